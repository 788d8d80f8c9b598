/* SPDX-License-Identifier: Apache-2.0 */
/* test_engines.c - threads that write, cut and read files beside all work in the background lose nothing. */

#include "tests/unit/tiering/codec/content.h"
#include "tests/unit/tiering/engine/compact.h"

enum { WRITERS = 2, BYTES = 10 * SMALL + 1000, STEPS = 50, STORE_MIB = 64 };

/* Each has a file of its own, and all write parts of the same content. */
static struct writer {
    struct ht_obj *o;
    uint8_t *want; /* what it must hold; zeros behind its end */
    uint64_t size, x;
    pthread_t thread;
} writer[WRITERS];
static uint8_t *shared;
static _Atomic bool ended;

static void engines(void)
{
    struct ht_scrub_stats st;

    ck_assert_int_eq(background_dedup(s), 0);
    ck_assert_int_eq(background_compress(s), 0);
    ck_assert_int_eq(background_compact(s), 0);
    background_discard(s);
    ck_assert_int_eq(background_scrub(s), 0);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.run_found, 0);
}

static void *work_in_background(void *arg)
{
    (void)arg;
    do
        engines();
    while (!ended);
    return NULL;
}

static void write_part(struct writer *w, const uint8_t *from, uint64_t off, uint64_t n)
{
    memcpy(&w->want[off], from, n);
    put_all(w->o, off, from, n);
    w->size = ht_max_u64(w->size, off + n);
}

static void expect_file(struct writer *w)
{
    if (w->size)
        expect(w->o, 0, w->want, w->size);
}

static void change(struct writer *w)
{
    static const uint8_t zeros[BYTES];
    uint64_t off = random_next(&w->x) % BYTES, n = 1 + random_next(&w->x) % (BYTES - off);

    switch (random_next(&w->x) % 6) {
    case 0:
        ck_assert_int_eq(ht_obj_truncate(w->o, off), 0);
        memset(&w->want[off], 0, BYTES - off);
        w->size = off;
        break;
    case 1:
        write_part(w, zeros, off, n);
        break;
    case 2:
        ck_assert_int_eq(ht_obj_sync(w->o), 0);
        ht_obj_evict(w->o);
        break;
    default:
        write_part(w, &shared[off], off, n);
    }
    expect_file(w);
}

static void *write_always(void *arg)
{
    for (unsigned i = 0; i < STEPS; i++)
        change(arg);
    return NULL;
}

TEST(files_that_change_beside_all_engines_lose_nothing)
{
    uint64_t oid[WRITERS];
    pthread_t background;

    fixture_discard = true;
    fresh(STORE_MIB, false);
    ht_store_set_compress(s, all_may, NULL);
    shared = test_alloc(BYTES);
    content_bf16(shared, BYTES, 5);
    sparse(16);
    ended = false;
    for (unsigned i = 0; i < WRITERS; i++) {
        writer[i] = (struct writer){.o = object(SMALL, 0), .want = test_alloc(BYTES), .x = 77 + i};
        ck_assert_int_eq(pthread_create(&writer[i].thread, NULL, write_always, &writer[i]), 0);
    }
    ck_assert_int_eq(pthread_create(&background, NULL, work_in_background, NULL), 0);
    for (unsigned i = 0; i < WRITERS; i++)
        pthread_join(writer[i].thread, NULL);
    ended = true;
    pthread_join(background, NULL);
    for (unsigned i = 0; i < WRITERS; i++) {
        write_part(&writer[i], shared, 0, BYTES);
        oid[i] = ht_obj_id(writer[i].o);
    }
    ck_assert_int_eq(ht_store_commit(s), 0);
    for (unsigned i = 0; i < 3; i++)
        engines();
    ck_assert_uint_gt(engine_figure("recompress", "chunks"), 0);
    ck_assert_uint_gt(engine_figure("dedup", "shared_bytes"), 0);
    ck_assert_uint_gt(engine_figure("discard", "discarded_bytes"), 0);
    expect_all();
    ht_store_verify(s, true);
    reopen();
    for (unsigned i = 0; i < WRITERS; i++) {
        writer[i].o = get_object(oid[i]);
        expect_file(&writer[i]);
    }
    expect_all();
}

RUN_TESTS("engines", .timeout_s = 120, .quiet = ERRORS_ONLY, .teardown = fixture_end)
