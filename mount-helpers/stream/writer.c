/* SPDX-License-Identifier: Apache-2.0 */
/* writer.c - writes a stream, record by record. */
#include "mount-helpers/stream/stream.h"
#include "tiering/base/base.h"

/* An incremental stream says first what it builds on. */
static int put_base(struct ht_stream_writer *w, const struct ht_stream_base *base)
{
    ht_buf_reset(&w->out.payload);
    ht_buf_put_u64(&w->out.payload, base->step);
    ht_buf_put(&w->out.payload, base->digest.byte, sizeof(base->digest.byte));
    ht_digest_base(&w->digest, base);
    return ht_records_put_payload(&w->out, HT_STREAM_BASE, 0);
}

/* A stream for a rank says first for which, and by which table. */
static int put_shard(struct ht_stream_writer *w)
{
    char text[HT_SHARDS_TEXT_MAX];

    ht_shards_format(&w->shard.table, text);
    ht_buf_reset(&w->out.payload);
    ht_buf_put_u16(&w->out.payload, (uint16_t)w->shard.rank);
    ht_buf_put_u16(&w->out.payload, (uint16_t)w->shard.of);
    ht_buf_put(&w->out.payload, text, strlen(text));
    ht_digest_shard(&w->digest, &w->shard);
    return ht_records_put_payload(&w->out, HT_STREAM_SHARD, 0);
}

int ht_stream_writer_begin(struct ht_stream_writer *w, const struct ht_stream_head *head,
                           int (*to)(void *ctx, const void *data, size_t len), void *ctx)
{
    uint8_t bytes[HT_STREAM_HEADER_BYTES] = HT_STREAM_MAGIC;
    int rc;

    *w = (struct ht_stream_writer){.out = {.put = to, .ctx = ctx, .payload = HT_BUF_INIT},
                                   .incremental = head->incremental,
                                   .for_rank = head->for_rank,
                                   .shard = head->shard};
    if (head->for_rank && (head->incremental || ht_stream_shard_refused(&head->shard)))
        return -EINVAL;
    ht_moves_begin(&w->moves, &w->shard);
    rc = ht_digest_begin(&w->digest, head->step);
    if (rc < 0)
        return rc;
    ht_le32_store(bytes + 8, HT_STREAM_VERSION);
    ht_le32_store(bytes + 12, head->incremental ? HT_STREAM_INCREMENTAL : head->for_rank ? HT_STREAM_FOR_RANK : 0);
    ht_le32_store(bytes + 16, HT_STREAM_BLOCK_BYTES);
    ht_le64_store(bytes + 24, head->step);
    ht_le64_store(bytes + 32, head->bytes);
    ht_le64_store(bytes + 56, ht_hash64(bytes, 56, 0));
    rc = ht_records_put_bytes(&w->out, bytes, sizeof(bytes));
    if (rc == 0 && head->for_rank)
        rc = put_shard(w);
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
    rc = w->for_rank ? ht_moves_file(&w->moves, ht_stream_parameter(e) != NULL, e->size) : 0;
    if (rc < 0)
        return rc;
    encode(&w->out.payload, e);
    rc = ht_records_put_payload(&w->out, HT_STREAM_ENTRY, 0);
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
    rc = w->for_rank ? ht_moves_state(&w->moves, s->name, s->size) : 0;
    if (rc < 0)
        return rc;
    ht_buf_reset(&w->out.payload);
    ht_buf_put_u64(&w->out.payload, s->size);
    ht_buf_put(&w->out.payload, s->name, strlen(s->name));
    rc = ht_records_put_payload(&w->out, HT_STREAM_STATE, 0);
    if (rc < 0)
        return rc;
    ht_digest_state(&w->digest, s);
    return 0;
}

int ht_stream_put_block(struct ht_stream_writer *w, uint64_t index, const uint8_t *data, size_t len)
{
    struct ht_hash128 sum;

    if (!len || len > HT_STREAM_BLOCK_BYTES || (w->for_rank && !ht_moves_has(&w->moves, index)))
        return -EINVAL;
    if (ht_is_zero(data, len))
        return 0;
    sum = ht_hash128(data, len);
    ht_digest_put_block(&w->digest, index, &sum);
    w->bytes += len;
    return ht_records_put(&w->out, HT_STREAM_BLOCK, index, &sum, data, len);
}

int ht_stream_put_same(struct ht_stream_writer *w, const struct ht_stream_same *s)
{
    if (!w->incremental || w->last_kind != HT_STREAM_FILE || ht_stream_same_refused(s))
        return -EINVAL;
    ht_buf_reset(&w->out.payload);
    ht_buf_put_u64(&w->out.payload, s->count);
    ht_buf_put(&w->out.payload, s->path, strlen(s->path));
    ht_digest_same(&w->digest, s);
    return ht_records_put_payload(&w->out, HT_STREAM_SAME, s->index);
}

int ht_stream_put_end(struct ht_stream_writer *w, struct ht_hash128 *out_digest)
{
    *out_digest = ht_digest_get(&w->digest);
    ht_buf_reset(&w->out.payload);
    ht_buf_put_u64(&w->out.payload, w->entries);
    ht_buf_put_u64(&w->out.payload, w->bytes);
    ht_buf_put(&w->out.payload, out_digest->byte, sizeof(out_digest->byte));
    return ht_records_put_payload(&w->out, HT_STREAM_END, 0);
}

void ht_stream_writer_free(struct ht_stream_writer *w)
{
    ht_digest_end(&w->digest);
    ht_moves_end(&w->moves);
    ht_buf_free(&w->out.payload);
}
