/* SPDX-License-Identifier: Apache-2.0 */
/*
 * override.c - the word user.hitrain.optimizer of files, and of directories below a model root.
 *
 * Such a text amends: the words that it leaves out are those of the directory above it, and in the end those of the root. A
 * change is for the next step that opens. So while a step is open, the text that was there before is kept beside the new one,
 * with the number of the change (ht_optim_words_change): who asks for an earlier number gets the earlier text.
 *
 * The number is taken, the earlier text kept and the attribute set under words_lock, which readers share: they see all of a change
 * or nothing. An earlier text is forgotten at the first change after its step.
 */
#include "fs/ctl/ctl_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

static const char word[] = HT_XATTR_PREFIX "optimizer";

struct earlier {
    struct ht_list link; /* in ctl.earlier_words, by change */
    uint64_t root, ino, change;
    size_t len;
    bool none; /* the attribute was not there */
    char text[];
};

/* -------------------------------------------------------------------- read */

/* What is asked for: all attributes as they are, but for one of which another text is tried. */
struct question {
    const struct ht_ctl *ctl;
    uint64_t as_of;
    uint64_t tried_ino; /* 0: none */
    const char *tried;
    struct ht_optim_config *config;
    char *err;
};

/* The text of the first change after as_of is the one that was in force. */
static const struct earlier *find_earlier(const struct question *q, uint64_t ino)
{
    ht_list_for_each(p, &q->ctl->earlier_words) {
        const struct earlier *e = ht_list_entry(p, struct earlier, link);

        if (e->ino == ino && e->change > q->as_of)
            return e;
    }
    return NULL;
}

static int amend(void *ctx, uint64_t ino, const char *value, size_t len)
{
    const struct question *q = ctx;
    const struct earlier *e = find_earlier(q, ino);

    if (ino == q->tried_ino) {
        value = q->tried;
        len = value ? strlen(value) : 0;
    } else if (e) {
        value = e->none ? NULL : e->text;
        len = e->len;
    }
    return value ? ht_optim_config_amend(value, len, q->config, q->config, q->err) : 0;
}

int ht_override_of(struct ht_ctl *c, uint64_t ino, uint64_t as_of, const struct ht_optim_config *base,
                   struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    struct question q = {.ctl = c, .as_of = as_of, .config = out, .err = err};
    int r;

    *out = *base;
    snprintf(err, HT_OPTIM_ERROR_MAX, "its words cannot be read");
    ht_rwlock_rdlock(&c->words_lock);
    r = ht_ns_xattr_path(c->ns, ino, word, amend, &q);
    ht_rwlock_unlock(&c->words_lock);
    return r == -ESTALE ? 0 : r; /* it is gone, and told so by others */
}

/* ------------------------------------------------------------------- check */

static int try_text(struct ht_ctl *c, uint64_t root, uint64_t ino, uint64_t tried_ino, const char *text,
                    struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    struct question q = {
        .ctl = c, .as_of = UINT64_MAX, .tried_ino = tried_ino, .tried = text, .config = out, .err = err};
    int r = ht_optim_words_of(c->optim, root, 0, out, err);

    if (r)
        return r;
    ht_rwlock_rdlock(&c->words_lock);
    r = ht_ns_xattr_path(c->ns, ino, word, amend, &q);
    ht_rwlock_unlock(&c->words_lock);
    return r;
}

static int name_state(struct ht_ctl *c, uint64_t param, char err[HT_OPTIM_ERROR_MAX])
{
    char path[160];

    ht_ns_path(c->ns, param, path, sizeof(path));
    snprintf(err, HT_OPTIM_ERROR_MAX, "%s has state of another rule: reset it first", path);
    return -EBUSY;
}

struct params {
    uint64_t root;
    struct ht_buf found; /* uint64_t each */
};

static int note_param(void *ctx, const struct ht_optim_entry *e)
{
    struct params *p = ctx;

    if (e->root == p->root && e->parameter)
        ht_buf_put(&p->found, &e->parameter, sizeof(e->parameter));
    return p->found.err;
}

/* Every parameter below dir that has state. */
static int check_below(struct ht_ctl *c, uint64_t root, uint64_t dir, const char *text, char err[HT_OPTIM_ERROR_MAX])
{
    struct params p = {.root = root, .found = HT_BUF_INIT};
    struct ht_optim_config config;
    int r = ht_optim_walk(c->optim, note_param, &p);

    for (size_t at = 0; r == 0 && at < p.found.len; at += sizeof(uint64_t)) {
        uint64_t ino;

        memcpy(&ino, p.found.data + at, sizeof(ino));
        if (!ht_ns_is_below(c->ns, ino, dir))
            continue;
        r = try_text(c, root, ino, dir, text, &config, err);
        if (r == 0 && !ht_optim_state_fits(c->optim, ino, &config))
            r = name_state(c, ino, err);
    }
    ht_buf_free(&p.found);
    return r;
}

int ht_override_check(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text, char err[HT_OPTIM_ERROR_MAX])
{
    struct ht_optim_config config;
    struct stat st;
    int r = ht_ns_getattr(c->ns, ino, &st);

    err[0] = 0;
    if (r == 0)
        r = try_text(c, root, ino, ino, text, &config, err);
    if (r == 0 && S_ISDIR(st.st_mode))
        return check_below(c, root, ino, text, err);
    return r == 0 && !ht_optim_state_fits(c->optim, ino, &config) ? name_state(c, ino, err) : r;
}

/* ------------------------------------------------------------------ change */

static void forget(struct earlier *e)
{
    ht_list_del(&e->link);
    free(e);
}

/* Under words_lock: those that no open step asks for. */
static void forget_old(struct ht_ctl *c)
{
    ht_list_for_each_safe(p, next, &c->earlier_words) {
        struct earlier *e = ht_list_entry(p, struct earlier, link);

        if (ht_optim_words_as_of(c->optim, e->root) >= e->change)
            forget(e);
    }
}

void ht_override_forget_all(struct ht_ctl *c)
{
    while (!ht_list_empty(&c->earlier_words))
        forget(ht_list_entry(c->earlier_words.next, struct earlier, link));
}

static int keep_earlier(struct ht_ctl *c, uint64_t root, uint64_t ino, struct earlier **out)
{
    ssize_t n = ht_ns_getxattr(c->ns, ino, word, NULL, 0);
    struct earlier *e;

    if (n < 0 && n != -ENODATA)
        return (int)n;
    e = calloc(1, sizeof(*e) + (size_t)(n > 0 ? n : 0));
    if (!e)
        return -ENOMEM;
    e->root = root;
    e->ino = ino;
    e->none = n < 0;
    if (n > 0)
        n = ht_ns_getxattr(c->ns, ino, word, e->text, (size_t)n);
    if (n < 0 && !e->none) {
        free(e);
        return (int)n;
    }
    e->len = n > 0 ? (size_t)n : 0;
    e->change = ht_optim_words_change(c->optim);
    ht_list_add_tail(&c->earlier_words, &e->link);
    *out = e;
    return 0;
}

int ht_override_set(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text, int flags)
{
    struct earlier *e = NULL;
    int r;

    ht_rwlock_wrlock(&c->words_lock);
    forget_old(c);
    r = keep_earlier(c, root, ino, &e);
    if (r == 0) {
        r = text ? ht_ns_setxattr(c->ns, ino, word, text, strlen(text), flags) : ht_ns_removexattr(c->ns, ino, word);
        if (r)
            forget(e);
    }
    ht_rwlock_unlock(&c->words_lock);
    return r;
}
