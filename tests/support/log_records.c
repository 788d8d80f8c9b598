/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/log_records.h"

#include "tiering/journal/journal.h"
#include <hitrain/format.h>

void log_put_chunk(struct ht_buf *b, const struct log_chunk *c)
{
    unsigned pieces = c->pieces ? c->pieces : 1;
    uint64_t blocks = ht_div_up(c->stored, HT_BLOCK_BYTES) / pieces;
    size_t mark = ht_record_begin(b, HT_REC_CHUNK);

    ht_buf_put_u64(b, c->oid);
    ht_buf_put_u64(b, c->index);
    ht_buf_put_u32(b, c->generation);
    ht_buf_put_u8(b, c->codec);
    ht_buf_put_u8(b, 0);
    ht_buf_put_u16(b, (uint16_t)pieces);
    ht_buf_put_u32(b, c->stored);
    ht_buf_put_u32(b, c->visible);
    ht_buf_put_u64(b, c->checksum);
    for (unsigned i = 0; i < pieces; i++) {
        ht_buf_put_u8(b, c->device);
        ht_buf_put_u8(b, 0);
        ht_buf_put_u16(b, (uint16_t)blocks);
        ht_buf_put_u64(b, c->block + i * blocks);
    }
    ht_record_end(b, mark);
}

void log_put_object(struct ht_buf *b, const struct log_object *o)
{
    size_t mark = ht_record_begin(b, HT_REC_OBJECT);

    ht_buf_put_u64(b, o->oid);
    ht_buf_put_u32(b, o->chunk_bytes);
    ht_buf_put_u32(b, HT_CLASS_DURABLE);
    ht_buf_put_u64(b, o->size);
    ht_buf_put_u64(b, o->scope);
    ht_record_end(b, mark);
}
