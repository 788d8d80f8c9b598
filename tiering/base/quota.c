/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/quota.h"

enum { OWNER_PARTS = 1, OTHERS_PARTS = 6, PARTS = 8, BLOCK_SHIFT = 16 };

uint32_t ht_quota_group(uint32_t uid)
{
    const uint32_t block = uid >> BLOCK_SHIFT;

    return block ? (1u << BLOCK_SHIFT) + block : uid;
}

uint64_t ht_quota_taken(const struct ht_quota *q)
{
    uint64_t taken = 0;

    for (unsigned i = 0; i < HT_QUOTA_KINDS; i++)
        taken += q->taken[i];
    return taken;
}

/* What a exceeds b by. */
static uint64_t beyond(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* So much that the user then has no more than is left. */
static uint64_t half(uint64_t left, const struct ht_quota_user *u)
{
    return beyond(left, u->taken) / 2;
}

uint64_t ht_quota_room(const struct ht_quota *q, const struct ht_quota_user *u)
{
    uint64_t left = beyond(q->max, ht_quota_taken(q));

    switch (u->kind) {
    case HT_QUOTA_ROOT:
        return beyond(left, beyond(q->max / PARTS * OWNER_PARTS, q->taken[HT_QUOTA_OWNER]));
    case HT_QUOTA_OWNER:
        return half(left, u);
    default:
        return half(ht_min_u64(left, beyond(q->max / PARTS * OTHERS_PARTS, q->taken[HT_QUOTA_OTHERS])), u);
    }
}

void ht_quota_set(struct ht_quota *q, struct ht_quota_user *u, uint64_t taken)
{
    q->taken[u->kind] += taken - u->taken;
    u->taken = taken;
}
