/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_super.c - superblocks, copy by copy.
 *
 * A valid copy of an older generation is no problem: a crash between two writes leaves one, and the next mount brings
 * it up to date. A copy that fails its checksum is always a problem: everything that changes between generations lies
 * in the first 512 bytes, and a device writes these whole or not at all.
 */
#include "mount-helpers/fsck/fsck.h"

#include "mount-helpers/common/probe.h"

static const enum ht_fsck_code code_of[] = {
    [HT_SUPER_UNREADABLE] = HT_FSCK_SB_READ,   [HT_SUPER_NO_MAGIC] = HT_FSCK_SB_MAGIC,
    [HT_SUPER_BAD_CHECKSUM] = HT_FSCK_SB_CSUM, [HT_SUPER_BAD_VERSION] = HT_FSCK_SB_VERSION,
    [HT_SUPER_BAD_FIELD] = HT_FSCK_SB_FIELD,
};

static void rewrite(struct ht_fsck *f, struct ht_dev *dev, const struct ht_super *sb, unsigned copy)
{
    if (ht_super_rewrite(sb, dev, copy) == 0)
        ht_fsck_repaired_last(f);
    else
        f->failed = true; /* the reason was reported */
}

/* Where on the device a copy lies. */
static struct ht_fsck_where copy_where(struct ht_dev *dev, unsigned copy, uint64_t offset)
{
    return (struct ht_fsck_where){.device = ht_dev_name(dev),
                                  .copy = HT_FSCK_AT(copy),
                                  .offset = HT_FSCK_AT(offset),
                                  .bytes = HT_FSCK_AT(HT_BLOCK_BYTES),
                                  .by_hand = offset + HT_BLOCK_BYTES > ht_dev_size(dev)};
}

static void report_copies(struct ht_fsck *f, struct ht_dev *dev, const struct ht_super *sb,
                          const struct ht_super_report *report)
{
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++) {
        uint64_t offset = ht_super_offset(sb->device_bytes[sb->device_index], i);
        const struct ht_fsck_where w = copy_where(dev, i, offset);
        if (report->copy[i] == HT_SUPER_OK)
            continue;
        if (ht_fsck_problem(f, code_of[report->copy[i]], &w, "%s: superblock copy %u (byte offset %llu): %s", w.device,
                            i, (unsigned long long)offset, ht_super_problem_text(report->copy[i])))
            rewrite(f, dev, sb, i);
    }
}

/* Valid in itself, but does it belong to this store and this device? */
static void check_copy(struct ht_fsck *f, struct ht_dev *dev, const struct ht_super *sb, unsigned copy)
{
    uint64_t offset = ht_super_offset(sb->device_bytes[sb->device_index], copy);
    const struct ht_fsck_where w = copy_where(dev, copy, offset);
    struct ht_super other;

    if (ht_super_read_copy(dev, offset, &other) != HT_SUPER_OK)
        return; /* reported already */
    if (memcmp(other.uuid, sb->uuid, sizeof(other.uuid)) == 0 && other.device_index == sb->device_index &&
        other.salt == sb->salt)
        return;
    if (ht_fsck_problem(
            f, HT_FSCK_SB_OTHER, &w,
            "%s: superblock copy %u (byte offset %llu) belongs to another store or device than the newest one",
            w.device, copy, (unsigned long long)offset))
        rewrite(f, dev, sb, copy);
}

static int report_foreign(struct ht_dev *dev)
{
    char text[HT_PROBE_TEXT_MAX];

    if (ht_probe(ht_dev_name(dev), text) == 1)
        ht_error("%s is not a hitrain store: it contains %s", ht_dev_name(dev), text);
    else
        ht_error("%s is not a hitrain store: none of the places of a superblock holds one (%s looked at)",
                 ht_dev_name(dev), ht_size_text(ht_dev_size(dev)));
    return -EMEDIUMTYPE;
}

static void report_short(struct ht_fsck *f, struct ht_dev *dev, const struct ht_super *sb)
{
    uint64_t made = sb->device_bytes[sb->device_index], size = ht_dev_size(dev);
    const struct ht_fsck_where w = {
        .device = ht_dev_name(dev), .offset = HT_FSCK_AT(size), .bytes = HT_FSCK_AT(made - size)};

    ht_fsck_problem(
        f, HT_FSCK_SB_SHORT, &w,
        "%s ends at byte %llu, but the store was made on %llu bytes: the last %llu are missing (truncated?)", w.device,
        (unsigned long long)size, (unsigned long long)made, (unsigned long long)(made - size));
}

/* Writing would break what the feature is for, so nothing is repaired. */
static void report_feature(struct ht_fsck *f, struct ht_dev *dev, const struct ht_super *sb)
{
    const struct ht_fsck_where w = {.device = ht_dev_name(dev)};
    uint64_t unknown = sb->feat_ro & ~HT_FEAT_RO_KNOWN;
    char lacks[256];

    if (!unknown || f->newer)
        return;
    ht_super_unknown_text(dev, lacks, sizeof(lacks));
    f->newer = true;
    ht_fsck_problem(f, HT_FSCK_SB_FEATURE, &w, "%s: the store has features that this version does not know: %s",
                    w.device, lacks);
}

/* The findings about one device. */
struct member {
    struct ht_super super;
    struct ht_super_report report;
    int rc;
};

/* The number of the one device of the store that no other device has, or -1. */
static int missing_index(const struct ht_fsck *f, const struct member *m, const struct ht_super *newest)
{
    unsigned seen = 0, missing = HT_DEVICES_MAX;

    if (!newest || newest->device_count != f->dev_count)
        return -1;
    for (unsigned i = 0; i < f->dev_count; i++)
        seen |= m[i].rc == 0 ? 1u << m[i].super.device_index : 0;
    for (unsigned i = 0; i < f->dev_count; i++)
        if ((seen & 1u << i) == 0)
            missing = missing == HT_DEVICES_MAX ? i : HT_DEVICES_MAX + 1;
    return missing < HT_DEVICES_MAX ? (int)missing : -1;
}

/* If no copy is valid, the other devices know the former content. */
static int check_none(struct ht_fsck *f, unsigned i, struct member *m, const struct ht_super *newest)
{
    int index = missing_index(f, m, newest);
    const struct ht_fsck_where w = {.device = ht_dev_name(f->devs[i]),
                                    .by_hand = index < 0 || ht_dev_size(f->devs[i]) < newest->device_bytes[index]};

    if (!ht_fsck_problem(f, HT_FSCK_SB_NONE, &w, "%s: no copy of the superblock is valid: %s; %s; %s", w.device,
                         ht_super_problem_text(m[i].report.copy[0]), ht_super_problem_text(m[i].report.copy[1]),
                         ht_super_problem_text(m[i].report.copy[2])))
        return -EUCLEAN;
    m[i].super = *newest;
    m[i].super.device_index = (uint32_t)index;
    m[i].rc = 0;
    for (unsigned c = 0; m[i].rc == 0 && c < HT_SUPER_COPIES; c++)
        m[i].rc = ht_super_rewrite(&m[i].super, f->devs[i], c);
    if (m[i].rc == 0) {
        ht_fsck_repaired_last(f);
        f->member[index] = f->devs[i];
    }
    return m[i].rc;
}

/* -EUCLEAN: nothing was reported yet. */
static int check_device(struct ht_fsck *f, struct ht_dev *dev, struct member *m)
{
    char lacks[256];

    m->rc = ht_super_read(dev, &m->super, &m->report);
    switch (m->rc) {
    case 0:
        report_feature(f, dev, &m->super);
        report_copies(f, dev, &m->super, &m->report);
        for (unsigned i = 0; i < HT_SUPER_COPIES; i++)
            check_copy(f, dev, &m->super, i);
        break;
    case -ENODATA:
        report_copies(f, dev, &m->super, &m->report);
        report_short(f, dev, &m->super);
        break;
    case -EMEDIUMTYPE:
        return report_foreign(dev);
    case -EUCLEAN:
        break;
    case -EPROTONOSUPPORT:
        ht_super_unknown_text(dev, lacks, sizeof(lacks));
        ht_error("%s: a hitrain store of a newer version, and this one lacks %s; see hitrainctl features DEVICE",
                 ht_dev_name(dev), *lacks ? lacks : "its format");
        break;
    default:
        ht_error("%s: cannot read its superblocks: %s", ht_dev_name(dev), strerror(-m->rc));
        break;
    }
    return m->rc;
}

/* An operational error weighs more than damage: nothing was checked then. */
static int worse(int a, int b)
{
    return a == 0 || (a == -EUCLEAN && b != 0) ? b : a;
}

int ht_fsck_pass_super(struct ht_fsck *f)
{
    static struct member m[HT_DEVICES_MAX];
    const struct ht_super *newest = NULL;
    int rc = 0;

    for (unsigned i = 0; i < f->dev_count; i++) {
        int one = check_device(f, f->devs[i], &m[i]);
        if (one == 0)
            f->member[m[i].super.device_index] = f->devs[i];
        if (one == 0 && (!newest || m[i].super.generation > newest->generation))
            newest = &m[i].super;
        if (one != -EUCLEAN)
            rc = worse(rc, one == -ENODATA ? -EUCLEAN : one);
    }
    if (newest)
        f->super = *newest;
    for (unsigned i = 0; i < f->dev_count; i++)
        if (m[i].rc == -EUCLEAN)
            rc = worse(rc, check_none(f, i, m, newest));
    return rc;
}
