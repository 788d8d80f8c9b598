/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/engine/pass.h"

#include "tiering/object/context.h"

#define REST_NS_MAX UINT64_C(1000000)

enum { REST_SHARE = 50 }; /* between walks, at least so many times what the last one took */

int ht_walk_begin(struct ht_walk *w, struct ht_store *s)
{
    *w = (struct ht_walk){.s = s};
    int rc = ht_store_oids(s, &w->oids, &w->count);
    if (!rc)
        qsort(w->oids, w->count, sizeof(*w->oids), ht_compare_numbers);
    return rc;
}

size_t ht_walk_find(const struct ht_walk *w, uint64_t oid)
{
    const uint64_t *at = bsearch(&oid, w->oids, w->count, sizeof(*w->oids), ht_compare_numbers);

    return at ? (size_t)(at - w->oids) : w->count;
}

void ht_walk_end(struct ht_walk *w)
{
    free(w->oids);
    *w = (struct ht_walk){.s = w->s};
}

bool ht_walk_is_over(const struct ht_walk *w)
{
    return w->at == w->count;
}

uint64_t ht_walk_bytes(const struct ht_walk *w)
{
    return w->count * sizeof(*w->oids);
}

uint64_t ht_walk_next_ns(const struct ht_walk *w, uint64_t period_ns)
{
    return ht_now_ns() + ht_max_u64(period_ns, REST_SHARE * w->ns);
}

static void next_object(struct ht_walk *w, unsigned *left)
{
    w->chunk = 0;
    w->at++;
    *left -= *left > 0;
}

/* 1: the object is done; 0: the slice ends here. */
static int walk_object(struct ht_walk *w, const struct ht_walk_visitor *v, void *ctx, unsigned *left)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = ht_obj_find_locked(w->s, w->oids[w->at]);

    if (!o || o->dead || (v->object && !v->object(ctx, o)))
        return 1;
    /* bounded: so many chunks as left says */
    ht_chunk_for_each_from(c, o, w->chunk) {
        if (!*left)
            return 0;
        int rc = v->chunk(ctx, o, c, w->chunk);
        if (rc < 0 || rc == HT_WALK_PAUSE)
            return rc < 0 ? rc : 0;
        --*left;
        if (rc == HT_WALK_TAKEN) {
            w->chunk++;
            return 0;
        }
    }
    return 1;
}

/* As many objects as *left allows; of a visitor that wants to be asked without the lock one. */
static int walk_objects(struct ht_walk *w, const struct ht_walk_visitor *v, void *ctx, unsigned *left)
    HT_EXCLUDES(HT_LOCK_STORE)
{
    int rc;

    ht_store_lock(w->s);
    uint64_t began_ns = ht_now_ns();
    do {
        rc = walk_object(w, v, ctx, left);
        if (rc == 1)
            next_object(w, left);
    } while (rc == 1 && *left && !v->wants && !ht_walk_is_over(w));
    w->ns += ht_now_ns() - began_ns;
    ht_store_unlock(w->s);
    return rc;
}

int ht_walk_slice(struct ht_walk *w, const struct ht_walk_visitor *v, void *ctx, unsigned chunks)
{
    uint64_t before_ns = w->ns;
    unsigned left = chunks;
    int rc = 1;

    while (rc == 1 && left && !ht_walk_is_over(w)) {
        if (v->wants && w->chunk == 0 && !v->wants(ctx, w->oids[w->at]))
            next_object(w, &left);
        else
            rc = walk_objects(w, v, ctx, &left);
    }
    ht_sleep_ns(ht_min_u64(w->ns - before_ns, REST_NS_MAX));
    return rc < 0 ? rc : 0;
}
