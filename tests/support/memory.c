/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "tests/support/memory.h"
#include "tiering/sys/mem.h"
#include "tiering/sys/processors.h"

enum { KEPT_MAX = 8, HUGE_PAGE_BYTES = 2 << 20, HEAP_STEP_BYTES = 16 << 20, MAPPED_LEAST_BYTES = 32 << 20 };

int __real_ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, const struct ht_nodes *nodes);
void __real_ht_pinned_free(struct ht_pinned *m);
int __wrap_ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, const struct ht_nodes *nodes);
void __wrap_ht_pinned_free(struct ht_pinned *m);
void __real_ht_quota_find(struct ht_cpu_quota *out);
void __wrap_ht_quota_find(struct ht_cpu_quota *out);
unsigned __real_ht_processors_usable(void);
unsigned __wrap_ht_processors_usable(void);

static struct {
    pthread_mutex_t lock;
    bool on;
    struct ht_pinned area[KEPT_MAX];
    unsigned count;
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool take(struct ht_pinned *m, size_t bytes)
{
    bool found = false;

    pthread_mutex_lock(&kept.lock);
    for (unsigned i = 0; i < kept.count && !found; i++) {
        found = kept.area[i].bytes == bytes;
        if (!found)
            continue;
        *m = kept.area[i];
        kept.area[i] = kept.area[--kept.count];
    }
    pthread_mutex_unlock(&kept.lock);
    return found;
}

static bool keep(const struct ht_pinned *m)
{
    pthread_mutex_lock(&kept.lock);
    bool room = kept.on && kept.count < KEPT_MAX;
    if (room)
        kept.area[kept.count++] = *m;
    pthread_mutex_unlock(&kept.lock);
    return room;
}

/* The C library, too: new pages for each buffer would take a third of a test that opens thousands of stores. */
static void keep_heap(void)
{
    mallopt(M_MMAP_THRESHOLD, MAPPED_LEAST_BYTES);
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    mallopt(M_TOP_PAD, HEAP_STEP_BYTES);
}

void memory_keep(bool on)
{
    if (on)
        keep_heap();
    pthread_mutex_lock(&kept.lock);
    kept.on = on;
    while (!on && kept.count > 0)
        __real_ht_pinned_free(&kept.area[--kept.count]);
    pthread_mutex_unlock(&kept.lock);
}

static bool is_divided(const struct ht_nodes *nodes)
{
    return nodes && nodes->count;
}

int __wrap_ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, const struct ht_nodes *nodes)
{
    if (!is_divided(nodes) && take(m, ht_round_up(bytes, HUGE_PAGE_BYTES))) {
        m->nodes = nodes;
        return 0;
    }
    int rc = __real_ht_pinned_alloc(m, name, bytes, nodes);
    if (rc == 0)
        madvise(m->base, m->bytes, MADV_DOFORK); /* each test is a child of the program */
    return rc;
}

void __wrap_ht_pinned_free(struct ht_pinned *m)
{
    if (m->base)
        ht_pinned_stop_populating(m);
    if (!m->base || is_divided(m->nodes) || !keep(m))
        __real_ht_pinned_free(m);
    *m = (struct ht_pinned){.base = NULL};
}

/*
 * What control groups allow is read once: that would take a third of a test that opens thousands of stores. Threads
 * that are first at the same time read the same.
 */
void __wrap_ht_quota_find(struct ht_cpu_quota *out)
{
    static struct ht_cpu_quota first;
    static bool is_known;

    pthread_mutex_lock(&kept.lock);
    if (!kept.on || !is_known)
        __real_ht_quota_find(&first);
    is_known = true;
    *out = first;
    pthread_mutex_unlock(&kept.lock);
}

unsigned __wrap_ht_processors_usable(void)
{
    static _Atomic unsigned first;

    pthread_mutex_lock(&kept.lock);
    unsigned usable = kept.on ? first : 0;
    pthread_mutex_unlock(&kept.lock);
    return usable ? usable : (first = __real_ht_processors_usable());
}
