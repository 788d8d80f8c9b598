/* SPDX-License-Identifier: Apache-2.0 */
/*
 * harness.h - the whole daemon but FUSE, on devices of memory, driven by one thread; and fsck's passes on them.
 *
 * Inode numbers are used without holding a count: no other thread removes names.
 */
#pragma once

#include "fs/ctl/ctl.h"
#include "fs/participants/participants.h"
#include "optim/optim.h"
#include "tests/support/recorder.h"
#include "tests/support/steps.h"
#include "tiering/api/store.h"

struct harness {
    struct ht_dev *dev[HT_DEVICES_MAX];
    unsigned dev_count;
    uint64_t shm_bytes; /* of DRAM, for shared memory; set before harness_open */
    struct ht_store *store;
    struct ht_ctl *ctl;
    struct ht_participants participants;
    struct ht_ns *ns; /* these two */
    struct ht_optim *optim;
};

/* Opens devices of memory with a new store on them. */
void harness_format(struct harness *k, unsigned dev_count, uint64_t bytes, unsigned lba);
/* On one device that is a file, reached through the kernel. False: its file system has no O_DIRECT. */
bool harness_format_file(struct harness *k, uint64_t bytes);
/* Mount. 0 or -errno; harness_close must follow in either case. */
int harness_open(struct harness *k, unsigned optim_threads) HT_MUST_CHECK;
/* clean: unmount; else as after a crash: nothing is written any more. The devices stay open. */
int harness_close(struct harness *k, bool clean);
void harness_free(struct harness *k); /* the devices */
/* Records all devices, in one order; recorder_stop of the first ends it. */
void harness_record(const struct harness *k, const char *path);

/* Runs all passes of fsck and prints the problems to stdout. Returns their number. */
unsigned harness_fsck(const struct harness *k);
/* The same without a word, of a store that may be in any state; *out_rc: 0, or the error that ended a pass. */
uint64_t harness_problems(const struct harness *k, int *out_rc);
/* The exit status of hitrain-fsck -y; without a word, too. */
int harness_repair(const struct harness *k);

/* 0: there is none. */
uint64_t harness_find(const struct harness *k, uint64_t dir, const char *name);
uint64_t harness_make(const struct harness *k, uint64_t dir, const char *name);
/* 0 or -errno. A file that is not there is made. */
int harness_write(const struct harness *k, uint64_t ino, uint64_t off, const void *data, size_t len) HT_MUST_CHECK;
void harness_put(const struct harness *k, uint64_t dir, const char *name, const void *data, size_t len);
void harness_set_word(const struct harness *k, uint64_t ino, const char *name, const char *value);

/* A small model to train. */
struct harness_param {
    const char *name, *dtype; /* f32 or bf16 */
    uint64_t elements;
};
uint64_t harness_element_bytes(const struct harness_param *p);
/* A model root with its parameters and a file "cursor", not committed. Returns its inode. */
uint64_t harness_model(const struct harness *k, const char *name, const struct harness_param *params, unsigned count,
                       const char *config);
/* A clone of one of its kept steps gets this name in dir, durable. 0 or -errno. */
int harness_clone(const struct harness *k, uint64_t root, const char *step, uint64_t dir, const char *name,
                  uint32_t uid) HT_MUST_CHECK;
extern char harness_why[HT_OPTIM_ERROR_MAX]; /* what a refusal of the last one says */
/* Takes the model back to one of its kept steps. 0 or -errno. */
int harness_rollback(const struct harness *k, uint64_t root, const char *step) HT_MUST_CHECK;
/* Writes and closes the gradient of a parameter. */
/* The second phase of a step of muon: the update comes back unchanged. A skipped step has none. */
void harness_ortho(const struct harness *k, uint64_t root, const struct harness_param *p);
void harness_gradient(const struct harness *k, uint64_t root, const struct harness_param *p, uint64_t seed);
/* A part of a gradient, closed and then taken back (drop). */
void harness_dropped_gradient(const struct harness *k, uint64_t root, const struct harness_param *p, uint64_t seed);
/* The same for a sparse one, of every fifth element. */
void harness_sparse_gradient(const struct harness *k, uint64_t root, const struct harness_param *p, uint64_t seed);
/* The content that a client writes for it, into room for the header and 8 bytes for each element. Returns its bytes. */
size_t harness_sparse_content(uint8_t *out, const struct harness_param *p, uint64_t seed);
/* Parameters, optimizer states, cursor and names of a model as one number; 0: something is missing. */
uint64_t harness_model_hash(const struct harness *k, uint64_t root, const struct harness_param *params, unsigned count);
/* The content of a file mixed into hash; 1 or 2 when it cannot be opened or read. */
uint64_t harness_file_hash(const struct harness *k, uint64_t ino, uint64_t hash);
/* UINT64_MAX: it is no model. */
uint64_t harness_model_step(const struct harness *k, uint64_t root);
