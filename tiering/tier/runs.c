/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/runs.h"

static_assert(HT_RUN_NEAR == 8, "seen has a bit for each");

int ht_runs_init(struct ht_runs *r)
{
    *r = (struct ht_runs){.run = calloc(HT_RUNS_MIN, sizeof(*r->run)), .size = HT_RUNS_MIN};
    return r->run ? 0 : -ENOMEM;
}

void ht_runs_destroy(struct ht_runs *r)
{
    free(r->run);
    r->run = NULL;
}

uint64_t ht_runs_oldest(const struct ht_runs *r)
{
    return ht_max_u64(r->from, r->count - ht_min_u64(r->count, r->size));
}

static struct ht_run *run_of(const struct ht_runs *r, uint64_t n)
{
    return &r->run[n & (r->size - 1)];
}

static uint64_t *open_of(struct ht_runs *r, const struct ht_run_access *a)
{
    uint64_t h = (a->object * HT_PLAN_USES + a->use) * UINT64_C(0x9e3779b97f4a7c15);

    return &r->open[(h >> 32) % HT_RUNS_OPEN];
}

/* Does the access belong to the run? Then it does so from now on. */
static bool goes_on(struct ht_run *run, const struct ht_run_access *a)
{
    uint32_t back = run->last - a->index;

    if (a->index > run->last) {
        uint32_t ahead = a->index - run->last;
        if (ahead > HT_RUN_NEAR)
            return false;
        run->seen = (uint8_t)(ahead < HT_RUN_NEAR ? run->seen << ahead | 1 : 1);
        run->last = a->index;
        return true;
    }
    if (!a->begins)
        return a->index >= run->first;
    if (back >= HT_RUN_NEAR || run->seen >> back & 1)
        return false;
    run->seen |= (uint8_t)(1u << back);
    if (a->index < run->first)
        run->first = a->index;
    return true;
}

static uint8_t units_of(const struct ht_run_access *a)
{
    uint64_t chunk = UINT64_C(1) << a->chunk_shift, bytes = a->bytes ? ht_min_u64(a->bytes, chunk) : chunk;

    return (uint8_t)ht_min_u64(ht_div_up(bytes, HT_RUN_UNIT), UINT8_MAX);
}

void ht_runs_note(struct ht_runs *r, const struct ht_run_access *a)
{
    uint64_t *open = open_of(r, a);

    if (*open > ht_runs_oldest(r)) {
        struct ht_run *run = run_of(r, *open - 1);
        if (run->object == a->object && run->use == a->use && goes_on(run, a)) {
            run->end_ns = a->now_ns;
            run->last_units = a->index == run->last ? units_of(a) : run->last_units;
            return;
        }
    }
    *run_of(r, r->count) = (struct ht_run){
        .object = a->object,
        .begin_ns = a->now_ns,
        .end_ns = a->now_ns,
        .first = a->index,
        .last = a->index,
        .use = (uint8_t)a->use,
        .seen = 1,
        .chunk_shift = a->chunk_shift,
        .last_units = units_of(a),
        .pinned = a->pinned,
    };
    *open = ++r->count;
}

uint32_t ht_runs_copy(const struct ht_runs *r, uint64_t from, uint32_t most, struct ht_run *to)
{
    uint32_t n = (uint32_t)ht_min_u64(r->count - from, most);

    assert(from >= ht_runs_oldest(r) && from <= r->count);
    for (uint32_t i = 0; i < n; i++)
        to[i] = *run_of(r, from + i);
    return n;
}

struct ht_run *ht_runs_replace(struct ht_runs *r, struct ht_run *run, uint32_t size)
{
    struct ht_run *was = r->run;

    assert(size && (size & (size - 1)) == 0);
    r->run = run;
    r->size = size;
    r->from = r->count;
    return was;
}
