/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shares.c - the share of new content that each device gets: tier/placement.h decides, the allocator heeds it.
 *
 * Only what stores with several devices write needs shares. The writers bring them up to date themselves, so no thread
 * wakes for it. A device that the store closed or that does not answer has no share (ht_store_check_device). One of the
 * class capacity has a share once a model uses all paths.
 */
#include "tiering/data/data.h"
#include "tiering/object/context.h"
#include "tiering/data/data_priv.h"

static_assert((int)HT_WEIGHTS_WAYS == (int)HT_DIRECTIONS, "a way is a direction");
static_assert((int)HT_WEIGHTS_WHOLE == (int)HT_PLACE_WHOLE, "shares are of the same whole");

static struct ht_weights_device look_at(const struct ht_store *s, unsigned device) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_weights_device out = {.usable = s->dev[device] && s->data->health[device] < HT_HEALTH_FAILING};
    struct ht_alloc_device space;

    out.usable &= s->objects.any_all_paths || s->layout.device_class[device] == HT_DEVICE_FAST;
    ht_alloc_device(s->alloc, device, &space);
    out.blocks = space.blocks;
    out.free_blocks = space.free_blocks;
    for (unsigned k = 0; s->dev[device] && k < HT_DIRECTIONS; k++) {
        struct ht_rate_totals totals;
        ht_dev_large_totals(s->dev[device], k, &totals);
        out.way[k].bytes = totals.bytes;
        out.way[k].busy_ns = totals.busy_ns;
        out.waiting_ns = ht_max_u64(out.waiting_ns, totals.waiting_ns);
    }
    return out;
}

void ht_shares_update(struct ht_store *s)
{
    struct ht_weights *w = &s->data->weights;
    struct ht_weights_device device[HT_DEVICES_MAX];
    uint32_t share[HT_DEVICES_MAX];
    uint64_t now_ns = s->dev_count > 1 ? ht_now_ns() : 0;

    if (s->dev_count < 2 || !ht_weights_due(w, now_ns))
        return;
    for (unsigned i = 0; i < s->dev_count; i++)
        device[i] = look_at(s, i);
    if (!ht_weights_look(w, now_ns, device, s->dev_count))
        return;
    for (unsigned i = 0; i < s->dev_count; i++)
        share[i] = w->device[i].share;
    ht_alloc_set_shares(s->alloc, share);
}
