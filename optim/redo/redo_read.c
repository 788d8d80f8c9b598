/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_read.c - logged steps from store to store: durable ones for readers, as a header, the summary, then the bytes of
 * the gradients; and the numbers of the next updates as a client gives them, which has such a step of another store.
 * The store reads ahead of a reader of gradients.
 */
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/redo/logged.h"
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

/* ------------------------------------------------------------------ decide */

/*
 * Numbers of a parameter, and then of ranges of its elements. Words, scales and clipping have no part in such a step,
 * and a parameter without numbers takes no gradient. The end of the step, or an abort, ends this.
 */

static int decide_param(struct ht_root *root, uint64_t oid, uint8_t grad_dtype, const struct ht_redo_param *want,
                        char why[HT_OPTIM_ERROR_MAX]) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = ht_opt_param_find(root->o, oid);

    if (!p || p->gone || p->root != root || !p->cur.exists)
        return ht_optim_refuse(why, -ENOENT, "it has no state");
    if (p->has_grad || (root->open && !root->decided))
        return ht_optim_refuse(why, -EBUSY, "the step is open with other numbers: commit or abort first");
    bool sum = want->grad_dtype == HT_DTYPE_F32; /* the step has the sum of several gradients */
    if ((want->grad_dtype != grad_dtype && !sum) || !ht_opt_redo_follows(&p->cur, 0, want))
        return ht_optim_refuse(
            why, -EINVAL,
            "the numbers are for another dtype, size, rule, form of state or count of steps than its own");
    if (!root->decided)
        root->decided = ++root->o->last_step_number;
    p->decided = root->decided;
    p->decided_t = want->steps;
    p->decided_scalars = want->scalars;
    ht_opt_sections_clear(p);
    p->decided_dtype = want->grad_dtype;
    return 0;
}

/* Numbers for a range of elements, after those of the parameter and of the ranges before. */
static int decide_section(struct ht_root *root, uint64_t oid, const struct ht_redo_summary *one,
                          char why[HT_OPTIM_ERROR_MAX]) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = ht_opt_param_find(root->o, oid);
    struct ht_param_section section;

    if (!p || p->gone || p->root != root || !root->decided || p->has_grad || !ht_opt_is_decided(p))
        return ht_optim_refuse(why, -EINVAL, "numbers for a range of elements follow those of their parameter");
    const struct ht_param_sections *had = p->sections;
    uint64_t from = had && had->decided ? had->of[had->decided - 1].end : 0;
    if (ht_opt_redo_section_at(one, 0, ht_le64_load(one->param), from, p->cur.elements, &section) ||
        !ht_opt_layout_keeps(&p->cur.layout, section.scalars.kernel))
        return ht_optim_refuse(why, -EINVAL, "the numbers for a range of elements make no sense");
    return ht_opt_sections_add(p, &section, true);
}

int ht_optim_decide(struct ht_optim *o, const struct ht_decision *d, struct ht_optim_steer *by)
{
    const struct ht_redo_summary one = {.param = d->bytes, .params = 1, .version = HT_REDO_VERSION_SECTIONS};
    bool section = ht_opt_redo_is_section(&one, 0);
    struct ht_redo_param want;
    struct ht_root *root;

    static_assert(sizeof(d->bytes) == sizeof(struct ht_disk_redo_param), "one of the summary");
    if (!section && ht_opt_redo_param_at(&one, 0, &want))
        return ht_optim_refuse(by->why, -EINVAL, "the numbers make no sense");
    root = ht_opt_root_get(o, d->root);
    if (!root)
        return -ENOENT;
    lock(o);
    int rc = ht_opt_gate_enter_by(root, by);
    if (!rc) {
        if (!root->exists)
            rc = -ENOENT;
        else if (section)
            rc = decide_section(root, d->oid, &one, by->why);
        else
            rc = decide_param(root, d->oid, d->grad_dtype, &want, by->why);
        ht_opt_gate_leave(root);
    }
    ht_opt_root_put(root);
    unlock(o);
    return rc;
}
