/* SPDX-License-Identifier: Apache-2.0 */
/* super_priv.h - the common part of the files of the superblock. */
#pragma once

#include "tiering/space/super.h"

#define HT_SUPER_DEVICE_BYTES_MIN (8 * HT_MIB)
#define HT_SUPER_COUNTER_MAX (1ull << 62) /* generations, epochs, positions: never reached by counting */

bool ht_super_log_bytes_valid(uint64_t bytes);
bool ht_super_label_valid(const char *label);
int ht_super_make_uuid(uint8_t out[16]) HT_MUST_CHECK;
