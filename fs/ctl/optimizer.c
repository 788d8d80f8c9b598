/* SPDX-License-Identifier: Apache-2.0 */
/*
 * optimizer.c - the word user.hitrain.optimizer: on a directory it makes, changes or ends a model root; on a file, and
 * on a directory below a root, it amends the word above (override.c).
 *
 * A refused text changes nothing. The reason is in the log and in the word error of the inode. For a directory or file
 * below a root it is also in that of the root, where a trainer looks.
 */
#include "fs/ctl/ctl_priv.h"
#include "optim/rules/config.h"

#include <sys/xattr.h>

static const char word[] = HT_XATTR_PREFIX "optimizer", word_kind[] = "optimizer";

int ht_optimizer_read(struct ht_ctl *c, uint64_t ino, struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    char text[HT_OPTIM_CONFIG_TEXT_MAX];
    ssize_t n = ht_ns_getxattr(c->ns, ino, word, text, sizeof(text));

    if (n < 0)
        return ht_ctl_refuse(err, (int)n, "the attribute cannot be read: %s", strerror((int)-n));
    return ht_optim_config_parse(text, (size_t)n, out, err);
}

struct new_root {
    struct ht_ctl *ctl;
    uint64_t ino;
    const struct ht_optim_config *config;
};

/* Steps commit and abort everything below a model root, so only its owner may make or end one. */
static int check_owner(struct ht_ctl *c, uint64_t ino, const char *what, const struct ht_caller *caller)
{
    int rc = ht_ctl_owner(c, ino, caller);

    if (rc == -EPERM)
        ht_last_error_set(c, ino, word_kind, "cannot %s a model root: only the owner of the directory may, or root",
                          what);
    return rc;
}

/* All directories above the first foreign inode are the caller's, so the caller may know its name. */
static void report_foreign(struct ht_ctl *c, uint64_t ino, uint64_t foreign)
{
    char path[160] = "";
    struct stat st = {0};
    int rc = ht_ns_getattr(c->ns, foreign, &st);

    ht_ns_path(c->ns, foreign, path, sizeof(path));
    if (rc == 0)
        ht_last_error_set(c, ino, word_kind,
                          "cannot become a model root: %s belongs to user %u; move it away, or let root make the model",
                          path, st.st_uid);
}

static int add_in_tx(void *ctx, struct ht_tx *tx)
{
    struct new_root *n = ctx;

    return ht_optim_root_add(n->ctl->optim, n->ino, n->config, tx);
}

struct nested {
    const struct ht_ctl *ctl;
    uint64_t dir, found;
};

static int find_nested(void *ctx, uint64_t root)
{
    struct nested *n = ctx;

    if (ht_ns_is_below(n->ctl->ns, root, n->dir))
        n->found = root;
    return 0;
}

static void report_nested(struct ht_ctl *c, uint64_t ino)
{
    struct nested n = {c, ino, 0};
    char path[160] = "";
    int rc = ht_ns_roots(c->ns, find_nested, &n);

    if (rc == 0 && n.found)
        ht_ns_path(c->ns, n.found, path, sizeof(path));
    ht_last_error_set(c, ino, word_kind,
                      "cannot become a model root: model roots do not nest, and there is one below: %s", path);
}

static const char *why_no_root(int error)
{
    switch (error) {
    case -EBUSY:
        return "something below has a hard link outside";
    case -ENOSPC:
        return "no space for what a model root needs";
    default:
        return strerror(-error);
    }
}

static int make_root(struct ht_ctl *c, uint64_t ino, const char *text, const struct ht_optim_config *config,
                     const struct ht_caller *caller)
{
    struct new_root n = {c, ino, config};
    struct ht_ns_claimant by = {.uid = caller->cred.uid};
    int rc = check_owner(c, ino, "become", caller);

    if (rc)
        return rc;
    rc = ht_ns_root_make(c->ns, ino, text, &by, add_in_tx, &n);
    if (rc == -EINVAL)
        report_nested(c, ino);
    else if (rc == -EPERM)
        report_foreign(c, ino, by.foreign);
    else if (rc)
        ht_last_error_set(c, ino, word_kind, "cannot become a model root: %s", why_no_root(rc));
    return rc;
}

/*
 * The optimizer first, because it may refuse; if then the attribute cannot be kept, the former configuration returns.
 */
static int change_root(struct ht_ctl *c, uint64_t ino, const char *text, const struct ht_optim_config *config)
{
    struct ht_optim_config before;
    char err[HT_OPTIM_ERROR_MAX];
    int had = ht_optimizer_read(c, ino, &before, err);
    int rc = ht_optim_root_configure(c->optim, ino, config);

    if (rc) {
        ht_last_error_set(c, ino, word_kind, "optimizer: %s",
                          rc == -EBUSY ? "another rule needs parameters without state: reset them first (reset *)"
                              : rc == -EAGAIN
                              ? "state_bits cannot change while a step is open: commit or abort it first"
                              : strerror(-rc));
        return rc == -EAGAIN ? -EBUSY : rc;
    }
    rc = ht_ns_setxattr(c->ns, ino, word, text, strlen(text), 0);
    if (rc && had == 0 && ht_optim_root_configure(c->optim, ino, &before))
        ht_last_error_set(c, ino, word_kind, "optimizer: neither the new nor the old configuration can be kept");
    return rc;
}

static int refuse_flags(struct ht_ctl *c, uint64_t ino, int flags)
{
    bool there = ht_ns_getxattr(c->ns, ino, word, NULL, 0) >= 0;

    if ((flags & XATTR_CREATE) && there)
        return -EEXIST;
    return (flags & XATTR_REPLACE) && !there ? -ENODATA : 0;
}

static int refuse_text(struct ht_ctl *c, uint64_t ino, const char *err)
{
    ht_last_error_set_below(c, ino, word_kind, "optimizer: %s", err);
    return -EINVAL;
}

/* text NULL: remove it. */
static int set_override(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text, int flags)
{
    char err[HT_OPTIM_ERROR_MAX];
    int rc = ht_override_check(c, root, ino, text, err);

    if (rc == 0)
        rc = ht_override_set(c, root, ino, text, flags, err);
    if (rc && err[0])
        refuse_text(c, ino, err);
    return rc;
}

/* Of a root, or of something outside of models. */
static int parse_own(const char *text, bool dir, struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    size_t len = strlen(text), first = ht_optim_sections_at(text, len), own = dir ? len : first;
    struct ht_optim_sections sections;
    int rc = ht_optim_config_parse(text, own, out, err);

    if (dir && first < len)
        snprintf(err, HT_OPTIM_ERROR_MAX, "only a file has words for ranges of elements");
    if (rc && own < len && ht_optim_sections_alone(text, own))
        snprintf(err, HT_OPTIM_ERROR_MAX,
                 "outside of a model ranges of elements follow a rule, as in adamw lr=0.1 0:32 lr=0.01");
    if (rc || own == len)
        return rc;
    rc = ht_optim_sections_parse(text + own, len - own, out, &sections, err);
    ht_optim_sections_free(&sections);
    return rc;
}

static int set_own(struct ht_ctl *c, uint64_t ino, const struct ht_ns_tensor *t, bool dir, const char *text, int flags,
                   const struct ht_caller *caller)
{
    struct ht_optim_config config;
    char err[HT_OPTIM_ERROR_MAX];

    if (parse_own(text, dir, &config, err))
        return refuse_text(c, ino, err);
    if (!dir)
        return ht_ns_setxattr(c->ns, ino, word, text, strlen(text), flags);
    return t->is_root ? change_root(c, ino, text, &config) : make_root(c, ino, text, &config, caller);
}

static int set_locked(struct ht_ctl *c, uint64_t ino, bool dir, const char *text, int flags,
                      const struct ht_caller *caller) HT_REQUIRES(HT_LOCK_ROOTS)
{
    struct ht_ns_tensor t;
    int rc = ht_ns_tensor(c->ns, ino, &t);

    if (rc == 0)
        rc = refuse_flags(c, ino, flags);
    if (rc == 0)
        rc = ht_ctl_may_set_words(c, t.root, ino, word_kind, caller);
    if (rc)
        return rc;
    rc = t.root && !t.is_root ? set_override(c, t.root, ino, text, flags)
                              : set_own(c, ino, &t, dir, text, flags, caller);
    if (rc == 0)
        ht_ctl_changed(c);
    return rc;
}

/* The text of a file may have many ranges of elements. */
static int refuse_value(struct ht_ctl *c, uint64_t ino, mode_t mode, const char *value, size_t len)
{
    if (!S_ISDIR(mode) && !S_ISREG(mode))
        return refuse_text(c, ino, "only directories and regular files can carry one");
    if (len >= HT_OPTIM_CONFIG_TEXT_MAX && (S_ISDIR(mode) || ht_optim_sections_at(value, len) == len))
        return refuse_text(c, ino, "the text is longer than 1023 bytes");
    if (len > HT_OPTIM_SECTIONS_TEXT_MAX)
        return refuse_text(c, ino, "the text is longer than 65536 bytes");
    return len && memchr(value, 0, len) ? refuse_text(c, ino, "the text has a zero byte") : 0;
}

int ht_optimizer_set(const struct ht_attribute *a)
{
    struct ht_ctl *c = a->ctl;
    struct stat st;
    int rc = ht_ns_getattr(c->ns, a->ino, &st);

    if (rc == 0)
        rc = refuse_value(c, a->ino, st.st_mode, a->value, a->len);
    if (rc)
        return rc;
    char *text = malloc(a->len + 1);
    if (!text)
        return -ENOMEM;
    if (a->len)
        memcpy(text, a->value, a->len); /* has no zero at its end */
    text[a->len] = '\0';
    ht_mutex_lock(ht_ctl_root_lock(c));
    rc = set_locked(c, a->ino, S_ISDIR(st.st_mode), text, a->flags, a->caller);
    ht_mutex_unlock(ht_ctl_root_lock(c));
    free(text);
    return rc;
}

static int unmake(void *ctx)
{
    struct new_root *n = ctx;

    return ht_ns_root_unmake(n->ctl->ns, n->ino);
}

/* A refused commit names its obstacle. */
static void report_not_ended(struct ht_ctl *c, uint64_t ino, int error)
{
    struct ht_root_stat st;

    if (ht_optim_root_stat(c->optim, ino, &st))
        st.error[0] = 0;
    ht_last_error_set(c, ino, word_kind, "cannot stop being a model root: %s",
                      st.error[0] ? st.error : strerror(-error));
}

bool ht_ctl_report_kept(struct ht_ctl *c, uint64_t root, const char *kind)
{
    struct ht_ns_kept *all = NULL;
    size_t count = 0;
    int rc = ht_ns_kept_list(c->ns, root, &all, &count);

    free(all);
    if (rc || !count)
        return false;
    ht_last_error_set(c, root, kind, "%s: the model has %zu kept steps: `hitrainctl forget ROOT --all` ends them", kind,
                      count);
    return true;
}

static int end_root(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller)
{
    struct new_root n = {c, ino, NULL};
    int rc = check_owner(c, ino, "stop being", caller);

    if (rc)
        return rc;
    if (ht_ctl_report_kept(c, ino, word_kind)) /* an end that is refused publishes nothing */
        return -EBUSY;
    if (ht_ns_getxattr(c->ns, ino, HT_XATTR_PREFIX "cold", NULL, 0) > 0) { /* until a commit finds no such content */
        ht_last_error_set(c, ino, word_kind, "content of the model may lie in a vault: recall it first, or commit");
        return -EBUSY;
    }
    rc = ht_optim_root_end(c->optim, ino, unmake, &n);
    if (rc)
        report_not_ended(c, ino, rc);
    else
        ht_ctl_changed(c);
    return rc;
}

int ht_optimizer_remove(const struct ht_attribute *a)
{
    struct ht_ctl *c = a->ctl;
    uint64_t ino = a->ino;
    struct ht_ns_tensor t;
    int rc = ht_ns_tensor(c->ns, ino, &t);

    if (rc)
        return rc;
    ht_mutex_lock(ht_ctl_root_lock(c));
    rc = ht_ctl_may_set_words(c, t.root, ino, word_kind, a->caller);
    if (rc == 0 && t.is_root)
        rc = end_root(c, ino, a->caller);
    else if (rc == 0)
        rc = t.root ? set_override(c, t.root, ino, NULL, 0) : ht_ns_removexattr(c->ns, ino, word);
    ht_mutex_unlock(ht_ctl_root_lock(c));
    return rc;
}
