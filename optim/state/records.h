/* SPDX-License-Identifier: Apache-2.0 */
/* records.h - what the log has of roots and parameters. */
#pragma once

#include "optim/state/param.h"

/* Log bytes of a record, with its header; that of a parameter with as many states as there may be. */
enum {
    HT_OPT_ROOT_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 16,
    HT_OPT_REDO_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 40,
    HT_OPT_REDO_DEL_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 8,
    HT_OPT_PARAM_RECORD_BYTES = HT_RECORD_HEADER_BYTES + 40 + HT_STATES_MAX * 16,
};

enum ht_opt_record_type {
    HT_REC_OPT_ROOT = HT_REC_OPT_FIRST,
    HT_REC_OPT_ROOT_DEL = HT_REC_OPT_FIRST + 1,
    HT_REC_OPT_PARAM = HT_REC_OPT_FIRST + 2,
    HT_REC_OPT_PARAM_DEL = HT_REC_OPT_FIRST + 3,
    HT_REC_OPT_REDO = HT_REC_OPT_FIRST + 4,
    HT_REC_OPT_REDO_DEL = HT_REC_OPT_FIRST + 5,
};

/* Log bytes for the record of a parameter, if it has none yet; gives them back. */
static inline int ht_opt_record_reserve(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = p->log_reserved ? 0 : ht_store_log_reserve(p->o->store, HT_OPT_PARAM_RECORD_BYTES);

    p->log_reserved |= !rc;
    return rc;
}

static inline void ht_opt_record_unreserve(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (p->log_reserved)
        ht_store_log_unreserve(p->o->store, HT_OPT_PARAM_RECORD_BYTES);
    p->log_reserved = false;
}

/* A record that has only the number of a root or a parameter. */
static inline void ht_opt_put_id(struct ht_buf *b, uint16_t type, uint64_t id)
{
    size_t mark = ht_record_begin(b, type);

    ht_buf_put_u64(b, id);
    ht_record_end(b, mark);
}

int ht_opt_replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len) HT_EXCLUDES(HT_LOCK_OPTIM);
int ht_opt_replayed(void *ctx) HT_EXCLUDES(HT_LOCK_OPTIM);
int ht_opt_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes) HT_EXCLUDES(HT_LOCK_OPTIM);
void ht_opt_put_root(struct ht_buf *b, const struct ht_root *r) HT_REQUIRES(HT_LOCK_OPTIM);
/* Inside a transaction: one parameter's record, if the log has another one; frees it if it is gone. */
void ht_opt_publish_param(struct ht_param *p, struct ht_tx *tx) HT_REQUIRES(HT_LOCK_OPTIM);
/* The optimizer's part in a commit, an abort and the end of a root: see struct ht_participant. */
size_t ht_opt_pending_bytes(void *ctx, uint64_t scope) HT_EXCLUDES(HT_LOCK_OPTIM);
void ht_opt_publish(void *ctx, uint64_t scope, size_t expected_bytes, struct ht_tx *tx) HT_EXCLUDES(HT_LOCK_OPTIM);
void ht_opt_abort(void *ctx, uint64_t scope) HT_EXCLUDES(HT_LOCK_OPTIM);
/* Its part in a copy of a root. */
int ht_opt_copy(void *ctx, struct ht_copy *k) HT_EXCLUDES(HT_LOCK_OPTIM);
void ht_opt_copied(void *ctx, struct ht_copy *k, struct ht_tx *tx) HT_EXCLUDES(HT_LOCK_OPTIM);
void ht_opt_copy_dropped(void *ctx, struct ht_copy *k) HT_EXCLUDES(HT_LOCK_OPTIM);
void ht_opt_ended(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx) HT_EXCLUDES(HT_LOCK_OPTIM);
/*
 * check.c. Takes out the problems that were found when the log had been read, and remembers them for fsck if the store
 * leaves out.
 */
int ht_opt_check_states(struct ht_optim *o) HT_REQUIRES(HT_LOCK_OPTIM) HT_MUST_CHECK;
void ht_opt_problems_free(struct ht_optim *o);
