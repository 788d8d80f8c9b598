/* SPDX-License-Identifier: Apache-2.0 */
/* cached_devices.h - a store on several devices of memory with volatile caches, whose power can be cut. */
#pragma once

#include "tests/support/dev.h"
#include "tests/unit/tiering/store/fixture.h"

enum { DEVICES_MAX = 4, CHUNKS = 6, SCOPE = 7, FLUSH_US = 500, WAIT_MS_MAX = 60000 };

static struct ht_dev *devs[DEVICES_MAX];
static unsigned device_count, answer_ms, commit_ms; /* commit_ms: with threads */
static uint8_t *one, *two, *three;

static inline void mount_all(void)
{
    struct ht_store_opts opts = {.dram_bytes = 48 * MIB,
                                 .staging_bytes = 16 * MIB,
                                 .numa_node = HT_NUMA_OFF,
                                 .no_threads = !commit_ms,
                                 .answer_ms = answer_ms,
                                 .compress_inline = fixture_inline,
                                 .commit_ms = commit_ms};
    struct ht_dev *given[DEVICES_MAX];

    memcpy(given, devs, sizeof(given));
    ck_assert_int_eq(ht_store_new(given, device_count, &opts, &s), 0);
    ck_assert_int_eq(ht_store_mount(s), 0);
}

static inline void make(unsigned count)
{
    struct ht_super sb;
    struct ht_format_opts opts = {.log_bytes = MIB};

    device_count = count;
    for (unsigned i = 0; i < count; i++)
        ck_assert_int_eq(dev_open_ram(96 * MIB, 512, &devs[i]), 0);
    ck_assert_int_eq(ht_super_format(devs, count, &opts, &sb), 0);
    for (unsigned i = 0; i < count; i++)
        ck_assert_int_eq(dev_set_cache(devs[i], FLUSH_US), 0);
    mount_all();
    one = pattern(CHUNKS * MIB, 1);
    two = pattern(CHUNKS * MIB, 2);
    three = pattern(CHUNKS * MIB, 3);
}

/* The caller has put all references. */
static inline void power_cut(uint64_t seed)
{
    dev_power_off(devs, device_count, seed);
    close_store();
    for (unsigned i = 0; i < device_count; i++)
        dev_power_on(devs[i]);
    mount_all();
}

/* For run_tests(): after a test, unless it called this itself. */
static inline void end(void)
{
    if (!s)
        return;
    unmount_store();
    for (unsigned i = 0; i < device_count; i++)
        ht_dev_close(devs[i]);
    s = NULL;
}

static inline struct ht_obj *published(uint64_t scope, const uint8_t *content, size_t bytes)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, scope);

    put_synced(o, 0, content, bytes);
    return o;
}

static inline uint64_t put(struct ht_obj *o)
{
    uint64_t oid = ht_obj_id(o);

    put_object(o);
    return oid;
}

static inline void expect_after_cut(uint64_t oid, const uint8_t *want, size_t bytes)
{
    struct ht_obj *o = get_object(oid);

    ck_assert_ptr_nonnull(o);
    expect(o, 0, want, bytes);
    put_object(o);
}

/* The object as it is after a power cut. */
static inline void cut_and_expect(struct ht_obj *o, uint64_t seed, const uint8_t *want, size_t bytes)
{
    uint64_t oid = put(o);

    power_cut(seed);
    expect_after_cut(oid, want, bytes);
}

static inline uint64_t written_to(unsigned device)
{
    struct ht_dev_counters c;

    ht_dev_counters(devs[device], &c);
    return c.written_bytes;
}

/* Writes the object back without a flush. Returns the device that took it. */
static inline unsigned write_back(struct ht_obj *o)
{
    uint64_t before[DEVICES_MAX];

    for (unsigned i = 0; i < device_count; i++)
        before[i] = written_to(i);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    for (unsigned i = 0; i < device_count; i++)
        if (written_to(i) != before[i])
            return i;
    ck_abort_msg("nothing was written");
}

/* A sync in a thread of its own. */
struct syncing {
    struct ht_obj *o;
    _Atomic bool over;
    int rc;
};

static inline void *sync_main(void *arg)
{
    struct syncing *y = arg;

    y->rc = ht_obj_sync(y->o);
    y->over = true;
    return NULL;
}
