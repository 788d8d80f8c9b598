/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thread waits with the flight_lock of its device. Permits that come back wake it. Urgent requests wake nobody when
 * they end: the waiting thread looks again at the time that the policy says, so that urgent requests cost the same with
 * a full gate.
 *
 * `wanted` and `recalled` have no lock. The waiting thread counts itself before it reads them, and a caller sets them
 * before it reads the number of waiting threads. So one of the two sees the other.
 */
#include "tiering/base/activity.h"
#include "tiering/io/io_priv.h"

#define SECOND_NS UINT64_C(1000000000)
#define LOOK_NS_MIN UINT64_C(200000)

enum { MEAN_OF = 8, HOLD_PART = 20 };

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

/* ------------------------------------------------------------------- policy */

void ht_gate_urgent_begin(struct ht_gate_urgent *u, uint64_t now_ns)
{
    if (u->now++ > 0)
        return;
    uint64_t pause_ns = !u->any ? HT_GATE_PAUSE_NS_MAX : now_ns > u->end_ns ? now_ns - u->end_ns : 0;
    pause_ns = ht_min_u64(pause_ns, HT_GATE_PAUSE_NS_MAX);
    u->pause_ns = u->any ? u->pause_ns - u->pause_ns / MEAN_OF + pause_ns / MEAN_OF : pause_ns;
    u->any = true;
}

void ht_gate_urgent_end(struct ht_gate_urgent *u, uint64_t now_ns)
{
    u->now--;
    u->end_ns = ht_max_u64(u->end_ns, now_ns);
}

/* Have there been none for so long? A clock that went back says nothing: then there were none. */
static bool is_quiet(const struct ht_gate_urgent *u, uint64_t now_ns, uint64_t ns)
{
    return u->now == 0 && (!u->any || now_ns < u->end_ns || now_ns - u->end_ns >= ns);
}

/* Do so many more bytes keep the bound? One request always does. */
static bool fits(const struct ht_gate_state *st, uint32_t bytes)
{
    double most = (double)st->bytes_per_s * ((double)HT_GATE_BOUND_NS / (double)SECOND_NS);

    if (!st->rate_known)
        most = (double)HT_GATE_UNKNOWN_BYTES;
    return st->permitted_bytes == 0 || (double)st->permitted_bytes + bytes <= most;
}

/* When a planned request looks again: it hears of permits that come back, and not of silence. */
static uint64_t planned_next_ns(const struct ht_gate_state *st, uint32_t bytes, uint64_t now_ns)
{
    if (is_quiet(&st->requests, now_ns, HT_GATE_ALONE_NS) || fits(st, bytes))
        return 0;
    return (st->requests.now > 0 ? now_ns : st->requests.end_ns) + HT_GATE_ALONE_NS;
}

static uint64_t hold_ns(const struct ht_gate_state *st, uint32_t bytes)
{
    uint64_t pause_ns = st->waits.pause_ns;
    double served_ns = (double)bytes * (double)SECOND_NS / (double)ht_max_u64(st->bytes_per_s, 1);

    if (!st->rate_known || (double)pause_ns < 2 * served_ns)
        return HT_GATE_HOLD_NS_MAX;
    return ht_min_u64(pause_ns / HOLD_PART, HT_GATE_HOLD_NS_MAX);
}

/* When a request beside urgent ones is within the share. */
static uint64_t share_next_ns(const struct ht_gate_state *st)
{
    double times_ns = (double)(st->share_bytes * HT_GATE_SHARE) * (double)SECOND_NS;

    if (!st->has_share || !st->rate_known || !st->bytes_per_s || st->background > 0)
        return UINT64_MAX;
    return st->share_ns + (uint64_t)(times_ns / (double)st->bytes_per_s);
}

static uint64_t background_next_ns(const struct ht_gate_state *st, uint32_t bytes, uint64_t now_ns)
{
    uint64_t hold = hold_ns(st, bytes);
    bool alone = is_quiet(&st->waits, now_ns, HT_GATE_ALONE_NS);

    if (!is_quiet(&st->waits, now_ns, hold))
        return st->waits.now > 0 ? now_ns + ht_max_u64(hold, LOOK_NS_MIN) : st->waits.end_ns + hold;
    if (st->background < (alone ? 2u : 1u) && (alone || fits(st, bytes)))
        return 0;
    return now_ns + HT_GATE_ALONE_NS;
}

uint64_t ht_gate_next_ns(const struct ht_gate_state *st, enum ht_io_class io_class, uint32_t bytes, uint64_t since_ns,
                         uint64_t now_ns)
{
    bool planned = io_class == HT_IO_PLANNED;
    uint64_t most_ns = planned ? HT_GATE_PLANNED_WAIT_NS_MAX : HT_GATE_BACKGROUND_WAIT_NS_MAX;

    if (io_class == HT_IO_URGENT || now_ns < since_ns || now_ns - since_ns >= most_ns)
        return 0;
    uint64_t at_ns = planned ? planned_next_ns(st, bytes, now_ns) : background_next_ns(st, bytes, now_ns);
    uint64_t share_ns = planned ? UINT64_MAX : share_next_ns(st);
    return now_ns >= share_ns ? 0 : ht_min_u64(ht_min_u64(at_ns, share_ns), since_ns + most_ns);
}

/* ------------------------------------------------------------------ permits */

static bool is_wanted(const struct ht_gate *g, enum ht_gate_good good)
{
    return (good != HT_GATE_NOTHING && atomic_load(&g->wanted[good]) > 0) || (recalled && atomic_load(recalled));
}

static uint64_t next_ns_locked(struct ht_dev *dev, const struct ht_permit_request *r, uint64_t since_ns,
                               uint64_t now_ns) HT_REQUIRES(HT_LOCK_DEV_FLIGHT)
{
    struct ht_gate_state st = dev->gate_state;
    struct ht_dev_rate rate;

    ht_rate_get(&dev->large_rate[r->direction], now_ns, &rate); /* small requests say less of what it can move */
    if (!rate.known)
        ht_rate_get(&dev->rate[r->direction], now_ns, &rate);
    st.permitted_bytes = dev->permitted_bytes[r->direction];
    st.has_share = has_share;
    st.rate_known = rate.known;
    st.bytes_per_s = rate.bytes_per_s;
    return ht_gate_next_ns(&st, mine, r->bytes, since_ns, now_ns);
}

static void take_locked(struct ht_dev *dev, const struct ht_permit *p) HT_REQUIRES(HT_LOCK_DEV_FLIGHT)
{
    dev->permitted_bytes[p->direction] += p->bytes;
    dev->gate_state.background += p->io_class == HT_IO_BACKGROUND;
    if (has_share) {
        dev->gate_state.share_ns = ht_now_ns();
        dev->gate_state.share_bytes = p->bytes;
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
    dev->gate_stats.waits[mine]++;
    dev->gate_stats.wait_ns[mine] += now_ns > since_ns ? now_ns - since_ns : 0;
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
    dev->gate_state.background -= p->io_class == HT_IO_BACKGROUND;
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

void ht_gate_recall(struct ht_gate *g)
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
        ht_gate_recall(g);
}

void ht_gate_heed(const _Atomic bool *flag)
{
    recalled = flag;
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
    ht_gate_urgent_begin(&dev->gate_state.waits, ht_now_ns());
    ht_mutex_unlock(ht_dev_flight_lock(dev));
}

void ht_gate_wait_end(struct ht_dev *dev)
{
    ht_mutex_lock(ht_dev_flight_lock(dev));
    ht_gate_urgent_end(&dev->gate_state.waits, ht_now_ns());
    ht_mutex_unlock(ht_dev_flight_lock(dev));
}

/* ------------------------------------------------------------------ figures */

void ht_gate_stats(struct ht_dev *dev, struct ht_gate_stats *out)
{
    *out = ht_locked(ht_dev_flight_lock(dev), dev->gate_stats);
}
