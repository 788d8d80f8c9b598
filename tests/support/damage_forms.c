/* SPDX-License-Identifier: Apache-2.0 */
/* damage_forms.c - damages of optimizer state in 16 and 8 bits. */
#include <check.h>

#include "tests/support/damage.h"
#include "tests/support/harness.h"
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
