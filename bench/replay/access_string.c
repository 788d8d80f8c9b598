/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/replay/access_string.h"

#include <stdlib.h>

static uint64_t units_of(uint64_t bytes, uint64_t unit_bytes)
{
    return ht_div_up(bytes, unit_bytes);
}

uint32_t sim_param_units(const struct sim_string *s, uint32_t tensor)
{
    return (uint32_t)units_of(s->trace->tensor[tensor].bytes, s->unit_bytes);
}

static uint64_t state_units(const struct sim_string *s, uint32_t tensor)
{
    return units_of(s->trace->tensor[tensor].state_bytes, s->unit_bytes);
}

void sim_state_units(const struct sim_string *s, uint32_t tensor, uint32_t i, uint32_t *out_begin, uint32_t *out_end)
{
    uint64_t params = sim_param_units(s, tensor), states = state_units(s, tensor);
    uint32_t first = s->first[tensor] + (uint32_t)params;

    *out_begin = first + (uint32_t)(i * states / params);
    *out_end = first + (uint32_t)((i + 1) * states / params);
}

uint64_t sim_unit_bytes(const struct sim_string *s, uint32_t unit)
{
    uint32_t tensor = s->tensor[unit], params = sim_param_units(s, tensor), i = unit - s->first[tensor];
    const struct replay_tensor *t = &s->trace->tensor[tensor];

    if (i < params)
        return ht_min_u64(s->unit_bytes, t->bytes - i * s->unit_bytes);
    return ht_min_u64(s->unit_bytes, t->state_bytes - (i - params) * s->unit_bytes);
}

uint32_t sim_entry_accesses(const struct sim_string *s, const struct replay_entry *e)
{
    if (e->op == REPLAY_GRADIENT)
        return sim_param_units(s, e->tensor) + (uint32_t)state_units(s, e->tensor);
    if (e->op != REPLAY_READ && e->op != REPLAY_WRITE)
        return 0;
    return (uint32_t)(units_of(e->offset + e->bytes, s->unit_bytes) - e->offset / s->unit_bytes);
}

/* ------------------------------------------------------------------ making */

static uint64_t units_after_first(uint64_t bytes, uint64_t unit_bytes)
{
    return bytes ? units_of(bytes, unit_bytes) - 1 : 0;
}

/* Units of REPLAY_TENSOR_BYTES_MAX fit: then an entry is two accesses at most. */
static bool fits(const struct replay_trace *t, uint64_t unit_bytes)
{
    uint64_t units = 0, accesses = 0;
    struct sim_string s = {.trace = t, .unit_bytes = unit_bytes};

    for (uint32_t i = 0; i < t->tensors; i++)
        units +=
            units_after_first(t->tensor[i].bytes, unit_bytes) + units_after_first(t->tensor[i].state_bytes, unit_bytes);
    if (units > SIM_UNITS_MAX)
        return false;
    for (uint64_t i = 0; i < t->entries && accesses <= SIM_ACCESSES_MAX; i++)
        accesses += sim_entry_accesses(&s, &t->entry[i]);
    return accesses <= SIM_ACCESSES_MAX;
}

static void number_units(struct sim_string *s)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < s->trace->tensors; i++) {
        uint32_t count = sim_param_units(s, i) + (uint32_t)state_units(s, i);
        s->first[i] = n;
        for (uint32_t k = 0; s->tensor && k < count; k++)
            s->tensor[n + k] = i;
        n += count;
    }
    s->units = n;
}

/* Writes the accesses of an update, in its order. */
static uint32_t *put_update(const struct sim_string *s, uint32_t tensor, uint32_t *to)
{
    uint32_t params = sim_param_units(s, tensor), begin, end;

    for (uint32_t i = 0; i < params; i++) {
        *to++ = s->first[tensor] + i;
        sim_state_units(s, tensor, i, &begin, &end);
        while (begin < end)
            *to++ = begin++;
    }
    return to;
}

static void fill(struct sim_string *s)
{
    uint32_t *to = s->unit;

    for (uint64_t i = 0; i < s->trace->entries; i++) {
        const struct replay_entry *e = &s->trace->entry[i];
        uint32_t n = sim_entry_accesses(s, e);
        if (e->op == REPLAY_GRADIENT)
            to = put_update(s, e->tensor, to);
        else
            for (uint32_t k = 0; k < n; k++)
                *to++ = s->first[e->tensor] + (uint32_t)(e->offset / s->unit_bytes) + k;
    }
    for (uint32_t u = 0; u < s->units; u++)
        s->first_used[u] = SIM_NEVER;
    for (uint32_t i = s->accesses; i-- > 0;) {
        s->next[i] = s->first_used[s->unit[i]];
        s->first_used[s->unit[i]] = i;
    }
}

int sim_string_make(const struct replay_trace *t, struct sim_string *out)
{
    struct sim_string s = {.trace = t, .unit_bytes = SIM_UNIT_BYTES_MIN};

    while (!fits(t, s.unit_bytes))
        s.unit_bytes *= 2;
    for (uint64_t i = 0; i < t->entries; i++)
        s.accesses += sim_entry_accesses(&s, &t->entry[i]);
    s.first = calloc(t->tensors + 1, sizeof(*s.first));
    if (s.first)
        number_units(&s);
    s.tensor = calloc(s.units + 1, sizeof(*s.tensor));
    s.first_used = calloc(s.units + 1, sizeof(*s.first_used));
    s.unit = calloc((size_t)s.accesses + 1, sizeof(*s.unit));
    s.next = calloc((size_t)s.accesses + 1, sizeof(*s.next));
    if (!s.first || !s.tensor || !s.first_used || !s.unit || !s.next) {
        sim_string_free(&s);
        return -ENOMEM;
    }
    number_units(&s);
    fill(&s);
    *out = s;
    return 0;
}

void sim_string_free(struct sim_string *s)
{
    free(s->first);
    free(s->tensor);
    free(s->first_used);
    free(s->unit);
    free(s->next);
    *s = (struct sim_string){0};
}
