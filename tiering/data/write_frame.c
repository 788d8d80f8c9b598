/* SPDX-License-Identifier: Apache-2.0 */
/*
 * write_frame.c - new content becomes a compressed frame when it is written; the encoders for that.
 *
 *   image of a new chunk --worth it--> encoded into a staging buffer --> written and published as any other
 *                    |                          |
 *                    |                          '-- no buffer, no encoder, or it saves too little
 *                    v                          v
 *                  raw bytes, straight from the image
 *
 * The image stays as it is, and is clean afterwards. A write that fails makes it dirty again, so the frame is never the
 * only copy before the device has it.
 */
#include "tiering/data/data.h"
#include "tiering/base/mutant.h"
#include "tiering/cache/staging.h"
#include "tiering/codec/frame.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/write_batch.h"
#include "tiering/object/context.h"

#define FORGET_NS UINT64_C(10000000000) /* a rate of the codec that is older may have been that of a busy machine */
#define RATE_BYTES_MAX (64 * UINT64_C(1 << 20)) /* of what was encoded: older content fades */

void ht_encoders_init(struct ht_encoders *e)
{
    HT_UNSHARED(HT_LOCK_ENCODERS);
    ht_processors_of_thread(&e->processors);
    ht_mutex_init(&e->lock, HT_LOCK_ENCODERS);
    ht_quota_find(&e->quota);
    unsigned most = ht_processors_usable() / 2;
    e->most = (unsigned)ht_min_u64(ht_max_u64(most, 1), HT_ENCODERS_MAX);
}

void ht_encoders_destroy(struct ht_encoders *e)
{
    HT_UNSHARED(HT_LOCK_ENCODERS);
    while (e->idle_count)
        ht_encoder_free(e->idle[--e->idle_count]);
    ht_mutex_destroy(&e->lock);
}

/* ------------------------------------------------------------------ is it worth it? */

/* The writes of all devices together. */
static void look_at_devices(struct ht_store *s, struct ht_encode_look *l)
{
    l->device_known = s->dev_count > 0;
    for (unsigned i = 0; i < s->dev_count; i++) {
        struct ht_dev_rate rate = {.known = false};
        if (!s->dev[i])
            continue;
        ht_dev_rate(s->dev[i], HT_DIRECTION_WRITE, &rate);
        l->device_known &= rate.known;
        l->device_bytes_per_s += rate.bytes_per_s;
    }
}

static uint64_t codec_rate(const struct ht_encoders *e, uint64_t now_ns) HT_REQUIRES(HT_LOCK_ENCODERS)
{
    if (!e->rate_ns || now_ns - e->encoded_at_ns > FORGET_NS)
        return 0;
    return (uint64_t)((double)e->rate_bytes * 1e9 / (double)e->rate_ns);
}

/*
 * The first look knows no time in which processors were idle. idle_ms: of all processors together, now. left_percent:
 * of a quota.
 */
static void look(struct ht_store *s, struct ht_encoders *e, uint64_t now_ns, uint64_t idle_ms, uint64_t left_percent)
    HT_REQUIRES(HT_LOCK_ENCODERS)
{
    struct ht_encode_look l = {.codec_bytes_per_s = codec_rate(e, now_ns), .ns = now_ns - e->looked_ns};

    e->worth = false;
    if (e->looked_ns && idle_ms > e->idle_ms) {
        look_at_devices(s, &l);
        l.idle_percent = (unsigned)ht_min_u64((idle_ms - e->idle_ms) * 100000000 / l.ns, left_percent);
        l.encoding_percent = (unsigned)(e->encoding_ns * 100 / l.ns);
        e->worth = ht_encode_is_worth(&l);
    }
    e->looked_ns = now_ns;
    e->idle_ms = idle_ms;
    e->encoding_ns = 0;
}

/* The kernel counts without the lock: other writers go on as the last look said. */
static bool is_worth_now(struct ht_store *s)
{
    struct ht_encoders *e = &s->data->encoders;
    uint64_t now_ns = ht_now_ns(), idle_ms, left_percent;

    if (s->opts.compress_inline != HT_INLINE_AUTO)
        return s->opts.compress_inline == HT_INLINE_ALWAYS;
    ht_mutex_lock(ht_encoders_lock(e));
    if (!e->looking && now_ns - e->looked_ns >= HT_ENCODE_LOOK_NS) {
        uint64_t since_ns = now_ns - e->looked_ns;
        e->looking = true;
        ht_mutex_unlock(ht_encoders_lock(e));
        int rc = ht_processors_idle_ms(&e->processors, &idle_ms);
        left_percent = ht_quota_left_percent(&e->quota, since_ns);
        ht_mutex_lock(ht_encoders_lock(e));
        e->looking = false;
        if (!rc)
            look(s, e, now_ns, idle_ms, left_percent);
        else
            e->worth = false;
    }
    bool worth = e->worth;
    ht_mutex_unlock(ht_encoders_lock(e));
    return worth;
}

/* ------------------------------------------------------------------ encoding */

/* NULL: others have all, there is no memory, or content of this kind saves too little. */
static struct ht_encoder *get(struct ht_encoders *e)
{
    struct ht_encoder *encoder = NULL;

    ht_mutex_lock(ht_encoders_lock(e));
    if (!e->idle_count && e->made < e->most && !ht_encoder_new(&encoder)) {
        e->made++;
        e->bytes += ht_encoder_bytes(encoder);
        e->idle[e->idle_count++] = encoder;
    }
    encoder = e->idle_count && ht_encode_tries(&e->vain) ? e->idle[--e->idle_count] : NULL;
    ht_mutex_unlock(ht_encoders_lock(e));
    return encoder;
}

static void put(struct ht_encoders *e, struct ht_encoder *encoder, uint32_t bytes, uint64_t ns, bool saved)
{
    ht_mutex_lock(ht_encoders_lock(e));
    e->idle[e->idle_count++] = encoder;
    ht_encode_tried(&e->vain, saved);
    if (e->rate_bytes > RATE_BYTES_MAX) {
        e->rate_bytes /= 2;
        e->rate_ns /= 2;
    }
    e->encoding_ns += ns;
    e->rate_bytes += bytes;
    e->rate_ns += ns;
    e->encoded_at_ns = ht_now_ns();
    ht_mutex_unlock(ht_encoders_lock(e));
}

/*
 * Encodes raw into out, which has room for as much. The frame's bytes; 0: it would save too little; -EAGAIN: nothing
 * was tried.
 */
static int encode_now(struct ht_store *s, const void *raw, uint32_t bytes, void *out)
{
    struct ht_encoders *e = &s->data->encoders;
    struct ht_encoder *encoder = get(e);

    if (!encoder)
        return -EAGAIN;
    uint64_t began_ns = ht_now_ns();
    int len = ht_codec_encode(encoder, raw, bytes, out);
    put(e, encoder, bytes, ht_now_ns() - began_ns, len > 0);
    return len < 0 ? -EAGAIN : len;
}

/* ------------------------------------------------------------------ frames */

bool ht_write_frame_may(const struct ht_obj *o, struct ht_chunk *c, uint32_t bytes)
{
    return o->compress && o->scope->id == 0 && o->obj_class == HT_CLASS_DURABLE && !o->extra->shm &&
        !o->extra->rewrite_reserve_blocks && bytes == ht_obj_bytes_per_chunk(o) && !ht_chunk_ref(c) && !c->prealloc &&
        o->s->opts.compress_inline != HT_INLINE_OFF;
}

/*
 * Readers of cold content need buffers of this kind, too: at most half are for frames of one thread, which waits for
 * its own writes, and for nothing else.
 */
static void *take_buffer(struct ht_write_batch *w, int numa_index)
{
    struct ht_staging *staging = w->s->staging;
    unsigned most = ht_staging_count(staging, HT_STAGING_FILL) / 2;
    void *buf;

    ht_store_lock(w->s);
    while (w->copies >= most)
        ht_write_batch_finish(w);
    ht_store_unlock(w->s);
    return ht_staging_get(staging, HT_STAGING_FILL, 1, true, numa_index, &buf) ? NULL : buf;
}

bool ht_write_frame_prepare(struct ht_write_batch *w, struct ht_batch_write *j, const void *data, int numa_index,
                            bool *out_vain)
{
    struct ht_encoders *e = &w->s->data->encoders;

    *out_vain = false;
    if (!is_worth_now(w->s))
        return false;
    if (!e->durable && !HT_MUTANT("frame-early")) {
        e->asked = true;
        return false;
    }
    void *frame = take_buffer(w, numa_index);
    if (!frame)
        return false;
    int len = encode_now(w->s, data, j->bytes, frame);
    if (len <= 0) {
        *out_vain = len == 0;
        ht_staging_put(w->s->staging, HT_STAGING_FILL, frame);
        return false;
    }
    uint32_t saved = j->bytes - (uint32_t)ht_round_up((uint32_t)len, HT_BLOCK_BYTES);
    ht_chunk_write_prepare(&j->io, frame, (uint32_t)len, HT_CODEC_PLANES, j->bytes);
    j->copy = frame;
    j->bytes = (uint32_t)len;
    w->copies++;
    e->chunks++;
    e->saved_bytes += saved;
    return true;
}

void ht_write_frames_durable(struct ht_store *s)
{
    s->data->encoders.durable = true;
}

bool ht_write_frames_asked(const struct ht_store *s)
{
    return s->data->encoders.asked && !s->data->encoders.durable;
}

void ht_write_frame_figures(const struct ht_store *s, uint64_t *out_chunks, uint64_t *out_saved_bytes)
{
    *out_chunks = s->data->encoders.chunks;
    *out_saved_bytes = s->data->encoders.saved_bytes;
}
