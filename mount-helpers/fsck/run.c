/* SPDX-License-Identifier: Apache-2.0 */
/* run.c - one run: all passes, repair, the sums. */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/space/claim.h"

static const struct pass {
    const char *name; /* NULL: it reports its progress itself */
    int (*run)(struct ht_fsck *f);
} passes[] = {
    {"superblocks", ht_fsck_pass_super}, {"log", ht_fsck_pass_log},         {"names", ht_fsck_pass_names},
    {"optimizer", ht_fsck_pass_optim},   {"references", ht_fsck_pass_refs}, {NULL, ht_fsck_pass_tensors},
};

static int run_watched(struct ht_fsck *f, const char *name, int (*run)(struct ht_fsck *f))
{
    ht_fsck_watch_begin(f, name, HT_FSCK_WATCH_MS);
    int rc = run(f);
    ht_fsck_watch_end(f);
    return rc;
}

static int run_pass(struct ht_fsck *f, const struct pass *p)
{
    if (p->name)
        return run_watched(f, p->name, p->run);
    return f->opt.no_data && !f->overlaps ? 0 : p->run(f);
}

/*
 * The passes have reported all problems that opening for repair meets. The next run finds those that cannot be repaired
 * now.
 */
static int repair(struct ht_fsck *f)
{
    int rc = f->blocked || f->planned == 0 ? 0 : run_watched(f, "repair", ht_fsck_repair);

    if (rc == 0 && !f->blocked)
        f->repaired += f->planned;
    return rc;
}

static int status_of(const struct ht_fsck *f)
{
    int status = f->problems > f->repaired ? HT_FSCK_LEFT : HT_FSCK_CLEAN;

    return status | (f->repaired != 0 ? HT_FSCK_CORRECTED : 0) | (f->failed ? HT_FSCK_FAILED : 0);
}

int ht_fsck_run(struct ht_fsck *f, const char *name)
{
    if (f->opt.json) {
        ht_json_object(&f->json, NULL);
        ht_json_array(&f->json, "problems");
    }
    int rc = f->failed ? -EIO : f->opt.mode != HT_FSCK_CHECK ? ht_claim_ask(f->devs, f->dev_count) : 0;
    for (unsigned i = 0; rc == 0 && i < HT_ARRAY_SIZE(passes); i++)
        rc = run_pass(f, &passes[i]);
    /* -EUCLEAN: the damage that ends the check was reported as a problem */
    f->failed |= rc < 0 && (rc != -EUCLEAN || f->problems == 0);
    if (f->opt.json && f->opt.mode == HT_FSCK_CHECK)
        ht_json_end(&f->json);
    if (f->opt.extents && rc == 0)
        ht_fsck_list_extents(f);
    rc = rc == 0 ? repair(f) : rc;
    f->failed |= rc < 0 && rc != -EUCLEAN;
    if (f->opt.json && f->opt.mode != HT_FSCK_CHECK) {
        ht_fsck_report_all(f, rc == 0 && !f->blocked);
        ht_json_end(&f->json);
    }
    int status = status_of(f);
    ht_fsck_summary(f, name, status);
    return status;
}

void ht_fsck_close(struct ht_fsck *f)
{
    ht_fsck_close_store(f);
    for (unsigned i = 0; i < f->dev_count; i++)
        ht_dev_close(f->devs[i]);
    free(f->items);
    free(f->frags);
    free(f->lose.list);
    free(f->orphans.list);
    free(f->strangers.list);
    free(f->forget.list);
    free(f->told_steps.list);
    free(f->cut_steps.list);
    free(f->unconfigured.list);
    free(f->cold_roots.list);
    ht_fsck_reported_free(f);
}
