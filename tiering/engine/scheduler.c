/* SPDX-License-Identifier: Apache-2.0 */
/* scheduler.c - see scheduler.h. */
#include <assert.h>

#include "tiering/engine/scheduler.h"

#define NEVER UINT64_MAX
#define LINGER_NS UINT64_C(1000000000)
#define MS UINT64_C(1000000)

enum { BUDGET_BYTES_MAX = 16 << 20, SLICES = 100 }; /* a paced row: steps in a second of its rate */

/* ------------------------------------------------------------------ a step */

static uint64_t budget_bytes(const struct ht_row *r)
{
    uint64_t bytes = r->pace.rate_bytes ? r->pace.rate_bytes / SLICES : BUDGET_BYTES_MAX;

    return ht_max_u64(ht_min_u64(bytes, BUDGET_BYTES_MAX), 1);
}

/* What the lane's rows have not moved is the foreground's. Lock held. */
static uint64_t pace_ns(struct ht_row *r, uint64_t now_ns, uint64_t bytes, uint64_t traffic) HT_REQUIRES(HT_LOCK_ENGINE)
{
    uint64_t own = 0;

    if (!r->pace.rate_bytes)
        return 0;
    for (unsigned i = 0; i < r->lane->rows; i++)
        own += r->lane->row[i]->figures.bytes;
    return ht_pace_wait_ns(&r->pace, now_ns, bytes, traffic - ht_min_u64(own, traffic));
}

/* When the row is due after this step. Lock held. */
static uint64_t next_ns(struct ht_row *r, enum ht_step found, const struct ht_budget *b, uint64_t traffic)
    HT_REQUIRES(HT_LOCK_ENGINE)
{
    uint64_t now = ht_now_ns(), wait = found == HT_STEP_WORKED ? pace_ns(r, now, b->bytes, traffic) : 0;

    r->blocked = found == HT_STEP_BLOCKED;
    if (r->blocked)
        return now + r->type->pause_ms * MS;
    if (r->woken)
        return now;
    return found == HT_STEP_WORKED ? now + wait : b->at_ns ? b->at_ns : NEVER;
}

/* Lock held; the step runs without it. */
static void step(struct ht_lane *l, struct ht_row *r) HT_REQUIRES(HT_LOCK_ENGINE)
{
    struct ht_budget b = {.most_bytes = budget_bytes(r)};

    r->woken = r->blocked = false;
    r->stepping = true;
    ht_mutex_unlock(ht_lane_lock(l));
    enum ht_step found = r->type->step(r->ctx, &b);
    uint64_t traffic = l->config.traffic ? l->config.traffic(l->config.ctx) : 0;
    ht_mutex_lock(ht_lane_lock(l));
    r->stepping = false;
    r->figures.steps++;
    r->figures.blocked += found == HT_STEP_BLOCKED;
    r->figures.bytes += b.bytes;
    r->at_ns = next_ns(r, found, &b, traffic);
}

/* ------------------------------------------------------------------ thread */

static struct ht_row *first_due(const struct ht_lane *l) HT_REQUIRES(HT_LOCK_ENGINE)
{
    struct ht_row *first = l->row[0];

    for (unsigned i = 1; i < l->rows; i++)
        if (l->row[i]->at_ns < first->at_ns)
            first = l->row[i];
    return first;
}

/* Until something changes, or then. False: the thread of a lane on demand has lingered long enough. Lock held. */
static bool rest(struct ht_lane *l, uint64_t at_ns) HT_REQUIRES(HT_LOCK_ENGINE)
{
    bool lingers = l->config.on_demand && at_ns == NEVER;
    uint64_t until = lingers ? ht_now_ns() + LINGER_NS : at_ns == NEVER ? 0 : at_ns;
    int rc = ht_cond_wait_until(&l->changed, ht_lane_lock(l), until);

    return !lingers || rc != ETIMEDOUT || first_due(l)->at_ns != NEVER;
}

static void *lane_main(void *arg)
{
    struct ht_lane *l = arg;

    pthread_setname_np(pthread_self(), l->config.name);
    (void)ht_io_class_set(l->config.io_class);
    if (l->config.enter)
        l->config.enter(l->config.ctx);
    ht_mutex_lock(ht_lane_lock(l));
    for (bool more = true; more && !l->stopping;) {
        struct ht_row *r = first_due(l);
        if (r->at_ns <= ht_now_ns())
            step(l, r);
        else
            more = rest(l, r->at_ns);
    }
    l->running = false;
    ht_mutex_unlock(ht_lane_lock(l));
    return NULL;
}

/* Lock held. The thread that has ended needs it no more. */
static int start_locked(struct ht_lane *l) HT_REQUIRES(HT_LOCK_ENGINE)
{
    if (l->stopping)
        return -ECANCELED;
    if (l->running)
        return 0;
    if (l->joinable)
        pthread_join(l->thread, NULL);
    int rc = pthread_create(&l->thread, NULL, lane_main, l);
    l->running = l->joinable = rc == 0;
    return -rc;
}

static void wake_locked(struct ht_row *r) HT_REQUIRES(HT_LOCK_ENGINE)
{
    r->woken = true;
    if (!r->stepping && !r->blocked)
        r->at_ns = ht_min_u64(r->at_ns, ht_now_ns());
}

/* --------------------------------------------------------------- interface */

void ht_lane_init(struct ht_lane *l, const struct ht_lane_config *config)
{
    l->config = *config;
    ht_mutex_init(&l->lock, HT_LOCK_ENGINE);
    ht_cond_init(&l->changed);
}

void ht_lane_destroy(struct ht_lane *l)
{
    HT_UNSHARED(HT_LOCK_ENGINE);
    assert(!l->running);
    pthread_cond_destroy(&l->changed);
    ht_mutex_destroy(&l->lock);
}

void ht_lane_add(struct ht_lane *l, struct ht_row *r, const struct ht_engine_type *type, void *ctx, uint64_t rate_bytes)
{
    assert(l->rows < HT_LANE_ROWS_MAX);
    *r = (struct ht_row){.type = type, .ctx = ctx, .pace.rate_bytes = rate_bytes, .lane = l, .at_ns = NEVER};
    l->row[l->rows++] = r;
}

int ht_lane_start(struct ht_lane *l)
{
    ht_mutex_lock(ht_lane_lock(l));
    for (unsigned i = 0; i < l->rows; i++)
        wake_locked(l->row[i]);
    int rc = start_locked(l);
    ht_mutex_unlock(ht_lane_lock(l));
    return rc;
}

void ht_lane_stop(struct ht_lane *l)
{
    ht_mutex_lock(ht_lane_lock(l));
    l->stopping = true;
    pthread_cond_broadcast(&l->changed);
    bool joinable = l->joinable;
    pthread_t thread = l->thread;
    l->joinable = false;
    ht_mutex_unlock(ht_lane_lock(l));
    if (joinable)
        pthread_join(thread, NULL);
}

int ht_row_wake(struct ht_row *r)
{
    struct ht_lane *l = r->lane;

    ht_mutex_lock(ht_lane_lock(l));
    wake_locked(r);
    pthread_cond_signal(&l->changed);
    int rc = l->config.on_demand ? start_locked(l) : 0;
    ht_mutex_unlock(ht_lane_lock(l));
    return rc;
}

void ht_row_figures(struct ht_row *r, struct ht_row_figures *out)
{
    ht_mutex_lock(ht_lane_lock(r->lane));
    *out = r->figures;
    ht_mutex_unlock(ht_lane_lock(r->lane));
}
