/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_sparse.c - gradients that are mostly zeros go into the log as entries (tiering/base/sparse.h). These are sparse
 * gradients of clients and their sums, and dense ones such as those of an embedding.
 *
 * A worker reads a gradient once more to count its entries. For a dense gradient it stops after a few elements.
 */

#include "tiering/base/sparse.h"
#include "optim/state/context.h"
#include "optim/redo/redo_priv.h"

enum {
    LEAST_BYTES = 512, /* of elements; less is not worth its entries */
    PROBES = 4,
    PROBE_BYTES = 256,
    WINDOW_BYTES = 8 << 10,
    ENTRIES_BYTES_MAX = 2 * WINDOW_BYTES, /* of a window: an entry for each element of 2 bytes */
    OUT_BYTES = 2 * ENTRIES_BYTES_MAX,
};

/* Elements at evenly spread places, of which two thirds are not zero: hardly ever does a sparse gradient look so. */
static int looks_dense(struct ht_obj *obj, uint64_t off, uint32_t len, unsigned size, bool *out)
{
    uint8_t probe[PROBE_BYTES];
    size_t entries = 0, stride = len / PROBES / size * size;
    int rc = 0;

    *out = false;
    if (stride < PROBE_BYTES)
        return 0;
    for (unsigned i = 0; !rc && i < PROBES; i++) {
        struct ht_sparse_encoder e = {.size = size};
        rc = ht_opt_read_all(obj, off + i * stride, probe, sizeof(probe));
        entries += rc ? 0 : ht_sparse_encode(&e, probe, sizeof(probe), NULL) / ht_sparse_entry_bytes(size);
    }
    *out = entries * 3 > PROBES * (PROBE_BYTES / size) * 2;
    return rc;
}

int ht_opt_sparse_measure(struct ht_obj *obj, uint64_t off, uint32_t len, unsigned size, bool *out_sparse,
                          uint32_t *out_bytes)
{
    struct ht_sparse_encoder e = {.size = size};
    size_t bytes = 0, most = ht_min_u64(len / 2, HT_REDO_SPARSE_BYTES_MAX);
    uint8_t window[WINDOW_BYTES];
    bool dense = len < LEAST_BYTES;
    int rc = dense ? 0 : looks_dense(obj, off, len, size, &dense);

    *out_sparse = false;
    *out_bytes = 0;
    for (uint32_t done = 0; !rc && !dense && done < len; done += WINDOW_BYTES) {
        size_t part = ht_min_u64(len - done, WINDOW_BYTES);
        rc = ht_opt_read_all(obj, off + done, window, part);
        bytes += rc ? 0 : ht_sparse_encode(&e, window, part, NULL);
        dense = bytes > most;
    }
    if (rc || dense)
        return rc;
    *out_sparse = true;
    *out_bytes = (uint32_t)bytes;
    return 0;
}

int ht_opt_sparse_copy(struct ht_obj *obj, uint64_t off, uint32_t len, unsigned size, struct ht_obj *to, uint64_t at,
                       uint32_t bytes)
{
    struct ht_sparse_encoder e = {.size = size};
    uint8_t window[WINDOW_BYTES], out[OUT_BYTES];
    uint64_t end = at + bytes;
    size_t have = 0;

    for (uint32_t done = 0; done < len; done += WINDOW_BYTES) {
        size_t part = ht_min_u64(len - done, WINDOW_BYTES);
        int rc = ht_opt_read_all(obj, off + done, window, part);
        if (rc)
            return rc;
        have += ht_sparse_encode(&e, window, part, out + have);
        bool last = len - done <= WINDOW_BYTES;
        if (!last && have <= OUT_BYTES - ENTRIES_BYTES_MAX)
            continue;
        if (have > end - at || (last && have != end - at))
            return -EIO;
        rc = have ? ht_opt_write_all(to, at, out, have) : 0;
        if (rc)
            return rc;
        at += have;
        have = 0;
    }
    return 0;
}
