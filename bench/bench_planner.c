/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_planner.c - what the store does for a plan of many tensors: it notes each access, finds the step in its
 * history, and makes the plan. Each tensor is read forward and backward and then updated. DRAM has room for half of
 * them. Prints JSON: seconds of processor time, and bytes of memory.
 *
 *     bench_planner [TENSORS]     (default: 100000)
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#include "tiering/tier/forecast.h"
#include "tiering/tier/runs.h"

enum { USES = 3, STEPS = 3, SHIFT = 20 };
#define ACCESS_NS UINT64_C(1000000)

static struct ht_runs runs;

static void must(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "bench_planner: %s\n", what);
    exit(1);
}

static double processor_s(void)
{
    struct timespec t;

    must(!clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t), "clock");
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t peak_bytes(void)
{
    struct rusage u;

    must(!getrusage(RUSAGE_SELF, &u), "getrusage");
    return (uint64_t)u.ru_maxrss * 1024;
}

static void note_steps(uint32_t tensors)
{
    uint64_t now_ns = 0;

    for (uint32_t i = 0; i < STEPS * USES * tensors; i++) {
        uint32_t pass = i / tensors % USES, k = i % tensors;
        const struct ht_run_access a = {
            .object = 1 + (pass == 0 ? k : tensors - 1 - k),
            .now_ns = now_ns += ACCESS_NS,
            .use = pass < 2 ? HT_PLAN_READ : HT_PLAN_UPDATE,
            .chunk_shift = SHIFT,
            .begins = true,
        };
        ht_runs_note(&runs, &a);
    }
}

static uint32_t find_period(const struct ht_run run[], uint32_t n)
{
    uint64_t *key = malloc(n * sizeof(*key));
    uint32_t period;

    must(key, "memory");
    for (uint32_t i = 0; i < n; i++)
        key[i] = run[i].object * HT_PLAN_USES + run[i].use;
    must(!ht_period_find(key, n, &period), "period");
    free(key);
    return period;
}

static struct ht_forecast *make_plan(const struct ht_run run[], uint32_t n, uint32_t tensors)
{
    struct ht_forecast *f;
    const struct ht_forecast_input in = {
        .run = run,
        .runs = n,
        .begin_ns = run[0].begin_ns,
        .step_ns = n * ACCESS_NS,
        .now_ns = run[0].begin_ns,
        .room_bytes = (uint64_t)tensors << SHIFT >> 1,
    };

    must(!ht_forecast_make(&in, &f) && f, "plan");
    return f;
}

int main(int argc, char **argv)
{
    uint32_t tensors = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 100000;

    must(tensors > 1 && tensors <= HT_RUNS_MAX / USES / STEPS, "too many tensors, or too few");
    must(!ht_runs_init(&runs), "memory");
    struct ht_run *ring = calloc(HT_RUNS_MAX, sizeof(*ring)), *copy = malloc(HT_RUNS_MAX * sizeof(*copy));
    must(ring && copy, "memory");
    free(ht_runs_replace(&runs, ring, HT_RUNS_MAX));
    double begin = processor_s();
    note_steps(tensors);
    double noted = processor_s();
    uint32_t n = ht_runs_copy(&runs, ht_runs_oldest(&runs), UINT32_MAX, copy);
    uint32_t period = find_period(copy, n);
    double found = processor_s();
    must(period == USES * tensors, "another period");
    struct ht_forecast *f = make_plan(copy + n - 1 - period, period, tensors);
    double made = processor_s();
    printf(
        "{\"tensors\": %u, \"uses\": %u, \"note_ns\": %.0f, \"step_s\": %.3f, \"plan_s\": %.3f, \"runs_bytes\": %llu, "
        "\"plan_bytes\": %llu, \"peak_bytes\": %llu}\n",
        tensors, period, 1e9 * (noted - begin) / n, found - noted, made - found,
        (unsigned long long)ht_runs_bytes(&runs), (unsigned long long)ht_forecast_bytes(f),
        (unsigned long long)peak_bytes());
    ht_forecast_free(f);
    free(copy);
    ht_runs_destroy(&runs);
    return 0;
}
