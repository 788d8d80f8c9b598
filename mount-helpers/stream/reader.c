/* SPDX-License-Identifier: Apache-2.0 */
/* reader.c - reads a stream, record by record. Nothing in it is believed before it was checked. */
#include "mount-helpers/stream/stream.h"
#include "tiering/base/base.h"
#include <hitrain/words.h>

enum { STATE_FIXED_BYTES = 8, SAME_FIXED_BYTES = 8, SHARD_FIXED_BYTES = 4 };

/* ------------------------------------------------------------------ header */

static int take_header(struct ht_stream_reader *r, const uint8_t *h)
{
    uint32_t features = ht_le32_load(h + 12);

    if (memcmp(h, HT_STREAM_MAGIC, 8) != 0)
        return ht_records_fail(&r->in, -EPROTO, "this is no stream of a step");
    if (ht_le64_load(h + 56) != ht_hash64(h, 56, 0))
        return ht_records_fail(&r->in, -EPROTO, "the header is damaged");
    if (ht_le32_load(h + 8) != HT_STREAM_VERSION)
        return ht_records_fail(&r->in, -EPROTO, "the stream has version %u, and this program reads version %u",
                               ht_le32_load(h + 8), HT_STREAM_VERSION);
    if (features > HT_STREAM_FOR_RANK)
        return ht_records_fail(&r->in, -EPROTO, "the stream has features that this program does not know: 0x%x",
                               features);
    if (ht_le32_load(h + 16) != HT_STREAM_BLOCK_BYTES)
        return ht_records_fail(&r->in, -EPROTO,
                               "the stream has blocks of %u bytes, and this program reads blocks of %u",
                               ht_le32_load(h + 16), HT_STREAM_BLOCK_BYTES);
    if (!ht_is_zero(h + 20, 4) || !ht_is_zero(h + 40, 16))
        return ht_records_fail(&r->in, -EPROTO, "the header has bytes that this program does not know");
    r->head.step = ht_le64_load(h + 24);
    r->head.bytes = ht_le64_load(h + 32);
    r->head.incremental = features == HT_STREAM_INCREMENTAL;
    r->head.for_rank = features == HT_STREAM_FOR_RANK;
    return r->head.step > INT64_MAX ? ht_records_fail(&r->in, -EPROTO, "the number of the step is impossible") : 0;
}

/* The first record of an incremental stream. */
static int take_base(struct ht_stream_reader *r)
{
    struct ht_stream_base *base = &r->head.base;
    struct ht_records_head head;
    struct ht_reader in;
    const uint8_t *digest;
    int rc = ht_records_get(&r->in, &head);

    if (rc < 0)
        return rc;
    in = ht_reader_of(r->in.payload, head.len);
    base->step = ht_get_u64(&in);
    digest = ht_get_bytes(&in, sizeof(base->digest.byte));
    if (head.type != HT_STREAM_BASE || head.place || !digest || !ht_reader_done(&in) || base->step > INT64_MAX)
        return ht_records_fail(&r->in, -EPROTO, "the stream does not say what it builds on");
    memcpy(base->digest.byte, digest, sizeof(base->digest.byte));
    ht_digest_base(&r->digest, base);
    return 0;
}

/* The first record of a stream for a rank. */
static int take_shard(struct ht_stream_reader *r)
{
    struct ht_stream_shard *s = &r->head.shard;
    struct ht_records_head head;
    struct ht_reader in;
    const char *text, *why;
    int rc = ht_records_get(&r->in, &head);

    if (rc < 0)
        return rc;
    in = ht_reader_of(r->in.payload, head.len);
    s->rank = ht_get_u16(&in);
    s->of = ht_get_u16(&in);
    text = (const char *)ht_get_bytes(&in, head.len < SHARD_FIXED_BYTES ? 0 : head.len - SHARD_FIXED_BYTES);
    if (head.type != HT_STREAM_SHARD || head.place || in.bad ||
        ht_shards_parse(text, head.len - SHARD_FIXED_BYTES, &s->table) < 0)
        return ht_records_fail(&r->in, -EPROTO, "the stream is for a rank and has no proper table of ranks");
    why = ht_stream_shard_refused(s);
    if (why)
        return ht_records_fail(&r->in, -EPROTO, "the stream is for rank %u, and %s", s->rank, why);
    ht_digest_shard(&r->digest, s);
    return 0;
}

int ht_stream_reader_begin(struct ht_stream_reader *r, ssize_t (*from)(void *ctx, void *data, size_t len), void *ctx)
{
    uint8_t bytes[HT_STREAM_HEADER_BYTES];
    int rc;

    *r = (struct ht_stream_reader){.in = {.get = from, .ctx = ctx, .after = r->path, .cut = -EPROTO}};
    rc = ht_records_begin(&r->in, HT_STREAM_PAYLOAD_BYTES_MAX, bytes, sizeof(bytes));
    if (rc == 0)
        rc = take_header(r, bytes);
    if (rc < 0)
        return rc;
    rc = ht_digest_begin(&r->digest, r->head.step);
    if (rc < 0)
        return ht_records_fail(&r->in, rc, "not enough memory");
    ht_moves_begin(&r->moves, &r->head.shard);
    return r->head.incremental ? take_base(r) : r->head.for_rank ? take_shard(r) : 0;
}

void ht_stream_reader_free(struct ht_stream_reader *r)
{
    ht_digest_end(&r->digest);
    ht_moves_end(&r->moves);
    ht_records_in_free(&r->in);
}

/* ----------------------------------------------------------------- records */

/* A text of len bytes with a NUL after it. False: it has one inside, or is too long. */
static bool take_text(struct ht_reader *from, size_t len, char *to, size_t cap)
{
    const uint8_t *p = ht_get_bytes(from, len);

    if (!p || len >= cap || memchr(p, '\0', len))
        return false;
    memcpy(to, p, len);
    to[len] = '\0';
    return true;
}

/* The root has the table that the stream is made by. */
static bool has_table(const struct ht_stream_reader *r, const struct ht_stream_entry *e)
{
    static const char name[] = HT_XATTR_PREFIX "shards";
    struct ht_stream_attributes rest = e->attributes;
    struct ht_stream_attribute a;
    char text[HT_SHARDS_TEXT_MAX];

    ht_shards_format(&r->head.shard.table, text);
    while (ht_stream_attribute_next(&rest, &a))
        if (a.name_len == strlen(name) && memcmp(a.name, name, a.name_len) == 0)
            return a.value_len == strlen(text) && memcmp(a.value, text, a.value_len) == 0;
    return false;
}

/* In a stream for a rank: which blocks of the entry come. */
static int begin_moves(struct ht_stream_reader *r, const struct ht_stream_entry *e)
{
    const char *dtype = ht_stream_parameter(e);
    int rc;

    if (e->path[0] == '\0' && !has_table(r, e))
        return ht_records_fail(&r->in, -EPROTO, "the model has another table of ranks than the stream");
    rc = ht_moves_file(&r->moves, dtype != NULL, e->size);
    if (rc < 0)
        return ht_records_fail(&r->in, rc == -EFBIG ? -EPROTO : rc, "the entry %.120s is refused: %s", e->path,
                               rc == -EFBIG ? "it has too many blocks for ranks to share" : "not enough memory");
    r->shape += dtype ? ht_stream_shape(e->path, dtype, e->size) : 0;
    return 0;
}

static int take_entry(struct ht_stream_reader *r, size_t len, struct ht_stream_record *out)
{
    struct ht_reader in = ht_reader_of(r->in.payload, len);
    struct ht_stream_entry *e = &out->entry;
    char path[sizeof(r->path)];
    size_t path_len, target_len;
    const char *why = NULL;

    e->kind = (enum ht_stream_kind)ht_get_u16(&in);
    e->mode = ht_get_u16(&in);
    e->uid = ht_get_u32(&in);
    e->gid = ht_get_u32(&in);
    path_len = ht_get_u16(&in);
    target_len = ht_get_u16(&in);
    e->mtime_ns = (int64_t)ht_get_u64(&in);
    e->size = ht_get_u64(&in);
    if (!take_text(&in, path_len, path, sizeof(path)) || !take_text(&in, target_len, r->target, sizeof(r->target)))
        return ht_records_fail(&r->in, -EPROTO, "an entry has no proper path");
    e->path = path;
    e->target = r->target;
    e->attributes = (struct ht_stream_attributes){in.p, (size_t)(in.end - in.p)};
    if ((r->entries == 0) != (path[0] == '\0'))
        return ht_records_fail(&r->in, -EPROTO, "the root is not the first entry, or comes twice");
    why = ht_stream_entry_refused(e);
    if (!why && r->entries)
        why = ht_stream_order_refused(r->path, r->kind, path);
    if (why)
        return ht_records_fail(&r->in, -EPROTO, "the entry %.120s is refused: %s", path, why);
    memcpy(r->path, path, path_len + 1);
    e->path = r->path;
    r->kind = e->kind;
    r->state[0] = '\0';
    r->size = e->size;
    r->next_block = 0;
    r->entries++;
    ht_digest_entry(&r->digest, e);
    return r->head.for_rank ? begin_moves(r, e) : 0;
}

static int take_state(struct ht_stream_reader *r, size_t len, struct ht_stream_record *out)
{
    struct ht_reader in = ht_reader_of(r->in.payload, len);
    char name[sizeof(r->state)];
    struct ht_stream_state *s = &out->state;
    const char *why;

    s->size = ht_get_u64(&in);
    s->name = name;
    if (r->kind != HT_STREAM_FILE || len < STATE_FIXED_BYTES ||
        !take_text(&in, len - STATE_FIXED_BYTES, name, sizeof(name)))
        return ht_records_fail(&r->in, -EPROTO, "there is state of no file, or without a proper name");
    why = ht_stream_state_refused(s);
    if (why)
        return ht_records_fail(&r->in, -EPROTO, "the state %s is refused: %s", name, why);
    if (strcmp(r->state, name) >= 0)
        return ht_records_fail(&r->in, -EPROTO, "the state %s is not in order, or comes twice", name);
    if (r->head.for_rank && ht_moves_state(&r->moves, name, s->size) < 0)
        return ht_records_fail(&r->in, -EPROTO, "the state %s is refused: its size is not that of its parameter", name);
    r->shape += r->head.for_rank ? ht_stream_state_shape(r->path, name, s->size) : 0;
    memcpy(r->state, name, strlen(name) + 1);
    s->name = r->state;
    r->size = s->size;
    r->next_block = 0;
    ht_digest_state(&r->digest, s);
    return 0;
}

static int take_block(struct ht_stream_reader *r, uint64_t index, const struct ht_hash128 *sum, size_t len,
                      struct ht_stream_record *out)
{
    if (index < r->next_block || index >= ht_div_up(r->size, HT_STREAM_BLOCK_BYTES))
        return ht_records_fail(&r->in, -EPROTO, "block %llu lies beyond the end, or is not in order",
                               (unsigned long long)index);
    if (len != ht_min_u64(HT_STREAM_BLOCK_BYTES, r->size - index * HT_STREAM_BLOCK_BYTES))
        return ht_records_fail(&r->in, -EPROTO, "block %llu has another size", (unsigned long long)index);
    if (r->head.for_rank && !ht_moves_has(&r->moves, index))
        return ht_records_fail(&r->in, -EPROTO, "block %llu is none that the rank gets", (unsigned long long)index);
    if (ht_is_zero(r->in.payload, len))
        return ht_records_fail(&r->in, -EPROTO, "block %llu is zero, and such blocks are left out",
                               (unsigned long long)index);
    r->next_block = index + 1;
    r->bytes += len;
    ht_digest_put_block(&r->digest, index, sum);
    out->block = (struct ht_stream_block){index, r->in.payload, len};
    return 0;
}

static int take_same(struct ht_stream_reader *r, uint64_t index, size_t len, struct ht_stream_record *out)
{
    struct ht_reader in = ht_reader_of(r->in.payload, len);
    struct ht_stream_same *s = &out->same;
    const char *why;

    s->index = index;
    s->count = ht_get_u64(&in);
    s->path = r->target;
    if (!r->head.incremental || r->kind != HT_STREAM_FILE)
        return ht_records_fail(&r->in, -EPROTO, "there are blocks of a base, and no base or no file");
    if (len < SAME_FIXED_BYTES || !take_text(&in, len - SAME_FIXED_BYTES, r->target, sizeof(r->target)))
        return ht_records_fail(&r->in, -EPROTO, "blocks of the base have no proper path");
    why = ht_stream_same_refused(s);
    if (why)
        return ht_records_fail(&r->in, -EPROTO, "blocks of the base are refused: %s", why);
    if (index < r->next_block || index + s->count > ht_div_up(r->size, HT_STREAM_BLOCK_BYTES))
        return ht_records_fail(&r->in, -EPROTO, "%llu blocks of the base lie beyond the end, or are not in order",
                               (unsigned long long)s->count);
    r->next_block = index + s->count;
    ht_digest_same(&r->digest, s);
    return 0;
}

static int take_end(struct ht_stream_reader *r, size_t len, struct ht_stream_record *out)
{
    struct ht_reader in = ht_reader_of(r->in.payload, len);
    uint64_t entries = ht_get_u64(&in), bytes = ht_get_u64(&in);
    const uint8_t *digest = ht_get_bytes(&in, sizeof(out->digest.byte));
    char more;

    out->digest = ht_digest_get(&r->digest);
    if (!digest || !ht_reader_done(&in) || entries != r->entries || bytes != r->bytes)
        return ht_records_fail(&r->in, -EPROTO, "the end mark has other counts: something is missing");
    if (memcmp(digest, out->digest.byte, sizeof(out->digest.byte)) != 0)
        return ht_records_fail(&r->in, -EPROTO, "the end mark has another digest");
    if (r->head.for_rank)
        return 0;
    ssize_t n = r->in.get(r->in.ctx, &more, 1);
    if (n < 0)
        return ht_records_fail(&r->in, (int)n, "cannot read: %s", strerror((int)-n));
    return n ? ht_records_fail(&r->in, -EPROTO, "there are bytes after the end mark") : 0;
}

static int take(struct ht_stream_reader *r, const struct ht_records_head *head, struct ht_stream_record *out)
{
    if (out->type != HT_STREAM_BLOCK && out->type != HT_STREAM_SAME && head->place)
        return ht_records_fail(&r->in, -EPROTO, "a record has a place and is no block");
    if (out->type != HT_STREAM_ENTRY && !r->entries)
        return ht_records_fail(&r->in, -EPROTO, "the root is missing");
    switch (out->type) {
    case HT_STREAM_ENTRY:
        return take_entry(r, head->len, out);
    case HT_STREAM_STATE:
        return take_state(r, head->len, out);
    case HT_STREAM_BLOCK:
        return take_block(r, head->place, &head->sum, head->len, out);
    case HT_STREAM_SAME:
        return take_same(r, head->place, head->len, out);
    case HT_STREAM_END:
        return take_end(r, head->len, out);
    default:
        return ht_records_fail(&r->in, -EPROTO, "a record has the unknown type %u", (unsigned)out->type);
    }
}

int ht_stream_next(struct ht_stream_reader *r, struct ht_stream_record *out)
{
    struct ht_records_head head;
    int rc = ht_records_get(&r->in, &head);

    if (rc < 0)
        return rc;
    *out = (struct ht_stream_record){.type = (enum ht_stream_type)head.type};
    return take(r, &head, out);
}
