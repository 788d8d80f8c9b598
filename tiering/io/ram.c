/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ram.c - devices of memory: the rules of a real one, no persistence.
 *
 * ram_lock makes each transfer whole in itself, as a device does for its blocks. Which of two
 * requests in flight comes first is up to the ring.
 */
#include "tiering/io/io_priv.h"

#include <sys/mman.h>

int ht_dev_open_ram(uint64_t bytes, uint32_t lba, struct ht_dev **out_dev)
{
    if ((lba != 512 && lba != 4096) || bytes == 0 || bytes % lba != 0)
        return -EINVAL;
    struct ht_dev *dev = ht_dev_alloc("ram");
    if (!dev)
        return -ENOMEM;
    void *ram = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (ram == MAP_FAILED) {
        ht_dev_close(dev);
        return -ENOMEM;
    }
    dev->ram = ram;
    dev->size = bytes;
    dev->lba = lba;
    dev->local = true;
    *out_dev = dev;
    return 0;
}

void *ht_dev_ram_data(struct ht_dev *dev)
{
    return dev->ram;
}

int ht_ram_perform(struct ht_io *io)
{
    struct ht_dev *dev = io->dev;

    if (dev->observer)
        return dev->observer->perform(dev->observer, io);
    ht_mutex_lock(&dev->ram_lock);
    if (io->op == HT_IO_READ)
        memcpy(io->buf, dev->ram + io->offset, io->len);
    else if (io->op == HT_IO_WRITE)
        memcpy(dev->ram + io->offset, io->buf, io->len);
    ht_mutex_unlock(&dev->ram_lock);
    return 0;
}
