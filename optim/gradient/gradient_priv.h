/* SPDX-License-Identifier: Apache-2.0 */
/* gradient_priv.h - inside gradient/: an open gradient. */
#pragma once

#include "optim/optim.h"
#include "optim/state/interval_set.h"

struct ht_param;
struct ht_range_own;
struct ht_root;

/* Bytes of a gradient: of its ranges those that has() names; NULL: all. */
struct ht_opt_window {
    uint64_t begin, end; /* end 0: none */
    ht_grad_part_fn has;
    const void *ctx;
};

/* The bytes that an opener itself wrote since its last flush, if they are kept (grad.c). */
struct ht_opt_account {
    struct ht_optim *o; /* NULL: they are not kept */
    struct ht_quota_user *user;
    uint32_t count, cap;
    struct ht_range_own **own; /* in ascending order of ranges */
};

struct ht_grad {
    struct ht_param *param;
    /* The fields below are valid as long as param.forgotten is since. */
    uint64_t since;
    uint64_t applied;          /* param.applied: mine is valid as long as it is that */
    struct ht_opt_window mine; /* from the first to the last byte written since the last flush */
    struct ht_opt_account account;
    bool spoiled;   /* a write went beyond the end: the next flush refuses this opener's bytes */
    uint64_t sized; /* size that was set after the last write, for the next flush; 0: none */

    bool wrote, refused; /* ever: bytes; a write that failed */
};

#define ht_opt_refuse_gradient(p, ...) ht_opt_refuse((p)->root, HT_EVENT_GRADIENT_REFUSED, (p)->oid, __VA_ARGS__)

/* Was the gradient refused only because the step before failed after its request? The root's error says how it did. */
bool ht_opt_close_failed(struct ht_root *root, int err) HT_EXCLUDES(HT_LOCK_OPTIM);
/* An abort or a drop ended this opener's writes: it begins anew. */
void ht_opt_grad_refresh(struct ht_grad *g) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Writes zeros where the opener left gaps that count as zeros; not locked. Errors as in ht_grad_write, reported. WAITS.
 */
int ht_opt_grad_fill_holes(struct ht_grad *g) HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
/* The opener has written nothing. Its part stays its part. */
void ht_opt_grad_forget_mine(struct ht_grad *g) HT_REQUIRES(HT_LOCK_OPTIM);
/* Its bytes count as not written. If a set cannot be cut for want of memory, its whole range. */
void ht_opt_account_drop(const struct ht_opt_account *a, struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM);
/* A write of this opener went beyond the end: drops its bytes, and makes its next flush fail. */
void ht_opt_grad_spoil(struct ht_grad *g) HT_REQUIRES(HT_LOCK_OPTIM);
/*
 * Writes a whole gradient or nothing. fill gets one window after the other, in order and zeroed, and puts its elements
 * in. window: memory for a whole number of elements. Errors as in ht_grad_write, reported, or those of fill. WAITS.
 */
typedef int (*ht_opt_fill_fn)(void *ctx, uint64_t off, void *buf, size_t len);
int ht_opt_grad_make(struct ht_grad *g, void *window, size_t window_bytes, ht_opt_fill_fn fill, void *ctx)
    HT_EXCLUDES(HT_LOCK_OPTIM) HT_MUST_CHECK;
