/* SPDX-License-Identifier: Apache-2.0 */
/* mending.h - damaged sample stores, fsck on them as it is run, and what is left of them. */
#ifndef HITRAIN_TESTS_SUPPORT_MENDING_H
#define HITRAIN_TESTS_SUPPORT_MENDING_H

#include "mount-helpers/fsck/fsck.h"
#include "tests/support/damage.h"
#include "tests/support/sample.h"

enum { MENDING_DEVICES = 2, MENDING_TEXT_MAX = 64 << 10 };

/* The sample store on one device, and on two. */
struct mending_world {
    uint8_t *bytes[MENDING_DEVICES];
    struct damage_ids ids;
    struct sample_items items;
};
extern struct mending_world mending_worlds[MENDING_DEVICES];
/* The store at hand, and what fsck has said of it. */
extern struct stack mending;
extern char mending_text[MENDING_TEXT_MAX];
extern size_t mending_text_len;

/* Makes the worlds, once. */
void mending_setup(void);
/* Devices with an undamaged store; stack_free ends it. */
void mending_begin(unsigned devices);
/* One run; its exit status. Devices that fail to read do so until it has said something. */
int mending_fsck_with(const struct ht_fsck_options *opt);
int mending_fsck(enum ht_fsck_mode mode, bool json);
/* Mounts, and counts what is as it was in w. It stays mounted. */
size_t mending_count(const struct mending_world *w, size_t *out_errors);
/* Writes something, unmounts, and finds it in order. */
void mending_go_on(void);

#endif
