/* SPDX-License-Identifier: Apache-2.0 */
/* recompress_shared.c - see recompress_shared.h. */
#include "tiering/engine/recompress_shared.h"

#include "tiering/base/idhash.h"
#include "tiering/base/lock.h"

#define HASHES_ALL (UINT64_C(1) << 32)

enum { SPARE = 4 }; /* notes fill less than this part of their bound: the next round looks at twice as many places */

void ht_recompress_shared_begin(struct ht_recompress_shared *x, struct ht_recompress_part now, size_t most)
{
    *x = (struct ht_recompress_shared){.now = now, .most = most};
    if (!x->now.hashes)
        x->now.hashes = HASHES_ALL;
}

void ht_recompress_shared_end(struct ht_recompress_shared *x)
{
    ht_owners_end(&x->owners);
}

static bool is_in_part(const struct ht_recompress_shared *x, uint64_t place)
{
    return (uint32_t)((uint32_t)ht_id_hash(place) - x->now.from) < x->now.hashes;
}

/* Half as many places: notes of the others go. Those of this half are still all owners that were walked. */
static void narrow(struct ht_recompress_shared *x)
{
    size_t n = 0;

    ht_lock_expect_none("looking through all notes");
    x->now.hashes /= 2;
    for (size_t i = 0; i < x->owners.count; i++)
        if (is_in_part(x, x->owners.found[i].place))
            x->owners.found[n++] = x->owners.found[i];
    x->owners.count = n;
}

bool ht_recompress_shared_is_full(const struct ht_recompress_shared *x, uint64_t place)
{
    return x->owners.count >= x->most && x->now.hashes > 1 && is_in_part(x, place);
}

void ht_recompress_shared_make_room(struct ht_recompress_shared *x)
{
    while (x->owners.count >= x->most && x->now.hashes > 1)
        narrow(x);
}

int ht_recompress_shared_note(struct ht_recompress_shared *x, uint64_t place, uint64_t oid, uint64_t index)
{
    if (!is_in_part(x, place) || x->owners.count >= x->most)
        return 0;
    return ht_owners_note(&x->owners, &(struct ht_owner_found){.place = place, .oid = oid, .index = index});
}

const struct ht_owner_found *ht_recompress_shared_next(struct ht_recompress_shared *x, size_t *out_n)
{
    if (x->at == 0)
        ht_owners_sort(&x->owners);
    if (x->at == x->owners.count)
        return NULL;
    const struct ht_owner_found *f = &x->owners.found[x->at];
    *out_n = ht_owners_same(&x->owners, x->at);
    x->at += *out_n;
    return f;
}

bool ht_recompress_shared_is_over(const struct ht_recompress_shared *x)
{
    return x->at == x->owners.count;
}

bool ht_recompress_shared_is_long(const struct ht_recompress_shared *x)
{
    if (ht_recompress_shared_is_over(x))
        return false;
    return (x->at ? ht_owners_same(&x->owners, x->at) : x->owners.count) > HT_OWNERS_LONG;
}

struct ht_recompress_part ht_recompress_shared_then(const struct ht_recompress_shared *x)
{
    struct ht_recompress_part then = {.from = (uint32_t)(x->now.from + x->now.hashes), .hashes = x->now.hashes};

    if (then.hashes < HASHES_ALL && x->owners.count < x->most / SPARE)
        then.hashes *= 2;
    return then;
}
