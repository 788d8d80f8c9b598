/* SPDX-License-Identifier: Apache-2.0 */
/* socket.h - a session without a mount: the test has the kernel's end of the connection, which is a socket here. */
#pragma once

#include <check.h>
#include <semaphore.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fs/fuse/fuse_priv.h"

#include <linux/fuse.h>

enum { SECONDS_MAX = 60 };

static struct ht_fuse fuse;
static struct ht_traffic traffic;
static int kernel;
static pthread_t loop;
static int loop_rc;
static long loop_waits;
static sem_t go, began;
static _Atomic unsigned ready;

/* --------------------------------------------------------------- the kernel */

/* Returns its number. */
static inline uint64_t request(uint32_t opcode, const void *args, size_t len)
{
    uint8_t message[4096];
    static uint64_t unique;
    const struct fuse_in_header in = {
        .len = (uint32_t)(sizeof(in) + len), .opcode = opcode, .unique = unique += 2, .nodeid = 1};

    memcpy(message, &in, sizeof(in));
    memcpy(message + sizeof(in), args, len);
    ck_assert_int_eq(send(kernel, message, in.len, 0), in.len);
    return unique;
}

static inline struct fuse_out_header answer(void)
{
    uint8_t message[4096];
    struct fuse_out_header out;
    ssize_t n;

    do /* with a time limit, a stop of the process interrupts it without any handler */
        n = recv(kernel, message, sizeof(message), 0);
    while (n < 0 && errno == EINTR);
    ck_assert_msg(n >= (ssize_t)sizeof(out), "%zd bytes: %s", n, n < 0 ? strerror(errno) : "too few");
    memcpy(&out, message, sizeof(out));
    return out;
}

static inline bool is_silent(void)
{
    char byte;

    return recv(kernel, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

static inline void ping(void)
{
    const struct fuse_access_in in = {0};

    request(FUSE_ACCESS, &in, sizeof(in));
    ck_assert_int_eq(answer().error, 0);
}

static inline int agree(void)
{
    const struct fuse_init_in in = {.major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION};

    request(FUSE_INIT, &in, sizeof(in));
    return answer().error;
}

/* ----------------------------------------------------------------- the loop */

static inline void count_ready(void *ctx)
{
    ready++;
}

static void *run_loop(void *arg)
{
    struct rusage usage;

    loop_rc = ht_workers_run(&fuse);
    ck_assert_int_eq(getrusage(RUSAGE_THREAD, &usage), 0);
    loop_waits = usage.ru_nvcsw;
    return NULL;
}

static inline void begin(unsigned threads, const struct fuse_lowlevel_ops *with)
{
    const struct timeval patience = {.tv_sec = SECONDS_MAX};
    char name[] = "test", path[32];
    char *argv[] = {name, NULL};
    struct fuse_args args = FUSE_ARGS_INIT(1, argv);
    int fds[2];

    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds), 0);
    kernel = fds[0];
    ck_assert_int_eq(setsockopt(kernel, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    fuse.opts.threads = threads;
    fuse.session = fuse_session_new(&args, with, sizeof(*with), &fuse);
    ck_assert_ptr_nonnull(fuse.session);
    fuse_opt_free_args(&args);
    snprintf(path, sizeof(path), "/dev/fd/%d", fds[1]);
    ck_assert_int_eq(fuse_session_mount(fuse.session, path), 0);
    fuse.mounted = true;
    ck_assert_int_eq(pthread_create(&loop, NULL, run_loop, NULL), 0);
}

static inline void end(void)
{
    fuse.exited = true;
    fuse_session_exit(fuse.session);
    ht_workers_wake(&fuse);
    ck_assert_int_eq(pthread_join(loop, NULL), 0);
}

static inline void setup(void)
{
    memset(&fuse, 0, sizeof(fuse));
    fuse.traffic = &traffic;
    fuse.opts.ready = count_ready;
    ready = 0;
    sem_init(&go, 0, 0);
    sem_init(&began, 0, 0);
    ht_workers_init(&fuse);
    ht_mutex_init(&fuse.job_lock, HT_LOCK_JOBS);
    ck_assert_int_eq(ht_job_start(&fuse), 0);
}

static inline void teardown(void)
{
    ht_job_stop(&fuse);
    fuse_session_destroy(fuse.session);
    close(kernel);
    ht_mutex_destroy(&fuse.job_lock);
    ht_workers_destroy(&fuse);
    sem_destroy(&go);
    sem_destroy(&began);
}
