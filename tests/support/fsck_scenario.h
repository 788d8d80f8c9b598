/* SPDX-License-Identifier: Apache-2.0 */
/* fsck_scenario.h - damaged sample stores, runs of fsck on them, and the items that survive. */
#pragma once

#include "mount-helpers/fsck/fsck.h"
#include "tests/support/damage.h"
#include "tests/support/sample.h"

enum { FSCK_SCENARIO_DEVICES = 2, FSCK_SCENARIO_TEXT_MAX = 64 << 10 };

/* The sample store on one device, and on two. */
struct fsck_scenario_store {
    uint8_t *bytes[FSCK_SCENARIO_DEVICES];
    struct damage_ids ids;
    struct sample_items items;
};
extern struct fsck_scenario_store fsck_scenario_stores[FSCK_SCENARIO_DEVICES];
/* The current store, and the output of fsck. */
extern struct harness fsck_scenario;
extern char fsck_scenario_text[FSCK_SCENARIO_TEXT_MAX];
extern size_t fsck_scenario_text_len;

/* Makes the worlds, once. */
void fsck_scenario_setup(void);
/* Devices with an undamaged store, in place of the former ones. */
void fsck_scenario_begin(unsigned devices);
void fsck_scenario_end(void);
/* One run; its exit status. Devices that fail to read do so until it has said something. */
int fsck_scenario_fsck_with(const struct ht_fsck_options *opt);
int fsck_scenario_fsck(enum ht_fsck_mode mode, bool json);
extern bool fsck_scenario_reads_vault; /* in these runs */
/* Mounts, and counts the items that are as they were in w. The store stays mounted. */
size_t fsck_scenario_count(const struct fsck_scenario_store *w, size_t *out_errors);
/* Writes something, unmounts, and finds it in order. */
void fsck_scenario_go_on(void);
