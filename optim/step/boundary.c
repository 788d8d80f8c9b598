/* SPDX-License-Identifier: Apache-2.0 */
/*
 * boundary.c - the boundary between two steps: every parameter with a gradient has got all of it, unless partial=1; all
 * updates have run; the step is counted, and its coverage forgotten.
 *
 * With clipping or skipping a step is deferred: its updates depend on the norm of all its gradients, and a range is
 * updated at the boundary only. Until then readers get the last boundary's version at once. A range that is frozen
 * wholly is measured at once, while its gradient is in memory, and keeps the sums of its squares (state/range.c). The
 * boundary measures only what lacks them: ranges that are covered in part.
 *
 * The norm is the square root of the sum of squares of all covered elements, unscaled, in double. Its order is fixed:
 * blocks, intervals, then parameters by their number. So threads, chunks and the order of arrival change no bit. As in
 * torch.nn.utils.clip_grad_norm_ the gradient is multiplied by min(1, max_grad_norm / (norm + 1e-6)).
 */
#include <math.h>

#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/redo/logged.h"
#include "optim/step/step_priv.h"

/* What the boundary asks for of each parameter with a gradient. */
enum demand {
    WHOLE = 1,        /* gradients */
    WHOLE_MATRIX = 2, /* of rules in two phases */
    ORTHO = 4,        /* and their orthogonalised updates */
};

/* With partial=1 each element has at least one of the gradients that the step may add. */
static bool is_covered(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        const struct ht_range *r = ht_opt_range_find(p, i);
        if (!r || !(r->added || ht_interval_set_cover(&r->frozen, 0, ht_opt_range_grad_bytes(p, i))))
            return false;
    }
    return true;
}

static bool lacks(const struct ht_param *p, unsigned demand) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool partial = p->complete != p->shape.range_count, matrix = demand & WHOLE_MATRIX && ht_opt_in_phases(p);

    return (partial && (demand & WHOLE || (matrix && !is_covered(p)))) || (demand & ORTHO && ht_opt_ortho_missing(p));
}

/* The first that lacks something, orphans apart. */
static struct ht_param *find_lacking(const struct ht_root *root, unsigned demand, bool orphans)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched)
        if (!p->gone && p->orphan == orphans && lacks(p, demand))
            return p;
    return NULL;
}

static unsigned demand_of(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return (root->allow_partial ? 0u : WHOLE) | WHOLE_MATRIX;
}

/*
 * A parameter without a name keeps no step from ending, however long it is held open. Releases the lock in
 * between.
 */
static struct ht_param *find_in_the_way(struct ht_root *root, unsigned demand) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p;

    while ((p = find_lacking(root, demand, false)) && ht_opt_param_file(p) != HT_OPTIM_FILE_NAMED)
        p->orphan = true;
    return p;
}

/* The step ends without them. Releases the lock in between. */
static int forget_orphans(struct ht_root *root, unsigned demand) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param *p;
    int rc = 0;

    while (!rc && (p = find_lacking(root, demand, true))) {
        struct ht_waiter *chain = NULL;
        p->refs++;
        ht_opt_cancel(p);
        ht_opt_take_waiters(p, &chain); /* waiters of a running update come with its end */
        unlock(root->o);
        ht_opt_wake(chain); /* not by the helper, as in end_deciding() */
        lock(root->o);
        rc = ht_opt_drain(root);
        if (!rc)
            ht_opt_forget_gradient(p);
        p->refs--;
    }
    return rc;
}

/*
 * A parameter that prevents the boundary, the first byte of its gradient that no client has handed over, and how many
 * gradients it should get.
 */
struct partial {
    uint64_t oid, hole;
    unsigned wanted;
    bool ortho, prepared; /* it lacks the orthogonalised update; the client may make it now */
};

/* Without sums of several gradients. */
static uint64_t first_hole(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    for (uint64_t i = 0; i < p->shape.range_count; i++) {
        const struct ht_range *r = ht_opt_range_find(p, i);
        const struct ht_interval *v = r && r->frozen.count ? ht_interval_set_all(&r->frozen) : NULL;
        uint64_t covered = v && v->begin == 0 ? v->end : 0;
        if ((!r || r->state == HT_RANGE_IDLE) && covered < ht_opt_range_grad_bytes(p, i))
            return i * p->shape.range_elements * p->shape.g_bytes + covered;
    }
    return 0;
}

/* May the step end? Every refusal that needs no update is found here. Releases the lock in between. */
static int check_boundary(struct ht_root *root, unsigned demand, struct partial *out) HT_REQUIRES(HT_LOCK_OPTIM)
{
    root->allow_partial = root->latched.partial || root->config.partial;
    if (root->failure)
        return -EIO;
    const struct ht_param *p = root->open ? find_in_the_way(root, demand_of(root) | demand) : NULL;
    if (!p)
        return 0;
    *out = (struct partial){.oid = p->oid,
                            .hole = first_hole(p),
                            .wanted = ht_opt_accumulate(root),
                            .ortho = !lacks(p, demand_of(root)),
                            .prepared = root->prepared || !ht_opt_deferred(root)};
    return -EBUSY;
}

/* -------------------------------------------------------------------- norm */

static int by_number(const void *a, const void *b)
{
    const struct ht_param *x = *(struct ht_param *const *)a, *y = *(struct ht_param *const *)b;

    return x->oid < y->oid ? -1 : x->oid > y->oid;
}

/* sorted: room for all that are touched. Counts elements that are not finite. */
static double add_up(struct ht_root *root, struct ht_param **sorted) HT_REQUIRES(HT_LOCK_OPTIM)
{
    double sum = 0;
    size_t n = 0;

    ht_list_for_each(pos, &root->touched)
        sorted[n++] = ht_list_entry(pos, struct ht_param, touched);
    qsort(sorted, n, sizeof(struct ht_param *), by_number);
    root->step_nonfinite = 0;
    for (size_t i = 0; i < n; i++)
        if (!sorted[i]->gone)
            ht_opt_squares_total(sorted[i], &sum, &root->step_nonfinite);
    root->nonfinite += root->step_nonfinite;
    return sum;
}

/* All memory first: after the first measurement only a failed update may end this, and then only an abort helps. */
static int measure_step(struct ht_root *root, double *out_sum) HT_REQUIRES(HT_LOCK_OPTIM)
{
    size_t count = 1;
    int rc = 0;

    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched) {
        rc = ht_opt_squares_make(p) ? rc : -ENOMEM; /* most have them since their first gradient of the step */
        count++;
    }
    struct ht_param **sorted = rc ? NULL : malloc(count * sizeof(struct ht_param *));
    if (!sorted)
        return -ENOMEM;
    ht_opt_queue_frozen(root, false);
    rc = ht_opt_drain(root);
    if (!rc)
        *out_sum = add_up(root, sorted);
    free(sorted);
    return rc;
}

/* Applies nothing: frozen ranges count as done. */
static void skip_step(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(p, &root->touched, const struct ht_param, touched)
        ht_opt_for_each_range(r, p)
            if (r->frozen.count || r->added)
                r->state = HT_RANGE_DONE;
    root->skipped++;
}

static void clip_step(struct ht_root *root, double norm) HT_REQUIRES(HT_LOCK_OPTIM)
{
    double most = root->latched.max_grad_norm, coefficient = most > 0 ? most / (norm + 1e-6) : 1;

    if (coefficient >= 1)
        return;
    /* NaN too: as with PyTorch it goes into every parameter. */
    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched)
        ht_opt_set_grad_factor(p, (float)(coefficient / ht_opt_divisor(root)));
    root->clipped++;
}

/* With accumulation sums wait, which are like state. */
static uint64_t waiting_bytes(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t bytes = 0;

    ht_list_for_each_entry(p, &root->touched, const struct ht_param, touched)
        ht_opt_for_each_range(r, p)
            bytes += !p->gone && r->measured ? ht_opt_range_grad_bytes(p, r->index) : 0;
    return ht_opt_accumulate(root) > 1 ? 0 : bytes;
}

/*
 * The step is deferred. Computes the norm, then queues all updates. *out_skip: none was queued, the step is to change
 * nothing. Releases the lock in between.
 */
static int whole_step(struct ht_root *root, bool *out_skip) HT_REQUIRES(HT_LOCK_OPTIM)
{
    double sum = 0;
    int rc = measure_step(root, &sum);

    if (rc)
        return rc;
    ht_opt_expect_waiting(root, waiting_bytes(root)); /* before updates fill the room */
    root->grad_norm = sqrt(sum) / ht_opt_divisor(root);
    *out_skip = root->latched.skip_nonfinite && root->step_nonfinite;
    if (*out_skip) {
        skip_step(root);
        return 0;
    }
    clip_step(root, root->grad_norm);
    ht_opt_queue_frozen(root, true);
    return 0;
}

/* ---------------------------------------------------------------- boundary */

/*
 * All updates are queued, or there will be none: reads wait for these only from now on. Releases the lock in between.
 * The helper may wait for a page that one of the readers holds, so it cannot wake them.
 */
static void end_deciding(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!root->deciding)
        return;
    root->deciding = false;
    notify_changed(root->o);
    unlock(root->o);
    ht_opt_wake_readers(root);
    lock(root->o);
}

/*
 * The first half of a boundary that check_boundary accepted: the verdict on the step, and its updates. Of rules in two
 * phases this is the first one. Releases the lock in between.
 */
static int decide_step(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    bool partial =
        root->open && root->allow_partial && (find_lacking(root, WHOLE, false) || find_lacking(root, WHOLE, true));
    int rc = root->open ? forget_orphans(root, demand_of(root)) : 0;

    /* Additions end first: then the ranges can be queued. */
    if (!rc && ht_opt_accumulate(root) > 1)
        rc = ht_opt_drain(root);
    if (!rc && root->open && ht_opt_deferred(root))
        rc = whole_step(root, &root->skipping);
    else if (!rc && partial)
        ht_opt_queue_frozen(root, true);
    end_deciding(root);
    if (!rc && root->open && !ht_opt_deferred(root))
        ht_opt_expect_waiting(root, 0);
    root->norm_known = root->open && ht_opt_deferred(root) && !rc;
    return rc;
}

/*
 * Ends a step that check_boundary accepted, and converts state if the step is published, as commit or durable_every
 * say. Releases the lock in between.
 */
static int end_boundary(struct ht_root *root, bool commit) HT_REQUIRES(HT_LOCK_OPTIM)
{
    int rc = root->open && root->prepared ? forget_orphans(root, ORTHO) : decide_step(root);

    if (!rc)
        rc = ht_opt_drain(root);
    if (!rc && root->open) {
        ht_store_end_step(root->o->store, ht_opt_deferred(root));
        bool skipped = root->skipping, logged = ht_opt_redo_count(root, skipped);
        ht_opt_close_step(root, skipped ? HT_STEP_SKIPPED : logged ? HT_STEP_LOGGED : HT_STEP_APPLIED);
        ht_opt_delta_end(root);
    }
    if (!rc && (commit || ht_opt_step_durable(root, root->undurable)))
        rc = ht_opt_convert(root);
    return rc;
}

/* An abort may lose more than the caller thinks: also files that no commit has made durable yet. */
static void report_refused(struct ht_root *root, const struct ht_optim_steer *by, int rc, const struct partial *partial)
{
    if (by->refused)
        ht_opt_refuse(root, HT_EVENT_STEP_REFUSED, 0, "%s", by->why);
    else if (rc == -EBUSY && partial->ortho)
        ht_opt_refuse(
            root, HT_EVENT_STEP_REFUSED, partial->oid,
            "its orthogonalised update is missing in this step: %sread update/, write ortho/, and apply that; or "
            "abort, which takes back the whole step, and all below the root that is newer than the last commit",
            partial->prepared ? "" : "prepare, ");
    else if (rc == -EBUSY && partial->wanted > 1)
        ht_opt_refuse(
            root, HT_EVENT_STEP_REFUSED, partial->oid,
            "has not got all of the %u gradients of this step; write the rest, or take back what came with drop, or set "
            "partial=1; abort takes back the whole step, with everything below the root that is newer than the last commit",
            partial->wanted);
    else if (rc == -EBUSY)
        ht_opt_refuse(
            root, HT_EVENT_STEP_REFUSED, partial->oid,
            "only a part of it has a gradient in this step: byte %llu is the first hole; write the rest, or take that "
            "back with drop, or set partial=1; abort takes back the whole step, and all below the root that is newer than the "
            "last commit",
            (ull)partial->hole);
}

/* The end of a boundary that had begun: on success nothing is taken off the queue until its publication. */
static void leave_boundary(struct ht_root *root, int rc) HT_REQUIRES(HT_LOCK_OPTIM)
{
    root->hold = !rc;
    root->draining = root->ending;
    if (!rc)
        root->decided = 0;
    ht_opt_root_ready(root);
    notify_changed(root->o);
}

/* Begins to drain, if the client may end the step, and it can end. */
static int begin_boundary(struct ht_root *root, struct ht_optim_steer *by, unsigned demand, struct partial *out_partial)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    root->draining = true;
    int rc = ht_opt_may_steer(root, by);
    return rc ? rc : check_boundary(root, demand, out_partial);
}

int ht_opt_boundary(struct ht_root *root, bool commit, struct ht_optim_steer *by)
{
    struct partial partial = {0};

    lock(root->o);
    int rc = begin_boundary(root, by, ORTHO, &partial);
    if (!rc)
        rc = end_boundary(root, commit);
    leave_boundary(root, rc);
    unlock(root->o);
    report_refused(root, by, rc, &partial);
    return rc;
}

int ht_opt_prepare(struct ht_root *root, struct ht_optim_steer *by)
{
    struct partial partial = {0};

    lock(root->o);
    int rc = begin_boundary(root, by, 0, &partial);
    if (!rc && root->open && !root->prepared) {
        rc = decide_step(root);
        root->prepared = !rc;
    }
    root->draining = root->ending;
    notify_changed(root->o);
    unlock(root->o);
    report_refused(root, by, rc, &partial);
    return rc;
}

/* ------------------------------------------------------------ asynchronous */

/*
 * From now on reads of ranges that the step will update wait for that, and the kernel is to drop what it has cached of
 * those that no worker has. Without clipping, skipping and partial coverage all of these are queued already.
 */
static uint64_t hide_touched(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t ticket = 0;

    root->deciding = root->open && !root->prepared && (ht_opt_deferred(root) || root->allow_partial);
    if (!root->deciding)
        return 0;
    ht_list_for_each_entry(p, &root->touched, struct ht_param, touched)
        ht_opt_for_each_range(r, p)
            if (!p->gone && ht_opt_range_decided_later(r) && !(r->work & HT_WORK_UPDATE))
                ticket = ht_max_u64(ticket, ht_opt_inval_range(r));
    return ticket;
}

bool ht_opt_step_durable(const struct ht_root *root, uint64_t undurable)
{
    return undurable >= root->config.durable_every || (root->config.redo && undurable > root->redo.steps);
}

int ht_opt_boundary_request(struct ht_root *root, struct ht_optim_steer *by, uint64_t *out_ticket)
{
    struct partial partial = {0};

    lock(root->o);
    int rc = begin_boundary(root, by, ORTHO, &partial);
    if (rc) {
        leave_boundary(root, rc);
    } else {
        root->async = true;
        root->close_open = root->open;
        root->close_durable = ht_opt_step_durable(root, root->undurable + (root->open != 0));
        *out_ticket = hide_touched(root);
    }
    unlock(root->o);
    report_refused(root, by, rc, &partial);
    return rc;
}

int ht_opt_boundary_close(struct ht_root *root)
{
    lock(root->o);
    int rc = end_boundary(root, root->close_durable);
    if (rc && rc != -ECANCELED) /* before writers go on */
        root->close_error = rc;
    leave_boundary(root, rc);
    unlock(root->o);
    return rc;
}
