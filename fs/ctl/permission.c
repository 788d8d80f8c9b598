/* SPDX-License-Identifier: Apache-2.0 */
/*
 * permission.c - permissions beyond those that the kernel checks by the mode of the file. The table for users is in
 * hitrain(7), PERMISSIONS; each of its rows has a test (tests/mount/test_permissions.py).
 *
 * A model root takes everything below it into its steps: a user who may steer it decides which changes are kept. So
 * only the owner may make and end a root, and it may not take in files of other users.
 *
 * Commands run with the credentials of the process that opened .hitrain/ctl. A privileged program that writes to a
 * descriptor it inherited does not lend its rights to the opener.
 */
#include "fs/ctl/ctl_priv.h"

#include <unistd.h>

enum { GROUPS_MAX = 1024 };

/* ------------------------------------------------------------- credentials */

int ht_person_init(struct ht_person *p, const struct ht_caller *caller)
{
    uint32_t gids[GROUPS_MAX];
    size_t count = caller->groups ? ht_min_u64(caller->groups(caller->ctx, gids, GROUPS_MAX), GROUPS_MAX) : 0;

    *p = (struct ht_person){.cred = caller->cred};
    if (!count)
        return 0;
    p->gids = malloc(count * sizeof(*p->gids));
    if (!p->gids)
        return -ENOMEM;
    memcpy(p->gids, gids, count * sizeof(*p->gids));
    p->gid_count = count;
    return 0;
}

void ht_person_free(struct ht_person *p)
{
    free(p->gids);
}

static size_t groups_of(void *ctx, uint32_t *gids, size_t cap)
{
    const struct ht_person *p = ctx;
    size_t count = ht_min_u64(p->gid_count, cap);

    if (count)
        memcpy(gids, p->gids, count * sizeof(*gids));
    return count;
}

struct ht_caller ht_person_caller(struct ht_person *p)
{
    return (struct ht_caller){.cred = p->cred, .groups = groups_of, .ctx = p};
}

/* ---------------------------------------------------------------- verdicts */

int ht_ctl_access(struct ht_ctl *c, uint64_t ino, int mask, const struct ht_caller *caller)
{
    uint32_t gids[GROUPS_MAX];

    if (ht_ns_access(c->ns, ino, mask, caller->cred, NULL, 0) == 0)
        return 0;
    if (!caller->groups)
        return -EACCES;
    size_t count = caller->groups(caller->ctx, gids, GROUPS_MAX);
    return ht_ns_access(c->ns, ino, mask, caller->cred, gids, ht_min_u64(count, GROUPS_MAX));
}

static bool is_owner(const struct stat *st, const struct ht_caller *caller)
{
    return caller->cred.uid == 0 || caller->cred.uid == st->st_uid;
}

int ht_ctl_owner(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller)
{
    struct stat st;
    int rc = ht_ns_getattr(c->ns, ino, &st);

    return rc ? rc : is_owner(&st, caller) ? 0 : -EPERM;
}

int ht_ctl_may_steer(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller)
{
    struct stat st;
    int rc = ht_ns_getattr(c->ns, root, &st);

    if (rc == 0)
        rc = ht_ctl_access(c, root, W_OK, caller);
    if (rc)
        return rc;
    return (st.st_mode & S_ISVTX) && !is_owner(&st, caller) ? -EACCES : 0;
}

int ht_ctl_may_set_words(struct ht_ctl *c, uint64_t root, uint64_t ino, const char *kind,
                         const struct ht_caller *caller)
{
    char why[HT_OPTIM_ERROR_MAX];
    int pid;

    if (!root || !ht_optim_claimed(c->optim, root, &pid, why) ||
        pid == (caller->process ? caller->process(caller->ctx) : 0))
        return 0;
    ht_last_error_set_below(c, ino, kind, "%s: %s, which alone changes it until the claim ends", kind, why);
    return -EBUSY;
}

bool ht_ctl_may_find(struct ht_ctl *c, uint64_t dir, const struct ht_caller *caller)
{
    uint64_t up;

    for (; dir != HT_NS_ROOT_INO; dir = up) {
        up = ht_ns_parent(c->ns, dir);
        if (!up || ht_ctl_access(c, up, R_OK | X_OK, caller))
            return false;
    }
    return true;
}

/* ------------------------------------------------------------------- paths */

/*
 * Looks up a step of a path as the kernel does: first whether it is a directory, then the right to search it. Names in
 * one that the caller may not search are as unknown as absent ones.
 */
static int look_up(struct ht_ctl *c, uint64_t dir, const char *name, const struct ht_caller *caller,
                   struct stat *out_st)
{
    struct stat st;
    int rc = ht_ns_getattr(c->ns, dir, &st);

    if (rc == 0)
        rc = S_ISDIR(st.st_mode) ? ht_ctl_access(c, dir, X_OK, caller) : -ENOTDIR;
    return rc ? rc : ht_ns_lookup(c->ns, dir, name, out_st);
}

int ht_ctl_resolve(struct ht_ctl *c, uint64_t dir, const char *path, size_t len, const struct ht_caller *caller,
                   uint64_t *out_ino)
{
    size_t left = len;
    char name[HT_NAME_BYTES_MAX + 1];
    uint64_t at = dir;
    int rc;

    if (left && *path == '/')
        return -EINVAL;
    while ((rc = ht_parse_component(&path, &left, name)) > 0) {
        struct stat st;
        int found = look_up(c, at, name, caller, &st);
        if (at != dir)
            ht_ns_forget(c->ns, at, 1);
        if (found)
            return found;
        at = st.st_ino;
    }
    if (rc == 0 && at == dir)
        rc = -EINVAL;
    if (rc && at != dir)
        ht_ns_forget(c->ns, at, 1);
    if (rc == 0)
        *out_ino = at;
    return rc;
}
