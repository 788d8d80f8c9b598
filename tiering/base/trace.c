/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c - see trace.h. An entry's last word says which round of the ring it is of; 0: it is being written. */
#include "tiering/base/trace.h"

#include <stdatomic.h>

#include "tiering/base/activity.h"

enum { OP_BITS = 8 };
#define ROUND_MASK 0xffffffu

struct slot {
    _Atomic uint64_t time_ns, id;
    _Atomic uint32_t first, count; /* units */
    _Atomic uint32_t waited_us;
    _Atomic uint32_t word; /* round and operation */
};
static_assert(sizeof(struct slot) == 32, "32 bytes an entry");

struct ht_trace {
    uint64_t start_ns;
    _Atomic uint64_t next; /* entries so far */
    uint32_t mask;
    unsigned shift;
    struct slot slot[];
};

const char *ht_trace_op_word(enum ht_trace_op op)
{
    static const char *const words[HT_TRACE_OPS] = {"read",     "write", "gradient", "update", "open", "close",
                                                    "prefetch", "evict", "step",     "commit", "abort"};

    return words[op];
}

static size_t bytes_of(uint32_t entries)
{
    return sizeof(struct ht_trace) + entries * sizeof(struct slot);
}

int ht_trace_new(uint32_t entries, struct ht_trace **out)
{
    struct ht_trace *t = ht_pages_new(bytes_of(entries));

    if (!t)
        return -ENOMEM;
    t->start_ns = ht_now_ns();
    assert(entries && (entries & (entries - 1)) == 0);
    t->mask = entries - 1;
    t->shift = (unsigned)__builtin_ctz(entries);
    *out = t;
    return 0;
}

void ht_trace_free(struct ht_trace *t)
{
    if (t)
        ht_pages_free(t, bytes_of(t->mask + 1));
}

/* ------------------------------------------------------------------ writing */

struct ht_trace_mark ht_trace_begin(void)
{
    return (struct ht_trace_mark){ht_now_ns(), ht_activity_waited_ns()};
}

struct ht_trace_mark ht_trace_begin_at(uint64_t begin_ns)
{
    uint64_t now = ht_now_ns();

    if (!begin_ns)
        begin_ns = now;
    return (struct ht_trace_mark){begin_ns, ht_activity_waited_ns() - (now - begin_ns)};
}

/* 1 to ROUND_MASK: never the word of an entry that is being written. */
static uint32_t word_of(const struct ht_trace *t, uint64_t n, enum ht_trace_op op)
{
    return (uint32_t)(((n >> t->shift) % ROUND_MASK + 1) << OP_BITS | op);
}

static uint32_t units(uint64_t bytes)
{
    return (uint32_t)ht_min_u64(ht_div_up(bytes, HT_TRACE_UNIT), UINT32_MAX);
}

#define SET(field, value) atomic_store_explicit(&(field), value, memory_order_release) /* after the word's 0 */
#define GET(field) atomic_load_explicit(&(field), memory_order_acquire) /* the word is looked at again after it */

void ht_trace_end(struct ht_trace *t, const struct ht_trace_mark *m, enum ht_trace_op op, uint64_t id, uint64_t offset,
                  uint64_t bytes)
{
    uint64_t n = atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed);
    uint64_t waited_ns = ht_activity_waited_ns() - m->waited_ns;
    struct slot *s = &t->slot[n & t->mask];

    (void)atomic_exchange_explicit(&s->word, 0, memory_order_acq_rel);
    SET(s->time_ns, m->begin_ns > t->start_ns ? m->begin_ns - t->start_ns : 0);
    SET(s->id, id);
    SET(s->first, (uint32_t)ht_min_u64(offset / HT_TRACE_UNIT, UINT32_MAX));
    SET(s->count, units(offset % HT_TRACE_UNIT + bytes));
    SET(s->waited_us, (uint32_t)ht_min_u64(waited_ns / 1000, UINT32_MAX));
    atomic_store_explicit(&s->word, word_of(t, n, op), memory_order_release);
}

/* ------------------------------------------------------------------ reading */

/* Entry number n, from 0. False: it is being written, or a newer one has its place. */
static bool read_slot(struct ht_trace *t, uint64_t n, struct ht_trace_entry *out)
{
    struct slot *s = &t->slot[n & t->mask];
    uint32_t word = atomic_load_explicit(&s->word, memory_order_acquire);

    *out = (struct ht_trace_entry){
        .seq = n + 1,
        .time_ns = GET(s->time_ns),
        .id = GET(s->id),
        .offset = (uint64_t)GET(s->first) * HT_TRACE_UNIT,
        .bytes = (uint64_t)GET(s->count) * HT_TRACE_UNIT,
        .waited_ns = (uint64_t)GET(s->waited_us) * 1000,
        .op = word & ((1u << OP_BITS) - 1),
    };
    return word == word_of(t, n, out->op) && GET(s->word) == word;
}

bool ht_trace_next(struct ht_trace *t, uint64_t after, struct ht_trace_entry *out)
{
    uint64_t end = atomic_load_explicit(&t->next, memory_order_acquire), entries = t->mask + UINT64_C(1);

    for (uint64_t n = ht_max_u64(after, end > entries ? end - entries : 0); n < end; n++) {
        if (read_slot(t, n, out))
            return true;
        /* It is being written, and comes next; or newer ones have gone all the way round. */
        if (atomic_load_explicit(&t->next, memory_order_acquire) - n <= entries)
            return false;
    }
    return false;
}
