/* SPDX-License-Identifier: Apache-2.0 */
/* squares.h - sums of squares of gradients, kept until the boundary computes the norm. */
#ifndef HITRAIN_OPTIM_STATE_SQUARES_H
#define HITRAIN_OPTIM_STATE_SQUARES_H

#include "optim/rules/kernel.h"

struct ht_param;
struct ht_range;
struct ht_root;

/* Elements of one sum: every range is a whole number of them, but the last. */
enum { HT_SUM_SPAN = 16 * HT_SUM_BLOCK };

/* Elements of a range that lie one after the other: count of them from first on. */
struct ht_elements {
    const void *bytes;
    uint8_t dtype;
    uint64_t first, count;
};

/* Memory for the sums of a parameter; false: there is none. Memory that is there stays as it is. */
bool ht_opt_squares_make(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_squares_free(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
uint64_t ht_opt_squares_bytes(const struct ht_param *p);
/* For the worker that runs the range, not locked: its sums, set to zero. */
double *ht_opt_squares_begin(const struct ht_range *r);
/* Adds the squares of elements to the sums of their range, block by block. Adds to *nonfinite those not finite. */
void ht_opt_squares_add(const struct ht_kernels *kernels, double *span, const struct ht_elements *part,
                        uint64_t *nonfinite);
/* Adds the sum of a parameter's measured ranges, in their order; and how many of their elements are not finite. */
void ht_opt_squares_total(const struct ht_param *p, double *sum, uint64_t *nonfinite) HT_REQUIRES(HT_LOCK_OPTIM);
/* Asserts that kept sums are those of the bytes that the store has. Releases the lock in between. */
void ht_opt_squares_verify(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM);

#endif
