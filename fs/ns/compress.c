/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compress.c - which files may be compressed: those whose attribute user.hitrain.compress is auto, and those without
 * one where the mount says so. A new file or directory gets the attribute of its directory.
 */
#include "fs/ns/content.h"
#include "fs/ns/ns_priv.h"
#include "tiering/api/compress.h"

static const char name[] = HT_NS_COMPRESS_NAME;

void ht_ns_note_compress(struct ht_ns *ns, const char *attribute, size_t len)
{
    if (len == strlen(name) && memcmp(attribute, name, len) == 0)
        ns->compress_named = true;
}

static bool may_compress(const struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_xattr *x;

    if (!i || !S_ISREG(i->cur.mode))
        return false;
    x = ht_ns_xattr_find(i, name, strlen(name));
    if (!x || x->value_len == 0)
        return ns->compress_all;
    return x->value_len == 4 && memcmp(ht_ns_xattr_value(x), "auto", 4) == 0;
}

/* New content may be compressed by the thread that writes it. */
void ht_ns_compress_content(struct ht_ns *ns, const struct ht_ns_inode *i, struct ht_obj *obj)
{
    ht_obj_set_compress(obj, may_compress(ns, i));
}

/* Called by the store's engine. oid 0: may any be? */
static bool answer(void *ctx, uint64_t oid)
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
    ht_store_set_compress(ns->store, answer, ns);
    ht_ns_compress_changed(ns);
}

void ht_ns_compress_changed(struct ht_ns *ns)
{
    if (answer(ns, 0))
        ht_store_wake_compress(ns->store);
}
