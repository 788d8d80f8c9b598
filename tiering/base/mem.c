/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem.c - large pinned memory.
 *
 * Order matters: huge pages and the NUMA policy are asked for before the first page is
 * touched, because pages that exist keep their size and place. No shared state; any thread.
 */
#include "tiering/base/mem.h"
#include "tiering/base/log.h"

#include <inttypes.h>
#include <numa.h>
#include <numaif.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_PAGE_BYTES (2 * HT_MIB)
#define NODES_MAX 1024u
#define WORD_BITS (8 * sizeof(unsigned long))

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* Map bytes of fd at an address aligned to huge pages: reserve more than needed, keep the aligned part. */
static void *map_aligned(int fd, size_t bytes)
{
    size_t reserved = bytes + HUGE_PAGE_BYTES;
    char *area = mmap(NULL, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *base;

    if (area == MAP_FAILED)
        return MAP_FAILED;
    base = (char *)ht_round_up((uintptr_t)area, HUGE_PAGE_BYTES);
    if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int saved_errno = errno;

        munmap(area, reserved);
        errno = saved_errno;
        return MAP_FAILED;
    }
    if (base > area)
        munmap(area, (size_t)(base - area));
    munmap(base + bytes, (size_t)(area + reserved - (base + bytes)));
    return base;
}

static int bind_to_node(void *base, size_t bytes, int node)
{
    unsigned long mask[NODES_MAX / WORD_BITS] = {0};

    if (node < 0)
        return 0;
    if (numa_available() < 0 || node > numa_max_node() || (unsigned)node >= NODES_MAX) {
        ht_error("NUMA node %d does not exist on this machine", node);
        return -EINVAL;
    }
    mask[(unsigned)node / WORD_BITS] |= 1ul << ((unsigned)node % WORD_BITS);
    if (mbind(base, bytes, MPOL_BIND, mask, NODES_MAX, 0) == 0)
        return 0;
    if (errno != EPERM && errno != ENOSYS)
        return -errno;
    ht_warn("memory is not bound to NUMA node %d: %m (a container may forbid mbind)", node);
    return 0;
}

static int populate(char *base, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    while (madvise(base, bytes, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN)
            continue;
        if (errno == EFAULT) /* what would be SIGBUS when touched: no page to be had */
            return -ENOMEM;
        if (errno != EINVAL)
            return -errno;
        for (size_t at = 0; at < bytes; at += page) /* an older kernel */
            *(volatile char *)(base + at) = 0;
        break;
    }
    return 0;
}

/* Whether the kernel mapped all of it by huge pages; only smaps tells. */
static bool is_huge(const char *base, size_t bytes)
{
    FILE *f = fopen("/proc/self/smaps", "re");
    uint64_t from, to, kib, huge_kib = 0;
    bool inside = false;
    char line[512];

    if (f == NULL)
        return false;
    while (fgets(line, sizeof(line), f) != NULL) {
        if (sscanf(line, "%" SCNx64 "-%" SCNx64 " ", &from, &to) == 2)
            inside = from >= (uintptr_t)base && to <= (uintptr_t)base + bytes;
        else if (inside && sscanf(line, "ShmemPmdMapped: %" SCNu64, &kib) == 1)
            huge_kib += kib;
    }
    fclose(f);
    return huge_kib * HT_KIB >= bytes;
}

static int prepare(struct ht_pinned *m, int node)
{
    int err;

    madvise(m->base, m->bytes, MADV_HUGEPAGE);
    madvise(m->base, m->bytes, MADV_DONTDUMP);
    err = bind_to_node(m->base, m->bytes, node);
    if (err == 0)
        err = populate(m->base, m->bytes);
    if (err != 0)
        return err;
    m->locked = mlock(m->base, m->bytes) == 0;
    m->huge = is_huge(m->base, m->bytes);
    return 0;
}

int ht_pinned_alloc(struct ht_pinned *m, const char *name, size_t bytes, int node)
{
    struct ht_pinned p = {.base = MAP_FAILED, .fd = -1};
    int err;

    if (bytes == 0 || bytes > SIZE_MAX / 2)
        return -EINVAL;
    p.bytes = ht_round_up(bytes, HUGE_PAGE_BYTES);
    p.fd = memfd_create(name, MFD_CLOEXEC);
    if (p.fd < 0)
        return -errno;
    if (ftruncate(p.fd, (off_t)p.bytes) != 0) {
        err = -errno;
        goto out;
    }
    p.base = map_aligned(p.fd, p.bytes);
    if (p.base == MAP_FAILED) {
        err = -errno;
        goto out;
    }
    err = prepare(&p, node);
    if (err == 0)
        *m = p;
out:
    if (err != 0) {
        if (p.base != MAP_FAILED)
            munmap(p.base, p.bytes);
        close(p.fd);
    }
    return err;
}

void ht_pinned_free(struct ht_pinned *m)
{
    if (m->base == NULL)
        return;
    munmap(m->base, m->bytes);
    close(m->fd);
    *m = (struct ht_pinned){.fd = -1};
}
