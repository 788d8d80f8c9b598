/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/rules/newton_schulz.h"

#include <math.h>

/* m <= n. Rows are padded with zeros to whole panels, so that products have no tails. */
struct work {
    const struct ht_kernels *kernels;
    size_t m, n, m_wide, n_wide;        /* wide: floats from row to row */
    float *x, *across, *gram, *product; /* X, its transpose; A; a product of any of these */
    float *panel;
};

static size_t wide(size_t n)
{
    return ht_round_up(n, HT_PANEL);
}

uint64_t ht_newton_schulz_bytes(uint64_t rows, uint64_t columns)
{
    uint64_t m = ht_min_u64(rows, columns), n = ht_max_u64(rows, columns);

    return 4 * (2 * m * wide(n) + n * wide(m) + m * wide(m) + n * HT_PANEL);
}

static float round_bf16(float x)
{
    return ht_bf16_to_f32(ht_f32_to_bf16(x));
}

static double norm_of(const struct ht_kernels *kernels, const uint16_t *u, size_t count)
{
    double sum = 0;
    uint64_t nonfinite = 0;

    for (size_t i = 0; i < count; i += HT_SUM_BLOCK)
        sum += kernels->sum_squares(u + i, HT_DTYPE_BF16, ht_min_u64(HT_SUM_BLOCK, count - i), &nonfinite);
    return sqrt(sum);
}

static bool begin(struct work *w, size_t rows, size_t columns)
{
    w->m = ht_min_u64(rows, columns);
    w->n = ht_max_u64(rows, columns);
    w->m_wide = wide(w->m);
    w->n_wide = wide(w->n);
    w->x = calloc(1, ht_newton_schulz_bytes(rows, columns));
    if (!w->x)
        return false;
    w->product = w->x + w->m * w->n_wide;
    w->across = w->product + w->m * w->n_wide;
    w->gram = w->across + w->n * w->m_wide;
    w->panel = w->gram + w->m * w->m_wide;
    return true;
}

static void load(struct work *w, const uint16_t *u, bool turned, double norm, double eps)
{
    float divisor = fmaxf(round_bf16((float)norm), round_bf16((float)eps));

    if (isnan(norm)) /* fmaxf would take the other one */
        divisor = NAN;
    for (size_t i = 0; i < w->m; i++)
        for (size_t j = 0; j < w->n; j++)
            w->x[i * w->n_wide + j] = round_bf16(ht_bf16_to_f32(turned ? u[j * w->m + i] : u[i * w->n + j]) / divisor);
}

static void store(const struct work *w, uint16_t *u, bool turned)
{
    for (size_t i = 0; i < w->m; i++)
        for (size_t j = 0; j < w->n; j++)
            u[turned ? j * w->m + i : i * w->n + j] = ht_f32_to_bf16(w->x[i * w->n_wide + j]);
}

/* product = a b, with so many rows, inner elements and floats in a row of the result. */
static void multiply(struct work *w, const float *a, size_t a_wide, const float *b, size_t b_wide, size_t inner)
{
    w->kernels->matmul(w->product, a, a_wide, b, b_wide, w->m, inner, w->panel);
}

/* to = beta to + alpha product, in bf16. */
static void mix(const struct work *w, float *to, size_t width, double beta, double alpha)
{
    for (size_t i = 0; i < w->m * width; i++)
        to[i] = round_bf16(fmaf((float)alpha, w->product[i], (float)beta * to[i]));
}

static void turn(struct work *w)
{
    for (size_t i = 0; i < w->m; i++)
        for (size_t j = 0; j < w->n; j++)
            w->across[j * w->m_wide + i] = w->x[i * w->n_wide + j];
}

int ht_newton_schulz(const struct ht_kernels *kernels, const struct ht_optim_config *c, uint16_t *u, uint32_t rows,
                     uint32_t columns, bool (*stop)(void *ctx), void *ctx)
{
    struct work w = {.kernels = kernels};
    bool turned = rows > columns;
    int rc = begin(&w, rows, columns) ? 0 : -ENOMEM;

    if (!rc)
        load(&w, u, turned, norm_of(kernels, u, (size_t)rows * columns), c->eps);
    for (uint32_t i = 0; !rc && i < c->ns_steps; i++) {
        turn(&w);
        multiply(&w, w.x, w.n_wide, w.across, w.m_wide, w.n);
        mix(&w, w.gram, w.m_wide, 0, 1);
        rc = stop(ctx) ? -ECANCELED : 0;
        if (rc)
            break;
        multiply(&w, w.gram, w.m_wide, w.gram, w.m_wide, w.m);
        mix(&w, w.gram, w.m_wide, c->ns_b, c->ns_c);
        multiply(&w, w.gram, w.m_wide, w.x, w.n_wide, w.m);
        mix(&w, w.x, w.n_wide, c->ns_a, 1);
        rc = stop(ctx) ? -ECANCELED : 0;
    }
    if (!rc)
        store(&w, u, turned);
    free(w.x);
    return rc;
}
