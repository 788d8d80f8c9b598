/* SPDX-License-Identifier: Apache-2.0 */
/* data.h - the state of data/. */
#pragma once

#include "tiering/base/base.h"

struct ht_store;

/* Before and after everything else. -ENOMEM */
int ht_data_setup(struct ht_store *s) HT_MUST_CHECK;
void ht_data_teardown(struct ht_store *s);
/* From now on chunks may be compressed: reading one never fails for want of a decoder. -ENOMEM */
int ht_data_need_decoder(struct ht_store *s) HT_MUST_CHECK;
/* Heap that it holds for decoders and encoders. */
uint64_t ht_data_bytes(struct ht_store *s);
