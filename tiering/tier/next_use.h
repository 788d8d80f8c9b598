/* SPDX-License-Identifier: Apache-2.0 */
/*
 * next_use.h - when programs will use objects next, as they say. Pure; not locked: the owner does.
 *
 * Without a plan these times give places in the order of eviction. Place 0 is up to 16 ms away; from there on four
 * places double the time; the last but one is ten minutes away or more; the last is for what no program uses again.
 * A use comes nearer while its place stands. So a place is looked at again before its image goes.
 *
 *   set --reads may begin--> due --all read--> known --used, or late by a quarter--> forgotten
 */
#pragma once

#include "tiering/base/idtable.h"

enum { HT_NEXT_USES = 4096, HT_NEXT_USE_PLACES = 64 };
#define HT_NEXT_USE_NEVER UINT64_MAX

struct ht_next_use {
    struct ht_id_link link; /* by object; id 0: the entry is free */
    uint64_t next_ns;       /* or NEVER */
    uint64_t end_ns;        /* it is forgotten then */
    uint64_t fetch_ns;      /* reads may begin; UINT64_MAX: no more reads */
    uint32_t chunk;         /* the next one to read */
};

struct ht_next_uses {
    struct ht_id_table table;
    struct ht_next_use *use; /* NULL until the first one is set */
    struct ht_next_use *due; /* is read now, or NULL */
    uint64_t look_ns;        /* nothing begins or ends before */
    bool leads;              /* the order of eviction is by these places: no plan is followed */
};

static inline uint32_t ht_next_uses_count(const struct ht_next_uses *t)
{
    return (uint32_t)t->table.count;
}
/*
 * An object's next use, in place of an older one. after_ns: from now, at least 1, or NEVER; reads may begin lead_ns
 * before. -ENOSPC: as many are set as there can be. -ENOMEM.
 */
int ht_next_uses_set(struct ht_next_uses *t, uint64_t object, uint64_t after_ns, uint64_t lead_ns,
                     uint64_t now_ns) HT_MUST_CHECK;
/* False: there was none. */
bool ht_next_uses_forget(struct ht_next_uses *t, uint64_t object);
void ht_next_uses_free(struct ht_next_uses *t);
uint64_t ht_next_uses_bytes(const struct ht_next_uses *t); /* heap */
/* NULL: none is set, or it is past. */
const struct ht_next_use *ht_next_uses_find(const struct ht_next_uses *t, uint64_t object, uint64_t now_ns);
/* The object that is needed first, if its reads may begin. Forgets uses that are past. NULL: none. */
struct ht_next_use *ht_next_uses_due(struct ht_next_uses *t, uint64_t now_ns);
/* The whole object was read. */
void ht_next_use_was_read(struct ht_next_uses *t, struct ht_next_use *u);
unsigned ht_next_use_place(const struct ht_next_use *u, uint64_t now_ns);
