/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/engine/owners.h"

#include "tiering/base/idhash.h"
#include "tiering/object/context.h"
#include "tiering/txn/txn.h"

#define HASHES_ALL (UINT64_C(1) << 32)

enum {
    SPARE = 4, /* notes fill less than this part of their bound: the next part has twice as many hashes */
};

unsigned ht_owners_max(const struct ht_store *s)
{
    return s->opts.owners_max ? s->opts.owners_max : HT_OWNERS_MAX;
}

bool ht_owners_are_too_many(const struct ht_store *s, const struct ht_ref *ref)
{
    const struct ht_refcount *e = ht_refcount_find(s, ref);

    return e &&
        (e->owners > ht_owners_max(s) ||
         e->owners * (uint64_t)ht_move_record_bytes(ref) > ht_owners_max(s) * (uint64_t)HT_OWNERS_RECORD_BYTES);
}

void ht_owners_begin(struct ht_owners *w, size_t most, struct ht_owners_part part)
{
    *w = (struct ht_owners){.most = most, .groups = part.hashes ? part.hashes : HASHES_ALL, .from = part.from};
}

uint32_t ht_owners_group_of(const struct ht_owners *w, uint64_t hashed)
{
    return (uint32_t)ht_id_hash(hashed) - w->from;
}

struct ht_owners_part ht_owners_then(const struct ht_owners *w)
{
    bool more = w->groups < HASHES_ALL && w->count < w->most / SPARE;

    return (struct ht_owners_part){.from = (uint32_t)(w->from + w->groups), .hashes = w->groups << more};
}

static bool is_full(const struct ht_owners *w)
{
    return w->count >= w->most && w->groups > 1;
}

bool ht_owners_lack_room(struct ht_owners *w, uint32_t group)
{
    w->lacks_room = is_full(w) && group < w->groups;
    return w->lacks_room;
}

static void halve(struct ht_owners *w)
{
    size_t n = 0;

    w->groups /= 2;
    for (size_t i = 0; i < w->count; i++)
        if (w->found[i].group < w->groups)
            w->found[n++] = w->found[i];
    w->count = n;
}

void ht_owners_make_room(struct ht_owners *w)
{
    ht_lock_expect_none("looking through all notes");
    while (w->lacks_room && is_full(w))
        halve(w);
    w->lacks_room = false;
}

bool ht_owners_are_full(const struct ht_owners *w, uint32_t group)
{
    return group < w->groups && w->groups == 1 && w->count >= w->most;
}

int ht_owners_note(struct ht_owners *w, const struct ht_owner_found *f)
{
    if (f->group >= w->groups || ht_owners_are_full(w, f->group))
        return 0;
    if (ht_array_grow((void **)&w->found, &w->cap, w->count + 1, sizeof(*w->found)))
        return -ENOMEM;
    w->found[w->count++] = *f;
    return 0;
}

static int by_group_and_place(const struct ht_owner_found *x, const struct ht_owner_found *y)
{
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    if (x->content != y->content)
        return x->content < y->content ? -1 : 1;
    return x->place < y->place ? -1 : x->place > y->place;
}

static int by_place(const void *a, const void *b)
{
    const struct ht_owner_found *x = a, *y = b;
    int order = by_group_and_place(x, y);

    if (order)
        return order;
    if (x->oid != y->oid)
        return x->oid < y->oid ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* The notes at `from` and at `end - 1` are of one place: does a neighbour have the same content elsewhere? */
static bool has_twin(const struct ht_owners *w, size_t from, size_t end)
{
    const struct ht_owner_found *f = w->found;

    return f[from].content &&
        ((from > 0 && f[from - 1].content == f[from].content) || (end < w->count && f[end].content == f[from].content));
}

void ht_owners_sort(struct ht_owners *w)
{
    if (w->count)
        qsort(w->found, w->count, sizeof(*w->found), by_place);
    w->twin_bytes = 0;
    for (size_t i = 0, same; i < w->count; i += same) {
        same = ht_owners_same(w, i);
        w->twin_bytes += has_twin(w, i, i + same) ? w->found[i].bytes : 0;
    }
}

size_t ht_owners_same(const struct ht_owners *w, size_t at)
{
    size_t next = at + 1;

    if (next < w->count && by_group_and_place(&w->found[next], &w->found[at]))
        return 1; /* as most */
    HT_PARTITION_POINT(next, w->count, i, by_group_and_place(&w->found[i], &w->found[at]) == 0);
    return next - at;
}

const struct ht_owner_found *ht_owners_next(struct ht_owners *w, size_t *out_n)
{
    if (w->at == 0)
        ht_owners_sort(w);
    if (w->at == w->count)
        return NULL;
    const struct ht_owner_found *f = &w->found[w->at];
    *out_n = ht_owners_same(w, w->at);
    w->at += *out_n;
    w->twin_bytes -= ht_owners_had_twin(w, *out_n) ? f->bytes : 0;
    return f;
}

bool ht_owners_had_twin(const struct ht_owners *w, size_t n)
{
    return has_twin(w, w->at - n, w->at);
}

bool ht_owners_are_over(const struct ht_owners *w)
{
    return w->at == w->count;
}

bool ht_owners_are_long(const struct ht_owners *w)
{
    if (ht_owners_are_over(w))
        return false;
    return (w->at ? ht_owners_same(w, w->at) : w->count) > HT_OWNERS_LONG;
}

size_t ht_owners_first_of(const struct ht_owners *w, unsigned group)
{
    size_t first = 0;

    HT_PARTITION_POINT(first, w->count, i, w->found[i].group < group);
    return first;
}

uint64_t ht_owners_bytes(const struct ht_owners *w)
{
    return w->cap * sizeof(*w->found);
}

void ht_owners_end(struct ht_owners *w)
{
    free(w->found);
    *w = (struct ht_owners){0};
}
