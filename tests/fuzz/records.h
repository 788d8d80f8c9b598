/* SPDX-License-Identifier: Apache-2.0 */
/*
 * records.h - streams of records in memory, for fuzz targets: callbacks of writers and
 * readers, and records with right checksums.
 */
#ifndef HITRAIN_TESTS_FUZZ_RECORDS_H
#define HITRAIN_TESTS_FUZZ_RECORDS_H

#include "mount-helpers/stream/records.h"

/* To a struct ht_buf. */
static inline int fuzz_put(void *ctx, const void *data, size_t len)
{
    ht_buf_put(ctx, data, len);
    return 0;
}

/* From a struct ht_reader. */
static inline ssize_t fuzz_get(void *ctx, void *data, size_t len)
{
    struct ht_reader *in = ctx;
    size_t left = (size_t)(in->end - in->p), n = len < left ? len : left;

    if (n)
        memcpy(data, ht_get_bytes(in, n), n);
    return (ssize_t)n;
}

static inline void fuzz_put_record(struct ht_buf *to, uint64_t number, uint8_t type, uint64_t place,
                                   const uint8_t *payload, size_t len)
{
    struct ht_records_out w = {.put = fuzz_put, .ctx = to, .number = number};
    struct ht_hash128 sum = ht_hash128(payload, len);
    int rc = ht_records_put(&w, type, place, &sum, payload, len);

    (void)rc; /* memory alone */
}

#endif
