/* SPDX-License-Identifier: Apache-2.0 */
/*
 * resync.c - brings a copy that dropped out up to the other one, and writes it again, while the log goes on.
 *
 *   written --a write or flush fails--> out --resync--> copying --all but the last frames--> token --> written
 *                                        ^----------------'---------- anything fails ----------'
 *
 *   token: the rest of the frames, a flush, and the copy is recorded as whole
 *
 * 1. Every frame from the start of the log is written to it, after verification. Such a frame may replace the last
 *    sound one of another place, and after a failed flush the result of earlier writes is unknown.
 * 2. Frame after frame is made durable, so a crash in between leaves a stale copy, and none that looks damaged.
 * 3. The copy counts (copy_back) only when it is whole, and no frame is written until then. So a crash finds one whole
 *    copy and a stale one, or two whole ones.
 *
 * When: some time after the failure, which is longer each time, so that a device that goes on failing costs little; and
 * after a checkpoint, which leaves few frames, and large ones. While a copy is out there is no split mode, which takes
 * two.
 */
#include "tiering/journal/journal_priv.h"

#include "tiering/base/event.h"
#include "tiering/base/fault.h"

#define SECOND_NS ((uint64_t)1000000000)

enum {
    DOUBLINGS_MAX = 10,
    CALM_S = 3600,   /* after so long without a failure a copy counts as one that never failed */
    ROUNDS_MAX = 16, /* of copying newly appended frames, before frames have to wait for the rest */
};

struct resyncing {
    struct ht_journal *j;
    struct ht_log_copy from, to;
    unsigned from_index, to_index;
    uint64_t epoch, start_pos, end_pos; /* end of the log at the last check */
    struct ht_journal_start next;       /* the first frame that is not copied */
    uint64_t failures;                  /* failed flushes of its device at the beginning */
    bool reported;                      /* the record of its return may be durable */
    struct ht_log_scanner scanner;
};

/* ------------------------------------------------------------------ when */

static bool is_out(const struct ht_journal *j, unsigned i)
{
    return j->config.dev[i] && !j->copy[i].dev;
}

static void plan_locked(struct ht_journal *j) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    j->resync_at_ns = ht_now_ns() + (SECOND_NS << ht_min_u64(j->resync_tries, DOUBLINGS_MAX));
}

void ht_journal_plan_resync_locked(struct ht_journal *j)
{
    if (ht_now_ns() - j->resynced_ns > CALM_S * SECOND_NS)
        j->resync_tries = 0;
    plan_locked(j);
    ht_journal_wake_locked(j);
}

/* ---------------------------------------------------------- plan, progress */

/* Plans the work, and checks whether it is possible now. */
static int inspect_locked(struct resyncing *r) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    struct ht_journal *j = r->j;
    unsigned to = is_out(j, 0) ? 0 : 1;

    if (j->error || !j->started)
        return j->error ? j->error : -EROFS;
    if (!is_out(j, to))
        return -ENOENT;
    if (j->stopping)
        return -ECANCELED;
    if (!j->copy[!to].dev)
        return -EIO;
    if (ht_dev_health(j->config.dev[to], SECOND_NS) == HT_HEALTH_NOT_ANSWERING)
        return -EAGAIN;
    r->from_index = !to;
    r->to_index = to;
    r->from = j->copy[!to];
    r->to = j->copy[to];
    r->to.dev = j->config.dev[to];
    r->epoch = j->epoch;
    r->start_pos = j->start.pos;
    r->end_pos = j->end_pos;
    if (r->next.pos < j->start.pos || r->next.seq < j->start.seq)
        r->next = j->start;
    return 0;
}

static int inspect(struct resyncing *r)
{
    return ht_locked(ht_journal_lock(r->j), inspect_locked(r));
}

/* An unmount waits for one request at most. */
static int copy_frame(void *ctx, const struct ht_frame *f, const uint8_t *payload)
{
    struct resyncing *r = ctx;

    if (ht_locked(ht_journal_lock(r->j), r->j->stopping))
        return -ECANCELED;
    return ht_log_write_durably(&r->to, f->pos, payload - HT_FRAME_HEADER_BYTES, ht_frame_bytes(f->payload_len));
}

/* Copies frames up to the last known end; perhaps more. */
static int copy_frames(struct resyncing *r)
{
    struct ht_journal_config config = r->j->config;
    struct ht_log_scan scan = {.links = NULL};

    config.start = r->next;
    config.epoch = r->epoch;
    r->scanner.config = &config;
    int rc = ht_log_walk(&r->scanner, &r->from, copy_frame, r, &scan);
    if (rc == 0 && scan.end_pos < r->end_pos)
        rc = scan.error ? scan.error : -EUCLEAN;
    if (rc == 0)
        r->next = (struct ht_journal_start){.pos = scan.end_pos, .seq = scan.last_seq + 1, .chain = scan.last_checksum};
    free(scan.links);
    return rc;
}

/* Copies as much as possible while other threads append. */
static int copy_live(struct resyncing *r)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < ROUNDS_MAX && r->next.pos < r->end_pos; i++) {
        rc = copy_frames(r);
        uint64_t start_pos = r->start_pos;
        int now = inspect(r);
        if (rc == -EUCLEAN && r->start_pos != start_pos)
            rc = -EAGAIN; /* overwritten: that is possible for frames before the start */
        rc = rc ? rc : now;
    }
    return rc;
}

/* Token held: the end of the log stays where it is. */
static int complete(struct resyncing *r)
{
    int rc = inspect(r);

    if (rc == 0 && r->next.pos < r->end_pos)
        rc = copy_frames(r);
    if (rc == 0)
        rc = ht_journal_cut_behind(r->j, &r->to, r->start_pos, r->end_pos);
    if (rc == 0)
        rc = ht_dev_flush_since(r->to.dev, r->failures);
    r->reported = rc == 0;
    if (rc == 0 && r->j->config.copy_back)
        rc = r->j->config.copy_back(r->j->config.ctx, r->to_index);
    return rc;
}

static void report(const struct resyncing *r, int rc)
{
    struct ht_event_about about = {.device = ht_dev_name(r->to.dev), .offset = r->to.offset, .error = rc};

    if (rc == 0) {
        ht_event(HT_EVENT_LOG_REPAIRED, &about, "log: copy %u on %s was brought up to copy %u and is written again",
                 r->to_index, about.device, r->from_index);
    } else if (rc == -EUCLEAN) {
        about.device = ht_dev_name(r->from.dev);
        ht_event(HT_EVENT_LOG_DAMAGED, &about,
                 "log: copy %u, which alone is written, does not verify on %s; unmount and run hitrain-fsck -p",
                 r->from_index, about.device);
    } else if (rc != -ECANCELED) {
        ht_info("log: copy %u on %s cannot be written again yet: %s", r->to_index, about.device, strerror(-rc));
    }
}

static int finish(struct resyncing *r)
{
    struct ht_journal *j = r->j;

    ht_mutex_lock(ht_journal_lock(j));
    ht_journal_token_take_locked(j);
    ht_mutex_unlock(ht_journal_lock(j));
    int rc = complete(r);
    ht_mutex_lock(ht_journal_lock(j));
    if (rc == 0) {
        j->copy[r->to_index].dev = r->to.dev;
        j->resynced_ns = ht_now_ns();
    } else if (r->reported) {
        j->lost[r->to_index] = true; /* so that its loss is on record again before the next frame counts */
    }
    ht_journal_token_release_locked(j);
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}

static int resync_one(struct resyncing *r)
{
    int rc = inspect(r);

    if (rc)
        return rc;
    r->failures = ht_dev_flush_failures(r->to.dev);
    rc = ht_fault(HT_FAULT_JOURNAL_REFILL);
    if (rc == 0)
        rc = ht_log_scanner_init(&r->scanner, &r->j->config);
    if (rc == 0)
        rc = copy_live(r);
    if (rc == 0)
        rc = finish(r);
    ht_log_scanner_end(&r->scanner);
    report(r, rc);
    return rc;
}

int ht_journal_resync(struct ht_journal *j)
{
    struct resyncing r = {.j = j};
    int rc = resync_one(&r);

    ht_mutex_lock(ht_journal_lock(j));
    j->resync_tries++;
    j->resync_next = false;
    if (is_out(j, 0) || is_out(j, 1))
        plan_locked(j);
    else
        j->resync_at_ns = 0;
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}
