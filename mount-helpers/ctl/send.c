/* SPDX-License-Identifier: Apache-2.0 */
/*
 * send.c - `hitrainctl send` and `hitrainctl verify`: read all of a kept step, which verifies every checksum of the
 * store, and write it as a stream, or compute its digest alone.
 */
#include "mount-helpers/ctl/ctl.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#include "mount-helpers/common/progress.h"
#include "mount-helpers/common/text.h"
#include "mount-helpers/ctl/kept.h"
#include "mount-helpers/stream/tree.h"
#include "tiering/base/files.h"
#include "tiering/base/json.h"
#include <hitrain/words.h>

struct sink {
    uint64_t rate, written, began_ns; /* rate 0: no limit */
};

/* Waits until so many bytes may have been written. */
static void keep_rate(const struct sink *s)
{
    uint64_t due_ns = (uint64_t)((double)s->written / (double)s->rate * 1e9), now_ns = ht_now_ns() - s->began_ns;

    if (due_ns > now_ns) {
        struct timespec t = {(time_t)((due_ns - now_ns) / 1000000000), (long)((due_ns - now_ns) % 1000000000)};
        (void)nanosleep(&t, NULL);
    }
}

static int put(void *ctx, const void *data, size_t len)
{
    struct sink *s = ctx;
    int rc = ht_write_all(STDOUT_FILENO, data, len);

    s->written += len;
    if (rc == 0 && s->rate)
        keep_rate(s);
    return rc;
}

static void add(void *ctx, uint64_t bytes)
{
    ht_progress_add(ctx, bytes);
}

struct reading {
    const char *root, *name, *done;
    int base_dir; /* -1: a whole step */
    struct ht_stream_base base;
    uint64_t entries, bytes;
    struct ht_hash128 digest;
};

/* Reads the step; sink NULL: for its digest alone. */
static int read_step(struct reading *q, int dir, struct sink *sink)
{
    char why[HT_TREE_WHY_MAX];
    struct ht_stream_head head = {.incremental = q->base_dir >= 0, .base = q->base};
    struct ht_stream_writer w;
    struct ht_progress progress;
    struct ht_tree_progress p = {add, &progress};
    int rc = ht_kept_step(dir, &head.step);

    if (rc < 0) {
        ht_error("%s: %s has no number of a step: %s", q->root, q->name, strerror(-rc));
        return rc;
    }
    rc = ht_tree_measure(dir, &head.bytes, why);
    if (rc < 0) {
        ht_error("%s: %s", q->root, why);
        return rc;
    }
    ht_progress_begin(&progress, false, q->done, head.bytes);
    rc = ht_stream_writer_begin(&w, &head, sink ? put : NULL, sink);
    why[0] = '\0';
    if (rc == 0)
        rc = ht_tree_read(dir, q->base_dir, &w, &p, why);
    if (rc == 0)
        rc = ht_stream_put_end(&w, &q->digest);
    q->entries = w.entries;
    q->bytes = w.bytes;
    ht_stream_writer_free(&w);
    if (rc == 0)
        ht_progress_end(&progress);
    else
        ht_progress_clear(&progress);
    if (rc < 0 && why[0] != '\0')
        ht_error("%s: %s", q->root, why);
    else if (rc < 0)
        ht_error("cannot write the stream: %s", strerror(-rc));
    return rc;
}

/* 32 digits, which main has checked. */
static struct ht_hash128 parse_digest(const char *text)
{
    struct ht_hash128 h;

    for (size_t i = 0; i < sizeof(h.byte); i++) {
        const char digits[3] = {text[2 * i], text[2 * i + 1], '\0'};
        h.byte[i] = (uint8_t)strtoul(digits, NULL, 16);
    }
    return h;
}

/* The step that the stream builds on. A wrong digest only makes receivers refuse it. */
static int open_base(struct reading *q, const struct ht_cmd_options *o)
{
    int rc;

    q->base_dir = ht_kept_open(q->root, o->from);
    if (q->base_dir < 0)
        return q->base_dir;
    rc = ht_kept_step(q->base_dir, &q->base.step);
    if (rc < 0)
        ht_error("%s: %s has no number of a step: %s", q->root, o->from, strerror(-rc));
    else if (o->digest)
        q->base.digest = parse_digest(o->digest);
    else
        rc = ht_kept_digest(q->root, o->from, q->base_dir, NULL, &q->base.digest);
    return rc;
}

static void report_sent(const struct reading *q, const struct ht_cmd_options *o)
{
    char text[HT_DIGEST_TEXT_MAX];

    if (o->from)
        ht_info("%s: sent step %s as changes since step %s, digest %s: %llu entries, %s of content", q->root, q->name,
                o->from, ht_digest_text(&q->base.digest, text), (unsigned long long)q->entries, ht_size_text(q->bytes));
    else
        ht_info("%s: sent step %s: %llu entries, %s of content, digest %s", q->root, q->name,
                (unsigned long long)q->entries, ht_size_text(q->bytes), ht_digest_text(&q->digest, text));
}

int ht_cmd_send(const char *path, const struct ht_cmd_options *o)
{
    struct reading q = {.root = path, .name = o->words[0], .done = "sent", .base_dir = -1};
    struct sink sink = {.rate = o->rate};
    int dir, rc;

    if (isatty(STDOUT_FILENO)) {
        ht_error("the stream is for a file or a pipe, and standard output is a terminal");
        return HT_CMD_USAGE;
    }
    if (o->digest && !o->from) {
        ht_error("--digest is that of the step of --from");
        return HT_CMD_USAGE;
    }
    dir = ht_kept_open(path, q.name);
    if (dir < 0)
        return HT_CMD_FAILED;
    (void)signal(SIGPIPE, SIG_IGN); /* a message says that the reader is gone */
    rc = o->from ? open_base(&q, o) : 0;
    sink.began_ns = ht_now_ns();
    if (rc == 0)
        rc = read_step(&q, dir, &sink);
    close(dir);
    if (q.base_dir >= 0)
        close(q.base_dir);
    if (rc < 0)
        return HT_CMD_FAILED;
    report_sent(&q, o);
    return HT_CMD_OK;
}

static void report(const struct reading *q, const struct ht_cmd_options *o, const char *digest, bool same)
{
    struct ht_json j;

    if (!o->json) {
        printf("%s: step %s: %s%s\n", q->root, q->name, digest, !o->digest ? "" : same ? ", as expected" : "");
        return;
    }
    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", q->root);
    ht_json_str(&j, "name", q->name);
    ht_json_str(&j, "digest", digest);
    ht_json_u64(&j, "entries", q->entries);
    ht_json_u64(&j, "bytes", q->bytes);
    if (o->digest)
        ht_json_bool(&j, "same", same);
    ht_json_end(&j);
}

int ht_cmd_verify(const char *path, const struct ht_cmd_options *o)
{
    struct reading q = {.root = path, .name = o->words[0], .done = "verified", .base_dir = -1};
    char text[HT_DIGEST_TEXT_MAX];
    bool same;
    int dir = ht_kept_open(path, q.name), rc;

    if (dir < 0)
        return HT_CMD_FAILED;
    rc = read_step(&q, dir, NULL);
    close(dir);
    if (rc < 0)
        return HT_CMD_FAILED;
    ht_digest_text(&q.digest, text);
    same = !o->digest || strcmp(text, o->digest) == 0;
    report(&q, o, text, same);
    if (!same)
        ht_error("%s: step %s has another digest than %s", path, q.name, o->digest);
    return same && fflush(stdout) == 0 ? HT_CMD_OK : HT_CMD_FAILED;
}
