/* SPDX-License-Identifier: Apache-2.0 */
/* seen.h - a set of numbers that grows: which states there were already. */
#ifndef HITRAIN_TESTS_SUPPORT_SEEN_H
#define HITRAIN_TESTS_SUPPORT_SEEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct seen {
    uint64_t *slot; /* 0: free */
    size_t size, count;
};

/* Zeroed at first. Was it new? */
bool seen_add(struct seen *set, uint64_t value);
void seen_free(struct seen *set);

#endif
