/* SPDX-License-Identifier: Apache-2.0 */
/*
 * optimizer.c - the word user.hitrain.optimizer: on a directory it makes, changes or ends a model root; on a file, and on a
 * directory below a root, it amends what is above (override.c).
 *
 * A text that is refused changes nothing; the reason is in the log and in the word error of the inode (a
 * directory or file below a root: of that root, too, which is where a trainer looks).
 */
#include "fs/ctl/ctl_priv.h"

#include <stdio.h>
#include <sys/stat.h>
#include <sys/xattr.h>

static const char word[] = HT_XATTR_PREFIX "optimizer", word_kind[] = "optimizer";

int ht_optimizer_read(struct ht_ctl *c, uint64_t ino, struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    char text[HT_OPTIM_CONFIG_TEXT_MAX];
    ssize_t n = ht_ns_getxattr(c->ns, ino, word, text, sizeof(text));

    if (n < 0) {
        snprintf(err, HT_OPTIM_ERROR_MAX, "the attribute cannot be read: %s", strerror((int)-n));
        return (int)n;
    }
    return ht_optim_config_parse(text, (size_t)n, out, err);
}

struct new_root {
    struct ht_ctl *ctl;
    uint64_t ino;
    const struct ht_optim_config *config;
};

/* Everything below a model root goes back and forth with its steps. */
static int check_owner(struct ht_ctl *c, uint64_t ino, const char *what, const struct ht_caller *caller)
{
    int r = ht_ctl_owner(c, ino, caller);

    if (r == -EPERM)
        ht_problem_set(c, ino, word_kind, "cannot %s a model root: only the owner of the directory may, or root", what);
    return r;
}

/* The first that is another's lies in directories that are all the caller's: he may know its name. */
static void tell_foreign(struct ht_ctl *c, uint64_t ino, uint64_t foreign)
{
    char path[160] = "";
    struct stat st = {0};
    int r = ht_ns_getattr(c->ns, foreign, &st);

    ht_ns_path(c->ns, foreign, path, sizeof(path));
    if (r == 0)
        ht_problem_set(c, ino, word_kind,
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

static void tell_nested(struct ht_ctl *c, uint64_t ino)
{
    struct nested n = {c, ino, 0};
    char path[160] = "";
    int r = ht_ns_roots(c->ns, find_nested, &n);

    if (r == 0 && n.found)
        ht_ns_path(c->ns, n.found, path, sizeof(path));
    ht_problem_set(c, ino, word_kind, "cannot become a model root: model roots do not nest, and there is one below: %s",
                   path);
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
    int r = check_owner(c, ino, "become", caller);

    if (r)
        return r;
    r = ht_ns_root_make(c->ns, ino, text, &by, add_in_tx, &n);
    if (r == -EINVAL)
        tell_nested(c, ino);
    else if (r == -EPERM)
        tell_foreign(c, ino, by.foreign);
    else if (r)
        ht_problem_set(c, ino, word_kind, "cannot become a model root: %s", why_no_root(r));
    return r;
}

/* The optimizer first, because it may refuse; if then the attribute cannot be kept, back to what was. */
static int change_root(struct ht_ctl *c, uint64_t ino, const char *text, const struct ht_optim_config *config)
{
    struct ht_optim_config before;
    char err[HT_OPTIM_ERROR_MAX];
    int had = ht_optimizer_read(c, ino, &before, err);
    int r = ht_optim_root_configure(c->optim, ino, config);

    if (r) {
        ht_problem_set(c, ino, word_kind, "optimizer: %s",
                       r == -EBUSY ? "another rule needs parameters without state: reset them first (reset *)"
                                   : strerror(-r));
        return r;
    }
    r = ht_ns_setxattr(c->ns, ino, word, text, strlen(text), 0);
    if (r && had == 0 && ht_optim_root_configure(c->optim, ino, &before))
        ht_problem_set(c, ino, word_kind, "optimizer: neither the new nor the old configuration can be kept");
    return r;
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
    ht_problem_set_below(c, ino, word_kind, "optimizer: %s", err);
    return -EINVAL;
}

/* text NULL: remove it. */
static int set_override(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text, int flags)
{
    char err[HT_OPTIM_ERROR_MAX];
    int r = ht_override_check(c, root, ino, text, err);

    if (r == 0)
        r = ht_override_set(c, root, ino, text, flags, err);
    if (r && err[0])
        refuse_text(c, ino, err);
    return r;
}

static int set_own(struct ht_ctl *c, uint64_t ino, const struct ht_ns_tensor *t, bool dir, const char *text, int flags,
                   const struct ht_caller *caller)
{
    struct ht_optim_config config;
    char err[HT_OPTIM_ERROR_MAX];

    if (ht_optim_config_parse(text, strlen(text), &config, err)) {
        refuse_text(c, ino, err);
        return -EINVAL;
    }
    if (!dir)
        return ht_ns_setxattr(c->ns, ino, word, text, strlen(text), flags);
    return t->is_root ? change_root(c, ino, text, &config) : make_root(c, ino, text, &config, caller);
}

static int set_locked(struct ht_ctl *c, uint64_t ino, bool dir, const char *text, int flags,
                      const struct ht_caller *caller)
{
    struct ht_ns_tensor t;
    int r = ht_ns_tensor(c->ns, ino, &t);

    if (r == 0)
        r = refuse_flags(c, ino, flags);
    if (r)
        return r;
    r = t.root && !t.is_root ? set_override(c, t.root, ino, text, flags)
                             : set_own(c, ino, &t, dir, text, flags, caller);
    if (r == 0)
        ht_ctl_changed(c);
    return r;
}

int ht_optimizer_set(struct ht_ctl *c, uint64_t ino, const char *value, size_t len, int flags,
                     const struct ht_caller *caller)
{
    char text[HT_OPTIM_CONFIG_TEXT_MAX];
    struct stat st;
    int r;

    if (len >= sizeof(text))
        return refuse_text(c, ino, "the text is longer than 1023 bytes");
    if (len && memchr(value, 0, len))
        return refuse_text(c, ino, "the text has a zero byte");
    memcpy(text, value, len);
    text[len] = 0;
    r = ht_ns_getattr(c->ns, ino, &st);
    if (r)
        return r;
    if (!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode))
        return refuse_text(c, ino, "only directories and regular files can carry one");
    ht_mutex_lock(&c->root_lock);
    r = set_locked(c, ino, S_ISDIR(st.st_mode), text, flags, caller);
    ht_mutex_unlock(&c->root_lock);
    return r;
}

static void remove_in_tx(void *ctx, struct ht_tx *tx)
{
    struct new_root *n = ctx;

    ht_optim_root_remove(n->ctl->optim, n->ino, tx);
}

static int unmake(void *ctx)
{
    struct new_root *n = ctx;

    return ht_ns_root_unmake(n->ctl->ns, n->ino, remove_in_tx, n);
}

/* A commit that is refused says by name what is in the way. */
static void tell_not_ended(struct ht_ctl *c, uint64_t ino, int error)
{
    struct ht_root_stat st;

    if (ht_optim_root_stat(c->optim, ino, &st))
        st.error[0] = 0;
    ht_problem_set(c, ino, word_kind, "cannot stop being a model root: %s", st.error[0] ? st.error : strerror(-error));
}

static int end_root(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller)
{
    struct new_root n = {c, ino, NULL};
    int r = check_owner(c, ino, "stop being", caller);

    if (r)
        return r;
    r = ht_optim_root_end(c->optim, ino, unmake, &n);
    if (r)
        tell_not_ended(c, ino, r);
    else
        ht_ctl_changed(c);
    return r;
}

int ht_optimizer_remove(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller)
{
    struct ht_ns_tensor t;
    int r = ht_ns_tensor(c->ns, ino, &t);

    if (r)
        return r;
    ht_mutex_lock(&c->root_lock);
    if (t.is_root)
        r = end_root(c, ino, caller);
    else
        r = t.root ? set_override(c, t.root, ino, NULL, 0) : ht_ns_removexattr(c->ns, ino, word);
    ht_mutex_unlock(&c->root_lock);
    return r;
}
