/* SPDX-License-Identifier: Apache-2.0 */
/*
 * super_format.c - lay out a new store, add a device to one, and the ids of this host.
 *
 * A new store begins above the generation of any store that was on its devices, and exists only when every copy of its
 * superblock was written: no left-over copy of an older store can win over it. Until then the older store is whole,
 * because format overwrites nothing else.
 */
#include "tiering/space/super.h"

#include "tiering/base/mutant.h"

#include <pthread.h>

#define LOG_PLACE (1 * HT_MIB) /* of the first log region on a device; later regions are aligned to it too */

/*
 * Reserves end at 0.29 of the log. For one file of 16 KiB after the other, as ext4 provides inodes, about 150 bytes are
 * reserved for each: 1/32 of the store. 1 GiB of that is enough for any use; but large stores can be filled with whole
 * chunks of 1 MiB, which reserve 60 bytes each, as far as the largest log goes: 88 million chunks, 84 TiB.
 */
static uint64_t default_log_bytes(uint64_t smallest_bytes, uint64_t all_bytes)
{
    uint64_t wanted = ht_max_u64(HT_GIB, all_bytes / 4096);
    uint64_t bytes = ht_min_u64(smallest_bytes / 32, wanted) / HT_BLOCK_BYTES * HT_BLOCK_BYTES;

    return ht_min_u64(ht_max_u64(bytes, HT_LOG_BYTES_MIN), HT_LOG_BYTES_MAX);
}

static unsigned next_fast(const struct ht_super *sb, unsigned from)
{
    while (from < sb->device_count && sb->device_class[from] != HT_DEVICE_FAST)
        from++;
    return from;
}

/* Two fast devices: one copy at the front of each. One fast device: one at the front, one at the back. */
static void place_logs(struct ht_super *sb)
{
    unsigned first = next_fast(sb, 0), second = next_fast(sb, first + 1);
    uint64_t back = sb->device_bytes[first] / HT_BLOCK_BYTES * HT_BLOCK_BYTES - HT_BLOCK_BYTES - sb->log_bytes;
    bool two = second < sb->device_count;

    sb->log_device[0] = first;
    sb->log_offset[0] = LOG_PLACE;
    sb->log_device[1] = two ? second : first;
    sb->log_offset[1] = two ? LOG_PLACE : back / LOG_PLACE * LOG_PLACE;
}

static void set_classes(struct ht_super *sb, uint32_t capacity)
{
    for (unsigned i = 0; i < sb->device_count; i++)
        if (capacity >> i & 1)
            sb->device_class[i] = HT_DEVICE_CAPACITY;
    if (capacity)
        sb->feat_ignore |= HT_FEAT_IGNORE_CLASSES;
}

static int format_layout(struct ht_super *sb, struct ht_dev *const devs[], const struct ht_format_opts *opts)
{
    uint64_t smallest = UINT64_MAX, all = 0; /* smallest: of the fast ones */

    set_classes(sb, opts->capacity);
    if (next_fast(sb, 0) == sb->device_count)
        return -EINVAL;
    for (unsigned i = 0; i < sb->device_count; i++) {
        sb->device_bytes[i] = ht_dev_size(devs[i]);
        if (sb->device_bytes[i] < HT_SUPER_DEVICE_BYTES_MIN)
            return -ENOSPC;
        if (sb->device_class[i] == HT_DEVICE_FAST)
            smallest = ht_min_u64(smallest, sb->device_bytes[i]);
        all += sb->device_bytes[i];
    }
    sb->chunk_bytes = opts->chunk_bytes ? opts->chunk_bytes : HT_CHUNK_BYTES;
    sb->log_bytes = opts->log_bytes ? opts->log_bytes : default_log_bytes(smallest, all);
    if (!HT_CHUNK_BYTES_VALID(sb->chunk_bytes) || !ht_super_log_bytes_valid(sb->log_bytes))
        return -EINVAL;
    if (sb->log_bytes > smallest / 4)
        return -ENOSPC;
    place_logs(sb);
    return 0;
}

/* A random (version 4) UUID. */
static int make_uuid(uint8_t out[16])
{
    int rc = ht_random(out, 16);

    out[6] = (uint8_t)((out[6] & 0x0f) | 0x40);
    out[8] = (uint8_t)((out[8] & 0x3f) | 0x80);
    return rc;
}

static int format_identity(struct ht_super *sb, const char *label)
{
    int rc = make_uuid(sb->uuid);
    uint8_t host[16];

    for (unsigned i = 0; !rc && i < sb->device_count; i++)
        rc = make_uuid(sb->device_uuid[i]);
    if (!rc)
        rc = ht_random(&sb->salt, sizeof(sb->salt));
    if (rc)
        return rc;
    if (label && strlen(label) > HT_LABEL_BYTES)
        return -EINVAL;
    if (label)
        memcpy(sb->label, label, strlen(label));
    ht_host_ids(host, sb->boot_id);
    sb->created_ns = ht_wall_ns();
    return ht_super_label_valid(sb->label) ? 0 : -EINVAL;
}

/* The highest generation of an older store on these devices. */
static uint64_t left_over_generation(struct ht_dev *const devs[], unsigned dev_count)
{
    uint64_t highest = 0;

    for (unsigned i = 0; i < dev_count; i++) {
        struct ht_super sb;
        struct ht_super_report report;
        int ignored = ht_super_read(devs[i], &sb, &report);
        (void)ignored; /* the present content is about to be overwritten */
        for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
            highest = ht_max_u64(highest, report.generation[c]);
    }
    return highest < HT_SUPER_COUNTER_MAX / 2 ? highest : 0;
}

int ht_super_format(struct ht_dev *const devs[], unsigned dev_count, const struct ht_format_opts *opts,
                    struct ht_super *out_sb)
{
    struct ht_super sb;
    unsigned partial;

    if (dev_count < 1 || dev_count > HT_DEVICES_MAX)
        return -EINVAL;
    memset(&sb, 0, sizeof(sb));
    sb.device_count = dev_count;
    int rc = format_layout(&sb, devs, opts);
    if (!rc)
        rc = format_identity(&sb, opts->label);
    if (rc)
        return rc;

    sb.flags = HT_SUPER_CLEAN; /* an empty log: nothing to miss */
    sb.start_seq = 1;
    sb.generation = left_over_generation(devs, dev_count);
    /* Every copy must be there, or one of an older store could be found later. */
    if (ht_super_write(&sb, devs, dev_count, &partial) || partial)
        return -EIO;
    *out_sb = sb;
    return 0;
}

/* -------------------------------------------------------- one more device */

/*
 *   new device: anything --> one of n + 1 devices --.
 *   members:    n devices ----------------------------'--> n + 1 devices
 *
 * Each arrow ends with a flush, and the first one with three whole copies: what was on the device counts no more. A cut
 * between the two leaves a device that names a store which does not name it. It is a member if it is named at the next
 * mount, which tells the others. If they are mounted without it, it is none any more (ht_members_validate): its
 * generation is only one more than theirs was, so its superblock does not count then.
 */
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
    int rc = make_uuid(with.device_uuid[index]);
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

/* ------------------------------------------------------------- host ids */

/* 16 bytes in hexadecimal digits, dashes between them ignored; zeros when the file has something else. */
static void read_id(const char *path, uint8_t out[16])
{
    FILE *f = fopen(path, "re");
    unsigned n = 0;
    char digits[3];

    memset(out, 0, 16);
    if (!f)
        return;
    while (n < 16 && fscanf(f, "%*[-]") != EOF && fscanf(f, "%2[0-9a-fA-F]", digits) == 1 && digits[1])
        out[n++] = (uint8_t)strtoul(digits, NULL, 16);
    (void)fclose(f);
    if (n < 16)
        memset(out, 0, 16);
}

static uint8_t host_id[16], boot_id[16];

static void read_ids(void)
{
    read_id("/etc/machine-id", host_id);
    read_id("/proc/sys/kernel/random/boot_id", boot_id);
}

void ht_host_ids(uint8_t out_host[16], uint8_t out_boot[16])
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, read_ids);
    memcpy(out_host, host_id, sizeof(host_id));
    memcpy(out_boot, boot_id, sizeof(boot_id));
}
