/* SPDX-License-Identifier: Apache-2.0 */
/* follow_read.c - reads a stream of logged steps. Nothing in it is believed before it was checked. */
#include "mount-helpers/stream/follow.h"

#include <stdlib.h>

#include "tiering/base/base.h"
#include "tiering/base/sparse.h"
#include <hitrain/words.h>

enum { STEP_BYTES = 24, FILE_FIXED_BYTES = 18, DONE_BYTES = 17 };

/* ------------------------------------------------------------------ header */

/* Later versions have the same beginning of the header. */
static int check_version(struct ht_follow_reader *r, const uint8_t *h)
{
    uint32_t version = ht_le32_load(h + 8), features = ht_le32_load(h + 12);

    if (version != HT_FOLLOW_VERSION)
        return ht_records_fail(&r->in, -EPROTO,
                               "this is a stream of version %u, and this program reads version %u: update the %s",
                               version, HT_FOLLOW_VERSION, version > HT_FOLLOW_VERSION ? "receiver" : "sender");
    if (features)
        return ht_records_fail(&r->in, -EPROTO, "the stream has features 0x%x, which this program does not know",
                               features);
    return 0;
}

static int take_header(struct ht_follow_reader *r, const uint8_t *h)
{
    uint32_t proof = ht_le32_load(h + 32);
    int rc;

    if (memcmp(h, HT_FOLLOW_MAGIC, 8) != 0)
        return ht_records_fail(&r->in, -EPROTO, "this is no stream of logged steps");
    if (ht_le64_load(h + 56) != ht_hash64(h, 56, 0))
        return ht_records_fail(&r->in, -EPROTO, "the header is damaged");
    rc = check_version(r, h);
    if (rc < 0)
        return rc;
    if (proof > HT_FOLLOW_SUM || !ht_is_zero(h + 36, 4) || (!proof && !ht_is_zero(h + 40, 16)))
        return ht_records_fail(&r->in, -EPROTO, "the header has bytes that this program does not know");
    r->head.step = r->step = ht_le64_load(h + 16);
    r->head.lineage = ht_le64_load(h + 24);
    r->head.proof = (enum ht_follow_proof)proof;
    memcpy(r->head.sum.byte, h + 40, sizeof(r->head.sum.byte));
    return r->step >= INT64_MAX ? ht_records_fail(&r->in, -EPROTO, "the number of the step is impossible") : 0;
}

int ht_follow_reader_begin(struct ht_follow_reader *r, ssize_t (*from)(void *ctx, void *data, size_t len), void *ctx)
{
    uint8_t bytes[HT_FOLLOW_HEADER_BYTES];
    int rc;

    *r = (struct ht_follow_reader){.in = {.get = from, .ctx = ctx, .cut = -EPIPE}, .last = HT_FOLLOW_DONE};
    rc = ht_records_begin(&r->in, HT_FOLLOW_PAYLOAD_BYTES_MAX, bytes, sizeof(bytes));
    return rc < 0 ? rc : take_header(r, bytes);
}

void ht_follow_reader_free(struct ht_follow_reader *r)
{
    ht_hash128_sum_free(r->sum.sum);
    r->sum.sum = NULL;
    free(r->elements);
    r->elements = NULL;
    ht_records_in_free(&r->in);
}

/* ----------------------------------------------------------------- records */

static int take_step(struct ht_follow_reader *r, uint64_t place, size_t len, struct ht_follow_step *s)
{
    struct ht_reader in = ht_reader_of(r->in.payload, len);
    int rc;

    s->step = place;
    s->params = ht_get_u64(&in);
    s->bytes = ht_get_u64(&in);
    s->newest = ht_get_u64(&in);
    if (len != STEP_BYTES || place != r->step + 1 || place > INT64_MAX || s->newest < place || s->params > UINT32_MAX)
        return ht_records_fail(&r->in, -EPROTO, "step %llu does not follow step %llu, or has impossible numbers",
                               (unsigned long long)place, (unsigned long long)r->step);
    rc = ht_follow_sum_begin(&r->sum, place);
    if (rc < 0)
        return ht_records_fail(&r->in, rc, "not enough memory");
    r->step = place;
    r->params_left = s->params;
    r->path[0] = '\0';
    return 0;
}

/* The rest of the payload as a path. That of a parameter stands in a command. */
static int take_path(struct ht_follow_reader *r, struct ht_reader *in, const char *(*refused)(const char *path))
{
    size_t len = (size_t)(in->end - in->p);
    const uint8_t *p = ht_get_bytes(in, len);
    const char *why;

    if (!p || len >= sizeof(r->path) || memchr(p, '\0', len))
        return ht_records_fail(&r->in, -EPROTO, "there is no proper path");
    memcpy(r->path, p, len);
    r->path[len] = '\0';
    why = refused(r->path);
    return why ? ht_records_fail(&r->in, -EPROTO, "the path %.120s is refused: %s", r->path, why) : 0;
}

/* A section follows its parameter, before any block. */
static int take_section(struct ht_follow_reader *r, struct ht_reader *in, const struct ht_follow_param *p)
{
    size_t len = strlen(r->path);

    if (r->next_at || !len || (size_t)(in->end - in->p) != len || memcmp(in->p, r->path, len) != 0)
        return ht_records_fail(&r->in, -EPROTO, "there are numbers for a range of elements without their parameter");
    r->params_left--;
    ht_follow_sum_param(&r->sum, p);
    return 0;
}

static int take_param(struct ht_follow_reader *r, size_t len, struct ht_follow_param *p)
{
    struct ht_reader in = ht_reader_of(r->in.payload, len);
    int rc;

    p->numbers = ht_get_bytes(&in, HT_FOLLOW_NUMBERS_BYTES);
    p->path = r->path;
    if (!p->numbers || !ht_is_zero(p->numbers, 8) || !r->params_left)
        return ht_records_fail(&r->in, -EPROTO, "there is a parameter too many, or one without its numbers");
    p->section = !p->numbers[offsetof(struct ht_disk_redo_section, no_dtype)];
    if (p->section)
        return take_section(r, &in, p);
    rc = take_path(r, &in, ht_follow_path_refused);
    if (rc < 0)
        return rc;
    r->params_left--;
    r->next_at = 0;
    r->size = HT_FILE_BYTES_MAX;
    r->element_bytes = ht_dtype_trained_bytes(p->numbers[offsetof(struct ht_disk_redo_param, grad_dtype)]);
    ht_follow_sum_param(&r->sum, p);
    return 0;
}

static int take_words(struct ht_follow_reader *r, size_t len, struct ht_follow_words *w)
{
    if (!len || len >= sizeof(r->words) || memchr(r->in.payload, '\0', len) || r->params_left)
        return ht_records_fail(&r->in, -EPROTO, "the settings are no proper text, or stand before a parameter");
    memcpy(r->words, r->in.payload, len);
    r->words[len] = '\0';
    w->text = r->words;
    return 0;
}

static int take_file(struct ht_follow_reader *r, size_t len, struct ht_follow_file *f)
{
    struct ht_reader in = ht_reader_of(r->in.payload, len);

    f->mode = ht_get_u16(&in);
    f->mtime_ns = (int64_t)ht_get_u64(&in);
    f->size = ht_get_u64(&in);
    f->path = r->path;
    if (in.bad || f->mode > 0777 || f->size > HT_FILE_BYTES_MAX || r->params_left)
        return ht_records_fail(&r->in, -EPROTO, "a file has impossible numbers, or stands before a parameter");
    r->next_at = 0;
    r->size = f->size;
    return take_path(r, &in, ht_stream_path_refused);
}

/* Of a gradient, or of a file. */
static int take_block(struct ht_follow_reader *r, uint64_t at, size_t len, struct ht_follow_block *b)
{
    if (!len || at < r->next_at || at > r->size || len > r->size - at)
        return ht_records_fail(&r->in, -EPROTO, "bytes at %llu lie beyond the end, or are not in order",
                               (unsigned long long)at);
    r->next_at = at + len;
    *b = (struct ht_follow_block){at, r->in.payload, len};
    return 0;
}

/* Its elements, as a block. */
static int take_sparse(struct ht_follow_reader *r, uint64_t at, size_t len, struct ht_follow_record *out)
{
    struct ht_reader in = ht_reader_of(r->in.payload, len);
    struct ht_follow_sparse *s = &out->sparse;

    s->at = at;
    s->bytes = ht_get_u32(&in);
    s->entries = in.p;
    s->len = (size_t)(in.end - in.p);
    if (in.bad || s->bytes > HT_FOLLOW_SPARSE_BYTES_MAX || !r->element_bytes)
        return ht_records_fail(&r->in, -EPROTO, "a sparse block is too long, or its gradient is of no known type");
    int rc = take_block(r, at, s->bytes, &out->block);
    if (rc < 0)
        return rc;
    if (!r->elements)
        r->elements = malloc(HT_FOLLOW_SPARSE_BYTES_MAX);
    if (!r->elements)
        return ht_records_fail(&r->in, -ENOMEM, "not enough memory");
    if (ht_sparse_decode(s->entries, s->len, r->element_bytes, r->elements, s->bytes))
        return ht_records_fail(&r->in, -EPROTO, "a sparse block has elements outside of its %u bytes at %llu", s->bytes,
                               (unsigned long long)at);
    out->block.data = r->elements;
    return 0;
}

static int take_done(struct ht_follow_reader *r, uint64_t place, size_t len, struct ht_follow_done *d)
{
    struct ht_hash128 sum = ht_follow_sum_end(&r->sum);

    if (len != DONE_BYTES || place != r->step || r->params_left || r->in.payload[16] > 1)
        return ht_records_fail(&r->in, -EPROTO, "step %llu lacks parameters", (unsigned long long)r->step);
    memcpy(d->sum.byte, r->in.payload, sizeof(d->sum.byte));
    d->files = r->in.payload[16];
    return memcmp(d->sum.byte, sum.byte, sizeof(sum.byte)) == 0
        ? 0
        : ht_records_fail(&r->in, -EPROTO, "step %llu does not match its sum", (unsigned long long)r->step);
}

static bool is_block(enum ht_follow_type type)
{
    return type == HT_FOLLOW_BLOCK || type == HT_FOLLOW_SPARSE;
}

/* May a record of this type come after the last one? */
static bool follows(const struct ht_follow_reader *r, enum ht_follow_type type)
{
    bool between = r->last == HT_FOLLOW_DONE;

    switch (type) {
    case HT_FOLLOW_STEP:
    case HT_FOLLOW_END:
        return between;
    case HT_FOLLOW_PARAM:
        return r->last == HT_FOLLOW_STEP || r->last == HT_FOLLOW_PARAM || is_block(r->last);
    case HT_FOLLOW_BLOCK:
    case HT_FOLLOW_SPARSE:
        return r->last == HT_FOLLOW_PARAM || is_block(r->last);
    case HT_FOLLOW_PART:
        return r->last == HT_FOLLOW_FILE || r->last == HT_FOLLOW_PART;
    case HT_FOLLOW_WORDS:
        return r->last == HT_FOLLOW_STEP || r->last == HT_FOLLOW_PARAM || is_block(r->last);
    case HT_FOLLOW_FILE:
    case HT_FOLLOW_DONE:
        return !between;
    default:
        return false;
    }
}

int ht_follow_next(struct ht_follow_reader *r, struct ht_follow_record *out)
{
    struct ht_records_head head;
    int rc = r->last == HT_FOLLOW_END ? -EINVAL : ht_records_get(&r->in, &head);

    if (rc < 0)
        return rc;
    uint64_t place = head.place;
    size_t len = head.len;
    out->type = (enum ht_follow_type)head.type;
    if (!follows(r, out->type))
        return ht_records_fail(&r->in, -EPROTO, "a record of type %u comes after one of type %u", head.type,
                               (unsigned)r->last);
    r->last = out->type;
    if (place && (out->type == HT_FOLLOW_PARAM || out->type == HT_FOLLOW_FILE || out->type == HT_FOLLOW_WORDS))
        return ht_records_fail(&r->in, -EPROTO, "a record has bytes that this program does not know");
    switch (out->type) {
    case HT_FOLLOW_STEP:
        return take_step(r, place, len, &out->step);
    case HT_FOLLOW_PARAM:
        return take_param(r, len, &out->param);
    case HT_FOLLOW_WORDS:
        return take_words(r, len, &out->words);
    case HT_FOLLOW_FILE:
        return take_file(r, len, &out->file);
    case HT_FOLLOW_BLOCK:
    case HT_FOLLOW_SPARSE:
        rc = out->type == HT_FOLLOW_BLOCK ? take_block(r, place, len, &out->block) : take_sparse(r, place, len, out);
        if (rc == 0)
            ht_follow_sum_block(&r->sum, out->type, place, &head.sum);
        return rc;
    case HT_FOLLOW_PART:
        return take_block(r, place, len, &out->block);
    case HT_FOLLOW_DONE:
        return take_done(r, place, len, &out->done);
    default:
        return len || place != r->step
            ? ht_records_fail(&r->in, -EPROTO, "the end mark has bytes that this program does not know")
            : 0;
    }
}
