/* SPDX-License-Identifier: Apache-2.0 */
/*
 * override.c - the word user.hitrain.optimizer of files, and of directories below a model root.
 *
 * Such a text amends: omitted words come from the directory above it, and in the end from the root. That of a file may
 * have sections, with other words for ranges of its elements (optim/rules/config.h). A change is for the
 * next step that opens. So while a step is open, the earlier text is kept beside the new one, with the number of the
 * change (ht_optim_words_change): a caller that asks with an earlier number gets the earlier text.
 *
 * The writer takes the number, keeps the earlier text and sets the attribute under words_lock, which readers share:
 * they see a whole change or nothing. An earlier text is forgotten at the first change after its step.
 *
 * An open step only needs the text that was there when it opened. So an inode has one earlier text at most, that of the
 * first change after the opening, however often it is changed. There are EARLIER_MAX in all, with EARLIER_BYTES_MAX.
 */
#include "fs/ctl/ctl_priv.h"
#include "optim/rules/config.h"

static const char word[] = HT_XATTR_PREFIX "optimizer";

enum { EARLIER_MAX = 1 << 16, EARLIER_BYTES_MAX = 64 << 20 };

/* A model root that has earlier texts. */
struct earlier_root {
    struct ht_list link; /* in ctl.earlier_roots */
    uint64_t root;
    struct ht_list words; /* by change; never empty outside of this file's functions */
};

struct earlier {
    struct ht_id_link by_ino; /* in ctl.earlier_words */
    struct ht_list link;      /* in of->words */
    struct earlier_root *of;
    uint64_t change;
    size_t len;
    bool none; /* the attribute was not there */
    char text[];
};

/* -------------------------------------------------------------------- read */

/* The question: all attributes as they are, except one with another text on trial. */
struct question {
    const struct ht_ctl *ctl;
    uint64_t as_of;
    uint64_t tried_ino; /* 0: none */
    const char *tried;
    uint64_t file; /* whose sections are asked for */
    struct ht_optim_config *config;
    struct ht_optim_sections *sections; /* NULL: they are not */
    char *err;
};

static struct earlier *find_earlier(const struct ht_ctl *c, uint64_t ino)
{
    struct ht_id_link *link = ht_id_find(&c->earlier_words, ino);

    return link ? ht_container_of(link, struct earlier, by_ino) : NULL;
}

static int refuse_directory(char err[HT_OPTIM_ERROR_MAX])
{
    return ht_ctl_refuse(err, -EINVAL, "only a file has words for ranges of elements");
}

/* The file comes last, so its sections amend all other words. */
static int amend_with(const struct question *q, uint64_t ino, const char *value, size_t len)
{
    size_t own = ht_optim_sections_at(value, len);

    if (own < len && ino != q->file)
        return refuse_directory(q->err);
    int rc = own < len && ht_optim_sections_alone(value, own)
        ? 0
        : ht_optim_config_amend(value, own, q->config, q->config, q->err);
    if (rc || own == len || !q->sections)
        return rc;
    return ht_optim_sections_parse(value + own, len - own, q->config, q->sections, q->err);
}

static int amend(void *ctx, uint64_t ino, const char *value, size_t len)
{
    const struct question *q = ctx;
    const struct earlier *e = find_earlier(q->ctl, ino);

    if (ino == q->tried_ino) {
        value = q->tried;
        len = value ? strlen(value) : 0;
    } else if (e && e->change > q->as_of) {
        value = e->none ? NULL : e->text;
        len = e->len;
    }
    return value ? amend_with(q, ino, value, len) : 0;
}

static int ask_words(struct ht_ctl *c, uint64_t ino, struct question *q)
{
    ht_rwlock_rdlock(ht_ctl_words_lock(c));
    int rc = ht_ns_xattr_path(c->ns, ino, word, amend, q);
    ht_rwlock_unlock(ht_ctl_words_lock(c));
    return rc;
}

int ht_override_of(void *ctl, uint64_t ino, uint64_t as_of, const struct ht_optim_config *base,
                   struct ht_optim_config *out, struct ht_optim_sections *sections, char err[HT_OPTIM_ERROR_MAX])
{
    struct ht_ctl *c = ctl;
    struct question q = {.ctl = c, .as_of = as_of, .file = ino, .config = out, .sections = sections, .err = err};

    *out = *base;
    snprintf(err, HT_OPTIM_ERROR_MAX, "its words cannot be read");
    int rc = ask_words(c, ino, &q);
    if (!rc && sections && out->rule == HT_RULE_MUON)
        rc = ht_shape_blocks(c, ino, out, sections, err);
    return rc == -ESTALE ? 0 : rc; /* the inode is gone, and other functions report that */
}

/* ------------------------------------------------------------------- check */

static int try_text(struct ht_ctl *c, uint64_t root, uint64_t ino, uint64_t tried_ino, const char *text,
                    struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    struct ht_optim_sections sections = {.section = NULL};
    struct question q = {.ctl = c,
                         .as_of = UINT64_MAX,
                         .tried_ino = tried_ino,
                         .tried = text,
                         .file = ino,
                         .config = out,
                         .sections = &sections,
                         .err = err};
    int rc = ht_optim_words_of(c->optim, root, 0, out, err);

    if (rc)
        return rc;
    rc = ask_words(c, ino, &q);
    ht_optim_sections_free(&sections);
    return rc;
}

/* Text that amends the words of ino would make them config: fits its state, and an open step? */
static int check_config(struct ht_ctl *c, uint64_t root, uint64_t ino, const struct ht_optim_config *config,
                        char err[HT_OPTIM_ERROR_MAX])
{
    struct ht_optim_config before;
    char why[HT_OPTIM_ERROR_MAX], path[160];

    if (!ht_optim_state_fits(c->optim, ino, config)) {
        ht_ns_path(c->ns, ino, path, sizeof(path));
        return ht_ctl_refuse(err, -EBUSY, "%s has state of another rule: reset it first", path);
    }
    if (ht_optim_words_as_of(c->optim, root) == UINT64_MAX || ht_optim_words_of(c->optim, root, ino, &before, why))
        return 0;
    if (before.state_bits == config->state_bits && before.state_bits_min == config->state_bits_min)
        return 0;
    return ht_ctl_refuse(err, -EBUSY, "state_bits cannot change while a step is open: commit or abort it first");
}

struct params {
    uint64_t root;
    struct ht_buf *found;
};

static int note_param(void *ctx, const struct ht_optim_entry *e)
{
    struct params *p = ctx;

    if (e->root == p->root && e->parameter)
        ht_buf_put(p->found, &e->parameter, sizeof(e->parameter));
    return p->found->err;
}

int ht_override_stateful(struct ht_ctl *c, uint64_t root, struct ht_buf *out)
{
    struct params p = {.root = root, .found = out};

    return ht_optim_walk(c->optim, note_param, &p);
}

/* Every parameter below dir that has state. */
static int check_below(struct ht_ctl *c, uint64_t root, uint64_t dir, const char *text, char err[HT_OPTIM_ERROR_MAX])
{
    struct ht_buf found = HT_BUF_INIT;
    struct ht_optim_config config;
    int rc = ht_override_stateful(c, root, &found);

    for (size_t at = 0; rc == 0 && at < found.len; at += sizeof(uint64_t)) {
        uint64_t ino;
        memcpy(&ino, found.data + at, sizeof(ino));
        if (!ht_ns_is_below(c->ns, ino, dir))
            continue;
        rc = try_text(c, root, ino, dir, text, &config, err);
        if (rc == 0)
            rc = check_config(c, root, ino, &config, err);
    }
    ht_buf_free(&found);
    return rc;
}

int ht_override_check(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text, char err[HT_OPTIM_ERROR_MAX])
{
    struct ht_optim_config config;
    struct stat st;
    int rc = ht_ns_getattr(c->ns, ino, &st);

    err[0] = 0;
    if (rc == 0 && text && S_ISDIR(st.st_mode) && ht_optim_sections_at(text, strlen(text)) < strlen(text))
        return refuse_directory(err);
    if (rc == 0)
        rc = try_text(c, root, ino, ino, text, &config, err);
    if (rc == 0 && S_ISDIR(st.st_mode))
        return check_below(c, root, ino, text, err);
    return rc ? rc : check_config(c, root, ino, &config, err);
}

/* ------------------------------------------------------------------ change */

static void forget_words(struct ht_ctl *c, struct earlier *e)
{
    struct earlier_root *of = e->of;

    ht_id_remove(&c->earlier_words, &e->by_ino);
    c->earlier_bytes -= e->len;
    ht_list_del(&e->link);
    free(e);
    if (!ht_list_empty(&of->words))
        return;
    ht_list_del(&of->link);
    free(of);
}

static struct earlier *oldest_until(const struct earlier_root *of, uint64_t change)
{
    struct earlier *e = ht_list_entry(of->words.next, struct earlier, link);

    return e->change <= change ? e : NULL;
}

/* Drops texts that no open step needs. Each root is queried once. */
static void forget_old(struct ht_ctl *c) HT_REQUIRES(HT_LOCK_WORDS)
{
    ht_list_for_each_safe(p, next, &c->earlier_roots) {
        struct earlier_root *of = ht_list_entry(p, struct earlier_root, link);
        uint64_t as_of = ht_optim_words_as_of(c->optim, of->root);
        struct earlier *e;
        bool last = false;
        while (!last && (e = oldest_until(of, as_of))) {
            last = e->link.next == &of->words;
            forget_words(c, e);
        }
    }
}

void ht_override_forget_all(struct ht_ctl *c)
{
    while (!ht_list_empty(&c->earlier_roots)) {
        struct earlier_root *of = ht_list_entry(c->earlier_roots.next, struct earlier_root, link);
        forget_words(c, ht_list_entry(of->words.next, struct earlier, link));
    }
    ht_id_table_free(&c->earlier_words);
}

static struct earlier_root *earlier_root(struct ht_ctl *c, uint64_t root)
{
    ht_list_for_each_entry(there, &c->earlier_roots, struct earlier_root, link)
        if (there->root == root)
            return there;
    struct earlier_root *of = calloc(1, sizeof(*of));
    if (!of)
        return NULL;
    of->root = root;
    ht_list_init(&of->words);
    ht_list_add_tail(&c->earlier_roots, &of->link);
    return of;
}

/* e is in no list yet; it is freed if there is no memory. */
static int keep(struct ht_ctl *c, uint64_t root, struct earlier *e)
{
    int rc = ht_id_insert(&c->earlier_words, &e->by_ino);

    if (rc == 0) {
        e->of = earlier_root(c, root);
        if (e->of) {
            ht_list_add_tail(&e->of->words, &e->link);
            c->earlier_bytes += e->len;
            return 0;
        }
        ht_id_remove(&c->earlier_words, &e->by_ino);
        rc = -ENOMEM;
    }
    free(e);
    return rc;
}

static int read_earlier(struct ht_ctl *c, uint64_t ino, uint64_t change, struct earlier **out)
{
    ssize_t n = ht_ns_getxattr(c->ns, ino, word, NULL, 0);
    struct earlier *e;

    if (n < 0 && n != -ENODATA)
        return (int)n;
    e = calloc(1, sizeof(*e) + (size_t)(n > 0 ? n : 0));
    if (!e)
        return -ENOMEM;
    e->by_ino.id = ino;
    e->change = change;
    e->none = n < 0;
    if (n > 0)
        n = ht_ns_getxattr(c->ns, ino, word, e->text, (size_t)n);
    if (n < 0 && !e->none) {
        free(e);
        return (int)n;
    }
    e->len = n > 0 ? (size_t)n : 0;
    *out = e;
    return 0;
}

static int refuse_more(const struct ht_ctl *c, char err[HT_OPTIM_ERROR_MAX])
{
    return ht_ctl_refuse(err, -EBUSY,
                         "the words of %zu files were changed in open steps: commit or abort the step first",
                         c->earlier_words.count);
}

/*
 * Numbers a change and keeps the earlier text, if an open step may need it and it is not kept yet. The number comes
 * first: a step that opens from then on knows the change. *out: the added text, or NULL.
 */
static int keep_earlier(struct ht_ctl *c, uint64_t root, uint64_t ino, struct earlier **out,
                        char err[HT_OPTIM_ERROR_MAX]) HT_REQUIRES(HT_LOCK_WORDS)
{
    uint64_t change = ht_optim_words_change(c->optim);

    *out = NULL;
    forget_old(c);
    if (ht_optim_words_as_of(c->optim, root) >= change)
        return 0;
    struct earlier *e = find_earlier(c, ino);
    if (e && e->of->root == root)
        return 0;
    if (e)
        forget_words(c, e); /* of the root that it was in before */
    if (c->earlier_words.count >= EARLIER_MAX)
        return refuse_more(c, err);
    int rc = read_earlier(c, ino, change, &e);
    if (rc == 0 && c->earlier_bytes + e->len > EARLIER_BYTES_MAX) {
        free(e);
        return refuse_more(c, err);
    }
    if (rc == 0)
        rc = keep(c, root, e);
    if (rc == 0)
        *out = e;
    return rc;
}

int ht_override_set(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *text, int flags,
                    char err[HT_OPTIM_ERROR_MAX])
{
    struct earlier *e;

    err[0] = 0;
    ht_rwlock_wrlock(ht_ctl_words_lock(c));
    int rc = keep_earlier(c, root, ino, &e, err);
    if (rc == 0) {
        rc = text ? ht_ns_setxattr(c->ns, ino, word, text, strlen(text), flags) : ht_ns_removexattr(c->ns, ino, word);
        if (rc && e)
            forget_words(c, e);
    }
    ht_rwlock_unlock(ht_ctl_words_lock(c));
    return rc;
}
