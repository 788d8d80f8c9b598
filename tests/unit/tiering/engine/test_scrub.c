/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_scrub.c - damage on the media is found, repaired if there is a second copy, and other threads see none of this.
 */
#include "tests/unit/tiering/engine/scrub.h"

#include "tests/support/wrap.h"
#include "tiering/base/event.h"
#include "tiering/object/chunk.h"

/* ---------------------------------------------------------------- support */

static _Atomic unsigned events[HT_EVENT_CODES];
static struct ht_event first; /* event about something bad */

static void count_event(void *ctx, const struct ht_event *e)
{
    events[e->code]++;
    if ((e->code == HT_EVENT_SCRUB_DAMAGE || e->code == HT_EVENT_SCRUB_REPAIRED) && !first.text[0])
        first = *e;
}

static void setup(void)
{
    memset(events, 0, sizeof(events));
    ht_event_set_sink(count_event, NULL);
    fresh(32, false);
}

static void teardown(void)
{
    done();
    ht_event_set_sink(NULL, NULL);
}

/* ------------------------------------------------------------------ tests */

TEST(a_sound_store_is_read_whole_and_nothing_found)
{
    uint8_t *p = pattern(3 * BIG, 1);

    (void)stored(p, 3 * BIG - 100, 0);
    struct ht_scrub_stats st = scrub();

    ck_assert_uint_eq(st.run_found, 0);
    ck_assert_uint_ge(st.run_bytes, 3 * BIG + 3 * 4096);
    ck_assert_uint_eq(st.run_bytes, st.run_total_bytes);
    ck_assert_uint_eq(st.runs, 1);
    ck_assert_uint_eq(events[HT_EVENT_SCRUB_ENDED], 1);
}

/* A scrub reads such a device, too. */
TEST(content_of_a_device_that_takes_no_more_is_in_the_total)
{
    (void)stored(pattern(3 * BIG, 1), 3 * BIG, 0);
    ht_store_lock(s);
    ht_alloc_set_offline(s->alloc, 0);
    ht_store_unlock(s);
    struct ht_scrub_stats st = scrub();

    ck_assert_uint_ge(st.run_bytes, 3 * BIG);
    ck_assert_uint_eq(st.run_bytes, st.run_total_bytes);
}

/* As a forged log may have it. */
TEST(a_chunk_of_which_no_byte_counts_is_not_repaired)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0);
    uint64_t oid = ht_obj_id(o), place = place_of(p, BIG);

    ht_chunk_find(o, 0)->pub.visible = 0;
    put_object(o);
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    remount();
    o = get_object(oid);
    ck_assert_int_eq(ht_obj_read(o, 0, p, 4096), 4096); /* it has an image */
    damage(place);
    expect_found(1, 0);
}

TEST_LOOP(a_superblock_copy_is_written_anew, HT_SUPER_COPIES)
{
    struct ht_super sb;
    struct ht_super_report report;

    memset(ram() + ht_super_offset(ht_dev_size(dev), (unsigned)_i), 0x55, 512);
    expect_found(1, 1);
    ck_assert_int_eq(ht_super_read(dev, &sb, &report), 0);
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++)
        ck_assert_int_eq(report.copy[i], HT_SUPER_OK);
    expect_found(0, 0);
    ck_assert_uint_eq(events[HT_EVENT_SCRUB_REPAIRED], 1);
}

TEST(all_superblock_copies_are_written_anew_from_memory)
{
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++)
        memset(ram() + ht_super_offset(ht_dev_size(dev), i), 0, 4096);
    expect_found(3, 3);
    remount();
}

static uint64_t log_place(unsigned copy)
{
    return ht_store_super(s)->log_offset[copy];
}

TEST_LOOP(a_log_frame_is_written_anew_from_the_other_copy, 2)
{
    uint8_t *p = pattern(SMALL, 1);

    for (unsigned i = 0; i < 8; i++)
        (void)stored(p, SMALL, 0);
    damage(log_place((unsigned)_i) + 100);              /* the first frame */
    damage(log_place((unsigned)_i) + 5 * 4096 + 8);     /* a header in the middle */
    memset(ram() + log_place(!_i) + 3 * 4096, 0, 4096); /* one that is gone, in the other copy */
    expect_found(3, 3);
    expect_found(0, 0);
    ck_assert_int_eq(memcmp(ram() + log_place(0), ram() + log_place(1), 8 * 4096), 0);
}

TEST(a_frame_that_no_copy_has_is_replaced_by_a_checkpoint)
{
    uint8_t *p = pattern(SMALL, 1);
    struct ht_obj *o = stored(p, SMALL, 0);

    damage(log_place(0) + 100);
    damage(log_place(1) + 100);
    expect_found(2, 0);
    ck_assert_uint_eq(events[HT_EVENT_LOG_DAMAGED], 1);
    ck_assert_int_eq(ht_store_checkpoint(s), 0); /* which the thread would have done */
    expect_found(0, 0);
    o = after(remount, o);
    expect(o, 0, p, SMALL);
}

TEST(a_chunk_without_a_second_copy_is_told_and_stays_an_error)
{
    uint8_t *p = pattern(BIG, 1), byte;
    struct ht_obj *o = stored(p, BIG, 0), *other = stored(p + 1, BIG - 1, 0);

    ht_obj_evict(o);
    damage(place_of(p, BIG) + 5000);
    expect_found(1, 0);
    expect_found(1, 0);
    ck_assert_uint_eq(events[HT_EVENT_SCRUB_DAMAGE], 2);
    ck_assert_int_eq(ht_obj_read(o, 0, &byte, 1), -EIO);
    expect(other, 0, p + 1, BIG - 1);
    put_all(o, 0, p, BIG); /* writing it heals */
    ck_assert_int_eq(ht_obj_sync(o), 0);
    expect_found(0, 0);
}

TEST_LOOP(a_published_chunk_is_written_to_another_place_from_its_clean_image, 2)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG - 5000, _i ? SCOPE : 0);
    uint64_t was = place_of(p, BIG - 5000), oid = ht_obj_id(o), free_bytes = stats().available_bytes;

    damage(was + 4096);
    expect_found(1, 1);
    expect_found(0, 0);
    ck_assert_uint_eq(stats().available_bytes, free_bytes);
    ck_assert_uint_eq(obj_stat(o).dirty_bytes, 0);
    ck_assert(!obj_stat(o).unpublished);
    crash();
    o = get_object(oid);
    expect(o, 0, p, BIG - 5000);
}

TEST_LOOP(what_was_cut_off_is_not_needed_for_a_repair, 2)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0);

    ck_assert_int_eq(ht_obj_truncate(o, 300000), 0);
    if (_i)
        ck_assert_int_eq(ht_obj_sync(o), 0);
    expect(o, 0, p, 300000);
    damage(place_of(p, BIG) + 900000);
    expect_found(1, 1);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    expect_found(0, 0);
    o = after(crash, o);
    ck_assert_uint_eq(ht_obj_size(o), 300000);
    expect(o, 0, p, 300000);
}

TEST(an_unpublished_reference_is_replaced_and_nothing_is_published_for_it)
{
    uint8_t *p = pattern(BIG, 1), *q = pattern(BIG, 99);
    struct ht_obj *o = stored(p, BIG, SCOPE);

    put_all(o, 0, q, BIG);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    damage(place_of(q, BIG) + 77);
    expect_found(1, 1);
    expect_found(0, 0);
    ck_assert_int_eq(ht_scope_abort(s, SCOPE), 0);
    expect(o, 0, p, BIG);
}

TEST(a_dirty_image_is_written_back_at_once)
{
    uint8_t *p = pattern(BIG, 1), *q = pattern(BIG, 99);
    struct ht_obj *o = stored(p, BIG, 0);
    uint64_t was = place_of(p, BIG);

    put_all(o, 0, q, BIG);
    damage(was + 77);
    expect_found(1, 1);
    ck_assert_uint_eq(obj_stat(o).dirty_bytes, 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    expect_found(0, 0);
    ht_obj_evict(o);
    expect(o, 0, q, BIG);
}

TEST(a_repair_below_a_root_keeps_the_open_step_out_of_the_log)
{
    uint8_t *p = pattern(2 * BIG, 1), *q = pattern(BIG, 99);
    struct ht_obj *o = stored(p, 2 * BIG, SCOPE);
    uint64_t oid = ht_obj_id(o);

    put_all(o, BIG, q, BIG); /* the step: the second chunk */
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    damage(place_of(p, BIG) + 4242);
    expect_found(1, 1);
    crash(); /* before the commit: the step is not there, the repair is */
    o = get_object(oid);
    expect(o, 0, p, 2 * BIG);
}

TEST(a_full_store_repairs_nothing_and_says_so)
{
    uint8_t *p = pattern(BIG, 1), *fill = pattern(BIG, 5);
    struct ht_obj *o = stored(p, BIG, 0), *big = object(BIG, 0);
    uint64_t at = 0;

    while (ht_obj_write(big, at, fill, 4096) == 4096)
        at += 4096;
    expect(o, 0, p, BIG);
    damage(place_of(p, BIG) + 1);
    expect_found(1, 0);
    expect(o, 0, p, BIG);
    delete_durably(big);
    expect_found(1, 1);
}

/* Reads of a run that finds nothing. */
static unsigned reads_of_run(void)
{
    struct ht_dev_counters before, after;

    ht_dev_counters(dev, &before);
    expect_found(0, 0);
    ht_dev_counters(dev, &after);
    return (unsigned)(after.reads - before.reads);
}

/* A run, of which the first event has these words and this error. */
static void expect_event(const char *what, const char *reason, int error)
{
    first.text[0] = 0;
    scrub();
    dev_fail(dev, HT_IO_READ, 0, false);
    ck_assert_msg(strstr(first.text, what) && strstr(first.text, reason), "%s", first.text);
    ck_assert_int_eq(first.error, error);
}

/* As a file on a damaged file system does. */
TEST(an_error_that_a_device_reports_is_not_called_a_wrong_checksum)
{
    static const char reported[] = ": the device reports: Structure needs cleaning; ";
    uint8_t *p = pattern(BIG, 1);

    (void)stored(p, BIG, 0);
    damage(place_of(p, BIG) + 1);
    expect_event("chunk 0 of object ", ": its checksum is wrong; ", -EUCLEAN);
    /* A run reads the superblocks first, and the chunk last. */
    dev_fail_with(dev, HT_IO_READ, reads_of_run(), true, -EUCLEAN);
    expect_event("chunk 0 of object ", reported, -EUCLEAN);
    dev_fail_with(dev, HT_IO_READ, HT_SUPER_COPIES + 1, false, -EUCLEAN);
    expect_event("copy 0 of the log ", reported, -EUCLEAN);
    damage(log_place(1) + 100);
    expect_event("copy 1 of the log ", ": a frame does not verify; ", -EUCLEAN);
    dev_fail_with(dev, HT_IO_READ, 1, true, -EUCLEAN);
    expect_event("superblock copy 0 on ", ": cannot be read; ", -EIO);
    damage(ht_super_offset(ht_dev_size(dev), 1));
    expect_event("superblock copy 1 on ", ": not a hitrain superblock; ", -EUCLEAN);
    expect_found(0, 0);
}

TEST(a_read_that_fails_once_is_no_damage_and_one_that_goes_on_failing_is)
{
    uint8_t *p = pattern(BIG, 1);

    (void)stored(p, BIG, 0);
    struct ht_scrub_stats st;
    unsigned reads = reads_of_run(); /* the chunk is the last one */

    dev_fail(dev, HT_IO_READ, reads, false);
    expect_found(0, 0);
    dev_fail(dev, HT_IO_READ, reads, true);
    st = scrub();
    ck_assert_uint_eq(st.run_found, 1);
    ck_assert_uint_eq(st.run_repaired, 1); /* from its image */
    dev_fail(dev, HT_IO_READ, 0, false);
}

TEST(every_read_or_write_may_fail_and_a_run_ends)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0);

    for (unsigned nth = 1; nth < 20; nth++) {
        enum ht_io_op op = nth % 2 ? HT_IO_READ : HT_IO_WRITE;
        dev_fail(dev, op, nth, false);
        struct ht_scrub_stats st = scrub();
        dev_fail(dev, op, 0, false);
        ck_assert_uint_ge(st.run_found, st.run_repaired);
    }
    expect_found(0, 0);
    o = after(remount, o);
    expect(o, 0, p, BIG);
}

static uint64_t read_bytes(void)
{
    struct ht_dev_counters c;

    ht_dev_counters(dev, &c);
    return c.read_bytes;
}

/* Two chunks with three owners each, one unpublished; the next run reads both again. */
TEST(content_of_several_owners_is_read_once_in_each_run)
{
    uint8_t *p = pattern(2 * BIG, 1);
    struct ht_obj *o = stored(p, 2 * BIG, 0), *other[2] = {object(BIG, 0), object(BIG, SCOPE)};
    uint64_t place = place_of(p, BIG);

    for (unsigned i = 0; i < HT_ARRAY_SIZE(other); i++)
        ck_assert_int_eq(ht_obj_clone(o, 0, other[i], 0, 2 * BIG), 2 * BIG);
    ck_assert_int_eq(ht_obj_sync(other[0]), 0);
    ht_obj_evict(o);
    for (unsigned run = 0; run < 3; run++) {
        uint64_t before = read_bytes();
        struct ht_scrub_stats st = scrub();
        ck_assert_uint_eq(st.run_found, 0);
        ck_assert_uint_eq(st.run_bytes, st.run_total_bytes);
        ck_assert_uint_ge(st.run_bytes, 2 * BIG);
        ck_assert_uint_lt(st.run_bytes, 3 * BIG);
        ck_assert_uint_lt(read_bytes() - before, 3 * BIG);
    }
    damage(place);
    expect_found(3, 0); /* a finding for each owner */
    damage(place);      /* and back */
    expect_found(0, 0);
}

TEST(a_read_only_store_is_looked_at_and_left_alone)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0);
    uint64_t oid = ht_obj_id(o), place = place_of(p, BIG);

    unmount_store();
    mount_with(false, true);
    o = get_object(oid);
    expect(o, 0, p, BIG); /* an image, so that it could be repaired */
    damage(place);
    damage(ht_super_offset(ht_dev_size(dev), 1) + 200);
    damage(log_place(1) + 100);
    uint8_t *before = test_alloc(ht_dev_size(dev));
    memcpy(before, ram(), ht_dev_size(dev));
    expect_found(3, 0);
    ck_assert_int_eq(memcmp(before, ram(), ht_dev_size(dev)), 0);
}

/* -------------------------------------------------------------- the thread */

static void wait_for_end(void)
{
    struct ht_scrub_stats st;
    const struct timespec pause = {.tv_nsec = 1000000};

    for (;;) {
        ht_store_scrub_stats(s, &st);
        if (st.state != HT_SCRUB_RUNNING)
            return;
        nanosleep(&pause, NULL);
    }
}

TEST(it_is_started_once_and_stopped_once_and_ends_with_the_mount)
{
    struct ht_scrub_stats st;
    uint8_t *p = pattern(8 * BIG, 1);

    unmount_store();
    mount_as(.scrub_rate_bytes = 1000);
    put_object(stored(p, 8 * BIG, 0));
    ck_assert_int_eq(ht_store_scrub_stop(s), -ESRCH);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(ht_store_scrub_start(s), 0);
        ck_assert_int_eq(ht_store_scrub_start(s), -EBUSY);
        ck_assert_int_eq(ht_store_scrub_stop(s), 0);
        ht_store_scrub_stats(s, &st);
        ck_assert_uint_eq(st.state, HT_SCRUB_STOPPED);
        ck_assert_int_eq(ht_store_scrub_stop(s), -ESRCH);
    }
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    /* It is unmounted while it runs, at 1,000 bytes a second. */
}

/* A paused lane has no thread. If none begins, the caller ends the run itself. */
TEST(a_paused_one_stops_although_no_thread_begins)
{
    struct ht_scrub_stats st;

    unmount_store();
    mount_with(true, false);
    ck_assert_int_eq(ht_store_background_pause(s, NULL), 0);
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    wrap_fail(WRAP_THREAD, 1, true);
    ck_assert_int_eq(ht_store_scrub_stop(s), 0);
    ck_assert(wrap_reached(WRAP_THREAD));
    wrap_fail(WRAP_THREAD, 0, false);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.state, HT_SCRUB_STOPPED);
    ck_assert_int_eq(ht_store_background_resume(s, NULL), 0); /* and finds no run */
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    wait_for_end();
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.state, HT_SCRUB_COMPLETE);
}

/* A step ends after its bytes (0), or at its time (1): then a device that takes 6 ms serves two reads. */
TEST_LOOP(a_step_keeps_to_its_budget, 2)
{
    enum { N = 16, LIMIT = 4 * SMALL };
    bool slow = _i;
    struct ht_scrub_stats st;
    uint64_t most = 0;
    uint8_t *p = pattern(N * SMALL, 1);
    struct ht_obj *o = object(SMALL, 0);

    put_synced(o, 0, p, N * SMALL);
    ck_assert_int_eq(ht_store_background_pause(s, NULL), 0); /* no thread begins */
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    dev_set_delay(dev, slow ? 6 : 0);
    for (enum ht_step found = HT_STEP_WORKED; found == HT_STEP_WORKED;) {
        struct ht_budget b = {.most_bytes = slow ? UINT64_MAX : LIMIT,
                              .until_ns = slow ? ht_now_ns() + 10000000 : UINT64_MAX};
        found = ht_scrub_engine.step(s, &b);
        most = ht_max_u64(most, b.bytes);
    }
    dev_set_delay(dev, 0);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.state, HT_SCRUB_COMPLETE);
    ck_assert_uint_ge(st.run_bytes, N * SMALL);
    ck_assert_uint_ge(most, SMALL);
    ck_assert_uint_le(most, slow ? 2 * SMALL : LIMIT + SMALL);
}

/* The row makes no run after the unmount, so no thread would end one. */
TEST(one_that_cannot_start_leaves_no_trace)
{
    struct ht_scrub_stats st;

    ck_assert_int_eq(ht_store_unmount(s), 0);
    ck_assert_int_eq(ht_store_scrub_start(s), -ECANCELED);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.state, HT_SCRUB_NEVER);
    ck_assert_uint_eq(events[HT_EVENT_SCRUB_ENDED], 0);
    crash();
}

struct load {
    pthread_t thread;
    uint8_t *p;
    unsigned seed;
    struct ht_obj *o;
};

static _Atomic bool enough;

/* Rewrites, syncs, truncates, drops from memory, and reads back. */
static void *work(void *arg)
{
    struct load *l = arg;

    for (unsigned i = 0; !enough || i < 20; i++) {
        size_t n = SMALL + (i * 7919u + l->seed) % (BIG - SMALL);
        put_all(l->o, 0, l->p + i % 64, n);
        if (i % 3 == 0)
            ck_assert_int_eq(ht_obj_sync(l->o), 0);
        if (i % 5 == 0)
            ht_obj_evict(l->o);
        expect(l->o, 0, l->p + i % 64, n);
        if (i % 7 == 0)
            ck_assert_int_eq(ht_obj_truncate(l->o, n / 2), 0);
    }
    return NULL;
}

TEST(beside_a_load_it_finds_nothing_and_changes_nothing)
{
    enum { THREADS = 3 };
    struct load l[THREADS];
    struct ht_scrub_stats st;

    unmount_store();
    mount_as(.commit_ms = 5, .scrub_rate_bytes = 1ull << 40);
    enough = false;
    for (unsigned i = 0; i < THREADS; i++) {
        l[i] = (struct load){.p = pattern(BIG + 64, i), .seed = i * 1001, .o = object(BIG, 0)};
        pthread_create(&l[i].thread, NULL, work, &l[i]);
    }
    for (unsigned i = 0; i < 30; i++) {
        ck_assert_int_eq(ht_store_scrub_start(s), 0);
        wait_for_end();
    }
    enough = true;
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(l[i].thread, NULL);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.runs, 30);
    ck_assert_uint_eq(st.found, 0);
}

/* --------------------------------------------------- changes beside a repair stay */

/* The request at which the device falls silent during a repair. */
enum phase { FIRST_LOOK, SECOND_LOOK, NEW_PLACE, FRAME, FLUSH, PHASES };
enum change { CUT, CUT_AND_GROWN, CUT_AND_ABORTED, REWRITTEN, CLONED, CHANGES };
enum { KEPT = 4096 };

struct beside {
    enum change change;
    struct ht_obj *o, *other;
    uint8_t *p, *q;
    _Atomic bool done;
};

/* Published, which needs no answer of the device. */
static void cut(struct ht_obj *o, uint64_t size)
{
    struct ht_tx *tx;

    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    ck_assert_int_eq(ht_tx_begin(s, ht_obj_pending_bytes(o), &tx), 0);
    ht_obj_publish(o, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
}

static void *change_it(void *arg)
{
    struct beside *b = arg;

    switch (b->change) {
    case CUT:
        cut(b->o, KEPT);
        break;
    case CUT_AND_GROWN:
        cut(b->o, KEPT);
        cut(b->o, BIG);
        break;
    case CUT_AND_ABORTED:
        ck_assert_int_eq(ht_obj_truncate(b->o, KEPT), 0);
        ck_assert_int_eq(ht_scope_abort(s, SCOPE), 0);
        break;
    case REWRITTEN:
        put_all(b->o, 0, b->q, BIG);
        ck_assert_int_eq(ht_obj_sync(b->o), 0);
        break;
    default:
        ck_assert_int_eq(ht_obj_clone(b->o, 0, b->other, 0, BIG), BIG);
        ck_assert_int_eq(ht_obj_sync(b->other), 0);
    }
    b->done = true;
    return NULL;
}

static void silent_in(enum phase phase, unsigned reads)
{
    if (phase <= SECOND_LOOK)
        dev_stall_at(dev, HT_IO_READ, reads + (phase == SECOND_LOOK)); /* the chunk is the last that is read */
    else if (phase <= FRAME)
        dev_stall_at(dev, HT_IO_WRITE, phase == NEW_PLACE ? 1 : 2);
    else
        dev_stall_at(dev, HT_IO_FLUSH, 1);
}

static void rest(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* The change ends in the silence, or waits for the chunk that the repair holds. */
static void change_in_silence(struct beside *b)
{
    enum { ROUNDS = 30 };
    pthread_t thread;

    dev_wait_stalled(dev);
    pthread_create(&thread, NULL, change_it, b);
    for (unsigned i = 0; i < ROUNDS && !b->done; i++)
        rest();
    dev_stall(dev, false);
    pthread_join(thread, NULL);
    wait_for_end();
}

static void expect_cut(struct ht_obj *o, const uint8_t *p)
{
    uint8_t *want = calloc(1, BIG);

    memcpy(want, p, KEPT);
    expect(o, 0, want, BIG);
    free(want);
}

static void expect_bytes_or_error(struct ht_obj *o, const uint8_t *p)
{
    uint8_t *got = malloc(BIG);
    ssize_t n = ht_obj_read(o, 0, got, BIG);

    ck_assert(n == -EIO || (n == BIG && memcmp(got, p, BIG) == 0));
    free(got);
}

/* An abort drops the image, and a clone has none: without the repair their bytes are lost. */
static void expect_changed(struct beside *b)
{
    switch (b->change) {
    case CUT:
        ck_assert_int_eq(ht_obj_truncate(b->o, BIG), 0);
        expect_cut(b->o, b->p);
        break;
    case CUT_AND_GROWN:
        expect_cut(b->o, b->p);
        break;
    case CUT_AND_ABORTED:
        ck_assert_uint_eq(ht_obj_size(b->o), BIG);
        expect_bytes_or_error(b->o, b->p);
        break;
    case REWRITTEN:
        expect(b->o, 0, b->q, BIG);
        break;
    default:
        expect(b->o, 0, b->p, BIG);
        expect_bytes_or_error(b->other, b->p);
    }
}

TEST_LOOP(what_changes_beside_a_repair_stays_changed, PHASES *CHANGES)
{
    enum phase phase = (enum phase)(_i % PHASES);
    struct beside b = {.change = (enum change)(_i / PHASES), .p = pattern(BIG, 1), .q = pattern(BIG, 99)};

    b.other = object(BIG, 0);
    ck_assert_int_eq(ht_obj_sync(b.other), 0);
    b.o = stored(b.p, BIG, SCOPE);
    uint64_t oid = ht_obj_id(b.o), other = ht_obj_id(b.other);
    unsigned reads = reads_of_run();
    damage(place_of(b.p, BIG) + 900000);
    silent_in(phase, reads);
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    change_in_silence(&b);
    expect_changed(&b);
    ck_assert_int_eq(ht_obj_sync(b.o), 0);
    scrub(); /* a repair that came second has changed nothing: this one does it */
    if (b.change <= CUT_AND_GROWN || b.change == REWRITTEN)
        expect_found(0, 0);
    ht_obj_evict(b.o);
    expect_changed(&b);
    crash();
    b.o = get_object(oid);
    b.other = get_object(other);
    expect_changed(&b);
}

/* While the bytes are read for the first owner, one owner gets others: that read says nothing about the other owner. */
TEST_LOOP(bad_bytes_are_found_for_the_owner_that_still_has_them, 2)
{
    struct beside b = {.change = REWRITTEN, .p = pattern(BIG, 1), .q = pattern(BIG, 99)};
    struct ht_obj *owner[2] = {stored(b.p, BIG, 0), object(BIG, 0)};
    struct ht_scrub_stats st;

    ck_assert_int_eq(ht_obj_clone(owner[0], 0, owner[1], 0, BIG), BIG);
    ck_assert_int_eq(ht_obj_sync(owner[1]), 0);
    ht_obj_evict(owner[0]);
    unsigned reads = reads_of_run();
    damage(place_of(b.p, BIG) + 900000);
    b.o = owner[_i];
    silent_in(FIRST_LOOK, reads);
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    change_in_silence(&b);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_ge(st.run_found, 1); /* 2: the change came late */
    expect(b.o, 0, b.q, BIG);
}

TEST(a_truncation_between_the_copy_of_a_repair_and_its_transaction_stays)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0);
    struct ht_dev_counters before, now;
    struct ht_tx *tx;

    damage(place_of(p, BIG) + 900000);
    ht_dev_counters(dev, &before);
    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0); /* for this the repair waits */
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    do {
        rest();
        ht_dev_counters(dev, &now);
    } while (now.written_bytes < before.written_bytes + BIG);
    ck_assert_int_eq(ht_obj_truncate(o, KEPT), 0);
    ht_obj_publish(o, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    wait_for_end();
    expect_found(0, 0);
    cut(o, BIG);
    expect_cut(o, p);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    o = after(crash, o);
    expect_cut(o, p);
}

RUN_TESTS("scrub", .setup = setup, .teardown = teardown, .timeout_s = 120, .quiet = ERRORS_ONLY)
