/* SPDX-License-Identifier: Apache-2.0 */
/*
 * receive.c - `hitrainctl receive`: a stream from standard input becomes a new model root.
 *
 * A directory out of sight becomes a model root first, so nothing in it is published before its commit. At the end
 * mark, with the right digest, it gets its step, is committed and moves to its name. Until then any failure removes it,
 * and after a crash the next program does (staging.h).
 */
#include "mount-helpers/ctl/ctl.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/common/progress.h"
#include "mount-helpers/common/text.h"
#include "mount-helpers/copy/kept_base.h"
#include "mount-helpers/copy/receive.h"
#include "tiering/base/json.h"
#include <hitrain/words.h>

enum { LOOK_MS = 200 };

static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

/*
 * Reads end early, so that what was received can be removed. Where a lost connection ended the reader of messages, too,
 * a message must not end this program before that.
 */
static void catch_signals(void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction a = {.sa_handler = stop};

    for (size_t i = 0; i < HT_ARRAY_SIZE(numbers); i++)
        (void)sigaction(numbers[i], &a, NULL);
    (void)signal(SIGPIPE, SIG_IGN);
}

ssize_t ht_receive_get(void *ctx, void *data, size_t len)
{
    struct ht_receive_input *in = ctx;

    if (in->holds && len) {
        in->holds = false;
        *(uint8_t *)data = in->held;
        return 1;
    }
    while (!stopped) {
        struct pollfd in_fd = {.fd = STDIN_FILENO, .events = POLLIN};
        int ready = poll(&in_fd, 1, LOOK_MS); /* a signal that came just before the call does not end it */
        if (ready == 0 || (ready < 0 && errno == EINTR))
            continue;
        ssize_t n = read(STDIN_FILENO, data, len);
        if (n >= 0 || errno != EINTR)
            return n < 0 ? -errno : n;
    }
    return -EINTR;
}

static void add(void *ctx, uint64_t bytes)
{
    ht_progress_add(ctx, bytes);
}

bool ht_receive_stopped(void)
{
    return stopped;
}

/* The step that an incremental stream builds on, in the same store. *out: its directory. */
static int find_base(const char *path, const struct ht_staging *s, const struct ht_stream_base *base, const char *root,
                     int *out)
{
    struct stat mine, theirs;

    if (!root) {
        ht_error(
            "%s: nothing is received: the stream has changes since step %llu alone; --base=ROOT names a model that "
            "keeps that step",
            path, (unsigned long long)base->step);
        return -EINVAL;
    }
    *out = ht_kept_find_base(root, base, ht_receive_stopped);
    if (*out < 0)
        return *out;
    if (fstat(*out, &theirs) == 0 && fstat(s->dir, &mine) == 0 && mine.st_dev == theirs.st_dev)
        return 0;
    ht_error("%s: nothing is received: %s is in another store", path, root);
    return -EXDEV;
}

int ht_receive_tree(const char *path, const struct ht_staging *s, int base, struct ht_stream_reader *r,
                    struct ht_received *out)
{
    char why[HT_TREE_WHY_MAX] = "";
    struct ht_progress progress = {0};
    struct ht_tree_progress p = {add, &progress};
    int rc;

    ht_progress_begin(&progress, false, "received", r->head.bytes);
    rc = ht_tree_write(s->model, base, r, geteuid() == 0, &p, &out->root, &out->digest, why);
    if (rc == 0)
        ht_progress_end(&progress);
    else
        ht_progress_clear(&progress);
    if (rc < 0)
        ht_error("%s: nothing is received: %s", path, why);
    return rc;
}

/* A stream of a whole step, or of what differs from a base. */
static int fill_new(const char *path, struct ht_staging *s, const char *base_root, struct ht_stream_reader *r,
                    struct ht_received *out)
{
    int rc = ht_staging_make_model(s, path), base = -1;

    if (rc == 0 && r->head.incremental)
        rc = find_base(path, s, &r->head.base, base_root, &base);
    if (rc == 0)
        rc = ht_receive_tree(path, s, base, r, out);
    if (base >= 0)
        close(base);
    out->entries = r->entries;
    out->bytes = r->bytes;
    return rc;
}

static int fill(const char *path, struct ht_staging *s, const char *base_root, struct ht_received *out)
{
    struct ht_receive_input in = {.holds = false};
    struct ht_stream_reader r;
    int rc = ht_stream_reader_begin(&r, ht_receive_get, &in);

    if (rc < 0)
        ht_error("%s: nothing is received: %s", path, r.in.why);
    else
        rc = r.head.for_rank ? ht_receive_shards(path, s, base_root, &r, out) : fill_new(path, s, base_root, &r, out);
    out->incremental = r.head.incremental;
    out->for_rank = r.head.for_rank;
    out->base_step = r.head.base.step;
    out->step = r.head.step;
    ht_stream_reader_free(&r);
    return rc;
}

/* Commits by a descriptor of ctl that was opened while the directory was the caller's own. */
static int commit_by(const char *path, int ctl)
{
    char reason[512];
    ssize_t n;
    int err;

    if (write(ctl, "commit\n", 7) >= 0)
        return 0;
    err = errno;
    n = read(ctl, reason, sizeof(reason) - 1);
    reason[n > 0 ? n : 0] = '\0';
    reason[strcspn(reason, "\n")] = '\0';
    ht_error("%s: the step cannot be committed: %s", path, reason[0] != '\0' ? reason : strerror(err));
    return -err;
}

static int set_step(const char *path, int dir, uint64_t step)
{
    char text[32];
    int n = snprintf(text, sizeof(text), "%llu", (unsigned long long)step);

    if (fgetxattr(dir, HT_XATTR_PREFIX "optimizer", NULL, 0) < 0) {
        ht_error("%s: the stream is no model: its root has no optimizer", path);
        return -EPROTO;
    }
    if (fsetxattr(dir, HT_XATTR_PREFIX "step", text, (size_t)n, 0) == 0)
        return 0;
    ht_error("%s: cannot set step %s: %s", path, text, strerror(errno));
    return -errno;
}

static int write_root(const char *path, int dir, const struct ht_tree_root *root)
{
    char why[HT_TREE_WHY_MAX];
    int rc = ht_tree_write_root(dir, root, geteuid() == 0, why);

    if (rc < 0)
        ht_error("%s: %s", path, why);
    return rc;
}

/* A clone has all else. */
static int set_mode(const char *path, int dir, mode_t mode)
{
    struct stat st;

    if (fstat(dir, &st) == 0 && ((st.st_mode & 07777) == mode || fchmod(dir, mode) == 0))
        return 0;
    ht_error("%s: cannot set its mode: %s", path, strerror(errno));
    return -errno;
}

/* A model at its step, durable. Until then its directory is the caller's own. */
static int commit(const char *path, const struct ht_staging *s, const struct ht_received *r)
{
    int rc = r->is_clone ? 0 : set_step(path, s->model, r->step), ctl;

    if (rc < 0)
        return rc;
    ctl = openat(s->model, HT_CTL_DIR "/ctl", O_RDWR | O_CLOEXEC);
    if (ctl < 0) {
        ht_error("%s: " HT_CTL_DIR "/ctl: %s", path, strerror(errno));
        return -errno;
    }
    rc = r->is_clone ? set_mode(path, s->model, r->root.mode) : write_root(path, s->model, &r->root);
    if (rc == 0)
        rc = commit_by(path, ctl);
    close(ctl);
    return rc;
}

/*
 * To move a directory its owner needs to be able to write to it. A model that its owner may not write to gets its mode
 * after it has its name: a crash in between leaves it whole, at its name, and writable.
 */
static int finish(const char *path, struct ht_staging *s, struct ht_received *r)
{
    bool later = geteuid() != 0 && !(r->root.mode & S_IWUSR);
    uint16_t mode = r->root.mode;
    int rc;

    r->root.mode |= later ? S_IWUSR : 0;
    rc = commit(path, s, r);
    if (rc == 0)
        rc = ht_staging_publish(s, path);
    r->root.mode = mode;
    if (rc == 0 && later && (rc = commit(path, s, r)) < 0)
        ht_error("%s has its name, but not its mode", path);
    return rc;
}

static void report_text(const char *path, const struct ht_received *r)
{
    char text[HT_DIGEST_TEXT_MAX];

    if (r->for_rank) {
        printf("%s: received what rank %u gets at step %llu: %s of parameters and state", path, r->shard.rank,
               (unsigned long long)r->step, ht_size_text(r->moved.sent));
        printf(", and the least is %s\n", ht_size_text(r->moved.least));
    } else if (r->incremental) {
        printf("%s: received step %llu as changes since step %llu: %llu entries, %s of content\n", path,
               (unsigned long long)r->step, (unsigned long long)r->base_step, (unsigned long long)r->entries,
               ht_size_text(r->bytes));
    } else {
        printf("%s: received step %llu: %llu entries, %s of content, digest %s\n", path, (unsigned long long)r->step,
               (unsigned long long)r->entries, ht_size_text(r->bytes), ht_digest_text(&r->digest, text));
    }
}

static void report(const char *path, const struct ht_cmd_options *o, const struct ht_received *r)
{
    char text[HT_DIGEST_TEXT_MAX];
    struct ht_json j;

    if (!o->json) {
        report_text(path, r);
        return;
    }
    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", path);
    ht_json_u64(&j, "step", r->step);
    if (r->for_rank) {
        ht_json_u64(&j, "rank", r->shard.rank);
        ht_json_u64(&j, "moved_bytes", r->moved.sent);
        ht_json_u64(&j, "least_bytes", r->moved.least);
    } else if (r->incremental) {
        ht_json_u64(&j, "from", r->base_step);
    } else {
        ht_json_str(&j, "digest", ht_digest_text(&r->digest, text));
    }
    ht_json_u64(&j, "entries", r->entries);
    ht_json_u64(&j, "bytes", r->bytes);
    ht_json_end(&j);
}

int ht_cmd_receive(const char *path, const struct ht_cmd_options *o)
{
    struct ht_staging s;
    struct ht_received r = {0};
    int rc;

    if (isatty(STDIN_FILENO)) {
        ht_error("receive reads a stream from a file or a pipe, and standard input is a terminal");
        return HT_CMD_USAGE;
    }
    catch_signals();
    if (ht_staging_begin(&s, path) < 0)
        return HT_CMD_FAILED;
    rc = fill(path, &s, o->base, &r);
    if (rc == 0)
        rc = finish(path, &s, &r);
    if (rc < 0 && !s.published)
        ht_staging_drop(&s);
    ht_staging_end(&s);
    ht_buf_free(&r.root.lists);
    if (rc == 0)
        report(path, o, &r);
    return rc == 0 && fflush(stdout) == 0 ? HT_CMD_OK : HT_CMD_FAILED;
}
