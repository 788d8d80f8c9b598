/* SPDX-License-Identifier: Apache-2.0 */
/*
 * topk.h - the layout of .hitrain/grad-topk/P: a gradient whose elements are mostly zero. Little-endian.
 *
 *   header    struct ht_topk_header
 *   indices   count x u32: of elements, strictly increasing
 *   values    count x dtype, in the same order
 *
 * Elements that are not named have the gradient zero. Nothing comes after the values.
 */
#pragma once

#include <assert.h>
#include <hitrain/format.h>

#define HT_TOPK_MAGIC "HTtopk\r\n" /* without its NUL */
#define HT_TOPK_VERSION 1u
#define HT_TOPK_BYTES_MAX 0xfffffffful /* of header, indices and values */

struct ht_topk_header {
    uint8_t magic[8]; /*  0 HT_TOPK_MAGIC */
    ht_le32 version;  /*  8 */
    uint8_t dtype;    /* 12 of the values, enum ht_dtype: f32, bf16 or f16 */
    uint8_t zero[3];  /* 13 */
    ht_le64 elements; /* 16 of the parameter */
    ht_le64 count;    /* 24 of entries */
};
static_assert(sizeof(struct ht_topk_header) == 32, "as written by clients");
static_assert(offsetof(struct ht_topk_header, count) == 24, "as written by clients");
