/* SPDX-License-Identifier: Apache-2.0 */
/*
 * add.c - mkfs.hitrain --add: one more device for a store that is not mounted. It holds all members and the new device
 * before it changes anything; tiering/space/super_format.c has the order of the writes.
 */
#include "mount-helpers/mkfs/mkfs.h"

#include "tiering/space/claim.h"

#define LOG_CHUNKS_PER_MIB 5370u /* mkfs.hitrain(8) */

struct adding {
    const struct ht_mkfs_options *o;
    struct ht_mkfs_target named[HT_DEVICES_MAX], *target; /* the members as named, and behind them the new device */
    unsigned count;                                       /* of members */
    struct ht_dev *member[HT_DEVICES_MAX];                /* by index */
    struct ht_super sb[HT_DEVICES_MAX];
    struct ht_super newest;
    uint8_t uuid[16];
    bool added; /* the store names it: it stays whatever happens */
};

static int read_member(struct adding *a, struct ht_mkfs_target *t)
{
    struct ht_super_report report;
    struct ht_super sb;
    int rc = ht_super_read(t->dev, &sb, &report);

    if (rc < 0)
        ht_error("%s: no whole member of a store that this version of hitrain knows; see hitrain-fsck", t->path);
    else if (sb.feat_ro & ~HT_FEAT_RO_KNOWN)
        ht_error("%s: this version of hitrain lacks features of the store; see hitrainctl features", t->path);
    else if (t != a->named && memcmp(sb.uuid, a->uuid, sizeof(sb.uuid)) != 0)
        ht_error("%s belongs to another store than %s", t->path, a->named[0].path);
    else if (a->member[sb.device_index])
        ht_error("%s and %s are the same member", ht_dev_name(a->member[sb.device_index]), t->path);
    else {
        a->member[sb.device_index] = t->dev;
        a->sb[sb.device_index] = sb;
        memcpy(a->uuid, sb.uuid, sizeof(a->uuid));
        return 0;
    }
    return -EINVAL;
}

/* All members, and nothing else. */
static int check_members(struct adding *a)
{
    const struct ht_super *there[HT_DEVICES_MAX] = {NULL};
    struct ht_members m;

    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        there[i] = a->member[i] ? &a->sb[i] : NULL;
    int rc = ht_members_validate(there, &m);
    a->newest = a->sb[m.newest];
    if (rc < 0)
        return ht_fail(rc, "%s: its members have not the same history; mount the store first, which says more",
                       a->named[0].path);
    for (unsigned i = 0; i < a->newest.device_count; i++)
        if (!a->member[i])
            return ht_fail(-ENODEV, "device %u of %u of the store is missing: name all members", i,
                           a->newest.device_count);
    return 0;
}

/* Also the new device is held then, and may be overwritten. */
static int hold_all(struct adding *a)
{
    int rc = ht_mkfs_check_distinct(a->named, a->count + 1);

    for (unsigned i = 0; rc == 0 && i < a->count; i++) {
        rc = ht_dev_open(a->named[i].path, a->o->no_wait ? HT_DEV_NOWAIT : 0, &a->named[i].dev);
        if (rc == 0)
            rc = read_member(a, &a->named[i]);
    }
    if (rc == 0)
        rc = check_members(a);
    if (rc == 0)
        rc = ht_mkfs_open(a->target, a->o, &a->newest);
    if (rc == 0 && ht_dev_size(a->target->dev) < HT_MKFS_BYTES_MIN) {
        ht_error("%s is too small: it has %s, and each device needs 8 MiB", a->target->path,
                 ht_size_text(ht_dev_size(a->target->dev)));
        rc = -ENOSPC;
    }
    return rc;
}

static int report_add_error(const struct adding *a, int rc)
{
    if (rc == -EUCLEAN)
        ht_error("%s is a member now, but a device lacks a copy of its superblock: run hitrain-fsck -p",
                 a->target->path);
    else if (rc < 0)
        ht_error("%s was not added, and the store is as it was: %s", a->target->path, strerror(-rc));
    return rc;
}

static int add(struct adding *a)
{
    struct ht_claim *claim;
    enum ht_device_class device_class = a->o->add_capacity ? HT_DEVICE_CAPACITY : HT_DEVICE_FAST;
    int rc = ht_claim_ask(&a->target->dev, 1);

    if (rc == 0)
        rc = ht_claim_take(&a->newest, a->member, a->newest.device_count, &claim);
    if (rc < 0)
        return rc;
    ht_mkfs_discard(a->target, a->o);
    rc = ht_mkfs_wipe_old(a->target);
    if (rc == 0)
        rc = report_add_error(a, ht_super_add(&a->newest, a->member, a->target->dev, device_class));
    a->added = rc == 0 || rc == -EUCLEAN;
    if (a->added)
        ht_claim_free(claim);
    else
        ht_claim_undo(claim, &a->newest);
    return rc < 0 ? rc : ht_mkfs_verify(a->target->dev, &a->newest);
}

static void report(const struct adding *a)
{
    const struct ht_super *sb = &a->newest;
    unsigned index = sb->device_count - 1;
    uint64_t bytes = 0, most = sb->log_bytes / HT_MIB * LOG_CHUNKS_PER_MIB * sb->chunk_bytes;
    char uuid[HT_UUID_TEXT_MAX];

    for (unsigned i = 0; i <= index; i++)
        bytes += sb->device_bytes[i];
    if (a->target->held_something)
        printf("%s contained %s: overwritten\n", a->target->path, a->target->found);
    printf("hitrain store %s\n  device %-2u %s, %s%s: added; mount the store with -o device=%s, too\n",
           ht_uuid_text(sb->uuid, uuid), index, a->target->path, ht_size_text(sb->device_bytes[index]),
           sb->device_class[index] == HT_DEVICE_CAPACITY ? ", capacity" : "", a->target->path);
    if (most < bytes)
        ht_warn("the log has room for some %s of tensors, which is less than the %s of all devices: a new store with "
                "--log-size= can use all",
                ht_size_text(most), ht_size_text(bytes));
}

int ht_mkfs_add(const char *const paths[], unsigned count, const struct ht_mkfs_options *o)
{
    struct adding a = {.o = o, .count = count};

    if (count >= HT_DEVICES_MAX)
        return ht_fail(-E2BIG, "%s: a store has at most %u devices, and %u are named", o->add, HT_DEVICES_MAX, count);
    for (unsigned i = 0; i < count; i++)
        a.named[i].path = paths[i];
    a.target = &a.named[count];
    a.target->path = o->add;
    int rc = hold_all(&a);
    if (rc == 0)
        rc = add(&a);
    if (rc == 0)
        report(&a);
    ht_mkfs_close(a.target, !a.added);
    for (unsigned i = 0; i < count; i++)
        ht_mkfs_close(&a.named[i], false);
    return rc;
}
