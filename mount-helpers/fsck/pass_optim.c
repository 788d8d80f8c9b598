/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_optim.c - names, model roots, parameters and optimizer state: problems that these layers found when they read
 * the log, and whether names and optimizer agree.
 *
 * The pass forgets contradictory state at once in memory, so that state without an owner is then found as such.
 *
 * Logged steps are those that the next mount computes again from gradients. A step that cannot be computed again closes
 * the model for changes at every mount. So whatever takes away something that a step needs cuts the step, and those
 * after it, in the same run.
 */
#include "mount-helpers/fsck/fsck.h"

typedef unsigned long long ull;

/* ------------------------------------------------------------- pass: names */

struct report {
    struct ht_fsck *f;
    size_t count;
};

static void report(void *ctx, const char *code, const char *text)
{
    struct report *r = ctx;

    r->count++;
    (void)ht_fsck_problem_named(r->f, code, text); /* opening for repair takes out every such record of names */
}

int ht_fsck_pass_names(struct ht_fsck *f)
{
    struct report r = {.f = f};
    size_t found = ht_ns_check(f->ns, report, &r), more = found > r.count ? found - r.count : 0;

    f->problems += more;
    f->planned += f->opt.mode != HT_FSCK_CHECK && !f->blocked ? more : 0;
    if (f->opt.json)
        f->unlisted += more;
    else if (more != 0)
        fprintf(f->out, "... and %zu more of names\n", more);
    return 0;
}

/* ------------------------------------------------------------ logged steps */

static bool is_noted(const struct ht_fsck_notes *n, uint64_t root, uint64_t step)
{
    for (size_t i = 0; i < n->count; i++)
        if (n->list[i].id == root && n->list[i].part <= step)
            return true;
    return false;
}

/* Reports that a step cannot be computed again, unless an earlier one of its model cannot, and notes the repair. */
static int cut_steps(void *ctx, uint64_t root, uint64_t step, const char *why)
{
    struct ht_fsck *f = ctx;
    char path[HT_FSCK_PATH_MAX] = "/";
    const struct ht_fsck_where w = {.object = HT_FSCK_AT(root), .path = path};

    if (is_noted(&f->told_steps, root, step))
        return 0;
    int rc = ht_fsck_note(&f->told_steps, root, step);
    if (rc != 0)
        return rc;
    ht_ns_path(f->ns, root, path + 1, sizeof(path) - 1);
    if (!ht_fsck_problem(f, HT_FSCK_OPT_REDO, &w, "step %llu of model %s cannot be computed again: %s", (ull)step, path,
                         why))
        return 0;
    return ht_fsck_note(&f->cut_steps, root, step);
}

/* The same for the steps that need this object, if any do: it loses a chunk, or is forgotten. */
static int cut_steps_of(struct ht_fsck *f, uint64_t oid)
{
    uint64_t root, step;
    int rc = ht_optim_redo_owner(f->optim, oid, &root, &step);

    if (rc == 0)
        return cut_steps(f, root, step, "a part of its gradients is lost");
    rc = ht_optim_redo_needs(f->optim, oid, &root, &step);
    if (rc == 0)
        return cut_steps(f, root, step, "a part of a parameter, or of its state, is lost");
    return rc == -ENOENT ? 0 : rc;
}

int ht_fsck_lose(struct ht_fsck *f, uint64_t oid, uint64_t index, bool repair)
{
    int rc = repair ? ht_fsck_note(&f->lose, oid, index) : 0;

    return rc == 0 ? cut_steps_of(f, oid) : rc;
}

bool ht_fsck_is_gradients(struct ht_fsck *f, uint64_t oid)
{
    const char *state;
    uint64_t parameter;
    struct stat st;

    return ht_ns_getattr(f->ns, oid, &st) != 0 && ht_optim_state_owner(f->optim, oid, &parameter, &state) != 0;
}

static bool is_other(void *ctx, uint64_t oid)
{
    return !ht_fsck_is_gradients(ctx, oid);
}

/* Programs that do not know a bit of feat_refuse must not open the store: see tiering/txn/tx.c. */
static void check_mark(struct ht_fsck *f, uint64_t bit, uint64_t count, const char *what, const char *after)
{
    if (count && !(ht_store_super(f->store)->feat_refuse & bit) &&
        ht_fsck_problem(f, HT_FSCK_OPT_FEATURE, NULL, "there %s %llu %s%s, and the superblock does not say so",
                        count == 1 ? "is" : "are", (ull)count, ht_plural(count, what), after))
        f->unmarked |= bit;
}

static int check_kept_mark(struct ht_fsck *f)
{
    struct ht_ns_kept *list;
    size_t count;
    int rc = ht_ns_kept_list(f->ns, 0, &list, &count);

    if (rc < 0)
        return rc;
    free(list);
    check_mark(f, HT_FEAT_REFUSE_KEPT, count, "kept step", "");
    return 0;
}

/* Reports steps that a mount would refuse to compute again. */
static int check_logged(struct ht_fsck *f)
{
    struct ht_optim_redo_check check = {.is_other = is_other, .report = cut_steps, .ctx = f};
    int rc = ht_optim_redo_check(f->optim, &check);

    if (rc == 0) {
        check_mark(f, HT_FEAT_REFUSE_REDO, check.steps, "logged step", "");
        check_mark(f, HT_FEAT_REFUSE_SPARSE, check.coded, "logged step", " with sparse gradients");
        check_mark(f, HT_FEAT_REFUSE_SECTIONS, check.sections, "logged step", " with numbers for ranges of elements");
        check_mark(f, HT_FEAT_REFUSE_TWO_PHASE, check.ortho, "logged step", " in two phases");
        f->replay_lacks_bytes = ht_optim_redo_lacks(f->optim);
        check_mark(f, HT_FEAT_REFUSE_FORMS, ht_optim_formed(f->optim), "parameter", " with state in 16 or 8 bits");
        rc = check_kept_mark(f);
    }
    return rc;
}

/* --------------------------------------------------------- pass: optimizer */

struct state {
    uint64_t oid, root, parameter;
};

struct optim_pass {
    struct ht_fsck *f;
    struct ht_fsck_notes roots, params; /* params: parameter, root */
    struct state *states;
    size_t state_count, state_cap;
};

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
    int rc = parameter != 0 ? cut_steps_of(f, parameter) : 0;

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
    const struct ht_fsck_where w = {.object = HT_FSCK_AT(root)};

    if (is_root(f, root))
        return 0;
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
    const struct ht_fsck_where w = {.object = HT_FSCK_AT(root), .path = path};
    ssize_t n = ht_ns_getxattr(f->ns, root, HT_XATTR_PREFIX "optimizer", text, sizeof(text));

    if (n >= 0 && ht_optim_config_parse(text, (size_t)n, &config, err) == 0)
        return 0;
    if (n < 0)
        snprintf(err, sizeof(err), "%s", n == -ENODATA ? "there is none" : strerror((int)-n));
    ht_ns_path(f->ns, root, path + 1, sizeof(path) - 1);
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
    const struct ht_fsck_where w = {.object = HT_FSCK_AT(parameter)};

    if (!is_root(f, root) || is_parameter(f, parameter, root))
        return 0;
    ht_fsck_problem(f, HT_FSCK_OPT_PARAM, &w, "parameter %llu is no file of its model root %llu", (ull)parameter,
                    (ull)root);
    return forget(f, root, parameter);
}

/* ------------------------------------------------------------------ state */

static int by_oid(const void *a, const void *b)
{
    const struct state *x = a, *y = b;

    return ht_fsck_order(x->oid, y->oid, ht_fsck_order(x->parameter, y->parameter, 0));
}

/* Each object is one thing only. */
static int check_state(struct ht_fsck *f, const struct state *s, bool again)
{
    const struct ht_fsck_where w = {.object = HT_FSCK_AT(s->oid)};
    struct stat st;

    if (!again && ht_ns_getattr(f->ns, s->oid, &st) != 0)
        return 0;
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
        rc = check_logged(p->f);
    return rc == 0 ? ht_ns_roots(p->f->ns, check_config, p->f) : rc;
}

int ht_fsck_pass_optim(struct ht_fsck *f)
{
    struct optim_pass p = {.f = f};
    struct report r = {.f = f};

    (void)ht_optim_check(f->optim, report, &r);
    int rc = check_all(&p);
    if (rc < 0)
        ht_error("cannot check the optimizer: %s", strerror(-rc));
    free(p.roots.list);
    free(p.params.list);
    free(p.states);
    return rc;
}
