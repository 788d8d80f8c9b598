/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/io/gate_policy.h"

#define SECOND_NS UINT64_C(1000000000)
#define LOOK_NS_MIN UINT64_C(200000)

enum { MEAN_OF = 8, HOLD_PART = 20 };

/* ------------------------------------------------------------ urgent requests */

void ht_gate_urgent_begin(struct ht_gate_urgent *u, uint64_t now_ns)
{
    if (u->now++ > 0)
        return;
    uint64_t pause_ns = !u->any ? HT_GATE_PAUSE_NS_MAX : now_ns > u->end_ns ? now_ns - u->end_ns : 0;
    pause_ns = ht_min_u64(pause_ns, HT_GATE_PAUSE_NS_MAX);
    u->pause_ns = u->any ? u->pause_ns - u->pause_ns / MEAN_OF + pause_ns / MEAN_OF : pause_ns;
    u->any = true;
}

void ht_gate_urgent_end(struct ht_gate_urgent *u, uint64_t now_ns)
{
    u->now--;
    u->end_ns = ht_max_u64(u->end_ns, now_ns);
}

/* Have there been none for so long? A clock that went back says nothing: then there were none. */
static bool is_quiet(const struct ht_gate_urgent *u, uint64_t now_ns, uint64_t ns)
{
    return u->now == 0 && (!u->any || now_ns < u->end_ns || now_ns - u->end_ns >= ns);
}

/* ------------------------------------------------------------------- classes */

/* Do so many more bytes keep the bound? One request always does. */
static bool fits(const struct ht_gate_state *st, uint32_t bytes)
{
    double most = (double)st->bytes_per_s * ((double)HT_GATE_BOUND_NS / (double)SECOND_NS);

    if (!st->rate_known)
        most = (double)HT_GATE_UNKNOWN_BYTES;
    return st->permitted_bytes == 0 || (double)st->permitted_bytes + bytes <= most;
}

/* When a planned request looks again: it hears of permits that come back, and not of silence. */
static uint64_t planned_next_ns(const struct ht_gate_state *st, uint32_t bytes, uint64_t now_ns)
{
    if (is_quiet(&st->requests, now_ns, HT_GATE_ALONE_NS) || fits(st, bytes))
        return 0;
    return (st->requests.now > 0 ? now_ns : st->requests.end_ns) + HT_GATE_ALONE_NS;
}

static uint64_t hold_ns(const struct ht_gate_state *st, uint32_t bytes)
{
    uint64_t pause_ns = st->waits.pause_ns;
    double served_ns = (double)bytes * (double)SECOND_NS / (double)ht_max_u64(st->bytes_per_s, 1);

    if (!st->rate_known || (double)pause_ns < 2 * served_ns)
        return HT_GATE_HOLD_NS_MAX;
    return ht_min_u64(pause_ns / HOLD_PART, HT_GATE_HOLD_NS_MAX);
}

/* When a request beside urgent ones is within the share. */
static uint64_t share_next_ns(const struct ht_gate_state *st)
{
    double times_ns = (double)(st->share_bytes * HT_GATE_SHARE) * (double)SECOND_NS;

    if (!st->has_share || !st->rate_known || !st->bytes_per_s || st->background > 0)
        return UINT64_MAX;
    return st->share_ns + (uint64_t)(times_ns / (double)st->bytes_per_s);
}

static uint64_t background_next_ns(const struct ht_gate_state *st, uint32_t bytes, uint64_t now_ns)
{
    uint64_t hold = hold_ns(st, bytes);
    bool alone = is_quiet(&st->waits, now_ns, HT_GATE_ALONE_NS);

    if (!is_quiet(&st->waits, now_ns, hold))
        return st->waits.now > 0 ? now_ns + ht_max_u64(hold, LOOK_NS_MIN) : st->waits.end_ns + hold;
    if (st->background < (alone ? 2u : 1u) && (alone || fits(st, bytes)))
        return 0;
    return now_ns + HT_GATE_ALONE_NS;
}

uint64_t ht_gate_next_ns(const struct ht_gate_state *st, enum ht_io_class io_class, uint32_t bytes, uint64_t since_ns,
                         uint64_t now_ns)
{
    bool planned = io_class == HT_IO_PLANNED;
    uint64_t most_ns = planned ? HT_GATE_PLANNED_WAIT_NS_MAX : HT_GATE_BACKGROUND_WAIT_NS_MAX;

    if (io_class == HT_IO_URGENT || now_ns < since_ns || now_ns - since_ns >= most_ns)
        return 0;
    uint64_t at_ns = planned ? planned_next_ns(st, bytes, now_ns) : background_next_ns(st, bytes, now_ns);
    uint64_t share_ns = planned ? UINT64_MAX : share_next_ns(st);
    return now_ns >= share_ns ? 0 : ht_min_u64(ht_min_u64(at_ns, share_ns), since_ns + most_ns);
}
