/* SPDX-License-Identifier: Apache-2.0 */
/*
 * planner.c - makes plans of steps that repeat, and follows them.
 *
 *   accesses --> runs (tier/runs.h) --period--> one step --> forecast (tier/forecast.h)
 *                                                              |
 *   eviction: what is needed last goes first (cache/order.c) <-|
 *   reads before they are asked for (readahead.c) <------------'
 *
 *   nothing --enough runs, content above the room, a period--> plan is followed --two steps did not match--> nothing
 *                                                               '--steps take another time--> made anew
 *
 * Without a plan all is as if this engine did not exist. A plan evicts no dirty content, and a wrong one costs time and
 * nothing else. It is made without any lock; threads that work on chunks only add to the runs and ask the forecast.
 *
 * A ring of runs that is full and has no whole step is followed by a larger one, if the tier is large enough. Making a
 * plan takes a small part of one processor, however often it fails.
 */

#include "tiering/api/stats.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/engine/engine_priv.h"

enum { RUNS_MIN = 4, ROOM_PART = 8, HISTORY_MIN = 4, NEWS_PART = 16, AHEAD_PART = 16 };
enum {
    COPY_RUNS = 4096, /* are copied while the lock is held */
    LARGER = 4,       /* the next ring of runs, times this one */
    RUNS_PART = 16,   /* of the tier: at most so much is the ring */
    TRY_PART = 32     /* of a processor: at most so much is for plans that fail */
};
#define WAIT_NS_MIN UINT64_C(200000000) /* between two tries */
#define WAIT_NS_MAX UINT64_C(10000000000)
#define TRY_WAIT_NS_MAX UINT64_C(60000000000)
#define FETCH_PAUSE_NS UINT64_C(2000000)

int ht_planner_init(struct ht_planner *p)
{
    HT_UNSHARED(HT_LOCK_STORE);
    p->wait_ns = WAIT_NS_MIN;
    return ht_runs_init(&p->runs);
}

void ht_planner_destroy(struct ht_planner *p)
{
    HT_UNSHARED(HT_LOCK_STORE);
    ht_forecast_free(p->forecast);
    ht_runs_destroy(&p->runs);
}

uint64_t ht_planner_bytes(const struct ht_planner *p)
{
    return ht_runs_bytes(&p->runs) + ht_forecast_bytes(p->forecast);
}

/* ---------------------------------------------------------------- accesses */

/* What the forecast is to be followed by. */
enum change { KEEP, DROP, MAKE };

static enum change find_change(const struct ht_planner *p) HT_REQUIRES(HT_LOCK_STORE)
{
    if (p->forecast)
        return p->outdated || ht_forecast_is_wrong(p->forecast) ? DROP
            : ht_forecast_has_drifted(p->forecast)              ? MAKE
                                                                : KEEP;
    return p->runs.count - p->tried_runs >= RUNS_MIN ? MAKE : KEEP;
}

/* Something may be to do for the engine. */
static bool is_due(const struct ht_planner *p, uint64_t now_ns) HT_REQUIRES(HT_LOCK_STORE)
{
    return find_change(p) != KEEP && (p->forecast || now_ns - p->tried_ns >= p->wait_ns);
}

/* So many bytes changed that plans of steps before do not hold. */
static void outdate(struct ht_planner *p) HT_REQUIRES(HT_LOCK_STORE)
{
    p->valid_ns = ht_now_ns();
    p->outdated = p->forecast;
    p->wait_ns = WAIT_NS_MIN;
}

static bool is_news(const struct ht_store *s, uint64_t bytes, uint64_t before) HT_REQUIRES(HT_LOCK_STORE)
{
    return (bytes > before ? bytes - before : before - bytes) > ht_arena_bytes(s->arena) / NEWS_PART;
}

/* Pinned content stays, whatever a plan says, and leaves it less room. */
static void note_pinned(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_planner *p = &s->engine->planner;
    uint64_t bytes = ht_arena_sums(s->arena)->pinned_bytes;

    if (!is_news(s, bytes, p->pinned_bytes))
        return;
    p->pinned_bytes = bytes;
    outdate(p);
}

/* The use that a program named has come. */
static void end_hint(const struct ht_obj *o, const struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    if (s->next_uses.leads || ht_next_uses_find(&s->next_uses, o->oid, ht_now_ns()))
        ht_arena_forget_next_use(s->arena, c->slot);
}

/* Bytes that its image takes, or would take. */
static uint32_t memory_of(const struct ht_obj *o, const struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    if (c->slot != HT_SLOT_NONE)
        return ht_arena_slot_bytes(o->s->arena, c->slot);
    return ht_chunk_update_bytes(o, c, index, 0);
}

void ht_planner_note(struct ht_obj *o, const struct ht_chunk *c, uint64_t index, enum ht_plan_use use, bool begins)
{
    struct ht_store *s = o->s;
    struct ht_planner *p = &s->engine->planner;

    note_pinned(s);
    if (index > UINT32_MAX || o->extra->shm) /* no such chunk of a tensor; and mapped memory stays where it is */
        return;
    const struct ht_run_access a = {
        .object = o->oid,
        .now_ns = ht_now_ns(),
        .index = (uint32_t)index,
        .use = use,
        .chunk_shift = o->chunk_shift,
        .bytes = memory_of(o, c, index),
        .pinned = o->residency == HT_RESIDENCY_PINNED,
        .begins = begins,
    };
    ht_runs_note(&p->runs, &a);
    struct ht_forecast_use next = {.known = false};
    if (p->forecast) {
        next = ht_forecast_note(p->forecast, &a);
        ht_arena_order_move(s->arena, ht_forecast_place(p->forecast, ht_forecast_now(p->forecast, a.now_ns)));
        if (next.known && c->slot != HT_SLOT_NONE)
            ht_arena_set_next_use(s->arena, c->slot, ht_forecast_place(p->forecast, next.next_ns), true);
    }
    if (!next.known && c->slot != HT_SLOT_NONE && ht_next_uses_count(&s->next_uses))
        end_hint(o, c);
    if (is_due(p, a.now_ns))
        s->waits.wakes.planner = s->waits.wakes.any = true;
    struct ht_forecast_fetch fetch;
    uint64_t place;
    if (begins && ht_planner_fetch(s, &fetch, &place))
        s->waits.wakes.readahead = s->waits.wakes.any = true;
}

/* Content that is read early takes room from content that stays. So only a small part may be unused. */
static bool has_enough(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_arena_sums(s->arena)->readahead_bytes >= ht_arena_moving_bytes(s->arena) / AHEAD_PART;
}

bool ht_planner_fetch(struct ht_store *s, struct ht_forecast_fetch *out, uint64_t *out_place)
{
    struct ht_planner *p = &s->engine->planner;
    uint64_t now = ht_now_ns();

    p->hinted = now >= p->fetch_ns && ht_next_use_fetch(s, out, out_place);
    if (p->hinted)
        return true;
    if (!p->forecast || p->outdated || has_enough(s) || now < p->fetch_ns || !ht_forecast_fetch(p->forecast, now, out))
        return false;
    *out_place = ht_forecast_place(p->forecast, out->need_ns);
    return true;
}

void ht_planner_fetch_done(struct ht_store *s)
{
    if (s->engine->planner.hinted)
        ht_next_use_fetch_done(s);
    else if (s->engine->planner.forecast)
        ht_forecast_fetch_done(s->engine->planner.forecast);
}

void ht_planner_fetch_later(struct ht_store *s)
{
    s->engine->planner.fetch_ns = ht_now_ns() + FETCH_PAUSE_NS;
}

/* Of the next use that a program named, or the plan. False: none is known. */
static bool next_place(const struct ht_obj *o, uint64_t index, uint64_t *out_place) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_forecast *f = o->s->engine->planner.forecast;

    if (ht_next_use_order_place(o->s, o->oid, out_place))
        return true;
    if (!f || index > UINT32_MAX)
        return false;
    struct ht_forecast_use next = ht_forecast_next(f, o->oid, (uint32_t)index);
    if (next.known)
        *out_place = ht_forecast_place(f, next.next_ns);
    return next.known;
}

void ht_planner_note_ahead(struct ht_obj *o, const struct ht_chunk *c, uint64_t index)
{
    uint64_t place;

    if (next_place(o, index, &place))
        ht_arena_set_next_use(o->s->arena, c->slot, place, false);
}

bool ht_planner_place(const struct ht_obj *o, uint64_t index, uint64_t *out_place)
{
    const struct ht_forecast *f = o->s->engine->planner.forecast;

    if (f && !next_place(o, index, out_place))
        *out_place = ht_forecast_place(f, ht_forecast_now(f, ht_now_ns()));
    return f != NULL;
}

enum ht_forecast_stay ht_planner_stays(const struct ht_obj *o, uint64_t index)
{
    const struct ht_planner *p = &o->s->engine->planner;

    if (!p->forecast || p->outdated || index > UINT32_MAX)
        return HT_FORECAST_UNKNOWN;
    return ht_forecast_stays(p->forecast, o->oid, (uint32_t)index);
}

void ht_planner_expect_waiting(struct ht_store *s, uint64_t bytes)
{
    struct ht_planner *p = &s->engine->planner;

    if (!is_news(s, bytes, p->waiting_bytes))
        return;
    p->waiting_bytes = bytes;
    outdate(p);
}

/* ------------------------------------------------------------ making a plan */

/* The step that ended last, as runs. */
struct step {
    struct ht_run *run; /* all that were copied */
    uint32_t first, runs;
    uint64_t begin_ns, step_ns;
};

static uint64_t key_of(const struct ht_run *run)
{
    return (run->object * HT_PLAN_USES + run->use) * UINT64_C(0x9e3779b97f4a7c15) + run->first;
}

/* The period of the longest part of the history that has one: other work may have come before. */
static bool cut_at_period(struct step *st, uint32_t n)
{
    uint64_t *key = malloc(ht_max_u64(n, 1) * sizeof(*key));
    uint32_t period = 0;

    for (uint32_t i = 0; key && i < n; i++)
        key[i] = key_of(&st->run[i]);
    int rc = key ? 0 : -ENOMEM;
    for (uint32_t part = n; !rc && !period && part >= HISTORY_MIN; part /= 2)
        rc = ht_period_find(key + n - part, part, &period);
    free(key);
    if (rc || !period)
        return false;
    /* The run that is the last one now may go on: the step ended before it. */
    st->first = n - 1 - period;
    st->runs = period;
    st->begin_ns = st->run[st->first].begin_ns;
    st->step_ns = st->run[n - 1].begin_ns - st->begin_ns;
    return st->step_ns > 0;
}

/* The limits of a plan, from the time when its making began. */
struct limits {
    uint64_t valid_ns; /* steps before do not count */
    uint64_t pinned_bytes;
};

static struct ht_forecast *make(const struct ht_store *s, const struct step *st, const struct limits *l)
{
    struct ht_forecast *f = NULL;

    uint64_t bytes = ht_arena_bytes(s->arena);
    const struct ht_forecast_input in = {
        .run = st->run + st->first,
        .runs = st->runs,
        .begin_ns = st->begin_ns,
        .step_ns = st->step_ns,
        .now_ns = ht_now_ns(),
        .room_bytes = bytes - bytes / ROOM_PART - l->pinned_bytes,
    };
    int rc = ht_forecast_make(&in, &f);
    (void)rc; /* without a plan all is as before */
    return f;
}

/* Counts what the plan that ends has seen. */
static void add_up(struct ht_planner *p, uint64_t now_ns) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_forecast_figures g;

    if (!p->forecast)
        return;
    ht_forecast_figures(p->forecast, now_ns, &g);
    p->hits += g.hits;
    p->strangers += g.strangers;
}

/* True: hints need their places again. */
static bool install(struct ht_store *s, struct ht_forecast *f, uint64_t cpu_ns) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_planner *p = &s->engine->planner;
    uint64_t now = ht_now_ns();

    add_up(p, now);
    p->made += f != NULL;
    p->dropped += p->forecast && !f;
    p->tried_runs = p->runs.count;
    p->tried_ns = now;
    p->wait_ns = f
        ? WAIT_NS_MIN
        : ht_max_u64(ht_min_u64(2 * p->wait_ns, WAIT_NS_MAX), ht_min_u64(TRY_PART * cpu_ns, TRY_WAIT_NS_MAX));
    if (f && p->forecast)
        ht_forecast_continue(f, p->forecast, now);
    p->forecast = f;
    p->outdated = false;
    if (f)
        ht_arena_order_begin(s->arena, ht_forecast_place(f, ht_forecast_now(f, now)), false);
    else if (!s->next_uses.leads)
        ht_arena_order_end(s->arena);
    bool begins = ht_next_use_update(s);
    return begins || (f && ht_next_uses_count(&s->next_uses));
}

/* Copies all runs, in slices: others wait for the lock. Returns how many; *out_run is the caller's. */
static uint32_t copy_runs(struct ht_store *s, struct ht_run **out_run)
{
    const struct ht_runs *r = &s->engine->planner.runs;
    uint32_t n = 0;

    ht_store_lock(s);
    uint64_t at = ht_runs_oldest(r), end = r->count, size = end - at;
    ht_store_unlock(s);
    *out_run = malloc(ht_max_u64(size, 1) * sizeof(**out_run));
    while (*out_run && at < end) {
        ht_store_lock(s);
        if (at < ht_runs_oldest(r)) { /* newer ones took the next places */
            at = ht_runs_oldest(r);
            n = 0;
        }
        uint32_t more = at < end ? ht_runs_copy(r, at, (uint32_t)ht_min_u64(end - at, COPY_RUNS), *out_run + n) : 0;
        ht_store_unlock(s);
        at += more;
        n += more;
    }
    return n;
}

/* Places in the next ring of runs; 0: it stays. */
static uint32_t next_size(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_runs *r = &s->engine->planner.runs;
    uint64_t size = ht_min_u64((uint64_t)r->size * LARGER, HT_RUNS_MAX);

    while (size * sizeof(*r->run) > ht_arena_bytes(s->arena) / RUNS_PART)
        size /= 2;
    return ht_runs_is_full(r) && size > r->size ? (uint32_t)size : 0;
}

/* No step was found. A full ring may be too small for one. */
static void give_more_room(struct ht_store *s)
{
    uint32_t size = ht_store_locked(s, next_size(s));
    struct ht_run *run = size ? calloc(size, sizeof(*run)) : NULL;

    if (!run)
        return;
    struct ht_run *was = ht_store_locked(s, ht_runs_replace(&s->engine->planner.runs, run, size));
    free(was);
}

static struct ht_forecast *find_step_and_make(struct ht_store *s, const struct limits *l)
{
    struct step st = {0};
    struct ht_forecast *f = NULL;
    uint32_t n = copy_runs(s, &st.run);
    bool found = st.run && cut_at_period(&st, n);

    if (found && st.begin_ns >= l->valid_ns)
        f = make(s, &st, l);
    if (st.run && !found)
        give_more_room(s);
    free(st.run);
    return f;
}

void ht_store_plan(struct ht_store *s)
{
    struct ht_planner *p = &s->engine->planner;

    ht_store_lock(s);
    const struct limits l = {p->valid_ns, ht_arena_sums(s->arena)->pinned_bytes};
    enum change change = find_change(p);
    ht_store_unlock(s);
    if (change == KEEP)
        return;
    uint64_t cpu_ns = ht_thread_cpu_ns();
    struct ht_forecast *f = change == MAKE ? find_step_and_make(s, &l) : NULL;
    cpu_ns = ht_thread_cpu_ns() - cpu_ns;
    ht_store_lock(s);
    struct ht_forecast *was = p->forecast, *late = l.valid_ns == p->valid_ns ? NULL : f;
    bool again = install(s, late ? NULL : f, cpu_ns);
    if (late)
        p->wait_ns = WAIT_NS_MIN;
    ht_store_unlock(s);
    if (again)
        ht_next_use_settle(s);
    ht_forecast_free(was);
    ht_forecast_free(late);
}

static enum ht_step step(void *ctx, struct ht_budget *b)
{
    ht_store_plan(ctx);
    return HT_STEP_IDLE;
}

const struct ht_engine_type ht_planner_engine = {.name = "planner", .step = step};

/* ----------------------------------------------------------------- figures */

void ht_store_plan_stats(struct ht_store *s, struct ht_plan_stats *out)
{
    const struct ht_planner *p = &s->engine->planner;

    *out = (struct ht_plan_stats){0};
    ht_store_lock(s);
    out->active = p->forecast != NULL;
    if (p->forecast)
        ht_forecast_figures(p->forecast, ht_now_ns(), &out->figures);
    out->made = p->made;
    out->dropped = p->dropped;
    out->hits = p->hits + out->figures.hits;
    out->strangers = p->strangers + out->figures.strangers;
    ht_store_unlock(s);
}

unsigned ht_store_plan_lines(struct ht_store *s, struct ht_plan_place *at, struct ht_plan_line *to, unsigned most)
{
    struct ht_forecast_part part;
    unsigned n = 0;

    ht_store_lock(s);
    const struct ht_planner *p = &s->engine->planner;
    const struct ht_forecast *f = p->forecast;
    if (!at->made)
        at->made = p->made;
    while (f && at->made == p->made && n < most && ht_forecast_part(f, at->part, &part)) {
        if (at->use >= part.uses) {
            *at = (struct ht_plan_place){at->made, at->part + 1, 0};
            continue;
        }
        to[n] = (struct ht_plan_line){.object = part.object, .offset = part.offset, .bytes = part.bytes};
        ht_forecast_idle(f, at->part, at->use++, &to[n++].idle);
    }
    ht_store_unlock(s);
    return n;
}
