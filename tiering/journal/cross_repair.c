/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cross_repair.c - makes two damaged copies of one log whole: a frame that one copy lost is in the other one.
 *
 * The code walks the copy that goes further. Frames that lie after the end of the other copy are written to that copy,
 * at places where nothing verifies there. Then that one may go further with frames of its own, and they change places.
 * Frames of a fork are never overwritten: there both end. Only verified frames are written, and only to places without
 * one: a crash leaves nothing worse than before.
 */
#include "tiering/journal/journal_priv.h"

#include "tiering/sys/mem.h"

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
        rc = ht_log_write_at(&m->copy[m->bad], f->pos, payload - HT_FRAME_HEADER_BYTES, ht_frame_bytes(f->payload_len));
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
    struct cross_repair m = {.scanner = {.config = config}};
    int rc = 0;

    *out_frames = 0;
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        m.copy[i] = (struct ht_log_copy){config->dev[i], config->offset[i], config->log_bytes};
        if (!config->dev[i])
            return 0;
    }
    rc = ht_log_reader_init(&m.scanner.reader, config->rings);
    if (rc == 0)
        rc = cross_repair(&m);
    *out_frames = m.written;
    ht_log_reader_destroy(&m.scanner.reader);
    free(m.scanner.frame.data);
    free(m.mem.data);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        free(m.scan[i].links);
    return rc;
}

/* ------------------------------------------------------------------- aside */

/* Unreadable blocks stay zeros, which are no frame. */
static void read_piece(struct ht_dev *from, uint64_t offset, uint8_t *to, uint32_t len)
{
    if (ht_dev_read(from, offset, to, len) == 0)
        return;
    memset(to, 0, len);
    for (uint32_t at = 0; at < len; at += HT_BLOCK_BYTES)
        if (ht_dev_read(from, offset + at, to + at, HT_BLOCK_BYTES) != 0)
            memset(to + at, 0, HT_BLOCK_BYTES);
}

/* Blocks of the device without writes take no memory: a region may be large, and most of it empty. */
static void copy_blocks(uint8_t *to, const uint8_t *from, uint32_t len)
{
    static const uint8_t zeros[HT_BLOCK_BYTES];

    for (uint32_t at = 0; at < len; at += HT_BLOCK_BYTES)
        if (memcmp(from + at, zeros, HT_BLOCK_BYTES) != 0)
            memcpy(to + at, from + at, HT_BLOCK_BYTES);
}

static int copy_aside(const struct ht_journal_config *config, unsigned i, struct ht_dev **out_dev)
{
    uint8_t *piece = aligned_alloc(HT_BLOCK_BYTES, HT_LOG_PIECE_BYTES);
    int rc = piece ? ht_dev_open_ram(config->log_bytes, HT_BLOCK_BYTES, out_dev) : -ENOMEM;

    for (uint64_t at = 0; rc == 0 && at < config->log_bytes; at += HT_LOG_PIECE_BYTES) {
        uint32_t len = (uint32_t)ht_min_u64(HT_LOG_PIECE_BYTES, config->log_bytes - at);
        read_piece(config->dev[i], config->offset[i] + at, piece, len);
        copy_blocks((uint8_t *)ht_dev_ram_data(*out_dev) + at, piece, len);
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
