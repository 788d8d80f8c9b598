/* SPDX-License-Identifier: Apache-2.0 */
/* interval_set.c - sorted, disjoint, non-adjacent intervals. */

#include "optim/state/interval_set.h"

static struct ht_interval *items(struct ht_interval_set *s)
{
    return s->cap ? s->array : &s->one;
}

/* Index of the first interval that ends at or after pos. */
static uint32_t first_ending_at(const struct ht_interval_set *s, uint32_t pos)
{
    const struct ht_interval *v = ht_interval_set_all(s);
    uint32_t first = 0;

    HT_PARTITION_POINT(first, s->count, i, v[i].end < pos);
    return first;
}

static bool is_full(const struct ht_interval_set *s)
{
    return s->count == (s->cap ? s->cap : 1);
}

static uint32_t next_cap(const struct ht_interval_set *s)
{
    return s->cap ? s->cap * 2 : 4;
}

static int grow_set(struct ht_interval_set *s)
{
    uint32_t cap = next_cap(s);

    if (!is_full(s))
        return 0;
    if (s->count >= HT_INTERVALS_MAX)
        return -E2BIG;
    struct ht_interval *array = malloc(cap * sizeof(*array));
    if (!array)
        return -ENOMEM;
    memcpy(array, items(s), s->count * sizeof(*array));
    if (s->cap)
        free(s->array);
    s->array = array;
    s->cap = cap;
    return 0;
}

/* Puts span at index at, and moves the others up. */
static int insert_item(struct ht_interval_set *s, uint32_t at, struct ht_interval interval)
{
    int rc = grow_set(s);

    if (rc)
        return rc;
    struct ht_interval *v = items(s);
    memmove(v + at + 1, v + at, (s->count - at) * sizeof(*v));
    v[at] = interval;
    s->count++;
    return 0;
}

/* Deletes [from, to). */
static void delete_items(struct ht_interval_set *s, uint32_t from, uint32_t to)
{
    struct ht_interval *v = items(s);

    memmove(v + from, v + to, (s->count - to) * sizeof(*v));
    s->count -= to - from;
}

int ht_interval_set_add(struct ht_interval_set *s, uint32_t begin, uint32_t end)
{
    if (begin >= end)
        return 0;
    uint32_t first = first_ending_at(s, begin), last = first;
    struct ht_interval *v = items(s);
    while (last < s->count && v[last].begin <= end)
        last++;
    if (first == last)
        return insert_item(s, first, (struct ht_interval){begin, end});
    if (v[first].begin > begin)
        v[first].begin = begin;
    v[first].end = v[last - 1].end > end ? v[last - 1].end : end;
    delete_items(s, first + 1, last);
    return 0;
}

size_t ht_interval_set_growth(const struct ht_interval_set *s, uint32_t begin, uint32_t end)
{
    if (begin >= end || !is_full(s) || ht_interval_set_overlap(s, begin - (begin > 0), end + 1))
        return 0;
    return (next_cap(s) - s->cap) * sizeof(struct ht_interval);
}

int ht_interval_set_remove(struct ht_interval_set *s, uint32_t begin, uint32_t end)
{
    if (begin >= end)
        return 0;
    struct ht_interval *v = items(s);
    uint32_t first = first_ending_at(s, begin + 1), last = first;
    while (last < s->count && v[last].begin < end)
        last++;
    if (first == last)
        return 0;
    if (last == first + 1 && v[first].begin < begin && v[first].end > end) {
        int rc = insert_item(s, first, (struct ht_interval){v[first].begin, begin});
        if (!rc)
            items(s)[first + 1].begin = end;
        return rc;
    }
    if (v[first].begin < begin)
        v[first++].end = begin;
    if (first < last && v[last - 1].end > end)
        v[--last].begin = end;
    if (first < last)
        delete_items(s, first, last);
    return 0;
}

/* Adds what is in both, in order. */
static int append_common(struct ht_interval_set *to, const struct ht_interval_set *s,
                         const struct ht_interval_set *other)
{
    const struct ht_interval *v = ht_interval_set_all(s), *w = ht_interval_set_all(other);
    int rc = 0;

    for (uint32_t i = 0, j = 0; i < s->count && j < other->count && !rc;) {
        uint32_t begin = v[i].begin > w[j].begin ? v[i].begin : w[j].begin;
        bool ends_first = v[i].end < w[j].end;
        uint32_t end = ends_first ? v[i].end : w[j].end;
        if (begin < end)
            rc = insert_item(to, to->count, (struct ht_interval){begin, end});
        i += ends_first;
        j += !ends_first;
    }
    return rc;
}

/* Adds what s has and other has not, in order. */
static int append_rest(struct ht_interval_set *to, const struct ht_interval_set *s, const struct ht_interval_set *other)
{
    const struct ht_interval *v = ht_interval_set_all(s), *w = ht_interval_set_all(other);
    int rc = 0;

    for (uint32_t i = 0, j = 0; i < s->count; i++) {
        for (uint32_t begin = v[i].begin; begin < v[i].end && !rc;) {
            while (j < other->count && w[j].end <= begin)
                j++;
            bool cut = j < other->count && w[j].begin < v[i].end;
            uint32_t end = cut ? w[j].begin : v[i].end;
            if (begin < end)
                rc = insert_item(to, to->count, (struct ht_interval){begin, end});
            begin = cut ? w[j].end : v[i].end;
        }
    }
    return rc;
}

typedef int append_fn(struct ht_interval_set *to, const struct ht_interval_set *s, const struct ht_interval_set *other);

/* The set becomes what append makes of both. */
static int make_of_both(struct ht_interval_set *s, const struct ht_interval_set *other, append_fn *append)
{
    struct ht_interval_set made = {0};
    int rc = append(&made, s, other);

    if (rc) {
        ht_interval_set_free(&made);
        return rc;
    }
    ht_interval_set_free(s);
    *s = made;
    return 0;
}

int ht_interval_set_intersect(struct ht_interval_set *s, const struct ht_interval_set *other)
{
    return make_of_both(s, other, append_common);
}

int ht_interval_set_subtract(struct ht_interval_set *s, const struct ht_interval_set *other)
{
    return make_of_both(s, other, append_rest);
}

bool ht_interval_set_overlap(const struct ht_interval_set *s, uint32_t begin, uint32_t end)
{
    uint32_t i = begin < end ? first_ending_at(s, begin + 1) : s->count;

    return i < s->count && ht_interval_set_all(s)[i].begin < end;
}

bool ht_interval_set_cover(const struct ht_interval_set *s, uint32_t begin, uint32_t end)
{
    uint32_t i = first_ending_at(s, end);

    return begin >= end || (i < s->count && ht_interval_set_all(s)[i].begin <= begin);
}

uint32_t ht_interval_set_next(const struct ht_interval_set *s, uint32_t pos, uint32_t end, uint32_t *out_stop)
{
    uint32_t i = first_ending_at(s, pos + 1);

    *out_stop = end;
    if (i == s->count || ht_interval_set_all(s)[i].begin >= end)
        return end;
    if (ht_interval_set_all(s)[i].end < end)
        *out_stop = ht_interval_set_all(s)[i].end;
    return ht_interval_set_all(s)[i].begin > pos ? ht_interval_set_all(s)[i].begin : pos;
}

void ht_interval_set_clear(struct ht_interval_set *s)
{
    s->count = 0;
}

void ht_interval_set_free(struct ht_interval_set *s)
{
    if (s->cap)
        free(s->array);
    memset(s, 0, sizeof(*s));
}
