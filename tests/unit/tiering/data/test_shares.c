/* SPDX-License-Identifier: Apache-2.0 */
/* Devices with shares: where new content goes, and which rewritten content moves. */
#include "tiering/tier/placement.h"
#include "tests/unit/tiering/store/fixture.h"

enum { DEVICES = 2, DEVICE_MIB = 128, RANGES = 24 };

static struct ht_dev *devs[DEVICES];

static void make(uint64_t dram_bytes)
{
    struct ht_super sb;
    struct ht_format_opts format = {0};
    struct ht_store_opts opts = {
        .dram_bytes = dram_bytes, .staging_bytes = 16 * MIB, .numa_node = HT_NUMA_OFF, .no_threads = true};

    for (unsigned i = 0; i < DEVICES; i++)
        ck_assert_int_eq(dev_open_ram(DEVICE_MIB * MIB, 4096, &devs[i]), 0);
    ck_assert_int_eq(ht_super_format(devs, DEVICES, &format, &sb), 0);
    ck_assert_int_eq(ht_store_new(devs, DEVICES, &opts, &s), 0);
    ck_assert_int_eq(ht_store_mount(s), 0);
}

static void end(void)
{
    ht_store_verify(s, false);
    unmount_store();
    for (unsigned i = 0; i < DEVICES; i++)
        ht_dev_close(devs[i]);
}

/*
 * Linked in the place of what measures devices. In a second it has seen enough to replace the shares of a test, and a
 * slow machine takes longer for that test.
 */
void __wrap_ht_shares_update(struct ht_store *store);
void __wrap_ht_shares_update(struct ht_store *store)
{
    (void)store;
}

/* Shares of these quarters. */
static void share(unsigned first, unsigned second)
{
    const uint32_t shares[DEVICES] = {first * HT_PLACE_WHOLE / 4, second * HT_PLACE_WHOLE / 4};

    ht_store_lock(s);
    ht_alloc_set_shares(s->alloc, shares);
    ht_store_unlock(s);
}

static unsigned on[DEVICES];
static uint8_t device[RANGES];

static int note_device(void *ctx, const struct ht_chunk_info *info)
{
    (void)ctx;
    for (unsigned k = 0; k < info->extent_count; k++)
        ck_assert_uint_eq(info->extents[k].device, info->extents[0].device);
    device[info->index] = (uint8_t)info->extents[0].device;
    on[info->extents[0].device]++;
    return 0;
}

static void look(void)
{
    memset(on, 0, sizeof(on));
    ck_assert_int_eq(ht_store_walk(s, note_device, NULL), 0);
}

static struct ht_obj *stored(void)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    uint8_t *content = pattern(RANGES * MIB, 1);

    put_synced(o, 0, content, RANGES * MIB);
    look();
    return o;
}

/* One update of all. */
static void update(struct ht_obj *o)
{
    struct ht_batch_pin pin = {.store = s, .count = 1};

    for (unsigned i = 0; i < RANGES; i++) {
        pin.chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .index = i, .mode = HT_BATCH_PIN_UPDATE};
        pin_now(&pin);
        pin.chunk[0].data[0]++;
        unpin(&pin, 1);
    }
    ck_assert_int_eq(ht_obj_sync(o), 0);
    look();
}

TEST(new_content_goes_to_devices_by_shares)
{
    make(8 * MIB);
    share(3, 1);
    (void)stored();
    ck_assert_msg(on[0] == RANGES * 3 / 4 && on[1] == RANGES / 4, "%u and %u", on[0], on[1]);
    struct ht_device_stat st;
    ht_store_device_stat(s, 0, &st);
    ck_assert(st.has_share);
    ck_assert_uint_eq(st.share_per_mille, 750);
}

TEST(without_shares_devices_fill_up_alike)
{
    make(8 * MIB);
    (void)stored();
    ck_assert_msg(on[0] == RANGES / 2 && on[1] == RANGES / 2, "%u and %u", on[0], on[1]);
    struct ht_device_stat st;
    ht_store_device_stat(s, 0, &st);
    ck_assert(!st.has_share);
}

/* Streamed through staging buffers, and resident. */
static const uint64_t dram[] = {8 * MIB, 64 * MIB};

TEST_LOOP(updates_move_content_until_it_lies_by_shares_and_then_none, HT_ARRAY_SIZE(dram))
{
    make(dram[_i]);
    struct ht_obj *o = stored();
    uint8_t *want = pattern(RANGES * MIB, 1);
    unsigned steps = 5;
    share(1, 3);
    for (unsigned n = 0; n < steps; n++)
        update(o);
    ck_assert_msg(on[0] <= RANGES / 4 + 1 && on[0] > 0, "%u and %u", on[0], on[1]);
    uint64_t moved = stats().moved_bytes;
    ck_assert_uint_ge(moved, (RANGES / 2 - on[0]) * (uint64_t)MIB);
    ck_assert_uint_le(moved, RANGES * (uint64_t)MIB); /* few move back */
    for (; steps < 10; steps++)
        update(o);
    ck_assert_uint_le(stats().moved_bytes - moved, RANGES / 2 * (uint64_t)MIB); /* of 5 * RANGES MiB */
    for (unsigned i = 0; i < RANGES; i++)
        want[(size_t)i * MIB] = (uint8_t)(want[(size_t)i * MIB] + steps);
    expect(o, 0, want, RANGES * MIB);
}

TEST(content_leaves_a_device_that_lost_its_share)
{
    make(8 * MIB);
    struct ht_obj *o = stored();
    ck_assert_uint_eq(on[1], RANGES / 2);
    share(4, 0);
    update(o);
    ck_assert_uint_eq(on[1], 0);
    ck_assert_uint_eq(stats().moved_bytes, RANGES / 2 * (uint64_t)MIB);
}

static unsigned next_on(unsigned from, unsigned which)
{
    while (device[from] != which)
        ck_assert_uint_lt(++from, RANGES);
    return from;
}

/* One pin of two chunks, of which some (bits) change. */
static void update_two(struct ht_obj *o, unsigned first, unsigned second, uint32_t dirty)
{
    struct ht_batch_pin pin = {.store = s, .count = 2};

    pin.chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .index = first, .mode = HT_BATCH_PIN_UPDATE};
    pin.chunk[1] = (struct ht_batch_pin_chunk){.obj = o, .index = second, .mode = HT_BATCH_PIN_UPDATE};
    pin_now(&pin);
    unpin(&pin, dirty);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    look();
}

TEST_LOOP(only_what_changes_and_lies_elsewhere_counts_as_moved, HT_ARRAY_SIZE(dram))
{
    make(dram[_i]);
    struct ht_obj *o = stored();
    unsigned here = next_on(0, 0), there = next_on(0, 1), other = next_on(there + 1, 1);
    share(4, 0);
    update_two(o, there, other, 2);
    ck_assert_uint_eq(stats().moved_bytes, MIB);
    ck_assert(device[there] == 1 && device[other] == 0);
    update_two(o, here, there, 3);
    ck_assert_uint_eq(stats().moved_bytes, 2 * (uint64_t)MIB);
    ck_assert(device[here] == 0 && device[there] == 0);
}

TEST(a_full_device_passes_content_on)
{
    make(8 * MIB);
    share(4, 0);
    struct ht_obj *o[DEVICE_MIB / RANGES + 2], *last;
    unsigned count = 0;
    do {
        ck_assert_uint_lt(count, HT_ARRAY_SIZE(o));
        o[count++] = last = stored();
    } while (on[1] == 0);
    ck_assert_uint_gt(on[0], 3 * RANGES);
    uint8_t *want = pattern(RANGES * MIB, 1);
    expect(last, 0, want, RANGES * MIB);
    while (count)
        put_object(o[--count]);
}

RUN_TESTS("shares", .teardown = end)
