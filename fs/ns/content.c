/* SPDX-License-Identifier: Apache-2.0 */
/* content.c - the object that holds the content of a regular file. */
#include "fs/ns/ns_priv.h"

/* Large ones for tensors, as given to mkfs. */
uint32_t ht_ns_chunk_bytes(struct ht_ns *ns, const struct ht_ns_inode *i)
{
    return i->cur.dtype != HT_DTYPE_NONE ? ht_store_layout(ns->store)->chunk_bytes : HT_SMALL_CHUNK_BYTES;
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

    if (!obj)
        return ht_obj_create(ns->store, &attr, out_obj);
    *out_obj = obj;
    return 0;
}
