/* SPDX-License-Identifier: Apache-2.0 */
/*
 * no_memory.h - an arena of any size whose memory is never touched: addresses alone. For one file of a program that is
 * linked with --wrap of ht_pinned_alloc and ht_pinned_free.
 */
#pragma once

#include <errno.h>
#include <sys/mman.h>

#include "tiering/sys/mem.h"

int __wrap_ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, const struct ht_nodes *nodes);
void __wrap_ht_pinned_free(struct ht_pinned *m);

int __wrap_ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, const struct ht_nodes *nodes)
{
    void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    (void)name;
    if (base == MAP_FAILED)
        return -ENOMEM;
    *m = (struct ht_pinned){.base = base, .bytes = bytes, .nodes = nodes, .end = {bytes}};
    return 0;
}

void __wrap_ht_pinned_free(struct ht_pinned *m)
{
    munmap(m->base, m->bytes);
}
