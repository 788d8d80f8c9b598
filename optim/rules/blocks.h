/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.h - the blocks of a parameter of muon: the parts that are orthogonalised each alone.
 * Pure functions, any thread.
 *
 * A shape m,n is a matrix; E,m,n are E matrices, one after the other. muon_split cuts the rows of each into blocks.
 */
#pragma once

#include "optim/rules/sections.h"

enum { HT_BLOCKS_SECTIONS_MAX = 8192 };

/*
 * Gives the configuration of a parameter its matrix. Blocks with other rows than the first one get sections, as their
 * learning rate is another one; the caller frees them, also after an error. -EINVAL: that shape is none for muon, or
 * has other rows than muon_split; with a message in err. -ENOMEM.
 */
int ht_muon_blocks(const uint64_t *dim, unsigned dims, struct ht_optim_config *config,
                   struct ht_optim_sections *sections, char err[HT_OPTIM_ERROR_MAX]) HT_MUST_CHECK;
/* Calls fn for each block with its first element, in their order, until it returns an error. */
int ht_muon_each_block(const struct ht_optim_config *config, int (*fn)(void *ctx, uint64_t first, uint32_t rows),
                       void *ctx) HT_MUST_CHECK;
