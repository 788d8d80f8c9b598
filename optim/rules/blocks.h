/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.h - the blocks of a parameter of muon: the parts that are orthogonalised each alone.
 * Pure functions, any thread.
 *
 * A shape m,n is a matrix; E,m,n are E matrices, one after the other. muon_split cuts the rows of each into blocks.
 *
 * The orthogonal matrix near a block is as torch.optim.Muon computes it (arXiv:2409.20325, 4.1):
 *
 *   X = u / max(|u|, eps)            |u|: Frobenius norm; u transposed if it has more rows than columns
 *   ns_steps times:  A = X X'        X = a X + (b A + c A A) X
 *
 * Matrices are rounded to bf16 after each product, as there. Every element of a product is a sum in f32, by fused
 * multiply-adds in ascending order of the inner index. So bits depend neither on threads nor on the instruction set;
 * those of PyTorch's BLAS differ in the order.
 */
#pragma once

#include "optim/rules/config.h"
#include "optim/rules/kernel.h"

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
/* Bytes of memory that one block takes meanwhile, beside u. */
uint64_t ht_newton_schulz_bytes(uint64_t rows, uint64_t columns);
/*
 * u: rows x columns in bf16, replaced by the result. stop: asked between products; true: -ECANCELED, with u as it was
 * or half done. -ENOMEM.
 */
int ht_newton_schulz(const struct ht_kernels *kernels, const struct ht_optim_config *c, uint16_t *u, uint32_t rows,
                     uint32_t columns, bool (*stop)(void *ctx), void *ctx) HT_MUST_CHECK;
