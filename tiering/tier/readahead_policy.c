/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/readahead_policy.h"

enum {
    IN_FLIGHT = 8,    /* requests that may overtake each other */
    FIRST_UNITS = 2,  /* the window when it opens */
    LONG_UNITS = 2,   /* a run that is a stream wherever it began */
    FORGET_UNITS = 64 /* of a run only so much counts */
};

#define MIRROR (1ull << 62) /* beyond all offsets */

static uint64_t gaps(const struct ht_readahead_policy *st)
{
    return st->hi - st->lo - st->seen;
}

/* Does it belong to the run? */
static bool goes_on(const struct ht_readahead_policy *st, uint64_t off, uint64_t len)
{
    uint64_t slack = IN_FLIGHT * len;

    if (!st->seen || off + slack < st->hi || off > st->hi + slack)
        return false;
    return gaps(st) <= slack;
}

/* Only a part of a long run counts, so that gaps show soon. */
static void forget(struct ht_readahead_policy *st, uint64_t unit)
{
    uint64_t most = FORGET_UNITS * unit;

    if (st->hi - st->lo <= most)
        return;
    uint64_t left = most / 2, missing = ht_min_u64(gaps(st), left);
    st->lo = st->hi - left;
    st->from = ht_max_u64(st->from, st->lo);
    st->seen = left - missing;
}

/* A run that went on farther backwards is one of the other direction. */
static bool is_stream(const struct ht_readahead_policy *st, uint64_t unit)
{
    if (st->hi - st->from <= st->from - st->lo)
        return false;
    return !gaps(st) && st->seen >= (st->lo ? LONG_UNITS * unit : unit / 2);
}

uint64_t ht_readahead_policy_note(struct ht_readahead_policy *st, uint64_t off, uint64_t len, uint64_t unit,
                                  uint64_t most)
{
    if (!goes_on(st, off, len)) {
        *st = (struct ht_readahead_policy){.lo = off, .hi = off + len, .from = off, .seen = len};
    } else {
        st->hi = ht_max_u64(st->hi, off + len);
        st->lo = ht_min_u64(st->lo, off);
        st->seen = ht_min_u64(st->seen + len, st->hi - st->lo);
        forget(st, unit);
    }
    if (!st->window && is_stream(st, unit)) {
        st->window = FIRST_UNITS * unit;
        st->grow_at = st->hi + st->window;
    } else if (st->window && st->hi >= st->grow_at) {
        st->window *= 2;
        st->grow_at = st->hi + st->window;
    }
    st->window = ht_min_u64(st->window, ht_max_u64(most, unit));
    return st->window ? st->hi + st->window : 0;
}

void ht_readahead_policy_shrink(struct ht_readahead_policy *st, uint64_t unit)
{
    st->window = ht_max_u64(st->window / 2, unit);
    st->grow_at = st->hi + 4 * st->window;
}

struct ht_readahead_target ht_readahead_both_note(struct ht_readahead_both *st, uint64_t off, uint64_t len,
                                                  uint64_t unit, uint64_t most)
{
    uint64_t above = ht_readahead_policy_note(&st->up, off, len, unit, most);
    uint64_t below = ht_readahead_policy_note(&st->down, MIRROR - off - len, len, unit, most);

    if (below && (!above || st->down.hi - st->down.from > st->up.hi - st->up.from))
        return (struct ht_readahead_target){true, true, below < MIRROR ? MIRROR - below : 0};
    return (struct ht_readahead_target){above != 0, false, above};
}

uint64_t ht_readahead_both_low(const struct ht_readahead_both *st)
{
    return MIRROR - st->down.hi;
}
