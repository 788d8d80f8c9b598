/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev_cache.c - the volatile cache of a device of memory.
 *
 * Reads see the device's memory. Only the medium survives a power cut. It is a second copy, which takes sectors over
 * when a flush ends:
 *
 *   on the medium --write--> written --a flush begins--> covered --it ends--> on the medium
 *                               ^                           |
 *                               `--------- write -----------'   the covered bytes go to the medium before
 *   written, covered --a flush fails--> lost: the medium has noise there, reads see the
 *                                       written bytes, and no flush brings them
 *
 * One lock for all such devices, so that a power cut is one moment for several.
 */
#include <hitrain/limits.h>
#include <stdlib.h>

#include "tests/support/dev_priv.h"

#define SECTOR 512u
#define LOST_BYTE 0xee

enum state { CLEAN, WRITTEN, COVERED };

struct dev_cache {
    uint8_t *medium;
    uint8_t *state; /* state of each sector */
    _Atomic uint64_t flush_ns;
    unsigned void_after; /* writes; 0: never */
    bool off;
};

pthread_mutex_t dev_cache_lock = PTHREAD_MUTEX_INITIALIZER;

/* Blocks that nothing has written are zeros on both sides, and take no memory. */
static void copy_written(const struct dev *d, uint8_t *to, const uint8_t *from)
{
    for (uint64_t at = 0; at < d->dev->size; at += HT_BLOCK_BYTES)
        if (d->touched[at / HT_BLOCK_BYTES])
            memcpy(to + at, from + at, ht_min_u64(HT_BLOCK_BYTES, d->dev->size - at));
}

int dev_set_cache(struct ht_dev *dev, uint32_t flush_us)
{
    struct dev_cache *c = calloc(1, sizeof(*c));
    struct dev *d = dev_of(dev);

    if (!c)
        return -ENOMEM;
    c->medium = calloc(1, d->dev->size);
    c->state = calloc(1, d->dev->size / SECTOR);
    c->flush_ns = (uint64_t)flush_us * 1000;
    d->cache = c;
    if (!c->medium || !c->state) {
        dev_cache_free(d);
        return -ENOMEM;
    }
    copy_written(d, c->medium, d->dev->ram);
    return 0;
}

void dev_set_flush_us(struct ht_dev *dev, uint32_t flush_us)
{
    dev_of(dev)->cache->flush_ns = (uint64_t)flush_us * 1000;
}

void dev_cache_free(struct dev *d)
{
    if (!d->cache)
        return;
    free(d->cache->medium);
    free(d->cache->state);
    free(d->cache);
    d->cache = NULL;
}

static void to_medium(struct dev *d, uint64_t sector)
{
    memcpy(d->cache->medium + sector * SECTOR, d->dev->ram + sector * SECTOR, SECTOR);
}

void dev_cache_note_write(struct dev *d, uint64_t offset, uint64_t bytes)
{
    for (uint64_t i = offset / SECTOR; d->cache && i < (offset + bytes) / SECTOR; i++) {
        if (d->cache->state[i] == COVERED)
            to_medium(d, i);
        d->cache->state[i] = WRITTEN;
    }
}

bool dev_cache_is_off(const struct dev *d)
{
    return d->cache && d->cache->off;
}

/* Calls fn for each sector that is not clean. */
static void each_unflushed(struct dev *d, void (*fn)(struct dev *d, uint64_t sector, void *ctx), void *ctx)
{
    const uint8_t *state = d->cache->state;
    uint64_t word;

    for (uint64_t i = 0; i < d->dev->size / SECTOR; i++) {
        if (i % 8 == 0 && i + 8 <= d->dev->size / SECTOR) {
            memcpy(&word, state + i, sizeof(word));
            if (word == 0) {
                i += 7;
                continue;
            }
        }
        if (state[i] != CLEAN)
            fn(d, i, ctx);
    }
}

static void cover(struct dev *d, uint64_t sector, void *ctx)
{
    d->cache->state[sector] = COVERED;
}

static void lose(struct dev *d, uint64_t sector, void *ctx)
{
    memset(d->cache->medium + sector * SECTOR, LOST_BYTE, SECTOR);
    d->cache->state[sector] = CLEAN;
}

static void keep_covered(struct dev *d, uint64_t sector, void *ctx)
{
    if (d->cache->state[sector] != COVERED)
        return;
    to_medium(d, sector);
    d->cache->state[sector] = CLEAN;
}

static void keep_any(struct dev *d, uint64_t sector, void *ctx)
{
    uint64_t *seed = ctx;

    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    if (*seed >> 63)
        to_medium(d, sector);
    d->cache->state[sector] = CLEAN;
}

void dev_cache_begin_flush(struct dev *d, int error)
{
    pthread_mutex_lock(&dev_cache_lock);
    if (!d->cache->off)
        each_unflushed(d, error ? lose : cover, NULL);
    pthread_mutex_unlock(&dev_cache_lock);
}

bool dev_cache_delays(const struct dev *d, const struct ht_io *io)
{
    return io->op == HT_IO_FLUSH && d->cache && ht_now_ns() - io->began_ns_ < d->cache->flush_ns;
}

void dev_cache_end_flush(struct dev *d)
{
    if (d->cache)
        each_unflushed(d, keep_covered, NULL);
}

void dev_void_after(struct ht_dev *dev, unsigned nth)
{
    struct dev *d = dev_of(dev);

    pthread_mutex_lock(&dev_cache_lock);
    d->cache->void_after = nth;
    pthread_mutex_unlock(&dev_cache_lock);
}

void dev_cache_end_write(struct dev *d)
{
    if (!d->cache || d->cache->void_after == 0 || --d->cache->void_after > 0)
        return;
    each_unflushed(d, lose, NULL);
    atomic_fetch_add(&d->dev->errors[HT_IO_FLUSH], 1);
}

void dev_power_off(struct ht_dev *const devs[], unsigned count, uint64_t seed)
{
    pthread_mutex_lock(&dev_cache_lock);
    for (unsigned i = 0; i < count; i++) {
        each_unflushed(dev_of(devs[i]), keep_any, &seed);
        dev_of(devs[i])->cache->off = true;
    }
    pthread_mutex_unlock(&dev_cache_lock);
}

void dev_power_on(struct ht_dev *dev)
{
    struct dev_cache *c = dev_of(dev)->cache;

    pthread_mutex_lock(&dev_cache_lock);
    copy_written(dev_of(dev), dev->ram, c->medium);
    memset(c->state, CLEAN, dev->size / SECTOR);
    c->off = false;
    pthread_mutex_unlock(&dev_cache_lock);
}
