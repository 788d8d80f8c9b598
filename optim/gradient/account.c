/* SPDX-License-Identifier: Apache-2.0 */
/*
 * account.c - exactly which bytes an opener has written since its last flush.
 *
 * The window of an opener reaches from its first to its last byte, and other openers may have written between them. An
 * opener that keeps an account discards its own bytes alone. A byte that two openers wrote belongs to both.
 *
 * The account is a set for each range that has any, in ascending order of ranges. Another opener's flush may freeze
 * these bytes with its own. When the range is thawed, at the boundary or after a pass, the sets lose what was frozen.
 * From then on these bytes belong to the opener that writes them next. Guarded by the optimizer's lock.
 */

#include "optim/state/param.h"
#include "optim/state/range.h"
#include "optim/gradient/gradient_priv.h"

/* Where the set of this range is, or belongs. */
static uint32_t place_of(const struct ht_opt_account *a, uint64_t index)
{
    uint32_t place = 0;

    HT_PARTITION_POINT(place, a->count, i, a->own[i]->index < index);
    return place;
}

static int grow_account(struct ht_opt_account *a)
{
    uint32_t cap = a->cap ? 2 * a->cap : 1;
    struct ht_range_own **own;

    if (a->count < a->cap)
        return 0;
    own = realloc(a->own, cap * sizeof(struct ht_range_own *));
    if (!own)
        return -ENOMEM;
    a->own = own;
    a->cap = cap;
    return 0;
}

static struct ht_range_own *insert_own(struct ht_opt_account *a, uint64_t index) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint32_t at = place_of(a, index);
    struct ht_range_own *own = grow_account(a) ? NULL : calloc(1, sizeof(*own));

    if (!own)
        return NULL;
    own->index = index;
    own->user = a->user;
    ht_list_init(&own->link);
    memmove(a->own + at + 1, a->own + at, (a->count - at) * sizeof(struct ht_range_own *));
    a->own[at] = own;
    a->count++;
    ht_opt_range_count_own(a->o, own, false);
    return own;
}

static bool may_take(const struct ht_opt_account *a, uint64_t bytes) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return bytes <= ht_quota_room(&a->o->accounts, a->user);
}

/* The set of a range, or NULL. */
static struct ht_range_own *own_at(const struct ht_opt_account *a, uint64_t index)
{
    uint32_t at = place_of(a, index);

    return at < a->count && a->own[at]->index == index ? a->own[at] : NULL;
}

/* The set of a range, which is made if there is none. */
static int find_own(struct ht_opt_account *a, const struct ht_param *p, uint64_t index, struct ht_range_own **out)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_range_own *own = own_at(a, index);

    if (!own) {
        if (!may_take(a, HT_RANGE_OWN_BYTES))
            return -EDQUOT;
        own = insert_own(a, index);
        if (!own)
            return -ENOMEM;
    }
    if (ht_list_empty(&own->link)) { /* new, or of a former range: its bytes are gone */
        ht_interval_set_clear(&own->bytes);
        ht_list_add_tail(&ht_opt_range_find(p, index)->own, &own->link);
    }
    *out = own;
    return 0;
}

static int add_piece(struct ht_opt_account *a, const struct ht_param *p, const struct ht_range_piece *at)
    HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_range_own *own;
    int rc = find_own(a, p, at->index, &own);

    if (rc)
        return rc;
    if (!may_take(a, ht_interval_set_growth(&own->bytes, at->begin, at->end)))
        return -EDQUOT;
    rc = ht_interval_set_add(&own->bytes, at->begin, at->end);
    ht_opt_range_count_own(a->o, own, false);
    return rc;
}

int ht_opt_account_add(struct ht_opt_account *a, const struct ht_param *p, uint64_t begin, uint64_t end)
{
    ht_opt_for_each_piece(at, p, begin, a->o ? end : 0) {
        int rc = add_piece(a, p, &at);
        if (rc)
            return rc;
    }
    return 0;
}

void ht_opt_account_remove(struct ht_opt_account *a, const struct ht_param *p, uint64_t begin, uint64_t end)
{
    ht_opt_for_each_piece(at, p, begin, a->count ? end : 0) {
        struct ht_range_own *own = own_at(a, at.index);
        if (own) {
            if (ht_interval_set_remove(&own->bytes, at.begin, at.end))
                ht_interval_set_clear(&own->bytes);
            ht_opt_range_count_own(a->o, own, false);
        }
    }
}

void ht_opt_account_drop(const struct ht_opt_account *a, struct ht_param *p)
{
    for (uint32_t i = 0; i < a->count; i++) {
        const struct ht_range_own *own = a->own[i];
        struct ht_range *r = ht_list_empty(&own->link) ? NULL : ht_opt_range_find(p, own->index);
        if (!r)
            continue;
        if (ht_interval_set_subtract(&r->written, &own->bytes))
            ht_interval_set_clear(&r->written);
        ht_opt_range_count_intervals(r);
        if (!r->written.count)
            ht_list_del(&r->dirty);
    }
}

void ht_opt_account_clear(struct ht_opt_account *a)
{
    for (uint32_t i = 0; i < a->count; i++) {
        ht_list_del(&a->own[i]->link);
        ht_opt_range_count_own(a->o, a->own[i], true);
        ht_interval_set_free(&a->own[i]->bytes);
        free(a->own[i]);
    }
    a->count = 0;
}

void ht_opt_account_free(struct ht_opt_account *a)
{
    ht_opt_account_clear(a);
    free(a->own);
}
