/* SPDX-License-Identifier: Apache-2.0 */
/*
 * super_codec.c - superblocks between memory and disk form.
 *
 * The only file that touches struct ht_disk_super. fields_valid() checks every number from a device before any other
 * code uses it: a number that passed ht_super_decode can be used as an offset or an index without another check.
 *
 * No state, no I/O: any thread.
 */
#include "tiering/space/super.h"

#include "tiering/base/buf.h"
#include "tiering/base/hash.h"
#include "tiering/base/mutant.h"

#define DEVICE_BYTES_MAX (1ull << 60)

struct range {
    uint64_t first, end;
};

const char *ht_super_problem_text(enum ht_super_problem p)
{
    static const char *const texts[] = {
        [HT_SUPER_OK] = "valid",
        [HT_SUPER_UNREADABLE] = "cannot be read",
        [HT_SUPER_NO_MAGIC] = "not a hitrain superblock",
        [HT_SUPER_BAD_CHECKSUM] = "checksum does not match",
        [HT_SUPER_BAD_VERSION] = "unknown format version or feature",
        [HT_SUPER_BAD_FIELD] = "a field is out of bounds",
    };

    return texts[p];
}

const char *ht_device_class_word(unsigned device_class)
{
    return device_class == HT_DEVICE_CAPACITY ? "capacity" : "fast";
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

static uint64_t block_checksum(const struct ht_disk_super *d)
{
    size_t from = offsetof(struct ht_disk_super, version);

    return ht_hash64((const uint8_t *)d + from, sizeof(*d) - from, 0);
}

/* Fields that have one name and meaning in both forms, by their kind. */
#define FIELDS_32(F) F(flags) F(device_index) F(device_count) F(chunk_bytes)
#define FIELDS_64(F) F(feat_refuse) F(feat_ro) F(feat_ignore) F(salt) F(generation) F(created_ns) F(log_bytes)
#define LOG_STATE_64(F) F(start_pos) F(start_seq) F(start_chain) F(epoch) F(durable_seq)
#define FIELDS_BYTES(F) F(uuid) F(boot_id)

#define PUT32(field) ht_le32_store(d->field.b, sb->field);
#define PUT64(field) ht_le64_store(d->field.b, sb->field);
#define PUT_BYTES(field) memcpy(d->field, sb->field, sizeof(d->field));

static void encode_fields(const struct ht_super *sb, struct ht_disk_super *d)
{
    FIELDS_32(PUT32);
    FIELDS_64(PUT64);
    LOG_STATE_64(PUT64);
    FIELDS_BYTES(PUT_BYTES);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        ht_le32_store(d->log[i].device.b, sb->log_device[i]);
        ht_le64_store(d->log[i].offset.b, sb->log_offset[i]);
    }
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++) {
        PUT64(device_bytes[i]);
        PUT64(member_epoch[i]);
        PUT_BYTES(device_uuid[i]);
    }
    memcpy(d->label, sb->label, strnlen(sb->label, HT_LABEL_BYTES));
    ht_le64_store(d->writer.b, sb->writer);
    ht_le64_store(d->writer_place.b, sb->writer ? sb->writer_place : 0);
    ht_le32_store(d->log[0].writer.b, sb->writer ? sb->writer_flags | HT_WRITER_KNOWN : 0);
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
    ht_le32_store(d.version.b, HT_FORMAT_VERSION);
    ht_le32_store(d.block_bytes.b, HT_BLOCK_BYTES);
    encode_fields(sb, &d);
    memcpy(d.feature_names, feature_names, sizeof(feature_names));
    ht_le64_store(d.checksum.b, block_checksum(&d));
    memcpy(out_block, &d, sizeof(d));
}

#define GET32(field) sb->field = ht_le32_load(d->field.b);
#define GET64(field) sb->field = ht_le64_load(d->field.b);
#define GET_BYTES(field) memcpy(sb->field, d->field, sizeof(sb->field));

static void decode_fields(const struct ht_disk_super *d, struct ht_super *sb)
{
    FIELDS_32(GET32);
    FIELDS_64(GET64);
    LOG_STATE_64(GET64);
    FIELDS_BYTES(GET_BYTES);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        sb->log_device[i] = ht_le32_load(d->log[i].device.b);
        sb->log_offset[i] = ht_le64_load(d->log[i].offset.b);
    }
    for (unsigned i = 0; i < HT_DEVICES_MAX; i++) {
        GET64(device_bytes[i]);
        GET64(member_epoch[i]);
        GET_BYTES(device_uuid[i]);
    }
    memcpy(sb->label, d->label, HT_LABEL_BYTES);
    sb->label[HT_LABEL_BYTES] = '\0';
    sb->writer = ht_le32_load(d->log[0].writer.b) & HT_WRITER_KNOWN ? ht_le64_load(d->writer.b) : 0;
    sb->writer_place = sb->writer ? ht_le64_load(d->writer_place.b) : 0;
    sb->writer_flags = sb->writer ? ht_le32_load(d->log[0].writer.b) : 0;
    if (sb->feat_ignore & HT_FEAT_IGNORE_CLASSES)
        memcpy(sb->device_class, d->device_class, sizeof(sb->device_class));
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
    if (ht_le64_load(d.checksum.b) != block_checksum(&d))
        return HT_SUPER_BAD_CHECKSUM;
    *out = (struct ht_super_words){
        .version = ht_le32_load(d.version.b),
        .feat_refuse = ht_le64_load(d.feat_refuse.b),
        .feat_ro = ht_le64_load(d.feat_ro.b),
        .feat_ignore = ht_le64_load(d.feat_ignore.b),
        .generation = ht_le64_load(d.generation.b),
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
    if (ht_le64_load(d.checksum.b) != block_checksum(&d) && !HT_MUTANT("super-checksum"))
        return HT_SUPER_BAD_CHECKSUM;
    if (ht_le32_load(d.version.b) != HT_FORMAT_VERSION || (ht_le64_load(d.feat_refuse.b) & ~HT_FEAT_REFUSE_KNOWN))
        return HT_SUPER_BAD_VERSION;
    if (ht_le32_load(d.block_bytes.b) != HT_BLOCK_BYTES)
        return HT_SUPER_BAD_FIELD;
    memset(&sb, 0, sizeof(sb));
    decode_fields(&d, &sb);
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
