/* SPDX-License-Identifier: Apache-2.0 */
/* reader.c - reads a stream, record by record. Nothing in it is believed before it was checked. */
#include "mount-helpers/stream/stream.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { STATE_FIXED_BYTES = 8, SAME_FIXED_BYTES = 8 };

/* What the reader was at, for a message. The path is the stream's: it may hold any byte but a line's end. */
static int fail(struct ht_stream_reader *r, int rc, const char *fmt, ...) HT_PRINTF(3, 4);
static int fail(struct ht_stream_reader *r, int rc, const char *fmt, ...)
{
    int n = snprintf(r->why, sizeof(r->why), "at byte %llu of the stream", (unsigned long long)r->at);
    va_list args;

    if (r->path[0] != '\0')
        n += snprintf(r->why + n, sizeof(r->why) - (size_t)n, ", after %.120s", r->path);
    n += snprintf(r->why + n, sizeof(r->why) - (size_t)n, ": ");
    va_start(args, fmt);
    vsnprintf(r->why + n, sizeof(r->why) - (size_t)n, fmt, args);
    va_end(args);
    for (char *p = r->why; *p != '\0'; p++)
        if ((unsigned char)*p < ' ' || (unsigned char)*p == 127)
            *p = '?';
    return rc;
}

/* All len bytes. */
static int get(struct ht_stream_reader *r, uint8_t *to, size_t len)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = r->get(r->ctx, to + done, len - done);
        if (n < 0)
            return fail(r, (int)n, "cannot read: %s", strerror((int)-n));
        if (n == 0) {
            r->at += done;
            return fail(r, -EPROTO, "the stream is cut: its end mark is missing");
        }
        done += (size_t)n;
    }
    r->at += len;
    return 0;
}

/* ------------------------------------------------------------------ header */

static int take_header(struct ht_stream_reader *r, const uint8_t *h)
{
    if (memcmp(h, HT_STREAM_MAGIC, 8) != 0)
        return fail(r, -EPROTO, "this is no stream of a step");
    if (ht_le64_load(h + 56) != ht_hash64(h, 56, 0))
        return fail(r, -EPROTO, "the header is damaged");
    if (ht_le32_load(h + 8) != HT_STREAM_VERSION)
        return fail(r, -EPROTO, "the stream has version %u, and this program reads version %u", ht_le32_load(h + 8),
                    HT_STREAM_VERSION);
    if (ht_le32_load(h + 12) & ~(uint32_t)HT_STREAM_INCREMENTAL)
        return fail(r, -EPROTO, "the stream has features that this program does not know: 0x%x", ht_le32_load(h + 12));
    if (ht_le32_load(h + 16) != HT_STREAM_BLOCK_BYTES)
        return fail(r, -EPROTO, "the stream has blocks of %u bytes, and this program reads blocks of %u",
                    ht_le32_load(h + 16), HT_STREAM_BLOCK_BYTES);
    if (!ht_stream_is_zero(h + 20, 4) || !ht_stream_is_zero(h + 40, 16))
        return fail(r, -EPROTO, "the header has bytes that this program does not know");
    r->head.step = ht_le64_load(h + 24);
    r->head.bytes = ht_le64_load(h + 32);
    r->head.incremental = ht_le32_load(h + 12) & HT_STREAM_INCREMENTAL;
    return r->head.step > INT64_MAX ? fail(r, -EPROTO, "the number of the step is impossible") : 0;
}

/* A record's head, and its payload in r->payload. */
static int get_record(struct ht_stream_reader *r, uint8_t head[HT_STREAM_RECORD_BYTES], size_t *out_len)
{
    struct ht_hash128 sum;
    size_t len;
    int rc = get(r, head, HT_STREAM_RECORD_BYTES);

    if (rc < 0)
        return rc;
    len = ht_le32_load(head + 4);
    if (ht_le64_load(head + 40) != ht_hash64(head, 40, 0))
        return fail(r, -EPROTO, "a record is damaged");
    if (ht_le64_load(head + 8) != r->number)
        return fail(r, -EPROTO, "record %llu comes in the place of record %llu",
                    (unsigned long long)ht_le64_load(head + 8), (unsigned long long)r->number);
    if (len > HT_STREAM_PAYLOAD_BYTES_MAX || !ht_stream_is_zero(head + 2, 2))
        return fail(r, -EPROTO, "a record has an impossible size");
    rc = get(r, r->payload, len);
    if (rc < 0)
        return rc;
    sum = ht_hash128(r->payload, len);
    if (memcmp(sum.byte, head + 24, sizeof(sum.byte)) != 0)
        return fail(r, -EPROTO, "%zu bytes before it do not match their checksum", len);
    r->number++;
    *out_len = len;
    return 0;
}

/* The first record of an incremental stream. */
static int take_base(struct ht_stream_reader *r)
{
    uint8_t head[HT_STREAM_RECORD_BYTES];
    struct ht_stream_base *base = &r->head.base;
    struct ht_reader in;
    const uint8_t *digest;
    size_t len;
    int rc = get_record(r, head, &len);

    if (rc < 0)
        return rc;
    in = ht_reader_of(r->payload, len);
    base->step = ht_get_u64(&in);
    digest = ht_get_bytes(&in, sizeof(base->digest.byte));
    if (head[0] != HT_STREAM_BASE || head[1] || ht_le64_load(head + 16) || !digest || !ht_reader_done(&in) ||
        base->step > INT64_MAX)
        return fail(r, -EPROTO, "the stream does not say what it builds on");
    memcpy(base->digest.byte, digest, sizeof(base->digest.byte));
    ht_digest_base(&r->digest, base);
    return 0;
}

int ht_stream_reader_begin(struct ht_stream_reader *r, ssize_t (*from)(void *ctx, void *data, size_t len), void *ctx)
{
    uint8_t bytes[HT_STREAM_HEADER_BYTES];
    int rc;

    *r = (struct ht_stream_reader){.get = from, .ctx = ctx};
    r->payload = malloc(HT_STREAM_PAYLOAD_BYTES_MAX);
    if (!r->payload)
        return fail(r, -ENOMEM, "not enough memory");
    rc = get(r, bytes, sizeof(bytes));
    if (rc == 0)
        rc = take_header(r, bytes);
    if (rc < 0)
        return rc;
    rc = ht_digest_begin(&r->digest, r->head.step);
    if (rc < 0)
        return fail(r, rc, "not enough memory");
    return r->head.incremental ? take_base(r) : 0;
}

void ht_stream_reader_free(struct ht_stream_reader *r)
{
    ht_digest_end(&r->digest);
    free(r->payload);
    r->payload = NULL;
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

static int take_entry(struct ht_stream_reader *r, size_t len, struct ht_stream_record *out)
{
    struct ht_reader in = ht_reader_of(r->payload, len);
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
        return fail(r, -EPROTO, "an entry has no proper path");
    e->path = path;
    e->target = r->target;
    e->attributes = (struct ht_stream_attributes){in.p, (size_t)(in.end - in.p)};
    if ((r->entries == 0) != (path[0] == '\0'))
        return fail(r, -EPROTO, "the root is not the first entry, or comes twice");
    why = ht_stream_entry_refused(e);
    if (!why && r->entries)
        why = ht_stream_order_refused(r->path, r->kind, path);
    if (why)
        return fail(r, -EPROTO, "the entry %.120s is refused: %s", path, why);
    memcpy(r->path, path, path_len + 1);
    e->path = r->path;
    r->kind = e->kind;
    r->state[0] = '\0';
    r->size = e->size;
    r->next_block = 0;
    r->entries++;
    ht_digest_entry(&r->digest, e);
    return 0;
}

static int take_state(struct ht_stream_reader *r, size_t len, struct ht_stream_record *out)
{
    struct ht_reader in = ht_reader_of(r->payload, len);
    char name[sizeof(r->state)];
    struct ht_stream_state *s = &out->state;
    const char *why;

    s->size = ht_get_u64(&in);
    s->name = name;
    if (r->kind != HT_STREAM_FILE || len < STATE_FIXED_BYTES ||
        !take_text(&in, len - STATE_FIXED_BYTES, name, sizeof(name)))
        return fail(r, -EPROTO, "there is state of no file, or without a proper name");
    why = ht_stream_state_refused(s);
    if (why)
        return fail(r, -EPROTO, "the state %s is refused: %s", name, why);
    if (strcmp(r->state, name) >= 0)
        return fail(r, -EPROTO, "the state %s is not in order, or comes twice", name);
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
        return fail(r, -EPROTO, "block %llu lies beyond the end, or is not in order", (unsigned long long)index);
    if (len != ht_min_u64(HT_STREAM_BLOCK_BYTES, r->size - index * HT_STREAM_BLOCK_BYTES))
        return fail(r, -EPROTO, "block %llu has another size", (unsigned long long)index);
    if (ht_stream_is_zero(r->payload, len))
        return fail(r, -EPROTO, "block %llu is zero, and such blocks are left out", (unsigned long long)index);
    r->next_block = index + 1;
    r->bytes += len;
    ht_digest_block(&r->digest, index, sum);
    out->block = (struct ht_stream_block){index, r->payload, len};
    return 0;
}

static int take_same(struct ht_stream_reader *r, uint64_t index, size_t len, struct ht_stream_record *out)
{
    struct ht_reader in = ht_reader_of(r->payload, len);
    struct ht_stream_same *s = &out->same;
    const char *why;

    s->index = index;
    s->count = ht_get_u64(&in);
    s->path = r->target;
    if (!r->head.incremental || r->kind != HT_STREAM_FILE)
        return fail(r, -EPROTO, "there are blocks of a base, and no base or no file");
    if (len < SAME_FIXED_BYTES || !take_text(&in, len - SAME_FIXED_BYTES, r->target, sizeof(r->target)))
        return fail(r, -EPROTO, "blocks of the base have no proper path");
    why = ht_stream_same_refused(s);
    if (why)
        return fail(r, -EPROTO, "blocks of the base are refused: %s", why);
    if (index < r->next_block || index + s->count > ht_div_up(r->size, HT_STREAM_BLOCK_BYTES))
        return fail(r, -EPROTO, "%llu blocks of the base lie beyond the end, or are not in order",
                    (unsigned long long)s->count);
    r->next_block = index + s->count;
    ht_digest_same(&r->digest, s);
    return 0;
}

static int take_end(struct ht_stream_reader *r, size_t len, struct ht_stream_record *out)
{
    struct ht_reader in = ht_reader_of(r->payload, len);
    uint64_t entries = ht_get_u64(&in), bytes = ht_get_u64(&in);
    const uint8_t *digest = ht_get_bytes(&in, sizeof(out->digest.byte));
    char more;

    out->digest = ht_digest_get(&r->digest);
    if (!digest || !ht_reader_done(&in) || entries != r->entries || bytes != r->bytes)
        return fail(r, -EPROTO, "the end mark has other counts: something is missing");
    if (memcmp(digest, out->digest.byte, sizeof(out->digest.byte)) != 0)
        return fail(r, -EPROTO, "the end mark has another digest");
    ssize_t n = r->get(r->ctx, &more, 1);
    if (n < 0)
        return fail(r, (int)n, "cannot read: %s", strerror((int)-n));
    return n ? fail(r, -EPROTO, "there are bytes after the end mark") : 0;
}

static int take(struct ht_stream_reader *r, const uint8_t *head, size_t len, struct ht_stream_record *out)
{
    uint64_t place = ht_le64_load(head + 16);
    struct ht_hash128 sum;

    memcpy(sum.byte, head + 24, sizeof(sum.byte));
    if (out->type != HT_STREAM_BLOCK && out->type != HT_STREAM_SAME && place)
        return fail(r, -EPROTO, "a record has a place and is no block");
    if (out->type != HT_STREAM_ENTRY && !r->entries)
        return fail(r, -EPROTO, "the root is missing");
    switch (out->type) {
    case HT_STREAM_ENTRY:
        return take_entry(r, len, out);
    case HT_STREAM_STATE:
        return take_state(r, len, out);
    case HT_STREAM_BLOCK:
        return take_block(r, place, &sum, len, out);
    case HT_STREAM_SAME:
        return take_same(r, place, len, out);
    case HT_STREAM_END:
        return take_end(r, len, out);
    default:
        return fail(r, -EPROTO, "a record has the unknown type %u", (unsigned)out->type);
    }
}

int ht_stream_next(struct ht_stream_reader *r, struct ht_stream_record *out)
{
    uint8_t head[HT_STREAM_RECORD_BYTES];
    size_t len;
    int rc = get_record(r, head, &len);

    if (rc < 0)
        return rc;
    *out = (struct ht_stream_record){.type = (enum ht_stream_type)head[0] | head[1] << 8};
    return take(r, head, len, out);
}
