/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kv.h - a small real client of the journal, for its tests: a map from keys to stamped values of some length.
 *
 * Block 0 of the first device plays the superblock (one write, one flush). The log copies lie on one device or on two.
 * A transaction sets a few keys to one stamp; so a group that was replayed in part shows.
 */
#pragma once

#include "tests/support/dev.h"
#include "tests/support/suite.h"
#include "tiering/journal/journal.h"

#define KV_KEYS 512u
#define KV_LOG_BYTES ((uint64_t)HT_LOG_BYTES_MIN)
#define KV_LOG_OFFSET ((uint64_t)65536)
#define KV_DEVICE_BYTES (KV_LOG_OFFSET + 2 * KV_LOG_BYTES)
#define KV_SALT 0x5a17ull
#define KV_MAGIC 0x6b765f7375706572ull
#define KV_SLICE_BYTES 32768u

enum { KV_SET = 200, KV_DEL = 201 };

struct kv_entry {
    uint64_t stamp; /* 0: not there */
    uint32_t len;   /* filler */
};

struct kv_map {
    struct kv_entry e[KV_KEYS];
};

struct kv {
    struct ht_dev *dev[2]; /* of the log copies; may be the same one */
    struct ht_dev *super;
    struct ht_journal *j;
    struct ht_journal_report report;
    struct ht_journal_start start;
    uint64_t epoch, super_durable, super_clean;
    pthread_mutex_t tx_lock;
    struct kv_map map;
    bool inline_checkpoint;
    _Atomic bool stopping; /* the thread that makes checkpoints ends */
    bool behind[2];        /* as the superblock says of their devices */
    uint64_t last_durable; /* the last call of the callback */
    uint64_t last_lsn;     /* of the last group */
    int before_write_error;
    unsigned before_writes;
    int (*copy_back)(void *ctx, unsigned copy);
};

static inline struct ht_dev *kv_new_dev(void)
{
    struct ht_dev *dev;

    ck_assert_int_eq(dev_open_ram(KV_DEVICE_BYTES, 512, &dev), 0);
    return dev;
}

/* A device of the same content, without armed failures. */
static inline struct ht_dev *kv_clone_dev(struct ht_dev *dev)
{
    struct ht_dev *clone = kv_new_dev();

    memcpy(ht_dev_ram_data(clone), ht_dev_ram_data(dev), KV_DEVICE_BYTES);
    return clone;
}

/* Copies the content of both devices into saved, and back from there. */
static inline void kv_save_images(const struct kv *kv, uint8_t saved[2][KV_DEVICE_BYTES])
{
    for (unsigned i = 0; i < 2; i++)
        memcpy(saved[i], ht_dev_ram_data(kv->dev[i]), KV_DEVICE_BYTES);
}

static inline void kv_restore_images(const struct kv *kv, uint8_t saved[2][KV_DEVICE_BYTES])
{
    for (unsigned i = 0; i < 2; i++)
        memcpy(ht_dev_ram_data(kv->dev[i]), saved[i], KV_DEVICE_BYTES);
}

static inline uint64_t kv_offset(const struct kv *kv, unsigned copy)
{
    return kv->dev[0] == kv->dev[1] && copy == 1 ? KV_LOG_OFFSET + KV_LOG_BYTES : KV_LOG_OFFSET;
}

/* The bytes of a log position in the memory of a copy. */
static inline uint8_t *kv_bytes(const struct kv *kv, unsigned copy, uint64_t pos)
{
    return (uint8_t *)ht_dev_ram_data(kv->dev[copy]) + kv_offset(kv, copy) + pos % KV_LOG_BYTES;
}

/* ------------------------------------------------------------ superblock */

static inline int kv_super_write(struct kv *kv)
{
    _Alignas(4096) uint8_t block[4096] = {0};
    const uint64_t words[] = {KV_MAGIC,  kv->start.pos,     kv->start.seq,  kv->start.chain,
                              kv->epoch, kv->super_durable, kv->super_clean};

    for (size_t i = 0; i < HT_ARRAY_SIZE(words); i++)
        ht_le64_store(block + 8 * i, words[i]);
    int rc = ht_dev_write(kv->super, 0, block, sizeof(block));
    return rc ? rc : ht_dev_flush(kv->super);
}

static inline void kv_super_read(struct kv *kv)
{
    const uint8_t *block = ht_dev_ram_data(kv->super);

    ck_assert_uint_eq(ht_le64_load(block), KV_MAGIC);
    kv->start = (struct ht_journal_start){
        .pos = ht_le64_load(block + 8), .seq = ht_le64_load(block + 16), .chain = ht_le64_load(block + 24)};
    kv->epoch = ht_le64_load(block + 32);
    kv->super_durable = ht_le64_load(block + 40);
    kv->super_clean = ht_le64_load(block + 48);
}

/* ------------------------------------------------------------- callbacks */

static inline int kv_replay_set(struct kv *kv, struct ht_reader *r, uint32_t len)
{
    uint32_t key = ht_get_u32(r);
    uint64_t stamp = ht_get_u64(r);

    if (r->bad || key >= KV_KEYS || stamp == 0)
        return -EUCLEAN;
    const uint8_t *value = ht_get_bytes(r, len - 12);
    if (r->bad)
        return -EUCLEAN;
    for (uint32_t i = 0; i < len - 12; i++)
        if (value[i] != (uint8_t)(stamp + key))
            return -EUCLEAN;
    kv->map.e[key] = (struct kv_entry){stamp, len - 12};
    return 0;
}

static inline int kv_replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    struct kv *kv = ctx;
    struct ht_reader r = ht_reader_of(payload, len);

    if (type == KV_SET)
        return kv_replay_set(kv, &r, len);
    uint32_t key = ht_get_u32(&r);
    if (type != KV_DEL || key >= KV_KEYS)
        return -EUCLEAN;
    kv->map.e[key] = (struct kv_entry){0, 0};
    return 0;
}

static inline int kv_before_write(void *ctx)
{
    struct kv *kv = ctx;

    kv->before_writes++;
    return kv->before_write_error;
}

static inline void kv_durable(void *ctx, uint64_t lsn)
{
    struct kv *kv = ctx;

    ck_assert(lsn >= kv->last_durable);
    kv->last_durable = lsn;
}

/* ------------------------------------------------------------------ life */

/* dev[0] == dev[1]: both copies on one device. */
static inline void kv_format(struct kv *kv, struct ht_dev *dev0, struct ht_dev *dev1)
{
    memset(kv, 0, sizeof(*kv));
    kv->dev[0] = kv->super = dev0;
    kv->dev[1] = dev1;
    kv->start.seq = 1;
    ck_assert_int_eq(kv_super_write(kv), 0);
}

static inline size_t kv_set_bytes(uint32_t len)
{
    return HT_RECORD_HEADER_BYTES + 12 + len;
}

/* Reads the superblock and replays; missing: bit i: copy i is not there. */
static inline int kv_open(struct kv *kv, bool force, unsigned missing)
{
    memset(&kv->map, 0, sizeof(kv->map));
    pthread_mutex_init(&kv->tx_lock, NULL);
    kv->last_durable = kv->last_lsn = 0;
    kv_super_read(kv);
    struct ht_journal_config c = {.log_bytes = KV_LOG_BYTES,
                                  .salt = KV_SALT,
                                  .start = kv->start,
                                  .epoch = kv->epoch,
                                  .durable_seq = kv->super_durable,
                                  .clean = kv->super_clean,
                                  .ctx = kv,
                                  .replay = kv_replay,
                                  .before_write = kv_before_write,
                                  .copy_back = kv->copy_back,
                                  .durable = kv_durable};
    for (unsigned i = 0; i < 2; i++) {
        c.dev[i] = missing & 1u << i ? NULL : kv->dev[i];
        c.offset[i] = kv_offset(kv, i);
        c.behind[i] = kv->behind[i];
    }
    kv->j = NULL;
    return ht_journal_open(&c, force, &kv->report, &kv->j);
}

static inline int kv_start(struct kv *kv)
{
    kv->epoch++;
    kv->super_clean = false;
    for (unsigned k = 0; k < KV_KEYS; k++)
        if (kv->map.e[k].stamp)
            ck_assert_int_eq(ht_journal_reserve(kv->j, kv_set_bytes(kv->map.e[k].len), true), 0);
    int rc = kv_super_write(kv);
    return rc ? rc : ht_journal_start(kv->j, kv->epoch);
}

static inline int kv_mount(struct kv *kv)
{
    int rc = kv_open(kv, false, 0);

    if (rc)
        return rc;
    rc = kv_start(kv);
    if (rc) {
        ht_journal_abandon(kv->j);
        kv->j = NULL;
    }
    return rc;
}

static inline void kv_crash(struct kv *kv)
{
    ht_journal_abandon(kv->j);
    kv->j = NULL;
}

static inline void kv_unmount(struct kv *kv)
{
    struct ht_journal_stats st;

    ck_assert_int_eq(ht_journal_sync(kv->j, kv->last_lsn), 0);
    ht_journal_stats(kv->j, &st);
    ck_assert_uint_le(st.used_bytes, st.log_bytes);
    kv->super_durable = ht_journal_durable(kv->j);
    kv->super_clean = true;
    kv_crash(kv);
    ck_assert_int_eq(kv_super_write(kv), 0);
}

/* How many frames of copies a scrub calls damaged. */
static inline unsigned kv_scrub(struct kv *kv)
{
    struct ht_log_scrub cursor = {.repair = true};
    struct ht_log_scrub_found found;
    unsigned damaged = 0;
    int rc;

    while ((rc = ht_journal_scrub_step(kv->j, &cursor, &found)) > 0)
        damaged += found.copy[0].damaged + found.copy[1].damaged;
    ck_assert_int_eq(rc, 0);
    ht_log_scrub_end(&cursor);
    return damaged;
}

/* ------------------------------------------------------------ checkpoint */

static inline void kv_put_set(struct ht_buf *b, uint32_t key, uint64_t stamp, uint32_t len)
{
    size_t mark = ht_record_begin(b, KV_SET);

    ht_buf_put_u32(b, key);
    ht_buf_put_u64(b, stamp);
    ck_assert_int_eq(ht_buf_reserve(b, len), 0);
    memset(b->data + b->len, (uint8_t)(stamp + key), len);
    b->len += len;
    ht_record_end(b, mark);
}

static inline int kv_emit_slice(struct kv *kv, uint32_t *key)
{
    struct ht_buf b = HT_BUF_INIT;
    int rc = 0;

    pthread_mutex_lock(&kv->tx_lock);
    for (; *key < KV_KEYS && b.len < KV_SLICE_BYTES; ++*key)
        if (kv->map.e[*key].stamp)
            kv_put_set(&b, *key, kv->map.e[*key].stamp, kv->map.e[*key].len);
    if (b.len)
        rc = ht_journal_append(kv->j, &b, &kv->last_lsn);
    pthread_mutex_unlock(&kv->tx_lock);
    ht_buf_free(&b);
    return rc;
}

static inline int kv_checkpoint(struct kv *kv)
{
    struct ht_journal_start start;
    int rc = ht_journal_checkpoint_begin(kv->j);

    for (uint32_t key = 0; rc == 0 && key < KV_KEYS;)
        rc = kv_emit_slice(kv, &key);
    if (rc == 0)
        rc = ht_journal_checkpoint_end(kv->j, &start);
    if (rc)
        return rc;
    kv->start = start;
    kv->super_durable = start.durable_seq;
    rc = kv_super_write(kv);
    if (rc == 0)
        ht_journal_checkpoint_release(kv->j, &start);
    return rc;
}

/* Until a checkpoint is wanted; copies that are due are brought up. False: the journal needs nothing any more. */
static inline bool kv_wait(struct kv *kv)
{
    uint64_t at_ns;
    enum ht_journal_need need;

    while ((need = ht_journal_need(kv->j, &at_ns)) != HT_JOURNAL_NEEDS_CHECKPOINT) {
        if (need == HT_JOURNAL_NEEDS_RESYNC)
            (void)!ht_journal_resync(kv->j);
        else if (kv->stopping)
            return false;
        else
            usleep(1000);
    }
    return true;
}

static inline void *kv_checkpoint_main(void *arg)
{
    struct kv *kv = arg;

    while (kv_wait(kv))
        if (kv_checkpoint(kv))
            break;
    return NULL;
}

static inline void kv_stop(struct kv *kv)
{
    kv->stopping = true;
    ht_journal_checkpoint_stop(kv->j);
}

/* ---------------------------------------------------------- transactions */

/* Room, then the transaction lock. */
static inline int kv_begin(struct kv *kv, size_t bytes)
{
    for (;;) {
        if (kv->inline_checkpoint && !ht_journal_try_space(kv->j, bytes)) {
            int rc = kv_checkpoint(kv);
            if (rc)
                return rc;
        }
        int rc = ht_journal_wait_space(kv->j, bytes);
        if (rc)
            return rc;
        pthread_mutex_lock(&kv->tx_lock);
        if (ht_journal_try_space(kv->j, bytes))
            return 0;
        pthread_mutex_unlock(&kv->tx_lock);
    }
}

/* The present reserves of the keys. */
static inline uint64_t kv_reserved(const struct kv *kv, const uint32_t keys[], unsigned count)
{
    uint64_t bytes = 0;

    for (unsigned i = 0; i < count; i++)
        bytes += kv->map.e[keys[i]].stamp ? kv_set_bytes(kv->map.e[keys[i]].len) : 0;
    return bytes;
}

/* Sets keys (different ones) to a stamp in one group. On an error nothing has changed. */
static inline int kv_set(struct kv *kv, const uint32_t keys[], unsigned count, uint64_t stamp, uint32_t len,
                         uint64_t *out_lsn)
{
    struct ht_buf b = HT_BUF_INIT;

    for (unsigned i = 0; i < count; i++)
        kv_put_set(&b, keys[i], stamp, len);
    int rc = kv_begin(kv, b.len);
    if (rc)
        goto out;
    uint64_t had = kv_reserved(kv, keys, count), wants = (uint64_t)count * kv_set_bytes(len);
    rc = ht_journal_reserve(kv->j, wants, false);
    if (rc)
        goto unlock;
    rc = ht_journal_append(kv->j, &b, &kv->last_lsn);
    *out_lsn = kv->last_lsn;
    ht_journal_unreserve(kv->j, rc ? wants : had);
    for (unsigned i = 0; rc == 0 && i < count; i++)
        kv->map.e[keys[i]] = (struct kv_entry){stamp, len};
unlock:
    pthread_mutex_unlock(&kv->tx_lock);
out:
    ht_buf_free(&b);
    return rc;
}

static inline int kv_set_one(struct kv *kv, uint32_t key, uint64_t stamp, uint32_t len)
{
    uint64_t lsn;
    int rc = kv_set(kv, &key, 1, stamp, len, &lsn);

    return rc ? rc : ht_journal_sync(kv->j, lsn);
}

static inline void kv_free_devs(struct kv *kv)
{
    if (kv->dev[1] != kv->dev[0])
        ht_dev_close(kv->dev[1]);
    ht_dev_close(kv->dev[0]);
    kv->dev[0] = kv->dev[1] = NULL;
}

/* --------------------------------------------------------- of the program */

static struct kv kv;

/* For run_tests(): after a test, unless it freed them itself. */
static inline void kv_end(void)
{
    if (kv.j)
        kv_unmount(&kv);
    if (kv.dev[0])
        kv_free_devs(&kv);
}
