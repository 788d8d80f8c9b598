/* SPDX-License-Identifier: Apache-2.0 */
/*
 * program.h - one process that serves a vault: its start, its packets, its end. One thread uses it.
 *
 * The child inherits the standard error, one end of a socket, and a memfd of `slots` slots. The memfd is sealed, so a
 * child cannot cut it under a reader.
 */
#pragma once

#include <sys/types.h>

#include "tiering/base/base.h"

enum { HT_REMOTE_TEXT_BYTES = 512 };

/* What a program can answer to a get (mount-helpers/vault/wire.py and errors.py). */
enum ht_remote_result {
    HT_REMOTE_OK = 0,
    HT_REMOTE_MISSING = 2,
    HT_REMOTE_NO_VAULT = 3,
    HT_REMOTE_AGAIN = 6,
    HT_REMOTE_RESULTS = 11, /* all are below */
};

struct ht_remote_program {
    pid_t pid; /* 0: none runs */
    int socket;
    uint8_t *memory;
    size_t memory_bytes;
};

struct ht_remote_answer {
    uint32_t number;
    enum ht_remote_result result;
    uint64_t bytes;
    char text[HT_REMOTE_TEXT_BYTES + 1]; /* printable ASCII; others are ? */
};

/* path: of the program. 0 or -errno. */
int ht_remote_program_start(struct ht_remote_program *p, const char *path, const char *url, uint32_t slots,
                            uint32_t slot_bytes) HT_MUST_CHECK;
/* A get. 0, or an error after which the program is to be ended. */
int ht_remote_program_ask(const struct ht_remote_program *p, uint32_t number, uint32_t slot, uint64_t left_ms,
                          const char *key, uint64_t offset, uint64_t bytes) HT_MUST_CHECK;
/* 0; -EAGAIN: there is none; -EPIPE: the program has ended; -EPROTO: it is no answer to a get. */
int ht_remote_program_answer(const struct ht_remote_program *p, struct ht_remote_answer *out_answer) HT_MUST_CHECK;
/* Lets go of socket and memory. The process ends by itself if it is well behaved; ht_remote_program_reap waits. */
void ht_remote_program_leave(struct ht_remote_program *p);
/* Has the process with this number ended? It is forgotten then. */
bool ht_remote_program_reap(pid_t pid);
