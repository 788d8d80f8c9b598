/* SPDX-License-Identifier: Apache-2.0 */
/* A ring for each thread: whose it is, how long it lives, and that each lack of the kernel costs speed only. */
#include <sys/wait.h>
#include "io_test.h"
#include "tiering/base/fault.h"
#include "tiering/io/rings.h"

#define DEV_BYTES (16 * HT_MIB)
#define BLOCK 4096u
#define AREA_BYTES (64 * BLOCK)

static struct ht_dev *dev;
static struct ht_rings *rings;
static uint8_t *area;

/* False: skipped. */
static bool begin(int kind)
{
    struct ht_rings_of of = {.area_count = 1};

    dev = open_kind((enum kind)kind, DEV_BYTES);
    if (!dev)
        return false;
    area = aligned(AREA_BYTES);
    of.dev[3] = dev;
    of.area[0] = (struct ht_pinned_area){.base = area, .bytes = AREA_BYTES};
    ck_assert_int_eq(ht_rings_new(&of, &rings), 0);
    return true;
}

static void finish(void)
{
    ht_fault_disarm_all();
    ht_rings_free(rings);
    ht_dev_close(dev);
}

/* Writes and reads back at a place of the thread's own, in registered memory and in other. How often it failed. */
static uintptr_t work(unsigned place)
{
    uint64_t offset = (uint64_t)place * 8 * BLOCK;
    uint8_t *in = area + (size_t)place * 4 * BLOCK, *other = aligned(2 * BLOCK);
    struct ht_ring *ring = ht_ring_mine(rings);
    uintptr_t bad = !ring;

    for (uint64_t round = 0; round < 20 && bad == 0; round++) {
        struct ht_io write = io_of(dev, HT_IO_WRITE, offset, in, 2 * BLOCK);
        struct ht_io read = io_of(dev, HT_IO_READ, offset, round % 2 ? other : in + 2 * BLOCK, 2 * BLOCK);
        fill(in, offset, 2 * BLOCK, round);
        bad += ht_ring_run(ring, &write, 1) != 0;
        bad += ht_ring_run(ring, &read, 1) != 0;
        bad += !is_filled(read.buf, offset, 2 * BLOCK, round);
        bad += ht_ring_mine(rings) != ring || ht_ring_mine(NULL) != ring;
    }
    return bad;
}

static void *work_main(void *place)
{
    return (void *)work((unsigned)(uintptr_t)place);
}

static void work_in_threads(unsigned count)
{
    pthread_t threads[16];

    for (uintptr_t i = 0; i < count; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, work_main, (void *)i), 0);
    for (unsigned i = 0; i < count; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        ck_assert_ptr_null(bad);
    }
}

TEST_LOOP(each_thread_has_one_ring_for_all_it_does, KINDS)
{
    if (!begin(_i))
        return;
    ck_assert_ptr_nonnull(ht_ring_mine(NULL)); /* before it worked for the set */
    work_in_threads(16);
    work_in_threads(16);
    ck_assert_uint_eq(work(3), 0);
    finish();
}

TEST(a_thread_of_two_sets_has_a_ring_for_each)
{
    static const struct ht_rings_of nothing;
    struct ht_rings *second;

    if (!begin(RAM_512))
        return;
    ck_assert_int_eq(ht_rings_new(&nothing, &second), 0);
    struct ht_ring *first_ring = ht_ring_mine(rings);
    struct ht_ring *second_ring = ht_ring_mine(second);
    ck_assert_ptr_ne(first_ring, second_ring);
    ck_assert_ptr_eq(ht_ring_mine(rings), first_ring);
    ck_assert_ptr_eq(ht_ring_mine(second), second_ring);
    ht_rings_free(second);
    ck_assert_ptr_eq(ht_ring_mine(rings), first_ring);
    finish();
}

static pthread_barrier_t meet;

static void *outlive_set(void *arg)
{
    uintptr_t bad = work(1);

    (void)arg;
    pthread_barrier_wait(&meet); /* the set goes */
    pthread_barrier_wait(&meet);
    bad += ht_dev_read(dev, 0, area, BLOCK) != 0;
    return (void *)bad;
}

TEST_LOOP(a_set_takes_the_rings_of_threads_that_live_on, KINDS)
{
    pthread_t thread;
    void *bad;

    if (!begin(_i))
        return;
    pthread_barrier_init(&meet, NULL, 2);
    ck_assert_int_eq(pthread_create(&thread, NULL, outlive_set, NULL), 0);
    pthread_barrier_wait(&meet);
    ck_assert_uint_eq(work(0), 0);
    ht_rings_free(rings);
    rings = NULL;
    pthread_barrier_wait(&meet);
    pthread_join(thread, &bad);
    ck_assert_ptr_null(bad);
    pthread_barrier_destroy(&meet);
    finish();
}

/* A child that used its parent's rings would take the parent's completions. */
TEST_LOOP(a_forked_child_leaves_its_parents_rings_alone, KINDS)
{
    int status;

    if (!begin(_i))
        return;
    ck_assert_uint_eq(work(0), 0);
    pid_t child = fork();
    if (child == 0)
        _exit(work(1) == 0 ? 0 : 1);
    ck_assert_uint_eq(work(0), 0);
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_int_eq(status, 0);
    finish();
}

/* Rings of this process with so many registered files and buffers, as the kernel reports. */
static unsigned rings_with(unsigned files, unsigned buffers)
{
    unsigned found = 0;

    for (int fd = 0; fd < 64; fd++) {
        unsigned has_files = UINT32_MAX, has_buffers = UINT32_MAX;
        char path[64], line[256];
        snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
        FILE *f = fopen(path, "re");
        while (f && fgets(line, sizeof(line), f)) {
            (void)sscanf(line, "UserFiles: %u", &has_files);
            (void)sscanf(line, "UserBufs: %u", &has_buffers);
        }
        if (f)
            fclose(f);
        found += has_files == files && has_buffers == buffers;
    }
    return found;
}

TEST(what_is_shared_reaches_rings_that_are_there_and_others)
{
    struct ht_io_features f;

    if (!begin(A_FILE))
        return;
    ck_assert_int_eq(ht_io_features(&f), 0);
    if (!f.files || !f.shared_memory) {
        printf("skipped: this kernel cannot share registered memory\n");
        return;
    }
    uint8_t *more = aligned(AREA_BYTES);
    ck_assert_uint_eq(work(0), 0);
    ck_assert_uint_eq(rings_with(1, 1), 1);
    ck_assert_uint_eq(rings_with(0, 1), 1); /* to take over from */
    ht_rings_share(rings, &(struct ht_pinned_area){more, AREA_BYTES, false});
    ck_assert_uint_eq(rings_with(0, 2), 1);
    ck_assert_uint_eq(rings_with(1, 1), 1); /* until the thread needs it again */
    ck_assert_uint_eq(work(0), 0);
    ck_assert_uint_eq(rings_with(1, 2), 1);
    fill(more, 0, 4 * BLOCK, 1);
    ck_assert_int_eq(ht_dev_write(dev, 0, more, 4 * BLOCK), 0);
    memset(more, 0, AREA_BYTES);
    ck_assert_int_eq(ht_dev_read(dev, 0, more, 4 * BLOCK), 0);
    ck_assert(is_filled(more, 0, 4 * BLOCK, 1));
    work_in_threads(4);
    ck_assert_uint_eq(rings_with(1, 2), 1); /* those of threads that ended are gone */
    finish();
}

static const enum ht_fault_point lacks[] = {
    HT_FAULT_IO_DEFERRED, HT_FAULT_IO_COOPERATIVE, HT_FAULT_IO_FILES, HT_FAULT_IO_REGISTER, HT_FAULT_IO_CLONE,
};

/* One by one, and all. */
TEST_LOOP(what_the_kernel_lacks_costs_speed_only, HT_ARRAY_SIZE(lacks) + 1)
{
    uint8_t *more = aligned(AREA_BYTES);

    for (int kind = RAM_4096; kind <= A_FILE; kind++) {
        if (!begin(kind))
            continue;
        for (unsigned i = 0; i < HT_ARRAY_SIZE(lacks); i++)
            if (_i == (int)i || _i == HT_ARRAY_SIZE(lacks))
                ht_fault_arm(lacks[i], 1, true);
        work_in_threads(4);
        ck_assert_uint_eq(work(5), 0);
        ht_rings_share(rings, &(struct ht_pinned_area){more, AREA_BYTES, false});
        work_in_threads(4);
        ck_assert_uint_eq(work(5), 0);
        finish();
    }
}

TEST(features_are_found_out)
{
    struct ht_io_features f;

    ck_assert_int_eq(ht_io_features(&f), 0);
    ck_assert(f.mode >= HT_RING_PLAIN && f.mode <= HT_RING_DEFERRED);
}

TEST(no_ring_is_told_and_tried_again)
{
    if (!begin(A_FILE))
        return;
    ht_fault_arm(HT_FAULT_IO_RING, 1, false);
    ck_assert_int_eq(ht_dev_read(dev, 0, area, BLOCK), -ENOMEM);
    ck_assert_int_eq(ht_dev_read(dev, 0, area, BLOCK), 0);
    finish();
}

RUN_TESTS("rings", .timeout_s = 120)
