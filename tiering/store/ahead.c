/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ahead.c - reading chunks into images before anybody asks for them: ahead of those who read one byte after the other (stream.h says
 * who does, and how far), and for a prefetch.
 *
 *   reader --note--> hungry --its next chunk: image taken, read started--> ... --all asked for--> not hungry
 *                      '--reads elsewhere, closes--> not hungry: what is under way is read to its end
 *
 * One thread, which begins with the first hungry reader, has some reads in flight for all of them in turn. It waits for nothing but
 * devices: a chunk that somebody holds is left to him, and an image comes from what the clock lets go, never from what is dirty
 * or kept. What fails is not told: the reader will see it himself.
 *
 * Threads hold several chunks here, in any order. They wait for a chunk only when they hold none.
 */
#include <assert.h>

#include "tiering/store/store_priv.h"

enum {
    TRIES = 1024,                /* images that are asked to go */
    STREAM_BYTES_MAX = 16 << 20, /* ahead of one reader */
    MISSING_MAX = 2,             /* where so many readers wait for devices already, these are busy without it */
    ARENA_SHARE = 4, /* what is read ahead and not used yet takes at most this part of what moves in the arena */
};

/* Is there something to read for it? */
static bool wanted(struct ht_chunk *c)
{
    return c && c->slot == HT_SLOT_NONE && !(c->flags & CH_BAD) && ht_chunk_ref(c) && !ht_ref_lost(ht_chunk_ref(c));
}

/* ------------------------------------------------------------------ readers */

/*
 * For one reader: a part of what moves in the arena, of which others have read ahead some already; or of what is free, for what nobody
 * came for may stay there for ever.
 */
static uint64_t stream_bytes_max(const struct ht_store *s)
{
    uint64_t all = ht_arena_moving_bytes(s->arena) / ARENA_SHARE, used = ht_arena_ahead_bytes(s->arena);
    uint64_t unused = ht_arena_free_slots(s->arena) * HT_MIB / ARENA_SHARE;
    return ht_min_u64(STREAM_BYTES_MAX, ht_max_u64(all - ht_min_u64(used, all), unused));
}

static void *ahead_main(void *s);

/* Somebody is hungry. Without a thread nobody is fed, and reads for himself. */
static void wake(struct ht_store *s)
{
    struct ht_ahead *a = &s->ahead;
    if (!a->running && !s->opts.no_threads && !s->stopping)
        a->running = pthread_create(&a->thread, NULL, ahead_main, s) == 0;
    s->wakes.ahead = s->wakes.any = true;
}

void ht_obj_reader_note(struct ht_obj *o, struct ht_obj_reader *r, uint64_t off, uint64_t len)
{
    struct ht_store *s = o->s;
    if (!len || o->extra->handed)
        return;
    if (!r->obj) {
        r->obj = o;
        ht_list_init(&r->hungry);
    }
    uint64_t unit = ht_obj_bytes_per_chunk(o), at = off >> o->chunk_shift, most = stream_bytes_max(s);
    uint64_t to = ht_stream_note(&r->stream, off, len, unit, most);
    ht_list_del(&r->hungry);
    if (!to || most < unit) { /* without room it would take the place of what is being read */
        r->next = 0;
        return;
    }
    r->end = ht_div_up(ht_min_u64(to, o->size), unit);
    if (r->next > r->end) /* he has begun anew */
        r->next = 0;
    if (at < r->next && wanted(ht_chunk_find(o, at))) /* it was there, and had to go */
        ht_stream_shrink(&r->stream, unit);
    r->next = ht_max_u64(r->next, ((r->stream.hi - 1) >> o->chunk_shift) + 1);
    while (r->next < r->end && !wanted(ht_chunk_find(o, r->next)))
        r->next++;
    if (r->next >= r->end || s->missing >= MISSING_MAX)
        return;
    ht_list_add_tail(&s->ahead.hungry, &r->hungry);
    wake(s);
}

void ht_obj_reader_end(struct ht_obj_reader *r)
{
    if (!r->obj)
        return;
    ht_store_lock(r->obj->s);
    ht_list_del(&r->hungry);
    ht_store_unlock(r->obj->s);
    r->obj = NULL;
}

/* The next chunk of a reader, held exclusively, and an image for it. HT_SLOT_NONE: nothing is to be read for him now. */
static uint32_t next_of(struct ht_obj_reader *r, struct ht_chunk **out_c, uint64_t *out_index)
{
    struct ht_obj *o = r->obj;
    while (r->next < r->end) {
        struct ht_chunk *c = ht_chunk_find(o, r->next++);
        if (!wanted(c) || !ht_chunk_trylock_exclusive(c))
            continue;
        int near = ht_chunk_near_now(o->s, c);
        uint32_t bytes = ht_chunk_image_bytes(o, c, r->next - 1, 0);
        uint32_t slot = ht_arena_get(o->s->arena, bytes, TRIES, near);
        if (slot != HT_SLOT_NONE) {
            *out_c = c;
            *out_index = r->next - 1;
            return slot;
        }
        ht_chunk_unlock_exclusive(o, c, r->next - 1);
        ht_stream_shrink(&r->stream, ht_obj_bytes_per_chunk(o));
        r->end = --r->next;
    }
    return HT_SLOT_NONE;
}

/* A chunk for whoever has been hungry longest. False: nobody is. Lock held, let go meanwhile: the reader may go. */
static bool feed(struct ht_fills *w)
{
    struct ht_store *s = w->s;
    if (ht_list_empty(&s->ahead.hungry))
        return false;
    struct ht_obj_reader *r = ht_list_entry(s->ahead.hungry.next, struct ht_obj_reader, hungry);
    struct ht_chunk *c;
    uint64_t index;
    uint32_t slot = next_of(r, &c, &index);
    ht_list_del(&r->hungry);
    if (slot == HT_SLOT_NONE)
        return true;
    if (r->next < r->end)
        ht_list_add_tail(&s->ahead.hungry, &r->hungry);
    ht_arena_mark_ahead(s->arena, slot);
    ht_chunk_attach_image(r->obj, c, index, slot);
    ht_fills_start(w, r->obj, c, index);
    return true;
}

static void send_away(struct ht_store *s)
{
    while (!ht_list_empty(&s->ahead.hungry))
        ht_list_del(s->ahead.hungry.next);
}

/* Until nobody is hungry. Lock held, let go meanwhile. */
static void feed_all(struct ht_fills *w)
{
    struct ht_store *s = w->s;
    ht_store_unlock(s);
    w->ring = ht_store_ring(s);
    ht_store_lock(s);
    if (!w->ring) {
        send_away(s);
        return;
    }
    do {
        while (w->count < HT_FILLS_MAX && !s->stopping && feed(w))
            ;
        if (w->count)
            ht_fills_finish(w);
    } while (w->count);
}

static void *ahead_main(void *arg)
{
    struct ht_store *s = arg;
    struct ht_fills w = {.s = s};
    ht_store_lock(s);
    while (!s->stopping) {
        if (ht_list_empty(&s->ahead.hungry))
            ht_store_wait(s, &s->ahead.wake, 0);
        else
            feed_all(&w);
    }
    ht_store_unlock(s);
    return NULL;
}

void ht_store_read_ahead(struct ht_store *s)
{
    struct ht_fills w = {.s = s};
    ht_store_lock(s);
    feed_all(&w);
    ht_store_unlock(s);
}

void ht_ahead_init(struct ht_ahead *a)
{
    ht_list_init(&a->hungry);
    pthread_cond_init(&a->wake, NULL);
}

void ht_ahead_stop(struct ht_store *s)
{
    ht_store_lock(s);
    s->stopping = true;
    pthread_cond_signal(&s->ahead.wake);
    bool running = s->ahead.running;
    s->ahead.running = false;
    ht_store_unlock(s);
    if (running)
        pthread_join(s->ahead.thread, NULL);
}

void ht_ahead_destroy(struct ht_ahead *a)
{
    pthread_cond_destroy(&a->wake);
}

/* ----------------------------------------------------------------- prefetch */

/* One that was handed out has its own memory for it. Chunk held. */
static int fill_handed(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    int rc = ht_chunk_get_slot(o, c, index, 0);
    if (!rc)
        rc = ht_chunk_fill(o, c, index);
    if (rc)
        ht_chunk_drop_empty(o, c, index);
    return rc;
}

/* 0: go on; 1: there is no room. Lock held, let go meanwhile. */
static int prefetch_chunk(struct ht_fills *w, struct ht_obj *o, uint64_t index)
{
    struct ht_store *s = w->s;
    if (w->count == HT_FILLS_MAX)
        ht_fills_finish(w);
    struct ht_chunk *c;
    while ((c = ht_chunk_find(o, index)) && w->count && (c->exclusive || c->shared || o->extra->handed))
        ht_fills_finish(w);
    if (!c)
        return 0;
    ht_chunk_lock_exclusive(s, c);
    int rc = 0;
    if (wanted(c) && o->extra->handed) {
        rc = fill_handed(o, c, index);
    } else if (wanted(c)) {
        int near = ht_chunk_near_now(s, c);
        uint32_t slot = ht_arena_get(s->arena, ht_chunk_image_bytes(o, c, index, 0), 0, near);
        if (slot != HT_SLOT_NONE) {
            ht_chunk_attach_image(o, c, index, slot);
            ht_fills_start(w, o, c, index);
            return 0;
        }
        rc = 1;
    } else if (c->slot == HT_SLOT_NONE && ht_chunk_ref(c)) {
        rc = -EIO; /* lost, or given up */
    }
    ht_chunk_unlock_exclusive(o, c, index);
    return rc;
}

static int prefetch(struct ht_fills *w, struct ht_obj *o)
{
    struct ht_chunk *c;
    uint64_t index = 0;
    int rc = 0;
    ht_chunk_for_each_from(c, o, index)
    {
        if (rc || w->error || ht_arena_free_slots(w->s->arena) == 0)
            break;
        if (c->slot == HT_SLOT_NONE && ht_chunk_ref(c))
            rc = prefetch_chunk(w, o, index);
    }
    ht_fills_finish_all(w);
    return rc < 0 ? rc : w->error;
}

int ht_obj_prefetch(struct ht_obj *o)
{
    struct ht_store *s = o->s;
    struct ht_fills w = {.s = s, .tell = true, .ring = ht_store_ring(s)};
    if (!w.ring)
        return -ENOMEM;
    ht_store_lock(s);
    int rc = prefetch(&w, o);
    ht_store_unlock(s);
    return rc;
}
