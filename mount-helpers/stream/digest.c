/* SPDX-License-Identifier: Apache-2.0 */
/*
 * digest.c - the digest of a step. It covers the number of the step, kinds, paths, targets, sizes, content, state, and
 * attributes, but for those that say where content lies and how it is stored. Owners, modes, access lists and times are
 * left out: another machine has other users. The digest of an incremental stream covers its base and its runs, too.
 */
#include "mount-helpers/stream/stream.h"

#include <stdio.h>

#include <hitrain/words.h>

static const char domain[] = "hitrain step 1";

static void add_u64(struct ht_digest *d, uint64_t v)
{
    uint8_t bytes[8];

    ht_le64_store(bytes, v);
    ht_hash128_sum_add(d->sum, bytes, sizeof(bytes));
}

static void add_bytes(struct ht_digest *d, const void *p, size_t len)
{
    add_u64(d, len);
    if (len)
        ht_hash128_sum_add(d->sum, p, len);
}

static bool counts(const struct ht_stream_attribute *a)
{
    static const char *const storage[] = {HT_XATTR_PREFIX "tier", HT_XATTR_PREFIX "pin", HT_XATTR_PREFIX "compress"};

    for (size_t i = 0; i < HT_ARRAY_SIZE(storage); i++)
        if (strlen(storage[i]) == a->name_len && memcmp(storage[i], a->name, a->name_len) == 0)
            return false;
    return a->name_len > 5 && memcmp(a->name, "user.", 5) == 0;
}

int ht_digest_begin(struct ht_digest *d, uint64_t step)
{
    int rc = ht_hash128_sum_new(&d->sum);

    if (rc < 0)
        return rc;
    ht_hash128_sum_add(d->sum, domain, sizeof(domain) - 1);
    add_u64(d, step);
    return 0;
}

void ht_digest_entry(struct ht_digest *d, const struct ht_stream_entry *e)
{
    struct ht_stream_attributes rest = e->attributes;
    struct ht_stream_attribute a;

    add_u64(d, HT_STREAM_ENTRY);
    add_u64(d, e->kind);
    add_u64(d, e->size);
    add_bytes(d, e->path, strlen(e->path));
    add_bytes(d, e->target, strlen(e->target));
    while (ht_stream_attribute_next(&rest, &a)) {
        if (!counts(&a))
            continue;
        add_bytes(d, a.name, a.name_len);
        add_bytes(d, a.value, a.value_len);
    }
    add_u64(d, 0); /* no name is empty */
}

void ht_digest_state(struct ht_digest *d, const struct ht_stream_state *s)
{
    add_u64(d, HT_STREAM_STATE);
    add_u64(d, s->size);
    add_bytes(d, s->name, strlen(s->name));
}

void ht_digest_block(struct ht_digest *d, uint64_t index, const struct ht_hash128 *sum)
{
    add_u64(d, HT_STREAM_BLOCK);
    add_u64(d, index);
    ht_hash128_sum_add(d->sum, sum->byte, sizeof(sum->byte));
}

void ht_digest_base(struct ht_digest *d, const struct ht_stream_base *base)
{
    add_u64(d, HT_STREAM_BASE);
    add_u64(d, base->step);
    ht_hash128_sum_add(d->sum, base->digest.byte, sizeof(base->digest.byte));
}

void ht_digest_same(struct ht_digest *d, const struct ht_stream_same *s)
{
    add_u64(d, HT_STREAM_SAME);
    add_u64(d, s->index);
    add_u64(d, s->count);
    add_bytes(d, s->path, strlen(s->path));
}

struct ht_hash128 ht_digest_get(const struct ht_digest *d)
{
    return ht_hash128_sum_get(d->sum);
}

void ht_digest_end(struct ht_digest *d)
{
    ht_hash128_sum_free(d->sum);
    d->sum = NULL;
}

const char *ht_digest_text(const struct ht_hash128 *h, char buf[HT_DIGEST_TEXT_MAX])
{
    for (size_t i = 0; i < sizeof(h->byte); i++)
        snprintf(buf + 2 * i, 3, "%02x", h->byte[i]);
    return buf;
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int ht_digest_parse(const char *text, struct ht_hash128 *out)
{
    if (strlen(text) != 2 * sizeof(out->byte))
        return -EINVAL;
    for (size_t i = 0; i < sizeof(out->byte); i++) {
        int high = digit(text[2 * i]), low = digit(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return -EINVAL;
        out->byte[i] = (uint8_t)(high << 4 | low);
    }
    return 0;
}
