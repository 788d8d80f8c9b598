/* SPDX-License-Identifier: Apache-2.0 */
/*
 * newton_schulz.h - the orthogonal matrix near a given one, as torch.optim.Muon computes it (arXiv:2409.20325, 4.1):
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

/* Bytes of memory that one block takes meanwhile, beside u. */
uint64_t ht_newton_schulz_bytes(uint64_t rows, uint64_t columns);
/*
 * u: rows x columns in bf16, replaced by the result. stop: asked between products; true: -ECANCELED, with u as it was
 * or half done. -ENOMEM.
 */
int ht_newton_schulz(const struct ht_kernels *kernels, const struct ht_optim_config *c, uint16_t *u, uint32_t rows,
                     uint32_t columns, bool (*stop)(void *ctx), void *ctx) HT_MUST_CHECK;
