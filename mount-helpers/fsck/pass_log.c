/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_log.c - both copies of the metadata log.
 *
 * The journal's own replay decides where each copy ends and whether that end is damage; a copy that is merely behind,
 * as a crash leaves it, is in order. Opening the store for repair writes the copy anew that is not.
 */
#include "mount-helpers/fsck/fsck.h"

#include <stdlib.h>

#include "mount-helpers/common/text.h"
#include "tiering/base/log.h"

static struct ht_dev *copy_device(const struct ht_fsck *f, unsigned copy)
{
    return f->member[ht_store_super(f->store)->log_device[copy]];
}

static uint64_t copy_place(const struct ht_fsck *f, unsigned copy, uint64_t pos)
{
    const struct ht_super *sb = ht_store_super(f->store);

    return sb->log_offset[copy] + pos % sb->log_bytes;
}

static void tell_damage(struct ht_fsck *f, unsigned copy)
{
    uint64_t pos = f->log.copy[copy].damage_pos, frame = f->log.copy[copy].last_seq + 1;
    int error = f->log.copy[copy].error;
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    w.device = ht_dev_name(copy_device(f, copy));
    w.copy = copy;
    w.position = pos;
    w.frame = frame;
    w.offset = copy_place(f, copy, pos);
    if (error != 0)
        ht_fsck_problem(f, HT_FSCK_LOG_READ, &w,
                        "%s: log copy %u cannot be read at position %llu (byte offset %llu), frame %llu: %s", w.device,
                        copy, (unsigned long long)pos, (unsigned long long)w.offset, (unsigned long long)frame,
                        strerror(-error));
    else
        ht_fsck_problem(f, HT_FSCK_LOG_FRAME, &w,
                        "%s: log copy %u is damaged at position %llu (byte offset %llu), frame %llu", w.device, copy,
                        (unsigned long long)pos, (unsigned long long)w.offset, (unsigned long long)frame);
}

static void tell_copies(struct ht_fsck *f)
{
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (f->log.copy[i].state == HT_LOG_DAMAGED || f->log.copy[i].error != 0)
            tell_damage(f, i);
}

/* ------------------------------------------------------------- no whole copy */

static int add_step(void *ctx, const struct ht_optim_entry *e)
{
    return e->parameter == 0 ? ht_fsck_note(ctx, e->root, 0) : 0;
}

/* "; model /m goes back to step 7": how far the models are by what is left of the log. */
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

static void tell_all_damaged(struct ht_fsck *f)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};
    unsigned long long last = f->log.copy[f->log.chosen].last_seq, known = f->log.known_seq;
    char models[1024];

    models_text(f, models, sizeof(models));
    w.by_hand = f->log.frames == 0;
    f->cut |= ht_fsck_problem(
        f, HT_FSCK_LOG_ALL, &w,
        "no copy of the log is whole: %llu %s up to number %llu of at least %llu can be read%s; what follows is what they say",
        (unsigned long long)f->log.frames, f->log.frames == 1 ? "frame" : "frames", last, known, models);
}

static void tell_diverged(struct ht_fsck *f)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    f->cut |= ht_fsck_problem(
        f, HT_FSCK_LOG_FORK, &w,
        "both copies of the log are whole and say different things: their devices were mounted apart. Copy %u is the newer one",
        f->log.chosen);
}

/* ---------------------------------------------------------------------- pass */

static void tell_left_out(struct ht_fsck *f)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    if (f->log.left_out == 0)
        return;
    w.frame = f->log.left_out_frame;
    ht_fsck_problem(
        f, HT_FSCK_LOG_RECORD, &w, "%llu %s no sense, the first in frame %llu; what follows is what the others say",
        (unsigned long long)f->log.left_out,
        f->log.left_out == 1 ? "record of the log makes" : "records of the log make", (unsigned long long)w.frame);
}

/* No program lets so much live in the log; a store like that cannot be mounted to be written. */
static void tell_full(struct ht_fsck *f)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};
    struct ht_store_stats st;

    ht_store_stats(f->store, &st);
    if (!st.log.too_full)
        return;
    w.bytes = st.log.claimed_bytes;
    ht_fsck_problem(f, HT_FSCK_LOG_FULL, &w, "the log cannot be compacted: what lives in it takes %s of its %s",
                    ht_size_text(st.log.claimed_bytes), ht_size_text(st.log.log_bytes));
}

/* By the longest copy, for want of a better one. */
static int open_by_force(struct ht_fsck *f)
{
    bool diverged = f->log.diverged;
    int ret;

    ht_fsck_close_store(f);
    f->mend = f->opt.mode == HT_FSCK_CHECK && f->mended != 0; /* what repairing modes have written by now */
    ret = ht_fsck_open_store(f, true, false);
    f->mend = false;
    if (ret < 0)
        return ret;
    if (diverged)
        tell_diverged(f);
    else
        tell_all_damaged(f);
    tell_copies(f);
    return 0;
}

/* Both copies are damaged: maybe each can be made whole by the other. With -n that is done in memory. */
static int open_mended(struct ht_fsck *f)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};
    int ret;

    ht_fsck_close_store(f);
    f->mend = true;
    ret = ht_fsck_open_store(f, false, false);
    f->mend = false;
    if (f->mended != 0) /* done: what is planned with it writes all of the log anew */
        (void)ht_fsck_problem(
            f, HT_FSCK_LOG_FRAME, &w,
            "both copies of the log are damaged, but not in the same places: %u %s whole in one of them", f->mended,
            f->mended == 1 ? "frame was" : "frames were");
    return ret;
}

int ht_fsck_pass_log(struct ht_fsck *f)
{
    int ret = ht_fsck_open_store(f, false, false);

    if (ret == -EUCLEAN && !f->log.diverged)
        ret = open_mended(f);
    if (f->store == NULL || f->optim == NULL)
        return ret; /* told */
    if (ret == -EUCLEAN)
        ret = open_by_force(f);
    else
        tell_copies(f);
    if (ret < 0)
        ht_error("%s: cannot replay the log: %s", ht_dev_name(f->devs[0]), strerror(-ret));
    else
        tell_left_out(f);
    if (ret == 0)
        tell_full(f);
    return ret == -EUCLEAN ? -EIO : ret;
}
