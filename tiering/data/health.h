/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health.h - how the devices do, for callers that must not wait for one that does not answer. Sets of devices are bits.
 */
#pragma once

#include "tiering/io/dev.h"

struct ht_store;

/* The present state of the device; reports changes, and remembers them for placement. */
enum ht_health ht_store_check_device(struct ht_store *s, unsigned device) HT_REQUIRES(HT_LOCK_STORE);
/* Its path, or a text for an absent one, or the vault. */
const char *ht_device_name(const struct ht_store *s, unsigned device);
/* Time between two looks of the background. */
uint64_t ht_health_period_ns(const struct ht_store *s);
/* Space for data on all present devices. */
uint64_t ht_store_data_bytes(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);

/* Devices with a copy of the log that is written: without these nothing becomes durable. */
uint32_t ht_log_devices(const struct ht_store *s);
/*
 * Devices that a commit of the scope waits for, including those of other threads' requests.
 * Releases the lock in between.
 */
uint32_t ht_commit_devices_locked(struct ht_store *s, uint64_t scope) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Returns those of the devices that do not answer. Ends when each has answered or counts as silent, which is after the
 * time that the options allow. The store's lock is not held.
 */
uint32_t ht_probe_devices(struct ht_store *s, uint32_t devices) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Waits for the probes that still run. No other thread works with the store. */
void ht_probes_end(struct ht_store *s);
