/* SPDX-License-Identifier: Apache-2.0 */
/*
 * damage.h - every kind of damage that fsck has a word for, done to the sample store.
 *
 * What is in the log is appended to it by the journal itself, with records that no program would write: so checksums
 * are right, and only what they say is wrong. The rest is done to bytes, checksummed anew where it needs to be.
 */
#ifndef HITRAIN_TESTS_SUPPORT_DAMAGE_H
#define HITRAIN_TESTS_SUPPORT_DAMAGE_H

#include "tests/support/stack.h"

/* Numbers of things in the sample store. */
struct damage_ids {
    uint64_t small, big, sparse, below, model, w;
    struct ht_ref_place {
        uint64_t block, checksum;
        uint32_t stored, visible;
    } of_small, of_big, of_sparse; /* their first chunks */
};

/* Of a store that is mounted. */
void damage_find(const struct stack *k, struct damage_ids *out);

struct damage {
    const char *name; /* the code of the problem, and maybe a variant of it */
    /* One of: records for the log, or anything else. Log records first where two damages come together. */
    void (*put)(const struct damage_ids *ids, struct ht_buf *records);
    void (*harm)(struct stack *k, const struct damage_ids *ids);
    unsigned devices;   /* of the store; 0: one */
    bool stays;         /* no program can repair it */
    bool reading_fails; /* on the last device, from some request on, until somebody has noticed */
    bool alone;         /* not together with others */
};
extern const struct damage damages[];
extern const unsigned damage_count;

/* A group of records at the end of the log, whatever state it is in. */
void damage_append(struct stack *k, const struct ht_buf *records);
/* The record that chunk 0 of an object is at a place. */
void damage_put_chunk(struct ht_buf *records, uint64_t oid, const struct ht_ref_place *place);
/* Well-formed ones, of everything there is in the sample and of a little more. */
void damage_random_records(const struct damage_ids *ids, struct ht_buf *records, uint64_t *rnd);
void damage_do(const struct damage *d, struct stack *k, const struct damage_ids *ids);

#endif
