/* SPDX-License-Identifier: Apache-2.0 */
/* test_super.c - superblocks: round trip, every damage told apart, no crash or error loses them all. */
#include "tests/support/dev.h"
#include "tiering/space/super.h"

#include "tests/support/suite.h"
#include "tiering/base/buf.h"
#include "tiering/base/hash.h"

#define DEVICE_BYTES (16 * HT_MIB)

static struct ht_dev *new_dev(uint64_t bytes)
{
    struct ht_dev *dev;

    ck_assert_int_eq(dev_open_ram(bytes, 512, &dev), 0);
    return test_keep(dev); /* it need not be closed */
}

static struct ht_super format(struct ht_dev *const devs[], unsigned count)
{
    struct ht_super sb;

    ck_assert_int_eq(ht_super_format(devs, count, &(struct ht_format_opts){.label = "test"}, &sb), 0);
    return sb;
}

static uint8_t *copy_bytes(struct ht_dev *dev, unsigned copy)
{
    return (uint8_t *)ht_dev_ram_data(dev) + ht_super_offset(ht_dev_size(dev), copy);
}

TEST(format_then_read_gives_the_same)
{
    struct ht_dev *devs[] = {new_dev(DEVICE_BYTES), new_dev(2 * DEVICE_BYTES)};
    struct ht_super sb = format(devs, 2), got;
    struct ht_super_report report;

    for (unsigned i = 0; i < 2; i++) {
        ck_assert_int_eq(ht_super_read(devs[i], &got, &report), 0);
        ck_assert_uint_eq(got.device_index, i);
        got.device_index = sb.device_index;
        ck_assert_mem_eq(&got, &sb, sizeof(sb));
        for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
            ck_assert_int_eq(report.copy[c], HT_SUPER_OK);
    }
    ck_assert_str_eq(got.label, "test");
    ck_assert_uint_eq(got.log_device[0], 0);
    ck_assert_uint_eq(got.log_device[1], 1);
    ck_assert_uint_eq(got.chunk_bytes, HT_CHUNK_BYTES);
}

TEST(the_smallest_device_leaves_most_for_data)
{
    struct ht_dev *dev = new_dev(8 * HT_MIB);
    struct ht_super sb = format(&dev, 1);

    ck_assert_uint_eq(sb.log_bytes, HT_LOG_BYTES_MIN);
    ck_assert_uint_gt(sb.log_offset[1], 6 * HT_MIB);
}

TEST(log_size_follows_the_smallest_device)
{
    struct ht_dev *devs[] = {new_dev(HT_GIB), new_dev(64 * HT_GIB)};
    struct ht_super sb = format(devs, 2);

    ck_assert_uint_eq(sb.log_bytes, 32 * HT_MIB);
}

TEST(format_refuses_bad_wishes)
{
    struct ht_dev *tiny = new_dev(8 * HT_MIB - 4096), *dev = new_dev(DEVICE_BYTES);
    struct ht_super sb;
    const struct ht_format_opts bad[] = {
        {.chunk_bytes = 3 << 16}, {.chunk_bytes = 1 << 15},
        {.chunk_bytes = 1 << 23}, {.log_bytes = 1000000},
        {.log_bytes = 64 * 1024}, {.log_bytes = HT_LOG_BYTES_MAX + 4096},
        {.label = "a\nb"},        {.label = "this label is longer than thirty-two"},
    };

    ck_assert_int_eq(ht_super_format(&tiny, 1, &(struct ht_format_opts){0}, &sb), -ENOSPC);
    ck_assert_int_eq(ht_super_format(&dev, 1, &(struct ht_format_opts){.log_bytes = 8 * HT_MIB}, &sb), -ENOSPC);
    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_int_eq(ht_super_format(&dev, 1, &bad[i], &sb), -EINVAL);
    ck_assert_int_eq(ht_super_format(&dev, 0, &bad[0], &sb), -EINVAL);
}

TEST(foreign_devices_are_told_from_damaged_ones)
{
    struct ht_dev *dev = new_dev(DEVICE_BYTES), *tiny = new_dev(512);
    struct ht_super sb;
    struct ht_super_report report;

    ck_assert_int_eq(ht_super_read(dev, &sb, &report), -EMEDIUMTYPE);
    ck_assert_int_eq(report.copy[0], HT_SUPER_NO_MAGIC);
    ck_assert_int_eq(ht_super_read(tiny, &sb, &report), -EMEDIUMTYPE);
    ck_assert_int_eq(report.copy[2], HT_SUPER_UNREADABLE);

    format(&dev, 1);
    for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
        copy_bytes(dev, c)[300] ^= 1;
    ck_assert_int_eq(ht_super_read(dev, &sb, &report), -EUCLEAN);
    dev_fail(dev, HT_IO_READ, 1, true);
    ck_assert_int_eq(ht_super_read(dev, &sb, &report), -EIO);
}

TEST(any_one_copy_is_enough)
{
    for (unsigned keep = 0; keep < HT_SUPER_COPIES; keep++) {
        struct ht_dev *dev = new_dev(DEVICE_BYTES);
        struct ht_super sb = format(&dev, 1), got;
        struct ht_super_report report;
        for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
            if (c != keep)
                memset(copy_bytes(dev, c), 0xa5, 4096);
        ck_assert_int_eq(ht_super_read(dev, &got, &report), 0);
        ck_assert_mem_eq(&got, &sb, sizeof(sb));
        ht_dev_close(dev);
    }
}

TEST(every_flipped_byte_is_noticed)
{
    struct ht_dev *dev = new_dev(DEVICE_BYTES);
    struct ht_super sb = format(&dev, 1), got;
    uint8_t block[4096];

    ht_super_encode(&sb, block);
    for (unsigned i = 0; i < sizeof(block); i++) {
        block[i] ^= 0x40;
        ck_assert_int_ne(ht_super_decode(block, &got), HT_SUPER_OK);
        block[i] ^= 0x40;
    }
    ck_assert_int_eq(ht_super_decode(block, &got), HT_SUPER_OK);
}

/* A field changed and the checksum made right again: only the bounds can notice. */
static enum ht_super_problem decode_with(const struct ht_super *sb, size_t offset, uint64_t value, unsigned bytes)
{
    uint8_t block[4096];
    struct ht_super got;

    ht_super_encode(sb, block);
    if (bytes == 4)
        ht_le32_store(block + offset, (uint32_t)value);
    else
        ht_le64_store(block + offset, value);
    ht_le64_store(block + offsetof(struct ht_disk_super, checksum), ht_hash64(block + 16, 4096 - 16, 0));
    return ht_super_decode(block, &got);
}

TEST(every_field_has_bounds)
{
    struct ht_dev *dev = new_dev(DEVICE_BYTES);
    struct ht_super sb = format(&dev, 1);

#define F(f) offsetof(struct ht_disk_super, f)
    const struct {
        size_t offset;
        uint64_t value;
        unsigned bytes;
        enum ht_super_problem problem;
    } cases[] = {
        {F(version), HT_FORMAT_VERSION + 1, 4, HT_SUPER_BAD_VERSION},
        {F(feat_refuse), 1ull << 63, 8, HT_SUPER_BAD_VERSION},
        {F(feat_ro), 1, 8, HT_SUPER_OK},
        {F(feat_ignore), 1, 8, HT_SUPER_OK},
        {F(flags), 8, 4, HT_SUPER_BAD_FIELD},
        {F(generation), 0, 8, HT_SUPER_BAD_FIELD},
        {F(generation), UINT64_MAX, 8, HT_SUPER_BAD_FIELD},
        {F(label), 0x0a, 4, HT_SUPER_BAD_FIELD},
        {F(device_index), 1, 4, HT_SUPER_BAD_FIELD},
        {F(device_count), 0, 4, HT_SUPER_BAD_FIELD},
        {F(device_count), 2, 4, HT_SUPER_BAD_FIELD}, /* of no bytes */
        {F(device_count), 17, 4, HT_SUPER_BAD_FIELD},
        {F(block_bytes), 512, 4, HT_SUPER_BAD_FIELD},
        {F(chunk_bytes), 0, 4, HT_SUPER_BAD_FIELD},
        {F(chunk_bytes), 3 << 18, 4, HT_SUPER_BAD_FIELD},
        {F(chunk_bytes), 8 << 20, 4, HT_SUPER_BAD_FIELD},
        {F(log_bytes), HT_LOG_BYTES_MIN - 4096, 8, HT_SUPER_BAD_FIELD},
        {F(log_bytes), HT_LOG_BYTES_MIN + 1, 8, HT_SUPER_BAD_FIELD},
        {F(log_bytes), UINT64_MAX - 4095, 8, HT_SUPER_BAD_FIELD},
        {F(log_bytes), 16 * HT_MIB, 8, HT_SUPER_BAD_FIELD}, /* runs into the other and the end */
        {F(log[0].device), 1, 4, HT_SUPER_BAD_FIELD},
        {F(log[0].offset), 0, 8, HT_SUPER_BAD_FIELD},
        {F(log[0].offset), 16 * 4096, 8, HT_SUPER_BAD_FIELD},
        {F(log[0].offset), 4096, 8, HT_SUPER_BAD_FIELD},
        {F(log[0].offset), HT_MIB + 512, 8, HT_SUPER_BAD_FIELD},
        {F(log[0].offset), DEVICE_BYTES - HT_LOG_BYTES_MIN, 8, HT_SUPER_BAD_FIELD}, /* over copy 2 */
        {F(log[0].offset), DEVICE_BYTES, 8, HT_SUPER_BAD_FIELD},
        {F(log[0].offset), UINT64_MAX - 4095, 8, HT_SUPER_BAD_FIELD},
        {F(log[1].offset), HT_MIB + 4096, 8, HT_SUPER_BAD_FIELD}, /* over the other */
        {F(start_pos), 1, 8, HT_SUPER_BAD_FIELD},
        {F(start_pos), 1ull << 63, 8, HT_SUPER_BAD_FIELD},
        {F(start_seq), 0, 8, HT_SUPER_BAD_FIELD},
        {F(start_seq), 7, 8, HT_SUPER_BAD_FIELD}, /* clean, but nothing there is durable */
        {F(epoch), UINT64_MAX, 8, HT_SUPER_BAD_FIELD},
        {F(durable_seq), UINT64_MAX, 8, HT_SUPER_BAD_FIELD},
        {F(device_bytes), 4096, 8, HT_SUPER_BAD_FIELD},
        {F(device_bytes), UINT64_MAX, 8, HT_SUPER_BAD_FIELD},
        {F(device_class), UINT64_MAX, 8, HT_SUPER_OK}, /* without the feature they are no classes */
    };
#undef F

    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++)
        ck_assert_msg(decode_with(&sb, cases[i].offset, cases[i].value, cases[i].bytes) == cases[i].problem, "case %zu",
                      i);
}

TEST(logs_lie_on_fast_devices_alone)
{
    struct ht_dev *devs[] = {new_dev(8 * DEVICE_BYTES), new_dev(2 * DEVICE_BYTES), new_dev(8 * DEVICE_BYTES),
                             new_dev(4 * DEVICE_BYTES)};
    struct ht_super sb, got;
    struct ht_super_report report;

    ck_assert_int_eq(ht_super_format(devs, 4, &(struct ht_format_opts){.capacity = 5}, &sb), 0);
    ck_assert(sb.log_device[0] == 1 && sb.log_device[1] == 3);
    ck_assert_uint_eq(sb.log_bytes, DEVICE_BYTES / 16); /* of the smallest fast one */
    ck_assert_int_eq(ht_super_read(devs[0], &got, &report), 0);
    for (unsigned i = 0; i < 4; i++)
        ck_assert_uint_eq(got.device_class[i], i % 2 ? HT_DEVICE_FAST : HT_DEVICE_CAPACITY);
    ck_assert_int_eq(ht_super_format(devs, 2, &(struct ht_format_opts){.capacity = 1}, &sb), 0);
    ck_assert(sb.log_device[0] == 1 && sb.log_device[1] == 1 && sb.log_offset[0] != sb.log_offset[1]);
    ck_assert_int_eq(ht_super_format(devs, 4, &(struct ht_format_opts){.capacity = 15}, &sb), -EINVAL);
    for (unsigned i = 0; i < 4; i++)
        ht_dev_close(devs[i]);
}

TEST(hostile_classes_are_refused_and_an_older_program_loses_them)
{
    struct ht_dev *devs[] = {new_dev(DEVICE_BYTES), new_dev(DEVICE_BYTES)};
    size_t at = offsetof(struct ht_disk_super, device_class);
    struct ht_super sb;

    ck_assert_int_eq(ht_super_format(devs, 2, &(struct ht_format_opts){.capacity = 2}, &sb), 0);
    ck_assert_int_eq(decode_with(&sb, at, 0x0100, 8), HT_SUPER_OK);
    ck_assert_int_eq(decode_with(&sb, at, 0, 8), HT_SUPER_OK);             /* it wrote zeros */
    ck_assert_int_eq(decode_with(&sb, at, 0x0101, 8), HT_SUPER_BAD_FIELD); /* none is fast */
    ck_assert_int_eq(decode_with(&sb, at, 0x0001, 8), HT_SUPER_BAD_FIELD); /* the log is there */
    for (unsigned i = 1; i < 8; i++)                                       /* also of devices that there are not */
        ck_assert_int_eq(decode_with(&sb, at, 2ull << 8 * i, 8), HT_SUPER_BAD_FIELD);
    ck_assert_int_eq(decode_with(&sb, at + 8, 0xffull << 56, 8), HT_SUPER_BAD_FIELD);
}

TEST(a_truncated_device_is_named_as_such_and_a_grown_one_works)
{
    struct ht_dev *dev = new_dev(DEVICE_BYTES), *less = new_dev(DEVICE_BYTES - 4096), *more = new_dev(2 * DEVICE_BYTES);
    struct ht_super sb = format(&dev, 1), got;
    struct ht_super_report report;

    memcpy(ht_dev_ram_data(less), ht_dev_ram_data(dev), DEVICE_BYTES - 4096);
    memset(&got, 0, sizeof(got));
    ck_assert_int_eq(ht_super_read(less, &got, &report), -ENODATA);
    ck_assert_mem_eq(got.uuid, sb.uuid, 16);
    ck_assert_int_eq(report.copy[2], HT_SUPER_UNREADABLE);

    memcpy(ht_dev_ram_data(more), ht_dev_ram_data(dev), DEVICE_BYTES);
    ck_assert_int_eq(ht_super_read(more, &got, &report), 0);
    ck_assert_int_eq(report.copy[2], HT_SUPER_OK);
}

TEST(a_new_format_wins_over_what_was_there)
{
    struct ht_dev *dev = new_dev(DEVICE_BYTES);
    struct ht_super old = format(&dev, 1), sb, got;
    struct ht_super_report report;

    for (int i = 0; i < 5; i++)
        ck_assert_uint_eq(ht_super_write(&old, &dev, 1, NULL), 0);
    sb = format(&dev, 1);
    ck_assert_uint_gt(sb.generation, old.generation);
    ck_assert_int_eq(ht_super_read(dev, &got, &report), 0);
    ck_assert_mem_eq(got.uuid, sb.uuid, 16);
    ck_assert_mem_ne(got.uuid, old.uuid, 16);
}

TEST(missing_members_are_skipped)
{
    struct ht_dev *devs[] = {new_dev(DEVICE_BYTES), new_dev(DEVICE_BYTES)}, *one[] = {devs[0], NULL};
    struct ht_super sb = format(devs, 2), got;
    struct ht_super_report report;
    uint64_t before = sb.generation;

    ck_assert_uint_eq(ht_super_write(&sb, one, 2, NULL), 0);
    ck_assert_int_eq(ht_super_read(devs[0], &got, &report), 0);
    ck_assert_uint_eq(got.generation, before + 1);
    ck_assert_int_eq(ht_super_read(devs[1], &got, &report), 0);
    ck_assert_uint_eq(got.generation, before);
}

/*
 * The n-th write or flush of one ht_super_write fails; repeat: all after it too. Then the
 * state must still be readable, as old or new.
 */
static void fail_nth(enum ht_io_op op, unsigned nth, bool repeat)
{
    struct ht_dev *dev = new_dev(DEVICE_BYTES);
    struct ht_super sb = format(&dev, 1), got;
    struct ht_super_report report;
    uint64_t before = sb.generation;

    dev_fail(dev, op, nth, repeat);
    int rc = ht_super_write(&sb, &dev, 1, NULL);
    ck_assert_int_eq(ht_super_read(dev, &got, &report), 0);
    ck_assert(got.generation == before + 1 || (rc && got.generation == before));
    ht_dev_close(dev);
}

TEST(failing_at_any_operation_leaves_the_old_or_the_new)
{
    for (unsigned nth = 1; nth <= 4; nth++)
        for (int repeat = 0; repeat <= 1; repeat++) {
            fail_nth(HT_IO_WRITE, nth, repeat);
            fail_nth(HT_IO_FLUSH, nth, repeat);
        }
}

/*
 * One write of a superblock was cut anywhere inside, from a state in which only some copies are the present ones;
 * missed: so many generations were not written to this device.
 */
static void tear_first_write(unsigned stale_mask, unsigned missed)
{
    struct ht_dev *dev = new_dev(DEVICE_BYTES);
    struct ht_super old = format(&dev, 1), sb = old, got;
    struct ht_super_report report;
    uint8_t was[HT_SUPER_COPIES][4096];

    ck_assert_uint_eq(ht_super_write(&sb, &dev, 1, NULL), 0);
    for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
        if (stale_mask & 1u << c) { /* an older generation */
            ht_super_encode(&old, copy_bytes(dev, c));
        }
    for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
        memcpy(was[c], copy_bytes(dev, c), 4096);
    uint64_t before = sb.generation;
    sb.generation += missed;
    dev_fail(dev, HT_IO_WRITE, 2, true); /* only the first write gets through */
    dev_fail(dev, HT_IO_FLUSH, 1, true);
    int rc = ht_super_write(&sb, &dev, 1, NULL);
    ck_assert_int_ne(rc, 0);
    for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
        if (memcmp(was[c], copy_bytes(dev, c), 4096) != 0)
            memset(copy_bytes(dev, c), 0x77, 512); /* and was torn */
    ck_assert_int_eq(ht_super_read(dev, &got, &report), 0);
    ck_assert_uint_ge(got.generation, before);
    ht_dev_close(dev);
}

TEST(the_last_present_copy_is_never_overwritten_first)
{
    for (unsigned stale_mask = 0; stale_mask < 7; stale_mask++)
        for (unsigned missed = 0; missed <= 2; missed++)
            tear_first_write(stale_mask, missed);
}

/*
 * After the n-th write of a superblock the flush of another caller fails; then the next superblock gets no further than
 * `writes` writes, and the power is cut.
 */
static void void_then_cut(unsigned nth, unsigned writes, uint64_t seed)
{
    struct ht_dev *dev = new_dev(DEVICE_BYTES);
    struct ht_super sb = format(&dev, 1), got;
    struct ht_super_report report;

    ck_assert_int_eq(dev_set_cache(dev, 0), 0);
    ck_assert_uint_eq(ht_super_write(&sb, &dev, 1, NULL), 0);
    uint64_t durable = sb.generation;
    dev_void_after(dev, nth);
    if (ht_super_write(&sb, &dev, 1, NULL) == 0)
        durable = sb.generation;
    dev_void_after(dev, 0);
    dev_fail(dev, HT_IO_WRITE, writes + 1, true);
    dev_fail(dev, HT_IO_FLUSH, writes > 1 ? 2 : 1, true);
    if (ht_super_write(&sb, &dev, 1, NULL) == 0)
        durable = sb.generation;
    dev_power_off(&dev, 1, seed);
    dev_power_on(dev);
    ck_assert_int_eq(ht_super_read(dev, &got, &report), 0);
    ck_assert_uint_ge(got.generation, durable);
    ht_dev_close(dev);
}

TEST(a_flush_that_failed_for_another_caller_takes_no_superblock_away)
{
    for (unsigned nth = 1; nth <= 4; nth++)
        for (unsigned writes = 0; writes <= 3; writes++)
            for (uint64_t seed = 1; seed <= 5; seed++)
                void_then_cut(nth, writes, seed);
}

TEST(format_needs_every_copy)
{
    for (unsigned nth = 1; nth <= 3; nth++) {
        struct ht_dev *dev = new_dev(DEVICE_BYTES);
        struct ht_super sb;
        dev_fail(dev, HT_IO_WRITE, nth, false);
        ck_assert_int_eq(ht_super_format(&dev, 1, &(struct ht_format_opts){0}, &sb), -EIO);
        ht_dev_close(dev);
    }
}

RUN_TESTS("super", .timeout_s = 60, .quiet = WARNINGS)
