/* SPDX-License-Identifier: Apache-2.0 */

#include "tiering/engine/scheduler.h"

#define NEVER UINT64_MAX
#define LINGER_NS UINT64_C(1000000000)
#define MS UINT64_C(1000000)
#define NS_PER_PERCENT UINT64_C(10000000) /* of a second */

enum {
    BUDGET_BYTES_MAX = 16 << 20,
    SHORT_BYTES_MAX = 1 << 20,
    SHORT_MS = 10,
    SLICES = 100, /* a paced row: steps in a second of its rate */
};

/* ------------------------------------------------------------------ a step */

/* The row's rate and that of its lane both count. */
static uint64_t budget_bytes(const struct ht_row *r)
{
    const struct ht_lane_config *config = &r->lane->config;
    uint64_t most = config->short_steps ? SHORT_BYTES_MAX : BUDGET_BYTES_MAX;
    uint64_t own = r->pace.rate_bytes ? r->pace.rate_bytes / SLICES : most;
    uint64_t common = config->rate_bytes ? config->rate_bytes / SLICES : most;

    return ht_max_u64(ht_min_u64(ht_min_u64(own, common), most), 1);
}

/* What the lane's rows have not moved is the foreground's. Lock held. */
static uint64_t others_bytes(const struct ht_lane *l, uint64_t traffic) HT_REQUIRES(HT_LOCK_ENGINE)
{
    uint64_t own = 0;

    for (unsigned i = 0; i < l->rows; i++)
        own += l->row[i]->figures.bytes;
    return traffic - ht_min_u64(own, traffic);
}

static uint64_t pace_ns(struct ht_row *r, uint64_t now_ns, uint64_t bytes, uint64_t traffic) HT_REQUIRES(HT_LOCK_ENGINE)
{
    if (!r->pace.rate_bytes)
        return 0;
    return ht_pace_wait_ns(&r->pace, now_ns, bytes, others_bytes(r->lane, traffic));
}

/* The budget of the lane after a step. Lock held. */
static void charge(struct ht_lane *l, uint64_t bytes, uint64_t cpu_ns, uint64_t traffic) HT_REQUIRES(HT_LOCK_ENGINE)
{
    uint64_t now = ht_now_ns(), wait = 0;

    if (l->rate.rate_bytes)
        wait = ht_pace_wait_ns(&l->rate, now, bytes, others_bytes(l, traffic));
    if (l->cpu.rate_bytes)
        wait = ht_max_u64(wait, ht_pace_wait_ns(&l->cpu, now, cpu_ns, 0));
    l->not_before_ns = wait ? now + wait : 0;
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

static void *lane_main(void *arg);

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

/* Lock held; the step runs without it. own: by the lane's own thread. */
static void step(struct ht_lane *l, struct ht_row *r, bool own) HT_REQUIRES(HT_LOCK_ENGINE)
{
    struct ht_budget b = {.most_bytes = budget_bytes(r), .until_ns = NEVER, .may_be_long = own || r->long_anyway};

    r->woken = r->blocked = r->passes = false;
    r->stepping = true;
    if (!r->run_began_ns) { /* a run goes from one idle step to the next */
        r->run_began_ns = ht_now_ns();
        r->figures.run_bytes = 0;
    }
    if (l->config.short_steps)
        b.until_ns = ht_now_ns() + SHORT_MS * MS;
    ht_mutex_unlock(ht_lane_lock(l));
    uint64_t cpu_ns = ht_thread_cpu_ns();
    enum ht_step found = r->type->step(r->ctx, &b);
    cpu_ns = ht_thread_cpu_ns() - cpu_ns;
    uint64_t traffic = l->config.traffic ? l->config.traffic(l->config.ctx) : 0;
    ht_mutex_lock(ht_lane_lock(l));
    r->stepping = false;
    r->figures.steps++;
    r->figures.blocked += found == HT_STEP_BLOCKED;
    r->figures.bytes += b.bytes;
    r->figures.run_bytes += b.bytes;
    r->figures.cpu_ns += cpu_ns;
    charge(l, b.bytes, cpu_ns, traffic);
    r->at_ns = next_ns(r, found, &b, traffic);
    if (found == HT_STEP_IDLE) {
        r->figures.run_ns = ht_now_ns() - r->run_began_ns;
        r->run_began_ns = 0;
    }
    r->is_long = b.next_is_long;
    r->long_anyway = r->is_long && l->lent && start_locked(l);
}

/* ------------------------------------------------------------------ thread */

/* When it may step or rest: also its lane's budget and a pause count. Lock held. */
static uint64_t due_ns(const struct ht_row *r) HT_REQUIRES(HT_LOCK_ENGINE)
{
    if (r->rests)
        return r->paused_ns;
    if (r->at_ns == NEVER || (r->passes && !r->off))
        return r->at_ns;
    return r->paused || r->off ? NEVER : ht_max_u64(r->at_ns, r->lane->not_before_ns);
}

/* Is the row one for the lane's own thread, or for one that serves? */
static bool is_for(const struct ht_row *r, bool own) HT_REQUIRES(HT_LOCK_ENGINE)
{
    if (own)
        return !r->lane->lent || (r->passes && !r->off) || (r->is_long && !r->long_anyway);
    return !r->is_long || r->long_anyway || r->rests;
}

/* Of rows that wait for the budget, the one that is due longest. */
static bool comes_before(const struct ht_row *a, const struct ht_row *b) HT_REQUIRES(HT_LOCK_ENGINE)
{
    return due_ns(a) != due_ns(b) ? due_ns(a) < due_ns(b) : a->at_ns < b->at_ns;
}

/* NULL: none is for this thread. */
static struct ht_row *first_due(const struct ht_lane *l, bool own) HT_REQUIRES(HT_LOCK_ENGINE)
{
    struct ht_row *first = NULL;

    for (unsigned i = 0; i < l->rows; i++)
        if (is_for(l->row[i], own) && (!first || comes_before(l->row[i], first)))
            first = l->row[i];
    return first;
}

static uint64_t first_due_ns(const struct ht_lane *l, bool own) HT_REQUIRES(HT_LOCK_ENGINE)
{
    const struct ht_row *r = first_due(l, own);

    return r ? due_ns(r) : NEVER;
}

/* Until something changes, or then. False: a thread that lingers has done so long enough. Lock held. */
static bool rest(struct ht_lane *l, uint64_t at_ns, bool lingers) HT_REQUIRES(HT_LOCK_ENGINE)
{
    uint64_t until = lingers ? ht_now_ns() + LINGER_NS : at_ns == NEVER ? 0 : at_ns;
    int rc = ht_cond_wait_until(&l->changed, ht_lane_lock(l), until);

    return !lingers || rc != ETIMEDOUT || first_due_ns(l, true) != NEVER;
}

/* Lock held. */
static void serve_row(struct ht_lane *l, struct ht_row *r, bool own) HT_REQUIRES(HT_LOCK_ENGINE)
{
    l->busy = true;
    if (r->rests) {
        /* Lock held; the row rests without it. */
        r->rests = false;
        ht_mutex_unlock(ht_lane_lock(l));
        r->type->rest(r->ctx);
        ht_mutex_lock(ht_lane_lock(l));
    } else
        step(l, r, own);
    l->busy = false;
    pthread_cond_broadcast(&l->changed);
}

/* Serves the row if it is due, or waits. False: the thread has lingered long enough. Lock held. */
static bool turn(struct ht_lane *l, struct ht_row *r, bool own) HT_REQUIRES(HT_LOCK_ENGINE)
{
    uint64_t due = r ? due_ns(r) : NEVER;

    if (l->busy)
        return rest(l, NEVER, false);
    if (due > ht_now_ns())
        return rest(l, due, own && l->config.on_demand && due == NEVER);
    serve_row(l, r, own);
    return true;
}

static void *lane_main(void *arg)
{
    struct ht_lane *l = arg;
    struct ht_row *r;

    pthread_setname_np(pthread_self(), l->config.name);
    (void)ht_io_class_set(l->config.io_class);
    if (l->config.enter)
        l->config.enter(l->config.ctx);
    ht_mutex_lock(ht_lane_lock(l));
    for (bool more = true; more && !l->stopping && (r = first_due(l, true));)
        more = turn(l, r, true);
    l->running = false;
    ht_mutex_unlock(ht_lane_lock(l));
    return NULL;
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
    HT_UNSHARED(HT_LOCK_ENGINE);
    l->config = *config;
    l->rate.rate_bytes = config->rate_bytes;
    l->cpu.rate_bytes = config->cpu_percent * NS_PER_PERCENT;
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
    assert(l->rows < HT_LANE_ROWS_MAX && type->figures <= HT_ENGINE_FIGURES_MAX);
    *r = (struct ht_row){.type = type, .ctx = ctx, .pace.rate_bytes = rate_bytes, .lane = l, .at_ns = NEVER};
    l->row[l->rows++] = r;
}

void ht_row_end(struct ht_row *r)
{
    ht_mutex_lock(ht_lane_lock(r->lane));
    r->off = true;
    while (r->stepping)
        ht_cond_wait(&r->lane->changed, ht_lane_lock(r->lane));
    ht_mutex_unlock(ht_lane_lock(r->lane));
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
    while (l->served)
        ht_cond_wait(&l->changed, ht_lane_lock(l));
    bool joinable = l->joinable;
    pthread_t thread = l->thread;
    l->joinable = false;
    ht_mutex_unlock(ht_lane_lock(l));
    if (joinable)
        pthread_join(thread, NULL);
}

/* ------------------------------------------------------------------ lending */

void ht_lane_lend(struct ht_lane *l)
{
    assert(l->config.on_demand);
    ht_mutex_lock(ht_lane_lock(l));
    l->lent = true;
    pthread_cond_broadcast(&l->changed);
    ht_mutex_unlock(ht_lane_lock(l));
}

void ht_lane_take_back(struct ht_lane *l)
{
    ht_mutex_lock(ht_lane_lock(l));
    l->lent = false;
    pthread_cond_broadcast(&l->changed);
    while (l->served)
        ht_cond_wait(&l->changed, ht_lane_lock(l));
    if (first_due_ns(l, true) != NEVER)
        (void)start_locked(l); /* else the next wake starts it */
    ht_mutex_unlock(ht_lane_lock(l));
}

/* Does the thread that serves go on? Lock held. */
static bool serves_on(const struct ht_lane *l) HT_REQUIRES(HT_LOCK_ENGINE)
{
    return l->lent && !l->stopping && !atomic_load(&l->recalled);
}

static void serve_locked(struct ht_lane *l, bool once) HT_REQUIRES(HT_LOCK_ENGINE)
{
    l->served = true;
    if (once)
        atomic_store(&l->recalled, true); /* it is wanted already: it waits at no gate */
    if (once && !l->busy && first_due_ns(l, false) <= ht_now_ns())
        serve_row(l, first_due(l, false), false);
    while (!once && serves_on(l))
        (void)turn(l, first_due(l, false), false);
    atomic_store(&l->recalled, false);
    l->served = false;
    pthread_cond_broadcast(&l->changed);
}

bool ht_lane_serve(struct ht_lane *l, bool once)
{
    enum ht_io_class was = ht_io_class_set(l->config.io_class);

    ht_mutex_lock(ht_lane_lock(l));
    if (!l->served && l->lent && !l->stopping)
        serve_locked(l, once);
    bool more = l->lent && !l->stopping;
    ht_mutex_unlock(ht_lane_lock(l));
    (void)ht_io_class_set(was);
    return more;
}

void ht_lane_recall(struct ht_lane *l)
{
    ht_mutex_lock(ht_lane_lock(l));
    atomic_store(&l->recalled, true);
    pthread_cond_broadcast(&l->changed);
    ht_mutex_unlock(ht_lane_lock(l));
}

/* -------------------------------------------------------------------- wakes */

static int wake_and_start(struct ht_row *r) HT_REQUIRES(HT_LOCK_ENGINE)
{
    struct ht_lane *l = r->lane;

    wake_locked(r);
    pthread_cond_broadcast(&l->changed);
    if (!l->config.on_demand || (l->lent && !l->stopping && !is_for(r, true)))
        return 0;
    return l->stopping || due_ns(r) != NEVER ? start_locked(l) : 0;
}

int ht_row_wake(struct ht_row *r)
{
    return ht_locked(ht_lane_lock(r->lane), wake_and_start(r));
}

int ht_row_wake_to_end(struct ht_row *r)
{
    ht_mutex_lock(ht_lane_lock(r->lane));
    r->passes = true;
    int rc = wake_and_start(r);
    ht_mutex_unlock(ht_lane_lock(r->lane));
    return rc;
}

int ht_row_pause(struct ht_row *r)
{
    ht_mutex_lock(ht_lane_lock(r->lane));
    if (!r->paused) {
        r->paused_ns = ht_now_ns();
        /* Without a thread no step has begun what it must end. */
        r->rests = r->type->rest && (r->lane->running || r->lane->lent);
        pthread_cond_broadcast(&r->lane->changed);
    }
    r->paused = true;
    ht_mutex_unlock(ht_lane_lock(r->lane));
    return 0;
}

int ht_row_resume(struct ht_row *r)
{
    int rc = 0;

    ht_mutex_lock(ht_lane_lock(r->lane));
    if (r->paused && r->run_began_ns)
        r->run_began_ns += ht_now_ns() - ht_max_u64(r->paused_ns, r->run_began_ns);
    r->paused = false;
    if (r->at_ns != NEVER)
        rc = wake_and_start(r);
    ht_mutex_unlock(ht_lane_lock(r->lane));
    return rc;
}

bool ht_row_is_paused(struct ht_row *r)
{
    return ht_locked(ht_lane_lock(r->lane), r->paused);
}

static enum ht_background_state state_of(const struct ht_row *r) HT_REQUIRES(HT_LOCK_ENGINE)
{
    if (r->off)
        return HT_BACKGROUND_OFF;
    if (r->paused)
        return HT_BACKGROUND_PAUSED;
    if (r->blocked)
        return HT_BACKGROUND_BLOCKED;
    return r->stepping || r->run_began_ns ? HT_BACKGROUND_WORKING : HT_BACKGROUND_IDLE;
}

void ht_row_figures(struct ht_row *r, struct ht_background_stat *out)
{
    ht_mutex_lock(ht_lane_lock(r->lane));
    *out = r->figures;
    out->state = state_of(r);
    if (r->run_began_ns) {
        uint64_t until_ns = r->paused ? ht_max_u64(r->paused_ns, r->run_began_ns) : ht_now_ns();
        out->run_ns = until_ns - r->run_began_ns;
    }
    ht_mutex_unlock(ht_lane_lock(r->lane));
}
