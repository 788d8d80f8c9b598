/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_space.c - space that is set aside for logged steps: for those that come before the next full one, or for as many
 * as fit into half of the free space, all roots together, and for one of a root if that alone fits. Without space for a
 * step the step is full. So a full store makes full steps come earlier, and no step fails for want of space for its
 * log. Other content that finds the store full gets back what is more than a step of each root.
 *
 * A logged step is a promise: the next mount computes it again. What it needs for that stays reserved until the full
 * step, else the step is not logged. It is the next rewrite of parameters and state, and their largest logged gradient.
 * A mount reserves the rewrites again, and sets all free space aside that gradients may need, before it lets anyone in.
 * The gradients take theirs from that. Steps to come get space only after that.
 */
#include "tiering/base/mutant.h"
#include "tiering/api/stats.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

/*
 * Bytes of a step: the largest one that was logged, or what gradients of all parameters take. An eighth more, because
 * the writer may write a chunk twice. 0: there is no parameter with state.
 */
static uint64_t step_bytes(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_totals *t = &root->totals;
    uint64_t gradients = root->config.accumulate > 1 ? t->elements * sizeof(float) : t->param_bytes;

    gradients += root->config.rule == HT_RULE_MUON ? t->elements * 2 : 0; /* orthogonalised updates */
    uint64_t bytes = root->redo.largest ? root->redo.largest : gradients;

    return ht_round_up(bytes + bytes / 8, HT_BLOCK_BYTES);
}

/* Steps that are to be logged before the next full one. */
static uint64_t steps_to_come(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_optim_config *c = &root->config;
    uint64_t most = ht_min_u64(c->durable_every - 1 + (c->redo_keep > 0), HT_REDO_STEPS_MAX);
    uint64_t logged = root->redo.steps + root->redo.counted;

    return c->redo && root->exists && !root->frozen && most > logged ? most - logged : 0;
}

static void give_back(struct ht_root *root, uint64_t bytes) HT_REQUIRES(HT_LOCK_OPTIM)
{
    root->redo.aside_bytes -= bytes;
    ht_store_set_aside_end(root->o->store, bytes);
}

/* Of all roots. */
static uint64_t all_aside(const struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t bytes = 0;

    ht_list_for_each(pos, &o->roots)
        bytes += ht_list_entry(pos, struct ht_root, all)->redo.aside_bytes;
    return bytes;
}

void ht_opt_redo_set_aside(struct ht_root *root)
{
    uint64_t one = step_bytes(root), most = steps_to_come(root) * one, have = root->redo.aside_bytes;

    if (have > most)
        give_back(root, have - most);
    if (have >= most || !root->o->started || ht_store_read_only(root->o->store) || root->o->recoveries)
        return;
    uint64_t free = ht_store_available(root->o->store), all = all_aside(root->o), half = (free + all) / 2;
    uint64_t fits = half > all - have ? (half - (all - have)) / one * one : 0;
    uint64_t want = fits ? ht_min_u64(fits, most) : free + have >= one ? one : 0;
    if (want > have && !ht_store_set_aside(root->o->store, want - have))
        root->redo.aside_bytes = want;
}

static uint64_t spare_bytes(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t one = step_bytes(root), have = root->redo.aside_bytes;

    return have > one ? have - one : 0;
}

uint64_t ht_opt_redo_spare_aside(struct ht_optim *o)
{
    uint64_t bytes = 0;

    ht_list_for_each(pos, &o->roots)
        bytes += spare_bytes(ht_list_entry(pos, struct ht_root, all));
    return bytes;
}

/* Roots give back so many bytes, but not the space for a step. Returns how many. */
static uint64_t shrink_aside(struct ht_optim *o, uint64_t bytes) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t given = 0;

    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        uint64_t spare = spare_bytes(root), left = bytes - given;
        uint64_t n = spare > left ? ht_min_u64(spare, ht_round_up(left, HT_BLOCK_BYTES)) : spare;
        give_back(root, n);
        given += ht_min_u64(n, left);
    }
    return given;
}

/* The oldest kept step of a root after `seq`; its object is the caller's then. NULL: no root has one. */
static struct ht_obj *take_oldest(struct ht_optim *o, uint64_t *seq, uint64_t *out_root, uint64_t *out_step)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        struct ht_redo *redo = &root->redo;
        if (root->seq <= *seq)
            continue;
        *seq = root->seq;
        if (!redo->held_count)
            continue;
        struct ht_obj *obj = redo->held[0].obj;
        *out_root = root->id;
        *out_step = redo->held[0].step.step;
        redo->held_count--;
        memmove(redo->held, redo->held + 1, redo->held_count * sizeof(*redo->held));
        return obj;
    }
    return NULL;
}

/* A reader that has the step open keeps its space. */
static uint64_t bytes_of(struct ht_obj *obj)
{
    struct ht_obj_stat st;

    ht_obj_stat(obj, &st);
    return st.refs == 1 ? st.stored_bytes : 0;
}

uint64_t ht_opt_redo_could_give(void *ctx)
{
    struct ht_optim *o = ctx;

    lock(o);
    uint64_t bytes = ht_opt_redo_spare_aside(o) + ht_opt_deltas_could_give(o);
    ht_list_for_each(pos, &o->roots) {
        const struct ht_redo *redo = &ht_list_entry(pos, struct ht_root, all)->redo;
        for (size_t i = 0; i < redo->held_count; i++)
            bytes += bytes_of(redo->held[i].obj);
    }
    unlock(o);
    return bytes;
}

/* The oldest step of each root in turn. */
uint64_t ht_opt_redo_give_up(void *ctx, uint64_t bytes)
{
    struct ht_optim *o = ctx;
    uint64_t seq = 0, id = 0, step = 0;
    bool any = false;

    lock(o);
    uint64_t given = ht_opt_deltas_give_up(o, bytes);
    given += given < bytes ? shrink_aside(o, bytes - given) : 0;
    unlock(o);
    while (given < bytes) {
        lock(o);
        struct ht_obj *obj = take_oldest(o, &seq, &id, &step);
        unlock(o);
        if (!obj && !any)
            break;
        any = obj;
        seq = obj ? seq : 0;
        if (!obj)
            continue;
        given += bytes_of(obj);
        ht_obj_put(obj);
        ht_opt_event(HT_EVENT_STEPS_GIVEN_UP, id, "the store is full: step %llu is not kept for readers any more",
                     (ull)step);
    }
    return given;
}

bool ht_opt_redo_yield_aside(struct ht_optim *o)
{
    bool any = all_aside(o) > 0;

    ht_list_for_each(pos, &o->roots)
        ht_opt_redo_end_aside(ht_list_entry(pos, struct ht_root, all));
    return any;
}

void ht_opt_redo_end_aside(struct ht_root *root)
{
    if (root->redo.aside_bytes)
        give_back(root, root->redo.aside_bytes);
}

/* Kept steps are given up for a step that is to be logged. */
bool ht_opt_redo_has_space(const struct ht_root *root)
{
    return root->redo.aside_bytes >= step_bytes(root) || root->redo.held_count;
}

/* ------------------------------------------------------------------ replay */

bool ht_opt_redo_reserve(struct ht_param *p)
{
    bool sum = p->root->latched.accumulate > 1;
    uint8_t bytes = sum ? (uint8_t)sizeof(float) : p->shape.g_bytes;

    if ((p->redo_g_bytes >= bytes && !p->unreserved) || HT_MUTANT("logged-unreserved"))
        return true;
    p->redo_g_bytes = (uint8_t)ht_max_u64(p->redo_g_bytes, bytes);
    return !ht_opt_rewrites_reserve(p);
}

/* Nobody knows yet of which dtype their gradients are. A reserve is for two halves, in whole blocks. */
static uint64_t room_bytes(const struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t bytes = 0;

    ht_list_for_each_entry(p, &o->params, const struct ht_param, all) {
        if (!p->root->redo.recovering || !p->cur.exists)
            continue;
        bytes += ht_round_up(p->cur.elements * sizeof(float), HT_BLOCK_BYTES) + 2 * (uint64_t)HT_BLOCK_BYTES;
        if (p->cur.layout.kind[0] == HT_STATE_MOMENTUM_BUFFER) /* it may have steps in two phases */
            bytes += 2 * (ht_round_up(p->cur.elements * 2, HT_BLOCK_BYTES) + 2 * (uint64_t)HT_BLOCK_BYTES);
    }
    return bytes;
}

void ht_opt_redo_set_room(struct ht_optim *o)
{
    uint64_t want = room_bytes(o), have = o->replay_room_bytes;
    uint64_t more = ht_min_u64(want > have ? want - have : 0, ht_store_available(o->store));

    if (more && !HT_MUTANT("replay-roomless") && !ht_store_set_aside(o->store, more))
        o->replay_room_bytes += more;
}

void ht_opt_redo_end_room(struct ht_optim *o)
{
    if (o->replay_room_bytes)
        ht_store_set_aside_end(o->store, o->replay_room_bytes);
    o->replay_room_bytes = 0;
}

/* -------------------------------------------------------------------- fsck */

/* used: bytes of its chunks (ht_obj_set_used). Without memory for them the object takes more. */
static uint64_t rewrite_bytes(const struct ht_param *p, uint64_t oid, uint64_t size, uint32_t used)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_obj *obj = ht_obj_get(p->o->store, oid);

    if (obj)
        (void)!ht_obj_set_used(obj, used);
    uint64_t bytes = obj ? ht_obj_rewrite_bytes(obj, size) : 0;

    ht_obj_put(obj);
    return bytes;
}

/* As much as ht_opt_rewrites_reserve takes at a mount, and its largest logged gradient, which is in no place yet. */
static uint64_t mount_bytes(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t bytes = 2 * ht_round_up(ht_div_up(p->cur.elements * p->redo_g_bytes, 2), HT_BLOCK_BYTES);
    const struct ht_layout *l = &p->cur.layout;
    struct ht_param_shape shape;

    bytes += rewrite_bytes(p, p->oid, p->cur.elements * ht_dtype_trained_bytes(p->cur.dtype), p->cur.chunk_bytes);
    for (unsigned i = 0; i < l->count && !ht_opt_state_shape(p, &shape); i++)
        bytes += rewrite_bytes(p, p->cur.oid[i], ht_opt_state_size(&shape, l->kind[i], l->form[i]),
                               ht_opt_state_used_bytes(&shape, l->kind[i], l->form[i]));
    return bytes;
}

uint64_t ht_optim_redo_lacks(struct ht_optim *o)
{
    uint64_t bytes = 0, free = ht_store_available(o->store);
    bool any = false;

    lock(o);
    ht_list_for_each_entry(p, &o->params, const struct ht_param, all) {
        bool settles = p->cur.exists && !p->root->frozen;
        bytes += settles ? mount_bytes(p) : 0;
        any |= settles && p->redo_g_bytes;
    }
    unlock(o);
    return any && bytes > free ? bytes - free : 0;
}

/* ------------------------------------------------------------------ object */

int ht_opt_redo_prealloc(struct ht_root *root, struct ht_obj *obj, uint64_t at, uint64_t len)
{
    struct ht_optim *o = root->o;
    int rc;

    do {
        lock(o);
        while (root->redo.taking)
            wait_changed(o);
        uint64_t bytes = ht_min_u64(root->redo.aside_bytes, ht_round_up(len, HT_BLOCK_BYTES) + HT_CHUNK_BYTES);
        root->redo.aside_bytes -= bytes;
        root->redo.taking = true;
        unlock(o);
        rc = ht_obj_prealloc_aside(obj, at, len, &bytes);
        lock(o);
        root->redo.aside_bytes += bytes;
        root->redo.taking = false;
        notify_changed(o);
        unlock(o);
    } while (rc == -ENOSPC && !ht_store_make_space(o->store, true));
    return rc;
}

uint64_t ht_opt_redo_bytes(const struct ht_root *root)
{
    const struct ht_redo *redo = &root->redo;
    uint64_t bytes = 0;

    for (size_t i = 0; i < redo->steps; i++)
        bytes += redo->step[i].at + redo->step[i].bytes;
    for (size_t i = 0; i < redo->held_count; i++)
        bytes += redo->held[i].step.at + redo->held[i].step.bytes;
    return bytes;
}
