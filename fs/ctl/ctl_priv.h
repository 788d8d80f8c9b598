/* SPDX-License-Identifier: Apache-2.0 */
/* ctl_priv.h - the common part of the files of fs/ctl. */
#pragma once

#include "fs/ctl/ctl.h"
#include "fs/ctl/parse.h"
#include "tiering/base/idtable.h"
#include "tiering/base/lock.h"
#include "tiering/base/quota.h"
#include "tiering/base/event.h"
#include "tiering/api/background.h"
#include "tiering/api/stats.h"
#include "tiering/base/trace.h"
#include "tiering/api/tx.h"

enum { HT_LAST_ERRORS_MAX = 256 }; /* remembered texts, see last_error.c */

/* Puts the message into err, as many bytes as an optimizer's. Returns error. */
#define ht_ctl_refuse ht_optim_refuse
static_assert((int)HT_CTL_ERROR_MAX == (int)HT_OPTIM_ERROR_MAX, "one function fills both");

/* The last refused action of an inode, for the word error. */
struct ht_last_error {
    uint64_t ino;     /* that shows it; 0: free */
    uint64_t about;   /* the subject: ino, or something below it */
    const char *kind; /* the refused action: its next success ends the entry */
    uint64_t age;
    uint32_t uid;  /* the owner of ino */
    bool in_model; /* step is known: steps that were done then */
    uint64_t step;
    int64_t time; /* seconds since 1970 */
    char text[HT_CTL_ERROR_MAX];
};

/* A name or inode whose copy in a client's cache is stale after an abort. */
struct ht_stale {
    struct ht_stale *next;
    uint64_t ino, parent;
    char name[]; /* empty: none */
};

struct ht_ctl {
    struct ht_store *store;
    struct ht_ns *ns;
    struct ht_optim *optim;
    struct ht_ns_hooks ns_hooks;
    struct ht_optim_hooks optim_hooks;
    const struct ht_ctl_cache *_Atomic cache;
    const char *options; /* the attribute options, or NULL */
    struct ht_traffic traffic;
    _Atomic uint32_t epoch;

    struct ht_mutex lock;       /* a leaf */
    struct ht_list files, dirs; /* open ones of the hidden tree; lock */
    HT_GUARDED_BY(HT_LOCK_CTL) struct {
        struct ht_last_error last_error[HT_LAST_ERRORS_MAX];
        uint64_t last_error_age;
        struct ht_stale *stale;
        bool stale_lost; /* memory ran out: everything counts as stale */
        struct {
            struct ht_list lists;
            uint64_t bytes;
            unsigned idle;
        } shards; /* shard.c */
        struct {
            struct ht_list users; /* with open files */
            struct ht_quota members;
        } gathers;                /* gather.c */
        struct ht_recall *recall; /* cold.c: the one that runs, or ran last */
    };
    _Atomic unsigned last_errors; /* that are there; changes under lock */

    struct ht_digests *digests; /* digest.c; NULL before the start */
    struct ht_event_log *events;
    uint64_t event_patience_ns; /* an open of .hitrain/events waits so long for names of earlier events */
    pthread_t event_thread;
    struct ht_mutex name_lock; /* above names and optimizer */
    /* ns and optim may be used to find names. */
    bool attached HT_GUARDED_BY(HT_LOCK_EVENT_NAMES);

    struct ht_mutex root_lock; /* one change of the set of roots at a time; above everything else */
    struct ht_mutex cold_lock; /* cold.c: a root has its attribute cold as long as places are set below it */

    struct ht_rwlock words_lock;      /* override.c; guards the fields below */
    struct ht_id_table earlier_words; /* by inode */
    struct ht_list earlier_roots;     /* the same, by model root and by change */
    size_t earlier_bytes;             /* of their texts */
};

HT_MUTEX_OF(ht_ctl_lock, struct ht_ctl, lock, HT_LOCK_CTL)
HT_MUTEX_OF(ht_ctl_name_lock, struct ht_ctl, name_lock, HT_LOCK_EVENT_NAMES)
HT_MUTEX_OF(ht_ctl_root_lock, struct ht_ctl, root_lock, HT_LOCK_ROOTS)
HT_MUTEX_OF(ht_ctl_cold_lock, struct ht_ctl, cold_lock, HT_LOCK_COLD)
HT_RWLOCK_OF(ht_ctl_words_lock, struct ht_ctl, words_lock, HT_LOCK_WORDS)

/*
 * last_error.c: reports an error to people (an event) and programs (the word error). kind: the action, a static text.
 * _below: also at the model root of ino, with the path of ino.
 */
void ht_last_error_set(struct ht_ctl *c, uint64_t ino, const char *kind, const char *fmt, ...) HT_PRINTF(4, 5);
void ht_last_error_set_below(struct ht_ctl *c, uint64_t ino, const char *kind, const char *fmt, ...) HT_PRINTF(4, 5);
/*
 * If the caller may only read ino, the error appears at ino alone: it does not hide the model's error. Else as _below.
 */
void ht_last_error_set_for(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, const char *kind,
                           const char *text);
/* An action of this kind succeeded. */
void ht_last_error_done(struct ht_ctl *c, uint64_t ino, const char *kind);
/* False: there was none. */
bool ht_last_error_clear(struct ht_ctl *c, uint64_t ino);
/* False: none. */
bool ht_last_error_get(struct ht_ctl *c, uint64_t ino, struct ht_last_error *out);
int ht_last_error_format(const char *text, bool in_model, uint64_t step, int64_t when, char *buf, size_t cap);

/* ctl.c */
/*
 * Tells the store the attribute endurance of the mount's root, or that there is none. After each change of it. Any
 * number of threads at a time.
 */
void ht_endurance_apply(struct ht_ctl *c);
void ht_ctl_link(struct ht_ctl *c, struct ht_list *head, struct ht_list *link);
void ht_ctl_unlink(struct ht_ctl *c, struct ht_list *link);
/* The kernel drops its pages of these bytes, or (len 0) of all. WAITS for what its requests wait for. */
void ht_ctl_drop_data(struct ht_ctl *c, uint64_t ino, uint64_t off, uint64_t len);
/* Drops everything that an abort left stale from the cache. No lock held. */
void ht_ctl_drop_stale(struct ht_ctl *c);
/* A file's content into memory, where its next opener will look for it. WAITS. */
int ht_ctl_prefetch(struct ht_ctl *c, uint64_t ino, struct ht_obj *obj) HT_MUST_CHECK;

/* An attribute that is set, or removed: then without a value. */
struct ht_attribute {
    struct ht_ctl *ctl;
    uint64_t ino;
    const char *name; /* whole */
    const char *value;
    size_t len;
    int flags;
    const struct ht_caller *caller;
};

/* optimizer.c: the word optimizer. */
int ht_optimizer_set(const struct ht_attribute *a) HT_MUST_CHECK;
int ht_optimizer_remove(const struct ht_attribute *a) HT_MUST_CHECK;
/* The configuration in an inode's attribute. -ENODATA, -EINVAL with text in err. */
int ht_optimizer_read(struct ht_ctl *c, uint64_t ino, struct ht_optim_config *out,
                      char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;

/*
 * override.c: the word optimizer of files and of directories below a root: it amends the words above. The hook of the
 * optimizer. text NULL in the others: without the word.
 */
int ht_override_of(void *ctl, uint64_t ino, uint64_t as_of, const struct ht_optim_config *base,
                   struct ht_optim_config *out, struct ht_optim_sections *sections,
                   char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
/*
 * May ino, below root, have this text? -EINVAL: it is senseless there; -EBUSY: state of another rule; with err. Under
 * root_lock.
 */
int ht_override_check(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text,
                      char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
/* Sets or removes it, for the next step. Under root_lock. -EBUSY with err: too many changes in open steps. */
int ht_override_set(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text, int flags,
                    char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
void ht_override_forget_all(struct ht_ctl *c);
/* Appends the inode (uint64_t) of each parameter of root that has state. */
int ht_override_stateful(struct ht_ctl *c, uint64_t root, struct ht_buf *out) HT_MUST_CHECK;

/* params.c */
/* The model root that an inode is, or is below; 0: none. */
uint64_t ht_ctl_root_of(struct ht_ctl *c, uint64_t ino);
/* Parameter: its description, with the content kept until ht_ns_close(ns, ino). -EINVAL: no float dtype, or no root. */
int ht_ctl_describe(struct ht_ctl *c, uint64_t ino, struct ht_param_desc *out) HT_MUST_CHECK;
/* Its attribute shape. -ENODATA; -EINVAL, -ERANGE: it is none. */
int ht_shape_of(struct ht_ctl *c, uint64_t ino, struct ht_shape *out) HT_MUST_CHECK;
/* A shape that is to be set, and the present one. -EINVAL with text in err: the file has another number of elements. */
int ht_shape_fits(struct ht_ctl *c, uint64_t ino, const char *text, size_t len,
                  char err[HT_CTL_ERROR_MAX]) HT_MUST_CHECK;
/* Again when a gradient is opened: a program may have set the shape before it wrote the file. */
int ht_shape_check(struct ht_ctl *c, uint64_t ino, char err[HT_CTL_ERROR_MAX]) HT_MUST_CHECK;
int ht_shape_blocks(struct ht_ctl *c, uint64_t ino, struct ht_optim_config *config, struct ht_optim_sections *sections,
                    char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK; /* ht_muon_blocks */
/*
 * Bytes of a parameter, as read and write of its file have them. A read waits for updates of the bytes; a writer has
 * waited, unless it has pages of a mapping. A parameter becomes no longer: -ESTALE. WAITS.
 */
ssize_t ht_ctl_param_read(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
ssize_t ht_ctl_param_write(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, const void *buf,
                           size_t len) HT_MUST_CHECK;

#define HT_MAKING_MAX 64 /* bytes of the attribute making */
/* -EBUSY: its attribute making says that its maker has not committed it. or_claimed: 0 while it is claimed. */
int ht_ctl_need_whole(struct ht_ctl *c, uint64_t root, bool or_claimed, char err[HT_CTL_ERROR_MAX]) HT_MUST_CHECK;

/* permission.c. The credentials of a moment, kept: groups and all. -ENOMEM */
struct ht_person {
    struct ht_cred cred;
    uint32_t *gids;
    size_t gid_count;
};
int ht_person_init(struct ht_person *p, const struct ht_caller *caller) HT_MUST_CHECK;
void ht_person_free(struct ht_person *p);
/* Valid as long as p. */
struct ht_caller ht_person_caller(struct ht_person *p);
/* 0, or -EPERM: neither the owner nor root. */
int ht_ctl_owner(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller) HT_MUST_CHECK;
/*
 * A claim also protects the words of a model that decide the numbers of its steps. -EBUSY: another process has claimed
 * it, which is then in the word error of ino and its root.
 */
int ht_ctl_may_set_words(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *kind,
                         const struct ht_caller *caller) HT_MUST_CHECK;
/* 0, or -EACCES: no write permission on the model root, or not the owner where it is sticky. */
int ht_ctl_may_steer(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller) HT_MUST_CHECK;

/*
 * The inode at a path below dir, with a lookup count. Symbolic links are not followed: a file is named by its own path.
 * -EINVAL: it is empty, begins with a slash, or has "." or "..".
 */
int ht_ctl_resolve(struct ht_ctl *c, uint64_t dir, const char *path, size_t len, const struct ht_caller *caller,
                   uint64_t *out_ino) HT_MUST_CHECK;
/* Could the caller find this directory by listing those above it? Nobody finds a deleted one. */
bool ht_ctl_may_find(struct ht_ctl *c, uint64_t dir, const struct ht_caller *caller);

/* The opener of a .hitrain/ctl, and the claim of that descriptor. Guarded by its session's lock. */
struct ht_seat {
    uint64_t root, claim; /* 0: none */
    uint64_t held;        /* the kept step that does not expire while this is open; 0: none */
    uint64_t checked;     /* the model root that the person was last allowed to steer; 0: none */
    bool makes;           /* if the claimed root is half-made, then since this claimed it, or took it back */
    int process;
    struct ht_person person;
};

/* command.c: run one command for directory dir of root (0: the mount's root, no model root). WAITS. */
int ht_command_run(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat, const struct ht_command *cmd,
                   char err[HT_CTL_ERROR_MAX]) HT_MUST_CHECK;
/*
 * May the person command dir of root? Opening ctl checks the right to steer; this checks it again if the directory has
 * moved under another root since. -EACCES with text in err.
 */
int ht_seat_check(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat,
                  char err[HT_CTL_ERROR_MAX]) HT_MUST_CHECK;
/* The open ctl is closed: its claim and its hold end. No waiting. */
void ht_seat_leave(struct ht_ctl *c, struct ht_seat *seat);

/* A command that runs. A function of one may WAIT; ino: of the file that it names, or 0. */
struct ht_call {
    struct ht_ctl *ctl;
    uint64_t dir, root; /* of the ctl; root 0: the directory is in no model */
    struct ht_seat *seat;
    struct ht_caller caller; /* who opened it */
    const struct ht_command *cmd;
    struct ht_optim_steer by; /* by.why comes before err */
    char *err;                /* HT_CTL_ERROR_MAX bytes; empty: the error number says it */
};
/* kept.c: make, use and end kept steps. */
int ht_kept_snapshot(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;
int ht_kept_hold(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;
int ht_kept_archived(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;
int ht_kept_forget(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;
int ht_kept_rollback(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;
int ht_kept_clone(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;

/* cold.c: commands; texts of attributes. The attribute cold goes where no content lies in the vault: WAITS. */
int ht_cold_vault(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;
int ht_cold_begin_root(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;
int ht_cold_recall(struct ht_call *q, uint64_t ino) HT_MUST_CHECK;
ssize_t ht_cold_vault_text(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap) HT_MUST_CHECK;
ssize_t ht_cold_recall_text(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap) HT_MUST_CHECK;
void ht_cold_settle(struct ht_ctl *c, uint64_t root);

/* digest.c: why the kept step with this directory has no digest, for people. False: it did not fail in this mount. */
bool ht_digest_error(struct ht_ctl *c, uint64_t kept, char out[HT_CTL_ERROR_MAX]);

/* figures.c */
/* Lines of stats for each NUMA node that memory comes from, if there are several. */
void ht_node_lines(struct ht_ctl *c, struct ht_buf *out);
/* Metrics of devices, engines in the background, and these nodes. */
void ht_part_metrics(struct ht_ctl *c, struct ht_buf *out);
/* A figure at this offset in the struct that has it. */
uint64_t ht_metrics_value(const void *of, size_t offset);
/* What comes before the samples of a metric. Its unit is bytes if its name says so. */
void ht_metrics_head(struct ht_buf *out, const char *name, const char *type, const char *help);
/* A text as OpenMetrics writes labels. */
void ht_metrics_label(const char *text, char *out, size_t cap);
/* metrics.c */
/* One word. -ENODATA: the inode has no such figure. */
int ht_metrics_one(struct ht_ctl *c, uint64_t ino, const char *word, uint64_t *out) HT_MUST_CHECK;
bool ht_metrics_known(const char *word);
/* All figures as key=value lines. */
int ht_metrics_lines(struct ht_ctl *c, uint64_t ino, struct ht_buf *out) HT_MUST_CHECK;
/* OpenMetrics text: of one root, or (root 0) of the store and all its roots that the caller may know of. */
int ht_metrics_openmetrics(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller,
                           struct ht_buf *out) HT_MUST_CHECK;
