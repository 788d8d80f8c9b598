/* SPDX-License-Identifier: Apache-2.0 */
/*
 * silent.c - finds the devices that a caller would wait for, and checks whether they answer.
 *
 * Health (health.c) goes by the age of requests in flight, so a silent device without requests looks well. A probe is
 * such a request:
 *
 *   none --request--> running: a thread of its own reads a block --answer, or error--> none
 *                      '--older than answer_ms: the device counts as silent, and no caller waits any longer
 *
 * A device has one probe at a time. Its thread ends when the device answers. Without threads (no_threads) nothing is
 * probed, and health alone decides. Lock: store.lock.
 */
#include "tiering/data/silent.h"
#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/io/dev.h"
#include "tiering/journal/journal.h"
#include "tiering/cache/arena.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/object/scope.h"
#include "tiering/object/slice.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/flush.h"
#include "tiering/data/health.h"
#include "tiering/data/write_batch.h"

#define LOOK_NS UINT64_C(10000000)

/* ------------------------------------------------------ what a commit needs */

uint32_t ht_log_devices(const struct ht_store *s)
{
    uint32_t devices = 0;

    for (unsigned c = 0; c < HT_LOG_COPIES; c++)
        if (ht_journal_copy_live(s->journal, c))
            devices |= 1u << s->layout.log_device[c];
    return devices;
}

static uint32_t devices_of(const struct ht_ref *ref)
{
    uint32_t devices = 0;

    for (unsigned i = 0; ref && ht_ref_holds(ref) && i < ht_ref_extents(ref); i++)
        devices |= 1u << ht_ref_extent(ref, i).device;
    return devices;
}

/* Devices of writes in flight: their chunks are free when they have ended. */
static uint32_t written_to(const struct ht_store *s, uint64_t scope) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t devices = 0;

    ht_list_for_each(p, &s->data->writing) {
        const struct ht_write_batch *w = ht_list_entry(p, struct ht_write_batch, link);
        for (unsigned i = 0; i < w->count; i++) {
            const struct ht_batch_write *j = &w->job[w->order[i]];
            if (j->io.obj->scope->id == scope)
                devices |= devices_of(&j->io.ref);
        }
    }
    return devices;
}

/* Devices of dirty images that another thread holds: it may be reading the rest of their bytes. */
static void add_filled_from(struct ht_obj *o, struct ht_slice *slice, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t *devices = ctx;
    struct ht_chunk *c;
    uint64_t index = 0;

    ht_chunk_for_each_from(c, o, index)
    {
        if (!o->dirty)
            break;
        if (!ht_chunk_leaf(c)->dirty)
            index = ht_leaf_last(index);
        else if (c->exclusive && c->slot != HT_SLOT_NONE && ht_arena_image(o->s->arena, c->slot)->dirty)
            *devices |= devices_of(ht_chunk_ref(c));
        if (slice)
            ht_slice_next(o->s, slice);
    }
}

uint32_t ht_commit_devices_locked(struct ht_store *s, uint64_t scope)
{
    uint32_t devices = ht_flush_needed_locked(s, ht_scope_unflushed_locked(s, scope, false));
    struct ht_slice slice = {0};

    devices |= ht_log_devices(s) | s->data->suspect | s->data->resolving | written_to(s, scope);
    ht_scope_visit_touched(s, scope, &slice, add_filled_from, &devices);
    return devices;
}

/* ------------------------------------------------------------------ probes */

static void *probe_main(void *arg)
{
    struct ht_probe *p = arg;
    _Alignas(HT_BLOCK_BYTES) uint8_t block[HT_BLOCK_BYTES];
    int rc = ht_dev_read(p->s->dev[p - p->s->data->probe], 0, block, sizeof(block));

    (void)rc; /* an error is an answer, too */
    ht_store_lock(p->s);
    p->running = false;
    pthread_cond_broadcast(&p->s->data->probe_ended);
    ht_store_unlock(p->s);
    return NULL;
}

/* If no thread can be made, health alone decides. Lock held. */
static void start(struct ht_store *s, unsigned device) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_probe *p = &s->data->probe[device];

    if (p->running || s->opts.no_threads)
        return;
    if (p->joinable)
        pthread_join(p->thread, NULL);
    p->s = s;
    p->running = p->joinable = pthread_create(&p->thread, NULL, probe_main, p) == 0;
}

/* An older request in flight must end, too: it may be of a kind that the device does not take any more. */
static bool is_in_doubt(const struct ht_store *s, unsigned device, uint64_t since_ns) HT_REQUIRES(HT_LOCK_STORE)
{
    return s->data->probe[device].running || ht_dev_oldest_ns(s->dev[device]) > ht_now_ns() - since_ns;
}

uint32_t ht_probe_devices(struct ht_store *s, uint32_t devices)
{
    uint32_t silent = 0;

    ht_store_lock(s);
    uint64_t since_ns = ht_now_ns();
    for (unsigned i = 0; i < s->dev_count; i++)
        if (devices >> i & 1)
            start(s, i);
    for (unsigned i = 0; i < s->dev_count; i++) {
        if (!(devices >> i & 1))
            continue;
        while (ht_store_check_device(s, i) < HT_HEALTH_NOT_ANSWERING && is_in_doubt(s, i, since_ns))
            ht_store_wait(s, &s->data->probe_ended, ht_now_ns() + LOOK_NS);
        silent |= (uint32_t)(ht_device_health(s, i) >= HT_HEALTH_NOT_ANSWERING) << i;
    }
    ht_store_unlock(s);
    return silent;
}

void ht_probes_end(struct ht_store *s)
{
    HT_UNSHARED(HT_LOCK_STORE); /* a running probe does not change the fields that this function reads */
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        if (s->data->probe[i].joinable)
            pthread_join(s->data->probe[i].thread, NULL);
}
