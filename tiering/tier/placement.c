/* SPDX-License-Identifier: Apache-2.0 */
/* placement.c - see placement.h. */
#include "tiering/tier/placement.h"

/* Half of the best share is still fair to a caller that wants to stay. */
#define FAIR_PART 2u

/* Lower is better. */
static unsigned rank_of(const struct ht_place_device *d, unsigned index, uint32_t avoid)
{
    return (d->failing ? 1u : 0u) + (avoid >> index & 1 ? 2u : 0u);
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

/* Among devices with so many blocks the one of the best rank with the largest free share. */
static int find_best(const struct ht_place_device devices[], unsigned count, uint32_t blocks, uint32_t avoid)
{
    int best = -1;

    for (unsigned i = 0; i < count; i++) {
        unsigned rank = rank_of(&devices[i], i, avoid);
        unsigned rank_best = best < 0 ? ~0u : rank_of(&devices[best], (unsigned)best, avoid);
        if (!can_serve(&devices[i], blocks) || rank > rank_best)
            continue;
        if (rank < rank_best || !share_reaches(&devices[best], 1, &devices[i]))
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

int ht_place_choose(const struct ht_place_device devices[], unsigned count, uint32_t blocks, struct ht_alloc_hint hint)
{
    int best = find_best(devices, count, blocks, hint.avoid);

    if (best < 0)
        return find_most(devices, count);
    if (hint.device < 0 || (unsigned)hint.device >= count || !can_serve(&devices[hint.device], blocks))
        return best;
    bool as_good = rank_of(&devices[hint.device], (unsigned)hint.device, hint.avoid) <=
        rank_of(&devices[best], (unsigned)best, hint.avoid);
    return as_good && share_reaches(&devices[hint.device], FAIR_PART, &devices[best]) ? hint.device : best;
}
