/* SPDX-License-Identifier: Apache-2.0 */
/* hidden_priv.h - the common part of hidden.c (names) and hidden_file.c (contents). */
#pragma once

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/hidden.h"

/* 0 is no kind: numbers of ordinary inodes have it. */
enum ht_hidden_kind {
    HT_HIDDEN_DIR = 1,    /* .hitrain; base: its directory, as in the next two */
    HT_HIDDEN_GRAD_DIR,   /* .hitrain/grad */
    HT_HIDDEN_STATE_DIR,  /* .hitrain/state */
    HT_HIDDEN_PARAM_DIR,  /* .hitrain/state/P; base: P, as in the next two */
    HT_HIDDEN_GRAD,       /* .hitrain/grad/P */
    HT_HIDDEN_STATE,      /* .hitrain/state/P/NAME; index: which NAME */
    HT_HIDDEN_CTL,        /* .hitrain/ctl; base: its directory, as in the next */
    HT_HIDDEN_STATS,      /* .hitrain/stats */
    HT_HIDDEN_EVENTS,     /* .hitrain/events of the mount's root */
    HT_HIDDEN_TOPK_DIR,   /* .hitrain/grad-topk; base: its directory */
    HT_HIDDEN_TOPK,       /* .hitrain/grad-topk/P; base: P */
    HT_HIDDEN_TRACE,      /* .hitrain/trace of the mount's root */
    HT_HIDDEN_PLAN,       /* .hitrain/plan of the mount's root */
    HT_HIDDEN_SNAP_DIR,   /* .hitrain/snap; base: the model root's directory. Its entries are ordinary inodes */
    HT_HIDDEN_REDO_DIR,   /* .hitrain/redo; base: the model root's directory, as in the next */
    HT_HIDDEN_REDO,       /* .hitrain/redo/STEP; index: STEP modulo 256 */
    HT_HIDDEN_SHARD_DIR,  /* .hitrain/shard; base: the model root's directory, as in the next */
    HT_HIDDEN_GATHER,     /* .hitrain/gather */
    HT_HIDDEN_DEVICES,    /* .hitrain/devices of the mount's root */
    HT_HIDDEN_BACKGROUND, /* .hitrain/background of the mount's root */
    HT_HIDDEN_ROOTS,      /* .hitrain/roots of the mount's root */
    HT_HIDDEN_KEPT,       /* .hitrain/kept; base: the model root's directory */
    HT_HIDDEN_UPDATE_DIR, /* .hitrain/update; base: its directory */
    HT_HIDDEN_UPDATE,     /* .hitrain/update/P; base: P */
    HT_HIDDEN_ORTHO_DIR,  /* .hitrain/ortho; base: its directory */
    HT_HIDDEN_ORTHO,      /* .hitrain/ortho/P; base: P */
    HT_HIDDEN_DELTA_DIR,  /* .hitrain/delta; base: the model root's directory, as in the next */
    HT_HIDDEN_DELTA,      /* .hitrain/delta/STEP; index: STEP modulo 256 */

    /* These also have a rank, and the number of ranks. */
    HT_HIDDEN_SHARD_RANK,      /* .hitrain/shard/<r>of<R>; base: the model root's directory */
    HT_HIDDEN_SHARD_PARAM_DIR, /* .../param; base: its directory, as in the next two */
    HT_HIDDEN_SHARD_GRAD_DIR,  /* .../grad */
    HT_HIDDEN_SHARD_STATE_DIR, /* .../state */
    HT_HIDDEN_SHARD_STATES,    /* .../state/P; base: P, as in the next three */
    HT_HIDDEN_SHARD_PARAM,     /* .../param/P */
    HT_HIDDEN_SHARD_GRAD,      /* .../grad/P */
    HT_HIDDEN_SHARD_STATE,     /* .../state/P/NAME; index: which NAME */
    HT_HIDDEN_KINDS,
};
static_assert(HT_REDO_READABLE_MAX < 256 && HT_DELTAS_MAX < 256, "the index tells readable steps apart");
enum { HT_HIDDEN_STATES_MAX = 255 };

/* A number that is none has the kind 0. */
enum ht_hidden_kind ht_hidden_kind(uint64_t ino);
unsigned ht_hidden_index(uint64_t ino);
uint64_t ht_hidden_base(uint64_t ino);
/* Whose bytes an inode has: a file, or a state of a parameter. */
struct ht_subject {
    uint64_t file;
    bool is_state;
    unsigned index; /* of the state */
};
/* False: it is another hidden file. */
bool ht_hidden_subject(uint64_t ino, struct ht_subject *out);
static inline bool ht_hidden_is_shard(enum ht_hidden_kind kind)
{
    return kind >= HT_HIDDEN_SHARD_RANK;
}
/* For the owner and root: it names things in directories that not all users may search. */
bool ht_hidden_is_private(uint64_t ino);
/*
 * The bytes of a shard's file, of which d describes the parameter. -ENOENT: by now there is another number of ranks.
 * NULL and 0: it is a state of one number, which each rank has.
 */
struct ht_shard_map;
int ht_hidden_shard_map(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d,
                        struct ht_shard_map **out) HT_MUST_CHECK;
/* The inode whose permissions rule over a hidden one. */
uint64_t ht_hidden_permission_inode(struct ht_ctl *c, uint64_t ino);
/* The number of the readable step of such an inode; 0: there is none any more. */
uint64_t ht_hidden_step(struct ht_ctl *c, uint64_t ino);
void ht_hidden_closedir_all(struct ht_ctl *c);
