/* SPDX-License-Identifier: Apache-2.0 */
/* wait.c - a client that reads a parameter waits for its updates. */
#include "fs/ctl/ctl_priv.h"

#include "tiering/base/activity.h"

#define LOOK_NS 50000000 /* between two looks whether the request is interrupted */

struct sleeper {
    struct ht_waiter waiter;
    struct ht_mutex lock;
    pthread_cond_t woken;
    HT_GUARDED_BY(HT_LOCK_SLEEPER) bool done;
};

HT_MUTEX_OF(sleeper_lock, struct sleeper, lock, HT_LOCK_SLEEPER)

/* The sleeper may be gone once the lock is released. */
static void wake_sleeper(struct ht_waiter *w)
{
    struct sleeper *s = ht_container_of(w, struct sleeper, waiter);

    ht_mutex_lock(sleeper_lock(s));
    s->done = true;
    pthread_cond_signal(&s->woken);
    ht_mutex_unlock(sleeper_lock(s));
}

/* By the clock of ht_now_ns, so that a change of the time of day delays nothing; 0: for as long as it takes. */
static bool sleep_until(struct sleeper *s, uint64_t at_ns)
{
    int rc = 0;

    ht_mutex_lock(sleeper_lock(s));
    while (!s->done && !rc)
        rc = ht_cond_wait_until(&s->woken, sleeper_lock(s), at_ns);
    bool done = s->done;
    ht_mutex_unlock(sleeper_lock(s));
    return done;
}

/* True: it was woken. Else the client does not want the request any more, which waits for a replay of logged steps. */
static bool sleep_or_interrupted(struct ht_ctl *c, uint64_t ino, struct sleeper *s)
{
    while (!ht_activity_interrupted() || !ht_optim_replaying(c->optim, ino))
        if (sleep_until(s, ht_now_ns() + LOOK_NS))
            return true;
    return !ht_optim_cancel(c->optim, &s->waiter) && sleep_until(s, 0);
}

int ht_ctl_wait_updates(struct ht_ctl *c, uint64_t ino, uint64_t off, uint64_t len)
{
    struct sleeper s = {.waiter = {.wake = wake_sleeper}};
    bool done = true;
    int rc = ht_optim_readable(c->optim, ino, off, len, NULL);

    if (rc != -EAGAIN)
        return rc;
    ht_mutex_init(&s.lock, HT_LOCK_SLEEPER);
    ht_cond_init(&s.woken);
    ht_activity_wait("updates of parameter", ino);
    if (ht_optim_readable(c->optim, ino, off, len, &s.waiter) == -EAGAIN)
        done = ht_activity_interruptible() ? sleep_or_interrupted(c, ino, &s) : sleep_until(&s, 0);
    ht_activity_go_on();
    pthread_cond_destroy(&s.woken);
    ht_mutex_destroy(&s.lock);
    if (!done)
        return -EINTR;
    return ht_optim_readable(c->optim, ino, off, len, NULL) == -EIO ? -EIO : 0;
}
