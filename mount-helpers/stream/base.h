/* SPDX-License-Identifier: Apache-2.0 */
/*
 * base.h - the base of an incremental stream: which blocks of a step it has, too. The store answers by the places of
 * the bytes, so nothing is read. One thread.
 */
#ifndef HITRAIN_MOUNT_HELPERS_STREAM_BASE_H
#define HITRAIN_MOUNT_HELPERS_STREAM_BASE_H

#include "mount-helpers/stream/stream.h"

/* The regular file at a path below dir; no symlink on the way is followed. A descriptor, or -errno. */
int ht_base_open(int dir, const char *path) HT_MUST_CHECK;
/* The same for a state of that file, by the name of the state. */
int ht_base_open_state(int dir, const char *path, const char *state) HT_MUST_CHECK;
/* Either one, to be written, also where the mode keeps its owner from that; state: NULL for the file. */
int ht_base_open_to_write(int dir, const char *path, const char *state) HT_MUST_CHECK;

struct ht_base_file; /* size and path */
struct ht_base {
    int dir;                     /* -1: there is none */
    struct ht_base_file **files; /* by size; listed when the first file without a twin comes */
    size_t count, cap;
    bool listed;
};
void ht_base_free(struct ht_base *b);

/* A file or state of the base that may have blocks of another one. */
struct ht_twin {
    int fd; /* -1: there is none */
    uint64_t ino, size;
    uint64_t off, end; /* of the last answer */
    bool is_same;
    char path[HT_STREAM_PATH_BYTES_MAX + 1]; /* of the file */
};
/*
 * The twin of the file at path, open as fd: the base's file there. If there is none, one of the same size under another
 * name that begins with the same bytes. 0, also where there is none; -ENOMEM.
 */
int ht_twin_find(struct ht_twin *t, struct ht_base *b, const char *path, int fd, uint64_t size) HT_MUST_CHECK;
void ht_twin_find_state(struct ht_twin *t, const struct ht_base *b, const struct ht_twin *file, const char *state);
/* How many blocks from the one at byte at on the twin has, too. fd: the file or state of size bytes. */
uint64_t ht_twin_blocks(struct ht_twin *t, int fd, uint64_t at, uint64_t size);
void ht_twin_close(struct ht_twin *t);

#endif
