/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xattr.c - extended attributes, and the words of hitrain among them that are fields of the inode.
 *
 * dtype, grad_dtype and class are not stored as attributes: they are fields, set here by their words and inherited from
 * the directory at creation, so that reading one returns the value in force. All others are bytes under a name. An
 * access list and the mode are kept in step.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

#include <linux/limits.h>
#include <sys/xattr.h>

/* ----------------------------------------------------------------- words */

struct word_field {
    const char *name;
    size_t offset;                      /* of a byte in struct ht_ns_attr */
    const char *(*word)(uint8_t value); /* NULL: it has none */
};

static const char *dtype_word(uint8_t value)
{
    const struct ht_dtype_word *row = ht_dtype_row(value);

    return row ? row->word : NULL;
}

static const char *class_word(uint8_t value)
{
    static const char *const words[] = {[HT_CLASS_DURABLE] = "durable", [HT_CLASS_SCRATCH] = "scratch"};

    return value < HT_ARRAY_SIZE(words) ? words[value] : NULL;
}

enum { DTYPE, GRAD_DTYPE, CLASS };
static const struct word_field word_fields[] = {
    [DTYPE] = {HT_XATTR_PREFIX "dtype", offsetof(struct ht_ns_attr, dtype), dtype_word},
    [GRAD_DTYPE] = {HT_XATTR_PREFIX "grad_dtype", offsetof(struct ht_ns_attr, grad_dtype), dtype_word},
    [CLASS] = {HT_XATTR_PREFIX "class", offsetof(struct ht_ns_attr, obj_class), class_word},
};

static const struct word_field *find_word(const char *name)
{
    for (size_t n = 0; n < HT_ARRAY_SIZE(word_fields); n++)
        if (strcmp(word_fields[n].name, name) == 0)
            return &word_fields[n];
    return NULL;
}

static uint8_t word_value(const struct word_field *w, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return ((const uint8_t *)&i->cur)[w->offset];
}

/* The value with this text, or -EINVAL. */
static int parse_word(const struct word_field *w, const char *text, size_t len)
{
    for (int value = 0; value <= UINT8_MAX; value++) {
        const char *word = w->word((uint8_t)value);
        if (word && strlen(word) == len && memcmp(word, text, len) == 0)
            return value;
    }
    return -EINVAL;
}

bool ht_ns_is_note(const char *name, size_t len)
{
    return (len == sizeof(HT_NS_DIGEST) - 1 && memcmp(name, HT_NS_DIGEST, len) == 0) ||
        (len == sizeof(HT_NS_ARCHIVED) - 1 && memcmp(name, HT_NS_ARCHIVED, len) == 0);
}

/* Attributes that copies of a tree must not bring along. */
static bool is_hidden(const char *name)
{
    return strcmp(name, HT_XATTR_PREFIX "optimizer") == 0 || strcmp(name, HT_XATTR_PREFIX "making") == 0 ||
        strcmp(name, HT_XATTR_PREFIX "pin") == 0 || strcmp(name, HT_XATTR_PREFIX "cold") == 0 ||
        strcmp(name, HT_XATTR_PREFIX "endurance") == 0 || ht_ns_is_note(name, strlen(name));
}

/* ------------------------------------------------------ change of state */

/* The inode's ctime with a change of attributes; outside roots the record carries it. */
static void stamp(struct ht_ns_op *op, struct ht_ns_inode *i, int64_t time_ns) HT_REQUIRES(HT_LOCK_NAMES)
{
    ht_ns_attr_edit(op, i);
    if (time_ns == 0)
        return;
    i->cur.ctime_ns = time_ns;
    if (!ht_ns_pending(i) && ht_ns_shadow(i))
        ht_ns_shadow(i)->published.ctime_ns = time_ns;
}

/* x is current no more. */
static void end_xattr(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_ns_xattr *x) HT_REQUIRES(HT_LOCK_NAMES)
{
    if (ht_ns_pending(i) && x->state == HT_NS_CLEAN) {
        x->state = HT_NS_GONE;
        ht_ns_shadow(i)->xattrs = true;
        return;
    }
    ht_ns_xattr_remove(op->ns, i, x);
}

void ht_ns_xattr_install(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_ns_xattr *x, int64_t time_ns)
{
    struct ht_ns_xattr *old = ht_ns_xattr_find(i, x->data, x->name_len);

    stamp(op, i, time_ns);
    if (old)
        end_xattr(op, i, old);
    x->next = i->xattrs;
    i->xattrs = x;
    x->state = ht_ns_pending(i) ? HT_NS_NEW : HT_NS_CLEAN;
    if (ht_ns_pending(i))
        ht_ns_shadow(i)->xattrs = true;
    else
        ht_ns_put_xattr(op->tx, HT_REC_NS_XATTR, i->ino, x, time_ns);
}

void ht_ns_xattr_drop(struct ht_ns_op *op, struct ht_ns_inode *i, struct ht_ns_xattr *x, int64_t time_ns)
{
    stamp(op, i, time_ns);
    if (!ht_ns_pending(i))
        ht_ns_put_xattr(op->tx, HT_REC_NS_XATTR_DEL, i->ino, x, time_ns);
    end_xattr(op, i, x);
}

/* ------------------------------------------------------------------- set */

struct xattr_request {
    uint64_t ino;
    const char *name;
    const void *value;
    size_t len;
    int flags;
};

static int check_flags(int flags, bool there)
{
    if ((flags & XATTR_CREATE) != 0 && there)
        return -EEXIST;
    return (flags & XATTR_REPLACE) != 0 && !there ? -ENODATA : 0;
}

/*
 * An object's class never changes. So a file that has no byte yet, and is not open, gets a new object at its next open.
 * If the old one is published on a root its end would be pending, and the number taken until the commit. Programs that
 * copy files set attributes when the content is there: that stays durable, which is more than scratch asks for. Other
 * changes are refused in the way that they take for an attribute that cannot be copied.
 */
static int change_class(struct ht_ns_op *op, const struct ht_ns_inode *i, uint8_t value)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj *obj = ht_obj_get(op->ns->store, i->ino);
    struct ht_obj_stat os;
    int rc = 0;

    if (!obj)
        return 0;
    ht_obj_stat(obj, &os);
    bool published = ht_ns_pending(i) && !os.unpublished && os.obj_class != HT_CLASS_SCRATCH;
    bool stays = os.obj_class == value || (os.size > 0 && value == HT_CLASS_SCRATCH);
    if (!stays && (os.size > 0 || i->opens > 0 || published))
        rc = -EOPNOTSUPP;
    else if (!stays)
        ht_obj_delete(obj, op->tx);
    ht_obj_put(obj);
    return rc;
}

/* A tensor's chunks are large; a file that has content already keeps those it has. */
static void adapt_chunks(struct ht_ns_op *op, struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_obj *obj = ht_obj_get(op->ns->store, i->ino);

    if (!obj)
        return;
    ht_ns_content_changed(op->ns, i);
    int rc = ht_obj_set_chunk_bytes(obj, ht_ns_chunk_bytes(op->ns, i));
    if (rc == 0 && !ht_ns_pending(i))
        ht_obj_publish(obj, op->tx);
    ht_obj_put(obj);
}

static int set_field(struct ht_ns_op *op, struct ht_ns_inode *i, const struct word_field *w, uint8_t value)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    int rc = 0;

    if (S_ISREG(i->cur.mode) && w == &word_fields[CLASS] && i->cur.obj_class != value)
        rc = change_class(op, i, value);
    if (rc != 0)
        return rc;
    ht_ns_attr_edit(op, i);
    ((uint8_t *)&i->cur)[w->offset] = value;
    i->cur.ctime_ns = op->now_ns;
    if (S_ISREG(i->cur.mode) && w == &word_fields[DTYPE])
        adapt_chunks(op, i);
    ht_ns_attr_put(op, i);
    return 0;
}

static int set_word(struct ht_ns_op *op, struct ht_ns_inode *i, const struct word_field *w,
                    const struct xattr_request *q) HT_REQUIRES(HT_LOCK_NAMES)
{
    int value = parse_word(w, q->value, q->len), rc = check_flags(q->flags, word_value(w, i) != 0);

    if (rc == 0 && value < 0)
        rc = value;
    return rc != 0 ? rc : set_field(op, i, w, (uint8_t)value);
}

/* The attributes of an inode stay within bounds, and its list within the kernel's limit. but: will be replaced. */
static bool has_room(const struct ht_ns_inode *i, const struct ht_ns_xattr *but, size_t name_len, size_t value_len)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    uint64_t bytes = name_len + value_len, listed = name_len + 1;

    for (size_t n = 0; n < HT_ARRAY_SIZE(word_fields); n++)
        listed += strlen(word_fields[n].name) + 1;
    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next) {
        if (x == but || x->state == HT_NS_GONE)
            continue;
        bytes += (uint64_t)x->name_len + x->value_len;
        listed += (uint64_t)x->name_len + 1;
    }
    return bytes <= HT_XATTR_INODE_BYTES_MAX && listed <= XATTR_LIST_MAX;
}

static int set_bytes(struct ht_ns_op *op, struct ht_ns_inode *i, const struct xattr_request *q)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    size_t name_len = strlen(q->name);
    struct ht_ns_xattr *old = ht_ns_xattr_find(i, q->name, name_len), *x;
    int rc = check_flags(q->flags, old != NULL);

    if (rc == 0 && !has_room(i, old, name_len, q->len))
        rc = -ENOSPC;
    if (rc == 0)
        rc = ht_ns_xattr_new(op->ns, q->name, name_len, q->value, q->len, &x);
    if (rc == 0)
        ht_ns_xattr_install(op, i, x, op->now_ns);
    return rc;
}

/* The mode follows the access list; a list that says no more than the mode is not kept. */
static int set_acl(struct ht_ns_op *op, struct ht_ns_inode *i, const struct xattr_request *q) HT_REQUIRES(HT_LOCK_NAMES)
{
    bool access = strcmp(q->name, HT_NS_ACL_ACCESS) == 0;
    struct ht_ns_xattr *old;
    int rc = 0;

    if (!ht_ns_acl_valid(q->value, q->len))
        return -EINVAL;
    if (!access && !ht_ns_is_dir(i))
        return -EACCES;
    if (!access || !ht_ns_acl_is_plain(q->value, q->len)) {
        rc = set_bytes(op, i, q);
    } else if ((old = ht_ns_xattr_find(i, q->name, strlen(q->name)))) {
        ht_ns_xattr_drop(op, i, old, op->now_ns);
    }
    if (rc != 0 || !access)
        return rc;
    ht_ns_attr_edit(op, i);
    i->cur.mode = (uint16_t)ht_ns_acl_mode(q->value, q->len, i->cur.mode);
    if ((q->flags & HT_XATTR_KILL_SGID) != 0)
        i->cur.mode &= (uint16_t)~S_ISGID;
    i->cur.ctime_ns = op->now_ns;
    ht_ns_attr_put(op, i);
    return 0;
}

static bool is_acl(const char *name)
{
    return strcmp(name, HT_NS_ACL_ACCESS) == 0 || strcmp(name, HT_NS_ACL_DEFAULT) == 0;
}

/* Namespaces that do not exist are refused, and names that are nothing but one. */
int ht_ns_xattr_check_name(const char *name)
{
    static const char *const prefixes[] = {"user.", "trusted.", "security."};

    if (*name == 0 || strlen(name) > HT_XATTR_NAME_BYTES_MAX)
        return -ERANGE;
    if (ht_ns_is_note(name, strlen(name)))
        return -EOPNOTSUPP;
    for (size_t n = 0; n < HT_ARRAY_SIZE(prefixes); n++)
        if (strncmp(name, prefixes[n], strlen(prefixes[n])) == 0)
            return name[strlen(prefixes[n])] != 0 ? 0 : -EINVAL;
    return is_acl(name) ? 0 : -EOPNOTSUPP;
}

static int set_locked(struct ht_ns_op *op, const struct xattr_request *q) HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct word_field *w = find_word(q->name);
    struct ht_ns_inode *i;
    int rc = ht_ns_find_to_change(op->ns, q->ino, &i);

    if (rc != 0)
        return rc;
    if (w)
        return set_word(op, i, w, q);
    rc = is_acl(q->name) ? set_acl(op, i, q) : set_bytes(op, i, q);
    if (rc == 0 && ht_ns_is_of_content(q->name))
        ht_ns_content_changed(op->ns, i);
    return rc;
}

int ht_ns_setxattr(struct ht_ns *ns, uint64_t ino, const char *name, const void *value, size_t len, int flags)
{
    struct xattr_request q = {ino, name, value, len, flags};
    struct ht_ns_op op;
    int rc = ht_ns_xattr_check_name(name);

    if (rc != 0)
        return rc;
    if (len > HT_XATTR_VALUE_BYTES_MAX)
        return -E2BIG;
    if ((flags & ~(XATTR_CREATE | XATTR_REPLACE | HT_XATTR_KILL_SGID)) != 0)
        return -EINVAL;
    rc = ht_ns_op_begin(ns, 512 + strlen(name) + len, &op);
    if (rc != 0)
        return rc;
    return ht_ns_op_end(&op, set_locked(&op, &q));
}

/* ------------------------------------------------------------------ path */

/* The directory of an inode's first name, or NULL. */
static const struct ht_ns_inode *dir_of(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return i->links > 0 && i->ino != HT_NS_ROOT_INO ? ht_ns_name_of(i)->dir : NULL;
}

static const struct ht_ns_inode *next_below_root(const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *dir = dir_of(i);

    return dir && (dir->flags & HT_NS_MODEL_ROOT) == 0 ? dir : NULL;
}

enum { DEPTH_COMMON = 32 };

/* Under the lock. */
static int walk_path(const struct ht_ns_inode *i, const char *name,
                     int (*fn)(void *ctx, uint64_t ino, const char *value, size_t len), void *ctx)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *few[DEPTH_COMMON], **path = few, *at = i;
    size_t depth = 0, n = 0;
    int rc = 0;

    for (; at; at = next_below_root(at))
        depth++;
    if (depth > DEPTH_COMMON)
        path = malloc(depth * sizeof(const struct ht_ns_inode *));
    if (!path)
        return -ENOMEM;
    for (at = i; at; at = next_below_root(at))
        path[n++] = at;
    while (rc == 0 && n > 0) {
        const struct ht_ns_xattr *x = ht_ns_xattr_find(path[--n], name, strlen(name));
        rc = fn(ctx, path[n]->ino, x ? ht_ns_xattr_value(x) : NULL, x ? x->value_len : 0);
    }
    if (path != few)
        free(path);
    return rc;
}

int ht_ns_xattr_path(struct ht_ns *ns, uint64_t ino, const char *name,
                     int (*fn)(void *ctx, uint64_t ino, const char *value, size_t len), void *ctx)
{
    int rc = 0;
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);

    if (!i)
        rc = -ESTALE;
    else if (ht_ns_root(i)->ino != 0 && (i->flags & HT_NS_MODEL_ROOT) == 0)
        rc = walk_path(i, name, fn, ctx);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return rc;
}

bool ht_ns_is_below(struct ht_ns *ns, uint64_t ino, uint64_t dir)
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);

    while (i && i->ino != dir)
        i = dir_of(i);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return i != NULL;
}

/* ---------------------------------------------------------------- remove */

/* A file without a class of its own has that of its directory, as when it was made. */
static uint8_t removed_value(const struct ht_ns_inode *i, const struct word_field *w) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return S_ISREG(i->cur.mode) && i->names && w == &word_fields[CLASS] ? i->names->dir->cur.obj_class : 0;
}

static int remove_locked(struct ht_ns_op *op, uint64_t ino, const char *name) HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct word_field *w = find_word(name);
    struct ht_ns_inode *i;
    int rc = ht_ns_find_to_change(op->ns, ino, &i);

    if (rc != 0)
        return rc;
    if (w)
        return word_value(w, i) == 0 ? -ENODATA : set_field(op, i, w, removed_value(i, w));
    struct ht_ns_xattr *x = ht_ns_xattr_find(i, name, strlen(name));
    if (!x)
        return is_acl(name) ? 0 : -ENODATA; /* the caller wants no list, and there is none */
    ht_ns_xattr_drop(op, i, x, op->now_ns);
    if (ht_ns_is_of_content(name))
        ht_ns_content_changed(op->ns, i);
    return 0;
}

int ht_ns_removexattr(struct ht_ns *ns, uint64_t ino, const char *name)
{
    struct ht_ns_op op;
    int rc = ht_ns_xattr_check_name(name);

    if (rc != 0)
        return rc;
    rc = ht_ns_op_begin(ns, 512, &op);
    if (rc != 0)
        return rc;
    return ht_ns_op_end(&op, remove_locked(&op, ino, name));
}

/* ------------------------------------------------------------------- get */

ssize_t ht_ns_xattr_give(const void *value, size_t len, void *buf, size_t cap)
{
    if (cap == 0)
        return (ssize_t)len;
    if (len > cap)
        return -ERANGE;
    if (len > 0)
        memcpy(buf, value, len);
    return (ssize_t)len;
}

static ssize_t get_locked(const struct ht_ns_inode *i, const char *name, void *buf, size_t cap)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct word_field *w = find_word(name);
    const char *word;

    if (!i)
        return -ESTALE;
    if (w) {
        word = w->word(word_value(w, i));
        return word ? ht_ns_xattr_give(word, strlen(word), buf, cap) : -ENODATA;
    }
    const struct ht_ns_xattr *x = ht_ns_xattr_find(i, name, strlen(name));
    return x ? ht_ns_xattr_give(ht_ns_xattr_value(x), x->value_len, buf, cap) : -ENODATA;
}

ssize_t ht_ns_getxattr(struct ht_ns *ns, uint64_t ino, const char *name, void *buf, size_t cap)
{
    ssize_t n = ht_ns_xattr_check_name(name);

    if (n != 0)
        return n;
    n = get_locked(ht_ns_read_begin(ns, ino), name, buf, cap);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return n;
}

/* Appends a name with its NUL; *len also counts the part that does not fit. */
static void list_name(const char *name, char *buf, size_t cap, size_t *len)
{
    size_t n = strlen(name) + 1;

    if (*len + n <= cap)
        memcpy(buf + *len, name, n);
    *len += n;
}

static ssize_t list_locked(const struct ht_ns_inode *i, bool trusted, char *buf, size_t cap)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    size_t len = 0;

    if (!i)
        return -ESTALE;
    for (size_t n = 0; n < HT_ARRAY_SIZE(word_fields); n++)
        if (word_value(&word_fields[n], i) != 0)
            list_name(word_fields[n].name, buf, cap, &len);
    for (const struct ht_ns_xattr *x = i->xattrs; x; x = x->next)
        if (x->state != HT_NS_GONE && !is_hidden(x->data) &&
            (trusted || strncmp(x->data, "trusted.", strlen("trusted.")) != 0))
            list_name(x->data, buf, cap, &len);
    return cap == 0 || len <= cap ? (ssize_t)len : -ERANGE;
}

ssize_t ht_ns_listxattr(struct ht_ns *ns, uint64_t ino, bool trusted, char *buf, size_t cap)
{
    ssize_t n = list_locked(ht_ns_read_begin(ns, ino), trusted, buf, cap);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return n;
}
