/* SPDX-License-Identifier: Apache-2.0 */
/* follow_write.c - writes logged steps as a stream. */
#include "mount-helpers/stream/follow.h"

int ht_follow_writer_begin(struct ht_follow_writer *w, const struct ht_follow_head *head,
                           int (*to)(void *ctx, const void *data, size_t len), void *ctx)
{
    uint8_t bytes[HT_FOLLOW_HEADER_BYTES] = HT_FOLLOW_MAGIC;

    *w = (struct ht_follow_writer){.out = {.put = to, .ctx = ctx, .payload = HT_BUF_INIT}, .step = head->step};
    ht_le32_store(bytes + 8, HT_FOLLOW_VERSION);
    ht_le64_store(bytes + 16, head->step);
    ht_le64_store(bytes + 24, head->lineage);
    ht_le32_store(bytes + 32, (uint32_t)head->proof);
    if (head->proof)
        memcpy(bytes + 40, head->sum.byte, sizeof(head->sum.byte));
    ht_le64_store(bytes + 56, ht_hash64(bytes, 56, 0));
    return ht_records_put_bytes(&w->out, bytes, sizeof(bytes));
}

int ht_follow_put_step(struct ht_follow_writer *w, const struct ht_follow_step *s)
{
    int rc = ht_follow_sum_begin(&w->sum, s->step);

    if (rc < 0)
        return rc;
    w->step = s->step;
    ht_buf_reset(&w->out.payload);
    ht_buf_put_u64(&w->out.payload, s->params);
    ht_buf_put_u64(&w->out.payload, s->bytes);
    ht_buf_put_u64(&w->out.payload, s->newest);
    return ht_records_put_payload(&w->out, HT_FOLLOW_STEP, s->step);
}

int ht_follow_put_param(struct ht_follow_writer *w, const struct ht_follow_param *p)
{
    if (ht_follow_path_refused(p->path))
        return -EINVAL;
    ht_buf_reset(&w->out.payload);
    ht_buf_put(&w->out.payload, p->numbers, HT_FOLLOW_NUMBERS_BYTES);
    ht_buf_put(&w->out.payload, p->path, strlen(p->path));
    ht_follow_sum_param(&w->sum, p);
    return ht_records_put_payload(&w->out, HT_FOLLOW_PARAM, 0);
}

int ht_follow_put_block(struct ht_follow_writer *w, uint64_t at, const uint8_t *data, size_t len)
{
    struct ht_hash128 sum = ht_hash128(data, len);

    ht_follow_sum_block(&w->sum, HT_FOLLOW_BLOCK, at, &sum);
    return ht_records_put(&w->out, HT_FOLLOW_BLOCK, at, &sum, data, len);
}

int ht_follow_put_sparse(struct ht_follow_writer *w, const struct ht_follow_sparse *s)
{
    struct ht_buf *b = &w->out.payload;

    ht_buf_reset(b);
    ht_buf_put_u32(b, s->bytes);
    ht_buf_put(b, s->entries, s->len);
    if (b->err)
        return b->err;
    struct ht_hash128 sum = ht_hash128(b->data, b->len);
    ht_follow_sum_block(&w->sum, HT_FOLLOW_SPARSE, s->at, &sum);
    return ht_records_put_payload(&w->out, HT_FOLLOW_SPARSE, s->at);
}

int ht_follow_put_words(struct ht_follow_writer *w, const char *text)
{
    ht_buf_reset(&w->out.payload);
    ht_buf_put(&w->out.payload, text, strlen(text));
    return ht_records_put_payload(&w->out, HT_FOLLOW_WORDS, 0);
}

int ht_follow_put_file(struct ht_follow_writer *w, const struct ht_follow_file *f)
{
    ht_buf_reset(&w->out.payload);
    ht_buf_put_u16(&w->out.payload, f->mode);
    ht_buf_put_u64(&w->out.payload, (uint64_t)f->mtime_ns);
    ht_buf_put_u64(&w->out.payload, f->size);
    ht_buf_put(&w->out.payload, f->path, strlen(f->path));
    return ht_records_put_payload(&w->out, HT_FOLLOW_FILE, 0);
}

int ht_follow_put_part(struct ht_follow_writer *w, uint64_t at, const uint8_t *data, size_t len)
{
    struct ht_hash128 sum = ht_hash128(data, len);

    return ht_records_put(&w->out, HT_FOLLOW_PART, at, &sum, data, len);
}

int ht_follow_put_done(struct ht_follow_writer *w, bool files, struct ht_hash128 *out_sum)
{
    *out_sum = ht_follow_sum_end(&w->sum);
    ht_buf_reset(&w->out.payload);
    ht_buf_put(&w->out.payload, out_sum->byte, sizeof(out_sum->byte));
    ht_buf_put_u8(&w->out.payload, files);
    return ht_records_put_payload(&w->out, HT_FOLLOW_DONE, w->step);
}

int ht_follow_put_end(struct ht_follow_writer *w)
{
    ht_buf_reset(&w->out.payload);
    return ht_records_put_payload(&w->out, HT_FOLLOW_END, w->step);
}

void ht_follow_writer_free(struct ht_follow_writer *w)
{
    ht_hash128_sum_free(w->sum.sum);
    ht_buf_free(&w->out.payload);
}
