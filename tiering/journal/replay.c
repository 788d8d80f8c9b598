/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay.c - chooses a copy of the log, and hands out its records.
 *
 * Every copy is scanned (scan.c), then compared with the other:
 *
 *   both ended, one continues the other    the longer one; the other is stale
 *   both ended, different from some frame   a fork. A frame that one copy got and the other did not, because the writer
 *     on                                    died or the copy had dropped out, is continued by the next mount on the
 *                                           other copy with a newer epoch: that branch wins. Both branches have a newer
 *                                           epoch with something in it: the members were mounted apart; refuse.
 *   one damaged                             the other, unless it ends before a frame that the damaged one calls durable
 *   both damaged                            refuse; by force the one that goes further, also a stale one
 *
 * The chosen chain is walked a second time to hand out the records: nothing reaches the client from a copy that might
 * still be rejected, and no more than one frame is in memory.
 *
 * Runs before the journal has threads. Writes nothing.
 */
#include "tiering/journal/journal_priv.h"

#include "tiering/base/event.h"

#define NO_FORK SIZE_MAX

struct replay {
    const struct ht_journal_config *config;
    struct ht_log_copy copy[HT_LOG_COPIES];
    struct ht_log_scan scan[HT_LOG_COPIES];
    struct ht_journal_report *report;
    struct ht_log_scanner scanner;
    bool diverged;
};

/* ------------------------------------------------------------ comparison */

static bool same_prefix(const struct ht_log_scan *a, const struct ht_log_scan *b, size_t count)
{
    /* Each link covers all links before it. */
    return count == 0 || a->links[count - 1].checksum == b->links[count - 1].checksum;
}

/* Index of the first link that differs, or NO_FORK when one chain continues the other. */
static size_t fork_index(const struct ht_log_scan *a, const struct ht_log_scan *b)
{
    size_t common = a->link_count < b->link_count ? a->link_count : b->link_count;
    size_t i = 0;

    if (same_prefix(a, b, common))
        return NO_FORK;
    while (same_prefix(a, b, i + 1))
        i++;
    return i;
}

static uint64_t epoch_before(const struct ht_log_scan *s, size_t fork)
{
    return fork ? s->links[fork - 1].epoch : 0;
}

/* Has a newer mount written more to this branch than the record of its beginning? */
static bool branch_weighs(const struct ht_log_scan *s, size_t fork)
{
    return s->last_epoch > epoch_before(s, fork) && s->link_count - fork >= 2;
}

static bool is_newer(const struct ht_log_scan *a, const struct ht_log_scan *b)
{
    return a->last_epoch > b->last_epoch || (a->last_epoch == b->last_epoch && a->last_seq > b->last_seq);
}

/* Both ended. 0 or 1, or -EUCLEAN. */
static int choose_of_two(const struct ht_log_scan scan[HT_LOG_COPIES])
{
    size_t fork = fork_index(&scan[0], &scan[1]);

    if (fork == NO_FORK)
        return scan[1].last_seq > scan[0].last_seq;
    bool weighs0 = branch_weighs(&scan[0], fork), weighs1 = branch_weighs(&scan[1], fork);
    if (weighs0 && weighs1)
        return -EUCLEAN;
    if (weighs0 || weighs1)
        return weighs1;
    if (scan[0].last_epoch == scan[1].last_epoch && scan[0].last_epoch == epoch_before(&scan[0], fork))
        return -EUCLEAN; /* one mount never writes two different frames of one number */
    return is_newer(&scan[1], &scan[0]);
}

/* s ended; does the damaged copy d name something durable that s lacks? */
static bool falls_short(const struct ht_log_scan *s, const struct ht_log_scan *d)
{
    size_t fork = fork_index(s, d);

    if (s->last_epoch > d->named_epoch)
        return false; /* d stopped taking part before s did */
    if (s->last_seq < d->named_durable)
        return true;
    return fork != NO_FORK && s->last_epoch <= epoch_before(s, fork);
}

static void validate_beside(struct replay *r, unsigned i)
{
    const struct ht_log_scan *other = &r->scan[!i];
    struct ht_log_scan *s = &r->scan[i];

    if (s->state == HT_LOG_ENDED && other->state == HT_LOG_DAMAGED && falls_short(s, other))
        s->state = HT_LOG_DAMAGED;
}

static int least_bad(const struct replay *r)
{
    if (r->scan[0].state == HT_LOG_MISSING)
        return 1;
    if (r->scan[1].state == HT_LOG_MISSING)
        return 0;
    return is_newer(&r->scan[1], &r->scan[0]);
}

/* The reason why no copy is believed. */
static int refusal(const struct replay *r)
{
    bool readable = false, present = false;

    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        present = present || r->scan[i].state != HT_LOG_MISSING;
        readable = readable || (r->scan[i].state != HT_LOG_MISSING && !r->scan[i].error);
    }
    if (!present)
        ht_error("log: no copy is present");
    return readable ? -EUCLEAN : -EIO;
}

/* Is this copy stale, and the other one there? */
static bool is_passed_over(const struct ht_journal_config *c, unsigned i)
{
    return c->behind[i] && c->dev[!i] && !c->behind[!i];
}

/* The copies that were passed over, or the others. */
static int scan_copies(struct replay *r, bool passed_over)
{
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        if (!r->copy[i].dev || is_passed_over(r->config, i) != passed_over)
            continue;
        int rc = ht_log_scan_copy(&r->scanner, &r->copy[i], &r->scan[i]);
        if (rc)
            return rc;
    }
    return 0;
}

/* Chooses a copy, or returns -errno; force: the least bad one in place of -EUCLEAN. *out_sound: not by force. */
static int choose(struct replay *r, bool force, bool *out_sound)
{
    int chosen;

    /* One round is enough: a copy that becomes damaged here names only frames of its own chain. */
    validate_beside(r, 0);
    validate_beside(r, 1);
    bool ended0 = r->scan[0].state == HT_LOG_ENDED, ended1 = r->scan[1].state == HT_LOG_ENDED;
    if (ended0 && ended1) {
        chosen = choose_of_two(r->scan);
        r->diverged = chosen < 0;
        if (chosen < 0)
            ht_error("log: the copies on %s and %s have diverged: the members of this store were mounted apart",
                     ht_dev_name(r->copy[0].dev), ht_dev_name(r->copy[1].dev));
    } else {
        chosen = ended0 ? 0 : ended1 ? 1 : refusal(r);
    }
    *out_sound = chosen >= 0;
    bool present = r->scan[0].state != HT_LOG_MISSING || r->scan[1].state != HT_LOG_MISSING;
    if (chosen >= 0 || !force || !present)
        return chosen;
    int rc = scan_copies(r, true); /* a stale copy may still hold more than the rest of the newest */
    return rc ? rc : least_bad(r);
}

/* ---------------------------------------------------------------- report */

static uint64_t highest_seq(const struct ht_log_scan *s)
{
    return ht_max_u64(s->later ? s->later_frame.seq : 0, ht_max_u64(s->last_seq, s->named_durable));
}

static void fill_report(struct replay *r)
{
    memset(r->report, 0, sizeof(*r->report));
    r->report->diverged = r->diverged;
    r->report->known_seq = r->config->durable_seq;
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        const struct ht_log_scan *s = &r->scan[i];
        r->report->copy[i].state = s->state;
        r->report->copy[i].last_seq = s->last_seq;
        r->report->copy[i].end_pos = s->end_pos;
        r->report->copy[i].epoch = s->last_epoch;
        r->report->copy[i].error = s->error;
        r->report->known_seq = ht_max_u64(r->report->known_seq, highest_seq(s));
        if (s->state != HT_LOG_DAMAGED)
            continue;
        struct ht_event_about about = {
            .device = ht_dev_name(r->copy[i].dev),
            .offset = r->copy[i].offset + s->end_pos % r->copy[i].log_bytes,
            .error = s->error,
        };
        ht_event(HT_EVENT_LOG_DAMAGED, &about, "log: copy %u on %s is damaged at position %llu (frame %llu)%s%s", i,
                 about.device, (unsigned long long)s->end_pos, (unsigned long long)s->last_seq + 1,
                 s->error ? ": " : "", s->error ? strerror(-s->error) : "");
    }
}

static bool scans_equal(const struct ht_log_scan *a, const struct ht_log_scan *b)
{
    return a->last_seq == b->last_seq && a->last_checksum == b->last_checksum;
}

static void report_chosen(struct replay *r, unsigned chosen)
{
    unsigned other = !chosen;
    const struct ht_log_scan *s = &r->scan[other];

    r->report->chosen = chosen;
    r->report->copy[other].stale = is_passed_over(r->config, other);
    if (s->state != HT_LOG_ENDED || scans_equal(s, &r->scan[chosen]))
        return;
    r->report->copy[other].stale = true;
    ht_info("log: copy %u on %s is behind (frame %llu of %llu)", other, ht_dev_name(r->copy[other].dev),
            (unsigned long long)s->last_seq, (unsigned long long)r->scan[chosen].last_seq);
}

/* ------------------------------------------------------------ second pass */

static int hand_out_record(const struct ht_journal_config *c, uint16_t type, const uint8_t *payload, uint32_t len)
{
    if (type == HT_REC_EPOCH || type == HT_REC_CHECKPOINT_BEGIN || type == HT_REC_CHECKPOINT_END)
        return 0;
    return c->replay ? c->replay(c->ctx, type, payload, len) : 0;
}

static int hand_out_frame(void *ctx, const struct ht_frame *f, const uint8_t *payload)
{
    struct replay *r = ctx;
    struct ht_reader rd = ht_reader_of(payload, f->payload_len);

    while (!ht_reader_done(&rd)) {
        uint16_t type = ht_get_u16(&rd);
        (void)ht_get_u16(&rd);
        uint32_t len = ht_get_u32(&rd);
        const uint8_t *p = ht_get_bytes(&rd, len);
        if (rd.bad)
            return -EUCLEAN; /* was verified, so this cannot happen */
        int rc = hand_out_record(r->config, type, p, len);
        bool malformed = rc == -EUCLEAN || rc > 0;
        if (rc && !(malformed && r->config->leave_out))
            return malformed ? -EUCLEAN : rc;
        if (malformed && r->report->left_out++ == 0)
            r->report->left_out_frame = f->seq;
        r->report->records++;
    }
    r->report->frames++;
    r->report->bytes += ht_frame_bytes(f->payload_len);
    return 0;
}

static int hand_out(struct replay *r, unsigned chosen)
{
    struct ht_log_scan again;
    int rc = ht_log_walk(&r->scanner, &r->copy[chosen], hand_out_frame, r, &again);

    if (rc == 0 && !scans_equal(&again, &r->scan[chosen])) {
        ht_error("log: copy %u on %s reads differently the second time", chosen, ht_dev_name(r->copy[chosen].dev));
        rc = -EIO;
    }
    free(again.links);
    return rc;
}

/* ------------------------------------------------------------------ open */

static int replay_all(struct replay *r, bool force, bool *out_sound)
{
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        r->copy[i] = (struct ht_log_copy){r->config->dev[i], r->config->offset[i], r->config->log_bytes};
        r->scan[i].state = HT_LOG_MISSING;
    }
    int rc = scan_copies(r, false);
    int chosen = rc ? rc : choose(r, force, out_sound);

    fill_report(r);
    if (chosen < 0)
        return chosen;
    report_chosen(r, (unsigned)chosen);
    rc = hand_out(r, (unsigned)chosen);
    return rc ? rc : chosen;
}

static void journal_from(struct ht_journal *j, const struct replay *r, unsigned chosen, bool sound)
{
    const struct ht_log_scan *s = &r->scan[chosen];

    HT_UNSHARED(HT_LOCK_JOURNAL);
    memcpy(j->copy, r->copy, sizeof(j->copy));
    j->read_only = !sound && !r->config->give_up;
    j->chosen = chosen;
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        bool damaged = r->scan[i].state == HT_LOG_DAMAGED;
        j->refill[i] = j->copy[i].dev && (damaged || !scans_equal(s, &r->scan[i]));
        j->stale[i] = j->refill[i] && !damaged;
    }
    j->end_pos = j->tail_pos = s->end_pos;
    j->written_seq = j->durable_seq = j->notified_seq = s->last_seq;
    j->written_checksum = s->last_checksum;
    j->next_seq = s->last_seq + 1;
    j->epoch = ht_max_u64(r->config->epoch, s->last_epoch);
}

static bool config_valid(const struct ht_journal_config *c)
{
    return c->log_bytes >= HT_LOG_BYTES_MIN && c->log_bytes <= HT_LOG_BYTES_MAX && c->log_bytes % HT_BLOCK_BYTES == 0 &&
        c->start.pos % HT_BLOCK_BYTES == 0 && c->start.seq >= 1;
}

int ht_journal_open(const struct ht_journal_config *config, bool force, struct ht_journal_report *out_report,
                    struct ht_journal **out_journal)
{
    struct replay r = {.config = config, .report = out_report};
    struct ht_journal *j = NULL;
    bool sound = false;

    memset(out_report, 0, sizeof(*out_report));
    if (!config_valid(config))
        return -EINVAL;
    int rc = ht_journal_new(config, &j);
    if (rc == 0)
        rc = ht_log_scanner_init(&r.scanner, config);
    if (rc == 0)
        rc = replay_all(&r, force, &sound);
    if (rc >= 0)
        journal_from(j, &r, (unsigned)rc, sound);
    ht_log_scanner_end(&r.scanner);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        free(r.scan[i].links);
    if (rc < 0) {
        ht_journal_abandon(j);
        return rc;
    }
    *out_journal = j;
    return 0;
}
