/* SPDX-License-Identifier: Apache-2.0 */
/* fixture.h - a store on a device of memory, for the tests of the store. */
#pragma once

#include "tests/support/background.h"
#include "tests/support/dev.h"
#include "tests/support/suite.h"
#include "tiering/api/batch_pin.h"
#include "tiering/api/check.h"
#include "tiering/api/object.h"
#include "tiering/api/stats.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"
#include "tiering/txn/txn.h"

enum { MIB = 1 << 20 };

#ifndef FIXTURE_MIB
#define FIXTURE_MIB 32 /* of the store that fixture_begin makes */
#endif

static struct ht_dev *dev;
static struct ht_store *s;
static uint64_t fixture_dram_bytes = 8 * MIB;
static uint64_t fixture_shm_bytes; /* beside these */
static bool fixture_shm_lent;      /* a part of these, instead */
static bool fixture_discard;
static unsigned fixture_owners_max;   /* of bytes that background work moves; 0: the store's limit */
static enum ht_inline fixture_inline; /* of objects that may be compressed: none */

/* With no_threads, or what else a test has in mind; the sizes are those above. */
static inline void mount_by(struct ht_store_opts opts)
{
    opts.dram_bytes = fixture_dram_bytes + fixture_shm_bytes;
    opts.shm_bytes = fixture_shm_bytes;
    opts.shm_lent = fixture_shm_lent;
    opts.staging_bytes = 16 * MIB;
    opts.numa_node = HT_NUMA_OFF;
    opts.discard = fixture_discard;
    opts.compress_inline = fixture_inline;
    opts.owners_max = fixture_owners_max;
    ck_assert_int_eq(ht_store_new(&dev, 1, &opts, &s), 0);
    ck_assert_int_eq(ht_store_mount(s), 0);
}

#define mount_as(...) mount_by((struct ht_store_opts){__VA_ARGS__})

static inline void mount_with(bool threads, bool read_only)
{
    mount_as(.no_threads = !threads, .read_only = read_only);
}

/* References of tests to objects of s: those that a test does not put itself are put before the store closes. */
static struct {
    pthread_mutex_t lock;
    struct ht_obj **o;
    size_t count, cap;
} held_objects = {.lock = PTHREAD_MUTEX_INITIALIZER};

static inline struct ht_obj *hold_object(struct ht_obj *o)
{
    pthread_mutex_lock(&held_objects.lock);
    if (held_objects.count == held_objects.cap) {
        held_objects.cap = held_objects.cap ? 2 * held_objects.cap : 64;
        held_objects.o = realloc(held_objects.o, held_objects.cap * sizeof(struct ht_obj *));
        ck_assert_ptr_nonnull(held_objects.o);
    }
    held_objects.o[held_objects.count++] = o;
    pthread_mutex_unlock(&held_objects.lock);
    return o;
}

static inline void put_object(struct ht_obj *o)
{
    size_t i;

    pthread_mutex_lock(&held_objects.lock);
    for (i = held_objects.count; i > 0 && held_objects.o[i - 1] != o; i--)
        ;
    if (i > 0)
        held_objects.o[i - 1] = held_objects.o[--held_objects.count];
    pthread_mutex_unlock(&held_objects.lock);
    ht_obj_put(o);
}

static inline void put_held(void)
{
    while (held_objects.count > 0)
        ht_obj_put(held_objects.o[--held_objects.count]);
}

static inline struct ht_obj *get_object(uint64_t oid)
{
    struct ht_obj *o = ht_obj_get(s, oid);

    return o ? hold_object(o) : NULL;
}

/* Which must be there. */
static inline struct ht_obj *same_object(uint64_t oid)
{
    struct ht_obj *o = get_object(oid);

    ck_assert_ptr_nonnull(o);
    return o;
}

/* As in a crash. */
static inline void close_store(void)
{
    put_held();
    ht_store_close(s);
    s = NULL;
}

static inline void unmount_store(void)
{
    put_held();
    ck_assert_int_eq(ht_store_unmount(s), 0);
    ht_store_close(s);
    s = NULL;
}

static inline void done(void)
{
    put_held();
    ht_store_verify(s, false);
    unmount_store();
    ht_dev_close(dev);
}

/* For run_tests(): after a test, unless it is done itself. */
static inline void fixture_end(void)
{
    if (s)
        done();
}

/* In place of the store that there may be. log_bytes 0: the usual size. */
static inline void fresh_with_log(uint64_t mib, uint64_t log_bytes, bool threads)
{
    struct ht_super sb;
    struct ht_format_opts opts = {.log_bytes = log_bytes};

    fixture_end();
    ck_assert_int_eq(dev_open_ram(mib * MIB, 512, &dev), 0);
    ck_assert_int_eq(ht_super_format(&dev, 1, &opts, &sb), 0);
    mount_with(threads, false);
}

static inline void fresh(uint64_t mib, bool threads)
{
    fresh_with_log(mib, 0, threads);
}

/* For run_tests(): before a test. */
static inline void fixture_begin(void)
{
    fresh(FIXTURE_MIB, false);
}

static inline struct ht_obj *object(uint32_t chunk_bytes, uint64_t scope)
{
    struct ht_obj *o;
    struct ht_obj_attr a = {.oid = ht_store_new_id(s), .chunk_bytes = chunk_bytes, .scope = scope};

    ck_assert_int_eq(ht_obj_create(s, &a, &o), 0);
    return hold_object(o);
}

/* Of 256 bytes that repeat, and change with each 8 KiB: most are copied, because sanitizers make arithmetic slow. */
static inline uint8_t *pattern(size_t n, unsigned seed)
{
    uint8_t *p = test_alloc(n);

    for (size_t at = 0; at < n; at += 256) {
        size_t len = ht_min_u64(256, n - at);
        if (at % 8192)
            memcpy(p + at, p + at - 256, len);
        else
            for (size_t i = at; i < at + len; i++)
                p[i] = (uint8_t)(i * 2654435761u + seed + (i >> 13));
    }
    return p;
}

/* Its chunks are all different, unlike chunks of pattern(). */
static inline uint8_t *noise(size_t n, uint64_t seed)
{
    uint8_t *p = test_alloc(n);

    for (size_t i = 0; i < n; i++) {
        if (i % 8 == 0)
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        p[i] = (uint8_t)(seed >> (56 - i % 8));
    }
    return p;
}

static inline void expect(struct ht_obj *o, uint64_t off, const uint8_t *want, size_t n)
{
    uint8_t *got = malloc(n);

    ck_assert_int_eq(ht_obj_read(o, off, got, n), (ssize_t)n);
    ck_assert_int_eq(memcmp(got, want, n), 0);
    free(got);
}

static inline void put_all(struct ht_obj *o, uint64_t off, const uint8_t *p, size_t n)
{
    ck_assert_int_eq(ht_obj_write(o, off, p, n), (ssize_t)n);
}

static inline void put_synced(struct ht_obj *o, uint64_t off, const uint8_t *p, size_t n)
{
    put_all(o, off, p, n);
    ck_assert_int_eq(ht_obj_sync(o), 0);
}

static inline void sync_and_evict(struct ht_obj *o)
{
    ck_assert_int_eq(ht_obj_sync(o), 0);
    ht_obj_evict(o);
}

static inline struct ht_obj *written_object(uint32_t chunk_bytes, uint64_t scope, const uint8_t *p, size_t n)
{
    struct ht_obj *o = object(chunk_bytes, scope);

    put_all(o, 0, p, n);
    return o;
}

static inline struct ht_obj *synced_object(uint32_t chunk_bytes, uint64_t scope, const uint8_t *p, size_t n)
{
    struct ht_obj *o = object(chunk_bytes, scope);

    put_synced(o, 0, p, n);
    return o;
}

/* A file of whole MiB with their number in each byte, durable and not in memory. */
static inline struct ht_obj *tensor_of(unsigned chunks)
{
    struct ht_obj *o = object(MIB, 0);
    uint8_t *bytes = malloc(MIB);

    for (unsigned i = 0; i < chunks; i++) {
        memset(bytes, (int)i, MIB);
        put_all(o, i * (uint64_t)MIB, bytes, MIB);
    }
    free(bytes);
    sync_and_evict(o);
    return o;
}

static inline void put_each(struct ht_obj *const o[], size_t n)
{
    for (size_t i = 0; i < n; i++)
        put_object(o[i]);
}

#define put_objects(...) put_each((struct ht_obj *[]){__VA_ARGS__}, HT_ARRAY_SIZE(((struct ht_obj *[]){__VA_ARGS__})))

/* A crash: the device loses nothing, and nothing more is written. */
static inline void crash(void)
{
    close_store();
    mount_with(false, false);
}

static inline void remount(void)
{
    unmount_store();
    mount_with(false, false);
}

/* The same object, which must be there, after the store has ended so. */
static inline struct ht_obj *after(void (*how)(void), struct ht_obj *o)
{
    uint64_t oid = ht_obj_id(o);

    how();
    return same_object(oid);
}

static inline void commit_durably(struct ht_tx *tx)
{
    uint64_t lsn;

    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(s, lsn), 0);
}

static inline void publish_scope(uint64_t scope)
{
    uint64_t lsn;

    ck_assert_int_eq(ht_scope_commit(s, scope, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(s, lsn), 0);
}

/* The same in one transaction of the caller. */
static inline void publish_scope_at_once(uint64_t scope)
{
    struct ht_tx *tx;

    ck_assert_int_eq(ht_scope_writeback(s, scope), 0);
    ck_assert_int_eq(ht_tx_begin(s, ht_scope_pending_bytes(s, scope) + (1 << 18), &tx), 0);
    ht_scope_publish(s, scope, false, tx);
    commit_durably(tx);
}

/* A file of which each chunk has the content of that one. */
static inline struct ht_obj *with_owners_of(struct ht_obj *from, uint32_t chunk_bytes, unsigned n)
{
    struct ht_obj *o = object(chunk_bytes, 0);

    for (uint64_t i = 0; i < n; i++)
        ck_assert_int_eq(ht_obj_clone(from, 0, o, i * chunk_bytes, chunk_bytes), chunk_bytes);
    ck_assert_int_eq(ht_store_commit(s), 0);
    return o;
}

static inline void pin_now(struct ht_batch_pin *l)
{
    ck_assert_int_eq(ht_batch_pin_begin(l), 0);
    ck_assert_int_eq(ht_batch_pin_wait(l), 0);
}

static inline void unpin(struct ht_batch_pin *l, uint32_t dirty)
{
    ht_batch_pin_end(l, dirty);
    ck_assert_int_eq(ht_batch_pin_finish(l), 0);
}

static inline struct ht_store_stats stats(void)
{
    struct ht_store_stats st;

    ht_store_stats(s, &st);
    return st;
}

static inline struct ht_obj_stat obj_stat(struct ht_obj *o)
{
    struct ht_obj_stat st;

    ht_obj_stat(o, &st);
    return st;
}

/*
 * Sets so much of the log aside that it has no room for one transaction of so many bytes, but for half of that.
 */
static inline uint64_t crowd_log(size_t bytes)
{
    uint64_t aside = 0;
    struct ht_tx *tx;

    for (; ht_tx_begin(s, bytes, &tx) == 0; aside += bytes / 4) {
        ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
        ht_store_log_reserve_force(s, bytes / 4);
    }
    ck_assert_int_eq(ht_tx_begin(s, bytes / 2, &tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    return aside;
}

static inline struct ht_background_stat engine(const char *name)
{
    return background_stat(s, name);
}

static inline uint64_t engine_figure(const char *name, const char *key)
{
    return background_figure(s, name, key);
}

static inline uint64_t engine_memory_bytes(void)
{
    ht_store_lock(s);
    uint64_t bytes = ht_engine_memory_bytes(s);
    ht_store_unlock(s);
    return bytes;
}

/* Deletes and releases the object; durable only with a later sync. */
static inline void delete (struct ht_obj *o)
{
    struct ht_tx *tx;

    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
    ht_obj_delete(o, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    put_object(o);
}

static inline void delete_durably(struct ht_obj *o)
{
    delete (o);
    ck_assert_int_eq(ht_store_commit(s), 0);
}
