/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem.c - large memory, and how much memory this process may still use.
 *
 * Order matters: huge pages and the NUMA policy are requested before the first page is touched, because existing pages
 * keep their size and place. No shared state; any thread.
 *
 * Pinned memory is anonymous, not a memfd: most systems give huge pages to it on request (enabled=madvise) and to
 * shared memory never (shmem_enabled=never); without them filling it costs ten times as much.
 *
 * Shared memory is a memfd, mapped whole; again, twice as large, when it outgrows its mapping. Huge pages are used only
 * for whole ones of the file: the last one would take 2 MiB for a small rest.
 */
#include "tiering/sys/mem.h"
#include "tiering/base/fault.h"
#include "tiering/sys/cgroup.h"

#include <inttypes.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#define SMALL_BYTES (32 * HT_MIB) /* so little comes when it is touched, but for one page */
#define EAGER_BYTES (64 * HT_MIB)
#define STEP_BYTES (16 * HT_MIB)

#ifndef PR_SET_VMA
#define PR_SET_VMA 0x53564d41 /* Linux 5.17 */
#define PR_SET_VMA_ANON_NAME 0
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24 /* Linux 5.18 */
#endif

/* malloc looks at all that it has free, while others wait for it. */
uint64_t ht_heap_spare_bytes(void)
{
    static _Atomic uint64_t bytes, until_ns;
    uint64_t now = ht_now_ns(), until = until_ns;

    if (now >= until && atomic_compare_exchange_strong(&until_ns, &until, now + 1000000000ull))
        bytes = mallinfo2().fordblks;
    return bytes;
}

/*
 * Memory that nothing has touched, at an address aligned to huge pages: without that none is used. Or MAP_FAILED.
 * Reserves more than needed, and keeps the aligned part.
 */
static void *map_aligned(size_t bytes, int protection)
{
    size_t reserved = bytes + HT_HUGE_PAGE_BYTES;
    char *area = mmap(NULL, reserved, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (area == MAP_FAILED)
        return MAP_FAILED;
    char *base = (char *)ht_round_up((uintptr_t)area, HT_HUGE_PAGE_BYTES);
    if (base > area)
        munmap(area, (size_t)(base - area));
    munmap(base + bytes, (size_t)(area + reserved - (base + bytes)));
    return base;
}

int ht_mem_populate(char *base, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    while (madvise(base, bytes, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN)
            continue;
        if (errno == EFAULT) /* touching it would be SIGBUS: there is no page */
            return -ENOMEM;
        if (errno != EINVAL)
            return -errno;
        for (size_t at = 0; at < bytes; at += page) /* an older kernel */
            *(volatile char *)(base + at) = 0;
        break;
    }
    return 0;
}

bool ht_mem_give_back(char *base, size_t bytes)
{
    return madvise(base, bytes, MADV_DONTNEED_LOCKED) == 0;
}

/* How much of the memory the kernel has mapped by huge pages; only smaps shows this. */
static uint64_t count_huge(const char *base, size_t bytes)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    uint64_t from, to, kib, huge_kib = 0;
    bool inside = false;
    char line[512];

    if (!f)
        return 0;
    while (fgets(line, sizeof(line), f)) {
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &from, &to) == 2)
            inside = from >= (uintptr_t)base && to <= (uintptr_t)base + bytes;
        else if (inside && sscanf(line, "AnonHugePages: %" SCNu64, &kib) == 1)
            huge_kib += kib;
    }
    fclose(f);
    return huge_kib * HT_KIB;
}

/* ---------------------------------------------------------------- the rest */

enum { FILLING, ASKED, FILLED };

struct ht_filler {
    atomic_bool stop, ended; /* ended: the thread has nothing of this any more */
    atomic_int state;        /* the second of two calls fn: the filler with FILLED, or the requester with ASKED */
    void (*fn)(void *ctx);   /* before ASKED */
    void *ctx;
    _Atomic uint64_t huge_bytes; /* of all, when it has populated all */
    char *base;
    size_t bytes; /* of all */
};

static void *fill_rest(void *arg)
{
    struct ht_filler *f = arg;

    for (size_t at = EAGER_BYTES; at < f->bytes && !atomic_load(&f->stop); at += STEP_BYTES)
        if (ht_mem_populate(f->base + at, ht_min_u64(STEP_BYTES, f->bytes - at)) != 0)
            break; /* the first access reports the error */
    if (!atomic_load(&f->stop))
        atomic_store(&f->huge_bytes, count_huge(f->base, f->bytes));
    if (!atomic_load(&f->stop) && atomic_exchange(&f->state, FILLED) == ASKED)
        f->fn(f->ctx);
    atomic_store(&f->ended, true);
    return NULL;
}

void ht_pinned_when_populated(struct ht_pinned *m, void (*fn)(void *ctx), void *ctx)
{
    struct ht_filler *f = m->filler;

    if (!f) {
        if (m->bytes > SMALL_BYTES && m->bytes <= EAGER_BYTES)
            fn(ctx);
        return;
    }
    f->fn = fn;
    f->ctx = ctx;
    if (atomic_exchange(&f->state, ASKED) == FILLED)
        fn(ctx);
}

/* Without a thread pages come when they are touched. */
static void start_filler(struct ht_pinned *m)
{
    struct ht_filler *f;
    pthread_t thread;

    if (m->bytes <= EAGER_BYTES || !(f = calloc(1, sizeof(*f))))
        return;
    f->base = m->base;
    f->bytes = m->bytes;
    if (pthread_create(&thread, NULL, fill_rest, f) != 0) {
        free(f);
        return;
    }
    pthread_detach(thread);
    m->filler = f;
}

void ht_pinned_stop_populating(struct ht_pinned *m)
{
    if (m->filler)
        atomic_store(&m->filler->stop, true);
    while (m->filler && !atomic_load(&m->filler->ended)) /* it ends after its step */
        ht_sleep_ns(1000000);
}

/* ------------------------------------------------------------------- parts */

static void divide(struct ht_pinned *m, const struct ht_nodes *nodes)
{
    uint64_t all = 0, before = 0;

    m->nodes = nodes;
    for (unsigned i = 0; nodes && i < nodes->count; i++)
        all += nodes->weight[i];
    for (unsigned i = 0; i + 1 < ht_pinned_parts(m); i++) {
        before += nodes->weight[i];
        m->end[i] = (size_t)((unsigned __int128)m->bytes * before / all / HT_HUGE_PAGE_BYTES * HT_HUGE_PAGE_BYTES);
    }
    m->end[ht_pinned_parts(m) - 1] = m->bytes;
}

unsigned ht_pinned_parts(const struct ht_pinned *m)
{
    return m->nodes && m->nodes->count ? m->nodes->count : 1;
}

size_t ht_pinned_part_start(const struct ht_pinned *m, unsigned part)
{
    return part ? m->end[part - 1] : 0;
}

size_t ht_pinned_part_bytes(const struct ht_pinned *m, unsigned part)
{
    return m->end[part] - ht_pinned_part_start(m, part);
}

unsigned ht_pinned_part_of(const struct ht_pinned *m, const void *address)
{
    size_t at = (size_t)((const char *)address - (const char *)m->base);
    unsigned part = 0;

    while (at >= m->end[part])
        part++;
    return part;
}

uint64_t ht_pinned_away_bytes(const struct ht_pinned *m, unsigned part)
{
    char *start = (char *)m->base + ht_pinned_part_start(m, part);

    if (!m->nodes || !m->nodes->count)
        return 0;
    return ht_nodes_away(m->nodes, (int)part, start, ht_pinned_part_bytes(m, part), HT_MIB);
}

uint64_t ht_pinned_huge_bytes(const struct ht_pinned *m)
{
    return ht_max_u64(m->huge_bytes, m->filler ? atomic_load(&m->filler->huge_bytes) : 0);
}

uint64_t ht_mem_lock_limit(void)
{
    struct rlimit limit;

    return getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
}

static int prepare(struct ht_pinned *m)
{
    size_t eager = m->bytes <= SMALL_BYTES ? HT_HUGE_PAGE_BYTES : ht_min_u64(m->bytes, EAGER_BYTES);

    madvise(m->base, m->bytes, MADV_HUGEPAGE);
    madvise(m->base, m->bytes, MADV_DONTDUMP);
    madvise(m->base, m->bytes, MADV_DONTFORK); /* libfuse starts mount(8): it would copy what rings have registered */
    for (unsigned i = 0; m->nodes && i < m->nodes->count; i++)
        ht_nodes_prefer(m->nodes, (int)i, (char *)m->base + ht_pinned_part_start(m, i), ht_pinned_part_bytes(m, i));
    m->locked = mlock2(m->base, m->bytes, MLOCK_ONFAULT) == 0;
    int rc = ht_mem_populate(m->base, eager);
    if (rc != 0)
        return rc;
    m->huge_bytes = count_huge(m->base, m->bytes);
    start_filler(m);
    return 0;
}

/* ---------------------------------------------------------------- in all */

int ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, const struct ht_nodes *nodes)
{
    struct ht_pinned p = {.base = NULL};
    int rc = ht_fault(HT_FAULT_PINNED);

    if (rc != 0)
        return rc;
    if (bytes == 0 || bytes > SIZE_MAX / 2)
        return -EINVAL;
    p.bytes = ht_round_up(bytes, HT_HUGE_PAGE_BYTES);
    p.base = map_aligned(p.bytes, PROT_READ | PROT_WRITE);
    if (p.base == MAP_FAILED)
        return -errno;
    prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, p.base, p.bytes, name); /* for /proc/PID/smaps, if the kernel can */
    divide(&p, nodes);
    rc = prepare(&p);
    if (rc != 0)
        munmap(p.base, p.bytes);
    else
        *m = p;
    return rc;
}

void ht_pinned_free(struct ht_pinned *m)
{
    if (!m->base)
        return;
    ht_pinned_stop_populating(m);
    free(m->filler);
    munmap(m->base, m->bytes);
    *m = (struct ht_pinned){.base = NULL};
}

/* ------------------------------------------------------------------ shared */

static uint8_t *map_file(int fd, uint64_t bytes)
{
    void *base = map_aligned(bytes, PROT_NONE);

    if (base == MAP_FAILED)
        return NULL;
    if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED)
        return base;
    munmap(base, bytes);
    return NULL;
}

static int map_more(struct ht_shared *m, uint64_t bytes)
{
    uint64_t before = m->maps ? m->map[m->maps - 1].bytes : 0, want = ht_round_up(bytes, HT_HUGE_PAGE_BYTES);

    if (m->maps == HT_SHARED_MAPS_MAX)
        return -ENOMEM;
    want = ht_max_u64(want, 2 * before);
    uint8_t *base = map_file(m->fd, want);
    if (!base)
        return -ENOMEM;
    madvise(base, want, MADV_DONTDUMP);
    if (m->nodes)
        ht_nodes_prefer(m->nodes, m->numa_index, base, want);
    if (mlock2(base, want, MLOCK_ONFAULT) == 0) /* else it may be swapped, as the arena, which reports that */
        m->locked_bytes += want;
    m->map[m->maps].base = base;
    m->map[m->maps++].bytes = want;
    m->huge_bytes = 0;
    return 0;
}

static void choose_pages(struct ht_shared *m)
{
    uint64_t huge = m->bytes / HT_HUGE_PAGE_BYTES * HT_HUGE_PAGE_BYTES, before = m->huge_bytes;

    if (huge > before)
        madvise(ht_shared_at(m, before), huge - before, MADV_HUGEPAGE);
    else if (huge < before)
        madvise(ht_shared_at(m, huge), before - huge, MADV_NOHUGEPAGE);
    m->huge_bytes = huge;
}

int ht_shared_resize(struct ht_shared *m, uint64_t bytes)
{
    int rc = ht_fault(HT_FAULT_SHARED);

    if (rc)
        return rc;
    if (!m->maps || bytes > m->map[m->maps - 1].bytes)
        rc = map_more(m, ht_max_u64(bytes, 1));
    if (!rc && ftruncate(m->fd, (off_t)bytes))
        rc = -errno;
    if (rc)
        return rc;
    m->bytes = bytes;
    choose_pages(m);
    return 0;
}

int ht_shared_open(struct ht_shared *m, const char *name, uint64_t bytes)
{
    *m = (struct ht_shared){.fd = memfd_create(name, MFD_CLOEXEC), .nodes = m->nodes, .numa_index = m->numa_index};
    if (m->fd < 0)
        return -errno;
    int rc = ht_shared_resize(m, bytes);
    if (rc)
        ht_shared_close(m);
    return rc;
}

void ht_shared_close(struct ht_shared *m)
{
    while (m->maps) {
        m->maps--;
        munmap(m->map[m->maps].base, m->map[m->maps].bytes);
    }
    close(m->fd);
    m->fd = -1;
}

/* --------------------------------------------------------------- available */

static uint64_t machine_bytes(void)
{
    FILE *f = fopen("/proc/meminfo", "re");
    char line[256];
    uint64_t kib = 0;

    if (!f)
        return 0;
    while (fgets(line, sizeof(line), f) && sscanf(line, "MemAvailable: %" SCNu64, &kib) != 1)
        continue;
    fclose(f);
    return kib * HT_KIB;
}

/* Limit minus use, where page cache that the kernel can drop counts as unused. */
static uint64_t left_in_group(const struct ht_cgroup *g)
{
    uint64_t limit, used, droppable = 0;

    if (!ht_cgroup_numbers(g, g->v2 ? "memory.max" : "memory.limit_in_bytes", &limit, NULL) ||
        !ht_cgroup_numbers(g, g->v2 ? "memory.current" : "memory.usage_in_bytes", &used, NULL))
        return UINT64_MAX;
    (void)ht_cgroup_keyed(g, "memory.stat", g->v2 ? "inactive_file" : "total_inactive_file", &droppable);
    used -= ht_min_u64(used, droppable);
    return limit > used ? limit - used : 0;
}

/* From the process's own group to the root of the mounted tree. */
static uint64_t left_in_hierarchy(bool v2)
{
    struct ht_cgroup g;
    uint64_t left = UINT64_MAX;

    for (bool more = ht_cgroup_find(v2, "memory", &g); more; more = ht_cgroup_up(&g))
        left = ht_min_u64(left, left_in_group(&g));
    return left;
}

uint64_t ht_mem_available(void)
{
    return ht_min_u64(machine_bytes(), ht_min_u64(left_in_hierarchy(false), left_in_hierarchy(true)));
}
