/* SPDX-License-Identifier: Apache-2.0 */
/* receive.c - see receive.h. No memory is allocated here: a test may let each allocation of the daemon fail. */
#include <check.h>
#include <stdio.h>
#include <sys/stat.h>

#include "tests/support/receive.h"
#include "tiering/base/hash.h"
#include "tiering/base/step_digest.h"

#define UNNAMED ".hitrain-receive-00000001"
#define MODEL "model"

enum { ELEMENTS_MAX = 2000, SECONDS = 1000000000, FILES_MAX = 8 };

const char receive_name[] = "copy";
static const char config[] = "adamw lr=0.01 weight_decay=0.1";
static const struct ht_cred user = {0, 0};
static uint8_t data[4 * ELEMENTS_MAX];

/* ------------------------------------------------------------------- files */

static int find(const struct harness *k, uint64_t dir, const char *name, uint64_t *out)
{
    struct stat st;
    int rc = ht_ns_lookup(k->ns, dir, name, &st);

    if (rc)
        return rc;
    ht_ns_forget(k->ns, st.st_ino, 1);
    *out = st.st_ino;
    return 0;
}

static int set_word(const struct harness *k, uint64_t ino, const char *name, const char *value)
{
    struct ht_caller root = {{0, 0}, NULL, NULL};

    return ht_attribute_set(k->ctl, ino, name, value, strlen(value), 0, &root);
}

/* Owner, mode, time: in this order. */
static int set_meta(const struct harness *k, uint64_t ino, mode_t mode)
{
    static const unsigned what[] = {HT_SET_UID | HT_SET_GID, HT_SET_MODE, HT_SET_MTIME};
    int rc = 0;

    for (unsigned i = 0; !rc && i < HT_ARRAY_SIZE(what); i++) {
        struct stat st = {.st_mode = mode, .st_mtim = {.tv_sec = SECONDS}};
        rc = ht_ns_setattr(k->ns, ino, what[i], &st, &st);
    }
    return rc;
}

/* The model out of sight, in its private directory. */
static int find_unnamed(const struct harness *k, uint64_t *out)
{
    uint64_t outer = 0;
    int rc = find(k, HT_NS_ROOT_INO, UNNAMED, &outer);

    return rc ? rc : find(k, outer, MODEL, out);
}

/* A new file of its size, without content. */
static int make_file(const struct harness *k, const char *name, const char *dtype, uint64_t size, uint64_t *out)
{
    struct stat st;
    uint64_t dir;
    int rc = find_unnamed(k, &dir);

    if (!rc)
        rc = ht_ns_mknod(k->ns, dir, name, S_IFREG | 0600, 0, user, &st);
    if (rc)
        return rc;
    ht_ns_forget(k->ns, st.st_ino, 1);
    *out = st.st_ino;
    if (dtype)
        rc = set_word(k, *out, "user.hitrain.dtype", dtype);
    st = (struct stat){.st_size = (off_t)size};
    return rc ? rc : ht_ns_setattr(k->ns, *out, HT_SET_SIZE, &st, &st);
}

static int write_file(const struct harness *k, uint64_t ino, const void *bytes, size_t len)
{
    struct ht_obj *o;
    int rc = ht_ns_open(k->ns, ino, &o);

    if (rc)
        return rc;
    ssize_t n = ht_obj_write(o, 0, bytes, len);
    ht_ns_touch(k->ns, ino, true);
    ht_ns_close(k->ns, ino);
    return n == (ssize_t)len ? 0 : n < 0 ? (int)n : -ENOSPC;
}

static int share(const struct harness *k, uint64_t from, uint64_t to, uint64_t bytes)
{
    struct ht_obj *a, *b;
    int rc = ht_ns_open(k->ns, from, &a);

    if (rc)
        return rc;
    rc = ht_ns_open(k->ns, to, &b);
    if (!rc) {
        ssize_t n = ht_obj_clone(a, 0, b, 0, bytes);
        rc = n == (ssize_t)bytes ? 0 : n < 0 ? (int)n : -ENOSPC;
        ht_ns_close(k->ns, to);
    }
    ht_ns_close(k->ns, from);
    return rc;
}

/* ------------------------------------------------------------------- state */

/* One file of state of a parameter, read or written. Bytes, or a negative errno. */
static ssize_t pass_state(const struct harness *k, uint64_t root, const struct harness_param *p, const char *name,
                          size_t write_bytes)
{
    uint8_t dtype = harness_element_bytes(p) == 4 ? HT_DTYPE_F32 : HT_DTYPE_BF16;
    struct ht_param_desc desc = {.root = root, .dtype = dtype, .grad_dtype = dtype};
    uint64_t ino;
    ssize_t n = find(k, root, p->name, &ino);

    if (!n)
        n = ht_ns_open(k->ns, ino, &desc.obj);
    if (n)
        return n;
    n = write_bytes ? ht_optim_state_write(k->optim, &desc, name, 0, data, write_bytes)
                    : ht_optim_state_read(k->optim, &desc, name, 0, data, sizeof(data));
    ht_ns_close(k->ns, ino);
    return n;
}

/* A value that both types have, so that a master rounds to its parameter. */
static uint32_t value(uint64_t seed, uint64_t element)
{
    return (0x3c00 | (uint32_t)(1 + (seed + element) % 250)) << 16;
}

static int put_state(const struct receive *r, uint64_t dir, const struct harness_param *p, const char *name, bool same)
{
    bool is_step = strcmp(name, "step") == 0;
    ssize_t bytes = is_step ? 4 : (ssize_t)p->elements * 4, n;

    for (ssize_t at = 0; at < bytes; at += 4)
        ht_le32_store(data + at, is_step ? 0x40000000 : value(r->seed, (uint64_t)at / 4));
    if (same)
        bytes = pass_state(r->k, r->base, p, name, 0);
    n = bytes > 0 ? pass_state(r->k, dir, p, name, (size_t)bytes) : bytes;
    return n == bytes && n > 0 ? 0 : n < 0 ? (int)n : -EIO;
}

static int put_states(const struct receive *r, const struct harness_param *p, bool same)
{
    static const char *const names[] = {"exp_avg", "exp_avg_sq", "master", "step"};
    uint64_t dir;
    int rc = find_unnamed(r->k, &dir);

    for (unsigned i = 0; !rc && i < HT_ARRAY_SIZE(names); i++)
        if (strcmp(names[i], "master") != 0 || harness_element_bytes(p) < 4)
            rc = put_state(r, dir, p, names[i], same);
    return rc;
}

static int put_content(const struct receive *r, const struct harness_param *p, uint64_t ino)
{
    uint64_t size = harness_element_bytes(p);

    for (uint64_t e = 0; e < p->elements; e++) {
        uint8_t bytes[4];
        ht_le32_store(bytes, value(r->seed, e));
        memcpy(data + size * e, bytes + 4 - size, size);
    }
    return write_file(r->k, ino, data, size * p->elements);
}

/* The last parameter is as in the base, if there is one. */
static int put_parameter(const struct receive *r, unsigned n)
{
    const struct harness_param *p = &r->params[n];
    uint64_t bytes = p->elements * harness_element_bytes(p), ino = 0, from;
    bool same = r->base && n == RECEIVE_PARAMS - 1;
    int rc = make_file(r->k, p->name, p->dtype, bytes, &ino);

    if (!rc && same) {
        rc = find(r->k, r->base, p->name, &from);
        if (!rc)
            rc = share(r->k, from, ino, bytes);
    } else if (!rc) {
        rc = put_content(r, p, ino);
    }
    if (!rc)
        rc = put_states(r, p, same);
    return rc ? rc : set_meta(r->k, ino, 0644);
}

/* ------------------------------------------------------------------ phases */

static void changed(const struct receive *r)
{
    if (r->changed)
        r->changed(r->ctx);
}

static int make_directory(const struct receive *r, uint64_t parent, const char *name, uint64_t *out)
{
    struct stat st;
    int rc = ht_ns_mkdir(r->k->ns, parent, name, 0700, user, &st);

    if (rc)
        return rc;
    ht_ns_forget(r->k->ns, st.st_ino, 1);
    changed(r);
    *out = st.st_ino;
    return 0;
}

int receive_begin(const struct receive *r)
{
    uint64_t outer, model;
    int rc = make_directory(r, HT_NS_ROOT_INO, UNNAMED, &outer);

    if (!rc)
        rc = ht_ns_setxattr(r->k->ns, outer, HT_STAGING_ATTRIBUTE, UNNAMED, sizeof(UNNAMED) - 1, 0);
    if (rc)
        return rc;
    changed(r);
    rc = ht_ns_fsync(r->k->ns, outer);
    if (!rc)
        rc = make_directory(r, outer, MODEL, &model);
    if (!rc)
        rc = set_word(r->k, model, "user.hitrain.optimizer", config);
    if (!rc)
        changed(r);
    return rc;
}

int receive_files(const struct receive *r)
{
    uint64_t cursor = 0;
    int rc = make_file(r->k, "cursor", NULL, 4, &cursor);

    if (!rc)
        rc = write_file(r->k, cursor, "here", 4);
    if (!rc)
        rc = set_meta(r->k, cursor, 0644);
    for (unsigned n = 0; !rc && n < RECEIVE_PARAMS; n++) {
        rc = put_parameter(r, n);
        if (!rc && r->between)
            r->between(r->ctx);
    }
    return rc;
}

int receive_commit(const struct receive *r)
{
    uint64_t dir;
    int rc = find_unnamed(r->k, &dir);

    if (!rc)
        rc = set_word(r->k, dir, "user.hitrain.step", "7");
    if (!rc)
        rc = set_meta(r->k, dir, 0755);
    return rc ? rc : ht_optim_commit(r->k->optim, dir);
}

int receive_publish(const struct receive *r)
{
    uint64_t outer = 0;
    int rc = find(r->k, HT_NS_ROOT_INO, UNNAMED, &outer);

    if (!rc)
        rc = ht_ns_rename(r->k->ns, outer, MODEL, HT_NS_ROOT_INO, receive_name, RENAME_NOREPLACE, NULL);
    if (rc)
        return rc;
    changed(r);
    rc = ht_ns_fsync(r->k->ns, HT_NS_ROOT_INO);
    int back = rc ? ht_ns_rename(r->k->ns, HT_NS_ROOT_INO, receive_name, outer, MODEL, RENAME_NOREPLACE, NULL) : 0;
    (void)back; /* a log that has failed takes no change any more */
    return rc;
}

/* ----------------------------------------------------------------- removal */

struct list {
    char name[FILES_MAX][16];
    unsigned count;
};

static int take_name(void *ctx, const struct ht_ns_dirent *e)
{
    struct list *l = ctx;

    if (strcmp(e->name, ".") != 0 && strcmp(e->name, "..") != 0 && l->count < FILES_MAX)
        snprintf(l->name[l->count++], sizeof(l->name[0]), "%s", e->name);
    return 0;
}

static int empty(const struct harness *k, uint64_t dir)
{
    struct list l = {.count = 0};
    int rc = ht_ns_readdir(k->ns, dir, 0, take_name, &l);

    for (unsigned i = 0; !rc && i < l.count; i++)
        rc = ht_ns_unlink(k->ns, dir, l.name[i]);
    return rc;
}

int receive_clean(const struct harness *k)
{
    uint64_t outer, dir;
    int rc = find(k, HT_NS_ROOT_INO, UNNAMED, &outer);

    if (rc)
        return rc == -ENOENT ? 0 : rc;
    rc = find(k, outer, MODEL, &dir);
    if (!rc)
        rc = empty(k, dir);
    if (!rc)
        rc = ht_ns_rmdir(k->ns, outer, MODEL);
    return rc && rc != -ENOENT ? rc : ht_ns_rmdir(k->ns, HT_NS_ROOT_INO, UNNAMED);
}

/* ----------------------------------------------------------------- judging */

static uint64_t mix(uint64_t hash, uint64_t value)
{
    return ht_hash64(&value, sizeof(value), hash);
}

static int mix_name(void *ctx, const struct ht_ns_dirent *e)
{
    uint64_t *sum = ctx;

    *sum += ht_hash64(e->name, strlen(e->name), 9);
    return 0;
}

/* The names of all files, also if some are missing. The time is that of the stream only at the end. */
static uint64_t model_hash(const struct harness *k, const struct harness_param *params, uint64_t parent,
                           const char *name, uint64_t hash)
{
    uint64_t dir = parent ? harness_find(k, parent, name) : 0, names = 0;
    struct stat st;

    if (!dir || ht_ns_getattr(k->ns, dir, &st))
        return mix(hash, 4);
    ck_assert_int_eq(ht_ns_readdir(k->ns, dir, 0, mix_name, &names), 0);
    hash = mix(mix(mix(hash, st.st_mode), names), st.st_mode & S_IXOTH ? (uint64_t)st.st_mtim.tv_sec : 0);
    return mix(mix(hash, harness_model_step(k, dir)), harness_model_hash(k, dir, params, RECEIVE_PARAMS));
}

uint64_t receive_hash(const struct harness *k, const struct harness_param *params)
{
    uint64_t outer = harness_find(k, HT_NS_ROOT_INO, UNNAMED), hash = mix(0, outer != 0);
    bool is_marked = outer && ht_ns_getxattr(k->ns, outer, HT_STAGING_ATTRIBUTE, NULL, 0) == sizeof(UNNAMED) - 1;

    /* The next receive removes what is marked: all that a cut left, but for an empty directory. */
    ck_assert_msg(is_marked || !outer || !harness_find(k, outer, MODEL), "a model without a mark");
    hash = model_hash(k, params, HT_NS_ROOT_INO, receive_name, mix(hash, is_marked));
    return model_hash(k, params, outer, MODEL, hash);
}
