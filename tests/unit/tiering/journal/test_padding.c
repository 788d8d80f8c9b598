/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_padding.c - a power cut stored the last frame except sectors of its padding, over older content.
 *
 * The checksum of the frame is right then. This is still the end of a log and not damage: the frame in flight is gone,
 * or in the other copy. If anything proves that the frame was whole once, it is damage like any other.
 */
#include "tests/unit/tiering/journal/kv.h"

#include "tiering/journal/journal_priv.h"

enum { SECTOR = 512, USED_BYTE = 0xa5, RECORD_BYTES = 100 /* of a frame with one empty value */ };

static struct kv_map before, after; /* the last frame */
static uint64_t last_pos, last_end;
static size_t last_bytes; /* without padding */
static uint8_t saved[2][KV_DEVICE_BYTES];

static uint64_t end_pos(void)
{
    struct ht_journal_stats st;

    ht_journal_stats(kv.j, &st);
    return kv.start.pos + st.used_bytes;
}

static struct ht_dev *used_dev(void)
{
    struct ht_dev *dev = kv_new_dev();

    memset(ht_dev_ram_data(dev), USED_BYTE, KV_DEVICE_BYTES);
    return dev;
}

enum where { AT_START, WRAPPED, CHECKPOINTED, WHERES };

/* Mounted, on devices that were used before, with a last frame of so many bytes. */
static void make_log(enum where where, size_t bytes)
{
    kv_format(&kv, used_dev(), used_dev());
    kv.start.pos = where == WRAPPED ? KV_LOG_BYTES - 3 * HT_BLOCK_BYTES : 0; /* the third frame is the last */
    ck_assert_int_eq(kv_super_write(&kv), 0);
    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert_int_eq(kv_set_one(&kv, 1, 5, 30), 0);
    if (where == CHECKPOINTED)
        ck_assert_int_eq(kv_checkpoint(&kv), 0);
    before = kv.map;
    last_pos = end_pos();
    last_bytes = bytes;
    ck_assert_int_eq(kv_set_one(&kv, 2, 7, (uint32_t)(bytes - RECORD_BYTES)), 0);
    last_end = end_pos();
    ck_assert_uint_eq(last_end - last_pos, ht_round_up(bytes, HT_BLOCK_BYTES));
    after = kv.map;
}

static uint64_t first_padding(void)
{
    return ht_round_up(last_bytes, SECTOR);
}

/* The device had not yet taken these bytes of the last frame. */
static void lose(unsigned copy, uint64_t from, uint64_t to)
{
    for (uint64_t at = from; at < to; at += SECTOR)
        memset(kv_bytes(&kv, copy, last_pos + at), USED_BYTE, SECTOR);
}

static void lose_padding(unsigned copy)
{
    lose(copy, first_padding(), last_end - last_pos);
}

/* The log ended as after any cut, and a mount for reading leaves it as it is. */
static void ended_with(const struct kv_map *want)
{
    static uint8_t was[2][KV_DEVICE_BYTES];

    for (unsigned i = 0; i < 2; i++)
        memcpy(was[i], ht_dev_ram_data(kv.dev[i]), KV_DEVICE_BYTES);
    ck_assert_int_eq(kv_open(&kv, false, 0), 0);
    ck_assert_mem_eq(&kv.map, want, sizeof(*want));
    for (unsigned i = 0; i < 2; i++)
        ck_assert_int_eq(kv.report.copy[i].state, HT_LOG_ENDED);
    ck_assert_uint_eq(kv_scrub(&kv), 0);
    kv_crash(&kv);
    for (unsigned i = 0; i < 2; i++)
        ck_assert_mem_eq(was[i], ht_dev_ram_data(kv.dev[i]), KV_DEVICE_BYTES);
}

static void goes_on(void)
{
    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert_int_eq(kv_set_one(&kv, 400, 77, 10), 0);
    struct kv_map want = kv.map;
    kv_crash(&kv);
    for (unsigned missing = 0; missing < 3; missing++) {
        ck_assert_int_eq(kv_open(&kv, false, missing), 0);
        ck_assert_mem_eq(&want, &kv.map, sizeof(want));
        kv_crash(&kv);
    }
}

static void check_cut(uint64_t from, uint64_t to)
{
    for (unsigned bad = 0; bad < 2; bad++) {
        lose(bad, from, to);
        ended_with(&after);
        ck_assert(kv.report.copy[bad].stale);
        goes_on();
        kv_restore_images(&kv, saved);
    }
    lose(0, from, to);
    lose(1, from, to);
    ended_with(&before);
    ck_assert(!kv.report.copy[0].stale && !kv.report.copy[1].stale);
    ck_assert_uint_eq(kv.report.copy[0].end_pos, last_pos);
    goes_on();
    kv_restore_images(&kv, saved);
}

/* From any sector to the end, and each alone. */
TEST_LOOP(a_frame_torn_in_its_padding_was_in_flight, WHERES)
{
    static const size_t bytes[] = {SECTOR, SECTOR + 1, 4096 - SECTOR, 4096 + 300, 3 * 4096 - 2 * SECTOR};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(bytes); i++) {
        make_log((enum where)_i, bytes[i]);
        kv_crash(&kv);
        kv_save_images(&kv, saved);
        for (uint64_t at = first_padding(); at < last_end - last_pos; at += SECTOR) {
            check_cut(at, last_end - last_pos);
            check_cut(at, at + SECTOR);
        }
        kv_free_devs(&kv);
    }
}

TEST(a_frame_without_padding_cannot_be_torn_in_it)
{
    make_log(AT_START, 4096);
    kv_crash(&kv);
    ck_assert_uint_eq(first_padding(), last_end - last_pos);
    ended_with(&after);
    kv_free_devs(&kv);
}

TEST(the_other_copy_may_be_shorter)
{
    make_log(AT_START, 4096 + 300);
    kv_crash(&kv);
    kv_save_images(&kv, saved);
    for (unsigned torn = 0; torn < 2; torn++) {
        lose_padding(torn);
        lose(!torn, 0, last_end - last_pos);
        ended_with(&before);
        goes_on();
        kv_restore_images(&kv, saved);
    }
    kv_free_devs(&kv);
}

/* A frame was whole if a later frame calls it durable, or follows it. */
static void is_damage(void)
{
    kv_save_images(&kv, saved);
    for (unsigned bad = 0; bad < 2; bad++) {
        lose_padding(bad);
        ck_assert_int_eq(kv_open(&kv, false, 0), 0);
        ck_assert_mem_eq(&kv.map, &after, sizeof(after));
        ck_assert_int_eq(kv.report.copy[bad].state, HT_LOG_DAMAGED);
        ck_assert_uint_eq(kv.report.copy[bad].end_pos, last_pos);
        kv_crash(&kv);
        kv_restore_images(&kv, saved);
    }
    lose_padding(0);
    lose_padding(1);
    ck_assert_int_eq(kv_open(&kv, false, 0), -EUCLEAN);
    kv_free_devs(&kv);
}

TEST_LOOP(behind_it_lies_a_later_frame, WHERES)
{
    make_log((enum where)_i, 4096 + 300);
    ck_assert_int_eq(kv_set_one(&kv, 3, 9, 0), 0);
    after = kv.map;
    kv_crash(&kv);
    is_damage();
}

TEST_LOOP(the_superblock_names_it_durable, WHERES)
{
    make_log((enum where)_i, 4096 + 300);
    kv_unmount(&kv);
    is_damage();
}

/* A right checksum over bytes that no writer has written. */
TEST(it_begins_an_epoch_without_saying_so)
{
    struct ht_frame f;

    make_log(AT_START, SECTOR);
    kv_crash(&kv);
    kv.epoch++;
    ck_assert_int_eq(kv_super_write(&kv), 0);
    for (unsigned i = 0; i < 2; i++) {
        ck_assert(ht_frame_decode_header(kv_bytes(&kv, i, last_pos), &f));
        f.epoch = kv.epoch;
        ht_frame_encode(kv_bytes(&kv, i, last_pos), &f);
        lose_padding(i);
    }
    ck_assert_int_eq(kv_open(&kv, false, 0), -EUCLEAN);
    kv_free_devs(&kv);
}

RUN_TESTS("padding", .timeout_s = 120, .quiet = ERRORS_ONLY)
