/* SPDX-License-Identifier: Apache-2.0 */
/* runs.c - see runs.h. */
#include "tiering/tier/runs.h"

#include <assert.h>
#include <stdlib.h>

static_assert(HT_RUN_NEAR == 8, "seen has a bit for each");

int ht_runs_init(struct ht_runs *r)
{
    *r = (struct ht_runs){.run = calloc(HT_RUNS, sizeof(*r->run))};
    return r->run ? 0 : -ENOMEM;
}

void ht_runs_destroy(struct ht_runs *r)
{
    free(r->run);
    r->run = NULL;
}

static uint64_t *open_of(struct ht_runs *r, const struct ht_run_access *a)
{
    uint64_t h = (a->object * HT_PLAN_USES + a->use) * UINT64_C(0x9e3779b97f4a7c15);

    return &r->open[(h >> 32) % HT_RUNS_OPEN];
}

static bool is_of(const struct ht_run *run, const struct ht_run_access *a)
{
    return run->object == a->object && run->use == a->use;
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

void ht_runs_note(struct ht_runs *r, const struct ht_run_access *a)
{
    uint64_t *open = open_of(r, a);

    if (*open && r->count - *open < HT_RUNS) {
        struct ht_run *run = &r->run[(*open - 1) % HT_RUNS];
        if (is_of(run, a) && goes_on(run, a)) {
            run->end_ns = a->now_ns;
            return;
        }
    }
    r->run[r->count % HT_RUNS] = (struct ht_run){
        .object = a->object,
        .begin_ns = a->now_ns,
        .end_ns = a->now_ns,
        .first = a->index,
        .last = a->index,
        .use = (uint8_t)a->use,
        .seen = 1,
        .chunk_shift = a->chunk_shift,
        .stored = a->stored,
        .pinned = a->pinned,
    };
    *open = ++r->count;
}

uint32_t ht_runs_copy(const struct ht_runs *r, uint64_t from_ns, struct ht_run *to)
{
    uint32_t n = 0;

    for (uint64_t i = r->count - ht_min_u64(r->count, HT_RUNS); i < r->count; i++) {
        const struct ht_run *run = &r->run[i % HT_RUNS];
        if (run->begin_ns >= from_ns)
            to[n++] = *run;
    }
    return n;
}
