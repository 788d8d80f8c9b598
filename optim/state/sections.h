/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sections.h - the numbers for ranges of a parameter's elements, as its words give them (rules/sections.h).
 *
 * The first gradient of a step latches them with the numbers of the parameter. From then on until the step has ended
 * they stay as they are, but for the factor of the gradient, which a boundary sets while no worker runs. So workers
 * read them without the lock. Numbers that a client has decided wait in the same memory for the first gradient.
 */
#pragma once

#include "optim/rules/kernel.h"
#include "optim/state/context.h"

struct ht_param;

enum { HT_SECTIONS_MAX = 8192 }; /* of a parameter; a text has fewer */

/* Elements [begin, end) of a parameter. */
struct ht_param_section {
    uint64_t begin, end;
    bool frozen; /* no update changes them, or their state */
    struct ht_scalars scalars;
};

struct ht_param_sections {
    uint32_t count;   /* of the step */
    uint32_t decided; /* or those of a client, until a gradient latches them or others */
    uint32_t room;
    struct ht_param_section of[]; /* ascending, apart from each other */
};

/* -EINVAL: these words are none for its next update, with the reason in why. */
int ht_opt_sections_check(const struct ht_param *p, const struct ht_optim_sections *s, char why[HT_OPTIM_ERROR_MAX])
    HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* The same of a rule in two phases: its matrices must be those of the parameter. */
int ht_opt_blocks_check(const struct ht_param *p, const struct ht_optim_config *c, char why[HT_OPTIM_ERROR_MAX])
    HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* Memory for so many, and no longer for many more: between steps. What there was is void. -ENOMEM */
int ht_opt_sections_reserve(struct ht_param *p, size_t count) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* These count for the step, for whose number there is memory. */
void ht_opt_sections_latch(struct ht_param *p, const struct ht_optim_sections *s) HT_REQUIRES(HT_LOCK_OPTIM);
/* Forgets all; adds one to those of the step, or to those that a client has decided. -E2BIG, -ENOMEM */
void ht_opt_sections_clear(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
int ht_opt_sections_add(struct ht_param *p, const struct ht_param_section *s, bool decided)
    HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_sections_free(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
uint64_t ht_opt_sections_bytes(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* How many count for the step. */
uint32_t ht_opt_sections_count(const struct ht_param *p);
/* The factor of its gradient, for all of its elements. */
void ht_opt_set_grad_factor(struct ht_param *p, float factor) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * The numbers for element e; NULL: it is frozen. *n is cut to the elements from there on that have the same. A worker
 * calls it without a lock.
 */
const struct ht_scalars *ht_opt_scalars_at(const struct ht_param *p, uint64_t e, uint64_t *n);
