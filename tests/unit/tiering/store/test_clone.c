/* SPDX-License-Identifier: Apache-2.0 */
/* Clones: several objects own stored content, until the last owner releases it and the log knows it. */
#include <sched.h>
#include <time.h>

#include "tiering/object/scope.h"
#include "tests/unit/tiering/store/fixture.h"

enum { SMALL = HT_SMALL_CHUNK_BYTES };

static void clone_all(struct ht_obj *src, struct ht_obj *dst)
{
    uint64_t size = ht_obj_size(src);

    ck_assert_int_eq(ht_obj_clone(src, 0, dst, 0, HT_FILE_BYTES_MAX), (ssize_t)size);
}

/* Puts other bytes wherever there is room, so that they overwrite space that is free by mistake. */
static void use_all_space(void)
{
    struct ht_obj *o = object(SMALL, 0);
    uint8_t *junk = pattern(4096, 99);
    uint64_t end = 0;

    while (ht_obj_write(o, end, junk, 4096) == 4096) {
        end += SMALL;
        if (end % (32 * SMALL) == 0)
            ck_assert_int_eq(ht_obj_writeback(o), 0);
    }
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    delete (o);
}

TEST(a_clone_has_the_same_bytes_and_takes_no_space)
{
    fresh(64, false);
    uint8_t *p = pattern(8 * MIB + 12345, 1);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 8 * MIB + 12345), *b = object(SMALL, 0);
    struct ht_store_stats before = stats();
    clone_all(a, b);
    ck_assert_uint_eq(ht_obj_chunk_bytes(b), HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    ck_assert_uint_eq(stats().available_bytes, before.available_bytes);
    ck_assert_uint_lt(stats().device_written_bytes - before.device_written_bytes, MIB);
    ck_assert_uint_eq(obj_stat(b).stored_bytes, obj_stat(a).stored_bytes);
    ht_obj_evict(a);
    ht_obj_evict(b);
    expect(b, 0, p, 8 * MIB + 12345);
    /* One that writes has its own; the other does not see it. */
    put_synced(b, 3 * MIB + 5, (const uint8_t *)"mine", 4);
    ck_assert_uint_eq(stats().available_bytes, before.available_bytes - MIB);
    expect(a, 0, p, 8 * MIB + 12345);
    memcpy(p + 3 * MIB + 5, "mine", 4);
    ht_obj_evict(b);
    expect(b, 0, p, 8 * MIB + 12345);
}

TEST(a_target_that_was_made_for_large_chunks_keeps_them)
{
    fresh(64, false);
    uint8_t *p = pattern(4 * MIB + 99, 1);
    struct ht_obj *a = synced_object(SMALL, 0, p, 4 * MIB + 99), *b = object(HT_CHUNK_BYTES, 0);
    clone_all(a, b);
    ck_assert_uint_eq(ht_obj_chunk_bytes(b), HT_CHUNK_BYTES);
    sync_and_evict(b);
    expect(b, 0, p, 4 * MIB + 99);
}

TEST(space_comes_back_with_the_last_owner_in_any_order)
{
    static const int order[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};

    fresh(32, false);
    uint8_t *p = pattern(3 * MIB, 2);
    struct ht_store_stats before = stats();
    for (int k = 0; k < 48; k++) {
        /* The owners are published or not, and there was a remount since or not. */
        bool publish = k / 6 & 1, again = k / 12 & 1, gone = k / 24 & 1;
        struct ht_obj *o[3] = {synced_object(HT_CHUNK_BYTES, 0, p, 3 * MIB), object(SMALL, 0), object(SMALL, 0)};
        clone_all(o[0], o[1]);
        clone_all(o[1], o[2]);
        for (int i = 1; publish && i < 3; i++)
            ck_assert_int_eq(ht_obj_sync(o[i]), 0);
        if (again) {
            uint64_t oid[] = {ht_obj_id(o[0]), ht_obj_id(o[1]), ht_obj_id(o[2])};
            remount();
            for (int i = 0; i < 3; i++)
                ck_assert_ptr_nonnull(o[i] = get_object(oid[i]));
        }
        for (int i = 0; i < 3; i++) {
            struct ht_obj *x = o[order[k % 6][i]];
            ck_assert_uint_ge(before.free_bytes - stats().free_bytes, 3 * MIB);
            for (int j = i; j < 3; j++) {
                ht_obj_evict(o[order[k % 6][j]]);
                expect(o[order[k % 6][j]], 0, p, 3 * MIB);
            }
            if (gone)
                ck_assert_int_eq(ht_obj_truncate(x, 0), 0);
            if (gone)
                ck_assert_int_eq(ht_obj_sync(x), 0);
            delete_durably(x);
        }
        ck_assert_uint_eq(stats().free_bytes, before.free_bytes);
        ck_assert_uint_eq(stats().pending_free_bytes, 0);
        ck_assert_uint_eq(stats().reserved_bytes, 0);
        ck_assert_uint_eq(stats().log.reserved_bytes, before.log.reserved_bytes);
    }
}

/*
 * The record that ends one owner is not durable, the other owner was never published: a crash
 * shows the first one again.
 */
TEST(what_a_record_named_is_not_used_again_before_its_end_is_durable)
{
    uint8_t *p = pattern(4 * MIB, 3);

    for (int round = 0; round < 8; round++) {
        int variant = round % 4;
        fresh(16, false);
        struct ht_obj *a = object(HT_CHUNK_BYTES, 0), *b = object(HT_CHUNK_BYTES, 9);
        put_all(a, 0, p, 4 * MIB);
        if (round < 4)
            ck_assert_int_eq(ht_obj_sync(a), 0);
        clone_all(a, b);
        ck_assert_int_eq(ht_obj_sync(a), 0); /* named by a record before it was shared, or only now */
        uint64_t oid = ht_obj_id(a), free_bytes = stats().free_bytes;
        struct ht_tx *tx;
        if (variant < 2) { /* ended by a deletion */
            delete (a);
        } else { /* by a publication; the last owner goes while that is still being collected, or later */
            ck_assert_int_eq(ht_obj_truncate(a, 0), 0);
            ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
            ht_obj_publish(a, tx);
            if (variant == 2)
                ck_assert_int_eq(ht_obj_truncate(b, 0), 0);
            ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
            put_object(a);
        }
        if (variant == 1)
            ck_assert_int_eq(ht_scope_abort(s, 9), 0);
        else
            ck_assert_int_eq(ht_obj_truncate(b, 0), 0);
        put_object(b);
        ck_assert_uint_eq(stats().free_bytes, free_bytes);
        ck_assert_uint_eq(stats().pending_free_bytes, 4 * MIB);
        /* As much as fits without it may be written; a crash then shows a as it was. */
        struct ht_obj *c = object(HT_CHUNK_BYTES, 0);
        uint8_t *q = pattern(MIB, 4);
        uint64_t end = 0;
        for (; stats().free_bytes >= MIB && stats().pending_free_bytes; end += MIB) {
            put_all(c, end, q, MIB);
            ck_assert_int_eq(ht_obj_writeback(c), 0);
        }
        crash();
        a = get_object(oid);
        ck_assert_ptr_nonnull(a);
        expect(a, 0, p, 4 * MIB);
        done();
    }
}

/* A caller that needs the space of an uncommitted transaction waits for that transaction, and then gets the space. */
static void *write_much(void *arg)
{
    uint8_t *p = pattern(MIB, 5);
    uint64_t end = 0;

    while (ht_obj_write(arg, end, p, MIB) == MIB) {
        ck_assert_int_eq(ht_obj_writeback(arg), 0);
        end += MIB;
    }
    return NULL;
}

TEST(space_of_an_open_transaction_is_waited_for)
{
    fresh(16, false);
    uint8_t *p = pattern(4 * MIB, 6);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 4 * MIB), *c = object(HT_CHUNK_BYTES, 0);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_obj_truncate(a, 0), 0);
    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
    ht_obj_publish(a, tx);
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, write_much, c), 0);
    while (stats().free_bytes >= MIB) /* then it waits */
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    pthread_join(thread, NULL);
    ck_assert_uint_lt(stats().available_bytes, MIB);
    ck_assert_uint_ge(ht_obj_size(c), 13 * MIB);
    ck_assert_int_eq(ht_obj_sync(c), 0);
}

/* Owners that the open transaction ended stay in the table: it must grow, however many there are. */
TEST(owners_ended_by_an_open_transaction_are_no_room_for_new_ones)
{
    enum { OLD = 48, NEW = 120 };

    fresh(64, false);
    uint8_t *p = pattern(NEW * SMALL, 8);
    struct ht_obj *a = synced_object(SMALL, 0, p, OLD * SMALL), *b = object(SMALL, 0),
                  *c = synced_object(SMALL, 0, p, NEW * SMALL), *d = object(SMALL, 0);
    struct ht_tx *tx;
    clone_all(a, b);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    ck_assert_int_eq(ht_obj_truncate(a, 0), 0);
    ck_assert_int_eq(ht_tx_begin(s, 16384, &tx), 0);
    ht_obj_publish(a, tx);
    for (uint64_t i = 0; i < NEW; i++)
        ck_assert_int_eq(ht_obj_clone(c, i * SMALL, d, i * SMALL, SMALL), SMALL);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    sync_and_evict(d);
    expect(d, 0, p, NEW * SMALL);
}

TEST(a_remount_counts_the_owners)
{
    fresh(16, false);
    uint8_t *p = pattern(3 * MIB, 7);
    struct ht_obj *o[3] = {synced_object(HT_CHUNK_BYTES, 0, p, 3 * MIB), object(SMALL, 0), object(SMALL, 0)};
    uint64_t oid[] = {ht_obj_id(o[0]), ht_obj_id(o[1]), ht_obj_id(o[2])};
    clone_all(o[0], o[1]);
    clone_all(o[0], o[2]);
    ck_assert_int_eq(ht_obj_truncate(o[2], 2 * MIB + 10), 0); /* sees less of the last chunk */
    ck_assert_int_eq(ht_store_commit(s), 0);
    uint64_t free_bytes = stats().free_bytes;
    ck_assert_int_eq(ht_store_checkpoint(s), 0);
    crash();
    ck_assert_uint_eq(ht_store_conflicts(s, NULL, 0), 0);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    for (int i = 0; i < 3; i++) {
        ck_assert_ptr_nonnull(o[i] = get_object(oid[i]));
        if (i == 2)
            break;
        delete_durably(o[i]);
        ck_assert_uint_eq(stats().free_bytes, free_bytes);
        use_all_space();
        ck_assert_int_eq(ht_store_commit(s), 0);
    }
    expect(o[2], 0, p, 2 * MIB + 10);
    crash();
    o[2] = get_object(oid[2]);
    expect(o[2], 0, p, 2 * MIB + 10);
    delete_durably(o[2]);
    ck_assert_uint_eq(stats().free_bytes, free_bytes + 3 * MIB);
}

TEST(an_unpublished_clone_is_gone_after_a_crash_and_a_published_one_is_not)
{
    fresh(16, false);
    uint8_t *p = pattern(2 * MIB, 8);
    /* The source is dirty and never published: only the clone is in the log. */
    struct ht_obj *a = object(HT_CHUNK_BYTES, 0), *b = object(HT_CHUNK_BYTES, 0), *c = object(HT_CHUNK_BYTES, 0);
    uint64_t oid[3] = {ht_obj_id(a), ht_obj_id(b), ht_obj_id(c)};
    put_all(a, 0, p, 2 * MIB);
    clone_all(a, b);
    ck_assert_uint_eq(obj_stat(a).dirty_bytes, 0);
    clone_all(a, c);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    crash();
    ck_assert_ptr_null(get_object(oid[0]));
    ck_assert_ptr_null(get_object(oid[2]));
    b = get_object(oid[1]);
    use_all_space();
    expect(b, 0, p, 2 * MIB);
}

TEST(an_unpublished_reference_that_is_shared_is_not_overwritten)
{
    fresh(32, false);
    uint8_t *p = pattern(2 * MIB, 9), *q = pattern(2 * MIB, 10);
    struct ht_obj *a = object(HT_CHUNK_BYTES, 9), *b = object(HT_CHUNK_BYTES, 9);
    put_all(a, 0, p, 2 * MIB);
    ck_assert_int_eq(ht_obj_rewrite_reserve(a, 2 * MIB), 0);
    clone_all(a, b);
    struct ht_batch_pin l = {.store = s, .count = 2};
    for (int staged = 0; staged < 2; staged++) {
        struct ht_obj *x = synced_object(HT_CHUNK_BYTES, 0, q, 2 * MIB); /* fills the tier */
        for (unsigned i = 0; staged && i < 6; i++)
            put_all(x, i * MIB, q, MIB);
        ht_obj_evict(a);
        ht_obj_evict(b);
        for (unsigned i = 0; i < 2; i++)
            l.chunk[i] = (struct ht_batch_pin_chunk){.obj = a, .index = i, .mode = HT_BATCH_PIN_OVERWRITE};
        pin_now(&l);
        for (unsigned i = 0; i < 2; i++)
            memcpy(l.chunk[i].data, q + i * MIB, MIB);
        unpin(&l, 3);
        ck_assert_int_eq(ht_scope_writeback(s, 9), 0);
        use_all_space();
        ht_obj_evict(a);
        expect(b, 0, p, 2 * MIB);
        expect(a, 0, q, 2 * MIB);
        delete_durably(x);
    }
    publish_scope(9);
    ht_obj_evict(a);
    ht_obj_evict(b);
    expect(a, 0, q, 2 * MIB);
    expect(b, 0, p, 2 * MIB);
}

/*
 * Sharing takes nothing from preallocated space: neither that of the source, nor that of the target, nor space
 * preallocated later.
 */
TEST(a_rewrite_reserve_holds_for_what_is_shared)
{
    uint8_t *p = pattern(3 * MIB, 11);

    for (int variant = 0; variant < 3; variant++) {
        fresh(24, false);
        struct ht_obj *a = object(HT_CHUNK_BYTES, 9), *b = object(HT_CHUNK_BYTES, 0), *g = variant == 1 ? b : a;
        uint64_t scope = variant == 1 ? 0 : 9;
        put_all(a, 0, p, 3 * MIB);
        publish_scope(9);
        if (variant < 2)
            ck_assert_int_eq(ht_obj_rewrite_reserve(g, 3 * MIB), 0);
        clone_all(a, b);
        ck_assert_int_eq(ht_obj_sync(b), 0);
        if (variant == 2)
            ck_assert_int_eq(ht_obj_rewrite_reserve(g, 3 * MIB), 0);
        struct ht_obj *filler = object(HT_CHUNK_BYTES, 0);
        uint64_t end = 0;
        while (ht_obj_write(filler, end, p, MIB) > 0)
            end += MIB;
        ck_assert_int_eq(ht_obj_sync(filler), 0);
        for (int round = 0; round < 6; round++) {
            put_all(g, 0, p, 3 * MIB);
            ck_assert_int_eq(scope ? ht_scope_writeback(s, scope) : ht_obj_writeback(g), 0);
            if (round % 2)
                publish_scope(scope);
        }
        ck_assert_int_eq(ht_obj_rewrite_reserve(g, 0), 0);
        done();
    }
}

TEST(a_full_store_refuses_to_share_what_has_a_rewrite_reserve)
{
    fresh(16, false);
    uint8_t *p = pattern(3 * MIB, 12);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 3 * MIB), *b = object(HT_CHUNK_BYTES, 0),
                  *plain = synced_object(HT_CHUNK_BYTES, 0, p, MIB), *filler = object(SMALL, 0);
    ck_assert_int_eq(ht_obj_rewrite_reserve(a, 3 * MIB), 0);
    uint64_t end = 0;
    while (ht_obj_write(filler, end, p, SMALL) == SMALL)
        end += SMALL;
    ck_assert_int_eq(ht_obj_sync(filler), 0);
    struct ht_store_stats before = stats();
    ck_assert_int_eq(ht_obj_clone(a, 0, b, 0, 3 * MIB), -ENOSPC);
    ck_assert_uint_eq(ht_obj_size(b), 0);
    ck_assert_uint_eq(stats().available_bytes, before.available_bytes);
    ck_assert_uint_eq(stats().log.reserved_bytes, before.log.reserved_bytes);
    clone_all(plain, b); /* no preallocation, no space */
    expect(b, 0, p, MIB);
    ck_assert_uint_eq(stats().available_bytes, before.available_bytes);
}

TEST(an_aborted_scope_gives_its_clones_back)
{
    fresh(32, false);
    uint8_t *p = pattern(2 * MIB, 13), *q = pattern(2 * MIB, 14);
    struct ht_obj *out = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB), *in = object(HT_CHUNK_BYTES, 9), *two;
    put_all(in, 0, q, 2 * MIB);
    publish_scope(9);
    struct ht_store_stats before = stats();
    clone_all(out, in); /* into the scope */
    two = object(SMALL, 0);
    clone_all(in, two); /* and out again, before it was published */
    ck_assert_int_eq(ht_scope_abort(s, 9), 0);
    ht_obj_evict(in);
    expect(in, 0, q, 2 * MIB);
    expect(two, 0, p, 2 * MIB);
    delete_durably(out);
    use_all_space();
    ht_obj_evict(two);
    expect(two, 0, p, 2 * MIB);
    delete_durably(two);
    ck_assert_uint_eq(stats().free_bytes, before.free_bytes + 2 * MIB);
}

TEST(edges_holes_and_other_chunk_sizes_are_right)
{
    fresh(64, false);
    enum { N = 4 * MIB };
    uint8_t *p = pattern(N, 15), *want = test_alloc(N), *old = pattern(N, 16);
    static const uint32_t sizes[] = {SMALL, HT_CHUNK_BYTES};
    uint64_t rnd = 5;
    for (int k = 0; k < 80; k++) {
        struct ht_obj *a = object(sizes[k & 1], 0), *b = object(sizes[k >> 1 & 1], 0);
        uint64_t cut = k % 5 == 0 ? N - 77777 : N;
        put_all(a, 0, p, cut);
        ck_assert_int_eq(ht_obj_punch(a, MIB, 3 * SMALL), 0);
        memset(p + MIB, 0, 3 * SMALL);
        uint64_t have = k % 3 == 0 ? 0 : k % 3 == 1 ? N : MIB + 5;
        if (have)
            put_all(b, 0, old, have);
        memset(want, 0, N);
        memcpy(want, old, have);
        if (k & 4)
            ck_assert_int_eq(ht_store_commit(s), 0);
        rnd = rnd * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t align = k & 8 ? SMALL : 1, src = (rnd >> 20) % N / align * align;
        uint64_t dst = k & 16 ? src : (rnd >> 33) % N / align * align;
        uint64_t len = ht_min_u64(1 + (rnd >> 40) % N, N - dst), n = src < cut ? ht_min_u64(len, cut - src) : 0;
        ck_assert_int_eq(ht_obj_clone(a, src, b, dst, len), (ssize_t)n);
        memcpy(want + dst, p + src, n);
        uint64_t size = n ? ht_max_u64(have, dst + n) : have;
        ck_assert_uint_eq(ht_obj_size(b), size);
        expect(b, 0, want, size);
        sync_and_evict(b);
        expect(b, 0, want, size);
        expect(a, 0, p, cut);
        delete (a);
        delete (b);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(stats().chunks, 0);
}

TEST(a_sparse_source_of_any_size_is_cloned_at_once)
{
    fresh(32, false);
    struct ht_obj *a = object(SMALL, 0), *b = object(SMALL, 0);
    uint64_t far = HT_FILE_BYTES_MAX - SMALL;
    put_all(a, far, (const uint8_t *)"end", 3);
    put_all(b, 5 * MIB, (const uint8_t *)"old", 3);
    clone_all(a, b);
    ck_assert_uint_eq(ht_obj_size(b), far + 3);
    ck_assert_int_eq(ht_obj_seek(b, 0, false), (int64_t)far);
    expect(b, far, (const uint8_t *)"end", 3);
    ck_assert_uint_lt(stats().meta_bytes, 200000);
}

TEST(the_last_partial_chunk_is_shared_unless_something_is_behind_it)
{
    fresh(32, false);
    uint8_t *p = pattern(2 * SMALL, 17);
    struct ht_obj *a = synced_object(SMALL, 0, p, SMALL + 1000), *b = object(SMALL, 0),
                  *c = synced_object(SMALL, 0, p + 9, 2 * SMALL - 9);
    uint64_t available = stats().available_bytes;
    clone_all(a, b);
    ck_assert_uint_eq(stats().available_bytes, available);
    clone_all(a, c);
    ck_assert_uint_lt(stats().available_bytes, available);
    expect(c, 0, p, SMALL + 1000);
    put_all(b, SMALL + 1000, p, 10); /* appending is not seen by the others */
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_obj_evict(a);
    ht_obj_evict(c);
    expect(a, 0, p, SMALL + 1000);
    expect(c, 0, p, SMALL + 1000);
}

TEST(what_cannot_be_cloned_is_refused)
{
    fresh(32, false);
    uint8_t *p = pattern(4 * SMALL, 18);
    struct ht_obj *a = synced_object(SMALL, 0, p, 4 * SMALL), *b = object(SMALL, 0);
    ck_assert_int_eq(ht_obj_clone(a, 0, a, 100, 101), -EINVAL);
    ck_assert_int_eq(ht_obj_clone(a, SMALL, a, 0, SMALL + 1), -EINVAL);
    ck_assert_int_eq(ht_obj_clone(a, 0, a, 0, 1), -EINVAL);
    ck_assert_int_eq(ht_obj_clone(a, 0, a, SMALL, SMALL), SMALL); /* beside each other */
    expect(a, SMALL, p, SMALL);
    ck_assert_int_eq(ht_obj_clone(a, 4 * SMALL, b, 0, 1), 0);
    ck_assert_int_eq(ht_obj_clone(a, UINT64_MAX, b, 0, 1), 0);
    ck_assert_int_eq(ht_obj_clone(a, 0, b, HT_FILE_BYTES_MAX, 1), -EFBIG);
    ck_assert_int_eq(ht_obj_clone(a, 0, b, UINT64_MAX, 1), -EFBIG);
    ck_assert_uint_eq(ht_obj_size(b), 0);
    remount();
    unmount_store();
    mount_with(false, true);
    a = get_object(2);
    ck_assert_int_eq(ht_obj_clone(a, 0, a, SMALL, SMALL), -EROFS);
}

TEST(scratch_is_copied_not_shared)
{
    fresh(32, false);
    struct ht_obj *x;
    struct ht_obj_attr attr = {
        .oid = ht_store_new_id(s), .chunk_bytes = HT_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH, .scope = 9};
    ck_assert_int_eq(ht_obj_create(s, &attr, &x), 0);
    hold_object(x);
    uint8_t *p = pattern(2 * MIB, 19);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB), *b = object(HT_CHUNK_BYTES, 0);
    clone_all(a, x);
    clone_all(x, b);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    ht_obj_scratch_drop(x, 0, UINT64_MAX);
    delete_durably(a);
    ck_assert_uint_eq(obj_stat(b).stored_bytes, 2 * MIB);
    expect(b, 0, p, 2 * MIB);
}

TEST(what_cannot_be_written_back_is_copied_as_it_is)
{
    fresh(32, false);
    uint8_t *p = pattern(2 * MIB, 22), *q = pattern(2 * MIB, 23);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, 2 * MIB), *b = object(HT_CHUNK_BYTES, 0);
    put_all(a, 0, q, 2 * MIB);
    dev_fail(dev, HT_IO_WRITE, 1, true);
    clone_all(a, b);
    dev_fail(dev, HT_IO_WRITE, 0, false);
    expect(b, 0, q, 2 * MIB);
    ck_assert_int_eq(obj_stat(a).error, -EIO); /* the source reports it */
    ck_assert_int_eq(obj_stat(b).error, 0);
    sync_and_evict(b);
    expect(b, 0, q, 2 * MIB);
}

/* In pieces of one block each. */
TEST(chunks_in_many_pieces_are_shared_too)
{
    fresh(16, false);
    static struct ht_obj *o[4000];
    unsigned n = 0;
    uint8_t *p = pattern(MIB, 20);
    while (n < 4000 && (o[n] = object(SMALL, 0)) && ht_obj_write(o[n], 0, p, 4096) == 4096)
        n++;
    ck_assert_int_eq(ht_store_commit(s), 0);
    for (unsigned i = 0; i < n; i += 2)
        delete (o[i]);
    ck_assert_int_eq(ht_store_commit(s), 0);
    struct ht_obj *filler = object(SMALL, 0); /* an extent in one piece */
    uint64_t end = 0;
    while (stats().available_bytes > 4 * MIB && ht_obj_write(filler, end, p, SMALL) == SMALL)
        end += SMALL;
    ck_assert_int_eq(ht_store_commit(s), 0);
    uint64_t free_bytes = stats().free_bytes;
    for (int k = 0; k < 4; k++) {
        struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, MIB), *b = object(SMALL, 0);
        uint64_t oid[2] = {ht_obj_id(a), ht_obj_id(b)};
        clone_all(a, b);
        ck_assert_int_eq(ht_store_commit(s), 0);
        if (k & 2) {
            crash();
            ck_assert_uint_eq(ht_store_conflicts(s, NULL, 0), 0);
            a = get_object(oid[0]);
            b = get_object(oid[1]);
        }
        delete (k & 1 ? a : b);
        ck_assert_int_eq(ht_store_commit(s), 0);
        expect(k & 1 ? b : a, 0, p, MIB);
        delete (k & 1 ? b : a);
        ck_assert_int_eq(ht_store_commit(s), 0);
        ck_assert_uint_eq(stats().free_bytes, free_bytes);
    }
}

TEST(remembering_owners_costs_what_is_shared)
{
    fresh(32, false);
    uint8_t *p = pattern(8 * MIB, 21);
    struct ht_obj *a = synced_object(SMALL, 0, p, 8 * MIB);
    uint64_t meta = 0;
    for (int k = 0; k < 60; k++) {
        struct ht_obj *b = object(SMALL, 0);
        clone_all(a, b);
        ck_assert_int_eq(ht_obj_sync(b), 0);
        put_all(a, 0, p, 8 * MIB); /* a has its own again */
        ck_assert_int_eq(ht_obj_sync(a), 0);
        delete_durably(b);
        if (k == 5)
            meta = stats().meta_bytes;
    }
    ck_assert_uint_eq(stats().meta_bytes, meta);
}

struct cloner {
    pthread_t thread;
    struct ht_obj *from, *to;
    unsigned seed;
};

static void *clone_and_write(void *arg)
{
    struct cloner *c = arg;
    uint8_t byte[SMALL];

    for (unsigned i = 0; i < 60; i++) {
        uint64_t size = ht_obj_size(c->from);
        ssize_t n = ht_obj_clone(c->from, 0, c->to, 0, size);
        ck_assert(n >= 0 || n == -ENOSPC);
        memset(byte, (int)(c->seed + i), sizeof(byte));
        n = ht_obj_write(c->to, (uint64_t)((i * 7 + c->seed) % 24) * SMALL, byte, sizeof(byte));
        ck_assert(n > 0 || n == -ENOSPC);
        if (i % 5 == c->seed % 5)
            ck_assert_int_eq(ht_obj_sync(c->to), 0);
        if (i % 11 == c->seed)
            ck_assert_int_eq(ht_obj_truncate(c->to, 10 * SMALL), 0);
        /* Every chunk is of one byte: none is torn. */
        for (unsigned k = 0; k < 24; k++) {
            n = ht_obj_read(c->to, (uint64_t)k * SMALL, byte, sizeof(byte));
            ck_assert_int_ge(n, 0);
            if (n > 1)
                ck_assert_int_eq(memcmp(byte, byte + 1, (size_t)n - 1), 0);
        }
    }
    return NULL;
}

TEST(cloning_in_a_circle_while_all_write_disturbs_nobody)
{
    fresh(32, true);
    enum { N = 4 };
    struct cloner c[N];
    struct ht_store_stats before = stats();
    struct ht_obj *o[N];
    uint8_t *p = test_alloc(24 * SMALL);
    for (unsigned i = 0; i < N; i++) {
        o[i] = object(SMALL, i == 3 ? 9 : 0);
        put_all(o[i], 0, p, 24 * SMALL);
    }
    for (unsigned i = 0; i < N; i++) {
        c[i] = (struct cloner){.from = o[i], .to = o[(i + 1) % N], .seed = i};
        ck_assert_int_eq(pthread_create(&c[i].thread, NULL, clone_and_write, &c[i]), 0);
    }
    for (unsigned i = 0; i < N; i++)
        pthread_join(c[i].thread, NULL);
    publish_scope(9);
    for (unsigned i = 0; i < N; i++)
        delete (o[i]);
    publish_scope(9);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(stats().free_bytes, before.free_bytes);
    ck_assert_uint_eq(stats().available_bytes, before.available_bytes);
}

/* A run goes as far as it is known: a caller asks again at its end. */
static uint64_t same_until(struct ht_obj *a, struct ht_obj *b, uint64_t off, bool want)
{
    uint64_t end = off, next;

    while (end != UINT64_MAX && ht_obj_same(a, b, end, &next) == want)
        end = next;
    return end;
}

TEST(objects_are_compared_by_their_places)
{
    enum { N = 3000 }; /* more than one run has */
    uint64_t end;

    fresh(64, false);
    uint8_t *p = pattern(MIB, 1);
    struct ht_obj *a = object(SMALL, 0), *b = object(SMALL, 0), *large = synced_object(HT_CHUNK_BYTES, 0, p, MIB);
    for (uint64_t i = 0; i < N; i++)
        put_all(a, i * SMALL, p + i, 100);
    ck_assert_int_eq(ht_obj_truncate(a, N * SMALL), 0);
    ck_assert_int_eq(ht_obj_sync(a), 0);
    ck_assert(!ht_obj_same(a, b, 0, &end) && end > 0);
    clone_all(a, b);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    ck_assert_uint_eq(same_until(a, b, 0, true), UINT64_MAX);
    put_all(b, 1500 * SMALL + 7, p, 1);
    put_all(b, 1502 * SMALL, p + 1502, 1); /* equal bytes in another place */
    ck_assert_int_eq(ht_obj_sync(b), 0);
    uint64_t before = stats().device_read_bytes;
    ck_assert_uint_eq(same_until(a, b, 0, true), 1500 * SMALL);
    ck_assert_uint_eq(same_until(a, b, 1500 * SMALL + 9, false), 1501 * SMALL);
    ck_assert_uint_eq(same_until(a, b, 1501 * SMALL, true), 1502 * SMALL);
    ck_assert_uint_eq(same_until(a, b, 1503 * SMALL, true), UINT64_MAX);
    ck_assert_uint_eq(same_until(a, b, HT_FILE_BYTES_MAX, true), UINT64_MAX);
    ck_assert_uint_eq(stats().device_read_bytes, before);
    ck_assert_int_eq(ht_obj_truncate(b, 2000 * SMALL + 5), 0);
    ck_assert_int_eq(ht_obj_sync(b), 0);
    ck_assert_uint_eq(same_until(a, b, 1503 * SMALL, true), 2000 * SMALL);
    ck_assert_uint_eq(same_until(a, b, 2000 * SMALL, false), N * SMALL);
    ck_assert(!ht_obj_same(a, large, 0, &end) && end == UINT64_MAX); /* chunks of another size */
}

struct waiting_clone {
    struct ht_obj *src, *dst;
    ssize_t rc;
};

static void *clone_main(void *arg)
{
    struct waiting_clone *w = arg;

    w->rc = ht_obj_clone(w->src, 0, w->dst, MIB, MIB);
    return NULL;
}

/* Another thread fixes smaller chunks for the target while the clone waits for a publication. */
TEST(a_clone_that_waited_sees_the_chunks_that_its_target_has)
{
    struct ht_scope_changes c;
    pthread_t thread;

    fresh(64, false);
    uint8_t *p = pattern(MIB, 1);
    struct ht_obj *a = synced_object(HT_CHUNK_BYTES, 0, p, MIB), *b = object(SMALL, 9);
    struct waiting_clone w = {.src = a, .dst = b};
    ht_store_lock(s);
    ht_scope_changes_begin(&c, s, 9);
    ht_store_unlock(s);
    ck_assert_int_eq(pthread_create(&thread, NULL, clone_main, &w), 0);
    for (bool waits = false; !waits; sched_yield()) {
        ht_store_lock(s);
        waits = c.awaited;
        ht_store_unlock(s);
    }
    ck_assert_int_eq(ht_obj_set_chunk_bytes(b, SMALL), 0);
    ht_store_lock(s);
    ht_scope_changes_end(&c);
    ht_store_unlock(s);
    pthread_join(thread, NULL);
    ck_assert_int_eq(w.rc, MIB);
    ck_assert_uint_eq(ht_obj_chunk_bytes(b), SMALL);
    expect(b, MIB, p, MIB);
    publish_scope(9);
    ht_obj_evict(b);
    expect(b, MIB, p, MIB);
    ht_store_verify(s, false);
}

RUN_TESTS("clones", .teardown = fixture_end, .timeout_s = 300)
