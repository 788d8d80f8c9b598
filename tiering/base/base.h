/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base.h - the small things every layer uses: sizes, time, bytes, small files, and how much space a call lacked.
 *
 * Every function of the project that can fail returns 0 (or a useful count)
 * or a negative errno, and is marked HT_MUST_CHECK.
 */
#pragma once

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tiering/base/guarded.h"

#define HT_MUST_CHECK __attribute__((warn_unused_result))
#define HT_PRINTF(f, a) __attribute__((format(printf, f, a)))

#define HT_KIB 1024ull
#define HT_MIB (1024ull * 1024)
#define HT_GIB (1024ull * 1024 * 1024)

#define HT_ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
/* Raises low to the first place in [low, end) for which `before`, a condition on `at`, is false; it is true below. */
#define HT_PARTITION_POINT(low, end, at, before)            \
    for (__typeof__(low) end_ = (end), at; (low) < end_;) { \
        at = (low) + (end_ - (low)) / 2;                    \
        if (before)                                         \
            (low) = at + 1;                                 \
        else                                                \
            end_ = at;                                      \
    }
#define ht_container_of(p, type, member) ((type *)((char *)(p)-offsetof(type, member)))

static inline uint64_t ht_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t ht_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static inline uint64_t ht_div_up(uint64_t n, uint64_t d)
{
    return n / d + (n % d != 0);
}

/* align: a power of two */
static inline uint64_t ht_round_up(uint64_t n, uint64_t align)
{
    return (n + align - 1) & ~(align - 1);
}

static inline bool ht_is_zero(const uint8_t *p, size_t n)
{
    return n == 0 || (p[0] == 0 && memcmp(p, p + 1, n - 1) == 0);
}

/* Monotonic clock, nanoseconds. */
uint64_t ht_now_ns(void);
/* Processor time of the calling thread, nanoseconds. */
uint64_t ht_thread_cpu_ns(void);
/* Wall clock, nanoseconds since 1970. */
uint64_t ht_wall_ns(void);
/* Or until a signal. */
void ht_sleep_ns(uint64_t ns);

/*
 * Parses "8G", "64k", "1048576", "1.5G" (binary units k m g t p, an optional "b" or "ib" after them, any case). 0 or
 * -EINVAL (not a size) or -ERANGE.
 */
int ht_parse_size(const char *text, uint64_t *out_bytes) HT_MUST_CHECK;
/* Writes bytes in a short human form ("1.5 GiB") into buf; returns buf. */
const char *ht_format_size(uint64_t bytes, char *buf, size_t cap);

/* Bytes of the UTF-8 character at text, which ends with a NUL, or 0 if none begins there. */
unsigned ht_utf8_length(const char *text);

/* Fills buf with random bytes of the kernel. 0 or -errno. */
int ht_random(void *buf, size_t len) HT_MUST_CHECK;
/* Room for need elements of size bytes in an array that grows by at least half. -ENOMEM: it is as before. */
int ht_array_grow(void **array, size_t *cap, size_t need, size_t size) HT_MUST_CHECK;
/*
 * A large table of which a part may never be used: zeros that come when they are touched, or NULL. calloc zeroes such a
 * table at once if its memory was in use before, and a sanitizer marks it whole.
 */
void *ht_pages_new(size_t bytes);
/* The same bytes. NULL: nothing. */
void ht_pages_free(void *pages, size_t bytes);
/* For qsort, bsearch and tfind: things that begin with a uint64_t, the smallest first. */
int ht_compare_numbers(const void *a, const void *b);

/* All len bytes, in as many writes as it takes. -EIO: the file takes none. */
int ht_write_all(int fd, const void *data, size_t len) HT_MUST_CHECK;
/* The first line of a file, without its end. False: there is none. */
bool ht_read_line(const char *path, char *out, size_t cap) HT_MUST_CHECK;
/*
 * Opens /dev/null for standard descriptors that the caller of this program has closed. First call in main: else a
 * device could get descriptor 2, and the next message would be written to it.
 */
void ht_stdio_fds_open(void);
/* Turns all three into /dev/null: no program reads or writes there any more. */
void ht_stdio_fds_detach(void);

/*
 * How much space a call lacked that was refused with -ENOSPC. Of each thread, like errno: whoever refuses says it, and
 * the caller that wants to make room asks before its next call.
 */
/* Returns -ENOSPC. 0: it is no space for data that is lacking. */
int ht_lack_space(uint64_t bytes);
/* Of the last refusal. */
uint64_t ht_lack(void);
/* The same, once: 0 afterwards. */
uint64_t ht_lack_take(void);
