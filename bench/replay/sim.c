/* SPDX-License-Identifier: Apache-2.0 */
/* sim.c - see sim.h: the time, the device, updates. */
#include "bench/replay/sim.h"

#include <stdlib.h>

#include "tiering/cache/arena.h"

enum { GIGA = 1000000000, BACKLOG_EIGHTHS = 3, RANGES_AHEAD = 64 };

#define NS_MAX 0x1p62 /* 146 years */

/* Gradients that wait for their updates, the oldest first. */
struct waiting {
    uint64_t since;
    uint32_t tensor, pos, range;
    uint64_t bytes;
};

struct sim_updates {
    struct waiting *ring;
    uint64_t head, tail, room; /* numbers of gradients; room is a power of two */
    uint64_t *newest;          /* by tensor: the number of its newest gradient, and 1 */
    uint64_t waiting_bytes;
    uint64_t free_at;                     /* the last update ends */
    uint64_t ended[RANGES_AHEAD], ranges; /* of the last ones */
    uint64_t ranges_ahead;                /* that may be under way */
};

static uint64_t ns_for(uint64_t bytes, uint64_t rate)
{
    return rate ? (uint64_t)((double)bytes / (double)rate * GIGA) : 0;
}

/* ------------------------------------------------------------------ device */

static uint64_t read_device(struct sim *s, uint64_t at, uint64_t bytes)
{
    s->read_free = ht_max_u64(s->read_free, at) + ns_for(bytes, s->config->read_rate);
    s->result.read_bytes += bytes;
    return s->read_free + s->config->latency_ns;
}

/* Returns when the buffer has taken it. */
static uint64_t write_device(struct sim *s, uint64_t at, uint64_t bytes)
{
    uint64_t ahead = ns_for(s->config->buffer_bytes, s->config->write_rate);

    s->write_free = ht_max_u64(s->write_free, at) + ns_for(bytes, s->config->write_rate);
    s->result.written_bytes += bytes;
    return s->write_free > ahead ? ht_max_u64(at, s->write_free - ahead) : at;
}

bool sim_has_buffer(const struct sim *s, uint64_t at)
{
    return s->write_free < at + ns_for(s->config->buffer_bytes, s->config->write_rate);
}

void sim_clean(struct sim *s, uint32_t unit)
{
    struct sim_unit *u = &s->unit[unit];

    if (!u->dirty)
        return;
    uint64_t at = ht_max_u64(s->room_at, u->ready_at);
    s->room_at = ht_max_u64(s->room_at, write_device(s, at, sim_unit_bytes(s->string, unit)));
    u->dirty = false;
    if (s->policy->changed)
        s->policy->changed(s, unit, false);
}

void sim_evict(struct sim *s, uint32_t unit)
{
    struct sim_unit *u = &s->unit[unit];

    if (u->dirty)
        s->room_at = ht_max_u64(s->room_at,
                                write_device(s, ht_max_u64(s->room_at, u->ready_at), sim_unit_bytes(s->string, unit)));
    u->resident = u->dirty = u->fetched = false;
}

/* ---------------------------------------------------------------- accesses */

static void make_dirty(struct sim *s, uint32_t unit)
{
    struct sim_unit *u = &s->unit[unit];

    if (!u->listed)
        s->dirty[s->dirty_count++] = unit;
    u->listed = true;
    if (u->dirty)
        return;
    u->dirty = true;
    if (s->policy->changed)
        s->policy->changed(s, unit, true);
}

/* Returns when the access has ended. */
static uint64_t access_unit(struct sim *s, uint32_t unit, uint32_t pos, enum sim_kind kind, uint64_t at)
{
    struct sim_unit *u = &s->unit[unit];
    bool hit = u->resident;
    uint64_t bytes = sim_unit_bytes(s->string, unit);

    s->room_at = at;
    bool resident = s->policy->access(s, unit, pos, kind);
    if (kind == SIM_PREFETCH && !resident)
        return at;
    uint64_t done = hit ? ht_max_u64(at, u->ready_at) : s->room_at;
    if (!hit && kind != SIM_OVERWRITE)
        done = read_device(s, s->room_at, bytes);
    u->resident = resident;
    if (kind != SIM_PREFETCH) {
        s->result.accesses++;
        s->result.hits += hit && !u->fetched;
        s->result.prefetched += hit && u->fetched;
    }
    u->fetched = kind == SIM_PREFETCH;
    u->ready_at = ht_max_u64(u->ready_at, done);
    if (kind == SIM_READ || kind == SIM_PREFETCH)
        return done;
    if (resident)
        make_dirty(s, unit);
    else
        done = write_device(s, done, bytes);
    return ht_max_u64(done, s->room_at);
}

/* The caller waits. */
static void stall_until(struct sim *s, uint64_t at)
{
    if (at <= s->now)
        return;
    s->waited_ns += at - s->now;
    s->result.stall_ns += at - s->now;
    s->now = at;
}

/* Its own work, of so long in every step, which no policy avoids. */
static void copy(struct sim *s, uint64_t bytes)
{
    uint64_t ns = ns_for(bytes, s->config->copy_rate);

    s->result.stall_ns += ns;
    s->now += ns;
}

/* ----------------------------------------------------------------- updates */

static int queue_gradient(struct sim *s, uint32_t tensor, uint32_t pos)
{
    struct sim_updates *q = s->updates;

    if (q->tail - q->head == q->room) {
        uint64_t room = q->room ? 2 * q->room : 64;
        struct waiting *ring = calloc(room, sizeof(*ring));
        if (!ring)
            return -ENOMEM;
        for (uint64_t i = q->head; i < q->tail; i++)
            ring[i & (room - 1)] = q->ring[i & (q->room - 1)];
        free(q->ring);
        q->ring = ring;
        q->room = room;
    }
    uint64_t bytes = s->trace->tensor[tensor].bytes;
    q->ring[q->tail++ & (q->room - 1)] = (struct waiting){s->now, tensor, pos, 0, bytes};
    q->newest[tensor] = q->tail;
    q->waiting_bytes += bytes;
    return 0;
}

/* The oldest waiting range: its update may begin then. */
static uint64_t next_begin(const struct sim_updates *q)
{
    uint64_t since = q->ring[q->head & (q->room - 1)].since;
    uint64_t before = q->ranges < q->ranges_ahead ? 0 : q->ended[(q->ranges - q->ranges_ahead) % RANGES_AHEAD];

    return ht_max_u64(since, before);
}

static void update_range(struct sim *s, uint64_t at)
{
    struct sim_updates *q = s->updates;
    struct waiting *w = &q->ring[q->head & (q->room - 1)];
    uint32_t begin, end, param = s->string->first[w->tensor] + w->range;
    uint64_t done, bytes = sim_unit_bytes(s->string, param);

    if (s->policy->tick)
        s->policy->tick(s, at);
    done = access_unit(s, param, w->pos++, SIM_UPDATE, at);
    sim_state_units(s->string, w->tensor, w->range, &begin, &end);
    for (uint32_t u = begin; u < end; u++) {
        done = ht_max_u64(done, access_unit(s, u, w->pos++, SIM_UPDATE, at));
        bytes += sim_unit_bytes(s->string, u);
    }
    q->free_at = ht_max_u64(q->free_at, done) + ns_for(bytes, s->config->copy_rate);
    for (uint32_t u = begin; u < end; u++)
        s->unit[u].ready_at = q->free_at;
    s->unit[param].ready_at = q->free_at;
    q->ended[q->ranges++ % RANGES_AHEAD] = q->free_at;
    q->waiting_bytes -= ht_min_u64(w->bytes, sim_unit_bytes(s->string, param));
    if (++w->range == sim_param_units(s->string, w->tensor))
        q->head++;
}

/* All updates that begin until then. */
static void run_updates(struct sim *s, uint64_t until)
{
    struct sim_updates *q = s->updates;

    while (q->head < q->tail && next_begin(q) <= until)
        update_range(s, next_begin(q));
    if (s->policy->tick && until <= s->now)
        s->policy->tick(s, until);
}

/* Those up to the newest gradient of the tensor; readers of a parameter wait for its own updates only. */
static void run_updates_of(struct sim *s, uint32_t tensor)
{
    struct sim_updates *q = s->updates;

    while (q->head < q->newest[tensor])
        update_range(s, next_begin(q));
}

/* Gradients that may wait: as in the engine, a part of the DRAM that is not for protected images. */
static uint64_t backlog_bytes_max(const struct sim *s)
{
    uint64_t all = s->config->dram_bytes, passing = all - ht_arena_protected_max(all);

    return s->policy->unlimited ? UINT64_MAX : ht_max_u64(passing / 8 * BACKLOG_EIGHTHS, SIM_UNIT_BYTES_MIN);
}

/* The caller waits while too many gradients do. */
static void wait_for_updates(struct sim *s)
{
    struct sim_updates *q = s->updates;
    uint64_t limit = backlog_bytes_max(s);

    while (q->head < q->tail && q->waiting_bytes > limit) {
        update_range(s, next_begin(q));
        stall_until(s, q->free_at);
    }
}

/* ----------------------------------------------------------------- entries */

/* A caller reads or writes. */
static void access_range(struct sim *s, const struct replay_entry *e, uint32_t pos)
{
    uint64_t unit_bytes = s->string->unit_bytes, end = s->now, at = e->offset;

    if (s->trace->tensor[e->tensor].state_bytes)
        run_updates_of(s, e->tensor);
    for (uint32_t i = 0; at < e->offset + e->bytes; i++) {
        uint32_t unit = s->string->first[e->tensor] + (uint32_t)(at / unit_bytes);
        uint64_t to = ht_min_u64((at / unit_bytes + 1) * unit_bytes, e->offset + e->bytes);
        bool whole = to - at == sim_unit_bytes(s->string, unit);
        enum sim_kind kind = e->op == REPLAY_READ ? SIM_READ : whole ? SIM_OVERWRITE : SIM_WRITE;
        end = ht_max_u64(end, access_unit(s, unit, pos + i, kind, s->now));
        at = to;
    }
    stall_until(s, end);
    copy(s, e->bytes);
}

static void hint(struct sim *s, const struct replay_entry *e)
{
    uint32_t first = s->string->first[e->tensor], count = sim_param_units(s->string, e->tensor);

    for (uint32_t u = first; s->policy->takes_hints && u < first + count; u++) {
        if (e->op == REPLAY_PREFETCH && !s->unit[u].resident)
            (void)access_unit(s, u, SIM_NEVER, SIM_PREFETCH, s->now);
        if (e->op == REPLAY_EVICT && s->policy->drop && s->unit[u].resident) {
            s->room_at = s->now;
            s->policy->drop(s, u);
            sim_evict(s, u);
        }
    }
}

static double next_random(struct sim *s)
{
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    return (double)(s->random >> 11) / (double)(UINT64_C(1) << 53);
}

static void compute(struct sim *s, uint64_t us)
{
    double part = 1 + s->config->noise * (2 * next_random(s) - 1);
    uint64_t ns = (uint64_t)((double)us * 1000 * part);

    s->result.compute_ns += ns;
    s->now += ns;
}

static void write_all(struct sim *s)
{
    for (uint32_t i = 0; i < s->dirty_count; i++) {
        s->room_at = s->now;
        sim_clean(s, s->dirty[i]);
        s->unit[s->dirty[i]].listed = false;
    }
    s->dirty_count = 0;
    stall_until(s, s->write_free);
}

/* The figures begin here. */
static void begin_figures(struct sim *s)
{
    s->result = (struct sim_result){0};
    s->began = s->now;
    s->steps = 0;
}

static void end_step(struct sim *s, bool commit)
{
    run_updates(s, UINT64_MAX);
    stall_until(s, s->updates->free_at);
    if (commit)
        write_all(s);
}

static int take_entry(struct sim *s, const struct replay_entry *e, uint32_t pos)
{
    int rc = 0;

    switch ((enum replay_op)e->op) {
    case REPLAY_COMPUTE:
        compute(s, e->offset);
        break;
    case REPLAY_READ:
    case REPLAY_WRITE:
        access_range(s, e, pos);
        break;
    case REPLAY_GRADIENT:
        copy(s, e->bytes);
        rc = queue_gradient(s, e->tensor, pos);
        if (!rc)
            wait_for_updates(s);
        break;
    case REPLAY_PREFETCH:
    case REPLAY_EVICT:
        hint(s, e);
        break;
    case REPLAY_STEP:
    case REPLAY_COMMIT:
        end_step(s, e->op == REPLAY_COMMIT);
        break;
    case REPLAY_OPS:
        break;
    }
    return rc;
}

/*
 * More than the trace takes: each access reads and writes once, and nothing overlaps. A plan reads for an access that
 * comes, a hint reads its tensor, and writes follow changes.
 */
static double longest_ns(const struct sim_string *s, const struct sim_config *c)
{
    double unit = (double)s->unit_bytes * GIGA, units = s->accesses, us = 0;
    double access = (double)c->latency_ns + unit / (double)c->read_rate + unit / (double)c->write_rate +
        (c->copy_rate ? 2 * unit / (double)c->copy_rate : 0);

    for (uint64_t i = 0; i < s->trace->entries; i++) {
        const struct replay_entry *e = &s->trace->entry[i];
        if (e->op == REPLAY_COMPUTE)
            us += (double)e->offset;
        if (e->op == REPLAY_PREFETCH || e->op == REPLAY_EVICT)
            units += sim_param_units(s, e->tensor);
    }
    return 2 * (units * access + us * 1000) + (double)c->buffer_bytes / (double)c->write_rate * GIGA;
}

static int play(struct sim *s)
{
    uint64_t steps = replay_trace_steps(s->trace), warm = s->config->warm_steps, seen = 0;
    uint32_t pos = 0;
    int rc = 0;

    if (warm >= steps)
        warm = steps ? steps - 1 : 0;
    for (uint64_t i = 0; !rc && i < s->trace->entries; i++) {
        const struct replay_entry *e = &s->trace->entry[i];
        run_updates(s, s->now);
        rc = take_entry(s, e, pos);
        pos += sim_entry_accesses(s->string, e);
        if (!replay_ends_step(s->trace, i))
            continue;
        s->steps++;
        if (++seen == warm)
            begin_figures(s);
    }
    run_updates(s, UINT64_MAX);
    stall_until(s, s->updates->free_at);
    s->result.time_ns = s->now - s->began;
    s->result.steps = ht_max_u64(s->steps, 1);
    return rc;
}

int sim_run(const struct sim_string *string, const struct sim_config *config, const struct sim_policy *policy,
            struct sim_result *out)
{
    struct sim_updates updates = {0};
    struct sim s = {.string = string, .trace = string->trace, .config = config, .policy = policy, .updates = &updates};
    uint64_t ahead = config->buffer_bytes / (string->unit_bytes * 4);

    if (longest_ns(string, config) > NS_MAX)
        return -ERANGE;

    updates.ranges_ahead = ht_max_u64(1, ht_min_u64(ahead, RANGES_AHEAD));
    s.random = (config->seed + 1) * 0x9e3779b97f4a7c15ull;
    s.unit = calloc(string->units + 1, sizeof(*s.unit));
    s.dirty = calloc(string->units + 1, sizeof(*s.dirty));
    updates.newest = calloc(string->trace->tensors + 1, sizeof(*updates.newest));
    int rc = s.unit && s.dirty && updates.newest ? policy->start(&s) : -ENOMEM;
    if (!rc) {
        rc = play(&s);
        policy->stop(&s);
    }
    free(s.unit);
    free(s.dirty);
    free(updates.ring);
    free(updates.newest);
    if (!rc)
        *out = s.result;
    return rc;
}
