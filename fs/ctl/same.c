/* SPDX-License-Identifier: Apache-2.0 */
/* same.c - which bytes two kept steps of a model have in common, by their places. */
#include "fs/ctl/hidden_priv.h"

#include <unistd.h>

/* Takes a lookup count: the number comes from a caller. *out_scope: the directory of its kept step. */
static int hold_file(struct ht_ctl *c, const struct ht_subject *s, const struct ht_caller *caller, uint64_t *out_scope)
{
    struct ht_ns_tensor t;
    struct stat st;
    int rc = ht_ns_lookup_ino(c->ns, s->file, false, &st);

    if (rc)
        return rc;
    if (!S_ISREG(st.st_mode) || !ht_ns_is_frozen(c->ns, s->file))
        rc = -EINVAL;
    if (rc == 0)
        rc = ht_ctl_access(c, s->file, R_OK, caller);
    if (rc == 0)
        rc = ht_ns_tensor(c->ns, s->file, &t);
    if (rc == 0)
        *out_scope = t.root;
    else
        ht_ns_forget(c->ns, s->file, 1);
    return rc;
}

static int same_files(struct ht_ctl *c, uint64_t a, uint64_t b, struct ht_ioctl_same *same)
{
    struct ht_obj *x, *y;
    int rc = ht_ns_open(c->ns, a, &x);

    if (rc)
        return rc;
    rc = ht_ns_open(c->ns, b, &y);
    if (rc == 0) {
        same->is_same = ht_obj_same(x, y, same->offset, &same->end);
        ht_ns_close(c->ns, b);
    }
    ht_ns_close(c->ns, a);
    return rc;
}

static int same_states(struct ht_ctl *c, const struct ht_subject *a, const struct ht_subject *b,
                       struct ht_ioctl_same *same)
{
    struct ht_param_desc x, y;
    const char *name, *other;
    int rc = ht_ctl_describe(c, a->file, &x);

    if (rc)
        return rc;
    rc = ht_ctl_describe(c, b->file, &y);
    if (rc == 0) {
        if (ht_optim_state_name(c->optim, &x, a->index, &name) || ht_optim_state_name(c->optim, &y, b->index, &other) ||
            strcmp(name, other) != 0)
            rc = -EINVAL;
        else
            same->is_same = ht_optim_state_same(c->optim, &x, &y, name, same->offset, &same->end);
        ht_ns_close(c->ns, b->file);
    }
    ht_ns_close(c->ns, a->file);
    return rc;
}

/* Are both directories those of kept steps of one model? */
static int check_scopes(struct ht_ctl *c, uint64_t a, uint64_t b)
{
    struct ht_ns_kept *all = NULL;
    uint64_t root[2] = {0, 0};
    size_t count = 0;
    int rc = ht_ns_kept_list(c->ns, 0, &all, &count);

    for (size_t i = 0; rc == 0 && i < count; i++) {
        if (all[i].ino == a)
            root[0] = all[i].root;
        if (all[i].ino == b)
            root[1] = all[i].root;
    }
    free(all);
    return rc == 0 && (!root[0] || root[0] != root[1]) ? -EINVAL : rc;
}

int ht_kept_same(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, struct ht_ioctl_same *same)
{
    struct ht_subject a, b;
    uint64_t scope[2];

    same->is_same = 0;
    if (!ht_hidden_subject(ino, &a) || !ht_hidden_subject(same->other, &b) || a.is_state != b.is_state ||
        same->offset > HT_FILE_BYTES_MAX)
        return -EINVAL;
    int rc = hold_file(c, &a, caller, &scope[0]);
    if (rc)
        return rc;
    rc = hold_file(c, &b, caller, &scope[1]);
    if (rc == 0) {
        rc = check_scopes(c, scope[0], scope[1]);
        if (rc == 0)
            rc = a.is_state ? same_states(c, &a, &b, same) : same_files(c, a.file, b.file, same);
        ht_ns_forget(c->ns, b.file, 1);
    }
    ht_ns_forget(c->ns, a.file, 1);
    return rc;
}
