/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steer.c - which client may steer a root, and which step it means.
 *
 * A step has a number while it is open. The numbers begin at random in each mount and count up, so no later step has
 * the number of an earlier one. A claim names the one client that may end steps or take them
 * back; it is kept in memory only.
 *
 * The verdict (ht_opt_may_steer) is taken under the gate, in the same critical section that begins to drain: until the
 * command has ended no other command runs, and no gradient opens a step.
 */
#include "optim/state/root.h"

/* ------------------------------------------------------------- step numbers */

void ht_opt_step_latch(struct ht_root *root, bool decided)
{
    root->open = ++root->o->last_step_number;
    root->open_words = root->o->words_changes;
    root->latched = root->config;
    if (decided) {
        root->latched.accumulate = 1;
        root->latched.max_grad_norm = 0;
        root->latched.skip_nonfinite = false;
        root->latched.partial = true;
    }
}

void ht_opt_step_opens(struct ht_root *root)
{
    assert(!root->open);
    ht_opt_step_latch(root, root->decided);
    ht_opt_redo_open(root);
    ht_opt_delta_opens(root);
}

/* -------------------------------------------------------------------- verdict */

static int claimed_by_other(const struct ht_claim *c, char why[HT_OPTIM_ERROR_MAX])
{
    return ht_optim_refuse(why, -EBUSY, "claimed by %s (pid %d)", c->name, c->pid);
}

static int check_claim(const struct ht_claim *c, uint64_t claim, char why[HT_OPTIM_ERROR_MAX])
{
    if (claim == c->id)
        return 0;
    if (!claim)
        return claimed_by_other(c, why);
    if (!c->id)
        return ht_optim_refuse(why, -ESTALE, "the claim of this descriptor has ended: claim again, or unclaim");
    return ht_optim_refuse(why, -ESTALE, "the claim of this descriptor has ended: now claimed by %s (pid %d)", c->name,
                           c->pid);
}

int ht_opt_may_steer(const struct ht_root *root, struct ht_optim_steer *by)
{
    int rc = check_claim(&root->claim, by->claim, by->why);
    uint64_t open = root->redo.replaying ? 0 : root->open;

    if (!rc && by->conditional && by->step_open != open)
        rc = ht_optim_refuse(by->why, -ESTALE, "if=%llu: the open step is %llu%s", (ull)by->step_open, (ull)open,
                             open ? "" : ": none is open");
    by->refused = rc != 0;
    return rc;
}

int ht_optim_may_steer(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    int rc = !root || !root->exists ? -ENOENT : root->frozen ? -EROFS : ht_opt_may_steer(root, by);
    unlock(o);
    return rc;
}

int ht_opt_gate_enter_by(struct ht_root *root, struct ht_optim_steer *by)
{
    struct ht_optim_steer anyone = {.claim = 0};
    int rc = ht_opt_gate_enter(root);

    if (rc)
        return rc;
    rc = ht_opt_may_steer(root, by ? by : &anyone);
    if (rc)
        ht_opt_gate_leave(root);
    return rc;
}

/* --------------------------------------------------------------------- claims */

static int take_claim(struct ht_root *root, struct ht_optim_claim *want, char why[HT_OPTIM_ERROR_MAX])
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_claim *c = &root->claim;

    if (c->id && c->id != want->held && !(want->takeover && strcmp(want->takeover, c->name) == 0))
        return claimed_by_other(c, why);
    if (!c->id || c->id != want->held)
        c->id = ++root->o->last_claim;
    c->pid = want->pid;
    snprintf(c->name, sizeof(c->name), "%s", want->name);
    want->held = c->id;
    return 0;
}

int ht_optim_claim(struct ht_optim *o, uint64_t id, struct ht_optim_claim *want, char why[HT_OPTIM_ERROR_MAX])
{
    struct ht_root *root = ht_opt_root_get(o, id);

    why[0] = '\0';
    if (!root)
        return -ENOENT;
    lock(o);
    /* A command that runs comes to its end first. */
    int rc = ht_opt_gate_enter(root);
    if (!rc) {
        rc = take_claim(root, want, why);
        ht_opt_gate_leave(root);
    }
    ht_opt_root_put(root);
    unlock(o);
    return rc;
}

bool ht_optim_claimed(struct ht_optim *o, uint64_t id, int *out_pid, char why[HT_OPTIM_ERROR_MAX])
{
    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    bool claimed = root && root->claim.id && claimed_by_other(&root->claim, why);
    if (claimed)
        *out_pid = root->claim.pid;
    unlock(o);
    return claimed;
}

int ht_optim_unclaim(struct ht_optim *o, uint64_t id, uint64_t claim)
{
    lock(o);
    struct ht_root *root = ht_opt_root_find(o, id);
    bool held = root && claim && root->claim.id == claim;
    if (held)
        root->claim = (struct ht_claim){0};
    unlock(o);
    return held ? 0 : -ESTALE;
}
