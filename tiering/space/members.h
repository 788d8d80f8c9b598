/* SPDX-License-Identifier: Apache-2.0 */
/*
 * members.h - which members of a store may act together: each member's part in its history. Pure.
 *
 * Every mount has an epoch, and so has every time at which a member drops out while the others go on. A superblock
 * names its epoch. For each device it names the last epoch in which the device took part, as far as was known at its
 * writing. The superblock is written to all members that take part before anything of that epoch is. So of two members
 * with one history one knows all that the other did:
 *
 *   A knows B:  A.member_epoch[B] >= B.member_epoch[B]
 *
 *   both mounted at 5, then A alone at 6:  A {epoch 6, A 6, B 5}   B {epoch 5, A 5, B 5}   A knows B: B catches up
 *   and then B alone, too:                 A {epoch 6, A 6, B 5}   B {epoch 6, A 5, B 6}   neither: they have diverged
 *
 * A device that was being added (super_add.c) names a store whose other members may not name it: they went on without
 * it, and perhaps another one has its number. It is a stranger then.
 *
 * A member that dropped out while it could still be written, or whose log is not up to date yet, knows that itself: it
 * must not stand for the store alone.
 */
#pragma once

#include "tiering/space/super.h"

struct ht_members {
    unsigned newest;      /* index of the device whose superblock counts */
    unsigned apart[2];    /* -EXDEV: these two */
    unsigned left_behind; /* -ESTALE: this one */
    unsigned stranger;    /* -ENXIO: this one */
};

/*
 * sb[i]: superblock of the device with index i; NULL: not there. At least one is there. 0, -EXDEV: two members have
 * changed apart from each other; -ESTALE: none of the present ones with a copy of the log has the newest one; -ENXIO:
 * the newest superblock does not name this device.
 */
int ht_members_validate(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out) HT_MUST_CHECK;
/* Is have, of a device with the store's uuid, not of the member that the store has under its number? */
bool ht_members_is_stranger(const struct ht_super *newest, const struct ht_super *have);
/* Did device i have the whole content when this superblock was written? */
bool ht_members_takes_part(const struct ht_super *sb, unsigned i);
/* Those that take part (bits) do so in sb->epoch from now on. */
void ht_members_take_part(struct ht_super *sb, uint32_t devices);
