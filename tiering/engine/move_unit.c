/* SPDX-License-Identifier: Apache-2.0 */
/*
 * move_unit.c - empties groups of blocks, a unit after the other. Each ends when the budget of its step is used up.
 *
 *   next groups of the batch --all that is taken is known content--> closed --> copied --> published, all owners
 *            |                                                         ^           | the budget is used up:
 *            '--other content, or no room: it stays                    |           v the rest in the next unit
 *                                                                      '-----------'
 *   64 groups later, or at the end: durable --> open, and free as a whole
 *
 * A closed group serves no request, but its free blocks stay available: a writer that needs them opens it, and the rest
 * of its content stays (space/space_map.h). Copies need space until their old places are free. So no group is closed
 * unless the other broken groups have that, and unless the store has more than the slack that it leaves to writers.
 *
 * Between units the batch keeps numbers only: a deleted object keeps no space because the engine was paused.
 */

#include "tiering/base/mutant.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/flush.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/move_batch.h"

enum {
    MOVES_MAX = HT_GROUP_BLOCKS,
    UNIT_OWNERS = HT_OWNERS_LONG,             /* of a unit with several groups */
    UNIT_BLOCKS = HT_GROUP_BLOCKS,            /* the same */
    GROUP_BLOCKS_MAX = 4 * HT_GROUP_BLOCKS,   /* of the content of one group, with what lies outside of it */
    LOOKS_MAX = 64,                           /* groups that a unit looks at */
    CLOSED_BLOCKS_MAX = 64 * HT_GROUP_BLOCKS, /* in closed groups */
    SLACK_BLOCKS_MAX = 16 * HT_GROUP_BLOCKS,
    SLACK_SHARE = 32, /* of the store */
};

struct unit {
    struct ht_move_batch *b;
    struct ht_store *s;
    struct ht_move move[MOVES_MAX];
    unsigned victim[MOVES_MAX];  /* of each move: the first of its groups */
    struct ht_move_owner *owner; /* in the order of the moves */
    unsigned count, owners, owners_cap, blocks;
    struct ht_slice slice; /* while it gathers */
};

static unsigned blocks_inside(const struct ht_move_victim *v, const struct ht_ref *ref)
{
    uint64_t from = ht_move_group(v->key) * HT_GROUP_BLOCKS, end = from + HT_GROUP_BLOCKS;
    unsigned blocks = 0;

    for (unsigned i = 0; i < ht_ref_extents(ref); i++) {
        struct ht_extent x = ht_ref_extent(ref, i);
        uint64_t a = ht_max_u64(x.block, from), z = ht_min_u64(x.block + x.blocks, end);
        if (x.device == ht_move_device(v->key) && a < z)
            blocks += (unsigned)(z - a);
    }
    return blocks;
}

/* --------------------------------------------------------------- gathering */

enum { GATHERED, FULL, STAYS, NOT_DURABLE };

/* Is the chunk's published content still where it was found? */
static bool is_there(const struct ht_chunk *c, const struct ht_owner_found *f) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!c || !(c->flags & HT_CH_PUB) || !ht_ref_holds(&c->pub))
        return false;
    return ht_ref_place(&c->pub) == f->place;
}

/* A chunk may reach into several groups of a unit. */
static struct ht_move *find_move(struct unit *u, const struct ht_ref *ref)
{
    for (unsigned i = 0; i < u->count; i++)
        if (ht_ref_same_place(&u->move[i].was, ref))
            return &u->move[i];
    return NULL;
}

static bool add_owner(struct unit *u, struct ht_move *m, const struct ht_owner_found *f) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o;
    const struct ht_chunk *c = ht_chunk_find_in(u->s, f->oid, f->index, &o);

    if (!c || (c->flags & ~HT_CH_LOG_RESERVED) != HT_CH_PUB || !ht_ref_same_place(&c->pub, &m->was))
        return false;
    u->owner[u->owners++] = (struct ht_move_owner){f->oid, f->index};
    m->owners++;
    return true;
}

/* The content of one place with its owners, from f on. Content that has left is no obstacle. 0, STAYS, or -ENOMEM. */
static int gather_place(struct unit *u, unsigned victim, const struct ht_owner_found *f, unsigned n, unsigned *inside)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_move *m = &u->move[u->count];
    struct ht_obj *o;
    const struct ht_chunk *c = ht_chunk_find_in(u->s, f->oid, f->index, &o);

    if (!is_there(c, f))
        return GATHERED;
    *inside += blocks_inside(&u->b->victim[victim], &c->pub);
    if (find_move(u, &c->pub))
        return GATHERED;
    if (u->count == MOVES_MAX)
        return STAYS;
    *m = (struct ht_move){.obj = o, .owner = &u->owner[u->owners]};
    int rc = ht_ref_copy(&m->was, &c->pub);
    if (rc)
        return rc;
    o->refs++;
    u->victim[u->count++] = victim;
    u->blocks += ht_ref_blocks(&m->was);
    for (unsigned i = 0; i < n; i++, ht_slice_next(u->s, &u->slice))
        if (!add_owner(u, m, &f[i]))
            return STAYS;
    return ht_move_may(u->s, m) ? GATHERED : STAYS;
}

/* Back to so many moves. */
static void forget_from(struct unit *u, unsigned count) HT_REQUIRES(HT_LOCK_STORE)
{
    while (u->count > count) {
        struct ht_move *m = &u->move[--u->count];
        u->blocks -= ht_ref_blocks(&m->was);
        u->owners -= m->owners;
        ht_obj_put_locked(m->obj);
        ht_slice_next(u->s, &u->slice);
        if (ht_ref_holds(&m->now))
            ht_free_ref_now(u->s, &m->now);
        ht_ref_forget(&m->was);
    }
}

static uint64_t slack_blocks(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_min_u64(SLACK_BLOCKS_MAX, ht_alloc_total(s->alloc) / SLACK_SHARE);
}

/* Closes a group of which so many taken blocks are known content. NOT_DURABLE: maybe when earlier moves are durable. */
static int close_group(struct unit *u, struct ht_move_victim *v, unsigned inside) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_alloc *a = u->s->alloc;
    unsigned taken = ht_alloc_group_taken(a, ht_move_device(v->key), ht_move_group(v->key)),
             left = HT_GROUP_BLOCKS - taken;
    uint64_t unusable = ht_alloc_whole_blocks(a) + u->b->closed_blocks + left;

    if (!inside || taken > HT_MOVE_TAKEN_MAX)
        return STAYS;
    if (inside != taken || ht_alloc_free_blocks(a) < unusable + u->blocks ||
        ht_alloc_available(a) < u->blocks + slack_blocks(u->s))
        return u->b->lsn || u->b->closed_blocks ? NOT_DURABLE : STAYS;
    ht_alloc_close_group(a, ht_move_device(v->key), ht_move_group(v->key));
    u->b->closed_blocks += left;
    v->closed = true;
    return GATHERED;
}

static bool fits(const struct unit *u, unsigned before, unsigned owners)
{
    unsigned most = before ? UNIT_BLOCKS : GROUP_BLOCKS_MAX;

    return u->blocks <= most && u->count + HT_MOVE_TAKEN_MAX <= MOVES_MAX &&
        (!before || u->owners + owners <= UNIT_OWNERS);
}

/* All that lies in a group. GATHERED; or nothing was gathered: FULL, STAYS, NOT_DURABLE, -ENOMEM. */
static int gather_group(struct unit *u, unsigned victim) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_owners *w = &u->b->pass.shared;
    struct ht_move_victim *v = &u->b->victim[victim];
    size_t first = ht_owners_first_of(w, victim), end = ht_owners_first_of(w, victim + 1);
    unsigned n = (unsigned)(end - first), before = u->count, inside = 0;
    int rc = v->skip ? STAYS : GATHERED;

    if (!rc && v->closed && !ht_alloc_is_closed_group(u->s->alloc, ht_move_device(v->key), ht_move_group(v->key)))
        rc = STAYS; /* a writer needed it */
    if (!rc && !fits(u, before, n))
        rc = FULL;
    if (!rc)
        rc = ht_move_make_room(&u->owner, &u->owners_cap, u->owners + n, u->move, u->count);
    for (size_t i = first, same; !rc && i < end; i += same) {
        same = ht_owners_same(w, i);
        rc = gather_place(u, victim, &w->found[i], HT_MUTANT("owner-left-behind") ? 1 : (unsigned)same, &inside);
    }
    if (!rc && !fits(u, before, 0))
        rc = before ? FULL : STAYS;
    if (!rc && !v->closed)
        rc = close_group(u, v, inside);
    if (rc)
        forget_from(u, before);
    return rc;
}

/* The groups that are closed become free before another one is closed. */
static bool has_enough(const struct ht_move_batch *b)
{
    return b->closed_blocks >= CLOSED_BLOCKS_MAX && !b->victim[b->at].closed;
}

bool ht_move_is_long(const struct ht_move_batch *b)
{
    if (b->at == b->count || has_enough(b))
        return false;
    return ht_owners_first_of(&b->pass.shared, b->at + 1) - ht_owners_first_of(&b->pass.shared, b->at) > UNIT_OWNERS;
}

/*
 * The next groups, as many as a unit holds; one of very many owners is a unit of its own. 0, NOT_DURABLE, or -ENOMEM.
 */
static int gather(struct unit *u)
{
    struct ht_move_batch *b = u->b;
    int rc = GATHERED;

    ht_store_lock(u->s);
    for (unsigned i = 0; i < LOOKS_MAX && b->at < b->count && !has_enough(b) && !(i && ht_move_is_long(b)); i++) {
        rc = gather_group(u, b->at);
        if (rc != GATHERED && rc != STAYS)
            break;
        b->figure[HT_COMPACT_SKIPPED] += rc == STAYS && !b->victim[b->at].closed;
        b->at++;
    }
    ht_store_unlock(u->s);
    return rc == NOT_DURABLE || rc < 0 ? rc : 0;
}

/* ----------------------------------------------------------------- copying */

/*
 * Content is read, verified, and written to new places:
 *
 *   a round: reads, all in flight --each that is sound--> writes, all in flight --> copied
 *
 * A round has at most HT_MOVE_WRITES_MAX contents, which fit into one buffer and come from one device. A device that
 * serves a round within a quarter of the step's time gets twice as many in the next one. One that needs more than half
 * gets half as many. So a step ends in time on a slow device, too.
 */
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
static struct round next_round(struct ht_move_batch *b, struct ht_move m[], unsigned count,
                               const struct ht_budget *budget)
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
        const struct ht_move *m = &r->move[i];
        io[i] = (struct ht_chunk_io){
            .obj = m->obj, .index = m->owner[0].index, .ref = m->was, .data = r->at[i], .as_stored = true};
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

/*
 * As much as the budget allows and at least one. *out_done: the moves before it were copied. 0, or the error of that
 * one; later ones may have been copied, too.
 */
static int copy(struct ht_move_batch *b, struct ht_move m[], unsigned count, struct ht_budget *budget,
                unsigned *out_done)
{
    struct ht_ring *ring = ht_store_ring(b->s);
    uint64_t now = ht_now_ns();
    unsigned done = 0;
    int rc = ring ? 0 : -ENOMEM;

    while (!rc && done < count) {
        if (done && (budget->bytes >= budget->most_bytes || now >= budget->until_ns || b->s->waits.stopping))
            break;
        struct round r = next_round(b, &m[done], count - done, budget);
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

/* -------------------------------------------------------------- publishing */

static int publish(struct unit *u, unsigned done)
{
    struct ht_move_batch *b = u->b;
    uint64_t lsn = 0;
    int rc = done ? ht_move_publish(u->s, u->move, done, &lsn) : 0;

    b->lsn = !rc && lsn ? lsn : b->lsn;
    for (unsigned i = 0; !rc && i < done; i++)
        if (u->move[i].moved)
            b->figure[HT_COMPACT_MOVED] += u->move[i].was.stored;
    return rc;
}

/*
 * Where the next unit begins: with the content that was not copied, or behind the group of which some cannot be, or of
 * which copies found no room in the log: another unit would copy the same again.
 */
static int copy_and_publish(struct unit *u, struct ht_budget *budget)
{
    unsigned done;
    int rc = copy(u->b, u->move, u->count, budget, &done);

    if (done < u->count)
        u->b->at = u->victim[done];
    if (rc == -EIO || rc == -ENOSPC) {
        u->b->at++;
        rc = 0;
    }
    bool many = u->owners > UNIT_OWNERS;
    int published = publish(u, done);
    bool stays = published == -EIO || (published == -ENOSPC && many); /* the log has no room for so many records */
    if (stays && u->b->at == u->victim[done - 1])
        u->b->at++;
    return rc ? rc : stays ? 0 : published;
}

/* ---------------------------------------------------------------- settling */

static void open_until(struct ht_move_batch *b, unsigned end) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_alloc *a = b->s->alloc;

    for (; b->settled < end; b->settled++) {
        struct ht_move_victim *v = &b->victim[b->settled];
        if (!v->closed)
            continue;
        if (ht_alloc_is_closed_group(a, ht_move_device(v->key), ht_move_group(v->key)) &&
            ht_alloc_group_taken(a, ht_move_device(v->key), ht_move_group(v->key)) == 0)
            b->figure[HT_COMPACT_EMPTIED]++;
        else
            b->figure[HT_COMPACT_SKIPPED]++;
        ht_alloc_open_group(a, ht_move_device(v->key), ht_move_group(v->key));
        v->closed = false;
    }
}

void ht_move_open_all(struct ht_move_batch *b)
{
    ht_store_lock(b->s);
    open_until(b, b->count);
    ht_store_unlock(b->s);
}

/* Old places are free once the moves are durable. */
static int settle(struct ht_move_batch *b)
{
    int rc = b->lsn ? ht_store_sync(b->s, b->lsn) : 0;

    if (rc)
        return rc;
    b->lsn = 0;
    ht_store_lock(b->s);
    open_until(b, b->at);
    b->closed_blocks = 0;
    for (unsigned i = b->at; i < b->count && b->victim[i].closed; i++) /* the rest of a unit that took too long */
        b->closed_blocks += HT_GROUP_BLOCKS;
    ht_store_unlock(b->s);
    return 0;
}

/* ------------------------------------------------------------------- units */

bool ht_move_is_over(const struct ht_move_batch *b)
{
    return b->at == b->count && b->settled == b->count;
}

int ht_move_unit(struct ht_move_batch *b, struct ht_budget *budget)
{
    if (b->at == b->count || has_enough(b))
        return settle(b);
    struct unit *u = calloc(1, sizeof(*u));
    if (!u)
        return -ENOMEM;
    u->b = b;
    u->s = b->s;
    int rc = gather(u);
    if (u->count)
        rc = copy_and_publish(u, budget);
    else if (rc == NOT_DURABLE)
        rc = settle(b);
    ht_store_lock(b->s);
    forget_from(u, 0);
    ht_store_unlock(b->s);
    free(u->owner);
    free(u);
    return rc;
}
