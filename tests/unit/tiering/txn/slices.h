/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slices.h - for tests that operations on many chunks or objects hold locks for short slices only: a store with a hot
 * object that a thread reads, one of many chunks in a scope that keeps steps, and a look at the longest holds.
 */
#pragma once

#include <sched.h>

#include "tiering/object/chunk.h"
#include "tiering/object/ref.h"
#include "tiering/object/scope.h"

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/api/keep.h"
#include "tiering/base/lock.h"
#include "tiering/cache/arena.h"
#include "tiering/io/gate.h"
#include "tiering/data/chunk_io.h"
#include "tiering/txn/txn.h"
#include "tiering/txn/txn_priv.h"
#include "tiering/object/context.h"
#include "tiering/tier/next_use.h"

enum {
    SCOPE = 9,
    CHUNK = HT_SMALL_CHUNK_BYTES,
    FEW_CHUNKS = 6000,
    STEPS_MAX = 4 * HT_SLICE_STEPS,
    BLOCKS_MAX = 600000, /* take less than a millisecond */
    BLOCK = 4096,
    ALONE_US = 1000000
};

static struct ht_obj *obj, *hot;
static uint64_t chunks;
static bool prints;

/* How often a test runs that says nothing about many chunks. */
static inline int unless_many(int count)
{
    return getenv("HITRAIN_TEST_CHUNKS") ? 0 : count;
}

/* ------------------------------------------------------------- a hot reader */

static _Atomic bool stop;
static _Atomic uint64_t slowest_ns;
static _Atomic int reader_tid;

/* How long the reader ran, or would have run but for other programs: all the time in which it waited for no lock. */
static inline uint64_t reader_ready_ns(void)
{
    unsigned long long ran_ns = 0, waited_ns = 0;
    char path[64];

    snprintf(path, sizeof(path), "/proc/self/task/%d/schedstat", reader_tid);
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%llu %llu", &ran_ns, &waited_ns) != 2)
        ran_ns = waited_ns = 0;
    if (f)
        fclose(f);
    return ran_ns + waited_ns;
}

static inline void *read_hot(void *arg)
{
    uint8_t block[BLOCK];

    reader_tid = gettid();
    while (!stop) {
        uint64_t began_ns = ht_now_ns();
        if (ht_obj_read(hot, 0, block, sizeof(block)) != sizeof(block))
            abort();
        uint64_t ns = ht_now_ns() - began_ns;
        if (ns > slowest_ns)
            slowest_ns = ns;
    }
    return arg;
}

/* -------------------------------------------------------------- operations */

static uint64_t began_ns, ready_before_ns;

static inline void begin(void)
{
    for (enum ht_lock_rank rank = HT_LOCK_TX; rank < HT_LOCK_RANKS; rank++)
        ht_lock_longest(rank);
    slowest_ns = 0;
    ready_before_ns = reader_ready_ns();
    began_ns = ht_now_ns();
}

/* Of all locks but that of the transaction, which is held from its begin to its end. */
static inline void expect_slices(const char *what)
{
    uint64_t ns = ht_now_ns() - began_ns;
    struct ht_lock_hold log = {0};

    if (prints)
        printf("%-28s %9.1f ms  slowest read %8.3f ms  reader ready %4.2f", what, (double)ns / 1e6,
               (double)slowest_ns / 1e6, (double)(reader_ready_ns() - ready_before_ns) / (double)ns);
    for (enum ht_lock_rank rank = HT_LOCK_TX + 1; rank < HT_LOCK_RANKS; rank++) {
        struct ht_lock_hold longest = ht_lock_longest(rank);
        if (prints && rank == HT_LOCK_STORE)
            printf("  longest holds: store %7.3f ms %7llu steps %7llu blocks", (double)longest.ns / 1e6,
                   (unsigned long long)longest.steps, (unsigned long long)longest.blocks);
        ck_assert_msg(longest.steps <= STEPS_MAX && longest.blocks <= BLOCKS_MAX,
                      "%s: %llu steps, %llu blocks in one hold", what, (unsigned long long)longest.steps,
                      (unsigned long long)longest.blocks);
        log = rank == HT_LOCK_JOURNAL ? longest : log;
    }
    if (prints)
        printf("  log %7.3f ms\n", (double)log.ns / 1e6);
}

static inline void fill(uint64_t first, uint64_t count, uint8_t seed)
{
    uint8_t block[BLOCK];

    memset(block, seed, sizeof(block));
    for (uint64_t i = first; i < first + count; i++)
        put_all(obj, i * CHUNK, block, sizeof(block));
}

static inline void expect_block(uint64_t index, uint8_t seed)
{
    uint8_t want[BLOCK];

    memset(want, seed, sizeof(want));
    expect(obj, index * CHUNK, want, sizeof(want));
}

/* -------------------------------------------------------------- kept steps */

static uint64_t kept_oid, *many_kept;
static struct ht_obj **files;
static size_t many_count;

/* The names of a copy: one object, or many beside it. */
static inline int copy_names(void *ctx, struct ht_copy *k)
{
    (void)ctx;
    k->to = ht_store_new_id(k->s);
    kept_oid = ht_copy_add(k, ht_obj_id(obj));
    for (size_t i = 0; i < many_count; i++)
        many_kept[i] = ht_copy_add(k, ht_obj_id(files[i]));
    return kept_oid ? 0 : -ENOMEM;
}

static inline void delete_in(struct ht_tx *tx, struct ht_obj *o)
{
    ht_obj_delete(o, tx);
    put_object(o);
}

static inline void names_ended(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx)
{
    (void)ctx, (void)scope;
    if (how != HT_SCOPE_DELETED)
        return;
    delete_in(tx, get_object(kept_oid));
    for (size_t i = 0; i < many_count; i++)
        delete_in(tx, get_object(many_kept[i]));
}

static inline int emit_nothing(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes)
{
    (void)ctx, (void)tx, (void)cursor, (void)max_bytes;
    return 0;
}

static inline uint64_t keep(void)
{
    struct ht_copy k = {.must = true, .step = 1};
    uint64_t lsn;

    ck_assert_int_eq(ht_scope_commit_copying(s, SCOPE, &k, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(s, lsn), 0);
    return k.to;
}

static inline void forget(uint64_t kept)
{
    uint64_t lsn;

    ck_assert_int_eq(ht_kept_end(s, kept, chunks, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(s, lsn), 0);
}

/* ------------------------------------------------------------------- store */

static inline void open_store(void)
{
    struct ht_store_opts opts = {.dram_bytes = 64 * MIB, .staging_bytes = 16 * MIB, .numa_node = HT_NUMA_OFF};
    struct ht_participant names = {.type_first = HT_REC_NS_FIRST,
                                   .type_last = HT_REC_NS_LAST,
                                   .emit = emit_nothing,
                                   .ended = names_ended,
                                   .copy = copy_names};

    ck_assert_int_eq(ht_store_new(&dev, 1, &opts, &s), 0);
    ck_assert_int_eq(ht_store_register(s, &names), 0);
    ck_assert_int_eq(ht_store_mount(s), 0);
}

static inline void setup(void)
{
    struct ht_format_opts opts = {0};
    struct ht_super sb;
    uint8_t block[BLOCK] = {7};

    const char *text = getenv("HITRAIN_TEST_CHUNKS");
    prints = text != NULL;
    setlinebuf(stdout);
    chunks = text ? strtoull(text, NULL, 10) : FEW_CHUNKS;
    uint64_t bytes = chunks * 3 * BLOCK + 512 * (uint64_t)MIB;
    opts.log_bytes = ht_max_u64(64 * MIB, ht_round_up(chunks * 1024, MIB));
    ck_assert_int_eq(dev_open_ram(bytes + 2 * opts.log_bytes, 512, &dev), 0);
    ck_assert_int_eq(ht_super_format(&dev, 1, &opts, &sb), 0);
    open_store();
    hot = object(CHUNK, 0);
    put_all(hot, 0, block, sizeof(block));
    obj = object(CHUNK, SCOPE);
    ht_lock_measure(prints);
}

/* ----------------------------------------------------- changes meanwhile */

static uint8_t *seeds;
static _Atomic uint64_t changes;

/* One writer: seeds[] is what the chunks hold; 0: a hole, or behind the end. */
static inline void *change(void *arg)
{
    uint64_t state = 88172645463325252;
    uint8_t block[BLOCK];

    while (!stop) {
        random_next(&state);
        uint64_t index = state % chunks;
        uint8_t seed = (uint8_t)(1 + state / chunks % 255);
        memset(block, seed, sizeof(block));
        if (state % 7 && ht_obj_write(obj, index * CHUNK, block, sizeof(block)) != sizeof(block))
            abort();
        if (!(state % 7) && ht_obj_punch(obj, index * CHUNK, CHUNK))
            abort();
        seeds[index] = state % 7 ? seed : 0;
        changes++;
    }
    return arg;
}
