/* SPDX-License-Identifier: Apache-2.0 */
/*
 * forms.h - the forms in which state is kept: f32, or fewer bits.
 *
 * A range of a parameter has its codes first, then, from a multiple of 64 bytes on, the scales of its blocks: one f32
 * for each. Blocks count from the first element of the range, and only the last one may be short.
 *
 *   f32      the state as it is.
 *   bf16     the upper half. An update rounds up with the probability of the bits that are cut, so that the
 *            rounding has no bias: nearest would keep a second moment at beta2 = 0.999 where it is, because a decay of
 *            a thousandth is less than half a step of bf16. The chance is a hash of salt, kind, step and element. So a
 *            replay rounds alike. Values of clients are rounded to nearest even.
 *   dynamic  blocks of 256 elements with the largest magnitude as scale, and the codes of the dynamic map (Dettmers et
 *            al., arXiv:2110.02861, section 2.1; create_dynamic_map of bitsandbytes) with seven decades: signed, with
 *            -1 for its lowest value, or unsigned for state that is never negative. Unsigned codes ascend with their
 *            values. A signed code is a byte in two's complement, but 128 is 1.0 (forms_loop.h).
 *   linear   blocks of 2,048 elements, code = 127 x / scale to nearest even (for Muon: arXiv:2509.23106).
 *
 * In dynamic blocks an element gets the nearest code. In the middle between two codes, and up to 2^-20 of the value
 * above it, it gets the one of lower magnitude. The element with the largest magnitude is exact. A positive element of
 * the unsigned map never gets code 0: a second moment of zero beside a first moment that is none would make a step
 * without bound. A block that is encoded again after it was decoded has the same values, and the same codes if its
 * scale is 0 or at least 2^-96: below that two codes may have one value. If an element is NaN or
 * infinite the scale of its block is NaN, and so are all of its elements.
 *
 * All codecs give the same bits for the same input. Pure functions, any thread.
 */
#pragma once

#include "tiering/base/base.h"

/* Numbers are on disk. */
enum ht_form { HT_FORM_F32 = 0, HT_FORM_BF16 = 1, HT_FORM_DYNAMIC = 2, HT_FORM_LINEAR = 3, HT_FORMS };
enum {
    HT_FORM_SCALES_ALIGN = 64,
    HT_FORM_BLOCK_DYNAMIC = 256,
    HT_FORM_BLOCK_LINEAR = 2048,
    HT_FORM_WINDOW = 2048, /* elements; whole blocks of each form */
};

/* Elements of a block, which has one scale; 1: there are no scales. */
static inline uint32_t ht_form_block(unsigned form)
{
    return form == HT_FORM_DYNAMIC ? HT_FORM_BLOCK_DYNAMIC : form == HT_FORM_LINEAR ? HT_FORM_BLOCK_LINEAR : 1;
}

static inline uint64_t ht_form_code_bytes(unsigned form, uint64_t elements)
{
    return form == HT_FORM_F32 ? elements * 4 : form == HT_FORM_BF16 ? elements * 2 : elements;
}

/* Where the scales of a range of so many elements begin. */
static inline uint64_t ht_form_scales_at(unsigned form, uint64_t elements)
{
    return ht_round_up(ht_form_code_bytes(form, elements), HT_FORM_SCALES_ALIGN);
}

/* Bytes of a range of so many elements. */
static inline uint64_t ht_form_bytes(unsigned form, uint64_t elements)
{
    uint32_t block = ht_form_block(form);

    if (block == 1 || !elements)
        return ht_form_code_bytes(form, elements);
    return ht_form_scales_at(form, elements) + ht_div_up(elements, block) * sizeof(float);
}

/* Elements in a form: where they are, and what their rounding depends on. */
struct ht_coded {
    uint8_t *codes;   /* of the first element, which begins a block */
    float *scales;    /* of its block; not used by forms without scales */
    size_t n;         /* of a range's last block what it has; else whole blocks */
    uint8_t kind;     /* enum ht_state_kind: decides between signed and unsigned, too */
    bool nearest;     /* bf16: the value of a client, so the fields below do not count */
    uint32_t salt;    /* of the parameter's state */
    uint64_t t;       /* the parameter's count of steps, with the one that made the values */
    uint64_t element; /* the first one's index in the parameter */
};

/* Elements [first, first + n) of a range of `elements`, which is kept at `range`. first begins a block. */
static inline struct ht_coded ht_coded_at(unsigned form, uint8_t *range, uint64_t elements, uint64_t first, size_t n)
{
    uint32_t block = ht_form_block(form);
    uint64_t scales = ht_form_scales_at(form, elements) + first / block * sizeof(float);

    return (struct ht_coded){
        .codes = range + ht_form_code_bytes(form, first),
        .scales = block > 1 ? (float *)(void *)(range + scales) : NULL,
        .n = n,
    };
}

typedef void (*ht_decode_fn)(const struct ht_coded *c, float *x);
typedef void (*ht_encode_fn)(const struct ht_coded *c, const float *x);

struct ht_codecs {
    const char *name; /* of the instruction set */
    ht_decode_fn decode[HT_FORMS];
    ht_encode_fn encode[HT_FORMS];
};
extern const struct ht_codecs ht_codecs_scalar;
#if defined(__x86_64__)
extern const struct ht_codecs ht_codecs_avx2, ht_codecs_avx512;
#endif
/* The fastest ones that this CPU runs; HITRAIN_KERNEL=scalar|avx2|avx512 overrides. */
const struct ht_codecs *ht_codecs_choose(void);

/*
 * Noise of bf16 elements. HT_FORM_NOISE elements make a group; the number e of its first one is a multiple of that.
 * The i-th one, and the one half a group later, share h in 32 bits: h = (e / 2 + i) (key >> 32 | 1) + key;
 * h = (h ^ h >> 16) 0x21f0aaad; h = (h ^ h >> 15) 0x735a2d97. Noise of the first is (h ^ h >> 16) & 0xffff, of the
 * second h >> 16. The code is (bits + noise) >> 16.
 */
enum { HT_FORM_NOISE = 32 };
