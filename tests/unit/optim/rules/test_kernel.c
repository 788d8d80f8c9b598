/* SPDX-License-Identifier: Apache-2.0 */
/* Every kernel equals the scalar one bit for bit, whatever the values, lengths and addresses; conversions are exact. */
#include <math.h>

#include "optim/rules/blocks.h"
#include "optim/rules/rule.h"
#include "tests/support/suite.h"

enum { N_MAX = 1031, GUARD = 64, ROUNDS = 60 };

static uint64_t rnd = 88172645463325252ull;

/* All kinds of numbers: any bits, subnormals, specials, and ordinary ones. */
static uint32_t wild_bits(void)
{
    static const uint32_t special[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001,
                                       0x7f800001, 0x7f7fffff, 0x00000001, 0x00800000, 0x3f800000, 0x3f808000};
    uint64_t r = random_next(&rnd);

    switch (r >> 60 & 3) {
    case 0:
        return (uint32_t)r;
    case 1:
        return (uint32_t)r & 0x807fffffu;
    case 2:
        return special[(r & 0xffff) % HT_ARRAY_SIZE(special)];
    default:
        return ((uint32_t)r & 0x83ffffffu) | 0x38000000u;
    }
}

static uint32_t tame_bits(void)
{
    return ((uint32_t)random_next(&rnd) & 0x83ffffffu) | 0x38000000u;
}

struct arrays {
    uint8_t p[4 * N_MAX + GUARD], master[4 * N_MAX + GUARD], m[4 * N_MAX + GUARD], v[4 * N_MAX + GUARD],
        g[4 * N_MAX + GUARD];
};

static void fill(uint8_t *bytes, size_t len, bool wild)
{
    for (size_t i = 0; i + 4 <= len; i += 4) {
        uint32_t bits = wild ? wild_bits() : tame_bits();
        memcpy(bytes + i, &bits, 4);
    }
}

static struct ht_update view(struct arrays *a, uint8_t p_dtype, uint8_t g_dtype, size_t skip)
{
    size_t p_size = ht_dtype_trained_bytes(p_dtype), g_size = ht_dtype_trained_bytes(g_dtype);

    return (struct ht_update){
        .p = a->p + skip * p_size,
        .master = p_size == 2 ? (float *)(void *)(a->master + skip * 4) : NULL,
        .state = {(float *)(void *)(a->m + skip * 4), (float *)(void *)(a->v + skip * 4)},
        .g = a->g + skip * g_size,
        .p_dtype = p_dtype,
        .g_dtype = g_dtype,
    };
}

static double random_unit(void)
{
    return (double)(random_next(&rnd) % 1000) / 1000;
}

static void random_scalars(struct ht_scalars *s, enum ht_kernel kernel)
{
    static const enum ht_rule_id rule[HT_KERNEL_COUNT] = {HT_RULE_ADAMW, HT_RULE_ADAM, HT_RULE_SGD,     HT_RULE_SGD,
                                                          HT_RULE_SGD,   HT_RULE_LION, HT_RULE_ADAGRAD, HT_RULE_ADAMW,
                                                          HT_RULE_ADAM,  HT_RULE_MUON};
    bool near_g = kernel == HT_KERNEL_ADAMW_NEAR_G || kernel == HT_KERNEL_ADAM_NEAR_G;
    struct ht_optim_config c = {
        .rule = rule[kernel],
        .lr = random_unit() * 1e-2,
        .beta1 = random_unit() / 2 + (near_g ? 0 : 0.5001),
        .beta2 = random_unit(),
        .eps = 1e-8,
        .weight_decay = random_unit() * 0.1,
        .momentum = kernel == HT_KERNEL_SGD ? 0 : random_unit() + 1e-3,
        .dampening = random_unit(),
        .lr_decay = random_unit(),
        .nesterov = kernel == HT_KERNEL_SGD_NESTEROV,
        .matrix = {.rows = 3, .columns = 2, .block_rows = 3},
        .maximize = random_next(&rnd) & 1,
        .grad_scale = random_next(&rnd) & 1 ? 1 : random_unit() + 0.1,
    };

    ht_rule_scalars(&c, random_next(&rnd) % 100000 + 1, s);
    ck_assert_int_eq(s->kernel, kernel);
}

static void compare(ht_kernel_fn fn, enum ht_kernel kernel, uint8_t p_dtype, uint8_t g_dtype, size_t n, size_t skip,
                    bool wild)
{
    static _Alignas(64) struct arrays a, b;
    struct ht_scalars s;
    struct ht_update va = view(&a, p_dtype, g_dtype, skip), vb = view(&b, p_dtype, g_dtype, skip);

    fill((uint8_t *)&a, sizeof(a), wild);
    for (size_t i = 0; !wild && i < N_MAX; i++)
        a.v[4 * i + 3] &= 0x7f;
    /* Half of the masters agree with their parameter, as they do in a real run. */
    for (size_t i = 0; va.master && i < n; i += 2) {
        uint16_t half = va.p_dtype == HT_DTYPE_BF16 ? ht_f32_to_bf16(va.master[i]) : ht_f32_to_f16(va.master[i]);
        memcpy((uint8_t *)va.p + 2 * i, &half, 2);
    }
    memcpy(&b, &a, sizeof(a));
    random_scalars(&s, kernel);
    ck_assert_uint_eq(fn(&s, &va, n), ht_kernels_scalar.fn[kernel](&s, &vb, n));
    /* Compares everything: the kernel touched nothing beyond n either. */
    ck_assert_int_eq(memcmp(&a, &b, sizeof(a)), 0);
}

static const uint8_t dtypes[] = {HT_DTYPE_F32, HT_DTYPE_BF16, HT_DTYPE_F16};

/* NULL: this CPU lacks it. */
static const struct ht_kernels *kernels_of(const char *isa)
{
    const struct ht_kernels *k;

    setenv("HITRAIN_KERNEL", isa, 1);
    k = ht_kernels_choose();
    unsetenv("HITRAIN_KERNEL");
    return strcmp(k->name, isa) ? NULL : k;
}

static void compare_with_scalar(const char *isa, int i)
{
    enum ht_kernel kernel = (enum ht_kernel)(i / 9);
    uint8_t p_dtype = dtypes[i % 3], g_dtype = dtypes[i / 3 % 3];
    const struct ht_kernels *k = kernels_of(isa);

    if (!k)
        return;
    for (size_t n = 0; n < 70; n++)
        for (size_t skip = 0; skip < 9; skip++)
            compare(k->fn[kernel], kernel, p_dtype, g_dtype, n, skip, (n + skip) & 1);
    for (unsigned round = 0; round < ROUNDS; round++)
        compare(k->fn[kernel], kernel, p_dtype, g_dtype, N_MAX - 9, round % 9, round & 1);
}

TEST_LOOP(avx2_equals_scalar, 9 * HT_KERNEL_COUNT)
{
    compare_with_scalar("avx2", _i);
}

TEST_LOOP(avx512_equals_scalar, 9 * HT_KERNEL_COUNT)
{
    compare_with_scalar("avx512", _i);
}

TEST_LOOP(a_run_in_pieces_equals_a_run_at_once, HT_KERNEL_COUNT)
{
    static struct arrays a, b;
    struct ht_scalars s;
    ht_kernel_fn fn = ht_kernels_choose()->fn[_i];

    fill((uint8_t *)&a, sizeof(a), true);
    memcpy(&b, &a, sizeof(a));
    random_scalars(&s, (enum ht_kernel)_i);
    struct ht_update whole = view(&a, HT_DTYPE_BF16, HT_DTYPE_F32, 0);
    uint64_t nonfinite = fn(&s, &whole, 1000), sum = 0;
    for (size_t at = 0, n; at < 1000; at += n) {
        struct ht_update piece = view(&b, HT_DTYPE_BF16, HT_DTYPE_F32, at);
        n = ht_min_u64(random_next(&rnd) % 37 + 1, 1000 - at);
        sum += fn(&s, &piece, n);
    }
    ck_assert_uint_eq(nonfinite, sum);
    ck_assert_int_eq(memcmp(&a, &b, sizeof(a)), 0);
}

/* The formulas of the papers, in double. */
struct truth {
    double p, m, v;
};

static void step_in_double(struct truth *x, const struct ht_optim_config *c, enum ht_kernel kernel, double g,
                           uint64_t t)
{
    g = c->maximize ? -g : g;
    if (kernel == HT_KERNEL_MUON)
        ; /* below */
    else if (c->rule == HT_RULE_ADAMW || kernel == HT_KERNEL_LION)
        x->p *= 1 - c->lr * c->weight_decay;
    else
        g += c->weight_decay * x->p;
    if (c->rule == HT_RULE_ADAMW || c->rule == HT_RULE_ADAM) {
        x->m = c->beta1 * x->m + (1 - c->beta1) * g;
        x->v = c->beta2 * x->v + (1 - c->beta2) * g * g;
        double m = x->m / (1 - pow(c->beta1, (double)t)), v = x->v / (1 - pow(c->beta2, (double)t));
        x->p -= c->lr * m / (sqrt(v) + c->eps);
    } else if (kernel == HT_KERNEL_LION) {
        double u = c->beta1 * x->m + (1 - c->beta1) * g;
        x->p -= c->lr * ((u > 0) - (u < 0));
        x->m = c->beta2 * x->m + (1 - c->beta2) * g;
    } else if (kernel == HT_KERNEL_ADAGRAD) {
        x->m += g * g;
        x->p -= c->lr / (1 + (double)(t - 1) * c->lr_decay) * g / (sqrt(x->m) + c->eps);
    } else if (kernel == HT_KERNEL_MUON) {
        x->p = x->p * (1 - c->lr * c->weight_decay) - c->lr * (c->maximize ? -g : g);
    } else {
        x->m = t == 1 ? g : c->momentum * x->m + (1 - c->dampening) * g;
        if (kernel == HT_KERNEL_SGD_MOMENTUM)
            g = x->m;
        else if (kernel == HT_KERNEL_SGD_NESTEROV)
            g += c->momentum * x->m;
        x->p -= c->lr * g;
    }
}

TEST_LOOP(every_rule_follows_its_formula, HT_KERNEL_COUNT)
{
    static const char *const text[HT_KERNEL_COUNT] = {
        "adamw lr=1e-2 beta1=0.8 beta2=0.95 weight_decay=0.1",
        "adam lr=1e-2 beta1=0.8 beta2=0.95 weight_decay=0.1 maximize=1",
        "sgd lr=1e-2 weight_decay=0.1",
        "sgd lr=1e-2 momentum=0.9 dampening=0.2 weight_decay=0.1",
        "sgd lr=1e-2 momentum=0.9 nesterov=1 weight_decay=0.1",
        "lion lr=1e-2 beta1=0.8 beta2=0.95 weight_decay=0.1",
        "adagrad lr=1e-2 lr_decay=0.1 weight_decay=0.1",
        "adamw lr=1e-2 beta1=0.5 beta2=0.95 weight_decay=0.1",
        "adam lr=1e-2 beta1=0 beta2=0.95 weight_decay=0.1 maximize=1",
        "muon lr=1e-2 weight_decay=0.1",
    };
    enum ht_kernel kernel = (enum ht_kernel)_i;
    struct ht_optim_config c;
    char err[HT_OPTIM_ERROR_MAX];
    float p = 0.7f, m = 0, v = 0;
    struct truth x = {0.7f, 0, 0};

    ck_assert_int_eq(ht_optim_config_parse(text[_i], strlen(text[_i]), &c, err), 0);
    for (uint64_t t = 1; t <= 100; t++) {
        float g = (float)sin((double)t) + 0.1f;
        struct ht_update u = {&p, NULL, {&m, &v}, &g, HT_DTYPE_F32, HT_DTYPE_F32};
        struct ht_scalars s;
        ht_rule_scalars(&c, t, &s);
        ck_assert_int_eq(s.kernel, kernel);
        ck_assert_uint_eq(ht_kernels_scalar.fn[kernel](&s, &u, 1), 0);
        step_in_double(&x, &c, kernel, g, t);
        ck_assert_msg(fabs(p - x.p) < 2e-6, "step %llu: %.9g is not %.9g", (unsigned long long)t, (double)p, x.p);
    }
}

TEST_LOOP(nonfinite_gradients_are_counted, HT_KERNEL_COUNT)
{
    float p[9] = {0}, m[9] = {0}, v[9] = {0};
    float g[9] = {1, INFINITY, 2, NAN, 3, -INFINITY, 4, 5, NAN};
    struct ht_update a = {p, NULL, {m, v}, g, HT_DTYPE_F32, HT_DTYPE_F32};
    struct ht_scalars s;

    random_scalars(&s, (enum ht_kernel)_i);
    ck_assert_uint_eq(ht_kernels_choose()->fn[_i](&s, &a, 9), 4);
}

TEST_LOOP(sums_of_squares_are_the_same_bits_everywhere, 3)
{
    static struct arrays a;
    uint8_t dtype = dtypes[_i];

    for (unsigned round = 0; round < 400; round++) {
        uint64_t bad[2] = {0}, n = random_next(&rnd) % (HT_SUM_BLOCK + 1);
        fill((uint8_t *)&a, sizeof(a), round & 1);
        double slow = ht_kernels_scalar.sum_squares(a.g, dtype, n, &bad[0]);
        double fast = ht_kernels_choose()->sum_squares(a.g, dtype, n, &bad[1]), plain = 0;
        ck_assert(memcmp(&slow, &fast, 8) == 0 || (isnan(slow) && isnan(fast)));
        ck_assert_uint_eq(bad[0], bad[1]);
        for (uint64_t i = 0; i < n; i++)
            plain += (double)ht_kernel_element(a.g, dtype, i) * (double)ht_kernel_element(a.g, dtype, i);
        ck_assert(!(fabs(slow - plain) > 1e-12 * plain)); /* NaN and infinity pass */
    }
}

/* In pieces of any length, with NaN and signed zeros; the first one is a copy. */
TEST_LOOP(additions_are_the_same_bits_everywhere, 3)
{
    enum { N = 1003 };
    static const uint32_t odd[] = {0x80000000, 0x7fc00001, 0xffc12345, 0x7f800001,
                                   0x7f800000, 0xff800000, 1,          0x80000001};
    uint8_t dtype = (uint8_t)(HT_DTYPE_F32 + _i);
    static uint32_t g[2][N];
    static float sum[N], want[N];

    for (unsigned i = 0; i < 2 * N; i++)
        g[i / N][i % N] = i % 7 ? (uint32_t)random_next(&rnd) : odd[(uint32_t)random_next(&rnd) % HT_ARRAY_SIZE(odd)];
    for (unsigned pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < N; i++) {
            float x = ht_kernel_element(g[pass], dtype, i);
            want[i] = pass ? want[i] + x : x;
        }
        for (size_t i = 0, n; i < N; i += n) {
            n = ht_min_u64(1 + (uint32_t)random_next(&rnd) % 37, N - i);
            ht_kernels_choose()->add(sum + i, (uint8_t *)g[pass] + i * ht_dtype_trained_bytes(dtype), dtype, n, !pass);
        }
        for (size_t i = 0; i < N; i++) {
            uint32_t bits;
            memcpy(&bits, &sum[i], 4);
            ck_assert(isnan(want[i]) ? bits == 0x7fc00000u : !memcmp(&sum[i], &want[i], 4));
        }
    }
}

/* The first phase: the same bits everywhere, in pieces, with wild numbers; and both forms of torch.lerp. */
TEST_LOOP(momentum_is_the_same_bits_everywhere, 3)
{
    static struct arrays a, b;
    uint8_t dtype = dtypes[_i];

    for (unsigned round = 0; round < 400; round++) {
        struct ht_optim_config c = {.rule = HT_RULE_MUON,
                                    .momentum = round % 3 ? 0.95 : 0.25,
                                    .nesterov = round & 1,
                                    .maximize = round & 2,
                                    .grad_scale = round & 4 ? 3 : 1};
        size_t n = random_next(&rnd) % N_MAX, skip = round % 9;
        uint64_t bad = 0;
        struct ht_scalars s;
        ht_rule_scalars(&c, 1, &s);
        fill((uint8_t *)&a, sizeof(a), round & 8);
        memcpy(&b, &a, sizeof(a));
        const uint8_t *g = a.g + skip;
        for (size_t at = 0, part; at < n; at += part) {
            part = ht_min_u64(random_next(&rnd) % 37 + 1, n - at);
            bad += ht_kernels_choose()->stir(&s, (float *)(void *)a.m + at, g + at * ht_dtype_trained_bytes(dtype),
                                             dtype, (uint16_t *)(void *)a.p + at, part);
        }
        ck_assert_uint_eq(
            bad, ht_kernels_scalar.stir(&s, (float *)(void *)b.m, b.g + skip, dtype, (uint16_t *)(void *)b.p, n));
        ck_assert_int_eq(memcmp(&a, &b, sizeof(a)), 0);
    }
}

/* Bits decide, not values; nothing is written far behind the last element. */
static void find_changed(const struct ht_kernels *k, size_t bytes, size_t n, size_t skip, unsigned rate)
{
    static uint8_t was[4 * N_MAX + GUARD], is[4 * N_MAX + GUARD], value[4 * N_MAX + GUARD];
    static uint16_t place[N_MAX + GUARD];
    uint32_t first = (uint32_t)(random_next(&rnd) % (65536 - n));
    size_t found = 0;

    fill(was, sizeof(was), true);
    memcpy(is, was, sizeof(is));
    for (size_t i = 0; i < n; i++) {
        uint8_t *e = is + skip + i * bytes;
        unsigned bit = (unsigned)(random_next(&rnd) % (8 * bytes)); /* also of a sign, and of a NaN */
        e[bit / 8] ^= random_next(&rnd) % 100 < rate ? (uint8_t)(1u << bit % 8) : 0;
    }
    memset(place, 0xee, sizeof(place));
    memset(value, 0xee, sizeof(value));
    size_t count = k->changed(was + skip, is + skip, bytes, n, first, place, value);
    for (size_t i = 0; i < n; i++) {
        if (!memcmp(was + skip + i * bytes, is + skip + i * bytes, bytes))
            continue;
        ck_assert_uint_eq(place[found], first + i);
        ck_assert_mem_eq(value + found * bytes, is + skip + i * bytes, bytes);
        found++;
    }
    ck_assert_uint_eq(count, found);
    ck_assert_uint_eq(place[found + HT_CHANGED_MORE], 0xeeee);
    ck_assert_uint_eq(value[(found + HT_CHANGED_MORE) * bytes], 0xee);
}

TEST_LOOP(changed_elements_are_found_everywhere, 5)
{
    static const unsigned rates[] = {0, 1, 7, 50, 100};
    const struct ht_kernels *avx2 = kernels_of("avx2");

    for (size_t bytes = 2; bytes <= 4; bytes += 2) {
        for (size_t n = 0; n < 140; n++)
            for (size_t skip = 0; skip < 9; skip++)
                find_changed(&ht_kernels_scalar, bytes, n, skip, rates[_i]);
        for (size_t n = 0; n < 140 && avx2; n++)
            for (size_t skip = 0; skip < 9; skip++)
                find_changed(avx2, bytes, n, skip, rates[_i]);
        for (unsigned i = 0; i < ROUNDS; i++)
            find_changed(ht_kernels_choose(), bytes, N_MAX - 9, i % 9, rates[_i]);
    }
}

TEST(f32_becomes_bf16_the_same_everywhere)
{
    static float x[N_MAX];
    static uint16_t half[N_MAX + 1];

    for (unsigned round = 0; round < 40 * ROUNDS; round++) {
        size_t n = round % N_MAX;
        fill((uint8_t *)x, sizeof(x), true);
        memset(half, 0xee, sizeof(half));
        (round & 1 ? &ht_kernels_scalar : ht_kernels_choose())->halve(half, x, n);
        for (size_t i = 0; i < n; i++)
            ck_assert_uint_eq(half[i], ht_f32_to_bf16(x[i]));
        ck_assert_uint_eq(half[n], 0xeeee);
    }
}

TEST_LOOP(products_of_matrices_are_the_same_bits_everywhere, 20)
{
    enum { ROWS = 13, INNER = 37, COLUMNS = 3 * HT_PANEL, WIDE = 41 };
    static float a[ROWS * WIDE], b[INNER * COLUMNS], c[2][ROWS * COLUMNS], panel[INNER * HT_PANEL];
    size_t rows = (size_t)_i % ROWS + 1, inner = (size_t)_i * 2 % INNER + 1;

    for (size_t i = 0; i < HT_ARRAY_SIZE(a); i++)
        a[i] = (float)random_unit() - 0.5f;
    for (size_t i = 0; i < HT_ARRAY_SIZE(b); i++)
        b[i] = (float)random_unit() - 0.5f;
    memset(c, 1, sizeof(c));
    ht_kernels_choose()->matmul(c[0], a, WIDE, b, COLUMNS, rows, inner, panel);
    ht_kernels_scalar.matmul(c[1], a, WIDE, b, COLUMNS, rows, inner, panel);
    ck_assert_int_eq(memcmp(c[0], c[1], sizeof(c[0])), 0); /* and nothing beyond */
    for (size_t i = 0; i < rows; i++) {
        for (size_t j = 0; j < COLUMNS; j++) {
            float sum = 0;
            for (size_t k = 0; k < inner; k++)
                sum = fmaf(a[i * WIDE + k], b[k * COLUMNS + j], sum);
            ck_assert(sum == c[0][i * COLUMNS + j]);
        }
    }
}

static bool never(void *ctx)
{
    (void)ctx;
    return false;
}

static bool at_once(void *ctx)
{
    (void)ctx;
    return true;
}

/*
 * Wide, tall and square: the same bits everywhere; and what 20 steps of the cubic iteration make has orthogonal rows.
 */
TEST_LOOP(newton_schulz_makes_orthogonal_rows, 4)
{
    static const uint32_t shape[][2] = {{7, 50}, {50, 7}, {24, 24}, {1, 33}};
    uint32_t rows = shape[_i][0], columns = shape[_i][1], m = rows < columns ? rows : columns;
    struct ht_optim_config c = {.ns_a = 1.5, .ns_b = -0.5, .ns_steps = 40, .eps = 1e-7};
    size_t n = (size_t)rows * columns;
    static uint16_t u[2][2500];

    for (size_t i = 0; i < n; i++)
        u[0][i] = u[1][i] = ht_f32_to_bf16((float)random_unit() - 0.5f);
    ck_assert_int_eq(ht_newton_schulz(ht_kernels_choose(), &c, u[0], rows, columns, never, NULL), 0);
    ck_assert_int_eq(ht_newton_schulz(&ht_kernels_scalar, &c, u[1], rows, columns, never, NULL), 0);
    ck_assert_mem_eq(u[0], u[1], n * 2);
    ck_assert_int_eq(ht_newton_schulz(ht_kernels_choose(), &c, u[1], rows, columns, at_once, NULL), -ECANCELED);
    for (uint32_t i = 0; i < m; i++) {
        for (uint32_t j = 0; j < m; j++) {
            double dot = 0;
            for (uint32_t k = 0; k < n / m; k++) {
                size_t x = rows > columns ? k * columns + i : i * columns + k;
                size_t y = rows > columns ? k * columns + j : j * columns + k;
                dot += (double)ht_bf16_to_f32(u[0][x]) * (double)ht_bf16_to_f32(u[0][y]);
            }
            ck_assert_msg(fabs(dot - (i == j)) < 0.03, "%u, %u: %g", i, j, dot);
        }
    }
    memset(u, 0, sizeof(u)); /* |u| is below eps */
    ck_assert_int_eq(ht_newton_schulz(ht_kernels_choose(), &c, u[0], rows, columns, never, NULL), 0);
    ck_assert_mem_eq(u[0], u[1], n * 2);
}

TEST_LOOP(momentum_follows_its_formula, 4)
{
    struct ht_optim_config c = {
        .rule = HT_RULE_MUON, .momentum = _i & 1 ? 0.95 : 0.25, .nesterov = _i & 2, .grad_scale = 1};
    struct ht_scalars s;
    float m = 0;
    double want = 0;

    ht_rule_scalars(&c, 1, &s);
    for (unsigned t = 1; t <= 100; t++) {
        float g = sinf((float)t);
        uint16_t u;
        ck_assert_uint_eq(ht_kernels_choose()->stir(&s, &m, &g, HT_DTYPE_F32, &u, 1), 0);
        want = c.momentum * want + (1 - c.momentum) * (double)g;
        ck_assert(fabs(want - (double)m) < 1e-6);
        double mixed = c.nesterov ? (1 - c.momentum) * (double)g + c.momentum * want : want;
        ck_assert(fabs(mixed - (double)ht_bf16_to_f32(u)) < 1e-6 + fabs(mixed) / 256);
    }
}

TEST(a_parameter_loaded_from_outside_is_believed)
{
    struct ht_optim_config still = {.rule = HT_RULE_ADAMW, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .grad_scale = 1};
    struct ht_scalars s;

    ht_rule_scalars(&still, 1, &s);
    for (unsigned i = 0; i < 2; i++) {
        uint8_t dtype = dtypes[1 + i];
        uint16_t p[2] = {dtype == HT_DTYPE_BF16 ? ht_f32_to_bf16(1.0f) : ht_f32_to_f16(1.0f),
                         dtype == HT_DTYPE_BF16 ? ht_f32_to_bf16(2.0f) : ht_f32_to_f16(2.0f)};
        float master[2] = {1.0001f, 7.0f}, m[2] = {0}, v[2] = {0}, g[2] = {0};
        struct ht_update a = {p, master, {m, v}, g, dtype, HT_DTYPE_F32};
        ht_kernels_scalar.fn[s.kernel](&s, &a, 2);
        ck_assert(master[0] == 1.0001f); /* rounds to p: kept */
        ck_assert(master[1] == 2.0f);    /* does not: p wins */
    }
}

/* Round to nearest even, by arithmetic in double instead of bits. */
static uint16_t slow_bf16(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, 4);
    if (isnan(x))
        return (uint16_t)(bits >> 16 | 0x40);
    uint16_t down = (uint16_t)(bits >> 16), up = (uint16_t)(down + 1);
    if ((down & 0x7f80) == 0x7f80)
        return down;
    double below = ht_bf16_to_f32(down), above = ht_bf16_to_f32(up);
    if (isinf(above)) /* the place of the next number, if there were one */
        above = 2 * below - (double)ht_bf16_to_f32((uint16_t)(down - 1));
    double to_down = fabs((double)x - below), to_up = fabs(above - (double)x);
    if (to_down == to_up)
        return down & 1 ? up : down;
    return to_down < to_up ? down : up;
}

TEST(bf16_rounds_to_nearest_even)
{
    unsigned wrong = 0;

    for (unsigned i = 0; i < 2000000; i++) {
        uint32_t bits = i & 1 ? wild_bits() : (uint32_t)random_next(&rnd) << 15;
        float x;
        memcpy(&x, &bits, 4);
        wrong += ht_f32_to_bf16(x) != slow_bf16(x);
    }
    for (uint32_t h = 0; h < 65536; h++) {
        float x = ht_bf16_to_f32((uint16_t)h);
        wrong += isnan(x) ? !isnan(ht_bf16_to_f32(ht_f32_to_bf16(x))) : ht_f32_to_bf16(x) != h;
    }
    ck_assert_uint_eq(wrong, 0);
}

/* By arithmetic in double: the nearest multiple of the unit in the last place of f16 at x, half to even. */
static uint16_t slow_f16(float x)
{
    uint16_t sign = signbit(x) ? 0x8000 : 0;
    double a = fabs((double)x), unit, scaled;
    int exponent;

    if (isnan(x) || isinf(x))
        return (uint16_t)(sign | 0x7c00);
    if (a == 0)
        return sign;
    (void)frexp(a, &exponent);
    unit = ldexp(1, (exponent < -13 ? -13 : exponent) - 11);
    scaled = nearbyint(a / unit);
    if (scaled * unit >= 65536)
        return (uint16_t)(sign | 0x7c00);
    if (exponent < -13)
        return (uint16_t)(sign | (uint16_t)scaled);
    return (uint16_t)(sign | (uint16_t)(((unsigned)(exponent + 13) << 10) + (unsigned)scaled));
}

TEST(f16_rounds_to_nearest_even)
{
    unsigned wrong = 0;

    for (unsigned i = 0; i < 2000000; i++) {
        /* Any bits, and numbers of the range in which f16 has something to round. */
        uint32_t bits = i & 1 ? wild_bits() : ((uint32_t)random_next(&rnd) & 0x9fffffffu) + 0x2f000000u;
        float x;
        bits = i % 4 ? bits : bits & ~0xfffu;
        memcpy(&x, &bits, 4);
        wrong += isnan(x) ? (ht_f32_to_f16(x) & 0x7e00) != 0x7e00 : ht_f32_to_f16(x) != slow_f16(x);
    }
    for (uint32_t h = 0; h < 65536; h++) {
        float x = ht_f16_to_f32((uint16_t)h);
        wrong += isnan(x) ? !isnan(ht_f16_to_f32(ht_f32_to_f16(x))) : ht_f32_to_f16(x) != h;
    }
    ck_assert_uint_eq(wrong, 0);
}

TEST(the_environment_chooses_the_kernel)
{
    setenv("HITRAIN_KERNEL", "scalar", 1);
    ck_assert_ptr_eq(ht_kernels_choose(), &ht_kernels_scalar);
    ck_assert_str_eq(ht_kernels_choose()->name, "scalar");
    setenv("HITRAIN_KERNEL", "fastest", 1);
    ck_assert_ptr_nonnull(ht_kernels_choose());
    setenv("HITRAIN_KERNEL", "avx512", 1);
    ck_assert_ptr_nonnull(ht_kernels_choose());
#if defined(__x86_64__)
    setenv("HITRAIN_KERNEL", "avx2", 1);
    ck_assert_ptr_eq(ht_kernels_choose(), kernels_of("avx2") ? &ht_kernels_avx2 : &ht_kernels_scalar);
#endif
}

RUN_TESTS("kernel", .timeout_s = 300)
