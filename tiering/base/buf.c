/* SPDX-License-Identifier: Apache-2.0 */
/*
 * buf.c - growable buffers and bounded readers.
 *
 * Invariants: len <= cap; data is NULL only when cap is 0; err is 0 or -ENOMEM, and once
 * set nothing is appended until ht_buf_reset. One thread at a time per buffer.
 */
#include "tiering/base/buf.h"

#include <endian.h>
#include <stdarg.h>

#define CAP_BYTES_MIN 64u

void ht_buf_free(struct ht_buf *b)
{
    free(b->data);
    *b = (struct ht_buf)HT_BUF_INIT;
}

void ht_buf_reset(struct ht_buf *b)
{
    b->len = 0;
    b->err = 0;
}

int ht_buf_reserve(struct ht_buf *b, size_t n)
{
    size_t cap = b->cap;
    uint8_t *data;

    if (b->err != 0)
        return b->err;
    if (n <= cap - b->len)
        return 0;
    if (n > SIZE_MAX / 2 - b->len) {
        b->err = -ENOMEM;
        return b->err;
    }
    if (cap < CAP_BYTES_MIN)
        cap = CAP_BYTES_MIN;
    while (cap - b->len < n)
        cap *= 2;
    data = realloc(b->data, cap);
    if (!data) {
        b->err = -ENOMEM;
        return b->err;
    }
    b->data = data;
    b->cap = cap;
    return 0;
}

void ht_buf_put(struct ht_buf *b, const void *p, size_t n)
{
    if (n == 0 || ht_buf_reserve(b, n) != 0)
        return;
    memcpy(b->data + b->len, p, n);
    b->len += n;
}

void ht_buf_put_u8(struct ht_buf *b, uint8_t v)
{
    ht_buf_put(b, &v, sizeof(v));
}

void ht_buf_put_u16(struct ht_buf *b, uint16_t v)
{
    v = htole16(v);
    ht_buf_put(b, &v, sizeof(v));
}

void ht_buf_put_u32(struct ht_buf *b, uint32_t v)
{
    v = htole32(v);
    ht_buf_put(b, &v, sizeof(v));
}

void ht_buf_put_u64(struct ht_buf *b, uint64_t v)
{
    v = htole64(v);
    ht_buf_put(b, &v, sizeof(v));
}

void ht_buf_printf(struct ht_buf *b, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0 || ht_buf_reserve(b, (size_t)n + 1) != 0)
        return;
    va_start(args, fmt);
    vsnprintf((char *)b->data + b->len, (size_t)n + 1, fmt, args);
    va_end(args);
    b->len += (size_t)n;
}

const uint8_t *ht_get_bytes(struct ht_reader *r, size_t n)
{
    const uint8_t *p = r->p;

    if (r->bad || n > (size_t)(r->end - r->p)) {
        r->bad = true;
        return NULL;
    }
    r->p += n;
    return p;
}

uint8_t ht_get_u8(struct ht_reader *r)
{
    const uint8_t *p = ht_get_bytes(r, 1);

    return p ? *p : 0;
}

uint16_t ht_get_u16(struct ht_reader *r)
{
    const uint8_t *p = ht_get_bytes(r, 2);

    return p ? (uint16_t)(p[0] | p[1] << 8) : 0;
}

uint32_t ht_get_u32(struct ht_reader *r)
{
    const uint8_t *p = ht_get_bytes(r, 4);

    return p ? ht_le32_load(p) : 0;
}

uint64_t ht_get_u64(struct ht_reader *r)
{
    const uint8_t *p = ht_get_bytes(r, 8);

    return p ? ht_le64_load(p) : 0;
}

uint32_t ht_le32_load(const void *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return le32toh(v);
}

uint64_t ht_le64_load(const void *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return le64toh(v);
}

void ht_le32_store(void *p, uint32_t v)
{
    v = htole32(v);
    memcpy(p, &v, sizeof(v));
}

void ht_le64_store(void *p, uint64_t v)
{
    v = htole64(v);
    memcpy(p, &v, sizeof(v));
}
