/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health.c - how the devices do, by the age of their oldest requests. A look waits for no device.
 *
 * A change is reported once, as an event. health[] is what placement and new requests go by.
 */
#include "tiering/data/health.h"
#include "tiering/base/event.h"
#include "tiering/io/dev.h"
#include "tiering/journal/journal.h"
#include "tiering/space/alloc.h"
#include "tiering/api/stats.h"
#include "tiering/api/store.h"
#include "tiering/object/context.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/endurance.h"
#include "tiering/data/shares.h"
#include "tiering/data/xfer.h"

enum { LOOKS = 4, LOOK_MS_MAX = 1000 }; /* in each answer_ms */

static uint64_t answer_ns(const struct ht_store *s)
{
    return (s->opts.answer_ms ? s->opts.answer_ms : HT_DEVICE_ANSWER_S * 1000u) * 1000000ull;
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
            about.device, (unsigned long long)(answer_ns(s) / 1000000));
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

enum ht_health ht_device_health(const struct ht_store *s, unsigned device)
{
    return s->data->health[device];
}

enum ht_health ht_store_check_device(struct ht_store *s, unsigned device)
{
    if (!s->dev[device])
        return HT_HEALTH_MISSING;
    enum ht_health was = s->data->health[device], is = ht_dev_health(s->dev[device], answer_ns(s));
    if (is == was)
        return is;
    s->data->health[device] = is;
    ht_alloc_set_failing(s->alloc, device, is >= HT_HEALTH_FAILING);
    pthread_cond_broadcast(&s->waits.settled); /* threads may wait for space that it discards */
    report(s, device, was, is);
    return is;
}

void ht_store_watch_devices(struct ht_store *s)
{
    ht_store_lock(s);
    for (unsigned i = 0; i < s->dev_count; i++)
        (void)ht_store_check_device(s, i);
    ht_endurance_check(s);
    ht_store_unlock(s);
}

uint64_t ht_health_period_ns(const struct ht_store *s)
{
    return ht_min_u64(answer_ns(s) / LOOKS, LOOK_MS_MAX * UINT64_C(1000000));
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
