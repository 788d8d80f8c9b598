/* SPDX-License-Identifier: Apache-2.0 */
/*
 * discard.c - devices forget what free space held.
 *
 *   free --space is released--> noted --pause--> taken --the device has discarded it, or refused--> free
 *
 * Space is released when no durable record names it (object/owners.c). From then on it may be written again, and
 * a discard is just another way to lose its content. While a discard is in flight its blocks are marked as taken, so no
 * write can reach the device before the discard, and be forgotten by it. A crash at any time leaves free space, with or
 * without its old content: recovery, fsck and scrub read what references name, and nothing else.
 *
 *   pause           space that is freed together is discarded together, in runs of up to 64 MiB: 2 s; by default 30 s,
 *                   because a step frees what the next one uses
 *   reserved file   by default it keeps its bytes: its file system could have none left for the next write
 *   step            batches of 16 runs, until 10 ms are over
 *   gate            a discard waits for a permit as a write of 1 MiB does, before it takes blocks
 *   full store      a discard takes at most a quarter of the free blocks, and writers wait for it (object/space.c)
 *   no discard      a device that refuses one is not asked again in this mount
 */

#include "tiering/base/log.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/engine/engine_priv.h"

/* A block device serves one discard after another: few at a time, so that none looks older than it is. */
enum { EXTENTS = 16, WAVE = 4, PERMIT_BYTES = 1 << 20 };
#define PAUSE_NS UINT64_C(2000000000)
#define AUTO_PAUSE_NS UINT64_C(30000000000)

enum { DISCARDED, REFUSED, FIGURES };

/* --------------------------------------------------------------- a batch */

static bool takes_discards(const struct ht_store *s, unsigned device)
{
    return s->dev[device] && !ht_dev_facts(s->dev[device])->rdonly && !(s->engine->discard.refused >> device & 1);
}

/* What became free there stays as it is. */
static bool keeps_free(const struct ht_store *s, unsigned device)
{
    return s->opts.discard == HT_DISCARD_AUTO && s->dev[device] && ht_dev_facts(s->dev[device])->reserved;
}

bool ht_discard_is_on(const struct ht_store *s)
{
    unsigned device = 0;

    while (device < s->dev_count && (!s->dev[device] || keeps_free(s, device)))
        device++;
    return s->opts.discard && !s->opts.read_only && device < s->dev_count;
}

static bool is_refusal(int error)
{
    return error == -EOPNOTSUPP || error == -EINVAL || error == -ENOTTY || error == -EROFS || error == -EPERM;
}

/* Of a device that cannot, or does not let us. Another error ends the walk. */
static void note_error(struct ht_store *s, unsigned device, int error)
{
    if (!is_refusal(error)) {
        ht_warn("%s: discarding free space: %s", ht_dev_name(s->dev[device]), strerror(-error));
        return;
    }
    s->engine->discard.refused |= 1u << device;
    ht_info("%s does not discard free space (%s): it is not asked again in this mount", ht_dev_name(s->dev[device]),
            strerror(-error));
}

/* Returns the first error, and what follows it is not discarded. */
static int discard_extents(struct ht_store *s, const struct ht_extent e[], unsigned n)
{
    struct ht_ring *ring = ht_ring_mine(s->rings);
    struct ht_io io[EXTENTS];

    if (!ring)
        return -errno;
    for (unsigned i = 0; i < n; i++)
        io[i] = (struct ht_io){.op = HT_IO_DISCARD,
                               .dev = s->dev[e[i].device],
                               .offset = e[i].block * HT_BLOCK_BYTES,
                               .len = e[i].blocks * HT_BLOCK_BYTES};
    for (unsigned i = 0; i < n; i += WAVE) {
        unsigned count = (unsigned)ht_min_u64(WAVE, n - i);
        int rc = ht_ring_run(ring, io + i, count);
        for (unsigned k = i; k < i + count; k++)
            s->engine->row[HT_ENGINE_DISCARD].figure[DISCARDED] += io[k].result ? 0 : io[k].len;
        if (rc)
            return rc;
    }
    return 0;
}

/* One batch of a walk over a device. An error ends the walk. */
static int discard_some(struct ht_store *s, struct ht_alloc_freed_walk *walk)
{
    const struct ht_permit_request request = {
        .dev = s->dev[walk->device], .direction = HT_DIRECTION_WRITE, .bytes = PERMIT_BYTES};
    struct ht_extent e[EXTENTS];
    struct ht_permit permit;

    ht_permit_get(&s->gate, &request, &permit);
    unsigned n = ht_store_locked(s, ht_alloc_take_freed(s->alloc, walk, e, EXTENTS));
    int rc = n ? discard_extents(s, e, n) : 0;
    ht_permit_put(&permit);
    if (rc) {
        note_error(s, walk->device, rc);
        walk->ended = true;
    }
    if (!n)
        return rc;
    ht_store_lock(s);
    ht_alloc_put_freed(s->alloc, e, n);
    ht_wake_for_compact_freed(s);
    pthread_cond_broadcast(&s->waits.settled);
    ht_store_unlock(s);
    return rc;
}

/* ---------------------------------------------------- what became free */

#ifdef HT_MUTANTS
/* This mutant discards space that the log still names. */
static void discard_deferred(struct ht_store *s)
{
    struct ht_extent e[EXTENTS];
    unsigned n = 0;

    if (!HT_MUTANT("discard-early"))
        return;
    ht_store_lock(s);
    /* some of them: enough for a mutant */
    for (const struct ht_deferred_free *f = s->frees.logged.first; f && n < EXTENTS; f = f->next)
        for (unsigned k = 0; k < ht_ref_extents(&f->ref) && n < EXTENTS; k++)
            e[n++] = ht_ref_extent(&f->ref, k);
    ht_store_unlock(s);
    if (n && discard_extents(s, e, n))
        abort();
}
#else
static void discard_deferred(const struct ht_store *s)
{
}
#endif

static void begin_walk(struct ht_store *s)
{
    struct ht_discard *d = &s->engine->discard;

    ht_store_lock(s);
    s->waits.discard_noted = false;
    ht_store_unlock(s);
    d->walking = true;
    d->walk = (struct ht_alloc_freed_walk){0};
    discard_deferred(s);
}

/* One batch; it passes devices without noted space. */
static void walk_on(struct ht_store *s)
{
    struct ht_discard *d = &s->engine->discard;

    while (d->walk.device < s->dev_count) {
        bool has = ht_store_locked(s, !d->walk.ended && ht_alloc_has_freed(s->alloc, d->walk.device));
        if (has && takes_discards(s, d->walk.device) && !keeps_free(s, d->walk.device)) {
            (void)discard_some(s, &d->walk);
            return;
        }
        d->walk = (struct ht_alloc_freed_walk){.device = d->walk.device + 1};
    }
    d->walking = false;
}

/* The first wake begins the pause; more space may become free meanwhile. */
static enum ht_step step(void *ctx, struct ht_budget *b)
{
    struct ht_store *s = ctx;
    struct ht_discard *d = &s->engine->discard;
    uint64_t now = ht_now_ns();

    if (!d->walking) {
        if (!ht_store_locked(s, s->waits.discard_noted))
            return HT_STEP_IDLE;
        d->due_ns = d->due_ns ? d->due_ns : now + (s->opts.discard == HT_DISCARD_AUTO ? AUTO_PAUSE_NS : PAUSE_NS);
        if (now < d->due_ns)
            return ht_idle_until(b, d->due_ns);
        d->due_ns = 0;
        begin_walk(s);
    }
    do
        walk_on(s);
    while (d->walking && ht_now_ns() < b->until_ns);
    return HT_STEP_WORKED;
}

static const struct ht_engine_figure figures[FIGURES] = {
    [DISCARDED] = {"discarded_bytes", "Free space that devices have discarded."},
    [REFUSED] = {"refused_devices", "Devices that do not discard.", .gauge = true},
};

static void values(void *ctx, uint64_t out[])
{
    const struct ht_store *s = ctx;

    out[REFUSED] = (uint64_t)__builtin_popcount(s->engine->discard.refused);
}

const struct ht_engine_type ht_discard_engine = {
    .name = "discard",
    .step = step,
    .figure = figures,
    .figures = FIGURES,
    .values = values,
};

/* ------------------------------------------------------------------ trim */

int ht_store_trim(struct ht_store *s, uint64_t *out_bytes)
{
    _Atomic uint64_t *discarded = &s->engine->row[HT_ENGINE_DISCARD].figure[DISCARDED];
    uint64_t before = *discarded;
    bool any = false;
    int error = 0;

    if (ht_is_read_only(s))
        return -EROFS;
    enum ht_io_class was = ht_io_class_set(HT_IO_BACKGROUND);
    for (unsigned i = 0; i < s->dev_count; i++) {
        struct ht_alloc_freed_walk walk = {.device = i, .all = true};
        while (!walk.ended && takes_discards(s, i) && !s->waits.trim_ends) {
            int rc = discard_some(s, &walk);
            error = error || is_refusal(rc) ? error : rc;
        }
        any |= takes_discards(s, i);
    }
    (void)ht_io_class_set(was);
    *out_bytes = *discarded - before;
    return s->waits.trim_ends ? -ECANCELED : error ? error : any ? 0 : -EOPNOTSUPP;
}

void ht_store_trim_cancel(struct ht_store *s)
{
    s->waits.trim_ends = true;
}
