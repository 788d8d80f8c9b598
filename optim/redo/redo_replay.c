/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_replay.c - computes logged steps again, after a mount or an abort, by ordinary updates (state/redo.h).
 *
 *   each part   of the content, if the DRAM tier does not hold it all (redo_parts.c):
 *   each step   its summary is read and checked; each gradient of the part is written and frozen as a client's, and
 *               queued; the workers update; with the last part the step is counted
 *
 * Reading and updating overlap. The store reads ahead of the thread that replays, which is a sequential reader of each
 * step's object. While the last updates of a step run it reads the summary and the first gradients of the next one. So
 * the DRAM tier has what is read ahead, as far as it has room for that. The thread waits with no chunk, and with no
 * staging buffer.
 *
 * Nothing is published, so a crash leaves the full step and the logged ones as they were. Afterwards the root is as it
 * was when the last of these steps had been logged.
 *
 * A client may have passed all checks before an abort begins, and give a parameter another size only in the replay.
 * Then the replay fails, everything goes back to the full step again, and a second replay follows.
 */

#include "tiering/base/sparse.h"
#include "tiering/api/stats.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/gradient/gradient.h"
#include "optim/redo/logged.h"

enum {
    COPY_BYTES = 256 << 10,
    AHEAD_BYTES_MAX = 16 << 20, /* of the next step */
};
#define TELL_NS 10000000000ull /* between two events of progress */
#define RETRY_NS 5000000000ull /* of a replay without room; sooner if there is more */
#define POLL_NS 100000000ull

/* A parameter that has an opener, and took another shape for the replay. */
struct reshaped {
    struct ht_param *p;
    struct ht_param_shape was;
};

/* A logged step that is being read. The store knows the address of its reader. */
struct source {
    struct ht_redo_step step;
    struct ht_obj *obj; /* reference; NULL: none is read */
    struct ht_obj_reader reader;
    uint8_t *summary;
    struct ht_redo_summary s;
    struct ht_redo_place *place; /* of the parameters of the summary; NULL: there is one part */
};

/* A step of a part. */
struct turn {
    struct ht_redo_step step;
    size_t part, index; /* index: of the step */
};

struct replay {
    struct ht_root *root;
    struct source source[2], *now, *next;
    struct ht_redo_parts parts;
    struct turn turn;        /* the present one */
    struct ht_param **param; /* in the order of the summary, with references; NULL: deleted */
    uint8_t copy[COPY_BYTES];
    uint8_t *entries, *elements; /* of a sparse piece */
    size_t entries_max, elements_max;
    struct reshaped *reshaped;
    size_t reshaped_count;
};

/* ----------------------------------------------------------------- sources */

/* The other source may have read bytes of the same step ahead, for its next part: then they stay. */
static void close_source(struct replay *w, struct source *from)
{
    const struct source *other = from == w->now ? w->next : w->now;

    if (!from->obj)
        return;
    ht_obj_reader_end(&from->reader);
    if (other->obj != from->obj)
        ht_obj_evict(from->obj);
    ht_obj_put(from->obj);
    free(from->summary);
    free(from->place);
    *from = (struct source){.obj = NULL};
}

/* A parameter that was deleted has no place, and none is asked for. */
static int find_places(const struct replay *w, struct source *from)
{
    struct ht_optim *o = w->root->o;
    struct ht_redo_param want;
    int rc = 0;

    if (w->parts.count == 1)
        return 0;
    from->place = calloc(from->s.params + 1, sizeof(*from->place));
    if (!from->place)
        return -ENOMEM;
    for (uint64_t i = 0; !rc && i < from->s.params; i++) {
        if (ht_opt_redo_is_section(&from->s, i)) /* no piece is its own */
            continue;
        rc = ht_opt_redo_param_at(&from->s, i, &want);
        lock(o);
        const struct ht_param *p = rc ? NULL : ht_opt_param_find(o, want.oid);
        if (p && p->root == w->root)
            from->place[i] = ht_opt_part_place(p);
        unlock(o);
    }
    return rc;
}

/* It is closed, and the caller closes it again, also after an error. */
static int open_source(const struct replay *w, const struct ht_redo_step *step, struct source *out)
{
    *out = (struct source){.step = *step, .obj = ht_obj_get(w->root->o->store, step->oid)};
    int rc = out->obj ? ht_opt_redo_read(out->obj, step, &out->summary, &out->s) : -EUCLEAN;

    return rc ? rc : find_places(w, out);
}

/* The piece of this parameter of the summary. */
static bool is_of_part(const struct replay *w, const struct source *from, uint32_t place, uint32_t range, size_t part)
{
    return !from->place || ht_opt_part_of(&w->parts, from->place[place], range) == part;
}

static void ignore_bytes(void *ctx, const void *bytes, size_t len)
{
    (void)ctx, (void)bytes, (void)len;
}

static bool is_busy(const struct ht_root *root)
{
    lock(root->o);
    bool busy = (root->pending || root->running) && !root->o->stopping;
    unlock(root->o);
    return busy;
}

/* False: there is no time for more, or an error. */
static bool read_through(struct replay *w, uint64_t at, uint64_t end)
{
    while (at < end && is_busy(w->root)) {
        ssize_t n = ht_obj_read_in_place(w->next->obj, &w->next->reader, at, w->copy,
                                         ht_min_u64(end - at, sizeof(w->copy)), ignore_bytes, NULL);
        if (n <= 0)
            return false;
        at += (uint64_t)n;
    }
    return at >= end;
}

/*
 * The first gradients of a turn, while updates run. What goes wrong here goes wrong again when the turn has come.
 * Pieces that follow each other are read together.
 */
static void read_ahead(struct replay *w, const struct turn *turn)
{
    uint64_t at = 0, end = 0, before = 0;
    struct ht_redo_piece piece;
    uint32_t place;

    if (open_source(w, &turn->step, w->next)) {
        close_source(w, w->next);
        return;
    }
    for (uint64_t i = 0; i < w->next->s.pieces && before + (end - at) < AHEAD_BYTES_MAX; i++) {
        if (ht_opt_redo_piece_at(&w->next->s, i, &place, &piece))
            return;
        if (!is_of_part(w, w->next, place, piece.range, turn->part))
            continue;
        if (piece.at != end) {
            if (!read_through(w, at, end))
                return;
            before += end - at;
            at = piece.at;
        }
        end = piece.at + piece.bytes;
    }
    (void)read_through(w, at, end);
}

/* Its turn has come: it may have been opened ahead. */
static int begin_source(struct replay *w, const struct ht_redo_step *step)
{
    struct source *free = w->now;

    if (w->next->obj && w->next->step.oid == step->oid && w->next->step.step == step->step) {
        w->now = w->next;
        w->next = free;
        return 0;
    }
    close_source(w, w->next);
    return open_source(w, step, w->now);
}

/* -------------------------------------------------------------- parameters */

static int note_shape(struct replay *w, struct ht_param *p, const struct ht_param_shape *was) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct reshaped *more = realloc(w->reshaped, (w->reshaped_count + 1) * sizeof(*more));

    if (!more)
        return -ENOMEM;
    w->reshaped = more;
    p->refs++;
    more[w->reshaped_count++] = (struct reshaped){p, *was};
    return 0;
}

/* Releases the lock in between. */
static int shape_param(struct replay *w, struct ht_param *p, const struct ht_redo_param *want)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param_shape shape, was = p->shape;
    int rc = ht_opt_shape_of(&shape, want->elements * ht_dtype_trained_bytes(want->dtype), want->chunk_bytes,
                             want->dtype, want->grad_dtype);

    if (rc)
        return -EUCLEAN;
    p->redo_g_bytes = (uint8_t)ht_max_u64(p->redo_g_bytes, shape.g_bytes);
    if (p->openers && p->shape.grad_dtype != shape.grad_dtype)
        rc = note_shape(w, p, &was);
    unlock(p->o);
    if (!rc)
        rc = ht_opt_param_build(p, &shape);
    lock(p->o);
    bool lacks = !rc && want->scalars.kernel == HT_KERNEL_MUON && ht_opt_ortho_lacks(p);
    unlock(p->o);
    if (lacks)
        rc = ht_opt_ortho_make(p);
    lock(p->o);
    return rc ? rc : ht_opt_state_load(p);
}

/* Its sections follow it in the summary. */
static int take_sections(const struct replay *w, uint64_t i, const struct ht_redo_param *want, struct ht_param *p)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_param_section section = {.end = 0};
    uint64_t count;
    int rc = ht_opt_redo_sections_of(&w->now->s, i, &count);

    ht_opt_sections_clear(p);
    for (uint64_t k = 1; !rc && k <= count; k++) {
        rc = ht_opt_redo_section_at(&w->now->s, i + k, want->oid, section.end, want->elements, &section);
        if (!rc)
            rc = ht_opt_sections_add(p, &section, false);
    }
    return rc;
}

static bool counts_steps(const struct replay *w)
{
    return w->turn.part + 1 == w->parts.count;
}

/* Its gradient comes: what its first gradient in an ordinary step does. */
static int begin_param(struct replay *w, uint64_t i)
{
    struct ht_root *root = w->root;
    struct ht_redo_param want;

    if (ht_opt_redo_is_section(&w->now->s, i)) /* its parameter takes it */
        return 0;
    int rc = ht_opt_redo_param_at(&w->now->s, i, &want);
    if (rc)
        return rc;
    lock(root->o);
    struct ht_param *p = ht_opt_param_find(root->o, want.oid);
    bool deleted = !p || p->gone; /* a file that was open without a name, and is not any more */
    bool passed = !deleted && p->root == root && !ht_opt_part_takes(p);
    uint64_t uncounted = deleted || counts_steps(w) ? 0 : p->redo_place; /* steps of this part that have changed it */
    if (deleted || passed || p->root != root || !p->obj || p->has_grad ||
        !ht_opt_redo_fits(p, p->obj, uncounted, &want)) {
        unlock(root->o);
        return deleted || passed ? 0 : -EUCLEAN;
    }
    p->refs++;
    w->param[i] = p;
    rc = shape_param(w, p, &want);
    if (p->gone)
        rc = 0;
    else if (!rc) {
        p->has_grad = true;
        ht_list_add_tail(&root->touched, &p->touched);
        p->scalars = want.scalars;
        if (ht_opt_in_phases(p))
            p->ortho->config.ns_store = false; /* the step has what was computed then */
        p->t = want.steps;
        p->layout = p->cur.layout;
        rc = take_sections(w, i, &want, p);
    }
    unlock(root->o);
    return rc;
}

/* ------------------------------------------------------------------ pieces */

/*
 * The same of an orthogonalised update: the first phase of the range is queued, or has run, and this waits for it. The
 * elements that are there count as those of a client. Releases the lock in between.
 */
static struct ht_range *range_of_ortho(struct ht_param *p, struct ht_range *r) HT_REQUIRES(HT_LOCK_OPTIM)
{
    while (r && (r->work & HT_WORK_MOMENTUM) && !r->stirred && r->state != HT_RANGE_FAILED && !p->gone &&
           !p->o->stopping)
        wait_changed(p->o);
    return r && r->stirred && r->state == HT_RANGE_IDLE && ht_opt_in_phases(p) ? r : NULL;
}

/* The range that a piece belongs to; NULL: the piece is senseless, or there is no memory. */
static struct ht_range *range_of(struct ht_param *p, const struct ht_redo_piece *piece) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!ht_opt_redo_piece_fits(&p->shape, piece))
        return NULL;
    struct ht_range *r = ht_opt_range_make(p, piece->range);
    if (piece->ortho)
        return range_of_ortho(p, r);
    bool taken = r && (r->state != HT_RANGE_IDLE || ht_interval_set_overlap(&r->frozen, piece->begin, piece->end));
    return taken ? NULL : r;
}

/* Steps to come get space after acknowledged ones. */
static bool roots_yield(struct ht_optim *o)
{
    lock(o);
    bool any = ht_opt_redo_yield_aside(o);
    unlock(o);
    return any;
}

static int write_gradient(struct ht_param *p, struct ht_obj *obj, uint64_t to, const uint8_t *bytes, size_t len)
{
    ssize_t n;

    do
        n = ht_obj_write(obj, to, bytes, len);
    while (n == -ENOSPC && (!ht_store_make_space(p->o->store, true) || roots_yield(p->o)));
    return n == (ssize_t)len ? 0 : n < 0 ? (int)n : -EUCLEAN;
}

/* Of the present step. Its gradients lie in the order of its pieces. */
static int read_bytes(struct replay *w, uint64_t at, uint8_t *buf, size_t len)
{
    ssize_t n = ht_obj_read_for(w->now->obj, &w->now->reader, at, buf, len);

    return n == (ssize_t)len ? 0 : n < 0 ? (int)n : -EUCLEAN;
}

/* Sizes are checked: entries are a MiB at most, and elements those of a range. */
static int read_sparse(struct replay *w, const struct ht_redo_piece *piece, unsigned size)
{
    size_t len = piece->end - piece->begin;

    int rc = ht_array_grow((void **)&w->entries, &w->entries_max, piece->bytes + 1, 1);

    if (!rc)
        rc = ht_array_grow((void **)&w->elements, &w->elements_max, len, 1);
    if (!rc)
        rc = read_bytes(w, piece->at, w->entries, piece->bytes);
    return rc ? rc : ht_sparse_decode(w->entries, piece->bytes, size, w->elements, len);
}

static int copy_piece(struct replay *w, struct ht_param *p, const struct ht_redo_piece *piece)
{
    unsigned size = ht_opt_redo_piece_bytes(&p->shape, piece);
    uint64_t range_bytes = piece->ortho ? ht_opt_ortho_chunk_bytes(p) : p->shape.range_elements * size;
    uint64_t to = piece->range * range_bytes + piece->begin;
    struct ht_obj *obj = piece->ortho ? p->ortho->given : p->grad;
    int rc = piece->sparse ? read_sparse(w, piece, size) : 0;

    for (size_t done = 0, len = piece->end - piece->begin, part; !rc && done < len; done += part) {
        part = ht_min_u64(len - done, sizeof(w->copy));
        if (!piece->sparse)
            rc = read_bytes(w, piece->at + done, w->copy, part);
        if (!rc)
            rc = write_gradient(p, obj, to + done, piece->sparse ? w->elements + done : w->copy, part);
    }
    return rc;
}

/* Writes and freezes a piece. last: no further one of its range follows, and the range is queued. */
static int replay_piece(struct replay *w, struct ht_param *p, const struct ht_redo_piece *piece, bool last)
{
    struct ht_root *root = w->root;

    lock(root->o);
    while (ht_opt_backlog_full(root) && !root->o->stopping)
        wait_changed(root->o);
    bool gone = p->gone, stopping = root->o->stopping;
    struct ht_range *r = gone ? NULL : range_of(p, piece);
    unlock(root->o);
    if (!r || stopping)
        return stopping ? -ECANCELED : gone ? 0 : -EUCLEAN;
    int rc = copy_piece(w, p, piece);
    lock(root->o);
    gone = p->gone; /* a client deletes it meanwhile */
    if (!rc && !gone && !piece->ortho)
        rc = ht_interval_set_add(&r->frozen, piece->begin, piece->end);
    ht_opt_range_count_intervals(r);
    if (!rc && !gone && last)
        ht_opt_range_queue(r, ht_opt_in_phases(p) && !piece->ortho ? HT_WORK_MOMENTUM : HT_WORK_UPDATE);
    unlock(root->o);
    return gone ? 0 : rc;
}

static int replay_pieces(struct replay *w)
{
    struct ht_redo_piece now, next;
    uint32_t place, next_place = 0;
    int rc = w->now->s.pieces ? ht_opt_redo_piece_at(&w->now->s, 0, &next_place, &next) : 0;

    for (uint64_t i = 0; !rc && i < w->now->s.pieces; i++) {
        now = next;
        place = next_place;
        bool last = i + 1 == w->now->s.pieces;
        if (!last)
            rc = ht_opt_redo_piece_at(&w->now->s, i + 1, &next_place, &next);
        if (!rc && w->param[place] && is_of_part(w, w->now, place, now.range, w->turn.part))
            rc = replay_piece(w, w->param[place], &now,
                              last || next_place != place || next.range != now.range || next.ortho != now.ortho);
    }
    return rc;
}

/* -------------------------------------------------------------------- step */

/* Everything that the summary says is applied as it is. */
static void open_step(struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_opt_step_latch(root, true);
    root->latched.redo = root->redo.wanted = false;
}

static void end_step(struct replay *w)
{
    lock(w->root->o);
    for (uint64_t i = 0; w->param && i < w->now->s.params; i++)
        if (w->param[i])
            w->param[i]->refs--;
    unlock(w->root->o);
    free(w->param);
    w->param = NULL;
    close_source(w, w->now);
}

/* Has the step the gradient of a range, and not the orthogonalised update? */
static bool any_halfway(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    if (!ht_opt_in_phases(p))
        return false;
    ht_opt_for_each_range(r, p)
        if (r->stirred && r->state != HT_RANGE_DONE)
            return true;
    return false;
}

/* next: the turn after the present one, or NULL. */
static int take_turn(struct replay *w, const struct turn *next)
{
    struct ht_root *root = w->root;
    uint64_t before = counts_steps(w) ? 0 : w->turn.index;
    int rc = begin_source(w, &w->turn.step);

    if (!rc)
        w->param = calloc(w->now->s.params + 1, sizeof(struct ht_param *));
    if (!rc && !w->param)
        rc = -ENOMEM;
    lock(root->o);
    if (!rc && w->turn.step.step != root->step + before + 1)
        rc = -EUCLEAN;
    if (!rc)
        open_step(root);
    unlock(root->o);
    for (uint64_t i = 0; !rc && i < w->now->s.params; i++)
        rc = begin_param(w, i);
    if (!rc)
        rc = replay_pieces(w);
    if (!rc && next)
        read_ahead(w, next);
    lock(root->o);
    int drained = ht_opt_drain(root);
    rc = rc ? rc : drained;
    assert(!root->update_bytes); /* else workers would take turns near its limit */
    for (uint64_t i = 0; !rc && i < w->now->s.params; i++)
        rc = w->param[i] && !w->param[i]->gone && any_halfway(w->param[i]) ? -EUCLEAN : 0;
    if (!rc)
        ht_opt_close_step(root, counts_steps(w) ? HT_STEP_LOGGED : HT_STEP_OF_PART);
    unlock(root->o);
    end_step(w);
    return rc;
}

/* Openers go on with the shape that they know. */
static int restore_shapes(struct replay *w)
{
    struct ht_optim *o = w->root->o;
    int rc = 0;

    while (w->reshaped_count) {
        const struct reshaped *r = &w->reshaped[--w->reshaped_count];
        lock(o);
        bool gone = r->p->gone;
        unlock(o);
        int one = gone ? 0 : ht_opt_param_build(r->p, &r->was);
        lock(o);
        r->p->refs--;
        unlock(o);
        rc = rc ? rc : one;
    }
    free(w->reshaped);
    return rc;
}

/* A step of a part; with their end the first one of the next part. False: there are no more. */
static bool turn_at(struct ht_root *root, size_t part, size_t i, struct turn *out)
{
    lock(root->o);
    size_t steps = root->redo.steps;
    bool any = i < steps || (steps && part + 1 < root->redo.parts.count);
    if (any) {
        size_t index = i < steps ? i : 0;
        *out = (struct turn){root->redo.step[index], i < steps ? part : part + 1, index};
    }
    unlock(root->o);
    return any;
}

/* *told: when an event told about it. */
static int count_replayed(struct ht_root *root, uint64_t *told)
{
    uint64_t now = ht_now_ns();

    lock(root->o);
    root->redo.replayed++;
    struct ht_redo_progress progress = ht_opt_redo_progress(root);
    int rc = root->o->stopping ? -ECANCELED : 0;
    unlock(root->o);
    if (rc || !progress.left || now - *told < TELL_NS)
        return rc;
    *told = now;
    ht_opt_event(HT_EVENT_REPLAY_PROGRESS, root->id,
                 "%llu of %llu logged steps are still to be computed again, about %llu s", (ull)progress.left,
                 (ull)progress.steps, (ull)progress.seconds_left);
    return 0;
}

static int take_turns(struct replay *w, uint64_t *out_step)
{
    struct ht_root *root = w->root;
    uint64_t told = ht_now_ns();
    struct turn next = {.part = 0};
    int rc = 0;

    for (bool more = turn_at(root, 0, 0, &w->turn); !rc && more; w->turn = next) {
        *out_step = w->turn.step.step;
        more = turn_at(root, w->turn.part, w->turn.index + 1, &next);
        rc = take_turn(w, more ? &next : NULL);
        if (!rc)
            rc = count_replayed(root, &told);
        if (!rc && more && next.part != w->turn.part)
            ht_opt_part_next(root);
    }
    return rc;
}

static int replay_all(struct ht_root *root, uint64_t *out_step)
{
    struct replay *w = calloc(1, sizeof(*w));

    if (!w)
        return -ENOMEM;
    w->root = root;
    w->now = &w->source[0];
    w->next = &w->source[1];
    w->parts = ht_opt_parts_cut(root);
    int rc = take_turns(w, out_step);
    close_source(w, w->next);
    int restored = restore_shapes(w);
    free(w->entries);
    free(w->elements);
    free(w);
    return rc ? rc : restored;
}

/* Has a client given a parameter another size than its state has? Its request came before the abort, and ended late. */
static bool is_resized(const struct ht_root *root) HT_REQUIRES(HT_LOCK_OPTIM)
{
    ht_list_for_each_entry(p, &root->params, const struct ht_param, of_root) {
        const struct ht_param_meta *m = &p->cur;
        if (!p->gone && p->obj && m->exists && ht_obj_size(p->obj) != m->elements * ht_dtype_trained_bytes(m->dtype))
            return true;
    }
    return false;
}

/* *out_again: it may succeed now. */
static int try_replay(struct ht_root *root, uint64_t *out_step, bool *out_again)
{
    lock(root->o);
    root->redo.replayed = 0;
    unlock(root->o);
    int rc = replay_all(root, out_step);
    lock(root->o);
    if (!root->exists) /* deleted meanwhile, with its logged steps */
        rc = 0;
    *out_again = rc && rc != -ECANCELED && is_resized(root);
    unlock(root->o);
    if (rc && rc != -ECANCELED)
        ht_opt_show_full(root);
    return rc;
}

/*
 * A store that an older program has filled has no room for the gradients. Everything stays as it is, readers wait, and
 * commands are refused, until others have deleted something. False: the mount ends.
 */
static bool wait_for_room(struct ht_root *root, ull step, bool *told)
{
    struct ht_optim *o = root->o;
    uint64_t began = ht_now_ns(), had = ht_store_available(o->store);

    lock(o);
    bool waits = root->redo.recovering;
    unlock(o);
    if (waits && !*told)
        ht_opt_refuse(root, HT_EVENT_NOT_RESERVED, 0,
                      "the store is too full to compute step %llu again; readers of this model wait: delete other "
                      "files, then it goes on",
                      step);
    *told = true;
    lock(o);
    root->redo.starved = waits;
    notify_changed(o);
    while (waits && root->exists && ht_now_ns() - began < RETRY_NS && !o->stopping && !o->finishing) {
        (void)ht_cond_wait_until(&o->changed, ht_optim_lock(o), ht_now_ns() + POLL_NS);
        unlock(o);
        uint64_t has = ht_store_available(o->store);
        lock(o);
        if (has > had)
            break;
    }
    waits = waits && !o->stopping && !o->finishing;
    root->redo.starved = false;
    if (waits)
        ht_opt_redo_set_room(o);
    unlock(o);
    return waits;
}

int ht_opt_redo_replay(struct ht_root *root)
{
    bool again, told = false;

    lock(root->o);
    uint64_t step = root->step + 1;
    bool any = root->redo.steps > 0;
    root->redo.replaying = any;
    root->redo.replays += any;
    root->redo.replay_began_ns = ht_now_ns();
    unlock(root->o);
    if (!any)
        return 0;
    int rc = try_replay(root, &step, &again);
    if (again)
        rc = try_replay(root, &step, &again);
    while (rc == -ENOSPC && wait_for_room(root, step, &told))
        rc = try_replay(root, &step, &again);
    if (rc && rc != -ECANCELED)
        ht_opt_refuse(root, HT_EVENT_REPLAY_FAILED, 0,
                      "step %llu cannot be computed again from its gradients: %s; nothing of this model can be read or "
                      "changed: %s",
                      (ull)step, strerror(-rc),
                      rc == -ENOSPC
                          ? "delete other files and mount again"
                          : "mount again; if that fails, too, hitrain-fsck -y goes back to a step before it, and "
                            "hitrainctl rollback to a kept one");
    lock(root->o);
    root->redo.replaying = false;
    root->redo.failed = rc;
    if (rc && rc != -ECANCELED)
        root->durable_step = root->pub_step;
    if (!rc) {
        ht_opt_reopened(root);
        ht_opt_redo_set_aside(root);
    }
    notify_changed(root->o);
    unlock(root->o);
    return rc;
}
