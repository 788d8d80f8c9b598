/* SPDX-License-Identifier: Apache-2.0 */
/* compact.h - content moves out of nearly empty groups of blocks, so that free space is in long runs. */
#ifndef HITRAIN_TIERING_API_COMPACT_H
#define HITRAIN_TIERING_API_COMPACT_H

#include "tiering/base/base.h"

struct ht_store;

/* One pass in this thread, at full speed and whatever the options say. WAITS. -EROFS, -ENOMEM */
int ht_store_compact(struct ht_store *s) HT_MUST_CHECK;

#endif
