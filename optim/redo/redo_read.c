/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_read.c - durable steps of a root for readers: a header, the summary, then the bytes of the gradients. The store
 * reads ahead of a reader of gradients.
 */

#include "optim/state/root.h"
#include "optim/redo/redo_priv.h"
#include <hitrain/redo.h>

struct ht_optim_redo {
    struct ht_obj *obj; /* reference */
    struct ht_obj_reader reader;
    struct ht_redo_step step;
    struct ht_redo_file head;
};

static void widen_steps(struct ht_redo_steps *r, uint64_t step)
{
    if (!r->last || step != r->last + 1)
        r->first = step;
    r->last = step;
}

static struct ht_redo_steps readable_steps(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_redo *redo = &root->redo;
    struct ht_redo_steps r = {.lineage = redo->lineage, .publications = root->publications};

    for (size_t i = 0; i < redo->held_count; i++)
        widen_steps(&r, redo->held[i].step.step);
    /* Of the log the durable ones. Older ones follow each other without gaps, up to the first of these. */
    for (size_t i = 0; i < redo->steps && !redo->renamed; i++)
        if (redo->step[i].step <= root->durable_step && !redo->replaying && !redo->failed)
            widen_steps(&r, redo->step[i].step);
    if (r.last - r.first >= HT_REDO_READABLE_MAX)
        r.first = r.last - HT_REDO_READABLE_MAX + 1;
    return r;
}

int ht_optim_redo_steps(struct ht_optim *o, uint64_t id, struct ht_redo_steps *out)
{
    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    int rc = root && root->exists ? 0 : -ENOENT;
    *out = rc ? (struct ht_redo_steps){.last = 0} : readable_steps(root);
    unlock(o);
    return rc;
}

static struct ht_obj *find_step(const struct ht_root *root, uint64_t step, struct ht_redo_step *out)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_redo *redo = &root->redo;

    for (size_t i = 0; i < redo->held_count; i++) {
        *out = redo->held[i].step;
        if (out->step == step)
            return ht_obj_ref(redo->held[i].obj);
    }
    for (size_t i = 0; i < redo->steps; i++) {
        *out = redo->step[i];
        if (out->step == step)
            return ht_obj_get(root->o->store, out->oid);
    }
    return NULL;
}

static void fill_head(struct ht_optim_redo *r, uint64_t lineage)
{
    memcpy(r->head.magic, HT_REDO_FILE_MAGIC, sizeof(r->head.magic));
    ht_le32_store(&r->head.version, HT_REDO_FILE_VERSION);
    ht_le64_store(&r->head.step, r->step.step);
    ht_le64_store(&r->head.lineage, lineage);
    ht_le64_store(&r->head.summary_bytes, r->step.bytes);
    ht_le64_store(&r->head.gradient_bytes, r->step.at);
}

int ht_optim_redo_open(struct ht_optim *o, uint64_t id, uint64_t step, struct ht_optim_redo **out)
{
    struct ht_optim_redo *r = calloc(1, sizeof(*r));

    if (!r)
        return -ENOMEM;
    lock(o);
    const struct ht_root *root = ht_opt_root_find(o, id);
    if (root && root->exists) {
        struct ht_redo_steps all = readable_steps(root);
        if (step && step >= all.first && step <= all.last)
            r->obj = find_step(root, step, &r->step);
        fill_head(r, all.lineage);
    }
    unlock(o);
    if (!r->obj) {
        free(r);
        return -ENOENT;
    }
    *out = r;
    return 0;
}

void ht_optim_redo_close(struct ht_optim_redo *r)
{
    ht_obj_reader_end(&r->reader);
    ht_obj_put(r->obj);
    free(r);
}

uint64_t ht_optim_redo_bytes(const struct ht_optim_redo *r)
{
    return sizeof(r->head) + r->step.bytes + r->step.at;
}

/* One of the three parts, from an offset in it on. */
static ssize_t read_part(struct ht_optim_redo *r, uint64_t off, void *buf, size_t len)
{
    size_t n;

    if (off < sizeof(r->head)) {
        n = ht_min_u64(len, sizeof(r->head) - off);
        memcpy(buf, (const uint8_t *)&r->head + off, n);
        return (ssize_t)n;
    }
    off -= sizeof(r->head);
    if (off < r->step.bytes)
        return ht_obj_read(r->obj, r->step.at + off, buf, ht_min_u64(len, r->step.bytes - off));
    off -= r->step.bytes;
    if (off >= r->step.at)
        return 0;
    return ht_obj_read_for(r->obj, &r->reader, off, buf, ht_min_u64(len, r->step.at - off));
}

ssize_t ht_optim_redo_read(struct ht_optim_redo *r, uint64_t off, void *buf, size_t len)
{
    size_t done = 0;

    while (done < len) {
        ssize_t n = read_part(r, off + done, (uint8_t *)buf + done, len - done);
        if (n < 0)
            return done ? (ssize_t)done : n;
        if (n == 0)
            break;
        done += (size_t)n;
    }
    return (ssize_t)done;
}
