/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/placement.h"

/* Half of the best share is still fair to a caller that wants to stay. */
#define FAIR_PART 2u

/* Lower is better. */
static unsigned rank_of(const struct ht_place_device *d, unsigned index, const struct ht_alloc_hint *hint)
{
    return (d->capacity && !hint->all_paths ? 1u : 0u) + (d->failing ? 2u : 0u) + (hint->avoid >> index & 1 ? 4u : 0u);
}

/* a's free share times factor against b's; sizes are below 2^48 blocks, so products need more than 64 bits. */
static bool share_reaches(const struct ht_place_device *a, unsigned factor, const struct ht_place_device *b)
{
    return (unsigned __int128)a->free_blocks * factor * b->blocks >= (unsigned __int128)b->free_blocks * a->blocks;
}

static bool can_serve(const struct ht_place_device *d, uint32_t blocks)
{
    return !d->offline && d->free_blocks > 0 && d->free_blocks >= blocks;
}

/* Takes part in the division by shares. */
static bool has_share(const struct ht_place_device *d)
{
    return d->share > 0;
}

/* Its credit once the blocks are divided. */
static int64_t credit_with(const struct ht_place_device *d, uint32_t blocks)
{
    return d->credit + (int64_t)d->share * blocks;
}

/* Both have the same rank. */
static bool is_better(const struct ht_place_device *a, const struct ht_place_device *b, uint32_t blocks)
{
    if (has_share(a) != has_share(b))
        return has_share(a);
    return has_share(a) ? credit_with(a, blocks) > credit_with(b, blocks) : !share_reaches(b, 1, a);
}

/* Among devices with so many blocks the one of the best rank that is next. */
static int find_best(const struct ht_place_device devices[], unsigned count, uint32_t blocks,
                     const struct ht_alloc_hint *hint)
{
    int best = -1;

    for (unsigned i = 0; i < count; i++) {
        unsigned rank = rank_of(&devices[i], i, hint);
        unsigned rank_best = best < 0 ? ~0u : rank_of(&devices[best], (unsigned)best, hint);
        if (!can_serve(&devices[i], blocks) || rank > rank_best)
            continue;
        if (rank < rank_best || is_better(&devices[i], &devices[best], blocks))
            best = (int)i;
    }
    return best;
}

/* No device has enough: pieces, the largest heap first. */
static int find_most(const struct ht_place_device devices[], unsigned count)
{
    int most = -1;

    for (unsigned i = 0; i < count; i++)
        if (can_serve(&devices[i], 1) && (most < 0 || devices[i].free_blocks > devices[most].free_blocks))
            most = (int)i;
    return most;
}

/* May content stay on a device that is as good as the best one? */
static bool may_stay(const struct ht_place_device *d, const struct ht_place_device *best, bool movable)
{
    if (!has_share(best))
        return share_reaches(d, FAIR_PART, best);
    return !movable || (has_share(d) && d->credit >= -(int64_t)HT_PLACE_SLACK_BLOCKS * HT_PLACE_WHOLE);
}

int ht_place_choose(const struct ht_place_device devices[], unsigned count, uint32_t blocks, struct ht_alloc_hint hint)
{
    int best = find_best(devices, count, blocks, &hint);

    if (best < 0)
        return find_most(devices, count);
    if (hint.device < 0 || (unsigned)hint.device >= count || !can_serve(&devices[hint.device], blocks))
        return best;
    bool as_good =
        rank_of(&devices[hint.device], (unsigned)hint.device, &hint) <= rank_of(&devices[best], (unsigned)best, &hint);
    return as_good && may_stay(&devices[hint.device], &devices[best], hint.movable) ? hint.device : best;
}

/* As good as the chosen device, and able to take the blocks. */
static bool takes_part(const struct ht_place_device devices[], unsigned i, uint32_t blocks,
                       const struct ht_alloc_hint *hint, int chosen)
{
    return has_share(&devices[i]) && can_serve(&devices[i], blocks) &&
        rank_of(&devices[i], i, hint) <= rank_of(&devices[chosen], (unsigned)chosen, hint);
}

void ht_place_charge(struct ht_place_device devices[], unsigned count, uint32_t blocks, struct ht_alloc_hint hint,
                     int chosen)
{
    uint64_t all = 0;
    int64_t left = (int64_t)blocks * HT_PLACE_WHOLE;

    if (chosen < 0 || !takes_part(devices, (unsigned)chosen, blocks, &hint, chosen))
        return;
    for (unsigned i = 0; i < count; i++)
        all += takes_part(devices, i, blocks, &hint, chosen) ? devices[i].share : 0;
    devices[chosen].credit -= left;
    for (unsigned i = 0; i < count; i++) {
        if (!takes_part(devices, i, blocks, &hint, chosen))
            continue;
        int64_t part = (int64_t)((uint64_t)blocks * HT_PLACE_WHOLE * devices[i].share / all);
        devices[i].credit += part;
        left -= part;
    }
    devices[chosen].credit += left; /* of rounding: the sum of all credits stays */
}
