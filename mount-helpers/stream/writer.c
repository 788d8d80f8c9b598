/* SPDX-License-Identifier: Apache-2.0 */
/* writer.c - writes a stream, record by record. */
#include "mount-helpers/stream/stream.h"

static int put(struct ht_stream_writer *w, const void *data, size_t len)
{
    return w->put && len ? w->put(w->ctx, data, len) : 0;
}

static int put_record(struct ht_stream_writer *w, enum ht_stream_type type, uint64_t place,
                      const struct ht_hash128 *sum, const void *payload, size_t len)
{
    uint8_t head[HT_STREAM_RECORD_BYTES] = {(uint8_t)type};
    int rc;

    ht_le32_store(head + 4, (uint32_t)len);
    ht_le64_store(head + 8, w->number++);
    ht_le64_store(head + 16, place);
    memcpy(head + 24, sum->byte, sizeof(sum->byte));
    ht_le64_store(head + 40, ht_hash64(head, 40, 0));
    rc = put(w, head, sizeof(head));
    return rc < 0 ? rc : put(w, payload, len);
}

/* Writes the payload that was built. */
static int put_payload(struct ht_stream_writer *w, enum ht_stream_type type, uint64_t place)
{
    struct ht_hash128 sum;

    if (w->payload.err)
        return w->payload.err;
    sum = ht_hash128(w->payload.data, w->payload.len);
    return put_record(w, type, place, &sum, w->payload.data, w->payload.len);
}

/* An incremental stream says first what it builds on. */
static int put_base(struct ht_stream_writer *w, const struct ht_stream_base *base)
{
    ht_buf_reset(&w->payload);
    ht_buf_put_u64(&w->payload, base->step);
    ht_buf_put(&w->payload, base->digest.byte, sizeof(base->digest.byte));
    ht_digest_base(&w->digest, base);
    return put_payload(w, HT_STREAM_BASE, 0);
}

int ht_stream_writer_begin(struct ht_stream_writer *w, const struct ht_stream_head *head,
                           int (*to)(void *ctx, const void *data, size_t len), void *ctx)
{
    uint8_t bytes[HT_STREAM_HEADER_BYTES] = HT_STREAM_MAGIC;
    int rc;

    *w = (struct ht_stream_writer){.put = to, .ctx = ctx, .payload = HT_BUF_INIT, .incremental = head->incremental};
    rc = ht_digest_begin(&w->digest, head->step);
    if (rc < 0)
        return rc;
    ht_le32_store(bytes + 8, HT_STREAM_VERSION);
    ht_le32_store(bytes + 12, head->incremental ? HT_STREAM_INCREMENTAL : 0);
    ht_le32_store(bytes + 16, HT_STREAM_BLOCK_BYTES);
    ht_le64_store(bytes + 24, head->step);
    ht_le64_store(bytes + 32, head->bytes);
    ht_le64_store(bytes + 56, ht_hash64(bytes, 56, 0));
    rc = put(w, bytes, sizeof(bytes));
    return rc == 0 && head->incremental ? put_base(w, &head->base) : rc;
}

static void encode(struct ht_buf *b, const struct ht_stream_entry *e)
{
    size_t path_len = strlen(e->path), target_len = strlen(e->target);

    ht_buf_reset(b);
    ht_buf_put_u16(b, (uint16_t)e->kind);
    ht_buf_put_u16(b, e->mode);
    ht_buf_put_u32(b, e->uid);
    ht_buf_put_u32(b, e->gid);
    ht_buf_put_u16(b, (uint16_t)path_len);
    ht_buf_put_u16(b, (uint16_t)target_len);
    ht_buf_put_u64(b, (uint64_t)e->mtime_ns);
    ht_buf_put_u64(b, e->size);
    ht_buf_put(b, e->path, path_len);
    ht_buf_put(b, e->target, target_len);
    ht_buf_put(b, e->attributes.data, e->attributes.len);
}

int ht_stream_put_entry(struct ht_stream_writer *w, const struct ht_stream_entry *e)
{
    bool first = w->entries == 0;
    int rc;

    if (ht_stream_entry_refused(e) || first != (e->path[0] == '\0') ||
        (!first && ht_stream_order_refused(w->last, w->last_kind, e->path)))
        return -EINVAL;
    encode(&w->payload, e);
    rc = put_payload(w, HT_STREAM_ENTRY, 0);
    if (rc < 0)
        return rc;
    ht_digest_entry(&w->digest, e);
    memcpy(w->last, e->path, strlen(e->path) + 1);
    w->last_kind = e->kind;
    w->entries++;
    return 0;
}

int ht_stream_put_state(struct ht_stream_writer *w, const struct ht_stream_state *s)
{
    int rc;

    if (w->last_kind != HT_STREAM_FILE || ht_stream_state_refused(s))
        return -EINVAL;
    ht_buf_reset(&w->payload);
    ht_buf_put_u64(&w->payload, s->size);
    ht_buf_put(&w->payload, s->name, strlen(s->name));
    rc = put_payload(w, HT_STREAM_STATE, 0);
    if (rc < 0)
        return rc;
    ht_digest_state(&w->digest, s);
    return 0;
}

int ht_stream_put_block(struct ht_stream_writer *w, uint64_t index, const uint8_t *data, size_t len)
{
    struct ht_hash128 sum;

    if (!len || len > HT_STREAM_BLOCK_BYTES)
        return -EINVAL;
    if (ht_stream_is_zero(data, len))
        return 0;
    sum = ht_hash128(data, len);
    ht_digest_block(&w->digest, index, &sum);
    w->bytes += len;
    return put_record(w, HT_STREAM_BLOCK, index, &sum, data, len);
}

int ht_stream_put_same(struct ht_stream_writer *w, const struct ht_stream_same *s)
{
    if (!w->incremental || w->last_kind != HT_STREAM_FILE || ht_stream_same_refused(s))
        return -EINVAL;
    ht_buf_reset(&w->payload);
    ht_buf_put_u64(&w->payload, s->count);
    ht_buf_put(&w->payload, s->path, strlen(s->path));
    ht_digest_same(&w->digest, s);
    return put_payload(w, HT_STREAM_SAME, s->index);
}

int ht_stream_put_end(struct ht_stream_writer *w, struct ht_hash128 *out_digest)
{
    *out_digest = ht_digest_get(&w->digest);
    ht_buf_reset(&w->payload);
    ht_buf_put_u64(&w->payload, w->entries);
    ht_buf_put_u64(&w->payload, w->bytes);
    ht_buf_put(&w->payload, out_digest->byte, sizeof(out_digest->byte));
    return put_payload(w, HT_STREAM_END, 0);
}

void ht_stream_writer_free(struct ht_stream_writer *w)
{
    ht_digest_end(&w->digest);
    ht_buf_free(&w->payload);
}
