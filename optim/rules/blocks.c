/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/rules/blocks.h"

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
