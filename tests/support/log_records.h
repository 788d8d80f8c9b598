/* SPDX-License-Identifier: Apache-2.0 */
/* log_records.h - records of references and objects that no program would write, byte by byte as format.h has them. */
#pragma once

#include "tiering/base/buf.h"

struct log_chunk {
    uint64_t oid, index;
    uint32_t generation, stored, visible; /* the latter in bytes */
    uint64_t checksum, block;             /* the first one */
    uint8_t device;
    unsigned pieces; /* as long as each other, one behind the other; 0: one */
    uint8_t codec;
};
void log_put_chunk(struct ht_buf *b, const struct log_chunk *c);

struct log_object {
    uint64_t oid, size, scope;
    uint32_t chunk_bytes;
};
/* Its class is durable. */
void log_put_object(struct ht_buf *b, const struct log_object *o);
