/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault_scenario.h - one script on the whole daemon but FUSE, during which something fails, and a check of the result:
 *
 *   no lie     failed calls changed nothing; reads are right; after a mount without the fault all
 *              acknowledged changes are there
 *   no damage  fsck finds nothing, and the store works on
 *   no leak    in the run under ASan; no hang: tests have a time limit
 *
 * The script: files, fsync, clone, unlink, truncate, checkpoint, eviction, scrub, and a model with dense and sparse
 * gradients that are accumulated, clipping, shared memory, steps and aborts; at the end unmount or crash.
 */
#pragma once

#include "tests/support/harness.h"

enum { FAULT_SCENARIO_FILES = 5, FAULT_SCENARIO_VERSIONS_MAX = 12 };

struct fault_scenario_file {
    const char *name;
    uint64_t version[FAULT_SCENARIO_VERSIONS_MAX]; /* all its versions; the last is the present one */
    unsigned count, acked;
};

struct fault_scenario {
    struct harness k;
    struct fault_scenario_file file[FAULT_SCENARIO_FILES];
    uint64_t model; /* inode, 0: none */
    uint64_t steps, steps_acked;
    bool model_acked;
    const char *wrong; /* the first thing that was */
    unsigned failures; /* calls that failed */
};

/* Learns the model's state after each step of a run without faults: first of all, once in each process. */
void fault_scenario_learn(void);
/* A new store on devices of memory. */
void fault_scenario_begin(struct fault_scenario *p, unsigned devices);
/* On a file, through the kernel. False: its file system has no O_DIRECT. */
bool fault_scenario_begin_file(struct fault_scenario *p);
/* Mount, script, and unmount (clean) or crash. */
void fault_scenario_run(struct fault_scenario *p, bool clean);
/* Checks without any fault, and closes the devices. Returns NULL, or a text that names the problem. */
const char *fault_scenario_check(struct fault_scenario *p);
