/* SPDX-License-Identifier: Apache-2.0 */
/*
 * eviction.c - which image of the arena goes next: a clock with a second chance over the clean ones, beside two sets.
 *
 *   protected                                    on no list
 *   of the working set, used of late             its list; the clock passes a few of them, too
 *                       not used of late    -->  clean or dirty
 *   dirty, durable or scratch                    its list, from which writeback takes    --written--> clean
 *   clean, used since the clock passed before    stays, counts as unused from now on; so do some images of a request
 *          its owner refuses: it is held         stays
 *          any other                             evicted; the working set remembers it
 *
 * Clean images whose next use is known go before, in order (order.c).
 *
 * Lists are of slots, the oldest first; the clock makes the one that it passes the newest. One clock serves all NUMA
 * nodes: an image goes because it is old, not because of its node.
 *
 * The owner protects images (ht_arena_protect). An image that is loaded again soon after its eviction joins the working
 * set (workingset.c). A slot belongs to a set while one of its pieces does, and all of the slot counts: no other
 * image gets that slot. Dirty images outside both sets are out of reach of the clock, so eviction.c also says when they
 * should be written.
 */
#include "tiering/cache/arena_priv.h"

enum { GROWING_MAX = 16 }; /* images */
enum { AGED_MAX = 8 };     /* slots of the working set that the clock passes with one other */
enum { OTHERS_PART = 8 };  /* of the images in order: so many others the clock leaves alone */
enum { MOVED_MAX = 8 };    /* images in order whose owner moves them to another place, in one pass */
enum { PASSES_MIN = 16 };  /* for images that leave the working set meanwhile */

/* ------------------------------------------------------------- the lists */

enum ht_image_kind ht_image_kind(const struct ht_image *im)
{
    if (im->protected || im->workingset)
        return im->protected ? HT_IMAGE_PROTECTED : HT_IMAGE_WORKINGSET;
    if (!im->dirty)
        return im->planned ? HT_IMAGE_PLANNED : HT_IMAGE_CLEAN;
    return im->durable ? HT_IMAGE_DIRTY : HT_IMAGE_SCRATCH;
}

/* Adds (1) or subtracts (-1) a slot from the protected ones or those of the working set. */
static void charge(struct ht_arena *a, const struct ht_slot *s, int sign)
{
    uint64_t bytes = (uint64_t)(sign * (int64_t)(1u << HT_SLOT_SHIFT));

    if (s->images[HT_IMAGE_PROTECTED])
        a->sums.protected_bytes += bytes;
    else if (s->images[HT_IMAGE_WORKINGSET])
        a->sums.workingset_bytes += bytes;
}

/* Adds (1) or subtracts (-1) an image's part of the dirty bytes that pass through. */
static void count_dirty(struct ht_arena *a, uint32_t n, int sign) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t bytes = (uint64_t)(sign * (int64_t)ht_arena_slot_bytes(a, n));

    a->sums.passing_dirty_bytes += bytes;
    a->sums.dirty_on[a->slot[n / HT_SLOT_SUBS].numa_index] += bytes;
    if (a->image[n].durable)
        a->sums.durable_dirty_bytes += bytes;
}

/* Adds (1) or subtracts (-1) an image as what it is now: before and after each change of that. */
static void count(struct ht_arena *a, uint32_t n, int sign) HT_REQUIRES(HT_LOCK_STORE)
{
    enum ht_image_kind kind = ht_image_kind(&a->image[n]);
    uint32_t i = n / HT_SLOT_SUBS;
    struct ht_slot *s = &a->slot[i];

    charge(a, s, -1);
    s->images[kind] = (uint8_t)(s->images[kind] + sign);
    charge(a, s, 1);
    if (kind == HT_IMAGE_DIRTY || kind == HT_IMAGE_SCRATCH)
        count_dirty(a, n, sign);
    if (kind == HT_IMAGE_PROTECTED)
        return;
    if (kind == HT_IMAGE_PLANNED) { /* of a whole slot */
        if (sign > 0)
            ht_order_add(a, i);
        else
            ht_order_del(a, i);
        return;
    }
    if (sign > 0 && s->images[kind] == 1)
        ht_slot_list_add(a->slot, ht_slot_image_list(a, i, kind), kind, i);
    if (sign < 0 && s->images[kind] == 0)
        ht_slot_list_del(a->slot, ht_slot_image_list(a, i, kind), kind, i);
}

/* ----------------------------------------------------------- the two sets */

static void set_workingset(struct ht_arena *a, uint32_t n, bool workingset) HT_REQUIRES(HT_LOCK_STORE)
{
    if (a->image[n].workingset == workingset)
        return;
    count(a, n, -1);
    a->image[n].workingset = workingset;
    count(a, n, 1);
}

static void set_protected(struct ht_arena *a, uint32_t n, bool protected) HT_REQUIRES(HT_LOCK_STORE)
{
    if (ht_arena_is_external(a, n) || a->image[n].protected == protected)
        return;
    set_workingset(a, n, false);
    count(a, n, -1);
    a->image[n].protected = protected;
    count(a, n, 1);
}

void ht_arena_set_protected_max(struct ht_arena *a, uint64_t bytes)
{
    a->protected_max = ht_min_u64(bytes, ht_arena_protected_max(ht_arena_bytes(a)));
}

uint64_t ht_arena_protected_max_now(const struct ht_arena *a)
{
    return a->protected_max;
}

/* Room in the protected set for waiting and pinned images that come. The size of the set changes. */
static uint64_t awaited_bytes(const struct ht_arena *a)
{
    uint64_t expected = ht_min_u64(a->waiting_expected, a->protected_max);

    return expected - ht_min_u64(a->sums.waiting_bytes, expected) + a->pinned_wanted;
}

/* Is there room in the protected set for the content of a slot, up to so many bytes? */
static bool has_share(const struct ht_arena *a, const struct ht_slot *s, uint64_t others, uint64_t most)
{
    return s->images[HT_IMAGE_PROTECTED] || a->sums.protected_bytes + others + (1u << HT_SLOT_SHIFT) <= most;
}

bool ht_arena_has_protected_room(const struct ht_arena *a)
{
    return a->sums.protected_bytes + awaited_bytes(a) + (1u << HT_SLOT_SHIFT) <= a->protected_max;
}

void ht_arena_expect_waiting(struct ht_arena *a, uint64_t bytes)
{
    a->waiting_expected = bytes;
}

bool ht_arena_lacks_waiting_room(const struct ht_arena *a)
{
    return a->sums.protected_bytes + awaited_bytes(a) > a->protected_max;
}

bool ht_arena_may_protect(const struct ht_arena *a, uint32_t n)
{
    return !ht_arena_is_external(a, n) && has_share(a, &a->slot[n / HT_SLOT_SUBS], awaited_bytes(a), a->protected_max);
}

/* The time of protected images: periods of steps, modulo 4. */
enum { PERIOD_STEPS = 16, PERIODS = 4, OLD_PERIODS = 2, OLD_SLOTS = 8 };

static unsigned period(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE)
{
    return a->steps / PERIOD_STEPS % PERIODS;
}

void ht_arena_end_step(struct ht_arena *a)
{
    a->steps++;
}

void ht_arena_protect(struct ht_arena *a, uint32_t n)
{
    set_protected(a, n, true);
    if (!ht_arena_is_external(a, n))
        a->image[n].protected_in = period(a);
}

void ht_arena_give_back_old(struct ht_arena *a)
{
    for (uint32_t i = 0; i < ht_min_u64(OLD_SLOTS, a->slots); i++) {
        a->old_at = (a->old_at + 1) % a->slots;
        if (!a->slot[a->old_at].images[HT_IMAGE_PROTECTED])
            continue;
        for (uint32_t n = a->old_at * HT_SLOT_SUBS; n < (a->old_at + 1) * HT_SLOT_SUBS; n++) {
            const struct ht_image *im = &a->image[n];
            if (im->protected && !im->waiting && (period(a) - im->protected_in) % PERIODS >= OLD_PERIODS)
                ht_arena_unprotect(a, n);
        }
    }
}

void ht_arena_protect_waiting(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_external(a, n) || a->image[n].protected ||
        !has_share(a, &a->slot[n / HT_SLOT_SUBS], 0, a->protected_max))
        return;
    ht_arena_protect(a, n);
    a->image[n].waiting = true;
    a->sums.waiting_bytes += ht_arena_slot_bytes(a, n);
}

static void wait_no_more(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE)
{
    a->sums.waiting_bytes -= a->image[n].waiting ? ht_arena_slot_bytes(a, n) : 0;
    a->image[n].waiting = false;
}

void ht_arena_unprotect(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_external(a, n) || a->image[n].pinned)
        return;
    wait_no_more(a, n);
    set_protected(a, n, false);
}

/* ---------------------------------------------------------- pinned images */

bool ht_arena_has_pinned_room(const struct ht_arena *a)
{
    uint64_t slot = 1u << HT_SLOT_SHIFT;

    return a->sums.pinned_bytes + slot <= ht_arena_pinned_max(ht_arena_bytes(a)) &&
        a->sums.protected_bytes + slot <= ht_arena_protected_max(ht_arena_bytes(a));
}

bool ht_arena_pin(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_external(a, n) || a->image[n].pinned)
        return true;
    uint32_t bytes = ht_arena_slot_bytes(a, n);
    if (a->sums.pinned_bytes + bytes > ht_arena_pinned_max(ht_arena_bytes(a)) ||
        !has_share(a, &a->slot[n / HT_SLOT_SUBS], 0, ht_arena_protected_max(ht_arena_bytes(a))))
        return false;
    wait_no_more(a, n);
    set_protected(a, n, true);
    a->image[n].pinned = true;
    a->sums.pinned_bytes += bytes;
    a->pinned_wanted = 0;
    return true;
}

static void pin_no_more(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE)
{
    a->sums.pinned_bytes -= a->image[n].pinned ? ht_arena_slot_bytes(a, n) : 0;
    a->image[n].pinned = false;
}

void ht_arena_unpin(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_external(a, n) || !a->image[n].pinned)
        return;
    pin_no_more(a, n);
    set_protected(a, n, false);
}

void ht_arena_want_pinned(struct ht_arena *a, uint64_t bytes)
{
    a->pinned_wanted = ht_min_u64(bytes, ht_arena_pinned_max(ht_arena_bytes(a)) - a->sums.pinned_bytes);
}

uint64_t ht_arena_moving_bytes(const struct ht_arena *a)
{
    uint64_t held = a->sums.protected_bytes + a->sums.workingset_bytes +
        a->sums.passing_dirty_bytes; /* a dirty piece may be in a slot that is protected */

    return ht_arena_bytes(a) - ht_min_u64(held, ht_arena_bytes(a));
}

void ht_eviction_join_workingset(struct ht_arena *a, uint32_t n)
{
    const struct ht_slot *s = &a->slot[n / HT_SLOT_SUBS];

    if (s->images[HT_IMAGE_WORKINGSET] ||
        has_share(a, s, a->sums.workingset_bytes + ht_order_hint_bytes(a), a->protected_max))
        set_workingset(a, n, true);
}

/* -------------------------------------------------------------- the order */

/* An image's next use is known, or not (HT_ORDER_PLACES). */
static void set_planned(struct ht_arena *a, uint32_t n, unsigned place) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_image *im = &a->image[n];
    bool listed = !im->dirty || im->workingset; /* as what changes now; dirty images keep their place */

    if (listed)
        count(a, n, -1);
    im->planned = place < HT_ORDER_PLACES;
    im->workingset = im->workingset && !im->planned;
    im->next_use = (uint8_t)place;
    if (listed)
        count(a, n, 1);
}

void ht_arena_set_next_use(struct ht_arena *a, uint32_t n, uint64_t place, bool used)
{
    if (ht_arena_is_external(a, n) || a->image[n].subs != HT_SLOT_SUBS)
        return;
    set_planned(a, n, place % HT_ORDER_PLACES);
    if (used)
        ht_order_note_use(a, n);
}

void ht_arena_forget_next_use(struct ht_arena *a, uint32_t n)
{
    if (!ht_arena_is_external(a, n) && a->image[n].planned)
        set_planned(a, n, HT_ORDER_PLACES);
}

/* The next images are the clock's. */
bool ht_arena_order_leave(struct ht_arena *a, unsigned most)
{
    uint32_t i;

    for (; most && (i = ht_order_first(a)) != HT_SLOT_NONE; most--)
        set_planned(a, i * HT_SLOT_SUBS, HT_ORDER_PLACES);
    return a->order.slots;
}

/* Of images with a hint, must some go that a program needs again? */
static bool hints_give_way(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_slot_list *clean = &a->list[HT_IMAGE_CLEAN][0];

    return !ht_arena_has_hint_room(a) || (a->forced && a->passed > UINT64_C(2) * clean->count);
}

/* The places of images that may go for this request. */
static uint64_t places_to_ask(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t ahead = ht_order_ahead(a);

    if (a->is_ahead)
        return ht_order_after(a, ahead, a->ahead_place);
    return a->order.hints && !hints_give_way(a) ? ahead & HT_ORDER_LAST : ahead;
}

/*
 * Evicts the image that is needed last and may go now. Returns its slot. If the images that it asked must stay, it
 * returns the slot of one, and *out_evicted is false. HT_SLOT_NONE: there are no images.
 */
static uint32_t pass_order(struct ht_arena *a, bool *out_evicted) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t ahead = places_to_ask(a);
    uint32_t i = HT_SLOT_NONE, next;
    unsigned moves = MOVED_MAX;

    *out_evicted = false;
    while (!*out_evicted && (next = ht_order_next(a, &ahead)) != HT_SLOT_NONE) {
        i = next;
        uint32_t n = i * HT_SLOT_SUBS, place = a->image[n].next_use;
        *out_evicted = (a->forced || !ht_order_was_used_now(a, n)) && a->evict(a->ctx, n);
        if (*out_evicted)
            ht_arena_put(a, n);
        else if (moves && (!a->image[n].planned || a->image[n].next_use != place)) {
            ahead = places_to_ask(a); /* its owner has moved it */
            moves--;
        }
    }
    return i;
}

/* Does an image in the order go before one that the clock finds? */
static bool order_goes_first(const struct ht_arena *a) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_slot_list *clean = &a->list[HT_IMAGE_CLEAN][0];

    if (!a->order.hints)
        return clean->count <= a->order.slots / OTHERS_PART;
    return a->order.places & HT_ORDER_LAST || hints_give_way(a);
}

/* ------------------------------------------------------------ readahead */

static void readahead_no_more(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_image *im = ht_arena_image(a, n);

    a->sums.readahead_bytes -= im->readahead ? ht_arena_slot_bytes(a, n) : 0;
    im->readahead = false;
}

void ht_arena_mark_readahead(struct ht_arena *a, uint32_t n)
{
    a->image[n].readahead = true;
    a->sums.readahead_chunks++;
    a->sums.readahead_bytes += ht_arena_slot_bytes(a, n);
}

/* ------------------------------------------------------------ the clock */

void ht_arena_use(struct ht_arena *a, uint32_t n)
{
    struct ht_image *im = ht_arena_image(a, n);

    im->referenced = true;
    im->used_at = a->workingset.came;
    a->sums.readahead_hits += im->readahead;
    readahead_no_more(a, n);
}

void ht_arena_cool(struct ht_arena *a, uint32_t n)
{
    if (ht_arena_is_external(a, n))
        return;
    a->image[n].referenced = false;
    set_workingset(a, n, false);
}

/* If an object has many images, those in pieces are a stream of small ones: their shadows would crowd out others. */
static bool may_come_back(const struct ht_arena *a, uint32_t n, uint64_t index)
{
    return a->image[n].subs == HT_SLOT_SUBS || index == 0;
}

void ht_eviction_note_new(struct ht_arena *a, uint32_t n)
{
    count(a, n, 1);
}

void ht_eviction_note_attached(struct ht_arena *a, uint32_t n)
{
    struct ht_image *im = &a->image[n];

    if (!may_come_back(a, n, im->index))
        return;
    if (ht_workingset_is_refault(&a->workingset, im->owner, im->index, im->subs))
        ht_eviction_join_workingset(a, n);
    im->used_at = a->workingset.came;
}

void ht_eviction_forget(struct ht_arena *a, uint32_t n)
{
    ht_arena_set_final(a, n, false);
    count(a, n, -1);
    a->sums.readahead_wasted += a->image[n].readahead;
    readahead_no_more(a, n);
    wait_no_more(a, n);
    pin_no_more(a, n);
    a->image[n].dirty = a->image[n].protected = a->image[n].workingset = a->image[n].planned = false;
}

/* The protected set takes its room from the working set. */
static bool may_stay_in_workingset(const struct ht_arena *a, const struct ht_image *im)
{
    return !a->forced &&
        a->sums.protected_bytes + a->sums.workingset_bytes + ht_order_hint_bytes(a) <= a->protected_max &&
        !ht_workingset_is_over(&a->workingset, im->used_at);
}

/* The next slots of the working set: images that were unused for long leave it. */
static void age_workingset(struct ht_arena *a, uint64_t most) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_slot_list *l = &a->list[HT_IMAGE_WORKINGSET][0];

    for (most = ht_min_u64(most, l->count); most; most--) {
        uint32_t i = ht_slot_list_rotate(a->slot, l, HT_IMAGE_WORKINGSET), n;
        for (uint32_t k = 0; (n = ht_slot_image(a, i, k)) != HT_SLOT_NONE; k = n % HT_SLOT_SUBS + a->image[n].subs)
            if (a->image[n].workingset && !may_stay_in_workingset(a, &a->image[n]))
                set_workingset(a, n, false);
    }
}

/* Evicts one image, if the clock has passed it before without a use since, and its owner agrees. */
static void try_evict(struct ht_arena *a, uint32_t n) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_image *im = &a->image[n];

    if (ht_image_kind(im) != HT_IMAGE_CLEAN)
        return;
    if (im->referenced && a->chances) {
        im->referenced = false;
        a->chances--;
        return;
    }
    if (!a->evict(a->ctx, n))
        return;
    if (may_come_back(a, n, im->index))
        ht_workingset_note_evicted(&a->workingset, im->owner, im->index, im->used_at);
    ht_arena_put(a, n);
}

/* Tries to evict images of a slot until there is room for a piece; for HT_SLOT_SUBS, every image. */
static void ask_slot(struct ht_arena *a, uint32_t i, uint32_t subs) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t n, first;

    for (uint32_t k = 0; (n = ht_slot_image(a, i, k)) != HT_SLOT_NONE; k = n % HT_SLOT_SUBS + a->image[n].subs) {
        if (ht_slot_has_room(a, i, subs, &first))
            return;
        try_evict(a, n);
    }
}

uint64_t ht_eviction_passes(const struct ht_arena *a, bool all)
{
    uint64_t clean = a->list[HT_IMAGE_CLEAN][0].count + a->order.slots;

    return !all ? clean : 2 * (clean + (a->forced ? a->list[HT_IMAGE_WORKINGSET][0].count : 0)) + PASSES_MIN;
}

uint32_t ht_eviction_pass(struct ht_arena *a, uint32_t subs)
{
    struct ht_slot_list *clean = &a->list[HT_IMAGE_CLEAN][0], *workingset = &a->list[HT_IMAGE_WORKINGSET][0];

    uint32_t passed = HT_SLOT_NONE;
    bool evicted = false;

    a->passed++;
    if (a->is_ahead)
        return a->order.active ? pass_order(a, &evicted) : HT_SLOT_NONE;
    if (a->order.hints && !clean->count)
        age_workingset(a, AGED_MAX); /* for hinted images that took its room */
    if (!a->order.active)
        (void)ht_arena_order_leave(a, AGED_MAX);
    else if (order_goes_first(a))
        passed = pass_order(a, &evicted);
    if (evicted)
        return passed;
    age_workingset(a, ht_min_u64(1 + workingset->count / ht_max_u64(clean->count, 1), AGED_MAX));
    while (a->forced && !clean->count && workingset->count)
        age_workingset(a, 1); /* each leaves it */
    uint32_t i = ht_slot_list_rotate(a->slot, clean, HT_IMAGE_CLEAN);
    if (i == HT_SLOT_NONE)
        return passed;
    ask_slot(a, i, subs);
    return i;
}

/* --------------------------------------------------------- dirty images */

void ht_arena_set_dirty(struct ht_arena *a, uint32_t n, bool dirty)
{
    struct ht_image *im = ht_arena_image(a, n);

    if (ht_arena_is_external(a, n) || im->dirty == dirty) {
        im->dirty = dirty;
        return;
    }
    if (!dirty)
        ht_arena_set_final(a, n, false);
    count(a, n, -1);
    im->dirty = dirty;
    count(a, n, 1);
}

void ht_arena_set_final(struct ht_arena *a, uint32_t n, bool final)
{
    struct ht_image *im = ht_arena_image(a, n);

    if (ht_arena_is_external(a, n) || im->final == (final && im->dirty))
        return;
    uint32_t i = n / HT_SLOT_SUBS;
    struct ht_slot *s = &a->slot[i];
    im->final = !im->final;
    s->finals = (uint8_t)(im->final ? s->finals + 1 : s->finals - 1);
    if (im->final && s->finals == 1)
        ht_slot_list_add(a->slot, &a->final[s->numa_index], HT_LIST_FINAL, i);
    if (!im->final && !s->finals)
        ht_slot_list_del(a->slot, &a->final[s->numa_index], HT_LIST_FINAL, i);
}

bool ht_arena_has_final(const struct ht_arena *a)
{
    for (unsigned p = 0; p < ht_pinned_parts(&a->memory); p++)
        if (a->final[p].count)
            return true;
    return false;
}

static struct ht_slot_list *list_of(struct ht_arena *a, const struct ht_dirty_walk *w)
{
    return w->final ? &a->final[w->place] : &a->list[w->kind][w->place];
}

/* Turns to the next list. False: that was the last. Walks over all nodes begin on each in turn. */
static bool next_list(struct ht_arena *a, struct ht_dirty_walk *w)
{
    unsigned first = w->final ? HT_LIST_FINAL : HT_IMAGE_DIRTY, last = w->scratch ? HT_IMAGE_SCRATCH : first;
    unsigned nodes = ht_pinned_parts(&a->memory);

    if (!w->kind) {
        w->nodes = w->numa_index == HT_NUMA_INDEX_ANY ? nodes : 1;
        w->place = w->numa_index == HT_NUMA_INDEX_ANY ? a->turn++ % nodes : (unsigned)w->numa_index;
        w->kind = first;
    } else if (w->passed < w->nodes) {
        w->place = (w->place + 1) % nodes;
    } else if (w->kind < last) {
        w->kind++;
        w->passed = 0;
        w->place = w->nodes > 1 ? (w->place + 1) % nodes : w->place;
    } else {
        return false;
    }
    w->passed++;
    const struct ht_slot_list *l = list_of(a, w);
    w->left = l->count + (l->sub ? 1 : 0); /* the head's images before that are the newest */
    return true;
}

/* The next image of that kind in the list's head, whose place the list keeps: walks go on where others stopped. */
static uint32_t next_in_head(const struct ht_arena *a, struct ht_slot_list *l, unsigned kind)
{
    while (l->count && l->sub < HT_SLOT_SUBS) {
        uint32_t n = ht_slot_image(a, l->head, l->sub);
        if (n == HT_SLOT_NONE)
            break;
        l->sub = n % HT_SLOT_SUBS + a->image[n].subs;
        if (kind == HT_LIST_FINAL ? a->image[n].final : ht_image_kind(&a->image[n]) == kind)
            return n;
    }
    return HT_SLOT_NONE;
}

uint32_t ht_dirty_walk_next(struct ht_arena *a, struct ht_dirty_walk *w)
{
    for (;;) {
        while (!w->left)
            if (!next_list(a, w))
                return HT_SLOT_NONE;
        struct ht_slot_list *l = list_of(a, w);
        uint32_t n = next_in_head(a, l, w->kind);
        if (n != HT_SLOT_NONE)
            return n;
        (void)ht_slot_list_rotate(a->slot, l, w->kind);
        w->left--;
    }
}

void ht_dirty_walk_skip_list(struct ht_dirty_walk *w)
{
    w->left = 0;
}

bool ht_arena_is_short(const struct ht_arena *a)
{
    return a->short_for;
}

bool ht_arena_under_pressure(const struct ht_arena *a)
{
    uint64_t moving = ht_arena_bytes(a) - a->sums.protected_bytes;

    if (a->sums.durable_dirty_bytes > moving / 2)
        return true;
    return a->short_for && a->sums.passing_dirty_bytes > (moving - a->sums.workingset_bytes) / 2;
}

/* The image was made just now, and is not written completely: a writer is still filling it. */
static bool is_growing(const struct ht_arena *a, uint32_t n)
{
    const struct ht_image *im = &a->image[n];

    return a->slot[n / HT_SLOT_SUBS].state == HT_SLOT_WHOLE && im->valid_hi - im->valid_lo < 1u << HT_SLOT_SHIFT &&
        a->workingset.came - im->used_at < HT_SLOT_SUBS * ht_max_u64(ht_min_u64(a->slots / 8, GROWING_MAX), 1);
}

bool ht_arena_presses(struct ht_arena *a, uint32_t n, bool growing)
{
    const struct ht_image *im = ht_arena_image(a, n);

    return ht_image_passes_dirty(im) && (im->durable || a->short_for) && (growing || !is_growing(a, n));
}
