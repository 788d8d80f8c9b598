/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verify.c - asserts that bitmaps, indexes and counts of free space agree (tiering/base/verify.h). What the index has
 * of a group is found here block by block.
 */
#include "tiering/space/space_map.h"

enum { PAGE_GROUPS = 4096 * 8 / HT_GROUP_BLOCKS }; /* that a page of the map of blocks has */

/* -------------------------------------------------------------- index */

static uint64_t word_of(const struct ht_free_index *x, unsigned level, unsigned class, uint64_t at)
{
    uint64_t word = x->level[level][at * HT_FREE_BITMAPS + class];

    return class == HT_FREE_WHOLE ? ~word : word;
}

static void verify_summaries(const struct ht_free_index *x, unsigned class, uint64_t group)
{
    uint64_t at = group;

    for (unsigned level = 0; level + 1 < x->levels; level++) {
        at /= 64;
        bool any = word_of(x, level, class, at) != 0;
        assert(any == (word_of(x, level + 1, class, at / 64) >> at % 64 & 1));
    }
}

void ht_free_index_verify(const struct ht_free_index *x, uint64_t group, bool whole, unsigned longest)
{
    unsigned is = whole ? HT_FREE_WHOLE : longest ? ht_free_class_of(longest) : HT_FREE_NONE;

    assert(x->longest[group] == (whole ? 0 : longest));
    for (unsigned class = 0; class < HT_FREE_CLASSES; class ++) {
        assert((word_of(x, 0, class, group / 64) >> group % 64 & 1) == (class == is));
        verify_summaries(x, class, group);
    }
    verify_summaries(x, HT_FREE_FREED, group);
    verify_summaries(x, HT_FREE_CLOSED, group);
    verify_summaries(x, HT_FREE_SPARSE, group);
}

/* ---------------------------------------------------------------- map */

static bool is_whole(const struct ht_space_map *m, uint64_t group)
{
    uint64_t end = (group + 1) * HT_GROUP_BLOCKS;

    return ht_space_map_find(m, group * HT_GROUP_BLOCKS, end, true) == end;
}

static bool is_sparse(const struct ht_space_map *m, uint64_t group)
{
    unsigned taken = ht_space_map_taken(m, group);

    return taken && taken <= HT_SPARSE_TAKEN_MAX && (group + 1) * HT_GROUP_BLOCKS <= m->blocks &&
        !ht_free_index_has(&m->index, HT_FREE_FIXED, group);
}

/* Do runs of this group and of its neighbours go on in each other? */
static bool joins_others(const struct ht_space_map *m, uint64_t group)
{
    return group < m->groups && !is_whole(m, group) && !ht_free_index_has(&m->index, HT_FREE_CLOSED, group);
}

/* The longest run that begins in a broken group. */
static uint64_t longest_run(const struct ht_space_map *m, uint64_t group)
{
    uint64_t begin = group * HT_GROUP_BLOCKS, end = begin + HT_GROUP_BLOCKS, longest = 0;
    uint64_t reach = joins_others(m, group + 1) ? end + HT_GROUP_BLOCKS : end, at = begin;

    if (group > 0 && joins_others(m, group - 1) && ht_space_map_find(m, begin - 1, begin, true) == begin)
        at = ht_space_map_find(m, begin, end, true); /* it began in the group before */
    for (uint64_t stop; (at = ht_space_map_find(m, at, end, false)) < end; at = stop) {
        stop = ht_space_map_find(m, at, reach, true);
        longest = ht_max_u64(longest, stop - at);
    }
    return ht_min_u64(longest, HT_GROUP_BLOCKS);
}

static uint64_t verify_group(const struct ht_space_map *m, uint64_t group)
{
    bool closed = ht_free_index_has(&m->index, HT_FREE_CLOSED, group), whole = !closed && is_whole(m, group);

    ht_free_index_verify(&m->index, group, whole, whole || closed ? 0 : (unsigned)longest_run(m, group));
    assert((ht_free_index_next(&m->index, HT_FREE_SPARSE, group) == group) == is_sparse(m, group));
    return HT_GROUP_BLOCKS - ht_space_map_taken(m, group);
}

/* Everything is free in pages that were never touched. */
uint64_t ht_space_map_verify(const struct ht_space_map *m)
{
    uint64_t free_blocks = 0, whole = 0, sparse = 0;

    for (uint64_t page = 0; page * PAGE_GROUPS < m->groups; page++) {
        uint64_t first = page * PAGE_GROUPS, end = ht_min_u64(first + PAGE_GROUPS, m->groups);
        bool touched = m->touched[page / 64] >> page % 64 & 1;
        for (uint64_t g = first; touched && g < end; g++) {
            free_blocks += verify_group(m, g);
            whole += is_whole(m, g) && !ht_free_index_has(&m->index, HT_FREE_CLOSED, g);
            sparse += is_sparse(m, g);
        }
        free_blocks += touched ? 0 : (end - first) * HT_GROUP_BLOCKS;
        whole += touched ? 0 : end - first;
    }
    assert(m->index.count[HT_FREE_SPARSE] == sparse);
    assert(m->free_blocks == free_blocks && (!m->groups || m->index.count[HT_FREE_WHOLE] == whole));
    return free_blocks;
}

/* ---------------------------------------------------------- allocator */

void ht_alloc_verify(const struct ht_alloc *a, uint64_t pending_free)
{
    uint64_t total = 0, free_blocks = 0;

    for (unsigned i = 0; i < a->device_count; i++) {
        const struct ht_alloc_map *d = &a->device[i];
        uint64_t free_here = ht_space_map_verify(&d->map);
        assert(d->bad_blocks <= d->map.blocks - free_here);
        total += d->offline ? 0 : d->map.blocks;
        free_blocks += d->offline ? 0 : free_here;
    }
    assert(a->total == total && a->free_blocks == free_blocks);
    assert(a->pending_free == pending_free + ht_alloc_discarding(a, true));
}
