/* SPDX-License-Identifier: Apache-2.0 */
/*
 * background.c - the lane `background` for others: figures, pause and resume of its rows for operators (a new row needs
 * nothing), the lane itself for a pool of threads of an upper folder, and the row `digest`, whose work is that of an
 * upper folder (tiering/api/background.h).
 */
#include "tiering/object/context.h"
#include "tiering/engine/engine_priv.h"

enum { DIGEST_PAUSE_MS = 1000 };

static struct ht_lane *lane_of(struct ht_store *s)
{
    return &s->engine->lane[HT_LANE_BACKGROUND];
}

const char *ht_background_state_word(enum ht_background_state state)
{
    static const char *const words[] = {"idle", "working", "blocked", "paused", "off"};

    return words[state];
}

int ht_store_background_stat(struct ht_store *s, unsigned index, struct ht_background_stat *out)
{
    const struct ht_lane *l = lane_of(s);

    if (index >= l->rows)
        return -ENOENT;
    struct ht_row *r = l->row[index];
    ht_row_figures(r, out);
    out->engine = r->type->name;
    out->figure = r->type->figure;
    out->figures = r->type->figures;
    for (unsigned i = 0; i < r->type->figures; i++)
        out->value[i] = r->figure[i];
    if (r->type->values)
        r->type->values(r->ctx, out->value);
    return 0;
}

/* Pauses or resumes. Returns the first error, after the last row. */
static int each(struct ht_store *s, const char *engine, int (*change)(struct ht_row *r))
{
    const struct ht_lane *l = lane_of(s);
    int rc = engine ? -ENOENT : 0;

    for (unsigned i = 0; i < l->rows; i++) {
        if (engine && strcmp(engine, l->row[i]->type->name) != 0)
            continue;
        int one = change(l->row[i]);
        rc = rc && rc != -ENOENT ? rc : one;
    }
    return rc;
}

int ht_store_background_pause(struct ht_store *s, const char *engine)
{
    return each(s, engine, ht_row_pause);
}

int ht_store_background_resume(struct ht_store *s, const char *engine)
{
    return each(s, engine, ht_row_resume);
}

/* ------------------------------------------------------------------ lending */

void ht_background_reads(bool on)
{
    ht_io_share_set(on);
    (void)ht_io_class_set(on ? HT_IO_BACKGROUND : HT_IO_URGENT);
}

bool ht_store_background_lend(struct ht_store *s)
{
    if (!s->engine->started)
        return false;
    ht_lane_lend(lane_of(s));
    return true;
}

void ht_store_background_take_back(struct ht_store *s)
{
    ht_store_background_recall(s);
    ht_lane_take_back(lane_of(s));
}

bool ht_store_background_serve(struct ht_store *s, bool once)
{
    ht_gate_heed(&lane_of(s)->recalled);
    bool more = ht_lane_serve(lane_of(s), once);
    ht_gate_heed(NULL);
    return more;
}

void ht_store_background_recall(struct ht_store *s)
{
    ht_lane_recall(lane_of(s));
    ht_gate_recall(&s->gate);
}

/* ------------------------------------------------------------------ digests */

static enum ht_step digest_step(void *ctx, struct ht_budget *b)
{
    struct ht_store *s = ctx;
    const struct ht_digest_client *client = s->engine->digest;

    return client && !ht_is_read_only(s) ? client->step(client->ctx, b) : HT_STEP_IDLE;
}

static const struct ht_engine_figure digest_figures[HT_DIGEST_FIGURES] = {
    [HT_DIGEST_DONE] = {"digests", "Kept steps that got a digest."},
    [HT_DIGEST_FAILED] = {"failed", "Kept steps that could not be read whole."},
    [HT_DIGEST_LEFT_BYTES] = {"left_bytes", "Bytes left of the step that is being read.", .gauge = true},
};

static void digest_values(void *ctx, uint64_t out[])
{
    struct ht_store *s = ctx;
    const struct ht_digest_client *client = s->engine->digest;

    memset(out, 0, HT_DIGEST_FIGURES * sizeof(*out));
    if (client)
        client->values(client->ctx, out);
}

const struct ht_engine_type ht_digest_engine = {
    .name = "digest",
    .pause_ms = DIGEST_PAUSE_MS,
    .step = digest_step,
    .figure = digest_figures,
    .figures = HT_DIGEST_FIGURES,
    .values = digest_values,
};

void ht_store_begin_digest(struct ht_store *s, const struct ht_digest_client *client)
{
    s->engine->digest = client;
    ht_store_wake_digest(s);
}

void ht_store_end_digest(struct ht_store *s)
{
    if (!s->engine->digest)
        return;
    ht_row_end(&s->engine->row[HT_ENGINE_DIGEST]);
    s->engine->digest = NULL;
}

void ht_store_wake_digest(struct ht_store *s)
{
    if (s->opts.digest && s->engine && s->engine->started && s->engine->digest)
        (void)ht_row_wake(&s->engine->row[HT_ENGINE_DIGEST]);
}
