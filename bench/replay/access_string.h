/* SPDX-License-Identifier: Apache-2.0 */
/*
 * access_string.h - a trace as a string of accesses to units. A unit is 1 MiB of a tensor or of its state. It is more
 * where the string would be too long otherwise: its memory is bounded, whatever the trace says. Each tensor and each
 * state has a unit of its own, however small it is.
 *
 * A gradient stands for the accesses of its update: each unit of the parameter, and the units of the state beside it.
 */
#pragma once

#include "bench/replay/trace_text.h"

#define SIM_UNIT_BYTES_MIN (UINT64_C(1) << 20)
#define SIM_ACCESSES_MAX (UINT64_C(1) << 26)
#define SIM_UNITS_MAX (UINT64_C(1) << 19) /* beside the first one of each tensor and of each state */
#define SIM_NEVER UINT32_MAX

struct sim_string {
    const struct replay_trace *trace;
    uint64_t unit_bytes;
    uint32_t units, accesses;
    uint32_t *first;      /* by tensor; its state's units follow those of the tensor */
    uint32_t *tensor;     /* by unit */
    uint32_t *unit;       /* by access */
    uint32_t *next;       /* by access: the next one of the unit, or SIM_NEVER */
    uint32_t *first_used; /* by unit: its first access, or SIM_NEVER */
};

int sim_string_make(const struct replay_trace *t, struct sim_string *out) HT_MUST_CHECK;
void sim_string_free(struct sim_string *s);

/* Accesses that an entry stands for. */
uint32_t sim_entry_accesses(const struct sim_string *s, const struct replay_entry *e);
uint64_t sim_unit_bytes(const struct sim_string *s, uint32_t unit);
/* Units of a parameter, and [*out_begin, *out_end) of its state's that belong to its i-th. */
uint32_t sim_param_units(const struct sim_string *s, uint32_t tensor);
void sim_state_units(const struct sim_string *s, uint32_t tensor, uint32_t i, uint32_t *out_begin, uint32_t *out_end);
