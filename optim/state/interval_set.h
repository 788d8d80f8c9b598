/* SPDX-License-Identifier: Apache-2.0 */
/*
 * interval_set.h - a small sorted set of half-open intervals: which bytes of a range's gradient are there.
 *
 * Intervals neither touch nor overlap. The usual case, one interval, needs no memory; more go to an array that is kept
 * for reuse. Not locked: the owner's lock guards them. A set of zeros is empty.
 */
#pragma once

#include "tiering/base/base.h"

/* A gradient written in more pieces than this, within one chunk of its parameter and not yet joined, is refused. */
enum { HT_INTERVALS_MAX = 4096 };

struct ht_interval {
    uint32_t begin, end;
};
struct ht_interval_set {
    struct ht_interval *array; /* owned; unused while cap is 0 */
    uint32_t count, cap;
    struct ht_interval one;
};

static inline const struct ht_interval *ht_interval_set_all(const struct ht_interval_set *s)
{
    return s->cap ? s->array : &s->one;
}

/* -ENOMEM; -E2BIG: more than HT_INTERVALS_MAX. Nothing changed then. An empty interval is fine. */
int ht_interval_set_add(struct ht_interval_set *s, uint32_t begin, uint32_t end) HT_MUST_CHECK;
int ht_interval_set_remove(struct ht_interval_set *s, uint32_t begin, uint32_t end) HT_MUST_CHECK;
/* So many bytes of memory more the set would take with this interval. */
size_t ht_interval_set_growth(const struct ht_interval_set *s, uint32_t begin, uint32_t end);
/*
 * Keeps the bytes that are in both, in one walk. -ENOMEM; -E2BIG: more than HT_INTERVALS_MAX. Nothing changed then.
 * With an empty set it needs no memory.
 */
int ht_interval_set_intersect(struct ht_interval_set *s, const struct ht_interval_set *other) HT_MUST_CHECK;
/* Keeps the bytes that are not in the other one; otherwise the same. Without memory: if nothing is left. */
int ht_interval_set_subtract(struct ht_interval_set *s, const struct ht_interval_set *other) HT_MUST_CHECK;
bool ht_interval_set_overlap(const struct ht_interval_set *s, uint32_t begin, uint32_t end);
bool ht_interval_set_cover(const struct ht_interval_set *s, uint32_t begin, uint32_t end);
/*
 * First position at or after pos that is inside, or end (which bounds the search); *out_stop: where that interval ends.
 */
uint32_t ht_interval_set_next(const struct ht_interval_set *s, uint32_t pos, uint32_t end, uint32_t *out_stop);
/* Empty, memory kept. */
void ht_interval_set_clear(struct ht_interval_set *s);
void ht_interval_set_free(struct ht_interval_set *s);
