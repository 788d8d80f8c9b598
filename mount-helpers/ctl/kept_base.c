/* SPDX-License-Identifier: Apache-2.0 */
/* kept_base.c - kept steps that streams build on: their digests, and the one that a stream means. */
#include "mount-helpers/ctl/kept.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <unistd.h>

#include "mount-helpers/common/progress.h"
#include "mount-helpers/ctl/ctl.h"
#include "mount-helpers/stream/tree.h"
#include "tiering/base/files.h"
#include <hitrain/words.h>

struct reading {
    bool (*stopped)(void);
    struct ht_progress progress;
};

/* Takes the stream and keeps nothing. */
static int put(void *ctx, const void *data, size_t len)
{
    const struct reading *r = ctx;

    (void)data;
    (void)len;
    return r->stopped && r->stopped() ? -EINTR : 0;
}

static void add(void *ctx, uint64_t bytes)
{
    struct reading *r = ctx;

    ht_progress_add(&r->progress, bytes);
}

int ht_kept_digest(const char *root, const char *name, int dir, bool (*stopped)(void), struct ht_hash128 *out)
{
    char why[HT_TREE_WHY_MAX] = "";
    struct reading reading = {.stopped = stopped};
    struct ht_tree_progress p = {add, &reading};
    struct ht_stream_head head = {0};
    struct ht_stream_writer w = {0};
    int rc = ht_kept_step(dir, &head.step);

    if (rc == 0)
        rc = ht_tree_measure(dir, &head.bytes, why);
    ht_progress_begin(&reading.progress, false, "of the base read", head.bytes);
    if (rc == 0)
        rc = ht_stream_writer_begin(&w, &head, put, &reading);
    if (rc == 0)
        rc = ht_tree_read(dir, -1, &w, &p, why);
    if (rc == 0)
        rc = ht_stream_put_end(&w, out);
    ht_stream_writer_free(&w);
    ht_progress_clear(&reading.progress);
    if (rc < 0)
        ht_error("%s: step %s: %s", root, name, why[0] != '\0' ? why : strerror(-rc));
    return rc;
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
