/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/data/data_priv.h"

#include "tiering/codec/frame.h"
#include "tiering/data/data.h"
#include "tiering/object/context.h"

void ht_decoders_init(struct ht_decoders *d)
{
    HT_UNSHARED(HT_LOCK_DECODERS);
    ht_mutex_init(&d->lock, HT_LOCK_DECODERS);
    ht_cond_init(&d->returned);
    d->most = (unsigned)ht_min_u64(ht_processors_usable(), HT_DECODERS_MAX);
}

void ht_decoders_destroy(struct ht_decoders *d)
{
    HT_UNSHARED(HT_LOCK_DECODERS);
    while (d->idle_count)
        ht_decoder_free(d->idle[--d->idle_count]);
    pthread_cond_destroy(&d->returned);
    ht_mutex_destroy(&d->lock);
}

/* One that no thread has, or a new one. -EAGAIN: others come back. -ENOMEM: there are none. */
static int take(struct ht_decoders *d, struct ht_decoder **out) HT_REQUIRES(HT_LOCK_DECODERS)
{
    if (d->idle_count) {
        *out = d->idle[--d->idle_count];
        return 0;
    }
    int rc = d->made < d->most ? ht_decoder_new(out) : -EAGAIN;
    if (rc)
        return d->made ? -EAGAIN : rc;
    d->made++;
    d->bytes += ht_decoder_bytes(*out);
    return 0;
}

static int get(struct ht_decoders *d, struct ht_decoder **out)
{
    int rc;

    ht_mutex_lock(ht_decoders_lock(d));
    while ((rc = take(d, out)) == -EAGAIN)
        ht_cond_wait(&d->returned, ht_decoders_lock(d));
    ht_mutex_unlock(ht_decoders_lock(d));
    return rc;
}

static void put(struct ht_decoders *d, struct ht_decoder *decoder)
{
    ht_mutex_lock(ht_decoders_lock(d));
    d->idle[d->idle_count++] = decoder;
    pthread_cond_signal(&d->returned);
    ht_mutex_unlock(ht_decoders_lock(d));
}

int ht_data_need_decoder(struct ht_store *s)
{
    struct ht_decoders *d = &s->data->decoders;
    struct ht_decoder *decoder = NULL;
    int rc = ht_locked(ht_decoders_lock(d), d->made) ? 0 : get(d, &decoder);

    if (!rc && decoder)
        put(d, decoder);
    return rc;
}

int ht_ref_decode(struct ht_decoders *d, const struct ht_ref *ref, void *data)
{
    struct ht_decoder *decoder;

    if (ref->codec != HT_CODEC_PLANES)
        return 0;
    int rc = get(d, &decoder);
    if (rc)
        return rc;
    rc = ht_codec_decode(decoder, data, ref->stored, data, ref->visible);
    put(d, decoder);
    return rc;
}
