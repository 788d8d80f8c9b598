/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/pace.h"

#define LOOK_NS 50000000u    /* how long a measurement of other work counts */
#define WORTH_NS 2000000u    /* shorter waits are put off */
#define CATCH_UP_NS 20000000 /* unused time is no credit beyond this */

enum { BUSY_SHARE = 4 };

static void measure(struct ht_pace *p, uint64_t now_ns, uint64_t others_bytes)
{
    if (p->seen_ns && now_ns - p->seen_ns < LOOK_NS)
        return;
    p->busy = p->seen_ns && others_bytes > p->seen_bytes;
    p->seen_bytes = others_bytes;
    p->seen_ns = now_ns;
}

/* Without overflow: a piece is far below a second's worth of 2^64 ns, a rate may be anything. */
static uint64_t duration_ns(uint64_t bytes, uint64_t rate_bytes)
{
    return (uint64_t)((double)bytes * 1e9 / (double)ht_max_u64(rate_bytes, 1));
}

uint64_t ht_pace_wait_ns(struct ht_pace *p, uint64_t now_ns, uint64_t bytes, uint64_t others_bytes)
{
    measure(p, now_ns, others_bytes);
    if (p->next_ns + CATCH_UP_NS < now_ns)
        p->next_ns = now_ns - CATCH_UP_NS;
    p->next_ns += duration_ns(bytes, p->busy ? p->rate_bytes / BUSY_SHARE : p->rate_bytes);
    return p->next_ns > now_ns + WORTH_NS ? p->next_ns - now_ns : 0;
}
