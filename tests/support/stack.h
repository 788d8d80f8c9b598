/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stack.h - the whole daemon but FUSE, on devices of memory, driven by one thread; and fsck's passes on them.
 *
 * Numbers of inodes are used without holding a count: nobody else is there to take the names away.
 */
#ifndef HITRAIN_TESTS_SUPPORT_STACK_H
#define HITRAIN_TESTS_SUPPORT_STACK_H

#include "fs/ctl/ctl.h"
#include "optim/optim.h"

struct stack {
    struct ht_dev *dev[HT_DEVICES_MAX];
    unsigned dev_count;
    uint64_t handout_bytes; /* of DRAM, for what is handed out; set before stack_open */
    struct ht_store *store;
    struct ht_ctl *ctl;
    struct ht_ns *ns;
    struct ht_optim *optim;
};

/* Open devices of memory with a new store on them. */
void stack_format(struct stack *k, unsigned dev_count, uint64_t bytes, unsigned lba);
/* On one device that is a file, reached through the kernel. False: its file system has no O_DIRECT. */
bool stack_format_file(struct stack *k, uint64_t bytes);
/* Mount. 0 or -errno; stack_close must follow in either case. */
int stack_open(struct stack *k, unsigned optim_threads) HT_CHECK;
/* clean: unmount; else as after a crash: nothing is written any more. The devices stay open. */
int stack_close(struct stack *k, bool clean);
void stack_free(struct stack *k); /* the devices */
/* Record all devices, in one order; ht_recorder_stop of the first ends it. */
void stack_record(const struct stack *k, const char *path);

/* All passes of fsck; how many problems it finds, told on stdout. */
unsigned stack_fsck(const struct stack *k);
/* The same without a word, of a store that may be in any state; *out_rc: 0, or the error that ended a pass. */
uint64_t stack_problems(const struct stack *k, int *out_rc);
/* The exit status of hitrain-fsck -y; without a word, too. */
int stack_repair(const struct stack *k);

/* 0: there is none. */
uint64_t stack_find(const struct stack *k, uint64_t dir, const char *name);
uint64_t stack_make(const struct stack *k, uint64_t dir, const char *name);
/* 0 or -errno. A file that is not there is made. */
int stack_write(const struct stack *k, uint64_t ino, uint64_t off, const void *data, size_t len) HT_CHECK;
void stack_put(const struct stack *k, uint64_t dir, const char *name, const void *data, size_t len);
void stack_set_word(const struct stack *k, uint64_t ino, const char *name, const char *value);

/* A small model to train. */
struct stack_param {
    const char *name, *dtype; /* f32 or bf16 */
    uint64_t elements;
};
uint64_t stack_element_bytes(const struct stack_param *p);
/* A model root with its parameters and a file "cursor", not committed. Returns its inode. */
uint64_t stack_model(const struct stack *k, const char *name, const struct stack_param *params, unsigned count,
                     const char *config);
/* Write and close the gradient of a parameter. */
void stack_gradient(const struct stack *k, uint64_t root, const struct stack_param *p, uint64_t seed);
/* A part of a gradient, closed and then taken back (drop). */
void stack_dropped_gradient(const struct stack *k, uint64_t root, const struct stack_param *p, uint64_t seed);
/* The same for a sparse one, of every fifth element. */
void stack_sparse_gradient(const struct stack *k, uint64_t root, const struct stack_param *p, uint64_t seed);
/* What a client writes for it, into room for the header and 8 bytes for each element. Returns its bytes. */
size_t stack_sparse_content(uint8_t *out, const struct stack_param *p, uint64_t seed);
/* Parameters, optimizer states, cursor and names of a model as one number; 0: something is missing. */
uint64_t stack_model_hash(const struct stack *k, uint64_t root, const struct stack_param *params, unsigned count);
/* The content of a file mixed into hash; 1 or 2 when it cannot be opened or read. */
uint64_t stack_file_hash(const struct stack *k, uint64_t ino, uint64_t hash);
/* UINT64_MAX: it is no model. */
uint64_t stack_model_step(const struct stack *k, uint64_t root);

#endif
