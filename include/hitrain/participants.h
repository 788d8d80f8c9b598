/* SPDX-License-Identifier: Apache-2.0 */
/*
 * participants.h - every participant of the commit, in the order in which the store calls them.
 *
 * PARTICIPANT(ID, name, first, last): its record types are HT_REC_ID_FIRST to HT_REC_ID_LAST, which are never given to
 * another one. The constant ht_participant_name says how to make it (tiering/api/participant.h). The daemon,
 * hitrain-fsck and the tests take all of them from here (fs/participants).
 */
#pragma once

#define HT_PARTICIPANTS(PARTICIPANT)                   \
    PARTICIPANT(NS, ns, 32, 47)     /* fs/ns: names */ \
    PARTICIPANT(OPT, optim, 48, 63) /* optim: model roots, parameters */
