/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pinner.c - registers a mapping as a buffer of io_uring and transfers bytes to and from it, as a GPU does.
 *
 * The kernel pins the mapping's pages for as long as the buffer is registered. A transfer reaches these pages, and not
 * what the file has by then. So a transfer that the file does not show has lost its page.
 *
 * usage: pinner FILE OTHER. The program opens FILE for reading and writing, maps and closes it, and registers the
 * mapping. It answers each line of standard input with a line: "ok", or the failing call and its error. "in" copies
 * OTHER to the mapping, and "out" the mapping to OTHER. "loop" copies OTHER to the mapping until the next line; where
 * OTHER is larger, from another place in it each time. "unmap" ends the mapping, and the pages stay pinned.
 */
#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "tests/programs/program.h"

enum { PIECE = 256 << 10, ENTRIES = 8, NOT_HERE = 77 };

static struct {
    int fd;
    struct io_uring_sqe *sqe;
    unsigned *sq_tail, *sq_array, *cq_head, *cq_tail, sq_mask, cq_mask;
    struct io_uring_cqe *cqe;
} ring;

static struct {
    uint8_t *base;
    size_t bytes;
    int fd;
    off_t from; /* in other: what comes to the begin of the mapping */
} mapping, other;

static void *map_ring(size_t bytes, off_t what)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring.fd, what);

    if (p == MAP_FAILED)
        die("mmap of the ring");
    return p;
}

static void open_ring(void)
{
    struct io_uring_params p = {0};

    ring.fd = (int)syscall(__NR_io_uring_setup, ENTRIES, &p);
    if (ring.fd < 0) {
        report_line("io_uring_setup: %s\n", strerror(errno));
        exit(NOT_HERE);
    }
    uint8_t *sq = map_ring(p.sq_off.array + p.sq_entries * sizeof(unsigned), IORING_OFF_SQ_RING);
    uint8_t *cq = map_ring(p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
    ring.sqe = map_ring(p.sq_entries * sizeof(struct io_uring_sqe), IORING_OFF_SQES);
    ring.sq_tail = (unsigned *)(void *)(sq + p.sq_off.tail);
    ring.sq_mask = *(unsigned *)(void *)(sq + p.sq_off.ring_mask);
    ring.sq_array = (unsigned *)(void *)(sq + p.sq_off.array);
    ring.cq_head = (unsigned *)(void *)(cq + p.cq_off.head);
    ring.cq_tail = (unsigned *)(void *)(cq + p.cq_off.tail);
    ring.cq_mask = *(unsigned *)(void *)(cq + p.cq_off.ring_mask);
    ring.cqe = (struct io_uring_cqe *)(void *)(cq + p.cq_off.cqes);
}

/* 0, or the line that answers the request. */
static const char *reap(size_t wanted)
{
    static char answer[80];
    unsigned head = *ring.cq_head;

    if (head == __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE))
        return "io_uring_enter: no completion";
    int res = ring.cqe[head & ring.cq_mask].res;
    __atomic_store_n(ring.cq_head, head + 1, __ATOMIC_RELEASE);
    if (res == (int)wanted)
        return NULL;
    snprintf(answer, sizeof(answer), "transfer: %s", res < 0 ? strerror(-res) : "short");
    return answer;
}

/* One piece between the mapping and the other file. */
static const char *transfer(uint8_t op, size_t at)
{
    size_t len = mapping.bytes - at < PIECE ? mapping.bytes - at : PIECE;
    unsigned tail = *ring.sq_tail, i = tail & ring.sq_mask;

    ring.sqe[i] = (struct io_uring_sqe){.opcode = op,
                                        .fd = other.fd,
                                        .off = (uint64_t)other.from + at,
                                        .addr = (uint64_t)(uintptr_t)(mapping.base + at),
                                        .len = (unsigned)len,
                                        .buf_index = 0};
    ring.sq_array[i] = i;
    __atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
    long n;
    do
        n = syscall(__NR_io_uring_enter, ring.fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0);
    while (n < 0 && errno == EINTR);
    return n == 1 ? reap(len) : "io_uring_enter: refused";
}

static const char *transfer_all(uint8_t op)
{
    const char *wrong = NULL;

    for (size_t at = 0; at < mapping.bytes && !wrong; at += PIECE)
        wrong = transfer(op, at);
    return wrong;
}

static bool is_asked(void)
{
    struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};

    return poll(&p, 1, 0) != 0;
}

static const char *loop(void)
{
    const char *wrong = NULL;

    report_line("begins\n");
    for (size_t n = 0; !wrong && !is_asked(); n++) {
        other.from = other.bytes > mapping.bytes ? (off_t)(n * 4096 % (other.bytes - mapping.bytes)) : 0;
        wrong = transfer_all(IORING_OP_READ_FIXED);
    }
    other.from = 0;
    return wrong;
}

static const char *unmap(void)
{
    return munmap(mapping.base, mapping.bytes) ? strerror(errno) : NULL;
}

static void map_file(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat st;

    if (fd < 0 || fstat(fd, &st))
        die("%s", path);
    mapping.bytes = (size_t)st.st_size;
    mapping.base = mmap(NULL, mapping.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping.base == MAP_FAILED || close(fd))
        die("mmap of %s", path);
}

int main(int argc, char **argv)
{
    char word[16];
    struct stat st;

    if (argc != 3)
        die("usage: pinner FILE OTHER");
    other.fd = open(argv[2], O_RDWR | O_CLOEXEC);
    if (other.fd < 0 || fstat(other.fd, &st))
        die("%s", argv[2]);
    other.bytes = (size_t)st.st_size;
    open_ring();
    map_file(argv[1]);
    struct iovec buffer = {mapping.base, mapping.bytes};
    if (syscall(__NR_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, &buffer, 1)) {
        report_line("register: %s\n", strerror(errno));
        return 1;
    }
    report_line("ok\n");
    /* Unbuffered, so that loop sees whether a line is there. */
    setvbuf(stdin, NULL, _IONBF, 0);
    while (scanf("%15s%*[^\n]", word) == 1) {
        getchar(); /* the end of the line */
        const char *wrong = !strcmp(word, "in") ? transfer_all(IORING_OP_READ_FIXED)
            : !strcmp(word, "out")              ? transfer_all(IORING_OP_WRITE_FIXED)
            : !strcmp(word, "loop")             ? loop()
            : !strcmp(word, "unmap")            ? unmap()
                                                : "unknown word";
        report_line("%s\n", wrong ? wrong : "ok");
    }
    return 0;
}
