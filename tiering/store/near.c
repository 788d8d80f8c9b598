/* SPDX-License-Identifier: Apache-2.0 */
/*
 * near.c - which memory is near which device.
 *
 * With devices on several NUMA nodes the tier and the staging pool are divided among these, as their devices are large. An image lies
 * near the device that its chunk is stored on. One that is stored nowhere yet gets a device in turn when its image is made, and is
 * written there while that is fair to the others (struct ht_place_wish). All of this is a wish: memory that is free elsewhere is used
 * before anything has to go.
 */
#include "tiering/base/log.h"
#include "tiering/store/store_priv.h"

static_assert(HT_DEVICES_MAX <= HT_NODES_MAX, "devices take turns as nodes do");

int ht_store_find_nodes(struct ht_store *s)
{
    int asked = s->opts.numa_node;
    if (asked >= 0 && !ht_node_exists(asked)) {
        ht_error("NUMA node %d does not exist on this machine", asked);
        return -EINVAL;
    }
    if (asked >= 0)
        ht_nodes_add(&s->nodes, asked, 1);
    for (unsigned i = 0; asked == HT_NUMA_AUTO && i < s->dev_count; i++)
        if (s->dev[i])
            ht_nodes_add(&s->nodes, ht_dev_numa_node(s->dev[i]), s->sb.device_bytes[i]);
    for (unsigned i = 0; i < s->dev_count; i++) {
        s->near[i] = HT_NEAR_ANY;
        if (s->nodes.count > 1 && s->dev[i]) {
            s->near[i] = (int8_t)ht_nodes_find(&s->nodes, ht_dev_numa_node(s->dev[i]));
            ht_nodes_add(&s->homes, (int)i, s->sb.device_bytes[i]);
        }
    }
    return 0;
}

int ht_ref_near(const struct ht_store *s, const struct ht_ref *ref)
{
    return ht_ref_lost(ref) ? HT_NEAR_ANY : s->near[ht_ref_extent(ref, 0).device];
}

/* A device that takes a chunk, in turn. */
static int next_home(struct ht_store *s, uint32_t bytes)
{
    int place = ht_nodes_turn(&s->homes, s->home_credit);
    struct ht_place_wish wish = {.hint = s->homes.node[place]};
    return ht_alloc_choose(s->alloc, (uint32_t)(bytes / HT_BLOCK_BYTES), wish);
}

/* The device that holds it, or -1. */
static int device_of(struct ht_chunk *c)
{
    const struct ht_ref *ref = ht_chunk_ref(c);
    return ref && !ht_ref_lost(ref) ? (int)ht_ref_extent(ref, 0).device : -1;
}

int ht_chunk_home(const struct ht_store *s, const struct ht_chunk *c)
{
    return c->slot == HT_SLOT_NONE ? -1 : ht_arena_image(s->arena, c->slot)->home - 1;
}

int ht_chunk_near_now(const struct ht_store *s, struct ht_chunk *c)
{
    int device = device_of(c);
    if (device < 0)
        device = ht_chunk_home(s, c);
    return device < 0 ? HT_NEAR_ANY : s->near[device];
}

int ht_chunk_near(struct ht_obj *o, struct ht_chunk *c, uint8_t *home)
{
    struct ht_store *s = o->s;
    int device = -1;
    if (s->nodes.count > 1)
        device = ht_chunk_ref(c) ? device_of(c) : next_home(s, ht_obj_bytes_per_chunk(o));
    *home = (uint8_t)(device + 1);
    return device < 0 ? HT_NEAR_ANY : s->near[device];
}

uint8_t ht_chunk_home_stored(const struct ht_store *s, struct ht_chunk *c)
{
    return s->nodes.count > 1 ? (uint8_t)(device_of(c) + 1) : 0;
}

int ht_obj_near_all(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c;
    uint64_t index = 0;
    int near = HT_NEAR_ANY;
    if (s->nodes.count < 2)
        return s->nodes.count ? 0 : HT_NEAR_ANY;
    ht_chunk_for_each_from(c, o, index)
    {
        const struct ht_ref *ref = ht_chunk_ref(c);
        int here = ref ? ht_ref_near(s, ref) : HT_NEAR_ANY;
        if (ref && (here == HT_NEAR_ANY || (near != HT_NEAR_ANY && near != here)))
            return HT_NEAR_ANY;
        near = ref ? here : near;
    }
    return near;
}

int ht_obj_near(struct ht_obj *o, uint64_t offset)
{
    struct ht_store *s = o->s;
    if (s->nodes.count < 2)
        return HT_NEAR_ANY;
    ht_store_lock(s);
    struct ht_chunk *c = ht_chunk_find(o, offset >> o->chunk_shift);
    int near = c ? ht_chunk_near_now(s, c) : HT_NEAR_ANY;
    ht_store_unlock(s);
    return near;
}

const struct ht_nodes *ht_store_nodes(const struct ht_store *s)
{
    return &s->nodes;
}
