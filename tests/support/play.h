/* SPDX-License-Identifier: Apache-2.0 */
/*
 * play.h - one script on the whole daemon but FUSE, during which something fails, and a judge who looks at what came of it:
 *
 *   no lie     what failed changed nothing; what was read is right; what was acknowledged is there after a mount without the fault
 *   no damage  fsck finds nothing, and the store works on
 *   no leak    in the run under ASan; no hang: tests have a time limit
 *
 * The script: files, fsync, clone, unlink, truncate, compaction, eviction, scrub, and a model with dense and sparse gradients that are
 * accumulated, clipping, memory that is handed out, steps and aborts; at the end unmount or crash.
 */
#ifndef HITRAIN_TESTS_SUPPORT_PLAY_H
#define HITRAIN_TESTS_SUPPORT_PLAY_H

#include "tests/support/stack.h"

enum { PLAY_FILES = 5, PLAY_VERSIONS_MAX = 12 };

struct play_file {
    const char *name;
    uint64_t version[PLAY_VERSIONS_MAX]; /* what it went through; the last is what it is now */
    unsigned count, acked;
};

struct play {
    struct stack k;
    struct play_file file[PLAY_FILES];
    uint64_t model; /* inode, 0: none */
    uint64_t steps, steps_acked;
    bool model_acked;
    const char *wrong; /* the first thing that was */
    unsigned failures; /* calls that failed */
};

/* What the model is after each step of a run without faults: first of all, once in each process. */
void play_learn(void);
/* A new store on devices of memory. */
void play_begin(struct play *p, unsigned devices);
/* On a file, through the kernel. False: its file system has no O_DIRECT. */
bool play_begin_file(struct play *p);
/* Mount, script, and unmount (clean) or crash. */
void play_run(struct play *p, bool clean);
/* What is wrong, or NULL. Without any fault now. The devices are closed. */
const char *play_judge(struct play *p);

#endif
