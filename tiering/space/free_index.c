/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/space/space_map.h"

enum { EXACT = 8, EXACT_LOG = 3, PARTS_LOG = 2, PARTS = 1 << PARTS_LOG }; /* classes of single lengths; of one power */

/* ------------------------------------------------------------ classes */

unsigned ht_free_class_of(unsigned blocks)
{
    assert(blocks >= 1 && blocks <= HT_GROUP_BLOCKS);
    if (blocks < EXACT)
        return blocks - 1;
    unsigned log = 31 - (unsigned)__builtin_clz(blocks);
    return EXACT - 1 + (log - EXACT_LOG) * PARTS + (blocks >> (log - PARTS_LOG)) % PARTS;
}

unsigned ht_free_class_min(unsigned class)
{
    assert(class < HT_FREE_CLASSES);
    if (class >= HT_FREE_LARGEST)
        return HT_GROUP_BLOCKS;
    if (class < EXACT - 1)
        return class + 1;
    unsigned above = class - (EXACT - 1);
    return (PARTS + above % PARTS) << (above / PARTS + EXACT_LOG - PARTS_LOG);
}

unsigned ht_free_class_with(unsigned blocks)
{
    unsigned class = ht_free_class_of(blocks);

    return class + (ht_free_class_min(class) < blocks);
}

/* ------------------------------------------------------------- bitmaps */

static uint64_t *word_at(const struct ht_free_index *x, unsigned level, unsigned class, uint64_t word)
{
    return &x->level[level][word * HT_FREE_BITMAPS + class];
}

static uint64_t flip_of(unsigned class)
{
    return class == HT_FREE_WHOLE ? ~0ull : 0;
}

static uint64_t word_get(const struct ht_free_index *x, unsigned level, unsigned class, uint64_t word)
{
    return *word_at(x, level, class, word) ^ flip_of(class);
}

bool ht_free_index_has(const struct ht_free_index *x, unsigned class, uint64_t group)
{
    return x->count[class] && word_get(x, 0, class, group / 64) >> group % 64 & 1;
}

static void put(struct ht_free_index *x, unsigned class, uint64_t group, bool in)
{
    uint64_t at = group;

    x->count[class] += in ? 1 : UINT64_MAX;
    for (unsigned level = 0; level < x->levels; level++) {
        uint64_t *word = word_at(x, level, class, at / 64), before = *word ^ flip_of(class);
        uint64_t after = in ? before | 1ull << at % 64 : before & ~(1ull << at % 64);
        *word = after ^ flip_of(class);
        if (!before == !after)
            return;
        at /= 64;
    }
}

int ht_free_index_init(struct ht_free_index *x, uint64_t groups)
{
    assert(groups >= 1);
    *x = (struct ht_free_index){.groups = groups, .count[HT_FREE_WHOLE] = groups};
    x->longest = calloc(groups, sizeof(*x->longest));
    bool complete = x->longest;
    for (uint64_t bits = groups; complete && (bits > 1 || !x->levels); bits = x->words[x->levels++]) {
        assert(x->levels < HT_FREE_LEVELS_MAX);
        x->words[x->levels] = ht_div_up(bits, 64);
        x->level[x->levels] = calloc(x->words[x->levels] * HT_FREE_BITMAPS, sizeof(uint64_t));
        complete = x->level[x->levels];
        if (complete && bits % 64) /* the bits beyond the end are clear */
            *word_at(x, x->levels, HT_FREE_WHOLE, bits / 64) = ~0ull << bits % 64;
    }
    if (complete)
        return 0;
    ht_free_index_destroy(x);
    return -ENOMEM;
}

void ht_free_index_destroy(struct ht_free_index *x)
{
    free(x->longest);
    for (unsigned level = 0; level < HT_FREE_LEVELS_MAX; level++)
        free(x->level[level]);
    *x = (struct ht_free_index){0};
}

/* -------------------------------------------------------------- groups */

unsigned ht_free_index_longest(const struct ht_free_index *x, uint64_t group)
{
    return ht_free_index_has(x, HT_FREE_WHOLE, group) ? HT_GROUP_BLOCKS : x->longest[group];
}

static unsigned class_at(const struct ht_free_index *x, uint64_t group)
{
    if (x->longest[group])
        return ht_free_class_of(x->longest[group]);
    return ht_free_index_has(x, HT_FREE_WHOLE, group) ? HT_FREE_WHOLE : HT_FREE_NONE;
}

void ht_free_index_set(struct ht_free_index *x, uint64_t group, bool whole, unsigned longest)
{
    unsigned was = class_at(x, group);
    unsigned is = whole ? HT_FREE_WHOLE : longest ? ht_free_class_of(longest) : HT_FREE_NONE;

    x->longest[group] = whole ? 0 : (uint16_t)longest;
    if (was == is)
        return;
    if (was != HT_FREE_NONE)
        put(x, was, group, false);
    if (is != HT_FREE_NONE)
        put(x, is, group, true);
}

void ht_free_index_note(struct ht_free_index *x, unsigned bitmap, uint64_t group, bool in)
{
    assert(bitmap >= HT_FREE_CLASSES && bitmap < HT_FREE_BITMAPS);
    if (ht_free_index_has(x, bitmap, group) != in)
        put(x, bitmap, group, in);
}

/* Upwards until a word has a bit at or after the place, then down to its first group. */
uint64_t ht_free_index_next(const struct ht_free_index *x, unsigned class, uint64_t from)
{
    uint64_t at = from;

    for (unsigned level = 0; level < x->levels && at / 64 < x->words[level]; level++) {
        uint64_t word = word_get(x, level, class, at / 64) & (~0ull << at % 64);
        if (word) {
            at = at / 64 * 64 + (unsigned)__builtin_ctzll(word);
            while (level-- > 0)
                at = at * 64 + (unsigned)__builtin_ctzll(word_get(x, level, class, at));
            return at;
        }
        at = at / 64 + 1;
    }
    return HT_NO_GROUP;
}

void ht_free_index_prefetch(const struct ht_free_index *x, unsigned class, uint64_t group)
{
    enum { WORDS_AHEAD = 4 };
    uint64_t word = group / 64, ahead = word + WORDS_AHEAD;

    __builtin_prefetch(&x->longest[group], 1);
    __builtin_prefetch(word_at(x, 0, HT_FREE_WHOLE, word), 1);
    __builtin_prefetch(word_at(x, 0, HT_FREE_SPARSE, word), 1);
    if (ahead < x->words[0])
        __builtin_prefetch(word_at(x, 0, class, ahead), 1);
}

uint64_t ht_free_index_last(const struct ht_free_index *x, unsigned class)
{
    uint64_t at = 0;

    if (!x->count[class])
        return HT_NO_GROUP;
    for (unsigned level = x->levels; level-- > 0;)
        at = at * 64 + 63 - (unsigned)__builtin_clzll(word_get(x, level, class, at));
    return at;
}

unsigned ht_free_index_whole_below(const struct ht_free_index *x, uint64_t group)
{
    uint64_t broken = ~word_get(x, 0, HT_FREE_WHOLE, group / 64) & ((1ull << group % 64) - 1);

    return (unsigned)(group % 64) - (broken ? 64 - (unsigned)__builtin_clzll(broken) : 0);
}

static_assert(EXACT - 1 + (8 - EXACT_LOG) * PARTS == HT_FREE_LARGEST, "256 has a class of its own");
