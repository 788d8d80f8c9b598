/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_kernel.c - the AdamW kernels beside an in-place stream of the same shape: four arrays in, three out, one
 * addition each, arrays far larger than the caches. One core, medians of interleaved runs; the ratio is what counts.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "optim/rules/rule.h"
#include "tiering/base/base.h"

enum { ELEMENTS = 24 << 20, RUNS = 9, ARRAYS_IN = 4, ARRAYS_OUT = 3 };

static float *array(void)
{
    size_t bytes = (size_t)ELEMENTS * sizeof(float);
    float *a = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (a == MAP_FAILED) {
        perror("bench_kernel: no memory for the arrays");
        exit(1);
    }
    madvise(a, bytes, MADV_HUGEPAGE);
    for (size_t i = 0; i < ELEMENTS; i++)
        a[i] = (float)(i % 1000) * 1e-3f;
    return a;
}

/* The ceiling: the same traffic, next to no arithmetic. */
__attribute__((noinline)) static void stream(float *p, float *m, float *v, const float *g, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float x = g[i];
        p[i] += x;
        m[i] += x;
        v[i] += x;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof(*v), by_value);
    return v[n / 2];
}

static double gbytes_per_s(uint64_t began_ns)
{
    double bytes = (double)ELEMENTS * sizeof(float) * (ARRAYS_IN + ARRAYS_OUT);
    return bytes / (double)(ht_now_ns() - began_ns);
}

int main(void)
{
    float *p = array(), *m = array(), *v = array(), *g = array();
    double ceiling[RUNS], rate[RUNS], scalar[RUNS];
    const struct ht_kernels *kernels = ht_kernels_choose();
    struct ht_optim_config config = ht_rule_of(HT_RULE_ADAMW)->defaults;
    struct ht_update u = {.p = p, .state = {m, v}, .g = g, .p_dtype = HT_DTYPE_F32, .g_dtype = HT_DTYPE_F32};
    struct ht_scalars s;
    ht_rule_scalars(&config, 10, &s);
    for (int i = 0; i < RUNS; i++) {
        uint64_t t = ht_now_ns();
        stream(p, m, v, g, ELEMENTS);
        ceiling[i] = gbytes_per_s(t);
        t = ht_now_ns();
        kernels->fn[s.kernel](&s, &u, ELEMENTS);
        rate[i] = gbytes_per_s(t);
        t = ht_now_ns();
        ht_kernels_scalar.fn[s.kernel](&s, &u, ELEMENTS);
        scalar[i] = gbytes_per_s(t);
    }
    double top = median(ceiling, RUNS), fast = median(rate, RUNS), slow = median(scalar, RUNS);
    printf("one core, %d MiB per array, medians of %d interleaved runs\n", (int)(ELEMENTS * sizeof(float) >> 20), RUNS);
    printf("  stream of the same shape  %6.2f GB/s\n", top);
    printf("  AdamW, %-6s             %6.2f GB/s  %.2f of the stream\n", kernels->name, fast, fast / top);
    printf("  AdamW, scalar reference   %6.2f GB/s  %.2f of the stream\n", slow, slow / top);
    return 0;
}
