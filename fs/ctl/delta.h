/* SPDX-License-Identifier: Apache-2.0 */
/*
 * delta.h - .hitrain/delta/STEP: the changes of a step, as a safetensors file (state/delta.h has the content).
 *
 *   NAME.indices   I32, or I64 beyond 2^31 elements; ascending, in the flat parameter NAME
 *   NAME.values    the new values, in the parameter's dtype, or bf16
 *   __metadata__   format, version, step, base_step, lineage, and shapes: JSON with the shape of each NAME
 *
 * Names are those at the open: another name cuts the chain of deltas. One that is open needs no lock.
 */
#pragma once

#include "fs/ctl/ctl.h"

struct ht_delta_file;
/*
 * -ENOENT: the step has none, or none any more. -EACCES: a parameter is not the caller's to read. caller NULL: the
 * daemon itself.
 */
int ht_delta_open(struct ht_ctl *c, uint64_t root, uint64_t step, const struct ht_caller *caller,
                  struct ht_delta_file **out) HT_MUST_CHECK;
void ht_delta_close(struct ht_delta_file *f);
uint64_t ht_delta_bytes(const struct ht_delta_file *f);
/* WAITS for a device. */
ssize_t ht_delta_read(struct ht_delta_file *f, uint64_t off, void *buf, size_t len) HT_MUST_CHECK;
