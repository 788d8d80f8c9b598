/* SPDX-License-Identifier: Apache-2.0 */
/* ctl_priv.h - what the files of fs/ctl share. */
#ifndef HITRAIN_FS_CTL_CTL_PRIV_H
#define HITRAIN_FS_CTL_CTL_PRIV_H

#include "fs/ctl/ctl.h"
#include "fs/ctl/line_quota.h"
#include "fs/ctl/parse.h"
#include "tiering/base/idtable.h"
#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/base/event.h"

enum { HT_PROBLEMS_MAX = 256 }; /* remembered texts, see problem.c */

/* The last refused thing of an inode, for the word error. */
struct ht_problem {
    uint64_t ino;     /* that shows it; 0: free */
    uint64_t about;   /* what it is about: ino, or something below it */
    const char *kind; /* what was tried: success of the same ends it */
    uint64_t age;
    uint32_t uid;  /* the owner of ino */
    bool in_model; /* step is known: steps that were done then */
    uint64_t step;
    int64_t time; /* seconds since 1970 */
    char text[HT_CTL_ERROR_MAX];
};

/* A name or inode that is not what a client's caches say, after an abort. */
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
    struct ht_traffic traffic;
    _Atomic uint32_t epoch;

    struct ht_mutex lock;       /* guards what follows; a leaf */
    struct ht_list files, dirs; /* open ones of the hidden tree */
    struct ht_problem problem[HT_PROBLEMS_MAX];
    _Atomic unsigned problems; /* that are there */
    uint64_t problem_age;
    struct ht_stale *stale;
    bool stale_lost; /* memory ran out: everything counts as stale */

    struct ht_event_log *events;
    pthread_t event_thread;
    struct ht_line_quota lines[HT_EVENT_CODES]; /* of that thread */
    struct ht_mutex name_lock;                  /* above names and optimizer */
    bool attached;                              /* ns and optim may be asked for names; name_lock */

    struct ht_mutex root_lock; /* one change of what is a root at a time; above everything else */

    struct ht_rwlock words_lock;      /* override.c; guards what follows */
    struct ht_id_table earlier_words; /* by inode */
    struct ht_list earlier_roots;     /* the same, by model root and by change */
};

/*
 * problem.c: tell people (an event) and programs (word error). kind: what was tried, a text that stays. _below: the model root
 * of ino says it, too, with the path of ino.
 */
void ht_problem_set(struct ht_ctl *c, uint64_t ino, const char *kind, const char *fmt, ...) HT_PRINTF(4, 5);
void ht_problem_set_below(struct ht_ctl *c, uint64_t ino, const char *kind, const char *fmt, ...) HT_PRINTF(4, 5);
/*
 * What was refused to a caller who may only read ino says ino alone: it does not hide what the model says. Else as _below.
 */
void ht_problem_set_for(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, const char *kind,
                        const char *text);
/* Something of this kind succeeded. */
void ht_problem_done(struct ht_ctl *c, uint64_t ino, const char *kind);
/* False: there was none. */
bool ht_problem_clear(struct ht_ctl *c, uint64_t ino);
/* False: none. */
bool ht_problem_get(struct ht_ctl *c, uint64_t ino, struct ht_problem *out);
/* The text with its time, and in a model how many steps were done. As snprintf. */
int ht_problem_tell(const char *text, bool in_model, uint64_t step, int64_t when, char *buf, size_t cap);

/* ctl.c */
void ht_ctl_link(struct ht_ctl *c, struct ht_list *head, struct ht_list *link);
void ht_ctl_unlink(struct ht_ctl *c, struct ht_list *link);
/* Tell the cache of everything an abort left stale. No lock held. */
void ht_ctl_drop_stale(struct ht_ctl *c);
/* A file's content into memory, where its next opener will look for it. WAITS. */
int ht_ctl_prefetch(struct ht_ctl *c, uint64_t ino, struct ht_obj *obj) HT_CHECK;
/* Parameter: its description, with the content kept until ht_ns_close(ns, ino). -EINVAL: no float dtype, or no root. */
int ht_ctl_describe(struct ht_ctl *c, uint64_t ino, struct ht_param_desc *out) HT_CHECK;

/* optimizer.c: the word optimizer. */
int ht_optimizer_set(struct ht_ctl *c, uint64_t ino, const char *value, size_t len, int flags,
                     const struct ht_caller *caller) HT_CHECK;
int ht_optimizer_remove(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller) HT_CHECK;
/* The configuration an inode's attribute says. -ENODATA, -EINVAL with text in err. */
int ht_optimizer_read(struct ht_ctl *c, uint64_t ino, struct ht_optim_config *out,
                      char err[HT_OPTIM_ERROR_MAX]) HT_CHECK;

/*
 * override.c: the word optimizer of files and of directories below a root: it amends what is above.
 * The hook of the optimizer. text NULL in the others: without the word.
 */
int ht_override_of(struct ht_ctl *c, uint64_t ino, uint64_t as_of, const struct ht_optim_config *base,
                   struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX]) HT_CHECK;
/* May ino, below root, have this text? -EINVAL: it makes no sense there; -EBUSY: state of another rule; with err. Under root_lock. */
int ht_override_check(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text,
                      char err[HT_OPTIM_ERROR_MAX]) HT_CHECK;
/* Set or remove it, for the next step that opens. Under root_lock. -EBUSY with err: too many changes in open steps. */
int ht_override_set(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text, int flags,
                    char err[HT_OPTIM_ERROR_MAX]) HT_CHECK;
void ht_override_forget_all(struct ht_ctl *c);

/* shape.c: a shape that is to be set, and the one that is set. -EINVAL with text in err: the file has another number of elements. */
int ht_shape_fits(struct ht_ctl *c, uint64_t ino, const char *text, size_t len, char err[HT_CTL_ERROR_MAX]) HT_CHECK;
int ht_shape_check(struct ht_ctl *c, uint64_t ino, char err[HT_CTL_ERROR_MAX]) HT_CHECK;

/* apply.c: the commands of these names. WAIT. */
int ht_ctl_apply(struct ht_ctl *c, uint64_t root, uint64_t ino) HT_CHECK;
int ht_ctl_drop(struct ht_ctl *c, uint64_t root, uint64_t ino, struct ht_optim_steer *by) HT_CHECK;

/* permission.c: who may do what. The credentials of a moment, kept: groups and all. -ENOMEM */
struct ht_person {
    struct ht_cred cred;
    uint32_t *gids;
    size_t gid_count;
};
int ht_person_init(struct ht_person *p, const struct ht_caller *caller) HT_CHECK;
void ht_person_free(struct ht_person *p);
/* Valid as long as p. */
struct ht_caller ht_person_caller(struct ht_person *p);
/* 0, or -EPERM: neither the owner nor root. */
int ht_ctl_owner(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller) HT_CHECK;
/* 0, or -EACCES: no write permission on the model root, or not the owner where it is sticky. */
int ht_ctl_may_steer(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller) HT_CHECK;
/* May the caller look for a name in it? 0, -EACCES, -ENOTDIR. */
int ht_ctl_may_search(struct ht_ctl *c, uint64_t dir, const struct ht_caller *caller) HT_CHECK;

/* Could the caller come upon this directory by listing those above it? */
bool ht_ctl_may_find(struct ht_ctl *c, uint64_t dir, const struct ht_caller *caller);

/* Who has opened a .hitrain/ctl, and what that descriptor has claimed. Guarded by its conversation. */
struct ht_seat {
    uint64_t root, claim; /* 0: none */
    uint64_t checked;     /* the model root that the person was last found to be allowed to steer; 0: there was none */
    int process;
    struct ht_person person;
};

/* command.c: run one command for directory dir of root (0: the mount's root, no model root). WAITS. */
int ht_command_run(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat, const struct ht_command *cmd,
                   char err[HT_CTL_ERROR_MAX]) HT_CHECK;
/*
 * May the person command dir of root? Steering is checked when ctl is opened; it is checked again here if the directory has come
 * under another root since. -EACCES with text in err.
 */
int ht_seat_check(struct ht_ctl *c, uint64_t dir, uint64_t root, struct ht_seat *seat,
                  char err[HT_CTL_ERROR_MAX]) HT_CHECK;
/* The open ctl is closed: its claim ends. No waiting. */
void ht_seat_leave(struct ht_ctl *c, struct ht_seat *seat);

/* nodes.c: lines of stats for each NUMA node that memory comes from, if there are several; and the same as metrics. */
void ht_node_lines(struct ht_ctl *c, struct ht_buf *out);
void ht_node_metrics(struct ht_ctl *c, struct ht_buf *out);
/* devices.c: a line for each device, key=value separated by tabs; and the same as metrics. */
int ht_device_lines(struct ht_ctl *c, struct ht_buf *out) HT_CHECK;
void ht_device_metrics(struct ht_ctl *c, struct ht_buf *out);

/* figures.c */
/* A text as OpenMetrics writes labels. */
void ht_figures_label(const char *text, char *out, size_t cap);
enum ht_figure_scope { HT_FIGURES_STORE = 1, HT_FIGURES_ROOT = 2, HT_FIGURES_FILE = 4 };
/* What figures an inode has: a set of scopes, 0 for most directories; *out_root: the model root of HT_FIGURES_ROOT. */
unsigned ht_figures_scopes(struct ht_ctl *c, uint64_t ino, uint64_t *out_root);
/* One word. -ENODATA: the inode has no such figure. */
int ht_figures_one(struct ht_ctl *c, uint64_t ino, const char *word, uint64_t *out) HT_CHECK;
bool ht_figures_known(const char *word);
/* All of them as key=value lines. */
int ht_figures_lines(struct ht_ctl *c, uint64_t ino, struct ht_buf *out) HT_CHECK;
/* OpenMetrics text: of one root, or (root 0) of the store and all its roots that the caller may know of. */
int ht_figures_metrics(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller, struct ht_buf *out) HT_CHECK;

#endif
