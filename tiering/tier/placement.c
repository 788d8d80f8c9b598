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

/* ------------------------------------------------------------------ shares */

#define NEAR 0.25     /* a difference that may be noise */
#define FOLLOW 0.25   /* part of a small difference that an estimate follows in one sample */
#define FAR 0.5       /* a difference that is none */
#define FAST 0.5      /* of a larger one */
#define FIRST 3.0     /* a first estimate is at most so many times what the device moves */
#define REACH 0.1     /* an estimate grows to so much more than what the device moves */
#define REACH_MAX 1.0 /* once it has proven several in a row */
#define BUSY 0.9      /* part of all time: the device cannot do more */
#define BYTES_PER_S_MAX 1e18

enum { CHANGE_PART = 24, FULL_PART = 4 };

bool ht_weights_due(const struct ht_weights *w, uint64_t now_ns)
{
    return !w->begun || now_ns < w->looked_ns || now_ns - w->looked_ns >= HT_WEIGHTS_PERIOD_NS;
}

/* ------------------------------------------------------------------ estimates */

static void prove(struct ht_weights_way *e, double speed, double reach)
{
    e->reach = reach < REACH_MAX ? reach : REACH_MAX;
    e->proven = speed;
}

static void grow(struct ht_weights_way *e, double busy_speed, double speed)
{
    if (speed >= busy_speed * BUSY)
        prove(e, speed, REACH);
    else if (speed >= e->proven * (1 + e->reach / 2))
        prove(e, speed, e->reach * 2);
    double most = speed * (1 + e->reach);
    if (most > busy_speed)
        most = busy_speed;
    if (most > e->bytes_per_s)
        e->bytes_per_s += (most - e->bytes_per_s) * FAST;
}

/*
 * busy_speed: bytes over busy time, the most that the device may be able to do; speed: over the time in which the
 * busiest device was in use that way, what it does. back: the other direction.
 */
static void follow(struct ht_weights_way *e, const struct ht_weights_way *back, double busy_speed, double speed)
{
    double was = e->bytes_per_s, first = speed * FIRST;

    if (back->known && back->bytes_per_s > first)
        first = back->bytes_per_s;
    if (!e->known || (busy_speed > 0 && was <= 0)) {
        e->bytes_per_s = busy_speed < first ? busy_speed : first;
        e->dropped_from = 0;
        prove(e, speed, REACH);
    } else if (busy_speed < was) {
        bool again = e->dropped_from > 0;
        bool drops = busy_speed < (again ? e->dropped_from : was) * (1 - FAR);
        double part = drops && again ? 1 : busy_speed < was * (1 - NEAR) ? FAST : FOLLOW;
        e->bytes_per_s += (busy_speed - was) * part;
        e->dropped_from = !drops ? 0 : again ? busy_speed : was;
        prove(e, speed, REACH);
    } else {
        e->dropped_from = 0;
        grow(e, busy_speed, speed);
    }
    e->known = true;
}

static double per_second(uint64_t bytes, uint64_t ns)
{
    double speed = (double)bytes / (double)ht_max_u64(ns, 1) * 1e9;

    return speed < BYTES_PER_S_MAX ? speed : BYTES_PER_S_MAX;
}

static bool is_whole(uint64_t bytes, uint64_t busy_ns, uint64_t ns)
{
    return bytes >= HT_WEIGHTS_SAMPLE_BYTES || busy_ns >= HT_WEIGHTS_SAMPLE_NS ||
        (bytes >= HT_WEIGHTS_FEW_BYTES && ns >= HT_WEIGHTS_FEW_NS);
}

/* What a direction of a device has moved up to a look. */
struct moved {
    uint64_t now_ns, bytes, busy_ns;
    uint64_t use_ns;   /* how long devices were in use in this direction */
    uint64_t store_ns; /* in both */
};

static bool goes_on(const struct ht_weights_way *e, const struct moved *m)
{
    return e->seen_ns && m->now_ns >= e->seen_ns && m->bytes >= e->seen_bytes && m->busy_ns >= e->seen_busy_ns;
}

/* Time in which no device had a request of this direction says nothing. */
static uint64_t time_in_use(const struct ht_weights_way *e, const struct moved *m)
{
    uint64_t ns = ht_min_u64(m->now_ns - e->seen_ns, m->use_ns - e->seen_use_ns);

    return ht_max_u64(ns, m->busy_ns - e->seen_busy_ns);
}

static void look_at_way(struct ht_weights_way *e, const struct ht_weights_way *back, const struct moved *m)
{
    uint64_t bytes = m->bytes - e->seen_bytes, busy_ns = m->busy_ns - e->seen_busy_ns;

    if (goes_on(e, m)) {
        if (busy_ns > 0 && is_whole(bytes, busy_ns, m->now_ns - e->seen_ns))
            follow(e, back, per_second(bytes, busy_ns), per_second(bytes, time_in_use(e, m)));
        else if (m->store_ns - e->seen_store_ns >= HT_WEIGHTS_FORGET_NS)
            e->known = false;
        else
            return;
    }
    e->seen_ns = m->now_ns;
    e->seen_bytes = m->bytes;
    e->seen_busy_ns = m->busy_ns;
    e->seen_use_ns = m->use_ns;
    e->seen_store_ns = m->store_ns;
}

/* Adds the time in which the busiest device was in use that way since the last look. Returns the sum. */
static uint64_t add_use(struct ht_weights *w, const struct ht_weights_device devices[], unsigned count, unsigned k)
{
    uint64_t most = 0;

    for (unsigned i = 0; i < count; i++) {
        uint64_t busy_ns = devices[i].way[k].busy_ns, was = w->device[i].way[k].last_busy_ns;
        most = ht_max_u64(most, busy_ns > was ? busy_ns - was : 0);
        w->device[i].way[k].last_busy_ns = busy_ns;
    }
    return w->use_ns[k] += most;
}

static void look_at_ways(struct ht_weights *w, uint64_t now_ns, const struct ht_weights_device devices[],
                         unsigned count)
{
    uint64_t use_ns[HT_WEIGHTS_WAYS], store_ns = 0;

    for (unsigned k = 0; k < HT_WEIGHTS_WAYS; k++)
        store_ns += use_ns[k] = add_use(w, devices, count, k);
    for (unsigned i = 0; i < count; i++) {
        for (unsigned k = 0; k < HT_WEIGHTS_WAYS; k++) {
            const struct moved m = {now_ns, devices[i].way[k].bytes, devices[i].way[k].busy_ns, use_ns[k], store_ns};
            look_at_way(&w->device[i].way[k], &w->device[i].way[!k], &m);
        }
    }
}

/* --------------------------------------------------------------------- shares */

static bool is_measured(const struct ht_weights_estimate *e)
{
    return e->way[0].known || e->way[1].known;
}

static bool takes_content(const struct ht_weights_device *d)
{
    return d->usable && d->blocks > 0 && d->waiting_ns < HT_WEIGHTS_STALL_NS;
}

/* Bits of the directions that all measured devices have: only these compare them. If there is none: all. */
static unsigned common_ways(const struct ht_weights *w, const struct ht_weights_device devices[], unsigned count)
{
    unsigned ways = (1u << HT_WEIGHTS_WAYS) - 1, all = ways;

    for (unsigned i = 0; i < count; i++)
        for (unsigned k = 0; k < HT_WEIGHTS_WAYS; k++)
            if (takes_content(&devices[i]) && is_measured(&w->device[i]) && !w->device[i].way[k].known)
                ways &= ~(1u << k);
    return ways ? ways : all;
}

/* An update reads and writes at once, as many bytes each way: the slower direction decides. */
static double bandwidth(const struct ht_weights_estimate *e, unsigned ways)
{
    double slower = BYTES_PER_S_MAX;

    for (unsigned k = 0; k < HT_WEIGHTS_WAYS; k++)
        if ((ways >> k & 1) && e->way[k].known && e->way[k].bytes_per_s < slower)
            slower = e->way[k].bytes_per_s;
    return slower;
}

static double free_factor(const struct ht_weights_device *d)
{
    double part = (double)d->free_blocks * FULL_PART / (double)d->blocks;

    return part < 1 ? part : 1;
}

/* The sum of weights; 0: there are none. */
static double weigh(const struct ht_weights *w, const struct ht_weights_device devices[], unsigned count,
                    double weight[])
{
    unsigned ways = common_ways(w, devices, count), measured = 0;
    double sum = 0, mean, all = 0;

    for (unsigned i = 0; i < count; i++) {
        if (!takes_content(&devices[i]) || !is_measured(&w->device[i]))
            continue;
        weight[i] = bandwidth(&w->device[i], ways);
        sum += weight[i];
        measured++;
    }
    if (!measured)
        return 0;
    mean = sum > 0 ? sum / measured : 1;
    for (unsigned i = 0; i < count; i++) {
        if (!takes_content(&devices[i]))
            continue;
        double least = (sum > 0 ? sum : 1) / HT_WEIGHTS_LEAST;
        weight[i] = !is_measured(&w->device[i]) ? mean : weight[i] > least ? weight[i] : least;
        weight[i] *= free_factor(&devices[i]);
        all += weight[i];
    }
    return all;
}

static void divide(const double weight[], double all, unsigned count, uint32_t out_share[])
{
    uint32_t left = HT_WEIGHTS_WHOLE;
    unsigned largest = 0;

    for (unsigned i = 0; i < count; i++) {
        out_share[i] = (uint32_t)(weight[i] / all * HT_WEIGHTS_WHOLE);
        left -= out_share[i];
        if (weight[i] > weight[largest])
            largest = i;
    }
    out_share[largest] += left;
}

static bool differs(uint32_t is, uint32_t wanted)
{
    uint32_t by = is > wanted ? is - wanted : wanted - is;

    return (is == 0) != (wanted == 0) || by > is / CHANGE_PART;
}

bool ht_weights_look(struct ht_weights *w, uint64_t now_ns, const struct ht_weights_device devices[], unsigned count)
{
    double weight[HT_DEVICES_MAX] = {0};
    uint32_t share[HT_DEVICES_MAX] = {0};
    bool changed = false;

    w->begun = true;
    w->looked_ns = now_ns;
    look_at_ways(w, now_ns, devices, count);
    double all = weigh(w, devices, count, weight);
    if (all > 0)
        divide(weight, all, count, share);
    for (unsigned i = 0; i < count; i++)
        changed |= differs(w->device[i].share, share[i]);
    for (unsigned i = 0; changed && i < count; i++)
        w->device[i].share = share[i];
    return changed;
}
