/* SPDX-License-Identifier: Apache-2.0 */
/* reshard.c - `hitrainctl reshard`: the next table of shards of a model root, and how much changes its owner. */
#include "mount-helpers/ctl/ctl.h"

#include <fts.h>
#include <sys/xattr.h>

#include "tiering/base/shards.h"
#include <hitrain/words.h>

struct change {
    struct ht_shards before, after;
    bool first; /* there was no table */
    uint64_t bytes[HT_SHARDS_RANKS_MAX], gets[HT_SHARDS_RANKS_MAX];
    uint64_t total, moved, least; /* least: no even shares of whole blocks move fewer */
};

uint8_t ht_cmd_trained_dtype(const char *word)
{
    for (size_t i = 0; i < HT_DTYPE_WORDS; i++)
        if (strcasecmp(ht_dtype_words[i].word, word) == 0 && ht_dtype_trained_bytes(ht_dtype_words[i].dtype))
            return ht_dtype_words[i].dtype;
    return HT_DTYPE_NONE;
}

static bool is_parameter(const char *path)
{
    char dtype[16] = "";

    return getxattr(path, HT_XATTR_PREFIX "dtype", dtype, sizeof(dtype) - 1) > 0 && ht_cmd_trained_dtype(dtype);
}

static int add_parameter(struct change *c, uint64_t size)
{
    uint64_t blocks = ht_div_up(size, HT_SHARD_BLOCK_BYTES), moved = 0, moved_before = c->moved;
    uint16_t *now = calloc(blocks + 1, sizeof(*now)), *before = calloc(blocks + 1, sizeof(*before));
    int rc = !now || !before ? -ENOMEM : !ht_shards_fit(&c->after, blocks) ? -EFBIG : 0;

    if (rc == 0) {
        ht_shards_owners(&c->before, blocks, before);
        ht_shards_owners(&c->after, blocks, now);
    }
    for (uint64_t b = 0; rc == 0 && b < blocks; b++) {
        uint64_t bytes = ht_min_u64(HT_SHARD_BLOCK_BYTES, size - b * HT_SHARD_BLOCK_BYTES);
        bool moves = !c->first && ht_shards_renumber(&c->after, before[b]) != now[b];
        c->bytes[now[b]] += bytes;
        c->gets[now[b]] += moves ? bytes : 0;
        c->total += bytes;
        c->moved += moves ? bytes : 0;
        moved += moves;
    }
    if (rc == 0 && moved) /* each block is whole but the last one */
        c->least +=
            ht_min_u64(c->moved - moved_before, ht_shards_least(&c->after, blocks, before) * HT_SHARD_BLOCK_BYTES);
    free(now);
    free(before);
    return rc;
}

static int add_all(struct change *c, const char *root)
{
    char *paths[] = {(char *)(uintptr_t)root, NULL};
    FTS *walk = fts_open(paths, FTS_PHYSICAL | FTS_NOCHDIR | FTS_XDEV, NULL);
    int rc = walk ? 0 : ht_cmd_explain(root, -errno);
    FTSENT *e;

    while (rc == 0 && (errno = 0, (e = fts_read(walk)))) {
        if (e->fts_info == FTS_DNR || e->fts_info == FTS_ERR || e->fts_info == FTS_NS)
            rc = ht_cmd_explain(e->fts_path, -e->fts_errno);
        else if (e->fts_info == FTS_F && is_parameter(e->fts_path))
            rc = add_parameter(c, (uint64_t)e->fts_statp->st_size);
        if (rc == -EFBIG)
            ht_error("%s: a parameter in shards has at most 1 TiB, and 4 TiB divided by the numbers of the table",
                     e->fts_path);
        else if (rc == -ENOMEM)
            ht_error("%s: not enough memory", e->fts_path);
    }
    if (rc == 0 && errno)
        rc = ht_cmd_explain(root, -errno);
    if (walk)
        fts_close(walk);
    return rc;
}

/* The present table: that of the attribute. *out_first: there is none. */
static int present(const char *root, struct ht_shards *out, bool *out_first)
{
    char *text;
    int rc = ht_cmd_attribute(root, "shards", false, &text);

    *out_first = rc == -ENODATA;
    if (rc)
        return rc == -ENODATA ? 0 : rc;
    rc = ht_shards_parse(text, strlen(text), out);
    free(text);
    return rc;
}

static int next_table(const char *root, const struct ht_cmd_options *o, struct change *c)
{
    unsigned lost = o->loses ? (unsigned)ht_min_u64(o->lost, HT_SHARDS_NONE - 1) : HT_SHARDS_NONE;
    int rc = present(root, &c->before, &c->first);

    if (rc)
        return rc;
    c->after = c->first ? (struct ht_shards){0} : c->before;
    rc = ht_shards_change(&c->after, (unsigned)ht_min_u64(o->to, UINT16_MAX), lost);
    if (c->first)
        c->before = c->after;
    if (rc == -EINVAL && o->loses && c->first)
        ht_error("%s: there is no table of shards yet, so no rank is lost", root);
    else if (rc == -EINVAL)
        ht_error("%s: there are 1 to %u ranks, and a lost one is one of the present ones", root, HT_SHARDS_RANKS_MAX);
    else if (rc == -E2BIG)
        ht_error("%s: the table has changed %u times; set " HT_XATTR_PREFIX "shards to a new one", root,
                 HT_SHARDS_CHANGES_MAX);
    return rc;
}

static void print(const char *root, const struct change *c, const char *text, bool json)
{
    unsigned ranks = ht_shards_ranks(&c->after);
    struct ht_json j;

    if (!json) {
        printf("%s: %u ranks, %s of parameters; %s get another owner, and %s have to\n", root, ranks,
               ht_size_text(c->total), ht_size_text(c->moved), ht_size_text(c->least));
        return;
    }
    ht_cmd_json_begin(&j, "path", root);
    ht_json_str(&j, "shards", text);
    ht_json_u64(&j, "bytes", c->total);
    ht_json_u64(&j, "moved_bytes", c->moved);
    ht_json_u64(&j, "least_bytes", c->least);
    ht_json_array(&j, "ranks");
    for (unsigned r = 0; r < ranks; r++) {
        ht_json_object(&j, NULL);
        ht_json_u64(&j, "rank", r);
        ht_json_u64(&j, "bytes", c->bytes[r]);
        ht_json_u64(&j, "moved_bytes", c->gets[r]);
        ht_json_end(&j);
    }
    ht_json_end(&j);
    ht_json_end(&j);
}

int ht_cmd_reshard(const char *path, const struct ht_cmd_options *o)
{
    static struct change c; /* large, and used once */
    char text[HT_SHARDS_TEXT_MAX] = "";

    if (!o->to)
        return ht_fail(HT_CMD_USAGE, "reshard: --to=R is needed: the number of ranks");
    int rc = next_table(path, o, &c);
    if (rc == 0)
        rc = add_all(&c, path);
    if (rc == 0) {
        ht_shards_format(&c.after, text);
        rc = setxattr(path, HT_XATTR_PREFIX "shards", text, strlen(text), c.first ? XATTR_CREATE : XATTR_REPLACE);
        rc = rc ? ht_cmd_explain(path, -errno) : 0;
    }
    if (rc == 0)
        print(path, &c, text, o->json);
    return rc == 0 && fflush(stdout) == 0 ? HT_CMD_OK : HT_CMD_FAILED;
}
