/* SPDX-License-Identifier: Apache-2.0 */
/* u64_set.h - a set of numbers that grows: which states there were already. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct u64_set {
    uint64_t *slot; /* 0: free */
    size_t size, count;
};

/* Zeroed at first. Was it new? */
bool u64_set_add(struct u64_set *set, uint64_t value);
void u64_set_free(struct u64_set *set);
