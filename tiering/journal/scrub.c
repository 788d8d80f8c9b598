/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - reads again the copies of the log, and writes lost frames of a copy anew.
 *
 * From the start to the last durable frame nothing is overwritten, except by a checkpoint that moves the start, and in
 * split mode. The scrub checks for both after the reads: frames that moved in between are no damage. Nor is a stale
 * copy that, in a mount for reading, no thread resyncs. A repair writes verified bytes of a copy over the same place of
 * the other one, holding the writing token: a crash leaves the sound copy as it is.
 */
#include "tiering/journal/journal_priv.h"

struct inspect {
    struct ht_log_copy copy[HT_LOG_COPIES];
    struct ht_frame frame[HT_LOG_COPIES]; /* frames of the sound copies */
    int error[HT_LOG_COPIES];             /* -ENODEV: not there; -EUCLEAN if mismatch; or the device's error */
    bool mismatch[HT_LOG_COPIES];         /* it was read and does not verify */
    uint64_t end_pos;
};

void ht_log_scrub_end(struct ht_log_scrub *c)
{
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        free(c->mem_[i].data);
    memset(c, 0, sizeof(*c));
}

int ht_log_read_at(const struct ht_log_copy *copy, uint64_t pos, uint8_t *mem, uint64_t bytes)
{
    int rc = 0;

    for (uint64_t at = 0; !rc && at < bytes;) {
        uint64_t offset;
        uint32_t len = ht_log_piece(copy, pos + at, bytes - at, &offset);
        rc = ht_dev_read(copy->dev, offset, mem + at, len);
        at += len;
    }
    return rc;
}

int ht_log_write_at(const struct ht_log_copy *copy, uint64_t pos, const uint8_t *mem, uint64_t bytes)
{
    uint64_t failures = ht_dev_flush_failures(copy->dev);
    int rc = 0;

    for (uint64_t at = 0; !rc && at < bytes;) {
        uint64_t offset;
        uint32_t len = ht_log_piece(copy, pos + at, bytes - at, &offset);
        rc = ht_dev_write(copy->dev, offset, mem + at, len);
        at += len;
    }
    return rc ? rc : ht_dev_flush_since(copy->dev, failures);
}

static bool continues(const struct ht_journal *j, const struct ht_log_scrub *c, const struct ht_frame *f,
                      uint64_t end_pos)
{
    uint64_t space = end_pos - c->pos_;

    return f->salt == j->config.salt && f->pos == c->pos_ && f->seq == c->seq_ && f->prev == c->chain_ &&
        f->payload_len <= space && ht_frame_bytes(f->payload_len) <= space;
}

static int refuse(struct inspect *l, unsigned i)
{
    l->mismatch[i] = true;
    return -EUCLEAN;
}

/* The frame at the cursor from one copy, wholly verified. -ENOMEM, or the reason. */
static int inspect_copy(struct ht_journal *j, struct ht_log_scrub *c, struct inspect *l, unsigned i)
{
    struct ht_frame *f = &l->frame[i];
    int rc = ht_frame_mem_reserve(&c->mem_[i], HT_BLOCK_BYTES);

    if (!rc)
        rc = ht_log_read_at(&l->copy[i], c->pos_, c->mem_[i].data, HT_BLOCK_BYTES);
    if (rc)
        return rc;
    if (!ht_frame_decode_header(c->mem_[i].data, f) || !continues(j, c, f, l->end_pos))
        return refuse(l, i);
    uint64_t bytes = ht_frame_bytes(f->payload_len);
    rc = ht_frame_mem_reserve(&c->mem_[i], bytes);
    if (!rc && bytes > HT_BLOCK_BYTES)
        rc = ht_log_read_at(&l->copy[i], c->pos_ + HT_BLOCK_BYTES, c->mem_[i].data + HT_BLOCK_BYTES,
                            bytes - HT_BLOCK_BYTES);
    if (rc)
        return rc;
    return ht_frame_checksum_ok(c->mem_[i].data, f) && ht_frame_padding_ok(c->mem_[i].data, f) ? 0 : refuse(l, i);
}

static bool moved_locked(const struct ht_journal *j, const struct ht_log_scrub *c) HT_REQUIRES(HT_LOCK_JOURNAL)
{
    return j->split || c->pos_ < j->start.pos;
}

/* 1: there is a frame to look at; 0: the end; -EAGAIN: not now. */
static int begin_inspection(struct ht_journal *j, struct ht_log_scrub *c, struct inspect *l)
{
    ht_mutex_lock(ht_journal_lock(j));
    int rc = j->split ? -EAGAIN : 1;
    if (rc > 0 && (!c->begun_ || c->pos_ < j->start.pos)) {
        c->begun_ = true;
        c->pos_ = j->start.pos;
        c->seq_ = j->start.seq;
        c->chain_ = j->start.chain;
    }
    if (rc > 0 && c->pos_ >= j->end_pos)
        rc = 0;
    memcpy(l->copy, j->copy, sizeof(l->copy));
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (j->stale[i] && !j->started)
            l->copy[i].dev = NULL;
    l->end_pos = j->end_pos;
    ht_mutex_unlock(ht_journal_lock(j));
    return rc;
}

static int may_repair_locked(const struct ht_journal *j, const struct ht_log_scrub *c, unsigned to)
    HT_REQUIRES(HT_LOCK_JOURNAL)
{
    if (j->error || j->read_only || !j->started)
        return j->error ? j->error : -EROFS;
    return moved_locked(j, c) || !j->copy[to].dev ? -EAGAIN : 0;
}

/* Writes the frame of copy `from` over the place of copy `to`, unless that place is not live any more. */
static int repair(struct ht_journal *j, struct ht_log_scrub *c, const struct inspect *l, unsigned from, unsigned to)
{
    uint64_t bytes = ht_frame_bytes(l->frame[from].payload_len);

    ht_mutex_lock(ht_journal_lock(j));
    ht_journal_token_take_locked(j);
    int rc = may_repair_locked(j, c, to);
    ht_mutex_unlock(ht_journal_lock(j));
    if (!rc)
        rc = ht_log_write_at(&l->copy[to], c->pos_, c->mem_[from].data, bytes);
    ht_mutex_lock(ht_journal_lock(j));
    ht_journal_token_release_locked(j);
    ht_mutex_unlock(ht_journal_lock(j));
    if (rc)
        return rc;
    struct inspect again = *l;
    return inspect_copy(j, c, &again, to);
}

static void note_damage(struct ht_journal *j, struct ht_log_scrub *c, const struct inspect *l, unsigned sound,
                        unsigned bad, struct ht_log_scrub_found *out)
{
    uint64_t offset;

    (void)ht_log_piece(&l->copy[bad], c->pos_, HT_BLOCK_BYTES, &offset);
    out->copy[bad] = (struct ht_log_scrub_damage){
        .dev = l->copy[bad].dev,
        .offset = offset,
        .error = l->error[bad],
        .mismatch = l->mismatch[bad],
        .damaged = true,
    };
    if (sound < HT_LOG_COPIES && c->repair)
        out->copy[bad].repaired = repair(j, c, l, sound, bad) == 0;
}

/* Was the place that was read still part of the log? Only then the bytes prove anything about the copies. */
static bool still_there(struct ht_journal *j, const struct ht_log_scrub *c)
{
    return ht_locked(ht_journal_lock(j), !moved_locked(j, c));
}

int ht_journal_scrub_step(struct ht_journal *j, struct ht_log_scrub *c, struct ht_log_scrub_found *out)
{
    struct inspect l = {.end_pos = 0};
    unsigned sound = HT_LOG_COPIES, present = 0;

    memset(out, 0, sizeof(*out));
    int rc = begin_inspection(j, c, &l);
    if (rc <= 0)
        return rc;
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        l.error[i] = l.copy[i].dev ? inspect_copy(j, c, &l, i) : -ENODEV;
        if (l.error[i] == -ENOMEM)
            return -ENOMEM;
        present += l.error[i] != -ENODEV;
        if (!l.error[i])
            sound = i;
    }
    if (!still_there(j, c))
        return 1;
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (l.error[i] && l.error[i] != -ENODEV)
            note_damage(j, c, &l, sound, i, out);
    if (sound == HT_LOG_COPIES)
        return present ? -EUCLEAN : 0;
    uint64_t bytes = ht_frame_bytes(l.frame[sound].payload_len);
    out->bytes = bytes * present;
    c->pos_ += bytes;
    c->seq_++;
    c->chain_ = l.frame[sound].checksum;
    return 1;
}
