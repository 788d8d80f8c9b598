/* SPDX-License-Identifier: Apache-2.0 */
/* session.c - opens devices and store as the daemon does, but without threads, and leaves out senseless records. */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/base/log.h"

/* The least the store takes: fsck reads chunks past it. */
#define DRAM_BYTES (8 * HT_MIB)
#define STAGING_BYTES (24 * HT_MIB)

int ht_fsck_open_devices(struct ht_fsck *f, char *const paths[], unsigned count)
{
    int flags = (f->opt.mode == HT_FSCK_CHECK ? HT_DEV_RDONLY : 0) | (f->opt.no_wait ? HT_DEV_NOWAIT : 0);

    while (f->dev_count < count) {
        const char *path = paths[f->dev_count];
        int rc = ht_dev_open(path, flags, &f->devs[f->dev_count]);
        if (rc == -EBUSY)
            ht_error("%s: nothing was checked", path);
        if (rc < 0)
            return rc; /* its holder, and other errors, were reported */
        f->dev_count++;
    }
    return 0;
}

static void name_parameter(void *ctx, uint64_t oid, char *buf, size_t cap)
{
    struct ht_fsck *f = ctx;

    ht_ns_path(f->ns, oid, buf, cap);
}

int ht_fsck_open_store(struct ht_fsck *f, bool force, bool repair)
{
    struct ht_store_opts opts = {
        .dram_bytes = DRAM_BYTES,
        .staging_bytes = STAGING_BYTES,
        .read_only = !repair,
        .force_damaged_log = force,
        .leave_out = true,
        .degraded = f->opt.degraded,
        .repair = repair,
        .numa_node = HT_NUMA_OFF,
        .no_threads = true,
    };
    const struct ht_optim_hooks hooks = {.ctx = f, .name = name_parameter}; /* nothing else happens without workers */
    const struct ht_ns_hooks ns_hooks = {.ctx = f};                         /* nothing is deleted */
    const struct ht_ns_setup ns = {.hooks = &ns_hooks};
    const struct ht_optim_setup optim = {.threads = 1, .hooks = &hooks};
    const struct ht_participants_setup setup = {{[HT_PARTICIPANT_NS] = &ns, [HT_PARTICIPANT_OPT] = &optim}};
    int rc = ht_store_new(f->devs, f->dev_count, &opts, &f->store);

    if (rc == 0)
        rc = ht_participants_new(f->store, &setup, &f->participants);
    f->ns = f->participants.of[HT_PARTICIPANT_NS];
    f->optim = f->participants.of[HT_PARTICIPANT_OPT];
    if (rc < 0) {
        ht_error("%s: cannot open the store: %s%s", ht_dev_name(f->devs[0]), strerror(-rc),
                 rc == -ENODEV ? "; name all devices of the store, or check the present ones with --degraded" : "");
        return rc == -EUCLEAN ? -EIO : rc; /* pass 1 found its superblocks in order */
    }
    if (f->cross_repair)
        rc = f->opt.mode == HT_FSCK_CHECK || f->newer ? ht_store_cross_repair_log_aside(f->store, &f->cross_repaired)
                                                      : ht_store_cross_repair_log(f->store, &f->cross_repaired);
    if (rc == 0)
        rc = ht_store_mount(f->store);
    if (repair)
        return rc;
    f->log = *ht_store_log_report(f->store);
    f->super = *ht_store_super(f->store);
    f->log_known = true;
    return rc;
}

void ht_fsck_close_store(struct ht_fsck *f)
{
    ht_participants_free(&f->participants);
    if (f->store)
        ht_store_close(f->store);
    f->optim = NULL;
    f->ns = NULL;
    f->store = NULL;
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
