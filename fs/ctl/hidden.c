/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hidden.c - the inodes of the hidden tree, and their attributes. See hidden.h.
 *
 * An inode number is made of a kind (bits 56 to 63), an index (48 to 55) and the inode it belongs to (0 to 47; the
 * store numbers from 1 up and never gets there). Below grad, grad-topk and state there is a directory for each
 * directory below that of .hitrain. Its index is the number of levels between: so every hidden directory has one path,
 * as the kernel wants it, while a gradient or a state has one for each directory above it.
 *
 * Below shard, which model roots alone have, bit 63 is set. The next bits are the kind (3), rank and number of ranks
 * as one number (16), an index (4) and the inode it belongs to (40: inodes beyond 10^12 have no shards).
 *
 * Attributes derive from those of that inode, so that the kernel's permission check grants the rights for steering and
 * reading; ht_hidden_open checks again.
 */
#include "fs/ctl/hidden_priv.h"

#include <unistd.h>

#define BASE_BITS 48
#define SHARD_BIT (1ull << 63)
enum { SHARD_BASE_BITS = 40, SHARD_INDEX_BITS = 4, PAIR_SHIFT = 44, PAIR_BITS = 16, SHARD_KIND_SHIFT = 60 };
enum { LEVELS_MAX = 255 };
static_assert(HT_SHARDS_RANKS_MAX * (HT_SHARDS_RANKS_MAX + 1) / 2 <= 1 << PAIR_BITS, "ranks fit");
static_assert(HT_ID_MAX <= 1ull << (BASE_BITS - 1), "inodes of the log are no hidden ones, nor are new ones");

static uint64_t number_of(enum ht_hidden_kind kind, unsigned index, uint64_t base)
{
    return (uint64_t)kind << 56 | (uint64_t)index << BASE_BITS | base;
}

/* pair: of rank and number of ranks. 0: there is no such number. */
static uint64_t shard_number(enum ht_hidden_kind kind, uint64_t pair, unsigned index, uint64_t base)
{
    if (base >> SHARD_BASE_BITS != 0 || index >> SHARD_INDEX_BITS != 0)
        return 0;
    return SHARD_BIT | (uint64_t)(kind - HT_HIDDEN_SHARD_RANK) << SHARD_KIND_SHIFT | pair << PAIR_SHIFT |
        (uint64_t)index << SHARD_BASE_BITS | base;
}

static uint64_t pair_of(uint64_t ino)
{
    return ino >> PAIR_SHIFT & ((1u << PAIR_BITS) - 1);
}

static uint64_t make_pair(unsigned rank, unsigned ranks)
{
    return ranks * (ranks - 1) / 2 + rank;
}

/* Of an entry below .hitrain/shard. */
static void find_ranks(uint64_t ino, unsigned *out_rank, unsigned *out_ranks)
{
    uint64_t pair = pair_of(ino);
    unsigned ranks = 1;

    while (make_pair(0, ranks + 1) <= pair)
        ranks++;
    *out_ranks = ranks;
    *out_rank = (unsigned)(pair - make_pair(0, ranks));
}

/* The number of an entry in a hidden directory. 0: it has none. */
static uint64_t number_below(uint64_t parent, enum ht_hidden_kind kind, unsigned index, uint64_t base)
{
    return ht_hidden_is_shard(kind) ? shard_number(kind, pair_of(parent), index, base) : number_of(kind, index, base);
}

enum ht_hidden_kind ht_hidden_kind(uint64_t ino)
{
    uint64_t kind = ino >> 56;

    if (ino & SHARD_BIT)
        return (enum ht_hidden_kind)(HT_HIDDEN_SHARD_RANK + (ino >> SHARD_KIND_SHIFT & 7));
    return kind < HT_HIDDEN_SHARD_RANK ? (enum ht_hidden_kind)kind : 0;
}

unsigned ht_hidden_index(uint64_t ino)
{
    return ino & SHARD_BIT ? ino >> SHARD_BASE_BITS & ((1u << SHARD_INDEX_BITS) - 1) : ino >> BASE_BITS & 0xff;
}

uint64_t ht_hidden_base(uint64_t ino)
{
    return ino & ((1ull << (ino & SHARD_BIT ? SHARD_BASE_BITS : BASE_BITS)) - 1);
}

bool ht_hidden_subject(uint64_t ino, struct ht_subject *out)
{
    *out = (struct ht_subject){.file = ino};
    if (!ht_hidden_match(ino))
        return true;
    *out = (struct ht_subject){ht_hidden_base(ino), true, ht_hidden_index(ino)};
    return ht_hidden_kind(ino) == HT_HIDDEN_STATE;
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

/* -------------------------------------------------------------------- rows */

/* The directories of its kind that it is in. */
enum place {
    EVERYWHERE,
    IN_MODEL,  /* at and below model roots */
    IN_ROOT,   /* of model roots */
    IN_LIVING, /* of model roots, but not of kept steps */
    IN_MOUNT,  /* of the mount's root */
};

/* What the inodes of a kind are. */
struct row {
    const char *name; /* in directories of the kind dir; NULL: names come from the model */
    enum ht_hidden_kind dir;
    enum place place;
    mode_t mode;                 /* the type of file, and permissions; if these are 0: */
    mode_t mask;                 /* so many permissions of the ruling inode, */
    mode_t (*bits)(mode_t base); /* and those that follow from its permissions */
    uint64_t (*size)(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d); /* files; NULL: 0 */
    /* Directories. */
    int (*lookup)(struct ht_ctl *c, uint64_t dir, const char *name, struct stat *out_st);
    int (*list)(struct ht_hidden_dir *d, uint64_t dir);
    enum ht_hidden_kind entry; /* of a parameter or state in it */
};
static const struct row rows[HT_HIDDEN_KINDS]; /* below */

static const struct row *row_of(uint64_t ino)
{
    return &rows[ht_hidden_kind(ino)];
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

static mode_t mode_of(const struct row *row, mode_t base)
{
    return row->mode | (base & row->mask) | (row->bits ? row->bits(base) : 0);
}

bool ht_hidden_is_private(uint64_t ino)
{
    return row_of(ino)->mode & 0777;
}

static uint64_t grad_size(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d)
{
    const struct ht_dtype_word *p = ht_dtype_row(d->dtype), *g = ht_dtype_row(d->grad_dtype);

    return p && g ? ht_obj_size(d->obj) / p->bytes * g->bytes : 0;
}

/* The steps that a directory of kind has; last 0: none. */
static void find_steps(struct ht_ctl *c, enum ht_hidden_kind kind, uint64_t root, uint64_t *out_first,
                       uint64_t *out_last)
{
    struct ht_delta_steps d = {.last = 0};
    struct ht_redo_steps s = {.last = 0};
    bool of_redo = kind == HT_HIDDEN_REDO || kind == HT_HIDDEN_REDO_DIR;
    int rc = of_redo ? ht_optim_redo_steps(c->optim, root, &s) : ht_optim_delta_steps(c->optim, root, &d);

    *out_first = of_redo ? s.first : d.first;
    *out_last = rc ? 0 : of_redo ? s.last : d.last;
}

uint64_t ht_hidden_step(struct ht_ctl *c, uint64_t ino)
{
    uint64_t first, last;

    find_steps(c, ht_hidden_kind(ino), ht_hidden_base(ino), &first, &last);
    uint64_t back = (last - ht_hidden_index(ino)) & 0xff;
    return last && back <= last - first ? last - back : 0;
}

/* Of a delta or a logged step. d: none. */
static uint64_t step_size(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d)
{
    uint64_t step = ht_hidden_step(c, ino), root = ht_hidden_base(ino), bytes = 0;
    struct ht_optim_redo *r;
    struct ht_delta_file *f;

    if (!step)
        return 0;
    if (ht_hidden_kind(ino) == HT_HIDDEN_DELTA && ht_delta_open(c, root, step, NULL, &f) == 0) {
        bytes = ht_delta_bytes(f);
        ht_delta_close(f);
    } else if (ht_hidden_kind(ino) == HT_HIDDEN_REDO && ht_optim_redo_open(c->optim, root, step, &r) == 0) {
        bytes = ht_optim_redo_bytes(r);
        ht_optim_redo_close(r);
    }
    return bytes;
}

static uint64_t ortho_size(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d)
{
    const struct ht_dtype_word *p = ht_dtype_row(d->dtype), *bf16 = ht_dtype_row(HT_DTYPE_BF16);

    return p ? ht_obj_size(d->obj) / p->bytes * bf16->bytes : 0;
}

static uint64_t state_size(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d)
{
    const char *name;
    int64_t size = 0;

    if (ht_optim_state_name(c->optim, d, ht_hidden_index(ino), &name) == 0)
        size = ht_optim_state_size(c->optim, d, name);
    return size > 0 ? (uint64_t)size : 0;
}

static uint64_t shard_size(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d)
{
    bool is_state = ht_hidden_kind(ino) == HT_HIDDEN_SHARD_STATE;
    uint64_t whole = is_state ? state_size(c, ino, d) : 0, size;
    struct ht_shard_map *m;

    if ((is_state && !whole) || ht_hidden_shard_map(c, ino, d, &m))
        return 0;
    size = m ? m->bytes : whole;
    ht_shard_map_free(c, m);
    return size;
}

/* 0 for an inode that is no parameter (opening it reports the reason), and for absent state. */
static uint64_t size_of(struct ht_ctl *c, uint64_t ino)
{
    const struct row *row = row_of(ino);
    struct ht_param_desc d;
    uint64_t size;

    if (!row->size)
        return 0;
    if (row->size == step_size)
        return row->size(c, ino, NULL);
    if (ht_ctl_describe(c, ht_hidden_base(ino), &d))
        return 0;
    size = row->size(c, ino, &d);
    ht_ns_close(c->ns, ht_hidden_base(ino));
    return size;
}

int ht_hidden_shard_map(struct ht_ctl *c, uint64_t ino, const struct ht_param_desc *d, struct ht_shard_map **out)
{
    const struct ht_dtype_word *p = ht_dtype_row(d->dtype), *g = ht_dtype_row(d->grad_dtype);
    uint64_t bytes = p ? p->bytes : 1, elements = ht_obj_size(d->obj) / bytes, of_each = bytes;
    enum ht_hidden_kind kind = ht_hidden_kind(ino);
    struct ht_shards table;
    unsigned rank, ranks;
    const char *name;

    find_ranks(ino, &rank, &ranks);
    *out = NULL;
    int rc = ht_shard_table(c, d->root, ranks, &table);
    if (rc == 0 && kind == HT_HIDDEN_SHARD_STATE) {
        rc = ht_optim_state_name(c->optim, d, ht_hidden_index(ino), &name);
        if (rc == 0 && strcmp(name, "step") == 0)
            return 0;
        of_each = sizeof(float);
    } else if (kind == HT_HIDDEN_SHARD_GRAD) {
        of_each = g ? g->bytes : bytes;
    }
    return rc ? rc : ht_shard_map(c, &table, rank, elements * of_each, HT_SHARD_BLOCK_BYTES / bytes * of_each, out);
}

/* The inode whose permissions rule: for ctl the model root, else the base. */
uint64_t ht_hidden_permission_inode(struct ht_ctl *c, uint64_t ino)
{
    uint64_t base = ht_hidden_base(ino), root = ht_hidden_kind(ino) == HT_HIDDEN_CTL ? ht_ctl_root_of(c, base) : 0;

    return root ? root : base;
}

int ht_hidden_getattr(struct ht_ctl *c, uint64_t ino, struct stat *out_st)
{
    struct stat st;
    int rc = ht_ns_getattr(c->ns, ht_hidden_permission_inode(c, ino), &st);

    if (rc)
        return rc;
    st.st_ino = ino;
    st.st_mode = mode_of(row_of(ino), st.st_mode);
    st.st_nlink = 1; /* of a directory: how many are below is not counted */
    st.st_size = (off_t)size_of(c, ino);
    st.st_blocks = 0;
    st.st_blksize = HT_BLOCK_BYTES;
    *out_st = st;
    return 0;
}

static unsigned hidden_perm(unsigned perm, void *ctx)
{
    return mode_of(row_of(*(const uint64_t *)ctx), perm << 6 | perm << 3 | perm) & 7;
}

/*
 * Derived from the list of the ruling inode as the mode is: mask and entries change alike, so the effective permissions
 * do, too.
 */
ssize_t ht_hidden_getxattr(struct ht_ctl *c, uint64_t ino, const char *name, void *buf, size_t cap)
{
    ssize_t n = ht_ns_xattr_check_name(name);

    if (n || strcmp(name, HT_NS_ACL_ACCESS) != 0 || ht_hidden_is_private(ino))
        return n ? n : -ENODATA;
    n = ht_ns_getxattr(c->ns, ht_hidden_permission_inode(c, ino), name, buf, cap);
    if (n > 0 && cap)
        ht_ns_acl_map(buf, (size_t)n, hidden_perm, &ino);
    return n;
}

/* ------------------------------------------------------------------ lookup */

static int found(struct ht_ctl *c, uint64_t number, struct stat *out_st)
{
    return number ? ht_hidden_getattr(c, number, out_st) : -EOVERFLOW;
}

static int lookup_dir(struct ht_ctl *c, uint64_t dir, struct stat *out_st)
{
    struct stat st;
    int rc = ht_ns_getattr(c->ns, dir, &st);

    if (rc)
        return rc;
    if (!S_ISDIR(st.st_mode) || (dir != HT_NS_ROOT_INO && !ht_ctl_root_of(c, dir)))
        return -ENOENT;
    return found(c, number_of(HT_HIDDEN_DIR, 0, dir), out_st);
}

/* Has this directory an entry of this row? */
static bool is_there(struct ht_ctl *c, const struct row *row, uint64_t parent)
{
    uint64_t dir = ht_hidden_base(parent);

    if (!row->name || row->dir != ht_hidden_kind(parent))
        return false;
    if (row->place == IN_MOUNT)
        return dir == HT_NS_ROOT_INO;
    return (row->place < IN_MODEL || ht_ctl_root_of(c, dir)) && (row->place < IN_ROOT || ht_ctl_is_root(c, dir)) &&
        (row->place < IN_LIVING || !ht_ns_is_frozen(c->ns, dir));
}

static int lookup_named(struct ht_ctl *c, uint64_t dir, const char *name, struct stat *out_st)
{
    for (enum ht_hidden_kind kind = 0; kind < HT_HIDDEN_KINDS; kind++) {
        const struct row *row = &rows[kind];
        if (row->name && strcmp(row->name, name) == 0 && is_there(c, row, dir))
            return found(c, number_below(dir, kind, 0, ht_hidden_base(dir)), out_st);
    }
    return -ENOENT;
}

static int lookup_rank(struct ht_ctl *c, uint64_t dir, const char *name, struct stat *out_st)
{
    uint64_t root = ht_hidden_base(dir);
    struct ht_shards table;
    unsigned rank, ranks;

    if (!ht_shard_parse_name(name, &rank, &ranks) || ht_shard_table(c, root, ranks, &table))
        return -ENOENT;
    return found(c, shard_number(HT_HIDDEN_SHARD_RANK, make_pair(rank, ranks), 0, root), out_st);
}

/* The number of a directory in a hidden one, whose levels are counted where it has several paths. 0: too many. */
static uint64_t number_of_dir(uint64_t parent, uint64_t dir)
{
    unsigned levels = ht_hidden_index(parent);
    enum ht_hidden_kind kind = ht_hidden_kind(parent);

    if (ht_hidden_is_shard(kind))
        return number_below(parent, kind, 0, dir);
    return levels < LEVELS_MAX ? number_of(kind, levels + 1, dir) : 0;
}

/*
 * A directory leads to the entries below it. A gradient resolves for every regular file, so that an open can say why a
 * file without a float dtype has none.
 */
static int lookup_param(struct ht_ctl *c, uint64_t parent, const char *name, struct stat *out_st)
{
    enum ht_hidden_kind kind = row_of(parent)->entry;
    unsigned levels = kind == HT_HIDDEN_PARAM_DIR ? ht_hidden_index(parent) : 0;
    bool any = kind == HT_HIDDEN_GRAD || kind == HT_HIDDEN_TOPK;
    struct stat st;
    int rc = ht_ns_lookup(c->ns, ht_hidden_base(parent), name, &st);

    if (rc)
        return rc;
    if (S_ISDIR(st.st_mode) && !ht_hidden_is_shard(kind) && ht_hidden_index(parent) == LEVELS_MAX)
        rc = -ENAMETOOLONG;
    else if (S_ISDIR(st.st_mode))
        rc = found(c, number_of_dir(parent, st.st_ino), out_st);
    else if (S_ISREG(st.st_mode) && (any || ht_ctl_param(c, st.st_ino)))
        rc = found(c, number_below(parent, kind, levels, st.st_ino), out_st);
    else
        rc = -ENOENT;
    ht_ns_forget(c->ns, st.st_ino, 1);
    return rc;
}

static int lookup_kept(struct ht_ctl *c, uint64_t dir, const char *name, struct stat *out_st)
{
    return ht_ns_kept_lookup(c->ns, ht_hidden_base(dir), name, out_st);
}

static int lookup(struct ht_ctl *c, uint64_t parent, const char *name, struct stat *out_st)
{
    const struct row *row = row_of(parent);

    if (!ht_hidden_match(parent))
        return lookup_dir(c, parent, out_st);
    return row->lookup ? row->lookup(c, parent, name, out_st) : -ENOTDIR;
}

int ht_hidden_lookup(struct ht_ctl *c, uint64_t parent, const char *name, struct stat *out_st)
{
    int rc = lookup(c, parent, name, out_st);

    if (rc == 0 && c->last_errors && ht_hidden_match(parent))
        ht_last_error_done(c, ht_ctl_root_of(c, ht_hidden_base(parent)), "name");
    return rc;
}

void ht_hidden_missed(struct ht_ctl *c, uint64_t parent, const char *name, const struct ht_caller *caller)
{
    uint64_t dir = ht_hidden_base(parent), root = ht_hidden_match(parent) ? ht_ctl_root_of(c, dir) : 0;
    enum ht_hidden_kind kind = ht_hidden_kind(parent);
    char path[160];

    if (!root || ht_ctl_may_steer(c, root, caller))
        return;
    if (kind == HT_HIDDEN_DIR)
        ht_last_error_set(
            c, root, "name",
            HT_CTL_DIR "/%.64s: there are ctl, stats, grad/P, grad-topk/P and state/P/NAME, where P is the path of a "
                       "parameter; in a model root also snap/STEP and shard/<r>of<R>/",
            name);
    if (kind != HT_HIDDEN_GRAD_DIR && kind != HT_HIDDEN_TOPK_DIR)
        return;
    ht_ns_path(c->ns, dir, path, sizeof(path));
    ht_last_error_set(c, root, "name", HT_CTL_DIR "/%s/%.64s: there is no such file below /%s", row_of(parent)->name,
                      name, path);
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

static void end_list(struct ht_hidden_dir *d)
{
    ht_buf_free(&d->names);
    ht_buf_free(&d->entries);
}

static int list_named(struct ht_hidden_dir *d, uint64_t dir)
{
    int rc = 0;

    for (enum ht_hidden_kind kind = 0; rc == 0 && kind < HT_HIDDEN_KINDS; kind++) {
        const struct row *row = &rows[kind];
        if (is_there(d->ctl, row, dir))
            rc = list_one(d, row->name, number_below(dir, kind, 0, ht_hidden_base(dir)), row->mode & S_IFMT);
    }
    return rc;
}

/* Inside the walk no lookup of names is allowed: takes all entries, each with a count, and sieves afterwards. */
static int take_entry(void *ctx, const struct ht_ns_dirent *e) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    struct ht_hidden_dir *d = ctx;
    struct stat st;

    if (!S_ISREG(e->type) && !S_ISDIR(e->type))
        return 0;
    int rc = list_one(d, e->name, e->ino, e->type);
    if (rc == 0)
        rc = ht_ns_getattr_locked(d->ctl->ns, e->ino, true, &st);
    return rc;
}

/* The hidden inode that a file or directory stands for in a hidden directory; 0: none. */
static uint64_t number_in(struct ht_ctl *c, uint64_t dir, const struct listed *l)
{
    enum ht_hidden_kind kind = row_of(dir)->entry;

    if (S_ISDIR(l->type))
        return number_of_dir(dir, l->ino);
    return ht_ctl_param(c, l->ino)
        ? number_below(dir, kind, kind == HT_HIDDEN_PARAM_DIR ? ht_hidden_index(dir) : 0, l->ino)
        : 0;
}

static void sieve(struct ht_hidden_dir *d, uint64_t dir)
{
    struct listed *l = (struct listed *)(void *)d->entries.data;
    size_t count = d->entries.len / sizeof(*l), kept = 0;

    for (size_t i = 0; i < count; i++) {
        uint64_t ino = l[i].ino, number = number_in(d->ctl, dir, &l[i]);
        if (number)
            l[kept++] = (struct listed){l[i].name, number, row_of(number)->mode & S_IFMT};
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

static int list_states(struct ht_hidden_dir *d, uint64_t dir)
{
    uint64_t param = ht_hidden_base(dir);
    struct ht_param_desc desc;
    const char *name;
    int rc = ht_ctl_describe(d->ctl, param, &desc);

    if (rc)
        return -ENOENT;
    for (unsigned i = 0; i < HT_HIDDEN_STATES_MAX && rc == 0; i++) {
        if (ht_optim_state_name(d->ctl->optim, &desc, i, &name))
            break;
        rc = list_one(d, name, number_below(dir, row_of(dir)->entry, i, param), S_IFREG);
    }
    ht_ns_close(d->ctl->ns, param);
    return rc;
}

static int list_kept(struct ht_hidden_dir *d, uint64_t dir)
{
    uint64_t root = ht_hidden_base(dir);
    struct ht_ns_kept *all = NULL;
    size_t count = 0;
    int rc = ht_ns_kept_list(d->ctl->ns, root, &all, &count);

    for (size_t i = 0; i < count && rc == 0; i++)
        rc = list_one(d, all[i].name, all[i].ino, S_IFDIR);
    free(all);
    return rc;
}

static int list_steps(struct ht_hidden_dir *d, uint64_t dir)
{
    uint64_t root = ht_hidden_base(dir), first, last;
    char name[24];
    int rc = 0;

    find_steps(d->ctl, ht_hidden_kind(dir), root, &first, &last);
    for (uint64_t step = first; !rc && last && step <= last; step++) {
        snprintf(name, sizeof(name), "%llu", (unsigned long long)step);
        rc = list_one(d, name, number_of(row_of(dir)->entry, step & 0xff, root), S_IFREG);
    }
    return rc;
}

/* Without a table any number of ranks has its names, and none is listed. */
static int list_ranks(struct ht_hidden_dir *d, uint64_t dir)
{
    uint64_t root = ht_hidden_base(dir);
    struct ht_shards table;
    char name[32];
    int rc = ht_shard_table(d->ctl, root, 0, &table);

    if (rc)
        return rc == -ENODATA ? 0 : rc;
    for (unsigned r = 0, ranks = ht_shards_ranks(&table); r < ranks && rc == 0; r++) {
        uint64_t number = shard_number(HT_HIDDEN_SHARD_RANK, make_pair(r, ranks), 0, root);
        snprintf(name, sizeof(name), "%uof%u", r, ranks);
        rc = number ? list_one(d, name, number, S_IFDIR) : 0;
    }
    return rc;
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
    rc = row_of(ino)->list ? row_of(ino)->list(d, ino) : -ENOTDIR;
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

/* A name of a state or step: as a listing has it. */
static int lookup_listed(struct ht_ctl *c, uint64_t dir, const char *name, struct stat *out_st)
{
    struct ht_hidden_dir d = {.ctl = c, .names = HT_BUF_INIT, .entries = HT_BUF_INIT};
    int rc = row_of(dir)->list(&d, dir);
    uint64_t number = 0;
    const char *known;
    struct stat st;

    for (uint64_t i = 0; !rc && !number && ht_hidden_entry(&d, i, &known, &st); i++)
        number = strcmp(known, name) == 0 ? st.st_ino : 0;
    end_list(&d);
    return rc ? rc : number ? found(c, number, out_st) : -ENOENT;
}

void ht_hidden_closedir(struct ht_hidden_dir *d)
{
    ht_ctl_unlink(d->ctl, &d->link);
    end_list(d);
    free(d);
}

void ht_hidden_closedir_all(struct ht_ctl *c)
{
    while (!ht_list_empty(&c->dirs))
        ht_hidden_closedir(ht_list_entry(c->dirs.next, struct ht_hidden_dir, link));
}

/* ------------------------------------------------------------------- kinds */

#define FILE_MODE .mode = S_IFREG, .mask = 0666
#define TEXT_MODE .mode = S_IFREG, .mask = 0444
#define PRIVATE_MODE .mode = S_IFREG | 0400
#define DIR_MODE .mode = S_IFDIR, .mask = 0555
#define NAMED .lookup = lookup_named, .list = list_named
#define PARAMS(kind) DIR_MODE, .lookup = lookup_param, .list = list_params, .entry = (kind)
#define STEPS(kind) .lookup = lookup_listed, .list = list_steps, .entry = (kind)
#define STATES(kind) .mode = S_IFDIR, .bits = search_bits, .lookup = lookup_listed, .list = list_states, .entry = (kind)

static const struct row rows[HT_HIDDEN_KINDS] = {
    [0] = {FILE_MODE},
    [HT_HIDDEN_DIR] = {DIR_MODE, NAMED},
    [HT_HIDDEN_BACKGROUND] = {"background", HT_HIDDEN_DIR, IN_MOUNT, TEXT_MODE},
    [HT_HIDDEN_CTL] = {"ctl", HT_HIDDEN_DIR, EVERYWHERE, .mode = S_IFREG, .bits = steer_bits},
    [HT_HIDDEN_DELTA_DIR] = {"delta", HT_HIDDEN_DIR, IN_LIVING, DIR_MODE, STEPS(HT_HIDDEN_DELTA)},
    [HT_HIDDEN_DELTA] = {TEXT_MODE, .size = step_size},
    [HT_HIDDEN_DEVICES] = {"devices", HT_HIDDEN_DIR, IN_MOUNT, TEXT_MODE},
    [HT_HIDDEN_EVENTS] = {"events", HT_HIDDEN_DIR, IN_MOUNT, PRIVATE_MODE},
    [HT_HIDDEN_GATHER] = {"gather", HT_HIDDEN_DIR, IN_LIVING, FILE_MODE},
    [HT_HIDDEN_GRAD_DIR] = {"grad", HT_HIDDEN_DIR, IN_MODEL, PARAMS(HT_HIDDEN_GRAD)},
    [HT_HIDDEN_GRAD] = {FILE_MODE, .size = grad_size},
    [HT_HIDDEN_TOPK_DIR] = {"grad-topk", HT_HIDDEN_DIR, IN_MODEL, PARAMS(HT_HIDDEN_TOPK)},
    [HT_HIDDEN_TOPK] = {FILE_MODE},
    [HT_HIDDEN_KEPT] = {"kept", HT_HIDDEN_DIR, IN_LIVING, TEXT_MODE},
    [HT_HIDDEN_ORTHO_DIR] = {"ortho", HT_HIDDEN_DIR, IN_MODEL, PARAMS(HT_HIDDEN_ORTHO)},
    [HT_HIDDEN_ORTHO] = {.mode = S_IFREG, .mask = 0222, .size = ortho_size},
    [HT_HIDDEN_PLAN] = {"plan", HT_HIDDEN_DIR, IN_MOUNT, PRIVATE_MODE},
    [HT_HIDDEN_REDO_DIR] = {"redo", HT_HIDDEN_DIR, IN_LIVING, .mode = S_IFDIR | 0500, STEPS(HT_HIDDEN_REDO)},
    [HT_HIDDEN_REDO] = {PRIVATE_MODE, .size = step_size},
    [HT_HIDDEN_ROOTS] = {"roots", HT_HIDDEN_DIR, IN_MOUNT, TEXT_MODE},
    [HT_HIDDEN_SHARD_DIR] = {"shard", HT_HIDDEN_DIR, IN_ROOT, DIR_MODE, .lookup = lookup_rank, .list = list_ranks},
    [HT_HIDDEN_SNAP_DIR] = {"snap", HT_HIDDEN_DIR, IN_LIVING, DIR_MODE, .lookup = lookup_kept, .list = list_kept},
    [HT_HIDDEN_STATE_DIR] = {"state", HT_HIDDEN_DIR, IN_MODEL, PARAMS(HT_HIDDEN_PARAM_DIR)},
    [HT_HIDDEN_PARAM_DIR] = {STATES(HT_HIDDEN_STATE)},
    [HT_HIDDEN_STATE] = {FILE_MODE, .size = state_size},
    [HT_HIDDEN_STATS] = {"stats", HT_HIDDEN_DIR, EVERYWHERE, TEXT_MODE},
    [HT_HIDDEN_TRACE] = {"trace", HT_HIDDEN_DIR, IN_MOUNT, PRIVATE_MODE},
    [HT_HIDDEN_UPDATE_DIR] = {"update", HT_HIDDEN_DIR, IN_MODEL, PARAMS(HT_HIDDEN_UPDATE)},
    [HT_HIDDEN_UPDATE] = {TEXT_MODE, .size = ortho_size},

    [HT_HIDDEN_SHARD_RANK] = {DIR_MODE, NAMED},
    [HT_HIDDEN_SHARD_GRAD_DIR] = {"grad", HT_HIDDEN_SHARD_RANK, EVERYWHERE, PARAMS(HT_HIDDEN_SHARD_GRAD)},
    [HT_HIDDEN_SHARD_PARAM_DIR] = {"param", HT_HIDDEN_SHARD_RANK, EVERYWHERE, PARAMS(HT_HIDDEN_SHARD_PARAM)},
    [HT_HIDDEN_SHARD_STATE_DIR] = {"state", HT_HIDDEN_SHARD_RANK, EVERYWHERE, PARAMS(HT_HIDDEN_SHARD_STATES)},
    [HT_HIDDEN_SHARD_STATES] = {STATES(HT_HIDDEN_SHARD_STATE)},
    [HT_HIDDEN_SHARD_PARAM] = {FILE_MODE, .size = shard_size},
    [HT_HIDDEN_SHARD_GRAD] = {FILE_MODE, .size = shard_size},
    [HT_HIDDEN_SHARD_STATE] = {FILE_MODE, .size = shard_size},
};
