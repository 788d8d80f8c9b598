/* SPDX-License-Identifier: Apache-2.0 */
/*
 * follow.h - `hitrainctl follow`: a copy of a model in another store gets each of its steps. The sender reads logged
 * steps and the files that are no parameters (follow_send.c, follow_files.c); the receiver computes each step again
 * (follow_receive.c).
 */
#ifndef HITRAIN_MOUNT_HELPERS_COPY_FOLLOW_H
#define HITRAIN_MOUNT_HELPERS_COPY_FOLLOW_H

#include "mount-helpers/ctl/ctl.h"
#include "mount-helpers/stream/follow.h"

/* Which logged steps a model has for readers: its attribute redo. last 0: none. */
struct ht_follow_state {
    uint64_t first, last, lineage, publications;
    bool changed;
};
/* 0, or -errno with a message printed. */
int ht_follow_state(const char *root, struct ht_follow_state *out) HT_MUST_CHECK;
/* The number after KEY= in a text of words or lines; 0: there is none. */
uint64_t ht_follow_number(const char *text, const char *key);
/* SIGINT, SIGTERM and SIGHUP make ht_follow_stopped true, and end calls early. */
void ht_follow_catch_signals(void);
bool ht_follow_stopped(void);

/* ---------------------------------------------------------- follow_files.c */

/* The files below a root that are no parameters, as the sender knows them, and the paths of all. */
struct ht_follow_entry {
    char *path;
    uint64_t ino, size;
    int64_t mtime_ns, ctime_ns;
    uint32_t mode;
    bool is_param;
};
struct ht_follow_files {
    const char *root;
    struct ht_follow_entry *entry; /* by number of inode, then by path */
    size_t count, max;
    char *words; /* the last settings that were sent; NULL: none */
};
/* Finds the paths. base: the directory of the kept step that the receiver has, or -1. Prints errors. */
int ht_follow_files_begin(struct ht_follow_files *f, const char *root, int base) HT_MUST_CHECK;
/* The path of a parameter; NULL: no file below the root has this inode. */
const char *ht_follow_param_path(struct ht_follow_files *f, uint64_t ino);
/*
 * Sends changed files, as they are at the end of this step, which is durable. *out_sent false: the model has changed
 * since. Prints errors of files, not those of the writer.
 */
int ht_follow_files_send(struct ht_follow_files *f, uint64_t step, struct ht_follow_writer *w,
                         bool *out_sent) HT_MUST_CHECK;
void ht_follow_files_free(struct ht_follow_files *f);

int ht_follow_send(const char *root, const struct ht_cmd_options *o);
int ht_follow_receive(const char *root, const struct ht_cmd_options *o);

#endif
