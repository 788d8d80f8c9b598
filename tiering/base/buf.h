/* SPDX-License-Identifier: Apache-2.0 */
/*
 * buf.h - a growable byte buffer and a bounded reader, for records and text.
 *
 * Integers are little-endian. A writer that ran out of memory stays in the
 * error state (err = -ENOMEM) and ignores further puts; check once at the end.
 * A reader that ran past the end stays in the error state and returns zeros.
 */
#pragma once

#include "tiering/base/base.h"

struct ht_buf {
    uint8_t *data; /* owned */
    size_t len, cap;
    int err;
};

#define HT_BUF_INIT   \
    {                 \
        NULL, 0, 0, 0 \
    }

void ht_buf_free(struct ht_buf *b);
/* Drops the content and the error, and keeps the memory. */
void ht_buf_reset(struct ht_buf *b);
/* Room for n more bytes. 0 or -ENOMEM (also kept in b->err). */
int ht_buf_reserve(struct ht_buf *b, size_t n);
void ht_buf_put(struct ht_buf *b, const void *p, size_t n);
void ht_buf_put_u8(struct ht_buf *b, uint8_t v);
void ht_buf_put_u16(struct ht_buf *b, uint16_t v);
void ht_buf_put_u32(struct ht_buf *b, uint32_t v);
void ht_buf_put_u64(struct ht_buf *b, uint64_t v);
/* Appends formatted text, not terminated by NUL in len (but always NUL after it). */
void ht_buf_printf(struct ht_buf *b, const char *fmt, ...) HT_PRINTF(2, 3);

struct ht_reader {
    const uint8_t *p, *end;
    bool bad;
};

static inline struct ht_reader ht_reader_of(const void *p, size_t n)
{
    /* p may be NULL when n is 0: no arithmetic on it then */
    return (struct ht_reader){(const uint8_t *)p, n > 0 ? (const uint8_t *)p + n : (const uint8_t *)p, false};
}

/* Pointer to the next n bytes, or NULL (and bad) when fewer are left. */
const uint8_t *ht_get_bytes(struct ht_reader *r, size_t n);
uint8_t ht_get_u8(struct ht_reader *r);
uint16_t ht_get_u16(struct ht_reader *r);
uint32_t ht_get_u32(struct ht_reader *r);
uint64_t ht_get_u64(struct ht_reader *r);
/* True when nothing failed and nothing is left. */
static inline bool ht_reader_done(const struct ht_reader *r)
{
    return !r->bad && r->p == r->end;
}

/* Unaligned little-endian access. */
uint32_t ht_le32_load(const void *p);
uint64_t ht_le64_load(const void *p);
void ht_le32_store(void *p, uint32_t v);
void ht_le64_store(void *p, uint64_t v);
