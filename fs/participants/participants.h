/* SPDX-License-Identifier: Apache-2.0 */
/*
 * participants.h - the participants of the commit in one program: makes, starts and frees all of them.
 *
 * Order of life: ht_store_new, ht_participants_new, ht_store_mount, ht_participants_start; then ht_participants_free
 * and ht_store_close. One thread.
 */
#pragma once

#include "tiering/api/participant.h"

#define HT_PARTICIPANT_INDEX(ID, name, first, last) HT_PARTICIPANT_##ID,
enum ht_participant_index { HT_PARTICIPANTS(HT_PARTICIPANT_INDEX) HT_PARTICIPANT_COUNT };
#undef HT_PARTICIPANT_INDEX

/* By index: struct ht_ns_setup, struct ht_optim_setup, ...; NULL where a participant needs none. */
struct ht_participants_setup {
    const void *of[HT_PARTICIPANT_COUNT];
};

/* By index; all NULL before ht_participants_new and after it has failed. */
struct ht_participants {
    void *of[HT_PARTICIPANT_COUNT];
    struct ht_store *store;
};

int ht_participants_new(struct ht_store *s, const struct ht_participants_setup *setup,
                        struct ht_participants *out) HT_MUST_CHECK;
int ht_participants_start(struct ht_participants *p) HT_MUST_CHECK;
/* Ends the store's threads, which call them; then the last one goes first. Also where some or all are NULL. */
void ht_participants_free(struct ht_participants *p);
