/* SPDX-License-Identifier: Apache-2.0 */
/* pass_names.c - directories, links and attributes, checked by the layer that keeps them. */
#include "mount-helpers/fsck/fsck.h"

struct counting {
    struct ht_fsck *f;
    size_t reported;
};

static void report(void *ctx, const char *code, const char *text)
{
    struct counting *c = ctx;

    c->reported++;
    (void)ht_fsck_problem_named(c->f, code, text); /* opening for repair takes out every such record */
}

int ht_fsck_pass_names(struct ht_fsck *f)
{
    struct counting c = {.f = f};
    size_t found = ht_ns_check(f->ns, report, &c);

    if (found <= c.reported)
        return 0;
    f->problems += found - c.reported;
    f->planned += f->opt.mode != HT_FSCK_CHECK && !f->blocked ? found - c.reported : 0;
    if (!f->opt.json)
        fprintf(f->out, "... and %zu more of names\n", found - c.reported);
    else
        f->unlisted += found - c.reported;
    return 0;
}
