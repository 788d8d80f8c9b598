/* SPDX-License-Identifier: Apache-2.0 */
/* hidden_priv.h - what files of the hidden tree share: its numbers, and the contents that have a file of their own. */
#pragma once

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/hidden.h"
#include "tiering/base/json.h"
#include "tiering/base/shards.h"

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
 * shard.c: the part of a parameter, its gradient or its state that one rank owns, as the bytes of a file: blocks one
 * after the other, in order (tiering/base/shards.h).
 *
 * A map is of one open file, and does not change: a program that has a shard open when ranks change goes on with the
 * blocks that it had. Lists of blocks are shared, under the lock of ctl.
 */
/*
 * The table of a model root: of its attribute, or without one the even one of so many ranks. -ENOENT: there is one, and
 * it has another number of ranks. ranks 0: any, and -ENODATA without the attribute.
 */
int ht_shard_table(struct ht_ctl *c, uint64_t root, unsigned ranks, struct ht_shards *out) HT_MUST_CHECK;

struct ht_shard_list;
struct ht_shard_map {
    uint64_t bytes; /* of the shard */
    uint64_t block_bytes;
    uint32_t count;
    unsigned rank, ranks;
    struct ht_shard_list *list; /* of the blocks, shared by maps; NULL: the table is even */
};
/*
 * Of a file of whole_bytes, with block_bytes for each block of its parameter. -EFBIG: the parameter has too many
 * blocks. -ENOMEM: also if the lists of all open shards are too long together.
 */
int ht_shard_map(struct ht_ctl *c, const struct ht_shards *table, unsigned rank, uint64_t whole_bytes,
                 uint64_t block_bytes, struct ht_shard_map **out) HT_MUST_CHECK;
void ht_shard_map_free(struct ht_ctl *c, struct ht_shard_map *m);
/* Block i of the shard is this one of the parameter. In ascending order: only the last one may have fewer bytes. */
uint64_t ht_shard_block(const struct ht_shard_map *m, uint64_t i);
/* At the end: no map is left. */
void ht_shard_forget_all(struct ht_ctl *c);
/* Calls fn for the pieces of [off, off+len) of the shard, with their places in the whole. Ends with its first error. */
typedef ssize_t (*ht_shard_fn)(void *ctx, uint64_t whole_off, void *buf, size_t len);
ssize_t ht_shard_each(const struct ht_shard_map *m, uint64_t off, void *buf, size_t len, ht_shard_fn fn,
                      void *ctx) HT_MUST_CHECK;
/*
 * The bytes of a shard's file, of which d describes the parameter. -ENOENT: by now there is another number of ranks.
 * NULL and 0: it is a state of one number, which each rank has.
 */
int ht_hidden_shard_map(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d,
                        struct ht_shard_map **out) HT_MUST_CHECK;
/* The inode whose permissions rule over a hidden one. */
uint64_t ht_hidden_permission_inode(struct ht_ctl *c, uint64_t ino);
/* The number of the readable step of such an inode; 0: there is none any more. */
uint64_t ht_hidden_step(struct ht_ctl *c, uint64_t ino);
void ht_hidden_closedir_all(struct ht_ctl *c);

/* delta.c: .hitrain/delta/STEP. */
struct ht_delta_file;
/*
 * -ENOENT: the step has none, or none any more. -EACCES: a parameter is not the caller's to read. caller NULL: the
 * daemon itself.
 */
int ht_delta_open(struct ht_ctl *c, uint64_t root, uint64_t step, const struct ht_caller *caller,
                  struct ht_delta_file **out) HT_MUST_CHECK;
void ht_delta_close(struct ht_delta_file *f);
uint64_t ht_delta_bytes(const struct ht_delta_file *f);
/* WAITS for a device. */
ssize_t ht_delta_read(struct ht_delta_file *f, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;

/* gather.c: .hitrain/gather. */
struct ht_gather;
int ht_gather_new(struct ht_ctl *c, uint64_t root, int flags, const struct ht_caller *caller,
                  struct ht_gather **out) HT_MUST_CHECK;
/* No other call is in progress. */
void ht_gather_free(struct ht_gather *g);
/*
 * lines: as in struct ht_ioctl_gather. All become members, or none: -E2BIG, -EDQUOT, -ENOMEM for a limit. WAITS: for a
 * boundary.
 */
int ht_gather_add(struct ht_gather *g, const char *lines, size_t len, const struct ht_caller *caller) HT_MUST_CHECK;
/* WAITS for updates of what is read. */
ssize_t ht_gather_read(struct ht_gather *g, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
/* waits false: -EAGAIN, where it would WAIT for updates. Then the same bytes are written again. */
ssize_t ht_gather_write(struct ht_gather *g, uint64_t off, const void *buf, size_t len, bool waits) HT_MUST_CHECK;

/*
 * feed.c: one reader of a hidden file of JSON Lines: a stream of lines, from the first entry or after the one whose
 * number is the offset of the first read; then offsets count no more. At the last entry reads end, and later ones go
 * on.
 *
 * ht_feed_next writes lines for one or more entries after number *after, and sets *after to the last one's. 1, or 0:
 * there are none; or -errno. One call for a feed at a time.
 */
typedef int ht_feed_next(void *ctx, uint64_t *after, FILE *to);

struct ht_feed;
/* free_ctx: with ctx when the feed closes, or if it cannot open; NULL: ctx is not the feed's. */
int ht_feed_open(ht_feed_next *next, void (*free_ctx)(void *ctx), void *ctx, struct ht_feed **out) HT_MUST_CHECK;
/* Lines that were made together at most. */
ssize_t ht_feed_read(struct ht_feed *f, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
void ht_feed_close(struct ht_feed *f);

/*
 * One for each hidden file of JSON Lines; hitrain(7) lists the keys. base: the inode that the file belongs to. Only the
 * lines of roots depend on the caller: they name those that it may know of.
 */
typedef int ht_feed_opener(struct ht_ctl *c, uint64_t base, const struct ht_caller *caller, struct ht_feed **out);
ht_feed_opener ht_event_feed_open, ht_kept_feed_open, ht_plan_feed_open, ht_root_feed_open, ht_trace_feed_open;
/* ctx: the struct ht_ctl, and nothing else. */
ht_feed_next ht_background_lines, ht_device_lines;
/* Begins the object of a line. */
struct ht_json ht_feed_line(FILE *to);
