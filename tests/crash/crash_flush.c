/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_flush.c - many threads on devices with volatile caches, whose flushes take their time and fail, also beside one
 * that succeeds; and the power is cut at any moment.
 *
 * Blocks bear the number of the round that wrote them. After each cut the store mounts, and every synced block has that
 * round or a later one. A model root bears one round, the last committed one or a later one. Clones bear the bytes that
 * were read before they were synced.
 *
 * HITRAIN_DEVICES=N plays with N devices only; HITRAIN_SEED=N begins with other random numbers; HITRAIN_LONG=1 does
 * fifty times as many cuts.
 */

#include "tests/support/dev.h"
#include "tests/support/memory.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/sys/mem.h"
#include "tiering/space/super.h"
#include "tiering/txn/txn.h"
#include "tiering/api/object.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"

enum {
    MIB = 1 << 20,
    DEVICES_MAX = 4,
    DEVICE_BYTES = 24 * MIB,
    FILES = 4,
    CLONES = 2,
    ROOTS = 2,
    OBJECTS = FILES + CLONES + 2 * ROOTS,
    CHUNKS = 5,
    CHUNK_BYTES = HT_SMALL_CHUNK_BYTES,
    BYTES = CHUNKS * CHUNK_BYTES,
    BLOCKS = BYTES / HT_BLOCK_BYTES,
    CUTS = 5,
    RUN_MS_MIN = 60,
    RUN_MS_MAX = 300,
    ERROR_US_MAX = 3000, /* from a failure to the end of its request */
};

/* The known rounds of the blocks of one file, clone or root. */
struct knowledge {
    _Atomic uint32_t acked, latest; /* of a file or a root */
    _Atomic uint32_t block[BLOCKS]; /* of a clone, as it was synced */
    _Atomic bool changing;          /* of a clone: not known now */
};

struct worker {
    struct fixture *w;
    unsigned index; /* of files, clones, then roots */
    uint64_t seed;
    struct knowledge now, at_cut;
    unsigned synced;
    pthread_t thread;
};

struct fixture {
    struct ht_dev *dev[DEVICES_MAX];
    unsigned devices;
    struct ht_store *s;
    uint64_t oid[OBJECTS];
    struct ht_obj *obj[OBJECTS];
    struct worker worker[FILES + CLONES + ROOTS];
    _Atomic bool stop;
    uint64_t seed;
    unsigned flushes_failed, read_only;
};

/* ------------------------------------------------------------------- work */

/* The round that all of the block bears, or -1. */
static int64_t round_of(const uint8_t *block)
{
    uint32_t round;

    memcpy(&round, block, 4);
    return memcmp(block, block + 4, HT_BLOCK_BYTES - 4) == 0 ? (int64_t)round : -1;
}

static bool write_all(struct ht_obj *o, uint8_t *buf, uint32_t round)
{
    for (size_t i = 0; i < BYTES; i += 4)
        memcpy(buf + i, &round, 4);
    return ht_obj_write(o, 0, buf, BYTES) == BYTES;
}

static bool work_on_file(struct worker *k, uint8_t *buf)
{
    struct ht_obj *o = k->w->obj[k->index];
    uint32_t round = k->now.latest + 1;

    k->now.latest = round;
    if (!write_all(o, buf, round))
        return false;
    if (rnd_below(&k->seed, 4) == 0 && ht_obj_writeback(o) == 0)
        ht_obj_evict(o);
    if (ht_obj_sync(o))
        return false;
    k->now.acked = round;
    return true;
}

static bool work_on_clone(struct worker *k, uint8_t *buf)
{
    struct fixture *w = k->w;
    struct ht_obj *o = w->obj[k->index], *src = w->obj[rnd_below(&k->seed, FILES)];

    k->now.changing = true;
    if (ht_obj_clone(src, 0, o, 0, BYTES) != BYTES || ht_obj_read(o, 0, buf, BYTES) != BYTES || ht_obj_sync(o))
        return false;
    for (unsigned b = 0; b < BLOCKS; b++)
        k->now.block[b] = (uint32_t)round_of(buf + (size_t)b * HT_BLOCK_BYTES);
    k->now.changing = false;
    return true;
}

static unsigned first_of_root(unsigned worker)
{
    return FILES + CLONES + 2 * (worker - FILES - CLONES);
}

static uint64_t scope_of(unsigned worker)
{
    return 1000000 + worker;
}

static int commit(struct fixture *w, uint64_t scope)
{
    struct ht_rounds rounds = HT_ROUNDS_OF_SCOPE(scope);
    struct ht_tx *tx;
    uint64_t lsn;
    int rc;

    do {
        ht_rounds_next(w->s, &rounds);
        rc = ht_scope_writeback(w->s, scope);
        if (!rc)
            rc = ht_tx_begin_round(w->s, ht_scope_pending_bytes(w->s, scope), &rounds, &tx);
    } while (rc == -EAGAIN);
    if (rc)
        return rc;
    ht_scope_publish(w->s, scope, false, tx);
    rc = ht_tx_commit(tx, &lsn);
    return rc ? rc : ht_store_sync(w->s, lsn);
}

static bool work_on_root(struct worker *k, uint8_t *buf)
{
    struct fixture *w = k->w;
    uint32_t round = k->now.latest + 1;

    k->now.latest = round;
    for (unsigned i = 0; i < 2; i++)
        if (!write_all(w->obj[first_of_root(k->index) + i], buf, round))
            return false;
    if (commit(w, scope_of(k->index)))
        return false;
    k->now.acked = round;
    return true;
}

static void *work_main(void *arg)
{
    struct worker *k = arg;
    uint8_t *buf = malloc(BYTES);

    while (!k->w->stop) {
        bool ok = k->index < FILES      ? work_on_file(k, buf)
            : k->index < FILES + CLONES ? work_on_clone(k, buf)
                                        : work_on_root(k, buf);
        k->synced += ok;
        if (!ok)
            usleep(1000);
    }
    free(buf);
    return NULL;
}

/* ------------------------------------------------------------------ checks */

static void expect_block(struct fixture *w, const struct worker *k, unsigned b, const uint8_t *block)
{
    const struct knowledge *known = &k->at_cut;
    int64_t round = round_of(block);
    bool clone = k->index >= FILES && k->index < FILES + CLONES;

    ck_assert_msg(round >= 0, "worker %u, block %u: a mixture", k->index, b);
    if (clone && !known->changing)
        ck_assert_msg(round == known->block[b] || k->now.changing, "clone %u, block %u: round %lld, %u was synced",
                      k->index, b, (long long)round, known->block[b]);
    if (!clone)
        ck_assert_msg(round >= known->acked && round <= k->now.latest,
                      "worker %u, block %u: round %lld, %u was synced, %u is the last", k->index, b, (long long)round,
                      known->acked, k->now.latest);
}

static void expect_one(struct fixture *w, const struct worker *k, unsigned object, uint8_t *buf)
{
    struct ht_obj *o = ht_obj_get(w->s, w->oid[object]);

    ck_assert_ptr_nonnull(o);
    ssize_t got = ht_obj_read(o, 0, buf, BYTES);
    ck_assert_msg(got == BYTES, "worker %u, cannot be read: %zd; %u was synced, %u is the last", k->index, got,
                  k->at_cut.acked, k->now.latest);
    for (unsigned b = 0; b < BLOCKS; b++)
        expect_block(w, k, b, buf + (size_t)b * HT_BLOCK_BYTES);
    ht_obj_put(o);
}

static void expect_root(struct fixture *w, const struct worker *k, uint8_t *buf)
{
    int64_t round = -1;

    for (unsigned i = 0; i < 2; i++) {
        expect_one(w, k, first_of_root(k->index) + i, buf);
        for (unsigned b = 0; b < BLOCKS; b++) {
            int64_t r = round_of(buf + (size_t)b * HT_BLOCK_BYTES);
            round = round < 0 ? r : round;
            ck_assert_msg(r == round, "root %u is between rounds %lld and %lld", k->index, (long long)round,
                          (long long)r);
        }
    }
}

static void expect_all(struct fixture *w)
{
    uint8_t *buf = malloc(BYTES);

    for (unsigned i = 0; i < HT_ARRAY_SIZE(w->worker); i++) {
        if (i < FILES + CLONES)
            expect_one(w, &w->worker[i], i, buf);
        else
            expect_root(w, &w->worker[i], buf);
    }
    free(buf);
}

/* ------------------------------------------------------------------- cuts */

static void mount_fixture(struct fixture *w)
{
    struct ht_store_opts opts = {
        .dram_bytes = 8 * MIB, .staging_bytes = 16 * MIB, .numa_node = HT_NUMA_OFF, .commit_ms = 20};
    struct ht_dev *given[DEVICES_MAX];

    memcpy(given, w->dev, sizeof(given));
    ck_assert_int_eq(ht_store_new(given, w->devices, &opts, &w->s), 0);
    ck_assert_int_eq(ht_store_mount(w->s), 0);
}

static uint64_t scope_of_object(unsigned object)
{
    return object < FILES + CLONES ? 0 : scope_of(FILES + CLONES + (object - FILES - CLONES) / 2);
}

/* All of round 0 is durable. */
static void make_fixture(struct fixture *w, unsigned devices, uint64_t seed)
{
    struct ht_super sb;
    struct ht_format_opts opts = {.log_bytes = MIB};
    uint8_t *buf = malloc(BYTES);

    *w = (struct fixture){.devices = devices, .seed = seed};
    for (unsigned i = 0; i < devices; i++)
        ck_assert_int_eq(dev_open_ram(DEVICE_BYTES, 512, &w->dev[i]), 0);
    ck_assert_int_eq(ht_super_format(w->dev, devices, &opts, &sb), 0);
    for (unsigned i = 0; i < devices; i++)
        ck_assert_int_eq(dev_set_cache(w->dev[i], 300 + (uint32_t)rnd_below(&seed, 1700)), 0);
    mount_fixture(w);
    for (unsigned i = 0; i < OBJECTS; i++) {
        struct ht_obj_attr a = {.oid = ht_store_new_id(w->s), .chunk_bytes = CHUNK_BYTES, .scope = scope_of_object(i)};
        w->oid[i] = a.oid;
        ck_assert_int_eq(ht_obj_create(w->s, &a, &w->obj[i]), 0);
        ck_assert(write_all(w->obj[i], buf, 0));
        ck_assert_int_eq(ht_obj_sync(w->obj[i]), 0);
        ht_obj_put(w->obj[i]);
    }
    for (unsigned i = 0; i < HT_ARRAY_SIZE(w->worker); i++)
        w->worker[i] = (struct worker){.w = w, .index = i, .seed = seed + i};
    free(buf);
}

static void note(struct knowledge *to, const struct knowledge *from)
{
    to->changing = from->changing; /* before the fields that it guards */
    to->acked = from->acked;
    to->latest = from->latest;
    for (unsigned b = 0; b < BLOCKS; b++)
        to->block[b] = from->block[b];
}

/* Flushes fail now and then. The first device has some peace, so that others are left for others to be closed. */
static void let_flushes_fail(struct fixture *w, uint64_t run_ms)
{
    uint64_t end = ht_now_ns() + run_ms * 1000000;

    while (ht_now_ns() < end) {
        usleep(5000 + (unsigned)rnd_below(&w->seed, 25000));
        unsigned device = (unsigned)rnd_below(&w->seed, w->devices);
        dev_set_error_us(w->dev[device], (uint32_t)rnd_below(&w->seed, ERROR_US_MAX));
        if (rnd_below(&w->seed, 3) == 0)
            dev_void_after(w->dev[device], 1 + (unsigned)rnd_below(&w->seed, 4));
        else
            dev_fail(w->dev[device], HT_IO_FLUSH, 1, false);
        w->flushes_failed++;
    }
}

static void run_and_cut(struct fixture *w)
{
    w->stop = false;
    for (unsigned i = 0; i < OBJECTS; i++)
        ck_assert_ptr_nonnull(w->obj[i] = ht_obj_get(w->s, w->oid[i]));
    for (unsigned i = 0; i < HT_ARRAY_SIZE(w->worker); i++)
        ck_assert_int_eq(pthread_create(&w->worker[i].thread, NULL, work_main, &w->worker[i]), 0);
    let_flushes_fail(w, RUN_MS_MIN + rnd_below(&w->seed, RUN_MS_MAX - RUN_MS_MIN));
    for (unsigned i = 0; i < HT_ARRAY_SIZE(w->worker); i++)
        note(&w->worker[i].at_cut, &w->worker[i].now);
    w->read_only += ht_store_read_only(w->s);
    dev_power_off(w->dev, w->devices, rnd_below(&w->seed, UINT32_MAX));
    w->stop = true;
    for (unsigned i = 0; i < HT_ARRAY_SIZE(w->worker); i++)
        pthread_join(w->worker[i].thread, NULL);
    for (unsigned i = 0; i < OBJECTS; i++)
        ht_obj_put(w->obj[i]);
    ht_store_close(w->s);
    for (unsigned i = 0; i < w->devices; i++) {
        dev_fail(w->dev[i], HT_IO_FLUSH, 0, false);
        dev_void_after(w->dev[i], 0);
        dev_power_on(w->dev[i]);
    }
}

/* The next rounds begin with the state after the cut. */
static void go_on_from(struct fixture *w)
{
    uint8_t *buf = malloc(BYTES);

    for (unsigned i = 0; i < HT_ARRAY_SIZE(w->worker); i++) {
        struct worker *k = &w->worker[i];
        struct ht_obj *o = ht_obj_get(w->s, w->oid[i < FILES + CLONES ? i : first_of_root(i)]);
        ck_assert_int_eq(ht_obj_read(o, 0, buf, BYTES), BYTES);
        for (unsigned b = 0; b < BLOCKS; b++)
            k->now.block[b] = (uint32_t)round_of(buf + (size_t)b * HT_BLOCK_BYTES);
        k->now.changing = false;
        ht_obj_put(o);
    }
    free(buf);
}

TEST_RANGE(what_was_acknowledged_is_there_after_every_cut, 1, DEVICES_MAX + 1)
{
    if (setting("HITRAIN_DEVICES", (uint64_t)_i) != (uint64_t)_i)
        return;
    unsigned cuts = getenv("HITRAIN_LONG") ? 50 * CUTS : CUTS, synced = 0;
    struct fixture *w = test_alloc(sizeof(*w));

    make_fixture(w, (unsigned)_i, setting("HITRAIN_SEED", 1) * 1000 + (uint64_t)_i);
    for (unsigned n = 0; n < cuts; n++) {
        run_and_cut(w);
        mount_fixture(w);
        expect_all(w);
        go_on_from(w);
    }
    for (unsigned i = 0; i < HT_ARRAY_SIZE(w->worker); i++)
        synced += w->worker[i].synced;
    printf("figures: %u devices: %u cuts, %u syncs and commits, %u flushes failed, %u times read-only at the cut\n",
           w->devices, cuts, synced, w->flushes_failed, w->read_only);
    ck_assert_int_eq(ht_store_unmount(w->s), 0);
    ht_store_close(w->s);
    for (unsigned i = 0; i < w->devices; i++)
        ht_dev_close(w->dev[i]);
}

RUN_TESTS("power cuts beside failing flushes", .timeout_s = getenv("HITRAIN_LONG") ? 3600 : 300, .quiet = SILENT,
          .memory = memory_keep)
