/* SPDX-License-Identifier: Apache-2.0 */
/*
 * next_use.c - content whose next use programs name stays until then, and is read before (tier/next_use.h).
 *
 *   nothing --hint--> its images have places in the order of eviction (cache/order.c)
 *           <--used-- a chunk at a time; the others keep their places until the time is past
 *
 * While a plan is followed hints get places in its order, and count more than what it says. Without one they make an
 * order of their own. When that changes all images get their places again.
 */
#include "tiering/object/context.h"
#include "tiering/engine/engine_priv.h"

enum { PART_CHUNKS = 64, ROOM_PART = 4, LEAD_TIMES = 2, LEAVE_SLOTS = 1024 };
#define LEAD_NS_MIN UINT64_C(1000000000)
#define AGAIN_NS UINT64_C(100000000) /* a read that found no room */

bool ht_next_use_order_place(const struct ht_store *s, uint64_t object, uint64_t *out_place)
{
    const struct ht_forecast *f = s->engine->planner.forecast;
    uint64_t now = ht_now_ns();
    const struct ht_next_use *u = ht_next_uses_find(&s->next_uses, object, now);

    if (!u || (!f && !s->next_uses.leads))
        return false;
    if (!f) {
        *out_place = ht_next_use_place(u, now);
        return true;
    }
    uint64_t at = ht_forecast_now(f, now), place = ht_forecast_place(f, at);
    if (u->next_ns == HT_NEXT_USE_NEVER)
        *out_place = place + HT_ORDER_PLACES - 1;
    else
        *out_place = ht_min_u64(ht_forecast_place(f, at + u->next_ns - ht_min_u64(now, u->next_ns)),
                                place + HT_ORDER_PLACES - 2);
    return true;
}

/*
 * Its images get their places, or have none any more. It releases the lock in between: the caller holds a reference,
 * and programs may change the hint.
 */
static void place_images(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;
    struct ht_slice slice = {0};
    unsigned ended = 0;
    uint64_t place;
    bool known = ht_next_use_order_place(s, o->oid, &place);

    if (!o->resident)
        return;
    ht_chunk_for_each_busy(c, o, index) {
        if (ended != slice.ended)
            known = ht_next_use_order_place(s, o->oid, &place);
        ended = slice.ended;
        if (c->slot != HT_SLOT_NONE && known)
            ht_arena_set_next_use(s->arena, c->slot, place, false);
        else if (c->slot != HT_SLOT_NONE)
            ht_arena_forget_next_use(s->arena, c->slot);
        ht_slice_next(s, &slice);
    }
}

static bool may_lead(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    return !s->engine->planner.forecast && ht_next_uses_count(&s->next_uses);
}

bool ht_next_use_update(struct ht_store *s)
{
    if (may_lead(s))
        return !s->next_uses.leads;
    if (s->next_uses.leads && !s->engine->planner.forecast)
        ht_arena_order_end(s->arena);
    s->next_uses.leads = false;
    return false;
}

/* Images of a plan before leave the order, some at a time. */
static void begin_order(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE)
{
    for (bool more = true; more;) {
        ht_store_lock(s);
        bool wanted = may_lead(s) && !s->next_uses.leads;
        more = wanted && ht_arena_order_leave(s->arena, LEAVE_SLOTS);
        if (wanted && !more) {
            s->next_uses.leads = true;
            ht_arena_order_begin(s->arena, 0, true);
        }
        ht_store_unlock(s);
    }
}

void ht_next_use_settle(struct ht_store *s)
{
    begin_order(s);
    for (uint32_t i = 0; i < HT_NEXT_USES; i++) {
        ht_store_lock(s);
        const struct ht_next_use *u = s->next_uses.use ? &s->next_uses.use[i] : NULL;
        struct ht_obj *o = u && u->link.id ? ht_obj_find_locked(s, u->link.id) : NULL;
        o = o && !o->dead ? o : NULL;
        if (o) {
            o->refs++;
            place_images(o);
        }
        ht_store_unlock(s);
        ht_obj_put(o);
    }
}

/* ---------------------------------------------------------------- from programs */

static uint64_t read_ns(const struct ht_store *s, uint64_t bytes)
{
    uint64_t rate = 0;

    for (unsigned i = 0; i < s->dev_count; i++) {
        struct ht_dev_rate r = {0};
        if (s->dev[i])
            ht_dev_rate(s->dev[i], HT_DIRECTION_READ, &r);
        rate += r.known ? r.bytes_per_s : 0;
    }
    return rate ? (uint64_t)((double)bytes / (double)rate * 1e9) : 0;
}

/* The devices may have to read all objects with a next use before this one; they count as if all had its size. */
static uint64_t hinted_bytes(struct ht_store *s, const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_min_u64(o->size * (ht_next_uses_count(&s->next_uses) + UINT64_C(1)), ht_arena_bytes(s->arena));
}

int ht_obj_set_next_use(struct ht_obj *o, uint64_t after_ns)
{
    struct ht_store *s = o->s;

    uint64_t bytes = ht_store_locked(s, hinted_bytes(s, o));
    uint64_t lead = LEAD_NS_MIN + LEAD_TIMES * read_ns(s, bytes);
    ht_store_lock(s);
    int rc = ht_next_uses_set(&s->next_uses, o->oid, after_ns, lead, ht_now_ns());
    bool all = ht_next_use_update(s);
    if (!rc && !all)
        place_images(o);
    s->waits.wakes.readahead = s->waits.wakes.any = true;
    ht_store_unlock(s);
    if (all)
        ht_next_use_settle(s);
    return rc;
}

int ht_obj_forget_next_use(struct ht_obj *o)
{
    struct ht_store *s = o->s;

    ht_store_lock(s);
    bool known = ht_next_uses_find(&s->next_uses, o->oid, ht_now_ns());
    if (ht_next_uses_forget(&s->next_uses, o->oid))
        place_images(o);
    (void)ht_next_use_update(s);
    ht_store_unlock(s);
    return known ? 0 : -ENODATA;
}

int ht_obj_next_use(struct ht_obj *o, uint64_t *out_after_ns)
{
    struct ht_store *s = o->s;

    ht_store_lock(s);
    uint64_t now = ht_now_ns();
    const struct ht_next_use *u = ht_next_uses_find(&s->next_uses, o->oid, now);
    *out_after_ns =
        !u || u->next_ns == HT_NEXT_USE_NEVER ? HT_NEXT_USE_NEVER : u->next_ns - ht_min_u64(now, u->next_ns);
    ht_store_unlock(s);
    return u ? 0 : -ENODATA;
}

/* -------------------------------------------------------------------- reads */

/* Without a plan the order of hints alone says whether there is room. */
static bool has_enough(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    return !s->next_uses.leads &&
        ht_arena_sums(s->arena)->readahead_bytes >= ht_arena_moving_bytes(s->arena) / ROOM_PART;
}

bool ht_next_use_fetch(struct ht_store *s, struct ht_forecast_fetch *out, uint64_t *out_place)
{
    struct ht_next_use *u;

    if (!ht_next_uses_count(&s->next_uses) || has_enough(s))
        return false;
    while ((u = ht_next_uses_due(&s->next_uses, ht_now_ns()))) {
        const struct ht_obj *o = ht_obj_find_locked(s, u->link.id);
        uint64_t chunks = o && !o->dead ? ht_div_up(o->size, ht_obj_bytes_per_chunk(o)) : 0;
        if (u->chunk >= chunks || !ht_next_use_order_place(s, u->link.id, out_place)) {
            ht_next_use_was_read(&s->next_uses, u);
            continue;
        }
        *out = (struct ht_forecast_fetch){
            .object = u->link.id,
            .first = u->chunk,
            .last = (uint32_t)ht_min_u64(u->chunk + PART_CHUNKS, chunks) - 1,
        };
        return true;
    }
    return false;
}

void ht_next_use_fetch_done(struct ht_store *s)
{
    if (s->next_uses.due)
        s->next_uses.due->chunk += PART_CHUNKS;
}

bool ht_next_use_may_take(const struct ht_store *s)
{
    return s->next_uses.leads && ht_arena_has_hint_room(s->arena);
}

uint64_t ht_next_use_look_ns(struct ht_store *s)
{
    uint64_t now = ht_now_ns();

    if (ht_next_uses_due(&s->next_uses, now))
        return now + AGAIN_NS;
    (void)ht_next_use_update(s); /* the last one may be past, or its object deleted */
    return !ht_next_uses_count(&s->next_uses) || s->next_uses.look_ns == UINT64_MAX ? 0 : s->next_uses.look_ns;
}
