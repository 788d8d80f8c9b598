/* SPDX-License-Identifier: Apache-2.0 */
/* kept.h - kept steps: their list (kept.c), and copies of model roots (copy.c). */
#pragma once

#include "fs/ns/ns_priv.h"
#include "tiering/api/keep.h"

/* A kept step, as the log has it. */
struct ht_ns_kept_step {
    struct ht_list link; /* ns.kept, in the order of their numbers */
    struct ht_ns_kept about;
    uint32_t holds; /* descriptors that keep it from expiring */
};

/*
 * The attribute of a kept step's directory that has its digest: "NUMBER DIGITS", with the number of that directory. So
 * the same value in another inode says nothing. No program sets or sees this attribute, and copies of the step lack it.
 */
#define HT_NS_DIGEST "trusted.hitrain.digest"
/* The same for the job of a vault that has the step: "NUMBER JOB". */
#define HT_NS_ARCHIVED "trusted.hitrain.archived"
/* Is it one of the two? */
bool ht_ns_is_note(const char *name, size_t len);

/* It belongs to a kept step. */
static inline bool ht_ns_frozen(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ht_ns_root(i)->frozen;
}
/* The kept step with this directory; NULL: none. */
struct ht_ns_kept_step *ht_ns_kept_step(struct ht_ns *ns, uint64_t ino) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* The one of this name; NULL: none. */
struct ht_ns_kept_step *ht_ns_kept_named(struct ht_ns *ns, uint64_t root, const char *name)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES);
/* From a record, or a copy; takes the place of the one with its number. -ENOMEM. */
int ht_ns_kept_add(struct ht_ns *ns, const struct ht_ns_kept *about) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
void ht_ns_kept_remove(struct ht_ns *ns, struct ht_ns_kept_step *x) HT_REQUIRES(HT_LOCK_NAMES);
/* Has this directory kept steps? */
bool ht_ns_has_kept(struct ht_ns *ns, uint64_t root) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
void ht_ns_put_kept(struct ht_tx *tx, const struct ht_ns_kept *about);
uint64_t ht_ns_kept_log_bytes(const struct ht_ns_kept *about);
/* Own bytes of archived kept steps that nobody holds; and the end of the oldest one: struct ht_participant. */
uint64_t ht_ns_kept_could_give(void *ctx) HT_EXCLUDES(HT_LOCK_NAMES);
uint64_t ht_ns_kept_give_up(void *ctx, uint64_t bytes) HT_EXCLUDES(HT_LOCK_NAMES);
/* The part of names in a copy of a scope, and in its end: see struct ht_participant. */
int ht_ns_copy(void *ctx, struct ht_copy *k);
void ht_ns_copied(void *ctx, struct ht_copy *k, struct ht_tx *tx);
void ht_ns_copy_dropped(void *ctx, struct ht_copy *k);
void ht_ns_ended(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx);
