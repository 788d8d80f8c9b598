/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fsx.c - random operations on two files, each beside a copy in memory that holds the expected content.
 *
 * Each file is open several times at once: plainly, with O_APPEND, and with --direct with O_DIRECT; each operation
 * takes any of these descriptors. A mapping of the whole file lives for as long as they do. The written bytes encode
 * the operation and the offset, so a mismatch names the writer of the wrong bytes. Equal seeds and options do the same
 * operations.
 *
 * With --keep the two files exist already, and stay: the caller chooses their content and their kind.
 *
 * Invariant: the copy holds zeros from its size on.
 */
#include <fcntl.h>
#include <getopt.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include "tests/programs/program.h"

enum { FILES = 2, FDS_MAX = 5, PAGE = 4096, LOG_LINES = 60, LINE_BYTES = 120, RUNS_SHOWN = 5, UNIT_MAX = 65536 };

struct descriptor {
    int fd;
    bool direct, append;
};

struct file {
    char path[4096];
    struct descriptor d[FDS_MAX];
    int count;
    uint8_t *copy;
    uint64_t size;
    uint8_t *map; /* of size_max bytes, shared; NULL without */
};

static const char *folder = NULL;
static uint64_t ops = 10000, seed, size_max = 256 << 10, unit, verify_every = 200;
static int no_map, no_clone, no_space, no_cut, all_direct, pollute, verbose, keep;

static struct file files[FILES];
static uint8_t *buffer; /* size_max and UNIT_MAX more, on a page */
static uint64_t rnd, op;
static char lines[LOG_LINES][LINE_BYTES];
static uint64_t line_count;
static bool offers_allocate, offers_punch, offers_zero, offers_clone;

/* -------------------------------------------------------------- messages */

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
    char *line = lines[line_count++ % LOG_LINES];
    int n = snprintf(line, LINE_BYTES, "%8llu  ", (unsigned long long)op);
    va_list args;

    va_start(args, format);
    vsnprintf(line + n, (size_t)(LINE_BYTES - n), format, args);
    va_end(args);
    if (verbose)
        puts(line);
}

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...)
{
    uint64_t from = line_count > LOG_LINES ? line_count - LOG_LINES : 0;
    va_list args;

    fflush(stdout);
    fprintf(stderr, "the last operations:\n");
    for (uint64_t i = from; i < line_count; i++)
        fprintf(stderr, "%s\n", lines[i % LOG_LINES]);
    fprintf(stderr, "fsx: operation %llu, --seed=%llu: ", (unsigned long long)op, (unsigned long long)seed);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\n");
    exit(1);
}

#define FAIL_ERRNO(what) fail("%s: %s", what, strerror(errno))

static const char *name_of(const struct file *f)
{
    return f == files ? "A" : "B";
}

static const char *kind_of(const struct descriptor *d)
{
    return d->direct ? d->append ? "direct append" : "direct" : d->append ? "append" : "plain";
}

/* -------------------------------------------------------------- contents */

static uint64_t word_at(uint64_t off)
{
    return mix64(op << 40 | off >> 3);
}

static void fill(uint8_t *to, uint64_t off, uint64_t len)
{
    for (uint64_t i = 0; i < len;) {
        uint64_t word = word_at(off + i), skip = (off + i) % 8, n = 8 - skip < len - i ? 8 - skip : len - i;
        memcpy(to + i, (uint8_t *)&word + skip, n);
        i += n;
    }
}

/* Names the operation that wrote the bytes at off, if one of ours did. */
static void report_writer(const uint8_t *got, uint64_t off, uint64_t end)
{
    uint64_t word, at = (off + 7) / 8 * 8;

    if (at + 8 > end)
        return;
    memcpy(&word, got + (at - off), 8);
    if (word == 0) {
        fprintf(stderr, ", found zeros");
        return;
    }
    word = unmix64(word);
    if (word >> 40 <= op && (word & ((1ull << 40) - 1)) << 3 < size_max)
        fprintf(stderr, ", found what operation %llu wrote at 0x%llx", (unsigned long long)(word >> 40),
                (unsigned long long)((word & ((1ull << 40) - 1)) << 3));
}

static void compare(const struct file *f, const char *how, const uint8_t *got, uint64_t off, uint64_t len)
{
    const uint8_t *want = f->copy + off;
    uint64_t i = 0;
    int runs = 0;

    if (memcmp(got, want, len) == 0)
        return;
    for (; i < len && runs < RUNS_SHOWN; runs++) {
        uint64_t end;
        while (i < len && got[i] == want[i])
            i++;
        for (end = i; end < len && got[end] != want[end]; end++)
            ;
        if (i < end) {
            fprintf(stderr, "0x%llx to 0x%llx: expected %02x, found %02x", (unsigned long long)(off + i),
                    (unsigned long long)(off + end), want[i], got[i]);
            report_writer(got + i, off + i, off + end);
            fprintf(stderr, "\n");
        }
        i = end;
    }
    fail("file %s (%s) of 0x%llx bytes differs, %s", name_of(f), f->path, (unsigned long long)f->size, how);
}

static void grow(struct file *f, uint64_t size)
{
    if (f->size < size)
        f->size = size;
}

/* --------------------------------------------------------------- choices */

static uint64_t below(uint64_t n)
{
    return rnd_below(&rnd, n);
}

static struct descriptor *any_descriptor(struct file *f)
{
    return &f->d[below((uint64_t)f->count)];
}

static struct descriptor *any_but_append(struct file *f)
{
    struct descriptor *d;

    do
        d = any_descriptor(f);
    while (d->append);
    return d;
}

/* Often near multiples that programs and file systems round to; 0 to max. */
static uint64_t any_offset(const struct file *f, uint64_t max)
{
    static const uint64_t steps[] = {512, PAGE, 65536, 1 << 20};
    uint64_t step = steps[below(COUNT_OF(steps))], at;

    switch (below(6)) {
    case 0:
        at = f->size;
        break;
    case 1:
        at = below(max / step + 1) * step;
        break;
    case 2:
        at = below(max / step + 1) * step + below(33);
        at = at > 16 ? at - 16 : 0;
        break;
    default:
        at = below(max + 1);
    }
    return at < max ? at : max;
}

static uint64_t any_length(void)
{
    uint64_t bits = 1;

    while (1ull << bits < size_max)
        bits++;
    return 1 + below(1ull << (1 + below(bits)));
}

/* A range below end that suits the descriptor; false where there is none. */
static bool any_range(const struct file *f, const struct descriptor *d, uint64_t end, uint64_t *off, uint64_t *len)
{
    *off = any_offset(f, end);
    *len = any_length();
    if (d && d->direct) {
        *off -= *off % unit;
        *len += unit - 1 - (*len - 1) % unit;
    }
    if (*len > end - *off)
        *len = end - *off;
    if (d && d->direct)
        *len -= *len % unit;
    return *len > 0;
}

static uint8_t *any_memory(const struct descriptor *d)
{
    if (!d->direct)
        return buffer + below(64);
    return buffer + below(PAGE / (unit < PAGE ? unit : PAGE)) * unit;
}

/* ------------------------------------------------------- reading, writing */

/* In several pieces: readv and writev get to see buffers of any size. */
static int make_pieces(struct iovec *v, uint8_t *at, uint64_t len)
{
    int n = 0;

    while (len > 0 && n < 3) {
        uint64_t piece = n < 2 ? 1 + below(len) : len;
        v[n++] = (struct iovec){at, piece};
        at += piece;
        len -= piece;
    }
    return n;
}

static ssize_t transfer(const struct descriptor *d, bool writes, uint8_t *bytes, uint64_t len, uint64_t off)
{
    struct iovec v[3];

    switch (d->direct ? 0 : below(3)) {
    case 1: {
        int pieces = make_pieces(v, bytes, len);
        return writes ? pwritev(d->fd, v, pieces, (off_t)off) : preadv(d->fd, v, pieces, (off_t)off);
    }
    case 2:
        if (lseek(d->fd, (off_t)off, SEEK_SET) != (off_t)off)
            FAIL_ERRNO("lseek");
        return writes ? write(d->fd, bytes, len) : read(d->fd, bytes, len);
    default:
        return writes ? pwrite(d->fd, bytes, len, (off_t)off) : pread(d->fd, bytes, len, (off_t)off);
    }
}

static void do_write(struct file *f)
{
    struct descriptor *d = any_descriptor(f);
    uint8_t *from = any_memory(d);
    uint64_t off, len;

    if (!any_range(f, d, size_max, &off, &len))
        return;
    if (d->append) {
        off = f->size;
        if (off + len > size_max || (d->direct && off % unit))
            return;
    }
    note("%s write  0x%llx + 0x%llx, %s", name_of(f), (unsigned long long)off, (unsigned long long)len, kind_of(d));
    fill(from, off, len);
    ssize_t n = transfer(d, true, from, len, off);
    if (n != (ssize_t)len)
        fail("write returned %zd: %s", n, n < 0 ? strerror(errno) : "short");
    fill(f->copy + off, off, len);
    grow(f, off + len);
}

static void read_and_compare(struct file *f, struct descriptor *d, uint64_t off, uint64_t len)
{
    uint64_t want = off >= f->size ? 0 : f->size - off < len ? f->size - off : len;
    uint8_t *to = any_memory(d);

    memset(to, 0xee, len);
    ssize_t n = transfer(d, false, to, len, off);
    if (n != (ssize_t)want)
        fail("read returned %zd instead of %llu: %s", n, (unsigned long long)want, n < 0 ? strerror(errno) : "");
    compare(f, d->direct ? "read directly" : "read", to, off, want);
}

static void do_read(struct file *f)
{
    struct descriptor *d = any_descriptor(f);
    uint64_t off, len;

    if (!any_range(f, d, size_max, &off, &len))
        return;
    note("%s read   0x%llx + 0x%llx, %s", name_of(f), (unsigned long long)off, (unsigned long long)len, kind_of(d));
    read_and_compare(f, d, off, len);
}

static void do_truncate(struct file *f)
{
    uint64_t size = any_offset(f, size_max);
    bool by_path = rnd_once_in(&rnd, 4);

    note("%s size   0x%llx to 0x%llx", name_of(f), (unsigned long long)f->size, (unsigned long long)size);
    int rc = by_path ? truncate(f->path, (off_t)size) : ftruncate(any_descriptor(f)->fd, (off_t)size);
    if (no_cut && size < f->size) {
        if (!rc || errno != EBUSY)
            fail("truncate: %s instead of EBUSY", rc ? strerror(errno) : "success");
        return;
    }
    if (rc)
        FAIL_ERRNO("truncate");
    if (size < f->size)
        memset(f->copy + size, 0, f->size - size);
    f->size = size;
}

/* -------------------------------------------------------------- mappings */

/* The mapping that lives on, or one of this moment on any descriptor. */
static uint8_t *map_range(struct file *f, uint64_t off, uint64_t len, uint8_t **out_base, uint64_t *out_len)
{
    uint64_t begin = off / PAGE * PAGE;
    struct descriptor *d = any_descriptor(f);

    *out_base = NULL;
    if (f->map && below(2))
        return f->map + off;
    *out_len = off + len - begin;
    *out_base = mmap(NULL, *out_len, PROT_READ | PROT_WRITE, MAP_SHARED, d->fd, (off_t)begin);
    if (*out_base == MAP_FAILED)
        fail("mmap, %s: %s", kind_of(d), strerror(errno));
    return *out_base + (off - begin);
}

static void unmap_range(uint8_t *base, uint64_t len)
{
    if (base && munmap(base, len))
        FAIL_ERRNO("munmap");
}

static void do_map_read(struct file *f)
{
    uint64_t off, len, mapped;
    uint8_t *base, *at;

    if (!any_range(f, NULL, f->size, &off, &len))
        return;
    at = map_range(f, off, len, &base, &mapped);
    note("%s load   0x%llx + 0x%llx, %s", name_of(f), (unsigned long long)off, (unsigned long long)len,
         base ? "new mapping" : "old mapping");
    compare(f, "through a mapping", at, off, len);
    unmap_range(base, mapped);
}

static void do_map_write(struct file *f)
{
    uint64_t off, len, mapped;
    uint8_t *base, *at;
    bool sync = rnd_once_in(&rnd, 8);

    if (!any_range(f, NULL, f->size, &off, &len))
        return;
    at = map_range(f, off, len, &base, &mapped);
    note("%s store  0x%llx + 0x%llx, %s%s", name_of(f), (unsigned long long)off, (unsigned long long)len,
         base ? "new mapping" : "old mapping", sync ? ", msync" : "");
    fill(at, off, len);
    /* Bytes after the end in the last page must not come to light when the file grows. */
    uint64_t end = off + len, tail = (PAGE - end % PAGE) % PAGE;
    if (pollute && end == f->size && tail > 0)
        memset(at + len, 0xbb, tail);
    if (sync && msync(at - off % PAGE, len + off % PAGE, MS_SYNC))
        FAIL_ERRNO("msync");
    fill(f->copy + off, off, len);
    unmap_range(base, mapped);
}

/* ----------------------------------------------------------------- space */

static void change_space(struct file *f, int mode, const char *what)
{
    uint64_t off, len;

    if (!any_range(f, NULL, size_max, &off, &len))
        return;
    note("%s %s 0x%llx + 0x%llx%s", name_of(f), what, (unsigned long long)off, (unsigned long long)len,
         mode & FALLOC_FL_KEEP_SIZE ? ", keep size" : "");
    if (fallocate(any_descriptor(f)->fd, mode, (off_t)off, (off_t)len))
        FAIL_ERRNO("fallocate");
    if (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))
        memset(f->copy + off, 0, len);
    if (!(mode & FALLOC_FL_KEEP_SIZE))
        grow(f, off + len);
}

static void do_punch(struct file *f)
{
    if (offers_punch)
        change_space(f, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, "punch ");
}

static void do_zero(struct file *f)
{
    if (offers_zero)
        change_space(f, FALLOC_FL_ZERO_RANGE | (below(2) ? FALLOC_FL_KEEP_SIZE : 0), "zero  ");
}

static void do_allocate(struct file *f)
{
    if (offers_allocate)
        change_space(f, below(2) ? FALLOC_FL_KEEP_SIZE : 0, "alloc ");
}

static void do_clone(struct file *f)
{
    struct file *to = &files[rnd_once_in(&rnd, 4)];
    struct descriptor *in = any_but_append(f), *out = any_but_append(to);
    const struct descriptor *strict = in->direct ? in : out;
    uint64_t off, len, at;

    if (!offers_clone || !any_range(f, strict, f->size, &off, &len))
        return;
    at = any_offset(to, size_max - len);
    if (strict->direct)
        at -= at % unit;
    else if (rnd_once_in(&rnd, 2) && len > 65536)
        at = at / 65536 * 65536 + off % 65536; /* so that a clone of references need not move bytes */
    if (at + len > size_max || (f == to && at < off + len && off < at + len))
        return;
    note("%s clone  0x%llx + 0x%llx to %s 0x%llx", name_of(f), (unsigned long long)off, (unsigned long long)len,
         name_of(to), (unsigned long long)at);
    memmove(to->copy + at, f->copy + off, len);
    grow(to, at + len);
    while (len > 0) {
        off_t from_off = (off_t)off, to_off = (off_t)at;
        ssize_t n = copy_file_range(in->fd, &from_off, out->fd, &to_off, len, 0);
        if (n <= 0 || (uint64_t)n > len)
            fail("copy_file_range returned %zd of %llu: %s", n, (unsigned long long)len, strerror(errno));
        off += (uint64_t)n;
        at += (uint64_t)n;
        len -= (uint64_t)n;
    }
}

/* Holes must hold zeros, and data and holes take turns up to the end. */
static void do_seek(struct file *f)
{
    int fd = any_descriptor(f)->fd;
    off_t at = 0, size = (off_t)f->size;

    note("%s seek", name_of(f));
    while (at < size) {
        off_t data = lseek(fd, at, SEEK_DATA), hole, end = data < 0 && errno == ENXIO ? size : data;
        if (end < at || end > size)
            fail("SEEK_DATA from 0x%llx gave 0x%llx: %s", (long long)at, (long long)data, strerror(errno));
        for (off_t i = at; i < end; i++)
            if (f->copy[i])
                fail("SEEK_DATA from 0x%llx gave 0x%llx, but there is data at 0x%llx", (long long)at, (long long)data,
                     (long long)i);
        if (end == size)
            break;
        hole = lseek(fd, end, SEEK_HOLE);
        if (hole <= end || hole > size)
            fail("SEEK_HOLE from 0x%llx gave 0x%llx: %s", (long long)end, (long long)hole, strerror(errno));
        at = hole;
    }
    if (lseek(fd, size, SEEK_DATA) != -1 || errno != ENXIO || lseek(fd, size, SEEK_HOLE) != -1 || errno != ENXIO)
        fail("SEEK_DATA or SEEK_HOLE at the end is not ENXIO");
}

/* ------------------------------------------------------- files as a whole */

static void open_one(struct file *f, int flags)
{
    struct descriptor *d = &f->d[f->count];

    d->direct = flags & O_DIRECT;
    d->append = flags & O_APPEND;
    d->fd = open(f->path, O_RDWR | O_CREAT | O_CLOEXEC | flags, 0600);
    if (d->fd < 0)
        fail("open %s, %s: %s", f->path, kind_of(d), strerror(errno));
    f->count++;
}

static void open_file(struct file *f)
{
    f->count = 0;
    if (unit) {
        open_one(f, O_DIRECT);
        open_one(f, O_DIRECT | O_APPEND);
    }
    if (!unit || !all_direct) {
        open_one(f, 0);
        open_one(f, 0);
        open_one(f, O_APPEND);
    }
    f->map = NULL;
    if (!no_map) {
        f->map = mmap(NULL, size_max, PROT_READ | PROT_WRITE, MAP_SHARED, f->d[0].fd, 0);
        if (f->map == MAP_FAILED)
            fail("mmap, %s: %s", kind_of(&f->d[0]), strerror(errno));
    }
}

static void close_file(struct file *f)
{
    bool map_last = below(2);

    if (f->map && !map_last && munmap(f->map, size_max))
        FAIL_ERRNO("munmap");
    for (int i = 0; i < f->count; i++)
        if (close(f->d[i].fd))
            FAIL_ERRNO("close");
    if (f->map && map_last && munmap(f->map, size_max))
        FAIL_ERRNO("munmap");
}

static void do_reopen(struct file *f)
{
    note("%s reopen", name_of(f));
    close_file(f);
    open_file(f);
}

static void do_sync(struct file *f)
{
    struct descriptor *d = any_descriptor(f);
    uint64_t how = below(3);

    note("%s %s", name_of(f), how == 0 ? "fsync" : how == 1 ? "fdatasync" : "msync");
    if (how == 0 ? fsync(d->fd) : how == 1 || !f->map ? fdatasync(d->fd) : msync(f->map, size_max, MS_SYNC))
        FAIL_ERRNO("sync");
}

static void do_forget(struct file *f)
{
    note("%s forget pages", name_of(f));
    if (posix_fadvise(any_descriptor(f)->fd, 0, 0, POSIX_FADV_DONTNEED))
        fail("posix_fadvise");
}

static void verify(struct file *f)
{
    struct stat st;

    for (int i = 0; i < f->count; i++) {
        uint64_t len = size_max;
        if (fstat(f->d[i].fd, &st) || (uint64_t)st.st_size != f->size)
            fail("file %s has %lld bytes instead of %llu", name_of(f), (long long)st.st_size,
                 (unsigned long long)f->size);
        if (f->d[i].direct)
            len -= len % unit;
        read_and_compare(f, &f->d[i], 0, len);
    }
    if (f->map)
        compare(f, "through a mapping", f->map, 0, f->size);
}

static const struct {
    unsigned weight;
    void (*work)(struct file *f);
    bool maps;
} kinds[] = {
    {24, do_write, false},    {20, do_read, false}, {10, do_truncate, false}, {12, do_map_read, true},
    {14, do_map_write, true}, {5, do_punch, false}, {4, do_zero, false},      {3, do_allocate, false},
    {8, do_clone, false},     {3, do_seek, false},  {1, do_reopen, false},    {2, do_sync, false},
    {2, do_forget, false},
};

static void step(void)
{
    struct file *f = &files[rnd_once_in(&rnd, 4)];
    unsigned sum = 0, at;
    size_t i = 0;

    for (i = 0; i < COUNT_OF(kinds); i++)
        sum += kinds[i].weight;
    at = (unsigned)below(sum);
    for (i = 0; at >= kinds[i].weight; i++)
        at -= kinds[i].weight;
    if (!kinds[i].maps || !no_map)
        kinds[i].work(f);
    if (op % verify_every == 0 || op == ops) {
        note("verify");
        for (int k = 0; k < FILES; k++)
            verify(&files[k]);
    }
}

/* ------------------------------------------------------------------ start */

static bool offers(int fd, int mode)
{
    return !no_space && fallocate(fd, mode, 0, PAGE) == 0;
}

/* Tried on a file of its own. */
static void find_offers(void)
{
    char path[4096];
    off_t in = 0, out = PAGE;

    snprintf(path, sizeof(path), "%s/fsx.%d.offers", folder, (int)getpid());
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 || unlink(path))
        fail("%s: %s", path, strerror(errno));
    offers_allocate = offers(fd, 0);
    offers_punch = offers(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE);
    offers_zero = offers(fd, FALLOC_FL_ZERO_RANGE);
    if (ftruncate(fd, PAGE))
        FAIL_ERRNO("truncate");
    offers_clone = !no_clone && copy_file_range(fd, &in, fd, &out, PAGE, 0) == PAGE;
    close(fd);
}

/* Fills the copy with the content of a kept file. */
static void take_content(struct file *f)
{
    int fd = open(f->path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : pread(fd, f->copy, size_max, 0);
    struct stat st;

    if (n < 0 || fstat(fd, &st))
        fail("%s: %s", f->path, strerror(errno));
    if (n != st.st_size)
        fail("%s has more than %llu bytes", f->path, (unsigned long long)size_max);
    f->size = (uint64_t)n;
    close(fd);
}

static void begin_file(struct file *f)
{
    f->copy = calloc(1, size_max);
    if (!f->copy)
        die("memory");
    if (keep) {
        snprintf(f->path, sizeof(f->path), "%s/%s", folder, name_of(f));
        take_content(f);
    } else {
        snprintf(f->path, sizeof(f->path), "%s/fsx.%d.%s", folder, (int)getpid(), name_of(f));
    }
    open_file(f);
}

static void usage(void)
{
    fputs("usage: fsx [OPTION]... FOLDER\n"
          "  --ops=N       operations (10000)\n"
          "  --seed=N      else it is taken from the clock; it is printed\n"
          "  --size=N      bytes that a file has at most (262144)\n"
          "  --direct=N    also descriptors with O_DIRECT, at offsets and lengths that are multiples of N; 1: at any\n"
          "  --all-direct  with --direct: no others, also for mappings\n"
          "  --no-map --no-clone --no-space    without mappings, copy_file_range, fallocate\n"
          "  --no-cut      making a file smaller is EBUSY\n"
          "  --keep        the files are FOLDER/A and FOLDER/B, which are there and stay\n"
          "  --pollute     write behind the end of files through mappings\n"
          "  --verify=N    look at everything after each N operations (200)\n"
          "  --verbose     print each operation\n",
          stderr);
    exit(2);
}

static void parse(int argc, char **argv)
{
    enum { OPS = 256, SEED, SIZE, DIRECT, VERIFY };
    static const struct option options[] = {
        {"ops", 1, NULL, OPS},         {"seed", 1, NULL, SEED},
        {"size", 1, NULL, SIZE},       {"direct", 1, NULL, DIRECT},
        {"verify", 1, NULL, VERIFY},   {"no-map", 0, &no_map, 1},
        {"no-clone", 0, &no_clone, 1}, {"no-space", 0, &no_space, 1},
        {"no-cut", 0, &no_cut, 1},     {"all-direct", 0, &all_direct, 1},
        {"pollute", 0, &pollute, 1},   {"verbose", 0, &verbose, 1},
        {"keep", 0, &keep, 1},         {0},
    };
    uint64_t *numbers[] = {&ops, &seed, &size_max, &unit, &verify_every};
    int c;

    seed = random_seed();
    while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0) {
        if (c >= OPS && c <= VERIFY)
            *numbers[c - OPS] = strtoull(optarg, NULL, 0);
        else if (c)
            usage();
    }
    if (optind != argc - 1 || size_max < PAGE || unit > UNIT_MAX || verify_every == 0)
        usage();
    folder = argv[optind];
}

int main(int argc, char **argv)
{
    parse(argc, argv);
    rnd = mix64(seed);
    printf("fsx: --seed=%llu\n", (unsigned long long)seed);
    fflush(stdout);
    buffer = aligned_alloc(PAGE, (size_max + UNIT_MAX + 2 * PAGE) / PAGE * PAGE);
    if (!buffer)
        die("memory");
    for (int i = 0; i < FILES; i++)
        begin_file(&files[i]);
    find_offers();
    printf("fsx: allocate %d, punch %d, zero %d, clone %d\n", offers_allocate, offers_punch, offers_zero, offers_clone);
    for (op = 1; op <= ops; op++)
        step();
    for (int i = 0; i < FILES; i++) {
        close_file(&files[i]);
        if (!keep && unlink(files[i].path))
            FAIL_ERRNO("unlink");
    }
    return 0;
}
