/* SPDX-License-Identifier: Apache-2.0 */
/*
 * repair.c - lost frames of a copy of the log are written anew from the other one: by a scrub while the log works on,
 * and before the log is opened if both copies are damaged.
 */
#include "tiering/journal/journal_priv.h"

#include "tiering/sys/mem.h"

/* ------------------------------------------------------------------ scrub */

/*
 * From the start to the last durable frame nothing is overwritten, except by a checkpoint that moves the start, and in
 * split mode. The scrub checks for both after the reads: frames that moved in between are no damage. Nor is a stale
 * copy that, in a mount for reading, no thread resyncs. A repair writes verified bytes of a copy over the same place of
 * the other one, holding the writing token: a crash leaves the sound copy as it is.
 */

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
        rc = ht_log_write_durably(&l->copy[to], c->pos_, c->mem_[from].data, bytes);
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
    if (ht_locked(ht_journal_lock(j), moved_locked(j, c)))
        return 1; /* the bytes that were read prove nothing about the copies */
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

/* ----------------------------------------------------------- cross-repair */

/*
 * Makes two damaged copies of one log whole: a frame that one copy lost is in the other one.
 *
 * The code walks the copy that goes further. Frames that lie after the end of the other copy are written to that copy,
 * at places where nothing verifies there. Then that one may go further with frames of its own, and they change places.
 * Frames of a fork are never overwritten: there both end. Only verified frames are written, and only to places without
 * one: a crash leaves nothing worse than before.
 */

enum { TURNS_MAX = 64 };

struct cross_repair {
    struct ht_log_scanner scanner;
    struct ht_log_copy copy[HT_LOG_COPIES];
    struct ht_log_scan scan[HT_LOG_COPIES];
    struct ht_frame_mem mem;
    unsigned bad; /* the copy that is written */
    unsigned written;
};

/* The frame that the bad copy has in this place: 1: the same; 0: none; -EEXIST: another one. */
static int compare(struct cross_repair *m, const struct ht_frame *f)
{
    uint64_t bytes = ht_frame_bytes(f->payload_len);
    struct ht_frame there;
    int rc = ht_frame_mem_reserve(&m->mem, bytes);

    if (rc)
        return rc;
    if (ht_log_read_at(&m->copy[m->bad], f->pos, m->mem.data, bytes) || !ht_frame_decode_header(m->mem.data, &there) ||
        there.salt != f->salt || there.pos != f->pos || ht_frame_bytes(there.payload_len) > bytes ||
        !ht_frame_checksum_ok(m->mem.data, &there))
        return 0;
    return there.checksum == f->checksum ? ht_frame_padding_ok(m->mem.data, &there) : -EEXIST;
}

static int repair_frame(void *ctx, const struct ht_frame *f, const uint8_t *payload)
{
    struct cross_repair *m = ctx;
    int rc = f->seq <= m->scan[m->bad].last_seq ? 1 : compare(m, f);

    if (rc == 0)
        rc = ht_log_write_durably(&m->copy[m->bad], f->pos, payload - HT_FRAME_HEADER_BYTES,
                                  ht_frame_bytes(f->payload_len));
    else
        return rc < 0 ? rc : 0;
    m->written += rc == 0;
    return rc;
}

static int walk(struct cross_repair *m, unsigned i, ht_frame_fn fn)
{
    free(m->scan[i].links);
    m->scan[i].links = NULL;
    return ht_log_walk(&m->scanner, &m->copy[i], fn, m, &m->scan[i]);
}

static int cross_repair(struct cross_repair *m)
{
    int rc = walk(m, 0, NULL);

    if (rc == 0)
        rc = walk(m, 1, NULL);
    for (unsigned i = 0; rc == 0 && i < TURNS_MAX && m->scan[0].last_seq != m->scan[1].last_seq; i++) {
        unsigned before = m->written;
        m->bad = m->scan[0].last_seq > m->scan[1].last_seq;
        rc = walk(m, !m->bad, repair_frame); /* copies the frames that copy bad lacks */
        if (rc == 0)
            rc = walk(m, m->bad, NULL);
        if (m->written == before)
            break;
    }
    return rc == -ENOMEM ? rc : 0; /* unreadable and unwritable places stay damage, and so does a fork */
}

int ht_journal_cross_repair(const struct ht_journal_config *config, unsigned *out_frames)
{
    struct cross_repair m = {.written = 0};
    int rc;

    *out_frames = 0;
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        m.copy[i] = (struct ht_log_copy){config->dev[i], config->offset[i], config->log_bytes};
        if (!config->dev[i])
            return 0;
    }
    rc = ht_log_scanner_init(&m.scanner, config);
    if (rc == 0)
        rc = cross_repair(&m);
    *out_frames = m.written;
    ht_log_scanner_end(&m.scanner);
    free(m.mem.data);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        free(m.scan[i].links);
    return rc;
}

/* ------------------------------------------------------------------- aside */

/*
 * Unreadable blocks stay zeros, which are no frame. Blocks of the device without writes take no memory: a region may be
 * large and almost empty.
 */
static void copy_piece(struct ht_dev *from, uint64_t offset, uint8_t *piece, uint32_t len, uint8_t *to)
{
    static const uint8_t zeros[HT_BLOCK_BYTES];
    bool whole = ht_dev_read(from, offset, piece, len) == 0;

    for (uint32_t at = 0; at < len; at += HT_BLOCK_BYTES)
        if ((whole || ht_dev_read(from, offset + at, piece + at, HT_BLOCK_BYTES) == 0) &&
            memcmp(piece + at, zeros, HT_BLOCK_BYTES) != 0)
            memcpy(to + at, piece + at, HT_BLOCK_BYTES);
}

static int copy_aside(const struct ht_journal_config *config, unsigned i, struct ht_dev **out_dev)
{
    uint8_t *piece = aligned_alloc(HT_BLOCK_BYTES, HT_LOG_PIECE_BYTES);
    int rc = piece ? ht_dev_open_ram(config->log_bytes, HT_BLOCK_BYTES, out_dev) : -ENOMEM;

    for (uint64_t at = 0; rc == 0 && at < config->log_bytes; at += HT_LOG_PIECE_BYTES) {
        uint32_t len = (uint32_t)ht_min_u64(HT_LOG_PIECE_BYTES, config->log_bytes - at);
        copy_piece(config->dev[i], config->offset[i] + at, piece, len, (uint8_t *)ht_dev_ram_data(*out_dev) + at);
    }
    free(piece);
    return rc;
}

int ht_journal_cross_repair_aside(const struct ht_journal_config *config, unsigned *out_frames,
                                  struct ht_dev *out_dev[HT_LOG_COPIES])
{
    struct ht_journal_config aside = *config;
    int rc = 0;

    *out_frames = 0;
    if (HT_LOG_COPIES * config->log_bytes > ht_mem_available() / 2)
        return 0; /* then there is no repair */
    memset(aside.dev, 0, sizeof(aside.dev));
    memset(aside.offset, 0, sizeof(aside.offset));
    for (unsigned i = 0; rc == 0 && i < HT_LOG_COPIES; i++)
        if (config->dev[i])
            rc = copy_aside(config, i, &aside.dev[i]);
    if (rc == 0)
        rc = ht_journal_cross_repair(&aside, out_frames);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (rc == 0)
            out_dev[i] = aside.dev[i];
        else if (aside.dev[i])
            ht_dev_close(aside.dev[i]);
    return rc;
}
