/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep.h - copies of a scope that share all stored bytes: kept steps, and model roots made from them.
 *
 * A kept step is a frozen copy of a model root as one commit published it: names, attributes, content, optimizer
 * records. The copy is made in the transaction of that commit. So after any crash the step is kept, whole, or it is
 * not. No content is copied, and no image is looked at: inside a transaction no other thread changes published
 * references. Its scope has the number of the copy's root directory, and accepts no change (-EROFS).
 *
 * A clone is a copy of a kept step that is not frozen: a model root with a name, made in a transaction of its own.
 *
 * Space: objects with a rewrite reserve cannot count on shared space for their next rewrite. So the copy reserves as
 * much again for them first. Objects of a clone get reserves of their own. Log bytes and memory come first, too:
 * nothing can be refused once a record is put, but for memory that other threads' writes made necessary since; then the
 * copy as a whole is left out.
 */
#pragma once

#include "tiering/api/tx.h"

/* The number of a thing in a scope, and that of its copy. */
struct ht_copy_id {
    uint64_t from, to;
    uint64_t reserve_bytes; /* the copy's rewrite reserve */
    uint32_t used_bytes;    /* of its chunks (ht_obj_set_used); 0: all */
};

/* Where a clone gets its name: a directory outside of model roots; and what participants need to know. */
struct ht_clone_target {
    uint64_t parent;
    const char *name;
    uint32_t uid;       /* all that is copied belongs to this user; 0: to any */
    const void *config; /* the optimizer's: its configuration in the clone */
};

/* What a copy that was refused with -ENOSPC did not get. */
enum ht_copy_lack { HT_COPY_LACKS_LOG, HT_COPY_LACKS_SPACE, HT_COPY_LACKS_TABLES };

struct ht_copy {
    uint64_t scope;                      /* what is copied */
    const struct ht_clone_target *clone; /* NULL: it becomes a kept step */
    /* Of a kept step. */
    bool must; /* without the copy no commit */
    uint64_t step;
    const char *name; /* NULL: its step, in decimal */
    uint32_t retain;  /* a kept step without a name of its own: at most so many of these stay; 0: any number */

    int error;              /* out: the copy was refused; 0: it was made */
    uint64_t to;            /* out: its scope */
    enum ht_copy_lack lack; /* out, with an error of -ENOSPC */
    uint64_t lack_bytes;    /* of space: what it had to reserve */

    /* From here on for participants, in a transaction. */
    struct ht_store *s;
    size_t bytes;           /* records of the copy, at least; each participant adds its own */
    struct ht_copy_id *ids; /* in order */
    size_t *table;          /* a hash by from: places in ids, plus 1 */
    size_t count, cap, table_size;
    uint64_t *expired; /* kept steps that end with the same transaction */
    size_t expired_count;
};

/* Memory for so many numbers, so that adding them moves none. -ENOMEM. */
int ht_copy_expect(struct ht_copy *k, size_t count) HT_MUST_CHECK;
/* A number for the copy of from. 0: no memory, or no number is left. */
uint64_t ht_copy_add(struct ht_copy *k, uint64_t from) HT_MUST_CHECK;
/* The number of its copy. 0: it has none. */
uint64_t ht_copy_of(const struct ht_copy *k, uint64_t from);
/*
 * The copy of an object that was added gets a rewrite reserve for so many bytes: for clones. used_bytes: of its chunks
 * (ht_obj_set_used); 0: all.
 */
void ht_copy_reserve(struct ht_copy *k, uint64_t from, uint64_t bytes, uint32_t used_bytes);
/* A kept step ends with the transaction of this copy. bytes: of its records. -ENOMEM. */
int ht_copy_expire(struct ht_copy *k, uint64_t kept, size_t bytes) HT_MUST_CHECK;

/*
 * ht_scope_commit, with a copy of what it publishes. k->error says whether there is one. -ENOSPC, -ENOMEM, -EEXIST with
 * k->must: neither the commit nor the copy was made. WAITS.
 */
int ht_scope_commit_copying(struct ht_store *s, uint64_t scope, struct ht_copy *k, uint64_t *out_lsn) HT_MUST_CHECK;
/*
 * A clone: a copy of what is published of k->scope, in a transaction of its own. Returns k->error, or that of the log;
 * then nothing was made. -ENOSPC, -ENOMEM, -EEXIST, -EINVAL: the directory is in a model root; -EPERM: something does
 * not belong to clone->uid; -ESTALE: the scope has ended. WAITS.
 */
int ht_scope_clone(struct ht_store *s, uint64_t scope, struct ht_copy *k, uint64_t *out_lsn) HT_MUST_CHECK;
/* The bound that k->error is about, and what helps, in words. */
void ht_copy_explain(const struct ht_copy *k, char *text, size_t cap);
/* Ends a kept step: it goes as a whole in one transaction. bytes: of its records. WAITS. */
int ht_kept_end(struct ht_store *s, uint64_t kept, size_t bytes, uint64_t *out_lsn) HT_MUST_CHECK;

/* The scope accepts no changes from now on: a kept step's. -ENOMEM. */
int ht_scope_freeze(struct ht_store *s, uint64_t scope) HT_MUST_CHECK;
bool ht_scope_is_frozen(struct ht_store *s, uint64_t scope);
