/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sparse.h - elements that are mostly zeros, as entries. Pure.
 *
 *     entry   u16 how many zeros come before this element, then its bytes
 *
 * Zeros are elements of which all bits are 0. After HT_SPARSE_ZEROS_MAX zeros a zero is an entry, too. Zeros after the
 * last entry are not stored. Places only grow, so no entry comes twice.
 */
#pragma once

#include "tiering/base/base.h"

enum { HT_SPARSE_ZEROS_MAX = UINT16_MAX };

/* Begins as {.size = bytes of an element}, 2 or 4. */
struct ht_sparse_encoder {
    unsigned size;
    uint32_t zeros; /* since the last entry */
};

static inline size_t ht_sparse_entry_bytes(unsigned size)
{
    return sizeof(uint16_t) + size;
}

/*
 * The next elements, whole ones. Returns the bytes of their entries, of which each element makes one at most. out NULL:
 * it counts only.
 */
size_t ht_sparse_encode(struct ht_sparse_encoder *e, const void *bytes, size_t len, void *out);
/*
 * All entries, which may come from anywhere. out: all elements, NULL if they are only checked. -EUCLEAN: these are no
 * whole entries, or one of them lies beyond the elements; then out has any bytes.
 */
int ht_sparse_decode(const void *entries, size_t len, unsigned size, void *out, size_t out_len) HT_MUST_CHECK;
