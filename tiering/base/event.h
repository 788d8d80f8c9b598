/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event.h - facts that an operator must learn even if no program checks: a code of a fixed set, its subject, and a
 * text. Any layer raises events; the layer that keeps them installs the sink. Without one they are messages (log.h).
 *
 * The words of the codes are an interface (hitrainctl, metrics, hitrainctl(8)): never change or reuse one.
 */
#ifndef HITRAIN_TIERING_BASE_EVENT_H
#define HITRAIN_TIERING_BASE_EVENT_H

#include "tiering/base/base.h"
#include "tiering/base/log.h"

enum ht_event_code {
    HT_EVENT_MOUNTED,
    HT_EVENT_UNMOUNTING,
    HT_EVENT_WRITE_ERROR,
    HT_EVENT_READ_ERROR,
    HT_EVENT_CHECKSUM,
    HT_EVENT_NO_SPACE,
    HT_EVENT_WRITE_REFUSED,
    HT_EVENT_READ_ONLY,
    HT_EVENT_COMMIT_FAILED,
    HT_EVENT_LOG_COPY_LOST,
    HT_EVENT_LOG_DAMAGED,
    HT_EVENT_LOG_REPAIRED,
    HT_EVENT_LOG_FULL,
    HT_EVENT_CHECKPOINT_FAILED,
    HT_EVENT_GRADIENT_REFUSED,
    HT_EVENT_STEP_REFUSED,
    HT_EVENT_UPDATE_FAILED,
    HT_EVENT_STEP_ABORTED,
    HT_EVENT_STEP_ROLLED_BACK,
    HT_EVENT_STEP_DROPPED,
    HT_EVENT_STEPS_REPLAYED,
    HT_EVENT_REPLAY_PROGRESS,
    HT_EVENT_REPLAY_FAILED,
    HT_EVENT_NOT_RESERVED,
    HT_EVENT_REFUSED,
    HT_EVENT_ERROR_CLEARED,
    HT_EVENT_DELETE_FAILED,
    HT_EVENT_PRIVILEGE_KEPT,
    HT_EVENT_STALE_CACHE,
    HT_EVENT_PAGES_LOST,
    HT_EVENT_FORCED_UNMOUNT,
    HT_EVENT_MOUNT_KEPT,
    HT_EVENT_DIGEST_FAILED,
    HT_EVENT_KEPT_GIVEN_UP,
    HT_EVENT_SCRUB_DAMAGE,
    HT_EVENT_SCRUB_REPAIRED,
    HT_EVENT_SCRUB_ENDED,
    HT_EVENT_DEGRADED,
    HT_EVENT_MEMBER_LEFT,
    HT_EVENT_DEVICE_FAILING,
    HT_EVENT_TAKEN_OVER,
    HT_EVENT_DEVICE_SILENT,
    HT_EVENT_DEVICE_ANSWERS,
    HT_EVENT_ENDURANCE,
    HT_EVENT_STEP_NOT_KEPT,
    HT_EVENT_STEPS_GIVEN_UP,
    HT_EVENT_CODES,
};

struct ht_event_kind {
    const char *word;
    enum ht_log_level level;
    const char *meaning; /* one line, for people */
    bool by_file;        /* may come once for every file: not each one gets a line in the system's log */
};
extern const struct ht_event_kind ht_event_kinds[HT_EVENT_CODES];

/* The subject of an event. Zeros and NULL: not known, or none. */
struct ht_event_about {
    uint64_t id;        /* inode, or object of the store (which share their numbers) */
    const char *device; /* its name */
    uint64_t offset;    /* on the device, bytes */
    int error;          /* negative errno */
};

enum { HT_EVENT_TEXT_BYTES = 256, HT_EVENT_DEVICE_BYTES = 128 };

struct ht_event {
    enum ht_event_code code;
    int error;
    uint64_t time_ns; /* wall clock */
    uint64_t id;
    uint64_t offset; /* counts only with a device */
    char device[HT_EVENT_DEVICE_BYTES];
    char text[HT_EVENT_TEXT_BYTES];
};

/*
 * Raises an event; about may be NULL. Any thread, with any lock held; errno is kept. The text says in a sentence what
 * happened. It stands alone except for the path, which the sink may be able to find from the id.
 */
void ht_event(enum ht_event_code code, const struct ht_event_about *about, const char *fmt, ...) HT_PRINTF(3, 4);

/*
 * The sink gets events from now on; NULL: none does. It must not block, nor take a lock that is held around ht_event.
 * When this returns no call of the former sink is running any more.
 */
void ht_event_set_sink(void (*sink)(void *ctx, const struct ht_event *e), void *ctx);

#endif
