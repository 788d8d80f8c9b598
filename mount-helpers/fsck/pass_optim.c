/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_optim.c - model roots, parameters and optimizer state: problems that the optimizer found when it read the log,
 * and whether names and optimizer agree.
 *
 * The pass forgets contradictory state at once in memory, so that state without an owner is then found as such.
 */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/base/log.h"

typedef unsigned long long ull;

struct state {
    uint64_t oid, root, parameter;
};

struct optim_pass {
    struct ht_fsck *f;
    struct ht_fsck_notes roots, params; /* params: parameter, root */
    struct state *states;
    size_t state_count, state_cap;
};

static void report(void *ctx, const char *code, const char *text)
{
    (void)ht_fsck_problem_named(ctx, code, text);
}

static int note_states(struct optim_pass *p, const struct ht_optim_entry *e)
{
    int rc = ht_array_grow((void **)&p->states, &p->state_cap, p->state_count + e->state_count + 1, sizeof(*p->states));

    for (unsigned i = 0; rc == 0 && i < e->state_count; i++)
        p->states[p->state_count++] = (struct state){e->states[i], e->root, e->parameter};
    return rc;
}

static int note_entry(void *ctx, const struct ht_optim_entry *e)
{
    struct optim_pass *p = ctx;
    int rc = e->parameter == 0 ? ht_fsck_note(&p->roots, e->root, 0) : ht_fsck_note(&p->params, e->parameter, e->root);

    return rc == 0 ? note_states(p, e) : rc;
}

/* Logged steps of the model need its parameter. */
static int forget(struct ht_fsck *f, uint64_t root, uint64_t parameter)
{
    int rc = parameter != 0 ? ht_fsck_cut_steps_of(f, parameter) : 0;

    ht_optim_forget(f->optim, root, parameter);
    return rc == 0 ? ht_fsck_note(&f->forget, root, parameter) : rc;
}

/* ------------------------------------------------------------------ roots */

static bool is_root(struct ht_fsck *f, uint64_t ino)
{
    struct ht_ns_tensor t;

    return ht_ns_tensor(f->ns, ino, &t) == 0 && t.is_root;
}

static int check_root(struct ht_fsck *f, uint64_t root)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    if (is_root(f, root))
        return 0;
    w.object = root;
    ht_fsck_problem(f, HT_FSCK_OPT_ROOT, &w, "the optimizer has a model root %llu, which is no directory of that kind",
                    (ull)root);
    return forget(f, root, 0);
}

/* Could it be mounted? */
static int check_config(void *ctx, uint64_t root)
{
    struct ht_fsck *f = ctx;
    char text[HT_OPTIM_CONFIG_TEXT_MAX], err[HT_OPTIM_ERROR_MAX], path[HT_FSCK_PATH_MAX] = "/";
    struct ht_optim_config config;
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};
    ssize_t n = ht_ns_getxattr(f->ns, root, HT_XATTR_PREFIX "optimizer", text, sizeof(text));

    if (n >= 0 && ht_optim_config_parse(text, (size_t)n, &config, err) == 0)
        return 0;
    if (n < 0)
        snprintf(err, sizeof(err), "%s", n == -ENODATA ? "there is none" : strerror((int)-n));
    ht_ns_path(f->ns, root, path + 1, sizeof(path) - 1);
    w.object = root;
    w.path = path;
    if (!ht_fsck_problem(f, HT_FSCK_OPT_CONFIG, &w, "model root %s: its optimizer makes no sense: %s", path, err))
        return 0;
    return ht_fsck_note(&f->unconfigured, root, 0);
}

/* ------------------------------------------------------------- parameters */

/* A file of the root. One without a name is deleted by the next mount, and its parameter with it. */
static bool is_parameter(struct ht_fsck *f, uint64_t ino, uint64_t root)
{
    struct ht_ns_tensor t;
    struct stat st;

    if (ht_ns_getattr(f->ns, ino, &st) != 0 || ht_ns_tensor(f->ns, ino, &t) != 0 || !S_ISREG(st.st_mode))
        return false;
    return t.root == root || (st.st_nlink == 0 && !ht_ns_is_in_lost_found(f->ns, ino));
}

static int check_parameter(struct ht_fsck *f, uint64_t parameter, uint64_t root)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    if (!is_root(f, root) || is_parameter(f, parameter, root))
        return 0;
    w.object = parameter;
    ht_fsck_problem(f, HT_FSCK_OPT_PARAM, &w, "parameter %llu is no file of its model root %llu", (ull)parameter,
                    (ull)root);
    return forget(f, root, parameter);
}

/* ------------------------------------------------------------------ state */

static int by_oid(const void *a, const void *b)
{
    const struct state *x = a, *y = b;

    if (x->oid != y->oid)
        return x->oid < y->oid ? -1 : 1;
    return x->parameter < y->parameter ? -1 : x->parameter > y->parameter;
}

/* Each object is one thing only. */
static int check_state(struct ht_fsck *f, const struct state *s, bool again)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};
    struct stat st;

    if (!again && ht_ns_getattr(f->ns, s->oid, &st) != 0)
        return 0;
    w.object = s->oid;
    ht_fsck_problem(f, HT_FSCK_OPT_STATE, &w, "state of parameter %llu (object %llu) is also %s", (ull)s->parameter,
                    (ull)s->oid, again ? "state of another one" : "an inode");
    return forget(f, s->root, s->parameter);
}

static int check_states(struct optim_pass *p)
{
    int rc = 0;

    if (p->state_count > 1)
        qsort(p->states, p->state_count, sizeof(*p->states), by_oid);
    for (size_t i = 0; rc == 0 && i < p->state_count; i++)
        rc = check_state(p->f, &p->states[i], i > 0 && p->states[i - 1].oid == p->states[i].oid);
    return rc;
}

/* -------------------------------------------------------------------- pass */

static int check_all(struct optim_pass *p)
{
    int rc = ht_optim_walk(p->f->optim, note_entry, p);

    for (size_t i = 0; rc == 0 && i < p->roots.count; i++)
        rc = check_root(p->f, p->roots.list[i].id);
    for (size_t i = 0; rc == 0 && i < p->params.count; i++)
        rc = check_parameter(p->f, p->params.list[i].id, p->params.list[i].part);
    if (rc == 0)
        rc = check_states(p);
    if (rc == 0)
        rc = ht_fsck_check_logged(p->f);
    return rc == 0 ? ht_ns_roots(p->f->ns, check_config, p->f) : rc;
}

int ht_fsck_pass_optim(struct ht_fsck *f)
{
    struct optim_pass p = {.f = f};

    (void)ht_optim_check(f->optim, report, f);
    int rc = check_all(&p);
    if (rc < 0)
        ht_error("cannot check the optimizer: %s", strerror(-rc));
    free(p.roots.list);
    free(p.params.list);
    free(p.states);
    return rc;
}
