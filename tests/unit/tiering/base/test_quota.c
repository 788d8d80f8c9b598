/* SPDX-License-Identifier: Apache-2.0 */
/* test_quota.c - each user has a part, and leaves one to others; root and the owner of the store leave one to each. */
#include "tests/support/suite.h"
#include "tiering/base/quota.h"

enum { MAX = 800, USERS = 40 };

/* Who has taken what when a user of this kind with so much asks for more. */
static const struct {
    uint64_t taken[HT_QUOTA_KINDS]; /* root, owner, others */
    enum ht_quota_kind kind;
    uint64_t of_user, room;
} cases[] = {
    {{0, 0, 0}, HT_QUOTA_ROOT, 0, 700},   /* an eighth stays for the owner */
    {{700, 0, 0}, HT_QUOTA_ROOT, 700, 0}, /* also if root asks twice */
    {{700, 0, 0}, HT_QUOTA_OWNER, 0, 50}, /* who halves it, as root may come back */
    {{0, 0, 0}, HT_QUOTA_OWNER, 0, 400},
    {{0, 400, 0}, HT_QUOTA_OWNER, 400, 0},
    {{0, 400, 0}, HT_QUOTA_ROOT, 0, 400},
    {{0, 100, 600}, HT_QUOTA_ROOT, 0, 100}, /* others and the owner have all that they may */
    {{0, 0, 600}, HT_QUOTA_OWNER, 0, 100},
    {{0, 0, 600}, HT_QUOTA_OTHERS, 0, 0},
    {{0, 0, 0}, HT_QUOTA_OTHERS, 0, 300},
    {{0, 0, 300}, HT_QUOTA_OTHERS, 300, 0},
    {{0, 0, 300}, HT_QUOTA_OTHERS, 0, 150},
    {{0, 0, 450}, HT_QUOTA_OTHERS, 100, 25},
    {{500, 200, 0}, HT_QUOTA_OTHERS, 0, 50}, /* of the rest of all */
    {{700, 100, 0}, HT_QUOTA_OTHERS, 0, 0},
    {{700, 200, 0}, HT_QUOTA_ROOT, 0, 0}, /* more than there is */
    {{700, 200, 700}, HT_QUOTA_OTHERS, 0, 0},
};

TEST(what_is_left_for_whom)
{
    for (unsigned i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        struct ht_quota q = {.max = MAX};
        const struct ht_quota_user u = {cases[i].kind, cases[i].of_user};
        memcpy(q.taken, cases[i].taken, sizeof(q.taken));
        uint64_t room = ht_quota_room(&q, &u);
        ck_assert_msg(room == cases[i].room, "case %u: %llu", i, (unsigned long long)room);
    }
}

static uint64_t take_all(struct ht_quota *q, struct ht_quota_user *u)
{
    ht_quota_set(q, u, u->taken + ht_quota_room(q, u));
    return u->taken;
}

/* Each takes what it can get. A person may have three parts: that of its uid, and of two blocks of uids. */
TEST(users_who_take_all_leave_some)
{
    struct ht_quota q = {.max = 64 << 20};
    struct ht_quota_user user[USERS], owner = {.kind = HT_QUOTA_OWNER}, root = {.kind = HT_QUOTA_ROOT};

    for (unsigned i = 0; i < USERS; i++) {
        user[i] = (struct ht_quota_user){.kind = HT_QUOTA_OTHERS};
        take_all(&q, &user[i]);
    }
    ck_assert_uint_eq(user[0].taken, 24 << 20);
    ck_assert_uint_eq(user[3].taken, 3 << 20);
    ck_assert_uint_eq(take_all(&q, &owner), 8 << 20);
    ck_assert_uint_ge(take_all(&q, &root), 8 << 20);
    ck_assert_uint_le(ht_quota_taken(&q), q.max);
    ht_quota_set(&q, &user[0], 0);
    ck_assert_uint_gt(ht_quota_room(&q, &user[0]), 10 << 20);
}

TEST(uids_of_a_block_are_one_user)
{
    ck_assert_uint_eq(ht_quota_group(0), 0);
    ck_assert_uint_eq(ht_quota_group(65535), 65535);
    ck_assert_uint_eq(ht_quota_group(524288), ht_quota_group(524288 + 65535));
    ck_assert_uint_ne(ht_quota_group(524288), ht_quota_group(524288 - 1));
    ck_assert_uint_gt(ht_quota_group(65536), 65535); /* no uid of its own */
    ck_assert_uint_ne(ht_quota_group(UINT32_MAX), ht_quota_group(65536));
}

RUN_TESTS("quota")
