/* SPDX-License-Identifier: Apache-2.0 */
/* base.c - clocks, sizes in people's notation, random bytes, memory, small files. No state of several threads. */
#include "tiering/base/base.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define FRACTION_DIGITS_MAX 9u
#define ARRAY_CAP_MIN 64u

static uint64_t clock_ns(clockid_t id)
{
    struct timespec ts;

    clock_gettime(id, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t ht_now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

uint64_t ht_thread_cpu_ns(void)
{
    return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}

uint64_t ht_wall_ns(void)
{
    return clock_ns(CLOCK_REALTIME);
}

void ht_sleep_ns(uint64_t ns)
{
    const struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};

    nanosleep(&ts, NULL);
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

/* The power of 1024 that a unit such as "", "k", "KB" or "KiB" stands for, or -1. */
static int unit_power(const char *text)
{
    static const char units[] = "kmgtp";

    if (*text == '\0')
        return 0;
    const char *at = strchr(units, lower(*text));
    if (!at)
        return -1;
    text++;
    if (lower(*text) == 'i' && lower(text[1]) == 'b')
        text++;
    if (lower(*text) == 'b')
        text++;
    return *text == '\0' ? (int)(at - units) + 1 : -1;
}

int ht_parse_size(const char *text, uint64_t *out_bytes)
{
    unsigned __int128 whole = 0, fraction = 0, scale = 1;
    unsigned digits = 0;
    bool over = false;

    if (!is_digit(*text))
        return -EINVAL;
    for (; is_digit(*text); text++) {
        whole = whole * 10 + (unsigned)(*text - '0');
        if (whole > UINT64_MAX) {
            over = true;
            whole = UINT64_MAX;
        }
    }
    if (*text == '.') {
        for (text++; is_digit(*text); text++) {
            if (++digits > FRACTION_DIGITS_MAX)
                return -EINVAL;
            fraction = fraction * 10 + (unsigned)(*text - '0');
            scale *= 10;
        }
        if (digits == 0)
            return -EINVAL;
    }
    int power = unit_power(text);
    if (power < 0 || (power == 0 && digits > 0))
        return -EINVAL;
    whole = (whole << (10 * power)) + (fraction << (10 * power)) / scale;
    if (over || whole > UINT64_MAX)
        return -ERANGE;
    *out_bytes = (uint64_t)whole;
    return 0;
}

const char *ht_format_size(uint64_t bytes, char *buf, size_t cap)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    unsigned unit = 0;

    /* In tenths; the next unit begins where rounding would print 1024.0 of this one. */
    unsigned __int128 tenths = (unsigned __int128)bytes * 10, shown = tenths;

    while (shown >= 10240 && unit + 1 < HT_ARRAY_SIZE(units)) {
        unit++;
        shown = (tenths + ((unsigned __int128)1 << (10 * unit - 1))) >> (10 * unit);
    }
    if (shown % 10 == 0)
        snprintf(buf, cap, "%u %s", (unsigned)(shown / 10), units[unit]);
    else
        snprintf(buf, cap, "%u.%u %s", (unsigned)(shown / 10), (unsigned)(shown % 10), units[unit]);
    return buf;
}

int ht_random(void *buf, size_t len)
{
    uint8_t *p = buf;

    while (len > 0) {
        ssize_t n = getrandom(p, len, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        p += n;
        len -= (size_t)n;
    }
    return 0;
}

unsigned ht_utf8_length(const char *text)
{
    const unsigned char *p = (const unsigned char *)text;
    unsigned n = p[0] < 0x80          ? 1
        : p[0] >= 0xc2 && p[0] < 0xe0 ? 2
        : p[0] >= 0xe0 && p[0] < 0xf0 ? 3
        : p[0] >= 0xf0 && p[0] < 0xf5 ? 4
                                      : 0;

    for (unsigned i = 1; i < n; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    /* longer forms than needed, surrogates, and beyond the last character */
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf0 && p[1] < 0x90) ||
        (p[0] == 0xf4 && p[1] > 0x8f))
        return 0;
    return n;
}

int ht_array_grow(void **array, size_t *cap, size_t need, size_t size)
{
    size_t want = ht_max_u64(ht_max_u64(need, *cap + *cap / 2), ARRAY_CAP_MIN);

    if (need <= *cap)
        return 0;
    void *p = realloc(*array, want * size);
    if (!p)
        return -ENOMEM;
    *array = p;
    *cap = want;
    return 0;
}

void *ht_pages_new(size_t bytes)
{
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return pages == MAP_FAILED ? NULL : pages;
}

void ht_pages_free(void *pages, size_t bytes)
{
    if (pages)
        (void)munmap(pages, bytes);
}

int ht_compare_numbers(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

/* ------------------------------------------------------------------- files */

int ht_write_all(int fd, const void *data, size_t len)
{
    for (const char *at = data; len > 0;) {
        ssize_t done = write(fd, at, len);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done < 0 ? -errno : -EIO;
        at += done;
        len -= (size_t)done;
    }
    return 0;
}

bool ht_read_line(const char *path, char *out, size_t cap)
{
    FILE *f = fopen(path, "re");
    bool there = f && fgets(out, (int)cap, f);

    if (there)
        out[strcspn(out, "\n")] = '\0';
    if (f)
        (void)fclose(f);
    return there;
}

void ht_stdio_fds_open(void)
{
    int fd;

    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= STDIN_FILENO && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
    else if (fcntl(STDIN_FILENO, F_GETFD) < 0 || fcntl(STDOUT_FILENO, F_GETFD) < 0 || fcntl(STDERR_FILENO, F_GETFD) < 0)
        abort(); /* without /dev/null there is no safe way on, and no place for a message */
}

void ht_stdio_fds_detach(void)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    if (null < 0)
        return;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        (void)dup2(null, fd);
    if (null > STDERR_FILENO)
        close(null);
}

/* -------------------------------------------------------------------- lack */

static _Thread_local uint64_t lack_bytes;

int ht_lack_space(uint64_t bytes)
{
    lack_bytes = bytes;
    return -ENOSPC;
}

uint64_t ht_lack(void)
{
    return lack_bytes;
}

uint64_t ht_lack_take(void)
{
    uint64_t bytes = lack_bytes;

    lack_bytes = 0;
    return bytes;
}
