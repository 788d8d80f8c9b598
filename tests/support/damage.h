/* SPDX-License-Identifier: Apache-2.0 */
/*
 * damage.h - every kind of damage that fsck has a code for, done to the sample store.
 *
 * The journal itself appends damaged records to the log. No program would write such records: their checksums are right
 * and their content is wrong. Other damage changes bytes and computes new checksums where needed.
 */
#pragma once

#include "tests/support/harness.h"

/* Numbers of things in the sample store. */
struct damage_ids {
    uint64_t small, big, sparse, below, model, w;
    struct ht_ref_place {
        uint64_t block, checksum;
        uint32_t stored, visible;
    } of_small, of_big, of_sparse; /* their first chunks */
};

/* The store is mounted. */
void damage_find(const struct harness *k, struct damage_ids *out);

struct damage {
    const char *name; /* the code of the problem, and possibly a variant */
    /* One of: records for the log, or anything else. Log records first where two damages come together. */
    void (*put)(const struct damage_ids *ids, struct ht_buf *records);
    void (*harm)(struct harness *k, const struct damage_ids *ids);
    unsigned devices;   /* of the store; 0: one */
    bool stays;         /* no program can repair it */
    bool reading_fails; /* on the last device, from some request on, until fsck has reported an error */
    bool alone;         /* not together with others */
    bool vault;         /* fsck reads the vault, which damage_remove_vault ends */
};
extern const struct damage damages[];
extern const unsigned damage_count;

/* A group of records at the end of the log, whatever state it is in. */
void damage_append(struct harness *k, const struct ht_buf *records);
/* The record that chunk 0 of an object is at a place. */
void damage_put_chunk(struct ht_buf *records, uint64_t oid, const struct ht_ref_place *place);
/* Well-formed ones, of everything there is in the sample and of a little more. */
void damage_random_records(const struct damage_ids *ids, struct ht_buf *records, uint64_t *rnd);
/* The superblock does not have this bit of feat_refuse any more. */
void damage_clear_feature(struct harness *k, uint64_t bit);
/* damage_forms.c: of state in 8 bits, and of steps in two phases. */
void damage_bad_phases(struct harness *k, const struct damage_ids *ids);
void damage_phases_unmarked(struct harness *k, const struct damage_ids *ids);
void damage_short_state_unmarked(struct harness *k, const struct damage_ids *ids);
void damage_bad_scale(struct harness *k, const struct damage_ids *ids);
/* damage_cold.c */
void damage_in_no_vault(const struct damage_ids *ids, struct ht_buf *records);
void damage_cold_unmarked(struct harness *k, const struct damage_ids *ids);
void damage_cold_unnamed(struct harness *k, const struct damage_ids *ids);
void damage_bad_in_vault(struct harness *k, const struct damage_ids *ids);
void damage_gone_from_vault(struct harness *k, const struct damage_ids *ids);
void damage_remove_vault(void);
void damage_do(const struct damage *d, struct harness *k, const struct damage_ids *ids);
