/* SPDX-License-Identifier: Apache-2.0 */
/*
 * move_copy.c - content of groups that are emptied is read, verified, and written to new places.
 *
 *   a round: reads, all in flight --each that is sound--> writes, all in flight --> copied
 *
 * A round has at most HT_MOVE_WRITES_MAX contents, which fit into one buffer and come from one device. A device that
 * serves a round within a quarter of the step's time gets twice as many in the next one. One that needs more than half
 * gets half as many. So a step ends in time on a slow device, too.
 */
#include "tiering/object/context.h"
#include "tiering/data/chunk_io.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/move_batch.h"

struct round {
    struct ht_move *move;
    unsigned n;
    uint32_t bytes; /* in whole blocks */
    uint8_t *at[HT_MOVE_WRITES_MAX];
};

static unsigned device_of(const struct ht_move *m)
{
    return (unsigned)ht_ref_home(&m->was);
}

/* At least one content, whatever is left of the budget. */
static struct round choose(struct ht_move_batch *b, struct ht_move m[], unsigned count, const struct ht_budget *budget)
{
    uint64_t left = budget->most_bytes - ht_min_u64(budget->bytes, budget->most_bytes);
    struct round r = {.move = m};

    while (r.n < count && r.n < b->flight) {
        uint32_t bytes = ht_ref_blocks(&m[r.n].was) * HT_BLOCK_BYTES;
        bool fits = device_of(&m[r.n]) == device_of(m) && r.bytes + bytes <= HT_CHUNK_BYTES &&
            2 * (uint64_t)(r.bytes + bytes) <= left;
        if (r.n && !fits)
            break;
        r.at[r.n++] = b->buf + r.bytes;
        r.bytes += bytes;
    }
    return r;
}

/* How many of the first ones came and are sound; *out_rc: why the next one is not. Scrub reports it. */
static unsigned read_round(const struct round *r, int *out_rc)
{
    struct ht_chunk_io io[HT_MOVE_WRITES_MAX];
    unsigned sound = 0;

    for (unsigned i = 0; i < r->n; i++) {
        const struct ht_move_owner *w = &r->move[i].owner[0];
        io[i] = (struct ht_chunk_io){
            .obj = w->obj, .index = w->index, .ref = r->move[i].was, .data = r->at[i], .as_stored = true};
    }
    *out_rc = ht_chunks_read_permitted(io, r->n);
    while (sound < r->n && !io[sound].rc)
        sound++;
    return sound;
}

/* How many of the first ones were copied; *out_rc: why the next one was not. */
static unsigned copy_round(struct ht_store *s, struct round *r, struct ht_ring *ring, int *out_rc)
{
    int rc[HT_MOVE_WRITES_MAX], failed = 0;
    unsigned n = read_round(r, out_rc), copied = 0;

    if (n)
        failed = ht_move_write_copies(s, r->move, r->at, n, ring, rc);
    while (!failed && copied < n && !rc[copied])
        copied++;
    if (copied < n)
        *out_rc = failed ? failed : rc[copied];
    return copied;
}

int ht_move_copy(struct ht_move_batch *b, struct ht_move m[], unsigned count, struct ht_budget *budget,
                 unsigned *out_done)
{
    struct ht_ring *ring = ht_store_ring(b->s);
    uint64_t now = ht_now_ns();
    unsigned done = 0;
    int rc = ring ? 0 : -ENOMEM;

    while (!rc && done < count) {
        if (done && (budget->bytes >= budget->most_bytes || now >= budget->until_ns || b->s->waits.stopping))
            break;
        struct round r = choose(b, &m[done], count - done, budget);
        done += copy_round(b->s, &r, ring, &rc);
        budget->bytes += 2 * (uint64_t)r.bytes; /* read and written */
        uint64_t began = now, left_ns = budget->until_ns - ht_min_u64(began, budget->until_ns);
        now = ht_now_ns();
        if (now - began < left_ns / 4 && b->flight < HT_MOVE_WRITES_MAX)
            b->flight *= 2;
        else if (now - began > left_ns / 2 && b->flight > 1)
            b->flight /= 2;
    }
    *out_done = done;
    return rc;
}
