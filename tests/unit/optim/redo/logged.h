/* SPDX-License-Identifier: Apache-2.0 */
/* logged.h - logged steps as tests see and damage them. */
#pragma once

#include "optim/state/context.h"
#include "optim/redo/logged.h"
#include "optim/state/root.h"
#include "tests/unit/optim/step/fixture.h"

static inline struct ht_redo_step last_step(struct fixture *f)
{
    lock(f->o);
    struct ht_redo *redo = &ht_opt_root_find(f->o, ROOT)->redo;
    ck_assert_uint_gt(redo->steps, 0);
    struct ht_redo_step s = redo->step[redo->steps - 1];
    unlock(f->o);
    return s;
}

static inline bool is_marked(struct fixture *f, uint64_t bit)
{
    return ht_store_super(f->s)->feat_refuse & bit;
}

/* Writes so many bytes of a number, and gives those that were there. */
static inline void exchange(struct ht_obj *obj, uint64_t at, size_t bytes, uint64_t *value)
{
    uint64_t was = 0;

    ck_assert_int_eq(ht_obj_read(obj, at, &was, bytes), (ssize_t)bytes);
    ck_assert_int_eq(ht_obj_write(obj, at, value, bytes), (ssize_t)bytes);
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    *value = was;
}
