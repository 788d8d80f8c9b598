/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/rules/need.h"

#include "optim/rules/rule.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

enum {
    OWN_BYTES = 12 << 20, /* superblocks, alignment of the log, and a reserve */
    LOG_SHARE = 16,       /* of the store, both copies together */
    LOOSE_SHARE = 24,     /* of the content: space that is free in pieces */
    TENSOR_BLOCKS =
        5, /* of each tensor and rewrite, since the last block of each object is not full; 1 of a gradient */
    MASTER_RANGE = 1u << 20, /* elements whose masters in two bytes have 64 KiB of facts */
    MASTER_FACTS = 64u << 10,
};
typedef unsigned __int128 sum;

#define ELEMENTS_MAX (UINT64_C(1) << 46)

/* Of 16 elements, so that facts on masters are whole bytes. */
static uint64_t content_bytes(uint8_t dtype, const struct ht_optim_config *c)
{
    /* With 8 bits, a scale of 4 bytes for 256 elements. */
    uint64_t state = c->state_bits == 8 ? 16 + 1 : 2ull * c->state_bits;
    /* Muon has the state of adamw where it is not for matrices: which is which is not known here. */
    uint64_t states = state * (c->rule == HT_RULE_MUON ? 2 : ht_kernel_states(ht_rule_kernel(c)));
    uint64_t own = dtype == HT_DTYPE_F32 ? 4 : 2;
    uint64_t master = dtype == HT_DTYPE_F32 ? 0 : dtype == HT_DTYPE_BF16 ? 2 : 4;
    uint64_t facts = dtype == HT_DTYPE_BF16 ? 16ull * MASTER_FACTS / MASTER_RANGE * 2 : 0;

    return 16 * (own + master) + states + facts;
}

static uint64_t gradients(const struct ht_optim_config *c)
{
    return c->redo ? 1ull + c->durable_every + c->redo_keep : 1;
}

uint64_t ht_need_bytes(const struct ht_need *n, const struct ht_optim_config *c)
{
    uint64_t gradient = n->dtype == HT_DTYPE_F32 || c->accumulate > 1 ? 4 : 2;
    /* The oldest kept step goes when a newer one is there, and its space is free a commit later. */
    uint64_t kept = c->retain ? c->retain + 2ull : 0;
    uint64_t times = 2 + kept; /* a mount computes logged steps again in the space of the next rewrite */
    /* Muon: what is orthogonalised, and the result, of two bytes each; the result is logged. */
    uint64_t between = c->rule == HT_RULE_MUON ? 2 + 2 * gradients(c) : 0;
    uint64_t sixteen = content_bytes(n->dtype, c) * times + 16 * (gradient * gradients(c) + between);
    sum all = n->elements / 16 + 1;

    all *= sixteen;
    all += (sum)n->tensors * HT_BLOCK_BYTES * (TENSOR_BLOCKS * times + gradients(c));
    all += all / LOOSE_SHARE + OWN_BYTES;
    all = all * LOG_SHARE / (LOG_SHARE - 1);
    all = (all + HT_MIB - 1) / HT_MIB * HT_MIB;
    return n->elements > ELEMENTS_MAX || all > INT64_MAX ? UINT64_MAX : (uint64_t)all;
}

uint64_t ht_need_tensors(uint64_t elements)
{
    return ht_min_u64(1000, elements / 65536 + 1);
}

uint64_t ht_need_elements(uint64_t bytes, uint8_t dtype, const struct ht_optim_config *c)
{
    uint64_t low = 0, high = ELEMENTS_MAX; /* low does, or nothing does */

    while (low + 1 < high) {
        struct ht_need n = {.elements = low + (high - low) / 2, .dtype = dtype};
        n.tensors = ht_need_tensors(n.elements);
        if (ht_need_bytes(&n, c) <= bytes)
            low = n.elements;
        else
            high = n.elements;
    }
    return low;
}
