/* SPDX-License-Identifier: Apache-2.0 */
/* delta_read.c - what a step has changed, for readers: indices and values of each parameter. */
#include <string.h>

#include "optim/state/root.h"

enum { PLACES = 1024 }; /* that are read together */

int ht_optim_delta_steps(struct ht_optim *o, uint64_t id, struct ht_delta_steps *out)
{
    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    int rc = root && root->exists ? 0 : -ENOENT;
    *out = (struct ht_delta_steps){0};
    if (!rc && root->deltas.count)
        *out = (struct ht_delta_steps){ht_list_entry(root->deltas.kept.next, struct ht_delta, of_root)->step,
                                       ht_list_entry(root->deltas.kept.prev, struct ht_delta, of_root)->step};
    unlock(o);
    return rc;
}

static struct ht_delta *find_delta(struct ht_optim *o, uint64_t id, uint64_t step) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_root *root = ht_opt_root_find(o, id);

    if (!root || !root->exists)
        return NULL;
    ht_list_for_each_entry(d, &root->deltas.kept, struct ht_delta, of_root)
        if (d->step == step)
            return d;
    return NULL;
}

int ht_optim_delta_open(struct ht_optim *o, uint64_t id, uint64_t step, struct ht_delta **out)
{
    lock(o);
    struct ht_delta *d = find_delta(o, id, step);
    int rc = !d ? -ENOENT : o->deltas_lost >= HT_DELTA_KEEP_MAX ? -EMFILE : 0;
    if (rc == 0) {
        d->refs++;
        *out = d;
    }
    unlock(o);
    return rc;
}

void ht_optim_delta_close(struct ht_delta *d)
{
    struct ht_optim *o = d->o;

    lock(o);
    ht_opt_delta_put(d);
    unlock(o);
}

void ht_optim_delta_stat(const struct ht_delta *d, struct ht_delta_stat *out)
{
    *out = (struct ht_delta_stat){
        .step = d->step, .base_step = d->whole ? 0 : d->step - 1, .lineage = d->lineage, .params = d->params};
}

const struct ht_delta_change *ht_optim_delta_change(const struct ht_delta *d, size_t i)
{
    return &d->param[i].of;
}

/* The piece with changed element k of a parameter. */
static const struct ht_delta_piece *find_piece(const struct ht_delta *d, const struct ht_delta_param *p, uint64_t k)
{
    size_t next = p->piece + 1;

    HT_PARTITION_POINT(next, p->piece + p->pieces, i, d->piece[i].before <= k);
    return &d->piece[next - 1];
}

/* Of one piece: bytes from off on of its values. *len: then how many. */
static int read_values(const struct ht_delta *d, const struct ht_delta_change *of, const struct ht_delta_piece *piece,
                       uint64_t off, uint8_t *buf, size_t *len)
{
    *len = ht_min_u64(*len, piece->count * ht_dtype_trained_bytes(of->dtype) - off);
    return ht_opt_read_all(d->obj, piece->at + off, buf, *len);
}

/* The same of its indices. */
static int read_indices(const struct ht_delta *d, const struct ht_delta_change *of, const struct ht_delta_piece *piece,
                        uint64_t off, uint8_t *buf, size_t *len)
{
    uint64_t places = piece->at + piece->count * ht_dtype_trained_bytes(of->dtype), bytes = of->index_bytes;
    uint64_t first = off / bytes, skipped = off % bytes;
    size_t n = ht_min_u64(ht_min_u64(piece->count - first, PLACES), ht_div_up(skipped + *len, bytes));
    uint8_t index[PLACES * sizeof(ht_le64)];
    uint16_t place[PLACES];
    int rc = ht_opt_read_all(d->obj, places + first * sizeof(*place), place, n * sizeof(*place));

    for (size_t i = 0; i < n && !rc; i++) {
        ht_le64 wide;
        ht_le64_store(&wide, piece->first + place[i]);
        memcpy(index + i * bytes, &wide, bytes);
    }
    *len = ht_min_u64(*len, n * bytes - skipped);
    if (!rc)
        memcpy(buf, index + skipped, *len);
    return rc;
}

ssize_t ht_optim_delta_read(const struct ht_delta *d, size_t i, bool values, uint64_t off, void *buf, size_t len)
{
    const struct ht_delta_param *p = &d->param[i];
    uint64_t bytes = values ? ht_dtype_trained_bytes(p->of.dtype) : p->of.index_bytes, all = p->of.changed * bytes;
    size_t want = off < all ? ht_min_u64(len, all - off) : 0, done = 0;

    while (done < want) {
        const struct ht_delta_piece *piece = find_piece(d, p, (off + done) / bytes);
        size_t n = want - done;
        int rc = (values ? read_values : read_indices)(d, &p->of, piece, off + done - piece->before * bytes,
                                                       (uint8_t *)buf + done, &n);
        if (rc)
            return done ? (ssize_t)done : rc;
        done += n;
    }
    return (ssize_t)done;
}
