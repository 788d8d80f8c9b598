/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steady_device.c - a file that is as fast as a device of a steady speed. Requests of one direction are served one
 * after the other, in the order in which they come, each in its bytes over the speed. So a request waits for those
 * before it and for nothing else, where the limit of a cgroup lets requests pass in portions. The answer to each comes
 * a latency later, during which others are served: that of a disk, or of a network.
 *
 * `steady_device FOLDER BYTES` mounts a file `device` of so many bytes, in memory, on the folder, until that is
 * unmounted. Each line of its input is a speed from then on, in bytes a second each way, with a latency in microseconds
 * behind it, or none; 0: no limit.
 */
#define FUSE_USE_VERSION FUSE_MAKE_VERSION(3, 17)

#include <fuse.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "tiering/base/base.h"

enum { THREADS = 64, GIGA = 1000000000 };
static const char path_of_device[] = "/device";

enum way { READ, WRITE, WAYS };

static struct {
    pthread_mutex_t lock;
    uint64_t bytes_per_s; /* 0: no limit */
    uint64_t latency_ns;
    uint64_t free_ns[WAYS]; /* the device ends the last request that came */
} speed = {.lock = PTHREAD_MUTEX_INITIALIZER};

static char *content;
static uint64_t content_bytes;

static void take_turn(enum way way, size_t bytes)
{
    struct timespec now;

    pthread_mutex_lock(&speed.lock);
    if (!speed.bytes_per_s) {
        pthread_mutex_unlock(&speed.lock);
        return;
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t at = (uint64_t)now.tv_sec * GIGA + (uint64_t)now.tv_nsec;
    speed.free_ns[way] =
        ht_max_u64(speed.free_ns[way], at) + (uint64_t)((double)bytes / (double)speed.bytes_per_s * GIGA);
    at = speed.free_ns[way] + speed.latency_ns;
    pthread_mutex_unlock(&speed.lock);
    const struct timespec until = {.tv_sec = (time_t)(at / GIGA), .tv_nsec = (long)(at % GIGA)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL))
        ;
}

/* Bytes of a request that are in the file. */
static size_t inside(size_t bytes, off_t offset)
{
    uint64_t at = (uint64_t)offset;

    return at >= content_bytes ? 0 : (size_t)ht_min_u64(bytes, content_bytes - at);
}

static int read_device(const char *path, char *to, size_t bytes, off_t offset, struct fuse_file_info *fi)
{
    (void)path;
    (void)fi;
    size_t n = inside(bytes, offset);
    memcpy(to, content + offset, n);
    take_turn(READ, n);
    return (int)n;
}

static int write_device(const char *path, const char *from, size_t bytes, off_t offset, struct fuse_file_info *fi)
{
    (void)path;
    (void)fi;
    size_t n = inside(bytes, offset);
    if (!n)
        return -ENOSPC;
    memcpy(content + offset, from, n);
    take_turn(WRITE, n);
    return (int)n;
}

static int get_attributes(const char *path, struct stat *st, struct fuse_file_info *fi)
{
    (void)fi;
    *st = (struct stat){.st_mode = S_IFDIR | 0755, .st_nlink = 2};
    if (strcmp(path, "/") == 0)
        return 0;
    *st = (struct stat){.st_mode = S_IFREG | 0600, .st_nlink = 1, .st_size = (off_t)content_bytes};
    return strcmp(path, path_of_device) == 0 ? 0 : -ENOENT;
}

/* Requests reach this program as they are made, also several writes at once. */
static int open_device(const char *path, struct fuse_file_info *fi)
{
    (void)path;
    fi->direct_io = 1;
    fi->parallel_direct_writes = 1;
    return 0;
}

static int sync_device(const char *path, int only_content, struct fuse_file_info *fi)
{
    (void)path;
    (void)only_content;
    (void)fi;
    take_turn(WRITE, 0);
    return 0;
}

static void *begin(struct fuse_conn_info *conn, struct fuse_config *config)
{
    (void)config;
    conn->max_background = THREADS;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = begin,
    .getattr = get_attributes,
    .open = open_device,
    .read = read_device,
    .write = write_device,
    .fsync = sync_device,
};

static void *read_speeds(void *unused)
{
    char line[64];

    while (fgets(line, sizeof(line), stdin)) {
        char *end;
        uint64_t bytes_per_s = strtoull(line, &end, 10), latency_us = strtoull(end, NULL, 10);
        pthread_mutex_lock(&speed.lock);
        speed.bytes_per_s = bytes_per_s;
        speed.latency_ns = latency_us * 1000;
        pthread_mutex_unlock(&speed.lock);
    }
    return unused;
}

static int serve(struct fuse *f)
{
    struct fuse_loop_config *config = fuse_loop_cfg_create();
    pthread_t thread;
    int rc = -ENOMEM;

    if (!config)
        return rc;
    fuse_loop_cfg_set_max_threads(config, THREADS);
    fuse_loop_cfg_set_idle_threads(config, THREADS);
    rc = -pthread_create(&thread, NULL, read_speeds, NULL);
    if (!rc) {
        pthread_detach(thread);
        rc = fuse_loop_mt(f, config);
    }
    fuse_loop_cfg_destroy(config);
    return rc;
}

int main(int argc, char **argv)
{
    struct fuse_args args = FUSE_ARGS_INIT(1, argv);

    if (argc != 3 || (content_bytes = strtoull(argv[2], NULL, 10)) == 0 || content_bytes > SIZE_MAX / 2) {
        fprintf(stderr, "usage: steady_device FOLDER BYTES\n");
        return 2;
    }
    content = mmap(NULL, content_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct fuse *f = content == MAP_FAILED ? NULL : fuse_new(&args, &operations, sizeof(operations), NULL);
    if (!f || fuse_mount(f, argv[1])) {
        fprintf(stderr, "steady_device: %s cannot be mounted\n", argv[1]);
        return 1;
    }
    int rc = serve(f);
    fuse_unmount(f);
    fuse_destroy(f);
    return rc ? 1 : 0;
}
