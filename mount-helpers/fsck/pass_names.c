/* SPDX-License-Identifier: Apache-2.0 */
/* pass_names.c - directories, links and attributes, checked by the layer that keeps them. */
#include "mount-helpers/fsck/fsck.h"

static void tell(void *ctx, const char *code, const char *text)
{
    ht_fsck_name_problem(ctx, code, text);
}

int ht_fsck_pass_names(struct ht_fsck *f)
{
    (void)ht_ns_check(f->ns, tell, f); /* each was counted when it was told */
    return 0;
}
