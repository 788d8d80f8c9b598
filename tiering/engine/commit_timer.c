/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commit_timer.c - the engine that commits changes outside scopes every few seconds, and gives closed memory back.
 *
 * A commit waits for the devices that its content lies on, for those of the log, and for other threads' writes of its
 * images (data/health.h). The engine does not begin one that would wait for a device that does not answer:
 *
 *   due --all requests from before are answered--> commit --> due again a period later
 *       --one of its devices does not answer-----> an event, once; due again a period later
 *       --some are not answered yet--------------> blocked, and looks again
 *
 * A device that falls silent during the commit's own requests holds the engine until it answers.
 */
#include "tiering/base/event.h"
#include "tiering/object/context.h"
#include "tiering/data/health.h"
#include "tiering/shm/shm.h"
#include "tiering/engine/engine_priv.h"

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
    ht_store_lock(s);
    enum answers found = look_at_needed(s, t->due_ns);
    ht_store_unlock(s);
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

static enum ht_step step(void *ctx, struct ht_budget *b)
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
    b->at_ns = t->next_ns;
    return HT_STEP_IDLE;
}

const struct ht_engine_type ht_commit_engine = {.name = "commit", .pause_ms = DOUBT_MS, .step = step};
