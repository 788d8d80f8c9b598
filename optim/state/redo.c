/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo.c - logged steps in memory, and their records in the log.
 *
 *   52 REDO       u64 root, u64 step, u64 object, u64 offset of the summary, u64 its bytes     once for each object
 *   53 REDO_DEL   u64 root                                                                     of all its logged steps
 *
 * The objects belong to the root's scope. A checkpoint emits REDO records right after the record of their root.
 *
 * With redo_keep steps stay readable when the log does not need them any more: a reference keeps the content of a
 * deleted object. So nothing of this is on a device, and a crash leaves the steps of the log alone.
 */
#include <sys/random.h>
#include <time.h>

#include "tiering/base/mutant.h"
#include "optim/state/records.h"
#include "optim/state/root.h"
#include "optim/state/redo.h"

/* ------------------------------------------------------------ the open step */

/*
 * The step that is full anyway needs no log, but for readers. The step before may be counted, and not published yet: if
 * its commit will be full, this one is the first after it.
 */
void ht_opt_redo_open(struct ht_root *root)
{
    const struct ht_optim_config *c = &root->latched;
    struct ht_redo *redo = &root->redo;
    bool first = root->hold && !ht_opt_redo_may_log(root);
    uint64_t before = first ? 0 : redo->steps + redo->counted;

    ht_opt_redo_set_aside(root);
    redo->broken = false;
    redo->wanted = c->redo && (first || (!redo->gap && root->undurable == before)) &&
        before + 1 < c->durable_every + (c->redo_keep > 0) && before < HT_REDO_STEPS_MAX && ht_opt_redo_has_space(root);
}

bool ht_opt_redo_may_log(const struct ht_root *root)
{
    const struct ht_redo *redo = &root->redo;

    return !redo->gap && !redo->full && root->config.redo && root->undurable < root->config.durable_every &&
        !root->ending && redo->steps + redo->counted == root->undurable && root->undurable > 0 &&
        root->undurable <= HT_REDO_STEPS_MAX;
}

bool ht_opt_redo_is_current(const struct ht_root *root)
{
    const struct ht_redo *redo = &root->redo;

    return redo->steps && root->undurable == redo->steps && redo->step[redo->steps - 1].step == root->step &&
        root->durable_step == root->step && !redo->gap && !redo->counted && !redo->failed && !root->failure &&
        !root->close_error;
}

void ht_opt_redo_count_heap(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;
    uint64_t bytes = redo->pieces_max * sizeof(*redo->piece) + redo->steps_max * sizeof(*redo->step) +
        redo->summary.cap + redo->held_max * sizeof(*redo->held);

    root->o->meta_bytes += bytes - redo->heap_bytes;
    redo->heap_bytes = bytes;
}

void ht_opt_redo_forget(struct ht_param *p)
{
    struct ht_redo *redo = &p->root->redo;
    size_t kept = 0;

    for (size_t i = 0; i < redo->pieces; i++)
        if (redo->piece[i].oid != p->oid)
            redo->piece[kept++] = redo->piece[i];
    redo->pieces = kept;
}

void ht_opt_redo_reset(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;

    ht_obj_put(redo->obj);
    redo->obj = NULL;
    redo->used = redo->unwritten = 0;
    redo->pieces = 0;
    redo->counted = redo->sparse = redo->sections = redo->near_g = false;
    ht_buf_reset(&redo->summary);
}

int ht_opt_redo_discard(struct ht_root *root)
{
    struct ht_optim *o = root->o;
    struct ht_redo *redo = &root->redo;

    lock(o);
    struct ht_obj *obj = redo->obj;
    redo->obj = NULL;
    ht_opt_redo_reset(root);
    unlock(o);
    int rc = obj ? ht_opt_delete_objects(o->store, &obj, 1) : 0;
    if (rc) { /* a commit that publishes the scope must find it, and delete it */
        lock(o);
        if (!redo->obj && root->exists) {
            redo->obj = obj;
            obj = NULL;
        }
        unlock(o);
    }
    ht_obj_put(obj);
    return rc;
}

/* ----------------------------------------------------------------- records */

static void put_step(struct ht_buf *b, const struct ht_root *root, const struct ht_redo_step *s)
{
    size_t mark = ht_record_begin(b, HT_REC_OPT_REDO);

    ht_buf_put_u64(b, root->id);
    ht_buf_put_u64(b, s->step);
    ht_buf_put_u64(b, s->oid);
    ht_buf_put_u64(b, s->at);
    ht_buf_put_u64(b, s->bytes);
    ht_record_end(b, mark);
}

static int room_for_step(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_redo *redo = &root->redo;
    int rc = ht_array_grow((void **)&redo->step, &redo->steps_max, redo->steps + 1, sizeof(*redo->step));

    ht_opt_redo_count_heap(root);
    return rc;
}

int ht_opt_redo_prepare(struct ht_root *root)
{
    int rc = ht_store_log_reserve(root->o->store, HT_OPT_REDO_RECORD_BYTES);

    root->redo.reserved = !rc;
    if (!rc)
        rc = room_for_step(root);
    if (rc)
        ht_opt_redo_unprepare(root);
    return rc;
}

void ht_opt_redo_unprepare(struct ht_root *root)
{
    if (root->redo.reserved)
        ht_store_log_unreserve(root->o->store, HT_OPT_REDO_RECORD_BYTES);
    root->redo.reserved = false;
}

void ht_opt_redo_put(struct ht_root *root, struct ht_tx *tx)
{
    struct ht_redo *redo = &root->redo;

    if (!redo->counted)
        return;
    struct ht_redo_step *s = &redo->step[redo->steps++];
    *s = (struct ht_redo_step){root->step, ht_obj_id(redo->obj), redo->used, redo->summary_bytes};
    redo->reserved = false; /* it is the record's */
    put_step(ht_tx_records(tx), root, s);
}

/* There are no logged steps any more. */
static void unreserve_params(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(p, &root->params, struct ht_param, of_root) {
        bool more = p->redo_g_bytes > p->shape.g_bytes;
        p->redo_g_bytes = 0;
        if (more && !p->unreserved)
            (void)!ht_opt_grad_reserve(p); /* giving back cannot fail */
    }
}

/* The objects first: a record of the root may follow. */
void ht_opt_redo_delete(struct ht_root *root, bool record, struct ht_tx *tx)
{
    struct ht_redo *redo = &root->redo;

    if (redo->obj) { /* its directory is deleted during a step */
        ht_obj_delete(redo->obj, tx);
        ht_opt_redo_reset(root);
    }
    if (!redo->steps)
        return;
    for (size_t i = 0; i < redo->steps; i++) {
        struct ht_obj *obj = ht_obj_get(root->o->store, redo->step[i].oid);
        if (obj)
            ht_obj_delete(obj, tx);
        ht_opt_redo_hold(root, &redo->step[i], obj);
    }
    if (record)
        ht_opt_put_id(ht_tx_records(tx), HT_REC_OPT_REDO_DEL, root->id);
    ht_store_log_unreserve(root->o->store, redo->steps * HT_OPT_REDO_RECORD_BYTES);
    redo->steps = 0;
    unreserve_params(root);
}

size_t ht_opt_redo_pending_bytes(const struct ht_root *root)
{
    const struct ht_redo *redo = &root->redo;
    size_t gone = redo->steps * (HT_RECORD_HEADER_BYTES + 8);

    if (redo->logging)
        return HT_OPT_REDO_RECORD_BYTES;
    return redo->steps ? HT_OPT_REDO_DEL_RECORD_BYTES + gone : 0;
}

void ht_opt_redo_emit(const struct ht_root *root, struct ht_buf *b)
{
    for (size_t i = 0; i < root->redo.steps; i++)
        put_step(b, root, &root->redo.step[i]);
}

/*
 * A step that is logged beside a checkpoint has its record in the log before the checkpoint emits the older steps, and
 * this one again. Two objects of one step stay side by side: the check finds them.
 */
int ht_opt_redo_replay_record(struct ht_root *r, struct ht_reader *in)
{
    struct ht_redo_step s = {.step = ht_get_u64(in)};

    s.oid = ht_get_u64(in);
    s.at = ht_get_u64(in);
    s.bytes = ht_get_u64(in);
    if (!ht_reader_done(in) || !s.oid || s.oid > HT_ID_MAX || s.at > HT_FILE_BYTES_MAX || s.bytes > HT_FILE_BYTES_MAX)
        return -EUCLEAN;
    int rc = room_for_step(r);
    if (rc)
        return rc;
    ht_store_saw_id(r->o->store, s.oid);
    struct ht_redo_step *step = r->redo.step;
    for (size_t i = 0; i < r->redo.steps; i++)
        if (step[i].oid == s.oid && step[i].step == s.step)
            return 0;
    if (r->redo.steps >= HT_REDO_STEPS_MAX)
        return -EUCLEAN;
    size_t at = r->redo.steps++;
    for (; at && step[at - 1].step > s.step && !HT_MUTANT("logged-unsorted"); at--)
        step[at] = step[at - 1];
    step[at] = s;
    return 0;
}

void ht_opt_redo_free(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;

    ht_opt_redo_cut(root);
    ht_opt_redo_end_aside(root);
    ht_obj_put(redo->obj);
    free(redo->held);
    free(redo->piece);
    free(redo->step);
    ht_buf_free(&redo->summary);
    root->o->meta_bytes -= redo->heap_bytes;
    *redo = (struct ht_redo){.wanted = false};
}

bool ht_opt_redo_ends_part(const struct ht_root *root)
{
    const struct ht_redo *redo = &root->redo;

    return redo->replaying && redo->part + 1 < redo->parts.count &&
        redo->replayed + 1 == (redo->part + 1) * redo->steps;
}

/* All steps of all parts count alike. */
struct ht_redo_progress ht_opt_redo_progress(const struct ht_root *root)
{
    const struct ht_redo *redo = &root->redo;
    uint64_t parts = redo->parts.count ? redo->parts.count : 1, all = redo->steps * parts, done = redo->replayed;
    uint64_t ns = ht_now_ns() - redo->replay_began_ns, left = all > done ? all - done : 0;

    if (!redo->replaying)
        return (struct ht_redo_progress){0};
    uint64_t seconds = done ? (ns / done * left + 999999999) / 1000000000 : 0;
    return (struct ht_redo_progress){redo->steps, ht_div_up(left, parts), seconds};
}

/* ------------------------------------------------------------- for readers */

/* The oldest go, until there are so many. */
static void drop_oldest(struct ht_redo *redo, size_t keep)
{
    size_t n = redo->held_count > keep ? redo->held_count - keep : 0;

    for (size_t i = 0; i < n; i++)
        ht_obj_put(redo->held[i].obj);
    redo->held_count -= n;
    if (n)
        memmove(redo->held, redo->held + n, redo->held_count * sizeof(*redo->held));
}

static int room_for_held(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_redo *redo = &root->redo;
    int rc = ht_array_grow((void **)&redo->held, &redo->held_max, redo->held_count + 1, sizeof(*redo->held));

    ht_opt_redo_count_heap(root);
    return rc;
}

static size_t held_wanted(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return root->config.redo ? root->config.redo_keep : 0;
}

void ht_opt_redo_trim(struct ht_root *root)
{
    drop_oldest(&root->redo, held_wanted(root));
}

void ht_opt_redo_hold(struct ht_root *root, const struct ht_redo_step *step, struct ht_obj *obj)
{
    struct ht_redo *redo = &root->redo;

    if (redo->held_count && redo->held[redo->held_count - 1].step.step + 1 != step->step)
        drop_oldest(redo, 0);
    drop_oldest(redo, HT_REDO_KEEP_MAX - 1);
    if (!obj || !held_wanted(root) || !redo->continued || room_for_held(root))
        ht_obj_put(obj);
    else
        redo->held[redo->held_count++] = (struct ht_redo_held){*step, obj};
    ht_opt_redo_trim(root);
}

uint64_t ht_opt_random(void)
{
    uint64_t seed;

    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != (ssize_t)sizeof(seed)) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        seed = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    }
    return seed;
}

void ht_opt_redo_cut(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;

    drop_oldest(redo, 0);
    redo->lineage = (ht_opt_random() ^ root->id) >> 1 | 1;
}

/* At once: who looks before the next publication finds the new names already. An abort leaves the new lineage. */
void ht_opt_redo_renamed(struct ht_root *root)
{
    struct ht_redo *redo = &root->redo;

    redo->gap = redo->renamed = true;
    redo->continued = false;
    ht_opt_redo_cut(root);
    ht_opt_delta_cut(root);
}
