/* SPDX-License-Identifier: Apache-2.0 */
/* Rings behave the same on every kind of device; each test runs on every kind. */
#include "io_test.h"
#include "tiering/base/fault.h"

#define DEV_BYTES (16 * HT_MIB)
#define BLOCK 4096u

static struct ht_dev *dev;
static struct ht_ring *ring;
static uint8_t *buffer;
static bool on_kernel; /* not a device of memory */

/* False: skipped. */
static bool begin(int kind, unsigned depth)
{
    dev = open_kind((enum kind)kind, DEV_BYTES);
    if (!dev)
        return false;
    on_kernel = kind > RAM_4096;
    ck_assert_int_eq(ht_ring_new(HT_RING_DEFERRED, depth, &ring), 0);
    return true;
}

/* And with a buffer. */
static bool begin_with(int kind, unsigned depth, size_t bytes)
{
    buffer = aligned(bytes);
    return begin(kind, depth);
}

static void finish(void)
{
    if (ring) {
        ck_assert_uint_eq(ht_ring_in_flight(ring), 0);
        ht_ring_free(ring);
        ht_dev_close(dev);
    }
    ring = NULL;
}

static int run_one(enum ht_io_op op, uint64_t offset, void *buf, uint32_t len)
{
    struct ht_io io = io_of(dev, op, offset, buf, len);

    ht_ring_submit(ring, &io);
    return ht_ring_wait(ring, &io);
}

TEST_LOOP(what_is_written_is_read_back, KINDS)
{
    static const uint32_t lens[] = {BLOCK, 3 * BLOCK, 1u << 20, 4u << 20};
    uint64_t offset = BLOCK;

    if (!begin_with(_i, 8, 4u << 20))
        return;
    ck_assert_uint_eq(ht_dev_size(dev), DEV_BYTES);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(lens); i++) {
        fill(buffer, offset, lens[i], i);
        ck_assert_int_eq(run_one(HT_IO_WRITE, offset, buffer, lens[i]), 0);
        memset(buffer, 0, lens[i]);
        ck_assert_int_eq(run_one(HT_IO_READ, offset, buffer, lens[i]), 0);
        ck_assert(is_filled(buffer, offset, lens[i], i));
        offset += lens[i];
    }
    ck_assert_int_eq(run_one(HT_IO_FLUSH, 0, NULL, 0), 0);
}

TEST_LOOP(requests_of_one_logical_block_work, KINDS)
{
    if (!begin_with(_i, 1, 2 * BLOCK))
        return;
    uint32_t lba = ht_dev_facts(dev)->lba;
    fill(buffer + lba, 7ull * lba, lba, 1);
    ck_assert_int_eq(run_one(HT_IO_WRITE, 7ull * lba, buffer + lba, lba), 0);
    memset(buffer, 0, 2 * BLOCK);
    ck_assert_int_eq(run_one(HT_IO_READ, 7ull * lba, buffer + lba, lba), 0);
    ck_assert(is_filled(buffer + lba, 7ull * lba, lba, 1));
    ck_assert_int_eq(run_one(HT_IO_READ, DEV_BYTES - lba, buffer, lba), 0);
}

TEST_LOOP(misaligned_requests_are_refused_and_change_nothing, KINDS)
{
    if (!begin_with(_i, 4, 4 * BLOCK))
        return;
    uint32_t lba = ht_dev_facts(dev)->lba;
    for (int op = HT_IO_READ; op <= HT_IO_WRITE; op++) {
        ck_assert_int_eq(run_one(op, lba / 2, buffer, lba), -EINVAL);
        ck_assert_int_eq(run_one(op, 0, buffer + 8, lba), -EINVAL);
        ck_assert_int_eq(run_one(op, 0, buffer, lba / 2), -EINVAL);
        ck_assert_int_eq(run_one(op, 0, buffer, 0), -EINVAL);
        ck_assert_int_eq(run_one(op, DEV_BYTES, buffer, lba), -EINVAL);
        ck_assert_int_eq(run_one(op, DEV_BYTES - lba, buffer, 2 * lba), -EINVAL);
        ck_assert_int_eq(run_one(op, UINT64_MAX - lba + 1, buffer, 2 * lba), -EINVAL);
    }
    ck_assert(!ht_dev_needs_flush(dev));
}

TEST_LOOP(short_and_interrupted_transfers_go_unnoticed, KINDS)
{
    const uint32_t len = 1u << 20;

    if (!begin_with(_i, 4, len))
        return;
    fill(buffer, 0, len, 3);
    ht_fault_arm(HT_FAULT_IO_SHORT, 1, true);
    ht_fault_arm(HT_FAULT_IO_AGAIN, 2, false);
    ck_assert_int_eq(run_one(HT_IO_WRITE, 0, buffer, len), 0);
    memset(buffer, 0, len);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, len), 0);
    if (_i > RAM_4096)
        ck_assert_uint_gt(ht_fault_passed(HT_FAULT_IO_SHORT), 10);
    ht_fault_disarm_all();
    ck_assert(is_filled(buffer, 0, len, 3));
}

TEST_LOOP(a_flush_that_ends_with_eagain_has_failed, KINDS)
{
    if (!begin(_i, 4))
        return;
    ht_fault_arm(HT_FAULT_IO_AGAIN, 1, false);
    ck_assert_int_eq(run_one(HT_IO_FLUSH, 0, NULL, 0), _i > RAM_4096 ? -EIO : 0); /* memory passes no such point */
    ht_fault_disarm_all();
    ck_assert_uint_eq(ht_dev_flush_failures(dev), _i > RAM_4096);
}

TEST_LOOP(more_requests_than_the_ring_is_deep, KINDS)
{
    enum { COUNT = 1000, DEPTH = 64 };
    struct ht_io *ios;

    if (!begin(_i, DEPTH))
        return;
    ios = test_alloc(COUNT * sizeof(*ios));
    uint8_t *buf = aligned((size_t)COUNT * BLOCK);
    for (unsigned i = 0; i < COUNT; i++) {
        uint64_t offset = (uint64_t)(i * 7 % COUNT) * BLOCK;
        fill(buf + (size_t)i * BLOCK, offset, BLOCK, 5);
        ios[i] = io_of(dev, HT_IO_WRITE, offset, buf + (size_t)i * BLOCK, BLOCK);
        ht_ring_submit(ring, &ios[i]);
        ck_assert_uint_le(ht_ring_in_flight(ring), DEPTH);
    }
    ht_ring_drain(ring);
    memset(buf, 0, (size_t)COUNT * BLOCK);
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert(ios[i].done);
        ck_assert_int_eq(ios[i].result, 0);
        ios[i] = io_of(dev, HT_IO_READ, (uint64_t)i * BLOCK, buf + (size_t)i * BLOCK, BLOCK);
    }
    ck_assert_int_eq(ht_ring_run(ring, ios, COUNT), 0);
    ck_assert(is_filled(buf, 0, (size_t)COUNT * BLOCK, 5));
}

TEST_LOOP(kick_starts_requests_that_nobody_waits_for_yet, KINDS)
{
    struct ht_io ios[4];

    if (!begin_with(_i, 8, 4 * BLOCK))
        return;
    fill(buffer, 0, 4 * BLOCK, 1);
    for (unsigned i = 0; i < 4; i++) {
        ios[i] = io_of(dev, HT_IO_WRITE, (uint64_t)i * BLOCK, buffer + (size_t)i * BLOCK, BLOCK);
        ht_ring_submit(ring, &ios[i]);
    }
    ht_ring_kick(ring);
    ck_assert_int_eq(ht_ring_wait(ring, &ios[2]), 0);
    ck_assert_int_eq(ht_ring_wait(ring, &ios[2]), 0); /* a finished request: returns at once */
    ht_ring_drain(ring);
    for (unsigned i = 0; i < 4; i++)
        ck_assert(ios[i].done && ios[i].result == 0);
}

/* Calls that gave the kernel something and did not wait. */
static unsigned pushes(void)
{
    return ht_fault_passed(HT_FAULT_IO_SUBMIT);
}

TEST_LOOP(what_is_offered_goes_together, KINDS)
{
    enum { COUNT = 80 };
    struct ht_io ios[COUNT];

    if (!begin_with(_i, COUNT, COUNT * BLOCK))
        return;
    fill(buffer, 0, COUNT * BLOCK, 1);
    ht_fault_arm(HT_FAULT_IO_SUBMIT, UINT32_MAX, false);
    for (unsigned i = 0; i < COUNT; i++) {
        ios[i] = io_of(dev, HT_IO_WRITE, (uint64_t)i * BLOCK, buffer + (size_t)i * BLOCK, BLOCK);
        ht_ring_submit(ring, &ios[i]);
        ht_ring_offer(ring);
        ck_assert_uint_eq(pushes(), on_kernel && i >= 63);
    }
    ck_assert_int_eq(ht_ring_wait(ring, &ios[COUNT - 1]), 0); /* sends the rest */
    ht_ring_drain(ring);
    ht_fault_disarm_all();
    memset(buffer, 0, COUNT * BLOCK);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, COUNT * BLOCK), 0);
    ck_assert(is_filled(buffer, 0, COUNT * BLOCK, 1));
}

TEST_LOOP(registered_memory_serves_aligned_parts_of_it, KINDS)
{
    if (!begin(_i, 8))
        return;
    uint8_t *a = aligned(8 * BLOCK), *b = aligned(8 * BLOCK), *other = aligned(BLOCK);
    struct ht_pinned_area areas[] = {{a, 8 * BLOCK, false}, {b, 8 * BLOCK, false}};
    ht_ring_register(ring, areas, 2);
    fill(a + BLOCK, 0, 4 * BLOCK, 1);
    ck_assert_int_eq(run_one(HT_IO_WRITE, 0, a + BLOCK, 4 * BLOCK), 0);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, b + 4 * BLOCK, 4 * BLOCK), 0);
    ck_assert(is_filled(b + 4 * BLOCK, 0, 4 * BLOCK, 1));
    ck_assert_int_eq(run_one(HT_IO_READ, BLOCK, other, BLOCK), 0);
    ck_assert(is_filled(other, BLOCK, BLOCK, 1));
}

/* Completions that a request of this length takes. */
static unsigned completions_of(enum ht_io_op op, void *buf, uint32_t len)
{
    ht_fault_arm(HT_FAULT_IO_AGAIN, UINT32_MAX, false);
    ck_assert_int_eq(run_one(op, BLOCK, buf, len), 0);
    unsigned n = ht_fault_passed(HT_FAULT_IO_AGAIN);
    ht_fault_disarm_all();
    return n;
}

static unsigned pieces_of(uint32_t len, bool huge)
{
    uint32_t max = huge ? ht_dev_facts(dev)->transfer_max : ht_dev_facts(dev)->scattered_max;

    return on_kernel ? max == 0 ? 1 : (unsigned)ht_div_up(len, max) : 0;
}

TEST_LOOP(large_requests_are_cut_to_what_the_device_takes, KINDS)
{
    const uint32_t len = (4u << 20) + BLOCK;

    if (!begin_with(_i, 3, len))
        return;
    uint8_t *huge = aligned(len);
    struct ht_pinned_area area = {huge, len, true};
    ht_ring_register(ring, &area, 1);
    /* The first one finds out which requests a raw device does not take from there. */
    ck_assert_int_eq(run_one(HT_IO_READ, BLOCK, huge, len), 0);
    fill(buffer, BLOCK, len, 7);
    ck_assert_uint_eq(completions_of(HT_IO_WRITE, buffer, len), pieces_of(len, false));
    ck_assert_uint_eq(completions_of(HT_IO_READ, huge, len), pieces_of(len, true));
    ck_assert(is_filled(huge, BLOCK, len, 7));
    if (_i >= LOOP_512)
        ck_assert_uint_gt(pieces_of(len, false), 3); /* more than the ring is deep */
}

TEST_LOOP(a_cut_request_fails_as_a_whole_and_once, KINDS)
{
    const uint32_t len = 4u << 20;

    if (!begin_with(_i, 8, len))
        return;
    for (unsigned nth = 1; nth <= pieces_of(len, false); nth++) {
        struct ht_dev_counters c;
        ht_fault_arm(HT_FAULT_IO_TORN, nth, false);
        ck_assert_int_eq(run_one(HT_IO_WRITE, 0, buffer, len), -EIO);
        ht_fault_disarm_all();
        ht_dev_counters(dev, &c);
        ck_assert_uint_eq(c.write_errors, nth);
        ck_assert_uint_eq(c.writes, 0);
    }
    ck_assert_int_eq(run_one(HT_IO_WRITE, 0, buffer, len), 0);
}

TEST_LOOP(the_nth_operation_fails_and_does_not_reach_the_device, KINDS)
{
    if (!begin_with(_i, 4, BLOCK))
        return;
    fill(buffer, 0, BLOCK, 1);
    ck_assert_int_eq(run_one(HT_IO_WRITE, 0, buffer, BLOCK), 0);
    dev_fail(dev, HT_IO_WRITE, 2, false);
    ck_assert_int_eq(run_one(HT_IO_WRITE, BLOCK, buffer, BLOCK), 0);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, BLOCK), 0);
    fill(buffer, 0, BLOCK, 2);
    ck_assert_int_eq(run_one(HT_IO_WRITE, 0, buffer, BLOCK), -EIO);
    ck_assert_int_eq(run_one(HT_IO_WRITE, 2 * BLOCK, buffer, BLOCK), 0);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, BLOCK), 0);
    ck_assert(is_filled(buffer, 0, BLOCK, 1));

    dev_fail(dev, HT_IO_FLUSH, 1, true);
    ck_assert_int_eq(run_one(HT_IO_FLUSH, 0, NULL, 0), -EIO);
    ck_assert_int_eq(run_one(HT_IO_FLUSH, 0, NULL, 0), -EIO);
    ck_assert(ht_dev_needs_flush(dev));
    dev_fail(dev, HT_IO_FLUSH, 0, false);
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    ck_assert(!ht_dev_needs_flush(dev));
}

TEST_LOOP(run_reports_the_first_error_and_ends_all, KINDS)
{
    struct ht_io ios[6];

    if (!begin_with(_i, 4, 6 * BLOCK))
        return;
    for (unsigned i = 0; i < 6; i++)
        ios[i] = io_of(dev, HT_IO_WRITE, (uint64_t)i * BLOCK, buffer + (size_t)i * BLOCK, BLOCK);
    dev_fail(dev, HT_IO_WRITE, 3, false);
    ck_assert_int_eq(ht_ring_run(ring, ios, 6), -EIO);
    for (unsigned i = 0; i < 6; i++) {
        ck_assert(ios[i].done);
        ck_assert_int_eq(ios[i].result, i == 2 ? -EIO : 0);
    }
}

TEST_LOOP(a_discard_leaves_its_neighbours_and_may_be_written_again, KINDS)
{
    enum { PART = 1 << 20 }; /* more than one command of a raw device moves */
    struct ht_dev_counters c;
    int rc;

    if (!begin_with(_i, 8, 3 * PART))
        return;
    fill(buffer, 0, 3 * PART, 1);
    ck_assert_int_eq(run_one(HT_IO_WRITE, 0, buffer, 3 * PART), 0);
    rc = run_one(HT_IO_DISCARD, PART, NULL, PART);
    if (rc != 0)
        ck_assert_int_eq(rc, -EOPNOTSUPP);
    ht_dev_counters(dev, &c);
    ck_assert_uint_eq(c.discards, rc == 0);
    ck_assert_uint_eq(c.discarded_bytes, rc == 0 ? PART : 0);
    ck_assert_uint_eq(c.discard_errors, rc != 0);
    memset(buffer, 0, 3 * PART);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, 3 * PART), 0);
    ck_assert(is_filled(buffer, 0, PART, 1));
    ck_assert(rc != 0 || !is_filled(buffer + PART, PART, PART, 1)); /* as all of these devices do it */
    ck_assert(is_filled(buffer + 2 * PART, 2 * PART, PART, 1));
    fill(buffer, PART, PART, 2);
    ck_assert_int_eq(run_one(HT_IO_WRITE, PART, buffer, PART), 0);
    memset(buffer, 0, PART);
    ck_assert_int_eq(run_one(HT_IO_READ, PART, buffer, PART), 0);
    ck_assert(is_filled(buffer, PART, PART, 2));
    ck_assert_int_eq(run_one(HT_IO_DISCARD, 100, NULL, BLOCK), -EINVAL);
    ck_assert_int_eq(run_one(HT_IO_DISCARD, DEV_BYTES - BLOCK, NULL, 2 * BLOCK), -EINVAL);
    ck_assert_int_eq(ht_dev_discard(dev, 0, DEV_BYTES), rc);
}

TEST_LOOP(a_kernel_that_passes_no_commands_on_serves_all_but_raw_devices, KINDS)
{
    dev = open_kind((enum kind)_i, DEV_BYTES);
    if (!dev)
        return;
    ht_fault_arm(HT_FAULT_IO_COMMANDS, 1, true);
    ck_assert_int_eq(ht_ring_new(HT_RING_DEFERRED, 4, &ring), 0);
    ht_fault_disarm_all();
    uint8_t *buf = aligned(BLOCK);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buf, BLOCK), dev->raw ? -EOPNOTSUPP : 0);
}

TEST_LOOP(commands_that_are_refused_go_without_registered_memory, KINDS)
{
    enum { LEN = 1 << 20 };

    if (!begin_with(_i, 4, LEN))
        return;
    struct ht_pinned_area area = {.base = buffer, .bytes = LEN};
    ht_ring_register(ring, &area, 1);
    ht_fault_arm(HT_FAULT_IO_COMMAND_MEMORY, 1, true);
    fill(buffer, 0, LEN, 1);
    ck_assert_int_eq(run_one(HT_IO_WRITE, 0, buffer, LEN), 0);
    memset(buffer, 0, LEN);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, LEN), 0);
    ck_assert(is_filled(buffer, 0, LEN, 1));
    ck_assert_int_eq(run_one(HT_IO_FLUSH, 0, NULL, 0), 0);
    ht_fault_disarm_all();
}

TEST_LOOP(counters_tell_what_was_done, KINDS)
{
    struct ht_dev_counters c;

    if (!begin_with(_i, 4, 2 * BLOCK))
        return;
    ck_assert_int_eq(run_one(HT_IO_WRITE, 0, buffer, 2 * BLOCK), 0);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, BLOCK), 0);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, BLOCK), 0);
    ck_assert_int_eq(run_one(HT_IO_FLUSH, 0, NULL, 0), 0);
    dev_fail(dev, HT_IO_READ, 1, false);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, buffer, BLOCK), -EIO);
    ht_dev_counters(dev, &c);
    ck_assert_uint_eq(c.reads, 2);
    ck_assert_uint_eq(c.read_bytes, 2 * BLOCK);
    ck_assert_uint_eq(c.writes, 1);
    ck_assert_uint_eq(c.written_bytes, 2 * BLOCK);
    ck_assert_uint_eq(c.flushes, 1);
    ck_assert_uint_eq(c.read_errors, 1);
    ck_assert_uint_eq(c.write_errors, 0);
}

TEST_LOOP(what_the_kernel_refuses_fails_and_the_rest_goes_on, KINDS)
{
    struct ht_io ios[6];

    if (!begin_with(_i, 8, 6 * BLOCK))
        return;
    fill(buffer, 0, 6 * BLOCK, 1);
    for (unsigned i = 0; i < 6; i++)
        ios[i] = io_of(dev, HT_IO_WRITE, (uint64_t)i * BLOCK, buffer + (size_t)i * BLOCK, BLOCK);
    for (unsigned i = 0; i < 3; i++)
        ht_ring_submit(ring, &ios[i]);
    ht_ring_kick(ring);
    ht_fault_arm(HT_FAULT_IO_REFUSED, 1, false);
    ck_assert_int_eq(ht_ring_run(ring, ios + 3, 3), on_kernel ? -EIO : 0);
    ht_fault_disarm_all();
    ht_ring_drain(ring);
    for (unsigned i = 0; i < 6; i++) {
        ck_assert(ios[i].done);
        ck_assert_int_eq(ios[i].result, i >= 3 && on_kernel ? -EIO : 0);
    }
    ck_assert_int_eq(ht_ring_run(ring, ios, 6), 0);
    ck_assert_int_eq(run_one(HT_IO_READ, 0, memset(buffer, 0, 6 * BLOCK), 6 * BLOCK), 0);
    ck_assert(is_filled(buffer, 0, 6 * BLOCK, 1));
}

static int descriptor_of_ring(void)
{
    for (int fd = 3; fd < 64; fd++) {
        char path[64], target[64] = "";
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        if (readlink(path, target, sizeof(target) - 1) > 0 && strcmp(target, "anon_inode:[io_uring]") == 0)
            return fd;
    }
    ck_abort_msg("no ring is open");
}

TEST(a_ring_that_the_kernel_does_not_know_fails_requests_and_recovers)
{
    struct ht_io ios[3];

    if (!begin(A_FILE, 8))
        return;
    uint8_t *buf = aligned(3 * BLOCK);
    int fd = descriptor_of_ring();
    int kept = dup(fd);
    close(fd);
    for (unsigned i = 0; i < 3; i++)
        ios[i] = io_of(dev, HT_IO_WRITE, (uint64_t)i * BLOCK, buf + (size_t)i * BLOCK, BLOCK);
    ck_assert_int_eq(ht_ring_run(ring, ios, 3), -EIO);
    for (unsigned i = 0; i < 3; i++)
        ck_assert(ios[i].done && ios[i].result == -EIO);
    ck_assert_int_eq(dup2(kept, fd), fd);
    close(kept);
    ck_assert_int_eq(ht_ring_run(ring, ios, 3), 0);
}

#define THREADS 8u
#define ROUNDS 60u
#define AT_ONCE 8u

/* Each thread has a region of the device and a ring. */
static void *work(void *arg)
{
    uint64_t region = DEV_BYTES / THREADS, base = (uintptr_t)arg * region;
    uint8_t *buf = aligned((size_t)AT_ONCE * BLOCK);
    struct ht_io ios[AT_ONCE];
    uintptr_t bad = 0;
    struct ht_ring *own;

    if (ht_ring_new(HT_RING_DEFERRED, AT_ONCE, &own) != 0)
        return (void *)1;
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (int op = HT_IO_WRITE; op >= HT_IO_READ; op--) {
            for (unsigned i = 0; i < AT_ONCE; i++) {
                uint64_t offset = base + (uint64_t)(round * 31 + i * 5) * BLOCK % region;
                if (op == HT_IO_WRITE)
                    fill(buf + (size_t)i * BLOCK, offset, BLOCK, round);
                ios[i] = io_of(dev, op, offset, buf + (size_t)i * BLOCK, BLOCK);
            }
            bad += ht_ring_run(own, ios, AT_ONCE) != 0;
        }
        for (unsigned i = 0; i < AT_ONCE; i++)
            bad += !is_filled(buf + (size_t)i * BLOCK, ios[i].offset, BLOCK, round);
        if (round % 16 == 0) {
            ios[0] = io_of(dev, HT_IO_FLUSH, 0, NULL, 0);
            bad += ht_ring_run(own, ios, 1) != 0;
        }
    }
    ht_ring_free(own);
    return (void *)bad;
}

TEST_LOOP(threads_with_rings_of_their_own_share_a_device, KINDS)
{
    pthread_t threads[THREADS];
    struct ht_dev_counters c;

    if (!begin(_i, 1))
        return;
    for (uintptr_t i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, work, (void *)i), 0);
    for (unsigned i = 0; i < THREADS; i++) {
        void *bad;
        pthread_join(threads[i], &bad);
        ck_assert_ptr_null(bad);
    }
    ht_dev_counters(dev, &c);
    ck_assert_uint_eq(c.writes, THREADS * ROUNDS * AT_ONCE);
    ck_assert_uint_eq(c.reads, c.writes);
    ck_assert(ht_dev_needs_flush(dev));
    ck_assert_int_eq(ht_dev_flush(dev), 0);
    ck_assert(!ht_dev_needs_flush(dev));
}

TEST(a_file_that_became_shorter_is_an_error_and_not_zeros)
{
    char path[PATH_MAX];

    scratch_path(path, DEV_BYTES);
    if (!direct_io_works(path)) {
        unlink(path);
        skipped(A_FILE, "no O_DIRECT");
        return;
    }
    ck_assert_int_eq(ht_dev_open(path, HT_DEV_NOWAIT, &dev), 0);
    ck_assert_int_eq(ht_ring_new(HT_RING_DEFERRED, 4, &ring), 0);
    ck_assert_int_eq(truncate(path, DEV_BYTES / 2), 0);
    unlink(path);
    uint8_t *buf = aligned(4 * BLOCK);
    ck_assert_int_eq(run_one(HT_IO_READ, DEV_BYTES / 2 - 2 * BLOCK, buf, 4 * BLOCK), -EIO);
    ck_assert_int_eq(run_one(HT_IO_READ, DEV_BYTES / 2, buf, 4 * BLOCK), -EIO);
}

TEST(an_impossible_ring_or_ram_device_is_refused)
{
    ck_assert_int_eq(ht_ring_new(HT_RING_DEFERRED, 0, &ring), -EINVAL);
    ck_assert_int_eq(ht_ring_new(HT_RING_DEFERRED, 1u << 20, &ring), -EINVAL);
    ck_assert_int_eq(dev_open_ram(4096, 1024, &dev), -EINVAL);
    ck_assert_int_eq(dev_open_ram(0, 512, &dev), -EINVAL);
    ck_assert_int_eq(dev_open_ram(4096 + 512, 4096, &dev), -EINVAL);
}

TEST(the_content_of_a_ram_device_can_be_looked_at_and_changed)
{
    uint8_t *buf = aligned(BLOCK);

    ck_assert(begin(RAM_4096, 2));
    fill(buf, BLOCK, BLOCK, 1);
    ck_assert_int_eq(run_one(HT_IO_WRITE, BLOCK, buf, BLOCK), 0);
    ck_assert_mem_eq((uint8_t *)ht_dev_ram_data(dev) + BLOCK, buf, BLOCK);
    ((uint8_t *)ht_dev_ram_data(dev))[BLOCK] ^= 1;
    ck_assert_int_eq(run_one(HT_IO_READ, BLOCK, buf, BLOCK), 0);
    ck_assert(!is_filled(buf, BLOCK, BLOCK, 1));
    ck_assert_str_eq(ht_dev_name(dev), "ram");
    ck_assert_int_eq(dev_touched(dev)[0], 0);
    ck_assert_int_eq(dev_touched(dev)[1], 1);
}

RUN_TESTS("ring", .teardown = finish, .timeout_s = 120)
