/* SPDX-License-Identifier: Apache-2.0 */
/*
 * master.c - masters that are kept in two bytes, presented as the file of f32 that they stand for.
 *
 * On devices they are two objects: missing bits, two bytes per element, and blocks, of which each range has a chunk
 * (rules/master.h). Updates work on both in one batch pin (update.c). Here they are read and written in windows, with
 * several calls. The caller makes sure that no update comes between them, or reads again.
 */
#include <stdlib.h>

#include "optim/rules/master.h"
#include "optim/state/state_priv.h"

enum { WINDOW_BLOCKS = 64, WINDOW = WINDOW_BLOCKS * HT_MASTER_BLOCK };

/* Elements [first, first + n), in blocks that are whole but at the end of the parameter, all of one range. */
struct window {
    uint64_t first, n;
    uint16_t p[WINDOW], low[WINDOW];
    float master[WINDOW];
    struct ht_disk_master block[WINDOW_BLOCKS];
};

/* Bytes after the end of an object, which another program may have truncated, are zeros. */
static int read_all(struct ht_obj *obj, uint64_t off, void *buf, size_t len)
{
    ssize_t n = ht_obj_read(obj, off, buf, len);

    if (n < 0)
        return (int)n;
    memset((uint8_t *)buf + n, 0, len - (size_t)n);
    return 0;
}

static uint64_t blocks_at(const struct ht_opt_masters *m, uint64_t element)
{
    uint64_t range = element / m->shape.range_elements, in_range = element % m->shape.range_elements;

    return range * HT_SMALL_CHUNK_BYTES + in_range / HT_MASTER_BLOCK * sizeof(struct ht_disk_master);
}

static size_t blocks_bytes(const struct window *w)
{
    return ht_div_up(w->n, HT_MASTER_BLOCK) * sizeof(struct ht_disk_master);
}

/* The window that element is in; its parameters. */
static int find(const struct ht_opt_masters *m, uint64_t element, struct window *out)
{
    uint64_t all = ht_min_u64(WINDOW, m->shape.range_elements);

    out->first = element - element % all;
    out->n = ht_min_u64(all, m->shape.elements - out->first);
    return read_all(m->p, out->first * 2, out->p, out->n * 2);
}

static int load(const struct ht_opt_masters *m, uint64_t element, struct window *out)
{
    int rc = find(m, element, out);

    if (!rc)
        rc = read_all(m->low, out->first * 2, out->low, out->n * 2);
    if (!rc)
        rc = read_all(m->blocks, blocks_at(m, out->first), out->block, blocks_bytes(out));
    for (uint64_t i = 0; !rc && i < out->n; i += HT_MASTER_BLOCK)
        ht_master_expand(m->kernels, &out->block[i / HT_MASTER_BLOCK], out->p + i, out->low + i,
                         ht_min_u64(HT_MASTER_BLOCK, out->n - i), out->master + i);
    return rc;
}

static int store(const struct ht_opt_masters *m, struct window *w)
{
    for (uint64_t i = 0; i < w->n; i += HT_MASTER_BLOCK)
        ht_master_compress(m->kernels, w->master + i, w->p + i, ht_min_u64(HT_MASTER_BLOCK, w->n - i), w->low + i,
                           &w->block[i / HT_MASTER_BLOCK]);
    int rc = ht_opt_write_all(m->low, w->first * 2, w->low, w->n * 2);
    return rc ? rc : ht_opt_write_all(m->blocks, blocks_at(m, w->first), w->block, blocks_bytes(w));
}

/* Bytes of the file from off on that are in the window, at most len. */
static size_t overlap(const struct window *w, uint64_t off, size_t len)
{
    return ht_min_u64(len, (w->first + w->n) * 4 - off);
}

ssize_t ht_opt_masters_read(const struct ht_opt_masters *m, uint64_t off, void *buf, size_t len)
{
    uint64_t size = m->shape.elements * 4;
    struct window *w = malloc(sizeof(*w));
    size_t done = 0;
    int rc = w ? 0 : -ENOMEM;

    len = off < size ? ht_min_u64(len, size - off) : 0;
    while (!rc && done < len) {
        rc = load(m, (off + done) / 4, w);
        size_t n = rc ? 0 : overlap(w, off + done, len - done);
        if (n)
            memcpy((uint8_t *)buf + done, (const uint8_t *)w->master + (off + done - w->first * 4), n);
        done += n;
    }
    free(w);
    return rc ? rc : (ssize_t)done;
}

/* Checks that the written masters round to the present parameter. */
static int validate(const struct ht_opt_masters *m, struct window *w, uint64_t off, const void *buf, size_t len,
                    uint64_t *out_element)
{
    const uint8_t *bytes = buf;
    int rc = 0;

    w->n = 0;
    for (size_t i = 0; !rc && i < len; i += 4) {
        uint64_t e = (off + i) / 4;
        float x;
        memcpy(&x, bytes + i, sizeof(x));
        if (!w->n || e >= w->first + w->n)
            rc = find(m, e, w);
        if (rc || ht_master_rounds_to(x, w->p[e - w->first]))
            continue;
        *out_element = e;
        rc = -EDOM;
    }
    return rc;
}

static int put(const struct ht_opt_masters *m, struct window *w, uint64_t off, const void *buf, size_t len)
{
    int rc = 0;

    for (size_t done = 0, n; !rc && done < len; done += n) {
        rc = load(m, (off + done) / 4, w);
        if (rc)
            return rc;
        n = overlap(w, off + done, len - done);
        memcpy((uint8_t *)w->master + (off + done - w->first * 4), (const uint8_t *)buf + done, n);
        rc = store(m, w);
    }
    return rc;
}

ssize_t ht_opt_masters_write(const struct ht_opt_masters *m, uint64_t off, const void *buf, size_t len,
                             uint64_t *out_element)
{
    struct window *w;

    if (off % 4 || len % 4)
        return -EINVAL;
    w = malloc(sizeof(*w));
    if (!w)
        return -ENOMEM;
    int rc = validate(m, w, off, buf, len, out_element);
    if (!rc)
        rc = put(m, w, off, buf, len);
    free(w);
    return rc ? rc : (ssize_t)len;
}
