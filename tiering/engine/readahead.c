/* SPDX-License-Identifier: Apache-2.0 */
/*
 * readahead.c - reads chunks into images before they are needed: ahead of sequential readers (readahead_policy.h finds
 * these, and says how far), for a plan (planner.c), and for a prefetch.
 *
 *   reader --note--> pending --its next chunk: image taken, read started--> ... --all started--> not pending
 *                      '--reads elsewhere, closes--> not pending: reads in flight go on to their end
 *
 * The engine has some reads in flight for all pending readers in turn. It waits for nothing but devices: it skips a
 * chunk that another thread holds, and takes an image that the clock evicts, never a dirty or protected one. It reports
 * no failure: the reader gets the error itself. Without the engine's thread readers read for themselves.
 *
 * Reads of a plan come after those of readers, in the order in which they are needed. They take free slots, and slots
 * of images that are needed later than what they read: so they make no hit a miss.
 *
 * Threads hold several chunks here, in any order. They wait for a chunk only when they hold none.
 */

#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/cold.h"
#include "tiering/shm/shm.h"
#include "tiering/engine/engine_priv.h"

enum {
    TRIES = 1024,                /* images that the clock tries to evict */
    STREAM_BYTES_MAX = 16 << 20, /* ahead of one reader */
    MISSING_MAX = 2,             /* with so many readers waiting for devices, these are busy without readahead */
    COLD_MAX = 8,                /* chunks that a prefetch fetches from the vault at once */
    ARENA_SHARE = 4,             /* unused readahead takes at most this part of the arena that moves */
};

/* Can the chunk be read, although it has no image? */
static bool is_readable(struct ht_chunk *c)
{
    return c->slot == HT_SLOT_NONE && !(c->flags & HT_CH_BAD) && ht_chunk_ref(c) && ht_ref_holds(ht_chunk_ref(c));
}

/* Mapped memory shows verified bytes only: it is not read into ahead. */
static bool is_wanted(struct ht_obj *o, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return c && is_readable(c) && !ht_obj_images(o)->mapped;
}

/* ------------------------------------------------------------------ readers */

/*
 * For one reader: a part of the arena that moves, less the unused readahead of others; or of the free slots, for unused
 * chunks may stay there for ever.
 */
static uint64_t stream_bytes_max(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t all = ht_arena_moving_bytes(s->arena) / ARENA_SHARE, used = ht_arena_sums(s->arena)->readahead_bytes;
    uint64_t unused = ht_arena_free_slots(s->arena) * HT_MIB / ARENA_SHARE;

    return ht_min_u64(STREAM_BYTES_MAX, ht_max_u64(all - ht_min_u64(used, all), unused));
}

static uint64_t chunks_left(const struct ht_obj_reader *r)
{
    uint64_t lo = r->downwards ? r->end : r->next, hi = r->downwards ? r->next : r->end;

    return hi > lo ? hi - lo : 0;
}

/* The chunk that is to be read after n others. */
static uint64_t chunk_after(const struct ht_obj_reader *r, uint64_t n)
{
    return r->downwards ? r->next - 1 - n : r->next + n;
}

/* Nothing was read ahead in this direction. */
static void start_over(struct ht_obj_reader *r, bool downwards)
{
    r->downwards = downwards;
    r->next = r->end = downwards ? UINT64_MAX : 0;
}

static void skip_unwanted(struct ht_obj *o, struct ht_obj_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    while (chunks_left(r) && !is_wanted(o, ht_chunk_find(o, chunk_after(r, 0))))
        r->next = r->downwards ? r->next - 1 : r->next + 1;
}

/* The image of a chunk that was read ahead is gone, and no fetch from the vault is to bring it. */
static bool was_evicted(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    return is_wanted(o, ht_chunk_find(o, index)) && !ht_cold_is_coming(o, index);
}

/* The reader is at chunk `at`, and readahead should reach offset `to`. */
static void aim_up(struct ht_obj *o, struct ht_obj_reader *r, uint64_t at, uint64_t to) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_readahead_policy *st = &r->streams.up;
    uint64_t unit = ht_obj_bytes_per_chunk(o);

    r->end = ht_div_up(ht_min_u64(to, o->size), unit);
    if (r->next > r->end) /* the reader has begun again */
        r->next = 0;
    if (at < r->next && was_evicted(o, at))
        ht_readahead_policy_shrink(st, unit);
    r->next = ht_max_u64(r->next, ((st->hi - 1) >> o->chunk_shift) + 1);
    skip_unwanted(o, r);
}

/* was_low: the lowest offset of the run before this read; what lies above it was not read ahead. */
static void aim_down(struct ht_obj *o, struct ht_obj_reader *r, uint64_t at, uint64_t to, uint64_t was_low)
    HT_REQUIRES(HT_LOCK_STORE)
{
    r->end = to >> o->chunk_shift;
    if (r->next < r->end)
        r->next = UINT64_MAX;
    if (at >= r->next && at < was_low >> o->chunk_shift && was_evicted(o, at))
        ht_readahead_policy_shrink(&r->streams.down, ht_obj_bytes_per_chunk(o));
    r->next = ht_min_u64(r->next, ht_readahead_both_low(&r->streams) >> o->chunk_shift);
    skip_unwanted(o, r);
}

/* An idle reader keeps no object. */
static void end_pending(struct ht_obj_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = r->obj;

    if (!o)
        return;
    ht_list_del(&r->pending);
    r->obj = NULL;
    ht_obj_put_locked(o);
}

void ht_obj_reader_note(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, uint64_t len)
{
    struct ht_store *s = o->s;

    if (!len)
        return;
    end_pending(r);
    if (r->oid != o->oid) /* what it waits for in the former one stays counted */
        *r = (struct ht_obj_reader){.store = s, .oid = o->oid, .missing = r->missing};
    uint64_t unit = ht_obj_bytes_per_chunk(o), at = off >> o->chunk_shift, most = stream_bytes_max(s);
    uint64_t was_low = ht_readahead_both_low(&r->streams);
    struct ht_readahead_target t = ht_readahead_both_note(&r->streams, off, len, unit, most);
    if (!t.any || most < unit) { /* without room it would take the place of chunks that are being read */
        start_over(r, false);
        return;
    }
    if (t.downwards != r->downwards)
        start_over(r, t.downwards);
    if (t.downwards)
        aim_down(o, r, at, t.to, was_low);
    else
        aim_up(o, r, at, t.to);
    if (!chunks_left(r) || s->flow.missing >= MISSING_MAX)
        return;
    r->obj = o;
    o->refs++;
    ht_list_add_tail(&s->engine->pending_readers, &r->pending);
    s->waits.wakes.readahead = s->waits.wakes.any = true;
}

void ht_obj_reader_end(struct ht_obj_reader *r)
{
    struct ht_store *s = r->store;

    if (!s)
        return;
    ht_store_lock(s);
    end_pending(r);
    ht_store_unlock(s);
}

/*
 * The next chunk of a reader, held exclusively, and an image for it. HT_SLOT_NONE: nothing is to be read for this
 * reader now.
 */
static uint32_t next_of(struct ht_obj_reader *r, struct ht_chunk **out_c, uint64_t *out_index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = r->obj;

    while (chunks_left(r)) {
        uint64_t index = chunk_after(r, 0), before = r->next;
        struct ht_chunk *c = ht_chunk_find(o, index);
        r->next = r->downwards ? index : index + 1;
        if (is_wanted(o, c) && ht_chunk_is_away(o->s, c)) { /* in no batch, where local content would wait for it */
            if (!ht_cold_ahead(o, index))
                r->end = r->next = before;
            continue;
        }
        if (!is_wanted(o, c) || !ht_chunk_trylock_exclusive(o, c, index))
            continue;
        int numa_index = ht_chunk_numa_index(o->s, c);
        uint32_t bytes = ht_chunk_image_bytes(o, c, index, 0);
        uint32_t slot = ht_arena_get(o->s->arena, bytes, TRIES, numa_index);
        if (slot != HT_SLOT_NONE) {
            *out_c = c;
            *out_index = index;
            return slot;
        }
        ht_chunk_unlock_exclusive(o, c, index);
        ht_readahead_policy_shrink(r->downwards ? &r->streams.down : &r->streams.up, ht_obj_bytes_per_chunk(o));
        r->end = r->next = before;
    }
    return HT_SLOT_NONE;
}

/* The permission for the chunk that next_of would take now. */
static struct ht_permit_request next_permit(struct ht_obj_reader *r) HT_REQUIRES(HT_LOCK_STORE)
{
    for (uint64_t i = 0, left = chunks_left(r); i < left; i++) {
        struct ht_chunk *c = ht_chunk_find(r->obj, chunk_after(r, i));
        if (is_wanted(r->obj, c) && !c->exclusive && !c->shared)
            return ht_admission_of_ref(r->obj->s, ht_chunk_ref(c));
    }
    return (struct ht_permit_request){.dev = NULL};
}

/* -------------------------------------------------------------------- plans */

/* The first chunk of the part that is to be read, and that no thread holds. NULL: there is none. */
static struct ht_chunk *find_planned(struct ht_obj *o, const struct ht_forecast_fetch *part, uint64_t *out_index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    for (uint64_t i = part->first; o && !o->dead && i <= part->last; i++) {
        struct ht_chunk *c = ht_chunk_find(o, i);
        if (!is_wanted(o, c) || ht_chunk_is_away(o->s, c) || c->exclusive || c->shared)
            continue;
        *out_index = i;
        return c;
    }
    return NULL;
}

/* The next chunk that the plan wants. NULL: there is none now. */
static struct ht_chunk *next_planned(struct ht_store *s, struct ht_obj **out_obj, uint64_t *out_index,
                                     uint64_t *out_place) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_forecast_fetch part;
    struct ht_chunk *c = NULL;

    while (!c && ht_planner_fetch(s, &part, out_place)) {
        *out_obj = ht_obj_find_locked(s, part.object);
        c = find_planned(*out_obj, &part, out_index);
        if (!c)
            ht_planner_fetch_done(s);
    }
    return c;
}

/* A chunk for the plan. Answers as feed(). */
static bool feed_plan(struct ht_read_batch *w) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->s;
    struct ht_obj *o;
    uint64_t index, place;
    struct ht_chunk *c = next_planned(s, &o, &index, &place);

    if (!c)
        return false;
    const struct ht_permit_request permit = ht_admission_of_ref(s, ht_chunk_ref(c));
    enum ht_admission a = ht_admit(s, &w->spare, &permit, w->count > 0);
    if (a != HT_ADMITTED || !ht_chunk_trylock_exclusive(o, c, index))
        return a == HT_ADMISSION_AGAIN;
    int numa_index = ht_chunk_numa_index(s, c);
    uint32_t bytes = ht_chunk_image_bytes(o, c, index, 0);
    uint32_t slot = ht_next_use_may_take(s) ? ht_arena_get(s->arena, bytes, TRIES, numa_index) : HT_SLOT_NONE;
    if (slot == HT_SLOT_NONE)
        slot = ht_arena_get_ahead(s->arena, bytes, place, numa_index);
    if (slot == HT_SLOT_NONE) {
        ht_chunk_unlock_exclusive(o, c, index);
        ht_planner_fetch_later(s);
        return false;
    }
    ht_arena_mark_readahead(s->arena, slot);
    ht_chunk_attach_image(o, c, index, slot);
    ht_planner_note_ahead(o, c, index);
    ht_read_batch_start(w, o, c, index);
    return true;
}

/*
 * A chunk for the reader that has been pending longest, or for the plan. False: none is, or requests in flight have to
 * end before. Lock held; releases it in between, and the reader may go.
 */
static bool feed(struct ht_read_batch *w) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->s;

    if (ht_list_empty(&s->engine->pending_readers))
        return feed_plan(w);
    struct ht_obj_reader *r = ht_list_entry(s->engine->pending_readers.next, struct ht_obj_reader, pending);
    const struct ht_permit_request permit = next_permit(r);
    enum ht_admission a = ht_admit(s, &w->spare, &permit, w->count > 0);
    if (a != HT_ADMITTED)
        return a == HT_ADMISSION_AGAIN;
    struct ht_chunk *c;
    struct ht_obj *o = r->obj;
    uint64_t index;
    uint32_t slot = next_of(r, &c, &index);
    o->refs++; /* the reader may be idle then, and go */
    ht_list_del(&r->pending);
    ht_list_add_tail(&s->engine->pending_readers, &r->pending);
    if (slot == HT_SLOT_NONE || !chunks_left(r))
        end_pending(r);
    if (slot != HT_SLOT_NONE) {
        ht_arena_mark_readahead(s->arena, slot);
        ht_chunk_attach_image(o, c, index, slot);
        ht_planner_note_ahead(o, c, index);
        ht_read_batch_start(w, o, c, index);
    }
    ht_obj_put_locked(o);
    return true;
}

/* Until no reader is pending. Releases the lock in between. */
static void feed_all(struct ht_read_batch *w) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = w->s;

    for (;;) {
        while (w->count < HT_READ_BATCH_MAX && !s->waits.stopping && feed(w))
            ;
        if (!w->count)
            break;
        ht_read_batch_finish(w); /* after the last one feed() may wait at the gate */
        if (w->error)            /* maybe of the plan's next read, which would come again at once */
            ht_planner_fetch_done(s);
        w->error = 0;
    }
    ht_read_batch_finish_all(w);
}

void ht_store_readahead(struct ht_store *s)
{
    struct ht_read_batch w = {.s = s, .ring = ht_store_ring(s)};

    ht_store_lock(s);
    if (w.ring)
        feed_all(&w);
    while (!w.ring && !ht_list_empty(&s->engine->pending_readers))
        end_pending(ht_list_entry(s->engine->pending_readers.next, struct ht_obj_reader, pending));
    ht_store_unlock(s);
}

static enum ht_step step(void *ctx, struct ht_budget *b)
{
    struct ht_store *s = ctx;

    ht_store_readahead(s);
    return ht_idle_until(b, ht_store_locked(s, ht_next_use_look_ns(s)));
}

static enum ht_step cold_step(void *ctx, struct ht_budget *b)
{
    ht_cold_finish_ahead(ctx);
    return HT_STEP_IDLE;
}

const struct ht_engine_type ht_cold_engine = {.name = "cold", .step = cold_step};
const struct ht_engine_type ht_readahead_engine = {.name = "readahead", .step = step};

/* ----------------------------------------------------------------- prefetch */

/* A program wants some content soon. */
struct prefetch {
    struct ht_read_batch batch;
    uint64_t evictable_bytes; /* of other content: so much may go for it */
};

/*
 * A free slot, or that of an image that a plan needs later; without a plan, and for a small image, of one that goes
 * next. HT_SLOT_NONE: there is none, or enough has gone. For a small image, one of a whole slot may go.
 */
static uint32_t prefetch_slot(struct prefetch *p, struct ht_obj *o, struct ht_chunk *c, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_arena *a = o->s->arena;
    uint32_t bytes = ht_chunk_image_bytes(o, c, index, 0);
    int numa_index = ht_chunk_numa_index(o->s, c);
    uint32_t slot = ht_arena_get(a, bytes, 0, numa_index);
    uint64_t place, used = ht_arena_sums(a)->used_bytes;

    if (slot != HT_SLOT_NONE || p->evictable_bytes < HT_MIB)
        return slot;
    bool planned = bytes == HT_MIB && ht_planner_place(o, index, &place);
    if (planned)
        slot = ht_arena_get_ahead(a, bytes, place, numa_index);
    for (unsigned i = 0; !planned && i < 2 && slot == HT_SLOT_NONE; i++) /* the clock passes used images once */
        slot = ht_arena_get(a, bytes, TRIES, numa_index);
    uint64_t came = slot == HT_SLOT_NONE ? 0 : ht_arena_slot_bytes(a, slot);
    p->evictable_bytes -= ht_min_u64(used + came - ht_arena_sums(a)->used_bytes, p->evictable_bytes);
    return slot;
}

/* 0: go on; 1: there is no room. Releases the lock in between. */
static int prefetch_chunk(struct prefetch *p, struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_read_batch *w = &p->batch;
    struct ht_store *s = w->s;

    if (w->count == HT_READ_BATCH_MAX)
        ht_read_batch_finish(w);
    struct ht_chunk *c;
    enum ht_admission a = HT_ADMISSION_AGAIN;
    while (a != HT_ADMITTED && (c = ht_chunk_find(o, index))) {
        const struct ht_permit_request permit = ht_admission_of_ref(s, ht_chunk_ref(c));
        a = HT_ADMISSION_LATER;
        if (!w->count || !(c->exclusive || c->shared))
            a = ht_admit(s, &w->spare, &permit, w->count > 0);
        if (a == HT_ADMISSION_LATER)
            ht_read_batch_finish(w);
    }
    if (!c)
        return 0;
    ht_chunk_lock_exclusive(o, c, index);
    int rc = 0;
    if (is_wanted(o, c)) {
        uint32_t slot = prefetch_slot(p, o, c, index);
        if (slot != HT_SLOT_NONE) {
            ht_chunk_attach_image(o, c, index, slot);
            ht_planner_note_ahead(o, c, index);
            ht_read_batch_start(w, o, c, index);
            return 0;
        }
        rc = 1;
    } else if (c->slot == HT_SLOT_NONE && ht_chunk_ref(c) && !is_readable(c)) {
        rc = -EIO; /* lost, or given up */
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

/* Half of what others have may go: so a large file evicts neither all of that nor its own first part. */
static uint64_t evictable_bytes(const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_arena *a = o->s->arena;
    uint64_t moving = ht_arena_moving_bytes(a), unused = ht_arena_free_slots(a) * HT_MIB;
    uint64_t bytes = moving - ht_min_u64(unused, moving);

    return o->residency == HT_RESIDENCY_PINNED ? bytes : bytes / 2;
}

static int prefetch(struct prefetch *p, struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_read_batch *w = &p->batch;
    struct ht_slice slice = {0};
    int rc = ht_shm_complete(o); /* mapped memory has room for all of it */

    p->evictable_bytes = evictable_bytes(o);

    ht_chunk_for_each_busy(c, o, index) {
        if (rc || w->error)
            break;
        if (c->slot == HT_SLOT_NONE && ht_chunk_ref(c) && !ht_chunk_is_away(o->s, c))
            rc = prefetch_chunk(p, o, index);
        ht_slice_next(o->s, &slice);
    }
    ht_read_batch_finish_all(w);
    return rc < 0 ? rc : w->error;
}

/* The oldest of these fetches is over. */
static int finish_cold(struct ht_cold_want *w) HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = ht_cold_wait_or_stop(w, NULL, NULL);

    if (!rc)
        rc = ht_cold_install(w);
    ht_cold_put(w);
    return rc;
}

/* Content in the vault, some chunks at a time. */
static int prefetch_cold(struct prefetch *p, struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_cold_want w[COLD_MAX];
    unsigned first = 0, count = 0;
    uint64_t room = p->evictable_bytes + ht_arena_free_slots(o->s->arena) * HT_MIB;
    int rc = 0;

    /* bounded: it waits for the vault, without the lock, every few chunks that are away; others are in memory */
    ht_chunk_for_each_busy(c, o, index) {
        if (rc || room < HT_MIB)
            break;
        if (!ht_chunk_is_away(o->s, c))
            continue;
        if (count == COLD_MAX) {
            rc = finish_cold(&w[first]);
            first = (first + 1) % COLD_MAX;
            count--;
        }
        struct ht_cold_want *next = &w[(first + count) % COLD_MAX];
        rc = rc ? rc : ht_cold_begin(o, index, false, false, next);
        if (rc || !next->fetch)
            continue;
        count += next->leads;
        if (!next->leads) /* another thread brings it: none waits for others before its own */
            ht_cold_put(next);
        room -= HT_MIB;
    }
    for (; count; count--, first = (first + 1) % COLD_MAX) {
        int one = finish_cold(&w[first]);
        rc = rc ? rc : one;
    }
    return rc;
}

int ht_obj_prefetch(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct prefetch p = {.batch = {.s = s, .report = true, .ring = ht_store_ring(s)}};

    if (!p.batch.ring)
        return -ENOMEM;
    enum ht_io_class was = ht_io_class_set(HT_IO_PLANNED);
    ht_store_lock(s);
    int rc = prefetch(&p, o);
    if (!rc && ht_obj_cold_blocks(o))
        rc = prefetch_cold(&p, o);
    ht_store_unlock(s);
    (void)ht_io_class_set(was);
    return rc;
}
