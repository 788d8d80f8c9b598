/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kept.c - the list of kept steps, and their records.
 *
 * The list is in the order of their numbers, which is that of their age. It is short: searching it is cheap beside what
 * the caller does.
 */
#include "fs/ns/kept.h"
#include "fs/ns/pending.h"

/* -------------------------------------------------------------------- list */

struct ht_ns_kept_step *ht_ns_kept_step(struct ht_ns *ns, uint64_t ino)
{
    ht_list_for_each_entry(x, &ns->kept, struct ht_ns_kept_step, link)
        if (x->about.ino == ino)
            return x;
    return NULL;
}

int ht_ns_kept_add(struct ht_ns *ns, const struct ht_ns_kept *about)
{
    struct ht_ns_kept_step *x = ht_ns_kept_step(ns, about->ino);
    struct ht_list *before = &ns->kept;

    if (x) {
        x->about = *about;
        return 0;
    }
    x = calloc(1, sizeof(*x));
    if (!x)
        return -ENOMEM;
    x->about = *about;
    ht_list_for_each(p, &ns->kept) {
        if (ht_list_entry(p, struct ht_ns_kept_step, link)->about.ino < about->ino)
            continue;
        before = p;
        break;
    }
    ht_list_add_tail(before, &x->link);
    ns->meta_bytes += sizeof(*x);
    return 0;
}

void ht_ns_kept_remove(struct ht_ns *ns, struct ht_ns_kept_step *x)
{
    ht_list_del(&x->link);
    ns->meta_bytes -= sizeof(*x);
    free(x);
}

/* A copy that the open transaction makes is not there yet. */
static bool is_there(struct ht_ns *ns, const struct ht_ns_kept_step *x) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *i = ht_ns_inode_find(ns, x->about.ino);

    return i && (i->flags & HT_NS_PUBLISHED) != 0;
}

bool ht_ns_has_kept(struct ht_ns *ns, uint64_t root)
{
    ht_list_for_each(p, &ns->kept)
        if (ht_list_entry(p, struct ht_ns_kept_step, link)->about.root == root)
            return true;
    return false;
}

int ht_ns_kept_list(struct ht_ns *ns, uint64_t root, struct ht_ns_kept **out, size_t *out_count)
{
    struct ht_ns_kept *all;
    size_t count = 0;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    ht_list_for_each(p, &ns->kept)
        count++;
    all = malloc((count + 1) * sizeof(*all));
    count = 0;
    if (all)
        ht_list_for_each_entry(x, &ns->kept, const struct ht_ns_kept_step, link)
            if ((root == 0 || x->about.root == root) && is_there(ns, x))
                all[count++] = x->about;
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (!all)
        return -ENOMEM;
    *out = all;
    *out_count = count;
    return 0;
}

struct ht_ns_kept_step *ht_ns_kept_named(struct ht_ns *ns, uint64_t root, const char *name)
{
    ht_list_for_each_entry(x, &ns->kept, struct ht_ns_kept_step, link)
        if (x->about.root == root && strcmp(x->about.name, name) == 0 && is_there(ns, x))
            return x;
    return NULL;
}

int ht_ns_kept_find(struct ht_ns *ns, uint64_t root, const char *name, struct ht_ns_kept *out)
{
    ht_rwlock_rdlock(ht_ns_lock(ns));
    const struct ht_ns_kept_step *x = ht_ns_kept_named(ns, root, name);
    if (x)
        *out = x->about;
    ht_rwlock_unlock(ht_ns_lock(ns));
    return x ? 0 : -ENOENT;
}

int ht_ns_kept_check_name(const char *name)
{
    size_t len = strlen(name);

    return !ht_ns_kept_name_valid(name, len) || strspn(name, "0123456789") == len ? -EINVAL : 0;
}

/* ----------------------------------------------------------------- records */

uint64_t ht_ns_kept_log_bytes(const struct ht_ns_kept *about)
{
    return HT_NS_KEPT_RECORD_BYTES + strlen(about->name);
}

void ht_ns_put_kept(struct ht_tx *tx, const struct ht_ns_kept *about)
{
    struct ht_ns_record r = {.type = HT_REC_NS_KEPT,
                             .ino = about->ino,
                             .root = about->root,
                             .step = about->step,
                             .time_ns = about->time_ns,
                             .name = about->name,
                             .name_len = (uint32_t)strlen(about->name)};

    ht_ns_record_encode(ht_tx_records(tx), &r);
}

/* ------------------------------------------------------------------- holds */

int ht_ns_kept_hold(struct ht_ns *ns, uint64_t root, const char *name, uint64_t *out_ino)
{
    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_kept_step *x = ht_ns_kept_named(ns, root, name);
    if (x) {
        x->holds++;
        *out_ino = x->about.ino;
    }
    ht_rwlock_unlock(ht_ns_lock(ns));
    return x ? 0 : -ENOENT;
}

void ht_ns_kept_release(struct ht_ns *ns, uint64_t ino)
{
    ht_rwlock_wrlock(ht_ns_lock(ns));
    struct ht_ns_kept_step *x = ht_ns_kept_step(ns, ino);
    if (x && x->holds)
        x->holds--;
    ht_rwlock_unlock(ht_ns_lock(ns));
}

/* ------------------------------------------------------------------- notes */

/* What follows the number; size: of out. The value is from the log: any bytes. */
static bool read_note(const struct ht_ns_inode *i, const char *name, char *out, size_t size)
    HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_xattr *x = ht_ns_xattr_find(i, name, strlen(name));
    const char *value = x ? ht_ns_xattr_value(x) : "";
    char expected[32];
    size_t n = (size_t)snprintf(expected, sizeof(expected), "%llu ", (unsigned long long)i->ino);

    if (!x || x->value_len <= n || x->value_len - n >= size || memcmp(value, expected, n) != 0)
        return false;
    memcpy(out, value + n, x->value_len - n);
    out[x->value_len - n] = '\0';
    return true;
}

static bool read_digest(const struct ht_ns_inode *i, char out[HT_NS_DIGEST_MAX]) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return read_note(i, HT_NS_DIGEST, out, HT_NS_DIGEST_MAX) && strspn(out, "0123456789abcdef") == HT_NS_DIGEST_MAX - 1;
}

static bool read_archived(const struct ht_ns_inode *i, char out[HT_KEPT_NAME_MAX + 1]) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    return read_note(i, HT_NS_ARCHIVED, out, HT_KEPT_NAME_MAX + 1) && ht_ns_kept_name_valid(out, strlen(out));
}

int ht_ns_kept_digest(struct ht_ns *ns, uint64_t ino, char out[HT_NS_DIGEST_MAX])
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    bool there = i && ht_ns_kept_step(ns, ino) && read_digest(i, out);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return there ? 0 : -ENODATA;
}

int ht_ns_kept_archived(struct ht_ns *ns, uint64_t ino, char out[HT_KEPT_NAME_MAX + 1])
{
    const struct ht_ns_inode *i = ht_ns_read_begin(ns, ino);
    bool there = i && ht_ns_kept_step(ns, ino) && read_archived(i, out);

    ht_rwlock_unlock(ht_ns_lock(ns));
    return there ? 0 : -ENODATA;
}

/* At once: a kept step has nothing that is pending. It takes the place of an earlier one. */
static int put_note(struct ht_ns_op *op, struct ht_ns_inode *i, const char *name, const char *text)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    char value[32 + HT_KEPT_NAME_MAX + 1];
    struct ht_ns_xattr *x;

    snprintf(value, sizeof(value), "%llu %s", (unsigned long long)i->ino, text);
    int rc = ht_ns_xattr_new(op->ns, name, strlen(name), value, strlen(value), &x);
    if (rc != 0)
        return rc;
    ht_ns_xattr_remove(op->ns, i, ht_ns_xattr_find(i, name, strlen(name)));
    x->state = HT_NS_CLEAN;
    x->next = i->xattrs;
    i->xattrs = x;
    ht_ns_put_xattr(op->tx, HT_REC_NS_XATTR, i->ino, x, 0);
    return 0;
}

static int note_locked(struct ht_ns_op *op, uint64_t ino, const char *job, const char *digits)
    HT_REQUIRES(HT_LOCK_NAMES)
{
    const struct ht_ns_kept_step *kept = ht_ns_kept_step(op->ns, ino);
    struct ht_ns_inode *i = kept && is_there(op->ns, kept) ? ht_ns_inode_live(op->ns, ino) : NULL;
    char present[HT_KEPT_NAME_MAX + 1];

    if (!i)
        return -ESTALE;
    bool known = read_digest(i, present);
    if (!job)
        return known ? -EEXIST : put_note(op, i, HT_NS_DIGEST, digits);
    if (known && strcmp(present, digits) != 0)
        return -EINVAL;
    return read_archived(i, present) && strcmp(present, job) == 0 ? 0 : put_note(op, i, HT_NS_ARCHIVED, job);
}

int ht_ns_kept_note(struct ht_ns *ns, uint64_t ino, const char *job, const char *digits)
{
    enum { NOTE_LOG_BYTES = 768 };
    struct ht_ns_op op;
    int rc = ht_ns_op_begin(ns, NOTE_LOG_BYTES, &op);

    if (rc)
        return rc;
    return ht_ns_op_end(&op, note_locked(&op, ino, job, digits));
}
