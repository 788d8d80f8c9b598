/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cold.c - models whose content lies in the store's vault: the vault itself, the places of blocks, and recalls.
 *
 * A recall runs in a thread of its own, one at a time in a store, because it waits for the vault:
 *
 *   recall --thread--> object after object, in blocks --all is here--> the attribute cold goes --> over
 *                        '--error, or the end of the mount--> over; user.hitrain.error has the reason
 */
#include "fs/ctl/hidden_priv.h"
#include "tiering/api/cold.h"

#include <unistd.h>

static const char cold_word[] = HT_XATTR_PREFIX "cold";

/* ------------------------------------------------------------------ the vault */

int ht_cold_vault(struct ht_call *q, uint64_t ino)
{
    char url[1024];
    int n = snprintf(url, sizeof(url), "%.*s", (int)q->cmd->path_len, q->cmd->path);
    int rc = n < (int)sizeof(url) ? ht_store_set_vault(q->ctl->store, q->cmd->numbers, url) : -ENAMETOOLONG;

    if (rc == -EBUSY)
        snprintf(q->err, HT_CTL_ERROR_MAX,
                 "content of this store lies in another vault: recall it, or delete it, first");
    else if (rc == -EPERM)
        snprintf(q->err, HT_CTL_ERROR_MAX, "the URL holds a password or a key, which lists of processes would show");
    else if (rc == -EINVAL || rc == -ENAMETOOLONG)
        snprintf(q->err, HT_CTL_ERROR_MAX, "neither a URL nor an absolute path");
    return rc;
}

ssize_t ht_cold_vault_text(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    struct ht_vault_info v;
    char digits[33];

    if (ino != HT_NS_ROOT_INO || ht_store_vault(c->store, &v))
        return -ENODATA;
    for (unsigned i = 0; i < sizeof(v.uuid); i++)
        snprintf(digits + 2 * i, 3, "%02x", v.uuid[i]);
    bool answered = v.answer_age_ns != UINT64_MAX;
    return snprintf(buf, cap, "%s %s state=%s answer_age=%lld\n", digits, v.url,
                    v.is_silent    ? "silent"
                        : answered ? "answers"
                                   : "unknown",
                    answered ? (long long)(v.answer_age_ns / 1000000000) : -1LL);
}

/* --------------------------------------------------------------- a cold root */

int ht_cold_begin_root(struct ht_call *q, uint64_t ino)
{
    struct ht_ctl *c = q->ctl;
    char now[HT_NAME_BYTES_MAX + 1];
    int rc = ht_ctl_owner(c, HT_NS_ROOT_INO, &q->caller);

    if (rc)
        return ht_ctl_refuse(q->err, rc, "cold: only root and the owner of the mount's root directory may");
    ssize_t n = ht_ns_getxattr(c->ns, q->root, cold_word, now, sizeof(now));
    if (n == (ssize_t)q->cmd->path_len && memcmp(now, q->cmd->path, (size_t)n) == 0)
        return 0;
    if (!ht_scope_is_empty(c->store, q->root))
        return ht_ctl_refuse(q->err, -EBUSY, "cold: the model has files already");
    return ht_ns_setxattr(c->ns, q->root, cold_word, q->cmd->path, q->cmd->path_len, 0);
}

/* May it have cold content? */
static bool is_cold(struct ht_ctl *c, uint64_t root)
{
    return ht_ns_getxattr(c->ns, root, cold_word, NULL, 0) > 0;
}

void ht_cold_settle(struct ht_ctl *c, uint64_t root)
{
    if (!is_cold(c, root))
        return;
    ht_mutex_lock(ht_ctl_root_lock(c)); /* no rollback makes it cold between */
    ht_mutex_lock(ht_ctl_cold_lock(c)); /* and nobody sets a place */
    if (ht_scope_is_warm(c->store, root))
        (void)!ht_ns_removexattr(c->ns, root, cold_word);
    ht_mutex_unlock(ht_ctl_cold_lock(c));
    ht_mutex_unlock(ht_ctl_root_lock(c));
}

/* --------------------------------------------------------------------- places */

struct places {
    struct ht_ctl *ctl;
    uint64_t root;
    const struct ht_obj_place *place;
    unsigned count;
};

/* While the root may have cold content: neither the end of its attribute nor an abort comes between. */
static int set_places(void *ctx, struct ht_obj *obj)
{
    const struct places *p = ctx;
    unsigned aborts = ht_obj_aborts(obj);

    ht_mutex_lock(ht_ctl_cold_lock(p->ctl));
    int rc = is_cold(p->ctl, p->root) ? ht_obj_set_places(obj, aborts, p->place, p->count) : -EINVAL;
    ht_mutex_unlock(ht_ctl_cold_lock(p->ctl));
    return rc;
}

static int subject_of(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, int mask, struct ht_subject *out,
                      uint64_t *out_root)
{
    struct ht_ns_tensor t;
    int rc = ht_ctl_owner(c, HT_NS_ROOT_INO, caller);

    if (!ht_hidden_subject(ino, out))
        return -ENOTTY;
    if (rc == 0)
        rc = ht_ctl_access(c, out->file, mask, caller);
    if (rc == 0)
        rc = ht_ns_tensor(c->ns, out->file, &t);
    if (rc == 0 && (!t.root || t.dtype == HT_DTYPE_NONE))
        rc = -EINVAL;
    *out_root = rc ? 0 : t.root;
    return rc;
}

static int with_object(struct ht_ctl *c, const struct ht_subject *s, bool make,
                       int (*fn)(void *ctx, struct ht_obj *obj), void *ctx)
{
    struct ht_param_desc desc;
    struct ht_obj *obj;
    const char *name;
    int rc;

    if (!s->is_state) {
        rc = ht_ns_open(c->ns, s->file, &obj);
        if (rc)
            return rc;
        rc = fn(ctx, obj);
        ht_ns_close(c->ns, s->file);
        return rc;
    }
    rc = ht_ctl_describe(c, s->file, &desc);
    if (rc)
        return rc;
    rc = ht_optim_state_name(c->optim, &desc, s->index, &name);
    if (rc == 0)
        rc = ht_optim_state_object(c->optim, &desc, name, make, fn, ctx);
    ht_ns_close(c->ns, s->file);
    return rc;
}

int ht_cold_set_places(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, const struct ht_ioctl_places *in)
{
    struct ht_obj_place place[HT_IOCTL_PLACES_MAX];
    struct places p = {.ctl = c, .place = place, .count = in->count};
    struct ht_subject s;
    int rc = subject_of(c, ino, caller, W_OK, &s, &p.root);

    if (rc == 0 && (in->count > HT_IOCTL_PLACES_MAX || in->reserved || !is_cold(c, p.root)))
        rc = -EINVAL;
    if (rc)
        return rc;
    for (unsigned i = 0; i < in->count; i++) {
        const struct ht_ioctl_place *from = &in->place[i];
        place[i] = (struct ht_obj_place){
            .index = from->index,
            .lease = from->lease,
            .segment = from->segment,
            .unit = from->unit,
            .stored = from->stored[0] | (uint32_t)from->stored[1] << 8 | (uint32_t)from->stored[2] << 16,
            .codec = from->codec,
            .checksum = from->checksum,
        };
    }
    rc = with_object(c, &s, true, set_places, &p);
    if (!s.is_state)
        ht_ctl_drop_data(c, s.file, 0, 0);
    return rc;
}

struct telling {
    uint64_t from;
    struct ht_obj_place place[HT_IOCTL_PLACES_MAX];
    unsigned count;
};

static int tell_places(void *ctx, struct ht_obj *obj)
{
    struct telling *t = ctx;

    t->count = ht_obj_places(obj, t->from, t->place, HT_IOCTL_PLACES_MAX);
    return 0;
}

int ht_cold_tell_places(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, struct ht_ioctl_places *io)
{
    struct telling t = {.from = io->place[0].index};
    struct ht_subject s;
    uint64_t root;
    int rc = subject_of(c, ino, caller, R_OK, &s, &root);

    if (rc == 0)
        rc = with_object(c, &s, false, tell_places, &t);
    if (rc)
        return rc;
    memset(io, 0, sizeof(*io));
    io->count = t.count;
    for (unsigned i = 0; i < t.count; i++) {
        const struct ht_obj_place *p = &t.place[i];
        io->place[i] = (struct ht_ioctl_place){
            .index = (uint32_t)p->index,
            .lease = p->lease,
            .segment = (uint16_t)p->segment,
            .unit = (uint16_t)p->unit,
            .stored = {(uint8_t)p->stored, (uint8_t)(p->stored >> 8), (uint8_t)(p->stored >> 16)},
            .codec = p->codec,
            .checksum = p->checksum,
        };
    }
    return 0;
}

/* --------------------------------------------------------------------- recall */

struct ht_recall {
    struct ht_ctl *ctl;
    pthread_t thread;
    uint64_t root, file; /* file 0: all of the root */
    _Atomic bool stop, over;
};

static bool stops(void *ctx)
{
    const struct ht_recall *r = ctx;

    return r->stop;
}

static int recall_object(void *ctx, struct ht_obj *obj)
{
    struct ht_recall *r = ctx;

    return ht_obj_recall(obj, stops, r);
}

static int recall_file(struct ht_recall *r)
{
    struct ht_param_desc desc;
    const char *name;
    struct ht_subject s = {.file = r->file};
    int rc = with_object(r->ctl, &s, false, recall_object, r);

    if (rc || ht_ctl_describe(r->ctl, r->file, &desc))
        return rc;
    for (s.is_state = true; rc == 0 && ht_optim_state_name(r->ctl->optim, &desc, s.index, &name) == 0; s.index++) {
        rc = ht_optim_state_object(r->ctl->optim, &desc, name, false, recall_object, r);
        rc = rc == -EOPNOTSUPP || rc == -ENOENT ? 0 : rc;
    }
    ht_ns_close(r->ctl->ns, r->file);
    return rc;
}

static void *recall_main(void *arg)
{
    struct ht_recall *r = arg;
    struct ht_ctl *c = r->ctl;
    int rc = r->file ? recall_file(r) : ht_scope_recall(c->store, r->root, stops, r);

    if (rc && !r->stop)
        ht_last_error_set(c, r->root, "recall", "recall: %s",
                          rc == -EIO ? "the vault does not answer, or has other bytes; an event says more"
                                     : strerror(-rc));
    else if (!rc)
        ht_last_error_done(c, r->root, "recall");
    if (!rc)
        ht_cold_settle(c, r->root);
    if (r->file)
        ht_ns_forget(c->ns, r->file, 1);
    r->over = true;
    return NULL;
}

static void end(struct ht_recall *r)
{
    pthread_join(r->thread, NULL);
    free(r);
}

/* One that is over makes room. */
static int begin_recall(struct ht_ctl *c, struct ht_recall *r)
{
    struct ht_recall *was = NULL;
    int rc = -EBUSY;

    ht_mutex_lock(ht_ctl_lock(c));
    if (!c->recall || c->recall->over) {
        rc = -pthread_create(&r->thread, NULL, recall_main, r);
        was = rc ? NULL : c->recall;
        c->recall = rc ? c->recall : r;
    }
    ht_mutex_unlock(ht_ctl_lock(c));
    if (was)
        end(was);
    return rc;
}

int ht_cold_recall(struct ht_call *q, uint64_t ino)
{
    struct ht_ctl *c = q->ctl;
    struct ht_ns_tensor t = {.root = q->root};
    struct stat st;
    int rc = ino ? ht_ns_tensor(c->ns, ino, &t) : 0;

    if (rc == 0 && (!q->root || t.root != q->root))
        rc = -EINVAL;
    if (rc == 0)
        rc = ht_ctl_owner(c, q->root, &q->caller);
    if (rc == -EPERM)
        snprintf(q->err, HT_CTL_ERROR_MAX, "recall: only the owner of the model's directory may, or root");
    struct ht_recall *r = rc ? NULL : calloc(1, sizeof(*r));
    if (!r)
        return rc ? rc : -ENOMEM;
    *r = (struct ht_recall){.ctl = c, .root = q->root, .file = ino};
    rc = ino ? ht_ns_lookup_ino(c->ns, ino, false, &st) : 0; /* the thread has a lookup count of its own */
    if (rc == 0) {
        rc = begin_recall(c, r);
        if (rc && ino)
            ht_ns_forget(c->ns, ino, 1);
        if (rc == -EBUSY)
            snprintf(q->err, HT_CTL_ERROR_MAX, "a recall runs already");
    }
    if (rc)
        free(r);
    return rc;
}

ssize_t ht_cold_recall_text(struct ht_ctl *c, uint64_t ino, char *buf, size_t cap)
{
    ht_mutex_lock(ht_ctl_lock(c));
    bool runs = c->recall && c->recall->root == ino && !c->recall->over;
    ht_mutex_unlock(ht_ctl_lock(c));
    return runs ? snprintf(buf, cap, "running") : -ENODATA;
}

void ht_recalls_end(struct ht_ctl *c)
{
    ht_mutex_lock(ht_ctl_lock(c));
    struct ht_recall *r = c->recall;
    c->recall = NULL;
    ht_mutex_unlock(ht_ctl_lock(c));
    if (!r)
        return;
    r->stop = true;
    end(r);
}
