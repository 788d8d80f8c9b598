/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - reading again what the copies hold of the log, and writing anew what one of them lost.
 *
 * From the start to the last durable frame nothing is overwritten, but by a compaction that moves the start, and in split mode. Both are
 * looked for after the reads: what moved meanwhile is no damage. Nor is a copy that a cut left behind and that, in a mount for reading,
 * nobody brings up. A repair writes the bytes of a copy that verified
 * over the same place of the other one, holding the writing token: a crash leaves the sound copy as it is.
 */
#include "tiering/journal/journal_priv.h"

#include <stdlib.h>

struct look {
    struct ht_log_copy copy[HT_LOG_COPIES];
    struct ht_frame frame[HT_LOG_COPIES]; /* of the sound ones */
    int error[HT_LOG_COPIES];             /* -ENODEV: not there; -EUCLEAN: does not verify; what the device said */
    uint64_t end_pos;
};

void ht_log_scrub_end(struct ht_log_scrub *c)
{
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        free(c->mem_[i]);
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

static int reserve(struct ht_log_scrub *c, unsigned i, uint64_t bytes)
{
    struct ht_frame_mem m = {.data = c->mem_[i], .cap = c->cap_[i]};
    int rc = ht_frame_mem_reserve(&m, bytes);
    c->mem_[i] = m.data;
    c->cap_[i] = m.cap;
    return rc;
}

static bool continues(const struct ht_journal *j, const struct ht_log_scrub *c, const struct ht_frame *f,
                      uint64_t end_pos)
{
    uint64_t room = end_pos - c->pos_;
    return f->salt == j->config.salt && f->pos == c->pos_ && f->seq == c->seq_ && f->prev == c->chain_ &&
        f->payload_len <= room && ht_frame_bytes(f->payload_len) <= room;
}

/* The frame at the cursor from one copy, wholly verified. -ENOMEM, or why not. */
static int look_at_copy(struct ht_journal *j, struct ht_log_scrub *c, struct look *l, unsigned i)
{
    struct ht_frame *f = &l->frame[i];
    int rc = reserve(c, i, HT_BLOCK_BYTES);
    if (!rc)
        rc = ht_log_read_at(&l->copy[i], c->pos_, c->mem_[i], HT_BLOCK_BYTES);
    if (rc)
        return rc;
    if (!ht_frame_decode_header(c->mem_[i], f) || !continues(j, c, f, l->end_pos))
        return -EUCLEAN;
    uint64_t bytes = ht_frame_bytes(f->payload_len);
    rc = reserve(c, i, bytes);
    if (!rc && bytes > HT_BLOCK_BYTES)
        rc = ht_log_read_at(&l->copy[i], c->pos_ + HT_BLOCK_BYTES, c->mem_[i] + HT_BLOCK_BYTES, bytes - HT_BLOCK_BYTES);
    if (rc)
        return rc;
    return ht_frame_checksum_ok(c->mem_[i], f) && ht_frame_padding_ok(c->mem_[i], f) ? 0 : -EUCLEAN;
}

static bool moved_locked(const struct ht_journal *j, const struct ht_log_scrub *c)
{
    return j->split || c->pos_ < j->start.pos;
}

/* 1: there is a frame to look at; 0: the end; -EAGAIN: not now. */
static int begin_look(struct ht_journal *j, struct ht_log_scrub *c, struct look *l)
{
    ht_mutex_lock(&j->lock);
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
    ht_mutex_unlock(&j->lock);
    return rc;
}

/* Write the frame of copy `from` over the place of copy `to`, unless that is no live place any more. */
static int repair(struct ht_journal *j, struct ht_log_scrub *c, const struct look *l, unsigned from, unsigned to)
{
    uint64_t bytes = ht_frame_bytes(l->frame[from].payload_len);
    ht_mutex_lock(&j->lock);
    ht_journal_token_take_locked(j);
    int rc = j->error ? j->error : moved_locked(j, c) || !j->copy[to].dev ? -EAGAIN : 0;
    ht_mutex_unlock(&j->lock);
    if (!rc)
        rc = ht_log_write_at(&l->copy[to], c->pos_, c->mem_[from], bytes);
    ht_mutex_lock(&j->lock);
    ht_journal_token_release_locked(j);
    ht_mutex_unlock(&j->lock);
    if (rc)
        return rc;
    struct look again = *l;
    return look_at_copy(j, c, &again, to);
}

static void note_damage(struct ht_journal *j, struct ht_log_scrub *c, const struct look *l, unsigned sound,
                        unsigned bad, struct ht_log_scrub_found *out)
{
    uint64_t offset;
    (void)ht_log_piece(&l->copy[bad], c->pos_, HT_BLOCK_BYTES, &offset);
    out->copy[bad] = (struct ht_log_scrub_damage){
        .dev = l->copy[bad].dev, .offset = offset, .error = l->error[bad], .damaged = true};
    if (sound < HT_LOG_COPIES && c->repair && !j->read_only && j->started)
        out->copy[bad].repaired = repair(j, c, l, sound, bad) == 0;
}

/* What was read is a place of the log still; then it says something about the copies. */
static bool still_there(struct ht_journal *j, const struct ht_log_scrub *c)
{
    ht_mutex_lock(&j->lock);
    bool there = !moved_locked(j, c);
    ht_mutex_unlock(&j->lock);
    return there;
}

int ht_journal_scrub_step(struct ht_journal *j, struct ht_log_scrub *c, struct ht_log_scrub_found *out)
{
    struct look l;
    unsigned sound = HT_LOG_COPIES, present = 0;
    memset(out, 0, sizeof(*out));
    int rc = begin_look(j, c, &l);
    if (rc <= 0)
        return rc;
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        l.error[i] = l.copy[i].dev ? look_at_copy(j, c, &l, i) : -ENODEV;
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
