/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attributes.c - the attributes user.hitrain.*: one row per word. A new word is one row and,
 * when it needs one, a check.
 *
 * Words that describe a tensor are kept by fs/ns like any attribute, once their value has passed its check; words of
 * metrics (metrics.c) and the few special ones below are computed.
 */
#include "fs/ctl/ctl_priv.h"
#include "tiering/base/shards.h"

#include <unistd.h>

enum { TEXT_MAX = 32768, VALUES_MAX = 4 };

/* 0, or -errno with a message in err. */
typedef int check_fn(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX]);

struct word {
    const char *word;
    check_fn *check; /* of its value and of the right to set it; NULL: none */
    /* NULL: kept by fs/ns. */
    int (*set)(const struct ht_attribute *q);
    ssize_t (*get)(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap); /* whole text, at most cap bytes */
    int (*remove)(const struct ht_attribute *q);
    check_fn *may_remove;                                 /* NULL: it needs no more rights than any attribute */
    const char *values[VALUES_MAX];                       /* all that there are, before the check; none: any */
    int (*changed)(const struct ht_attribute *q, int rc); /* after a set or remove that returned rc; returns it, too */
    bool waits;
    /* In place of get: the whole text, of any length, or NULL. */
    const char *(*text)(struct ht_ctl *c, uint64_t ino);
};

/* ------------------------------------------------------------------ checks */

/* The client's text, so that a message can show it: cut, and printable. */
static const char *quoted(const struct ht_attribute *q, char out[40])
{
    size_t n = ht_min_u64(q->len, 32);

    for (size_t i = 0; i < n; i++)
        out[i] = q->value[i] >= ' ' && q->value[i] <= '~' ? q->value[i] : '?';
    memcpy(out + n, q->len > n ? "..." : "", q->len > n ? 4 : 1);
    return out;
}

/* The dtypes of a parameter decide what its bytes and those of its gradients mean. A new file has none. */
static int may_set_dtype(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    struct stat st;
    int rc = ht_ns_getattr(q->ctl->ns, q->ino, &st);

    if (rc || st.st_size == 0)
        return rc;
    return ht_ctl_may_set_words(q->ctl, ht_ctl_param(q->ctl, q->ino), q->ino, q->name + strlen(HT_XATTR_PREFIX),
                                q->caller);
}

static int check_dtype(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    char given[40];

    if (ht_parse_dtype(q->value, q->len))
        return may_set_dtype(q, err);
    int at = snprintf(err, HT_CTL_ERROR_MAX, "dtype: \"%s\" is not known; known are", quoted(q, given));
    for (size_t i = 0; i < HT_DTYPE_WORDS && at < HT_CTL_ERROR_MAX; i++)
        at += snprintf(err + at, (size_t)(HT_CTL_ERROR_MAX - at), " %s", ht_dtype_words[i].word);
    return -EINVAL;
}

static int check_grad_dtype(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    const struct ht_dtype_word *row = ht_parse_dtype(q->value, q->len);
    char given[40];

    if (row && (row->dtype == HT_DTYPE_F32 || row->dtype == HT_DTYPE_BF16 || row->dtype == HT_DTYPE_F16))
        return may_set_dtype(q, err);
    return ht_ctl_refuse(err, -EINVAL, "grad_dtype: \"%s\" is not known; gradients are f32, bf16 or f16",
                         quoted(q, given));
}

static int check_shape(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    struct ht_shape shape;

    if (ht_parse_shape(q->value, q->len, &shape) == 0)
        return ht_shape_fits(q->ctl, q->ino, q->value, q->len, err);
    return ht_ctl_refuse(err, -EINVAL,
                         "shape: numbers separated by commas, at most %u, as in 1024,768, or " HT_SHAPE_SCALAR,
                         HT_SHAPE_DIMS_MAX);
}

static int check_members(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    uint64_t elements;
    char shape[32];
    int rc = ht_parse_members(q->value, q->len, &elements);

    if (rc)
        return ht_ctl_refuse(
            err, -EINVAL,
            "members: a line for each parameter in the file, with its first element, shape and name, as in 0 16,32 w");
    rc = snprintf(shape, sizeof(shape), "%llu", (unsigned long long)elements);
    return ht_shape_fits(q->ctl, q->ino, shape, (size_t)rc, err);
}

static int check_value(const struct ht_attribute *q, const char *const values[VALUES_MAX], char err[HT_CTL_ERROR_MAX])
{
    for (unsigned i = 0; i < VALUES_MAX && values[i]; i++)
        if (strlen(values[i]) == q->len && memcmp(values[i], q->value, q->len) == 0)
            return 0;
    int at = snprintf(err, HT_CTL_ERROR_MAX, "%s: known are", q->name + strlen(HT_XATTR_PREFIX));
    for (unsigned i = 0; i < VALUES_MAX && values[i] && at < HT_CTL_ERROR_MAX; i++)
        at += snprintf(err + at, (size_t)(HT_CTL_ERROR_MAX - at), " '%s'", values[i]);
    return -EINVAL;
}

static int check_owner(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    int rc = ht_ctl_owner(q->ctl, q->ino, q->caller);

    if (rc == -EPERM)
        snprintf(err, HT_CTL_ERROR_MAX, "%s: only the owner may change it, or root", q->name + strlen(HT_XATTR_PREFIX));
    return rc;
}

/*
 * On a directory the class decides the fate of files that other users make there: scratch ones are lost at unmount,
 * synced or not. On a file it needs no more rights than truncating it.
 */
static int check_class_owner(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    struct stat st;
    int rc = ht_ns_getattr(q->ctl->ns, q->ino, &st);

    return rc ? rc : S_ISDIR(st.st_mode) ? check_owner(q, err) : 0;
}

/* Is there room to pin the whole file? */
static int check_pin(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    struct ht_obj *obj;
    int rc = check_owner(q, err);

    if (rc || !q->len)
        return rc;
    rc = ht_ns_open(q->ctl->ns, q->ino, &obj);
    if (rc == -EISDIR || rc == -EINVAL)
        snprintf(err, HT_CTL_ERROR_MAX, "pin: only files have it; on a directory set tier, which new files get");
    if (rc)
        return rc == -EISDIR ? -EINVAL : rc;
    int64_t left = ht_obj_pinnable_bytes(obj);
    ht_ns_close(q->ctl->ns, q->ino);
    if (left >= 0)
        return 0;
    return ht_ctl_refuse(err, -ENOSPC,
                         "pin: the file needs %lld bytes more than can be pinned: at most half of the DRAM tier",
                         -(long long)left);
}

static int check_next_use(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    uint64_t after_ns;
    struct stat st;
    int rc = ht_ns_getattr(q->ctl->ns, q->ino, &st);

    if (rc)
        return rc;
    if (!S_ISREG(st.st_mode))
        return ht_ctl_refuse(err, -EINVAL, "next_use: only files have it");
    if (ht_parse_next_use(q->value, q->len, &after_ns))
        return ht_ctl_refuse(err, -EINVAL,
                             "next_use: seconds from now, as in 2.5, more than 0 and at most %u; or never",
                             HT_NEXT_USE_S_MAX);
    return check_owner(q, err);
}

static int check_steers(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    return ht_ctl_may_steer(q->ctl, q->ino, q->caller);
}

/* It says who writes what: the right to steer the model is needed. */
static int check_shards(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    struct ht_shards table;

    if (!ht_ctl_is_root(q->ctl, q->ino))
        return ht_ctl_refuse(err, -EINVAL, "shards: this is no model root");
    int rc = ht_shards_parse(q->value, q->len, &table);
    if (rc)
        return ht_ctl_refuse(
            err, rc,
            "shards: the number of ranks, at most %u, and then each change of it, as in 4 3-1: 3 ranks, without the "
            "former rank 1; at most %u numbers",
            HT_SHARDS_RANKS_MAX, HT_SHARDS_CHANGES_MAX);
    return check_steers(q, err);
}

/* It says which devices its steps wait for. */
static int check_paths(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    if (ht_ctl_is_root(q->ctl, q->ino))
        return check_steers(q, err);
    return ht_ctl_refuse(err, -EINVAL,
                         "paths: this is no model root; all other content is on fast devices while they have room");
}

/* Of the program that makes a model of this directory, for itself (optim/torch/hitrain/_making.py). */
static int check_making(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    struct stat st;
    int rc = ht_ns_getattr(q->ctl->ns, q->ino, &st);

    if (!rc && S_ISDIR(st.st_mode) && q->len <= HT_MAKING_MAX)
        return ht_ctl_may_set_words(q->ctl, ht_ctl_is_root(q->ctl, q->ino) ? q->ino : 0, q->ino, "making", q->caller);
    if (rc)
        return rc;
    return ht_ctl_refuse(err, -EINVAL, "making: only directories have it, and at most %d bytes", HT_MAKING_MAX);
}

static int check_endurance(const struct ht_attribute *q, char err[HT_CTL_ERROR_MAX])
{
    uint64_t bytes;

    if (q->ino != HT_NS_ROOT_INO)
        return ht_ctl_refuse(err, -EINVAL, "endurance: only the mount's root has it");
    if (ht_parse_bytes(q->value, q->len, &bytes))
        return ht_ctl_refuse(err, -EINVAL, "endurance: bytes per day, as in 1600000000000 or 1.5T");
    if (bytes == 0)
        return ht_ctl_refuse(err, -EINVAL,
                             "endurance: 0 is no budget: every commit writes; remove it to have no budget");
    return check_owner(q, err);
}

/* ----------------------------------------------------------- special words */

static int class_changed(const struct ht_attribute *q, int rc)
{
    if (rc == -EOPNOTSUPP)
        ht_last_error_set_below(q->ctl, q->ino, "class",
                                "class: a file gets it before its first byte, while no program has it open; a copy of "
                                "the file into a folder of that class has it");
    return rc;
}

static int set_dtype(const struct ht_attribute *q)
{
    const char *own = ht_parse_dtype(q->value, q->len)->word; /* the usual name, if the caller gave another one */

    return ht_ns_setxattr(q->ctl->ns, q->ino, q->name, own, strlen(own), q->flags);
}

/* Open files depend on the dtype in several ways: they read it again. */
static int dtype_changed(const struct ht_attribute *q, int rc)
{
    ht_ctl_changed(q->ctl);
    return rc;
}

static int compress_changed(const struct ht_attribute *q, int rc)
{
    ht_ns_compress_changed(q->ctl->ns);
    return rc;
}

static int endurance_changed(const struct ht_attribute *q, int rc)
{
    ht_endurance_apply(q->ctl);
    return rc;
}

/* Brings the bytes into the DRAM tier now; fs/ns tells the store that they stay there. */
static int set_pin(const struct ht_attribute *q)
{
    struct ht_obj *obj;
    int rc = ht_ns_setxattr(q->ctl->ns, q->ino, q->name, q->value, q->len, q->flags);

    if (rc || !q->len || ht_ns_open(q->ctl->ns, q->ino, &obj))
        return rc;
    rc = ht_ctl_prefetch(q->ctl, q->ino, obj);
    ht_ns_close(q->ctl->ns, q->ino);
    return rc;
}

/* The store knows it until that time is past; no record of it is made. */
static int set_next_use(const struct ht_attribute *q)
{
    uint64_t after_ns = 0;
    struct ht_obj *obj;
    int rc = ht_parse_next_use(q->value, q->len, &after_ns);

    if (!rc)
        rc = ht_ns_open(q->ctl->ns, q->ino, &obj);
    if (rc)
        return rc;
    rc = ht_obj_set_next_use(obj, after_ns);
    ht_ns_close(q->ctl->ns, q->ino);
    if (rc == -ENOSPC)
        ht_last_error_set(q->ctl, q->ino, "next_use", "next_use: 4096 files have it; remove it from another one");
    return rc;
}

static int remove_next_use(const struct ht_attribute *q)
{
    struct ht_obj *obj;
    int rc = ht_ns_open(q->ctl->ns, q->ino, &obj);

    if (rc)
        return rc == -EISDIR || rc == -EINVAL ? -ENODATA : rc;
    rc = ht_obj_forget_next_use(obj);
    ht_ns_close(q->ctl->ns, q->ino);
    return rc;
}

static ssize_t get_next_use(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    uint64_t after_ns = 0;
    struct ht_obj *obj;
    struct stat st;

    if (ht_ns_getattr(c->ns, ino, &st) || !S_ISREG(st.st_mode) || ht_ns_open(c->ns, ino, &obj))
        return -ENODATA;
    int rc = ht_obj_next_use(obj, &after_ns);
    ht_ns_close(c->ns, ino);
    if (rc)
        return rc;
    return after_ns == UINT64_MAX ? snprintf(buf, cap, "never") : snprintf(buf, cap, "%.3f", (double)after_ns * 1e-9);
}

/* The figures of the model root that it belongs to. */
static int root_stat(struct ht_ctl *c, uint64_t ino, struct ht_root_stat *out)
{
    struct ht_ns_tensor t;
    int rc = ht_ns_tensor(c->ns, ino, &t);

    if (rc)
        return rc;
    return t.root ? ht_optim_root_stat(c->optim, t.root, out) : -ENODATA;
}

static int set_step(const struct ht_attribute *q)
{
    struct ht_ctl *c = q->ctl;
    struct ht_ns_tensor t;
    uint64_t step;
    int rc = ht_ns_tensor(c->ns, q->ino, &t);

    if (rc)
        return rc;
    if (!t.is_root) {
        ht_last_error_set(c, q->ino, "step", "step: this is no model root");
        return -EINVAL;
    }
    if (ht_parse_u64(q->value, q->len, &step) || step > INT64_MAX) {
        ht_last_error_set(c, q->ino, "step", "step: a number in decimal digits, at most %lld", (long long)INT64_MAX);
        return -EINVAL;
    }
    ht_mutex_lock(ht_ctl_root_lock(c));
    rc = ht_ctl_may_set_words(c, q->ino, q->ino, "step", q->caller);
    if (rc == 0) {
        rc = ht_optim_root_set_step(c->optim, q->ino, step);
        if (rc == -EBUSY)
            ht_last_error_set(c, q->ino, "step", "step: a step is open or ends now; commit or abort it first");
    }
    ht_mutex_unlock(ht_ctl_root_lock(c));
    return rc;
}

static ssize_t get_step(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    struct ht_root_stat st;
    int rc = root_stat(c, ino, &st);

    return rc ? rc : snprintf(buf, cap, "%llu", (unsigned long long)st.step);
}

static ssize_t get_durable_step(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    struct ht_root_stat st;
    int rc = root_stat(c, ino, &st);

    return rc ? rc : snprintf(buf, cap, "%llu", (unsigned long long)st.durable_step);
}

/* Known when the last step had to compute it: max_grad_norm or skip_nonfinite is set. */
static ssize_t get_grad_norm(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    struct ht_root_stat st;
    int rc = root_stat(c, ino, &st);

    if (rc == 0 && !st.norm_known)
        rc = -ENODATA;
    return rc ? rc : snprintf(buf, cap, "%.17g", st.grad_norm);
}

/* The remembered write error, whether or not an fsync has reported it. */
static int sticky_error(struct ht_ctl *c, uint64_t ino, bool clear)
{
    struct ht_obj_stat st;
    struct ht_obj *obj;
    struct stat attr;

    if (ht_ns_getattr(c->ns, ino, &attr) || !S_ISREG(attr.st_mode) || ht_ns_open(c->ns, ino, &obj))
        return 0;
    ht_obj_stat(obj, &st);
    if (clear)
        ht_obj_clear_error(obj);
    ht_ns_close(c->ns, ino);
    return st.sticky_error;
}

/* A lost write comes first, then the optimizer's refusal, then that of a word or of the tree. */
static ssize_t get_error(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    struct ht_root_stat st;
    struct ht_last_error p;
    int lost = sticky_error(c, ino, false);

    if (lost)
        return snprintf(buf, cap, "write: %s", strerror(-lost));
    if (ht_ctl_is_root(c, ino) && ht_optim_root_stat(c->optim, ino, &st) == 0 && st.error[0])
        return ht_last_error_format(st.error, true, st.error_step, st.error_time, buf, cap);
    return ht_last_error_get(c, ino, &p) ? ht_last_error_format(p.text, p.in_model, p.step, p.time, buf, cap) : 0;
}

static int clear_error(const struct ht_attribute *q)
{
    const struct ht_event_about about = {.id = q->ino};
    struct ht_root_stat st;
    bool any = sticky_error(q->ctl, q->ino, true) != 0;

    any |= ht_last_error_clear(q->ctl, q->ino);
    if (ht_ctl_is_root(q->ctl, q->ino)) {
        any |= ht_optim_root_stat(q->ctl->optim, q->ino, &st) == 0 && st.error[0];
        ht_optim_root_clear_error(q->ctl->optim, q->ino);
    }
    if (any)
        ht_event(HT_EVENT_ERROR_CLEARED, &about, "the error was cleared by user %u", q->caller->cred.uid);
    return 0;
}

static int set_error(const struct ht_attribute *q)
{
    return q->len ? -EINVAL : clear_error(q);
}

static ssize_t get_stats(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    struct ht_buf text = HT_BUF_INIT;
    ssize_t n = ht_metrics_lines(c, ino, &text);

    if (n == 0) {
        n = (ssize_t)ht_min_u64(text.len, cap);
        memcpy(buf, text.data, (size_t)n);
    }
    ht_buf_free(&text);
    return n;
}

static ssize_t get_digest(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    char digits[HT_NS_DIGEST_MAX];
    int rc = ht_ns_kept_digest(c->ns, ino, digits);

    return rc ? rc : snprintf(buf, cap, "%s", digits);
}

/* Of a model root: which logged steps can be read. Of a kept step, its lineage counts. */
static ssize_t get_redo(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    bool changed = ht_ns_is_changed(c->ns, ino); /* before the count: a publication in between is counted */
    struct ht_redo_steps s;

    if (ht_optim_redo_steps(c->optim, ino, &s))
        return -ENODATA;
    return snprintf(buf, cap, "first=%llu\nlast=%llu\nlineage=%llu\npublications=%llu\nchanged=%d\n",
                    (unsigned long long)s.first, (unsigned long long)s.last, (unsigned long long)s.lineage,
                    (unsigned long long)s.publications, changed);
}

static const char *options_of(struct ht_ctl *c, uint64_t ino)
{
    return ino == HT_NS_ROOT_INO ? c->options : NULL;
}

static int read_only(const struct ht_attribute *q)
{
    return -EOPNOTSUPP;
}

static const struct word words[] = {
    {"dtype", check_dtype, set_dtype, .may_remove = may_set_dtype, .changed = dtype_changed},
    {"shape", check_shape},
    {"members", check_members},
    {"grad_dtype", check_grad_dtype, set_dtype, .may_remove = may_set_dtype, .changed = dtype_changed},
    {"class", check_class_owner, .may_remove = check_class_owner, .values = {"durable", "scratch"},
     .changed = class_changed},
    {"pin", check_pin, set_pin, .may_remove = check_owner, .values = {"", "dram"}},
    /* It is about memory alone: which devices content lies on, the store decides by itself, and by paths. */
    {"tier", check_owner, .may_remove = check_owner, .values = {"", "dram", "capacity"}},
    {"next_use", check_next_use, set_next_use, get_next_use, remove_next_use, .may_remove = check_owner},
    {"passthrough", check_owner, .may_remove = check_owner, .values = {"", "on"}},
    {"compress", .values = {"off", "auto"}, .changed = compress_changed},
    {"shards", check_shards, .may_remove = check_steers},
    {"paths", check_paths, .may_remove = check_steers, .values = {"fast", "all"}},
    {"endurance", check_endurance, .may_remove = check_owner, .changed = endurance_changed},
    {"optimizer", NULL, ht_optimizer_set, NULL, ht_optimizer_remove, .waits = true},
    {"step", NULL, set_step, get_step, read_only, .waits = true},
    {"making", check_making},
    {"error", NULL, set_error, get_error, clear_error},
    {"durable_step", NULL, read_only, get_durable_step, read_only},
    {"grad_norm", NULL, read_only, get_grad_norm, read_only},
    {"stats", NULL, read_only, get_stats, read_only},
    {"digest", NULL, read_only, get_digest, read_only},
    {"redo", NULL, read_only, get_redo, read_only},
    {"cold", NULL, read_only, NULL, read_only},
    {"recall", NULL, read_only, ht_cold_recall_text, read_only},
    {"vault", NULL, read_only, ht_cold_vault_text, read_only},
    {"options", NULL, read_only, NULL, read_only, .text = options_of},
};

/* ---------------------------------------------------------------- dispatch */

bool ht_attribute_match(const char *name)
{
    return strncmp(name, HT_XATTR_PREFIX, strlen(HT_XATTR_PREFIX)) == 0;
}

static const struct word *find_word(const char *name)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(words); i++)
        if (strcmp(words[i].word, name + strlen(HT_XATTR_PREFIX)) == 0)
            return &words[i];
    return NULL;
}

bool ht_attribute_waits(const char *name)
{
    const struct word *w = find_word(name);

    return w && w->waits;
}

static int unknown(struct ht_ctl *c, uint64_t ino, const char *name)
{
    char list[HT_CTL_ERROR_MAX];

    if (ht_metrics_known(name + strlen(HT_XATTR_PREFIX)))
        return -EOPNOTSUPP;
    int at = snprintf(list, sizeof(list), "unknown attribute %.80s; known:", name);
    for (size_t i = 0; i < HT_ARRAY_SIZE(words) && at < (int)sizeof(list); i++)
        if (words[i].set != read_only)
            at += snprintf(list + at, sizeof(list) - (size_t)at, " %s", words[i].word);
    ht_last_error_set_below(c, ino, "attribute", "%s", list);
    return -EINVAL;
}

int ht_attribute_set(struct ht_ctl *c, uint64_t ino, const char *name, const void *value, size_t len, int flags,
                     const struct ht_caller *caller)
{
    struct ht_attribute q = {c, ino, name, value, len, flags, caller};
    const struct word *w = find_word(name);
    char err[HT_CTL_ERROR_MAX] = "";

    if (!w)
        return unknown(c, ino, name);
    int rc = w->values[0] ? check_value(&q, w->values, err) : 0;
    if (rc == 0 && w->check)
        rc = w->check(&q, err);
    if (rc) {
        if (err[0])
            ht_last_error_set_below(c, ino, w->word, "%s", err);
        return rc;
    }
    rc = w->set ? w->set(&q) : ht_ns_setxattr(c->ns, ino, name, value, len, flags);
    if (w->changed)
        rc = w->changed(&q, rc);
    if (rc == 0) {
        ht_last_error_done(c, ino, w->word);
        ht_last_error_done(c, ino, "attribute");
    }
    return rc;
}

ssize_t ht_attribute_get(struct ht_ctl *c, uint64_t ino, const char *name, void *buf, size_t cap)
{
    const struct word *w = find_word(name);
    char text[TEXT_MAX];
    uint64_t v = 0;

    if (w && w->text) {
        const char *whole = w->text(c, ino);
        return whole ? ht_ns_xattr_give(whole, strlen(whole), buf, cap) : -ENODATA;
    }
    if (w && !w->get)
        return ht_ns_getxattr(c->ns, ino, name, buf, cap);
    ssize_t n = w ? w->get(c, ino, text, sizeof(text)) : ht_metrics_one(c, ino, name + strlen(HT_XATTR_PREFIX), &v);
    if (!w && n == 0)
        n = snprintf(text, sizeof(text), "%llu", (unsigned long long)v);
    return n < 0 ? n : ht_ns_xattr_give(text, (size_t)n, buf, cap);
}

int ht_attribute_remove(struct ht_ctl *c, uint64_t ino, const char *name, const struct ht_caller *caller)
{
    struct ht_attribute q = {c, ino, name, NULL, 0, 0, caller};
    const struct word *w = find_word(name);
    char err[HT_CTL_ERROR_MAX] = "";

    if (!w)
        return ht_metrics_known(name + strlen(HT_XATTR_PREFIX)) ? -EOPNOTSUPP : -ENODATA;
    int rc = w->may_remove ? w->may_remove(&q, err) : 0;
    if (rc && err[0])
        ht_last_error_set(c, ino, w->word, "%s", err);
    if (rc)
        return rc;
    rc = w->remove ? w->remove(&q) : ht_ns_removexattr(c->ns, ino, name);
    return w->changed ? w->changed(&q, rc) : rc;
}
