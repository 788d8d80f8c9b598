/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/endurance.h"

void ht_endurance_set(struct ht_endurance *e, uint64_t budget_bytes)
{
    if (e->budget_bytes != budget_bytes)
        e->warned = false;
    e->budget_bytes = budget_bytes;
}

void ht_endurance_look(struct ht_endurance *e, uint64_t now_ns, uint64_t written_bytes)
{
    if (!e->begun)
        e->begun_ns = now_ns;
    e->begun = true;
    uint64_t hour = now_ns > e->begun_ns ? (now_ns - e->begun_ns) / HT_ENDURANCE_HOUR_NS : 0;
    if (hour >= e->hour + HT_ENDURANCE_HOURS)
        memset(e->hour_bytes, 0, sizeof(e->hour_bytes));
    else
        for (uint64_t i = e->hour + 1; i <= hour; i++)
            e->hour_bytes[i % HT_ENDURANCE_HOURS] = 0;
    e->hour = ht_max_u64(e->hour, hour); /* a clock that went back changes nothing */
    if (written_bytes > e->seen_bytes)
        e->hour_bytes[e->hour % HT_ENDURANCE_HOURS] += written_bytes - e->seen_bytes;
    e->seen_bytes = written_bytes;
}

uint64_t ht_endurance_day_bytes(const struct ht_endurance *e)
{
    uint64_t bytes = 0;

    for (unsigned i = 0; i < HT_ENDURANCE_HOURS; i++)
        bytes += e->hour_bytes[i];
    return bytes;
}

bool ht_endurance_must_warn(struct ht_endurance *e, uint64_t now_ns)
{
    if (e->budget_bytes == 0 || ht_endurance_day_bytes(e) <= e->budget_bytes)
        return false;
    if (e->warned && now_ns < e->warned_ns + HT_ENDURANCE_HOURS * HT_ENDURANCE_HOUR_NS)
        return false;
    e->warned = true;
    e->warned_ns = now_ns;
    return true;
}
