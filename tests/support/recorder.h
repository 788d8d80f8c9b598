/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recorder.h - records every completed write, flush and mark of a device, in the dm-log-writes format
 * (Linux Documentation/admin-guide/device-mapper/log-writes.rst). One recorder per device; started while nothing
 * is in flight. Sectors are of 512 bytes; a mark has at most 480.
 *
 * A discard is recorded as a write of DISCARDED_BYTE. Writes are logged when they completed. A FLUSH entry makes every
 * write before it durable, so it is logged only for a flush during which no write completed. Otherwise the writes that
 * this flush covered are logged again with the FUA flag. After them come, again, the overlapping writes that it did not
 * cover. A reader keeps the rule of the format: a FUA write is durable itself, and no older write undoes it.
 */
#pragma once

#include "tests/support/dev.h"

int recorder_start(struct ht_dev *dev, const char *path) HT_MUST_CHECK;
/*
 * Records dev together with a device that is recorded already: in one order, at addresses after those of the devices
 * that are recorded together so far. -ENOENT: that one is not recorded. Stopping one stops all.
 */
int recorder_join(struct ht_dev *dev, struct ht_dev *recorded) HT_MUST_CHECK;
int recorder_mark(struct ht_dev *dev, const char *text) HT_MUST_CHECK;
int recorder_stop(struct ht_dev *dev) HT_MUST_CHECK;
