/* SPDX-License-Identifier: Apache-2.0 */
/* damage_forms.c - damages of optimizer state in 16 and 8 bits, and of logged steps in two phases. */
#include <check.h>

#include "tests/support/damage.h"
#include "tiering/api/check.h"
#include "tiering/api/object.h"

/* A parameter with state in 8 bits. */
static void make_short_state(struct harness *k, const struct damage_ids *ids)
{
    const struct harness_param w_param = {"w", "f32", 700};

    ck_assert_int_eq(harness_open(k, 1), 0);
    harness_set_word(k, ids->model, "user.hitrain.optimizer", "adamw lr=0.01 state_bits=8 state_bits_min=0");
    harness_gradient(k, ids->model, &w_param, 3);
    ck_assert_int_eq(ht_optim_commit(k->optim, ids->model), 0);
}

void damage_short_state_unmarked(struct harness *k, const struct damage_ids *ids)
{
    make_short_state(k, ids);
    ck_assert_int_eq(harness_close(k, true), 0);
    damage_clear_feature(k, HT_FEAT_REFUSE_FORMS);
}

static int note_exp_avg(void *ctx, const struct ht_optim_entry *e)
{
    if (e->parameter && e->state_count)
        *(uint64_t *)ctx = e->states[0];
    return 0;
}

/* 700 codes, and from byte 704 on the scales of three blocks. The second one gets a sign. */
void damage_bad_scale(struct harness *k, const struct damage_ids *ids)
{
    uint64_t oid = 0;

    make_short_state(k, ids);
    ck_assert_int_eq(ht_optim_walk(k->optim, note_exp_avg, &oid), 0);
    struct ht_obj *obj = ht_obj_get(k->store, oid);
    ck_assert(ht_obj_write(obj, 708 + 3, "\xbf", 1) == 1 && !ht_obj_sync(obj));
    ht_obj_put(obj);
    ck_assert_int_eq(harness_close(k, false), 0);
}

/* -------------------------------------------------------------- two phases */

static const struct harness_param matrix = {"matrix", "f32", 700};

struct phases {
    struct harness *k;
    uint64_t root, oid; /* of the logged step */
};

static int find_phases(void *ctx, const struct ht_chunk_info *info)
{
    struct phases *x = ctx;
    uint64_t root, step;

    if (ht_optim_redo_owner(x->k->optim, info->oid, &root, &step) == 0 && root == x->root)
        x->oid = info->oid;
    return 0;
}

/* Another model, of muon, with two steps, of which the second is logged; the store stays open. */
static struct phases begin_phases(struct harness *k)
{
    struct phases x = {.k = k};

    ck_assert_int_eq(harness_open(k, 1), 0);
    x.root = harness_model(k, "phases", &matrix, 1, "muon lr=0.01 redo=on durable_every=100");
    harness_set_word(k, harness_find(k, x.root, "matrix"), "user.hitrain.shape", "20,35");
    for (uint64_t step = 1; step <= 2; step++) {
        harness_gradient(k, x.root, &matrix, step);
        harness_ortho(k, x.root, &matrix);
        ck_assert_int_eq(ht_optim_commit(k->optim, x.root), 0);
    }
    ck_assert_int_eq(ht_store_walk(k->store, find_phases, &x), 0);
    ck_assert(x.oid);
    return x;
}

/*
 * The orthogonalised update lacks its last element: its piece has another end and other bytes. Before the summary
 * are 700 gradients of f32, and 700 elements of two bytes. Then a crash.
 */
void damage_bad_phases(struct harness *k, const struct damage_ids *ids)
{
    struct phases x = begin_phases(k);
    uint64_t piece =
        4200 + sizeof(struct ht_disk_redo) + sizeof(struct ht_disk_redo_param) + sizeof(struct ht_disk_redo_coded);
    uint64_t end = piece + offsetof(struct ht_disk_redo_piece, end);
    struct ht_obj *obj = ht_obj_get(k->store, x.oid);

    (void)ids;
    ck_assert(ht_obj_write(obj, end, "\x76\x05\0\0\x76\x05", 6) == 6 && !ht_obj_sync(obj));
    ht_obj_put(obj);
    ck_assert_int_eq(harness_close(k, false), 0);
}

void damage_phases_unmarked(struct harness *k, const struct damage_ids *ids)
{
    (void)begin_phases(k);
    (void)ids;
    ck_assert_int_eq(harness_close(k, false), 0);
    damage_clear_feature(k, HT_FEAT_REFUSE_TWO_PHASE);
}
