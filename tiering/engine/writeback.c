/* SPDX-License-Identifier: Apache-2.0 */
/*
 * writeback.c - when dirty content is written: which images are cleaned to make room, and three engines. One keeps some
 * images clean, one writes final images, and the commit timer commits changes outside of scopes. txn/sync.c writes the
 * images of an object or a scope; data/write_batch.c says how.
 *
 * A final image is published as it is now (api/batch_pin.h): an update made it, and its step will be durable. It is
 * written as soon as the gate lets planned writes pass, each one once. So the devices are busy while a trainer
 * computes, and the publication finds little to write. If it changes again before, it is final no more.
 */
#include "tiering/base/event.h"
#include "tiering/object/context.h"
#include "tiering/data/data.h"
#include "tiering/data/write_batch.h"
#include "tiering/shm/shm.h"
#include "tiering/engine/engine_priv.h"

enum {
    ALONE = 8,
    FAILED_MAX = 16,
    TRIED_MAX = 256,
    PAUSE_MS = 10,
    FINAL = 64, /* in one step */
    FINAL_FLIGHT_MIN = 2 << 20,
    IN_VAIN_MS_MAX = 100,
};

/* Shall the thread search for one more? */
static bool goes_on(const struct ht_write_batch *w, unsigned tried, unsigned most, enum ht_clean whom)
    HT_REQUIRES(HT_LOCK_STORE)
{
    if (whom == HT_CLEAN_FINAL)
        return tried < most && !w->s->waits.stopping;
    return tried - w->failed < most || (whom && tried < TRIED_MAX && ht_arena_under_pressure(w->s->arena));
}

static bool is_asked(struct ht_store *s, uint32_t slot, enum ht_clean whom) HT_REQUIRES(HT_LOCK_STORE)
{
    return whom == HT_CLEAN_ANY || whom == HT_CLEAN_FINAL || ht_arena_presses(s->arena, slot, whom == HT_CLEAN_GROWING);
}

static struct ht_dirty_walk walk_for(struct ht_store *s, enum ht_clean whom, int numa_index) HT_REQUIRES(HT_LOCK_STORE)
{
    if (whom == HT_CLEAN_FINAL)
        return HT_FINAL_WALK;
    return HT_DIRTY_WALK(!whom || ht_arena_is_short(s->arena), numa_index);
}

/*
 * Of final images so many bytes are in flight as the devices move in the time that the gate lets urgent requests wait:
 * while no urgent request comes the gate lets all pass, and then one comes.
 */
static uint64_t final_flight_bytes(const struct ht_store *s)
{
    uint64_t bytes = 0;

    for (unsigned i = 0; i < s->dev_count; i++) {
        struct ht_dev_rate rate = {0};
        if (s->dev[i])
            ht_dev_rate(s->dev[i], HT_DIRECTION_WRITE, &rate);
        bytes += rate.known ? rate.bytes_per_s / 1000 * (HT_GATE_BOUND_NS / 1000000) : 0;
    }
    return ht_min_u64(ht_max_u64(bytes, FINAL_FLIGHT_MIN), HT_WRITE_BATCH_FLIGHT_MAX);
}

int ht_writeback_some(struct ht_store *s, unsigned most, enum ht_clean whom, int numa_index)
{
    struct ht_write_batch *w = ht_write_batch_open(s);
    unsigned tried = 0, given_up = 0;
    int rc = 0;

    if (!w)
        return -ENOMEM;
    if (whom == HT_CLEAN_FINAL) {
        w->early = true;
        w->good = HT_GATE_NOTHING;
        w->flight_bytes_max = final_flight_bytes(s);
    }
    ht_store_lock(s);
    struct ht_dirty_walk walk = walk_for(s, whom, numa_index);
    while (goes_on(w, tried, most, whom)) {
        /* Now, because both release the lock. */
        while (ht_write_batch_full(w) || !ht_write_batch_admit(w, -1))
            if (ht_write_batch_full(w))
                ht_write_batch_finish(w);
        uint32_t slot = ht_dirty_walk_next(s->arena, &walk);
        if (slot == HT_SLOT_NONE)
            break;
        struct ht_image *im = ht_arena_image(s->arena, slot);
        struct ht_obj *o = im->owner;
        struct ht_chunk *c = ht_chunk_find(o, im->index);
        if (!is_asked(s, slot, whom) || !ht_chunk_trylock_exclusive(o, c, im->index))
            continue;
        ht_arena_set_final(s->arena, slot, false); /* it is tried once: the publication is next */
        o->refs++;                                 /* a scratch object or a dead one may have no other reference */
        rc = ht_write_batch_start(w, o, c, im->index);
        ht_obj_put_locked(o);
        tried++;
        if (rc)
            ht_write_batch_note_error(w, rc);
        if (w->failed - given_up >= FAILED_MAX) { /* those of another device or kind may do */
            given_up = w->failed;
            ht_dirty_walk_skip_list(&walk);
        }
    }
    /* The caller wants to know whether an image was cleaned: an error of another chunk belongs to that chunk. */
    while (w->count)
        ht_write_batch_finish(w);
    unsigned cleaned = tried - w->failed;
    rc = ht_write_batch_close(w);
    ht_store_unlock(s);
    return cleaned || !rc ? (int)cleaned : rc;
}

int ht_writeback_make_room(struct ht_store *s)
{
    return ht_writeback_some(s, s->opts.no_threads ? ALONE : 1, HT_CLEAN_ANY, HT_NUMA_INDEX_ANY);
}

/* ------------------------------------------------------------------ engines */

static bool is_needed(struct ht_store *s, int numa_index)
{
    return ht_store_locked(s,
                           !s->waits.stopping && ht_arena_under_pressure(s->arena) &&
                               (numa_index == HT_NUMA_INDEX_ANY || ht_arena_sums(s->arena)->dirty_on[numa_index]));
}

/*
 * When nothing could be cleaned for some time, images that programs still fill are taken: there is nothing else. A step
 * that cleans nothing pauses: all images are busy, or the device fails.
 */
static enum ht_step relieve(void *ctx, struct ht_budget *b)
{
    struct ht_relief *r = ctx;

    if (!is_needed(r->s, r->numa_index))
        return HT_STEP_IDLE;
    uint64_t now = ht_now_ns();
    bool any = r->in_vain_ns && now - r->in_vain_ns > IN_VAIN_MS_MAX * UINT64_C(1000000);
    unsigned most = (unsigned)(b->most_bytes / HT_CHUNK_BYTES);
    int n = ht_writeback_some(r->s, most, any ? HT_CLEAN_GROWING : HT_CLEAN_PRESSING, r->numa_index);
    r->in_vain_ns = n > 0 ? 0 : r->in_vain_ns ? r->in_vain_ns : now;
    return n > 0 ? HT_STEP_WORKED : HT_STEP_BLOCKED;
}

static enum ht_step clean_final(void *ctx, struct ht_budget *b)
{
    struct ht_store *s = ctx;

    (void)b; /* a longer step keeps the devices busy, and no other row waits for it */
    bool needed = ht_store_locked(s, !s->waits.stopping && ht_arena_has_final(s->arena));
    if (!needed)
        return HT_STEP_IDLE;
    int n = ht_writeback_some(s, FINAL, HT_CLEAN_FINAL, HT_NUMA_INDEX_ANY);
    return n > 0 ? HT_STEP_WORKED : HT_STEP_BLOCKED;
}

const struct ht_engine_type ht_cleaning_engine = {.name = "cleaning", .pause_ms = PAUSE_MS, .step = clean_final};
const struct ht_engine_type ht_relief_engine = {.name = "writeback", .pause_ms = PAUSE_MS, .step = relieve};

/* ------------------------------------------------------------ commit timer */

/*
 * Commits changes outside scopes every few seconds, and gives closed memory back.
 *
 * A commit waits for the devices that its content lies on, for those of the log, and for other threads' writes of its
 * images (data/data.h). The engine does not begin one that would wait for a device that does not answer:
 *
 *   due --all requests from before are answered--> commit --> due again a period later
 *       --one of its devices does not answer-----> an event, once; due again a period later
 *       --some are not answered yet--------------> blocked, and looks again
 *
 * A device that falls silent during the commit's own requests holds the engine until it answers.
 */

/* A scan for stores through mappings of passthrough files takes at most so small a part of the timer's period. */
enum { BATCH = 16, SCAN_PART = 50, DOUBT_MS = 20 };

/*
 * A thread that waits for memory does not wait for a scan of tens of GiB, as the row that relieves the tier does.
 * Releases the lock in between.
 */
static void relieve_between(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    if (s->numa.nodes.count > 1 || !ht_arena_under_pressure(s->arena))
        return;
    ht_store_unlock(s);
    int n = ht_writeback_some(s, BATCH, HT_CLEAN_PRESSING, HT_NUMA_INDEX_ANY);
    (void)n; /* the next time, or the row */
    ht_store_lock(s);
}

static int scan_and_commit(struct ht_store *s, uint64_t period_ns)
{
    uint64_t now = ht_now_ns();
    struct ht_shm_scan scan = {period_ns, now, now + period_ns / SCAN_PART, relieve_between, 0};

    return ht_txn_commit_outside(s, ht_shm_scan(s, &scan));
}

enum answers { ANSWER_ALL, ANSWER_LATER, ANSWER_NEVER };

/* Do the devices answer that a commit waits for, which has been due since then? Lock held. */
static enum answers look_at_needed(struct ht_store *s, uint64_t since_ns) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t needed = ht_commit_devices_locked(s, 0);
    enum answers found = ANSWER_ALL;

    for (unsigned i = 0; i < s->dev_count; i++) {
        if (!s->dev[i] || !(needed >> i & 1))
            continue;
        if (ht_store_check_device(s, i) == HT_HEALTH_NOT_ANSWERING)
            return ANSWER_NEVER;
        if (ht_dev_oldest_ns(s->dev[i]) > ht_now_ns() - since_ns)
            found = ANSWER_LATER;
    }
    return found;
}

/* The commit is due. False: not all devices have answered yet. */
static bool commit_if_answered(struct ht_store *s, struct ht_commit_timer *t, uint64_t period_ns)
{
    t->due_ns = t->due_ns ? t->due_ns : ht_now_ns();
    enum answers found = ht_store_locked(s, look_at_needed(s, t->due_ns));
    if (found == ANSWER_LATER)
        return false;
    int rc = found == ANSWER_ALL ? scan_and_commit(s, period_ns) : t->reported ? 0 : -ETIMEDOUT;
    if (rc) {
        struct ht_event_about about = {.error = rc};
        ht_event(HT_EVENT_COMMIT_FAILED, &about,
                 "the commit of files outside models failed: %s; it will be tried again", strerror(-rc));
    }
    t->reported = found == ANSWER_NEVER;
    t->due_ns = 0;
    return true;
}

static enum ht_step commit_step(void *ctx, struct ht_budget *b)
{
    struct ht_store *s = ctx;
    struct ht_commit_timer *t = &s->engine->commit;
    uint64_t period_ns = s->opts.commit_ms * UINT64_C(1000000), now = ht_now_ns();
    uint64_t pause_ns = period_ns ? period_ns : HT_SHM_GIVE_NS;

    if (!period_ns && !s->opts.shm_lent)
        return HT_STEP_IDLE;
    if (!t->next_ns)
        t->next_ns = now + pause_ns;
    if (now >= t->next_ns) {
        if (period_ns && !commit_if_answered(s, t, period_ns))
            return HT_STEP_BLOCKED;
        ht_shm_give_closed(s);
        t->next_ns = ht_now_ns() + pause_ns;
    }
    return ht_idle_until(b, t->next_ns);
}

const struct ht_engine_type ht_commit_engine = {.name = "commit", .pause_ms = DOUBT_MS, .step = commit_step};
