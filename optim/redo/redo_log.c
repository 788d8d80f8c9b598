/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_log.c - logs the open step: workers copy frozen gradients, or their sums, into the step's object, a writer
 * brings them to the device meanwhile, and the commit publishes the object instead of parameters and state
 * (state/redo.h).
 *
 * A worker copies before it takes chunks for anything else, because writing into an object may wait for memory. An
 * error here never fails a step: its commit publishes everything.
 *
 * Gradients that are mostly zeros go into the log as entries (tiering/base/sparse.h). These are sparse gradients of
 * clients and their sums, and dense ones such as those of an embedding. A worker reads a gradient once more to count
 * its entries. For a dense gradient it stops after a few elements.
 */

#include "tiering/base/mutant.h"
#include "tiering/base/sparse.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/redo/logged.h"

enum { COPY_BYTES = 32 << 10 };

/* ------------------------------------------------------------------ writer */

/* A root with enough bytes to write, with a reference, and its object; NULL: none. */
static struct ht_root *next_root(struct ht_optim *o, struct ht_obj **out) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(root, &o->roots, struct ht_root, all) {
        struct ht_redo *redo = &root->redo;
        if (!redo->obj || redo->unwritten < HT_REDO_WRITE_BYTES)
            continue;
        redo->unwritten = 0;
        *out = ht_obj_get(o->store, ht_obj_id(redo->obj));
        root->refs++;
        return root;
    }
    return NULL;
}

/* An error stays with the object: the commit meets it, and publishes everything. */
static void *writer_main(void *arg)
{
    struct ht_optim *o = arg;

    pthread_setname_np(pthread_self(), "ht-redo");
    lock(o);
    while (!o->stopping) {
        struct ht_obj *obj = NULL;
        struct ht_root *root = next_root(o, &obj);
        if (!root) {
            ht_cond_wait(&o->redo_work, ht_optim_lock(o));
            continue;
        }
        unlock(o);
        int rc = obj ? ht_obj_writeback(obj) : 0;
        if (obj && !rc)
            ht_obj_evict(obj);
        lock(o);
        root->redo.broken |= rc != 0 && root->redo.obj == obj;
        ht_obj_put(obj);
        ht_opt_root_put(root);
    }
    unlock(o);
    return NULL;
}

/* ------------------------------------------------------------------ sparse */

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

/*
 * Elements [off, off + len) of an object, of so many bytes each: do they take at most half of their bytes as entries?
 * Their bytes then.
 */
static int measure_sparse(struct ht_obj *obj, uint64_t off, uint32_t len, unsigned size, bool *out_sparse,
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

/* Writes these entries into another object, and nothing else. -EIO: they have not these bytes any more. */
static int copy_sparse(struct ht_obj *obj, uint64_t off, uint32_t len, unsigned size, struct ht_obj *to, uint64_t at,
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

/* -------------------------------------------------------------------- copy */

/* Makes the step's object. Releases the lock in between. */
static int need_object(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_redo *redo = &root->redo;
    struct ht_optim *o = root->o;
    struct ht_obj *obj = NULL;

    while (redo->making)
        wait_changed(o);
    if (redo->broken || !root->exists)
        return redo->broken ? -EIO : -ESTALE;
    if (redo->obj)
        return 0;
    redo->making = true;
    unlock(o);
    int rc = ht_opt_object_create(o->store, root->id, HT_CHUNK_BYTES, &obj);
    lock(o);
    redo->making = false;
    notify_changed(o);
    if (!rc && !root->exists) { /* its directory was deleted meanwhile: nobody would find the object */
        unlock(o);
        rc = ht_opt_delete_objects(o->store, &obj, 1);
        ht_obj_put(obj);
        lock(o);
        return rc ? rc : -ESTALE;
    }
    redo->obj = rc ? NULL : obj;
    redo->used = redo->unwritten = 0;
    return rc;
}

/* What is logged of a range: the frozen bytes of its gradient, or its sum in f32. Fixed while the range is running. */
struct source {
    struct ht_obj *obj;
    uint64_t begin; /* of the range in obj */
    const struct ht_interval *v;
    struct ht_interval whole;
    uint32_t count, bytes; /* intervals; of an element in obj */
    bool ortho;            /* it is the orthogonalised update, in the second phase of a step */
    bool sparse;           /* its interval is logged as entries */
    uint32_t entry_bytes;  /* of all entries then */
};

static void find_source(const struct ht_range *r, struct source *s) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_param *p = r->param;
    bool summed = ht_opt_range_summed(r);

    s->ortho = r->stirred;
    s->obj = s->ortho ? p->ortho->given : summed ? p->sum : p->grad;
    s->bytes = s->ortho ? 2 : summed ? sizeof(float) : p->shape.g_bytes;
    s->sparse = false;
    s->begin = (uint64_t)r->index * (s->ortho ? ht_opt_ortho_chunk_bytes(p) : p->shape.range_elements * s->bytes);
    s->v = ht_opt_range_cover(r, &s->whole, &s->count);
}

/* An interval of the gradient as one of the source. */
static struct ht_interval piece_of(const struct ht_range *r, const struct source *s, uint32_t i)
{
    uint32_t g = r->param->shape.g_bytes;

    return (struct ht_interval){s->v[i].begin / g * s->bytes, s->v[i].end / g * s->bytes};
}

/* Gives the bytes of a range places in the object. */
static int place_range(const struct ht_range *r, const struct source *s, uint64_t *out_at) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_redo *redo = &r->param->root->redo;
    int rc = ht_array_grow((void **)&redo->piece, &redo->pieces_max, redo->pieces + s->count, sizeof(*redo->piece));

    ht_opt_redo_count_heap(r->param->root);
    if (rc)
        return rc;
    *out_at = redo->used;
    for (uint32_t i = 0; i < s->count; i++) {
        struct ht_interval v = piece_of(r, s, i);
        uint32_t bytes = s->sparse ? s->entry_bytes : v.end - v.begin;
        redo->piece[redo->pieces++] = (struct ht_redo_piece){.oid = r->param->oid,
                                                             .at = redo->used,
                                                             .range = r->index,
                                                             .begin = v.begin,
                                                             .end = v.end,
                                                             .bytes = bytes,
                                                             .sparse = s->sparse,
                                                             .ortho = s->ortho};
        redo->used += bytes;
    }
    redo->unwritten += redo->used - *out_at;
    return 0;
}

static int copy_bytes(struct ht_obj *from, uint64_t off, struct ht_obj *to, uint64_t at, uint64_t len)
{
    uint8_t buf[COPY_BYTES];
    int rc = 0;

    for (size_t done = 0, part; !rc && done < len; done += part) {
        part = ht_min_u64(len - done, sizeof(buf));
        rc = ht_opt_read_all(from, off + done, buf, part);
        if (!rc)
            rc = ht_opt_write_all(to, at + done, buf, part);
    }
    return rc;
}

/* The range is running: its frozen intervals, their bytes and its sum do not change. */
static int copy_range(const struct ht_range *r, const struct source *s, struct ht_obj *obj, uint64_t at)
{
    int rc = 0;

    for (uint32_t i = 0; !rc && i < s->count; i++) {
        struct ht_interval v = piece_of(r, s, i);
        if (s->sparse)
            return copy_sparse(s->obj, s->begin + v.begin, v.end - v.begin, s->bytes, obj, at, s->entry_bytes);
        rc = copy_bytes(s->obj, s->begin + v.begin, obj, at, v.end - v.begin);
        at += v.end - v.begin;
    }
    return rc;
}

/* The rest of its work is to be done, or there is none. Releases the lock in between. */
static void settle_range(struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p = r->param;
    unsigned work = r->work;

    r->logged = true;
    r->work &= (uint8_t)~HT_WORK_LOG;
    if (r->work && !p->gone) {
        ht_opt_range_ran(p->root);
        ht_opt_range_requeue(r);
        notify_changed(p->o);
        return;
    }
    r->state = HT_RANGE_IDLE;
    r->work = 0;
    ht_opt_range_ended(r, work);
}

void ht_opt_redo_log(struct ht_range *r)
{
    struct ht_root *root = r->param->root;
    struct ht_optim *o = root->o;
    uint64_t at = 0, len = 0;
    struct source s;

    lock(o);
    find_source(r, &s);
    int rc = r->param->gone ? -ESTALE : 0; /* its commit is full in any case */
    unlock(o);
    if (!rc && s.count == 1) { /* gradients in many parts have parts of their own without zeros */
        struct ht_interval v = piece_of(r, &s, 0);
        rc = measure_sparse(s.obj, s.begin + v.begin, v.end - v.begin, s.bytes, &s.sparse, &s.entry_bytes);
    }
    lock(o);
    if (!rc)
        rc = r->param->gone ? -ESTALE : need_object(root);
    if (!rc)
        rc = place_range(r, &s, &at);
    if (!rc)
        len = root->redo.used - at;
    struct ht_obj *obj = rc ? NULL : ht_obj_get(o->store, ht_obj_id(root->redo.obj));
    unlock(o);
    if (!rc && !obj)
        rc = -ESTALE;
    if (!rc && len)
        rc = ht_opt_redo_prealloc(root, obj, at, len);
    if (!rc)
        rc = copy_range(r, &s, obj, at);
    ht_obj_put(obj);
    lock(o);
    root->redo.broken |= rc != 0;
    if (root->redo.unwritten >= HT_REDO_WRITE_BYTES) { /* without a writer the commit writes everything */
        if (!o->redo_writer.started && !o->stopping)
            o->redo_writer.started = pthread_create(&o->redo_writer.thread, NULL, writer_main, o) == 0;
        pthread_cond_signal(&o->redo_work);
    }
    settle_range(r);
    unlock(o);
}

/* ------------------------------------------------------------------ commit */

bool ht_opt_redo_count(struct ht_root *root, bool skipped)
{
    struct ht_redo *redo = &root->redo;

    redo->counted = redo->wanted && !redo->broken && !redo->counted && root->undurable == redo->steps &&
        ht_opt_redo_summarize(root, skipped);
    redo->gap |= !redo->counted;
    if (redo->counted)
        redo->largest = ht_max_u64(redo->largest, redo->used + redo->summary_bytes);
    return redo->counted;
}

/* The root may be deleted meanwhile: the object and the summary are the caller's own. */
static int write_summary(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;
    struct ht_optim *o = root->o;
    struct ht_buf summary = {0};

    lock(o);
    int rc = need_object(root);
    struct ht_obj *obj = rc ? NULL : ht_obj_get(o->store, ht_obj_id(redo->obj));
    uint64_t at = redo->used;
    if (obj) {
        summary = redo->summary;
        redo->summary = (struct ht_buf){0};
    }
    unlock(o);
    if (!obj)
        return rc ? rc : -ESTALE;
    rc = ht_opt_redo_prealloc(root, obj, at, summary.len);
    if (!rc)
        rc = ht_opt_write_all(obj, at, summary.data, summary.len);
    ht_obj_put(obj);
    ht_buf_free(&summary);
    lock(o);
    ht_opt_redo_count_heap(root);
    unlock(o);
    return rc;
}

struct ht_redo_held ht_opt_redo_take(struct ht_root *root)
{
    const struct ht_redo *redo = &root->redo;
    struct ht_redo_held held = {.obj = NULL};
    struct ht_optim *o = root->o;

    lock(o);
    held.step = (struct ht_redo_step){.step = root->step, .at = redo->used, .bytes = redo->summary_bytes};
    /* What is counted, and the words want it for readers. */
    bool take =
        redo->counted && root->config.redo_keep && redo->summary.len && redo->summary.len == redo->summary_bytes;
    unlock(o);
    if (!take || write_summary(root))
        return held;
    lock(o);
    held.obj = root->redo.obj ? ht_obj_get(o->store, ht_obj_id(root->redo.obj)) : NULL;
    unlock(o);
    if (held.obj && ht_obj_writeback(held.obj)) {
        ht_obj_put(held.obj);
        held.obj = NULL;
    }
    if (held.obj) {
        held.step.oid = ht_obj_id(held.obj);
        ht_obj_evict(held.obj);
    }
    return held;
}

int ht_opt_redo_commit(struct ht_root *root, uint64_t *out_lsn)
{
    struct ht_store *s = root->o->store;

    lock(root->o);
    bool counted = root->redo.counted, sparse = counted && root->redo.sparse;
    bool sections = counted && root->redo.sections, near_g = counted && root->redo.near_g;
    unlock(root->o);
    /* Without a step there may be an object of one that was taken back. */
    int rc = counted ? write_summary(root) : ht_opt_redo_discard(root);

    uint64_t features = HT_FEAT_REFUSE_REDO | (near_g ? HT_FEAT_REFUSE_NEAR_G : 0);
    features |= sparse && !HT_MUTANT("sparse-unmarked") ? HT_FEAT_REFUSE_SPARSE : 0;
    features |= sections && !HT_MUTANT("sections-unmarked") ? HT_FEAT_REFUSE_SECTIONS : 0;
    if (!rc)
        rc = ht_store_need_features(s, features);
    if (rc)
        return rc;
    lock(root->o);
    rc = ht_opt_redo_prepare(root);
    root->redo.logging = !rc;
    unlock(root->o);
    if (rc)
        return rc;
    rc = ht_scope_commit_rest(s, root->id, out_lsn);
    lock(root->o);
    root->redo.logging = false;
    ht_opt_redo_unprepare(root);
    if (!rc)
        ht_opt_redo_reset(root);
    unlock(root->o);
    return rc;
}
