/* SPDX-License-Identifier: Apache-2.0 */
/*
 * endurance.c - what the store writes in a day, beside its budget.
 *
 * Everything counts that the devices took: content, log and superblocks, of all devices together.
 */
#include "tiering/data/data.h"
#include "tiering/base/event.h"
#include "tiering/api/stats.h"
#include "tiering/object/context.h"
#include "tiering/data/data_priv.h"

void ht_endurance_check(struct ht_store *s)
{
    struct ht_endurance *e = &s->data->endurance;
    uint64_t now_ns = ht_now_ns();

    ht_endurance_look(e, now_ns, ht_devs_totals(s->dev, s->dev_count).written_bytes);
    if (ht_endurance_must_warn(e, now_ns))
        ht_event(HT_EVENT_ENDURANCE, NULL,
                 "the store wrote %llu bytes to its devices in the last 24 hours; the attribute endurance allows %llu",
                 (unsigned long long)ht_endurance_day_bytes(e), (unsigned long long)e->budget_bytes);
}

void ht_endurance_stats(struct ht_store *s, struct ht_store_stats *out)
{
    const struct ht_endurance *e = &s->data->endurance;

    ht_endurance_check(s);
    out->day_written_bytes = ht_endurance_day_bytes(e);
    out->endurance_bytes = e->budget_bytes;
}

void ht_store_set_endurance(struct ht_store *s, uint64_t day_bytes)
{
    ht_store_lock(s);
    ht_endurance_set(&s->data->endurance, day_bytes);
    ht_store_unlock(s);
}
