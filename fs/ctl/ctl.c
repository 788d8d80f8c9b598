/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ctl.c - binds names, optimizer and the client's caches together.
 *
 * Owns the hooks that fs/ns and optim call. Threads: hooks run on the thread of the caller. Hooks inside a transaction
 * must not reach the cache (the kernel may hold a lock that a request waiting for this transaction holds). Entries that
 * an abort made stale are therefore collected here and dropped afterwards.
 */
#include "fs/ctl/events.h"

#include <unistd.h>

/* ------------------------------------------------------------------- hooks */

static void hook_deleted(void *ctx, uint64_t ino, bool pending, struct ht_tx *tx)
{
    struct ht_ctl *c = ctx;

    ht_optim_param_deleted(c->optim, ino, pending, tx);
    (void)ht_last_error_clear(c, ino);
}

static int hook_publish_alone(void *ctx, uint64_t root, const uint64_t *inos, size_t count)
{
    struct ht_ctl *c = ctx;

    return ht_optim_publish_alone(c->optim, root, inos, count);
}

static void hook_published_alone(void *ctx, uint64_t root)
{
    struct ht_ctl *c = ctx;

    ht_optim_published_alone(c->optim, root);
}

static bool hook_renamed(void *ctx, uint64_t ino)
{
    struct ht_ctl *c = ctx;

    return ht_optim_renamed(c->optim, ino);
}

static void hook_invalidate(void *ctx, uint64_t oid, uint64_t off, uint64_t len)
{
    ht_ctl_drop_data(ctx, oid, off, len);
}

static void hook_stale(void *ctx, uint64_t ino, uint64_t parent, const char *name)
{
    struct ht_ctl *c = ctx;
    size_t len = name ? strlen(name) : 0;
    struct ht_stale *s = malloc(sizeof(*s) + len + 1);

    if (s) {
        s->ino = ino;
        s->parent = parent;
        memcpy(s->name, name ? name : "", len + 1);
    }
    ht_mutex_lock(ht_ctl_lock(c));
    if (s) {
        s->next = c->stale;
        c->stale = s;
    } else {
        c->stale_lost = true;
    }
    ht_mutex_unlock(ht_ctl_lock(c));
    ht_ctl_changed(c);
}

static void hook_name(void *ctx, uint64_t oid, char *buf, size_t cap)
{
    struct ht_ctl *c = ctx;

    ht_ns_path(c->ns, oid, buf, cap);
}

static enum ht_optim_file hook_file(void *ctx, uint64_t oid)
{
    static const enum ht_optim_file files[] = {[HT_NS_NAMED] = HT_OPTIM_FILE_NAMED,
                                               [HT_NS_ORPHAN] = HT_OPTIM_FILE_UNLINKED,
                                               [HT_NS_DELETED] = HT_OPTIM_FILE_DELETED};
    struct ht_ctl *c = ctx;

    return files[ht_ns_life(c->ns, oid)];
}

static void hook_taken_back(void *ctx)
{
    ht_ctl_drop_stale(ctx);
    ht_endurance_apply(ctx);
}

static bool hook_half_made(void *ctx, uint64_t root)
{
    char err[HT_CTL_ERROR_MAX];

    return ht_ctl_need_whole(ctx, root, false, err) != 0;
}

static void hook_replay_begins(void *ctx, uint64_t root)
{
    const struct ht_ctl *c = ctx;

    if (c->cache)
        c->cache->replay_begins(c->cache->ctx, root);
}

void ht_ctl_link(struct ht_ctl *c, struct ht_list *head, struct ht_list *link)
{
    ht_mutex_lock(ht_ctl_lock(c));
    ht_list_add_tail(head, link);
    ht_mutex_unlock(ht_ctl_lock(c));
}

void ht_ctl_unlink(struct ht_ctl *c, struct ht_list *link)
{
    ht_mutex_lock(ht_ctl_lock(c));
    ht_list_del(link);
    ht_mutex_unlock(ht_ctl_lock(c));
}

void ht_ctl_drop_data(struct ht_ctl *c, uint64_t ino, uint64_t off, uint64_t len)
{
    const struct ht_ctl_cache *cache = c->cache;

    if (cache)
        cache->drop_data(cache->ctx, ino, off, len);
}

void ht_ctl_drop_stale(struct ht_ctl *c)
{
    const struct ht_ctl_cache *cache = c->cache;

    ht_mutex_lock(ht_ctl_lock(c));
    struct ht_stale *list = c->stale;
    bool lost = c->stale_lost;
    c->stale = NULL;
    c->stale_lost = false;
    ht_mutex_unlock(ht_ctl_lock(c));
    if (lost)
        ht_event(
            HT_EVENT_STALE_CACHE, NULL,
            "memory ran out during an abort: clients may see names and bytes from before it until they look again");
    while (list) {
        struct ht_stale *s = list;
        list = s->next;
        if (cache && s->name[0])
            cache->drop_name(cache->ctx, s->parent, s->name);
        if (s->ino)
            ht_ctl_drop_data(c, s->ino, 0, 0);
        free(s);
    }
}

int ht_ctl_prefetch(struct ht_ctl *c, uint64_t ino, struct ht_obj *obj)
{
    const struct ht_ctl_cache *cache = c->cache;
    struct ht_trace_mark mark = ht_trace_begin();
    int rc = cache && cache->bring(cache->ctx, ino, obj) ? 0 : ht_obj_prefetch(obj);

    ht_trace_end(ht_store_trace(c->store), &mark, HT_TRACE_PREFETCH, ino, 0, ht_obj_size(obj));
    return rc;
}

/* --------------------------------------------------------------- endurance */

/* Bytes that the devices may take per day. 0: none, or a senseless one, which only another program can have stored. */
static uint64_t budget_of(struct ht_ctl *c)
{
    char text[64];
    ssize_t n = ht_ns_getxattr(c->ns, HT_NS_ROOT_INO, HT_XATTR_PREFIX "endurance", text, sizeof(text));
    uint64_t bytes;

    return n > 0 && ht_parse_bytes(text, (size_t)n, &bytes) == 0 ? bytes : 0;
}

/* The thread that changed it last finds no other value than its own, so the store has that in the end. */
void ht_endurance_apply(struct ht_ctl *c)
{
    uint64_t bytes;

    do {
        bytes = budget_of(c);
        ht_store_set_endurance(c->store, bytes);
    } while (budget_of(c) != bytes);
}

/* -------------------------------------------------------------------- life */

int ht_ctl_new(struct ht_store *s, const char *options, struct ht_ctl **out)
{
    struct ht_ctl *c = calloc(1, sizeof(*c));

    if (!c)
        return -ENOMEM;
    c->store = s;
    c->options = options;
    c->epoch = 1;
    ht_list_init(&c->files);
    ht_list_init(&c->dirs);
    HT_UNSHARED(HT_LOCK_CTL);
    ht_list_init(&c->shards.lists);
    ht_list_init(&c->gathers.users);
    c->gathers.members.max = HT_GATHER_MEMBERS_OF_ALL_MAX;
    ht_mutex_init(&c->lock, HT_LOCK_CTL);
    ht_mutex_init(&c->root_lock, HT_LOCK_ROOTS);
    ht_mutex_init(&c->cold_lock, HT_LOCK_COLD);
    ht_rwlock_init(&c->words_lock, HT_LOCK_WORDS);
    ht_list_init(&c->earlier_roots);
    ht_mutex_init(&c->name_lock, HT_LOCK_EVENT_NAMES);
    c->ns_hooks = (struct ht_ns_hooks){
        .ctx = c,
        .deleted = hook_deleted,
        .publish_alone = hook_publish_alone,
        .published_alone = hook_published_alone,
        .stale = hook_stale,
        .renamed = hook_renamed,
    };
    c->optim_hooks = (struct ht_optim_hooks){
        .ctx = c,
        .invalidate = hook_invalidate,
        .name = hook_name,
        .file = hook_file,
        .override = ht_override_of,
        .taken_back = hook_taken_back,
        .half_made = hook_half_made,
        .replay_begins = hook_replay_begins,
    };
    int rc = ht_events_start(c);
    if (rc) {
        ht_ctl_free(c);
        return rc;
    }
    *out = c;
    return 0;
}

void ht_ctl_attach(struct ht_ctl *c, struct ht_ns *ns, struct ht_optim *o)
{
    c->ns = ns;
    c->optim = o;
    ht_mutex_lock(ht_ctl_name_lock(c));
    c->attached = true;
    ht_mutex_unlock(ht_ctl_name_lock(c));
}

void ht_ctl_detach(struct ht_ctl *c)
{
    ht_event_log_drain(c->events);
    ht_mutex_lock(ht_ctl_name_lock(c));
    c->attached = false;
    ht_mutex_unlock(ht_ctl_name_lock(c));
}

static int start_root(void *ctx, uint64_t ino)
{
    struct ht_ctl *c = ctx;
    struct ht_optim_config config;
    char err[HT_OPTIM_ERROR_MAX], path[256];
    struct ht_tx *tx = NULL;
    int rc = ht_optimizer_read(c, ino, &config, err);

    if (rc) {
        ht_ns_path(c->ns, ino, path, sizeof(path));
        ht_error("model root /%s: %s", path, rc == -EINVAL ? err : strerror(-rc));
        return rc == -EINVAL || rc == -ENODATA ? -EUCLEAN : rc;
    }
    if (ht_store_read_only(c->store)) /* replay found the root: this puts nothing into the log */
        return ht_optim_root_add(c->optim, ino, &config, NULL);
    rc = ht_tx_begin(c->store, 0, &tx);
    if (rc)
        return rc;
    rc = ht_optim_root_add(c->optim, ino, &config, tx);
    int end = ht_tx_commit(tx, NULL);
    return rc ? rc : end;
}

int ht_ctl_start(struct ht_ctl *c)
{
    ht_endurance_apply(c);
    return ht_ns_roots(c->ns, start_root, c);
}

void ht_ctl_free(struct ht_ctl *c)
{
    if (!c)
        return;
    c->cache = NULL;
    ht_ctl_drop_stale(c);
    ht_events_stop(c);
    ht_shard_forget_all(c);
    ht_mutex_destroy(&c->name_lock);
    ht_mutex_destroy(&c->lock);
    ht_mutex_destroy(&c->root_lock);
    ht_mutex_destroy(&c->cold_lock);
    ht_override_forget_all(c);
    ht_rwlock_destroy(&c->words_lock);
    free(c->digests);
    free(c);
}

struct ht_ctl_parts ht_ctl_parts(struct ht_ctl *c)
{
    return (struct ht_ctl_parts){c->store, c->ns, c->optim, &c->traffic, &c->ns_hooks, &c->optim_hooks};
}

void ht_ctl_set_cache(struct ht_ctl *c, const struct ht_ctl_cache *cache)
{
    c->cache = cache;
}

/* ----------------------------------------------------------------- queries */

uint32_t ht_ctl_epoch(struct ht_ctl *c)
{
    return c->epoch;
}

void ht_ctl_changed(struct ht_ctl *c)
{
    c->epoch++;
}

/* ------------------------------------------------------------------ errors */

void ht_ctl_write_failed(struct ht_ctl *c, uint64_t ino, uint64_t off, uint64_t len, int error, bool unseen)
{
    const struct ht_event_about about = {.id = ino, .error = error};
    struct ht_obj *obj;

    if (ht_ns_open(c->ns, ino, &obj) == 0) {
        ht_obj_note_error(obj, error, unseen);
        ht_ns_close(c->ns, ino);
    }
    ht_event(error == -ENOSPC ? HT_EVENT_NO_SPACE : HT_EVENT_WRITE_REFUSED, &about,
             "%s of %llu bytes at %llu failed: %s", unseen ? "write of mapped pages" : "write", (unsigned long long)len,
             (unsigned long long)off, strerror(-error));
}

/* -------------------------------------------------------------- durability */

/* Checks first, because writing back a parameter that may not be published is wasted work. */
int ht_ctl_fsync(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller)
{
    uint64_t root = ht_ctl_param(c, ino);
    struct ht_root_stat st;
    bool open = root &&
        ((ht_optim_root_stat(c->optim, root, &st) == 0 && st.open) || ht_optim_param_unpublished(c->optim, ino));
    int rc = open ? -EBUSY : ht_ns_fsync(c->ns, ino);

    if (rc == -EBUSY)
        ht_last_error_set_for(
            c, ino, caller, "fsync",
            "fsync of a parameter (or of a directory with a new one) while a step is open or not durable: commit the "
            "model root instead");
    else if (rc == 0)
        ht_last_error_done(c, ino, "fsync");
    return rc;
}

bool ht_ctl_is_root(struct ht_ctl *c, uint64_t dir)
{
    struct ht_ns_tensor t;

    return ht_ns_tensor(c->ns, dir, &t) == 0 && t.is_root;
}

int ht_ctl_need_whole(struct ht_ctl *c, uint64_t root, bool or_claimed, char err[HT_CTL_ERROR_MAX])
{
    char text[HT_MAKING_MAX + 1] = "", now[HT_MAKING_MAX];
    ssize_t n = ht_ns_getxattr(c->ns, root, HT_XATTR_PREFIX "making", text, HT_MAKING_MAX);
    struct ht_redo_steps s;
    struct ht_root_stat st;

    if (n <= 0 || ht_optim_redo_steps(c->optim, root, &s) || ht_optim_root_stat(c->optim, root, &st))
        return 0;
    snprintf(now, sizeof(now), " %llu %llu", (unsigned long long)s.lineage, (unsigned long long)s.publications);
    const char *when = strchr(text, ' ');
    if (!when || strcmp(when, now) != 0 || (or_claimed && !st.open && st.claimed_by[0]))
        return 0;
    return ht_ctl_refuse(
        err, -EBUSY,
        "this model is half-made: make it anew, abort to take it back, or remove its attribute " HT_XATTR_PREFIX
        "making to take it so");
}

int ht_ctl_commit(struct ht_ctl *c, uint64_t root, const struct ht_caller *caller)
{
    struct ht_trace_mark mark = ht_trace_begin();
    char err[HT_CTL_ERROR_MAX];
    int rc = ht_ctl_may_steer(c, root, caller);

    if (ht_ns_is_frozen(c->ns, root)) /* it is durable as it is */
        return 0;
    if (!rc && (rc = ht_ctl_need_whole(c, root, false, err)) != 0)
        ht_last_error_set(c, root, "fsync", "fsync: %s", err);
    if (!rc)
        rc = ht_optim_commit_by(c->optim, root, &(struct ht_optim_steer){.claim = 0});
    if (!rc)
        ht_trace_end(ht_store_trace(c->store), &mark, HT_TRACE_COMMIT, root, 0, 0);
    return rc;
}
