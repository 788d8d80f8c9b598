/* SPDX-License-Identifier: Apache-2.0 */
/*
 * spans.h - a small sorted set of half-open intervals: which bytes of a range's gradient are there.
 *
 * Intervals neither touch nor overlap. The usual case, one interval, needs no memory; more go to an array that is kept for
 * reuse. Not locked: the owner's lock guards them. A set of zeros is empty.
 */
#ifndef HITRAIN_OPTIM_SPANS_H
#define HITRAIN_OPTIM_SPANS_H

#include "tiering/base/base.h"

/* A gradient written in more pieces than this, within one chunk of its parameter and not yet joined, is refused. */
enum { HT_SPANS_MAX = 4096 };

struct ht_span {
    uint32_t begin, end;
};
struct ht_spans {
    struct ht_span *array; /* owned; unused while cap is 0 */
    uint32_t count, cap;
    struct ht_span one;
};

static inline const struct ht_span *ht_spans_all(const struct ht_spans *s)
{
    return s->cap ? s->array : &s->one;
}

/* -ENOMEM; -E2BIG: more than HT_SPANS_MAX. Nothing changed then. An empty interval is fine. */
int ht_spans_add(struct ht_spans *s, uint32_t begin, uint32_t end) HT_CHECK;
int ht_spans_remove(struct ht_spans *s, uint32_t begin, uint32_t end) HT_CHECK;
bool ht_spans_overlap(const struct ht_spans *s, uint32_t begin, uint32_t end);
bool ht_spans_cover(const struct ht_spans *s, uint32_t begin, uint32_t end);
/* First position at or after pos that is inside, or end (which bounds the search); *out_stop: where that interval ends. */
uint32_t ht_spans_next(const struct ht_spans *s, uint32_t pos, uint32_t end, uint32_t *out_stop);
/* Empty, memory kept. */
void ht_spans_clear(struct ht_spans *s);
void ht_spans_free(struct ht_spans *s);

#endif
