/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forecast.c - see forecast.h. Objects are divided into units of as many chunks as keep the plan within its bounds;
 * mostly of one. An object's units are neighbours in the table, and so are the uses of a unit.
 */
#include "tiering/tier/forecast.h"

enum {
    UNITS_GOOD = 1 << 17, /* more only if whole objects are more than half of that */
    USES_GOOD = 1 << 18,
    NEAR_PART = 6,      /* of a step: an access may be so far from its place in time */
    NEAR_USES_PART = 8, /* of the uses in a step: or from its place in their order */
    LOOK_MAX = 8,       /* uses of a unit that are looked at for one of the same kind, each way */
    SOON_PART = 8,      /* of a step: so early a read may begin */
    IDLE_PART = 8,      /* of a step: so far its time goes on without an access */
    STRANGERS_MAX = 64, /* in a row; then the time is set anew */
    STRANGERS_PART = 4, /* of the uses in a step: more, and it did not match */
    MISSING_PART = 4,   /* of the uses in a step */
    WRONG_STEPS = 2,
    DRIFT_STEPS = 4,
    DRIFT_PART = 2, /* of a step: its length may differ by so much */
    FIRST_STEP = 8  /* the time begins there, so that it never gets below 0 */
};

struct object {
    uint64_t id;          /* 0: the place is free */
    uint32_t first, last; /* chunks */
    uint32_t unit;        /* the first */
    uint8_t chunk_shift;
    uint32_t last_bytes; /* memory of the last chunk */
    bool pinned;
};

struct unit {
    uint32_t object, number; /* in the table of objects; from 0 in its object */
    uint32_t use;            /* the first */
    bool stays;
    bool overwritten; /* by a use: not followed */
    uint64_t seen_ns; /* its last use in the forecast's time */
};

struct use {
    uint32_t unit;
    uint32_t number; /* of all in the step, in order of time */
    uint8_t use;
    uint64_t time_ns;
};

struct ht_forecast {
    uint64_t step_ns;
    unsigned unit_shift; /* chunks of a unit */
    struct object *object;
    uint32_t places, objects; /* of that hash: a power of two; and objects in it */
    struct unit *unit;
    struct use *use;    /* by unit, then by time */
    uint32_t *read;     /* numbers of uses that only read, by time; of units that are followed */
    uint32_t *position; /* of the use with each number, in the table */
    uint32_t reads;
    uint32_t units, uses;
    uint64_t bytes, stay_bytes;
    /* what changes */
    uint64_t first_place;
    uint64_t time_ns, real_ns; /* the forecast's time, at that time of the clock */
    uint64_t place;            /* of the use there, in the order of all uses of all steps */
    uint64_t round, round_real_ns;
    uint64_t fetch; /* the next read, counted on through all steps */
    unsigned strangers_in_row, wrong_steps, drifted_steps;
    uint32_t strangers, seen; /* in this step */
    uint64_t steps, matched_steps, hits, all_strangers;
};

/* ---------------------------------------------------------------- objects */

static struct object *place_of(const struct ht_forecast *f, uint64_t id)
{
    uint32_t at = (uint32_t)(id * UINT64_C(0x9e3779b97f4a7c15) >> 32);

    while (f->object[at & (f->places - 1)].id && f->object[at & (f->places - 1)].id != id)
        at++;
    return &f->object[at & (f->places - 1)];
}

/* Without a figure, and for chunks that are smaller than the unit of figures: a whole chunk. */
static uint32_t last_bytes(const struct ht_run *run)
{
    uint64_t chunk = UINT64_C(1) << run->chunk_shift, bytes = (uint64_t)run->last_units * HT_RUN_UNIT;

    return (uint32_t)(bytes ? ht_min_u64(bytes, chunk) : chunk);
}

static int collect_objects(struct ht_forecast *f, const struct ht_forecast_input *in)
{
    f->places = 2;
    while (f->places < 2 * in->runs)
        f->places *= 2;
    f->object = calloc(f->places, sizeof(*f->object));
    if (!f->object)
        return -ENOMEM;
    for (uint32_t i = 0; i < in->runs; i++) {
        const struct ht_run *run = &in->run[i];
        if (!run->object || run->last < run->first || run->begin_ns < in->begin_ns || run->use >= HT_PLAN_USES)
            return -EINVAL;
        struct object *o = place_of(f, run->object);
        if (!o->id) {
            f->objects++;
            *o = (struct object){
                .id = run->object, .first = run->first, .chunk_shift = run->chunk_shift, .pinned = run->pinned};
        }
        if (run->last >= o->last)
            o->last_bytes = last_bytes(run);
        o->first = (uint32_t)ht_min_u64(o->first, run->first);
        o->last = (uint32_t)ht_max_u64(o->last, run->last);
    }
    return 0;
}

static uint32_t units_of(const struct ht_forecast *f, uint32_t first, uint32_t last)
{
    return (last >> f->unit_shift) - (first >> f->unit_shift) + 1;
}

/* The smallest units that are not too many: a run has one use at least, and an object one unit. */
static int choose_units(struct ht_forecast *f, const struct ht_forecast_input *in)
{
    uint64_t units_max = ht_max_u64(UNITS_GOOD, UINT64_C(2) * f->objects),
             uses_max = ht_max_u64(USES_GOOD, UINT64_C(2) * in->runs);

    for (f->unit_shift = 0; f->unit_shift < 32; f->unit_shift++) {
        uint64_t units = 0, uses = 0;
        for (uint32_t i = 0; i < f->places; i++)
            units += f->object[i].id ? units_of(f, f->object[i].first, f->object[i].last) : 0;
        for (uint32_t i = 0; i < in->runs; i++)
            uses += units_of(f, in->run[i].first, in->run[i].last);
        if (units > units_max || uses > uses_max)
            continue;
        f->units = (uint32_t)units;
        f->uses = (uint32_t)uses;
        return 0;
    }
    return -E2BIG;
}

static uint64_t first_chunk(const struct ht_forecast *f, const struct unit *u)
{
    const struct object *o = &f->object[u->object];

    return ht_max_u64(((o->first >> f->unit_shift) + (uint64_t)u->number) << f->unit_shift, o->first);
}

static uint64_t end_chunk(const struct ht_forecast *f, const struct unit *u)
{
    const struct object *o = &f->object[u->object];

    return ht_min_u64(((o->first >> f->unit_shift) + u->number + UINT64_C(1)) << f->unit_shift, o->last + UINT64_C(1));
}

static uint64_t unit_bytes(const struct ht_forecast *f, const struct unit *u)
{
    const struct object *o = &f->object[u->object];
    uint64_t end = end_chunk(f, u), bytes = (end - first_chunk(f, u)) << o->chunk_shift;

    return end > o->last ? bytes - (UINT64_C(1) << o->chunk_shift) + o->last_bytes : bytes;
}

static int make_units(struct ht_forecast *f)
{
    uint32_t n = 0;

    f->unit = calloc(f->units, sizeof(*f->unit));
    if (!f->unit)
        return -ENOMEM;
    for (uint32_t i = 0; i < f->places; i++) {
        struct object *o = &f->object[i];
        o->unit = n;
        for (uint32_t k = 0; o->id && k < units_of(f, o->first, o->last); k++)
            f->unit[n++] = (struct unit){.object = i, .number = k};
    }
    assert(n == f->units);
    return 0;
}

/* ------------------------------------------------------------------ uses */

static int by_time(const void *a, const void *b)
{
    const struct use *x = a, *y = b;

    if (x->time_ns != y->time_ns)
        return x->time_ns < y->time_ns ? -1 : 1;
    return x->unit < y->unit ? -1 : x->unit > y->unit;
}

/* The chunks of a run are accessed at the same pace. */
static void list_uses(const struct ht_forecast *f, const struct ht_forecast_input *in, struct use *to)
{
    for (uint32_t i = 0; i < in->runs; i++) {
        const struct ht_run *run = &in->run[i];
        const struct object *o = place_of(f, run->object);
        uint32_t n = units_of(f, run->first, run->last);
        uint32_t unit = o->unit + (run->first >> f->unit_shift) - (o->first >> f->unit_shift);
        double each = (double)(run->end_ns - run->begin_ns) / n;
        for (uint32_t k = 0; k < n; k++) {
            uint64_t at = run->begin_ns - in->begin_ns + (uint64_t)(each * k);
            *to++ = (struct use){.unit = unit + k, .use = run->use, .time_ns = ht_min_u64(at, in->step_ns - 1)};
        }
    }
}

/* Puts the uses to their units, each unit's in order of time. all: the uses in that order. */
static int sort_uses(struct ht_forecast *f, const struct use *all)
{
    uint32_t *next = calloc(f->units + 1, sizeof(*next));

    f->use = calloc(f->uses, sizeof(*f->use));
    f->read = calloc(f->uses, sizeof(*f->read));
    f->position = calloc(f->uses, sizeof(*f->position));
    if (!next || !f->use || !f->read || !f->position) {
        free(next);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < f->uses; i++)
        next[all[i].unit + 1]++;
    for (uint32_t u = 0; u < f->units; u++) {
        next[u + 1] += next[u];
        f->unit[u].use = next[u];
    }
    for (uint32_t i = 0; i < f->uses; i++) {
        uint32_t unit = all[i].unit;
        f->position[i] = next[unit];
        f->use[next[unit]] = all[i];
        f->use[next[unit]++].number = i;
        f->unit[unit].overwritten |= all[i].use == HT_PLAN_OVERWRITE;
    }
    for (uint32_t i = 0; i < f->uses; i++)
        if (all[i].use == HT_PLAN_READ && !f->unit[all[i].unit].overwritten)
            f->read[f->reads++] = i;
    free(next);
    return 0;
}

static uint32_t uses_end(const struct ht_forecast *f, uint32_t unit)
{
    return unit + 1 < f->units ? f->unit[unit + 1].use : f->uses;
}

/* When the unit of a use is used next, from the begin of this step on. */
static uint64_t next_ns(const struct ht_forecast *f, const struct use *use)
{
    uint32_t next = (uint32_t)(use - f->use) + 1;

    return next < uses_end(f, use->unit) ? f->use[next].time_ns : f->step_ns + f->use[f->unit[use->unit].use].time_ns;
}

/* ------------------------------------------------------------ units that stay */

/* A unit that may stay: how often a step uses it, and when last. */
struct candidate {
    uint32_t unit, uses;
    uint64_t last_ns;
};

/* A unit with many uses saves most reads. After a late use the next step would wait for it. */
static int by_worth(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;

    if (x->uses != y->uses)
        return x->uses > y->uses ? -1 : 1;
    if (x->last_ns != y->last_ns)
        return x->last_ns > y->last_ns ? -1 : 1;
    return x->unit < y->unit ? -1 : x->unit > y->unit;
}

/* May it stay? A gradient goes with its last use. */
static bool is_candidate(const struct ht_forecast *f, uint32_t unit)
{
    const struct unit *u = &f->unit[unit];
    uint32_t end = uses_end(f, unit);

    return u->use < end && !u->overwritten && f->use[end - 1].use != HT_PLAN_CONSUME;
}

static int choose_units_that_stay(struct ht_forecast *f, uint64_t room_bytes)
{
    struct candidate *all = calloc(f->units, sizeof(*all));
    uint32_t n = 0;

    if (!all)
        return -ENOMEM;
    for (uint32_t u = 0; u < f->units; u++) {
        uint32_t uses = uses_end(f, u) - f->unit[u].use;
        f->unit[u].stays = f->object[f->unit[u].object].pinned;
        if (!f->unit[u].stays && is_candidate(f, u))
            all[n++] = (struct candidate){u, uses, f->use[f->unit[u].use + uses - 1].time_ns};
    }
    qsort(all, n, sizeof(*all), by_worth);
    for (uint32_t i = 0; i < n; i++) {
        struct unit *u = &f->unit[all[i].unit];
        uint64_t bytes = unit_bytes(f, u);
        u->stays = bytes <= room_bytes;
        room_bytes -= u->stays ? bytes : 0;
        f->stay_bytes += u->stays ? bytes : 0;
    }
    free(all);
    return 0;
}

static int make_plan(struct ht_forecast *f, const struct ht_forecast_input *in)
{
    for (uint32_t u = 0; u < f->units; u++)
        f->bytes += f->object[f->unit[u].object].pinned ? 0 : unit_bytes(f, &f->unit[u]);
    if (f->bytes <= in->room_bytes)
        return 0;
    struct use *all = calloc(f->uses, sizeof(*all));
    if (!all)
        return -ENOMEM;
    list_uses(f, in, all);
    qsort(all, f->uses, sizeof(*all), by_time);
    int rc = sort_uses(f, all);
    free(all);
    return rc ? rc : choose_units_that_stay(f, in->room_bytes);
}

/* ------------------------------------------------------------ the first time */

static void begin_round(struct ht_forecast *f, uint64_t now_ns)
{
    f->round = f->time_ns / f->step_ns;
    f->round_real_ns = now_ns;
    f->strangers = f->seen = 0;
}

int ht_forecast_make(const struct ht_forecast_input *in, struct ht_forecast **out)
{
    *out = NULL;
    if (!in->runs || !in->step_ns || in->step_ns > INT64_MAX / (FIRST_STEP + 1))
        return in->runs ? -EINVAL : 0;
    struct ht_forecast *f = calloc(1, sizeof(*f));
    if (!f)
        return -ENOMEM;
    f->step_ns = in->step_ns;
    int rc = collect_objects(f, in);
    if (!rc)
        rc = choose_units(f, in);
    if (!rc)
        rc = make_units(f);
    if (!rc)
        rc = make_plan(f, in);
    if (rc || !f->use) {
        ht_forecast_free(f);
        return rc;
    }
    f->real_ns = in->now_ns;
    f->time_ns = FIRST_STEP * f->step_ns + (in->now_ns > in->begin_ns ? in->now_ns - in->begin_ns : 0) % f->step_ns;
    begin_round(f, in->now_ns);
    f->place = f->round * f->uses;
    for (uint32_t i = 0; i < f->uses; i++)
        f->place += f->use[i].time_ns < f->time_ns % f->step_ns;
    f->seen = f->uses; /* the first step is not complete, and counts as if it matched */
    *out = f;
    return 0;
}

void ht_forecast_free(struct ht_forecast *f)
{
    if (!f)
        return;
    free(f->object);
    free(f->unit);
    free(f->use);
    free(f->read);
    free(f->position);
    free(f);
}

uint64_t ht_forecast_bytes(const struct ht_forecast *f)
{
    if (!f)
        return 0;
    return sizeof(*f) + f->places * sizeof(*f->object) + f->units * sizeof(*f->unit) +
        f->uses * (sizeof(*f->use) + sizeof(*f->read) + sizeof(*f->position));
}

/* ---------------------------------------------------------------- accesses */

/* NULL: the plan has no use of that chunk. */
static struct unit *find_unit(const struct ht_forecast *f, uint64_t object, uint32_t index)
{
    const struct object *o = place_of(f, object);

    if (!o->id || index < o->first || index > o->last)
        return NULL;
    uint32_t unit = o->unit + (index >> f->unit_shift) - (o->first >> f->unit_shift);
    return f->unit[unit].use < uses_end(f, unit) ? &f->unit[unit] : NULL;
}

static uint64_t distance(uint64_t a, uint64_t b)
{
    return a > b ? a - b : b - a;
}

/* A unit's first use that is not before a time of the step; the end of its uses: there is none. */
static uint32_t use_from(const struct ht_forecast *f, uint32_t unit, uint64_t time_ns)
{
    uint32_t use = f->unit[unit].use;

    HT_PARTITION_POINT(use, uses_end(f, unit), i, f->use[i].time_ns < time_ns);
    return use;
}

/* A use of a unit in some step. */
struct moment {
    const struct use *use;
    uint64_t time_ns, place;
};

/* Number k of a unit's uses, counted from the first one in this step; before that one they are of the step before. */
static struct moment moment_of(const struct ht_forecast *f, const struct unit *u, int64_t k)
{
    int64_t n = uses_end(f, (uint32_t)(u - f->unit)) - u->use, steps = k >= 0 ? k / n : (k + 1) / n - 1;
    const struct use *use = &f->use[u->use + (k - steps * n)];
    uint64_t step = f->time_ns / f->step_ns + (uint64_t)steps;

    return (struct moment){use, step * f->step_ns + use->time_ns, step * f->uses + use->number};
}

static bool is_near(const struct ht_forecast *f, const struct moment *m)
{
    return distance(m->time_ns, f->time_ns) <= f->step_ns / NEAR_PART ||
        distance(m->place, f->place) <= f->uses / NEAR_USES_PART;
}

/* From use k on, later or earlier ones: the first of that kind; k itself if there is none. */
static struct moment first_of_kind(const struct ht_forecast *f, const struct unit *u, int64_t k, int by, uint8_t kind)
{
    struct moment first = moment_of(f, u, k), m = first;

    for (unsigned i = 0; i < LOOK_MAX && m.use->use != kind; i++)
        m = moment_of(f, u, k += by);
    return m.use->use == kind ? m : first;
}

/* The use that an access is: of the same kind, and near now; else the nearest. */
static struct moment find_use(const struct ht_forecast *f, const struct unit *u, uint8_t kind)
{
    uint32_t k = use_from(f, (uint32_t)(u - f->unit), f->time_ns % f->step_ns) - u->use;
    struct moment after = first_of_kind(f, u, k, 1, kind), before = first_of_kind(f, u, (int64_t)k - 1, -1, kind);

    if (is_near(f, &after) != is_near(f, &before))
        return is_near(f, &after) ? after : before;
    return distance(after.time_ns, f->time_ns) <= distance(before.time_ns, f->time_ns) ? after : before;
}

/* A step has ended: did it match? */
static void end_round(struct ht_forecast *f, uint64_t now_ns)
{
    uint64_t took = now_ns - ht_min_u64(f->round_real_ns, now_ns);
    bool matched = f->strangers <= f->uses / STRANGERS_PART && f->seen >= f->uses - f->uses / MISSING_PART;

    f->steps++;
    f->matched_steps += matched;
    f->wrong_steps = matched ? 0 : f->wrong_steps + 1;
    f->drifted_steps = distance(took, f->step_ns) > f->step_ns / DRIFT_PART ? f->drifted_steps + 1 : 0;
    begin_round(f, now_ns);
}

static void move_to(struct ht_forecast *f, uint64_t time_ns, uint64_t place, uint64_t now_ns)
{
    f->real_ns = now_ns;
    f->place = ht_max_u64(f->place, place);
    if (time_ns <= f->time_ns)
        return;
    f->time_ns = time_ns;
    if (f->time_ns / f->step_ns > f->round)
        end_round(f, now_ns);
}

/* m: the nearest use; NULL: the plan has none. */
static void note_stranger(struct ht_forecast *f, const struct moment *m, uint64_t now_ns)
{
    f->strangers++;
    f->all_strangers++;
    if (now_ns > f->real_ns && now_ns - f->real_ns > WRONG_STEPS * f->step_ns)
        f->wrong_steps = WRONG_STEPS; /* for so long only others came */
    if (f->strangers > ht_max_u64(f->uses, STRANGERS_MAX))
        end_round(f, now_ns);
    if (!m || ++f->strangers_in_row < STRANGERS_MAX)
        return;
    uint64_t steps = m->time_ns < f->time_ns;
    f->strangers_in_row = 0;
    move_to(f, m->time_ns + steps * f->step_ns, m->place + steps * f->uses, now_ns);
}

struct ht_forecast_use ht_forecast_note(struct ht_forecast *f, const struct ht_run_access *a)
{
    struct unit *u = find_unit(f, a->object, a->index);
    struct moment m = {0};

    if (u)
        m = find_use(f, u, (uint8_t)a->use);
    if (!u || !is_near(f, &m)) {
        if (a->begins)
            note_stranger(f, u ? &m : NULL, a->now_ns);
        return (struct ht_forecast_use){.known = false};
    }
    f->strangers_in_row = 0;
    f->hits += a->begins;
    move_to(f, m.time_ns, m.place, a->now_ns);
    f->seen += u->seen_ns != m.time_ns;
    u->seen_ns = m.time_ns;
    return (struct ht_forecast_use){!u->overwritten, m.time_ns - m.use->time_ns + next_ns(f, m.use)};
}

struct ht_forecast_use ht_forecast_next(const struct ht_forecast *f, uint64_t object, uint32_t index)
{
    const struct unit *u = find_unit(f, object, index);
    uint64_t in_step = f->time_ns % f->step_ns, step = f->time_ns - in_step;

    if (!u || u->overwritten)
        return (struct ht_forecast_use){false, UINT64_MAX};
    uint32_t unit = (uint32_t)(u - f->unit), next = use_from(f, unit, in_step);
    if (next < uses_end(f, unit))
        return (struct ht_forecast_use){true, step + f->use[next].time_ns};
    return (struct ht_forecast_use){true, step + f->step_ns + f->use[u->use].time_ns};
}

uint64_t ht_forecast_now(const struct ht_forecast *f, uint64_t now_ns)
{
    uint64_t since = now_ns > f->real_ns ? now_ns - f->real_ns : 0;

    return f->time_ns + ht_min_u64(since, f->step_ns / IDLE_PART);
}

uint64_t ht_forecast_place(const struct ht_forecast *f, uint64_t time_ns)
{
    uint64_t steps = time_ns / f->step_ns, rest = time_ns % f->step_ns;

    return f->first_place + steps * HT_FORECAST_PLACES +
        (uint64_t)((double)rest / (double)f->step_ns * HT_FORECAST_PLACES);
}

void ht_forecast_continue(struct ht_forecast *f, const struct ht_forecast *before, uint64_t now_ns)
{
    uint64_t was = ht_forecast_place(before, ht_forecast_now(before, now_ns));

    f->first_place += was - ht_forecast_place(f, ht_forecast_now(f, now_ns)); /* modulo 2^64 */
}

bool ht_forecast_is_wrong(const struct ht_forecast *f)
{
    return f->wrong_steps >= WRONG_STEPS;
}

bool ht_forecast_has_drifted(const struct ht_forecast *f)
{
    return f->drifted_steps >= DRIFT_STEPS;
}

enum ht_forecast_stay ht_forecast_stays(const struct ht_forecast *f, uint64_t object, uint32_t index)
{
    const struct unit *u = find_unit(f, object, index);

    return !u || u->overwritten ? HT_FORECAST_UNKNOWN : u->stays ? HT_FORECAST_STAYS : HT_FORECAST_LEAVES;
}

/* ------------------------------------------------------------------ reads */

/* The place of the next read in the order of all uses. */
static uint64_t fetch_place(const struct ht_forecast *f)
{
    return f->fetch / f->reads * f->uses + f->read[f->fetch % f->reads];
}

bool ht_forecast_fetch(struct ht_forecast *f, uint64_t now_ns, struct ht_forecast_fetch *out)
{
    if (!f->reads || f->wrong_steps)
        return false;
    f->fetch = ht_max_u64(f->fetch, f->place / f->uses * f->reads);
    while (fetch_place(f) <= f->place)
        f->fetch++;
    const struct use *use = &f->use[f->position[f->read[f->fetch % f->reads]]];
    const struct unit *u = &f->unit[use->unit];
    *out = (struct ht_forecast_fetch){
        .object = f->object[u->object].id,
        .first = (uint32_t)first_chunk(f, u),
        .last = (uint32_t)(end_chunk(f, u) - 1),
        .need_ns = f->fetch / f->reads * f->step_ns + use->time_ns,
    };
    return out->need_ns <= ht_forecast_now(f, now_ns) + f->step_ns / SOON_PART;
}

void ht_forecast_fetch_done(struct ht_forecast *f)
{
    f->fetch++;
}

/* ---------------------------------------------------------------- figures */

void ht_forecast_figures(const struct ht_forecast *f, uint64_t now_ns, struct ht_forecast_figures *out)
{
    *out = (struct ht_forecast_figures){
        .step_ns = f->step_ns,
        .units = f->units,
        .uses = f->uses,
        .bytes = f->bytes,
        .stay_bytes = f->stay_bytes,
        .steps = f->steps,
        .matched_steps = f->matched_steps,
        .now_ns = ht_forecast_now(f, now_ns) % f->step_ns,
        .hits = f->hits,
        .strangers = f->all_strangers,
    };
}

bool ht_forecast_part(const struct ht_forecast *f, uint32_t i, struct ht_forecast_part *out)
{
    if (i >= f->units)
        return false;
    const struct unit *u = &f->unit[i];
    const struct object *o = &f->object[u->object];
    out->object = o->id;
    out->offset = first_chunk(f, u) << o->chunk_shift;
    out->bytes = unit_bytes(f, u);
    out->uses = uses_end(f, i) - u->use;
    return true;
}

void ht_forecast_idle(const struct ht_forecast *f, uint32_t i, unsigned k, struct ht_forecast_idle *out)
{
    const struct use *use = &f->use[f->unit[i].use + k];
    uint64_t next = next_ns(f, use), idle = next - use->time_ns;

    *out = (struct ht_forecast_idle){
        .used_ns = use->time_ns,
        .next_ns = next,
        .fetch_ns = next - ht_min_u64(idle, f->step_ns / SOON_PART),
        .use = use->use,
        .leaves = !f->unit[i].stays,
    };
}
