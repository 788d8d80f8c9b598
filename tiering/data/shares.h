/* SPDX-License-Identifier: Apache-2.0 */
/* shares.h - the share of new content that each device gets, as fast as it is. */
#pragma once

#include "tiering/base/base.h"

struct ht_store;

/* Before a device is chosen: brings the shares up to date, if that is due. */
void ht_shares_update(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
