/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/state/records.h"
#include "tests/support/hostile.h"
#include "tests/support/log_records.h"
#include "tiering/object/chunk.h"

enum { FIRST_ID = 100, FAR = HT_FILE_BYTES_MAX / HT_SMALL_CHUNK_BYTES - 1, BLOCKS = 256 };

/* Of a chunk in count places of one block; all chunks have the same, from the first block of the log's copy on. */
static void put_chunk(struct ht_buf *b, uint64_t oid, uint64_t index, unsigned count)
{
    log_put_chunk(b,
                  &(struct log_chunk){.oid = oid,
                                      .index = index,
                                      .generation = 1,
                                      .stored = count * HT_BLOCK_BYTES,
                                      .visible = count * HT_BLOCK_BYTES,
                                      .checksum = index,
                                      .block = HT_MIB / HT_BLOCK_BYTES,
                                      .pieces = count,
                                      .codec = HT_CODEC_RAW});
}

static void put_object(struct ht_buf *b, uint64_t oid, uint64_t scope)
{
    log_put_object(b, &(struct log_object){.oid = oid, .scope = scope, .chunk_bytes = HT_CHUNK_BYTES});
}

/* ----------------------------------------------------------------- kinds */

/* Each alone under five nodes of its object's table. */
static void put_far_chunk(struct ht_buf *b, uint64_t n)
{
    put_chunk(b, FIRST_ID + n, FAR, 1);
}

/* One file's table, with a leaf for each. */
static void put_apart(struct ht_buf *b, uint64_t n)
{
    put_chunk(b, FIRST_ID, n * HT_LEAF_CHUNKS * HT_NODE_SLOTS, 1);
}

static void put_object_of_a_scope(struct ht_buf *b, uint64_t n)
{
    put_object(b, FIRST_ID + n, FIRST_ID + n);
}

static void put_root(struct ht_buf *b, uint64_t n)
{
    size_t mark = ht_record_begin(b, HT_REC_OPT_ROOT);

    ht_buf_put_u64(b, FIRST_ID + n);
    ht_buf_put_u64(b, 0);
    ht_record_end(b, mark);
}

/* Each of its blocks is a conflict. */
static void put_conflicts(struct ht_buf *b, uint64_t n)
{
    if (!n)
        put_object(b, FIRST_ID, 0);
    put_chunk(b, FIRST_ID, n, BLOCKS);
}

static void (*const kinds[HOSTILE_KINDS])(struct ht_buf *b, uint64_t n) = {
    put_far_chunk, put_apart, put_object_of_a_scope, put_root, put_conflicts};

void hostile_append(struct harness *k, unsigned kind, size_t bytes)
{
    struct ht_buf b = HT_BUF_INIT;

    for (uint64_t n = 0; b.len < bytes; n++)
        kinds[kind](&b, n);
    damage_append(k, &b);
    ht_buf_free(&b);
}

void hostile_harm(struct harness *k, const struct damage_ids *ids)
{
    (void)ids;
    harness_free(k);
    harness_format(k, 1, 64 << 20, 4096);
    hostile_append(k, 0, 3 << 19);
}
