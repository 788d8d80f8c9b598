/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_refs.c - references: inside the devices, clear of superblocks and logs, apart from each other unless they are clones (which name
 * the very same: replay has counted them), and owned.
 */
#include "mount-helpers/fsck/fsck.h"

#include <stdlib.h>

#include "tiering/base/log.h"

/* For so many conflicts the other owner is searched for, which takes a look at every reference. */
enum { PARTNERS_MAX = 100 };

static bool overlap(uint64_t a, uint64_t a_len, uint64_t b, uint64_t b_len)
{
    return a < b + b_len && b < a + a_len;
}

/* What of the store's own lies in a range of a device, or NULL. */
static const char *find_meta(const struct ht_fsck *f, const struct ht_ref_conflict *c)
{
    const struct ht_super *sb = ht_store_super(f->store);
    uint64_t offset = c->block * HT_BLOCK_BYTES, bytes = (uint64_t)c->blocks * HT_BLOCK_BYTES;

    for (unsigned i = 0; i < HT_SUPER_COPIES; i++)
        if (overlap(offset, bytes, ht_super_offset(sb->device_bytes[c->device], i), HT_BLOCK_BYTES))
            return "a superblock";
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (sb->log_device[i] == c->device && overlap(offset, bytes, sb->log_offset[i], sb->log_bytes))
            return "the log";
    return NULL;
}

static struct ht_fsck_item *find_item(struct ht_fsck *f, uint64_t oid, uint64_t index)
{
    size_t low = 0, high = f->item_count;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const struct ht_fsck_item *it = &f->items[mid];

        if (it->oid < oid || (it->oid == oid && it->index < index))
            low = mid + 1;
        else
            high = mid;
    }
    return low < f->item_count && f->items[low].oid == oid && f->items[low].index == index ? &f->items[low] : NULL;
}

static struct ht_fsck_item *find_partner(struct ht_fsck *f, const struct ht_ref_conflict *c)
{
    for (size_t i = 0; i < f->item_count; i++) {
        struct ht_fsck_item *it = &f->items[i];

        for (unsigned k = 0; k < it->frag_count && (it->oid != c->oid || it->index != c->index); k++) {
            struct ht_extent e = ht_fsck_item_extent(f, it, k);

            if (e.device == c->device && overlap(e.block, e.blocks, c->block, c->blocks))
                return it;
        }
    }
    return NULL;
}

static void tell_conflict(struct ht_fsck *f, const struct ht_ref_conflict *c, bool search)
{
    static char text[HT_FSCK_PATH_MAX + 128], other_text[HT_FSCK_PATH_MAX + 128];
    static struct ht_fsck_owner owner, other_owner;
    struct ht_fsck_item *it = find_item(f, c->oid, c->index);
    struct ht_fsck_item *other = search && c->error == -EEXIST ? find_partner(f, c) : NULL;
    const char *meta = c->error == -EEXIST ? find_meta(f, c) : NULL;
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};
    unsigned long long offset = c->block * HT_BLOCK_BYTES, bytes = (unsigned long long)c->blocks * HT_BLOCK_BYTES;

    if (it == NULL)
        return; /* gone again by a later record */
    ht_fsck_item_text(f, it, text, sizeof(text), &owner);
    w.device = c->device < f->dev_count ? ht_dev_name(f->devs[c->device]) : "missing device";
    w.offset = offset;
    w.bytes = bytes;
    w.object = c->oid;
    w.chunk = c->index;
    w.path = owner.path;
    w.state = owner.state;
    if (c->error != -EEXIST) {
        it->unreadable = true;
        ht_fsck_problem(f, HT_FSCK_REF_RANGE, &w, "%s: its place, %llu bytes at byte offset %llu, is not on %s", text,
                        bytes, offset, w.device);
    } else if (meta != NULL) {
        ht_fsck_problem(f, HT_FSCK_REF_META, &w, "%s: its place, %llu bytes at byte offset %llu of %s, is that of %s",
                        text, bytes, offset, w.device, meta);
    } else {
        if (other != NULL)
            ht_fsck_item_text(f, other, other_text, sizeof(other_text), &other_owner);
        ht_fsck_problem(f, HT_FSCK_REF_OVERLAP, &w,
                        "%s: its place, %llu bytes at byte offset %llu of %s, belongs also to %s", text, bytes, offset,
                        w.device, other != NULL ? other_text : "another chunk");
    }
}

static int check_conflicts(struct ht_fsck *f)
{
    size_t count = ht_store_conflicts(f->store, NULL, 0);
    struct ht_ref_conflict *list;

    if (count == 0)
        return 0;
    list = calloc(count, sizeof(*list));
    if (list == NULL)
        return -ENOMEM;
    count = ht_min_u64(count, ht_store_conflicts(f->store, list, count));
    for (size_t i = 0; i < count; i++)
        tell_conflict(f, &list[i], i < PARTNERS_MAX);
    free(list);
    return 0;
}

/* items[first...end) are one object's. */
static void check_owner(struct ht_fsck *f, size_t first, size_t end)
{
    static struct ht_fsck_owner owner;
    struct ht_fsck_where w = {HT_FSCK_NOWHERE};

    f->objects++;
    ht_fsck_owner(f, f->items[first].oid, &owner);
    if (owner.known)
        return;
    w.object = f->items[first].oid;
    w.bytes = 0;
    for (size_t i = first; i < end; i++)
        w.bytes += f->items[i].stored;
    ht_fsck_problem(f, HT_FSCK_REF_ORPHAN, &w,
                    "object %llu (%zu chunks, %llu bytes) belongs to no file and no optimizer",
                    (unsigned long long)w.object, end - first, (unsigned long long)w.bytes);
}

int ht_fsck_pass_refs(struct ht_fsck *f)
{
    int ret = ht_fsck_items_load(f);

    if (ret == 0)
        ret = check_conflicts(f);
    if (ret < 0)
        return ret;
    for (size_t first = 0, end; first < f->item_count; first = end) {
        for (end = first + 1; end < f->item_count && f->items[end].oid == f->items[first].oid;)
            end++;
        check_owner(f, first, end);
    }
    return 0;
}
