/* SPDX-License-Identifier: Apache-2.0 */
/*
 * limits.c - how large one transfer of a block device may be.
 *
 * The kernel would cut a larger one itself, but not in a call that must not wait. It refuses a ring's request that
 * needs cutting, and lets a thread of its own do it instead. That costs two switches, and order.
 */
#include "tiering/io/io_priv.h"
#include "tiering/sys/below.h"

#define PAGE_BYTES 4096u

/* The number of the disk, if the device is a partition. */
uint64_t ht_queue_limit(dev_t number, const char *name)
{
    static const char *const of[] = {"queue", "../queue"};
    uint64_t value = 0;

    for (unsigned i = 0; i < HT_ARRAY_SIZE(of) && value == 0; i++) {
        char path[64];
        snprintf(path, sizeof(path), "%s/%s", of[i], name);
        value = ht_block_number(number, path);
    }
    return value;
}

/* A number that is too large to matter is no bound. */
static uint32_t whole_blocks(const struct ht_dev *dev, uint64_t bytes)
{
    return bytes >= UINT32_MAX ? 0 : (uint32_t)(bytes / dev->lba * dev->lba);
}

void ht_dev_learn_limits(struct ht_dev *dev, dev_t number)
{
    uint64_t kib = ht_queue_limit(number, "max_sectors_kb"), segments = ht_queue_limit(number, "max_segments");
    uint64_t most = kib > 0 ? kib * HT_KIB : UINT64_MAX;
    uint64_t scattered = segments > 0 ? segments * PAGE_BYTES : UINT64_MAX;

    dev->transfer_max = whole_blocks(dev, most);
    dev->scattered_max = whole_blocks(dev, ht_min_u64(most, scattered));
}

uint32_t ht_dev_transfer_max(const struct ht_dev *dev, bool huge)
{
    return huge ? dev->transfer_max : dev->scattered_max;
}

/* Segments of one size, so that none is a small rest. */
uint32_t ht_dev_segment(const struct ht_io *io, uint32_t left, bool huge)
{
    const struct ht_dev *dev = io->dev;
    uint32_t max = io->op == HT_IO_DISCARD ? dev->discard_max : ht_dev_transfer_max(dev, huge);

    if (max == 0 || left <= max)
        return left;
    return (uint32_t)ht_round_up(ht_div_up(left, ht_div_up(left, max)), dev->lba);
}
