/* SPDX-License-Identifier: Apache-2.0 */
/*
 * records.h - a stream of bytes as a header and records, each with its number, a place and checksums.
 * docs/stream-format.md describes them. What types, places and payloads mean is the caller's business.
 */
#ifndef HITRAIN_MOUNT_HELPERS_STREAM_RECORDS_H
#define HITRAIN_MOUNT_HELPERS_STREAM_RECORDS_H

#include <sys/types.h>

#include "tiering/base/buf.h"
#include "tiering/base/hash.h"

enum { HT_RECORDS_HEAD_BYTES = 48, HT_RECORDS_WHY_MAX = 448 };

/* ------------------------------------------------------------------ writer */

struct ht_records_out {
    int (*put)(void *ctx, const void *data, size_t len); /* everything; 0 or -errno; NULL: nothing is written */
    void *ctx;
    uint64_t number;       /* records so far */
    struct ht_buf payload; /* of the next record; the caller frees it */
};
/* Bytes that are no record: a header. */
int ht_records_put_bytes(struct ht_records_out *w, const void *data, size_t len) HT_MUST_CHECK;
/* sum: of the payload. */
int ht_records_put(struct ht_records_out *w, unsigned type, uint64_t place, const struct ht_hash128 *sum,
                   const void *payload, size_t len) HT_MUST_CHECK;
/* The same with w->payload. -ENOMEM if that could not be built. */
int ht_records_put_payload(struct ht_records_out *w, unsigned type, uint64_t place) HT_MUST_CHECK;

/* ------------------------------------------------------------------ reader */

struct ht_records_in {
    ssize_t (*get)(void *ctx, void *data, size_t len); /* bytes, 0 at the end, or -errno */
    void *ctx;
    const char *after;   /* NULL, or the path that a message names, "" while there is none */
    int cut;             /* the error of a stream that ends too early */
    uint64_t at, number; /* bytes and records so far */
    uint8_t *payload;    /* of the last record; owned */
    size_t payload_max;
    char why[HT_RECORDS_WHY_MAX]; /* of the last failure: a sentence that says where */
};
struct ht_records_head {
    unsigned type;
    uint64_t place;
    struct ht_hash128 sum; /* of the payload; it was compared */
    size_t len;
};
/* Allocates the payload and reads the header. The caller ends with ht_records_in_free, also after a failure. */
int ht_records_begin(struct ht_records_in *r, size_t payload_max, uint8_t *header, size_t len) HT_MUST_CHECK;
/*
 * The next record, its payload in r->payload. Number, sizes and checksums are right. -EPROTO,
 * r->cut, or an error of get.
 */
int ht_records_get(struct ht_records_in *r, struct ht_records_head *out) HT_MUST_CHECK;
/* Returns rc. The text may hold any byte of the stream: those that would steer a terminal become '?'. */
int ht_records_fail(struct ht_records_in *r, int rc, const char *fmt, ...) HT_PRINTF(3, 4);
void ht_records_in_free(struct ht_records_in *r);

#endif
