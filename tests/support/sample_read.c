/* SPDX-License-Identifier: Apache-2.0 */
/* sample_read.c - reads everything that a store shows, through every interface, and trusts nothing. */
#include <check.h>
#include <limits.h>
#include <stdlib.h>

#include "tests/support/sample.h"
#include "tiering/base/hash.h"

enum {
    DEPTH_MAX = 40,        /* damage may make a circle */
    ENTRIES_MAX = 10000,   /* in all */
    READ_BYTES = 64 << 10, /* of one call */
    CONTENT_MAX = 4 << 20, /* of one file: sizes may be anything */
    XATTR_BYTES = 80 << 10,
};

struct walk {
    const struct harness *k;
    struct sample_items *out;
    uint64_t entries;
};

/* ------------------------------------------------------------------ items */

static void add(struct sample_items *items, uint64_t path, const char *kind, const void *data, size_t len)
{
    if (items->count == items->cap) {
        items->cap = items->cap ? items->cap * 2 : 64;
        items->item = realloc(items->item, items->cap * sizeof(*items->item));
        ck_assert_ptr_nonnull(items->item);
    }
    items->item[items->count++] = ht_hash64(data, len, ht_hash64(kind, strlen(kind), path));
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

void sample_sort(struct sample_items *items)
{
    if (items->count)
        qsort(items->item, items->count, sizeof(*items->item), compare);
}

bool sample_has(const struct sample_items *items, uint64_t item)
{
    return items->count && bsearch(&item, items->item, items->count, sizeof(item), compare);
}

void sample_free(struct sample_items *items)
{
    free(items->item);
    *items = (struct sample_items){0};
}

/* ---------------------------------------------------------------- content */

/* Holes count as zeros and are not read: a size may be 16 TiB. */
static void read_content(struct walk *w, uint64_t path, struct ht_obj *o)
{
    uint64_t size = ht_obj_size(o), hash = size, left = CONTENT_MAX;
    uint8_t *buf = malloc(READ_BYTES);
    int64_t at = 0;

    while (left && (at = ht_obj_seek(o, (uint64_t)at, false)) >= 0) {
        ssize_t n = ht_obj_read(o, (uint64_t)at, buf, READ_BYTES);
        if (n <= 0)
            break;
        hash = ht_hash64(buf, (size_t)n, hash ^ (uint64_t)at);
        at += n;
        left -= ht_min_u64(left, (uint64_t)n);
    }
    if (at == -ENXIO || (uint64_t)at >= size)
        add(w->out, path, "content", &hash, sizeof(hash));
    else
        w->out->errors++;
    free(buf);
}

static void read_state(struct walk *w, uint64_t path, const struct ht_ns_tensor *t, struct ht_obj *o)
{
    struct ht_param_desc desc = {.root = t->root, .obj = o, .dtype = t->dtype, .grad_dtype = t->dtype};
    uint8_t *buf = malloc(READ_BYTES);
    const char *name;

    for (unsigned i = 0; ht_optim_state_name(w->k->optim, &desc, i, &name) == 0; i++) {
        ssize_t n = ht_optim_state_read(w->k->optim, &desc, name, 0, buf, READ_BYTES);
        if (n >= 0)
            add(w->out, path, name, buf, (size_t)n);
        else
            w->out->errors++;
    }
    free(buf);
}

static void read_file(struct walk *w, uint64_t path, uint64_t ino)
{
    struct ht_ns_tensor t;
    struct ht_obj *o;

    if (ht_ns_open(w->k->ns, ino, &o)) {
        w->out->errors++;
        return;
    }
    read_content(w, path, o);
    if (ht_ctl_param(w->k->ctl, ino) && ht_ns_tensor(w->k->ns, ino, &t) == 0)
        read_state(w, path, &t, o);
    ht_ns_close(w->k->ns, ino);
}

/* ------------------------------------------------------------- attributes */

static void read_xattrs(struct walk *w, uint64_t path, uint64_t ino)
{
    char *names = malloc(XATTR_BYTES), *value = malloc(XATTR_BYTES);
    ssize_t len = ht_ns_listxattr(w->k->ns, ino, true, names, XATTR_BYTES);

    for (ssize_t at = 0; at < len; at += (ssize_t)strlen(names + at) + 1) {
        bool word = ht_attribute_match(names + at);
        ssize_t n = word ? ht_attribute_get(w->k->ctl, ino, names + at, value, XATTR_BYTES)
                         : ht_ns_getxattr(w->k->ns, ino, names + at, value, XATTR_BYTES);
        if (n >= 0)
            add(w->out, path, names + at, value, (size_t)n);
        else
            w->out->errors++;
    }
    free(names);
    free(value);
}

static void read_steps(struct walk *w, uint64_t path, uint64_t ino)
{
    static const char *const words[] = {"user.hitrain.step", "user.hitrain.optimizer", "user.hitrain.stats"};
    char value[4096];

    for (unsigned i = 0; i < HT_ARRAY_SIZE(words); i++) {
        ssize_t n = ht_attribute_get(w->k->ctl, ino, words[i], value, sizeof(value));
        if (n >= 0 && i < 2) /* the last is different every time */
            add(w->out, path, words[i], value, (size_t)n);
    }
}

static void read_attributes(struct walk *w, uint64_t path, const struct stat *st)
{
    uint32_t plain[] = {st->st_mode, st->st_uid, st->st_gid, (uint32_t)st->st_rdev, (uint32_t)st->st_nlink};

    add(w->out, path, "mode", plain, sizeof(plain));
    read_xattrs(w, path, st->st_ino);
}

static void read_target(struct walk *w, uint64_t path, uint64_t ino)
{
    char target[PATH_MAX];
    ssize_t n = ht_ns_readlink(w->k->ns, ino, target, sizeof(target));

    if (n >= 0)
        add(w->out, path, "target", target, (size_t)n);
    else
        w->out->errors++;
}

/* ------------------------------------------------------------------ names */

struct listing {
    char (*name)[HT_NAME_BYTES_MAX + 1];
    size_t count, cap;
};

static int list_one(void *ctx, const struct ht_ns_dirent *e)
{
    struct listing *l = ctx;

    if (l->count == l->cap) {
        l->cap = l->cap ? l->cap * 2 : 16;
        l->name = realloc(l->name, l->cap * sizeof(*l->name));
        ck_assert_ptr_nonnull(l->name);
    }
    ck_assert_uint_le(strlen(e->name), HT_NAME_BYTES_MAX);
    memcpy(l->name[l->count++], e->name, strlen(e->name) + 1);
    return l->count >= ENTRIES_MAX;
}

static void read_dir(struct walk *w, uint64_t path, uint64_t dir, unsigned depth);

static void read_entry(struct walk *w, uint64_t dir_path, uint64_t dir, const char *name, unsigned depth)
{
    uint64_t path = ht_hash64(name, strlen(name), dir_path);
    struct stat st;

    if (ht_ns_lookup(w->k->ns, dir, name, &st)) {
        w->out->errors++;
        return;
    }
    read_attributes(w, path, &st);
    if (S_ISREG(st.st_mode))
        read_file(w, path, st.st_ino);
    else if (S_ISLNK(st.st_mode))
        read_target(w, path, st.st_ino);
    else if (S_ISDIR(st.st_mode))
        read_dir(w, path, st.st_ino, depth + 1);
    ht_ns_forget(w->k->ns, st.st_ino, 1);
}

static void read_dir(struct walk *w, uint64_t path, uint64_t dir, unsigned depth)
{
    struct listing l = {0};

    if (depth >= DEPTH_MAX)
        return;
    read_steps(w, path, dir);
    if (ht_ns_readdir(w->k->ns, dir, 0, list_one, &l))
        w->out->errors++;
    for (size_t i = 0; i < l.count && w->entries++ < ENTRIES_MAX; i++)
        read_entry(w, path, dir, l.name[i], depth);
    free(l.name);
}

void sample_read(const struct harness *k, struct sample_items *out)
{
    struct walk w = {.k = k, .out = out};
    struct stat st;

    if (ht_ns_getattr(k->ns, HT_NS_ROOT_INO, &st) == 0)
        read_attributes(&w, 0, &st);
    read_dir(&w, 0, HT_NS_ROOT_INO, 0);
}
