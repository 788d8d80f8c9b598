/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/tier/next_use.h"

enum {
    UNIT_BITS = 22, /* of ns: a quarter of the first place */
    LATE_PART = 4,  /* of the time that was set */
    LAST = HT_NEXT_USE_PLACES - 1
};

static struct ht_next_use *entry_of(const struct ht_next_uses *t, uint64_t object)
{
    struct ht_id_link *l = ht_next_uses_count(t) ? ht_id_find(&t->table, object) : NULL;

    return l ? ht_container_of(l, struct ht_next_use, link) : NULL;
}

static void forget(struct ht_next_uses *t, struct ht_next_use *u)
{
    ht_id_remove(&t->table, &u->link);
    *u = (struct ht_next_use){.fetch_ns = UINT64_MAX};
    t->due = t->due == u ? NULL : t->due;
}

static bool is_past(const struct ht_next_use *u, uint64_t now_ns)
{
    return u->end_ns <= now_ns;
}

/* A free entry, or one that is past. */
static struct ht_next_use *free_entry(struct ht_next_uses *t, uint64_t now_ns)
{
    for (uint32_t i = 0; i < HT_NEXT_USES; i++) {
        struct ht_next_use *u = &t->use[i];
        if (u->link.id && is_past(u, now_ns))
            forget(t, u);
        if (!u->link.id)
            return u;
    }
    return NULL;
}

int ht_next_uses_set(struct ht_next_uses *t, uint64_t object, uint64_t after_ns, uint64_t lead_ns, uint64_t now_ns)
{
    struct ht_next_use *u = entry_of(t, object);
    bool never = after_ns == HT_NEXT_USE_NEVER;

    if (!t->use)
        t->use = calloc(HT_NEXT_USES, sizeof(*t->use));
    if (!t->use)
        return -ENOMEM;
    if (u)
        forget(t, u);
    u = free_entry(t, now_ns);
    if (!u)
        return -ENOSPC;
    *u = (struct ht_next_use){
        .link.id = object,
        .next_ns = never ? HT_NEXT_USE_NEVER : now_ns + after_ns,
        .end_ns = never ? UINT64_MAX : now_ns + after_ns + after_ns / LATE_PART,
        .fetch_ns = never ? UINT64_MAX : now_ns + after_ns - ht_min_u64(lead_ns, after_ns),
    };
    int rc = ht_id_insert(&t->table, &u->link);
    if (rc) {
        u->link.id = 0;
        return rc;
    }
    t->due = NULL;
    t->look_ns = 0;
    return 0;
}

bool ht_next_uses_forget(struct ht_next_uses *t, uint64_t object)
{
    struct ht_next_use *u = entry_of(t, object);

    if (u)
        forget(t, u);
    return u;
}

void ht_next_uses_free(struct ht_next_uses *t)
{
    ht_id_table_free(&t->table);
    free(t->use);
    *t = (struct ht_next_uses){.use = NULL};
}

uint64_t ht_next_uses_bytes(const struct ht_next_uses *t)
{
    return ht_id_table_bytes(&t->table) + (t->use ? HT_NEXT_USES * sizeof(*t->use) : 0);
}

const struct ht_next_use *ht_next_uses_find(const struct ht_next_uses *t, uint64_t object, uint64_t now_ns)
{
    const struct ht_next_use *u = entry_of(t, object);

    return u && !is_past(u, now_ns) ? u : NULL;
}

struct ht_next_use *ht_next_uses_due(struct ht_next_uses *t, uint64_t now_ns)
{
    if (t->due && !is_past(t->due, now_ns))
        return t->due;
    if (!ht_next_uses_count(t) || now_ns < t->look_ns)
        return NULL;
    struct ht_next_use *first = NULL;
    t->look_ns = UINT64_MAX;
    for (uint32_t i = 0; i < HT_NEXT_USES; i++) {
        struct ht_next_use *u = &t->use[i];
        if (u->link.id && is_past(u, now_ns))
            forget(t, u);
        if (!u->link.id)
            continue;
        t->look_ns = ht_min_u64(t->look_ns, u->fetch_ns > now_ns ? ht_min_u64(u->fetch_ns, u->end_ns) : u->end_ns);
        if (u->fetch_ns <= now_ns && (!first || u->next_ns < first->next_ns))
            first = u;
    }
    t->due = first;
    return first;
}

void ht_next_use_was_read(struct ht_next_uses *t, struct ht_next_use *u)
{
    u->fetch_ns = UINT64_MAX;
    t->due = NULL;
    t->look_ns = 0;
}

unsigned ht_next_use_place(const struct ht_next_use *u, uint64_t now_ns)
{
    uint64_t quarters = u->next_ns > now_ns ? (u->next_ns - now_ns) >> UNIT_BITS : 0;

    if (u->next_ns == HT_NEXT_USE_NEVER)
        return LAST;
    if (quarters < 4)
        return 0;
    unsigned bit = 63u - (unsigned)__builtin_clzll(quarters);
    return (unsigned)ht_min_u64((bit - 2) * 4 + (quarters >> (bit - 2) & 3) + 1, LAST - 1);
}
