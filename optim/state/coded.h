/* SPDX-License-Identifier: Apache-2.0 */
/*
 * coded.h - state in any form (rules/forms.h), and masters in two bytes (rules/master.h), as the f32 that it stands
 * for. No locks: the caller sees to it that no other thread changes the state meanwhile, or reads again.
 */
#pragma once

#include "optim/rules/forms.h"
#include "optim/state/param.h"

/* One state, with references of the caller. */
struct ht_opt_coded {
    const struct ht_optim *o;
    struct ht_param_shape shape;
    uint8_t kind, form;
    struct ht_obj *obj;
    struct ht_obj *p, *blocks; /* of masters in two bytes: the parameter, and the facts on their blocks; else NULL */
};

/* Takes the references; the lock is held. word: place of the kind in the layout. -ESTALE: some are not there: none. */
int ht_opt_coded_get(const struct ht_param *p, unsigned word, struct ht_opt_coded *out) HT_MUST_CHECK;
void ht_opt_coded_put(const struct ht_opt_coded *c);
/* Bytes [off, off + len) of the f32; fewer at the end. Allocates some 600 KiB. */
ssize_t ht_opt_coded_read(const struct ht_opt_coded *c, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
/*
 * Whole elements within the state; blocks that they cover in part are decoded, changed and encoded. -ERANGE: an element
 * that the form or the kind does not have, *out_element: not finite, negative although the kind is not, or for bf16 so
 * large that it would become infinite. -EDOM: a master that does not round to the parameter. Then nothing was changed.
 */
ssize_t ht_opt_coded_write(const struct ht_opt_coded *c, uint64_t off, const void *buf, size_t len,
                           uint64_t *out_element) HT_MUST_CHECK;
/*
 * All of from, which has another form, into to, which is new. A block with an element that is not finite has no other.
 * -ERANGE: an element is negative although the kind is not.
 */
int ht_opt_coded_convert(const struct ht_opt_coded *from, const struct ht_opt_coded *to) HT_MUST_CHECK;
