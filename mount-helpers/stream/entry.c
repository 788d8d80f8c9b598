/* SPDX-License-Identifier: Apache-2.0 */
/* entry.c - what an entry of a stream may be: pure functions, the same for writer and reader. */
#include "mount-helpers/stream/stream.h"

#include <hitrain/limits.h>
#include <hitrain/words.h>

/* -------------------------------------------------------------- attributes */

enum { ATTRIBUTE_HEAD_BYTES = 6 };

bool ht_stream_attribute_next(struct ht_stream_attributes *a, struct ht_stream_attribute *out)
{
    struct ht_reader r = ht_reader_of(a->data, a->len);

    if (!a->len)
        return false;
    out->name_len = ht_get_u16(&r);
    out->value_len = ht_get_u32(&r);
    out->name = (const char *)ht_get_bytes(&r, out->name_len);
    out->value = ht_get_bytes(&r, out->value_len);
    if (r.bad)
        return false;
    *a = (struct ht_stream_attributes){r.p, (size_t)(r.end - r.p)};
    return true;
}

void ht_stream_attribute_put(struct ht_buf *b, const char *name, const void *value, size_t len)
{
    size_t name_len = strlen(name);

    ht_buf_put_u16(b, (uint16_t)name_len);
    ht_buf_put_u32(b, (uint32_t)len);
    ht_buf_put(b, name, name_len);
    ht_buf_put(b, value, len);
}

static bool is_word(const char *name, size_t len, const char *word)
{
    return strlen(word) == len && memcmp(name, word, len) == 0;
}

bool ht_stream_attribute_known(const char *name, size_t len)
{
    if (is_word(name, len, HT_FOLLOW_ATTRIBUTE) || is_word(name, len, HT_STAGING_ATTRIBUTE))
        return false;
    return (len > 5 && memcmp(name, "user.", 5) == 0) || is_word(name, len, "system.posix_acl_access") ||
        is_word(name, len, "system.posix_acl_default");
}

/* -1, 0 or 1: bytes in order, a shorter name before a longer one that begins with it. */
static int compare(const char *a, size_t a_len, const char *b, size_t b_len)
{
    size_t both = a_len < b_len ? a_len : b_len;
    int order = both ? memcmp(a, b, both) : 0;

    return order ? order : a_len < b_len ? -1 : a_len > b_len;
}

static const char *attributes_refused(struct ht_stream_attributes a)
{
    struct ht_stream_attribute one, last = {0};

    if (a.len > HT_XATTR_INODE_BYTES_MAX + HT_XATTR_INODE_BYTES_MAX / 2)
        return "its attributes are too large";
    while (ht_stream_attribute_next(&a, &one)) {
        if (!one.name_len || one.name_len > HT_XATTR_NAME_BYTES_MAX || memchr(one.name, '\0', one.name_len))
            return "an attribute has no proper name";
        if (one.value_len > HT_XATTR_VALUE_BYTES_MAX)
            return "an attribute is too large";
        if (!ht_stream_attribute_known(one.name, one.name_len))
            return "an attribute is neither user.* nor an access list";
        if (last.name && compare(last.name, last.name_len, one.name, one.name_len) >= 0)
            return "its attributes are not in order";
        last = one;
    }
    return a.len ? "its attributes are cut" : NULL;
}

/* ------------------------------------------------------------------- paths */

static bool name_refused(const char *name, size_t len)
{
    return !len || len > HT_NAME_BYTES_MAX || is_word(name, len, ".") || is_word(name, len, "..") ||
        is_word(name, len, HT_CTL_DIR);
}

const char *ht_stream_path_refused(const char *path)
{
    unsigned depth = 0;

    if (strlen(path) > HT_STREAM_PATH_BYTES_MAX)
        return "its path is too long";
    for (;;) {
        size_t len = strcspn(path, "/");
        if (name_refused(path, len))
            return "its path leaves the model, or names what no program may make";
        if (path[len] == '\0')
            return NULL;
        if (++depth > HT_STREAM_DEPTH_MAX)
            return "it lies in too many directories";
        path += len + 1;
    }
}

/* Bytes that both paths have in common, as whole names. */
static size_t common(const char *a, const char *b)
{
    size_t i = 0, whole = 0;

    for (; a[i] == b[i] && a[i] != '\0'; i++)
        if (a[i] == '/')
            whole = i + 1;
    return whole;
}

/* The order of a walk that looks at the names of each directory in the order of their bytes. */
static int compare_paths(const char *a, const char *b)
{
    size_t from = common(a, b);

    return compare(a + from, strcspn(a + from, "/"), b + from, strcspn(b + from, "/"));
}

/* Is dir, without a slash at its end, the directory of the path? */
static bool is_directory_of(const char *dir, const char *path)
{
    size_t len = strlen(dir);
    const char *name = len ? path + len + 1 : path;

    return (!len || (strncmp(path, dir, len) == 0 && path[len] == '/')) && !strchr(name, '/');
}

const char *ht_stream_order_refused(const char *last, enum ht_stream_kind last_kind, const char *path)
{
    size_t from = common(last, path);

    if (is_directory_of(last, path))
        return last_kind == HT_STREAM_DIRECTORY ? NULL : "it lies in what is no directory";
    /* Its directory is one of those above the last entry. Those are directories: they stand before it. */
    if (strchr(path + from, '/'))
        return "it does not follow its directory";
    return compare_paths(last, path) < 0 ? NULL : "it is not in order, or comes twice";
}

/* -------------------------------------------------------------- parameters */

const char *ht_stream_float(const char *dtype, size_t len)
{
    static const char *const known[] = {"f32", "bf16", "f16"};

    for (size_t i = 0; i < HT_ARRAY_SIZE(known); i++)
        if (is_word(dtype, len, known[i]))
            return known[i];
    return NULL;
}

const char *ht_stream_parameter(const struct ht_stream_entry *e)
{
    static const char dtype[] = HT_XATTR_PREFIX "dtype";
    struct ht_stream_attributes rest = e->attributes;
    struct ht_stream_attribute a;

    while (e->kind == HT_STREAM_FILE && ht_stream_attribute_next(&rest, &a))
        if (is_word(a.name, a.name_len, dtype))
            return ht_stream_float((const char *)a.value, a.value_len);
    return NULL;
}

static uint64_t shape(const char *path, const char *what, uint64_t size, uint64_t kind)
{
    uint64_t sum = ht_hash64(what, strlen(what), ht_hash64(path, strlen(path), kind));

    return ht_hash64(&size, sizeof(size), sum);
}

uint64_t ht_stream_shape(const char *path, const char *dtype, uint64_t size)
{
    return shape(path, dtype, size, 1);
}

uint64_t ht_stream_state_shape(const char *path, const char *state, uint64_t size)
{
    return shape(path, state, size, 2);
}

/* ----------------------------------------------------------------- entries */

static const char *target_refused(const struct ht_stream_entry *e)
{
    bool has = e->kind == HT_STREAM_SYMLINK || e->kind == HT_STREAM_LINK;

    if (has != (e->target[0] != '\0'))
        return has ? "it is a link to nothing" : "it is no link and has a target";
    if (e->kind == HT_STREAM_SYMLINK)
        return strlen(e->target) > HT_SYMLINK_BYTES_MAX ? "its target is too long" : NULL;
    if (e->kind != HT_STREAM_LINK)
        return NULL;
    if (ht_stream_path_refused(e->target))
        return "its target leaves the model";
    return compare_paths(e->target, e->path) < 0 ? NULL : "its target does not stand before it";
}

const char *ht_stream_entry_refused(const struct ht_stream_entry *e)
{
    bool plain = e->kind == HT_STREAM_DIRECTORY || e->kind == HT_STREAM_FILE;
    const char *why = NULL;

    if (!plain && e->kind != HT_STREAM_SYMLINK && e->kind != HT_STREAM_LINK)
        return "its kind is unknown";
    if (e->path[0] == '\0' && e->kind != HT_STREAM_DIRECTORY)
        return "the root is no directory";
    if (e->path[0] != '\0')
        why = ht_stream_path_refused(e->path);
    if (!why)
        why = target_refused(e);
    if (why)
        return why;
    if (e->size > (e->kind == HT_STREAM_FILE ? HT_FILE_BYTES_MAX : 0))
        return "its size is impossible";
    if ((e->mode & ~07777) || (!plain && e->mode))
        return "its mode is impossible";
    if (!plain && e->attributes.len)
        return "it is a link and has attributes";
    if (e->kind == HT_STREAM_LINK && (e->uid || e->gid || e->mtime_ns))
        return "it is a link and has an owner or a time";
    return attributes_refused(e->attributes);
}

const char *ht_stream_state_refused(const struct ht_stream_state *s)
{
    size_t len = strspn(s->name, "abcdefghijklmnopqrstuvwxyz0123456789_");

    if (!len || s->name[len] != '\0' || len > HT_STREAM_STATE_NAME_BYTES_MAX)
        return "its state has no proper name";
    return !s->size || s->size > 4 * HT_FILE_BYTES_MAX ? "the size of its state is impossible" : NULL;
}

const char *ht_stream_same_refused(const struct ht_stream_same *s)
{
    if (!s->count || s->index > UINT64_MAX - s->count)
        return "its number of blocks is impossible";
    return s->path[0] != '\0' ? ht_stream_path_refused(s->path) : NULL;
}
