/* SPDX-License-Identifier: Apache-2.0 */
/*
 * background.c - the writeback thread: keeps some images clean, and commits what is outside scopes every few seconds. With several NUMA
 * nodes each has a thread of its own for the first of these.
 */
#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/store/store_priv.h"

/* Looking for what mappings of handed-out files have stored takes at most so small a part of the timer's period. */
enum { BATCH = 16, LOOK_PART = 50, IN_VAIN_MS_MAX = 100 };

static bool sleep_until(struct ht_store *s, uint64_t deadline_ns)
{
    int rc = 0;
    while (!s->stopping && (s->reliefs || !ht_arena_under_pressure(s->arena)) && rc != ETIMEDOUT)
        rc = ht_store_wait(s, &s->wake, deadline_ns);
    return rc == ETIMEDOUT || (deadline_ns && ht_now_ns() >= deadline_ns); /* also under pressure that does not end */
}

/* in_vain: since when nothing was cleaned. When that goes on, what was being filled has to do: there is nothing else. */
static void relieve(struct ht_store *s, int near, pthread_cond_t *pause, uint64_t *in_vain)
{
    uint64_t now = ht_now_ns();
    bool any = *in_vain && now - *in_vain > IN_VAIN_MS_MAX * UINT64_C(1000000);
    ht_store_unlock(s);
    int n = ht_writeback_some(s, BATCH, any ? HT_CLEAN_GROWING : HT_CLEAN_PRESSING, near);
    ht_store_lock(s);
    *in_vain = n > 0 ? 0 : *in_vain ? *in_vain : now;
    if (n <= 0 && !s->stopping) /* all busy, or the device fails: do not spin */
        ht_store_wait(s, pause, ht_now_ns() + 10000000);
}

/* Pauses with a condition that says only when to end: others make images dirty all the time. */
void *ht_relief_main(void *arg)
{
    const struct ht_relief *r = arg;
    struct ht_store *s = r->s;
    uint64_t in_vain = 0;
    pthread_setname_np(pthread_self(), "ht-writeback");
    ht_nodes_run_on(&s->nodes, r->near);
    ht_store_lock(s);
    while (!s->stopping) {
        if (ht_arena_under_pressure(s->arena) && ht_arena_dirty_on(s->arena, (unsigned)r->near))
            relieve(s, r->near, &s->watch, &in_vain);
        else
            ht_store_wait(s, &s->wake, 0);
    }
    ht_store_unlock(s);
    return NULL;
}

static size_t pending_bytes_outside(struct ht_store *s)
{
    return ht_scope_pending_bytes(s, 0) + 4096;
}

/* What could be written goes into the transaction; once more when some of it was given up in between. */
static int begin_commit(struct ht_store *s, int *out_written, struct ht_tx **out_tx)
{
    struct ht_rounds rounds = HT_ROUNDS_INIT;
    int rc;
    do {
        ht_rounds_next(s, &rounds);
        *out_written = ht_scope_write(s, 0);
        rc = *out_written == -EROFS ? -EROFS : ht_tx_begin_round(s, pending_bytes_outside(s), &rounds, out_tx);
    } while (rc == -EAGAIN);
    return rc;
}

/* found: the error of looking for what was stored unseen. */
static int commit(struct ht_store *s, int found)
{
    struct ht_tx *tx;
    int written, rc = begin_commit(s, &written, &tx), error = written ? written : found;
    if (rc)
        return rc;
    int expected = ht_tx_expect(tx, pending_bytes_outside(s));
    if (!expected)
        ht_scope_publish(s, 0, tx);
    for (unsigned i = 0; !expected && i < s->clients; i++)
        if (s->client[i].flush)
            s->client[i].flush(s->client[i].ctx, tx);
    uint64_t lsn;
    rc = ht_tx_commit(tx, &lsn);
    rc = expected ? expected : rc;
    if (!rc)
        rc = ht_store_sync(s, s->last_lsn);
    return rc ? rc : error;
}

int ht_store_commit(struct ht_store *s)
{
    return commit(s, ht_handed_find_changes(s, 0));
}

/* Who waits for memory does not wait for a look at tens of GiB. Lock held, let go meanwhile. */
static void relieve_between(struct ht_store *s)
{
    if (s->reliefs || !ht_arena_under_pressure(s->arena))
        return;
    ht_store_unlock(s);
    int n = ht_writeback_some(s, BATCH, HT_CLEAN_PRESSING, HT_NEAR_ANY);
    (void)n; /* the next time, or the loop */
    ht_store_lock(s);
}

static int look_and_commit(struct ht_store *s, uint64_t period_ns)
{
    uint64_t now = ht_now_ns();
    struct ht_handed_look look = {period_ns, now, now + period_ns / LOOK_PART, relieve_between, 0};
    return commit(s, ht_handed_look(s, &look));
}

static void commit_failed(int error)
{
    struct ht_event_about about = {.error = error};
    ht_event(HT_EVENT_COMMIT_FAILED, &about, "the commit of what is outside models failed: %s; it will be tried again",
             strerror(-error));
}

void *ht_writeback_main(void *arg)
{
    struct ht_store *s = arg;
    uint64_t period = (uint64_t)s->opts.commit_ms * 1000000, next = period ? ht_now_ns() + period : 0, in_vain = 0;
    ht_store_lock(s);
    while (!s->stopping) {
        bool due = sleep_until(s, next);
        if (s->stopping)
            break;
        if (due) {
            ht_store_unlock(s);
            int rc = look_and_commit(s, period);
            if (rc)
                commit_failed(rc);
            next = ht_now_ns() + period;
            ht_store_lock(s);
        } else {
            relieve(s, HT_NEAR_ANY, &s->wake, &in_vain);
        }
    }
    ht_store_unlock(s);
    return NULL;
}
