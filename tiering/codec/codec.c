/* SPDX-License-Identifier: Apache-2.0 */
/* codec.c - the table of codecs. */
#include "tiering/codec/codec.h"
#include <hitrain/format.h>

/* The chunk's bytes themselves; a truncation lets fewer of them count. */
static bool raw_valid(const struct ht_codec_sizes *z)
{
    return z->extents && z->extents <= HT_FRAGS_MAX && z->stored && z->stored <= HT_CHUNK_BYTES &&
        z->visible <= z->stored;
}

/* Nothing is stored. */
static bool lost_valid(const struct ht_codec_sizes *z)
{
    return !z->extents && !z->stored && z->visible && z->visible <= HT_CHUNK_BYTES && !z->checksum;
}

/* A compressed frame: more bytes may count than are stored. The decoder checks the rest. */
static bool planes_valid(const struct ht_codec_sizes *z)
{
    return z->extents && z->extents <= HT_FRAGS_MAX && z->stored > sizeof(struct ht_disk_planes) &&
        z->stored < HT_CHUNK_BYTES && z->visible <= HT_CHUNK_BYTES;
}

static const struct codec {
    bool (*sizes_valid)(const struct ht_codec_sizes *z);
} codecs[] = {
    [HT_CODEC_RAW] = {raw_valid},
    [HT_CODEC_LOST] = {lost_valid},
    [HT_CODEC_PLANES] = {planes_valid},
};

bool ht_codec_sizes_valid(const struct ht_codec_sizes *z)
{
    return z->codec < HT_ARRAY_SIZE(codecs) && codecs[z->codec].sizes_valid(z);
}
