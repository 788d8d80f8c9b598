/* SPDX-License-Identifier: Apache-2.0 */
/* delta.c - deltas of a root in memory: which are kept, and where their chain is cut. */

#include "optim/state/delta.h"
#include "optim/state/root.h"

enum { SKIPS_MAX = 15 };

void ht_opt_delta_count_heap(struct ht_delta *d)
{
    uint64_t bytes = sizeof(*d) + d->pieces_max * sizeof(*d->piece) + d->params * sizeof(*d->param);

    d->o->delta_heap_bytes += bytes - d->heap_bytes;
    d->heap_bytes = bytes;
}

struct ht_delta *ht_opt_delta_new(struct ht_optim *o)
{
    struct ht_delta *d = calloc(1, sizeof(*d));

    if (!d)
        return NULL;
    d->o = o;
    d->refs = 1;
    ht_list_init(&d->of_root);
    ht_opt_delta_count_heap(d);
    return d;
}

void ht_opt_delta_put(struct ht_delta *d)
{
    if (!d || --d->refs)
        return;
    d->o->deltas_lost -= d->lost;
    d->o->delta_heap_bytes -= d->heap_bytes;
    ht_obj_put(d->obj);
    free(d->piece);
    free(d->param);
    free(d);
}

void ht_opt_deltas_init(struct ht_root *root)
{
    ht_list_init(&root->deltas.kept);
    root->deltas.lineage = ++root->o->last_step_number;
}

void ht_opt_delta_opens(struct ht_root *root)
{
    struct ht_deltas *s = &root->deltas;

    ht_opt_delta_lose(root); /* a step that had no update yet, and no gradient any more */
    s->recording = root->latched.delta && s->based && !root->decided && !s->skips;
    s->skips -= s->skips > 0;
}

void ht_opt_delta_lose(struct ht_root *root)
{
    ht_opt_delta_put(root->deltas.open);
    root->deltas.open = NULL;
    root->deltas.recording = false;
}

void ht_opt_delta_give_up(struct ht_root *root)
{
    struct ht_deltas *s = &root->deltas;

    ht_opt_delta_lose(root);
    s->skips = s->backoff;
    s->backoff = s->backoff < SKIPS_MAX ? 2 * s->backoff + 1 : SKIPS_MAX;
}

static void drop_oldest(struct ht_root *root, size_t keep) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_deltas *s = &root->deltas;

    for (; s->count > keep; s->count--) {
        struct ht_delta *d = ht_list_entry(s->kept.next, struct ht_delta, of_root);
        ht_list_del(&d->of_root);
        d->lost = d->refs > 1;
        root->o->deltas_lost += d->lost;
        ht_opt_delta_put(d);
    }
}

void ht_opt_delta_cut(struct ht_root *root)
{
    ht_opt_delta_lose(root);
    drop_oldest(root, 0);
    root->deltas.based = false;
    root->deltas.lineage = ++root->o->last_step_number;
}

void ht_opt_delta_trim(struct ht_root *root)
{
    const struct ht_deltas *s = &root->deltas;
    const struct ht_delta *last = ht_list_entry(s->kept.prev, struct ht_delta, of_root);

    if (!root->config.delta || (s->count && last->bf16 != root->config.delta_bf16))
        ht_opt_delta_cut(root);
    drop_oldest(root, root->config.delta_keep);
}

void ht_opt_delta_keep(struct ht_root *root, struct ht_delta *d)
{
    ht_list_add_tail(&root->deltas.kept, &d->of_root);
    root->deltas.count++;
    ht_opt_delta_trim(root);
}

uint64_t ht_opt_delta_bytes(const struct ht_root *root)
{
    uint64_t bytes = 0;

    ht_list_for_each_entry(d, &root->deltas.kept, const struct ht_delta, of_root)
        bytes += d->bytes + d->heap_bytes;
    return bytes;
}

/* A reader that has one open keeps its space. */
static uint64_t spare_bytes(const struct ht_delta *d) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return d->refs == 1 ? d->bytes : 0;
}

uint64_t ht_opt_deltas_could_give(struct ht_optim *o)
{
    uint64_t bytes = 0;

    ht_list_for_each_entry(root, &o->roots, const struct ht_root, all)
        ht_list_for_each_entry(d, &root->deltas.kept, const struct ht_delta, of_root)
            bytes += spare_bytes(d);
    return bytes;
}

uint64_t ht_opt_deltas_give_up(struct ht_optim *o, uint64_t bytes)
{
    uint64_t given = 0;

    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        while (given < bytes && root->deltas.count) {
            given += spare_bytes(ht_list_entry(root->deltas.kept.next, struct ht_delta, of_root));
            drop_oldest(root, root->deltas.count - 1);
        }
    }
    return given;
}
