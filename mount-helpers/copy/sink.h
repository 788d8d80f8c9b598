/* SPDX-License-Identifier: Apache-2.0 */
/* sink.h - standard output as a stream with a limited rate. */
#ifndef HITRAIN_MOUNT_HELPERS_COPY_SINK_H
#define HITRAIN_MOUNT_HELPERS_COPY_SINK_H

#include "tiering/base/base.h"

struct ht_sink {
    uint64_t rate, written, began_ns; /* rate 0: no limit; the caller sets when it began */
    bool (*stopped)(void);            /* or NULL. True: a reader that takes nothing for 5 s ends the stream: -EINTR */
    int error;                        /* -errno of a write that failed, or 0 */
};
/* All len bytes, with ctx a struct ht_sink. 0 or -errno. */
int ht_sink_put(void *ctx, const void *data, size_t len) HT_MUST_CHECK;
/* Prints the error. reader: what reads the stream, and what happens when both programs are started again. */
void ht_sink_explain(int error, const char *reader, const char *again);

#endif
