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

uint64_t ht_decoders_bytes(struct ht_decoders *d)
{
    return ht_locked(ht_decoders_lock(d), d->bytes);
}

/* -ENOMEM, if there is no other that comes back. */
static int make(struct ht_decoders *d, struct ht_decoder **out) HT_REQUIRES(HT_LOCK_DECODERS)
{
    int rc = ht_decoder_new(out);

    if (rc)
        return d->made ? -EAGAIN : rc;
    d->made++;
    d->bytes += ht_decoder_bytes(*out);
    return 0;
}

int ht_data_need_decoder(struct ht_store *s)
{
    struct ht_decoders *d = &s->data->decoders;
    struct ht_decoder *decoder;
    int rc = 0;

    ht_mutex_lock(ht_decoders_lock(d));
    if (!d->made) {
        rc = make(d, &decoder);
        if (!rc)
            d->idle[d->idle_count++] = decoder;
    }
    ht_mutex_unlock(ht_decoders_lock(d));
    return rc;
}

static int get(struct ht_decoders *d, struct ht_decoder **out)
{
    int rc = -EAGAIN;

    ht_mutex_lock(ht_decoders_lock(d));
    while (rc == -EAGAIN) {
        if (d->idle_count) {
            *out = d->idle[--d->idle_count];
            rc = 0;
            continue;
        }
        rc = d->made < d->most ? make(d, out) : -EAGAIN;
        if (rc == -EAGAIN)
            ht_cond_wait(&d->returned, ht_decoders_lock(d));
    }
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
