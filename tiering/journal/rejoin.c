/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rejoin.c - a copy that dropped out is brought up to the other one and written again, while the log goes on.
 *
 *   written --a write or flush fails--> out --rejoin--> copying --all but the last frames--> token: the rest, flush, recorded --> written
 *                                        ^----------------'---------------- anything fails ------'
 *
 * 1. What is written to it are frames that verified, all of them from the start of the log: they replace what may be the last
 *    sound one elsewhere, and after a failed flush nobody knows what an earlier write left.
 * 2. Frame after frame is made durable, so a crash in between leaves a copy that is behind, and none that looks damaged.
 * 3. The copy counts (copy_back) only when it is whole, and no frame is written meanwhile. So a crash
 *    finds one whole copy and one that is behind, or two whole ones.
 *
 * When: some time after the failure, which is longer each time, so that a device that goes on failing costs little; and behind a compaction,
 * which leaves few frames, and large ones. While a copy is out there is no split mode, which takes two.
 */
#include "tiering/journal/journal_priv.h"

#include <stdlib.h>

#include "tiering/base/event.h"
#include "tiering/base/fault.h"

#define SECOND_NS ((uint64_t)1000000000)

enum {
    DOUBLINGS_MAX = 10,
    CALM_S = 3600,   /* a copy that was written so long is tried again as if it had never failed */
    ROUNDS_MAX = 16, /* copying what was appended meanwhile, before frames have to wait for the rest */
};

struct rejoining {
    struct ht_journal *j;
    struct ht_log_copy from, to;
    unsigned from_index, to_index;
    uint64_t epoch, start_pos, end_pos; /* of the log when it was last looked at */
    struct ht_journal_start next;       /* the first frame that is not copied */
    uint64_t failures;                  /* of flushes of its device when it began */
    bool told;                          /* its return may be on record */
    struct ht_log_scanner scanner;
};

/* ------------------------------------------------------------------ when */

static bool is_out(const struct ht_journal *j, unsigned i)
{
    return j->config.dev[i] && !j->copy[i].dev;
}

static void plan_locked(struct ht_journal *j)
{
    j->rejoin_at_ns = ht_now_ns() + (SECOND_NS << ht_min_u64(j->rejoin_tries, DOUBLINGS_MAX));
}

void ht_journal_plan_rejoin_locked(struct ht_journal *j)
{
    if (ht_now_ns() - j->rejoined_ns > CALM_S * SECOND_NS)
        j->rejoin_tries = 0;
    plan_locked(j);
    pthread_cond_broadcast(&j->compact);
}

/* --------------------------------------------------------------- what, how */

/* What is to be done, and whether it can be now. Lock held. */
static int look_locked(struct rejoining *r)
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

static int look(struct rejoining *r)
{
    ht_mutex_lock(&r->j->lock);
    int rc = look_locked(r);
    ht_mutex_unlock(&r->j->lock);
    return rc;
}

static bool is_stopping(struct ht_journal *j)
{
    ht_mutex_lock(&j->lock);
    bool stopping = j->stopping;
    ht_mutex_unlock(&j->lock);
    return stopping;
}

/* Whoever unmounts waits for one request at most. */
static int copy_frame(void *ctx, const struct ht_frame *f, const uint8_t *payload)
{
    struct rejoining *r = ctx;

    if (is_stopping(r->j))
        return -ECANCELED;
    return ht_log_write_at(&r->to, f->pos, payload - HT_FRAME_HEADER_BYTES, ht_frame_bytes(f->payload_len));
}

/* Frames up to the end that was last looked at; perhaps more. */
static int copy_frames(struct rejoining *r)
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

/* As much as can be while others append. */
static int copy_live(struct rejoining *r)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < ROUNDS_MAX && r->next.pos < r->end_pos; i++) {
        rc = copy_frames(r);
        uint64_t start_pos = r->start_pos;
        int now = look(r);
        if (rc == -EUCLEAN && r->start_pos != start_pos)
            rc = -EAGAIN; /* overwritten, as what is before the start may be */
        rc = rc ? rc : now;
    }
    return rc;
}

/* Token held: the end of the log stays where it is. */
static int complete(struct rejoining *r)
{
    int rc = look(r);

    if (rc == 0 && r->next.pos < r->end_pos)
        rc = copy_frames(r);
    if (rc == 0)
        rc = ht_journal_cut_behind(r->j, &r->to, r->start_pos, r->end_pos);
    if (rc == 0)
        rc = ht_dev_flush_since(r->to.dev, r->failures);
    r->told = rc == 0;
    if (rc == 0 && r->j->config.copy_back)
        rc = r->j->config.copy_back(r->j->config.ctx, r->to_index);
    return rc;
}

static void tell(const struct rejoining *r, int rc)
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

static int finish(struct rejoining *r)
{
    struct ht_journal *j = r->j;

    ht_mutex_lock(&j->lock);
    ht_journal_token_take_locked(j);
    ht_mutex_unlock(&j->lock);
    int rc = complete(r);
    ht_mutex_lock(&j->lock);
    if (rc == 0) {
        j->copy[r->to_index].dev = r->to.dev;
        j->rejoined_ns = ht_now_ns();
        if (ht_journal_copies_locked(j) == HT_LOG_COPIES)
            j->first_error = 0; /* nothing is lacking any more */
    } else if (r->told) {
        j->lost[r->to_index] = true; /* before the next frame counts, that it is out is on record again */
    }
    ht_journal_token_release_locked(j);
    ht_mutex_unlock(&j->lock);
    return rc;
}

static int rejoin_one(struct rejoining *r)
{
    int rc = look(r);

    if (rc)
        return rc;
    r->failures = ht_dev_flush_failures(r->to.dev);
    rc = ht_fault(HT_FAULT_JOURNAL_REFILL);
    if (rc == 0)
        rc = ht_log_reader_init(&r->scanner.reader, r->j->config.rings);
    if (rc == 0)
        rc = copy_live(r);
    if (rc == 0)
        rc = finish(r);
    ht_log_reader_destroy(&r->scanner.reader);
    free(r->scanner.frame.data);
    tell(r, rc);
    return rc;
}

int ht_journal_rejoin(struct ht_journal *j)
{
    struct rejoining r = {.j = j};
    int rc = rejoin_one(&r);

    ht_mutex_lock(&j->lock);
    j->rejoin_tries++;
    j->rejoin_next = false;
    if (is_out(j, 0) || is_out(j, 1))
        plan_locked(j);
    else
        j->rejoin_at_ns = 0;
    ht_mutex_unlock(&j->lock);
    return rc;
}
