/* SPDX-License-Identifier: Apache-2.0 */
/* event.c - see event.h. One lock, shared by threads that raise events: events are rare, and the sink is brief. */
#include "tiering/base/event.h"

#include <stdarg.h>
#include <stdio.h>

#include "tiering/base/lock.h"

const struct ht_event_kind ht_event_kinds[HT_EVENT_CODES] = {
    [HT_EVENT_MOUNTED] = {"mounted", HT_LOG_INFO, "The store was mounted."},
    [HT_EVENT_UNMOUNTING] = {"unmounting", HT_LOG_INFO, "The mount ends; the text has the cause."},
    [HT_EVENT_WRITE_ERROR] = {"write-error", HT_LOG_ERROR, "A device failed a write of content.", true},
    [HT_EVENT_READ_ERROR] = {"read-error", HT_LOG_ERROR, "A device failed a read of content.", true},
    [HT_EVENT_CHECKSUM] = {"checksum", HT_LOG_ERROR, "A device returned wrong bytes.", true},
    [HT_EVENT_NO_SPACE] = {"no-space", HT_LOG_ERROR, "The store refused something because it is full.", true},
    [HT_EVENT_WRITE_REFUSED] = {"write-refused", HT_LOG_ERROR, "A program's write failed for another reason.", true},
    [HT_EVENT_READ_ONLY] = {"read-only", HT_LOG_ERROR, "The store cannot write the log and takes no changes."},
    [HT_EVENT_COMMIT_FAILED] = {"commit-failed", HT_LOG_ERROR, "A commit did not become durable."},
    [HT_EVENT_LOG_COPY_LOST] = {"log-copy-lost", HT_LOG_ERROR, "The store no longer writes one copy of the log."},
    [HT_EVENT_LOG_DAMAGED] = {"log-damaged", HT_LOG_WARN, "One copy of the log was damaged; the store uses the other."},
    [HT_EVENT_LOG_REPAIRED] = {"log-repaired", HT_LOG_INFO, "A copy of the log is up to date again."},
    [HT_EVENT_LOG_FULL] = {"log-full", HT_LOG_WARN, "The log is full: a checkpoint goes into one of its copies."},
    [HT_EVENT_CHECKPOINT_FAILED] = {"checkpoint-failed", HT_LOG_ERROR, "A checkpoint of the log failed."},
    [HT_EVENT_GRADIENT_REFUSED] = {"gradient-refused", HT_LOG_ERROR, "A gradient was refused.", true},
    [HT_EVENT_STEP_REFUSED] = {"step-refused", HT_LOG_ERROR, "A step cannot end yet."},
    [HT_EVENT_UPDATE_FAILED] = {"update-failed", HT_LOG_ERROR, "A range of a parameter could not be updated."},
    [HT_EVENT_STEP_ABORTED] = {"step-aborted", HT_LOG_WARN, "A model went back to its last durable step."},
    [HT_EVENT_STEP_ROLLED_BACK] = {"step-rolled-back", HT_LOG_WARN, "A model went back to a kept step."},
    [HT_EVENT_STEP_DROPPED] = {"step-dropped", HT_LOG_WARN,
                               "The mount ended during a step; nothing of that step is kept."},
    [HT_EVENT_STEPS_REPLAYED] = {"steps-replayed", HT_LOG_WARN,
                                 "After a crash the logged steps of a model were computed again."},
    [HT_EVENT_REPLAY_PROGRESS] = {"replay-progress", HT_LOG_INFO,
                                  "Logged steps of a model are computed again; the text has the progress."},
    [HT_EVENT_REPLAY_FAILED] =
        {"replay-failed", HT_LOG_ERROR,
         "A logged step of a model cannot be computed again; the model can be neither read nor changed."},
    [HT_EVENT_NOT_RESERVED] = {"not-reserved", HT_LOG_WARN, "The store could not reserve the space of a step.", true},
    [HT_EVENT_REFUSED] = {"refused", HT_LOG_WARN, "An attribute, a hidden file or a command was refused.", true},
    [HT_EVENT_ERROR_CLEARED] = {"error-cleared", HT_LOG_INFO, "A program cleared the attribute error.", true},
    [HT_EVENT_DELETE_FAILED] = {"delete-failed", HT_LOG_WARN, "Deleted content stays until the next mount.", true},
    [HT_EVENT_PRIVILEGE_KEPT] = {"privilege-kept", HT_LOG_ERROR, "A written file keeps setuid bits or capabilities.",
                                 true},
    [HT_EVENT_STALE_CACHE] = {"stale-cache", HT_LOG_ERROR, "Programs may see outdated content.", true},
    [HT_EVENT_PAGES_LOST] = {"pages-lost", HT_LOG_ERROR, "Some pages could not be written when the mount ended."},
    [HT_EVENT_FORCED_UNMOUNT] = {"forced-unmount", HT_LOG_WARN, "The mount ended while it was in use."},
    [HT_EVENT_MOUNT_KEPT] = {"mount-kept", HT_LOG_WARN, "The mount is gone, but a process keeps the store mounted."},
    [HT_EVENT_KEPT_GIVEN_UP] = {"kept-given-up", HT_LOG_WARN, "A full store ended a kept step that a vault has."},
    [HT_EVENT_DIGEST_FAILED] = {"digest-failed", HT_LOG_ERROR, "A kept step could not be read whole for its digest."},
    [HT_EVENT_SCRUB_DAMAGE] = {"scrub-damage", HT_LOG_ERROR, "Scrub found damage and could not repair it.", true},
    [HT_EVENT_SCRUB_REPAIRED] = {"scrub-repaired", HT_LOG_WARN, "Scrub found damage and repaired it.", true},
    [HT_EVENT_SCRUB_ENDED] = {"scrub-ended", HT_LOG_INFO, "A scrub ended; the text has its findings."},
    [HT_EVENT_DEGRADED] = {"degraded", HT_LOG_WARN, "The store was mounted without one of its members."},
    [HT_EVENT_MEMBER_LEFT] = {"member-left", HT_LOG_ERROR, "A member does not take a superblock or the log."},
    [HT_EVENT_DEVICE_FAILING] = {"device-failing", HT_LOG_ERROR, "A device fails writes."},
    [HT_EVENT_TAKEN_OVER] = {"taken-over", HT_LOG_ERROR,
                             "Another mount took the store over; this one writes nothing any more."},
    [HT_EVENT_DEVICE_SILENT] = {"device-not-answering", HT_LOG_ERROR, "A device does not answer."},
    [HT_EVENT_DEVICE_ANSWERS] = {"device-answers", HT_LOG_INFO, "A device answers again."},
    [HT_EVENT_STEP_NOT_KEPT] = {"step-not-kept", HT_LOG_ERROR, "A commit could not keep its step."},
    [HT_EVENT_STEPS_GIVEN_UP] = {"steps-given-up", HT_LOG_WARN,
                                 "A full store gave up logged steps that were kept for readers."},
    [HT_EVENT_ENDURANCE] = {"endurance-exceeded", HT_LOG_WARN, "The store wrote more in a day than its budget."},
};

static struct ht_rwlock lock = HT_RWLOCK_INIT(HT_LOCK_EVENT_SINK);
static void (*sink)(void *ctx, const struct ht_event *e) HT_GUARDED_BY_STATIC(lock);
static void *sink_ctx HT_GUARDED_BY_STATIC(lock);

void ht_event_set_sink(void (*fn)(void *ctx, const struct ht_event *e), void *ctx)
{
    ht_rwlock_wrlock(&lock);
    sink = fn;
    sink_ctx = ctx;
    ht_rwlock_unlock(&lock);
}

void ht_event(enum ht_event_code code, const struct ht_event_about *about, const char *fmt, ...)
{
    int saved_errno = errno;
    struct ht_event e = {.code = code, .time_ns = ht_wall_ns()};
    va_list args;

    if (about) {
        e.id = about->id;
        e.offset = about->offset;
        e.error = about->error;
        snprintf(e.device, sizeof(e.device), "%s", about->device ? about->device : "");
    }
    errno = saved_errno; /* for %m */
    va_start(args, fmt);
    vsnprintf(e.text, sizeof(e.text), fmt, args);
    va_end(args);
    ht_rwlock_rdlock(&lock);
    if (sink)
        sink(sink_ctx, &e);
    else
        ht_log(ht_event_kinds[code].level, "%s", e.text);
    ht_rwlock_unlock(&lock);
    errno = saved_errno;
}
