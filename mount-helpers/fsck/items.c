/* SPDX-License-Identifier: Apache-2.0 */
/* items.c - the list of stored chunks and of their owners: 48 bytes each, one for every owner of shared content. */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/codec/codec.h"
#include "tiering/api/check.h"

static int add_frags(struct ht_fsck *f, const struct ht_chunk_info *info)
{
    int rc = ht_array_grow((void **)&f->frags, &f->frag_cap, f->frag_count + info->extent_count, sizeof(*f->frags));

    if (rc == 0 && f->frag_count + info->extent_count > UINT32_MAX)
        rc = -EOVERFLOW;
    if (rc < 0)
        return rc;
    memcpy(&f->frags[f->frag_count], info->extents, info->extent_count * sizeof(*f->frags));
    f->frag_count += info->extent_count;
    return 0;
}

static int add_item(void *ctx, const struct ht_chunk_info *info)
{
    const struct ht_codec_sizes z = {info->codec, info->extent_count, info->stored_bytes, info->visible_bytes,
                                     info->checksum};
    struct ht_fsck *f = ctx;
    struct ht_fsck_item *it;
    int rc;

    if (info->codec == HT_CODEC_LOST) {
        f->lost_chunks++;
        return 0;
    }
    /* replay has checked these numbers: make sure that narrower fields hold them */
    if (!ht_codec_sizes_valid(&z) || info->index > UINT32_MAX || info->extents[0].device > HT_DEVICE_VAULT ||
        info->chunk_bytes == 0)
        return -EUCLEAN;
    rc = ht_array_grow((void **)&f->items, &f->item_cap, f->item_count + 1, sizeof(*f->items));
    if (rc < 0)
        return rc;
    it = &f->items[f->item_count];
    *it = (struct ht_fsck_item){
        .oid = info->oid,
        .checksum = info->checksum,
        .block = info->extents[0].block,
        .index = (uint32_t)info->index,
        .stored = info->stored_bytes,
        .visible = info->visible_bytes,
        .frag_first = (uint32_t)f->frag_count,
        .frag_count = (uint16_t)info->extent_count,
        .device = (uint8_t)info->extents[0].device,
        .chunk_shift = (uint8_t)__builtin_ctz(info->chunk_bytes),
        .codec = info->codec,
    };
    if (info->extent_count > 1)
        rc = add_frags(f, info);
    if (rc < 0)
        return rc;
    bool cold = it->device == HT_DEVICE_VAULT;
    for (unsigned i = 0; i < info->extent_count && f->opt.degraded && !cold; i++)
        it->unreadable |= !f->member[info->extents[i].device];
    f->missing_chunks += it->unreadable;
    f->cold_chunks += cold;
    f->cold_bytes += cold ? info->stored_bytes : 0;
    f->item_count++;
    f->stored_bytes += info->stored_bytes;
    return 0;
}

static int by_owner(const void *a, const void *b)
{
    const struct ht_fsck_item *x = a, *y = b;

    return ht_fsck_order(x->oid, y->oid, ht_fsck_order(x->index, y->index, 0));
}

int ht_fsck_items_load(struct ht_fsck *f)
{
    int rc = ht_store_walk(f->store, add_item, f);

    if (rc != 0)
        return ht_fail(rc < 0 ? rc : -EIO, "cannot list the stored chunks: %s", strerror(-rc));
    if (f->item_count > 1)
        qsort(f->items, f->item_count, sizeof(*f->items), by_owner);
    return 0;
}

struct ht_extent ht_fsck_item_extent(const struct ht_fsck *f, const struct ht_fsck_item *it, unsigned i)
{
    if (it->frag_count > 1)
        return f->frags[it->frag_first + i];
    return (struct ht_extent){
        .block = it->block, .blocks = (uint32_t)ht_div_up(it->stored, HT_BLOCK_BYTES), .device = it->device};
}

int ht_fsck_note(struct ht_fsck_notes *n, uint64_t id, uint64_t part)
{
    int rc = ht_array_grow((void **)&n->list, &n->cap, n->count + 1, sizeof(*n->list));

    if (rc == 0)
        n->list[n->count++] = (struct ht_fsck_note){id, part};
    return rc;
}

const char *ht_fsck_member_name(const struct ht_fsck *f, uint32_t index)
{
    const struct ht_dev *dev = index < HT_DEVICES_MAX ? f->member[index] : NULL;

    return index == HT_DEVICE_VAULT ? "the vault" : dev ? ht_dev_name(dev) : "a missing device";
}

/* -------------------------------------------------------------------- owners */

/* Path of a file from the mount's root; false when there is no such file. */
static bool inode_path(struct ht_fsck *f, uint64_t ino, char *buf, size_t cap)
{
    struct stat st;

    if (ht_ns_getattr(f->ns, ino, &st) != 0 || !S_ISREG(st.st_mode))
        return false;
    buf[0] = '/';
    buf[1] = '\0';
    ht_ns_path(f->ns, ino, buf + 1, cap - 1);
    return true;
}

/* The gradients of a step from which the next mount computes it again. */
static bool logged_step(struct ht_fsck *f, uint64_t oid, struct ht_fsck_owner *out)
{
    uint64_t root, step;

    out->known = out->logged_step = ht_optim_redo_owner(f->optim, oid, &root, &step) == 0;
    if (!out->known)
        return false;
    size_t used =
        (size_t)snprintf(out->path, sizeof(out->path), "gradients of step %llu of model /", (unsigned long long)step);
    ht_ns_path(f->ns, root, out->path + used, sizeof(out->path) - used);
    return true;
}

void ht_fsck_owner(struct ht_fsck *f, uint64_t oid, struct ht_fsck_owner *out)
{
    uint64_t parameter;

    out->state = NULL;
    out->logged_step = false;
    out->known = inode_path(f, oid, out->path, sizeof(out->path));
    if (out->known)
        return;
    if (ht_optim_state_owner(f->optim, oid, &parameter, &out->state) == 0) {
        out->known = true;
        if (!inode_path(f, parameter, out->path, sizeof(out->path)))
            snprintf(out->path, sizeof(out->path), "parameter %llu, which has no file", (unsigned long long)parameter);
        return;
    }
    out->state = NULL;
    if (logged_step(f, oid, out))
        return;
    snprintf(out->path, sizeof(out->path), "object %llu without an owner", (unsigned long long)oid);
}

void ht_fsck_item_text(struct ht_fsck *f, const struct ht_fsck_item *it, char *buf, size_t cap,
                       struct ht_fsck_owner *out_owner)
{
    uint64_t first = (uint64_t)it->index << it->chunk_shift;

    ht_fsck_owner(f, it->oid, out_owner);
    snprintf(buf, cap, "%s%s%s%s, chunk %u (bytes %llu to %llu)", out_owner->path, out_owner->state ? ", state " : "",
             out_owner->state ? out_owner->state : "", out_owner->state ? " of its optimizer" : "", it->index,
             (unsigned long long)first,
             (unsigned long long)(first + (it->visible != 0 ? it->visible : it->stored) - 1));
}
