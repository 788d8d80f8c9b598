/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Flushes that fail beside other threads, on devices with volatile caches; and devices that no object needs. The orders
 * are fixed.
 */

#include "tests/support/memory.h"
#include "tests/unit/tiering/codec/content.h"
#include "tests/unit/tiering/store/cached_devices.h"
#include "tiering/sys/mem.h"
#include "tiering/space/super.h"

/* Another thread's file, on all devices, is synced while one flush of this device fails. */
static void fail_beside(unsigned device)
{
    struct ht_obj *other = object(HT_CHUNK_BYTES, 0);

    put_all(other, 0, three, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(other), 0);
    dev_fail(devs[device], HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_obj_sync(other), 0);
    put_object(other);
}

/* ------------------------------------------------------------------- space */

/* Its frames are smaller than what replaces them. The space for that is not that of others. */
TEST_LOOP(content_whose_frames_are_given_up_has_space_as_it_is, 2)
{
    enum { FILE_MIB = 20 };
    uint8_t *content = test_alloc(FILE_MIB * MIB);

    fixture_inline = HT_INLINE_ALWAYS;
    make(2);
    ck_assert_int_eq(ht_store_need_features(s, HT_FEAT_REFUSE_PLANES), 0);
    content_bf16(content, FILE_MIB * MIB, 5);
    struct ht_obj *f = object(MIB, 0), *others = object(MIB, 0);
    ht_obj_describe(f, true, false, false);
    put_all(f, 0, content, FILE_MIB * MIB);
    ck_assert_int_eq(ht_obj_writeback(f), 0);
    ck_assert_uint_lt(obj_stat(f).stored_bytes, FILE_MIB * MIB * 9 / 10);
    ht_obj_describe(f, false, false, false);
    fail_beside((unsigned)_i);
    uint64_t at = 0;
    while (ht_obj_write(others, at, one, MIB) == MIB && ht_obj_sync(others) == 0)
        at += MIB;
    ck_assert_int_eq(ht_obj_sync(f), 0);
    uint64_t id = put(f);
    put_object(others);
    power_cut(12);
    expect_after_cut(id, content, FILE_MIB * MIB);
    end();
    fixture_inline = HT_INLINE_AUTO;
}

/* ---------------------------------------------------------- publications */

/* The second half of an fsync or a commit. rounds: of the first half. */
static int publish(struct ht_obj *o, uint64_t scope, struct ht_rounds *rounds)
{
    struct ht_tx *tx;
    uint64_t lsn;
    int rc = ht_tx_begin_round(s, 64 << 10, rounds, &tx);

    if (rc)
        return rc;
    if (o)
        ht_obj_publish(o, tx);
    else
        ht_scope_publish(s, scope, false, tx);
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    return ht_store_sync(s, lsn);
}

/* Writes the scope back and publishes it, as often as the publication asks for another round. */
static void writeback_and_publish(struct ht_rounds *rounds)
{
    int rc;

    do {
        ht_rounds_next(s, rounds);
        ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    } while ((rc = publish(NULL, SCOPE, rounds)) == -EAGAIN);
    ck_assert_int_eq(rc, 0);
}

TEST_LOOP(a_flush_that_fails_beside_a_commit_does_not_tear_it, 3)
{
    struct ht_rounds of_m = HT_ROUNDS_INIT, of_f = HT_ROUNDS_INIT;

    make(3);
    struct ht_obj *m = published(SCOPE, one, CHUNKS * MIB), *f = published(0, one, CHUNKS * MIB);
    put_all(m, 0, two, CHUNKS * MIB);
    ht_rounds_next(s, &of_m);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    put_all(f, 0, two, CHUNKS * MIB);
    ht_rounds_next(s, &of_f);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    fail_beside((unsigned)_i);
    int rc;
    while ((rc = publish(NULL, SCOPE, &of_m)) == -EAGAIN) {
        ht_rounds_next(s, &of_m);
        ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    }
    ck_assert_int_eq(rc, 0);
    while ((rc = publish(f, 0, &of_f)) == -EAGAIN) {
        ht_rounds_next(s, &of_f);
        ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    }
    ck_assert_int_eq(rc, 0);
    uint64_t ids[] = {put(m), put(f)};
    power_cut(1);
    expect_after_cut(ids[0], two, CHUNKS * MIB);
    expect_after_cut(ids[1], two, CHUNKS * MIB);
}

/*
 * Another thread writes the object back once more after the flush, and that is given up: the flushed content is gone,
 * and so is the newer content.
 */
TEST_LOOP(what_replaced_flushed_content_is_not_missed, 2)
{
    struct ht_rounds rounds = HT_ROUNDS_INIT;

    make(2);
    struct ht_obj *f = published(0, one, CHUNKS * MIB);
    put_all(f, 0, two, CHUNKS * MIB);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    put_all(f, 0, three, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(f), 0);
    fail_beside((unsigned)_i);
    ck_assert_int_eq(publish(f, 0, &rounds), -EAGAIN);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    ck_assert_int_eq(publish(f, 0, &rounds), 0);
    cut_and_expect(f, 2, three, CHUNKS * MIB);
}

/*
 * Another thread writes the object back once more after the flush. A publication of the object begins again, and the
 * log continues.
 */
TEST_LOOP(what_is_written_back_after_the_flush_is_flushed_before_it_is_published, 3)
{
    bool scope = _i > 0;

    make(2);
    struct ht_obj *f = published(scope ? SCOPE : 0, one, MIB);
    struct ht_rounds all[] = {HT_ROUNDS_OF(f), HT_ROUNDS_OF_SCOPE(SCOPE), HT_ROUNDS_OF_REST(SCOPE)}, rounds = all[_i];
    put_all(f, 0, two, MIB);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    put_all(f, 0, three, MIB);
    dev_fail(devs[write_back(f)], HT_IO_FLUSH, 1, false);
    int rc;
    while ((rc = publish(scope ? NULL : f, SCOPE, &rounds)) == -EAGAIN) {
        ht_rounds_next(s, &rounds);
        ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    }
    ck_assert_int_eq(rc, 0);
    ck_assert(!ht_store_read_only(s));
    cut_and_expect(f, 10, three, MIB);
}

/* A commit that leaves an object out does not wait for its writes. */
TEST(a_publication_of_the_rest_does_not_wait_for_derived_content)
{
    struct ht_rounds rounds = HT_ROUNDS_OF_REST(SCOPE);

    make(2);
    struct ht_obj *f = published(SCOPE, one, MIB);
    ck_assert_int_eq(ht_obj_set_derived(f, false), 0);
    ht_rounds_next(s, &rounds);
    put_all(f, 0, two, MIB);
    ck_assert_int_eq(ht_obj_writeback(f), 0);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin_round(s, 4096, &rounds, &tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
}

/* Whatever others write, a publication ends. */
TEST(what_is_written_back_again_and_again_is_published_in_the_end)
{
    make(2);
    struct ht_obj *f = published(0, one, MIB);
    struct ht_rounds rounds = HT_ROUNDS_OF(f);
    unsigned again = 0;
    do {
        ht_rounds_next(s, &rounds);
        ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
        put_all(f, 0, two, MIB);
        ck_assert_int_eq(ht_obj_writeback(f), 0);
    } while (publish(f, 0, &rounds) == -EAGAIN && ++again);
    ck_assert_uint_eq(again, HT_ROUNDS_LATE_MAX);
    cut_and_expect(f, 11, two, MIB);
}

/* No content of this object needed the flush any more, so that another object's failure does not concern it. */
TEST(a_failed_flush_of_what_others_wrote_leaves_the_store_writable)
{
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    struct ht_tx *tx;

    make(4);
    struct ht_obj *f = published(0, one, CHUNKS * MIB), *g = published(0, one, CHUNKS * MIB);
    put_all(f, 0, two, CHUNKS * MIB);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback_flushed(f), 0);
    put_all(g, 0, two, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(g), 0);
    ck_assert_int_eq(ht_tx_begin_round(s, 8192, &rounds, &tx), 0);
    ht_obj_publish(f, tx);
    dev_fail(devs[3], HT_IO_FLUSH, 1, false); /* no log is on it */
    commit_durably(tx);
    ck_assert_int_eq(ht_obj_sync(g), 0);
    ck_assert(!ht_store_read_only(s));
    uint64_t ids[] = {put(f), put(g)};
    power_cut(3);
    expect_after_cut(ids[0], two, CHUNKS * MIB);
    expect_after_cut(ids[1], two, CHUNKS * MIB);
}

/* ----------------------------------------------------------------- clones */

struct cloning {
    struct ht_obj *src, *dst;
    ssize_t done;
};

static void *clone_main(void *arg)
{
    struct cloning *k = arg;

    k->done = ht_obj_clone(k->src, 0, k->dst, 0, MIB);
    return NULL;
}

/* The clone has taken the source's content, and waits for its target while that content is given up. */
TEST(a_clone_under_way_does_not_keep_what_was_given_up)
{
    make(3);
    struct ht_obj *a = object(HT_CHUNK_BYTES, 0), *b = published(0, one, MIB);
    put_all(a, 0, two, MIB);
    unsigned device = write_back(a);
    struct ht_batch_pin l = {.store = s,
                             .count = 1,
                             .chunk[0] =
                                 (struct ht_batch_pin_chunk){.obj = b, .index = 0, .mode = HT_BATCH_PIN_UPDATE}};
    pin_now(&l);
    struct cloning k = {.src = a, .dst = b};
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, clone_main, &k), 0);
    usleep(100000);
    fail_beside(device);
    unpin(&l, 0);
    pthread_join(thread, NULL);
    ck_assert_int_eq(k.done, MIB);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    put_object(a);
    uint64_t id = put(b);
    for (uint64_t seed = 1; seed <= 3; seed++) {
        power_cut(seed);
        expect_after_cut(id, two, MIB);
    }
}

/* ------------------------------------------------------- writes in flight */

struct writing {
    bool staged; /* by a batch pin, from a buffer */
    struct ht_obj *o;
    unsigned device; /* that keeps the write */
};

/* Any device that keeps a write from now on; none. */
static void keep_writes(unsigned nth)
{
    for (unsigned i = 0; i < device_count; i++)
        dev_stall_at(devs[i], HT_IO_WRITE, nth);
}

static unsigned keeper(void)
{
    for (unsigned ms = 0; ms < WAIT_MS_MAX; ms++) {
        for (unsigned i = 0; i < device_count; i++)
            if (dev_is_stalled(devs[i]))
                return i;
        usleep(1000);
    }
    ck_abort_msg("no device keeps the write");
}

static void write_by_batch_pin(struct ht_obj *o, uint64_t index, const uint8_t *content, bool *out_staged)
{
    struct ht_batch_pin l = {
        .store = s,
        .count = 1,
        .chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .index = index, .mode = HT_BATCH_PIN_OVERWRITE},
    };

    pin_now(&l);
    *out_staged = l.chunk[0].staged;
    memcpy(l.chunk[0].data, content, MIB);
    unpin(&l, 1);
}

/* Images that stay take all the room that there is for such, so that later batch pins write from buffers. */
static void fill_protected_set(struct ht_obj *o)
{
    bool staged = false;

    ck_assert_int_eq(ht_obj_truncate(o, 64 * MIB), 0);
    for (uint64_t i = 0; !staged; i++)
        write_by_batch_pin(o, i, one, &staged);
    ck_assert_int_eq(ht_obj_sync(o), 0);
}

static void *write_main(void *arg)
{
    struct writing *w = arg;
    bool staged = true;

    if (w->staged)
        write_by_batch_pin(w->o, 0, two, &staged);
    else
        ck_assert_int_eq(ht_obj_writeback(w->o), 0);
    ck_assert(staged);
    return NULL;
}

/* Content on all devices that are not closed, not flushed. */
static struct ht_obj *written_on_all(void)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);

    put_all(o, 0, three, CHUNKS * MIB);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    return o;
}

/* staged: of a batch pin. failures: devices that fail a flush of another caller while they keep the write. */
static void check_write_under_way(bool staged, unsigned failures)
{
    struct writing w = {.staged = staged};
    pthread_t thread;

    make(4);
    struct ht_obj *kept = object(HT_CHUNK_BYTES, 0), *other[2];
    if (staged)
        fill_protected_set(kept);
    w.o = published(0, one, MIB);
    if (!staged)
        put_all(w.o, 0, two, MIB);
    ht_obj_evict(w.o);
    uint64_t errors = stats().write_errors;
    for (unsigned i = 0; i < failures; i++) {
        other[i] = written_on_all();
        keep_writes(1);
        if (i == 0)
            ck_assert_int_eq(pthread_create(&thread, NULL, write_main, &w), 0);
        else
            dev_stall(devs[w.device], false);
        w.device = keeper();
        keep_writes(0);
        dev_fail(devs[w.device], HT_IO_FLUSH, 1, false);
        ck_assert_int_eq(ht_obj_writeback_flushed(other[i]), 0);
    }
    dev_stall(devs[w.device], false);
    pthread_join(thread, NULL);
    ck_assert_uint_eq(stats().write_errors, errors + failures); /* each time it was written elsewhere */
    ck_assert_int_eq(ht_obj_sync(w.o), 0);
    for (unsigned i = 0; i < failures; i++)
        put_object(other[i]);
    put_object(kept);
    cut_and_expect(w.o, 14, two, MIB);
}

TEST_LOOP(a_write_under_way_leaves_a_device_that_fails_a_flush, 2)
{
    check_write_under_way(_i & 1, 1);
}

TEST_LOOP(a_write_that_goes_elsewhere_leaves_that_device_too, 2)
{
    check_write_under_way(_i & 1, 2);
}

/* Flushes without content, of a superblock say. Twice before any check. */
TEST_LOOP(failures_of_flushes_are_seen_whoever_asked, 2)
{
    bool only = _i;

    make(only ? 1 : 3);
    uint64_t id = put(published(0, one, CHUNKS * MIB));
    for (unsigned round = 0; round < 2; round++) {
        const uint8_t *content = round ? three : two;
        struct ht_obj *f = get_object(id);
        struct ht_dev *failing = devs[only ? 0 : 1 + round];
        put_all(f, 0, content, CHUNKS * MIB);
        ck_assert_int_eq(ht_obj_writeback(f), 0);
        dev_fail(failing, HT_IO_FLUSH, 1, true);
        for (unsigned i = 0; i < 2; i++)
            ck_assert_int_eq(ht_dev_flush(failing), -EIO);
        dev_fail(failing, HT_IO_FLUSH, 0, false);
        ck_assert_int_eq(ht_obj_sync(f), 0);
        ck_assert(!ht_store_read_only(s));
        put_object(f);
        power_cut(15 + round);
        expect_after_cut(id, content, CHUNKS * MIB);
    }
}

/* ------------------------------------------------------- given-up content */

/*
 * The thread that resolves it has the bytes in memory, and waits for the open transaction. A truncation narrows the
 * reference that it is to give up.
 */
TEST(what_is_truncated_while_it_is_given_up_is_given_up)
{
    enum { KEEP = 600000 };
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    struct ht_tx *tx;
    pthread_t thread;

    make(1);
    struct ht_obj *f = published(0, one, MIB);
    put_all(f, 0, two, MIB);
    struct ht_obj *other = object(HT_CHUNK_BYTES, 0); /* changed later, so that it is resolved last */
    put_all(other, 0, three, MIB);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_obj_writeback(f), 0);
    struct syncing y = {.o = other};
    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
    dev_fail(devs[0], HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(pthread_create(&thread, NULL, sync_main, &y), 0);
    for (unsigned ms = 0; ms < WAIT_MS_MAX && !obj_stat(f).dirty_bytes; ms += 10)
        usleep(10000);
    ck_assert_uint_gt(obj_stat(f).dirty_bytes, 0);
    ck_assert_int_eq(ht_obj_truncate(f, KEEP), 0);
    ck_assert_int_eq(ht_obj_truncate(other, 0), 0); /* of f alone something is given up */
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    pthread_join(thread, NULL);
    ck_assert_int_eq(y.rc, 0);
    ck_assert_int_eq(publish(f, 0, &rounds), -EAGAIN);
    ck_assert_int_eq(ht_obj_sync(f), 0);
    put_object(other);
    cut_and_expect(f, 7, two, KEEP);
}

/* Content that the log has named before, on a closed device, needs no flush when it is cut or cloned. */
TEST_LOOP(what_is_durable_on_a_closed_device_can_be_cut_and_cloned, 2)
{
    bool clones = _i;

    make(3);
    uint64_t id = put(published(0, one, CHUNKS * MIB));
    unmount_store();
    mount_all(); /* no flush of this mount covers it */
    fail_beside(2);
    struct ht_obj *f = get_object(id), *b = object(HT_CHUNK_BYTES, 0);
    if (clones)
        ck_assert_int_eq(ht_obj_clone(f, 0, b, 0, CHUNKS * MIB), CHUNKS * MIB);
    for (uint64_t i = 0; i < CHUNKS && !clones; i++) {
        ck_assert_int_eq(ht_obj_truncate(f, (CHUNKS - i) * MIB - 100), 0);
        ck_assert_int_eq(ht_store_commit(s), 0);
        ck_assert_int_eq(ht_obj_sync(f), 0);
    }
    ck_assert_int_eq(ht_obj_sync(b), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert(!ht_store_read_only(s));
    uint64_t cloned = put(b);
    put_object(f);
    power_cut(9);
    if (clones)
        expect_after_cut(cloned, one, CHUNKS * MIB);
    expect_after_cut(id, one, clones ? CHUNKS * MIB : MIB - 100);
}

/* More flushes than the store remembers. */
static void sync_others(struct ht_obj *small)
{
    for (unsigned i = 0; i < 300; i++)
        put_synced(small, 0, two + i, 512);
}

/*
 * References remember their flush for 255 others. The device is closed, so content that seems uncovered is written
 * elsewhere.
 */
TEST(what_was_flushed_long_before_on_a_closed_device_is_published)
{
    struct ht_rounds rounds = HT_ROUNDS_OF_SCOPE(SCOPE);

    make(3);
    struct ht_obj *m = published(SCOPE, one, CHUNKS * MIB), *small = object(HT_SMALL_CHUNK_BYTES, 0);
    put_all(m, 0, two, CHUNKS * MIB);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    fail_beside(2);
    sync_others(small);
    writeback_and_publish(&rounds);
    put_object(small);
    cut_and_expect(m, 12, two, CHUNKS * MIB);
}

/*
 * The same, and it seems not to be covered only when its publication begins. The device needs no flush: one that was
 * not the store's came after the failure. A caller that writes nothing back is refused in the end.
 */
TEST(what_seems_not_to_be_covered_on_a_closed_device_does_not_end_the_log)
{
    struct ht_rounds rounds = HT_ROUNDS_OF_SCOPE(SCOPE);

    make(3);
    struct ht_obj *m = published(SCOPE, one, CHUNKS * MIB), *small = object(HT_SMALL_CHUNK_BYTES, 0);
    put_all(m, 0, two, CHUNKS * MIB);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    fail_beside(2);
    ck_assert_int_eq(ht_dev_flush(devs[2]), 0);
    ht_rounds_next(s, &rounds);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    sync_others(small);
    int rc;
    unsigned refused = 0;
    while ((rc = publish(NULL, SCOPE, &rounds)) == -EAGAIN)
        refused++;
    ck_assert_int_eq(rc, -EIO);
    ck_assert_uint_eq(refused, HT_ROUNDS_MAX);
    ck_assert(!ht_store_read_only(s));
    rounds = HT_ROUNDS_OF_SCOPE(SCOPE);
    writeback_and_publish(&rounds);
    put_object(small);
    cut_and_expect(m, 17, two, CHUNKS * MIB);
}

/*
 * There is no space for another copy, and none is needed: the bytes are in memory, and the
 * place that is given up is free.
 */
TEST(a_full_store_keeps_what_a_failed_flush_covered)
{
    make(1);
    struct ht_obj *filler = object(HT_CHUNK_BYTES, 0), *f = object(HT_CHUNK_BYTES, 0);
    uint64_t n = 0;
    while (ht_obj_write(filler, n * MIB, one, MIB) == MIB && ht_obj_sync(filler) == 0)
        n++;
    ck_assert_int_eq(ht_obj_truncate(filler, (n - 2) * MIB), 0);
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    put_all(f, 0, two, 2 * MIB);
    ck_assert_int_eq(ht_obj_writeback(f), 0);
    ck_assert_uint_lt(ht_store_available(s), MIB);
    dev_fail(devs[0], HT_IO_FLUSH, 1, false);
    ck_assert_int_eq(ht_obj_sync(f), 0);
    put_object(filler);
    cut_and_expect(f, 8, two, 2 * MIB);
}

/* --------------------------------------------------------------- the log */

/* Both copies of the log are on one device: after the frame was written to it another thread's flush fails. */
TEST(a_frame_that_a_flush_of_another_thread_voided_is_written_again)
{
    make(1);
    struct ht_obj *a = published(0, one, MIB), *b = published(0, one, MIB);
    put_all(a, 0, two, MIB);
    ck_assert_int_eq(ht_obj_writeback_flushed(a), 0);
    dev_void_after(devs[0], 2); /* the frame's two */
    ck_assert_int_eq(ht_obj_sync(a), 0);
    put_synced(b, 0, two, MIB);
    uint64_t ids[] = {put(a), put(b)};
    power_cut(5);
    expect_after_cut(ids[0], two, MIB);
    expect_after_cut(ids[1], two, MIB);
}

TEST(one_failed_flush_of_the_only_device_leaves_the_store_writable)
{
    make(1);
    struct ht_obj *a = published(0, one, MIB);
    for (unsigned nth = 1; nth <= 3; nth++) { /* of content, of the log, and the one after */
        put_all(a, 0, nth % 2 ? two : three, MIB);
        dev_fail(devs[0], HT_IO_FLUSH, nth, false);
        ck_assert_int_eq(ht_obj_sync(a), 0);
        dev_fail(devs[0], HT_IO_FLUSH, 0, false);
        ck_assert(!ht_store_read_only(s));
    }
    cut_and_expect(a, 6, two, MIB);
}

RUN_TESTS("flushes", .teardown = end, .timeout_s = 300, .quiet = ERRORS_ONLY, .memory = memory_keep)
