/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shared.c - see shared.h. A memfd, mapped whole; again, twice as large, when it outgrows its mapping. No shared state.
 *
 * Huge pages are used only for whole ones of the file: the last one would take 2 MiB for a small rest.
 */
#include "tiering/sys/shared.h"
#include "tiering/base/fault.h"
#include "tiering/sys/mem.h"

#include <sys/mman.h>
#include <unistd.h>

static uint8_t *map_file(int fd, uint64_t bytes)
{
    void *base = ht_mem_map_aligned(bytes, PROT_NONE);

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
