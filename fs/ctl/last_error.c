/* SPDX-License-Identifier: Apache-2.0 */
/*
 * last_error.c - the last refused action of each inode, until the same action succeeds.
 *
 * A table of fixed size, guarded by ctl.lock. If it is full, the owner of the most entries loses the oldest one: the
 * reasons of one user's files cannot push out those of another user's.
 */
#include "fs/ctl/ctl_priv.h"

#include <stdarg.h>
#include <unistd.h>

/* ------------------------------------------------------------------- table */

static struct ht_last_error *find_locked(struct ht_ctl *c, uint64_t ino) HT_REQUIRES(HT_LOCK_CTL)
{
    for (unsigned i = 0; i < HT_LAST_ERRORS_MAX; i++)
        if (c->last_error[i].ino == ino)
            return &c->last_error[i];
    return NULL;
}

static unsigned count_of(const struct ht_ctl *c, uint32_t uid) HT_REQUIRES(HT_LOCK_CTL)
{
    unsigned n = 0;

    for (unsigned i = 0; i < HT_LAST_ERRORS_MAX; i++)
        n += c->last_error[i].uid == uid;
    return n;
}

/* The table is full. */
static struct ht_last_error *victim_locked(struct ht_ctl *c) HT_REQUIRES(HT_LOCK_CTL)
{
    struct ht_last_error *best = &c->last_error[0];
    unsigned most = count_of(c, best->uid);

    for (unsigned i = 1; i < HT_LAST_ERRORS_MAX; i++) {
        struct ht_last_error *p = &c->last_error[i];
        unsigned n = p->uid == best->uid ? most : count_of(c, p->uid);
        if (n < most || (n == most && p->age > best->age))
            continue;
        best = p;
        most = n;
    }
    return best;
}

static void put_error(struct ht_ctl *c, const struct ht_last_error *new)
{
    ht_mutex_lock(ht_ctl_lock(c));
    struct ht_last_error *p = find_locked(c, new->ino);
    if (!p)
        p = find_locked(c, 0);
    if (!p)
        p = victim_locked(c);
    c->last_errors += p->ino == 0;
    *p = *new;
    p->age = ++c->last_error_age;
    ht_mutex_unlock(ht_ctl_lock(c));
}

static void drop_locked(struct ht_ctl *c, struct ht_last_error *p) HT_REQUIRES(HT_LOCK_CTL)
{
    p->ino = 0;
    c->last_errors--;
}

/* --------------------------------------------------------------------- set */

/* A model root shows the optimizer's error first. That one is older than this one, and is cleared. */
static void put_at(struct ht_ctl *c, struct ht_last_error *p, uint64_t ino, uint64_t root)
{
    struct ht_root_stat st;
    struct stat owned;

    p->ino = ino;
    p->uid = ht_ns_getattr(c->ns, ino, &owned) == 0 ? owned.st_uid : 0;
    p->time = time(NULL);
    p->in_model = root && ht_optim_root_stat(c->optim, root, &st) == 0;
    p->step = p->in_model ? st.step : 0;
    if (ino == root)
        ht_optim_root_clear_error(c->optim, ino);
    put_error(c, p);
}

static void report(struct ht_ctl *c, uint64_t ino, const char *kind, bool at_root, const char *fmt, va_list args)
{
    const struct ht_event_about about = {.id = ino};
    struct ht_last_error p = {.about = ino, .kind = kind};
    uint64_t root = ht_ctl_root_of(c, ino);
    char text[HT_CTL_ERROR_MAX], path[160];

    vsnprintf(text, sizeof(text), fmt, args);
    ht_event(HT_EVENT_REFUSED, &about, "%s", text);
    memcpy(p.text, text, sizeof(p.text));
    put_at(c, &p, ino, root);
    if (!at_root || !root || root == ino)
        return;
    ht_ns_path(c->ns, ino, path, sizeof(path));
    if (snprintf(p.text, sizeof(p.text), "%s: %s", path, text) >= (int)sizeof(p.text))
        p.text[sizeof(p.text) - 2] = '~';
    put_at(c, &p, root, root);
}

void ht_last_error_set(struct ht_ctl *c, uint64_t ino, const char *kind, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    report(c, ino, kind, false, fmt, args);
    va_end(args);
}

void ht_last_error_set_below(struct ht_ctl *c, uint64_t ino, const char *kind, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    report(c, ino, kind, true, fmt, args);
    va_end(args);
}

void ht_last_error_set_for(struct ht_ctl *c, uint64_t ino, const struct ht_caller *caller, const char *kind,
                           const char *text)
{
    if (ht_ctl_access(c, ino, W_OK, caller) == 0)
        ht_last_error_set_below(c, ino, kind, "%s", text);
    else
        ht_last_error_set(c, ino, kind, "%s", text);
}

/* ------------------------------------------------------------------- clear */

void ht_last_error_done(struct ht_ctl *c, uint64_t ino, const char *kind)
{
    if (!c->last_errors)
        return;
    ht_mutex_lock(ht_ctl_lock(c));
    for (unsigned i = 0; i < HT_LAST_ERRORS_MAX; i++) {
        struct ht_last_error *p = &c->last_error[i];
        if (p->ino && p->about == ino && strcmp(p->kind, kind) == 0)
            drop_locked(c, p);
    }
    ht_mutex_unlock(ht_ctl_lock(c));
}

bool ht_last_error_clear(struct ht_ctl *c, uint64_t ino)
{
    if (!c->last_errors)
        return false;
    ht_mutex_lock(ht_ctl_lock(c));
    struct ht_last_error *p = find_locked(c, ino);
    if (p)
        drop_locked(c, p);
    ht_mutex_unlock(ht_ctl_lock(c));
    return p != NULL;
}

/* -------------------------------------------------------------------- text */

int ht_last_error_format(const char *text, bool in_model, uint64_t step, int64_t when, char *buf, size_t cap)
{
    char stamp[32] = "";
    time_t t = (time_t)when;
    struct tm tm;

    if (gmtime_r(&t, &tm))
        (void)strftime(stamp, sizeof(stamp), "%Y-%m-%dT%H:%M:%SZ", &tm);
    if (in_model)
        return snprintf(buf, cap, "%s (after step %llu, %s)", text, (unsigned long long)step, stamp);
    return snprintf(buf, cap, "%s (%s)", text, stamp);
}

bool ht_last_error_get(struct ht_ctl *c, uint64_t ino, struct ht_last_error *out)
{
    ht_mutex_lock(ht_ctl_lock(c));
    struct ht_last_error *p = find_locked(c, ino);
    if (p)
        *out = *p;
    ht_mutex_unlock(ht_ctl_lock(c));
    return p != NULL;
}
