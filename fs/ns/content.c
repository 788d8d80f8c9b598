/* SPDX-License-Identifier: Apache-2.0 */
/*
 * content.c - the object that holds the content of a regular file, and what the file's attributes say of it: how long
 * it stays in memory, and whether it may be compressed. A model root says whether its content goes to devices of each
 * class. Content may be compressed with the attribute compress=auto, and without the attribute where the mount says so.
 * A new file or directory gets the attribute of its directory.
 */
#include "fs/ns/kept.h"
#include "tiering/api/background.h"
#include "tiering/base/log.h"

/* Large ones for tensors, as given to mkfs. */
uint32_t ht_ns_chunk_bytes(struct ht_ns *ns, const struct ht_ns_inode *i)
{
    return i->cur.dtype != HT_DTYPE_NONE ? ht_store_layout(ns->store)->chunk_bytes : HT_SMALL_CHUNK_BYTES;
}

static bool has_value(const struct ht_ns_inode *i, const char *name, const char *value)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_xattr *x = ht_ns_xattr_find(i, name, strlen(name));

    return x && x->value_len == strlen(value) && memcmp(ht_ns_xattr_value(x), value, x->value_len) == 0;
}

/* How long its content stays in memory. Copies that a model keeps are not used in training. */
static enum ht_residency residency_of(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (ht_ns_frozen(i))
        return HT_RESIDENCY_AUTO;
    if (has_value(i, HT_XATTR_PREFIX "pin", "dram") || has_value(i, HT_XATTR_PREFIX "tier", "dram"))
        return HT_RESIDENCY_PINNED;
    return has_value(i, HT_XATTR_PREFIX "tier", "capacity") ? HT_RESIDENCY_COLD : HT_RESIDENCY_AUTO;
}

static bool may_compress(const struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (!i || !S_ISREG(i->cur.mode))
        return false;
    const struct ht_ns_xattr *x = ht_ns_xattr_find(i, HT_NS_COMPRESS_NAME, strlen(HT_NS_COMPRESS_NAME));
    if (!x || x->value_len == 0)
        return ns->compress_all;
    return x->value_len == 4 && memcmp(ht_ns_xattr_value(x), "auto", 4) == 0;
}

bool ht_ns_is_of_content(const char *attribute)
{
    return strcmp(attribute, HT_XATTR_PREFIX "paths") == 0 || strcmp(attribute, HT_XATTR_PREFIX "pin") == 0 ||
        strcmp(attribute, HT_XATTR_PREFIX "tier") == 0 || strcmp(attribute, HT_NS_COMPRESS_NAME) == 0;
}

int ht_ns_content(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_obj **out_obj)
{
    struct ht_obj_attr attr = {
        .oid = i->ino,
        .chunk_bytes = ht_ns_chunk_bytes(ns, i),
        .obj_class = i->cur.obj_class,
        .scope = ht_ns_root(i)->ino,
    };
    struct ht_obj *obj = ht_obj_get(ns->store, i->ino);
    int rc = 0;

    if (!obj)
        rc = ht_obj_create(ns->store, &attr, &obj);
    if (rc)
        return rc;
    if (residency_of(i) != HT_RESIDENCY_AUTO)
        ht_obj_set_residency(obj, residency_of(i));
    ht_obj_describe(obj, may_compress(ns, i), i->cur.dtype != HT_DTYPE_NONE, false);
    *out_obj = obj;
    return 0;
}

void ht_ns_root_paths(struct ht_ns *ns, const struct ht_ns_inode *i)
{
    if (ht_scope_set_all_paths(ns->store, i->ino, has_value(i, HT_XATTR_PREFIX "paths", "all")))
        ht_warn("no memory: model root %llu uses all paths from the next mount on", (unsigned long long)i->ino);
}

void ht_ns_content_changed(struct ht_ns *ns, const struct ht_ns_inode *i)
{
    struct ht_obj *obj = S_ISREG(i->cur.mode) ? ht_obj_get(ns->store, i->ino) : NULL;

    if ((i->flags & HT_NS_MODEL_ROOT) != 0)
        ht_ns_root_paths(ns, i);

    if (obj) {
        ht_obj_set_residency(obj, residency_of(i));
        ht_obj_describe(obj, may_compress(ns, i), i->cur.dtype != HT_DTYPE_NONE, true);
    }
    ht_obj_put(obj);
}

/* ----------------------------------------------------------------- engine */

/* Called by the store's engine. oid 0: may any be? */
static bool may_compress_object(void *ctx, uint64_t oid)
{
    struct ht_ns *ns = ctx;

    if (oid == 0)
        return ns->compress_all || ns->compress_named;
    bool may = may_compress(ns, ht_ns_read_begin(ns, oid));
    ht_rwlock_unlock(ht_ns_lock(ns));
    return may;
}

void ht_ns_compress_begin(struct ht_ns *ns, bool all)
{
    ns->compress_all = all;
    ht_store_set_compress(ns->store, may_compress_object, ns);
    ht_ns_compress_changed(ns);
}

void ht_ns_compress_changed(struct ht_ns *ns)
{
    if (may_compress_object(ns, 0))
        ht_store_wake_compress(ns->store);
}
