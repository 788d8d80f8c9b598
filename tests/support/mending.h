/* SPDX-License-Identifier: Apache-2.0 */
/* mending.h - damaged sample stores, runs of fsck on them, and the items that survive. */
#ifndef HITRAIN_TESTS_SUPPORT_MENDING_H
#define HITRAIN_TESTS_SUPPORT_MENDING_H

#include "mount-helpers/fsck/fsck.h"
#include "tests/support/damage.h"
#include "tests/support/sample.h"

enum { MENDING_DEVICES = 2, MENDING_TEXT_MAX = 64 << 10 };

/* The sample store on one device, and on two. */
struct mending_store {
    uint8_t *bytes[MENDING_DEVICES];
    struct damage_ids ids;
    struct sample_items items;
};
extern struct mending_store mending_stores[MENDING_DEVICES];
/* The current store, and the output of fsck. */
extern struct harness mending;
extern char mending_text[MENDING_TEXT_MAX];
extern size_t mending_text_len;

/* Makes the worlds, once. */
void mending_setup(void);
/* Devices with an undamaged store; harness_free ends it. */
void mending_begin(unsigned devices);
/* One run; its exit status. Devices that fail to read do so until it has said something. */
int mending_fsck_with(const struct ht_fsck_options *opt);
int mending_fsck(enum ht_fsck_mode mode, bool json);
/* Mounts, and counts the items that are as they were in w. The store stays mounted. */
size_t mending_count(const struct mending_store *w, size_t *out_errors);
/* Writes something, unmounts, and finds it in order. */
void mending_go_on(void);

#endif
