/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ctl.h - the interface beside plain files: the attributes user.hitrain.* and the bindings between names, optimizer and
 * the cache of clients. Knows nothing about FUSE. The hidden tree .hitrain/ is in hidden.h.
 *
 * Order of life: ht_ctl_new, ht_participants_new with the hooks, ht_ctl_attach, ht_store_mount, ht_participants_start,
 * ht_ctl_start, ht_digests_begin; then ht_ctl_set_cache. The reverse at the end. From ht_ctl_new to
 * ht_ctl_free it is the sink of this process's events (tiering/base/event.h).
 *
 * Locks: its own are leaves, held for a few instructions and never over a call into another layer.
 * WAITS: may wait for I/O and for updates of the optimizer; must not be called by a thread that an update, an
 * invalidation or a transaction may wait for.
 */
#pragma once

#include <stdatomic.h>
#include "tiering/api/object.h"
#include "tiering/api/store.h"
#include "optim/optim.h"
#include "fs/ns/ns.h"

struct ht_ctl;
struct ht_caller;

/* options: the attribute options of the mount's root, text that stays; NULL: there is none. */
int ht_ctl_new(struct ht_store *s, const char *options, struct ht_ctl **out) HT_MUST_CHECK;
void ht_ctl_attach(struct ht_ctl *c, struct ht_ns *ns, struct ht_optim *o);
/* Names and optimizer are about to go: logs the events so far, and later ones without paths. */
void ht_ctl_detach(struct ht_ctl *c);
/* Gives every model root its optimizer back, after a mount. WAITS. */
int ht_ctl_start(struct ht_ctl *c) HT_MUST_CHECK;
void ht_ctl_free(struct ht_ctl *c);

/* digest.c: computes digests of kept steps in the background. After the mount. -ENOMEM. */
int ht_digests_begin(struct ht_ctl *c) HT_MUST_CHECK;
/* Before names and optimizer stop. Also after a begin that failed, or none. WAITS. */
void ht_digests_end(struct ht_ctl *c);

/* Ends a recall. At the same place. WAITS for the vault, no longer than its timeout. */
void ht_recalls_end(struct ht_ctl *c);
/*
 * HT_IOCTL_PLACES and HT_IOCTL_PLACES_TELL, on the inode of a file or of a state. -ENOTTY: it is neither. WAITS for
 * updates, and for requests of the kernel.
 */
int ht_cold_set_places(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller,
                       const struct ht_ioctl_places *in) HT_MUST_CHECK;
int ht_cold_tell_places(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller,
                        struct ht_ioctl_places *io) HT_MUST_CHECK;

/* What it binds together: names and optimizer once they are attached; the hooks, which they are made with, before. */
struct ht_ctl_parts {
    struct ht_store *store;
    struct ht_ns *ns;
    struct ht_optim *optim;
    struct ht_traffic *traffic;
    const struct ht_ns_hooks *ns_hooks;
    const struct ht_optim_hooks *optim_hooks;
};
struct ht_ctl_parts ht_ctl_parts(struct ht_ctl *c);

/* The holder of copies of names, attributes and content (the kernel). Dropping may block; called with no lock held. */
struct ht_ctl_cache {
    void *ctx;
    /* len 0: everything from off on. */
    void (*drop_data)(void *ctx, uint64_t ino, uint64_t off, uint64_t len);
    void (*drop_name)(void *ctx, uint64_t parent, const char *name);
    /*
     * The window of this gradient (ht_hidden_gradient) that clients store into, with a reference; NULL: there is none.
     * Does not wait.
     */
    struct ht_obj *(*mapped)(void *ctx, uint64_t gradient);
    /* Prefetches a file's content to the place of its next opener. False: that is the store's own memory. WAITS. */
    bool (*bring)(void *ctx, uint64_t ino, struct ht_obj *obj);
    /* A file that no program has any more need not be ready for its next opener. */
    void (*rest)(void *ctx, uint64_t ino);
    /* Requests of this model root that nobody wants any more need not wait: a replay of logged steps begins. */
    void (*replay_begins)(void *ctx, uint64_t root);
};
/* NULL: there is no such cache. */
void ht_ctl_set_cache(struct ht_ctl *c, const struct ht_ctl_cache *cache);

/* ----------------------------------------------------------------- callers */

/* Supplementary groups are read only when the rest does not decide. */
struct ht_caller {
    struct ht_cred cred;
    size_t (*groups)(void *ctx, uint32_t *gids, size_t cap); /* how many; may be NULL */
    void *ctx;
    int (*process)(void *ctx); /* its number, for messages; 0: unknown; may be NULL */
};
/* 0 or -EACCES. mask: R_OK, W_OK, X_OK. -EACCES also for an inode that is gone. */
int ht_ctl_access(struct ht_ctl *c, uint64_t ino, int mask, const struct ht_caller *caller) HT_MUST_CHECK;

/* ---------------------------------------------------------------- counters */

enum ht_traffic_kind { HT_TRAFFIC_PARAM, HT_TRAFFIC_GRAD, HT_TRAFFIC_STATE, HT_TRAFFIC_OTHER, HT_TRAFFIC_KINDS };

/* Bytes that crossed the mount. */
struct ht_traffic {
    _Atomic uint64_t read_bytes[HT_TRAFFIC_KINDS];
    _Atomic uint64_t written_bytes[HT_TRAFFIC_KINDS];
    _Atomic uint64_t requests;
    _Atomic uint64_t parked_reads;                             /* reads that waited for an update */
    _Atomic uint64_t workers;                                  /* threads that take requests */
    _Atomic uint64_t job_threads;                              /* threads for requests that may wait for others */
    _Atomic uint64_t jobs_left;                                /* of these, aborts that wait for directories */
    _Atomic uint64_t passthrough_opens, passthrough_fallbacks; /* opens passed through; those that could not be */
};

/*
 * Grows whenever the facts that an open file remembers of its inode (its root, its dtype, its mode) may have changed.
 */
uint32_t ht_ctl_epoch(struct ht_ctl *c);
void ht_ctl_changed(struct ht_ctl *c);
/* Something ends at a model root only without kept steps: says so in its attribute error. True: it has some. */
bool ht_ctl_report_kept(struct ht_ctl *c, uint64_t root, const char *kind);
/* Ends all kept steps of a root that goes. -EBUSY: the caller may not, and its attribute error says so. WAITS. */
int ht_ctl_forget_kept(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller) HT_MUST_CHECK;
/* The model root that this file is a parameter of, or 0. */
uint64_t ht_ctl_param(struct ht_ctl *c, uint64_t ino);
/*
 * Returns when the updates of these bytes of a parameter that were queued before the call are applied. -EINTR: the
 * client does not want its request any more (ht_activity_interrupted). WAITS.
 */
int ht_ctl_wait_updates(struct ht_ctl *c, uint64_t ino, uint64_t off, uint64_t len) HT_MUST_CHECK;

/* -------------------------------------------------- attributes of hitrain */

/* True for names of user.hitrain.*: they go to the functions below, every other name to fs/ns. */
bool ht_attribute_match(const char *name);
/*
 * -EINVAL with the reason in the log and in the word error; -EOPNOTSUPP: read-only. WAITS when
 * ht_attribute_waits(name).
 */
int ht_attribute_set(struct ht_ctl *c, uint64_t ino, const char *name, const void *value, size_t len, int flags,
                     const struct ht_caller *caller) HT_MUST_CHECK;
/* cap 0: the length. -ENODATA, -ERANGE. */
ssize_t ht_attribute_get(struct ht_ctl *c, uint64_t ino, const char *name, void *buf, size_t cap) HT_MUST_CHECK;
int ht_attribute_remove(struct ht_ctl *c, uint64_t ino, const char *name, const struct ht_caller *caller) HT_MUST_CHECK;
bool ht_attribute_waits(const char *name);

/* ------------------------------------------------------------------ errors */

/*
 * A client's write of len bytes at off failed. The client got the error, but may have ignored it (DeepSpeed always
 * does): the word error keeps it, and there is an event. unseen: no client got it (pages of a mapping): the next fsync
 * and close of the file return it, too.
 */
void ht_ctl_write_failed(struct ht_ctl *c, uint64_t ino, uint64_t off, uint64_t len, int error, bool unseen);

/* ------------------------------------------------------------- durability */

/*
 * fsync of a file or directory: -EBUSY for a parameter while a step of its root is open, and
 * for a directory with a new one. WAITS for I/O only.
 */
int ht_ctl_fsync(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller) HT_MUST_CHECK;
/* True: fsync of this directory's descriptor is a commit (ht_ctl_commit). */
bool ht_ctl_is_root(struct ht_ctl *c, uint64_t dir);
/* Makes a boundary, and everything below the root durable; -EACCES if the caller may not steer it. WAITS. */
int ht_ctl_commit(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller) HT_MUST_CHECK;
