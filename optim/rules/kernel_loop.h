/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernel_loop.h - one pass over n elements with the step of a rule, for the lanes of the file that includes this.
 *
 * The loop is instantiated for each step and pair of dtypes, so that no choice is left inside it.
 */
#pragma once

#include "optim/rules/all.h"

typedef void (*ht_step_fn)(struct ht_element *x, const struct ht_scalars *s);

HT_LANES_FN ht_lanes load_parameter(const struct ht_update *u, size_t i, uint8_t dtype)
{
    if (dtype == HT_DTYPE_F32)
        return lanes_load_f32((const float *)u->p + i);
    return lanes_believe(lanes_load_f32(u->master + i), (const uint16_t *)u->p + i, dtype);
}

HT_LANES_FN void store_parameter(const struct ht_update *u, size_t i, ht_lanes p, uint8_t dtype)
{
    if (dtype == HT_DTYPE_F32) {
        lanes_store_f32((float *)u->p + i, p);
        return;
    }
    lanes_store_f32(u->master + i, p);
    lanes_store_halves((uint16_t *)u->p + i, p, dtype);
}

HT_LANES_FN bool any_nan(const struct ht_element *x, unsigned states)
{
    bool nan = lanes_any_nan(x->p, states > 0 ? x->state[0] : x->p);

    for (unsigned k = 1; k < states; k++)
        nan |= lanes_any_nan(x->state[k], x->state[k]);
    return nan;
}

HT_LANES_FN void update_lanes(const struct ht_scalars *s, const struct ht_update *u, size_t i, ht_step_fn step,
                              unsigned states, uint8_t p_dtype, uint8_t g_dtype, ht_counts *nonfinite)
{
    struct ht_element x = {.g = lanes_load(u->g, g_dtype, i), .p = load_parameter(u, i, p_dtype)};

    *nonfinite = lanes_count_nonfinite(*nonfinite, x.g);
    x.g = lanes_negate(x.g * lanes_set(s->grad_factor), s->maximize);
    for (unsigned k = 0; k < states; k++)
        x.state[k] = lanes_load_f32(u->state[k] + i);
    step(&x, s);
    if (__builtin_expect(any_nan(&x, states), 0)) {
        x.p = lanes_canonical(x.p);
        for (unsigned k = 0; k < states; k++)
            x.state[k] = lanes_canonical(x.state[k]);
    }
    for (unsigned k = 0; k < states; k++)
        lanes_store_f32(u->state[k] + i, x.state[k]);
    store_parameter(u, i, x.p, p_dtype);
}

/*
 * A processor sees as far ahead as its reorder buffer holds instructions; for a rule that is less than memory's
 * latency. Its own prefetchers end at each page. Distances from 64 to 128 measure alike; 512 is as bad as none. Lines
 * that will be written are prefetched as such (prefetchw, which processors that lack it pass over).
 */
enum { HT_KERNEL_AHEAD = 96, HT_KERNEL_LINE = 64 / sizeof(float) };

HT_LANES_FN void prefetch_line(const struct ht_update *u, size_t i, unsigned states, uint8_t p_dtype, uint8_t g_dtype)
{
    i += HT_KERNEL_AHEAD;
    __builtin_prefetch((const char *)u->p + i * (p_dtype == HT_DTYPE_F32 ? 4 : 2), 1);
    __builtin_prefetch((const char *)u->g + i * (g_dtype == HT_DTYPE_F32 ? 4 : 2), 0);
    if (p_dtype != HT_DTYPE_F32)
        __builtin_prefetch(u->master + i, 1);
    for (unsigned k = 0; k < states; k++)
        __builtin_prefetch(u->state[k] + i, 1);
}

/* As many elements as fill lanes wholly. */
HT_LANES_FN uint64_t update_all(const struct ht_scalars *scalars, const struct ht_update *update, size_t n,
                                ht_step_fn step, unsigned states, uint8_t p_dtype, uint8_t g_dtype)
{
    /* Copies, because the compiler cannot know that the arrays do not overlap these. */
    struct ht_scalars s = *scalars;
    struct ht_update u = *update;
    ht_counts nonfinite = lanes_no_counts();

    size_t i = 0;
    for (; i + HT_KERNEL_LINE <= n; i += HT_KERNEL_LINE) {
        prefetch_line(&u, i, states, p_dtype, g_dtype);
        for (unsigned k = 0; k < HT_KERNEL_LINE; k += HT_LANES)
            update_lanes(&s, &u, i + k, step, states, p_dtype, g_dtype, &nonfinite);
    }
    for (; i + HT_LANES <= n; i += HT_LANES)
        update_lanes(&s, &u, i, step, states, p_dtype, g_dtype, &nonfinite);
    return lanes_sum_counts(nonfinite);
}

HT_LANES_FN uint64_t update_by_gradient(const struct ht_scalars *s, const struct ht_update *u, size_t n,
                                        ht_step_fn step, unsigned states, uint8_t p_dtype)
{
    return HT_BY_DTYPE(u->g_dtype, update_all, s, u, n, step, states, p_dtype);
}

HT_LANES_FN uint64_t update_by_dtypes(const struct ht_scalars *s, const struct ht_update *u, size_t n, ht_step_fn step,
                                      unsigned states)
{
    return HT_BY_DTYPE(u->p_dtype, update_by_gradient, s, u, n, step, states);
}

/* The elements after those, by kernels of fewer lanes. */
static inline uint64_t update_tail(const struct ht_scalars *s, const struct ht_update *u, size_t n,
                                   const struct ht_kernels *by)
{
    size_t done = n & ~(size_t)(HT_LANES - 1);
    struct ht_update tail = *u;

    tail.p = (uint8_t *)u->p + done * ht_dtype_trained_bytes(u->p_dtype);
    tail.g = (const uint8_t *)u->g + done * ht_dtype_trained_bytes(u->g_dtype);
    tail.master = u->master ? u->master + done : NULL;
    for (unsigned k = 0; k < HT_KERNEL_STATES_MAX; k++)
        tail.state[k] = u->state[k] ? u->state[k] + done : NULL;
    return by->fn[s->kernel](s, &tail, n - done);
}
