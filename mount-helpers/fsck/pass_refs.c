/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_refs.c - references: inside the devices, clear of superblocks and logs, apart from each other unless they are
 * clones (which name the very same: replay has counted them), and owned.
 */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/api/check.h"

/* For so many conflicts the other owner is searched for, which reads every reference. */
enum { PARTNERS_MAX = 100 };

static bool overlap(uint64_t a, uint64_t a_len, uint64_t b, uint64_t b_len)
{
    return a < b + b_len && b < a + a_len;
}

/* The name of the store's metadata that lies in a range of a device, or NULL. */
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
    struct ht_fsck_item *it = f->items;
    size_t at = 0;

    HT_PARTITION_POINT(at, f->item_count, i, it[i].oid < oid || (it[i].oid == oid && it[i].index < index));
    return at < f->item_count && it[at].oid == oid && it[at].index == index ? &it[at] : NULL;
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

struct conflict {
    const struct ht_ref_conflict *c;
    char text[HT_FSCK_PATH_MAX + 128]; /* whose it is, and which chunk */
    struct ht_fsck_where where;
    unsigned long long offset, bytes;
};

static bool report_overlap(struct ht_fsck *f, const struct conflict *k, bool search)
{
    static char text[HT_FSCK_PATH_MAX + 128];
    static struct ht_fsck_owner owner;
    struct ht_fsck_item *other = search ? find_partner(f, k->c) : NULL;

    if (other)
        ht_fsck_item_text(f, other, text, sizeof(text), &owner);
    f->overlaps |= ht_fsck_problem(f, HT_FSCK_REF_OVERLAP, &k->where,
                                   "%s: its place, %llu bytes at byte offset %llu of %s, belongs also to %s", k->text,
                                   k->bytes, k->offset, k->where.device, other ? text : "another chunk");
    return false; /* the checksums decide which one is lost */
}

/* True: the chunk is to be marked lost. */
static bool report_place(struct ht_fsck *f, const struct conflict *k, bool search)
{
    const char *meta = k->c->error == -EEXIST ? find_meta(f, k->c) : NULL;

    if (k->c->error == -EFBIG)
        return ht_fsck_problem(f, HT_FSCK_REF_SIZE, &k->where, "%s: the stored content is larger than its chunk",
                               k->text);
    if (k->c->error == -ENXIO)
        return ht_fsck_problem(f, HT_FSCK_REF_VAULT, &k->where, "%s: it lies in a vault, and the log names none",
                               k->text);
    if (k->c->error == -ERANGE)
        return ht_fsck_problem(f, HT_FSCK_REF_RANGE, &k->where,
                               "%s: its place, %llu bytes at byte offset %llu, is not on %s", k->text, k->bytes,
                               k->offset, k->where.device);
    if (!meta)
        return report_overlap(f, k, search);
    return ht_fsck_problem(f, HT_FSCK_REF_META, &k->where,
                           "%s: its place, %llu bytes at byte offset %llu of %s, is that of %s", k->text, k->bytes,
                           k->offset, k->where.device, meta);
}

static int report_conflict(struct ht_fsck *f, const struct ht_ref_conflict *c, bool search)
{
    static struct ht_fsck_owner owner;
    static struct conflict k;
    struct ht_fsck_item *it = find_item(f, c->oid, c->index);

    if (it && it->unreadable)
        return 0; /* another of its pieces was reported, or is missing */
    k = (struct conflict){
        .c = c, .offset = c->block * HT_BLOCK_BYTES, .bytes = (unsigned long long)c->blocks * HT_BLOCK_BYTES};
    if (it) {
        ht_fsck_item_text(f, it, k.text, sizeof(k.text), &owner);
    } else { /* a mark */
        ht_fsck_owner(f, c->oid, &owner);
        snprintf(k.text, sizeof(k.text), "%s, chunk %llu", owner.path, (unsigned long long)c->index);
    }
    k.where = (struct ht_fsck_where){.device = ht_fsck_member_name(f, c->device),
                                     .offset = HT_FSCK_AT(k.offset),
                                     .bytes = HT_FSCK_AT(k.bytes),
                                     .object = HT_FSCK_AT(c->oid),
                                     .chunk = HT_FSCK_AT(c->index),
                                     .path = owner.path,
                                     .state = owner.state};
    bool lose = report_place(f, &k, search);
    if (it)
        it->unreadable = c->error != -EEXIST || find_meta(f, c);
    return ht_fsck_lose(f, c->oid, c->index, lose);
}

static void report_undescribed(struct ht_fsck *f, uint64_t oid)
{
    const struct ht_fsck_where w = {.object = HT_FSCK_AT(oid)};

    ht_fsck_problem(f, HT_FSCK_REF_OBJECT, &w, "object %llu has content, but nothing says how large it is",
                    (unsigned long long)oid);
}

static int by_chunk(const void *a, const void *b)
{
    const struct ht_ref_conflict *x = a, *y = b;

    return ht_fsck_order(x->oid, y->oid, ht_fsck_order(x->index, y->index, ht_fsck_order(x->block, y->block, 0)));
}

/* Undescribed objects first: without them nothing is repaired. */
static int report_conflicts(struct ht_fsck *f, struct ht_ref_conflict *list, size_t count)
{
    unsigned searched = 0;
    int rc = 0;

    qsort(list, count, sizeof(*list), by_chunk);
    for (size_t i = 0; i < count; i++)
        if (list[i].error == -ENOENT)
            report_undescribed(f, list[i].oid);
    for (size_t i = 0; rc == 0 && i < count; i++)
        if (list[i].error != -ENOENT)
            rc = report_conflict(f, &list[i], searched++ < PARTNERS_MAX);
    return rc;
}

/* -------------------------------------------------------------- contested */

/* A stretch of a device that two references share at least in part. */
struct stretch {
    uint32_t device;
    uint64_t first, end; /* blocks */
};

static int by_stretch(const void *a, const void *b)
{
    const struct stretch *x = a, *y = b;

    return ht_fsck_order(x->device, y->device, ht_fsck_order(x->first, y->first, 0));
}

/* Sorted and apart. Returns how many. */
static size_t merge_stretches(struct stretch *s, size_t count)
{
    size_t n = 0;

    qsort(s, count, sizeof(*s), by_stretch);
    for (size_t i = 1; i < count; i++)
        if (s[i].device == s[n].device && s[i].first <= s[n].end)
            s[n].end = ht_max_u64(s[n].end, s[i].end);
        else
            s[++n] = s[i];
    return count != 0 ? n + 1 : 0;
}

static bool touches(const struct stretch *s, size_t count, const struct ht_extent *e)
{
    size_t at = 0; /* the first stretch that ends after the extent's first block */

    HT_PARTITION_POINT(at, count, i, s[i].device < e->device || (s[i].device == e->device && s[i].end <= e->block));
    return at < count && s[at].device == e->device && s[at].first < e->block + e->blocks;
}

/*
 * A conflict names the reference that came second. Everything that touches its place is contested, also the first
 * owner.
 */
static int mark_contested(struct ht_fsck *f, const struct ht_ref_conflict *list, size_t count)
{
    struct stretch *s = calloc(count, sizeof(*s));
    size_t n = 0;

    if (!s)
        return -ENOMEM;
    for (size_t i = 0; i < count; i++)
        if (list[i].error == -EEXIST)
            s[n++] = (struct stretch){list[i].device, list[i].block, list[i].block + list[i].blocks};
    n = merge_stretches(s, n);
    for (size_t i = 0; i < f->item_count; i++)
        for (unsigned k = 0; k < f->items[i].frag_count && !f->items[i].contested; k++) {
            struct ht_extent e = ht_fsck_item_extent(f, &f->items[i], k);
            f->items[i].contested = touches(s, n, &e);
        }
    free(s);
    return 0;
}

static int check_conflicts(struct ht_fsck *f)
{
    size_t count = ht_store_conflicts(f->store, NULL, 0);
    struct ht_ref_conflict *list;

    if (count == 0)
        return 0;
    list = calloc(count, sizeof(*list));
    if (!list)
        return -ENOMEM;
    count = ht_min_u64(count, ht_store_conflicts(f->store, list, count));
    int rc = report_conflicts(f, list, count);
    if (rc == 0 && f->overlaps)
        rc = mark_contested(f, list, count);
    free(list);
    return rc;
}

/* The object has no name. If its number is that of a directory, say, it cannot become a file. */
static int report_orphan(struct ht_fsck *f, uint64_t oid, uint64_t bytes, size_t chunks)
{
    const struct ht_fsck_where w = {.object = HT_FSCK_AT(oid), .bytes = HT_FSCK_AT(bytes)};
    struct stat st;
    bool stranger = ht_ns_getattr(f->ns, oid, &st) == 0;

    if (!ht_fsck_problem(
            f, stranger ? HT_FSCK_REF_NUMBER : HT_FSCK_REF_ORPHAN, &w, "object %llu (%zu %s, %llu bytes) %s",
            (unsigned long long)oid, chunks, ht_plural(chunks, "chunk"), (unsigned long long)bytes,
            stranger ? "has the number of something that is no file" : "belongs to no file and no optimizer"))
        return 0;
    return ht_fsck_note(stranger ? &f->strangers : &f->orphans, oid, 0);
}

/* The content in the vault of one object, items[first...end), lies below a model root that says so. */
static int check_cold(struct ht_fsck *f, size_t first, size_t end)
{
    static struct ht_fsck_owner owner;
    struct ht_obj *obj = ht_obj_get(f->store, f->items[first].oid);
    struct ht_obj_stat st = {.scope = 0};
    char text[HT_NAME_BYTES_MAX + 1];
    struct stat root;

    if (obj)
        ht_obj_stat(obj, &st);
    ht_obj_put(obj);
    if (st.scope && ht_ns_getattr(f->ns, st.scope, &root)) /* deleted while open: a mount deletes the rest */
        return 0;
    if (st.scope && ht_ns_getxattr(f->ns, st.scope, HT_XATTR_PREFIX "cold", text, sizeof(text)) > 0)
        return 0;
    bool in_model = st.scope && !ht_ns_is_frozen(f->ns, st.scope);
    ht_fsck_owner(f, st.oid, &owner);
    const struct ht_fsck_where w = {.object = HT_FSCK_AT(st.oid), .path = owner.path};
    bool repair =
        ht_fsck_problem(f, HT_FSCK_NS_COLD, &w, "%s: chunks from %u on lie in the vault, and no attribute cold says so",
                        owner.path, f->items[first].index);
    if (in_model)
        return repair ? ht_fsck_note(&f->cold_roots, st.scope, 0) : 0;
    int rc = 0;
    for (size_t i = first; rc == 0 && i < end; i++)
        if (f->items[i].device == HT_DEVICE_VAULT)
            rc = ht_fsck_lose(f, f->items[i].oid, f->items[i].index, repair);
    return rc;
}

/* items[first...end) are one object's. */
static int check_owner(struct ht_fsck *f, size_t first, size_t end)
{
    static struct ht_fsck_owner owner;
    uint64_t bytes = 0;

    f->objects++;
    ht_fsck_owner(f, f->items[first].oid, &owner);
    if (owner.known || ht_store_unknown_records(f->store).count) /* one of these may name it */
        return 0;
    for (size_t i = first; i < end; i++)
        bytes += f->items[i].stored;
    return report_orphan(f, f->items[first].oid, bytes, end - first);
}

/* A program that does not know such chunks would take the store for damaged. */
static void check_mark(struct ht_fsck *f, uint64_t bit, uint64_t count, const char *what)
{
    if (count && !(ht_store_super(f->store)->feat_refuse & bit) &&
        ht_fsck_problem(f, HT_FSCK_REF_CODEC, NULL, "%llu %s %s, and the superblock does not say so",
                        (unsigned long long)count, count == 1 ? "chunk is" : "chunks are", what))
        f->unmarked |= bit;
}

static void check_codecs(struct ht_fsck *f)
{
    uint64_t count = 0;

    for (size_t i = 0; i < f->item_count; i++)
        count += f->items[i].codec == HT_CODEC_PLANES;
    check_mark(f, HT_FEAT_REFUSE_PLANES, count, "compressed");
    check_mark(f, HT_FEAT_REFUSE_COLD, f->cold_chunks, "in a vault");
    check_mark(f, HT_FEAT_REFUSE_LOST, f->lost_chunks, "marked lost");
}

int ht_fsck_pass_refs(struct ht_fsck *f)
{
    int rc = ht_fsck_items_load(f);

    if (rc == 0)
        check_codecs(f);
    if (rc == 0)
        rc = check_conflicts(f);
    for (size_t first = 0, end; rc == 0 && first < f->item_count; first = end) {
        for (end = first + 1; end < f->item_count && f->items[end].oid == f->items[first].oid;)
            end++;
        size_t cold = first; /* the first that is */
        while (cold < end && (f->items[cold].device != HT_DEVICE_VAULT || f->items[cold].unreadable))
            cold++;
        rc = check_owner(f, first, end);
        if (rc == 0 && cold < end)
            rc = check_cold(f, cold, end);
    }
    if (rc < 0)
        ht_error("cannot check the references: %s", strerror(-rc));
    return rc;
}
