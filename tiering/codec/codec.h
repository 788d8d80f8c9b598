/* SPDX-License-Identifier: Apache-2.0 */
/*
 * codec.h - how a chunk's bytes are stored: the table of codecs, one row for each HT_CODEC_* of the format. Pure.
 */
#pragma once

#include "tiering/base/base.h"

/* What a record or a reference says about a chunk. */
struct ht_codec_sizes {
    uint8_t codec;
    unsigned extents;
    uint32_t stored, visible; /* bytes */
    uint64_t checksum;
};
/* May a chunk be stored so? False also for a codec that this program does not know. */
bool ht_codec_sizes_valid(const struct ht_codec_sizes *z) HT_MUST_CHECK;
