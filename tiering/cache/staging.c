/* SPDX-License-Identifier: Apache-2.0 */
/* staging.c - the staging pool: two stacks of buffers. */
#include <assert.h>
#include <stdlib.h>

#include "tiering/cache/staging.h"
#include "tiering/base/fault.h"
#include "tiering/base/lock.h"

enum { BUF_BYTES = 1 << 20, BUFS_MIN = 16 };

struct part {
    void **stack; /* free buffers */
    unsigned free, total;
    pthread_cond_t freed;
};

struct ht_staging {
    struct ht_pinned memory;
    struct ht_mutex lock; /* guards the stacks */
    struct part part[HT_STAGING_PARTS];
};

static int part_init(struct ht_staging *p, enum ht_staging_part which, unsigned first, unsigned count)
{
    struct part *part = &p->part[which];
    pthread_cond_init(&part->freed, NULL);
    part->stack = calloc(count, sizeof(void *));
    if (!part->stack)
        return -ENOMEM;
    part->free = part->total = count;
    for (unsigned i = 0; i < count; i++)
        part->stack[i] = (uint8_t *)p->memory.base + (size_t)(first + i) * BUF_BYTES;
    return 0;
}

int ht_staging_new(uint64_t bytes, int numa_node, struct ht_staging **out_staging)
{
    unsigned count = (unsigned)(bytes / BUF_BYTES);
    if (count < BUFS_MIN)
        return -EINVAL;
    struct ht_staging *p = calloc(1, sizeof(*p));
    if (!p)
        return -ENOMEM;
    int rc = ht_pinned_alloc(&p->memory, "hitrain-staging", (size_t)count * BUF_BYTES, numa_node);
    if (rc) {
        free(p);
        return rc;
    }
    ht_mutex_init(&p->lock, HT_LOCK_STAGING);
    rc = part_init(p, HT_STAGING_FILL, 0, count / 4);
    if (!rc)
        rc = part_init(p, HT_STAGING_UPDATE, count / 4, count - count / 4);
    if (rc) {
        ht_staging_free(p);
        return rc;
    }
    *out_staging = p;
    return 0;
}

void ht_staging_free(struct ht_staging *p)
{
    if (!p)
        return;
    for (int i = 0; i < HT_STAGING_PARTS; i++) {
        assert(p->part[i].free == p->part[i].total);
        pthread_cond_destroy(&p->part[i].freed);
        free(p->part[i].stack);
    }
    ht_mutex_destroy(&p->lock);
    ht_pinned_free(&p->memory);
    free(p);
}

int ht_staging_get(struct ht_staging *p, enum ht_staging_part which, unsigned count, bool nowait, void *out_bufs[])
{
    struct part *part = &p->part[which];
    if (count > part->total)
        return -E2BIG;
    int rc = nowait ? ht_fault(HT_FAULT_CACHE_STAGING) : 0;
    if (rc)
        return rc;
    ht_mutex_lock(&p->lock);
    while (part->free < count && !nowait)
        ht_cond_wait(&part->freed, &p->lock);
    if (part->free < count)
        rc = -EAGAIN;
    for (unsigned i = 0; !rc && i < count; i++)
        out_bufs[i] = part->stack[--part->free];
    ht_mutex_unlock(&p->lock);
    return rc;
}

void ht_staging_put(struct ht_staging *p, enum ht_staging_part which, void *buf)
{
    struct part *part = &p->part[which];
    ht_mutex_lock(&p->lock);
    assert(part->free < part->total);
    part->stack[part->free++] = buf;
    pthread_cond_broadcast(&part->freed);
    ht_mutex_unlock(&p->lock);
}

unsigned ht_staging_count(const struct ht_staging *p, enum ht_staging_part part)
{
    return p->part[part].total;
}

uint64_t ht_staging_bytes(const struct ht_staging *p)
{
    return (uint64_t)(p->part[0].total + p->part[1].total) * BUF_BYTES;
}

uint64_t ht_staging_used_bytes(struct ht_staging *p)
{
    ht_mutex_lock(&p->lock);
    uint64_t used = 0;
    for (int i = 0; i < HT_STAGING_PARTS; i++)
        used += p->part[i].total - p->part[i].free;
    ht_mutex_unlock(&p->lock);
    return used * BUF_BYTES;
}

const struct ht_pinned *ht_staging_memory(const struct ht_staging *p)
{
    return &p->memory;
}
