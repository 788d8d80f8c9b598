/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h - a stream in memory, for writers and readers of streams. */
#ifndef HITRAIN_TESTS_UNIT_MOUNT_HELPERS_STREAM_MEMORY_H
#define HITRAIN_TESTS_UNIT_MOUNT_HELPERS_STREAM_MEMORY_H

#include <string.h>
#include <sys/types.h>

#include "tiering/base/buf.h"

static struct ht_buf stream;

/* Appends to it. */
static int put(void *ctx, const void *data, size_t len)
{
    (void)ctx;
    ht_buf_put(&stream, data, len);
    return stream.err;
}

/* ctx: the struct ht_reader of what is left. */
static inline ssize_t get_left(void *ctx, void *data, size_t len)
{
    struct ht_reader *in = ctx;
    size_t left = (size_t)(in->end - in->p), n = len < left ? len : left;

    if (n)
        memcpy(data, ht_get_bytes(in, n), n);
    return (ssize_t)n;
}

#endif
