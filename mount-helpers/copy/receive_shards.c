/* SPDX-License-Identifier: Apache-2.0 */
/*
 * receive_shards.c - what a rank gets when the table of shards changes.
 *
 * A rank that was there before has a model: its kept step, with the new table, is cloned, and blocks of the streams
 * replace those of the clone. A new rank has nothing: the first stream makes its model, and the next ones fill in
 * blocks. All streams are for the same rank, table, step and parameters. At the end each former rank that has blocks
 * for this one has sent its stream.
 */
#include "mount-helpers/copy/receive.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/ctl/ctl.h"
#include "mount-helpers/copy/kept_base.h"
#include "tiering/base/files.h"
#include <hitrain/words.h>

struct gathering {
    const char *path;
    struct ht_staging *s;
    const char *base_root;
    struct ht_stream_head head; /* of the first stream */
    uint64_t shape;             /* of the model: its parameters and states */
    bool has_shape;
    bool got[HT_SHARDS_RANKS_MAX], source[HT_SHARDS_RANKS_MAX];
    struct ht_received *out;
};

static int refuse(const struct gathering *g, int rc, const char *why)
{
    ht_error("%s: nothing is received: %s", g->path, why);
    return rc;
}

/* ---------------------------------------------------------------- the model */

static bool has_table(int dir, const struct ht_shards *table)
{
    char own[HT_SHARDS_TEXT_MAX], text[HT_SHARDS_TEXT_MAX];
    ssize_t n = fgetxattr(dir, HT_XATTR_PREFIX "shards", own, sizeof(own));

    ht_shards_format(table, text);
    return n == (ssize_t)strlen(text) && memcmp(own, text, (size_t)n) == 0;
}

/* The newest kept step of the model with the number and the table of the stream: its name. */
static int find_step(const struct gathering *g, char out[NAME_MAX + 1])
{
    char folder[PATH_MAX], text[HT_SHARDS_TEXT_MAX];
    int n = snprintf(folder, sizeof(folder), "%s/" HT_CTL_DIR "/snap", g->base_root);
    DIR *d = n > 0 && (size_t)n < sizeof(folder) ? opendir(folder) : (errno = ENAMETOOLONG, NULL);
    struct dirent *e;
    uint64_t step;

    out[0] = '\0';
    if (!d) {
        ht_error("%s: %s", g->base_root,
                 errno == ENOENT || errno == ENOTDIR ? "this is no model root" : strerror(errno));
        return -ENOENT;
    }
    while ((e = readdir(d))) {
        int dir = ht_is_dot(e->d_name) ? -1 : openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (dir < 0)
            continue;
        if (ht_kept_step(dir, &step) == 0 && step == g->head.step && has_table(dir, &g->head.shard.table))
            snprintf(out, NAME_MAX + 1, "%s", e->d_name);
        close(dir);
    }
    closedir(d);
    if (out[0] != '\0')
        return 0;
    ht_shards_format(&g->head.shard.table, text);
    ht_error(
        "%s: nothing is received: %s keeps no step %llu with the table \"%s\", which the stream is made by; run the same "
        "reshard and snapshot in that store",
        g->path, g->base_root, (unsigned long long)g->head.step, text);
    return -ENOENT;
}

static int check_store(const struct gathering *g)
{
    struct stat mine, theirs;

    if (stat(g->base_root, &theirs) == 0 && fstat(g->s->dir, &mine) == 0 && mine.st_dev == theirs.st_dev)
        return 0;
    ht_error("%s: nothing is received: %s is in another store", g->path, g->base_root);
    return -EXDEV;
}

/* A root that its owner may not write to cannot move to its name. It gets its mode at the end. */
static int make_writable(struct gathering *g)
{
    struct stat st;
    mode_t mode;

    if (fstat(g->s->model, &st) < 0)
        return refuse(g, -errno, strerror(errno));
    mode = st.st_mode & 07777;
    g->out->root.mode = (uint16_t)mode;
    if (geteuid() == 0 || (mode & S_IWUSR) || fchmod(g->s->model, mode | S_IWUSR) == 0)
        return 0;
    return refuse(g, -errno, "the mode of its clone cannot be changed");
}

static int clone_base(struct gathering *g)
{
    char name[NAME_MAX + 1], why[HT_TREE_WHY_MAX];
    int rc = find_step(g, name);

    if (rc == 0)
        rc = check_store(g);
    if (rc == 0)
        rc = ht_kept_clone_at(g->base_root, name, g->s->dir, HT_STAGING_MODEL, g->path);
    if (rc == 0)
        rc = ht_staging_open_model(g->s, g->path);
    if (rc < 0)
        return rc;
    g->out->is_clone = true;
    rc = make_writable(g);
    if (rc < 0)
        return rc;
    rc = ht_tree_shape(g->s->model, &g->shape, why);
    g->has_shape = rc == 0;
    return rc < 0 ? refuse(g, rc, why) : 0;
}

/* ------------------------------------------------------------------- streams */

static bool comes_twice(const struct gathering *g, const struct ht_stream_shard *s)
{
    bool twice = false;

    for (unsigned q = 0; q < ht_stream_shard_former(s); q++)
        twice |= g->got[q] && (s->of == HT_SHARDS_NONE || s->of == q);
    return twice;
}

/* Does the stream belong to those before? */
static int check_head(const struct gathering *g, const struct ht_stream_head *h)
{
    const struct ht_stream_shard *s = &h->shard, *first = &g->head.shard;
    char a[HT_SHARDS_TEXT_MAX], b[HT_SHARDS_TEXT_MAX];

    if (!h->for_rank)
        return refuse(g, -EPROTO, "a stream that is for no rank follows one that is");
    ht_shards_format(&s->table, a);
    ht_shards_format(&first->table, b);
    if (strcmp(a, b) != 0)
        return refuse(g, -EPROTO, "the streams are made by different tables of ranks");
    if (s->rank != first->rank)
        return refuse(g, -EPROTO, "the streams are for different ranks");
    if (h->step != g->head.step)
        return refuse(g, -EPROTO, "the streams are of different steps");
    if (comes_twice(g, s))
        return refuse(g, -EPROTO, "the blocks of a former rank come twice");
    return 0;
}

static int begin(struct gathering *g)
{
    bool is_new = ht_stream_shard_is_new(&g->head.shard);

    if (is_new && g->base_root)
        return refuse(g, -EINVAL, "the rank is new and has no blocks yet: it begins without --base");
    if (!is_new && !g->base_root)
        return refuse(g, -EINVAL,
                      "the rank has the other blocks already: --base=ROOT names its model, which keeps the step");
    if (!is_new)
        return clone_base(g);
    if (!ht_stream_shard_has_files(&g->head.shard))
        return refuse(g, -EINVAL,
                      "the stream of the first former rank that is there comes first: it has the files of a new model");
    return ht_staging_make_model(g->s, g->path);
}

static void add(void *ctx, uint64_t bytes)
{
    ht_progress_add(ctx, bytes);
}

static int merge(struct gathering *g, struct ht_stream_reader *r)
{
    struct ht_progress progress = {0};
    struct ht_tree_progress p = {add, &progress, ht_receive_stopped};
    char why[HT_TREE_WHY_MAX] = "";
    int rc;

    ht_progress_begin(&progress, false, "received", r->head.bytes);
    rc = ht_tree_merge(g->s->model, r, g->out->is_clone, &p, why);
    if (rc == 0)
        ht_progress_end(&progress);
    else
        ht_progress_clear(&progress);
    return rc < 0 ? refuse(g, rc, why) : 0;
}

static int take_stream(struct gathering *g, struct ht_stream_reader *r, bool first)
{
    const struct ht_stream_shard *s = &r->head.shard;
    bool makes = first && !g->out->is_clone;
    int rc = makes ? ht_receive_tree(g->path, g->s, -1, r, g->out) : merge(g, r);

    if (rc < 0)
        return rc;
    if (g->has_shape && r->shape != g->shape)
        return refuse(g, -EPROTO, "the models have different parameters, or state of different sizes");
    g->shape = r->shape;
    g->has_shape = true;
    memcpy(g->source, r->moves.source, sizeof(g->source));
    for (unsigned q = 0; q < ht_stream_shard_former(s); q++)
        g->got[q] |= s->of == HT_SHARDS_NONE || s->of == q;
    g->out->entries = first ? r->entries : g->out->entries;
    g->out->bytes += r->bytes;
    g->out->moved.sent += r->moves.sum.sent;
    g->out->moved.gets = r->moves.sum.gets;
    g->out->moved.least = r->moves.sum.least;
    return 0;
}

/* 1: another stream follows. */
static int has_more(const struct gathering *g, struct ht_receive_input *in)
{
    ssize_t n = ht_receive_get(in, &in->held, 1);

    in->holds = n == 1;
    if (n < 0)
        ht_error("%s: nothing is received: cannot read: %s", g->path, strerror((int)-n));
    return (int)n;
}

static int take_next(struct gathering *g, struct ht_receive_input *in)
{
    struct ht_stream_reader r;
    int rc = ht_stream_reader_begin(&r, ht_receive_get, in);

    if (rc < 0)
        rc = refuse(g, rc, r.in.why);
    if (rc == 0)
        rc = check_head(g, &r.head);
    if (rc == 0)
        rc = take_stream(g, &r, false);
    ht_stream_reader_free(&r);
    return rc;
}

static int check_sources(const struct gathering *g)
{
    for (unsigned q = 0; q < ht_stream_shard_former(&g->head.shard); q++)
        if (g->source[q] && !g->got[q]) {
            ht_error("%s: nothing is received: the blocks of the former rank %u are missing", g->path, q);
            return -EPROTO;
        }
    return 0;
}

int ht_receive_shards(const char *path, struct ht_staging *s, const char *base_root, struct ht_stream_reader *r,
                      struct ht_received *out)
{
    struct gathering g = {.path = path, .s = s, .base_root = base_root, .head = r->head, .out = out};
    struct ht_receive_input *in = r->in.ctx;
    int rc = begin(&g);

    if (rc == 0)
        rc = take_stream(&g, r, true);
    while (rc == 0 && (rc = has_more(&g, in)) > 0)
        rc = take_next(&g, in);
    if (rc == 0)
        rc = check_sources(&g);
    out->shard = g.head.shard;
    return rc;
}
