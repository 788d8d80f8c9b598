/* SPDX-License-Identifier: Apache-2.0 */
/*
 * super_add.c - one more device for a store that nobody has mounted.
 *
 *   new device: anything --> one of n + 1 devices --.
 *   members:    n devices ----------------------------'--> n + 1 devices
 *
 * Each arrow ends with a flush, and the first one with three whole copies: what was on the device counts no more. A cut
 * between the two leaves a device that names a store which does not name it. It is a member if it is named at the next
 * mount, which tells the others. If they are mounted without it, it is none any more (members.h): its generation is
 * only one more than theirs was, so its superblock does not count then.
 */
#include "tiering/space/super_priv.h"

#include "tiering/base/mutant.h"

int ht_super_add(struct ht_super *sb, struct ht_dev *const devs[], struct ht_dev *dev,
                 enum ht_device_class device_class)
{
    struct ht_dev *all[HT_DEVICES_MAX] = {NULL};
    unsigned index = sb->device_count, partial;
    struct ht_super with = *sb;

    if (index == HT_DEVICES_MAX)
        return -E2BIG;
    if (ht_dev_size(dev) < HT_SUPER_DEVICE_BYTES_MIN)
        return -ENOSPC;
    with.device_count = index + 1;
    with.device_bytes[index] = ht_dev_size(dev);
    with.device_class[index] = (uint8_t)device_class;
    with.member_epoch[index] = 0; /* the members know the whole history without it */
    with.feat_ignore |= device_class == HT_DEVICE_CAPACITY ? HT_FEAT_IGNORE_CLASSES : 0;
    with.writer = 0;
    int rc = ht_super_make_uuid(with.device_uuid[index]);
    if (rc)
        return rc;
    for (unsigned i = 0; i < index; i++)
        all[i] = HT_MUTANT("add-members-first") ? devs[i] : NULL;
    all[index] = HT_MUTANT("add-members-first") ? NULL : dev;
    if (ht_super_write(&with, all, index + 1, &partial) || partial)
        return with.taken ? -EBUSY : -EIO;
    memcpy(all, devs, index * sizeof(all[0]));
    all[index] = dev;
    uint32_t failed = ht_super_write(&with, all, index + 1, &partial);
    *sb = with;
    return with.taken ? -EBUSY : failed || partial ? -EUCLEAN : 0;
}
