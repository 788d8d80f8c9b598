/* SPDX-License-Identifier: Apache-2.0 */
/* Stores of two devices of memory: members that are missing, return, fail, or stop answering. */
#include <sched.h>

#include "tiering/journal/journal.h"

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/base/fault.h"
#include "tiering/space/alloc.h"
#include "tiering/space/super.h"

enum { BYTES = 12 * MIB, DEVICES = 2 };

static struct ht_dev *devs[DEVICES];
static uint64_t oid;
static uint8_t *content, *newer;

static bool threads; /* of the store's own */

static int try_mount(unsigned present, bool degraded)
{
    struct ht_dev *given[DEVICES];
    unsigned n = 0;
    struct ht_store_opts opts = {.dram_bytes = 8 * MIB,
                                 .staging_bytes = 16 * MIB,
                                 .numa_node = HT_NUMA_OFF,
                                 .no_threads = !threads,
                                 .answer_ms = 50,
                                 .degraded = degraded};

    for (unsigned i = DEVICES; i-- > 0;)
        if (present >> i & 1)
            given[n++] = devs[i];
    int rc = ht_store_new(given, n, &opts, &s);
    if (rc)
        return rc;
    ck_assert_ptr_eq(given[0], devs[present & 1 ? 0 : 1]); /* by index again */
    rc = ht_store_mount(s);
    if (rc)
        close_store();
    return rc;
}

static void make(void)
{
    struct ht_super sb;
    struct ht_format_opts opts = {0};

    for (unsigned i = 0; i < DEVICES; i++)
        ck_assert_int_eq(dev_open_ram(64 * MIB, 4096, &devs[i]), 0);
    ck_assert_int_eq(ht_super_format(devs, DEVICES, &opts, &sb), 0);
    ck_assert_int_eq(try_mount(3, false), 0);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    oid = ht_obj_id(o);
    content = pattern(BYTES, 1);
    newer = pattern(BYTES, 2);
    put_synced(o, 0, content, BYTES);
    put_object(o);
}

static void end(void)
{
    if (s)
        unmount_store();
    for (unsigned i = 0; i < DEVICES; i++)
        if (devs[i])
            ht_dev_close(devs[i]);
    memset(devs, 0, sizeof(devs));
}

static struct ht_device_stat device(unsigned i)
{
    struct ht_device_stat st;

    ht_store_device_stat(s, i, &st);
    return st;
}

struct where {
    unsigned chunks[DEVICES];
    bool on[BYTES / MIB]; /* second device? */
};

static int count_chunk(void *ctx, const struct ht_chunk_info *info)
{
    struct where *w = ctx;

    for (unsigned i = 1; i < info->extent_count; i++)
        ck_assert_uint_eq(info->extents[i].device, info->extents[0].device);
    if (info->oid == oid) {
        w->chunks[info->extents[0].device]++;
        w->on[info->index] = info->extents[0].device;
    }
    return 0;
}

static struct where where(void)
{
    struct where w = {{0}, {0}};

    ck_assert_int_eq(ht_store_walk(s, count_chunk, &w), 0);
    return w;
}

/* ------------------------------------------------------------ missing members */

TEST(chunks_spread_over_equal_devices)
{
    struct where w = where();

    ck_assert_uint_eq(w.chunks[0], BYTES / MIB / 2);
    ck_assert_uint_eq(w.chunks[1], BYTES / MIB / 2);
    ck_assert_int_eq(device(0).log, HT_LOG_COPY_WRITTEN);
    ck_assert_int_eq(device(1).log, HT_LOG_COPY_WRITTEN);
}

TEST_LOOP(a_missing_member_is_refused_and_costs_only_what_is_on_it, 2)
{
    unsigned gone = (unsigned)_i, there = 1u << !gone;
    struct where w = where();
    uint64_t total = stats().total_bytes;

    unmount_store();
    ck_assert_int_eq(try_mount(there, false), -ENODEV);
    ck_assert_int_eq(try_mount(there, true), 0);
    ck_assert_uint_eq(stats().total_bytes, total / 2);
    ck_assert_int_eq(device(gone).health, HT_HEALTH_MISSING);
    ck_assert_int_eq(device(gone).log, HT_LOG_COPY_LOST);
    struct ht_obj *o = same_object(oid);
    uint8_t byte;
    for (unsigned i = 0; i < BYTES / MIB; i++)
        if (w.on[i] == gone)
            ck_assert_int_eq(ht_obj_read(o, i * MIB, &byte, 1), -EIO);
        else
            expect(o, i * MIB, content + i * MIB, MIB);
    /* written whole it is well again, and lies elsewhere */
    for (unsigned i = 0; i < BYTES / MIB; i += 3)
        put_synced(o, i * MIB, newer + i * MIB, MIB);
    ht_obj_evict(o);
    for (unsigned i = 0; i < BYTES / MIB; i += 3)
        expect(o, i * MIB, newer + i * MIB, MIB);
    close_store(); /* a crash */
    /* The device returns: it is brought up to date, and later writes are neither lost nor undone. */
    ck_assert_int_eq(try_mount(3, false), 0);
    ck_assert_int_eq(device(gone).log, HT_LOG_COPY_WRITTEN);
    o = same_object(oid);
    for (unsigned i = 0; i < BYTES / MIB; i++)
        expect(o, i * MIB, (i % 3 ? content : newer) + i * MIB, MIB);
    unmount_store();
    /* so now the other one may be away */
    ck_assert_int_eq(try_mount(1u << gone, true), 0);
    o = same_object(oid);
    w = where();
    for (unsigned i = 0; i < BYTES / MIB; i++)
        if (w.on[i] == gone)
            expect(o, i * MIB, (i % 3 ? content : newer) + i * MIB, MIB);
}

TEST(an_update_that_cannot_read_is_counted_as_a_read_error)
{
    struct where w = where();

    unmount_store();
    ck_assert_int_eq(try_mount(1, true), 0);
    struct ht_obj *o = same_object(oid);
    uint64_t index = 0;
    while (!w.on[index])
        index++;
    uint64_t errors = stats().read_errors;
    struct ht_batch_pin l = {.store = s, .count = 1, .chunk[0] = {o, index, HT_BATCH_PIN_UPDATE, 0, NULL, false}};
    ck_assert_int_eq(ht_batch_pin_begin(&l), -EIO);
    ck_assert_uint_eq(stats().read_errors, errors + 1);
}

TEST(what_a_missing_member_holds_is_no_space)
{
    unmount_store();
    ck_assert_int_eq(try_mount(1, true), 0);
    struct ht_obj *o = same_object(oid), *filler = object(HT_CHUNK_BYTES, 0);
    /* The space was freed on the missing device: no caller gets room here. */
    ck_assert_int_eq(ht_obj_truncate(o, 0), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    uint64_t end_at = 0;
    while (ht_obj_write(filler, end_at, content, MIB) == MIB)
        end_at += MIB;
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    ck_assert_uint_lt(end_at, 64 * MIB);
    ck_assert_uint_ge(end_at, 56 * MIB);
    unmount_store();
    ck_assert_int_eq(try_mount(3, false), 0);
}

TEST(members_that_changed_apart_are_refused)
{
    unmount_store();
    for (unsigned i = 0; i < DEVICES; i++) {
        ck_assert_int_eq(try_mount(1u << i, true), 0);
        struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
        put_synced(o, 0, newer, MIB);
        unmount_store();
    }
    ck_assert_int_eq(try_mount(3, false), -EXDEV);
    ck_assert_int_eq(try_mount(3, true), -EXDEV);
    ck_assert_int_eq(try_mount(1, true), 0);
}

/* -------------------------------------------------------- failing in mid-run */

/* Makes every kind of request of a device fail. */
static void fail_all(struct ht_dev *d, bool fail)
{
    dev_fail(d, HT_IO_WRITE, fail, fail);
    dev_fail(d, HT_IO_FLUSH, fail, fail);
}

TEST_LOOP(a_member_that_stops_taking_writes_is_left_behind, 4)
{
    unsigned bad = (unsigned)_i % 2, crashes = (unsigned)_i / 2;

    ck_assert_int_eq(ht_store_commit(s), 0);
    fail_all(devs[bad], true);
    struct ht_obj *o = same_object(oid);
    for (unsigned i = 0; i < BYTES / MIB; i++)
        put_synced(o, i * MIB, newer + i * MIB, MIB);
    struct where w = where();
    ck_assert_uint_eq(w.chunks[bad], 0);
    ck_assert_int_eq(device(bad).log, HT_LOG_COPY_LOST);
    ck_assert_int_ge(device(bad).health, HT_HEALTH_FAILING);
    ck_assert_int_eq(obj_stat(o).sticky_error, 0);
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    put_object(o);
    if (crashes)
        close_store();
    else
        unmount_store();
    fail_all(devs[bad], false);
    /* several mounts later, with it and without it */
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(try_mount(i == 1 ? 1u << !bad : 3, true), 0);
        o = same_object(oid);
        expect(o, 0, newer, BYTES);
        unmount_store();
    }
}

/* Only the log writes. */
static void log_something(void)
{
    struct ht_tx *tx;
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);

    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
    ht_obj_publish(o, tx);
    commit_durably(tx);
    put_object(o);
}

static void lose_log_of(unsigned member)
{
    dev_fail(devs[member], HT_IO_WRITE, 1, false);
    log_something();
    ck_assert_int_eq(device(member).log, HT_LOG_COPY_LOST);
}

/* Every member alone holds everything, and no member has diverged. */
static void expect_whole_alone(void)
{
    for (unsigned i = 0; i < DEVICES; i++) {
        ck_assert_int_eq(try_mount(1u << i, true), 0);
        ck_assert_uint_eq(device(i).log, HT_LOG_COPY_WRITTEN);
        unmount_store();
        ck_assert_int_eq(try_mount(3, true), 0);
        unmount_store();
    }
}

TEST_LOOP(a_member_that_was_left_behind_takes_part_again, 2)
{
    for (unsigned i = 0; i < 4; i++) { /* one error after the other, on both */
        lose_log_of(i % 2);
        log_something();
        ck_assert_int_eq(ht_journal_resync(s->journal), 0);
        ck_assert_int_eq(device(i % 2).log, HT_LOG_COPY_WRITTEN);
        log_something();
    }
    if (_i)
        unmount_store();
    else
        close_store();
    expect_whole_alone();
}

/* One error on each device, some time apart, needs no operator. */
TEST(a_member_comes_back_by_itself)
{
    unmount_store();
    threads = true;
    ck_assert_int_eq(try_mount(3, false), 0);
    for (unsigned i = 0; i < 2; i++) {
        lose_log_of(i);
        while (device(i).log != HT_LOG_COPY_WRITTEN)
            usleep(1000);
    }
    ck_assert(!ht_store_read_only(s));
    unmount_store();
    expect_whole_alone();
}

/* Its superblock cannot be written: it stays stale, and the other member continues. */
TEST(a_member_whose_return_cannot_be_recorded_stays_behind)
{
    lose_log_of(1);
    dev_fail(devs[1], HT_IO_WRITE, 3, true); /* after the log and its end */
    ck_assert_int_eq(ht_journal_resync(s->journal), -EIO);
    ck_assert_int_eq(device(1).log, HT_LOG_COPY_LOST);
    log_something();
    close_store();
    dev_fail(devs[1], HT_IO_WRITE, 0, false);
    ck_assert_int_eq(try_mount(2, true), -ESTALE);
    ck_assert_int_eq(try_mount(3, false), 0);
}

/* Some of its record may have been written, and it is out: that is on record before anything is that it lacks. */
TEST_LOOP(a_return_that_may_be_on_record_is_taken_back, 2)
{
    lose_log_of(1);
    ht_fault_arm(HT_FAULT_SPACE_SUPER, _i ? 2 : 1, true);
    ck_assert_int_eq(ht_journal_resync(s->journal), -EIO);
    ht_fault_disarm_all();
    ck_assert_int_eq(device(1).log, HT_LOG_COPY_LOST);
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    log_something();
    close_store();
    ck_assert_int_eq(try_mount(2, true), -ESTALE);
    ck_assert_int_eq(try_mount(3, false), 0);
}

/* The member with the last valid superblock does not become stale: only it holds the log's start. */
TEST_LOOP(superblocks_that_can_be_written_nowhere_are_written_later, 2)
{
    struct ht_super_report report;
    struct ht_super sb;

    if (_i)
        lose_log_of(1);
    ht_fault_arm(HT_FAULT_SPACE_SUPER, 1, true);
    ck_assert_int_eq(ht_store_checkpoint(s), -EIO);
    ck_assert_int_eq(ht_store_checkpoint(s), -EIO);
    ht_fault_disarm_all();
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    for (unsigned i = 0; i < 2; i++) {
        ck_assert_int_eq(ht_super_read(devs[i], &sb, &report), 0);
        ck_assert_uint_eq(sb.start_seq, ht_store_super(s)->start_seq);
    }
    close_store();
    ck_assert_int_eq(try_mount(3, false), 0);
    struct ht_obj *o = same_object(oid);
    expect(o, 0, content, BYTES);
}

/* A superblock is written (it is to name the feature first), and nothing else. */
static int write_supers(void)
{
    return ht_store_lose_chunk(s, oid, BYTES);
}

/* Every write to the device fails during the call; the log continues. */
static void lose_super_of(unsigned member)
{
    fail_all(devs[member], true);
    ck_assert_int_eq(write_supers(), -ENOENT);
    fail_all(devs[member], false);
    ck_assert_int_eq(device(member).log, HT_LOG_COPY_WRITTEN);
}

static bool knows_that_it_takes_part(unsigned member)
{
    struct ht_super_report report;
    struct ht_super sb;

    ck_assert_int_eq(ht_super_read(devs[member], &sb, &report), 0);
    ck_assert_uint_eq(sb.generation, ht_store_super(s)->generation);
    return ht_members_takes_part(&sb, 0) && ht_members_takes_part(&sb, 1);
}

TEST_LOOP(a_member_whose_superblock_failed_stands_in_for_the_log, 2)
{
    unsigned first = (unsigned)_i;

    lose_super_of(first);
    log_something();
    lose_log_of(!first);
    ck_assert(!ht_store_read_only(s));
    ck_assert_int_eq(device(first).log, HT_LOG_COPY_WRITTEN);
    log_something();
    ck_assert_int_eq(ht_journal_resync(s->journal), 0);
    close_store();
    expect_whole_alone();
}

TEST_LOOP(the_next_superblock_brings_a_member_back, 4)
{
    lose_super_of(_i % 2);
    if (_i / 2) {
        unmount_store();
    } else {
        ck_assert_int_eq(ht_store_checkpoint(s), 0);
        ck_assert(knows_that_it_takes_part(0));
        ck_assert(knows_that_it_takes_part(1));
        close_store();
    }
    expect_whole_alone();
}

/* A write and a flush fail once. The member takes the superblock that calls it stale, and the next one. */
TEST_LOOP(a_superblock_that_fails_once_leaves_nobody_behind, 2)
{
    dev_fail(devs[_i], HT_IO_WRITE, 1, false);
    dev_fail(devs[_i], HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(write_supers(), -ENOENT);
    ck_assert_uint_gt(ht_store_super(s)->epoch, 1); /* it was stale for a while */
    ck_assert(knows_that_it_takes_part(0));
    ck_assert(knows_that_it_takes_part(1));
    close_store();
    expect_whole_alone();
}

/* The last one goes on taking part, without its record; its log is on record before the other one's is given up. */
TEST(what_could_not_be_recorded_is_before_a_log_is_given_up)
{
    fail_all(devs[0], true);
    dev_fail(devs[1], HT_IO_WRITE, 4, true); /* not the first superblock, but that of being left alone */
    ck_assert_int_eq(write_supers(), -EIO);
    fail_all(devs[1], false);
    log_something(); /* the first one's log fails */
    ck_assert_int_eq(device(0).log, HT_LOG_COPY_LOST);
    close_store();
    fail_all(devs[0], false);
    ck_assert_int_eq(try_mount(1, true), 0); /* it could not know */
    unmount_store();
    ck_assert_int_eq(try_mount(3, true), -EXDEV);
}

TEST(a_member_left_behind_does_not_stand_for_the_store)
{
    lose_log_of(1);
    close_store();
    ck_assert_int_eq(try_mount(2, true), -ESTALE);
    ck_assert_int_eq(try_mount(1, true), 0);
    unmount_store();
    ck_assert_int_eq(try_mount(3, false), 0);
    unmount_store();
    ck_assert_int_eq(try_mount(2, true), 0);
}

TEST(a_bad_place_is_not_used_again)
{
    struct ht_obj *o = same_object(oid);
    uint64_t bad = device(0).bad_bytes + device(1).bad_bytes;

    for (unsigned i = 0; i < 2; i++)
        dev_fail(devs[i], HT_IO_WRITE, 1, false);
    put_all(o, 0, newer, MIB);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    for (unsigned i = 0; i < 2; i++)
        dev_fail(devs[i], HT_IO_WRITE, 0, false);
    ck_assert_uint_eq(device(0).bad_bytes + device(1).bad_bytes, bad + MIB);
    ck_assert_uint_eq(stats().write_errors, 1);
    ht_obj_evict(o);
    expect(o, 0, newer, MIB);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    unmount_store();
    ck_assert_int_eq(try_mount(3, false), 0);
    ck_assert_uint_eq(device(0).bad_bytes + device(1).bad_bytes, 0);
}

TEST(a_staged_update_goes_elsewhere_too)
{
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 9, content, BYTES);

    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    struct ht_batch_pin l = {.store = s, .count = 4};
    for (unsigned i = 0; i < 4; i++)
        l.chunk[i] = (struct ht_batch_pin_chunk){.obj = o, .index = i, .mode = HT_BATCH_PIN_UPDATE};
    pin_now(&l);
    for (unsigned i = 0; i < 4; i++)
        memcpy(l.chunk[i].data, newer + i * MIB, MIB);
    fail_all(devs[0], true);
    unpin(&l, 15);
    fail_all(devs[0], false);
    expect(o, 0, newer, 4 * MIB);
}

/* The chunks of a range are placed with the first chunk that has a place. */
TEST(a_range_stays_together)
{
    struct ht_obj *p = object(HT_CHUNK_BYTES, 9), *state = object(HT_CHUNK_BYTES, 9);

    put_all(p, 0, content, BYTES);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    put_all(state, BYTES - 1, content, 1);
    ht_obj_evict(p);
    struct ht_batch_pin l = {.store = s, .count = 2};
    for (unsigned i = 0; i < BYTES / MIB; i++) {
        l.chunk[0] = (struct ht_batch_pin_chunk){.obj = p, .index = i, .mode = HT_BATCH_PIN_UPDATE};
        l.chunk[1] = (struct ht_batch_pin_chunk){.obj = state, .index = i, .mode = HT_BATCH_PIN_UPDATE};
        pin_now(&l);
        memcpy(l.chunk[0].data, newer + i * MIB, MIB);
        memcpy(l.chunk[1].data, newer + i * MIB, MIB);
        unpin(&l, 3);
    }
    publish_scope_at_once(9);
    struct where of[2];
    for (unsigned k = 0; k < 2; k++) {
        oid = ht_obj_id(k ? state : p);
        of[k] = where();
        ck_assert_uint_eq(of[k].chunks[0] + of[k].chunks[1], BYTES / MIB);
        ck_assert_uint_gt(of[k].chunks[0], 0);
        ck_assert_uint_gt(of[k].chunks[1], 0);
    }
    ck_assert_int_eq(memcmp(of[0].on, of[1].on, sizeof(of[0].on)), 0);
}

/* ------------------------------------------------------------ failed flushes */

/* Written to devices, not flushed, in no record. */
static struct ht_obj *written_back(const uint8_t *bytes, uint64_t scope)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, scope);

    put_all(o, 0, bytes, 4 * MIB);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    return o;
}

TEST_LOOP(what_a_failed_flush_covered_is_written_again, 2)
{
    bool evicted = _i;

    end();
    fresh(64, false);
    newer = pattern(BYTES, 2);
    struct ht_obj *o = written_back(newer, 0);
    uint64_t id = ht_obj_id(o), written = stats().device_written_bytes;
    if (evicted)
        ht_obj_evict(o);
    dev_fail(dev, HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_ge(stats().device_written_bytes, written + 4 * MIB);
    ck_assert_int_eq(obj_stat(o).sticky_error, 0);
    crash();
    o = get_object(id);
    expect(o, 0, newer, 4 * MIB);
    done();
}

TEST(a_flush_that_never_succeeds_is_told)
{
    end();
    fresh(64, false);
    newer = pattern(BYTES, 2);
    struct ht_obj *o = written_back(newer, 0);
    uint64_t commits = stats().commits;
    dev_fail(dev, HT_IO_FLUSH, 1, true);
    ck_assert_int_eq(ht_obj_sync(o), -EIO);
    ck_assert_uint_eq(stats().commits, commits);
    expect(o, 0, newer, 4 * MIB);
    dev_fail(dev, HT_IO_FLUSH, 0, false);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    done();
}

/* A flush that succeeds later proves nothing: a caller that then publishes the object finds the former content. */
TEST(what_a_failed_flush_covered_is_not_published_later)
{
    end();
    fresh(64, false);
    content = pattern(BYTES, 1);
    newer = pattern(BYTES, 2);
    struct ht_obj *o = written_back(content, 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    put_all(o, 0, newer, 4 * MIB);
    dev_fail(dev, HT_IO_FLUSH, 1, true);
    ck_assert_int_eq(ht_obj_sync(o), -EIO);
    dev_fail(dev, HT_IO_FLUSH, 0, false);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(s, 8192, &tx), 0);
    ht_obj_publish(o, tx);
    commit_durably(tx);
    expect(o, 0, newer, 4 * MIB);
    o = after(crash, o);
    expect(o, 0, content, 4 * MIB);
    done();
}

/* With content that was written to it, not flushed, and in no record yet. */
TEST_LOOP(a_device_that_dies_takes_only_what_was_durable_on_it, 2)
{
    unsigned bad = (unsigned)_i;
    struct ht_obj *a = written_back(newer, 0), *b = written_back(newer + 4 * MIB, 9);
    uint64_t ids[] = {ht_obj_id(a), ht_obj_id(b)};

    fail_all(devs[bad], true);
    ck_assert_int_eq(ht_obj_sync(a), 0);
    publish_scope_at_once(9);
    ck_assert(!ht_store_read_only(s));
    ck_assert_uint_le(stats().total_bytes, 64 * MIB);
    ck_assert_int_eq(ht_store_commit(s), 0);
    close_store();
    ck_assert_int_eq(try_mount(1u << !bad, true), 0);
    for (unsigned k = 0; k < 2; k++) {
        struct ht_obj *o = get_object(ids[k]);
        ck_assert_ptr_nonnull(o);
        expect(o, 0, newer + k * 4 * MIB, 4 * MIB);
        put_object(o);
    }
}

TEST(what_died_with_its_device_is_told_to_its_owner_alone)
{
    struct ht_obj *a = written_back(newer, 9), *b = object(HT_CHUNK_BYTES, 0);

    ht_obj_evict(a);
    fail_all(devs[1], true);
    dev_fail(devs[1], HT_IO_READ, 1, true);
    ck_assert_int_eq(ht_scope_writeback(s, 9), -EIO);
    ck_assert_int_eq(obj_stat(a).sticky_error, -EIO);
    put_synced(b, 0, newer, MIB);
    ck_assert(!ht_store_read_only(s));
    ck_assert_int_eq(ht_scope_writeback(s, 9), -EIO); /* until abort */
    ck_assert_int_eq(ht_scope_abort(s, 9), 0);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    dev_fail(devs[1], HT_IO_READ, 0, false);
    fail_all(devs[1], false);
}

/* -------------------------------------------------------- not answering */

static void *sync_object(void *arg)
{
    return (void *)(intptr_t)ht_obj_sync(arg);
}

TEST(a_device_that_does_not_answer_is_told_and_hangs_only_who_needs_it)
{
    struct ht_obj *o = same_object(oid);
    struct where w = where();
    uint64_t commits = stats().commits;

    put_all(o, 0, newer, MIB);
    dev_stall(devs[1], true);
    pthread_t thread;
    void *result;
    ck_assert_int_eq(pthread_create(&thread, NULL, sync_object, o), 0);
    do
        ht_store_watch_devices(s);
    while (device(1).health != HT_HEALTH_NOT_ANSWERING);
    ck_assert_uint_ge(device(1).oldest_request_ns, 50 * 1000000);
    ck_assert_int_eq(device(0).health, HT_HEALTH_OK);
    /* nothing is waited for that is on it, and the rest is as ever */
    uint8_t byte;
    for (unsigned i = 2; i < BYTES / MIB; i++) {
        ht_obj_evict(o);
        if (w.on[i])
            ck_assert_int_eq(ht_obj_read(o, i * MIB, &byte, 1), -EIO);
        else
            expect(o, i * MIB, content + i * MIB, MIB);
    }
    put_all(o, 5 * MIB, newer, MIB);
    ck_assert_uint_eq(stats().commits, commits);
    dev_stall(devs[1], false);
    pthread_join(thread, &result);
    ck_assert_int_eq((int)(intptr_t)result, 0);
    ht_store_watch_devices(s);
    ck_assert_int_ne(device(1).health, HT_HEALTH_NOT_ANSWERING);
    ht_obj_evict(o);
    expect(o, 0, newer, MIB);
}

/* Half of the chunks go to each device. */
TEST_LOOP(an_image_is_clean_once_its_own_device_has_written_it, DEVICES)
{
    enum { CHUNKS = 4 };
    pthread_t thread;
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, newer, CHUNKS * MIB);

    dev_stall(devs[_i], true);
    ck_assert_int_eq(pthread_create(&thread, NULL, sync_object, o), 0);
    while (obj_stat(o).device_written_bytes < CHUNKS / 2 * MIB)
        sched_yield();
    dev_stall(devs[_i], false);
    pthread_join(thread, NULL);
    expect(o, 0, newer, CHUNKS * MIB);
}

RUN_TESTS("devices", .setup = make, .teardown = end, .timeout_s = 120)
