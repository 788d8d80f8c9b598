/* SPDX-License-Identifier: Apache-2.0 */
/*
 * planes.h - the bytes of equal rank of all elements, gathered into planes. Pure.
 *
 *     raw      a0 a1 b0 b1 c0 c1 ...        elements of two bytes
 *     planes   a0 b0 c0 ...   a1 b1 c1 ...
 *
 * In floating-point numbers one plane holds signs and exponents, of which few values are frequent. The others hold bits
 * of mantissas, which are near to random. A sample of the bytes shows which element size gives the smallest planes, so
 * no caller has to know what the bytes are.
 */
#pragma once

#include "tiering/base/base.h"

enum { HT_PLANES_MAX = 4 };

/* What the sample shows. The same bytes give the same answer on every machine. */
struct ht_planes {
    unsigned count;            /* of planes: the bytes of an element, 1, 2 or 4 */
    bool coded[HT_PLANES_MAX]; /* the plane gets at least 1/16 smaller */
    bool worth;                /* the whole frame does */
};
void ht_planes_sample(const uint8_t *raw, size_t bytes, struct ht_planes *out);

/* Gathers n elements of count bytes into planes of n bytes each. */
void ht_planes_split(uint8_t *const *plane, unsigned count, const uint8_t *raw, size_t n);
/* The reverse. Nothing overlaps. */
void ht_planes_join(uint8_t *raw, unsigned count, const uint8_t *const *plane, size_t n);
