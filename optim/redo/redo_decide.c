/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_decide.c - a client gives the numbers of the next updates, as a logged step of another store has them: of a
 * parameter, and then of ranges of its elements. Words, scales
 * and clipping have no part in such a step, and a parameter without numbers takes no gradient. The end of the step, or
 * an abort, ends this.
 */

#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/state/sections.h"
#include "optim/redo/redo_priv.h"

static int decide_param(struct ht_root *root, uint64_t oid, uint8_t grad_dtype, const struct ht_redo_param *want,
                        char why[HT_OPTIM_ERROR_MAX]) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = ht_opt_param_find(root->o, oid);

    if (!p || p->gone || p->root != root || !p->cur.exists)
        return ht_optim_refuse(why, -ENOENT, "it has no state");
    if (p->has_grad || (root->open && !root->decided))
        return ht_optim_refuse(why, -EBUSY, "the step is open with other numbers: commit or abort first");
    bool sum = want->grad_dtype == HT_DTYPE_F32; /* the step has the sum of several gradients */
    if ((want->grad_dtype != grad_dtype && !sum) || !ht_opt_redo_follows(&p->cur, 0, want))
        return ht_optim_refuse(
            why, -EINVAL,
            "the numbers are for another dtype, size, rule, form of state or count of steps than its own");
    if (!root->decided)
        root->decided = ++root->o->last_step_number;
    p->decided = root->decided;
    p->decided_t = want->steps;
    p->decided_scalars = want->scalars;
    ht_opt_sections_clear(p);
    p->decided_dtype = want->grad_dtype;
    return 0;
}

/* Numbers for a range of elements, after those of the parameter and of the ranges before. */
static int decide_section(struct ht_root *root, uint64_t oid, const struct ht_redo_summary *one,
                          char why[HT_OPTIM_ERROR_MAX]) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = ht_opt_param_find(root->o, oid);
    struct ht_param_section section;

    if (!p || p->gone || p->root != root || !root->decided || p->has_grad || !ht_opt_is_decided(p))
        return ht_optim_refuse(why, -EINVAL, "numbers for a range of elements follow those of their parameter");
    const struct ht_param_sections *had = p->sections;
    uint64_t from = had && had->decided ? had->of[had->decided - 1].end : 0;
    if (ht_opt_redo_section_at(one, 0, ht_le64_load(one->param), from, p->cur.elements, &section) ||
        !ht_opt_layout_keeps(&p->cur.layout, section.scalars.kernel))
        return ht_optim_refuse(why, -EINVAL, "the numbers for a range of elements make no sense");
    return ht_opt_sections_add(p, &section, true);
}

int ht_optim_decide(struct ht_optim *o, const struct ht_decision *d, struct ht_optim_steer *by)
{
    const struct ht_redo_summary one = {.param = d->bytes, .params = 1, .sections = true};
    bool section = ht_opt_redo_is_section(&one, 0);
    struct ht_redo_param want;
    struct ht_root *root;

    static_assert(sizeof(d->bytes) == sizeof(struct ht_disk_redo_param), "one of the summary");
    if (!section && ht_opt_redo_param_at(&one, 0, &want))
        return ht_optim_refuse(by->why, -EINVAL, "the numbers make no sense");
    root = ht_opt_root_get(o, d->root);
    if (!root)
        return -ENOENT;
    lock(o);
    int rc = ht_opt_gate_enter_by(root, by);
    if (!rc) {
        if (!root->exists)
            rc = -ENOENT;
        else if (section)
            rc = decide_section(root, d->oid, &one, by->why);
        else
            rc = decide_param(root, d->oid, d->grad_dtype, &want, by->why);
        ht_opt_gate_leave(root);
    }
    ht_opt_root_put_locked(root);
    unlock(o);
    return rc;
}
