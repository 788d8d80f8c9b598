/* SPDX-License-Identifier: Apache-2.0 */
/* kept.c - the commands of .hitrain/ctl that make and end kept steps. Each may WAIT. */
#include "fs/ctl/ctl_priv.h"

#include <stdio.h>
#include <stdlib.h>

/* ---------------------------------------------------------------- snapshot */

static int snapshot(struct ht_ctl *c, uint64_t root, const struct ht_command *cmd, struct ht_optim_steer *by,
                    char err[HT_CTL_ERROR_MAX])
{
    const char *name = cmd->name[0] ? cmd->name : NULL;

    if (name && ht_ns_kept_check_name(name)) {
        snprintf(err, HT_CTL_ERROR_MAX, "'%s' is no name for a kept step: digits alone are the number of a step", name);
        return -EINVAL;
    }
    return ht_optim_snapshot_by(c->optim, root, name, by);
}

/* ------------------------------------------------------------------ forget */

static int forget_all(struct ht_ctl *c, uint64_t root)
{
    struct ht_ns_kept *all = NULL;
    size_t count = 0;
    int rc = ht_ns_kept_list(c->ns, root, &all, &count);

    for (size_t n = 0; rc == 0 && n < count; n++)
        rc = ht_ns_kept_forget(c->ns, root, all[n].name);
    free(all);
    return rc;
}

static int forget(struct ht_ctl *c, uint64_t root, const struct ht_command *cmd, struct ht_optim_steer *by,
                  char err[HT_CTL_ERROR_MAX])
{
    struct ht_root_stat st;
    int rc = ht_optim_may_steer(c->optim, root, by);

    if (rc)
        return rc;
    if (ht_optim_root_stat(c->optim, root, &st) == 0 && st.open) {
        snprintf(err, HT_CTL_ERROR_MAX, "a step is open: commit or abort first");
        return -EBUSY;
    }
    rc = strcmp(cmd->name, "*") == 0 ? forget_all(c, root) : ht_ns_kept_forget(c->ns, root, cmd->name);
    if (rc == -ENOENT)
        snprintf(err, HT_CTL_ERROR_MAX, "there is no kept step '%s'", cmd->name);
    return rc;
}

/* --------------------------------------------------------------------- all */

bool ht_kept_is_command(const struct ht_command *cmd)
{
    return cmd->id == HT_COMMAND_SNAPSHOT || cmd->id == HT_COMMAND_FORGET;
}

int ht_kept_command(struct ht_ctl *c, uint64_t root, const struct ht_command *cmd, struct ht_optim_steer *by,
                    char err[HT_CTL_ERROR_MAX])
{
    int rc = cmd->id == HT_COMMAND_SNAPSHOT ? snapshot(c, root, cmd, by, err) : forget(c, root, cmd, by, err);

    if (by->why[0])
        snprintf(err, HT_CTL_ERROR_MAX, "%s", by->why);
    return rc;
}

/* ------------------------------------------------------------------- figures */

int ht_kept_lines(struct ht_ctl *c, uint64_t ino, struct ht_buf *out)
{
    struct ht_ns_kept *all = NULL;
    size_t count = 0, i = 0;
    uint64_t stored_bytes, own_bytes;
    int rc = ht_ns_kept_list(c->ns, 0, &all, &count);

    while (rc == 0 && i < count && all[i].ino != ino)
        i++;
    if (rc == 0 && i == count)
        rc = -ENODATA;
    if (rc == 0)
        rc = ht_store_scope_space(c->store, ino, &stored_bytes, &own_bytes);
    if (rc == 0)
        ht_buf_printf(out, "name=%s\nstep=%llu\ntime_ns=%lld\nstored_bytes=%llu\nown_bytes=%llu\n", all[i].name,
                      (unsigned long long)all[i].step, (long long)all[i].time_ns, (unsigned long long)stored_bytes,
                      (unsigned long long)own_bytes);
    free(all);
    return rc ? rc : out->err;
}
