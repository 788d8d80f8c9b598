/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_log.c - both copies of the metadata log.
 *
 * The journal's own replay decides where each copy ends and whether that end is damage; a copy that is merely behind,
 * as a crash leaves it, is in order. What the chain of checksums does not cover, the padding behind each frame, is
 * compared between the copies.
 */
#include "mount-helpers/fsck/fsck.h"

#include <stdlib.h>

#include "tiering/base/log.h"

#define COMPARE_BYTES HT_MIB

static struct ht_dev *copy_device(const struct ht_fsck *f, unsigned copy)
{
    return f->devs[ht_store_super(f->store)->log_device[copy]];
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

static bool tell_copies(struct ht_fsck *f)
{
    bool any_whole = false;

    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        if (f->log.copy[i].state == HT_LOG_DAMAGED || f->log.copy[i].error != 0)
            tell_damage(f, i);
        else
            any_whole |= f->log.copy[i].state == HT_LOG_ENDED;
    }
    return any_whole;
}

/* ------------------------------------------------------ bytes between frames */

static void tell_difference(struct ht_fsck *f, unsigned copy, uint64_t pos)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    w.device = ht_dev_name(copy_device(f, copy));
    w.copy = copy;
    w.position = pos;
    w.offset = copy_place(f, copy, pos);
    ht_fsck_problem(
        f, HT_FSCK_LOG_DIFFER, &w,
        "%s: log copy %u differs from copy %u at position %llu (byte offset %llu), outside any frame's checksum",
        w.device, copy, f->log.chosen, (unsigned long long)pos, (unsigned long long)w.offset);
}

static int compare_piece(struct ht_fsck *f, uint64_t pos, size_t len, uint8_t *a, uint8_t *b)
{
    unsigned other = 1 - f->log.chosen;
    int ret = ht_dev_read(copy_device(f, f->log.chosen), copy_place(f, f->log.chosen, pos), a, len);

    if (ret == 0)
        ret = ht_dev_read(copy_device(f, other), copy_place(f, other, pos), b, len);
    if (ret < 0) {
        ht_error("log: cannot compare its copies at position %llu: %s", (unsigned long long)pos, strerror(-ret));
        return ret;
    }
    for (size_t i = 0; i < len; i++) {
        if (a[i] != b[i]) {
            tell_difference(f, other, pos + i);
            return 1;
        }
    }
    return 0;
}

/* The part of the log that both copies hold, read side by side; the first difference is enough. */
static int compare_copies(struct ht_fsck *f)
{
    const struct ht_super *sb = ht_store_super(f->store);
    uint64_t end = ht_min_u64(f->log.copy[0].end_pos, f->log.copy[1].end_pos);
    void *a = NULL, *b = NULL;
    int ret = 0;

    static_assert(HT_LOG_COPIES == 2, "compares one copy with the other");
    if (posix_memalign(&a, HT_BLOCK_BYTES, COMPARE_BYTES) != 0 ||
        posix_memalign(&b, HT_BLOCK_BYTES, COMPARE_BYTES) != 0)
        ret = -ENOMEM;
    for (uint64_t pos = sb->start_pos; ret == 0 && pos < end;) {
        uint64_t to_wrap = sb->log_bytes - pos % sb->log_bytes;
        size_t len = (size_t)ht_min_u64(ht_min_u64(COMPARE_BYTES, to_wrap), end - pos);

        ret = compare_piece(f, pos, len, a, b);
        pos += len;
    }
    free(a);
    free(b);
    return ret < 0 ? ret : 0;
}

/* ---------------------------------------------------------------------- pass */

static void tell_all_damaged(struct ht_fsck *f)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    ht_fsck_problem(
        f, HT_FSCK_LOG_ALL, &w,
        "no copy of the log is whole: what follows was found in the longest one, and newer changes may be missing");
}

static void tell_refused(struct ht_fsck *f)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    ht_fsck_problem(
        f, HT_FSCK_LOG_RECORD, &w,
        "the log is whole but its records make no sense (the reason stands above); nothing behind it can be checked");
}

int ht_fsck_pass_log(struct ht_fsck *f)
{
    int ret = ht_fsck_open_store(f, false);
    bool whole;

    if (f->store == NULL || f->optim == NULL)
        return ret; /* told */
    whole = tell_copies(f);
    if (ret == -EUCLEAN && !whole) {
        tell_all_damaged(f);
        ht_fsck_close_store(f);
        ret = ht_fsck_open_store(f, true);
        if (f->store == NULL || f->optim == NULL)
            return ret;
    }
    if (ret == -EUCLEAN) {
        tell_refused(f);
        return ret;
    }
    if (ret < 0) {
        ht_error("%s: cannot replay the log: %s", ht_dev_name(f->devs[0]), strerror(-ret));
        return ret;
    }
    if (f->log.copy[0].state == HT_LOG_ENDED && f->log.copy[1].state == HT_LOG_ENDED)
        return compare_copies(f);
    return 0;
}
