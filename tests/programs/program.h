/* SPDX-License-Identifier: Apache-2.0 */
/* program.h - the common part of the programs in this folder: random numbers, and giving up with a reason. */
#pragma once

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define COUNT_OF(a) (sizeof(a) / sizeof((a)[0]))

/* The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection that unmix64 turns back. */
static inline uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static inline uint64_t unmix64(uint64_t z)
{
    z = (z ^ (z >> 31) ^ (z >> 62)) * 0x319642b2d24d8ec3ull;
    z = (z ^ (z >> 27) ^ (z >> 54)) * 0x96de1b173f119089ull;
    return z ^ (z >> 30) ^ (z >> 60);
}

static inline uint64_t rnd_next(uint64_t *state)
{
    return mix64(*state += 0x9e3779b97f4a7c15ull);
}

/* 0 to n - 1 */
static inline uint64_t rnd_below(uint64_t *state, uint64_t n)
{
    return rnd_next(state) % n;
}

/* True once in n times. */
static inline bool rnd_once_in(uint64_t *state, uint64_t n)
{
    return rnd_below(state, n) == 0;
}

static inline uint64_t hash_bytes(const void *data, size_t len)
{
    const unsigned char *p = data;
    uint64_t h = len;

    for (size_t i = 0; i < len; i++)
        h = (h ^ p[i]) * 0x100000001b3ull;
    return mix64(h);
}

static inline int64_t now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline uint64_t random_seed(void)
{
    return mix64((uint64_t)now_ns()) % 1000000000;
}

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...)
{
    int error = errno;
    va_list args;

    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, ": %s\n", strerror(error));
    exit(2);
}

/*
 * Whether the error of a call below the folder says that its daemon is gone. The kernel returns EIO for a request that
 * a killed daemon was just taking or answering: a daemon that lives answers the next request.
 */
static inline bool is_gone(int error, const char *folder)
{
    struct statfs st;

    if (error == EIO && statfs(folder, &st))
        error = errno;
    return error == ENOTCONN || error == ECONNABORTED;
}

/* For programs that a mount may be taken from: exit status 3 says that it was. */
__attribute__((noreturn)) static inline void failed_below(const char *folder, const char *what)
{
    if (is_gone(errno, folder))
        exit(3);
    die("%s", what);
}

/* One write(2), so that the line survives if the program is killed next, and lines of threads do not mix. */
__attribute__((format(printf, 1, 2))) static inline void report_line(const char *format, ...)
{
    char line[2048];
    va_list args;

    va_start(args, format);
    int len = vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    if (write(STDOUT_FILENO, line, (size_t)len) != len)
        die("standard output");
}
