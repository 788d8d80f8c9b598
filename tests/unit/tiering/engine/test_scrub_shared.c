/* SPDX-License-Identifier: Apache-2.0 */
/* test_scrub_shared.c - bad bytes of several owners get another place, for all of them if that can be. */

#include "tiering/object/chunk.h"
#include "tiering/object/ref.h"

#include "tests/unit/tiering/engine/scrub.h"

#include "tiering/data/chunk_io.h"
#include "tiering/engine/scrub_chunk.h"

static struct ht_obj *clone_of(struct ht_obj *o, uint64_t n, uint64_t scope)
{
    struct ht_obj *other = object(BIG, scope);

    ck_assert_int_eq(ht_obj_clone(o, 0, other, 0, n), (ssize_t)n);
    return other;
}

static bool is_same_place(struct ht_obj *a, struct ht_obj *b)
{
    ht_store_lock(s);
    bool same = ht_ref_same_place(&ht_chunk_find(a, 0)->pub, &ht_chunk_find(b, 0)->pub);
    ht_store_unlock(s);
    return same;
}

/* Whichever has the image, and whichever scrub finds first. */
TEST_LOOP(all_owners_of_bad_bytes_move_together, 5)
{
    enum { OWNERS = 5 };
    struct ht_obj *owner[OWNERS];
    uint64_t oid[OWNERS], lsn;
    uint8_t *p = pattern(BIG, 1);

    owner[0] = stored(p, BIG, 0);
    for (unsigned i = 1; i < OWNERS; i++)
        owner[i] = clone_of(owner[0], BIG, i == 3 ? SCOPE : 0);
    ck_assert_int_eq(ht_scope_commit(s, SCOPE, &lsn), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_obj_evict(owner[0]);
    uint64_t free_bytes = stats().free_bytes;
    expect(owner[_i], 0, p, BIG); /* its image */
    damage(place_of(p, BIG) + 1);
    expect_found(1, 1);
    expect_found(0, 0);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    for (unsigned i = 0; i < OWNERS; i++) {
        ck_assert(is_same_place(owner[0], owner[i]));
        oid[i] = ht_obj_id(owner[i]);
        put_object(owner[i]);
    }
    ht_store_verify(s, true);
    crash();
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    for (unsigned i = 0; i < OWNERS; i++) {
        owner[i] = get_object(oid[i]);
        expect(owner[i], 0, p, BIG);
        put_object(owner[i]);
    }
}

/* An owner that shows more than the image has, or that is newer, does not keep the others from a repair. */
TEST_LOOP(bad_bytes_stay_with_owners_that_cannot_move, 2)
{
    enum { CUT = 300000 };
    uint8_t *p = pattern(BIG, 1), byte;
    struct ht_obj *o = stored(p, BIG, 0), *cut = clone_of(o, BIG, 0), *other = clone_of(o, BIG, 0);

    ck_assert_int_eq(ht_store_commit(s), 0);
    if (_i == 0)
        ck_assert_int_eq(ht_obj_truncate(o, CUT), 0);
    ck_assert_int_eq(ht_obj_truncate(cut, CUT), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_obj_evict(o);
    ht_obj_evict(cut);
    if (_i == 0) {
        expect(cut, 0, p, CUT); /* other shows more */
    } else {
        expect(o, 0, p, BIG);
        ht_obj_evict(other);
        put_all(other, BIG - 1, &(uint8_t){7}, 1); /* it reads the rest */
        ck_assert_int_eq(ht_obj_writeback(other), 0);
    }
    damage(place_of(p, BIG) + 1);
    struct ht_scrub_stats st = scrub();
    ck_assert_uint_ge(st.run_repaired, 1);
    ck_assert(is_same_place(o, cut));
    ck_assert(!is_same_place(o, other));
    ht_store_verify(s, true);
    ht_obj_evict(cut);
    ht_obj_evict(o);
    expect(cut, 0, p, CUT);
    expect(o, 0, p, _i ? BIG : CUT);
    if (_i == 0)
        ck_assert_int_eq(ht_obj_read(other, 0, &byte, 1), -EIO);
    else
        expect(other, 0, p, BIG - 1);
}

/* A thread holds another owner all the time: scrub does not wait for ever, and mends the one that it can. */
TEST(a_held_owner_of_bad_bytes_is_not_waited_for_for_ever)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0), *other = clone_of(o, BIG, 0);

    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_store_lock(s);
    struct ht_move_owner owner[2] = {{o->oid, 0}, {other->oid, 0}};
    struct ht_move m = {.was = ht_chunk_find(o, 0)->pub, .obj = o, .owner = owner, .owners = 2};
    struct ht_chunk *c = ht_chunk_find(other, 0);
    ht_chunk_lock_shared(s, c);
    ht_store_unlock(s);
    uint64_t lsn;
    uint8_t *bytes = aligned_alloc(HT_BLOCK_BYTES, BIG);
    memcpy(bytes, p, BIG);
    ck_assert_int_eq(ht_move_write_raw(&m, ht_store_ring(s), bytes, BIG), 0);
    ck_assert_int_eq(ht_move_publish_bad(s, &m, &lsn), 0);
    ck_assert(!is_same_place(o, other));
    m = (struct ht_move){.was = ht_chunk_find(other, 0)->pub, .obj = other, .owner = &owner[1], .owners = 1};
    ck_assert_int_eq(ht_move_write_raw(&m, ht_store_ring(s), bytes, BIG), 0);
    ck_assert_int_eq(ht_move_publish_bad(s, &m, &lsn), -EAGAIN);
    free(bytes);
    ht_store_lock(s);
    ht_chunk_unlock_shared(other, c, 0);
    ht_store_unlock(s);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_store_verify(s, true);
    ht_obj_evict(o);
    ht_obj_evict(other);
    expect(o, 0, p, BIG);
    expect(other, 0, p, BIG);
}

/* Each owner is found, in each run. But the bytes are read twice, and not for each of them. */
TEST(lost_bytes_are_found_for_each_owner)
{
    enum { OWNERS = 40 };
    struct ht_obj *owner[OWNERS];
    uint8_t *p = pattern(BIG, 1);

    owner[0] = stored(p, BIG, 0);
    for (unsigned i = 1; i < OWNERS; i++)
        owner[i] = clone_of(owner[0], BIG, 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_obj_evict(owner[0]);
    uint64_t place = place_of(p, BIG) + 1;
    damage(place);
    for (unsigned run = 0; run < 2; run++) {
        uint64_t read_bytes = stats().device_read_bytes;
        expect_found(OWNERS, 0);
        ck_assert_uint_lt(stats().device_read_bytes - read_bytes, 3 * BIG);
    }
    damage(place); /* the device has the right bytes again */
    expect(owner[OWNERS - 1], 0, p, BIG);
    damage(place);
    expect_found(1, 1); /* this image has them */
    for (unsigned i = 0; i < OWNERS; i++) {
        ck_assert(is_same_place(owner[0], owner[i]));
        expect(owner[i], 0, p, BIG);
        put_object(owner[i]);
    }
}

static _Atomic bool stop; /* the run should end */

/* The first owner's bytes are looked at. */
static struct ht_suspect suspect(struct ht_move_owner owner[], unsigned owners)
{
    struct ht_suspect x = {.s = s, .owner = owner, .owners = owners, .stop = &stop, .repair = true};

    x.ring = ht_store_ring(s);
    ht_store_lock(s);
    ck_assert_int_eq(ht_ref_copy(&x.ref, &ht_chunk_find_in(s, owner[0].oid, 0, &x.obj)->pub), 0);
    ht_store_unlock(s);
    return x;
}

/* It may be one of very many in a large store. */
TEST_LOOP(a_run_that_stops_looks_for_no_other_owners, 2)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0), *other = clone_of(o, BIG, 0);
    struct ht_move_owner owner[] = {{o->oid, 0}, {other->oid, 0}};

    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_obj_evict(o);
    if (_i)
        expect(other, 0, p, BIG); /* its image */
    damage(place_of(p, BIG) + 1);
    for (unsigned stops = 2; stops-- > 0;) {
        struct ht_suspect x = suspect(owner, 2);
        x.buf = aligned_alloc(HT_BLOCK_BYTES, BIG);
        stop = stops;
        ck_assert_int_eq(ht_suspect_read(&x), HT_SUSPECT_BAD);
        ck_assert_int_eq(ht_suspect_check(&x, 0), HT_SUSPECT_BAD);
        ck_assert_int_eq(x.repair_error, stops ? -ECANCELED : _i ? 0 : -ENODATA);
        free(x.buf);
        ht_ref_forget(&x.ref);
    }
}

/* The run has found no image of the bytes, and then an owner gets one. */
TEST(a_late_image_of_lost_bytes_mends_them)
{
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0), *late = clone_of(o, BIG, 0);
    struct ht_move_owner owner[] = {{o->oid, 0}, {late->oid, 0}};

    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_obj_evict(o);
    uint64_t place = place_of(p, BIG) + 1;
    damage(place);
    stop = false;
    struct ht_suspect x = suspect(owner, 2);
    ck_assert_int_eq(ht_suspect_check(&x, 0), HT_SUSPECT_BAD);
    ck_assert_int_eq(x.repair_error, -ENODATA);
    damage(place); /* the device has the right bytes again */
    expect(late, 0, p, BIG);
    damage(place);
    ck_assert_int_eq(ht_suspect_check(&x, 0), HT_SUSPECT_BAD); /* it has none, and looks for none again */
    ck_assert_int_eq(x.repair_error, -ENODATA);
    ck_assert_int_eq(ht_suspect_check(&x, 1), HT_SUSPECT_BAD);
    ck_assert_int_eq(x.repair_error, 0);
    ht_ref_forget(&x.ref);
    ck_assert(is_same_place(o, late));
    ht_obj_evict(late);
    expect(o, 0, p, BIG);
}

/* They follow each other in parts. */
TEST(owners_of_bad_bytes_without_room_in_the_log_move_nevertheless)
{
    enum { OWNERS = 400 };
    uint8_t *p = pattern(SMALL, 1);

    done();
    fresh_with_log(32, HT_LOG_BYTES_MIN, true);
    struct ht_obj *first = synced_object(SMALL, 0, p, SMALL);
    struct ht_obj *o = object(SMALL, 0);
    for (uint64_t i = 0; i < OWNERS; i++)
        ck_assert_int_eq(ht_obj_clone(first, 0, o, i * SMALL, SMALL), SMALL);
    ck_assert_int_eq(ht_store_commit(s), 0);
    uint64_t aside = crowd_log(OWNERS * (size_t)ht_move_record_bytes(&(struct ht_ref){0}));
    uint64_t oid = ht_obj_id(o), free_bytes = stats().free_bytes;
    expect(first, 0, p, SMALL); /* its image */
    damage(place_of(p, SMALL) + 1);
    expect_found(1, 1);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    ck_assert(is_same_place(first, o));
    ht_store_log_unreserve(s, aside);
    ht_store_verify(s, true);
    crash();
    ck_assert_uint_eq(stats().free_bytes, free_bytes);
    o = get_object(oid);
    for (uint64_t i = 0; i < OWNERS; i++)
        expect(o, i * SMALL, p, SMALL);
    expect_found(0, 0);
}

static void *check(void *arg)
{
    struct ht_suspect *x = arg;

    x->ring = ht_store_ring(s);
    ck_assert_int_eq(ht_suspect_check(x, 0), HT_SUSPECT_BAD);
    return NULL;
}

/* One owner with an image could not mend this one, and the run stops before it asks the next. */
TEST(a_run_that_stops_asks_no_more_owners)
{
    enum { CUT = 300000, READS_BEFORE = 1 };
    uint8_t *p = pattern(BIG, 1);
    struct ht_obj *o = stored(p, BIG, 0), *cut = clone_of(o, BIG, 0);
    struct ht_move_owner owner[] = {{o->oid, 0}, {cut->oid, 0}};
    pthread_t thread;

    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_int_eq(ht_obj_truncate(cut, CUT), 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_obj_evict(o);
    ht_obj_evict(cut);
    expect(cut, 0, p, CUT); /* its image */
    struct ht_suspect x = suspect(owner, 2);
    damage(place_of(p, BIG) + 1);
    stop = false;
    dev_stall_at(dev, HT_IO_READ, READS_BEFORE + 1); /* that of the other owner */
    ck_assert_int_eq(pthread_create(&thread, NULL, check, &x), 0);
    dev_wait_stalled(dev);
    stop = true;
    dev_stall(dev, false);
    pthread_join(thread, NULL);
    ck_assert_int_eq(x.repair_error, -ECANCELED);
    ht_ref_forget(&x.ref);
}

/* Each bad reference is met once. */
TEST_LOOP(a_run_beside_a_pool_of_threads_finds_each_once, 2)
{
    uint8_t *p = pattern(BIG, 1), *q = pattern(BIG, 2);
    struct ht_scrub_stats st = {0};

    done();
    fresh(32, true);
    struct ht_obj *o = stored(p, BIG, 0), *other = clone_of(o, BIG, 0), *alone = stored(q, BIG, 0);
    ck_assert_int_eq(ht_store_commit(s), 0);
    ht_obj_evict(o);
    ht_obj_evict(alone);
    if (_i)
        expect(other, 0, p, BIG); /* its image */
    damage(place_of(p, BIG) + 1);
    damage(place_of(q, BIG) + 1);
    ck_assert(ht_store_background_lend(s));
    ck_assert_int_eq(ht_store_scrub_start(s), 0);
    while (st.state != HT_SCRUB_COMPLETE) {
        ck_assert(ht_store_background_serve(s, true));
        ht_store_scrub_stats(s, &st);
        ck_assert_int_ne(st.state, HT_SCRUB_FAILED);
    }
    ck_assert_uint_eq(st.run_found, _i ? 2 : 3);
    ck_assert_uint_eq(st.run_repaired, _i);
    ht_store_background_take_back(s);
}

RUN_TESTS("shared", .setup = fixture_begin, .teardown = done, .timeout_s = 120, .quiet = ERRORS_ONLY)
