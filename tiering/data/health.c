/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health.c - how the devices do: by the age of their oldest requests, and by what they took in a day. A look waits for
 * no device.
 *
 * A change is reported once, as an event. health[] is what placement and new requests go by.
 *
 * A silent device without requests looks well. So a caller that would wait for it first has it probed, by a request:
 *
 *   none --request--> running: a thread of its own reads a block --answer, or error--> none
 *                      '--older than answer_ms: the device counts as silent, and no caller waits any longer
 *
 * A device has one probe at a time. Its thread ends when the device answers. Without threads (no_threads) nothing is
 * probed, and health alone decides. Lock: store.lock.
 */
#include "tiering/base/event.h"
#include "tiering/api/stats.h"
#include "tiering/object/context.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/data.h"
#include "tiering/data/flush.h"
#include "tiering/data/write_batch.h"

#define PROBE_LOOK_NS UINT64_C(10000000)
enum { LOOKS = 4, LOOK_MS_MAX = 1000 }; /* in each answer_ms */

static uint64_t answer_ns(const struct ht_store *s, unsigned device_class)
{
    bool capacity = device_class == HT_DEVICE_CAPACITY;
    unsigned given_ms = capacity ? s->opts.capacity_answer_ms : s->opts.answer_ms;

    return (given_ms ? given_ms : (capacity ? HT_CAPACITY_ANSWER_S : HT_DEVICE_ANSWER_S) * 1000u) * 1000000ull;
}

const char *ht_device_name(const struct ht_store *s, unsigned device)
{
    return device == HT_DEVICE_VAULT ? "the vault" : s->dev[device] ? ht_dev_name(s->dev[device]) : "a missing device";
}

static void report(const struct ht_store *s, unsigned device, enum ht_health was, enum ht_health is)
{
    struct ht_event_about about = {.device = ht_device_name(s, device)};

    if (is == HT_HEALTH_NOT_ANSWERING) {
        about.error = -ETIMEDOUT;
        ht_event(
            HT_EVENT_DEVICE_SILENT, &about,
            "%s does not answer: a request is older than %llu ms; new ones go elsewhere or fail, and nothing that needs "
            "this one is durable until it answers",
            about.device, (unsigned long long)(answer_ns(s, s->layout.device_class[device]) / 1000000));
    } else if (was == HT_HEALTH_NOT_ANSWERING) {
        ht_event(HT_EVENT_DEVICE_ANSWERS, &about, "%s answers again", about.device);
    }
    if (is == HT_HEALTH_FAILING) {
        about.error = -EIO;
        ht_event(HT_EVENT_DEVICE_FAILING, &about,
                 "%s fails writes: the store uses it only when no other device has room; "
                 "copy its content while it can be read, and replace it",
                 about.device);
    }
}

enum ht_health ht_store_check_device(struct ht_store *s, unsigned device)
{
    if (!s->dev[device])
        return HT_HEALTH_MISSING;
    enum ht_health was = s->data->health[device], is;

    is = ht_dev_health(s->dev[device], answer_ns(s, s->layout.device_class[device]));
    if (is == was)
        return is;
    s->data->health[device] = is;
    ht_alloc_set_failing(s->alloc, device, is >= HT_HEALTH_FAILING);
    pthread_cond_broadcast(&s->waits.settled); /* threads may wait for space that it discards */
    report(s, device, was, is);
    return is;
}

uint64_t ht_health_period_ns(const struct ht_store *s)
{
    uint64_t least_ns = ht_min_u64(answer_ns(s, HT_DEVICE_FAST), answer_ns(s, HT_DEVICE_CAPACITY));

    return ht_min_u64(least_ns / LOOKS, LOOK_MS_MAX * UINT64_C(1000000));
}

/* --------------------------------------------------------------- endurance */

/* Everything counts that the devices took: content, log and superblocks, of all devices together. */
static void check_endurance(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_endurance *e = &s->data->endurance;
    uint64_t now_ns = ht_now_ns();

    ht_endurance_look(e, now_ns, ht_devs_totals(s->dev, s->dev_count).written_bytes);
    if (ht_endurance_must_warn(e, now_ns))
        ht_event(HT_EVENT_ENDURANCE, NULL,
                 "the store wrote %llu bytes to its devices in the last 24 hours; the attribute endurance allows %llu",
                 (unsigned long long)ht_endurance_day_bytes(e), (unsigned long long)e->budget_bytes);
}

void ht_endurance_stats(struct ht_store *s, struct ht_store_stats *out)
{
    const struct ht_endurance *e = &s->data->endurance;

    check_endurance(s);
    out->day_written_bytes = ht_endurance_day_bytes(e);
    out->endurance_bytes = e->budget_bytes;
}

void ht_store_watch_devices(struct ht_store *s)
{
    ht_store_lock(s);
    for (unsigned i = 0; i < s->dev_count; i++)
        (void)ht_store_check_device(s, i);
    check_endurance(s);
    ht_store_unlock(s);
}

void ht_store_set_endurance(struct ht_store *s, uint64_t day_bytes)
{
    ht_store_lock(s);
    ht_endurance_set(&s->data->endurance, day_bytes);
    ht_store_unlock(s);
}

/* ------------------------------------------------------------------ figures */

static enum ht_log_copy_state log_copy_of(const struct ht_store *s, unsigned device)
{
    enum ht_log_copy_state state = HT_LOG_COPY_NONE;

    for (unsigned c = 0; c < HT_LOG_COPIES; c++) {
        if (s->layout.log_device[c] != device)
            continue;
        if (!s->dev[device] || (s->journal && !ht_journal_copy_live(s->journal, c)))
            return HT_LOG_COPY_LOST;
        state = HT_LOG_COPY_WRITTEN;
    }
    return state;
}

uint64_t ht_store_fixed_bytes(const struct ht_store *s, unsigned device)
{
    uint64_t bytes = HT_SUPER_COPIES * HT_BLOCK_BYTES;

    for (unsigned c = 0; c < HT_LOG_COPIES; c++)
        bytes += s->layout.log_device[c] == device ? s->layout.log_bytes : 0;
    return bytes;
}

uint64_t ht_store_data_bytes(const struct ht_store *s)
{
    uint64_t bytes = ht_alloc_total(s->alloc) * HT_BLOCK_BYTES;

    for (unsigned i = 0; i < s->dev_count; i++)
        bytes -= s->dev[i] && !ht_device_is_closed(s, i) ? ht_store_fixed_bytes(s, i) : 0;
    return bytes;
}

unsigned ht_store_device_count(const struct ht_store *s)
{
    return s->dev_count;
}

void ht_store_device_stat(struct ht_store *s, unsigned index, struct ht_device_stat *out)
{
    struct ht_alloc_device space;

    memset(out, 0, sizeof(*out));
    ht_store_lock(s);
    out->health = ht_store_check_device(s, index);
    ht_alloc_device(s->alloc, index, &space);
    ht_shares_update(s);
    out->has_share = ht_alloc_has_shares(s->alloc);
    out->share_per_mille = ht_div_up((uint64_t)ht_alloc_share(s->alloc, index) * 1000, HT_PLACE_WHOLE);
    ht_store_unlock(s);
    out->bytes = s->layout.device_bytes[index];
    out->device_class = ht_device_class_word(s->layout.device_class[index]);
    out->data_bytes = space.blocks * HT_BLOCK_BYTES - ht_store_fixed_bytes(s, index);
    out->free_bytes = space.free_blocks * HT_BLOCK_BYTES;
    out->bad_bytes = space.bad_blocks * HT_BLOCK_BYTES;
    out->log = log_copy_of(s, index);
    if (!s->dev[index])
        return;
    out->name = ht_dev_name(s->dev[index]);
    out->oldest_request_ns = ht_dev_oldest_ns(s->dev[index]);
    ht_dev_counters(s->dev[index], &out->io);
    for (unsigned d = 0; d < HT_DIRECTIONS; d++)
        ht_dev_rate(s->dev[index], d, &out->rate[d]);
    ht_gate_stats(s->dev[index], &out->gate);
}

/* ------------------------------------------------------ what a commit needs */

uint32_t ht_log_devices(const struct ht_store *s)
{
    uint32_t devices = 0;

    for (unsigned c = 0; c < HT_LOG_COPIES; c++)
        if (ht_journal_copy_live(s->journal, c))
            devices |= 1u << s->layout.log_device[c];
    return devices;
}

/* Devices of writes in flight: their chunks are free when they have ended. */
static uint32_t written_to(const struct ht_store *s, uint64_t scope) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t devices = 0;

    ht_list_for_each_entry(w, &s->data->writing, const struct ht_write_batch, link) {
        for (unsigned i = 0; i < w->count; i++) {
            const struct ht_batch_write *j = &w->job[w->order[i]];
            if (j->io.obj->scope->id == scope)
                devices |= ht_ref_devices(&j->io.ref);
        }
    }
    return devices;
}

/* Devices of dirty images that another thread holds: it may be reading the rest of their bytes. */
static void add_filled_from(struct ht_obj *o, struct ht_slice *slice, void *ctx) HT_REQUIRES(HT_LOCK_STORE)
{
    uint32_t *devices = ctx;

    ht_chunk_for_each(c, o, index) {
        if (!o->dirty)
            break;
        if (!ht_chunk_leaf(c)->dirty)
            index = ht_leaf_last(index);
        else if (c->exclusive && ht_chunk_is_dirty(o->s, c))
            *devices |= ht_chunk_ref(c) ? ht_ref_devices(ht_chunk_ref(c)) : 0;
        ht_slice_next(o->s, slice);
    }
}

uint32_t ht_commit_devices_locked(struct ht_store *s, uint64_t scope)
{
    uint32_t devices = ht_flush_needed_locked(s, ht_unflushed_locked(s, &HT_ROUNDS_OF_SCOPE(scope)));
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
            ht_store_wait(s, &s->data->probe_ended, ht_now_ns() + PROBE_LOOK_NS);
        silent |= (uint32_t)(s->data->health[i] >= HT_HEALTH_NOT_ANSWERING) << i;
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
