/* SPDX-License-Identifier: Apache-2.0 */
/* The store's promises to its callers, one behaviour per test, on a device of memory. */
#include <time.h>

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/space/alloc.h"

TEST(a_synced_object_survives_a_crash)
{
    fresh(32, false);
    uint8_t *p = pattern(300000, 1);
    struct ht_obj *o = synced_object(HT_SMALL_CHUNK_BYTES, 0, p, 300000);
    o = after(crash, o);
    ck_assert_uint_eq(ht_obj_size(o), 300000);
    expect(o, 0, p, 300000);
}

TEST(more_than_the_dram_tier_streams_through_it)
{
    fresh(96, true);
    uint8_t *p = pattern(40 * MIB, 2);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, p, 40 * MIB);
    expect(o, 0, p, 40 * MIB);
    struct ht_store_stats st = stats();
    ck_assert_uint_le(st.dram_used_bytes, 8 * MIB);
    ck_assert_uint_ge(st.device_written_bytes, 32 * MIB);
    ck_assert_uint_ge(st.device_read_bytes, 32 * MIB);
}

TEST(a_full_store_refuses_writes_and_can_be_emptied)
{
    fresh(16, true);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    uint8_t *p = pattern(MIB, 3);
    uint64_t end = 0;
    ssize_t n;
    while ((n = ht_obj_write(o, end, p, MIB)) > 0)
        end += (uint64_t)n;
    ck_assert_int_eq(n, -ENOSPC);
    ck_assert_uint_ge(end, 12 * MIB);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    expect(o, end - MIB, p, MIB);
    /* Rewriting needs a second copy: refused too, and nothing is lost. */
    ck_assert_int_eq(ht_obj_write(o, 0, p + 1, MIB - 1), -ENOSPC);
    expect(o, 0, p, MIB);
    ck_assert_int_eq(ht_obj_truncate(o, 12345), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    expect(o, 0, p, 12345);
    put_synced(o, 0, p, MIB);
}

static int corrupt_first(void *ctx, const struct ht_chunk_info *info)
{
    uint8_t *ram = ht_dev_ram_data(dev);

    ram[info->extents[0].block * 4096 + 100] ^= 1;
    *(uint64_t *)ctx = info->index;
    return 1;
}

TEST(a_flipped_byte_is_an_error_never_wrong_data)
{
    fresh(32, false);
    uint8_t *p = pattern(3 * MIB, 4);
    struct ht_obj *o = synced_object(HT_CHUNK_BYTES, 0, p, 3 * MIB);
    ht_obj_evict(o);
    uint64_t index = 99;
    ck_assert_int_eq(ht_store_walk(s, corrupt_first, &index), 1);
    uint8_t byte;
    ck_assert_int_eq(ht_obj_read(o, index * MIB, &byte, 1), -EIO);
    expect(o, (index + 1) * MIB, p + (index + 1) * MIB, MIB);
    ck_assert_uint_eq(stats().checksum_errors, 1);
    /* Overwriting it whole heals it. */
    put_all(o, index * MIB, p, MIB);
    expect(o, index * MIB, p, MIB);
}

TEST(a_failed_write_is_reported_and_kept)
{
    fresh(32, false);
    uint8_t *p = pattern(MIB, 5);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, p, MIB);
    dev_fail(dev, HT_IO_WRITE, 1, true); /* here and everywhere else */
    ck_assert_int_eq(ht_obj_sync(o), -EIO);
    dev_fail(dev, HT_IO_WRITE, 0, false);
    expect(o, 0, p, MIB);
    sync_and_evict(o);
    expect(o, 0, p, MIB);
}

TEST(a_scope_changes_together_or_not_at_all)
{
    fresh(32, false);
    struct ht_obj *a = object(HT_CHUNK_BYTES, 9), *b = object(HT_SMALL_CHUNK_BYTES, 9);
    uint8_t *p = pattern(MIB, 6), *q = pattern(MIB, 7);
    put_all(a, 0, p, MIB);
    put_all(b, 0, p, 70000);
    publish_scope_at_once(9);
    put_all(a, 0, q, MIB);
    put_all(b, 10, q, 70000);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_int_eq(ht_scope_abort(s, 9), 0);
    expect(a, 0, p, MIB);
    ck_assert_uint_eq(ht_obj_size(b), 70000);
    expect(b, 0, p, 70000);
}

TEST(an_object_with_a_rewrite_reserve_can_always_be_rewritten)
{
    fresh(16, false);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 9), *filler = object(HT_CHUNK_BYTES, 0);
    uint8_t *p = pattern(4 * MIB, 8);
    put_all(o, 0, p, 4 * MIB);
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, 64 * MIB), -ENOSPC);
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, 4 * MIB), 0);
    while (ht_obj_write(filler, ht_obj_size(filler), p, MIB) > 0)
        ;
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    for (int step = 0; step < 6; step++) {
        put_all(o, 0, p, 4 * MIB);
        ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
        struct ht_tx *tx;
        ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
        if (step % 2)
            ht_scope_publish(s, 9, false, tx);
        commit_durably(tx);
    }
}

/* repeat: no place takes it at first. Else another place does, and the bad one stays taken. */
TEST_LOOP(a_rewrite_reserve_outlasts_writes_that_fail, 2)
{
    bool repeat = _i;

    fresh(64, false);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 9), *filler = object(HT_CHUNK_BYTES, 0);
    uint8_t *p = pattern(4 * MIB + 1, 8);
    put_all(o, 0, p, 4 * MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ck_assert_int_eq(ht_obj_rewrite_reserve(o, 4 * MIB), 0);
    ck_assert_uint_eq(stats().reserved_bytes, 4 * MIB);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    put_all(o, 0, p + 1, MIB);
    dev_fail(dev, HT_IO_WRITE, 1, repeat);
    ck_assert_int_eq(ht_scope_writeback(s, 9), repeat ? -EIO : 0);
    dev_fail(dev, HT_IO_WRITE, 0, false);
    ck_assert_uint_eq(stats().reserved_bytes, repeat ? 4 * MIB : 3 * MIB);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    while (ht_obj_write(filler, ht_obj_size(filler), p, MIB) > 0)
        ;
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    put_all(o, 0, p + 1, 4 * MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(stats().reserved_bytes, 4 * MIB);
    expect(o, 0, p + 1, 4 * MIB);
}

TEST(a_batch_pin_works_with_images_and_without)
{
    fresh(64, false);
    uint8_t *p = pattern(20 * MIB, 9);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 9, p, 20 * MIB);
    struct ht_batch_pin l = {.store = s};
    unsigned staged = 0;
    for (unsigned i = 0; i < 20; i += 4) {
        l.count = 4;
        for (unsigned k = 0; k < 4; k++)
            l.chunk[k] = (struct ht_batch_pin_chunk){
                .obj = o, .index = i + 3 - k, .mode = k ? HT_BATCH_PIN_UPDATE : HT_BATCH_PIN_OVERWRITE};
        pin_now(&l);
        for (unsigned k = 0; k < 4; k++) {
            ck_assert_uint_eq(l.chunk[k].len, MIB);
            staged += l.chunk[k].staged;
            uint8_t *want = p + (size_t)l.chunk[k].index * MIB;
            if (k)
                ck_assert_int_eq(memcmp(l.chunk[k].data, want, MIB), 0);
            for (unsigned b = 0; b < MIB; b++)
                l.chunk[k].data[b] = want[b] = (uint8_t)(want[b] + 1);
        }
        unpin(&l, 0xf);
    }
    ck_assert_uint_gt(staged, 0);
    expect(o, 0, p, 20 * MIB);
}

static int take(struct ht_batch_pin *l, struct ht_obj *o, uint64_t index)
{
    l->chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .index = index, .mode = HT_BATCH_PIN_UPDATE};
    int rc = ht_batch_pin_begin(l);
    return rc ? rc : ht_batch_pin_wait(l);
}

/*
 * Updates chunks [first, end) without changing them: as many as there is room for stay in memory. Returns the number of
 * the others.
 */
static unsigned fill_protected_set(struct ht_batch_pin *l, struct ht_obj *o, uint64_t first, uint64_t end)
{
    unsigned staged = 0;

    for (uint64_t i = first; i < end; i++) {
        ck_assert_int_eq(take(l, o, i), 0);
        staged += l->chunk[0].staged;
        unpin(l, 1);
    }
    return staged;
}

TEST(a_lost_staged_write_is_never_hidden)
{
    fresh(64, false);
    uint8_t *p = pattern(20 * MIB, 10);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 9, p, 20 * MIB);
    publish_scope_at_once(9);
    struct ht_batch_pin l = {.store = s, .count = 1};
    fill_protected_set(&l, o, 1, 20);
    ck_assert_int_eq(take(&l, o, 0), 0);
    ck_assert(l.chunk[0].staged);
    l.chunk[0].data[0] ^= 1;
    dev_fail(dev, HT_IO_WRITE, 1, true);
    ht_batch_pin_end(&l, 1);
    ck_assert_int_eq(ht_batch_pin_finish(&l), -EIO);
    dev_fail(dev, HT_IO_WRITE, 0, false);
    uint8_t byte;
    ck_assert_int_eq(ht_obj_read(o, 0, &byte, 1), -EIO);
    ck_assert_int_eq(ht_scope_writeback(s, 9), -EIO);
    ck_assert_int_eq(ht_scope_abort(s, 9), 0);
    expect(o, 0, p, 20 * MIB);
}

static uint64_t device_read_bytes(void)
{
    struct ht_dev_counters c;

    ht_dev_counters(dev, &c);
    return c.read_bytes;
}

/* K of N chunks hit, in whatever order they are updated, and other traffic does not push them out. */
TEST(what_is_updated_over_and_over_stays)
{
    enum { N = 24 };

    fresh(128, false);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 9), *other = object(HT_CHUNK_BYTES, 0);
    uint8_t *p = pattern(N * MIB, 10);
    put_all(o, 0, p, N * MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ht_obj_evict(o);
    struct ht_batch_pin l = {.store = s, .count = 1};
    unsigned staged = fill_protected_set(&l, o, 0, N);
    struct ht_store_stats st = stats();
    unsigned kept = (unsigned)(st.dram_protected_bytes / MIB);
    ck_assert_uint_eq(kept, st.dram_bytes * 3 / 4 / MIB);
    ck_assert_uint_eq(staged, N - kept);
    for (unsigned pass = 0; pass < 3; pass++) {
        put_all(other, 0, p, N * MIB);
        ck_assert_int_eq(ht_obj_writeback(other), 0);
        uint64_t before = device_read_bytes();
        for (unsigned i = 0; i < N; i++)
            ck_assert_uint_le(fill_protected_set(&l, o, (i * 5 + pass) % N, (i * 5 + pass) % N + 1), 1);
        ck_assert_uint_eq(device_read_bytes() - before, (N - kept) * (uint64_t)MIB);
    }
    expect(o, 0, p, N * MIB);
    ht_obj_unprotect(o);
    ck_assert_uint_eq(stats().dram_protected_bytes, 0);
}

TEST(scratch_is_not_protected_and_costs_no_write)
{
    fresh(32, false);
    struct ht_obj *o;
    struct ht_obj_attr a = {
        .oid = ht_store_new_id(s), .chunk_bytes = HT_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH, .scope = 9};
    ck_assert_int_eq(ht_obj_create(s, &a, &o), 0);
    hold_object(o);
    uint8_t *p = pattern(4 * MIB, 11);
    uint64_t before = stats().device_written_bytes;
    put_all(o, 0, p, 4 * MIB);
    ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_lt(stats().device_written_bytes - before, MIB);
    expect(o, 0, p, 4 * MIB);
    ht_obj_scratch_drop(o, 1, 1);
    memset(p + MIB, 0, MIB);
    expect(o, 0, p, 4 * MIB);
    ck_assert_uint_eq(stats().scratch_dropped_bytes, MIB);
    ht_obj_scratch_drop(o, 0, UINT64_MAX);
    struct ht_store_stats st = stats();
    ck_assert_uint_eq(st.dram_dirty_bytes, 0);
    ck_assert_uint_eq(st.scratch_dropped_bytes, 4 * MIB);
    ck_assert_uint_eq(st.scratch_written_bytes, 0);
    uint8_t *more = pattern(12 * MIB, 12); /* the tier has 8 */
    put_all(o, 0, more, 12 * MIB);
    ck_assert_uint_ge(stats().scratch_written_bytes, 4 * MIB);
    ht_obj_scratch_drop(o, 0, UINT64_MAX);
    uint64_t oid = ht_obj_id(o);
    remount();
    ck_assert_ptr_null(get_object(oid));
}

TEST(space_comes_back_after_deletion)
{
    fresh(32, false);
    struct ht_store_stats before = stats(), after;
    uint8_t *p = pattern(MIB, 12);
    for (int round = 0; round < 50; round++) {
        struct ht_obj *o = synced_object(round % 2 ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES, 0, p, MIB);
        delete (o);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    after = stats();
    ck_assert_uint_eq(after.free_bytes, before.free_bytes);
    ck_assert_uint_eq(after.reserved_bytes, 0);
    ck_assert_uint_eq(after.log.reserved_bytes, before.log.reserved_bytes);
    ck_assert_uint_eq(after.objects, before.objects);
}

TEST(freed_space_waits_for_the_log)
{
    fresh(16, false);
    struct ht_obj *a = object(HT_CHUNK_BYTES, 0), *b = object(HT_CHUNK_BYTES, 0);
    uint64_t oid = ht_obj_id(a), end = 0;
    uint8_t *p = pattern(6 * MIB, 13), *q = pattern(MIB, 14);
    put_synced(a, 0, p, 6 * MIB);
    delete (a);
    /* Uses up all space, including that of a. */
    while (ht_obj_write(b, end, q, MIB) == MIB) {
        end += MIB;
        ck_assert_int_eq(ht_obj_writeback(b), 0);
        uint8_t *ram = malloc(ht_dev_size(dev));
        memcpy(ram, ht_dev_ram_data(dev), ht_dev_size(dev));
        struct ht_dev *other = dev, *copy;
        struct ht_store *running = s;
        /* A crash now: a is there wholly, or gone. */
        ck_assert_int_eq(dev_open_ram(16 * MIB, 512, &copy), 0);
        memcpy(ht_dev_ram_data(copy), ram, 16 * MIB);
        free(ram);
        dev = copy;
        mount_with(false, false);
        a = get_object(oid);
        if (a)
            expect(a, 0, p, 6 * MIB);
        done();
        dev = other;
        s = running;
    }
    ck_assert_uint_ge(end, 13 * MIB);
}

/* ------------------------------------------------------------ many threads */

struct worker {
    pthread_t thread;
    struct ht_obj *o;
    unsigned seed;
};

static void *churn(void *arg)
{
    struct worker *w = arg;
    uint8_t *p = pattern(2 * MIB, w->seed);

    for (unsigned i = 0; i < 20; i++) {
        uint64_t off = (w->seed * 7919ull + i * 104729ull) % (3 * MIB);
        put_all(w->o, off, p, 2 * MIB);
        expect(w->o, off, p, 2 * MIB);
        if (i % 4 == 0)
            ck_assert_int_eq(ht_obj_sync(w->o), 0);
        if (i % 7 == 0)
            ck_assert_int_eq(ht_obj_truncate(w->o, off), 0);
    }
    return NULL;
}

TEST(many_threads_do_not_disturb_each_other)
{
    fresh(128, true);
    struct worker w[6];
    for (unsigned i = 0; i < 6; i++) {
        w[i] = (struct worker){.o = object(i % 2 ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES, 0), .seed = i};
        ck_assert_int_eq(pthread_create(&w[i].thread, NULL, churn, &w[i]), 0);
    }
    for (unsigned i = 0; i < 6; i++) {
        pthread_join(w[i].thread, NULL);
        put_object(w[i].o);
    }
}

TEST(an_object_deleted_while_it_is_written_leaves_nothing)
{
    fresh(32, false);
    struct ht_store_stats before = stats(), after;
    for (int published = 0; published < 2; published++) {
        struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
        ck_assert_int_eq(ht_obj_truncate(o, MIB), 0);
        if (published)
            ck_assert_int_eq(ht_obj_sync(o), 0);
        struct ht_batch_pin l = {.store = s, .count = 1};
        l.chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .mode = HT_BATCH_PIN_UPDATE};
        pin_now(&l);
        memset(l.chunk[0].data, 7, MIB);
        struct ht_tx *tx;
        ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
        ht_obj_delete(o, tx);
        ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
        unpin(&l, 1);
        put_object(o);
    }
    after = stats();
    ck_assert_uint_eq(after.objects, before.objects);
    ck_assert_uint_eq(after.available_bytes, before.available_bytes);
}

TEST(one_object_that_cannot_be_written_holds_up_no_other)
{
    fresh(32, false);
    struct ht_obj *bad = object(HT_SMALL_CHUNK_BYTES, 0), *good = object(HT_SMALL_CHUNK_BYTES, 0);
    uint8_t *p = pattern(65536, 9);
    put_synced(bad, 0, p, 65536);
    ck_assert_int_eq(ht_obj_sync(good), 0);
    ht_obj_evict(bad);
    uint64_t index;
    ck_assert_int_eq(ht_store_walk(s, corrupt_first, &index), 1);
    put_all(bad, 0, p, 100); /* the rest of the chunk is needed to write it back, and cannot be read */
    put_all(good, 0, p, 65536);
    ck_assert_int_eq(ht_store_commit(s), -EIO);
    good = after(crash, good);
    expect(good, 0, p, 65536);
}

static void *cut_to_nothing(void *arg)
{
    ck_assert_int_eq(ht_obj_truncate(arg, 0), 0);
    return NULL;
}

TEST(growth_is_taken_back_unless_others_grew_it_since)
{
    fresh(32, false);
    uint8_t *p = pattern(3 * MIB, 1);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, p, 3 * MIB);
    ck_assert_int_eq(ht_obj_ungrow(o, MIB + 5, 2 * MIB), 0);
    ck_assert_uint_eq(ht_obj_size(o), 3 * MIB);
    ck_assert_int_eq(ht_obj_ungrow(o, 3 * MIB, 3 * MIB), 0);
    ck_assert_uint_eq(ht_obj_size(o), 3 * MIB);
    ck_assert_int_eq(ht_obj_ungrow(o, MIB + 5, 3 * MIB), 0);
    ck_assert_uint_eq(ht_obj_size(o), MIB + 5);
    expect(o, 0, p, MIB + 5);
}

TEST(a_truncation_is_published_wholly_or_not_at_all)
{
    fresh(32, false);
    uint8_t *p = pattern(2 * MIB, 4), *zeros = test_alloc(2 * MIB);
    struct ht_obj *o = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB);
    uint64_t oid = ht_obj_id(o);
    struct ht_batch_pin l = {.store = s, .count = 1};
    l.chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .mode = HT_BATCH_PIN_READ};
    pin_now(&l);
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, cut_to_nothing, o), 0);
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL); /* it waits for the chunk */
    ck_assert_int_eq(ht_store_commit(s), 0);
    void *image = test_alloc(32 * MIB);
    memcpy(image, ht_dev_ram_data(dev), 32 * MIB);
    unpin(&l, 0);
    pthread_join(thread, NULL);
    close_store();
    memcpy(ht_dev_ram_data(dev), image, 32 * MIB);
    mount_with(false, false);
    o = get_object(oid);
    bool cut = ht_obj_size(o) == 0;
    ck_assert_int_eq(ht_obj_truncate(o, 2 * MIB), 0);
    expect(o, 0, cut ? zeros : p, 2 * MIB);
}

enum { SLOTS = 8, ROUNDS = 20 };

static void hold_all(struct ht_obj *o, unsigned count)
{
    struct ht_batch_pin l = {.store = s, .count = count};

    for (unsigned i = 0; i < count; i++)
        l.chunk[i] = (struct ht_batch_pin_chunk){.obj = o, .index = i, .mode = HT_BATCH_PIN_READ};
    pin_now(&l);
    unpin(&l, 0);
}

static void *hold_one_more(void *arg)
{
    hold_all(arg, SLOTS + 1);
    return NULL;
}

static void *read_last(void *arg)
{
    uint8_t byte;

    ck_assert_int_eq(ht_obj_read(arg, (uint64_t)SLOTS * MIB, &byte, 1), 1);
    return NULL;
}

/* A batch pin holds all slots and waits for one more chunk. A reader holds that chunk and waits for a slot. */
TEST(waiting_for_a_slot_holds_up_no_batch_pin)
{
    fresh(64, false);
    uint8_t *p = pattern((SLOTS + 1) * MIB, 11);
    struct ht_obj *o = synced_object(HT_CHUNK_BYTES, 0, p, (SLOTS + 1) * MIB);
    for (unsigned i = 0; i < ROUNDS; i++) {
        ht_obj_evict(o);
        expect(o, 0, p, SLOTS * MIB);
        struct ht_batch_pin l = {.store = s, .count = SLOTS};
        for (unsigned k = 0; k < SLOTS; k++)
            l.chunk[k] = (struct ht_batch_pin_chunk){.obj = o, .index = k, .mode = HT_BATCH_PIN_READ};
        pin_now(&l);
        pthread_t reader, pin;
        ck_assert_int_eq(pthread_create(&reader, NULL, read_last, o), 0);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        ck_assert_int_eq(pthread_create(&pin, NULL, hold_one_more, o), 0);
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        unpin(&l, 0);
        pthread_join(reader, NULL);
        pthread_join(pin, NULL);
    }
    expect(o, 0, p, (SLOTS + 1) * MIB);
}

TEST(pressure_does_not_put_off_the_commit_timer)
{
    fresh(64, false);
    unmount_store();
    mount_as(.commit_ms = 100);
    struct ht_obj *busy = object(HT_CHUNK_BYTES, 5), *o = object(HT_SMALL_CHUNK_BYTES, 0);
    ck_assert_int_eq(ht_obj_truncate(busy, 6 * MIB), 0);
    struct ht_batch_pin l = {.store = s, .count = 6}, l2;
    for (unsigned i = 0; i < 6; i++)
        l.chunk[i] = (struct ht_batch_pin_chunk){.obj = busy, .index = i, .mode = HT_BATCH_PIN_UPDATE};
    l2 = l;
    struct ht_store_stats st;
    struct ht_obj_stat os;
    do { /* dirty, and held before they could be cleaned */
        pin_now(&l);
        unpin(&l, 63);
        pin_now(&l2);
        ht_store_stats(s, &st);
        if (st.dram_dirty_bytes > 4 * MIB)
            break;
        unpin(&l2, 0);
    } while (true);
    put_all(o, 0, (const uint8_t *)"durable", 7);
    unsigned tries = 0;
    do {
        nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
        ht_obj_stat(o, &os);
    } while (os.unpublished && ++tries < 30);
    ck_assert(!os.unpublished);
    unpin(&l2, 0);
}

/* Accepted writes can be written back, whatever becomes of the rewrite reserve and of the free space. */
TEST(a_rewrite_reserve_that_ends_or_is_exceeded_loses_nothing)
{
    for (int exceeded = 0; exceeded < 2; exceeded++) {
        fresh(24, false);
        struct ht_obj *o = object(HT_CHUNK_BYTES, 0), *other = object(HT_CHUNK_BYTES, 0);
        uint8_t *p = pattern(4 * MIB, 12);
        put_synced(o, 0, p, exceeded ? 2 * MIB : 4 * MIB);
        ck_assert_int_eq(ht_obj_rewrite_reserve(o, exceeded ? 2 * MIB : 4 * MIB), 0);
        uint64_t end = 0;
        while (ht_obj_write(other, end, p, MIB) > 0)
            end += MIB;
        ck_assert_int_eq(ht_obj_sync(other), 0);
        ck_assert_int_eq(ht_obj_truncate(other, end - 3 * MIB), 0);
        ck_assert_int_eq(ht_obj_sync(other), 0);
        put_all(o, MIB, p, 3 * MIB);
        if (!exceeded)
            ck_assert_int_eq(ht_obj_rewrite_reserve(o, 0), 0);
        end -= 3 * MIB;
        while (ht_obj_write(other, end, p, MIB) > 0)
            end += MIB;
        ck_assert_int_eq(ht_obj_sync(other), 0);
        ck_assert_int_eq(ht_obj_sync(o), 0);
        expect(o, MIB, p, 3 * MIB);
        put_objects(o, other);
        free(p);
        done();
    }
}

TEST(seeking_at_or_beyond_the_end_finds_nothing)
{
    fresh(16, false);
    struct ht_obj *o = written_object(HT_SMALL_CHUNK_BYTES, 0, (const uint8_t *)"x", 1);
    ck_assert_int_eq(ht_obj_seek(o, 0, true), 1);
    ck_assert_int_eq(ht_obj_seek(o, 1, true), -ENXIO);
    ck_assert_int_eq(ht_obj_seek(o, 100, true), -ENXIO);
    ck_assert_int_eq(ht_obj_truncate(o, HT_FILE_BYTES_MAX), 0);
    ck_assert_int_eq(ht_obj_seek(o, 70000, false), -ENXIO);
    ck_assert_int_eq(ht_obj_seek(o, 70000, true), 70000);
}

/* After an orderly unmount the store knows that nothing was written later. After a crash it does not. */
TEST(a_mount_after_an_unmount_reads_what_the_log_holds_and_not_its_region)
{
    enum { DEVICE_MIB = 4096, LITTLE_BYTES = 32 * MIB };

    fresh(DEVICE_MIB, false);
    uint64_t region = ht_store_super(s)->log_bytes, before;
    ck_assert_uint_gt(region, 2 * LITTLE_BYTES);
    uint8_t *p = pattern(4096, 1);
    struct ht_obj *o = written_object(HT_CHUNK_BYTES, 0, p, 4096);
    uint64_t oid = ht_obj_id(o);
    put_object(o);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(ht_store_unmount(s), 0);
        before = device_read_bytes();
        crash(); /* closed in order, that is */
        ck_assert_uint_lt(device_read_bytes() - before, LITTLE_BYTES);
    }
    before = device_read_bytes();
    crash();
    ck_assert_uint_gt(device_read_bytes() - before, 2 * region);
    o = get_object(oid);
    expect(o, 0, p, 4096);
}

RUN_TESTS("store", .teardown = fixture_end, .timeout_s = 60)
