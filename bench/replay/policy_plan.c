/* SPDX-License-Identifier: Apache-2.0 */
/*
 * policy_plan.c - the plan of a step (tiering/tier/plan.h) in the simulator: units leave when it says, and are read
 * before they are needed.
 *
 *   a step is recorded: when each unit was accessed, without the times that the caller waited
 *   then the plan holds, until an access comes that it does not know, or one stays out: the next step is recorded again
 *
 *   access:  the plan keeps the unit   admitted; units that leave make room
 *            it leaves                 on the list of units that make room, the oldest first; not admitted after a miss
 *   fetch:   in the order of the plan, when it is due and the device is idle; of what a program reads, and of state and
 *            parameters before their update only if the configuration says so
 *
 * The plan's clock follows the accesses: it stands at the time of the newest access, and what has passed since.
 */
#include <stdlib.h>
#include <time.h>

#include "bench/replay/sim.h"
#include "tiering/tier/plan.h"

#define NONE UINT32_MAX
enum { AHEAD_PARTS = 16 }; /* so large a part of a step a fetch may begin before it is due */

struct record {
    uint64_t time_ns;
    uint32_t unit;
    enum ht_plan_use use;
};

/* A read of the plan. Accesses are numbered by their order in the step, those of the next step follow. */
struct fetch {
    int64_t due_ns;
    uint32_t unit, target;
};

struct planned {
    struct record *record;
    uint32_t records, room;
    uint64_t step_began, waited; /* of the step that is recorded; waited: before it */
    bool has_plan, differs;
    struct ht_plan plan;
    uint64_t step_ns;
    uint32_t accesses;
    uint64_t *time;                    /* of each access of the plan */
    uint32_t *next;                    /* by access: the next of the unit, or NONE */
    uint32_t *first, *last, *expected; /* by unit: its accesses in the plan; the one that comes next */
    struct fetch *fetch;
    uint32_t fetches, fetched;   /* fetched: those of this step and the next one that were looked at */
    uint32_t seen;               /* accesses of this step */
    uint64_t clock_ns, clock_at; /* the plan's time at a time of the simulator */
    uint64_t used_bytes;
    uint32_t *leaving, head, tail, cleaned; /* a ring of units that may go, a place for each unit and one more */
    bool *leaves;                           /* by unit: it is in the ring, and may go */
    bool *queued;                           /* it is in the ring */
};

/* -------------------------------------------------------------------- room */

static uint32_t ring_places(const struct sim *s)
{
    return s->string->units + 1;
}

static void let_leave(struct sim *s, uint32_t unit)
{
    struct planned *p = s->own;

    p->leaves[unit] = true;
    if (p->queued[unit])
        return;
    p->queued[unit] = true;
    p->leaving[p->tail] = unit;
    p->tail = (p->tail + 1) % ring_places(s);
}

static bool make_room(struct sim *s, uint64_t bytes)
{
    struct planned *p = s->own;

    while (p->used_bytes + bytes > s->config->dram_bytes && p->head != p->tail) {
        uint32_t unit = p->leaving[p->head];
        if (p->cleaned == p->head)
            p->cleaned = (p->cleaned + 1) % ring_places(s);
        p->head = (p->head + 1) % ring_places(s);
        p->queued[unit] = false;
        if (!p->leaves[unit] || !s->unit[unit].resident)
            continue;
        p->leaves[unit] = false;
        p->used_bytes -= sim_unit_bytes(s->string, unit);
        sim_evict(s, unit);
    }
    return p->used_bytes + bytes <= s->config->dram_bytes;
}

/* Units that leave are written while the device has nothing else to write, so that they can go at once. */
static void clean_leaving(struct sim *s, uint64_t at)
{
    struct planned *p = s->own;

    for (; p->cleaned != p->tail && sim_has_buffer(s, at); p->cleaned = (p->cleaned + 1) % ring_places(s)) {
        uint32_t unit = p->leaving[p->cleaned];
        s->room_at = 0; /* the device begins when the content is there, and it is free */
        if (p->leaves[unit] && s->unit[unit].resident)
            sim_clean(s, unit);
    }
}

/* --------------------------------------------------------------- recording */

static void record(struct sim *s, uint32_t unit, enum sim_kind kind)
{
    struct planned *p = s->own;
    uint64_t waited = s->waited_ns - p->waited;

    if (p->records == p->room) {
        uint32_t room = p->room ? 2 * p->room : 1024;
        struct record *r = p->room < HT_PLAN_ACCESSES_MAX ? realloc(p->record, room * sizeof(*r)) : NULL;
        if (!r) {
            p->differs = true;
            return;
        }
        p->record = r;
        p->room = room;
    }
    uint64_t at = s->room_at > p->step_began + waited ? s->room_at - p->step_began - waited : 0;
    p->record[p->records++] = (struct record){at, unit,
                                              kind == SIM_OVERWRITE                          ? HT_PLAN_OVERWRITE
                                                  : kind == SIM_READ || kind == SIM_PREFETCH ? HT_PLAN_READ
                                                                                             : HT_PLAN_UPDATE};
}

static int by_time(const void *a, const void *b)
{
    const struct record *x = a, *y = b;

    return x->time_ns != y->time_ns ? (x->time_ns > y->time_ns) - (x->time_ns < y->time_ns)
                                    : (x->unit > y->unit) - (x->unit < y->unit);
}

static int by_due(const void *a, const void *b)
{
    const struct fetch *x = a, *y = b;

    return x->due_ns != y->due_ns ? (x->due_ns > y->due_ns) - (x->due_ns < y->due_ns)
                                  : (x->target > y->target) - (x->target < y->target);
}

static uint64_t processor_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---------------------------------------------------------------- the plan */

static void drop_plan(struct planned *p)
{
    if (p->has_plan)
        ht_plan_free(&p->plan);
    free(p->time);
    free(p->next);
    free(p->fetch);
    p->time = NULL;
    p->next = NULL;
    p->fetch = NULL;
    p->accesses = p->fetches = 0;
    p->has_plan = false;
}

static void link_accesses(struct sim *s)
{
    struct planned *p = s->own;

    for (uint32_t u = 0; u < s->string->units; u++)
        p->first[u] = p->last[u] = NONE;
    for (uint32_t i = 0; i < p->accesses; i++) {
        uint32_t unit = p->record[i].unit;
        p->time[i] = p->record[i].time_ns;
        p->next[i] = NONE;
        if (p->first[unit] == NONE)
            p->first[unit] = i;
        else
            p->next[p->last[unit]] = i;
        p->last[unit] = i;
    }
}

/* The reads of one step, in their order. Updates read for themselves, as in the store, unless state_ahead is set. */
static void list_fetches(struct planned *p, bool state_ahead)
{
    for (uint32_t i = 0; i < p->accesses; i++) {
        uint32_t unit = p->record[i].unit, next = p->next[i];
        const struct ht_plan_idle *idle = &p->plan.idle[i];
        uint32_t target = next == NONE ? p->first[unit] : next;
        if (!idle->leaves || idle->fetch_ns >= idle->next_ns)
            continue;
        if (!state_ahead && p->record[target].use != HT_PLAN_READ)
            continue;
        p->fetch[p->fetches++] = (struct fetch){
            .due_ns = (int64_t)idle->fetch_ns - (next == NONE ? (int64_t)p->step_ns : 0),
            .unit = unit,
            .target = target,
        };
    }
    qsort(p->fetch, p->fetches, sizeof(*p->fetch), by_due);
}

/* Makes the plan from the recorded step. Without memory, or for an input that has no plan, there is none. */
static void make_plan(struct sim *s, uint64_t step_ns, bool stored)
{
    struct planned *p = s->own;
    struct ht_plan_tensor *tensor = calloc(s->string->units + 1, sizeof(*tensor));
    struct ht_plan_access *access = calloc(p->records + 1, sizeof(*access));

    drop_plan(p);
    p->accesses = p->records;
    p->step_ns = step_ns;
    p->time = calloc(p->accesses + 1, sizeof(*p->time));
    p->next = calloc(p->accesses + 1, sizeof(*p->next));
    p->fetch = calloc(p->accesses + 1, sizeof(*p->fetch));
    qsort(p->record, p->records, sizeof(*p->record), by_time);
    for (uint32_t u = 0; tensor && u < s->string->units; u++)
        tensor[u] = (struct ht_plan_tensor){sim_unit_bytes(s->string, u), stored};
    for (uint32_t i = 0; access && i < p->records; i++) {
        p->record[i].time_ns = ht_min_u64(p->record[i].time_ns, step_ns - 1);
        access[i] = (struct ht_plan_access){p->record[i].time_ns, p->record[i].unit, p->record[i].use};
    }
    struct ht_plan_input in = {
        .tensor = tensor,
        .access = access,
        .tensors = s->string->units,
        .accesses = p->accesses,
        .step_ns = step_ns,
        .room_bytes = s->config->dram_bytes,
        .read_bytes_per_s = s->config->read_rate,
        .write_bytes_per_s = s->config->write_rate,
        .write_bytes_max = UINT64_MAX,
    };
    if (tensor && access && p->time && p->next && p->fetch) {
        uint64_t began = processor_ns();
        p->has_plan = ht_plan_make(&in, &p->plan) == 0;
        s->result.plan_ns = ht_max_u64(s->result.plan_ns, processor_ns() - began);
    }
    if (p->has_plan) {
        link_accesses(s);
        list_fetches(p, s->config->state_ahead);
    }
    free(tensor);
    free(access);
}

/* ------------------------------------------------------------------- steps */

/* Units that the plan has away when a step begins, or does not know, make room. */
static void begin_step(struct sim *s)
{
    struct planned *p = s->own;

    p->fetched = p->seen = 0;
    p->clock_ns = 0;
    p->clock_at = s->now;
    p->records = 0;
    p->step_began = s->now;
    p->waited = s->waited_ns;
    p->differs = false;
    for (uint32_t u = 0; p->has_plan && u < s->string->units; u++) {
        p->expected[u] = p->first[u];
        if (s->unit[u].resident && (p->last[u] == NONE || p->plan.idle[p->last[u]].leaves))
            let_leave(s, u);
    }
}

static void step_plan(struct sim *s, uint64_t entry)
{
    struct planned *p = s->own;
    uint64_t waited = s->waited_ns - p->waited, step_ns = s->now - p->step_began - waited;

    if (p->has_plan && p->seen == p->accesses && !p->differs) {
        begin_step(s);
        return;
    }
    if (p->records && step_ns && p->records <= HT_PLAN_ACCESSES_MAX)
        make_plan(s, step_ns, s->trace->entry[entry].op == REPLAY_COMMIT);
    else
        drop_plan(p);
    begin_step(s);
}

/* ---------------------------------------------------------------- accesses */

/* The plan's decision about the time after this access. NULL: it does not know the access. */
static const struct ht_plan_idle *follow(struct sim *s, uint32_t unit)
{
    struct planned *p = s->own;
    uint32_t i = p->has_plan ? p->expected[unit] : NONE;

    if (i == NONE || i >= p->accesses) {
        p->differs |= p->has_plan;
        return NULL;
    }
    p->seen++;
    p->expected[unit] = p->next[i] == NONE ? p->first[unit] + p->accesses : p->next[i];
    if (p->time[i] >= p->clock_ns) {
        p->clock_ns = p->time[i];
        p->clock_at = s->room_at;
    }
    return &p->plan.idle[i];
}

static bool access_plan(struct sim *s, uint32_t unit, uint32_t pos, enum sim_kind kind)
{
    struct planned *p = s->own;
    uint64_t bytes = sim_unit_bytes(s->string, unit);

    (void)pos;
    if (kind != SIM_PREFETCH)
        record(s, unit, kind);
    const struct ht_plan_idle *idle = kind == SIM_PREFETCH ? NULL : follow(s, unit);
    bool leaves = idle && idle->leaves;
    p->leaves[unit] = false;
    if (!s->unit[unit].resident && (leaves || !make_room(s, bytes)))
        return false;
    if (!s->unit[unit].resident)
        p->used_bytes += bytes;
    s->unit[unit].resident = true;
    if (leaves || (p->has_plan && !idle))
        let_leave(s, unit);
    return true;
}

/* What to do about a fetch now. */
enum fetch_answer { FETCH_LATER, FETCH_SKIP, FETCH_LOAD };

static enum fetch_answer look_at(struct sim *s, const struct fetch *f, uint32_t lap)
{
    struct planned *p = s->own;
    uint32_t target = f->target + lap * p->accesses;

    if (p->expected[f->unit] != target)
        return p->expected[f->unit] > target ? FETCH_SKIP : FETCH_LATER;
    if (!s->unit[f->unit].resident)
        return FETCH_LOAD;
    p->leaves[f->unit] = false;
    return FETCH_SKIP;
}

/* Fetches in their order, while the device is idle: those of this step, then the first ones of the next. */
static void fetch_due(struct sim *s, uint64_t at)
{
    struct planned *p = s->own;
    uint64_t clock = p->clock_ns + (at > p->clock_at ? at - p->clock_at : 0);

    while (p->fetched < 2 * p->fetches && s->read_free <= at) {
        uint32_t lap = p->fetched / p->fetches;
        const struct fetch *f = &p->fetch[p->fetched % p->fetches];
        int64_t due = f->due_ns + (int64_t)(lap * p->step_ns) - (int64_t)(p->step_ns / AHEAD_PARTS);
        enum fetch_answer answer = look_at(s, f, lap);
        if (answer == FETCH_LATER || (answer == FETCH_LOAD && due > (int64_t)clock))
            return;
        /* The device has been idle for a while: the fetch began when it was due. */
        uint64_t passed = due > (int64_t)p->clock_ns ? (uint64_t)due - p->clock_ns : 0;
        s->room_at = ht_max_u64(s->read_free, p->clock_at + passed);
        if (answer == FETCH_LOAD && !make_room(s, sim_unit_bytes(s->string, f->unit)))
            return;
        if (answer == FETCH_LOAD) {
            p->used_bytes += sim_unit_bytes(s->string, f->unit);
            sim_load(s, f->unit, s->room_at);
        }
        p->fetched++;
    }
}

static void tick_plan(struct sim *s, uint64_t at)
{
    const struct planned *p = s->own;

    clean_leaving(s, at);
    if (p->has_plan)
        fetch_due(s, at);
}

static void drop_unit(struct sim *s, uint32_t unit)
{
    struct planned *p = s->own;

    p->used_bytes -= sim_unit_bytes(s->string, unit);
    p->leaves[unit] = false;
}

/* -------------------------------------------------------------------- life */

static void stop_plan(struct sim *s)
{
    struct planned *p = s->own;

    drop_plan(p);
    free(p->record);
    free(p->first);
    free(p->last);
    free(p->expected);
    free(p->leaving);
    free(p->leaves);
    free(p->queued);
    free(p);
}

static int start_plan(struct sim *s)
{
    struct planned *p = calloc(1, sizeof(*p));
    size_t places = ring_places(s);

    if (!p)
        return -ENOMEM;
    s->own = p;
    p->first = calloc(places, sizeof(*p->first));
    p->last = calloc(places, sizeof(*p->last));
    p->expected = calloc(places, sizeof(*p->expected));
    p->leaving = calloc(places, sizeof(*p->leaving));
    p->leaves = calloc(places, sizeof(*p->leaves));
    p->queued = calloc(places, sizeof(*p->queued));
    if (p->first && p->last && p->expected && p->leaving && p->leaves && p->queued)
        return 0;
    stop_plan(s);
    return -ENOMEM;
}

const struct sim_policy sim_plan = {
    .name = "plan",
    .takes_hints = true,
    .start = start_plan,
    .stop = stop_plan,
    .access = access_plan,
    .drop = drop_unit,
    .tick = tick_plan,
    .step = step_plan,
};
