/* SPDX-License-Identifier: Apache-2.0 */
/*
 * super_codec.c - superblocks between memory and disk form.
 *
 * The only file that touches struct ht_disk_super. fields_valid() checks every number from a device before any other
 * code uses it: a number that passed ht_super_decode can be used as an offset or an index without another check.
 *
 * No state, no I/O: any thread.
 */
#include "tiering/space/super_priv.h"

#include "tiering/base/buf.h"
#include "tiering/base/hash.h"
#include "tiering/base/mutant.h"

#define DEVICE_BYTES_MAX (1ull << 60)

struct range {
    uint64_t first, end;
};

const char *ht_super_problem_text(enum ht_super_problem p)
{
    switch (p) {
    case HT_SUPER_OK:
        return "valid";
    case HT_SUPER_UNREADABLE:
        return "cannot be read";
    case HT_SUPER_NO_MAGIC:
        return "not a hitrain superblock";
    case HT_SUPER_BAD_CHECKSUM:
        return "checksum does not match";
    case HT_SUPER_BAD_VERSION:
        return "unknown format version or feature";
    case HT_SUPER_BAD_FIELD:
        return "a field is out of bounds";
    }
    return "unknown problem";
}

uint64_t ht_super_offset(uint64_t device_bytes, unsigned copy)
{
    assert(copy < HT_SUPER_COPIES && device_bytes >= HT_BLOCK_BYTES);
    if (copy == 0)
        return 0;
    if (copy == 1)
        return (uint64_t)HT_SUPER_BLOCK_1 * HT_BLOCK_BYTES;
    return device_bytes / HT_BLOCK_BYTES * HT_BLOCK_BYTES - HT_BLOCK_BYTES;
}

static void put32(ht_le32 *to, uint32_t v)
{
    ht_le32_store(to->b, v);
}

static void put64(ht_le64 *to, uint64_t v)
{
    ht_le64_store(to->b, v);
}

static uint32_t get32(const ht_le32 *from)
{
    return ht_le32_load(from->b);
}

static uint64_t get64(const ht_le64 *from)
{
    return ht_le64_load(from->b);
}

static uint64_t block_checksum(const struct ht_disk_super *d)
{
    size_t from = offsetof(struct ht_disk_super, version);

    return ht_hash64((const uint8_t *)d + from, sizeof(*d) - from, 0);
}

static void encode_identity(const struct ht_super *sb, struct ht_disk_super *d)
{
    put32(&d->version, HT_FORMAT_VERSION);
    put32(&d->flags, sb->flags);
    put64(&d->feat_refuse, sb->feat_refuse);
    put64(&d->feat_ro, sb->feat_ro);
    put64(&d->feat_ignore, sb->feat_ignore);
    memcpy(d->uuid, sb->uuid, sizeof(d->uuid));
    memcpy(d->label, sb->label, strnlen(sb->label, HT_LABEL_BYTES));
    put64(&d->salt, sb->salt);
    put64(&d->generation, sb->generation);
    put64(&d->writer, sb->writer);
    put64(&d->writer_place, sb->writer ? sb->writer_place : 0);
    put32(&d->log[0].writer, sb->writer ? sb->writer_flags | HT_WRITER_KNOWN : 0);
    memcpy(d->boot_id, sb->boot_id, sizeof(d->boot_id));
    put64(&d->created_ns, sb->created_ns);
}

static void encode_layout(const struct ht_super *sb, struct ht_disk_super *d)
{
    put32(&d->device_index, sb->device_index);
    put32(&d->device_count, sb->device_count);
    put32(&d->block_bytes, HT_BLOCK_BYTES);
    put32(&d->chunk_bytes, sb->chunk_bytes);
    put64(&d->log_bytes, sb->log_bytes);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        put32(&d->log[i].device, sb->log_device[i]);
        put64(&d->log[i].offset, sb->log_offset[i]);
    }
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++) {
        put64(&d->device_bytes[i], sb->device_bytes[i]);
        memcpy(d->device_uuid[i], sb->device_uuid[i], sizeof(d->device_uuid[i]));
        put64(&d->member_epoch[i], sb->member_epoch[i]);
    }
    if (sb->feat_ignore & HT_FEAT_IGNORE_CLASSES)
        memcpy(d->device_class, sb->device_class, sizeof(d->device_class));
}

#define LINE(effect, bit, name, since, text) HT_FEATURE_WORD_##effect " " #bit " " name " " since "\n"
static const char feature_names[] = HT_FEATURES(LINE);
#undef LINE
static_assert(sizeof(feature_names) <= HT_FEATURE_NAMES_BYTES, "names of features");

void ht_super_encode(const struct ht_super *sb, uint8_t out_block[4096])
{
    struct ht_disk_super d;

    memset(&d, 0, sizeof(d));
    memcpy(d.magic, HT_SUPER_MAGIC, sizeof(d.magic));
    encode_identity(sb, &d);
    encode_layout(sb, &d);
    put64(&d.start_pos, sb->start_pos);
    put64(&d.start_seq, sb->start_seq);
    put64(&d.start_chain, sb->start_chain);
    put64(&d.epoch, sb->epoch);
    put64(&d.durable_seq, sb->durable_seq);
    memcpy(d.feature_names, feature_names, sizeof(feature_names));
    put64(&d.checksum, block_checksum(&d));
    memcpy(out_block, &d, sizeof(d));
}

static void decode_identity(const struct ht_disk_super *d, struct ht_super *sb)
{
    sb->flags = get32(&d->flags);
    sb->feat_refuse = get64(&d->feat_refuse);
    sb->feat_ro = get64(&d->feat_ro);
    sb->feat_ignore = get64(&d->feat_ignore);
    memcpy(sb->uuid, d->uuid, sizeof(sb->uuid));
    memcpy(sb->label, d->label, HT_LABEL_BYTES);
    sb->label[HT_LABEL_BYTES] = '\0';
    sb->salt = get64(&d->salt);
    sb->generation = get64(&d->generation);
    sb->writer = get32(&d->log[0].writer) & HT_WRITER_KNOWN ? get64(&d->writer) : 0;
    sb->writer_place = sb->writer ? get64(&d->writer_place) : 0;
    sb->writer_flags = sb->writer ? get32(&d->log[0].writer) : 0;
    memcpy(sb->boot_id, d->boot_id, sizeof(sb->boot_id));
    sb->created_ns = get64(&d->created_ns);
}

static void decode_layout(const struct ht_disk_super *d, struct ht_super *sb)
{
    sb->device_index = get32(&d->device_index);
    sb->device_count = get32(&d->device_count);
    sb->chunk_bytes = get32(&d->chunk_bytes);
    sb->log_bytes = get64(&d->log_bytes);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        sb->log_device[i] = get32(&d->log[i].device);
        sb->log_offset[i] = get64(&d->log[i].offset);
    }
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++) {
        sb->device_bytes[i] = get64(&d->device_bytes[i]);
        memcpy(sb->device_uuid[i], d->device_uuid[i], sizeof(sb->device_uuid[i]));
        sb->member_epoch[i] = get64(&d->member_epoch[i]);
    }
    if (sb->feat_ignore & HT_FEAT_IGNORE_CLASSES)
        memcpy(sb->device_class, d->device_class, sizeof(sb->device_class));
}

static void decode_log_state(const struct ht_disk_super *d, struct ht_super *sb)
{
    sb->start_pos = get64(&d->start_pos);
    sb->start_seq = get64(&d->start_seq);
    sb->start_chain = get64(&d->start_chain);
    sb->epoch = get64(&d->epoch);
    sb->durable_seq = get64(&d->durable_seq);
}

/* --------------------------------------------------------- field checks */

bool ht_super_log_bytes_valid(uint64_t bytes)
{
    return bytes % HT_BLOCK_BYTES == 0 && bytes >= HT_LOG_BYTES_MIN && bytes <= HT_LOG_BYTES_MAX;
}

/* Labels are shown on terminals: no control characters, nothing after the first NUL. */
bool ht_super_label_valid(const char *label)
{
    size_t len = strnlen(label, HT_LABEL_BYTES);

    for (size_t i = 0; i < len; i++)
        if ((unsigned char)label[i] < 0x20 || label[i] == 0x7f)
            return false;
    for (size_t i = len; i < HT_LABEL_BYTES; i++)
        if (label[i])
            return false;
    return true;
}

static bool ranges_overlap(struct range a, struct range b)
{
    return a.first < b.end && b.first < a.end;
}

static bool devices_valid(const struct ht_super *sb)
{
    if (sb->device_count < 1 || sb->device_count > HT_DEVICES_MAX)
        return false;
    if (sb->device_index >= sb->device_count)
        return false;
    for (unsigned i = 0; i < sb->device_count; i++)
        if (sb->device_bytes[i] < HT_SUPER_DEVICE_BYTES_MIN || sb->device_bytes[i] > DEVICE_BYTES_MAX)
            return false;
    return true;
}

static bool classes_valid(const struct ht_super *sb)
{
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        if (sb->device_class[i] > HT_DEVICE_CAPACITY)
            return false;
    return true;
}

/* Needs devices_valid and log_bytes_valid. So one device is fast at least. */
static bool log_copy_valid(const struct ht_super *sb, unsigned copy)
{
    uint64_t offset = sb->log_offset[copy];

    if (sb->log_device[copy] >= sb->device_count || offset % HT_BLOCK_BYTES)
        return false;
    if (sb->device_class[sb->log_device[copy]] != HT_DEVICE_FAST)
        return false;
    uint64_t bytes = sb->device_bytes[sb->log_device[copy]];
    if (offset > bytes || sb->log_bytes > bytes - offset)
        return false;
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++) {
        uint64_t at = ht_super_offset(bytes, i);
        if (ranges_overlap((struct range){at, at + HT_BLOCK_BYTES}, (struct range){offset, offset + sb->log_bytes}))
            return false;
    }
    return true;
}

static bool logs_valid(const struct ht_super *sb)
{
    if (!ht_super_log_bytes_valid(sb->log_bytes) || !log_copy_valid(sb, 0) || !log_copy_valid(sb, 1))
        return false;
    if (sb->log_device[0] != sb->log_device[1])
        return true;
    struct range first = (struct range){sb->log_offset[0], sb->log_offset[0] + sb->log_bytes};
    struct range second = (struct range){sb->log_offset[1], sb->log_offset[1] + sb->log_bytes};
    return !ranges_overlap(first, second);
}

static bool log_state_valid(const struct ht_super *sb)
{
    if (sb->start_pos % HT_BLOCK_BYTES || sb->start_pos > HT_SUPER_COUNTER_MAX)
        return false;
    if (sb->start_seq < 1 || sb->start_seq > HT_SUPER_COUNTER_MAX)
        return false;
    if (sb->epoch > HT_SUPER_COUNTER_MAX || sb->durable_seq > HT_SUPER_COUNTER_MAX)
        return false;
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++)
        if (sb->member_epoch[i] > sb->epoch)
            return false;
    return !(sb->flags & HT_SUPER_CLEAN) || sb->durable_seq + 1 >= sb->start_seq;
}

static bool fields_valid(const struct ht_super *sb)
{
    if (sb->flags & ~(HT_SUPER_CLEAN | HT_SUPER_IN_USE))
        return false;
    if (sb->generation < 1 || sb->generation > HT_SUPER_COUNTER_MAX)
        return false;
    return ht_super_label_valid(sb->label) && HT_CHUNK_BYTES_VALID(sb->chunk_bytes) && devices_valid(sb) &&
        classes_valid(sb) && logs_valid(sb) && log_state_valid(sb);
}

enum ht_super_problem ht_super_peek(const uint8_t block[4096], struct ht_super_words *out)
{
    struct ht_disk_super d;

    memcpy(&d, block, sizeof(d));
    if (memcmp(d.magic, HT_SUPER_MAGIC, sizeof(d.magic)) != 0)
        return HT_SUPER_NO_MAGIC;
    if (get64(&d.checksum) != block_checksum(&d))
        return HT_SUPER_BAD_CHECKSUM;
    *out = (struct ht_super_words){
        .version = get32(&d.version),
        .feat_refuse = get64(&d.feat_refuse),
        .feat_ro = get64(&d.feat_ro),
        .feat_ignore = get64(&d.feat_ignore),
        .generation = get64(&d.generation),
    };
    memcpy(out->uuid, d.uuid, sizeof(out->uuid));
    memcpy(out->label, d.label, HT_LABEL_BYTES);
    memcpy(out->feature_names, d.feature_names, HT_FEATURE_NAMES_BYTES);
    return HT_SUPER_OK;
}

enum ht_super_problem ht_super_decode(const uint8_t block[4096], struct ht_super *out_sb)
{
    struct ht_disk_super d;
    struct ht_super sb;

    memcpy(&d, block, sizeof(d));
    if (memcmp(d.magic, HT_SUPER_MAGIC, sizeof(d.magic)) != 0)
        return HT_SUPER_NO_MAGIC;
    if (get64(&d.checksum) != block_checksum(&d) && !HT_MUTANT("super-checksum"))
        return HT_SUPER_BAD_CHECKSUM;
    if (get32(&d.version) != HT_FORMAT_VERSION || (get64(&d.feat_refuse) & ~HT_FEAT_REFUSE_KNOWN))
        return HT_SUPER_BAD_VERSION;
    if (get32(&d.block_bytes) != HT_BLOCK_BYTES)
        return HT_SUPER_BAD_FIELD;
    memset(&sb, 0, sizeof(sb));
    decode_identity(&d, &sb);
    decode_layout(&d, &sb);
    decode_log_state(&d, &sb);
    if (!fields_valid(&sb))
        return HT_SUPER_BAD_FIELD;
    *out_sb = sb;
    return HT_SUPER_OK;
}

void ht_super_get_layout(const struct ht_super *sb, struct ht_super_layout *out)
{
    *out = (struct ht_super_layout){
        .salt = sb->salt,
        .chunk_bytes = sb->chunk_bytes,
        .log_bytes = sb->log_bytes,
    };
    memcpy(out->log_device, sb->log_device, sizeof(out->log_device));
    memcpy(out->log_offset, sb->log_offset, sizeof(out->log_offset));
    memcpy(out->device_bytes, sb->device_bytes, sizeof(out->device_bytes));
    memcpy(out->device_class, sb->device_class, sizeof(out->device_class));
}
