/* SPDX-License-Identifier: Apache-2.0 */
/*
 * receive.c - `hitrainctl receive`: a stream from standard input becomes a new model root.
 *
 * A directory out of sight becomes a model root first, so nothing in it is published before its commit. At the end
 * mark, with the right digest, it gets its step, is committed and gets its name. Until then any failure removes it.
 */
#include "mount-helpers/ctl/ctl.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/common/progress.h"
#include "mount-helpers/common/text.h"
#include "mount-helpers/ctl/staging.h"
#include "mount-helpers/stream/tree.h"
#include "tiering/base/json.h"
#include <hitrain/words.h>

static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

/* Reads end early, so that what was received can be removed. */
static void catch_signals(void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction a = {.sa_handler = stop};

    for (size_t i = 0; i < HT_ARRAY_SIZE(numbers); i++)
        (void)sigaction(numbers[i], &a, NULL);
}

static ssize_t get(void *ctx, void *data, size_t len)
{
    (void)ctx;
    for (;;) {
        ssize_t n;
        if (stopped)
            return -EINTR;
        n = read(STDIN_FILENO, data, len);
        if (n >= 0 || errno != EINTR)
            return n < 0 ? -errno : n;
    }
}

static void add(void *ctx, uint64_t bytes)
{
    ht_progress_add(ctx, bytes);
}

struct received {
    uint64_t step, entries, bytes;
    struct ht_hash128 digest;
};

/* The stream becomes the content of the staging directory. */
static int fill(const char *path, const struct ht_staging *s, struct received *out)
{
    char why[HT_TREE_WHY_MAX] = "";
    struct ht_stream_reader r;
    struct ht_progress progress = {0};
    struct ht_tree_progress p = {add, &progress};
    int rc = ht_stream_reader_begin(&r, get, NULL);

    if (rc == 0) {
        ht_progress_begin(&progress, false, "received", r.head.bytes);
        rc = ht_tree_write(s->dir, &r, geteuid() == 0, &p, &out->digest, why);
    }
    if (rc == 0)
        ht_progress_end(&progress);
    else
        ht_progress_clear(&progress);
    if (rc < 0)
        ht_error("%s: nothing is received: %s", path, why[0] != '\0' ? why : r.why);
    *out = (struct received){r.head.step, r.entries, r.bytes, out->digest};
    ht_stream_reader_free(&r);
    return rc;
}

/* A model at its step, durable in its directory out of sight. */
static int commit(const char *path, const struct ht_staging *s, uint64_t step)
{
    char text[32], *word;
    int n = snprintf(text, sizeof(text), "%llu", (unsigned long long)step);

    if (ht_cmd_attribute(s->path, "optimizer", true, &word) < 0) {
        ht_error("%s: the stream is no model: its root has no optimizer", path);
        return -EPROTO;
    }
    free(word);
    if (fsetxattr(s->dir, HT_XATTR_PREFIX "step", text, (size_t)n, 0) < 0) {
        ht_error("%s: cannot set step %s: %s", path, text, strerror(errno));
        return -errno;
    }
    return ht_cmd_command(path, s->path, "commit");
}

static void report(const char *path, const struct ht_cmd_options *o, const struct received *r)
{
    char text[HT_DIGEST_TEXT_MAX];
    struct ht_json j;

    ht_digest_text(&r->digest, text);
    if (!o->json) {
        printf("%s: received step %llu: %llu entries, %s of content, digest %s\n", path, (unsigned long long)r->step,
               (unsigned long long)r->entries, ht_size_text(r->bytes), text);
        return;
    }
    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", path);
    ht_json_u64(&j, "step", r->step);
    ht_json_str(&j, "digest", text);
    ht_json_u64(&j, "entries", r->entries);
    ht_json_u64(&j, "bytes", r->bytes);
    ht_json_end(&j);
}

int ht_cmd_receive(const char *path, const struct ht_cmd_options *o)
{
    struct ht_staging s;
    struct received r = {0};
    int rc;

    if (isatty(STDIN_FILENO)) {
        ht_error("receive reads a stream from a file or a pipe, and standard input is a terminal");
        return HT_CMD_USAGE;
    }
    catch_signals();
    if (ht_staging_begin(&s, path) < 0)
        return HT_CMD_FAILED;
    rc = ht_cmd_check_mount(s.path);
    if (rc == 0)
        rc = fill(path, &s, &r);
    if (rc == 0)
        rc = commit(path, &s, r.step);
    if (rc == 0)
        rc = ht_staging_publish(&s, path);
    if (rc < 0)
        ht_staging_drop(&s);
    ht_staging_end(&s);
    if (rc == 0)
        report(path, o, &r);
    return rc == 0 && fflush(stdout) == 0 ? HT_CMD_OK : HT_CMD_FAILED;
}
