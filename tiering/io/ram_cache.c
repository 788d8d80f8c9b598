/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ram_cache.c - the volatile cache of a RAM device, for tests.
 *
 * Reads see the device's memory. What survives a power cut is the medium, a second copy, which takes sectors over when a flush ends:
 *
 *   on the medium --write--> written --a flush begins--> covered --it ends--> on the medium
 *                               ^                           |
 *                               `--------- write -----------'   what was covered goes to the medium before
 *   written, covered --a flush fails--> lost: the medium has noise there, reads see what was written, and no flush brings it
 *
 * One lock for all such devices, so that a power cut is one moment for several.
 */
#include "tiering/io/io_priv.h"

#include <hitrain/limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#define SECTOR 512u
#define LOST_BYTE 0xee

enum state { CLEAN, WRITTEN, COVERED };

struct ht_ram_cache {
    uint8_t *medium;
    uint8_t *state; /* of each sector */
    uint64_t flush_ns;
    unsigned void_after; /* writes; 0: never */
    bool off;
};

struct ht_mutex ht_ram_cache_lock = HT_MUTEX_INIT(HT_LOCK_DEV_RAM);

int ht_dev_ram_set_cache(struct ht_dev *dev, uint32_t flush_us)
{
    struct ht_ram_cache *c = calloc(1, sizeof(*c));

    if (c == NULL)
        return -ENOMEM;
    c->medium = malloc(dev->size);
    c->state = calloc(1, dev->size / SECTOR);
    c->flush_ns = (uint64_t)flush_us * 1000;
    dev->cache = c;
    if (c->medium == NULL || c->state == NULL) {
        ht_ram_cache_free(dev);
        return -ENOMEM;
    }
    memcpy(c->medium, dev->ram, dev->size);
    return 0;
}

void ht_ram_cache_free(struct ht_dev *dev)
{
    if (dev->cache == NULL)
        return;
    free(dev->cache->medium);
    free(dev->cache->state);
    free(dev->cache);
    dev->cache = NULL;
}

static void to_medium(struct ht_dev *dev, uint64_t sector)
{
    memcpy(dev->cache->medium + sector * SECTOR, dev->ram + sector * SECTOR, SECTOR);
}

void ht_ram_cache_note_write(struct ht_dev *dev, uint64_t offset, uint64_t bytes)
{
    for (uint64_t i = offset / SECTOR; dev->cache != NULL && i < (offset + bytes) / SECTOR; i++) {
        if (dev->cache->state[i] == COVERED)
            to_medium(dev, i);
        dev->cache->state[i] = WRITTEN;
    }
}

bool ht_ram_cache_is_off(const struct ht_dev *dev)
{
    return dev->cache != NULL && dev->cache->off;
}

/* fn for each sector that is not clean. */
static void each_unflushed(struct ht_dev *dev, void (*fn)(struct ht_dev *dev, uint64_t sector, void *ctx), void *ctx)
{
    const uint8_t *state = dev->cache->state;
    uint64_t word;

    for (uint64_t i = 0; i < dev->size / SECTOR; i++) {
        if (i % 8 == 0 && i + 8 <= dev->size / SECTOR) {
            memcpy(&word, state + i, sizeof(word));
            if (word == 0) {
                i += 7;
                continue;
            }
        }
        if (state[i] != CLEAN)
            fn(dev, i, ctx);
    }
}

static void cover(struct ht_dev *dev, uint64_t sector, void *ctx)
{
    dev->cache->state[sector] = COVERED;
}

static void lose(struct ht_dev *dev, uint64_t sector, void *ctx)
{
    memset(dev->cache->medium + sector * SECTOR, LOST_BYTE, SECTOR);
    dev->cache->state[sector] = CLEAN;
}

static void keep_covered(struct ht_dev *dev, uint64_t sector, void *ctx)
{
    if (dev->cache->state[sector] != COVERED)
        return;
    to_medium(dev, sector);
    dev->cache->state[sector] = CLEAN;
}

static void keep_any(struct ht_dev *dev, uint64_t sector, void *ctx)
{
    uint64_t *seed = ctx;

    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    if (*seed >> 63)
        to_medium(dev, sector);
    dev->cache->state[sector] = CLEAN;
}

void ht_ram_cache_begin_flush(struct ht_dev *dev, int error)
{
    ht_mutex_lock(&ht_ram_cache_lock);
    if (!dev->cache->off)
        each_unflushed(dev, error ? lose : cover, NULL);
    ht_mutex_unlock(&ht_ram_cache_lock);
}

bool ht_ram_cache_delays(const struct ht_io *io)
{
    return io->op == HT_IO_FLUSH && io->dev->cache != NULL && ht_now_ns() - io->began_ns_ < io->dev->cache->flush_ns;
}

void ht_ram_cache_end_flush(struct ht_dev *dev)
{
    if (dev->cache != NULL)
        each_unflushed(dev, keep_covered, NULL);
}

void ht_dev_ram_void_after(struct ht_dev *dev, unsigned nth)
{
    ht_mutex_lock(&ht_ram_cache_lock);
    dev->cache->void_after = nth;
    ht_mutex_unlock(&ht_ram_cache_lock);
}

void ht_ram_cache_end_write(struct ht_dev *dev)
{
    if (dev->cache == NULL || dev->cache->void_after == 0 || --dev->cache->void_after > 0)
        return;
    each_unflushed(dev, lose, NULL);
    atomic_fetch_add(&dev->flush_errors, 1);
}

void ht_dev_ram_power_off(struct ht_dev *const devs[], unsigned count, uint64_t seed)
{
    ht_mutex_lock(&ht_ram_cache_lock);
    for (unsigned i = 0; i < count; i++) {
        each_unflushed(devs[i], keep_any, &seed);
        devs[i]->cache->off = true;
    }
    ht_mutex_unlock(&ht_ram_cache_lock);
}

void ht_dev_ram_power_on(struct ht_dev *dev)
{
    ht_mutex_lock(&ht_ram_cache_lock);
    memcpy(dev->ram, dev->cache->medium, dev->size);
    memset(dev->cache->state, CLEAN, dev->size / SECTOR);
    dev->cache->off = false;
    ht_mutex_unlock(&ht_ram_cache_lock);
}
