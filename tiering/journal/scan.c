/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scan.c - how far the chain of one copy goes, and whether it ended there or is damaged.
 *
 * A frame continues the chain when it lies where the one before it ended, names its checksum, has the next number, an
 * epoch not older (a newer one only with the record that begins it), the store's salt, and verifies wholly: checksum,
 * padding, records. If no frame does, the chain is over. Because a frame is submitted only after the one before it is
 * durable, at most one frame was in flight when the writer died. So it is an end when
 *
 *   - nothing after it verifies as a later frame of the same or a newer epoch. Older laps have lower positions; the
 *     remains of the frame in flight do not verify, or lack only padding (is_torn_in_padding), or continue the chain;
 *   - no verified frame, and not the superblock, calls a later number durable;
 *   - the place could be read.
 *
 * Otherwise it is damage. The search after the end reads the rest of the region once. A budget bounds the verification
 * of candidates, so that for any image it reads at most a few times the region.
 *
 * After an orderly unmount there is no need to read that much. The superblock is clean, and the chain ends with the
 * very frame and epoch that it names. It was written after that frame, as the last write of its mount, and the next
 * mount makes another superblock durable before its first frame. So later frames can only be from a mount whose
 * superblock this device did not take. Such frames begin right at the end, with the record of their epoch. To write
 * over them again their writer has to write over the chain first. The search reads CLOSED_SCAN_BYTES. After a crash
 * nothing says how far the writer came: the search then reads the whole region, except long holes of a file.
 *
 * Pieces of 1 MiB are read ahead, several in flight. When one cannot be read its blocks are read alone, so that one bad
 * block does not hide its neighbours.
 *
 * A header may claim any length. Memory for a frame grows from FRAME_STEP_BYTES, and doubles only while the bytes read
 * so far are records: each has a header of its own within HT_RECORD_BYTES_MAX, so memory follows the written bytes.
 */
#include "tiering/journal/journal_priv.h"
#include "tiering/base/mutant.h"

#define FRAME_STEP_BYTES ((uint64_t)HT_MIB)
#define HOLE_BYTES_MIN ((uint64_t)(8 * HT_MIB)) /* skipping is worth a discarded read-ahead */
#define CLOSED_SCAN_BYTES ((uint64_t)(4 * HT_MIB))
#define UNREADABLE_MAX 16u /* after the end; the search ends after so many blocks */

/* ---------------------------------------------------------------- reading */

uint32_t ht_log_piece(const struct ht_log_copy *c, uint64_t pos, uint64_t len, uint64_t *out_offset)
{
    uint64_t place = pos % c->log_bytes;

    *out_offset = c->offset + place;
    return (uint32_t)ht_min_u64(ht_min_u64(len, HT_LOG_PIECE_BYTES), c->log_bytes - place);
}

/* What would lie after the end of the region lies at its begin. */
static int transfer(const struct ht_log_copy *copy, bool write, uint64_t pos, uint8_t *mem, uint64_t bytes)
{
    int rc = 0;

    for (uint64_t at = 0, offset; !rc && at < bytes;) {
        uint32_t len = ht_log_piece(copy, pos + at, bytes - at, &offset);
        rc = write ? ht_dev_write(copy->dev, offset, mem + at, len) : ht_dev_read(copy->dev, offset, mem + at, len);
        at += len;
    }
    return rc;
}

int ht_log_read_at(const struct ht_log_copy *copy, uint64_t pos, uint8_t *mem, uint64_t bytes)
{
    return transfer(copy, false, pos, mem, bytes);
}

int ht_log_write_at(const struct ht_log_copy *copy, uint64_t pos, const uint8_t *mem, uint64_t bytes)
{
    /* A write only reads its memory. */
    return transfer(copy, true, pos, (uint8_t *)(uintptr_t)mem, bytes);
}

int ht_log_write_durably(const struct ht_log_copy *copy, uint64_t pos, const uint8_t *mem, uint64_t bytes)
{
    uint64_t failures = ht_dev_flush_failures(copy->dev);
    int rc = ht_log_write_at(copy, pos, mem, bytes);

    return rc ? rc : ht_dev_flush_since(copy->dev, failures);
}

int ht_frame_mem_reserve(struct ht_frame_mem *m, uint64_t bytes)
{
    if (bytes <= m->cap)
        return 0;
    uint8_t *data = aligned_alloc(HT_BLOCK_BYTES, bytes);
    if (!data)
        return -ENOMEM;
    if (m->cap)
        memcpy(data, m->data, m->cap);
    free(m->data);
    m->data = data;
    m->cap = bytes;
    return 0;
}

static int reader_init(struct ht_log_reader *r, struct ht_rings *rings)
{
    r->ring = ht_ring_mine(rings);
    if (!r->ring)
        return -errno;
    for (unsigned i = 0; i < HT_LOG_READ_AHEAD; i++) {
        r->piece[i].buf = aligned_alloc(HT_BLOCK_BYTES, HT_LOG_PIECE_BYTES);
        if (!r->piece[i].buf)
            return -ENOMEM; /* destroy frees the others */
    }
    return 0;
}

static void reader_destroy(struct ht_log_reader *r)
{
    if (r->ring)
        ht_ring_drain(r->ring);
    for (unsigned i = 0; i < HT_LOG_READ_AHEAD; i++)
        free(r->piece[i].buf);
}

static void read_ahead(struct ht_log_reader *r)
{
    while (r->count < HT_LOG_READ_AHEAD && r->next_pos < r->limit_pos) {
        unsigned i = (r->head + r->count) % HT_LOG_READ_AHEAD;
        uint64_t offset;
        uint32_t len = ht_log_piece(r->copy, r->next_pos, r->limit_pos - r->next_pos, &offset);
        r->piece[i].pos = r->next_pos;
        r->piece[i].io =
            (struct ht_io){.op = HT_IO_READ, .dev = r->copy->dev, .offset = offset, .buf = r->piece[i].buf, .len = len};
        ht_ring_submit(r->ring, &r->piece[i].io);
        r->next_pos += len;
        r->count++;
    }
    ht_ring_kick(r->ring);
}

/* Go on (or back) to pos of a copy. */
static void reader_seek(struct ht_log_reader *r, const struct ht_log_copy *copy, uint64_t pos, uint64_t limit_pos)
{
    ht_ring_drain(r->ring);
    r->copy = copy;
    r->next_pos = pos;
    r->limit_pos = limit_pos;
    r->head = r->count = 0;
}

/*
 * The block at pos (not before an earlier one), valid until the next call; NULL and *out_error when it cannot be read.
 */
static const uint8_t *reader_block(struct ht_log_reader *r, uint64_t pos, int *out_error)
{
    *out_error = -ERANGE;
    while (pos < r->limit_pos) {
        read_ahead(r);
        if (r->count == 0 || pos < r->piece[r->head].pos)
            return NULL; /* before the stream: a caller's error */
        struct ht_io *io = &r->piece[r->head].io;
        uint64_t at = pos - r->piece[r->head].pos;
        int rc = ht_ring_wait(r->ring, io);
        if (at < io->len) {
            uint8_t *block = r->piece[r->head].buf + at;
            *out_error = rc ? ht_log_read_at(r->copy, pos, block, HT_BLOCK_BYTES) : 0; /* alone */
            return *out_error ? NULL : block;
        }
        r->head = (r->head + 1) % HT_LOG_READ_AHEAD;
        r->count--;
    }
    return NULL;
}

int ht_log_scanner_init(struct ht_log_scanner *sc, const struct ht_journal_config *config)
{
    *sc = (struct ht_log_scanner){.config = config};
    return reader_init(&sc->reader, config->rings);
}

void ht_log_scanner_end(struct ht_log_scanner *sc)
{
    reader_destroy(&sc->reader);
    free(sc->frame.data);
}

/* ------------------------------------------------------------- the chain */

static uint64_t limit_pos(const struct ht_log_scanner *sc)
{
    return sc->config->start.pos + sc->config->log_bytes;
}

static bool frame_fits(const struct ht_log_scanner *sc, const struct ht_frame *f, uint64_t pos)
{
    uint64_t space = limit_pos(sc) - pos;

    return f->payload_len <= space && ht_frame_bytes(f->payload_len) <= space;
}

/* Is it a frame of this store that was written for this very place? Checks the header alone. */
static bool header_at(const struct ht_log_scanner *sc, const uint8_t *block, uint64_t pos, struct ht_frame *f)
{
    return ht_frame_decode_header(block, f) && f->salt == sc->config->salt && f->pos == pos && frame_fits(sc, f, pos);
}

static bool header_continues(const struct ht_log_scanner *sc, const struct ht_log_scan *s, const struct ht_frame *f)
{
    return f->seq == s->last_seq + 1 && (f->prev == s->last_checksum || HT_MUTANT("no-chain")) &&
        f->epoch >= s->last_epoch && f->epoch <= sc->config->epoch && f->durable_seq < f->seq;
}

static bool content_ok(const uint8_t *mem, const struct ht_frame *f, const struct ht_log_scan *s)
{
    const uint8_t *payload = mem + HT_FRAME_HEADER_BYTES;

    if (!ht_frame_checksum_ok(mem, f) || !ht_records_valid(payload, f->payload_len))
        return false;
    return f->epoch == s->last_epoch || s->link_count == 0 || ht_records_begin_epoch(payload, f->payload_len, f->epoch);
}

static int link_add(struct ht_log_scan *s, const struct ht_frame *f)
{
    if (ht_array_grow((void **)&s->links, &s->link_cap, s->link_count + 1, sizeof(*s->links)))
        return -ENOMEM;
    s->links[s->link_count++] = (struct ht_chain_link){f->checksum, f->epoch};
    return 0;
}

static void note_durable(struct ht_log_scan *s, const struct ht_frame *f)
{
    if (f->epoch < s->named_epoch || (f->epoch == s->named_epoch && f->durable_seq <= s->named_durable))
        return;
    s->named_epoch = f->epoch;
    s->named_durable = f->durable_seq;
}

/*
 * Memory for more of a frame than the at bytes that were read; *next: the first unchecked record in its payload. 1; 0:
 * the bytes read are no frame's; -ENOMEM.
 */
static int make_room(struct ht_frame_mem *m, const struct ht_frame *f, uint64_t at, uint64_t *next)
{
    uint64_t bytes = ht_frame_bytes(f->payload_len), space = ht_max_u64(FRAME_STEP_BYTES, 2 * at);

    if (at < m->cap)
        return 1;
    if (at > 0 && !ht_records_tile(m->data + HT_FRAME_HEADER_BYTES, at - HT_FRAME_HEADER_BYTES, next))
        return 0;
    int rc = ht_frame_mem_reserve(m, ht_min_u64(bytes, space));
    return rc ? rc : 1;
}

/*
 * The frame at pos into memory. 1: it continues the chain; 0: it does not; or -errno (-ENOMEM,
 * or a read error in *out_io).
 */
static int frame_at(struct ht_log_scanner *sc, const struct ht_log_scan *s, uint64_t pos, struct ht_frame *f,
                    int *out_io)
{
    const uint8_t *block = reader_block(&sc->reader, pos, out_io);

    if (!block || !header_at(sc, block, pos, f) || !header_continues(sc, s, f))
        return 0;
    uint64_t bytes = ht_frame_bytes(f->payload_len), next = 0;
    for (uint64_t at = 0; at < bytes; at += HT_BLOCK_BYTES) {
        int rc = make_room(&sc->frame, f, at, &next);
        if (rc <= 0)
            return rc;
        if (at > 0)
            block = reader_block(&sc->reader, pos + at, out_io);
        if (!block)
            return 0;
        memcpy(sc->frame.data + at, block, HT_BLOCK_BYTES);
    }
    return content_ok(sc->frame.data, f, s) && ht_frame_padding_ok(sc->frame.data, f);
}

static void scan_init(struct ht_log_scan *s, const struct ht_journal_config *c)
{
    memset(s, 0, sizeof(*s));
    s->state = HT_LOG_ENDED;
    s->last_seq = c->start.seq - 1;
    s->last_checksum = c->start.chain;
    s->end_pos = c->start.pos;
}

int ht_log_walk(struct ht_log_scanner *sc, const struct ht_log_copy *copy, ht_frame_fn fn, void *ctx,
                struct ht_log_scan *s)
{
    scan_init(s, sc->config);
    reader_seek(&sc->reader, copy, s->end_pos, limit_pos(sc));
    while (s->end_pos < limit_pos(sc)) {
        struct ht_frame f;
        int io_error = 0;
        int rc = frame_at(sc, s, s->end_pos, &f, &io_error);
        if (rc < 0)
            return rc;
        if (rc == 0) {
            s->error = io_error;
            break;
        }
        rc = fn ? fn(ctx, &f, sc->frame.data + HT_FRAME_HEADER_BYTES) : 0;
        if (rc == 0)
            rc = link_add(s, &f);
        if (rc)
            return rc;
        note_durable(s, &f);
        s->last_seq = f.seq;
        s->last_checksum = f.checksum;
        s->last_epoch = f.epoch;
        s->end_pos += ht_frame_bytes(f.payload_len);
    }
    return 0;
}

/* -------------------------------------------------------- after the end */

/* 1: the whole frame is there and verifies. 0: it does not. */
static int verify_later(struct ht_log_scanner *sc, const struct ht_log_copy *copy, const struct ht_frame *f)
{
    uint64_t bytes = ht_frame_bytes(f->payload_len), next = 0;

    for (uint64_t at = 0; at < bytes;) {
        int rc = make_room(&sc->frame, f, at, &next);
        if (rc <= 0)
            return rc;
        uint64_t end = ht_min_u64(bytes, sc->frame.cap);
        if (ht_log_read_at(copy, f->pos + at, sc->frame.data + at, end - at))
            return 0;
        at = end;
    }
    struct ht_frame again;
    return ht_frame_decode_header(sc->frame.data, &again) && memcmp(&again, f, sizeof(again)) == 0 &&
        ht_frame_checksum_ok(sc->frame.data, f);
}

/*
 * A cut of the frame in flight may have lost nothing but padding: its checksum is right, and its padding is older
 * content. It ends the chain like any cut frame; if a later frame or the superblock names it durable, it is damage all
 * the same.
 */
static bool is_torn_in_padding(const struct ht_log_scanner *sc, const struct ht_log_scan *s, const struct ht_frame *f)
{
    return f->pos == s->end_pos && header_continues(sc, s, f) && content_ok(sc->frame.data, f, s) &&
        !ht_frame_padding_ok(sc->frame.data, f) && !HT_MUTANT("padding-later");
}

static void note_later(struct ht_log_scan *s, const struct ht_frame *f)
{
    if (!s->later || f->epoch > s->later_frame.epoch ||
        (f->epoch == s->later_frame.epoch && f->seq > s->later_frame.seq))
        s->later_frame = *f;
    s->later = true;
    note_durable(s, f);
}

/* The end of the search. */
static uint64_t scan_limit(const struct ht_log_scanner *sc, const struct ht_log_scan *s)
{
    const struct ht_journal_config *c = sc->config;
    bool closed = c->clean && !s->error && s->last_seq == c->durable_seq && s->last_epoch == c->epoch;

    return closed ? ht_min_u64(limit_pos(sc), s->end_pos + CLOSED_SCAN_BYTES) : limit_pos(sc);
}

/*
 * Returns the position after a hole of a file, where no frame can be; pos itself if there is no long hole. Moves the
 * reader along.
 */
static uint64_t skip_hole(struct ht_log_scanner *sc, const struct ht_log_copy *copy, uint64_t pos, uint64_t end)
{
    uint64_t offset = copy->offset + pos % copy->log_bytes;
    uint64_t len = ht_min_u64(end - pos, copy->log_bytes - pos % copy->log_bytes);
    uint64_t hole = ht_dev_next_data(copy->dev, offset, offset + len) - offset;

    if (hole < HOLE_BYTES_MIN)
        return pos;
    pos += hole / HT_BLOCK_BYTES * HT_BLOCK_BYTES;
    reader_seek(&sc->reader, copy, pos, end);
    return pos;
}

static int scan_behind(struct ht_log_scanner *sc, const struct ht_log_copy *copy, struct ht_log_scan *s)
{
    uint64_t budget_bytes = 2 * sc->config->log_bytes, end = scan_limit(sc, s), ask_pos = s->end_pos;
    unsigned unreadable = 0;

    reader_seek(&sc->reader, copy, s->end_pos, end);
    for (uint64_t pos = s->end_pos; pos < end && unreadable < UNREADABLE_MAX; pos += HT_BLOCK_BYTES) {
        struct ht_frame f;
        int io_error;
        if (pos >= ask_pos) {
            pos = skip_hole(sc, copy, pos, end);
            ask_pos = pos + HOLE_BYTES_MIN;
            if (pos >= end)
                break;
        }
        const uint8_t *block = reader_block(&sc->reader, pos, &io_error);
        unreadable += !block;
        if (!block || !header_at(sc, block, pos, &f) || f.seq <= s->last_seq || f.epoch < s->last_epoch)
            continue;
        uint64_t bytes = ht_frame_bytes(f.payload_len);
        if (bytes > budget_bytes) {
            s->later = true; /* so many candidates are no accident */
            return 0;
        }
        budget_bytes -= bytes;
        int rc = verify_later(sc, copy, &f);
        if (rc < 0)
            return rc;
        if (rc > 0) {
            if (!is_torn_in_padding(sc, s, &f))
                note_later(s, &f);
            pos += bytes - HT_BLOCK_BYTES;
        }
    }
    return 0;
}

int ht_log_scan_copy(struct ht_log_scanner *sc, const struct ht_log_copy *copy, struct ht_log_scan *s)
{
    int rc = ht_log_walk(sc, copy, NULL, NULL, s);

    if (rc == 0)
        rc = scan_behind(sc, copy, s);
    if (HT_MUTANT("damage-unseen"))
        return rc;
    if (s->later || s->error || s->last_seq < s->named_durable || s->last_seq < sc->config->durable_seq)
        s->state = HT_LOG_DAMAGED;
    return rc;
}
