/* SPDX-License-Identifier: Apache-2.0 */
/* delta.c - deltas of a root in memory: which are kept, and where their chain is cut. */
#include <stdlib.h>

#include "tiering/api/tx.h"
#include "optim/state/delta.h"
#include "optim/state/root.h"

void ht_opt_delta_count_heap(struct ht_optim *o, struct ht_delta *d)
{
    uint64_t bytes = sizeof(*d) + d->pieces_max * sizeof(*d->piece) + d->params * sizeof(*d->param);

    o->delta_heap_bytes += bytes - d->heap_bytes;
    d->heap_bytes = bytes;
}

struct ht_delta *ht_opt_delta_new(struct ht_optim *o)
{
    struct ht_delta *d = calloc(1, sizeof(*d));

    if (!d)
        return NULL;
    d->refs = 1;
    ht_opt_delta_count_heap(o, d);
    return d;
}

void ht_opt_delta_put(struct ht_optim *o, struct ht_delta *d)
{
    if (!d || --d->refs)
        return;
    o->deltas_lost -= d->lost;
    o->delta_heap_bytes -= d->heap_bytes;
    ht_obj_put(d->obj);
    free(d->piece);
    free(d->param);
    free(d);
}

void ht_opt_delta_opens(struct ht_root *root)
{
    if (root->latched.delta && !root->deltas) {
        root->deltas = calloc(1, sizeof(*root->deltas));
        root->o->delta_heap_bytes += root->deltas ? sizeof(*root->deltas) : 0;
    }
    ht_opt_delta_lose(root); /* a step that had no update yet, and no gradient any more */
    if (root->deltas)
        root->deltas->recording = root->latched.delta && root->deltas->based && !root->decided;
}

void ht_opt_delta_lose(struct ht_root *root)
{
    struct ht_deltas *s = root->deltas;

    if (!s)
        return;
    ht_opt_delta_put(root->o, s->open);
    s->open = NULL;
    s->recording = false;
}

/* The caller has its reference then. */
static struct ht_delta *take_oldest(struct ht_deltas *s)
{
    struct ht_delta *d = s->kept[0];

    memmove(s->kept, s->kept + 1, --s->count * sizeof(struct ht_delta *));
    return d;
}

static void drop_oldest(struct ht_root *root, size_t keep) HT_REQUIRES(HT_LOCK_OPTIM)
{
    while (root->deltas->count > keep) {
        struct ht_delta *d = take_oldest(root->deltas);
        d->lost = d->refs > 1;
        root->o->deltas_lost += d->lost;
        ht_opt_delta_put(root->o, d);
    }
}

void ht_opt_delta_cut(struct ht_root *root)
{
    if (!root->deltas)
        return;
    ht_opt_delta_lose(root);
    drop_oldest(root, 0);
    root->deltas->based = false;
}

void ht_opt_delta_trim(struct ht_root *root)
{
    const struct ht_deltas *s = root->deltas;

    if (!s)
        return;
    if (!root->config.delta || (s->count && s->kept[s->count - 1]->bf16 != root->config.delta_bf16))
        ht_opt_delta_cut(root);
    drop_oldest(root, root->config.delta_keep);
}

void ht_opt_delta_free(struct ht_root *root)
{
    if (!root->deltas)
        return;
    ht_opt_delta_cut(root);
    root->o->delta_heap_bytes -= sizeof(*root->deltas);
    free(root->deltas);
    root->deltas = NULL;
}

void ht_opt_delta_keep(struct ht_root *root, struct ht_delta *d)
{
    drop_oldest(root, HT_DELTA_KEEP_MAX - 1);
    root->deltas->kept[root->deltas->count++] = d;
    ht_opt_delta_trim(root);
}

uint64_t ht_opt_delta_bytes(const struct ht_root *root)
{
    uint64_t bytes = 0;

    for (size_t i = 0; root->deltas && i < root->deltas->count; i++)
        bytes += root->deltas->kept[i]->bytes + root->deltas->kept[i]->heap_bytes;
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
        for (size_t i = 0; root->deltas && i < root->deltas->count; i++)
            bytes += spare_bytes(root->deltas->kept[i]);
    return bytes;
}

uint64_t ht_opt_deltas_give_up(struct ht_optim *o, uint64_t bytes)
{
    uint64_t given = 0;

    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        while (given < bytes && root->deltas && root->deltas->count) {
            given += spare_bytes(root->deltas->kept[0]);
            drop_oldest(root, root->deltas->count - 1);
        }
    }
    return given;
}
