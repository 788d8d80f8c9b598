/* SPDX-License-Identifier: Apache-2.0 */
/* content.c - the object that holds the content of a regular file. */
#include "fs/ns/content.h"
#include "fs/ns/kept.h"
#include "fs/ns/ns_priv.h"

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

bool ht_ns_is_of_content(const char *attribute)
{
    return strcmp(attribute, HT_XATTR_PREFIX "pin") == 0 || strcmp(attribute, HT_XATTR_PREFIX "tier") == 0 ||
        strcmp(attribute, HT_NS_COMPRESS_NAME) == 0;
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
    ht_ns_compress_content(ns, i, obj);
    *out_obj = obj;
    return 0;
}

void ht_ns_content_changed(struct ht_ns *ns, const struct ht_ns_inode *i)
{
    struct ht_obj *obj = S_ISREG(i->cur.mode) ? ht_obj_get(ns->store, i->ino) : NULL;

    if (obj) {
        ht_obj_set_residency(obj, residency_of(i));
        ht_ns_compress_content(ns, i, obj);
    }
    ht_obj_put(obj);
}
