/* SPDX-License-Identifier: Apache-2.0 */
/* digest.c - the engine `digest`: see tiering/api/background.h. Its work is that of an upper folder. */
#include "tiering/object/context.h"
#include "tiering/engine/engine_priv.h"

enum { PAUSE_MS = 1000 };

static const struct ht_digest_client *client_of(struct ht_store *s)
{
    return s->engine->digest;
}

static enum ht_step step(void *ctx, struct ht_budget *b)
{
    const struct ht_digest_client *client = client_of(ctx);

    return client && !ht_is_read_only(ctx) ? client->step(client->ctx, b) : HT_STEP_IDLE;
}

static const struct ht_engine_figure figures[HT_DIGEST_FIGURES] = {
    [HT_DIGEST_DONE] = {"digests", "Kept steps that got a digest."},
    [HT_DIGEST_FAILED] = {"failed", "Kept steps that could not be read whole."},
    [HT_DIGEST_LEFT_BYTES] = {"left_bytes", "Bytes left of the step that is being read.", .gauge = true},
};

static void values(void *ctx, uint64_t out[])
{
    const struct ht_digest_client *client = client_of(ctx);

    memset(out, 0, HT_DIGEST_FIGURES * sizeof(*out));
    if (client)
        client->values(client->ctx, out);
}

const struct ht_engine_type ht_digest_engine = {
    .name = "digest",
    .pause_ms = PAUSE_MS,
    .step = step,
    .figure = figures,
    .figures = HT_DIGEST_FIGURES,
    .values = values,
};

void ht_store_begin_digest(struct ht_store *s, const struct ht_digest_client *client)
{
    s->engine->digest = client;
    ht_store_wake_digest(s);
}

void ht_store_end_digest(struct ht_store *s)
{
    if (!client_of(s))
        return;
    ht_row_end(&s->engine->row[HT_ENGINE_DIGEST]);
    s->engine->digest = NULL;
}

void ht_store_wake_digest(struct ht_store *s)
{
    if (s->opts.digest && s->engine && s->engine->started && client_of(s))
        (void)ht_row_wake(&s->engine->row[HT_ENGINE_DIGEST]);
}
