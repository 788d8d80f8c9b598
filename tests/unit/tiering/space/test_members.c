/* SPDX-License-Identifier: Apache-2.0 */
/* Which members of a store may act together, told as histories. */

#include "tests/support/suite.h"
#include "tiering/space/super.h"

enum { COUNT = 3, A = 1, B = 2, C = 4 };

static struct ht_super sb[COUNT];

static void fresh(void)
{
    memset(sb, 0, sizeof(sb));
    for (unsigned i = 0; i < COUNT; i++) {
        sb[i].device_index = i;
        sb[i].device_count = COUNT;
        sb[i].generation = 1;
        sb[i].log_device[1] = 1; /* copies on A and B */
    }
}

/* The knowledge of the newest present member goes to all members (bits) that `written` names. */
static void write_pair(uint32_t present, uint32_t take_part, uint32_t written)
{
    struct ht_super newest = {.generation = 0};

    for (unsigned i = 0; i < COUNT; i++)
        if (present >> i & 1 && sb[i].generation > newest.generation)
            newest = sb[i];
    newest.generation++;
    newest.epoch++;
    ht_members_take_part(&newest, take_part);
    for (unsigned i = 0; i < COUNT; i++)
        if (written >> i & 1) {
            sb[i] = newest;
            sb[i].device_index = i;
        }
}

static void mount(uint32_t present)
{
    write_pair(present, present, present);
}

static int validate(uint32_t present, struct ht_members *out)
{
    const struct ht_super *there[HT_DEVICES_MAX] = {NULL};

    for (unsigned i = 0; i < COUNT; i++)
        there[i] = present >> i & 1 ? &sb[i] : NULL;
    return ht_members_validate(there, out);
}

TEST(members_of_one_history_belong_together)
{
    struct ht_members m;

    fresh();
    ck_assert_int_eq(validate(A | B | C, &m), 0);
    mount(A | B | C);
    mount(A | B | C);
    ck_assert_int_eq(validate(A | B | C, &m), 0);
    /* B is away twice and returns */
    mount(A | C);
    mount(A | C);
    ck_assert_int_eq(validate(A | B | C, &m), 0);
    ck_assert_uint_ne(m.newest, 1);
    mount(A | B | C);
    /* now another one may be away */
    mount(B | C);
    ck_assert_int_eq(validate(A | B | C, &m), 0);
    ck_assert_int_eq(validate(A, &m), 0); /* it cannot know */
}

TEST(members_mounted_apart_have_diverged)
{
    struct ht_members m;

    fresh();
    mount(A | B | C);
    mount(A | C);
    mount(B);
    ck_assert_int_eq(validate(A | B | C, &m), -EXDEV);
    ck_assert_uint_eq(m.apart[0], 0);
    ck_assert_uint_eq(m.apart[1], 1);
    ck_assert_int_eq(validate(A | C, &m), 0);
    ck_assert_int_eq(validate(B, &m), 0);
    for (unsigned i = 0; i < 5; i++)
        mount(B); /* however long ago, and however often */
    ck_assert_int_eq(validate(A | B | C, &m), -EXDEV);
    ck_assert_int_eq(validate(B | C, &m), -EXDEV);
}

TEST(a_member_left_behind_in_mid_run_does_not_stand_for_the_store)
{
    struct ht_members m;

    fresh();
    mount(A | B | C);
    /* A is excluded and still takes superblocks */
    write_pair(A | B | C, B | C, A | B | C);
    ck_assert_int_eq(validate(A | B | C, &m), 0);
    ck_assert_int_eq(validate(A | C, &m), -ESTALE);
    ck_assert_uint_eq(m.left_behind, 0);
    ck_assert_int_eq(validate(B, &m), 0);
    mount(B | C);
    ck_assert_int_eq(validate(A | B | C, &m), 0); /* a stale member has not diverged */
    mount(A | B | C);
    ck_assert_int_eq(validate(A, &m), 0);
    /* and takes none: mounted alone it cannot know, but then it has diverged */
    write_pair(A | B | C, B | C, B | C);
    ck_assert_int_eq(validate(A, &m), 0);
    ck_assert_int_eq(validate(A | B, &m), 0);
    mount(A);
    ck_assert_int_eq(validate(A | B, &m), -EXDEV);
}

TEST(a_crash_between_two_superblocks_parts_nobody)
{
    struct ht_members m;

    for (uint32_t written = 0; written < 8; written++) {
        fresh();
        mount(A | B | C);
        write_pair(A | B | C, A | B | C, written);
        ck_assert_int_eq(validate(A | B | C, &m), 0);
        /* a member that goes on without the others has begun nothing that they miss */
        mount(B | C);
        ck_assert_int_eq(validate(A | B | C, &m), 0);
    }
}

/* C names a store whose members may name it or not. */
TEST(a_device_that_was_being_added_joins_unless_the_others_went_on)
{
    struct ht_members m;

    fresh();
    mount(A | B);
    sb[0].device_count = sb[1].device_count = 2;
    sb[2] = sb[0];
    sb[2].device_index = 2;
    sb[2].device_count = 3;
    sb[2].generation++;
    memset(sb[2].device_uuid[2], 7, sizeof(sb[2].device_uuid[2]));
    ck_assert_int_eq(validate(A | B | C, &m), 0);
    ck_assert_uint_eq(m.newest, 2);
    ck_assert_int_eq(validate(A | B, &m), 0);
    struct ht_super before = sb[2];
    mount(A | B);
    ck_assert_uint_eq(sb[0].generation, sb[2].generation); /* and the lower index counts */
    ck_assert_int_eq(validate(A | B | C, &m), -ENXIO);
    ck_assert_uint_eq(m.stranger, 2);
    mount(A | B);
    ck_assert_int_eq(validate(A | B | C, &m), -ENXIO);
    ck_assert_int_eq(validate(B | C, &m), -ENXIO);
    /* another one has its number now */
    sb[2] = sb[0];
    sb[2].device_index = 2;
    for (unsigned i = 0; i < 3; i++) {
        sb[i].device_count = 3;
        sb[i].generation++;
        memset(sb[i].device_uuid[2], 8, sizeof(sb[i].device_uuid[2]));
    }
    ck_assert_int_eq(validate(A | B | C, &m), 0);
    sb[2] = before;
    ck_assert_int_eq(validate(A | B | C, &m), -ENXIO);
}

RUN_TESTS("members")
