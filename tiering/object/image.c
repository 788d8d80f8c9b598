/* SPDX-License-Identifier: Apache-2.0 */
/*
 * image.c - images in the arena: which memory is near which device, who gets room, and moves into a longer image.
 *
 * With fast devices on several NUMA nodes the tier and the staging pool are divided among these, as they are large.
 * An image lies near the device that its chunk is stored on. A chunk that is stored nowhere yet gets a device in turn
 * when its image is made. It is written there while that is fair to the other devices (struct ht_alloc_hint). All of
 * this is a hint: memory that is free elsewhere is used before anything is evicted.
 */

#include "tiering/base/activity.h"
#include "tiering/base/log.h"
#include "tiering/api/object.h"
#include "tiering/object/image.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"

/* ------------------------------------------------------------------- nodes */

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
            ht_nodes_add(&s->numa.nodes, ht_dev_facts(s->dev[i])->numa_node, s->layout.device_bytes[i]);
    for (unsigned i = 0; i < s->dev_count; i++) {
        s->numa.index[i] = HT_NUMA_INDEX_ANY;
        if (s->numa.nodes.count > 1 && s->dev[i]) {
            s->numa.index[i] = (int8_t)ht_nodes_find(&s->numa.nodes, ht_dev_facts(s->dev[i])->numa_node);
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

/*
 * Where an image of the chunk should be: near the device that it lies on. A chunk that is not stored yet gets a device
 * first (*target_device, and 1, as in struct ht_image), if it matters.
 */
static int choose_numa_index(struct ht_obj *o, struct ht_chunk *c, uint8_t *target_device) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    int device = -1;

    if (s->numa.nodes.count > 1)
        device = ht_chunk_ref(c) ? device_of(c) : next_target_device(o);
    *target_device = (uint8_t)(device + 1);
    return device < 0 ? HT_NUMA_INDEX_ANY : s->numa.index[device];
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

/* --------------------------------------------------------- the image of a chunk */

/* If there is no room it asks for as much as the object may need. */
static void pin_if_wanted(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    if (o->residency == HT_RESIDENCY_PINNED && !ht_arena_pin(o->s->arena, c->slot))
        ht_arena_want_pinned(o->s->arena, o->size);
}

void ht_chunk_attach_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t slot)
{
    struct ht_store *s = o->s;

    ht_arena_attach(s->arena, slot, o, index, o->obj_class != HT_CLASS_SCRATCH);
    ht_arena_image(s->arena, slot)->target_device = s->numa.nodes.count > 1 ? (uint8_t)(device_of(c) + 1) : 0;
    c->slot = slot;
    o->resident++;
    pin_if_wanted(o, c);
}

void ht_chunk_use_image(struct ht_obj *o, struct ht_chunk *c)
{
    ht_arena_use(o->s->arena, c->slot);
    pin_if_wanted(o, c);
    if (o->residency == HT_RESIDENCY_COLD)
        ht_arena_cool(o->s->arena, c->slot);
}

void ht_chunk_protect(struct ht_obj *o, struct ht_chunk *c)
{
    if (o->residency != HT_RESIDENCY_COLD && ht_arena_may_protect(o->s->arena, c->slot))
        ht_arena_protect(o->s->arena, c->slot);
}

/* -------------------------------------------------------------------- room */

/* Does it have an image that reaches up to so many bytes? */
static bool has_slot(struct ht_store *s, const struct ht_chunk *c, uint32_t reach) HT_REQUIRES(HT_LOCK_STORE)
{
    return c->slot != HT_SLOT_NONE && ht_arena_slot_bytes(s->arena, c->slot) >= reach;
}

uint32_t ht_chunk_update_bytes(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index, uint32_t reach)
{
    uint64_t bytes = ht_max_u64(reach, ht_chunk_len(o, index));

    bytes = ht_max_u64(bytes, c->flags & HT_CH_PUB ? ht_ref_image_bytes(&c->pub) : 0);
    return (uint32_t)ht_max_u64(bytes, c->flags & HT_CH_CUR ? ht_ref_image_bytes(&c->cur) : 0);
}

uint32_t ht_obj_first_image_bytes(uint32_t least)
{
    uint32_t bytes = HT_SMALL_CHUNK_BYTES;

    while (bytes < least)
        bytes *= 2;
    return bytes;
}

uint32_t ht_chunk_image_bytes(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index, uint32_t reach)
{
    return index && !o->extra->used_bytes ? ht_obj_bytes_per_chunk(o)
                                          : ht_obj_first_image_bytes(ht_chunk_update_bytes(o, c, index, reach));
}

/* A longer image takes the place of the present one. During the copy both belong to the chunk, which is held. */
static void move_image(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t to) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    uint32_t from = c->slot;
    const struct ht_image *im = ht_arena_image(s->arena, from);

    ht_arena_attach(s->arena, to, o, index, im->durable);
    ht_store_unlock(s);
    memcpy(ht_arena_data(s->arena, to) + im->valid_lo, ht_arena_data(s->arena, from) + im->valid_lo,
           im->valid_hi - im->valid_lo);
    ht_store_lock(s);
    if (im->dirty)
        s->flow.dirty_bytes += ht_arena_slot_bytes(s->arena, to) - ht_arena_slot_bytes(s->arena, from);
    ht_arena_replace(s->arena, from, to);
    c->slot = to;
    ht_wake_for_slot(s, from);
}

/* A request for an image that reaches so far, for a held chunk; with its place, and its target device + 1. */
struct slot_request {
    struct ht_obj *o;
    struct ht_chunk *c;
    uint64_t index;
    uint32_t reach;
    int numa_index;
    uint8_t target_device;
    bool reads;        /* the image comes free again after the read */
    uint64_t since_ns; /* it waits; 0: not yet */
};

static uint32_t bytes_of(const struct slot_request *w) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_chunk_image_bytes(w->o, w->c, w->index, w->reach);
}

/* Writers leave what comes free to readers that wait, for a while. */
static bool gives_way(const struct slot_request *w) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_waits *waits = &w->o->s->waits;

    return !w->reads && waits->slot_readers && (!w->since_ns || ht_now_ns() - w->since_ns < waits->patience_ns);
}

static uint32_t try_get(const struct slot_request *w, uint32_t tries) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->o->s;

    if (gives_way(w)) /* readers of whole slots have no use for room in a divided one */
        return s->waits.slot_piece_readers ? HT_SLOT_NONE : ht_arena_get_piece(s->arena, bytes_of(w), w->numa_index);
    /* The last clean images are for readers, unless nothing else can go. */
    if (!w->reads && tries != HT_ARENA_FORCE && ht_arena_keeps_reserve(s->arena, s->flow.coming))
        return HT_SLOT_NONE;
    return ht_arena_get(s->arena, bytes_of(w), tries, w->numa_index);
}

/* Was the request met, or does it need no image of the arena any more? Another thread may have had the chunk. */
static bool is_met(const struct slot_request *w) HT_REQUIRES(HT_LOCK_STORE)
{
    return has_slot(w->o->s, w->c, w->reach) || ht_chunk_images(w->o, w->c) != &ht_arena_images;
}

/* All images are in use: waits for a thread to release one. False: none did for some time. */
static bool wait_for_slot(const struct slot_request *w) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->o->s;
    pthread_cond_t *cond = w->reads ? &s->waits.slot_read : &s->waits.slot;
    bool piece = w->reads && bytes_of(w) < HT_CHUNK_BYTES;

    s->waits.slot_waiters++;
    s->waits.slot_readers += w->reads;
    s->waits.slot_piece_readers += piece;
    ht_gate_want(&s->gate, HT_GATE_MEMORY);
    ht_activity_wait("room in the DRAM tier", 0);
    int rc = ht_chunk_wait(w->o, w->c, w->index, cond, ht_now_ns() + HT_PATIENCE_NS);
    ht_activity_go_on();
    ht_gate_want_end(&s->gate, HT_GATE_MEMORY);
    s->waits.slot_waiters--;
    s->waits.slot_readers -= w->reads;
    s->waits.slot_piece_readers -= piece;
    return !rc;
}

/* Cleans some images, or waits until a thread releases one. Lock and chunk held; releases both in between. */
static int make_room(const struct slot_request *w, uint32_t *out_slot) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->o->s;

    ht_store_unlock(s);
    int n = s->hooks.make_room(s);
    ht_store_lock(s);
    if (n)
        return n < 0 ? n : 0;
    /* Images in flight will be clean soon: no reason yet to evict the working set. */
    *out_slot = try_get(w, s->flow.coming ? HT_ARENA_ASK_ALL : HT_ARENA_FORCE);
    if (*out_slot == HT_SLOT_NONE)
        (void)wait_for_slot(w);
    return 0;
}

/*
 * The device may be busy for long with images that stay when they are clean, as when a commit writes the working set.
 * Then one such image goes for a reader. A writer would take them all.
 */
static uint32_t ask(const struct slot_request *w) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_flow *flow = &w->o->s->flow;
    bool busy = flow->coming_workingset && !flow->coming;

    return try_get(w, w->reads && busy ? HT_ARENA_FORCE : HT_ARENA_ASK_ALL);
}

/*
 * Gets an image for a chunk that found none. -EALREADY: it needs none any more. A thread that was woken for a whole
 * slot and leaves a part of it wakes the next one; so does a reader, to which writers gave way.
 */
static int wait_for_room(struct slot_request *w, uint32_t *out_slot) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = w->o;
    struct ht_store *s = o->s;
    uint32_t slot = HT_SLOT_NONE;
    bool comes = true;
    int rc = 0;

    s->counts.room_waits++;
    w->since_ns = ht_now_ns();
    slot = ask(w);
    while (!rc && slot == HT_SLOT_NONE) {
        /* Pressure also begins without a new dirty image: here, when a search has found none to evict. */
        if (ht_arena_under_pressure(s->arena))
            s->waits.wakes.writeback = s->waits.wakes.any = true;
        /*
         * A thread that waits for the next image in flight continues at the speed of the device, without long stops. A
         * reader may take images of the working set, too.
         */
        bool wait = comes && (s->flow.coming || (w->reads && s->flow.coming_workingset));
        comes = !wait || wait_for_slot(w);
        rc = wait ? 0 : make_room(w, &slot);
        if (!rc && slot == HT_SLOT_NONE)
            rc = is_met(w) ? -EALREADY : 0;
        if (!rc && slot == HT_SLOT_NONE)
            slot = ask(w);
    }
    if (rc || w->reads || ht_arena_slot_bytes(s->arena, slot) < HT_CHUNK_BYTES)
        ht_wake_one_for_slot(s);
    if (!rc)
        *out_slot = slot;
    return rc;
}

/* Chooses the place and the target device: a present image has both. */
static void choose_place(struct slot_request *w) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_arena *a = w->o->s->arena;

    if (w->c->slot == HT_SLOT_NONE) {
        w->numa_index = choose_numa_index(w->o, w->c, &w->target_device);
        return;
    }
    w->target_device = ht_arena_image(a, w->c->slot)->target_device;
    w->numa_index = ht_arena_numa_index(a, w->c->slot);
}

static int attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t reach, bool grows)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct slot_request w = {.o = o, .c = c, .index = index, .reach = reach, .reads = !grows};

    assert(c->exclusive);
    if (has_slot(s, c, reach))
        return 0;
    choose_place(&w);
    uint32_t slot = try_get(&w, HT_ARENA_ASK_ALL);
    int rc = slot == HT_SLOT_NONE ? wait_for_room(&w, &slot) : 0;
    if (rc)
        return rc;
    if (c->slot != HT_SLOT_NONE) {
        move_image(o, c, index, slot);
        return 0;
    }
    ht_chunk_attach_image(o, c, index, slot);
    if (w.target_device)
        ht_arena_image(s->arena, slot)->target_device = w.target_device;
    return 0;
}

/* --------------------------------------------------------- the other calls */

static uint32_t reach_of(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_arena_slot_bytes(o->s->arena, c->slot);
}

static void cut(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t keep) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_image *im = ht_arena_image(o->s->arena, c->slot);

    if (im->valid_hi > keep)
        im->valid_hi = keep;
    if (im->data_hi > keep)
        im->data_hi = keep;
    if (im->valid_lo >= im->valid_hi)
        ht_chunk_drop_image(o, c, index);
}

/* The object may have been opened as shared memory while the thread waited for its chunk. */
static bool may_evict(struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return c->slot != HT_SLOT_NONE && ht_chunk_images(o, c) == &ht_arena_images &&
        !ht_arena_image(o->s->arena, c->slot)->dirty;
}

static void evict(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slice slice = {0};

    ht_chunk_for_each_busy(c, o, index) {
        if (may_evict(o, c)) {
            ht_chunk_lock_exclusive(o, c, index); /* an answered read may hold it for a moment more */
            if (may_evict(o, c))
                ht_chunk_drop_image(o, c, index);
            ht_chunk_unlock_exclusive(o, c, index);
        }
        ht_slice_next(o->s, &slice);
    }
}

const struct ht_image_ops ht_arena_images = {
    .attach = attach,
    .reach = reach_of,
    .cut = cut,
    .revert = ht_chunk_drop_image,
    .evict = evict,
};

/* ---------------------------------------------------- of either kind */

const struct ht_image_ops *ht_obj_images(const struct ht_obj *o)
{
    return o->extra->shm ? o->s->hooks.shm_images : &ht_arena_images;
}

const struct ht_image_ops *ht_chunk_images(const struct ht_obj *o, const struct ht_chunk *c)
{
    if (c->slot == HT_SLOT_NONE)
        return ht_obj_images(o);
    return ht_arena_is_external(o->s->arena, c->slot) ? o->s->hooks.shm_images : &ht_arena_images;
}

int ht_image_attach(struct ht_obj *o, struct ht_chunk *c, uint64_t index, uint32_t reach, bool grows)
{
    int rc;

    do
        rc = ht_chunk_images(o, c)->attach(o, c, index, reach, grows);
    while (rc == -EALREADY);
    return rc;
}
