/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Modes, best first. The first needs one thread that sets up, submits and waits: completions are worked off when this
 * thread wants them, and never interrupt it (Linux 6.1). The second spares the interrupts only (5.19). Never with
 * IOSQE_IO_DRAIN: together with the first mode, a wait for several completions never ends.
 *
 * Each feature has a fault point, by which tests simulate kernels that lack it; probing does not know these points.
 */
#include "tiering/io/uring.h"
#include "tiering/base/fault.h"
#include "tiering/base/lock.h"
#include "tiering/base/log.h"

#include <hitrain/limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PIECE_BYTES HT_GIB /* the kernel registers at most this much as one buffer */
#define PIECES_MAX 1024u
#define PROBE_DEPTH 2u
#define COMMAND_FLAGS (IORING_SETUP_SQE128 | IORING_SETUP_CQE32)

static const unsigned mode_flags[] = {
    [HT_RING_PLAIN] = 0,
    [HT_RING_COOPERATIVE] = IORING_SETUP_COOP_TASKRUN,
    [HT_RING_DEFERRED] = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
};

static struct ht_mutex lock = HT_MUTEX_INIT(HT_LOCK_IO_PROBE);
static struct ht_io_features features HT_GUARDED_BY_STATIC(lock);
static bool probed HT_GUARDED_BY_STATIC(lock);

/* Linux 6.12; liburing has it since 2.8. */
static int clone_memory(struct io_uring *to, const struct io_uring *from)
{
    enum { REGISTER_CLONE_BUFFERS = 30 };
    struct {
        uint32_t src_fd, flags, src_off, dst_off, count, pad[3];
    } arg = {.src_fd = (uint32_t)from->ring_fd};

    return syscall(__NR_io_uring_register, to->ring_fd, REGISTER_CLONE_BUFFERS, &arg, 1) == 0 ? 0 : -errno;
}

/* ------------------------------------------------------------------ probe */

/* Without these there is no I/O; all came by Linux 5.6. */
static bool operations_there(struct io_uring *uring)
{
    static const int needed[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED,
                                 IORING_OP_FSYNC};
    struct io_uring_probe *probe = io_uring_get_probe_ring(uring);
    bool all = probe != NULL;

    for (unsigned i = 0; all && i < HT_ARRAY_SIZE(needed); i++)
        all = io_uring_opcode_supported(probe, needed[i]);
    io_uring_free_probe(probe);
    return all;
}

static int probe_mode(struct io_uring *uring, enum ht_ring_mode *out_mode)
{
    int rc = -EINVAL;

    for (int mode = HT_RING_DEFERRED; mode >= HT_RING_PLAIN && rc == -EINVAL; mode--) {
        rc = io_uring_queue_init(PROBE_DEPTH, uring, mode_flags[mode]);
        *out_mode = (enum ht_ring_mode)mode;
    }
    return rc;
}

static bool registers_files(struct io_uring *uring)
{
    static const int nothing = -1; /* an empty place that may be filled later */
    bool works = io_uring_register_files(uring, &nothing, 1) == 0;

    if (works)
        io_uring_unregister_files(uring);
    return works;
}

static void probe_memory(struct io_uring *uring, struct ht_io_features *f)
{
    struct io_uring other;
    void *page;

    if (posix_memalign(&page, HT_BLOCK_BYTES, HT_BLOCK_BYTES) != 0)
        return;
    f->memory = io_uring_register_buffers(uring, &(struct iovec){page, HT_BLOCK_BYTES}, 1) == 0;
    if (f->memory && io_uring_queue_init(PROBE_DEPTH, &other, 0) == 0) {
        f->shared_memory = clone_memory(&other, uring) == 0;
        io_uring_queue_exit(&other);
    }
    if (f->memory)
        io_uring_unregister_buffers(uring);
    free(page);
}

/* NVMe commands are longer than an entry, and so are their results. */
static bool passes_commands(enum ht_ring_mode mode)
{
    struct io_uring uring;

    if (io_uring_queue_init(PROBE_DEPTH, &uring, mode_flags[mode] | COMMAND_FLAGS) != 0)
        return false;
    struct io_uring_probe *probe = io_uring_get_probe_ring(&uring);
    bool works = probe && io_uring_opcode_supported(probe, IORING_OP_URING_CMD);
    io_uring_free_probe(probe);
    io_uring_queue_exit(&uring);
    return works;
}

static int probe_locked(void) HT_REQUIRES_STATIC(lock)
{
    struct ht_io_features f = {.mode = HT_RING_PLAIN};
    struct io_uring uring;
    int rc = probe_mode(&uring, &f.mode);

    if (rc != 0)
        return rc;
    if (operations_there(&uring)) {
        f.files = registers_files(&uring);
        probe_memory(&uring, &f);
    } else {
        rc = -ENOSYS;
    }
    io_uring_queue_exit(&uring);
    if (rc == 0) {
        f.commands = passes_commands(f.mode);
        features = f;
        probed = true;
    }
    return rc;
}

int ht_io_features(struct ht_io_features *out)
{
    int rc = 0;

    ht_mutex_lock(&lock);
    if (!probed)
        rc = probe_locked();
    if (rc == 0)
        *out = features;
    ht_mutex_unlock(&lock);
    return rc;
}

/* ------------------------------------------------------------------- open */

static enum ht_ring_mode allowed_mode(enum ht_ring_mode mode)
{
    bool not_deferred = ht_fault(HT_FAULT_IO_DEFERRED) != 0, not_cooperative = ht_fault(HT_FAULT_IO_COOPERATIVE) != 0;

    if (mode == HT_RING_DEFERRED && not_deferred)
        mode = HT_RING_COOPERATIVE;
    return mode == HT_RING_COOPERATIVE && not_cooperative ? HT_RING_PLAIN : mode;
}

static int open_ring(struct io_uring *uring, unsigned depth, enum ht_ring_mode best)
{
    bool no_commands = ht_fault(HT_FAULT_IO_COMMANDS) != 0;
    unsigned flags = IORING_SETUP_CLAMP;
    struct ht_io_features f;
    int rc = ht_fault(HT_FAULT_IO_RING);

    if (rc == 0)
        rc = ht_io_features(&f);
    if (rc != 0)
        return rc;
    flags |= mode_flags[allowed_mode(best < f.mode ? best : f.mode)];
    if (f.commands && !no_commands)
        flags |= COMMAND_FLAGS;
    return io_uring_queue_init(depth, uring, flags);
}

int ht_uring_open(struct io_uring *uring, unsigned depth, enum ht_ring_mode best)
{
    int rc = open_ring(uring, depth, best);

    if (rc != 0)
        ht_error("io_uring cannot be used: %s (Linux 5.6 or newer is needed; see the sysctl kernel.io_uring_disabled, "
                 "the limit on locked memory, and what a container forbids)",
                 strerror(-rc));
    return rc;
}

void ht_uring_close(struct io_uring *uring, bool settle)
{
    if (settle) {
        (void)io_uring_get_events(uring);
        (void)io_uring_unregister_files(uring); /* takes effect at once; the kernel ends the ring later */
    }
    io_uring_queue_exit(uring);
}

/* ----------------------------------------------------------------- memory */

/* How many segments, or 0: too many. */
static unsigned cut(const struct ht_pinned_area *areas, unsigned count, struct iovec *segments,
                    struct ht_uring_memory *m)
{
    unsigned n = 0;

    for (unsigned i = 0; i < count; i++) {
        m->area[i] = areas[i];
        m->first_segment[i] = n;
        for (uint64_t at = 0; at < areas[i].bytes; at += PIECE_BYTES) {
            if (n == PIECES_MAX)
                return 0;
            segments[n++] = (struct iovec){(char *)areas[i].base + at, ht_min_u64(PIECE_BYTES, areas[i].bytes - at)};
        }
    }
    m->count = count;
    return n;
}

bool ht_uring_register(struct io_uring *uring, const struct ht_pinned_area *areas, unsigned count,
                       struct ht_uring_memory *out_memory)
{
    struct ht_uring_memory m;
    struct iovec *segments;

    if (count > HT_URING_AREAS_MAX || ht_fault(HT_FAULT_IO_REGISTER) != 0)
        return false;
    segments = calloc(PIECES_MAX, sizeof(*segments));
    if (!segments)
        return false;
    unsigned n = cut(areas, count, segments, &m);
    bool works = n > 0 && io_uring_register_buffers(uring, segments, n) == 0;
    free(segments);
    if (works)
        *out_memory = m;
    return works;
}

/* The area that an address lies in; the number of areas: in none. *out_at: where in it. */
static unsigned area_of(const struct ht_uring_memory *m, uintptr_t base, uint64_t *out_at)
{
    unsigned i = 0;

    while (i < m->count && (*out_at = base - (uintptr_t)m->area[i].base) >= m->area[i].bytes)
        i++;
    return i;
}

int ht_uring_lookup(const struct ht_uring_memory *m, uintptr_t base, uint32_t len)
{
    uint64_t at;
    unsigned i = area_of(m, base, &at);

    if (i == m->count || len > m->area[i].bytes - at || at / PIECE_BYTES != (at + len - 1) / PIECE_BYTES)
        return -1;
    return (int)(m->first_segment[i] + at / PIECE_BYTES);
}

bool ht_uring_clone(struct io_uring *uring, const struct io_uring *from)
{
    (void)io_uring_unregister_buffers(uring);
    return ht_fault(HT_FAULT_IO_CLONE) == 0 && clone_memory(uring, from) == 0;
}

bool ht_uring_is_huge(const struct ht_uring_memory *m, uintptr_t base)
{
    uint64_t at;
    unsigned i = area_of(m, base, &at);

    return i < m->count && m->area[i].huge;
}
