/* SPDX-License-Identifier: Apache-2.0 */
/* kept_base.c - reading a kept step; steps that streams build on: their digests, and the one that a stream means. */
#include "mount-helpers/copy/kept_base.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/ctl/ctl.h"
#include "tiering/base/files.h"
#include <hitrain/words.h>

int ht_kept_stored_digest(int dir, struct ht_hash128 *out)
{
    char text[HT_DIGEST_TEXT_MAX];
    ssize_t n = fgetxattr(dir, HT_XATTR_PREFIX "digest", text, sizeof(text) - 1);

    if (n < 0)
        return -errno;
    text[n] = '\0';
    return ht_digest_parse(text, out);
}

static void add(void *ctx, uint64_t bytes)
{
    ht_progress_add(ctx, bytes);
}

int ht_kept_read(struct ht_kept_reading *q, int dir, char why[HT_TREE_WHY_MAX])
{
    struct ht_stream_head head = {.incremental = q->base_dir >= 0, .base = q->base, .for_rank = q->shard != NULL};
    struct ht_tree_progress p = {add, &q->progress};
    struct ht_stream_writer w = {0};
    int rc = ht_kept_step(dir, &head.step);

    why[0] = '\0';
    if (q->shard)
        head.shard = *q->shard;
    if (rc < 0) {
        snprintf(why, HT_TREE_WHY_MAX, "%s has no number of a step: %s", q->name, strerror(-rc));
        return rc;
    }
    rc = ht_tree_measure(dir, &head.bytes, why);
    if (rc < 0)
        return rc;
    why[0] = '\0';
    ht_progress_begin(&q->progress, false, q->done, head.bytes);
    rc = ht_stream_writer_begin(&w, &head, q->put, q->ctx);
    if (rc == 0)
        rc = ht_tree_read(dir, q->base_dir, &w, &p, why);
    if (rc == 0)
        rc = ht_stream_put_end(&w, &q->digest);
    q->entries = w.entries;
    q->bytes = w.bytes;
    q->moved = w.moves.sum;
    ht_stream_writer_free(&w);
    if (rc < 0)
        ht_progress_clear(&q->progress);
    return rc;
}

struct stop {
    bool (*asked)(void);
};

/* Takes the stream and keeps nothing. */
static int put_nowhere(void *ctx, const void *data, size_t len)
{
    const struct stop *stop = ctx;

    (void)data;
    (void)len;
    return stop->asked && stop->asked() ? -EINTR : 0;
}

int ht_kept_digest(const char *root, const char *name, int dir, bool (*stopped)(void), struct ht_hash128 *out)
{
    char why[HT_TREE_WHY_MAX];
    struct stop stop = {stopped};
    struct ht_kept_reading q = {
        .name = name, .done = "of the base read", .base_dir = -1, .put = put_nowhere, .ctx = &stop};
    int rc = ht_kept_stored_digest(dir, out);

    if (rc == 0)
        return 0;
    rc = ht_kept_read(&q, dir, why);
    if (rc < 0) {
        ht_error("%s: step %s: %s", root, name, why[0] != '\0' ? why : strerror(-rc));
        return rc;
    }
    ht_progress_clear(&q.progress);
    *out = q.digest;
    return 0;
}

/* 1: the step is the base; 0: it is another one, or gone. */
static int is_base(const char *root, int snap, const char *name, const struct ht_stream_base *base,
                   bool (*stopped)(void), int *out_dir)
{
    int dir = openat(snap, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc;
    struct ht_hash128 digest;
    uint64_t step;

    if (dir < 0 || ht_kept_step(dir, &step) < 0 || step != base->step) {
        if (dir >= 0)
            close(dir);
        return 0;
    }
    rc = ht_kept_digest(root, name, dir, stopped, &digest);
    if (rc == 0 && memcmp(&digest, &base->digest, sizeof(digest)) == 0) {
        *out_dir = dir;
        return 1;
    }
    close(dir);
    return rc;
}

int ht_kept_find_base(const char *root, const struct ht_stream_base *base, bool (*stopped)(void))
{
    char folder[PATH_MAX], text[HT_DIGEST_TEXT_MAX];
    int n = snprintf(folder, sizeof(folder), "%s/" HT_CTL_DIR "/snap", root), found = 0, dir = -1;
    DIR *d = n > 0 && (size_t)n < sizeof(folder) ? opendir(folder) : (errno = ENAMETOOLONG, NULL);
    struct dirent *e;

    if (!d) {
        ht_error("%s: %s", root, errno == ENOENT || errno == ENOTDIR ? "this is no model root" : strerror(errno));
        return -ENOENT;
    }
    while (found == 0 && (e = readdir(d)))
        if (!ht_is_dot(e->d_name))
            found = is_base(root, dirfd(d), e->d_name, base, stopped, &dir);
    closedir(d);
    if (found == 0)
        ht_error("%s keeps no step %llu with digest %s, which the stream builds on", root,
                 (unsigned long long)base->step, ht_digest_text(&base->digest, text));
    return found < 0 ? found : found ? dir : -ENOENT;
}
