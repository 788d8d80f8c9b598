/* SPDX-License-Identifier: Apache-2.0 */
/*
 * acl.c - POSIX access control lists, in the form in which the kernel hands them on as extended attributes: le32
 * version (2), then entries { le16 tag, le16 permissions, le32 id }.
 *
 * The kernel enforces them. A file system has to keep list and mode in step, and to pass a directory's default list on
 * to new entries. Pure functions over bytes; only valid lists are ever stored.
 */
#include "fs/ns/ns_priv.h"

#include <unistd.h>

enum { ACL_VERSION = 2, HEADER_BYTES = 4, ENTRY_BYTES = 8 };
enum { TAG_USER_OBJ = 1, TAG_USER = 2, TAG_GROUP_OBJ = 4, TAG_GROUP = 8, TAG_MASK = 16, TAG_OTHER = 32 };

struct acl_entry {
    unsigned tag, perm;
    uint32_t id;
};

static size_t entry_count(size_t len)
{
    return (len - HEADER_BYTES) / ENTRY_BYTES;
}

static struct acl_entry get_entry(const void *value, size_t n)
{
    const uint8_t *p = (const uint8_t *)value + HEADER_BYTES + n * ENTRY_BYTES;

    return (struct acl_entry){p[0] | (unsigned)p[1] << 8, p[2] | (unsigned)p[3] << 8, ht_le32_load(p + 4)};
}

static void set_perm(void *value, size_t n, unsigned perm)
{
    uint8_t *p = (uint8_t *)value + HEADER_BYTES + n * ENTRY_BYTES;

    p[2] = (uint8_t)perm;
    p[3] = 0;
}

/* Index of the only entry of a tag, or -1. */
static ssize_t find_tag(const void *value, size_t len, unsigned tag)
{
    for (size_t n = 0; n < entry_count(len); n++)
        if (get_entry(value, n).tag == tag)
            return (ssize_t)n;
    return -1;
}

/* In the order of tags, one owner, group and other, and a mask if users or groups are named. */
bool ht_ns_acl_valid(const void *value, size_t len)
{
    unsigned last = 0, seen = 0;

    if (len < HEADER_BYTES || (len - HEADER_BYTES) % ENTRY_BYTES != 0 || ht_le32_load(value) != ACL_VERSION)
        return false;
    for (size_t n = 0; n < entry_count(len); n++) {
        struct acl_entry e = get_entry(value, n);
        bool named = e.tag == TAG_USER || e.tag == TAG_GROUP;
        bool known = e.tag != 0 && e.tag <= TAG_OTHER && (e.tag & (e.tag - 1)) == 0;
        if (!known || e.perm > 7 || e.tag < last || (e.tag == last && !named))
            return false;
        last = e.tag;
        seen |= e.tag;
    }
    if ((seen & (TAG_USER_OBJ | TAG_GROUP_OBJ | TAG_OTHER)) != (TAG_USER_OBJ | TAG_GROUP_OBJ | TAG_OTHER))
        return false;
    return (seen & (TAG_USER | TAG_GROUP)) == 0 || (seen & TAG_MASK) != 0;
}

/* The class that the group bits of the mode stand for. */
static ssize_t group_class(const void *value, size_t len)
{
    ssize_t mask = find_tag(value, len, TAG_MASK);

    return mask >= 0 ? mask : find_tag(value, len, TAG_GROUP_OBJ);
}

uint32_t ht_ns_acl_mode(const void *value, size_t len, uint32_t mode)
{
    unsigned user = get_entry(value, (size_t)find_tag(value, len, TAG_USER_OBJ)).perm;
    unsigned group = get_entry(value, (size_t)group_class(value, len)).perm;
    unsigned other = get_entry(value, (size_t)find_tag(value, len, TAG_OTHER)).perm;

    return (mode & ~0777u) | user << 6 | group << 3 | other;
}

bool ht_ns_acl_is_plain(const void *value, size_t len)
{
    return entry_count(len) == 3;
}

void ht_ns_acl_chmod(void *value, size_t len, uint32_t mode)
{
    set_perm(value, (size_t)find_tag(value, len, TAG_USER_OBJ), mode >> 6 & 7);
    set_perm(value, (size_t)group_class(value, len), mode >> 3 & 7);
    set_perm(value, (size_t)find_tag(value, len, TAG_OTHER), mode & 7);
}

uint32_t ht_ns_acl_inherit(void *value, size_t len, uint32_t mode)
{
    uint32_t left = mode & (ht_ns_acl_mode(value, len, 0) | ~0777u);

    ht_ns_acl_chmod(value, len, left);
    return left;
}

void ht_ns_acl_map(void *value, size_t len, unsigned (*perm)(unsigned perm, void *ctx), void *ctx)
{
    for (size_t n = 0; n < entry_count(len); n++)
        set_perm(value, n, perm(get_entry(value, n).perm, ctx) & 7);
}

/* ---------------------------------------------------------------- access */

bool ht_ns_is_member(uint32_t id, struct ht_cred cred, const uint32_t *gids, size_t gid_count)
{
    if (cred.gid == id)
        return true;
    for (size_t n = 0; n < gid_count; n++)
        if (gids[n] == id)
            return true;
    return false;
}

/* POSIX 1003.1e: the owner, else a named user, else any group that fits and permits, else others. */
int ht_ns_acl_permits(const void *value, size_t len, uint32_t uid, uint32_t gid, int mask, struct ht_cred cred,
                      const uint32_t *gids, size_t gid_count)
{
    ssize_t limit_at = find_tag(value, len, TAG_MASK);
    unsigned want = (unsigned)mask & 7u, limit = limit_at >= 0 ? get_entry(value, (size_t)limit_at).perm : 7;
    bool group_fits = false;

    for (size_t n = 0; n < entry_count(len); n++) {
        struct acl_entry e = get_entry(value, n);
        bool permits = (e.perm & limit & want) == want;
        if (e.tag == TAG_USER_OBJ && cred.uid == uid)
            return (e.perm & want) == want ? 0 : -EACCES;
        if (e.tag == TAG_USER && cred.uid == e.id)
            return permits ? 0 : -EACCES;
        if ((e.tag == TAG_GROUP_OBJ && ht_ns_is_member(gid, cred, gids, gid_count)) ||
            (e.tag == TAG_GROUP && ht_ns_is_member(e.id, cred, gids, gid_count))) {
            if (permits)
                return 0;
            group_fits = true;
        }
        if (e.tag == TAG_OTHER)
            return !group_fits && (e.perm & want) == want ? 0 : -EACCES;
    }
    return -EACCES;
}
