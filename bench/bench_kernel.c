/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_kernel.c - the update kernels beside an in-place stream of the same shape: as many arrays in and out, one
 * addition each, every array four times the last cache. On one core, then on all; medians of interleaved runs, and
 * the ratio is what counts. Then the same updates with state in 16 and 8 bits, in windows as a worker does them, beside
 * f32: elements a second, with the codecs of each instruction set that is here.
 *
 *     bench_kernel [--json] [RUNS]
 */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "optim/rules/blocks.h"
#include "optim/rules/rule.h"
#include "tiering/base/base.h"

enum { RUNS = 9, RUNS_MAX = 99, CACHES = 4, ARRAYS_MAX = 4, THREADS_MAX = 64, DEFAULT_L3 = 32 << 20 };
#define BYTES_MAX (128ull << 20) /* of an array: a cache that is the whole host's says little about us */

/* Each rule once; p and g, and as many states between them as the kernel keeps. */
static const struct {
    const char *config;
    unsigned states;
} cases[] = {
    {"adamw lr=1e-3 weight_decay=0.1", 2}, {"adam lr=1e-3 weight_decay=0.1", 2}, {"sgd lr=1e-3", 0},
    {"sgd lr=1e-3 momentum=0.9", 1},       {"lion lr=1e-4 weight_decay=0.1", 1}, {"adagrad lr=1e-2", 1},
};

struct arrays {
    float *a[ARRAYS_MAX]; /* p, states, and the gradient last */
    uint8_t *coded[HT_KERNEL_STATES_MAX];
    size_t elements;
};

struct work {
    const struct arrays *arrays;
    unsigned written; /* arrays in and out; one more is only read */
    ht_kernel_fn kernel;
    const struct ht_scalars *scalars;
    const struct ht_codecs *codecs; /* NULL: state is f32 */
    unsigned form;
    uint8_t kind[HT_KERNEL_STATES_MAX];
    size_t first, count;
};

/*
 * Arrays lie as chunks of the DRAM tier do: whole MiB apart, and not by a power of two. The first cache of Zen
 * distinguishes lines by address bits 12 to 27. Arrays whose addresses differ only above these evict each other, and
 * stream and kernel would run at a third.
 */
static void make_arrays(struct arrays *out, size_t bytes)
{
    size_t apart = bytes + (1 << 20);
    char *all = mmap(NULL, ARRAYS_MAX * apart, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (all == MAP_FAILED) {
        perror("bench_kernel: no memory for the arrays");
        exit(1);
    }
    madvise(all, ARRAYS_MAX * apart, MADV_HUGEPAGE);
    out->elements = bytes / sizeof(float);
    for (unsigned k = 0; k < HT_KERNEL_STATES_MAX; k++) {
        out->coded[k] = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (out->coded[k] == MAP_FAILED) {
            perror("bench_kernel: no memory for the codes");
            exit(1);
        }
        madvise(out->coded[k], bytes, MADV_HUGEPAGE);
    }
    for (unsigned k = 0; k < ARRAYS_MAX; k++) {
        out->a[k] = (float *)(void *)(all + k * apart);
        for (size_t i = 0; i < out->elements; i++)
            out->a[k][i] = (float)(i % 1000) * 1e-3f;
    }
}

/*
 * The ceiling: the same traffic, almost no arithmetic, in vectors. All arrays begin at the same place of a page, as
 * chunks in the store do. A load from one array after a store to another would wait for nothing, unless it may be
 * reordered (restrict).
 */
#if defined(__x86_64__) && !defined(__clang__)
#define STREAM __attribute__((noinline, optimize("O3"), target("avx2"))) static void
#else
#define STREAM __attribute__((noinline)) static void
#endif
STREAM stream4(float *restrict p, float *restrict m, float *restrict v, const float *restrict g, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float x = g[i];
        p[i] += x;
        m[i] += x;
        v[i] += x;
    }
}

STREAM stream3(float *restrict p, float *restrict m, const float *restrict g, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float x = g[i];
        p[i] += x;
        m[i] += x;
    }
}

STREAM stream2(float *restrict p, const float *restrict g, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] += g[i];
}

static void stream(const struct work *w)
{
    float *p = w->arrays->a[0] + w->first, *m = w->arrays->a[1] + w->first, *v = w->arrays->a[2] + w->first;
    const float *g = w->arrays->a[ARRAYS_MAX - 1] + w->first;

    if (w->written == 3)
        stream4(p, m, v, g, w->count);
    else if (w->written == 2)
        stream3(p, m, g, w->count);
    else
        stream2(p, g, w->count);
}

static struct ht_coded coded_at(const struct work *w, unsigned state, size_t e)
{
    struct ht_coded c = ht_coded_at(w->form, w->arrays->coded[state], w->arrays->elements, e, HT_FORM_WINDOW);

    c.kind = w->kind[state];
    c.t = 10;
    c.element = e;
    return c;
}

/* What a worker does with a window. */
static void run_window(const struct work *w, size_t e)
{
    float state[HT_KERNEL_STATES_MAX][HT_FORM_WINDOW];
    struct ht_update u = {
        .p = w->arrays->a[0] + e,
        .state = {state[0], state[1]},
        .g = w->arrays->a[ARRAYS_MAX - 1] + e,
        .p_dtype = HT_DTYPE_F32,
        .g_dtype = HT_DTYPE_F32,
    };

    for (unsigned k = 0; k + 1 < w->written; k++) {
        struct ht_coded c = coded_at(w, k, e);
        w->codecs->decode[w->form](&c, state[k]);
    }
    w->kernel(w->scalars, &u, HT_FORM_WINDOW);
    for (unsigned k = 0; k + 1 < w->written; k++) {
        struct ht_coded c = coded_at(w, k, e);
        w->codecs->encode[w->form](&c, state[k]);
    }
}

static void *run(void *arg)
{
    const struct work *w = arg;

    if (w->codecs) {
        for (size_t e = 0; e < w->count; e += HT_FORM_WINDOW)
            run_window(w, w->first + e);
        return NULL;
    }
    if (!w->kernel) {
        stream(w);
        return NULL;
    }
    struct ht_update u = {
        .p = w->arrays->a[0] + w->first,
        .state = {w->arrays->a[1] + w->first, w->arrays->a[2] + w->first},
        .g = w->arrays->a[ARRAYS_MAX - 1] + w->first,
        .p_dtype = HT_DTYPE_F32,
        .g_dtype = HT_DTYPE_F32,
    };
    w->kernel(w->scalars, &u, w->count);
    return NULL;
}

/* One thread is measured by its own time: what other programs have of its processor does not count. */
static uint64_t time_ns(unsigned threads)
{
    struct timespec t;

    if (threads > 1 || clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t))
        return ht_now_ns();
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* GB/s of one pass, each thread over its own part. */
static double measure(const struct work *whole, unsigned threads)
{
    pthread_t thread[THREADS_MAX];
    struct work part[THREADS_MAX];
    size_t each = whole->arrays->elements / threads / HT_FORM_WINDOW * HT_FORM_WINDOW;
    uint64_t began = time_ns(threads);

    for (unsigned i = 0; i < threads; i++) {
        part[i] = *whole;
        part[i].first = i * each;
        part[i].count = each;
        if (i && pthread_create(&thread[i], NULL, run, &part[i])) {
            perror("bench_kernel: pthread_create");
            exit(1);
        }
    }
    run(&part[0]);
    for (unsigned i = 1; i < threads; i++)
        pthread_join(thread[i], NULL);
    return (double)(each * threads * sizeof(float)) * (2 * whole->written + 1) / (double)(time_ns(threads) - began);
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

static void bench(const struct arrays *arrays, unsigned index, unsigned threads, int runs, bool json)
{
    const struct ht_kernels *kernels = ht_kernels_choose();
    double top[RUNS_MAX], fast[RUNS_MAX], slow[RUNS_MAX], ratio[RUNS_MAX];
    struct ht_optim_config config;
    struct ht_scalars s;
    char why[HT_OPTIM_ERROR_MAX];

    if (ht_optim_config_parse(cases[index].config, strlen(cases[index].config), &config, why)) {
        fprintf(stderr, "bench_kernel: %s: %s\n", cases[index].config, why);
        exit(1);
    }
    ht_rule_scalars(&config, 10, &s);
    struct work w = {.arrays = arrays, .written = cases[index].states + 1, .scalars = &s};
    for (int i = 0; i < runs; i++) {
        w.kernel = NULL;
        top[i] = measure(&w, threads);
        w.kernel = kernels->fn[s.kernel];
        fast[i] = measure(&w, threads);
        w.kernel = ht_kernels_scalar.fn[s.kernel];
        slow[i] = measure(&w, threads);
        ratio[i] = fast[i] / top[i];
    }
    double t = median(top, runs), f = median(fast, runs), l = median(slow, runs), r = median(ratio, runs);
    if (json)
        printf("{\"rule\": \"%s\", \"threads\": %u, \"kernel\": \"%s\", \"stream_gb_s\": %.3f, \"kernel_gb_s\": %.3f, "
               "\"scalar_gb_s\": %.3f, \"ratio\": %.3f}\n",
               cases[index].config, threads, kernels->name, t, f, l, r);
    else
        printf("  %-34s%8u%11.2f%11.2f%11.2f%8.2f\n", cases[index].config, threads, t, f, l, r);
    fflush(stdout);
}

/* ------------------------------------------------------- state in fewer bits */

/* Of the elements a second of f32, on one core. */
static double target(const struct ht_codecs *codecs, unsigned form)
{
    return form == HT_FORM_BF16 ? 0.7 : strcmp(codecs->name, "avx512") == 0 ? 0.45 : 0.25;
}

/* Moments as they are in training: of the signs and sizes of gradients. */
static void make_coded(struct work *w)
{
    float x[HT_FORM_WINDOW];

    for (size_t e = 0; e < w->arrays->elements; e += HT_FORM_WINDOW) {
        for (unsigned k = 0; k + 1 < w->written; k++) {
            for (size_t i = 0; i < HT_FORM_WINDOW; i++) {
                uint32_t r = (uint32_t)(e + i) * 2654435761u;
                float size = 1e-3f / (float)(1 + (r >> 12 & 1023)) * (r & 1 ? 1 : -1);
                x[i] = w->kind[k] == HT_STATE_EXP_AVG_SQ || w->kind[k] == HT_STATE_SUM ? size * size : size;
            }
            struct ht_coded c = coded_at(w, k, e);
            w->codecs->encode[w->form](&c, x);
        }
    }
}

static void bench_bits(const struct arrays *arrays, unsigned index, unsigned form, const struct ht_codecs *codecs,
                       int runs, bool json)
{
    double f32[RUNS_MAX], fewer[RUNS_MAX], ratio[RUNS_MAX];
    struct ht_optim_config config;
    struct ht_scalars s;
    char why[HT_OPTIM_ERROR_MAX];

    if (ht_optim_config_parse(cases[index].config, strlen(cases[index].config), &config, why))
        exit(1); /* bench has parsed it */
    ht_rule_scalars(&config, 10, &s);
    struct work w = {.arrays = arrays, .written = cases[index].states + 1, .scalars = &s, .form = form};
    double bytes = sizeof(float) * (2.0 * w.written + 1);
    memcpy(w.kind, ht_kernel_kinds(s.kernel), sizeof(w.kind));
    w.kernel = ht_kernels_choose()->fn[s.kernel];
    w.codecs = codecs;
    make_coded(&w);
    for (int i = 0; i < runs; i++) {
        w.codecs = NULL;
        f32[i] = measure(&w, 1) / bytes;
        w.codecs = codecs;
        fewer[i] = measure(&w, 1) / bytes;
        ratio[i] = fewer[i] / f32[i];
    }
    int bits = form == HT_FORM_BF16 ? 16 : 8;
    double f = median(f32, runs), b = median(fewer, runs), r = median(ratio, runs), t = target(codecs, form);
    if (json)
        printf("{\"state_of\": \"%s\", \"state_bits\": %d, \"codecs\": \"%s\", \"f32_g_s\": %.4f, \"g_s\": %.4f, "
               "\"of_f32\": %.3f, \"target\": %.2f}\n",
               cases[index].config, bits, codecs->name, f, b, r, t);
    else
        printf("  %-34s%8d  %-8s%9.3f%9.3f%9.2f%9.2f\n", cases[index].config, bits, codecs->name, f, b, r, t);
    fflush(stdout);
}

/* By each instruction set that this CPU has, the slowest first; not by the reference. */
static void bench_forms(const struct arrays *arrays, int runs, bool json)
{
    static const char *const isa[] = {"avx2", "avx512"};
    static const unsigned forms[] = {HT_FORM_BF16, HT_FORM_DYNAMIC};
    char *asked = getenv("HITRAIN_KERNEL") ? strdup(getenv("HITRAIN_KERNEL")) : NULL;

    if (!json)
        printf("\n  %-34s%8s  %-8s%9s%9s%9s%9s\n", "elements in ns, one thread", "bits", "codecs", "f32", "here",
               "of f32", "target");
    for (unsigned i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        for (unsigned k = 0; cases[i].states && k < HT_ARRAY_SIZE(isa); k++) {
            setenv("HITRAIN_KERNEL", isa[k], 1);
            for (unsigned f = 0; !strcmp(ht_codecs_choose()->name, isa[k]) && f < HT_ARRAY_SIZE(forms); f++)
                bench_bits(arrays, i, forms[f], ht_codecs_choose(), runs, json);
        }
    }
    asked ? setenv("HITRAIN_KERNEL", asked, 1) : unsetenv("HITRAIN_KERNEL");
    free(asked);
}

static size_t array_bytes(void)
{
    long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
    uint64_t bytes = CACHES * (uint64_t)(l3 > 0 ? l3 : DEFAULT_L3);

    return ht_min_u64(bytes, BYTES_MAX) / (4 * HT_FORM_WINDOW) * (4 * HT_FORM_WINDOW);
}

static unsigned cpu_count(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) ? 1 : ht_min_u64((uint64_t)CPU_COUNT(&set), THREADS_MAX);
}

/* ------------------------------------------------- orthogonal matrices by the store */

static bool never(void *ctx)
{
    (void)ctx;
    return false;
}

/* Of one core, with the defaults of muon. Each step multiplies three times: 4 m m n + 2 m m m operations. */
static void bench_ortho(uint32_t m, uint32_t n, int runs, bool json)
{
    struct ht_optim_config c = {.ns_a = 3.4445, .ns_b = -4.775, .ns_c = 2.0315, .ns_steps = 5, .eps = 1e-7};
    size_t elements = (size_t)m * n;
    uint16_t *u = malloc(elements * sizeof(*u));
    double seconds[RUNS_MAX], flop = 5 * (4.0 * m * m * n + 2.0 * m * m * m);

    for (int run = 0; u && run < runs; run++) {
        for (size_t i = 0; i < elements; i++)
            u[i] = ht_f32_to_bf16((float)(i * 2654435761u % 1000) - 500.0f);
        uint64_t start = time_ns(1);
        if (ht_newton_schulz(ht_kernels_choose(), &c, u, m, n, never, NULL))
            exit(1);
        seconds[run] = (double)(time_ns(1) - start) / 1e9;
    }
    double s = u ? median(seconds, runs) : 1;
    free(u);
    printf(json ? "{\"newton_schulz\": \"%ux%u\", \"gflop_s\": %.2f, \"parameters_s\": %.0f}\n"
                : "  Newton-Schulz of %u x %u: %.1f GFLOP/s on one core, %.0f parameters/s\n",
           m, n, flop / s / 1e9, (double)elements / s);
}

int main(int argc, char **argv)
{
    bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
    int runs = argc > 1 + json ? atoi(argv[1 + json]) : RUNS;
    size_t bytes = array_bytes();
    struct arrays arrays;
    unsigned cpus = cpu_count();

    if (runs < 1 || runs > RUNS_MAX) {
        fprintf(stderr, "usage: bench_kernel [--json] [RUNS]\n");
        return 2;
    }
    make_arrays(&arrays, bytes);
    if (!json)
        printf("%zu MiB per array, f32, medians of %d interleaved runs, GB/s (%s)\n\n  %-34s%8s%11s%11s%11s%8s\n",
               bytes >> 20, runs, ht_kernels_choose()->name, "", "threads", "stream", "kernel", "scalar", "ratio");
    for (unsigned i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        bench(&arrays, i, 1, runs, json);
        if (cpus > 1)
            bench(&arrays, i, cpus, runs, json);
    }
    bench_forms(&arrays, runs, json);
    bench_ortho(256, 256, runs, json);
    bench_ortho(512, 2048, runs, json);
    bench_ortho(1024, 1024, runs, json);
    return 0;
}
