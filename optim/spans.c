/* SPDX-License-Identifier: Apache-2.0 */
/* spans.c - sorted, disjoint, non-adjacent intervals. */
#include "optim/spans.h"

#include <stdlib.h>

static struct ht_span *items(struct ht_spans *s)
{
    return s->cap ? s->array : &s->one;
}

/* Index of the first interval that ends at or after pos. */
static uint32_t first_ending_at(const struct ht_spans *s, uint32_t pos)
{
    const struct ht_span *v = ht_spans_all(s);
    uint32_t lo = 0, hi = s->count;

    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (v[mid].end < pos)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static int grow(struct ht_spans *s)
{
    uint32_t cap = s->cap ? s->cap * 2 : 4;

    if (s->count < (s->cap ? s->cap : 1))
        return 0;
    if (s->count >= HT_SPANS_MAX)
        return -E2BIG;
    struct ht_span *array = malloc(cap * sizeof(*array));
    if (!array)
        return -ENOMEM;
    memcpy(array, items(s), s->count * sizeof(*array));
    if (s->cap)
        free(s->array);
    s->array = array;
    s->cap = cap;
    return 0;
}

/* Put span at index at, moving the others up. */
static int insert(struct ht_spans *s, uint32_t at, struct ht_span span)
{
    int ret = grow(s);

    if (ret)
        return ret;
    struct ht_span *v = items(s);
    memmove(v + at + 1, v + at, (s->count - at) * sizeof(*v));
    v[at] = span;
    s->count++;
    return 0;
}

/* Delete [from, to). */
static void delete_items(struct ht_spans *s, uint32_t from, uint32_t to)
{
    struct ht_span *v = items(s);

    memmove(v + from, v + to, (s->count - to) * sizeof(*v));
    s->count -= to - from;
}

int ht_spans_add(struct ht_spans *s, uint32_t begin, uint32_t end)
{
    if (begin >= end)
        return 0;
    uint32_t first = first_ending_at(s, begin), last = first;
    struct ht_span *v = items(s);
    while (last < s->count && v[last].begin <= end)
        last++;
    if (first == last)
        return insert(s, first, (struct ht_span){begin, end});
    if (v[first].begin > begin)
        v[first].begin = begin;
    v[first].end = v[last - 1].end > end ? v[last - 1].end : end;
    delete_items(s, first + 1, last);
    return 0;
}

int ht_spans_remove(struct ht_spans *s, uint32_t begin, uint32_t end)
{
    if (begin >= end)
        return 0;
    struct ht_span *v = items(s);
    uint32_t first = first_ending_at(s, begin + 1), last = first;
    while (last < s->count && v[last].begin < end)
        last++;
    if (first == last)
        return 0;
    if (last == first + 1 && v[first].begin < begin && v[first].end > end) {
        int ret = insert(s, first, (struct ht_span){v[first].begin, begin});
        if (!ret)
            items(s)[first + 1].begin = end;
        return ret;
    }
    if (v[first].begin < begin)
        v[first++].end = begin;
    if (first < last && v[last - 1].end > end)
        v[--last].begin = end;
    if (first < last)
        delete_items(s, first, last);
    return 0;
}

bool ht_spans_overlap(const struct ht_spans *s, uint32_t begin, uint32_t end)
{
    uint32_t i = begin < end ? first_ending_at(s, begin + 1) : s->count;

    return i < s->count && ht_spans_all(s)[i].begin < end;
}

bool ht_spans_cover(const struct ht_spans *s, uint32_t begin, uint32_t end)
{
    uint32_t i = first_ending_at(s, end);

    return begin >= end || (i < s->count && ht_spans_all(s)[i].begin <= begin);
}

uint32_t ht_spans_next(const struct ht_spans *s, uint32_t pos, uint32_t end, uint32_t *out_stop)
{
    uint32_t i = first_ending_at(s, pos + 1);

    *out_stop = end;
    if (i == s->count || ht_spans_all(s)[i].begin >= end)
        return end;
    if (ht_spans_all(s)[i].end < end)
        *out_stop = ht_spans_all(s)[i].end;
    return ht_spans_all(s)[i].begin > pos ? ht_spans_all(s)[i].begin : pos;
}

void ht_spans_clear(struct ht_spans *s)
{
    s->count = 0;
}

void ht_spans_free(struct ht_spans *s)
{
    if (s->cap)
        free(s->array);
    memset(s, 0, sizeof(*s));
}
