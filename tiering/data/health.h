/* SPDX-License-Identifier: Apache-2.0 */
/* health.h - how the devices do. */
#ifndef HITRAIN_TIERING_DATA_HEALTH_H
#define HITRAIN_TIERING_DATA_HEALTH_H

#include "tiering/base/base.h"
#include "tiering/io/dev.h"

struct ht_store;

/* The present state of the device; reports changes, and remembers them for placement. */
enum ht_health ht_store_check_device(struct ht_store *s, unsigned device) HT_REQUIRES(HT_LOCK_STORE);
/* The state at the last check. Also without the lock. */
enum ht_health ht_device_health(const struct ht_store *s, unsigned device);
/* Time between two looks of the background. */
uint64_t ht_health_period_ns(const struct ht_store *s);
/* The bytes of superblocks and log on a device. */
uint64_t ht_store_fixed_bytes(const struct ht_store *s, unsigned device);

#endif
