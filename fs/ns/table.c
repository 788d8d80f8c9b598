/* SPDX-License-Identifier: Apache-2.0 */
/*
 * table.c - the memory of names: inodes by number, entries by directory and name, extended attributes.
 *
 * Owns allocation, the two hash tables, the figures of ht_ns_stats and the log reserves, which are given back when the
 * thing is freed. Other files decide the links between inodes, slots and pending lists.
 *
 * Tables grow by a bucket at a time and never shrink. A table that cannot grow has longer chains and is still correct.
 * All functions: ns.lock held, for writing where something changes.
 */
#include "fs/ns/ns_priv.h"

#include "tiering/base/hash.h"

enum { PER_BUCKET = 2, GROW_MAX = 2, FREE_SHADOWS_MAX = 4096 };

/* ----------------------------------------------------------- log reserves */

/* In replay nothing is reserved: link.c reserves for everything at the end. */
static int log_reserve(struct ht_ns *ns, uint64_t bytes) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ns->replaying ? 0 : ht_store_log_reserve(ns->store, bytes);
}

static void log_unreserve(struct ht_ns *ns, uint64_t bytes) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    if (!ns->replaying)
        ht_store_log_unreserve(ns->store, bytes);
}

uint64_t ht_ns_inode_log_bytes(const struct ht_ns_inode *i)
{
    uint64_t bytes = HT_NS_INODE_RECORD_BYTES;

    if (S_ISLNK(i->cur.mode) && i->u.target)
        bytes += HT_NS_TARGET_RECORD_BYTES + strlen(i->u.target);
    return bytes;
}

uint64_t ht_ns_entry_log_bytes(const struct ht_ns_entry *e)
{
    return HT_NS_ENTRY_RECORD_BYTES + (uint64_t)e->len;
}

uint64_t ht_ns_xattr_log_bytes(const struct ht_ns_xattr *x)
{
    return HT_NS_XATTR_RECORD_BYTES + (uint64_t)x->name_len + x->value_len;
}

/* --------------------------------------------------------------- shadows */

void ht_ns_shadow_walk_begin(struct ht_ns *ns, struct ht_ns_shadow_walk *w, struct ht_list *list)
{
    *w = (struct ht_ns_shadow_walk){.next = ns->shadow_walks};
    ns->shadow_walks = w;
    if (ht_list_empty(list))
        return;
    w->at = list->next;
    w->last = list->prev;
}

struct ht_ns_shadow *ht_ns_shadow_walk_next(struct ht_ns_shadow_walk *w)
{
    struct ht_list *at = w->at;

    if (!at)
        return NULL;
    w->at = at == w->last ? NULL : at->next;
    return ht_list_entry(at, struct ht_ns_shadow, link);
}

void ht_ns_shadow_walk_end(struct ht_ns *ns, struct ht_ns_shadow_walk *w)
{
    ht_chain_remove(&ns->shadow_walks, w, next);
}

/* A walk that would come to it next goes past it. */
void ht_ns_shadow_leave(struct ht_ns *ns, struct ht_ns_shadow *s)
{
    for (struct ht_ns_shadow_walk *w = ns->shadow_walks; w; w = w->next) {
        if (w->at == &s->link)
            w->at = w->at == w->last ? NULL : w->at->next;
        else if (w->last == &s->link)
            w->last = s->link.prev;
    }
    ht_list_del(&s->link);
}

int ht_ns_shadow_reserve(struct ht_ns *ns, uint32_t count)
{
    while (ns->free_shadow_count < count) {
        struct ht_ns_shadow *s = malloc(sizeof(*s));
        if (!s)
            return -ENOMEM;
        ht_list_add_tail(&ns->free_shadows, &s->link);
        ns->free_shadow_count++;
        ns->meta_bytes += sizeof(*s);
    }
    return 0;
}

void ht_ns_shadow_set(struct ht_ns_inode *i, struct ht_ns_shadow *s)
{
    struct ht_ns_root *root = ht_ns_root(i);

    if (s)
        s->root = root;
    i->home = s ? (uintptr_t)s | 1 : (uintptr_t)root;
}

void ht_ns_shadow_take(struct ht_ns *ns, struct ht_ns_inode *i)
{
    if (ht_ns_shadow(i))
        return;
    assert(ns->free_shadow_count > 0);
    struct ht_ns_shadow *s = ht_list_entry(ns->free_shadows.next, struct ht_ns_shadow, link);
    ht_list_del(&s->link);
    ns->free_shadow_count--;
    s->inode = i;
    s->published = i->cur;
    s->xattrs = false;
    ht_ns_shadow_set(i, s);
    ht_list_add_tail(&s->root->shadows, &s->link);
}

/* Steady work allocates none. */
void ht_ns_shadow_recycle(struct ht_ns *ns, struct ht_ns_shadow *s)
{
    ht_ns_shadow_leave(ns, s);
    if (ns->free_shadow_count >= FREE_SHADOWS_MAX) {
        ns->meta_bytes -= sizeof(*s);
        free(s);
        return;
    }
    ht_list_add_tail(&ns->free_shadows, &s->link);
    ns->free_shadow_count++;
}

void ht_ns_shadow_drop(struct ht_ns *ns, struct ht_ns_inode *i)
{
    struct ht_ns_shadow *s = ht_ns_shadow(i);

    if (!s)
        return;
    ht_ns_shadow_set(i, NULL);
    ht_ns_shadow_recycle(ns, s);
}

void ht_ns_inode_set_root(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_ns_root *root)
{
    struct ht_ns_shadow *s = ht_ns_shadow(i);

    ht_ns_root(i)->members--;
    root->members++;
    if (!s) {
        i->home = (uintptr_t)root;
        return;
    }
    s->root = root;
    ht_ns_shadow_leave(ns, s);
    ht_list_add_tail(&root->shadows, &s->link);
}

/* ---------------------------------------------------------------- inodes */

struct ht_ns_inode *ht_ns_inode_find(struct ht_ns *ns, uint64_t ino)
{
    return (struct ht_ns_inode *)(void *)ht_id_find(&ns->inodes, ino);
}

struct ht_ns_inode *ht_ns_inode_live(struct ht_ns *ns, uint64_t ino)
{
    struct ht_ns_inode *i = ht_ns_inode_find(ns, ino);

    return i && (i->flags & (HT_NS_STALE | HT_NS_GHOST)) == 0 ? i : NULL;
}

struct ht_ns_inode *ht_ns_read_begin(struct ht_ns *ns, uint64_t ino)
{
    ht_rwlock_rdlock(ht_ns_lock(ns));
    return ht_ns_inode_live(ns, ino);
}

int ht_ns_inode_new(struct ht_ns *ns, uint64_t ino, uint32_t mode, struct ht_ns_inode **out)
{
    uint64_t table_bytes = ht_id_table_bytes(&ns->inodes);
    int rc = log_reserve(ns, HT_NS_INODE_RECORD_BYTES);

    if (rc != 0)
        return rc;
    struct ht_ns_inode *i = ht_pool_get(&ns->inode_pool);
    if (!i || ht_ns_inode_set_mode(ns, i, mode) != 0) {
        free(ht_pool_put(&ns->inode_pool, i));
        log_unreserve(ns, HT_NS_INODE_RECORD_BYTES);
        return -ENOMEM;
    }
    i->ino = ino;
    i->home = (uintptr_t)&ns->outside;
    ns->outside.members++;
    (void)!ht_id_insert(&ns->inodes, &i->by_ino); /* it has its first buckets */
    ns->meta_bytes += sizeof(*i) + ht_id_table_bytes(&ns->inodes) - table_bytes;
    *out = i;
    return 0;
}

int ht_ns_inode_set_mode(struct ht_ns *ns, struct ht_ns_inode *i, uint32_t mode)
{
    if (S_ISDIR(mode) && !i->u.dir) {
        i->u.dir = calloc(1, sizeof(*i->u.dir));
        if (!i->u.dir)
            return -ENOMEM;
        ns->meta_bytes += sizeof(*i->u.dir);
    }
    i->cur.mode = (uint16_t)mode;
    return 0;
}

int ht_ns_inode_set_target(struct ht_ns *ns, struct ht_ns_inode *i, const char *target, size_t len)
{
    int rc = log_reserve(ns, HT_NS_TARGET_RECORD_BYTES + len);

    if (rc != 0)
        return rc;
    i->u.target = strndup(target, len);
    if (!i->u.target) {
        log_unreserve(ns, HT_NS_TARGET_RECORD_BYTES + len);
        return -ENOMEM;
    }
    ns->meta_bytes += len + 1;
    return 0;
}

void ht_ns_inode_drop_payload(struct ht_ns *ns, struct ht_ns_inode *i)
{
    if (S_ISDIR(i->cur.mode) && i->u.dir) {
        ns->meta_bytes -= sizeof(*i->u.dir) + (uint64_t)i->u.dir->slot_cap * sizeof(*i->u.dir->slots);
        free(i->u.dir->slots);
        free(i->u.dir);
    } else if (S_ISLNK(i->cur.mode) && i->u.target) {
        ns->meta_bytes -= strlen(i->u.target) + 1;
        free(i->u.target);
    } else if (S_ISREG(i->cur.mode)) {
        ht_obj_put(i->u.obj);
    }
    memset(&i->u, 0, sizeof(i->u));
}

void ht_ns_inode_free(struct ht_ns *ns, struct ht_ns_inode *i)
{
    while (i->xattrs)
        ht_ns_xattr_remove(ns, i, i->xattrs);
    log_unreserve(ns, ht_ns_inode_log_bytes(i));
    ht_ns_shadow_drop(ns, i);
    ht_ns_root(i)->members--;
    ht_id_remove(&ns->inodes, &i->by_ino);
    ht_ns_inode_drop_payload(ns, i);
    ns->meta_bytes -= sizeof(*i);
    free(ht_pool_put(&ns->inode_pool, i));
}

int ht_ns_inode_each(struct ht_ns *ns, int (*fn)(void *ctx, struct ht_ns_inode *i), void *ctx)
{
    for (size_t b = 0; b < ns->inodes.buckets.count; b++)
        for (struct ht_ns_inode *i = *ht_bucket_at(&ns->inodes.buckets, b), *next; i; i = next) {
            next = ht_ns_inode_next(i);
            int rc = fn(ctx, i);
            if (rc != 0)
                return rc;
        }
    return 0;
}

struct collection {
    struct ht_ns *ns;
    ht_ns_wanted_fn wanted; /* NULL: all are */
    uint64_t *inos;
    size_t count, cap;
};

static int collect(void *ctx, struct ht_ns_inode *i)
{
    struct collection *c = ctx;

    if (c->wanted && !c->wanted(c->ns, i))
        return 0;
    if (ht_array_grow((void **)&c->inos, &c->cap, c->count + 1, sizeof(*c->inos)) != 0)
        return -ENOMEM;
    c->inos[c->count++] = i->ino;
    return 0;
}

int ht_ns_inode_each_sorted(struct ht_ns *ns, int (*fn)(void *ctx, struct ht_ns_inode *i), void *ctx)
{
    struct collection c = {.ns = ns};
    int rc = ht_ns_inode_each(ns, collect, &c);

    if (rc == 0 && c.count > 0)
        qsort(c.inos, c.count, sizeof(*c.inos), ht_compare_numbers);
    for (size_t n = 0; rc == 0 && n < c.count; n++) {
        struct ht_ns_inode *i = ht_ns_inode_find(ns, c.inos[n]);
        rc = i ? fn(ctx, i) : 0;
    }
    free(c.inos);
    return rc;
}

int ht_ns_inode_collect(struct ht_ns *ns, ht_ns_wanted_fn wanted, uint64_t **out_inos, size_t *out_count)
{
    struct collection c = {.ns = ns, .wanted = wanted};

    ht_rwlock_rdlock(ht_ns_lock(ns));
    int rc = ht_ns_inode_each(ns, collect, &c);
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (rc != 0) {
        free(c.inos);
        return rc;
    }
    *out_inos = c.inos;
    *out_count = c.count;
    return 0;
}

struct ht_ns_inode *ht_ns_inode_scan(struct ht_ns *ns, uint64_t *cursor)
{
    struct ht_ns_inode *chain = *ht_bucket_at(&ns->inodes.buckets, *cursor);

    *cursor = ht_buckets_next(&ns->inodes.buckets, *cursor);
    return chain;
}

/* --------------------------------------------------------------- entries */

static void **entry_bucket(const struct ht_ns *ns, uint64_t dir, const char *name, size_t len)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ht_bucket_of_hash(&ns->entries, ht_hash64(name, len, ns->salt ^ ht_id_hash(dir)));
}

static struct ht_ns_entry *find_entry(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name, size_t len,
                                      bool gone) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_ns_entry *e = *entry_bucket(ns, dir->ino, name, len);

    for (; e; e = e->hash_next)
        if (e->dir == dir && e->len == len && (e->state == HT_NS_GONE) == gone && memcmp(e->name, name, len) == 0)
            return e;
    return NULL;
}

struct ht_ns_entry *ht_ns_entry_find(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name, size_t len)
{
    return find_entry(ns, dir, name, len, false);
}

struct ht_ns_entry *ht_ns_entry_find_gone(struct ht_ns *ns, const struct ht_ns_inode *dir, const char *name, size_t len)
{
    return find_entry(ns, dir, name, len, true);
}

static size_t entry_bytes(size_t len)
{
    return ht_round_up(offsetof(struct ht_ns_entry, name) + len + 1, 8);
}

static struct ht_pool *entry_pool(struct ht_ns *ns, size_t len)
{
    return &ns->entry_pool[entry_bytes(len) / 8];
}

int ht_ns_entry_new(struct ht_ns *ns, const char *name, size_t len, struct ht_ns_entry **out)
{
    int rc = log_reserve(ns, HT_NS_ENTRY_RECORD_BYTES + len);

    if (rc != 0)
        return rc;
    struct ht_ns_entry *e = ht_pool_get(entry_pool(ns, len));
    if (!e) {
        log_unreserve(ns, HT_NS_ENTRY_RECORD_BYTES + len);
        return -ENOMEM;
    }
    e->len = (uint8_t)len;
    memcpy(e->name, name, len);
    ns->meta_bytes += entry_bytes(len);
    ns->entry_count++;
    *out = e;
    return 0;
}

void ht_ns_entry_free(struct ht_ns *ns, struct ht_ns_entry *e)
{
    log_unreserve(ns, ht_ns_entry_log_bytes(e));
    ns->meta_bytes -= entry_bytes(e->len);
    ns->entry_count--;
    free(ht_pool_put(entry_pool(ns, e->len), e));
}

static void put_entry(struct ht_ns *ns, struct ht_ns_entry *e) HT_REQUIRES(HT_LOCK_NAMES)
{
    void **head = entry_bucket(ns, e->dir->ino, e->name, e->len);

    ht_chain_link(head, e, hash_next);
}

static void grow_entries(struct ht_ns *ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    struct ht_buckets *b = &ns->entries;
    uint64_t before = ht_buckets_bytes(b);
    void **from;

    for (unsigned n = 0; n < GROW_MAX && ns->entry_count >= b->count * PER_BUCKET && ht_buckets_grow(b, &from); n++) {
        struct ht_ns_entry *e = *from, *next;
        for (*from = NULL; e; e = next) {
            next = e->hash_next;
            put_entry(ns, e);
            ht_lock_step();
        }
    }
    ns->meta_bytes += ht_buckets_bytes(b) - before;
}

void ht_ns_entry_insert(struct ht_ns *ns, struct ht_ns_entry *e, struct ht_ns_inode *dir, struct ht_ns_inode *inode)
{
    grow_entries(ns);
    e->dir = dir;
    e->inode = inode;
    put_entry(ns, e);
    e->name_next = inode->names;
    e->name_pprev = &inode->names;
    if (e->name_next)
        e->name_next->name_pprev = &e->name_next;
    inode->names = e;
}

void ht_ns_entry_remove(struct ht_ns *ns, struct ht_ns_entry *e)
{
    void **head = entry_bucket(ns, e->dir->ino, e->name, e->len);

    ht_chain_remove(head, e, hash_next);
    *e->name_pprev = e->name_next;
    if (e->name_next)
        e->name_next->name_pprev = e->name_pprev;
}

/* ------------------------------------------------- extended attributes */

static size_t xattr_bytes(size_t name_len, size_t value_len)
{
    return sizeof(struct ht_ns_xattr) + name_len + 1 + value_len;
}

int ht_ns_xattr_new(struct ht_ns *ns, const char *name, size_t name_len, const void *value, size_t value_len,
                    struct ht_ns_xattr **out)
{
    uint64_t record_bytes = HT_NS_XATTR_RECORD_BYTES + name_len + value_len;
    int rc = log_reserve(ns, record_bytes);

    if (rc != 0)
        return rc;
    struct ht_ns_xattr *x = malloc(xattr_bytes(name_len, value_len));
    if (!x) {
        log_unreserve(ns, record_bytes);
        return -ENOMEM;
    }
    *x = (struct ht_ns_xattr){.value_len = (uint32_t)value_len, .name_len = (uint8_t)name_len};
    memcpy(x->data, name, name_len);
    x->data[name_len] = '\0';
    if (value_len > 0)
        memcpy(x->data + name_len + 1, value, value_len);
    ns->meta_bytes += xattr_bytes(name_len, value_len);
    ns->xattr_count++;
    if (name_len == strlen(HT_NS_COMPRESS_NAME) && memcmp(name, HT_NS_COMPRESS_NAME, name_len) == 0)
        ns->compress_named = true;
    *out = x;
    return 0;
}

void ht_ns_xattr_free(struct ht_ns *ns, struct ht_ns_xattr *x)
{
    log_unreserve(ns, ht_ns_xattr_log_bytes(x));
    ns->meta_bytes -= xattr_bytes(x->name_len, x->value_len);
    ns->xattr_count--;
    free(x);
}

struct ht_ns_xattr *ht_ns_xattr_find(const struct ht_ns_inode *i, const char *name, size_t len)
{
    struct ht_ns_xattr *x = i->xattrs;

    while (x && (x->state == HT_NS_GONE || x->name_len != len || memcmp(x->data, name, len) != 0))
        x = x->next;
    return x;
}

void ht_ns_xattr_remove(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_ns_xattr *x)
{
    if (!x)
        return;
    ht_chain_remove(&i->xattrs, x, next);
    ht_ns_xattr_free(ns, x);
}

/* ----------------------------------------------------------------- whole */

int ht_ns_tables_init(struct ht_ns *ns)
{
    void **from;

    ht_pool_init(&ns->inode_pool, sizeof(struct ht_ns_inode));
    for (size_t i = 1; i < HT_NS_ENTRY_SIZES; i++)
        ht_pool_init(&ns->entry_pool[i], i * 8);
    if (!ht_buckets_grow(&ns->inodes.buckets, &from) || !ht_buckets_grow(&ns->entries, &from)) {
        ht_id_table_free(&ns->inodes);
        return -ENOMEM;
    }
    ns->meta_bytes = sizeof(*ns) + ht_id_table_bytes(&ns->inodes) + ht_buckets_bytes(&ns->entries);
    return 0;
}

static int free_inode(void *ctx, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES)
{
    ht_ns_inode_free(ctx, i);
    return 0;
}

/* Reserves are not given back: the store they were taken from ends, too. */
void ht_ns_tables_free(struct ht_ns *ns)
{
    ns->replaying = true;
    for (size_t b = 0; b < ns->entries.count; b++)
        for (struct ht_ns_entry *e = *ht_bucket_at(&ns->entries, b), *next; e; e = next) {
            next = e->hash_next;
            ht_ns_entry_free(ns, e);
        }
    (void)!ht_ns_inode_each(ns, free_inode, ns);
    ht_pool_destroy(&ns->inode_pool);
    for (size_t i = 1; i < HT_NS_ENTRY_SIZES; i++)
        ht_pool_destroy(&ns->entry_pool[i]);
    ht_id_table_free(&ns->inodes);
    ht_buckets_free(&ns->entries);
}

const struct ht_ns_entry *ht_ns_name_of(const struct ht_ns_inode *i)
{
    const struct ht_ns_entry *e = ht_ns_is_dir(i) ? i->u.dir->self : i->names;

    /* bounded: HT_LINKS_MAX names */
    while (e && !ht_ns_current(e) && i->links > 0)
        e = e->name_next;
    return e;
}
