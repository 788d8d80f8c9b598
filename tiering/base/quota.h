/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quota.h - how much one user may have of something of which all clients together have a bounded amount. Pure; its
 * owner's lock guards it.
 *
 *   root             all but an eighth, which stays for the owner of the store
 *   that owner       as much as is left for others
 *   each other user  as much as is left for others, of the three quarters that these users may have together
 *
 * So no user takes what another one of these three kinds needs. Users of the third kind halve their rest, one after
 * the other: there always is some.
 */
#pragma once

#include "tiering/base/base.h"

enum ht_quota_kind { HT_QUOTA_ROOT, HT_QUOTA_OWNER, HT_QUOTA_OTHERS, HT_QUOTA_KINDS };

struct ht_quota {
    uint64_t max;
    uint64_t taken[HT_QUOTA_KINDS]; /* sums over users */
};
/* Its kind does not change while it has any. */
struct ht_quota_user {
    enum ht_quota_kind kind;
    uint64_t taken;
};

/*
 * Which uids count as one user: from 65536 on a block of 65536. A person may have such a block besides its own
 * uid, for containers (subuid(5)), and otherwise had a user's part with each of them.
 */
uint32_t ht_quota_group(uint32_t uid);
uint64_t ht_quota_taken(const struct ht_quota *q);
/* How much more the user may take now. */
uint64_t ht_quota_room(const struct ht_quota *q, const struct ht_quota_user *u);
/* It has so much now. The caller has asked for room. */
void ht_quota_set(struct ht_quota *q, struct ht_quota_user *u, uint64_t taken);
