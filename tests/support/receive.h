/* SPDX-License-Identifier: Apache-2.0 */
/*
 * receive.h - what `hitrainctl restore` asks of the daemon, call by call.
 *
 * The order is that of mount-helpers/vault/restore.py and staging.py: a private directory, with a durable mark, gets a
 * model root, which gets files and state, its step, its mode and a commit, and then moves to
 * its name. Functions return 0 or a negative errno.
 */
#pragma once

#include "tests/support/harness.h"

extern const char receive_name[]; /* of the received model */

enum { RECEIVE_PARAMS = 2 };
struct receive {
    const struct harness *k;
    const struct harness_param *params; /* RECEIVE_PARAMS of at most 2000 elements */
    uint64_t base;                      /* directory of the kept step that the stream builds on, or 0 */
    uint64_t seed;                      /* of the content that differs from it */
    void (*changed)(void *ctx);         /* after each change that is outside the new root; may be NULL */
    void (*between)(void *ctx);         /* after each parameter; may be NULL */
    void *ctx;
};

int receive_begin(const struct receive *r) HT_MUST_CHECK;
int receive_files(const struct receive *r) HT_MUST_CHECK;
int receive_commit(const struct receive *r) HT_MUST_CHECK;
int receive_publish(const struct receive *r) HT_MUST_CHECK;
/* Removes what a receive left, also one that failed or was killed; 0 also if there is nothing. */
int receive_clean(const struct harness *k) HT_MUST_CHECK;
/* Both names as one number: files, state, step, mode and time of the directory, and what is marked as unfinished. */
uint64_t receive_hash(const struct harness *k, const struct harness_param *params);
