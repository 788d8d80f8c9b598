/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hidden.c - the inodes of the hidden tree, and their attributes. See hidden.h.
 *
 * An inode number is made of a kind (bits 56 to 63), an index (48 to 55) and the inode it belongs to (0 to 47; the
 * store numbers from 1 up and never gets there). Below grad, grad-topk and state there is a directory for each
 * directory below that of .hitrain. Its index is the number of levels between: so every hidden directory has one path,
 * as the kernel wants it, while a gradient or a state has one for each directory above it. Attributes derive from those
 * of that inode, so that the kernel's permission check grants the rights for steering and reading; ht_hidden_open
 * checks again.
 */
#include "fs/ctl/hidden_priv.h"

#include <stdlib.h>
#include <unistd.h>

#define BASE_BITS 48
enum { LEVELS_MAX = 255 };
static_assert(HT_ID_MAX <= 1ull << (BASE_BITS - 1), "inodes of the log are no hidden ones, nor are new ones");

static uint64_t number_of(enum ht_hidden_kind kind, unsigned index, uint64_t base)
{
    return (uint64_t)kind << 56 | (uint64_t)index << BASE_BITS | base;
}

enum ht_hidden_kind ht_hidden_kind(uint64_t ino)
{
    return (enum ht_hidden_kind)(ino >> 56);
}

unsigned ht_hidden_index(uint64_t ino)
{
    return ino >> BASE_BITS & 0xff;
}

uint64_t ht_hidden_base(uint64_t ino)
{
    return ino & ((1ull << BASE_BITS) - 1);
}

bool ht_hidden_match(uint64_t ino)
{
    return ino >> BASE_BITS != 0;
}

bool ht_hidden_name(uint64_t parent, const char *name)
{
    return ht_hidden_match(parent) || strcmp(name, HT_CTL_DIR) == 0;
}

bool ht_hidden_is_gradient(uint64_t ino)
{
    return ht_hidden_kind(ino) == HT_HIDDEN_GRAD;
}

uint64_t ht_hidden_gradient(uint64_t param)
{
    return number_of(HT_HIDDEN_GRAD, 0, param);
}

/* -------------------------------------------------------------- attributes */

static mode_t search_bits(mode_t mode)
{
    return (mode & 0444) | (mode & 0444) >> 2;
}

/* A user who may write may read the answers. */
static mode_t steer_bits(mode_t mode)
{
    return (mode & 0222) | (mode & 0222) << 1;
}

static mode_t mode_of(enum ht_hidden_kind kind, mode_t base)
{
    switch (kind) {
    case HT_HIDDEN_DIR:
    case HT_HIDDEN_GRAD_DIR:
    case HT_HIDDEN_TOPK_DIR:
    case HT_HIDDEN_STATE_DIR:
    case HT_HIDDEN_SNAP_DIR:
        return S_IFDIR | (base & 0555);
    case HT_HIDDEN_PARAM_DIR:
        return S_IFDIR | search_bits(base);
    case HT_HIDDEN_CTL:
        return S_IFREG | steer_bits(base);
    case HT_HIDDEN_STATS:
        return S_IFREG | (base & 0444);
    case HT_HIDDEN_EVENTS:
    case HT_HIDDEN_TRACE:
    case HT_HIDDEN_PLAN:
        return S_IFREG | 0400;
    default:
        return S_IFREG | (base & 0666);
    }
}

static uint64_t grad_size(const struct ht_param_desc *d)
{
    const struct ht_dtype_word *p = ht_dtype_row(d->dtype), *g = ht_dtype_row(d->grad_dtype);

    return p && g ? ht_obj_size(d->obj) / p->bytes * g->bytes : 0;
}

/* 0 for an inode that is no parameter (opening it reports the reason), and for absent state. */
static uint64_t size_of(struct ht_ctl *c, uint64_t ino)
{
    struct ht_param_desc d;
    const char *name;
    int64_t size = 0;

    if (ht_hidden_kind(ino) != HT_HIDDEN_GRAD && ht_hidden_kind(ino) != HT_HIDDEN_STATE)
        return 0;
    if (ht_ctl_describe(c, ht_hidden_base(ino), &d))
        return 0;
    if (ht_hidden_kind(ino) == HT_HIDDEN_GRAD)
        size = (int64_t)grad_size(&d);
    else if (ht_optim_state_name(c->optim, &d, ht_hidden_index(ino), &name) == 0)
        size = ht_optim_state_size(c->optim, &d, name);
    ht_ns_close(c->ns, ht_hidden_base(ino));
    return size > 0 ? (uint64_t)size : 0;
}

/* The inode whose permissions rule: for ctl the model root, else the base. */
uint64_t ht_hidden_permission_inode(struct ht_ctl *c, uint64_t ino)
{
    struct ht_ns_tensor t;
    uint64_t base = ht_hidden_base(ino);

    if (ht_hidden_kind(ino) != HT_HIDDEN_CTL || ht_ns_tensor(c->ns, base, &t) || !t.root)
        return base;
    return t.root;
}

int ht_hidden_getattr(struct ht_ctl *c, uint64_t ino, struct stat *out_st)
{
    struct stat st;
    int rc = ht_ns_getattr(c->ns, ht_hidden_permission_inode(c, ino), &st);

    if (rc)
        return rc;
    st.st_ino = ino;
    st.st_mode = mode_of(ht_hidden_kind(ino), st.st_mode);
    st.st_nlink = 1; /* of a directory: how many are below is not counted */
    st.st_size = (off_t)size_of(c, ino);
    st.st_blocks = 0;
    st.st_blksize = HT_BLOCK_BYTES;
    *out_st = st;
    return 0;
}

static unsigned hidden_perm(unsigned perm, void *ctx)
{
    return mode_of(*(const enum ht_hidden_kind *)ctx, perm << 6 | perm << 3 | perm) & 7;
}

/*
 * Derived from the list of the ruling inode as the mode is: mask and entries change alike, so the effective permissions
 * do, too.
 */
ssize_t ht_hidden_getxattr(struct ht_ctl *c, uint64_t ino, const char *name, void *buf, size_t cap)
{
    enum ht_hidden_kind kind = ht_hidden_kind(ino);
    ssize_t n;

    if (strcmp(name, HT_NS_ACL_ACCESS) != 0 || kind == HT_HIDDEN_EVENTS || kind == HT_HIDDEN_TRACE ||
        kind == HT_HIDDEN_PLAN)
        return -ENODATA;
    n = ht_ns_getxattr(c->ns, ht_hidden_permission_inode(c, ino), name, buf, cap);
    if (n > 0 && cap)
        ht_ns_acl_map(buf, (size_t)n, hidden_perm, &kind);
    return n;
}

int ht_hidden_setattr(struct ht_ctl *c, uint64_t ino, unsigned what, struct stat *out_st)
{
    if (what & (HT_SET_MODE | HT_SET_UID | HT_SET_GID))
        return -EPERM;
    return ht_hidden_getattr(c, ino, out_st);
}

/* ------------------------------------------------------------------ lookup */

static int found(struct ht_ctl *c, enum ht_hidden_kind kind, unsigned index, uint64_t base, struct stat *out_st)
{
    return ht_hidden_getattr(c, number_of(kind, index, base), out_st);
}

static int lookup_dir(struct ht_ctl *c, uint64_t dir, struct stat *out_st)
{
    struct ht_ns_tensor t;
    struct stat st;
    int rc = ht_ns_getattr(c->ns, dir, &st);

    if (rc == 0)
        rc = ht_ns_tensor(c->ns, dir, &t);
    if (rc)
        return rc;
    if (!S_ISDIR(st.st_mode) || (!t.root && dir != HT_NS_ROOT_INO))
        return -ENOENT;
    return found(c, HT_HIDDEN_DIR, 0, dir, out_st);
}

struct fixed {
    const char *name;
    enum ht_hidden_kind kind;
    bool model_only; /* in the mount's root only when that is a model root */
    bool mount_only; /* only in the mount's root */
    bool root_only;  /* only in the directory of a model root that is no kept step */
};

static const struct fixed fixed[] = {
    {"ctl", HT_HIDDEN_CTL, false, false},        {"events", HT_HIDDEN_EVENTS, false, true},
    {"grad", HT_HIDDEN_GRAD_DIR, true, false},   {"grad-topk", HT_HIDDEN_TOPK_DIR, true, false},
    {"plan", HT_HIDDEN_PLAN, false, true},       {"snap", HT_HIDDEN_SNAP_DIR, true, false, true},
    {"state", HT_HIDDEN_STATE_DIR, true, false}, {"stats", HT_HIDDEN_STATS, false, false},
    {"trace", HT_HIDDEN_TRACE, false, true},
};

static bool below_root(struct ht_ctl *c, uint64_t dir)
{
    struct ht_ns_tensor t;

    return ht_ns_tensor(c->ns, dir, &t) == 0 && t.root;
}

static bool is_there(struct ht_ctl *c, const struct fixed *f, uint64_t dir, bool in_model)
{
    bool may_keep = !f->root_only || (ht_ctl_is_root(c, dir) && !ht_ns_is_frozen(c->ns, dir));

    return may_keep && (in_model || !f->model_only) && (dir == HT_NS_ROOT_INO || !f->mount_only);
}

static int lookup_fixed(struct ht_ctl *c, uint64_t dir, const char *name, struct stat *out_st)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(fixed); i++)
        if (strcmp(fixed[i].name, name) == 0 && is_there(c, &fixed[i], dir, below_root(c, dir)))
            return found(c, fixed[i].kind, 0, dir, out_st);
    return -ENOENT;
}

/* The kind of entries in grad, grad-topk or state. */
static enum ht_hidden_kind kind_in(enum ht_hidden_kind dir)
{
    return dir == HT_HIDDEN_GRAD_DIR ? HT_HIDDEN_GRAD
        : dir == HT_HIDDEN_TOPK_DIR  ? HT_HIDDEN_TOPK
                                     : HT_HIDDEN_PARAM_DIR;
}

/*
 * A directory leads to the entries below it. A gradient resolves for every regular file, so that an open can say why a
 * file without a float dtype has none.
 */
static int lookup_param(struct ht_ctl *c, uint64_t parent, const char *name, struct stat *out_st)
{
    enum ht_hidden_kind dir = ht_hidden_kind(parent), kind = kind_in(dir);
    unsigned levels = ht_hidden_index(parent);
    struct stat st;
    int rc = ht_ns_lookup(c->ns, ht_hidden_base(parent), name, &st);

    if (rc)
        return rc;
    if (S_ISDIR(st.st_mode))
        rc = levels < LEVELS_MAX ? found(c, dir, levels + 1, st.st_ino, out_st) : -ENAMETOOLONG;
    else if (S_ISREG(st.st_mode) && kind != HT_HIDDEN_PARAM_DIR)
        rc = found(c, kind, 0, st.st_ino, out_st);
    else if (S_ISREG(st.st_mode) && ht_ctl_param(c, st.st_ino))
        rc = found(c, kind, levels, st.st_ino, out_st);
    else
        rc = -ENOENT;
    ht_ns_forget(c->ns, st.st_ino, 1);
    return rc;
}

static int lookup_state(struct ht_ctl *c, uint64_t param, const char *name, struct stat *out_st)
{
    struct ht_param_desc d;
    const char *known;
    int rc = ht_ctl_describe(c, param, &d);
    unsigned i = 0;

    if (rc)
        return -ENOENT;
    while (i < HT_HIDDEN_STATES_MAX && (rc = ht_optim_state_name(c->optim, &d, i, &known)) == 0 && strcmp(known, name))
        i++;
    ht_ns_close(c->ns, param);
    return rc || i == HT_HIDDEN_STATES_MAX ? -ENOENT : found(c, HT_HIDDEN_STATE, i, param, out_st);
}

static int lookup(struct ht_ctl *c, uint64_t parent, const char *name, struct stat *out_st)
{
    uint64_t base = ht_hidden_base(parent);

    if (!ht_hidden_match(parent))
        return lookup_dir(c, parent, out_st);
    switch (ht_hidden_kind(parent)) {
    case HT_HIDDEN_DIR:
        return lookup_fixed(c, base, name, out_st);
    case HT_HIDDEN_GRAD_DIR:
    case HT_HIDDEN_TOPK_DIR:
    case HT_HIDDEN_STATE_DIR:
        return lookup_param(c, parent, name, out_st);
    case HT_HIDDEN_PARAM_DIR:
        return lookup_state(c, base, name, out_st);
    case HT_HIDDEN_SNAP_DIR:
        return ht_ns_kept_lookup(c->ns, base, name, out_st);
    default:
        return -ENOTDIR;
    }
}

int ht_hidden_lookup(struct ht_ctl *c, uint64_t parent, const char *name, struct stat *out_st)
{
    int rc = lookup(c, parent, name, out_st);
    struct ht_ns_tensor t;

    if (rc == 0 && c->last_errors && ht_hidden_match(parent) && ht_ns_tensor(c->ns, ht_hidden_base(parent), &t) == 0)
        ht_last_error_done(c, t.root, "name");
    return rc;
}

static void report_missing_parameter(struct ht_ctl *c, uint64_t root, uint64_t dir, const char *what, const char *name)
{
    char path[160];

    ht_ns_path(c->ns, dir, path, sizeof(path));
    ht_last_error_set(c, root, "name", HT_CTL_DIR "/%s/%.64s: there is no such file below /%s", what, name, path);
}

void ht_hidden_missed(struct ht_ctl *c, uint64_t parent, const char *name, const struct ht_caller *caller)
{
    uint64_t dir = ht_hidden_base(parent);
    struct ht_ns_tensor t;

    if (!ht_hidden_match(parent) || ht_ns_tensor(c->ns, dir, &t) || !t.root || ht_ctl_may_steer(c, t.root, caller))
        return;
    if (ht_hidden_kind(parent) == HT_HIDDEN_DIR)
        ht_last_error_set(
            c, t.root, "name",
            HT_CTL_DIR "/%.64s: there are ctl, stats, grad/P, grad-topk/P and state/P/NAME, where P is the path of a "
                       "parameter",
            name);
    else if (ht_hidden_kind(parent) == HT_HIDDEN_GRAD_DIR)
        report_missing_parameter(c, t.root, dir, "grad", name);
    else if (ht_hidden_kind(parent) == HT_HIDDEN_TOPK_DIR)
        report_missing_parameter(c, t.root, dir, "grad-topk", name);
}

/* ------------------------------------------------------------- directories */

/* A listing is made when the directory is opened: names back to back, NUL-terminated, and where each begins. */
struct listed {
    size_t name; /* offset in names */
    uint64_t ino;
    uint32_t type;
};

struct ht_hidden_dir {
    struct ht_list link; /* in ctl.dirs */
    struct ht_ctl *ctl;
    struct ht_buf names, entries; /* entries: struct listed */
};

static int list_one(struct ht_hidden_dir *d, const char *name, uint64_t ino, uint32_t type)
{
    struct listed l = {d->names.len, ino, type};

    ht_buf_put(&d->names, name, strlen(name) + 1);
    ht_buf_put(&d->entries, &l, sizeof(l));
    return d->names.err ? d->names.err : d->entries.err;
}

static int list_fixed(struct ht_hidden_dir *d, uint64_t dir)
{
    bool root = below_root(d->ctl, dir);
    int rc = 0;

    for (size_t i = 0; i < HT_ARRAY_SIZE(fixed) && rc == 0; i++)
        if (is_there(d->ctl, &fixed[i], dir, root))
            rc = list_one(d, fixed[i].name, number_of(fixed[i].kind, 0, dir), mode_of(fixed[i].kind, 0) & S_IFMT);
    return rc;
}

/* Inside the walk no lookup of names is allowed: takes all entries, each with a count, and sieves afterwards. */
static int take_entry(void *ctx, const struct ht_ns_dirent *e) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_hidden_dir *d = ctx;
    struct stat st;
    int rc;

    if (!S_ISREG(e->type) && !S_ISDIR(e->type))
        return 0;
    rc = list_one(d, e->name, e->ino, e->type);
    if (rc == 0)
        rc = ht_ns_getattr_locked(d->ctl->ns, e->ino, true, &st);
    return rc;
}

/* The hidden inode that a file or directory stands for in a hidden directory; 0: none. */
static uint64_t number_in(struct ht_ctl *c, uint64_t dir, const struct listed *l)
{
    enum ht_hidden_kind kind = kind_in(ht_hidden_kind(dir));
    unsigned levels = ht_hidden_index(dir);

    if (S_ISDIR(l->type))
        return levels < LEVELS_MAX ? number_of(ht_hidden_kind(dir), levels + 1, l->ino) : 0;
    return ht_ctl_param(c, l->ino) ? number_of(kind, kind == HT_HIDDEN_PARAM_DIR ? levels : 0, l->ino) : 0;
}

static void sieve(struct ht_hidden_dir *d, uint64_t dir)
{
    struct listed *l = (struct listed *)(void *)d->entries.data;
    size_t count = d->entries.len / sizeof(*l), kept = 0;

    for (size_t i = 0; i < count; i++) {
        uint64_t ino = l[i].ino, number = number_in(d->ctl, dir, &l[i]);
        if (number)
            l[kept++] = (struct listed){l[i].name, number, mode_of(ht_hidden_kind(number), 0) & S_IFMT};
        ht_ns_forget(d->ctl->ns, ino, 1);
    }
    d->entries.len = kept * sizeof(*l);
}

static int list_params(struct ht_hidden_dir *d, uint64_t dir)
{
    int rc = ht_ns_readdir(d->ctl->ns, ht_hidden_base(dir), 0, take_entry, d);

    sieve(d, dir);
    return rc;
}

static int list_states(struct ht_hidden_dir *d, uint64_t param)
{
    struct ht_param_desc desc;
    const char *name;
    int rc = ht_ctl_describe(d->ctl, param, &desc);

    if (rc)
        return -ENOENT;
    for (unsigned i = 0; i < HT_HIDDEN_STATES_MAX && rc == 0; i++) {
        if (ht_optim_state_name(d->ctl->optim, &desc, i, &name))
            break;
        rc = list_one(d, name, number_of(HT_HIDDEN_STATE, i, param), S_IFREG);
    }
    ht_ns_close(d->ctl->ns, param);
    return rc;
}

static int list_kept(struct ht_hidden_dir *d, uint64_t root)
{
    struct ht_ns_kept *all = NULL;
    size_t count = 0;
    int rc = ht_ns_kept_list(d->ctl->ns, root, &all, &count);

    for (size_t i = 0; i < count && rc == 0; i++)
        rc = list_one(d, all[i].name, all[i].ino, S_IFDIR);
    free(all);
    return rc;
}

static int list_kind(struct ht_hidden_dir *d, uint64_t ino)
{
    uint64_t base = ht_hidden_base(ino);

    switch (ht_hidden_kind(ino)) {
    case HT_HIDDEN_DIR:
        return list_fixed(d, base);
    case HT_HIDDEN_GRAD_DIR:
    case HT_HIDDEN_TOPK_DIR:
    case HT_HIDDEN_STATE_DIR:
        return list_params(d, ino);
    case HT_HIDDEN_PARAM_DIR:
        return list_states(d, base);
    case HT_HIDDEN_SNAP_DIR:
        return list_kept(d, base);
    default:
        return -ENOTDIR;
    }
}

int ht_hidden_opendir(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, struct ht_hidden_dir **out)
{
    struct ht_hidden_dir *d;
    int rc = ht_ctl_access(c, ht_hidden_base(ino), R_OK, caller);

    if (rc)
        return rc;
    d = calloc(1, sizeof(*d));
    if (!d)
        return -ENOMEM;
    d->ctl = c;
    ht_ctl_link(c, &c->dirs, &d->link);
    rc = list_kind(d, ino);
    if (rc) {
        ht_hidden_closedir(d);
        return rc;
    }
    *out = d;
    return 0;
}

bool ht_hidden_entry(const struct ht_hidden_dir *d, uint64_t i, const char **out_name, struct stat *out_st)
{
    const struct listed *l = (const struct listed *)(const void *)d->entries.data;

    if (i >= d->entries.len / sizeof(*l))
        return false;
    *out_name = (const char *)d->names.data + l[i].name;
    *out_st = (struct stat){.st_ino = l[i].ino, .st_mode = l[i].type};
    return true;
}

void ht_hidden_closedir(struct ht_hidden_dir *d)
{
    ht_ctl_unlink(d->ctl, &d->link);
    ht_buf_free(&d->names);
    ht_buf_free(&d->entries);
    free(d);
}

void ht_hidden_closedir_all(struct ht_ctl *c)
{
    while (!ht_list_empty(&c->dirs))
        ht_hidden_closedir(ht_list_entry(c->dirs.next, struct ht_hidden_dir, link));
}
