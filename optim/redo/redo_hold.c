/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_hold.c - steps that stay readable when the log does not need them any more (redo_keep). A reference keeps the
 * content of a deleted object. So nothing of this is on a device, and a crash leaves the steps of the log alone.
 */
#include <stdlib.h>
#include <sys/random.h>

#include "optim/state/root.h"
#include "optim/redo/redo_priv.h"

static void drop_oldest(struct ht_redo *redo, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ht_obj_put_soon(redo->held[i].obj);
    redo->held_count -= n;
    memmove(redo->held, redo->held + n, redo->held_count * sizeof(*redo->held));
}

static bool room(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_redo *redo = &root->redo;

    if (redo->held_count < redo->held_max)
        return true;
    struct ht_redo_held *more = realloc(redo->held, HT_REDO_KEEP_MAX * sizeof(*more));
    if (!more)
        return false;
    redo->held = more;
    redo->held_max = HT_REDO_KEEP_MAX;
    ht_opt_redo_count_heap(root);
    return true;
}

static size_t wanted(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return root->config.redo ? root->config.redo_keep : 0;
}

void ht_opt_redo_trim(struct ht_root *root)
{
    size_t keep = wanted(root);

    if (root->redo.held_count > keep)
        drop_oldest(&root->redo, root->redo.held_count - keep);
}

void ht_opt_redo_hold(struct ht_root *root, const struct ht_redo_step *step, struct ht_obj *obj)
{
    struct ht_redo *redo = &root->redo;

    if (redo->held_count && redo->held[redo->held_count - 1].step.step + 1 != step->step)
        drop_oldest(redo, redo->held_count);
    if (redo->held_count == HT_REDO_KEEP_MAX)
        drop_oldest(redo, 1);
    if (!obj || !wanted(root) || !redo->continued || !room(root)) {
        ht_obj_put_soon(obj);
        ht_opt_redo_trim(root);
        return;
    }
    redo->held[redo->held_count++] = (struct ht_redo_held){*step, obj};
    ht_opt_redo_trim(root);
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
    uint64_t bytes = ht_opt_redo_spare_aside(o);
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
    uint64_t given = ht_opt_redo_shrink_aside(o, bytes);
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
                     (unsigned long long)step);
    }
    return given;
}

void ht_opt_redo_cut(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;
    uint64_t seed;

    if (redo->held_count)
        drop_oldest(redo, redo->held_count);
    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != (ssize_t)sizeof(seed))
        seed = ht_now_ns();
    redo->lineage = (seed ^ root->id) >> 1 | 1;
}

/* At once: who looks before the next publication finds the new names already. An abort leaves the new lineage. */
void ht_opt_redo_renamed(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;

    redo->gap = redo->renamed = true;
    redo->continued = false;
    ht_opt_redo_cut(root);
}
