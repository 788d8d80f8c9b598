/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/space/members.h"

bool ht_members_takes_part(const struct ht_super *sb, unsigned i)
{
    return sb->member_epoch[i] == sb->epoch;
}

static bool knows(const struct ht_super *a, const struct ht_super *b)
{
    return a->member_epoch[b->device_index] >= b->member_epoch[b->device_index];
}

static int find_apart(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out)
{
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        for (unsigned k = 0; k < i; k++)
            if (sb[i] && sb[k] && !knows(sb[i], sb[k]) && !knows(sb[k], sb[i])) {
                out->apart[0] = k;
                out->apart[1] = i;
                return -EXDEV;
            }
    return 0;
}

static unsigned find_newest(const struct ht_super *const sb[HT_DEVICES_MAX])
{
    unsigned newest = HT_DEVICES_MAX;

    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        if (sb[i] && (newest == HT_DEVICES_MAX || sb[i]->generation > sb[newest]->generation))
            newest = i;
    return newest;
}

bool ht_members_is_stranger(const struct ht_super *newest, const struct ht_super *have)
{
    unsigned i = have->device_index;

    return i >= newest->device_count ||
        memcmp(have->device_uuid[i], newest->device_uuid[i], sizeof(have->device_uuid[i])) != 0;
}

static int find_stranger(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out)
{
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        if (sb[i] && ht_members_is_stranger(sb[out->newest], sb[i])) {
            out->stranger = i;
            return -ENXIO;
        }
    return 0;
}

/* Does a present copy of the log go on to the end, as far as the newest superblock knows? */
static int check_log(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out)
{
    const struct ht_super *newest = sb[out->newest];
    bool present = false;

    for (unsigned c = 0; c < HT_LOG_COPIES; c++) {
        unsigned device = newest->log_device[c];
        if (!sb[device])
            continue;
        if (ht_members_takes_part(newest, device))
            return 0;
        present = true;
        out->left_behind = device;
    }
    return present ? -ESTALE : 0; /* without any copy the journal reports that */
}

int ht_members_validate(const struct ht_super *const sb[HT_DEVICES_MAX], struct ht_members *out)
{
    out->newest = find_newest(sb);
    int rc = find_apart(sb, out);

    if (!rc)
        rc = find_stranger(sb, out);
    return rc ? rc : check_log(sb, out);
}

void ht_members_take_part(struct ht_super *sb, uint32_t devices)
{
    for (unsigned i = 0; i < sb->device_count; i++)
        if (devices >> i & 1)
            sb->member_epoch[i] = sb->epoch;
}
