/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rule.h - an update rule: its words, the state it keeps, its scalars, its arithmetic.
 *
 * Each rule is one file of this folder, with its formula and its source. A new rule needs such a file, a line in all.h,
 * its numbers in enum ht_rule_id and enum ht_kernel, and the kinds of state that no other rule keeps.
 */
#pragma once

#include "optim/rules/forms.h"
#include "optim/rules/kernel.h"
#include "optim/rules/config.h"

/* Numbers are on disk. */
enum ht_state_kind {
    HT_STATE_EXP_AVG = 1,
    HT_STATE_EXP_AVG_SQ = 2,
    HT_STATE_MASTER = 3, /* of parameters of two bytes, whatever the rule */
    HT_STATE_MOMENTUM_BUFFER = 4,
    HT_STATE_SUM = 5,
    HT_STATE_MASTER_LOW = 6,    /* of bf16 parameters: the bits of masters that those miss, two bytes each */
    HT_STATE_MASTER_BLOCKS = 7, /* the facts on each block of these (master.h) */
    HT_STATE_KINDS
};
/* Its file below .hitrain/state/P/, PyTorch's name where it has one; NULL: no such kind. */
const char *ht_state_word(unsigned kind);
/* May state of this kind be kept in this form? */
bool ht_form_fits(unsigned form, uint8_t kind);
/* Is it never negative, so that dynamic codes are unsigned? */
bool ht_state_is_positive(uint8_t kind);

struct ht_rule {
    const char *name;
    const char *words; /* those of its own, in the order of messages; others are in config.c */
    struct ht_optim_config defaults;
    /* The error of a combination of words that are right each, or NULL. */
    const char *(*refuse)(const struct ht_optim_config *c);
    /* t: number of this parameter's step, from 1. */
    void (*scalars)(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out);
};
const struct ht_rule *ht_rule_of(enum ht_rule_id id);
/* By its name, in capitals or not; or NULL. */
const struct ht_rule *ht_rule_named(const char *name);
/* Names of all rules, a space between. */
void ht_rule_names(char *buf, size_t cap);
void ht_rule_scalars(const struct ht_optim_config *c, uint64_t t, struct ht_scalars *out);
/* The form (forms.h) in which its words keep state of this kind. */
uint8_t ht_rule_form(const struct ht_optim_config *c, unsigned kind);
/* The kernel of a configuration. */
enum ht_kernel ht_rule_kernel(const struct ht_optim_config *c);
/* Kinds of state beside the master, in the order of ht_update.state; 0: no more. */
const uint8_t *ht_kernel_kinds(enum ht_kernel kernel);
/* How many these are. */
unsigned ht_kernel_states(enum ht_kernel kernel);
/* The same kinds? */
bool ht_kernel_same_states(enum ht_kernel a, enum ht_kernel b);
