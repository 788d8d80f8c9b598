/* SPDX-License-Identifier: Apache-2.0 */
/*
 * numa.c - which memory is near which device.
 *
 * With fast devices on several NUMA nodes the tier and the staging pool are divided among these, as they are large.
 * An image lies near the device that its chunk is stored on. A chunk that is stored nowhere yet gets a device in turn
 * when its image is made. It is written there while that is fair to the other devices (struct ht_alloc_hint). All of
 * this is a hint: memory that is free elsewhere is used before anything is evicted.
 */
#include "tiering/base/log.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"

static_assert(HT_DEVICES_MAX <= HT_NODES_MAX, "devices take turns as nodes do");

int ht_store_find_nodes(struct ht_store *s)
{
    int asked = s->opts.numa_node;

    if (asked >= 0 && !ht_node_exists(asked)) {
        ht_error("NUMA node %d does not exist on this machine", asked);
        return -EINVAL;
    }
    if (asked >= 0)
        ht_nodes_add(&s->numa.nodes, asked, 1);
    for (unsigned i = 0; asked == HT_NUMA_AUTO && i < s->dev_count; i++)
        if (s->dev[i] && s->layout.device_class[i] == HT_DEVICE_FAST)
            ht_nodes_add(&s->numa.nodes, ht_dev_numa_node(s->dev[i]), s->layout.device_bytes[i]);
    for (unsigned i = 0; i < s->dev_count; i++) {
        s->numa.index[i] = HT_NUMA_INDEX_ANY;
        if (s->numa.nodes.count > 1 && s->dev[i]) {
            s->numa.index[i] = (int8_t)ht_nodes_find(&s->numa.nodes, ht_dev_numa_node(s->dev[i]));
            if (s->layout.device_class[i] == HT_DEVICE_FAST)
                ht_nodes_add(&s->numa.turns, (int)i, s->layout.device_bytes[i]);
        }
    }
    return 0;
}

int ht_ref_numa_index(const struct ht_store *s, const struct ht_ref *ref)
{
    int device = ht_ref_home(ref);

    return device < 0 ? HT_NUMA_INDEX_ANY : s->numa.index[device];
}

/* A device that takes a chunk: in turn, or by shares. */
static int next_target_device(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    uint32_t bytes = ht_obj_bytes_per_chunk(o);

    if (ht_alloc_has_shares(s->alloc))
        return ht_alloc_assign(s->alloc, (uint32_t)(bytes / HT_BLOCK_BYTES), ht_obj_hint(o, -1));
    int place = ht_nodes_turn(&s->numa.turns, s->numa.credit);

    return ht_alloc_choose(s->alloc, (uint32_t)(bytes / HT_BLOCK_BYTES), ht_obj_hint(o, s->numa.turns.node[place]));
}

/* The device that holds it, or -1. */
static int device_of(struct ht_chunk *c)
{
    const struct ht_ref *ref = ht_chunk_ref(c);

    return ref ? ht_ref_home(ref) : -1;
}

int ht_chunk_target_device(const struct ht_store *s, const struct ht_chunk *c)
{
    return c->slot == HT_SLOT_NONE ? -1 : ht_arena_image(s->arena, c->slot)->target_device - 1;
}

int ht_chunk_numa_index(const struct ht_store *s, struct ht_chunk *c)
{
    int device = device_of(c);

    if (device < 0)
        device = ht_chunk_target_device(s, c);
    return device < 0 ? HT_NUMA_INDEX_ANY : s->numa.index[device];
}

int ht_chunk_choose_numa_index(struct ht_obj *o, struct ht_chunk *c, uint8_t *target_device)
{
    struct ht_store *s = o->s;
    int device = -1;

    if (s->numa.nodes.count > 1)
        device = ht_chunk_ref(c) ? device_of(c) : next_target_device(o);
    *target_device = (uint8_t)(device + 1);
    return device < 0 ? HT_NUMA_INDEX_ANY : s->numa.index[device];
}

uint8_t ht_chunk_stored_target_device(const struct ht_store *s, struct ht_chunk *c)
{
    return s->numa.nodes.count > 1 ? (uint8_t)(device_of(c) + 1) : 0;
}

int ht_obj_common_numa_index(struct ht_obj *o)
{
    struct ht_slice slice = {0};
    struct ht_store *s = o->s;
    int numa_index = HT_NUMA_INDEX_ANY;

    if (s->numa.nodes.count < 2)
        return s->numa.nodes.count ? 0 : HT_NUMA_INDEX_ANY;
    ht_chunk_for_each_busy(c, o, index) {
        const struct ht_ref *ref = ht_chunk_ref(c);
        int here = ref ? ht_ref_numa_index(s, ref) : HT_NUMA_INDEX_ANY;
        if (ref && (here == HT_NUMA_INDEX_ANY || (numa_index != HT_NUMA_INDEX_ANY && numa_index != here)))
            return HT_NUMA_INDEX_ANY;
        numa_index = ref ? here : numa_index;
        ht_slice_next(s, &slice);
    }
    return numa_index;
}

int ht_obj_numa_index(struct ht_obj *o, uint64_t offset)
{
    struct ht_store *s = o->s;

    if (s->numa.nodes.count < 2)
        return HT_NUMA_INDEX_ANY;
    ht_store_lock(s);
    struct ht_chunk *c = ht_chunk_find(o, offset >> o->chunk_shift);
    int numa_index = c ? ht_chunk_numa_index(s, c) : HT_NUMA_INDEX_ANY;
    ht_store_unlock(s);
    return numa_index;
}

const struct ht_nodes *ht_store_nodes(const struct ht_store *s)
{
    return &s->numa.nodes;
}
