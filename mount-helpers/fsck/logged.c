/* SPDX-License-Identifier: Apache-2.0 */
/*
 * logged.c - logged steps of models: steps that the next mount computes again from gradients.
 *
 * A step that cannot be computed again closes the model for changes at every mount. So whatever takes away something
 * that a step needs cuts the step, and those after it, in the same run.
 */
#include "mount-helpers/fsck/fsck.h"

#include "mount-helpers/common/text.h"

typedef unsigned long long ull;

static bool is_noted(const struct ht_fsck_notes *n, uint64_t root, uint64_t step)
{
    for (size_t i = 0; i < n->count; i++)
        if (n->list[i].id == root && n->list[i].part <= step)
            return true;
    return false;
}

/* Reports that a step cannot be computed again, unless an earlier one of its model cannot, and notes the repair. */
static int cut_steps(struct ht_fsck *f, uint64_t root, uint64_t step, const char *why)
{
    char path[HT_FSCK_PATH_MAX] = "/";
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    if (is_noted(&f->told_steps, root, step))
        return 0;
    int rc = ht_fsck_note(&f->told_steps, root, step);
    if (rc != 0)
        return rc;
    ht_ns_path(f->ns, root, path + 1, sizeof(path) - 1);
    w.object = root;
    w.path = path;
    if (!ht_fsck_problem(f, HT_FSCK_OPT_REDO, &w, "step %llu of model %s cannot be computed again: %s", (ull)step, path,
                         why))
        return 0;
    return ht_fsck_note(&f->cut_steps, root, step);
}

int ht_fsck_cut_steps_of(struct ht_fsck *f, uint64_t oid)
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

    return rc == 0 ? ht_fsck_cut_steps_of(f, oid) : rc;
}

/* ------------------------------------------------------------------ check */

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

static int report(void *ctx, uint64_t root, uint64_t step, const char *why)
{
    return cut_steps(ctx, root, step, why);
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

int ht_fsck_check_logged(struct ht_fsck *f)
{
    struct ht_optim_redo_check check = {.is_other = is_other, .report = report, .ctx = f};
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
