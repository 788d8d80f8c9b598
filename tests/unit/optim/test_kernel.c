/* SPDX-License-Identifier: Apache-2.0 */
/* Every kernel equals the scalar one bit for bit, whatever the values, lengths and addresses; bf16 conversion is exact. */
#include <check.h>
#include <math.h>
#include <stdlib.h>

#include "optim/kernel.h"

enum { N_MAX = 1031, GUARD = 64, ROUNDS = 60 };

static uint64_t rnd = 88172645463325252ull;

static uint64_t next_random(void)
{
    rnd ^= rnd << 13;
    rnd ^= rnd >> 7;
    rnd ^= rnd << 17;
    return rnd;
}

/* All kinds of numbers: any bits, subnormals, specials, and ordinary ones. */
static uint32_t wild_bits(void)
{
    static const uint32_t special[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001,
                                       0x7f800001, 0x7f7fffff, 0x00000001, 0x00800000, 0x3f800000, 0x3f808000};
    uint64_t r = next_random();

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
    return ((uint32_t)next_random() & 0x83ffffffu) | 0x38000000u;
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

static struct ht_adamw_arrays view(struct arrays *a, uint8_t p_dtype, uint8_t g_dtype, size_t skip)
{
    size_t p_size = p_dtype == HT_DTYPE_BF16 ? 2 : 4, g_size = g_dtype == HT_DTYPE_BF16 ? 2 : 4;

    return (struct ht_adamw_arrays){
        .p = a->p + skip * p_size,
        .master = p_dtype == HT_DTYPE_BF16 ? (float *)(void *)(a->master + skip * 4) : NULL,
        .m = (float *)(void *)(a->m + skip * 4),
        .v = (float *)(void *)(a->v + skip * 4),
        .g = a->g + skip * g_size,
        .p_dtype = p_dtype,
        .g_dtype = g_dtype,
    };
}

/* Half of the masters agree with their parameter, as they do in a real run. */
static void round_some(struct ht_adamw_arrays *a, size_t n)
{
    for (size_t i = 0; a->master && i < n; i += 2) {
        uint16_t half = ht_f32_to_bf16(a->master[i]);
        memcpy((uint8_t *)a->p + 2 * i, &half, 2);
    }
}

static void random_scalars(struct ht_adamw_scalars *s)
{
    ht_adamw_scalars(s, (double)(next_random() % 1000) * 1e-5, (double)(next_random() % 1000) / 1000,
                     (double)(next_random() % 1000) / 1000, 1e-8, (double)(next_random() % 100) * 1e-3,
                     next_random() & 1, next_random() % 100000 + 1);
}

static void compare(ht_adamw_fn kernel, uint8_t p_dtype, uint8_t g_dtype, size_t n, size_t skip, bool wild)
{
    static _Alignas(64) struct arrays a, b;
    struct ht_adamw_scalars s;
    struct ht_adamw_arrays va = view(&a, p_dtype, g_dtype, skip), vb = view(&b, p_dtype, g_dtype, skip);

    fill((uint8_t *)&a, sizeof(a), wild);
    for (size_t i = 0; !wild && i < N_MAX; i++)
        a.v[4 * i + 3] &= 0x7f;
    round_some(&va, n);
    memcpy(&b, &a, sizeof(a));
    random_scalars(&s);
    ck_assert_uint_eq(kernel(&s, &va, n), ht_adamw_scalar(&s, &vb, n));
    /* All of it: nothing beyond n was touched either. */
    ck_assert_int_eq(memcmp(&a, &b, sizeof(a)), 0);
}

static void compare_all(ht_adamw_fn kernel, uint8_t p_dtype, uint8_t g_dtype)
{
    for (size_t n = 0; n < 70; n++) {
        for (size_t skip = 0; skip < 9; skip++)
            compare(kernel, p_dtype, g_dtype, n, skip, (n + skip) & 1);
    }
    for (unsigned i = 0; i < ROUNDS; i++)
        compare(kernel, p_dtype, g_dtype, N_MAX - 9, i % 9, i & 1);
}

#if defined(__x86_64__)
static bool have_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

START_TEST(avx2_equals_scalar)
{
    static const uint8_t dtype[] = {HT_DTYPE_F32, HT_DTYPE_BF16};

    if (have_avx2())
        compare_all(ht_adamw_avx2, dtype[_i & 1], dtype[_i >> 1]);
}
END_TEST
#endif

START_TEST(a_run_in_pieces_equals_a_run_at_once)
{
    static struct arrays a, b;
    struct ht_adamw_scalars s;
    const char *name;
    ht_adamw_fn kernel = ht_adamw_choose(&name);

    fill((uint8_t *)&a, sizeof(a), true);
    memcpy(&b, &a, sizeof(a));
    random_scalars(&s);
    struct ht_adamw_arrays whole = view(&a, HT_DTYPE_BF16, HT_DTYPE_F32, 0);
    uint64_t nonfinite = kernel(&s, &whole, 1000), sum = 0;
    for (size_t at = 0, n; at < 1000; at += n) {
        struct ht_adamw_arrays piece = view(&b, HT_DTYPE_BF16, HT_DTYPE_F32, at);
        n = ht_min_u64(next_random() % 37 + 1, 1000 - at);
        sum += kernel(&s, &piece, n);
    }
    ck_assert_uint_eq(nonfinite, sum);
    ck_assert_int_eq(memcmp(&a, &b, sizeof(a)), 0);
}
END_TEST

START_TEST(nonfinite_gradients_are_counted)
{
    float p[9] = {0}, m[9] = {0}, v[9] = {0};
    float g[9] = {1, INFINITY, 2, NAN, 3, -INFINITY, 4, 5, NAN};
    struct ht_adamw_arrays a = {p, NULL, m, v, g, HT_DTYPE_F32, HT_DTYPE_F32};
    struct ht_adamw_scalars s;

    ht_adamw_scalars(&s, 1e-3, 0.9, 0.999, 1e-8, 0, false, 1);
    ck_assert_uint_eq(ht_adamw_choose(NULL)(&s, &a, 9), 4);
}
END_TEST

START_TEST(a_parameter_loaded_from_outside_is_believed)
{
    uint16_t p[2] = {ht_f32_to_bf16(1.0f), ht_f32_to_bf16(2.0f)};
    float master[2] = {1.001f, 7.0f}, m[2] = {0}, v[2] = {0}, g[2] = {0};
    struct ht_adamw_arrays a = {p, master, m, v, g, HT_DTYPE_BF16, HT_DTYPE_F32};
    struct ht_adamw_scalars s;

    ht_adamw_scalars(&s, 0, 0.9, 0.999, 1e-8, 0, false, 1);
    ht_adamw_scalar(&s, &a, 2);
    ck_assert(master[0] == 1.001f); /* rounds to p: kept */
    ck_assert(master[1] == 2.0f);   /* does not: p wins */
}
END_TEST

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
    if (isinf(above)) /* where the next number would be, were there one */
        above = 2 * below - (double)ht_bf16_to_f32((uint16_t)(down - 1));
    double to_down = fabs((double)x - below), to_up = fabs(above - (double)x);
    if (to_down == to_up)
        return down & 1 ? up : down;
    return to_down < to_up ? down : up;
}

START_TEST(bf16_rounds_to_nearest_even)
{
    unsigned wrong = 0;

    for (unsigned i = 0; i < 2000000; i++) {
        uint32_t bits = i & 1 ? wild_bits() : (uint32_t)next_random() << 15;
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
END_TEST

START_TEST(the_environment_chooses_the_kernel)
{
    const char *name;

    setenv("HITRAIN_KERNEL", "scalar", 1);
    ck_assert(ht_adamw_choose(&name) == ht_adamw_scalar);
    ck_assert_str_eq(name, "scalar");
    setenv("HITRAIN_KERNEL", "fastest", 1);
    ck_assert_ptr_nonnull(ht_adamw_choose(&name));
#if defined(__x86_64__)
    setenv("HITRAIN_KERNEL", "avx2", 1);
    ck_assert(ht_adamw_choose(&name) == (have_avx2() ? ht_adamw_avx2 : ht_adamw_scalar));
#endif
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("kernel");
    TCase *t = tcase_create("all");

    tcase_set_timeout(t, 300);
#if defined(__x86_64__)
    tcase_add_loop_test(t, avx2_equals_scalar, 0, 4);
#endif
    tcase_add_test(t, a_run_in_pieces_equals_a_run_at_once);
    tcase_add_test(t, nonfinite_gradients_are_counted);
    tcase_add_test(t, a_parameter_loaded_from_outside_is_believed);
    tcase_add_test(t, bf16_rounds_to_nearest_even);
    tcase_add_test(t, the_environment_chooses_the_kernel);
    suite_add_tcase(suite, t);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
