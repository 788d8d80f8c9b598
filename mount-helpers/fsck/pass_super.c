/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_super.c - superblocks, copy by copy.
 *
 * A valid copy of an older generation is no problem: a crash between two writes leaves one, and the next mount brings it
 * up to date. A copy that fails its checksum is one always, because all that changes from generation to generation lies in
 * the first 512 bytes, which a device writes whole or not at all.
 */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/base/log.h"
#include "mount-helpers/common/probe.h"
#include "mount-helpers/common/text.h"

static enum ht_fsck_code code_of(enum ht_super_problem p)
{
    switch (p) {
    case HT_SUPER_NO_MAGIC:
        return HT_FSCK_SB_MAGIC;
    case HT_SUPER_BAD_CHECKSUM:
        return HT_FSCK_SB_CSUM;
    case HT_SUPER_BAD_VERSION:
        return HT_FSCK_SB_VERSION;
    case HT_SUPER_BAD_FIELD:
        return HT_FSCK_SB_FIELD;
    case HT_SUPER_OK:
    case HT_SUPER_UNREADABLE:
        break;
    }
    return HT_FSCK_SB_READ;
}

/* Where copy i lies: where the store ended at mkfs, when that is known. */
static uint64_t copy_offset(struct ht_dev *dev, const struct ht_super *sb, unsigned copy)
{
    return ht_super_offset(sb != NULL ? sb->device_bytes[sb->device_index] : ht_dev_size(dev), copy);
}

static void tell_copies(struct ht_fsck *f, struct ht_dev *dev, const struct ht_super *sb,
                        const struct ht_super_report *report)
{
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++) {
        struct ht_fsck_where w = {HT_FSCK_NOWHERE};

        if (report->copy[i] == HT_SUPER_OK)
            continue;
        w.device = ht_dev_name(dev);
        w.copy = i;
        w.offset = copy_offset(dev, sb, i);
        w.bytes = HT_BLOCK_BYTES;
        ht_fsck_problem(f, code_of(report->copy[i]), &w, "%s: superblock copy %u (byte offset %llu): %s", w.device, i,
                        (unsigned long long)w.offset, ht_super_problem_text(report->copy[i]));
    }
}

/* Valid in itself, but does it belong to this store and this device? */
static void check_copy(struct ht_fsck *f, struct ht_dev *dev, const struct ht_super *sb, unsigned copy)
{
    _Alignas(HT_BLOCK_BYTES) uint8_t block[HT_BLOCK_BYTES];
    uint64_t offset = copy_offset(dev, sb, copy);
    struct ht_super other;
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    if (ht_dev_read(dev, offset, block, sizeof(block)) != 0 || ht_super_decode(block, &other) != HT_SUPER_OK)
        return; /* told already */
    if (memcmp(other.uuid, sb->uuid, sizeof(other.uuid)) == 0 && other.device_index == sb->device_index &&
        other.salt == sb->salt)
        return;
    w.device = ht_dev_name(dev);
    w.copy = copy;
    w.offset = offset;
    w.bytes = HT_BLOCK_BYTES;
    ht_fsck_problem(f, HT_FSCK_SB_OTHER, &w,
                    "%s: superblock copy %u (byte offset %llu) belongs to another store or device than the newest one",
                    w.device, copy, (unsigned long long)offset);
}

static int tell_foreign(struct ht_dev *dev)
{
    char text[HT_PROBE_TEXT_MAX];

    if (ht_probe(ht_dev_name(dev), text) == 1)
        ht_error("%s is not a hitrain store: it contains %s", ht_dev_name(dev), text);
    else
        ht_error("%s is not a hitrain store: none of the places of a superblock holds one (%s looked at)",
                 ht_dev_name(dev), ht_size_text(ht_dev_size(dev)));
    return -EMEDIUMTYPE;
}

static void tell_short(struct ht_fsck *f, struct ht_dev *dev, const struct ht_super *sb)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};
    uint64_t made = sb->device_bytes[sb->device_index];

    w.device = ht_dev_name(dev);
    w.offset = ht_dev_size(dev);
    w.bytes = made - w.offset;
    ht_fsck_problem(
        f, HT_FSCK_SB_SHORT, &w,
        "%s ends at byte %llu, but the store was made on %llu bytes: the last %llu are missing (truncated?)", w.device,
        (unsigned long long)w.offset, (unsigned long long)made, (unsigned long long)w.bytes);
}

static int tell_none(struct ht_fsck *f, struct ht_dev *dev)
{
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    w.device = ht_dev_name(dev);
    ht_fsck_problem(f, HT_FSCK_SB_NONE, &w, "%s: no copy of the superblock is valid", w.device);
    return -EUCLEAN;
}

static int check_device(struct ht_fsck *f, struct ht_dev *dev, struct ht_super *out_sb)
{
    struct ht_super_report report;
    int ret = ht_super_read(dev, out_sb, &report);

    switch (ret) {
    case 0:
        tell_copies(f, dev, out_sb, &report);
        for (unsigned i = 0; i < HT_SUPER_COPIES; i++)
            check_copy(f, dev, out_sb, i);
        return 0;
    case -ENODATA:
        tell_copies(f, dev, out_sb, &report);
        tell_short(f, dev, out_sb);
        return -EUCLEAN;
    case -EUCLEAN:
        tell_copies(f, dev, NULL, &report);
        return tell_none(f, dev);
    case -EMEDIUMTYPE:
        return tell_foreign(dev);
    case -EPROTONOSUPPORT:
        ht_error("%s: a hitrain store of a format that this version does not know", ht_dev_name(dev));
        return ret;
    default:
        ht_error("%s: cannot read its superblocks: %s", ht_dev_name(dev), strerror(-ret));
        return ret;
    }
}

int ht_fsck_pass_super(struct ht_fsck *f)
{
    int ret = 0;

    for (unsigned i = 0; i < f->dev_count; i++) {
        struct ht_super sb;
        int one = check_device(f, f->devs[i], &sb);

        if (one == 0 && (i == 0 || sb.generation > f->super.generation))
            f->super = sb;
        /* an operational error weighs more than damage: nothing was checked then */
        if (one < 0 && (ret == 0 || ret == -EUCLEAN))
            ret = one;
    }
    return ret;
}
