/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_residency.c - objects that are pinned in the DRAM tier, and cold ones that leave it first. The tier has 8 MiB:
 * at most 6 are protected, and at most 4 are pinned.
 */
#define FIXTURE_MIB 128
#include "tests/unit/tiering/store/fixture.h"

static struct ht_obj *full(uint64_t mib, unsigned seed)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);
    uint8_t *p = pattern(mib * MIB, seed);

    put_synced(o, 0, p, mib * MIB);
    return o;
}

static void read_all(struct ht_obj *o)
{
    uint64_t size = ht_obj_size(o);
    uint8_t *got = malloc(MIB);

    for (uint64_t at = 0; at < size; at += MIB)
        ck_assert_int_eq(ht_obj_read(o, at, got, MIB), (ssize_t)ht_min_u64(MIB, size - at));
    free(got);
}

/* MiB that devices read for a pass over the object. */
static uint64_t misses(struct ht_obj *o)
{
    uint64_t before = obj_stat(o).device_read_bytes;

    read_all(o);
    return (obj_stat(o).device_read_bytes - before) / MIB;
}

static void update(struct ht_obj *o, uint64_t index, bool *out_staged)
{
    struct ht_batch_pin l = {.store = s, .count = 1};

    l.chunk[0] = (struct ht_batch_pin_chunk){.obj = o, .index = index, .mode = HT_BATCH_PIN_UPDATE};
    pin_now(&l);
    *out_staged = l.chunk[0].staged;
    unpin(&l, 1);
}

TEST(a_scan_evicts_what_is_not_pinned)
{
    struct ht_obj *pinned = full(2, 1), *other = full(2, 2), *scanned = full(32, 3);

    ht_obj_set_residency(pinned, HT_RESIDENCY_PINNED);
    ck_assert_int_eq(ht_obj_prefetch(pinned), 0);
    read_all(other);
    for (unsigned i = 0; i < 3; i++)
        read_all(scanned);
    ck_assert_uint_eq(misses(pinned), 0);
    ck_assert_uint_eq(misses(other), 2);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 2 * MIB);
    ht_obj_set_residency(pinned, HT_RESIDENCY_AUTO);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 0);
    for (unsigned i = 0; i < 3; i++)
        read_all(scanned);
    ck_assert_uint_eq(misses(pinned), 2);
}

TEST(half_of_the_tier_can_be_pinned)
{
    struct ht_obj *a = full(3, 1), *b = full(3, 2), *scanned = full(16, 3);

    ht_obj_set_residency(a, HT_RESIDENCY_PINNED);
    read_all(a);
    ck_assert_int_eq(ht_obj_pinnable_bytes(a), MIB);
    ck_assert_int_eq(ht_obj_pinnable_bytes(b), -2 * MIB);
    ht_obj_set_residency(b, HT_RESIDENCY_PINNED);
    read_all(b);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 4 * MIB);
    read_all(scanned);
    read_all(scanned);
    ck_assert_uint_eq(misses(a), 0);
    ck_assert_uint_eq(misses(b), 2);
    ck_assert_int_eq(ht_obj_truncate(a, MIB), 0);
    ck_assert_uint_le(stats().dram_pinned_bytes, 2 * MIB);
    read_all(b); /* the rest finds room now */
    ck_assert_uint_eq(stats().dram_pinned_bytes, 4 * MIB);
    delete (b);
    ck_assert_uint_eq(stats().dram_pinned_bytes, MIB);
}

TEST(updates_leave_room_to_pinned_content)
{
    bool staged;
    struct ht_obj *state = full(7, 1), *o = full(3, 2);

    for (uint64_t i = 0; i < 7; i++)
        update(state, i, &staged);
    ck_assert_uint_eq(stats().dram_protected_bytes, 6 * MIB);
    ht_obj_set_residency(o, HT_RESIDENCY_PINNED);
    for (uint64_t i = 0; i < 6; i++) { /* each of these gives up a protected image, until there is room */
        read_all(o);
        update(state, i, &staged);
    }
    read_all(o);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 3 * MIB);
    ck_assert_uint_le(stats().dram_protected_bytes, 6 * MIB);
    for (uint64_t i = 0; i < 7; i++)
        update(state, i, &staged);
    ck_assert_uint_eq(misses(o), 0);
    ht_obj_unprotect(o); /* of updates: a pin stays */
    ck_assert_uint_eq(stats().dram_pinned_bytes, 3 * MIB);
}

TEST(updates_of_pinned_content_stay_in_memory)
{
    bool staged;
    struct ht_obj *state = full(7, 1), *o = full(3, 2);

    ht_obj_set_residency(o, HT_RESIDENCY_PINNED);
    for (unsigned k = 0; k < 3; k++)
        for (uint64_t i = 0; i < 7; i++) {
            update(state, i, &staged);
            if (i >= 3)
                continue;
            update(o, i, &staged);
            ck_assert(!staged);
        }
    ck_assert_uint_eq(stats().dram_pinned_bytes, 3 * MIB);
    ck_assert_uint_eq(misses(o), 0);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 3 * MIB);
    ht_obj_evict(o);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 0);
}

/* States of a MiB and a quarter: their ends share a slot, so that all states stay. */
TEST(updates_keep_no_more_than_the_content_needs)
{
    enum { STATES = 4, END = MIB / 4 };
    struct ht_obj *state[STATES];
    uint8_t *p = pattern(MIB + END, 1);
    bool staged;

    for (unsigned k = 0; k < STATES; k++) {
        state[k] = object(HT_CHUNK_BYTES, 0);
        put_all(state[k], 0, p, MIB + END);
        sync_and_evict(state[k]);
    }
    for (unsigned pass = 0; pass < 2; pass++)
        for (unsigned k = 0; k < STATES; k++)
            for (uint64_t i = 0; i < 2; i++) {
                update(state[k], i, &staged);
                ck_assert(!staged);
            }
    ck_assert_uint_eq(stats().dram_used_bytes, STATES * (MIB + END));
    ck_assert_uint_eq(stats().dram_protected_bytes, STATES * (MIB + END));
    for (unsigned k = 0; k < STATES; k++) {
        ck_assert_uint_eq(obj_stat(state[k]).resident_bytes, MIB + END);
        ck_assert_uint_eq(obj_stat(state[k]).dirty_bytes, MIB + END);
        expect(state[k], 0, p, MIB + END);
        put_object(state[k]);
    }
}

/* The last image is as short as the content was. What the object has now is read, written and updated. */
TEST(the_last_image_of_an_update_grows_with_its_object)
{
    enum { END = MIB / 4, SIZE = 3 * MIB };
    uint8_t *p = test_alloc(SIZE);
    bool staged;

    memset(p, 7, MIB + END);
    for (unsigned write = 0; write < 2; write++) {
        struct ht_obj *o = synced_object(HT_CHUNK_BYTES, 0, p, MIB + END);
        ht_obj_evict(o);
        update(o, 1, &staged);
        ck_assert(!staged);
        ck_assert_int_eq(ht_obj_truncate(o, SIZE), 0);
        if (write)
            put_all(o, 2 * MIB - 4096, p, 4096);
        memset(p + 2 * MIB - 4096, write ? 7 : 0, 4096);
        update(o, 1, &staged);
        ck_assert(staged == !write); /* it waits for no longer image while it holds chunks */
        expect(o, 0, p, SIZE);
        ht_store_verify(s, false);
        put_object(o);
    }
}

TEST(a_pinned_image_that_grows_stays_pinned)
{
    uint8_t *p = pattern(MIB, 1);
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0), *scanned = full(24, 3);

    ht_obj_set_residency(o, HT_RESIDENCY_PINNED);
    put_all(o, 0, p, 1000);
    ck_assert_uint_eq(stats().dram_pinned_bytes, 1 << 16);
    put_all(o, 1000, p + 1000, MIB - 1000);
    ck_assert_uint_eq(stats().dram_pinned_bytes, MIB);
    ck_assert_int_eq(ht_obj_sync(o), 0);
    read_all(scanned);
    read_all(scanned);
    ck_assert_uint_eq(misses(o), 0);
    expect(o, 0, p, MIB);
}

TEST(cold_content_leaves_first)
{
    bool staged;
    struct ht_obj *cold = full(3, 1), *warm = full(5, 2), *more = full(3, 3);

    ht_obj_evict(more);
    ht_obj_evict(warm);
    ht_obj_evict(cold);
    ht_obj_set_residency(cold, HT_RESIDENCY_COLD);
    read_all(warm); /* the oldest by use */
    read_all(cold);
    read_all(more);
    ck_assert_uint_eq(misses(warm), 0);
    ck_assert_uint_eq(obj_stat(cold).resident_bytes, 0);
    read_all(cold);
    ht_obj_evict(cold);
    update(cold, 0, &staged);
    ck_assert(staged);
    ck_assert_uint_eq(stats().dram_protected_bytes, 0);
}

TEST(content_that_becomes_cold_is_protected_no_more)
{
    bool staged;
    struct ht_obj *o = full(2, 1);

    update(o, 0, &staged);
    update(o, 1, &staged);
    ck_assert_uint_eq(stats().dram_protected_bytes, 2 * MIB);
    ht_obj_set_residency(o, HT_RESIDENCY_COLD);
    ck_assert_uint_eq(stats().dram_protected_bytes, 0);
    update(o, 0, &staged); /* in its image: it is there */
    ck_assert_uint_eq(stats().dram_protected_bytes, 0);
}

/*
 * A backward pass writes a gradient, and updates read it for the last time. Returns the MiB that devices read for it.
 */
static uint64_t consume(struct ht_obj *gradient, uint64_t mib)
{
    uint8_t *p = pattern(mib * MIB, 5);
    uint64_t before = obj_stat(gradient).device_read_bytes;

    put_all(gradient, 0, p, mib * MIB);
    for (uint64_t i = 0; i < mib; i++) {
        struct ht_batch_pin l = {.store = s, .count = 1};
        l.chunk[0] =
            (struct ht_batch_pin_chunk){.obj = gradient, .index = i, .mode = HT_BATCH_PIN_READ, .consumed = true};
        pin_now(&l);
        unpin(&l, 0);
        ht_obj_scratch_drop(gradient, i, 1);
    }
    return (obj_stat(gradient).device_read_bytes - before) / MIB;
}

TEST(the_protected_set_gives_way_to_gradients_that_are_read_back)
{
    struct ht_store_stats st;
    bool staged;
    struct ht_obj_attr a = {
        .oid = ht_store_new_id(s), .chunk_bytes = HT_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH, .scope = 9};
    struct ht_obj *state = full(16, 1), *gradient;

    ck_assert_int_eq(ht_obj_create(s, &a, &gradient), 0);
    hold_object(gradient);
    for (unsigned step = 0; step < 8; step++) {
        uint64_t back = consume(gradient, 5);
        for (uint64_t i = 0; i < 16; i++)
            update(state, i, &staged);
        ck_assert_int_eq(ht_obj_sync(state), 0);
        ht_store_stats(s, &st);
        if (step == 1) /* the set is full */
            ck_assert(back >= 3 && st.dram_protectable_bytes == 6 * MIB);
        if (step >= 3) {
            ck_assert_uint_eq(back, 0);
            ck_assert_uint_le(st.dram_protectable_bytes, 3 * MIB);
            ck_assert_uint_le(st.dram_protected_bytes, 3 * MIB);
        }
        ht_store_end_step(s, false);
    }
    ht_store_end_step(s, true);
    ht_store_stats(s, &st);
    ck_assert_uint_eq(st.dram_protectable_bytes, 6 * MIB);
}

RUN_TESTS("residency", .setup = fixture_begin, .teardown = done)
