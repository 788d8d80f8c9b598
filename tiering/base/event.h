/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event.h - facts that an operator must learn even if no program checks: a code of a fixed set, its subject, and a
 * text. Any layer raises events; the layer that keeps them installs the sink. Without one they are messages (log.h).
 *
 * The words of the codes are an interface (hitrainctl, metrics, hitrainctl(8)): never change or reuse one.
 */
#pragma once

#include "tiering/base/log.h"

/* E(identifier, word, level, by_file, meaning) */
#define HT_EVENTS(E)                                                                                                   \
    E(MOUNTED, "mounted", INFO, false, "The store was mounted.")                                                       \
    E(UNMOUNTING, "unmounting", INFO, false, "The mount ends; the text has the cause.")                                \
    E(WRITE_ERROR, "write-error", ERROR, true, "A device failed a write of content.")                                  \
    E(READ_ERROR, "read-error", ERROR, true, "A device failed a read of content.")                                     \
    E(CHECKSUM, "checksum", ERROR, true, "A device returned wrong bytes.")                                             \
    E(NO_SPACE, "no-space", ERROR, true, "The store refused something because it is full.")                            \
    E(SPILLED, "spilled", WARN, false, "No fast device has room: content goes to one of the class capacity.")          \
    E(WRITE_REFUSED, "write-refused", ERROR, true, "A program's write failed for another reason.")                     \
    E(READ_ONLY, "read-only", ERROR, false, "The store cannot write the log and takes no changes.")                    \
    E(COMMIT_FAILED, "commit-failed", ERROR, false, "A commit did not become durable.")                                \
    E(LOG_COPY_LOST, "log-copy-lost", ERROR, false, "The store no longer writes one copy of the log.")                 \
    E(LOG_DAMAGED, "log-damaged", WARN, false, "One copy of the log was damaged; the store uses the other.")           \
    E(LOG_REPAIRED, "log-repaired", INFO, false, "A copy of the log is up to date again.")                             \
    E(LOG_FULL, "log-full", WARN, false, "The log is full: a checkpoint goes into one of its copies.")                 \
    E(CHECKPOINT_FAILED, "checkpoint-failed", ERROR, false, "A checkpoint of the log failed.")                         \
    E(GRADIENT_REFUSED, "gradient-refused", ERROR, true, "A gradient was refused.")                                    \
    E(STEP_REFUSED, "step-refused", ERROR, false, "A step cannot end yet.")                                            \
    E(UPDATE_FAILED, "update-failed", ERROR, false, "A range of a parameter could not be updated.")                    \
    E(STEP_ABORTED, "step-aborted", WARN, false, "A model went back to its last durable step.")                        \
    E(STEP_ROLLED_BACK, "step-rolled-back", WARN, false, "A model went back to a kept step.")                          \
    E(STEP_DROPPED, "step-dropped", WARN, false, "The mount ended during a step; nothing of that step is kept.")       \
    E(STEPS_REPLAYED, "steps-replayed", WARN, false, "After a crash the logged steps of a model were computed again.") \
    E(REPLAY_PROGRESS, "replay-progress", INFO, false,                                                                 \
      "Logged steps of a model are computed again; the text has the progress.")                                        \
    E(REPLAY_FAILED, "replay-failed", ERROR, false,                                                                    \
      "A logged step of a model cannot be computed again; the model can be neither read nor changed.")                 \
    E(NOT_RESERVED, "not-reserved", WARN, true, "The store could not reserve the space of a step.")                    \
    E(REFUSED, "refused", WARN, true, "An attribute, a hidden file or a command was refused.")                         \
    E(ERROR_CLEARED, "error-cleared", INFO, true, "A program cleared the attribute error.")                            \
    E(DELETE_FAILED, "delete-failed", WARN, true, "Deleted content stays until the next mount.")                       \
    E(PRIVILEGE_KEPT, "privilege-kept", ERROR, true, "A written file keeps setuid bits or capabilities.")              \
    E(STALE_CACHE, "stale-cache", ERROR, true, "Programs may see outdated content.")                                   \
    E(PAGES_LOST, "pages-lost", ERROR, false, "Some pages could not be written when the mount ended.")                 \
    E(FORCED_UNMOUNT, "forced-unmount", WARN, false, "The mount ended while it was in use.")                           \
    E(MOUNT_KEPT, "mount-kept", WARN, false, "The mount is gone, but a process keeps the store mounted.")              \
    E(DIGEST_FAILED, "digest-failed", ERROR, false, "A kept step could not be read whole for its digest.")             \
    E(KEPT_GIVEN_UP, "kept-given-up", WARN, false, "A full store ended a kept step that a vault has.")                 \
    E(VAULT_SILENT, "vault-silent", ERROR, false, "The vault does not answer.")                                        \
    E(VAULT_ANSWERS, "vault-answers", INFO, false, "The vault answers again.")                                         \
    E(VAULT_MISSING, "vault-missing", WARN, false, "The vault of cold content is gone, another, or older.")            \
    E(VAULT_DAMAGE, "vault-damage", ERROR, true, "The vault lacks content of the store, or has other bytes.")          \
    E(SCRUB_DAMAGE, "scrub-damage", ERROR, true, "Scrub found damage and could not repair it.")                        \
    E(SCRUB_REPAIRED, "scrub-repaired", WARN, true, "Scrub found damage and repaired it.")                             \
    E(SCRUB_ENDED, "scrub-ended", INFO, false, "A scrub ended; the text has its findings.")                            \
    E(DEGRADED, "degraded", WARN, false, "The store was mounted without one of its members.")                          \
    E(MEMBER_LEFT, "member-left", ERROR, false, "A member does not take a superblock or the log.")                     \
    E(DEVICE_FAILING, "device-failing", ERROR, false, "A device fails writes.")                                        \
    E(TAKEN_OVER, "taken-over", ERROR, false, "Another mount took the store over; this one writes nothing any more.")  \
    E(DEVICE_SILENT, "device-not-answering", ERROR, false, "A device does not answer.")                                \
    E(DEVICE_ANSWERS, "device-answers", INFO, false, "A device answers again.")                                        \
    E(ENDURANCE, "endurance-exceeded", WARN, false, "The store wrote more in a day than its budget.")                  \
    E(STEP_NOT_KEPT, "step-not-kept", ERROR, false, "A commit could not keep its step.")                               \
    E(STEPS_GIVEN_UP, "steps-given-up", WARN, false, "A full store gave up logged steps that were kept for readers.")

enum ht_event_code {
#define HT_EVENT_CODE(id, word, level, by_file, meaning) HT_EVENT_##id,
    HT_EVENTS(HT_EVENT_CODE)
#undef HT_EVENT_CODE
        HT_EVENT_CODES
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
