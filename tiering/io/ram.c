/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ram.c - devices of memory, for tests: same rules as a real one, no persistence.
 *
 * ram_lock makes each transfer whole in itself, as a device does for its blocks. Which of two
 * requests in flight comes first is up to the ring.
 */
#include "tiering/io/io_priv.h"

#include <hitrain/limits.h>
#include <stdlib.h>
#include <sys/mman.h>

#define DISCARDED_BYTE 0xd1

int ht_dev_open_ram(uint64_t bytes, uint32_t lba, struct ht_dev **out_dev)
{
    struct ht_dev *dev;
    void *ram;

    if ((lba != 512 && lba != 4096) || bytes == 0 || bytes % lba != 0)
        return -EINVAL;
    dev = ht_dev_alloc("ram");
    if (dev == NULL)
        return -ENOMEM;
    ram = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ram == MAP_FAILED) {
        ht_dev_close(dev);
        return -ENOMEM;
    }
    dev->ram = ram;
    dev->size = bytes;
    dev->ram_touched = calloc(1, ht_div_up(bytes, HT_BLOCK_BYTES));
    if (dev->ram_touched == NULL) {
        ht_dev_close(dev);
        return -ENOMEM;
    }
    dev->lba = lba;
    *out_dev = dev;
    return 0;
}

void *ht_dev_ram_data(struct ht_dev *dev)
{
    return dev->ram;
}

uint8_t *ht_dev_ram_touched(struct ht_dev *dev)
{
    return dev->ram_touched;
}

void ht_dev_ram_set_node(struct ht_dev *dev, int node)
{
    dev->numa_node = node;
}

static void ram_write(struct ht_dev *dev, const struct ht_io *io)
{
    uint64_t first = io->offset / HT_BLOCK_BYTES, end = ht_div_up(io->offset + io->len, HT_BLOCK_BYTES);

    ht_ram_cache_note_write(dev, io->offset, io->len);
    memcpy(dev->ram + io->offset, io->buf, io->len);
    memset(dev->ram_touched + first, 1, end - first);
}

/* Not zeroes, so that whoever reads what he gave away notices. */
static void ram_discard(struct ht_dev *dev, const struct ht_io *io)
{
    uint64_t first = io->offset / HT_BLOCK_BYTES, end = ht_div_up(io->offset + io->len, HT_BLOCK_BYTES);

    ht_ram_cache_note_write(dev, io->offset, io->len);
    memset(dev->ram + io->offset, DISCARDED_BYTE, io->len);
    memset(dev->ram_touched + first, 1, end - first);
}

void ht_dev_stall(struct ht_dev *dev, bool stalled)
{
    dev->stalled = stalled;
}

bool ht_dev_is_stalled(const struct ht_dev *dev)
{
    return dev->stalled;
}

static void perform(struct ht_dev *dev, struct ht_io *io)
{
    if (io->op == HT_IO_READ)
        memcpy(io->buf, dev->ram + io->offset, io->len);
    else if (io->op == HT_IO_DISCARD)
        ram_discard(dev, io);
    else if (io->op == HT_IO_FLUSH)
        ht_ram_cache_end_flush(dev);
    else if (io->op == HT_IO_WRITE) {
        ram_write(dev, io);
        ht_ram_cache_end_write(dev);
    }
}

int ht_ram_perform(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;
    struct ht_mutex *lock = dev->cache != NULL ? &ht_ram_cache_lock : &dev->ram_lock;
    bool off;

    ht_mutex_lock(lock);
    off = ht_ram_cache_is_off(dev);
    if (!off)
        perform(dev, io);
    ht_mutex_unlock(lock);
    return off ? -EIO : 0;
}
