/* SPDX-License-Identifier: Apache-2.0 */
/*
 * staging.c - the staging pool: for each of its two parts a stack of buffers from each node.
 *
 * Each request that waits has a ticket, and only the one whose ticket is served takes buffers: so none is overtaken,
 * however many buffers it needs. A request that may not wait gets nothing while another one waits.
 */

#include "tiering/cache/staging.h"
#include "tiering/base/activity.h"
#include "tiering/base/dump.h"
#include "tiering/base/fault.h"

enum { BUF_BYTES = 1 << 20, BUFS_MIN = 16, FILL_SHARE = 4 };

struct part {
    unsigned total, kept; /* kept: ht_staging_get leaves so many */
    HT_GUARDED_BY(HT_LOCK_STAGING) struct {
        void **stack[HT_NODES_MAX]; /* free buffers */
        unsigned height[HT_NODES_MAX], free;
        uint64_t ticket_next, ticket_serving; /* equal: no thread waits */
    };
    pthread_cond_t changed; /* a buffer came back, or the next ticket is served */
};

struct ht_staging {
    struct ht_pinned memory;
    struct ht_mutex lock;
    struct part part[HT_STAGING_PARTS];
};

HT_MUTEX_OF(staging_lock, struct ht_staging, lock, HT_LOCK_STAGING)

/* Buffers in turn, so that each node's share of both is fair. */
static enum ht_staging_part part_of(unsigned buffer)
{
    return buffer % FILL_SHARE == FILL_SHARE - 1 ? HT_STAGING_FILL : HT_STAGING_UPDATE;
}

static void push(struct ht_staging *p, enum ht_staging_part which, void *buf) HT_REQUIRES(HT_LOCK_STAGING)
{
    struct part *part = &p->part[which];
    unsigned numa_index = ht_pinned_part_of(&p->memory, buf);

    part->stack[numa_index][part->height[numa_index]++] = buf;
    part->free++;
}

/* From the requested node, else from the one that has most. */
static void *pop(struct part *part, int numa_index) HT_REQUIRES(HT_LOCK_STAGING)
{
    unsigned from = numa_index < 0 ? 0 : (unsigned)numa_index;

    for (unsigned i = 0; (numa_index < 0 || !part->height[from]) && i < HT_NODES_MAX; i++)
        if (part->height[i] > part->height[from])
            from = i;
    part->free--;
    return part->stack[from][--part->height[from]];
}

static int part_init(struct ht_staging *p, enum ht_staging_part which, unsigned count)
{
    struct part *part = &p->part[which];
    int rc = 0;

    HT_UNSHARED(HT_LOCK_STAGING);
    pthread_cond_init(&part->changed, NULL);
    for (unsigned i = 0; i < ht_pinned_parts(&p->memory); i++) {
        part->stack[i] = calloc(ht_pinned_part_bytes(&p->memory, i) / BUF_BYTES + 1, sizeof(void *));
        if (!part->stack[i])
            rc = -ENOMEM;
    }
    for (unsigned k = count; !rc && k-- > 0;)
        if (part_of(k) == which)
            push(p, which, (uint8_t *)p->memory.base + (size_t)k * BUF_BYTES);
    part->total = part->free;
    return rc;
}

int ht_staging_new(uint64_t bytes, const struct ht_nodes *nodes, struct ht_staging **out_staging)
{
    unsigned count = (unsigned)(bytes / BUF_BYTES);

    if (count < BUFS_MIN)
        return -EINVAL;
    struct ht_staging *p = calloc(1, sizeof(*p));
    if (!p)
        return -ENOMEM;
    int rc = ht_pinned_alloc(&p->memory, "hitrain-staging", (size_t)count * BUF_BYTES, nodes);
    if (rc) {
        free(p);
        return rc;
    }
    ht_mutex_init(&p->lock, HT_LOCK_STAGING);
    rc = part_init(p, HT_STAGING_FILL, count);
    if (!rc)
        rc = part_init(p, HT_STAGING_UPDATE, count);
    if (rc) {
        ht_staging_free(p);
        return rc;
    }
    struct part *update = &p->part[HT_STAGING_UPDATE];
    if (update->total > HT_STAGING_REQUEST_MAX)
        update->kept = (unsigned)ht_min_u64(update->total - HT_STAGING_REQUEST_MAX, HT_STAGING_REQUEST_MAX);
    *out_staging = p;
    return 0;
}

void ht_staging_free(struct ht_staging *p)
{
    if (!p)
        return;
    HT_UNSHARED(HT_LOCK_STAGING);
    for (int i = 0; i < HT_STAGING_PARTS; i++) {
        assert(p->part[i].free == p->part[i].total);
        pthread_cond_destroy(&p->part[i].changed);
        for (unsigned k = 0; k < HT_NODES_MAX; k++)
            free(p->part[i].stack[k]);
    }
    ht_mutex_destroy(&p->lock);
    ht_pinned_free(&p->memory);
    free(p);
}

/* Returns when count buffers are free beside those that are kept, and all earlier requests have theirs. */
static void wait_turn(struct ht_staging *p, struct part *part, unsigned count) HT_REQUIRES(HT_LOCK_STAGING)
{
    uint64_t ticket = part->ticket_next++;

    ht_activity_wait("staging buffers", 0);
    while (ticket != part->ticket_serving || part->free < count + part->kept)
        ht_cond_wait(&part->changed, staging_lock(p));
    ht_activity_go_on();
    part->ticket_serving++;
    if (part->ticket_serving != part->ticket_next)
        pthread_cond_broadcast(&part->changed);
}

int ht_staging_get(struct ht_staging *p, enum ht_staging_part which, unsigned count, bool nowait, int numa_index,
                   void *out_bufs[])
{
    struct part *part = &p->part[which];

    if (count > part->total - part->kept)
        return -E2BIG;
    int rc = nowait ? ht_fault(HT_FAULT_CACHE_STAGING) : 0;
    if (rc)
        return rc;
    ht_mutex_lock(staging_lock(p));
    bool at_once = part->ticket_serving == part->ticket_next && part->free >= count + part->kept;
    if (!at_once && nowait)
        rc = -EAGAIN;
    else if (!at_once)
        wait_turn(p, part, count);
    for (unsigned i = 0; !rc && i < count; i++)
        out_bufs[i] = pop(part, numa_index);
    ht_mutex_unlock(staging_lock(p));
    if (!rc)
        ht_activity_hold_buffers((int)count);
    return rc;
}

int ht_staging_get_kept(struct ht_staging *p, unsigned count, int numa_index, void *out_bufs[])
{
    struct part *part = &p->part[HT_STAGING_UPDATE];

    if (count > part->kept)
        return ht_staging_get(p, HT_STAGING_UPDATE, count, false, numa_index, out_bufs);
    ht_mutex_lock(staging_lock(p));
    assert(part->free >= count);
    for (unsigned i = 0; i < count; i++)
        out_bufs[i] = pop(part, numa_index);
    ht_mutex_unlock(staging_lock(p));
    ht_activity_hold_buffers((int)count);
    return 0;
}

void ht_staging_put(struct ht_staging *p, enum ht_staging_part which, void *buf)
{
    struct part *part = &p->part[which];

    ht_mutex_lock(staging_lock(p));
    assert(part->free < part->total);
    push(p, which, buf);
    if (part->ticket_serving != part->ticket_next)
        pthread_cond_broadcast(&part->changed);
    ht_mutex_unlock(staging_lock(p));
    ht_activity_hold_buffers(-1);
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
    ht_mutex_lock(staging_lock(p));
    uint64_t used = 0;
    for (int i = 0; i < HT_STAGING_PARTS; i++)
        used += p->part[i].total - p->part[i].free;
    ht_mutex_unlock(staging_lock(p));
    return used * BUF_BYTES;
}

void ht_staging_dump(struct ht_staging *p, struct ht_dump *d)
{
    static const char *const words[] = {[HT_STAGING_FILL] = "reads", [HT_STAGING_UPDATE] = "updates"};

    ht_dump_put(d, "staging buffers:\n");
    if (!ht_dump_lock(d, staging_lock(p), "the staging pool"))
        return;
    for (unsigned i = 0; i < HT_STAGING_PARTS; i++) {
        const struct part *part = &p->part[i];
        ht_dump_put(d, "  for %s: %u of %u in use, %llu threads wait\n", words[i], part->total - part->free,
                    part->total, (unsigned long long)(part->ticket_next - part->ticket_serving));
    }
    ht_mutex_unlock(staging_lock(p));
}

uint64_t ht_staging_meta_bytes(const struct ht_staging *p)
{
    uint64_t places = 0;

    for (unsigned i = 0; i < ht_pinned_parts(&p->memory); i++)
        places += ht_pinned_part_bytes(&p->memory, i) / BUF_BYTES + 1;
    return sizeof(*p) + HT_STAGING_PARTS * places * sizeof(void *);
}

const struct ht_pinned *ht_staging_memory(const struct ht_staging *p)
{
    return &p->memory;
}
