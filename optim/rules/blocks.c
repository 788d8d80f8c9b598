/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/rules/blocks.h"

#include <math.h>

typedef unsigned long long ull;

enum { DIM_MAX = 1 << 30 };
#define ELEMENTS_MAX ((1ull << 32) - 1) /* coverage of orthogonalised updates is counted in 32 bits */

static int find_matrix(const uint64_t *dim, unsigned dims, struct ht_matrix *out, char err[HT_OPTIM_ERROR_MAX])
{
    if (dims != 2 && dims != 3)
        return ht_optim_refuse(
            err, -EINVAL,
            "muon needs a matrix, or a stack of matrices: a shape has 2 or 3 dimensions, not %u; give the file words "
            "of another rule, as in adamw lr=3e-4",
            dims);
    uint64_t count = dims == 3 ? dim[0] : 1, rows = dim[dims - 2], columns = dim[dims - 1];
    if (!rows || !columns || !count || rows > DIM_MAX || columns > DIM_MAX || count > DIM_MAX ||
        rows * columns > ELEMENTS_MAX / count)
        return ht_optim_refuse(err, -EINVAL,
                               "muon: a matrix has 1 to 2^30 rows and columns, and fewer than 2^32 elements in all");
    *out = (struct ht_matrix){
        .rows = (uint32_t)rows, .columns = (uint32_t)columns, .count = (uint32_t)count, .block_rows = (uint32_t)rows};
    return 0;
}

/* Splits of the same number of rows as the first one need no section. */
static size_t sections_of(const struct ht_muon_split *split, uint64_t *out_rows)
{
    size_t others = 0;

    *out_rows = 0;
    for (uint32_t i = 0; i < split->count; i++) {
        *out_rows += (uint64_t)split->of[i].rows * split->of[i].times;
        others += split->of[i].rows != split->of[0].rows;
    }
    return others;
}

static void put_sections(const struct ht_optim_config *config, struct ht_optim_sections *to)
{
    const struct ht_muon_split *split = &config->muon_split;
    uint64_t row = 0;

    for (uint32_t k = 0; k < config->matrix.count; k++) {
        for (uint32_t i = 0; i < split->count; i++) {
            uint64_t end = row + (uint64_t)split->of[i].rows * split->of[i].times;
            if (split->of[i].rows != split->of[0].rows) {
                struct ht_optim_section *s = &to->section[to->count++];
                *s = (struct ht_optim_section){row * config->matrix.columns, end * config->matrix.columns, *config};
                s->config.matrix.block_rows = split->of[i].rows;
            }
            row = end;
        }
    }
}

int ht_muon_blocks(const uint64_t *dim, unsigned dims, struct ht_optim_config *config,
                   struct ht_optim_sections *sections, char err[HT_OPTIM_ERROR_MAX])
{
    const struct ht_muon_split *split = &config->muon_split;
    uint64_t rows;
    int rc = find_matrix(dim, dims, &config->matrix, err);

    if (rc)
        return rc;
    if (sections->count)
        return ht_optim_refuse(err, -EINVAL,
                               "muon takes whole blocks, so it has no words for ranges of elements; see muon_split");
    size_t others = sections_of(split, &rows) * config->matrix.count;
    if (split->count && rows != config->matrix.rows)
        return ht_optim_refuse(err, -EINVAL, "muon_split: its blocks have %llu rows together, and the matrix has %u",
                               (ull)rows, config->matrix.rows);
    if (split->count)
        config->matrix.block_rows = split->of[0].rows;
    if (others > HT_BLOCKS_SECTIONS_MAX)
        return ht_optim_refuse(err, -EINVAL,
                               "muon_split: a parameter has at most 8192 blocks of other rows than its first one");
    sections->section = others ? calloc(others, sizeof(*sections->section)) : NULL;
    if (others && !sections->section)
        return -ENOMEM;
    if (others)
        put_sections(config, sections);
    return 0;
}

int ht_muon_each_block(const struct ht_optim_config *config, int (*fn)(void *ctx, uint64_t first, uint32_t rows),
                       void *ctx)
{
    const struct ht_muon_split whole = {.count = 1, .of = {{config->matrix.rows, 1}}};
    const struct ht_muon_split *split = config->muon_split.count ? &config->muon_split : &whole;
    uint64_t row = 0;
    int rc = 0;

    for (uint32_t k = 0; k < config->matrix.count; k++) {
        for (uint32_t i = 0; i < split->count; i++)
            for (uint32_t n = 0; !rc && n < split->of[i].times; n++, row += split->of[i].rows)
                rc = fn(ctx, row * config->matrix.columns, split->of[i].rows);
    }
    return rc;
}

/* ----------------------------------------------------------- newton-schulz */

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
