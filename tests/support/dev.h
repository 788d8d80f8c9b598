/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dev.h - what tests do to devices: fail and stall requests, look at memory, cut the power. An observer
 * (tiering/io/io_priv.h) does all this. A device of memory has it from dev_open_ram on, any other one gets it at the
 * first call of a function below, while nothing is in flight. ht_dev_close frees it.
 */
#pragma once

#include "tiering/io/dev.h"

/* As ht_dev_open_ram. After a discard the bytes are not zero, so a reader of discarded bytes notices. */
int dev_open_ram(uint64_t bytes, uint32_t lba, struct ht_dev **out_dev) HT_MUST_CHECK;
/* One byte for each HT_BLOCK_BYTES of a device of memory. Writes and discards set it; tests read and clear it. */
uint8_t *dev_touched(struct ht_dev *dev);
/* From now on a device counts as attached to this NUMA node. */
void dev_set_node(struct ht_dev *dev, int node);

/*
 * The n-th operation of a kind from now (1 = next) fails with -EIO before the device, repeat: all after it; 0 disarms.
 */
void dev_fail(struct ht_dev *dev, enum ht_io_op op, unsigned nth, bool repeat);
/* The same with this error. */
void dev_fail_with(struct ht_dev *dev, enum ht_io_op op, unsigned nth, bool repeat, int error);
/* A request that fails so ends this much later than its failure. Counts also for one that has failed already. */
void dev_set_error_us(struct ht_dev *dev, uint32_t us);
/* How many have failed and not ended. */
unsigned dev_errors_pending(struct ht_dev *dev);
/* Each request takes so long before it begins; 0: no longer. */
void dev_set_delay(struct ht_dev *dev, unsigned ms);
/* A device of memory stops answering, or answers again: its requests wait. Answering again disarms dev_stall_at. */
void dev_stall(struct ht_dev *dev, bool stalled);
/* It stops when the n-th operation of a kind from now begins, that one included; 0 disarms. Replaces dev_fail of it. */
void dev_stall_at(struct ht_dev *dev, enum ht_io_op op, unsigned nth);
/* Called by the thread of each request before it begins; NULL: nothing is. */
void dev_call_before(struct ht_dev *dev, void (*fn)(enum ht_io_op op));
bool dev_is_stalled(struct ht_dev *dev);
/* Returns when it has stopped. A test that releases a device without this may come before the request that stops it. */
void dev_wait_stalled(struct ht_dev *dev);

/*
 * Gives a device of memory a volatile cache: written bytes can be read at once. They are on the medium when a later
 * flush has ended well, which takes flush_us. A flush that fails removes all unflushed writes from the medium.
 */
int dev_set_cache(struct ht_dev *dev, uint32_t flush_us) HT_MUST_CHECK;
/* Also for flushes in flight. */
void dev_set_flush_us(struct ht_dev *dev, uint32_t flush_us);
/*
 * Cuts the power of devices with caches, at one moment: their media keep some 512-byte sectors of the unflushed writes,
 * as seed says, and all later requests fail. After power on a device shows the content of its medium.
 */
void dev_power_off(struct ht_dev *const devs[], unsigned count, uint64_t seed);
void dev_power_on(struct ht_dev *dev);
/* When the n-th write from now (1 = next) has ended, the flush of another caller fails at once. */
void dev_void_after(struct ht_dev *dev, unsigned nth);
