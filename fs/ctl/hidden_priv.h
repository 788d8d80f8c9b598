/* SPDX-License-Identifier: Apache-2.0 */
/* hidden_priv.h - the common part of hidden.c (names) and hidden_file.c (contents). */
#ifndef HITRAIN_FS_CTL_HIDDEN_PRIV_H
#define HITRAIN_FS_CTL_HIDDEN_PRIV_H

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/hidden.h"

/* 0 is no kind: numbers of ordinary inodes have it. */
enum ht_hidden_kind {
    HT_HIDDEN_DIR = 1,   /* .hitrain; base: its directory, as in the next two */
    HT_HIDDEN_GRAD_DIR,  /* .hitrain/grad */
    HT_HIDDEN_STATE_DIR, /* .hitrain/state */
    HT_HIDDEN_PARAM_DIR, /* .hitrain/state/P; base: P, as in the next two */
    HT_HIDDEN_GRAD,      /* .hitrain/grad/P */
    HT_HIDDEN_STATE,     /* .hitrain/state/P/NAME; index: which NAME */
    HT_HIDDEN_CTL,       /* .hitrain/ctl; base: its directory, as in the next */
    HT_HIDDEN_STATS,     /* .hitrain/stats */
    HT_HIDDEN_EVENTS,    /* .hitrain/events of the mount's root */
    HT_HIDDEN_TOPK_DIR,  /* .hitrain/grad-topk; base: its directory */
    HT_HIDDEN_TOPK,      /* .hitrain/grad-topk/P; base: P */
    HT_HIDDEN_TRACE,     /* .hitrain/trace of the mount's root */
    HT_HIDDEN_PLAN,      /* .hitrain/plan of the mount's root */
    HT_HIDDEN_SNAP_DIR,  /* .hitrain/snap; base: the model root's directory. Its entries are ordinary inodes */
};
enum { HT_HIDDEN_STATES_MAX = 255 };

enum ht_hidden_kind ht_hidden_kind(uint64_t ino);
unsigned ht_hidden_index(uint64_t ino);
uint64_t ht_hidden_base(uint64_t ino);
/* The inode whose permissions rule over a hidden one. */
uint64_t ht_hidden_permission_inode(struct ht_ctl *c, uint64_t ino);
void ht_hidden_closedir_all(struct ht_ctl *c);

#endif
