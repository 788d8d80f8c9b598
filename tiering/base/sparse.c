/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/sparse.h"

/* Bytes of the entry. */
static size_t put_entry(uint8_t *out, uint32_t zeros, const void *value, unsigned size)
{
    if (out) {
        out[0] = (uint8_t)zeros;
        out[1] = (uint8_t)(zeros >> 8);
        memcpy(out + 2, value, size);
    }
    return ht_sparse_entry_bytes(size);
}

/* Bytes of zeros from here on that are looked at together: whole elements, or 0. */
static size_t zeros_at(const uint8_t *p, size_t left)
{
    uint64_t words[4] = {0};

    if (left >= sizeof(words)) {
        memcpy(words, p, sizeof(words));
        if (!(words[0] | words[1] | words[2] | words[3]))
            return sizeof(words);
    }
    return 0;
}

static bool is_zero(const uint8_t *p, unsigned size)
{
    uint32_t bits = 0;

    memcpy(&bits, p, size);
    return !bits;
}

size_t ht_sparse_encode(struct ht_sparse_encoder *e, const void *bytes, size_t len, void *out)
{
    static const uint8_t zero[4];
    const uint8_t *p = bytes;
    uint8_t *to = out;
    size_t n = 0;

    assert((e->size == 2 || e->size == 4) && len % e->size == 0);
    while (len) {
        size_t part = zeros_at(p, len);
        if (!part && is_zero(p, e->size))
            part = e->size;
        if (part) {
            e->zeros += (uint32_t)(part / e->size);
        } else {
            n += put_entry(to ? to + n : NULL, e->zeros, p, e->size);
            e->zeros = 0;
            part = e->size;
        }
        if (e->zeros > HT_SPARSE_ZEROS_MAX) {
            n += put_entry(to ? to + n : NULL, HT_SPARSE_ZEROS_MAX, zero, e->size);
            e->zeros -= HT_SPARSE_ZEROS_MAX + 1;
        }
        p += part;
        len -= part;
    }
    return n;
}

int ht_sparse_decode(const void *entries, size_t len, unsigned size, void *out, size_t out_len)
{
    const uint8_t *p = entries;
    size_t entry = ht_sparse_entry_bytes(size), left = out_len / size;
    uint8_t *to = out;

    if ((size != 2 && size != 4) || out_len % size || len % entry)
        return -EUCLEAN;
    if (to)
        memset(to, 0, out_len);
    for (; len; p += entry, len -= entry) {
        size_t zeros = (size_t)p[0] | (size_t)p[1] << 8;
        if (zeros >= left)
            return -EUCLEAN;
        left -= zeros + 1;
        if (to) {
            memcpy(to + zeros * size, p + 2, size);
            to += (zeros + 1) * size;
        }
    }
    return 0;
}
