/* SPDX-License-Identifier: Apache-2.0 */
/* Small tensors: an image is as long as its object, and grows with it. The tier here is of 8 MiB. */

#include "tests/unit/tiering/store/fixture.h"

enum { KIB = 1 << 10, PIECE = 64 * KIB, SMALL = 16 * KIB };

static uint64_t used(void)
{
    return stats().dram_used_bytes;
}

/* One tensor of n bytes, published. */
static struct ht_obj *tensor(const uint8_t *p, size_t n)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, 0);

    put_all(o, 0, p, n);
    return o;
}

static void save(struct ht_obj *o)
{
    ck_assert_int_eq(ht_obj_sync(o), 0);
}

static void stream(struct ht_obj *o, uint64_t bytes)
{
    uint8_t *buf = malloc(MIB);

    for (uint64_t at = 0; at < bytes; at += MIB)
        ck_assert_int_eq(ht_obj_read(o, at, buf, MIB), MIB);
    free(buf);
}

TEST(an_image_takes_what_its_object_has)
{
    static const struct {
        uint32_t bytes, takes;
    } cases[] = {
        {1, PIECE},           {PIECE, PIECE}, {PIECE + 1, 2 * PIECE}, {3 * PIECE, 4 * PIECE}, {8 * PIECE, 8 * PIECE},
        {8 * PIECE + 1, MIB}, {MIB, MIB}};
    uint8_t *p = pattern(MIB, 3);

    fresh(64, false);
    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        struct ht_obj *o = tensor(p, cases[i].bytes);
        ck_assert_uint_eq(used(), cases[i].takes);
        ck_assert_uint_eq(obj_stat(o).resident_bytes, cases[i].takes);
        ck_assert_uint_eq(obj_stat(o).dirty_bytes, cases[i].takes);
        ck_assert_uint_eq(stats().dram_dirty_bytes, cases[i].takes);
        save(o);
        ck_assert_uint_eq(obj_stat(o).dirty_bytes, 0);
        ck_assert_uint_eq(stats().dram_dirty_bytes, 0);
        ht_obj_evict(o);
        ck_assert_uint_eq(used(), 0);
        expect(o, 0, p, cases[i].bytes);
        ck_assert_uint_eq(used(), cases[i].takes);
        delete (o);
        ck_assert_uint_eq(used(), 0);
    }
}

/* They would fill the tier six times over if each took a slot. */
TEST(many_small_tensors_stay_while_a_large_one_passes)
{
    enum { COUNT = 48, LARGE = 16 };
    uint8_t *p = pattern(LARGE * MIB, 1);
    struct ht_obj *o[COUNT];

    fresh(64, false);
    for (int i = 0; i < COUNT; i++) {
        o[i] = tensor(p + i, SMALL);
        save(o[i]);
    }
    ck_assert_uint_eq(used(), COUNT * PIECE);
    struct ht_obj *large = tensor(p, LARGE * MIB);
    save(large);
    for (int round = 0; round < 6; round++) {
        uint64_t before = stats().misses, missed;
        for (int i = 0; i < COUNT; i++)
            expect(o[i], 0, p + i, SMALL);
        missed = stats().misses - before;
        if (round >= 4)                           /* refaults join the working set */
            ck_assert_uint_le(missed, COUNT / 4); /* two may share a place in the policy's memory */
        stream(large, LARGE * MIB);
    }
}

/*
 * Ways in which an object of a short image grows; each leaves the bytes of p in [0, SMALL) and
 * [at, at + SMALL), and zeros between.
 */
static void by_write(struct ht_obj *o, uint64_t at, const uint8_t *p)
{
    put_all(o, at, p + at, SMALL);
}

static void by_truncate(struct ht_obj *o, uint64_t at, const uint8_t *p)
{
    ck_assert_int_eq(ht_obj_truncate(o, at + SMALL), 0);
    put_all(o, at, p + at, SMALL);
}

static void by_a_look_behind_the_image(struct ht_obj *o, uint64_t at, const uint8_t *p)
{
    uint8_t got[SMALL], zeros[SMALL] = {0};

    ck_assert_int_eq(ht_obj_truncate(o, at + SMALL), 0);
    ck_assert_int_eq(ht_obj_read(o, at, got, SMALL), SMALL);
    ck_assert_int_eq(memcmp(got, zeros, SMALL), 0);
    put_all(o, at, p + at, SMALL);
}

static void by_batch_pin(struct ht_obj *o, uint64_t at, const uint8_t *p)
{
    ck_assert_int_eq(ht_obj_truncate(o, at + SMALL), 0);
    struct ht_batch_pin l = {.store = s, .count = 1, .chunk = {{.obj = o, .index = 0, .mode = HT_BATCH_PIN_UPDATE}}};
    pin_now(&l);
    uint64_t len = at + SMALL < MIB ? at + SMALL : MIB;
    ck_assert_uint_eq(l.chunk[0].len, len);
    ck_assert_int_eq(memcmp(l.chunk[0].data, p, SMALL), 0);
    ck_assert(l.chunk[0].data[SMALL] == 0 &&
              memcmp(l.chunk[0].data + SMALL, l.chunk[0].data + SMALL + 1, len - SMALL - 1) == 0);
    if (at < MIB)
        memcpy(l.chunk[0].data + at, p + at, SMALL);
    unpin(&l, 1);
    if (at >= MIB)
        put_all(o, at, p + at, SMALL);
}

/* Opened as shared memory: the image moves into memory of the object's own. */
static void by_mapping(struct ht_obj *o, uint64_t at, const uint8_t *p)
{
    ck_assert_int_eq(ht_obj_truncate(o, at + SMALL), 0);
    int fd = -1;
    ck_assert_int_eq(ht_obj_shm_open_for(o, 0, &fd), 0);
    ck_assert_int_eq(ht_obj_shm_expect_stores(o), 0);
    ck_assert_int_eq(pwrite(fd, p + at, SMALL, (off_t)at), SMALL);
    ht_obj_shm_close(o);
}

static void (*const ways[])(struct ht_obj *o, uint64_t at, const uint8_t *p) = {
    by_write, by_truncate, by_a_look_behind_the_image, by_batch_pin, by_mapping};

TEST_LOOP(an_image_grows_with_its_object, 2 * (int)HT_ARRAY_SIZE(ways))
{
    static const uint64_t places[] = {SMALL, PIECE - 1, PIECE, 3 * PIECE - 100, MIB - SMALL, MIB - 1, MIB, 2 * MIB};
    uint8_t *p = pattern(3 * MIB, 7), *want = test_alloc(3 * MIB);
    bool dirty = _i & 1;

    fixture_shm_bytes = 3 * MIB;
    fresh(64, false);
    memcpy(want, p, SMALL);
    for (size_t k = 0; k < HT_ARRAY_SIZE(places); k++) {
        uint64_t at = places[k], size = at + SMALL;
        if (ways[_i / 2] == by_batch_pin && at < MIB && size > MIB)
            continue;
        struct ht_obj *o = tensor(p, SMALL), *other = tensor(p + MIB, PIECE);
        if (!dirty)
            save(o);
        ways[_i / 2](o, at, p);
        memset(want + SMALL, 0, 3 * MIB - SMALL);
        memcpy(want + at, p + at, SMALL);
        memcpy(want, p, SMALL < at ? SMALL : at);
        expect(o, 0, want, size);
        expect(other, 0, p + MIB, PIECE); /* its neighbour in the tier */
        save(o);
        ht_obj_evict(o);
        expect(o, 0, want, size);
        delete (o);
        delete (other);
    }
}

/* A batch pin of an image that is too short for it, and leaves it as it was. */
TEST(a_batch_pin_that_changes_nothing_leaves_the_short_image)
{
    uint8_t *p = pattern(MIB, 2), *want = test_alloc(MIB);

    memcpy(want, p, SMALL);
    fresh(64, false);
    struct ht_obj *o = tensor(p, SMALL);
    ck_assert_int_eq(ht_obj_truncate(o, 5 * PIECE), 0);
    for (enum ht_batch_pin_mode mode = HT_BATCH_PIN_READ; mode <= HT_BATCH_PIN_OVERWRITE; mode++) {
        struct ht_batch_pin l = {.store = s, .count = 1, .chunk = {{.obj = o, .index = 0, .mode = mode}}};
        pin_now(&l);
        ck_assert(l.chunk[0].staged);
        if (mode != HT_BATCH_PIN_OVERWRITE)
            ck_assert_int_eq(memcmp(l.chunk[0].data, want, 5 * PIECE), 0);
        memset(l.chunk[0].data, 1, 5 * PIECE);
        unpin(&l, 0);
        ck_assert_uint_eq(obj_stat(o).dirty_bytes, PIECE);
    }
    expect(o, 0, want, 5 * PIECE);
    ck_assert_uint_eq(used(), 8 * PIECE);
    ck_assert_uint_eq(obj_stat(o).dirty_bytes, 8 * PIECE);
}

/*
 * Small tensors that are updated over and over become resident like large ones. They take no whole slots from other
 * callers.
 */
TEST(small_tensors_are_protected)
{
    enum { COUNT = 40 };
    uint8_t *p = pattern(16 * MIB, 4);
    struct ht_obj *o[COUNT], *large;

    fresh(128, false);
    large = tensor(p, 16 * MIB);
    save(large);
    for (int i = 0; i < COUNT; i++) {
        o[i] = tensor(p + i, SMALL);
        save(o[i]);
        ht_obj_evict(o[i]);
    }
    for (int round = 0; round < 3; round++) {
        uint64_t before = stats().misses;
        for (int i = 0; i < COUNT; i++) {
            struct ht_batch_pin l = {.store = s, .count = 1, .chunk = {{.obj = o[i], .mode = HT_BATCH_PIN_UPDATE}}};
            pin_now(&l);
            ck_assert(!l.chunk[0].staged);
            ck_assert_int_eq(memcmp(l.chunk[0].data, p + i, SMALL), 0);
            unpin(&l, 1);
        }
        ck_assert_uint_eq(stats().misses - before, round ? 0 : COUNT);
        ck_assert_uint_eq(stats().dram_protected_bytes, 3 * MIB); /* forty of sixteen in a slot */
        stream(large, 16 * MIB);
    }
}

/* ------------------------------------------------------------ many at once */

enum { OBJECTS = 24, STEPS = 300, SIZE_MAX_ = 2 * MIB };

struct worker {
    pthread_t thread;
    struct ht_obj *o[OBJECTS];
    uint8_t *want[OBJECTS];
    uint64_t size[OBJECTS];
    unsigned seed;
};

/* Mostly about the lengths of pieces. */
static uint64_t some_size(unsigned *seed)
{
    uint64_t about = (uint64_t)PIECE << rand_r(seed) % 6;

    return rand_r(seed) % 3 ? (uint64_t)rand_r(seed) % (about + 1) : about;
}

static void step(struct worker *w)
{
    unsigned k = (unsigned)rand_r(&w->seed) % OBJECTS;
    uint64_t to = some_size(&w->seed), from = some_size(&w->seed);
    struct ht_obj *o = w->o[k];

    if (to < from) {
        uint64_t t = to;
        to = from;
        from = t;
    }
    switch (rand_r(&w->seed) % 8) {
    case 0:
        ck_assert_int_eq(ht_obj_truncate(o, to), 0);
        if (to < w->size[k])
            memset(w->want[k] + to, 0, w->size[k] - to);
        w->size[k] = to;
        break;
    case 1:
        ck_assert_int_eq(ht_obj_punch(o, from, to - from), 0);
        if (from < w->size[k])
            memset(w->want[k] + from, 0, (to < w->size[k] ? to : w->size[k]) - from);
        break;
    case 2:
        save(o);
        break;
    case 3:
        ht_obj_evict(o);
        break;
    case 4:
    case 5:
        memset(w->want[k] + from, (int)(w->seed & 0xff), to - from);
        put_all(o, from, w->want[k] + from, to - from);
        if (from < to && to > w->size[k])
            w->size[k] = to;
        break;
    default:
        if (w->size[k])
            expect(o, 0, w->want[k], w->size[k]);
    }
}

static void *work(void *arg)
{
    struct worker *w = arg;

    for (int i = 0; i < STEPS; i++)
        step(w);
    for (int k = 0; k < OBJECTS; k++)
        expect(w->o[k], 0, w->want[k], w->size[k]);
    return NULL;
}

TEST(images_grow_beside_each_other_in_a_full_tier)
{
    enum { WORKERS = 4 };
    struct worker w[WORKERS] = {0};

    fresh(384, true);
    for (unsigned i = 0; i < WORKERS; i++) {
        w[i].seed = i + 1;
        for (int k = 0; k < OBJECTS; k++) {
            w[i].o[k] = object(HT_CHUNK_BYTES, 0);
            w[i].want[k] = calloc(1, SIZE_MAX_);
        }
        ck_assert_int_eq(pthread_create(&w[i].thread, NULL, work, &w[i]), 0);
    }
    for (unsigned i = 0; i < WORKERS; i++)
        ck_assert_int_eq(pthread_join(w[i].thread, NULL), 0);
    uint64_t resident = 0, dirty = 0;
    for (unsigned i = 0; i < WORKERS; i++)
        for (int k = 0; k < OBJECTS; k++) {
            save(w[i].o[k]);
            resident += obj_stat(w[i].o[k]).resident_bytes;
            dirty += obj_stat(w[i].o[k]).dirty_bytes;
        }
    ck_assert_uint_eq(resident, used());
    ck_assert_uint_eq(dirty, 0);
    ck_assert_uint_eq(stats().dram_dirty_bytes, 0);
    for (unsigned i = 0; i < WORKERS; i++)
        for (int k = 0; k < OBJECTS; k++) {
            delete (w[i].o[k]);
            free(w[i].want[k]);
        }
    ck_assert_uint_eq(used(), 0);
}

RUN_TESTS("small", .teardown = done, .timeout_s = 120)
