/* SPDX-License-Identifier: Apache-2.0 */
/* processors.h - how much of the machine's processors is idle. Any thread. */
#ifndef HITRAIN_TIERING_SYS_PROCESSORS_H
#define HITRAIN_TIERING_SYS_PROCESSORS_H

#include "tiering/base/base.h"

/* Milliseconds for which processors were idle, all together, since the machine began. -EIO: the kernel does not say. */
int ht_processors_idle_ms(uint64_t *out_ms) HT_MUST_CHECK;

#endif
