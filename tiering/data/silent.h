/* SPDX-License-Identifier: Apache-2.0 */
/* silent.h - for callers that must not wait for a device that does not answer. Devices are bits. */
#ifndef HITRAIN_TIERING_DATA_SILENT_H
#define HITRAIN_TIERING_DATA_SILENT_H

#include "tiering/base/base.h"
#include "tiering/base/guarded.h"

struct ht_store;

/* Devices with a copy of the log that is written: without these nothing becomes durable. */
uint32_t ht_log_devices(const struct ht_store *s);
/* Devices that a commit of the scope waits for, including those of other threads' requests. Lock held. */
/* Releases the lock in between. */
uint32_t ht_commit_devices_locked(struct ht_store *s, uint64_t scope) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Returns those of the devices that do not answer. Ends when each has answered or counts as silent, which is after the
 * time that the options allow. The store's lock is not held.
 */
uint32_t ht_probe_devices(struct ht_store *s, uint32_t devices) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Waits for the probes that still run. No other thread works with the store. */
void ht_probes_end(struct ht_store *s);

#endif
