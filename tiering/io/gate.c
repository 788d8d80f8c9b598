/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thread waits with the flight_lock of its device. Permits that come back wake it. Urgent requests wake nobody when
 * they end: the waiting thread looks again at the time that the policy says, so that urgent requests cost the same with
 * a full gate.
 *
 * `wanted` and `recalled` have no lock. The waiting thread counts itself before it reads them, and a caller sets them
 * before it reads the number of waiting threads. So one of the two sees the other.
 */
#include "tiering/io/gate.h"

#include "tiering/base/activity.h"
#include "tiering/io/io_priv.h"

static _Thread_local enum ht_io_class mine;
static _Thread_local bool has_share;
static _Thread_local const _Atomic bool *recalled; /* or NULL */

enum ht_io_class ht_io_class_set(enum ht_io_class io_class)
{
    enum ht_io_class was = mine;

    mine = io_class;
    return was;
}

enum ht_io_class ht_io_class(void)
{
    return mine;
}

void ht_io_share_set(bool on)
{
    has_share = on;
}

/* ------------------------------------------------------------------ permits */

static bool is_wanted(const struct ht_gate *g, enum ht_gate_good good)
{
    return (good != HT_GATE_NOTHING && atomic_load(&g->wanted[good]) > 0) || (recalled && atomic_load(recalled));
}

static uint64_t next_ns_locked(struct ht_dev *dev, const struct ht_permit_request *r, uint64_t since_ns,
                               uint64_t now_ns) HT_REQUIRES(HT_LOCK_DEV_FLIGHT)
{
    struct ht_gate_state st = {
        .requests = dev->urgent_requests,
        .waits = dev->urgent_waits,
        .permitted_bytes = dev->permitted_bytes[r->direction],
        .background = dev->background_permits,
        .has_share = has_share,
        .share_ns = dev->share_ns,
        .share_bytes = dev->share_bytes,
    };
    struct ht_dev_rate rate;

    ht_rate_get(&dev->large_rate[r->direction], now_ns, &rate); /* small requests say less of what it can move */
    if (!rate.known)
        ht_rate_get(&dev->rate[r->direction], now_ns, &rate);
    st.rate_known = rate.known;
    st.bytes_per_s = rate.bytes_per_s;
    return ht_gate_next_ns(&st, mine, r->bytes, since_ns, now_ns);
}

static void take_locked(struct ht_dev *dev, const struct ht_permit *p) HT_REQUIRES(HT_LOCK_DEV_FLIGHT)
{
    dev->permitted_bytes[p->direction] += p->bytes;
    dev->background_permits += p->io_class == HT_IO_BACKGROUND;
    if (has_share) {
        dev->share_ns = ht_now_ns();
        dev->share_bytes = p->bytes;
    }
    atomic_fetch_add_explicit(&dev->permits, 1, memory_order_relaxed);
}

/* Waits, if it may, until the request may go. False: it may not go now. */
static bool pass_locked(struct ht_gate *g, const struct ht_permit_request *r, bool wait) HT_REQUIRES(HT_LOCK_DEV_FLIGHT)
{
    struct ht_dev *dev = r->dev;
    uint64_t since_ns = ht_now_ns(), at_ns = next_ns_locked(dev, r, since_ns, since_ns);

    if (!at_ns || is_wanted(g, r->good))
        return true;
    if (!wait)
        return false;
    dev->gate_waiters++;
    while (at_ns && !is_wanted(g, r->good)) {
        (void)ht_cond_wait_until(&dev->gate_changed, ht_dev_flight_lock(dev), at_ns);
        at_ns = next_ns_locked(dev, r, since_ns, ht_now_ns());
    }
    dev->gate_waiters--;
    uint64_t now_ns = ht_now_ns();
    dev->gate_waits[mine]++;
    dev->gate_wait_ns[mine] += now_ns > since_ns ? now_ns - since_ns : 0;
    return true;
}

static bool pass(struct ht_gate *g, const struct ht_permit_request *r, bool wait, struct ht_permit *out)
{
    struct ht_dev *dev = r->dev;

    *out = (struct ht_permit){.dev = NULL};
    if (mine == HT_IO_URGENT || !dev)
        return true;
    ht_mutex_lock(ht_dev_flight_lock(dev));
    bool passed = pass_locked(g, r, wait);
    if (passed) {
        *out = (struct ht_permit){dev, r->direction, mine, r->bytes};
        take_locked(dev, out);
    }
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    return passed;
}

void ht_permit_get(struct ht_gate *g, const struct ht_permit_request *r, struct ht_permit *out)
{
    bool waits = mine != HT_IO_URGENT;

    if (waits) {
        assert(ht_activity_holds_nothing());
        ht_lock_expect_none("waiting at the gate of a device");
        ht_activity_wait("its permission for a device", 0);
    }
    (void)pass(g, r, true, out);
    if (waits)
        ht_activity_go_on();
}

bool ht_permit_try(struct ht_gate *g, const struct ht_permit_request *r, struct ht_permit *out)
{
    return pass(g, r, false, out);
}

void ht_permit_put(struct ht_permit *p)
{
    struct ht_dev *dev = p->dev;

    if (!dev)
        return;
    ht_mutex_lock(ht_dev_flight_lock(dev));
    assert(dev->permitted_bytes[p->direction] >= p->bytes);
    dev->permitted_bytes[p->direction] -= p->bytes;
    dev->background_permits -= p->io_class == HT_IO_BACKGROUND;
    atomic_fetch_sub_explicit(&dev->permits, 1, memory_order_relaxed);
    if (dev->gate_waiters)
        pthread_cond_broadcast(&dev->gate_changed);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    p->dev = NULL;
}

void ht_permit_settle(struct ht_permit *p, struct ht_dev *dev, uint32_t bytes)
{
    struct ht_permit settled = {dev, p->direction, p->io_class, bytes};

    if (!p->dev || (p->dev == dev && p->bytes == bytes))
        return;
    ht_permit_put(p);
    if (!dev)
        return;
    ht_mutex_lock(ht_dev_flight_lock(dev));
    take_locked(dev, &settled);
    ht_mutex_unlock(ht_dev_flight_lock(dev));
    *p = settled;
}

/* ---------------------------------------------------------------- promotion */

static bool counts(enum ht_gate_good good)
{
    return mine == HT_IO_URGENT || (mine == HT_IO_PLANNED && good == HT_GATE_LOG_ROOM);
}

static void wake_waiters(struct ht_gate *g)
{
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++) {
        struct ht_dev *dev = g->dev[i];
        if (!dev || !atomic_load(&dev->gate_waiters))
            continue;
        ht_mutex_lock(ht_dev_flight_lock(dev));
        pthread_cond_broadcast(&dev->gate_changed);
        ht_mutex_unlock(ht_dev_flight_lock(dev));
    }
}

void ht_gate_want(struct ht_gate *g, enum ht_gate_good good)
{
    if (counts(good) && atomic_fetch_add(&g->wanted[good], 1) == 0)
        wake_waiters(g);
}

void ht_gate_heed(const _Atomic bool *flag)
{
    recalled = flag;
}

void ht_gate_recall(struct ht_gate *g)
{
    wake_waiters(g);
}

void ht_gate_want_end(struct ht_gate *g, enum ht_gate_good good)
{
    if (!counts(good))
        return;
    unsigned was = atomic_fetch_sub(&g->wanted[good], 1);
    assert(was > 0);
    (void)was;
}

bool ht_dev_has_permits(const struct ht_dev *dev)
{
    return atomic_load_explicit(&dev->permits, memory_order_relaxed) > 0;
}

void ht_gate_wait_begin(struct ht_dev *dev)
{
    ht_mutex_lock(ht_dev_flight_lock(dev));
    ht_gate_urgent_begin(&dev->urgent_waits, ht_now_ns());
    ht_mutex_unlock(ht_dev_flight_lock(dev));
}

void ht_gate_wait_end(struct ht_dev *dev)
{
    ht_mutex_lock(ht_dev_flight_lock(dev));
    ht_gate_urgent_end(&dev->urgent_waits, ht_now_ns());
    ht_mutex_unlock(ht_dev_flight_lock(dev));
}

/* ------------------------------------------------------------------ figures */

void ht_gate_stats(struct ht_dev *dev, struct ht_gate_stats *out)
{
    ht_mutex_lock(ht_dev_flight_lock(dev));
    for (unsigned c = 0; c < HT_IO_CLASSES; c++) {
        out->in_flight_bytes[c] = dev->class_bytes[c];
        out->moved_bytes[c] = dev->moved_bytes[c];
        out->waits[c] = dev->gate_waits[c];
        out->wait_ns[c] = dev->gate_wait_ns[c];
    }
    ht_mutex_unlock(ht_dev_flight_lock(dev));
}
