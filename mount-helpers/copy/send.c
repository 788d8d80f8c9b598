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
#include <unistd.h>

#include "mount-helpers/common/text.h"
#include "mount-helpers/copy/kept_base.h"
#include "mount-helpers/copy/sink.h"
#include "tiering/base/json.h"
#include <hitrain/words.h>

static int read_step(const char *root, struct ht_kept_reading *q, int dir)
{
    char why[HT_TREE_WHY_MAX];
    int rc = ht_kept_read(q, dir, why);

    if (rc == 0)
        ht_progress_end(&q->progress);
    else if (why[0] != '\0')
        ht_error("%s: %s", root, why);
    else
        ht_sink_explain(rc, "receiver (hitrainctl receive)", "nothing is left of a stream that was cut");
    return rc;
}

/* The step that the stream builds on. A wrong digest only makes receivers refuse it. */
static int open_base(const char *root, struct ht_kept_reading *q, const struct ht_cmd_options *o)
{
    int rc;

    q->base_dir = ht_kept_open(root, o->from);
    if (q->base_dir < 0)
        return q->base_dir;
    rc = ht_kept_step(q->base_dir, &q->base.step);
    if (rc < 0)
        ht_error("%s: %s has no number of a step: %s", root, o->from, strerror(-rc));
    else if (o->digest)
        rc = ht_digest_parse(o->digest, &q->base.digest);
    else
        rc = ht_kept_digest(root, o->from, q->base_dir, NULL, &q->base.digest);
    return rc;
}

/* The rank that the stream is for, by the table that is part of the step. */
static int open_shard(const char *root, const char *name, int dir, const struct ht_cmd_options *o,
                      struct ht_stream_shard *out)
{
    char text[HT_SHARDS_TEXT_MAX];
    ssize_t n = fgetxattr(dir, HT_XATTR_PREFIX "shards", text, sizeof(text));
    const char *why = NULL;

    out->rank = (unsigned)ht_min_u64(o->shard, HT_SHARDS_NONE);
    out->of = o->of_rank ? (unsigned)ht_min_u64(o->of, HT_SHARDS_NONE - 1) : HT_SHARDS_NONE;
    if (n < 0 || ht_shards_parse(text, (size_t)n, &out->table) < 0)
        why = "the step has no table of ranks; `hitrainctl reshard` makes one";
    else
        why = ht_stream_shard_refused(out);
    if (why && out->table.changes < 2 && n >= 0)
        why = "the number of ranks has not changed; keep a step after `hitrainctl reshard`";
    if (!why)
        return 0;
    ht_error("%s: step %s: nothing is sent to rank %llu: %s", root, name, (unsigned long long)o->shard, why);
    return -EINVAL;
}

static void report_shard(const char *root, const struct ht_kept_reading *q)
{
    char sent[32];

    snprintf(sent, sizeof(sent), "%s", ht_size_text(q->moved.sent));
    if (q->shard->of == HT_SHARDS_NONE) {
        ht_info("%s: sent what rank %u gets at step %s: %s of parameters and state; the least is %s", root,
                q->shard->rank, q->name, sent, ht_size_text(q->moved.least));
        return;
    }
    char gets[32];
    snprintf(gets, sizeof(gets), "%s", ht_size_text(q->moved.gets));
    ht_info(
        "%s: sent what rank %u gets of the former rank %u at step %s: %s of parameters and state, of %s that it gets "
        "of all; the least is %s",
        root, q->shard->rank, q->shard->of, q->name, sent, gets, ht_size_text(q->moved.least));
}

static void report_sent(const char *root, const struct ht_kept_reading *q, const struct ht_cmd_options *o)
{
    char text[HT_DIGEST_TEXT_MAX];

    if (q->shard)
        report_shard(root, q);
    else if (o->from)
        ht_info("%s: sent step %s as changes since step %s, digest %s: %llu entries, %s of content", root, q->name,
                o->from, ht_digest_text(&q->base.digest, text), (unsigned long long)q->entries, ht_size_text(q->bytes));
    else
        ht_info("%s: sent step %s: %llu entries, %s of content, digest %s", root, q->name,
                (unsigned long long)q->entries, ht_size_text(q->bytes), ht_digest_text(&q->digest, text));
}

int ht_cmd_send(const char *path, const struct ht_cmd_options *o)
{
    struct ht_sink sink = {.rate = o->rate};
    struct ht_kept_reading q = {.name = o->words[0], .done = "sent", .base_dir = -1, .put = ht_sink_put, .ctx = &sink};
    struct ht_stream_shard shard;
    int dir, rc;

    if (isatty(STDOUT_FILENO)) {
        ht_error("the stream is for a file or a pipe, and standard output is a terminal");
        return HT_CMD_USAGE;
    }
    if (o->digest && !o->from) {
        ht_error("--digest is that of the step of --from");
        return HT_CMD_USAGE;
    }
    if ((o->for_rank && o->from) || (o->of_rank && !o->for_rank)) {
        ht_error("--shard goes without --from, and --of goes with --shard");
        return HT_CMD_USAGE;
    }
    dir = ht_kept_open(path, q.name);
    if (dir < 0)
        return HT_CMD_FAILED;
    (void)signal(SIGPIPE, SIG_IGN); /* a message says that the reader is gone */
    rc = o->from ? open_base(path, &q, o) : o->for_rank ? open_shard(path, q.name, dir, o, &shard) : 0;
    q.shard = o->for_rank ? &shard : NULL;
    sink.began_ns = ht_now_ns();
    if (rc == 0)
        rc = read_step(path, &q, dir);
    close(dir);
    if (q.base_dir >= 0)
        close(q.base_dir);
    if (rc < 0)
        return HT_CMD_FAILED;
    report_sent(path, &q, o);
    return HT_CMD_OK;
}

/* What verify compares with: the digest that was given, and the one that the store has. */
struct expected {
    const char *given;               /* or NULL */
    char stored[HT_DIGEST_TEXT_MAX]; /* "": none */
    bool same_given, same_stored;    /* or there is none */
};

static void compare(struct expected *x, const char *digest)
{
    x->same_given = !x->given || strcmp(digest, x->given) == 0;
    x->same_stored = x->stored[0] == '\0' || strcmp(digest, x->stored) == 0;
}

static void report(const char *root, const struct ht_kept_reading *q, const struct ht_cmd_options *o,
                   const char *digest, const struct expected *x)
{
    bool same = x->same_given && x->same_stored;
    struct ht_json j;

    if (!o->json) {
        printf("%s: step %s: %s%s\n", root, q->name, digest,
               !same                      ? ""
                   : x->given             ? ", as expected"
                   : x->stored[0] != '\0' ? ", as stored"
                                          : "");
        return;
    }
    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", root);
    ht_json_str(&j, "name", q->name);
    ht_json_str(&j, "digest", digest);
    if (x->stored[0] != '\0')
        ht_json_str(&j, "stored", x->stored);
    ht_json_u64(&j, "entries", q->entries);
    ht_json_u64(&j, "bytes", q->bytes);
    if (x->given || x->stored[0] != '\0')
        ht_json_bool(&j, "same", same);
    ht_json_end(&j);
}

int ht_cmd_verify(const char *path, const struct ht_cmd_options *o)
{
    struct ht_kept_reading q = {.name = o->words[0], .done = "verified", .base_dir = -1};
    struct expected x = {.given = o->digest};
    struct ht_hash128 stored;
    char text[HT_DIGEST_TEXT_MAX];
    int dir = ht_kept_open(path, q.name), rc;

    if (dir < 0)
        return HT_CMD_FAILED;
    rc = read_step(path, &q, dir);
    if (rc == 0 && ht_kept_stored_digest(dir, &stored) == 0)
        ht_digest_text(&stored, x.stored);
    close(dir);
    if (rc < 0)
        return HT_CMD_FAILED;
    compare(&x, ht_digest_text(&q.digest, text));
    report(path, &q, o, text, &x);
    if (!x.same_given)
        ht_error("%s: step %s has another digest than %s", path, q.name, x.given);
    if (!x.same_stored)
        ht_error("%s: step %s has changed: the store computed the digest %s", path, q.name, x.stored);
    return x.same_given && x.same_stored && fflush(stdout) == 0 ? HT_CMD_OK : HT_CMD_FAILED;
}
