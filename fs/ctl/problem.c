/* SPDX-License-Identifier: Apache-2.0 */
/* problem.c - the last refused thing of each inode: a small table, oldest out first. Guarded by ctl.lock. */
#include "fs/ctl/ctl_priv.h"

#include <stdarg.h>
#include <stdio.h>

static struct ht_problem *find_locked(struct ht_ctl *c, uint64_t ino)
{
    for (unsigned i = 0; i < HT_PROBLEMS_MAX; i++)
        if (c->problem[i].ino == ino)
            return &c->problem[i];
    return NULL;
}

static struct ht_problem *oldest_locked(struct ht_ctl *c)
{
    struct ht_problem *best = &c->problem[0];

    for (unsigned i = 1; i < HT_PROBLEMS_MAX; i++)
        if (c->problem[i].ino == 0 || (best->ino && c->problem[i].age < best->age))
            best = &c->problem[i];
    return best;
}

void ht_problem_set(struct ht_ctl *c, uint64_t ino, const char *fmt, ...)
{
    const struct ht_event_about about = {.id = ino};
    char text[HT_CTL_ERROR_MAX];
    struct ht_problem *p;
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    ht_event(HT_EVENT_REFUSED, &about, "%s", text);
    /* Of a model root the optimizer's is shown first; it is older now. */
    if (c->optim)
        ht_optim_root_clear_error(c->optim, ino);
    ht_mutex_lock(&c->lock);
    p = find_locked(c, ino);
    if (!p)
        p = oldest_locked(c);
    p->ino = ino;
    p->age = ++c->problem_age;
    memcpy(p->text, text, sizeof(text));
    ht_mutex_unlock(&c->lock);
}

bool ht_problem_clear(struct ht_ctl *c, uint64_t ino)
{
    struct ht_problem *p;

    ht_mutex_lock(&c->lock);
    p = find_locked(c, ino);
    if (p)
        p->ino = 0;
    ht_mutex_unlock(&c->lock);
    return p != NULL;
}

bool ht_problem_get(struct ht_ctl *c, uint64_t ino, char out[HT_CTL_ERROR_MAX])
{
    struct ht_problem *p;

    ht_mutex_lock(&c->lock);
    p = find_locked(c, ino);
    if (p)
        memcpy(out, p->text, HT_CTL_ERROR_MAX);
    ht_mutex_unlock(&c->lock);
    return p != NULL;
}
