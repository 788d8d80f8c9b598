/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frame.c - frames and records between memory and disk form.
 *
 * The only file that touches struct ht_disk_frame. Decoding trusts nothing: a header is believed
 * only as far as scan.c has compared it with where it was found.
 *
 * No state, no I/O: any thread.
 */
#include "tiering/journal/journal_priv.h"

#include "tiering/base/hash.h"
#include "tiering/base/mutant.h"

static_assert(sizeof(struct ht_disk_frame) == HT_FRAME_HEADER_BYTES, "frame header");

/* Everything after the checksum, with the payload, without the padding. */
static uint64_t frame_checksum(const uint8_t *mem, uint64_t payload_len)
{
    size_t from = offsetof(struct ht_disk_frame, salt);

    return ht_hash64(mem + from, HT_FRAME_HEADER_BYTES - from + payload_len, 0);
}

uint64_t ht_frame_encode(uint8_t *mem, struct ht_frame *f)
{
    struct ht_disk_frame d;
    size_t used = HT_FRAME_HEADER_BYTES + f->payload_len;

    assert(ht_records_valid(mem + HT_FRAME_HEADER_BYTES, f->payload_len));
    memset(&d, 0, sizeof(d));
    ht_le32_store(d.magic.b, HT_FRAME_MAGIC);
    ht_le64_store(d.salt.b, f->salt);
    ht_le64_store(d.epoch.b, f->epoch);
    ht_le64_store(d.seq.b, f->seq);
    ht_le64_store(d.pos.b, f->pos);
    ht_le64_store(d.prev.b, f->prev);
    ht_le64_store(d.durable_seq.b, f->durable_seq);
    ht_le64_store(d.payload_len.b, f->payload_len);
    memcpy(mem, &d, sizeof(d));
    memset(mem + used, 0, ht_frame_bytes(f->payload_len) - used);
    f->checksum = frame_checksum(mem, f->payload_len);
    ht_le64_store(mem + offsetof(struct ht_disk_frame, checksum), f->checksum);
    return f->checksum;
}

bool ht_frame_decode_header(const uint8_t *block, struct ht_frame *out_frame)
{
    struct ht_disk_frame d;

    memcpy(&d, block, sizeof(d));
    if (ht_le32_load(d.magic.b) != HT_FRAME_MAGIC || ht_le32_load(d.flags.b) || ht_le64_load(d.pad.b))
        return false;
    *out_frame = (struct ht_frame){
        .checksum = ht_le64_load(d.checksum.b),
        .salt = ht_le64_load(d.salt.b),
        .epoch = ht_le64_load(d.epoch.b),
        .seq = ht_le64_load(d.seq.b),
        .pos = ht_le64_load(d.pos.b),
        .prev = ht_le64_load(d.prev.b),
        .durable_seq = ht_le64_load(d.durable_seq.b),
        .payload_len = ht_le64_load(d.payload_len.b),
    };
    return true;
}

bool ht_frame_checksum_ok(const uint8_t *mem, const struct ht_frame *f)
{
    return frame_checksum(mem, f->payload_len) == f->checksum || HT_MUTANT("frame-checksum");
}

bool ht_frame_padding_ok(const uint8_t *mem, const struct ht_frame *f)
{
    uint64_t end = ht_frame_bytes(f->payload_len);

    for (uint64_t i = HT_FRAME_HEADER_BYTES + f->payload_len; i < end; i++)
        if (mem[i])
            return false;
    return true;
}

/* --------------------------------------------------------------- records */

size_t ht_record_begin(struct ht_buf *group, uint16_t type)
{
    size_t mark = group->len;

    ht_buf_put_u16(group, type);
    ht_buf_put_u16(group, 0);
    ht_buf_put_u32(group, 0);
    return mark;
}

void ht_record_end(struct ht_buf *group, size_t mark)
{
    if (group->err)
        return;
    assert(group->len >= mark + HT_RECORD_HEADER_BYTES);
    size_t len = group->len - mark - HT_RECORD_HEADER_BYTES;
    assert(len <= HT_RECORD_BYTES_MAX);
    ht_le32_store(group->data + mark + 4, (uint32_t)len);
}

void ht_record_put(struct ht_buf *group, uint16_t type, const void *payload, size_t len)
{
    size_t mark = ht_record_begin(group, type);

    ht_buf_put(group, payload, len);
    ht_record_end(group, mark);
}

bool ht_records_tile(const uint8_t *payload, uint64_t len, uint64_t *next)
{
    while (*next < len && len - *next >= HT_RECORD_HEADER_BYTES) {
        struct ht_reader r = ht_reader_of(payload + *next, HT_RECORD_HEADER_BYTES);
        uint16_t type = ht_get_u16(&r), zero = ht_get_u16(&r);
        uint32_t bytes = ht_get_u32(&r);
        if (type == 0 || zero != 0 || bytes > HT_RECORD_BYTES_MAX)
            return false;
        *next += HT_RECORD_HEADER_BYTES + bytes;
    }
    return true;
}

bool ht_records_valid(const uint8_t *payload, size_t len)
{
    uint64_t next = 0;

    return ht_records_tile(payload, len, &next) && next == len;
}

bool ht_records_begin_epoch(const uint8_t *payload, size_t len, uint64_t epoch)
{
    struct ht_reader r = ht_reader_of(payload, len);
    uint16_t type = ht_get_u16(&r);

    (void)ht_get_u16(&r);
    (void)ht_get_u32(&r);
    return type == HT_REC_EPOCH && ht_get_u64(&r) == epoch && !r.bad;
}
