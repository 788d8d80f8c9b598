/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_log.c - opens the store as the daemon does, but without threads, leaves out senseless records, and checks both
 * copies of the metadata log.
 *
 * The journal's own replay decides where each copy ends and whether that end is damage; a copy that is merely older, as
 * a crash leaves it, is in order. Opening the store for repair writes a bad copy anew.
 */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/api/check.h"
#include "tiering/api/stats.h"

/* The least the store takes: fsck reads chunks past it. */
#define DRAM_BYTES (8 * HT_MIB)
#define STAGING_BYTES (24 * HT_MIB)

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

/* ------------------------------------------------------------------- report */

static void report_damage(struct ht_fsck *f, unsigned copy)
{
    const struct ht_super *sb = ht_store_super(f->store);
    uint64_t pos = f->log.copy[copy].end_pos, frame = f->log.copy[copy].last_seq + 1;
    uint64_t offset = sb->log_offset[copy] + pos % sb->log_bytes;
    int error = f->log.copy[copy].error;
    const struct ht_fsck_where w = {.device = ht_dev_name(f->member[sb->log_device[copy]]),
                                    .copy = HT_FSCK_AT(copy),
                                    .position = HT_FSCK_AT(pos),
                                    .frame = HT_FSCK_AT(frame),
                                    .offset = HT_FSCK_AT(offset)};

    ht_fsck_problem(f, error ? HT_FSCK_LOG_READ : HT_FSCK_LOG_FRAME, &w,
                    "%s: log copy %u %s at position %llu (byte offset %llu), frame %llu%s%s", w.device, copy,
                    error ? "cannot be read" : "is damaged", (unsigned long long)pos, (unsigned long long)offset,
                    (unsigned long long)frame, error ? ": " : "", error ? strerror(-error) : "");
}

static void report_copies(struct ht_fsck *f)
{
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (f->log.copy[i].state == HT_LOG_DAMAGED || f->log.copy[i].error != 0)
            report_damage(f, i);
}

/* ------------------------------------------------------------- no whole copy */

static int add_step(void *ctx, const struct ht_optim_entry *e)
{
    return e->parameter == 0 ? ht_fsck_note(ctx, e->root, 0) : 0;
}

/* "; model /m goes back to step 7": the steps of the models in the rest of the log. */
static void models_text(struct ht_fsck *f, char *buf, size_t cap)
{
    struct ht_fsck_notes roots = {0};
    char path[256];
    size_t used = 0;

    buf[0] = '\0';
    if (ht_optim_walk(f->optim, add_step, &roots) != 0)
        roots.count = 0;
    for (size_t i = 0; i < roots.count && used < cap; i++) {
        struct ht_root_stat st;
        if (ht_optim_root_stat(f->optim, roots.list[i].id, &st) != 0)
            continue;
        ht_ns_path(f->ns, roots.list[i].id, path, sizeof(path));
        used += (size_t)snprintf(buf + used, cap - used, "; model /%s is at step %llu there", path,
                                 (unsigned long long)st.durable_step);
    }
    free(roots.list);
}

static void report_all_damaged(struct ht_fsck *f)
{
    const struct ht_fsck_where w = {.by_hand = f->log.frames == 0};
    unsigned long long last = f->log.copy[f->log.chosen].last_seq, known = f->log.known_seq;
    char models[1024];

    models_text(f, models, sizeof(models));
    f->cut |= ht_fsck_problem(
        f, HT_FSCK_LOG_ALL, &w,
        "no copy of the log is whole: %llu %s up to number %llu of at least %llu can be read%s; what follows is what they say",
        (unsigned long long)f->log.frames, f->log.frames == 1 ? "frame" : "frames", last, known, models);
}

/* ---------------------------------------------------------------------- pass */

static void report_left_out(struct ht_fsck *f)
{
    const struct ht_fsck_where w = {.frame = HT_FSCK_AT(f->log.left_out_frame)};

    if (f->log.left_out == 0)
        return;
    ht_fsck_problem(f, HT_FSCK_LOG_RECORD, &w,
                    "%llu %s no sense, the first in frame %llu; what follows is what the others say",
                    (unsigned long long)f->log.left_out,
                    f->log.left_out == 1 ? "record of the log makes" : "records of the log make",
                    (unsigned long long)f->log.left_out_frame);
}

/* They go before all other problems of the log, because nothing is repaired then. */
static void report_unknown(struct ht_fsck *f)
{
    struct ht_unknown_records u = ht_store_unknown_records(f->store);

    if (u.count)
        ht_fsck_problem(f, HT_FSCK_LOG_TYPE, NULL, "%llu %s of a type that this version does not know (the first: %u)",
                        (unsigned long long)u.count, u.count == 1 ? "record of the log is" : "records of the log are",
                        u.type);
}

/* No program keeps so much live metadata in the log; such a store cannot be mounted for writing. */
static void report_full(struct ht_fsck *f)
{
    struct ht_store_stats st;

    ht_store_stats(f->store, &st);
    if (!st.log.too_full)
        return;
    const struct ht_fsck_where w = {.bytes = HT_FSCK_AT(st.log.reserved_bytes)};
    ht_fsck_problem(f, HT_FSCK_LOG_FULL, &w,
                    "the log has no room for a checkpoint: what lives in it takes %s of its %s",
                    ht_size_text(st.log.reserved_bytes), ht_size_text(st.log.log_bytes));
}

/* No other pass has anything to look at then. */
static int report_memory(struct ht_fsck *f)
{
    ht_fsck_problem(f, HT_FSCK_LOG_MEMORY, NULL,
                    "what the records of the log describe needs more memory than a log of %s may take",
                    ht_size_text(f->super.log_bytes));
    return -EUCLEAN;
}

/* Uses the longest copy, as there is no better one. */
static int open_by_force(struct ht_fsck *f)
{
    bool diverged = f->log.diverged;

    ht_fsck_close_store(f);
    /* Other modes have written by now. */
    f->cross_repair = (f->opt.mode == HT_FSCK_CHECK || f->newer) && f->cross_repaired != 0;
    int rc = ht_fsck_open_store(f, true, false);
    f->cross_repair = false;
    if (rc < 0)
        return rc;
    report_unknown(f);
    if (diverged) {
        f->cut |= ht_fsck_problem(
            f, HT_FSCK_LOG_FORK, NULL,
            "both copies of the log are whole and say different things: their devices were mounted apart. Copy %u is the newer one",
            f->log.chosen);
    } else
        report_all_damaged(f);
    report_copies(f);
    return 0;
}

/* Both copies are damaged: perhaps each can repair the other. With -n that is done in memory. */
static int open_cross_repaired(struct ht_fsck *f)
{
    ht_fsck_close_store(f);
    f->cross_repair = true;
    int rc = ht_fsck_open_store(f, false, false);
    f->cross_repair = false;
    if (f->cross_repaired != 0) /* repaired already: the planned repair writes the whole log anew */
        (void)ht_fsck_problem(f, HT_FSCK_LOG_FRAME, NULL,
                              "both copies of the log are damaged, but not in the same places: %u %s whole in one copy",
                              f->cross_repaired, f->cross_repaired == 1 ? "frame was" : "frames were");
    return rc;
}

int ht_fsck_pass_log(struct ht_fsck *f)
{
    int rc = ht_fsck_open_store(f, false, false);

    if (rc == -EUCLEAN && !f->log.diverged)
        rc = open_cross_repaired(f);
    if (!f->store || !f->optim)
        return rc; /* reported already */
    if (rc == -EUCLEAN) {
        rc = open_by_force(f);
    } else {
        report_unknown(f);
        report_copies(f);
    }
    if (rc == -EOVERFLOW)
        return report_memory(f);
    if (rc < 0)
        ht_error("%s: cannot replay the log: %s", ht_dev_name(f->devs[0]), strerror(-rc));
    else
        report_left_out(f);
    if (rc == 0)
        report_full(f);
    return rc == -EUCLEAN ? -EIO : rc;
}
