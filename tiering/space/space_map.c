/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/space/space_map.h"

enum {
    GROUP_WORDS = HT_GROUP_BLOCKS / 64,
    PAGE_GROUPS = 4096 / (GROUP_WORDS * 8), /* that a page of the map of blocks has */
    TRIES_MAX = 32,                         /* groups of the request's own class that a search looks at */
    GROUPS_AHEAD = 8,                       /* of which memory is prefetched */
    DISCARD_GROUPS_MAX = 4096,              /* that one search for blocks to discard looks at */
};

/* ------------------------------------------------------------- bits */

static void bits_set(uint64_t *words, uint64_t from, uint64_t end, bool value)
{
    while (from < end) {
        uint64_t stop = ht_min_u64((from / 64 + 1) * 64, end);
        uint64_t mask = (~0ull >> (64 - (stop - from))) << (from % 64);
        if (value)
            words[from / 64] |= mask;
        else
            words[from / 64] &= ~mask;
        from = stop;
    }
}

uint64_t ht_space_map_find(const struct ht_space_map *m, uint64_t from, uint64_t end, bool taken)
{
    uint64_t flip = taken ? 0 : ~0ull;

    while (from < end) {
        uint64_t word = (m->taken[from / 64] ^ flip) >> (from % 64);
        if (word)
            return ht_min_u64(from + (unsigned)__builtin_ctzll(word), end);
        from = (from / 64 + 1) * 64;
    }
    return end;
}

static bool is_taken(const struct ht_space_map *m, uint64_t block)
{
    return m->taken[block / 64] >> block % 64 & 1;
}

static bool all_free(const struct ht_space_map *m, uint64_t from, uint64_t end)
{
    return ht_space_map_find(m, from, end, true) == end;
}

/* Free blocks at the end and at the begin of a group. */
static unsigned free_at_end(const struct ht_space_map *m, uint64_t group)
{
    unsigned n = 0;

    for (unsigned w = GROUP_WORDS; w-- > 0; n += 64) {
        uint64_t word = m->taken[group * GROUP_WORDS + w];
        if (word)
            return n + (unsigned)__builtin_clzll(word);
    }
    return n;
}

static unsigned free_at_begin(const struct ht_space_map *m, uint64_t group)
{
    uint64_t first = group * HT_GROUP_BLOCKS;

    return (unsigned)(ht_space_map_find(m, first, first + HT_GROUP_BLOCKS, true) - first);
}

static bool is_whole(const struct ht_space_map *m, uint64_t group)
{
    uint64_t any = 0;

    for (unsigned w = 0; w < GROUP_WORDS; w++)
        any |= m->taken[group * GROUP_WORDS + w];
    return !any;
}

/* Do runs of this group and of its neighbours go on in each other? */
static bool joins_others(const struct ht_space_map *m, uint64_t group)
{
    return !is_whole(m, group) && !ht_free_index_has(&m->index, HT_FREE_CLOSED, group);
}

/* Blocks at the begin of a group that belong to a run of the group before. */
static unsigned begun_before(const struct ht_space_map *m, uint64_t group)
{
    if (group == 0 || is_taken(m, group * HT_GROUP_BLOCKS - 1) || !joins_others(m, group - 1) ||
        !joins_others(m, group))
        return 0;
    return free_at_begin(m, group);
}

struct bits256 {
    uint64_t word[GROUP_WORDS];
};

/* The bits that are set, and so is the one n bits further. n is 1 to 128. */
static struct bits256 and_shifted(const struct bits256 *a, const struct bits256 *b, unsigned n)
{
    struct bits256 out = {{0}};
    unsigned words = n / 64, bits = n % 64;

    for (unsigned w = 0; w + words < GROUP_WORDS; w++) {
        uint64_t low = b->word[w + words] >> bits;
        uint64_t high = bits && w + words + 1 < GROUP_WORDS ? b->word[w + words + 1] << (64 - bits) : 0;
        out.word[w] = a->word[w] & (low | high);
    }
    return out;
}

static bool any_bit(const struct bits256 *a)
{
    return a->word[0] | a->word[1] | a->word[2] | a->word[3];
}

/*
 * The longest run inside a group that begins there, in at most 15 steps: power[i] has the places where 2^i blocks are
 * free. The length is put together from the highest power down.
 */
static unsigned longest_inside(const struct ht_space_map *m, uint64_t group)
{
    enum { POWERS = 9 };
    struct bits256 power[POWERS];
    unsigned top = 0;

    for (unsigned w = 0; w < GROUP_WORDS; w++)
        power[0].word[w] = ~m->taken[group * GROUP_WORDS + w];
    bits_set(power[0].word, 0, begun_before(m, group), false);
    if (!any_bit(&power[0]))
        return 0;
    for (; top + 1 < POWERS; top++) {
        power[top + 1] = and_shifted(&power[top], &power[top], 1u << top);
        if (!any_bit(&power[top + 1]))
            break;
    }
    struct bits256 begins = power[top];
    unsigned longest = 1u << top;
    for (unsigned i = top; i-- > 0;) {
        struct bits256 longer = and_shifted(&begins, &power[i], longest);
        if (!any_bit(&longer))
            continue;
        begins = longer;
        longest += 1u << i;
    }
    return longest;
}

/* ----------------------------------------------------------- groups */

/* Of a group that is broken: with the blocks at the begin of the next one, if that is broken, too. */
static unsigned longest_run(const struct ht_space_map *m, uint64_t group)
{
    unsigned longest = longest_inside(m, group), end = free_at_end(m, group);

    if (!end || group + 1 == m->groups || !joins_others(m, group + 1))
        return longest;
    unsigned across = end + free_at_begin(m, group + 1);
    return (unsigned)ht_min_u64(ht_max_u64(longest, across), HT_GROUP_BLOCKS);
}

static bool is_touched(const struct ht_space_map *m, uint64_t page)
{
    return m->touched[page / 64] >> page % 64 & 1;
}

static void note_touched(struct ht_space_map *m, uint64_t group)
{
    uint64_t page = group / PAGE_GROUPS, mask = 1ull << page % 64;

    m->pages_touched += !(m->touched[page / 64] & mask);
    m->touched[page / 64] |= mask;
}

unsigned ht_space_map_taken(const struct ht_space_map *m, uint64_t group)
{
    unsigned taken = 0;

    for (unsigned w = 0; w < GROUP_WORDS; w++)
        taken += (unsigned)__builtin_popcountll(m->taken[group * GROUP_WORDS + w]);
    return taken;
}

/* Not the last group, if the device ends in it, and none with blocks that never move. */
static bool is_sparse(const struct ht_space_map *m, uint64_t group)
{
    unsigned taken = ht_space_map_taken(m, group);

    return taken && taken <= HT_SPARSE_TAKEN_MAX && (group + 1) * HT_GROUP_BLOCKS <= m->blocks &&
        !ht_free_index_has(&m->index, HT_FREE_FIXED, group);
}

static void index_group(struct ht_space_map *m, uint64_t group)
{
    bool closed = ht_free_index_has(&m->index, HT_FREE_CLOSED, group), whole = !closed && is_whole(m, group);

    ht_free_index_note(&m->index, HT_FREE_SPARSE, group, is_sparse(m, group));
    ht_free_index_set(&m->index, group, whole, whole || closed ? 0 : longest_run(m, group));
}

/* True: the group is whole now and was broken, or the other way round. */
static bool index_changed_group(struct ht_space_map *m, uint64_t group)
{
    bool was_whole = ht_free_index_has(&m->index, HT_FREE_WHOLE, group);

    note_touched(m, group);
    index_group(m, group);
    return was_whole != ht_free_index_has(&m->index, HT_FREE_WHOLE, group);
}

/*
 * The blocks [block, end) changed. Runs of the group before may end in them, if all blocks before them are free, and
 * run on in the group behind, if they reach its border. Groups that are whole, or closed (`joins` changes then), join
 * no others.
 */
static void index_blocks(struct ht_space_map *m, uint64_t block, uint64_t end, bool joins)
{
    uint64_t first = block / HT_GROUP_BLOCKS, last = (end - 1) / HT_GROUP_BLOCKS, next = last + 1;
    bool before = joins || all_free(m, first * HT_GROUP_BLOCKS, block), behind = joins || end % HT_GROUP_BLOCKS == 0;

    for (uint64_t g = first; g <= last; g++) {
        bool changed = index_changed_group(m, g);
        before |= changed && g == first;
        behind |= changed && g == last;
    }
    if (before && first > 0 && !is_taken(m, first * HT_GROUP_BLOCKS - 1) && !is_whole(m, first - 1))
        index_group(m, first - 1);
    if (behind && next < m->groups && !is_taken(m, next * HT_GROUP_BLOCKS) && !is_whole(m, next))
        index_group(m, next);
}

void ht_space_map_set(struct ht_space_map *m, uint64_t block, uint64_t count, bool taken)
{
    bits_set(m->taken, block, block + count, taken);
    m->free_blocks = taken ? m->free_blocks - count : m->free_blocks + count;
    if (!m->index_deferred) {
        index_blocks(m, block, block + count, false);
        return;
    }
    for (uint64_t g = block / HT_GROUP_BLOCKS; g * HT_GROUP_BLOCKS < block + count; g++)
        note_touched(m, g);
}

void ht_space_map_defer_index(struct ht_space_map *m, bool defer)
{
    bool behind = m->index_deferred && !defer;

    m->index_deferred = defer;
    for (uint64_t page = 0; behind && page * PAGE_GROUPS < m->groups; page++)
        for (uint64_t g = page * PAGE_GROUPS; is_touched(m, page) && g < (page + 1) * PAGE_GROUPS && g < m->groups; g++)
            index_group(m, g);
}

void ht_space_map_prefetch(const struct ht_space_map *m, uint64_t block)
{
    uint64_t group = block / HT_GROUP_BLOCKS;

    __builtin_prefetch(&m->taken[block / 64], 1);
    if (m->index_deferred)
        return;
    __builtin_prefetch(&m->index.longest[group], 1);
    __builtin_prefetch(&m->index.level[0][group / 64 * HT_FREE_BITMAPS + HT_FREE_WHOLE], 1);
}

/* ------------------------------------------------------------ a map */

int ht_space_map_init(struct ht_space_map *m, uint64_t blocks)
{
    *m = (struct ht_space_map){.blocks = blocks, .groups = ht_div_up(blocks, HT_GROUP_BLOCKS), .free_blocks = blocks};
    if (blocks == 0)
        return 0;
    m->taken = calloc(m->groups, GROUP_WORDS * sizeof(*m->taken));
    m->touched = calloc(ht_div_up(m->groups, 64 * PAGE_GROUPS), sizeof(*m->touched));
    if (!m->taken || !m->touched || ht_free_index_init(&m->index, m->groups))
        return -ENOMEM;
    uint64_t end = m->groups * HT_GROUP_BLOCKS;
    if (blocks < end) {
        bits_set(m->taken, blocks, end, true);
        index_blocks(m, blocks, end, false);
    }
    m->small_next = blocks;
    return 0;
}

void ht_space_map_destroy(struct ht_space_map *m)
{
    free(m->taken);
    free(m->touched);
    ht_free_index_destroy(&m->index);
}

uint64_t ht_space_map_bytes(const struct ht_space_map *m)
{
    uint64_t page = PAGE_GROUPS * GROUP_WORDS * sizeof(*m->taken) + PAGE_GROUPS / 64 * HT_FREE_WORD_BYTES;

    return m->pages_touched * page;
}

/* A group of the highest class that any has, or HT_NO_GROUP. */
static uint64_t longest_group(const struct ht_space_map *m)
{
    for (unsigned i = HT_FREE_CLASSES; m->groups && i > 0; i--)
        if (m->index.count[i - 1])
            return ht_free_index_next(&m->index, i - 1, 0);
    return HT_NO_GROUP;
}

/* ------------------------------------------------------------- runs */

/* The run that begins at this block of the group. */
static struct ht_run run_at(const struct ht_space_map *m, uint64_t group, uint64_t block)
{
    uint64_t stop = (group + 1) * HT_GROUP_BLOCKS, end = ht_space_map_find(m, block, stop, true);

    if (end == stop && group + 1 < m->groups && joins_others(m, group + 1))
        end += free_at_begin(m, group + 1);
    return (struct ht_run){block, (uint32_t)(end - block)};
}

/* The shortest run of a broken group with at least want blocks; when there is none, one of no blocks. */
static struct ht_run best_run(const struct ht_space_map *m, uint64_t group, uint32_t want)
{
    uint64_t stop = (group + 1) * HT_GROUP_BLOCKS, at = group * HT_GROUP_BLOCKS + begun_before(m, group);
    struct ht_run best = {0, 0};

    while ((at = ht_space_map_find(m, at, stop, false)) < stop) {
        struct ht_run run = run_at(m, group, at);
        if (run.blocks >= want && (!best.blocks || run.blocks < best.blocks))
            best = run;
        at = run.block + run.blocks;
    }
    return best;
}

static bool take_run(struct ht_space_map *m, struct ht_run run, uint32_t blocks, struct ht_run *out)
{
    assert(run.blocks >= blocks);
    *out = (struct ht_run){run.block, blocks};
    ht_space_map_set(m, run.block, blocks, true);
    return true;
}

/* ---------------------------------------------------- whole requests */

static bool take_whole_group(struct ht_space_map *m, struct ht_run *out)
{
    uint64_t group = ht_free_index_next(&m->index, HT_FREE_WHOLE, m->whole_next);

    if (group == HT_NO_GROUP)
        group = ht_free_index_next(&m->index, HT_FREE_WHOLE, 0);
    if (group == HT_NO_GROUP)
        return false;
    m->whole_next = (group + 1) % m->groups;
    return take_run(m, (struct ht_run){group * HT_GROUP_BLOCKS, HT_GROUP_BLOCKS}, HT_GROUP_BLOCKS, out);
}

/* ---------------------------------------------------- small requests */

static bool take_small_run(struct ht_space_map *m, struct ht_run run, uint32_t blocks, struct ht_run *out)
{
    m->small_next = run.block + blocks;
    return take_run(m, run, blocks, out);
}

/* Behind the last one. */
static bool take_behind(struct ht_space_map *m, uint32_t blocks, struct ht_run *out)
{
    uint64_t first = m->small_next, end = first + blocks;

    if (end > m->blocks || !all_free(m, first, end) || !joins_others(m, first / HT_GROUP_BLOCKS) ||
        !joins_others(m, (end - 1) / HT_GROUP_BLOCKS))
        return false;
    return take_small_run(m, (struct ht_run){first, blocks}, blocks, out);
}

/* In the class that has shorter and longer runs: a bounded number of tries. */
static bool take_close(struct ht_space_map *m, uint32_t blocks, struct ht_run *out)
{
    unsigned class = ht_free_class_of(blocks);
    uint64_t group = 0;

    for (unsigned i = 0; i < TRIES_MAX; i++, group++) {
        group = ht_free_index_next(&m->index, class, group);
        if (group == HT_NO_GROUP)
            return false;
        if (ht_free_index_longest(&m->index, group) >= blocks)
            return take_small_run(m, best_run(m, group, blocks), blocks, out);
    }
    return false;
}

static bool take_longer(struct ht_space_map *m, uint32_t blocks, struct ht_run *out)
{
    for (unsigned class = ht_free_class_with(blocks); class <= HT_FREE_LARGEST; class ++)
        if (m->index.count[class])
            return take_small_run(m, best_run(m, ht_free_index_next(&m->index, class, 0), blocks), blocks, out);
    return false;
}

/* With the blocks that are free before it. */
static bool break_group(struct ht_space_map *m, uint32_t blocks, struct ht_run *out)
{
    uint64_t group = ht_div_up(m->small_next, HT_GROUP_BLOCKS), last = ht_free_index_last(&m->index, HT_FREE_WHOLE);

    if (last == HT_NO_GROUP)
        return false;
    if (group >= m->groups || !ht_free_index_has(&m->index, HT_FREE_WHOLE, group))
        group = last - ht_free_index_whole_below(&m->index, last);
    uint32_t before = group > 0 && joins_others(m, group - 1) ? free_at_end(m, group - 1) : 0;
    struct ht_run run = {group * HT_GROUP_BLOCKS - before, before + HT_GROUP_BLOCKS};
    return take_small_run(m, run, blocks, out);
}

bool ht_space_map_take(struct ht_space_map *m, uint32_t blocks, struct ht_run *out)
{
    assert(blocks >= 1 && blocks <= HT_GROUP_BLOCKS && !m->index_deferred);
    if (m->free_blocks < blocks)
        return false;
    if (blocks == HT_GROUP_BLOCKS)
        return take_whole_group(m, out) || take_longer(m, blocks, out);
    return take_behind(m, blocks, out) || take_close(m, blocks, out) || take_longer(m, blocks, out) ||
        break_group(m, blocks, out);
}

/* ----------------------------------------------------------- pieces */

/*
 * Runs of the group that have half of its longest one, while all of a run is needed; the first in any case. Returns
 * how many.
 */
static unsigned take_pieces_of(struct ht_space_map *m, uint64_t group, uint32_t blocks, struct ht_run out[])
{
    uint64_t at = group * HT_GROUP_BLOCKS + begun_before(m, group), stop = (group + 1) * HT_GROUP_BLOCKS;
    uint32_t least = ht_free_index_longest(&m->index, group) / 2;
    unsigned n = 0;

    while (blocks && (at = ht_space_map_find(m, at, stop, false)) < stop) {
        struct ht_run run = run_at(m, group, at);
        at = run.block + run.blocks;
        if (run.blocks < least || (n && run.blocks > blocks))
            continue;
        run.blocks = (uint32_t)ht_min_u64(run.blocks, blocks);
        bits_set(m->taken, run.block, run.block + run.blocks, true);
        m->free_blocks -= run.blocks;
        blocks -= run.blocks;
        out[n++] = run;
    }
    index_blocks(m, out[0].block, out[n - 1].block + out[n - 1].blocks, false);
    return n;
}

struct ahead {
    unsigned class; /* HT_FREE_NONE: nothing was prefetched */
    uint64_t group; /* the last one of the class of which the memory was prefetched */
};

/*
 * Pieces come from groups anywhere on a large device, and each would wait several times for memory that is in no cache.
 * So the memory of some groups that come next is on its way while this one is taken, if so many blocks need them.
 */
static void look_ahead(const struct ht_space_map *m, uint64_t group, uint32_t blocks, struct ahead *ahead)
{
    unsigned longest = ht_free_index_longest(&m->index, group), class = ht_free_class_of(longest);
    unsigned need = (blocks - 1) / longest, most = (unsigned)ht_min_u64(need, GROUPS_AHEAD);

    if (class == ahead->class)
        most = need >= GROUPS_AHEAD;
    if (class != ahead->class || ahead->group < group)
        *ahead = (struct ahead){class, group};
    for (unsigned i = 0; i < most; i++) {
        uint64_t next = ht_free_index_next(&m->index, class, ahead->group + 1);
        if (next == HT_NO_GROUP)
            return;
        ht_free_index_prefetch(&m->index, class, next);
        __builtin_prefetch(&m->taken[next * GROUP_WORDS], 1);
        __builtin_prefetch(&m->taken[next * GROUP_WORDS - 1]);
        ahead->group = next;
    }
}

unsigned ht_space_map_take_pieces(struct ht_space_map *m, uint32_t blocks, struct ht_run out[HT_GROUP_BLOCKS])
{
    struct ahead ahead = {.class = HT_FREE_NONE};
    uint64_t group;
    unsigned n = 0;

    assert(blocks <= HT_GROUP_BLOCKS);
    while (blocks && (group = longest_group(m)) != HT_NO_GROUP) {
        if (n && ht_free_index_longest(&m->index, group) >= blocks)
            break; /* the rest fits into one run: the caller looks for the closest */
        look_ahead(m, group, blocks, &ahead);
        for (unsigned end = n + take_pieces_of(m, group, blocks, &out[n]); n < end; n++)
            blocks -= out[n].blocks;
    }
    return n;
}

/* ---------------------------------------------------- closed groups */

void ht_space_map_set_closed(struct ht_space_map *m, uint64_t group, bool closed)
{
    assert(group < m->groups && !m->index_deferred);
    ht_free_index_note(&m->index, HT_FREE_CLOSED, group, closed);
    index_blocks(m, group * HT_GROUP_BLOCKS, (group + 1) * HT_GROUP_BLOCKS, true);
}

bool ht_space_map_open_all(struct ht_space_map *m)
{
    if (!m->index.count[HT_FREE_CLOSED])
        return false;
    while (m->index.count[HT_FREE_CLOSED])
        ht_space_map_set_closed(m, ht_free_index_next(&m->index, HT_FREE_CLOSED, 0), false);
    return true;
}

void ht_space_map_fix(struct ht_space_map *m, uint64_t block, uint64_t count)
{
    for (uint64_t g = block / HT_GROUP_BLOCKS; g * HT_GROUP_BLOCKS < block + count; g++) {
        ht_free_index_note(&m->index, HT_FREE_FIXED, g, true);
        ht_free_index_note(&m->index, HT_FREE_SPARSE, g, false);
    }
}

/* ---------------------------------------------------------- discard */

void ht_space_map_note_freed(struct ht_space_map *m, uint64_t block, uint64_t count)
{
    for (uint64_t g = block / HT_GROUP_BLOCKS; g * HT_GROUP_BLOCKS < block + count; g++)
        ht_free_index_note(&m->index, HT_FREE_FREED, g, true);
}

/*
 * So many blocks in runs of a group that are long enough. False: out may lack room for all of them, and none is taken.
 */
static bool take_runs_of(struct ht_space_map *m, uint64_t group, uint64_t left, struct ht_run out[], unsigned n_max,
                         unsigned *n)
{
    enum { RUNS_MAX = HT_GROUP_BLOCKS / (HT_DISCARD_BLOCKS_MIN + 1) + 1 };
    uint64_t at = group * HT_GROUP_BLOCKS, first = at, stop = at + HT_GROUP_BLOCKS, end;

    assert(n_max >= RUNS_MAX);
    if (n_max - *n < RUNS_MAX)
        return false;
    for (; (at = ht_space_map_find(m, at, stop, false)) < stop; at = end) {
        end = ht_space_map_find(m, at, stop, true);
        uint64_t most = ht_min_u64(end - at, left);
        struct ht_run *last = *n ? &out[*n - 1] : NULL;
        bool joins = last && last->block + last->blocks == at;
        if (!most || (most < HT_DISCARD_BLOCKS_MIN && !joins))
            continue;
        if (joins)
            last->blocks += (uint32_t)most;
        else
            out[(*n)++] = (struct ht_run){at, (uint32_t)most};
        bits_set(m->taken, at, at + most, true);
        m->free_blocks -= most;
        left -= most;
    }
    index_blocks(m, first, stop, false);
    return true;
}

unsigned ht_space_map_take_freed(struct ht_space_map *m, bool all, uint64_t *from, uint32_t blocks_max,
                                 struct ht_run out[], unsigned n_max)
{
    uint64_t before = m->free_blocks, group = *from;
    unsigned n = 0;

    for (unsigned i = 0; i < DISCARD_GROUPS_MAX; i++, group++) {
        group = all ? group : ht_free_index_next(&m->index, HT_FREE_FREED, group);
        if (group >= m->groups) {
            *from = HT_NO_GROUP;
            return n;
        }
        uint64_t left = blocks_max - (before - m->free_blocks);
        if (left < HT_GROUP_BLOCKS && !n && is_whole(m, group))
            continue;
        if ((left < HT_GROUP_BLOCKS && n) || !take_runs_of(m, group, left, out, n_max, &n))
            break;
        ht_free_index_note(&m->index, HT_FREE_FREED, group, false);
    }
    *from = group;
    return n;
}
