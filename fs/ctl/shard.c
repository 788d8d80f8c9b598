/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/ctl/shard.h"
#include "fs/ctl/ctl_priv.h"

int ht_shard_table(struct ht_ctl *c, uint64_t root, unsigned ranks, struct ht_shards *out)
{
    char text[HT_SHARDS_TEXT_MAX];
    ssize_t n = ht_ns_getxattr(c->ns, root, HT_XATTR_PREFIX "shards", text, sizeof(text));
    int rc = n < 0 ? (int)n : ht_shards_parse(text, (size_t)n, out);

    if (rc == -ENODATA && ranks) {
        *out = ht_shards_even(ranks);
        return 0;
    }
    if (rc)
        return rc;
    return !ranks || ht_shards_ranks(out) == ranks ? 0 : -ENOENT;
}

/* -------------------------------------------------------------- parameters */

ssize_t ht_shard_param_read(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, void *buf, size_t len)
{
    int rc = ht_ctl_wait_updates(c, ht_obj_id(obj), off, len);

    return rc ? rc : ht_obj_read(obj, off, buf, len);
}

static ssize_t write_with_space(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, const void *buf, size_t len)
{
    ssize_t n = ht_obj_write(obj, off, buf, len);

    for (bool again = false; n == -ENOSPC && ht_store_make_space(c->store, again) == 0; again = true)
        n = ht_obj_write(obj, off, buf, len);
    return n;
}

ssize_t ht_shard_param_write(struct ht_ctl *c, struct ht_obj *obj, uint64_t off, const void *buf, size_t len)
{
    uint64_t ino = ht_obj_id(obj), size = ht_obj_size(obj);

    if (off > size || len > size - off)
        return -ESTALE;
    if (ht_optim_readable(c->optim, ino, off, len, NULL) == -EIO)
        return -EIO;
    ssize_t n = write_with_space(c, obj, off, buf, len);
    if (n > 0)
        ht_ns_touch(c->ns, ino, true);
    return n;
}
