/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_classes.c - classes of I/O on a whole store: lower classes hold what callers need, on the smallest memory, and
 * all of them go on.
 */

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/io/gate.h"

enum { READERS = 3, CHUNKS = 24, WRITTEN = 12, LAPS = 8 };

static uint8_t *want;
static struct ht_obj *cold, *prefetched, *written;
static _Atomic bool stop;

static void *read_main(void *arg)
{
    uint8_t *mine = malloc(4096);
    uintptr_t at = (uintptr_t)arg;

    for (unsigned i = 0; i < LAPS * CHUNKS; i++, at = (at * 5 + 7) % CHUNKS) {
        ck_assert_int_eq(ht_obj_read(cold, at * MIB, mine, 4096), 4096);
        ck_assert_int_eq(memcmp(mine, want + at * MIB, 4096), 0);
    }
    free(mine);
    return NULL;
}

/* More than memory holds: writeback and the writer itself make room. */
static void *write_main(void *arg)
{
    while (!stop)
        put_all(written, 0, want, WRITTEN * MIB);
    return NULL;
}

static void *prefetch_main(void *arg)
{
    while (!stop) {
        ht_obj_evict(prefetched);
        ck_assert_int_eq(ht_obj_prefetch(prefetched), 0);
    }
    return NULL;
}

static void *scrub_main(void *arg)
{
    struct ht_scrub_stats st;

    (void)ht_io_class_set(HT_IO_BACKGROUND);
    while (!stop)
        ck_assert_int_eq(background_scrub(s), 0);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.found, 0);
    return NULL;
}

static struct ht_obj *stored(unsigned chunks)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);

    put_all(o, 0, want, (size_t)chunks * MIB);
    sync_and_evict(o);
    return o;
}

TEST(all_classes_go_on_beside_each_other_on_the_smallest_memory)
{
    void *(*const lower[])(void *) = {write_main, prefetch_main, scrub_main};
    pthread_t reader[READERS], other[3];
    struct ht_gate_stats st;

    want = pattern(CHUNKS * MIB, 3);
    stop = false;
    fresh(128, true);
    cold = stored(CHUNKS);
    prefetched = stored(4);
    written = object(HT_CHUNK_BYTES, 0);
    for (unsigned i = 0; i < 3; i++)
        ck_assert_int_eq(pthread_create(&other[i], NULL, lower[i], NULL), 0);
    for (uintptr_t i = 0; i < READERS; i++)
        ck_assert_int_eq(pthread_create(&reader[i], NULL, read_main, (void *)i), 0);
    for (unsigned i = 0; i < READERS; i++)
        pthread_join(reader[i], NULL);
    do /* scrub gets its turn in any case, and has waited for it */
        ht_gate_stats(dev, &st);
    while (st.waits[HT_IO_BACKGROUND] == 0);
    stop = true;
    for (unsigned i = 0; i < 3; i++)
        pthread_join(other[i], NULL);
    ht_gate_stats(dev, &st);
    ck_assert_uint_eq(st.waits[HT_IO_URGENT], 0);
    ck_assert_uint_eq(st.in_flight_bytes[HT_IO_BACKGROUND], 0);
}

RUN_TESTS("classes", .timeout_s = 300, .teardown = fixture_end)
