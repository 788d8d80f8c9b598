/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steer.c - who may steer a root, and which step is meant.
 *
 * A step has a number while it is open. The numbers begin at random in each mount and count up, so no later step has the
 * number of an earlier one. A claim names the one client that may end steps or take them back; it is kept in memory only.
 *
 * The verdict (ht_opt_may_steer) is taken under the gate, in the same critical section that begins to drain: until the
 * command has ended no other command runs, and no gradient opens a step.
 */
#include "optim/optim_priv.h"

#include <stdio.h>
#include <sys/random.h>
#include <time.h>

typedef unsigned long long ull;

/* ------------------------------------------------------------- step numbers */

/* 62 bits, so that the numbers of a mount stay below 2^63. The clock serves where the kernel has no random bytes. */
void ht_opt_step_numbers_begin(struct ht_optim *o)
{
    uint64_t seed;

    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != (ssize_t)sizeof(seed)) {
        struct timespec now;

        clock_gettime(CLOCK_REALTIME, &now);
        seed = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    }
    o->last_step_number = seed & ((1ull << 62) - 1);
}

void ht_opt_step_opens(struct root *root)
{
    assert(!root->open);
    root->open = ++root->o->last_step_number;
    root->open_words = root->o->words_changes;
    root->latched = root->config;
}

/* -------------------------------------------------------------------- verdict */

static int claimed_by_other(const struct claim *c, char why[HT_OPTIM_ERROR_MAX])
{
    snprintf(why, HT_OPTIM_ERROR_MAX, "claimed by %s (pid %d)", c->name, c->pid);
    return -EBUSY;
}

static int claim_ended(const struct claim *c, char why[HT_OPTIM_ERROR_MAX])
{
    if (c->id)
        snprintf(why, HT_OPTIM_ERROR_MAX, "the claim of this descriptor has ended: now claimed by %s (pid %d)", c->name,
                 c->pid);
    else
        snprintf(why, HT_OPTIM_ERROR_MAX, "the claim of this descriptor has ended: claim again, or unclaim");
    return -ESTALE;
}

static int check_claim(const struct root *root, uint64_t claim, char why[HT_OPTIM_ERROR_MAX])
{
    if (claim == root->claim.id)
        return 0;
    return claim ? claim_ended(&root->claim, why) : claimed_by_other(&root->claim, why);
}

int ht_opt_may_steer(const struct root *root, const struct ht_optim_steer *by, char why[HT_OPTIM_ERROR_MAX])
{
    int ret = check_claim(root, by ? by->claim : 0, why);

    if (ret || !by || !by->conditional || by->step_open == root->open)
        return ret;
    if (root->open)
        snprintf(why, HT_OPTIM_ERROR_MAX, "if=%llu: the open step is %llu", (ull)by->step_open, (ull)root->open);
    else
        snprintf(why, HT_OPTIM_ERROR_MAX, "if=%llu: the open step is 0: none is open", (ull)by->step_open);
    return -ESTALE;
}

int ht_optim_may_steer(struct ht_optim *o, uint64_t id, struct ht_optim_steer *by)
{
    lock(o);
    const struct root *root = ht_opt_root_find(o, id);
    int ret = root && root->exists ? ht_opt_may_steer(root, by, by->why) : -ENOENT;
    unlock(o);
    return ret;
}

int ht_opt_gate_enter_by(struct root *root, struct ht_optim_steer *by)
{
    char why[HT_OPTIM_ERROR_MAX];
    int ret = ht_opt_gate_enter(root);

    if (ret)
        return ret;
    ret = ht_opt_may_steer(root, by, by ? by->why : why);
    if (ret)
        ht_opt_gate_leave(root);
    return ret;
}

void ht_opt_refuse_steering(struct root *root, struct ht_optim_steer *by, const char *why)
{
    ht_opt_refuse(root, HT_EVENT_STEP_REFUSED, 0, "%s", why);
    if (by)
        memcpy(by->why, why, sizeof(by->why));
}

/* --------------------------------------------------------------------- claims */

/* Locked. */
static int may_claim(const struct claim *c, const struct ht_optim_claim *want, char why[HT_OPTIM_ERROR_MAX])
{
    if (!c->id || c->id == want->held || (want->takeover && strcmp(want->takeover, c->name) == 0))
        return 0;
    return claimed_by_other(c, why);
}

static void take(struct root *root, struct ht_optim_claim *want)
{
    struct claim *c = &root->claim;

    if (!c->id || c->id != want->held)
        c->id = ++root->o->last_claim;
    c->pid = want->pid;
    snprintf(c->name, sizeof(c->name), "%s", want->name);
    want->held = c->id;
}

int ht_optim_claim(struct ht_optim *o, uint64_t id, struct ht_optim_claim *want, char why[HT_OPTIM_ERROR_MAX])
{
    struct root *root = ht_opt_root_get(o, id);

    why[0] = '\0';
    if (!root)
        return -ENOENT;
    lock(o);
    /* A command that runs comes to its end first. */
    int ret = ht_opt_gate_enter(root);
    if (!ret) {
        ret = may_claim(&root->claim, want, why);
        if (!ret)
            take(root, want);
        ht_opt_gate_leave(root);
    }
    ht_opt_root_put_locked(root);
    unlock(o);
    return ret;
}

int ht_optim_unclaim(struct ht_optim *o, uint64_t id, uint64_t claim)
{
    lock(o);
    struct root *root = ht_opt_root_find(o, id);
    bool held = root && claim && root->claim.id == claim;
    if (held)
        root->claim = (struct claim){0};
    unlock(o);
    return held ? 0 : -ESTALE;
}
