/* SPDX-License-Identifier: Apache-2.0 */
/*
 * master.h - f32 master weights of bf16 parameters in two bytes: the bits that the parameter does not have.
 *
 * A parameter is its master, rounded to nearest even, so that as integers
 *
 *   master = (p << 16) + missing,   -0x8000 <= missing <= 0x8000
 *
 * Missing bits are stored as 16-bit integers. If p is even both ties round to it, and there is one value too many. A
 * block has fewer elements than there are codes, so some code is unused in it. That code (0x8000 itself, unless there
 * are lower ties, too) stands for the upper tie, and the block remembers it. Infinities and zeros are like other
 * numbers; NaN misses nothing.
 *
 * A block also remembers a hash of its parameters. If that differs, another program has changed some, and the masters
 * of the whole block are the parameters as they are.
 *
 * f16 has no such form: far more than 2^16 f32 round to its subnormals and zeros.
 */
#pragma once

#include "optim/rules/kernel.h"
#include <hitrain/format.h>

/* Masters of the n elements of a block, of which p and low are the parameters and the missing bits. */
void ht_master_expand(const struct ht_kernels *k, const struct ht_disk_master *block, const uint16_t *p,
                      const uint16_t *low, size_t n, float *out_master);
/* The other way: p is master, rounded, or expand's input for elements that were left as they are. */
void ht_master_compress(const struct ht_kernels *k, const float *master, const uint16_t *p, size_t n, uint16_t *low,
                        struct ht_disk_master *block);
/* Does a master round to this parameter? */
bool ht_master_rounds_to(float master, uint16_t p);
