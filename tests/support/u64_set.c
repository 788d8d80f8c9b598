/* SPDX-License-Identifier: Apache-2.0 */
/* u64_set.c - open addressing, at most half full. */
#include <stdlib.h>

#include "tests/support/u64_set.h"

enum { FIRST_SIZE = 1024 };

static void grow(struct u64_set *set)
{
    struct u64_set bigger = {.size = set->size ? 2 * set->size : FIRST_SIZE};

    bigger.slot = calloc(bigger.size, sizeof(uint64_t));
    if (!bigger.slot)
        abort();
    for (size_t i = 0; i < set->size; i++)
        if (set->slot[i])
            u64_set_add(&bigger, set->slot[i]);
    free(set->slot);
    *set = bigger;
}

bool u64_set_add(struct u64_set *set, uint64_t value)
{
    if (2 * (set->count + 1) > set->size)
        grow(set);
    value += value == 0;
    size_t i = value % set->size;
    while (set->slot[i] && set->slot[i] != value)
        i = (i + 1) % set->size;
    bool is_new = set->slot[i] == 0;
    set->slot[i] = value;
    set->count += is_new;
    return is_new;
}

void u64_set_free(struct u64_set *set)
{
    free(set->slot);
    *set = (struct u64_set){0};
}
