/* SPDX-License-Identifier: Apache-2.0 */
/* Memory near the device that a chunk lies on. The nodes of these devices need not exist: stats report the division. */
#include <numaif.h>
#include <sys/mman.h>

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/space/alloc.h"

enum { DEVICES = 2, CHUNKS = 6 };

static struct ht_dev *devs[DEVICES];
static uint64_t shm_bytes;
static bool threads;

static void mount_near(int numa)
{
    struct ht_store_opts opts = {.dram_bytes = 16 * MIB + shm_bytes,
                                 .shm_bytes = shm_bytes,
                                 .staging_bytes = 16 * MIB,
                                 .numa_node = numa,
                                 .no_threads = !threads};

    ck_assert_int_eq(ht_store_new(devs, DEVICES, &opts, &s), 0);
    ck_assert_int_eq(ht_store_mount(s), 0);
}

static void make(int first, int second)
{
    struct ht_super sb;
    struct ht_format_opts opts = {0};

    for (unsigned i = 0; i < DEVICES; i++)
        ck_assert_int_eq(dev_open_ram(64 * MIB, 4096, &devs[i]), 0);
    dev_set_node(devs[0], first);
    dev_set_node(devs[1], second);
    ck_assert_int_eq(ht_super_format(devs, DEVICES, &opts, &sb), 0);
    mount_near(HT_NUMA_AUTO);
}

static void end(void)
{
    unmount_store();
    for (unsigned i = 0; i < DEVICES; i++)
        ht_dev_close(devs[i]);
}

static uint64_t used_on(unsigned place)
{
    struct ht_node_stat st;

    ht_store_node_stat(s, place, &st);
    return st.dram_used_bytes;
}

static uint64_t wanted_oid;
static unsigned first_device;

static int note_first(void *ctx, const struct ht_chunk_info *info)
{
    (void)ctx;
    if (info->oid == wanted_oid && info->index == 0)
        first_device = info->extents[0].device;
    return 0;
}

/* The device of its first chunk. */
static unsigned device_of_first(struct ht_obj *o)
{
    wanted_oid = ht_obj_id(o);
    ck_assert_int_eq(ht_store_walk(s, note_first, NULL), 0);
    return first_device;
}

static int note_device(void *ctx, const struct ht_chunk_info *info)
{
    ((unsigned *)ctx)[info->index] = info->extents[0].device;
    return 0;
}

TEST(devices_of_the_class_capacity_get_no_memory_of_their_node)
{
    struct ht_super sb;

    for (unsigned i = 0; i < DEVICES; i++) {
        ck_assert_int_eq(dev_open_ram(64 * MIB, 4096, &devs[i]), 0);
        dev_set_node(devs[i], (int)i);
    }
    ck_assert_int_eq(ht_super_format(devs, DEVICES, &(struct ht_format_opts){.capacity = 2}, &sb), 0);
    mount_near(HT_NUMA_AUTO);
    ck_assert(ht_store_nodes(s)->count == 1 && ht_store_nodes(s)->node[0] == 0);
}

TEST(memory_is_divided_among_the_nodes_of_devices)
{
    struct ht_node_stat st;

    make(0, 1);
    ck_assert_uint_eq(ht_store_nodes(s)->count, 2);
    for (unsigned i = 0; i < 2; i++) {
        ht_store_node_stat(s, i, &st);
        ck_assert_uint_eq(st.dram_bytes, 8 * MIB);
        ck_assert_uint_eq(st.staging_bytes, 8 * MIB);
    }
}

TEST(images_are_near_the_device_of_their_chunk)
{
    unsigned device[CHUNKS], on[DEVICES] = {0};

    make(0, 1);
    uint8_t *content = pattern(CHUNKS * MIB, 1);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, content, CHUNKS * MIB);
    uint64_t fresh_on[2] = {used_on(0), used_on(1)};
    ck_assert_uint_eq(fresh_on[0], CHUNKS / 2 * MIB); /* devices take turns */
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_int_eq(ht_store_walk(s, note_device, device), 0);
    for (unsigned i = 0; i < CHUNKS; i++)
        on[device[i]]++;
    for (unsigned i = 0; i < DEVICES; i++)
        ck_assert_uint_eq(fresh_on[i], (uint64_t)on[i] * MIB); /* they went to the devices near which they had been */
    ht_obj_evict(o);
    ck_assert_uint_eq(used_on(0) + used_on(1), 0);
    for (unsigned i = 0; i < CHUNKS; i++)
        if (device[i] == 1)
            expect(o, (uint64_t)i * MIB, content + (size_t)i * MIB, MIB);
    ck_assert_uint_eq(used_on(0), 0);
    ck_assert_uint_eq(used_on(1), (uint64_t)on[1] * MIB);
}

TEST(all_memory_is_used_though_one_device_has_everything)
{
    make(0, 1);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    uint8_t *content = pattern(32 * MIB, 1);
    unsigned device[32], far = 0;
    put_synced(o, 0, content, 32 * MIB);
    ck_assert_int_eq(ht_store_walk(s, note_device, device), 0);
    ht_obj_evict(o);
    for (unsigned i = 0; i < 32; i++)
        if (device[i] == 0)
            expect(o, (uint64_t)i * MIB, content + (size_t)i * MIB, MIB);
    ck_assert_uint_eq(used_on(0), 8 * MIB);
    far = (unsigned)(used_on(1) / MIB);
    ck_assert_uint_ge(far, 7);
}

/*
 * Pages of memory on each of these two nodes. The policy of a file's pages belongs to the
 * file: another mapping shows it, too.
 */
static void count_pages(int fd, size_t bytes, unsigned count[2])
{
    size_t step = (size_t)sysconf(_SC_PAGESIZE);
    char *base = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);

    ck_assert_ptr_ne(base, MAP_FAILED);
    count[0] = count[1] = 0;
    for (size_t at = 0; at < bytes; at += step) {
        void *page = base + at;
        int node = -1;
        ck_assert_int_ge(*(volatile char *)page, -128);
        ck_assert_int_eq(move_pages(0, 1, &page, NULL, &node, 0), 0);
        ck_assert(node == 0 || node == 1);
        count[node]++;
    }
    munmap(base, bytes);
}

static struct ht_obj *stored(size_t bytes)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    uint8_t *content = pattern(bytes, 1);

    put_synced(o, 0, content, bytes);
    return o;
}

TEST(shm_images_are_near)
{
    struct ht_obj *o[3];
    int fd[3];
    unsigned pages[2], all = MIB / (unsigned)sysconf(_SC_PAGESIZE);

    shm_bytes = 12 * MIB;
    make(0, 1);
    for (unsigned i = 0; i < 3; i++) {
        o[i] = stored((i == 2 ? CHUNKS : 1) * MIB);
        ck_assert_int_eq(ht_obj_shm_open_for(o[i], 0, &fd[i]), 0);
        count_pages(fd[i], (i == 2 ? CHUNKS : 1) * MIB, pages);
        if (!ht_node_exists(1)) /* then it lies on the other one */
            ck_assert_uint_eq(pages[0], i == 2 ? CHUNKS * all : all);
        else if (i == 2) /* on both devices */
            ck_assert_uint_eq(pages[0], pages[1]);
        else
            ck_assert_uint_eq(pages[device_of_first(o[i])], all);
        ht_obj_shm_close(o[i]);
        put_object(o[i]);
    }
    shm_bytes = 0;
}

TEST(each_node_has_a_thread_that_cleans_its_images)
{
    threads = true;
    make(0, 1);
    uint8_t *content = pattern(32 * MIB, 1);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, content, 14 * MIB);
    while (stats().dram_dirty_bytes > 8 * MIB) /* ends with the test's time if no thread cleans */
        usleep(1000);
    put_all(o, 0, content, 32 * MIB);
    expect(o, 0, content, 32 * MIB);
    put_object(o);
    threads = false;
}

TEST(an_unknown_node_is_no_node)
{
    make(HT_NUMA_OFF, HT_NUMA_OFF);
    ck_assert_uint_eq(ht_store_nodes(s)->count, 0);
    end();
    make(0, HT_NUMA_OFF);
    ck_assert_uint_eq(ht_store_nodes(s)->count, 1);
}

TEST(one_node_can_be_asked_for)
{
    struct ht_store_opts opts = {.dram_bytes = 8 * MIB, .staging_bytes = 16 * MIB, .numa_node = 999};

    make(0, 1);
    unmount_store();
    ck_assert_int_eq(ht_store_new(devs, DEVICES, &opts, &s), -EINVAL);
    mount_near(HT_NUMA_OFF);
    ck_assert_uint_eq(ht_store_nodes(s)->count, 0);
}

RUN_TESTS("numa", .teardown = end, .timeout_s = 60) /* also in an emulated machine */
