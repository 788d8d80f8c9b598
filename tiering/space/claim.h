/* SPDX-License-Identifier: Apache-2.0 */
/*
 * claim.h - one writer of a store where locks cannot know: another machine, or a name that hides what it shows.
 *
 * Each mount that writes has a nonce, and all superblocks that it writes carry it (0: nobody has the store mounted).
 * Two of the three copies of a device serve as registers: X is copy 2, Y is copy 1. A claim changes only the nonce in
 * one copy at a time, and the rest of that copy stays as it was read. So it never harms a store that is in use: the
 * other copies have the newest generation, and a writer overwrites copies without it first.
 *
 *   claim P:   X = P; give up if there is a newer superblock; read Y; if Y is another's: wait, and give up if X
 *              changes; Y = P; give up unless X is still P
 *   owner Q:   looks at X and Y every HT_CLAIM_LOOK_MS, and before it writes a superblock
 *                X foreign, Y own:  a claim asks: X = Q
 *                X own, Y foreign:  a claim was late, and reads X before it goes on: Y = Q
 *                both foreign:      another took the store over; Q stops writing at once
 *
 * Without the wait at most one of several claims succeeds, however slow each is: it is a splitter (Lamport's fast
 * mutex). The wait is for an owner that may live elsewhere. HT_CLAIM_WAIT_MS is several of its looks. It is left out if
 * the nonce's owner cannot live, because we hold what it held: the same bytes of the same kernel (place), or both
 * claims are for bytes that no other machine or name reaches (local).
 *
 * Superblocks of older programs have no nonce. Nobody waits for these: their owners would not answer.
 */
#pragma once

#include "tiering/space/super.h"

struct ht_claim;
/*
 * devs: in any order, NULL for those that are missing. 0: sb has the nonce, and superblocks that are written from it
 * keep it. -EBUSY, and it is reported: another has the store, or came at the same moment; nothing is harmed. A device
 * that takes no claim is left out, if locks exclude an owner.
 */
int ht_claim_take(struct ht_super *sb, struct ht_dev *const devs[], unsigned count,
                  struct ht_claim **out) HT_MUST_CHECK;
/* The superblocks are again as they were, and sb has no nonce. Nothing was written since. */
void ht_claim_undo(struct ht_claim *c, struct ht_super *sb);
/* It stays. */
void ht_claim_free(struct ht_claim *c);
/* -EBUSY, and it is reported: another machine, or another name, has one of these stores mounted. */
int ht_claim_ask(struct ht_dev *const devs[], unsigned count) HT_MUST_CHECK;

enum ht_claim_state { HT_CLAIM_OWN, HT_CLAIM_ASKED, HT_CLAIM_LATE, HT_CLAIM_LOST };
/* What the registers of a device say to the owner of sb. Also without a lock on sb, whose nonce does not change. */
enum ht_claim_state ht_claim_look(const struct ht_super *sb, struct ht_dev *dev, unsigned index);
/* The owner's answer to ASKED and LATE. */
void ht_claim_answer(const struct ht_super *sb, struct ht_dev *dev, unsigned index, enum ht_claim_state state);
