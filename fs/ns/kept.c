/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kept.c - the list of kept steps, and their records.
 *
 * The list is in the order of their numbers, which is that of their age. It is short: searching it is cheap beside what
 * the caller does.
 */
#include "fs/ns/ns_priv.h"
#include "fs/ns/kept.h"

#include <stdlib.h>

/* -------------------------------------------------------------------- list */

struct ht_ns_kept_step *ht_ns_kept_step(struct ht_ns *ns, uint64_t ino)
{
    ht_list_for_each(p, &ns->kept) {
        struct ht_ns_kept_step *x = ht_list_entry(p, struct ht_ns_kept_step, link);
        if (x->about.ino == ino)
            return x;
    }
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
    x = malloc(sizeof(*x));
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

void ht_ns_kept_free_all(struct ht_ns *ns)
{
    ht_list_for_each_safe(p, next, &ns->kept)
        ht_ns_kept_remove(ns, ht_list_entry(p, struct ht_ns_kept_step, link));
}

/* A copy that the open transaction makes is not there yet. */
static bool is_there(struct ht_ns *ns, const struct ht_ns_kept_step *x) HT_REQUIRES_SHARED(HT_LOCK_NAMES)
{
    const struct ht_ns_inode *i = ht_ns_inode_find(ns, x->about.ino);

    return i && (i->flags & HT_NS_PUBLISHED) != 0;
}

bool ht_ns_has_kept(struct ht_ns *ns, uint64_t root)
{
    ht_list_for_each(p, &ns->kept) {
        if (ht_list_entry(p, struct ht_ns_kept_step, link)->about.root == root)
            return true;
    }
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
        ht_list_for_each(p, &ns->kept) {
            const struct ht_ns_kept_step *x = ht_list_entry(p, struct ht_ns_kept_step, link);
            if ((root == 0 || x->about.root == root) && is_there(ns, x))
                all[count++] = x->about;
        }
    ht_rwlock_unlock(ht_ns_lock(ns));
    if (!all)
        return -ENOMEM;
    *out = all;
    *out_count = count;
    return 0;
}

const struct ht_ns_kept_step *ht_ns_kept_named(struct ht_ns *ns, uint64_t root, const char *name)
{
    ht_list_for_each(p, &ns->kept) {
        const struct ht_ns_kept_step *x = ht_list_entry(p, struct ht_ns_kept_step, link);
        if (x->about.root == root && strcmp(x->about.name, name) == 0 && is_there(ns, x))
            return x;
    }
    return NULL;
}

int ht_ns_kept_find(struct ht_ns *ns, uint64_t root, const char *name, struct ht_ns_kept *out)
{
    const struct ht_ns_kept_step *x;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    x = ht_ns_kept_named(ns, root, name);
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

bool ht_ns_is_frozen(struct ht_ns *ns, uint64_t ino)
{
    const struct ht_ns_inode *i;
    bool frozen;

    ht_rwlock_rdlock(ht_ns_lock(ns));
    i = ht_ns_inode_live(ns, ino);
    frozen = i && ht_ns_frozen(i);
    ht_rwlock_unlock(ht_ns_lock(ns));
    return frozen;
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
