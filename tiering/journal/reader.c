/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reader.c - the region of one copy as a stream of blocks in the order of positions.
 *
 * Reads pieces of 1 MiB ahead, several in flight. When a piece cannot be read its blocks are read alone, so that one
 * bad block does not hide its neighbours.
 *
 * One reader belongs to one thread.
 */
#include "tiering/journal/journal_priv.h"

uint32_t ht_log_piece(const struct ht_log_copy *c, uint64_t pos, uint64_t len, uint64_t *out_offset)
{
    uint64_t place = pos % c->log_bytes;

    *out_offset = c->offset + place;
    return (uint32_t)ht_min_u64(ht_min_u64(len, HT_LOG_PIECE_BYTES), c->log_bytes - place);
}

int ht_log_reader_init(struct ht_log_reader *r, struct ht_rings *rings)
{
    memset(r, 0, sizeof(*r));
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

void ht_log_reader_destroy(struct ht_log_reader *r)
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

void ht_log_reader_seek(struct ht_log_reader *r, const struct ht_log_copy *copy, uint64_t pos, uint64_t limit_pos)
{
    ht_ring_drain(r->ring);
    r->copy = copy;
    r->next_pos = pos;
    r->limit_pos = limit_pos;
    r->head = r->count = 0;
}

static int read_block_alone(struct ht_log_reader *r, uint64_t pos, uint8_t *buf)
{
    uint64_t offset;

    (void)ht_log_piece(r->copy, pos, HT_BLOCK_BYTES, &offset);
    return ht_dev_read(r->copy->dev, offset, buf, HT_BLOCK_BYTES);
}

const uint8_t *ht_log_reader_block(struct ht_log_reader *r, uint64_t pos, int *out_error)
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
            *out_error = rc ? read_block_alone(r, pos, block) : 0;
            return *out_error ? NULL : block;
        }
        r->head = (r->head + 1) % HT_LOG_READ_AHEAD;
        r->count--;
    }
    return NULL;
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
