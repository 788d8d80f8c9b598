/* SPDX-License-Identifier: Apache-2.0 */
/* record_bytes.h - log bytes of objects and chunks. */
#ifndef HITRAIN_TIERING_OBJECT_RECORD_BYTES_H
#define HITRAIN_TIERING_OBJECT_RECORD_BYTES_H

enum {
    HT_OBJECT_RECORD_BYTES = 8 + 8 + 4 + 4 + 8 + 8,
    HT_OBJECT_DEL_RECORD_BYTES = 8 + 8,
    HT_CHUNK_RECORD_BYTES = 8 + 8 + 8 + 4 + 1 + 1 + 2 + 4 + 4 + 8,
    HT_CHUNK_DEL_RECORD_BYTES = 8 + 8 + 8 + 8,
    HT_FRAG_RECORD_BYTES = 12,
};

#endif
