/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/hostile.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>

#include "fs/ns/records.h"
#include "tests/support/log_records.h"
#include "tests/support/sample.h"
#include "tests/support/states.h"
#include "tiering/base/hash.h"
#include "tiering/codec/frame.h"
#include "tiering/space/alloc.h"
#include "tiering/space/super.h"
#include "tiering/api/check.h"

enum {
    NEW_INO = 5000, /* of nothing in the sample */
    FREE_BLOCK = 1300,
    REC_OPT_PARAM = HT_REC_OPT_FIRST + 2,
    KIND_EXP_AVG = 1,
    FRAME_BYTES = HT_BLOCK_BYTES,
};

/* Damages of one statement. */
#define HARM(name, ...)                                               \
    static void name(struct harness *k, const struct damage_ids *ids) \
    {                                                                 \
        __VA_ARGS__;                                                  \
    }
#define PUT(name, ...)                                               \
    static void name(const struct damage_ids *ids, struct ht_buf *b) \
    {                                                                \
        __VA_ARGS__;                                                 \
    }

/* ----------------------------------------------------------------- the store */

static int find_place(void *ctx, const struct ht_chunk_info *info)
{
    struct damage_ids *ids = ctx;
    struct ht_ref_place place = {info->extents[0].block, info->checksum, info->stored_bytes, info->visible_bytes};

    if (info->oid == ids->small && info->index == 0)
        ids->of_small = place;
    if (info->oid == ids->big && info->index == 0)
        ids->of_big = place;
    if (info->oid == ids->sparse)
        ids->of_sparse = place;
    return 0;
}

void damage_find(const struct harness *k, struct damage_ids *out)
{
    *out = (struct damage_ids){
        .small = harness_find(k, HT_NS_ROOT_INO, "small"),
        .big = harness_find(k, HT_NS_ROOT_INO, "big"),
        .sparse = harness_find(k, HT_NS_ROOT_INO, "sparse"),
        .below = harness_find(k, harness_find(k, HT_NS_ROOT_INO, "dir"), "below"),
        .model = harness_find(k, HT_NS_ROOT_INO, "model"),
    };
    out->w = harness_find(k, out->model, "w");
    ck_assert_int_eq(ht_store_walk(k->store, find_place, out), 0);
    ck_assert(out->of_small.block && out->of_big.block && out->of_sparse.block);
}

static struct ht_super super_of(struct harness *k, unsigned dev)
{
    struct ht_super_report report;
    struct ht_super sb;

    ck_assert_int_eq(ht_super_read(k->dev[dev], &sb, &report), 0);
    return sb;
}

void damage_append(struct harness *k, const struct ht_buf *records)
{
    struct ht_super sb = super_of(k, 0);
    struct ht_journal_report report;
    struct ht_journal *j;

    sb.epoch++;
    sb.flags = HT_SUPER_IN_USE;
    ht_members_take_part(&sb, (1u << k->dev_count) - 1);
    ck_assert_uint_eq(ht_super_write(&sb, k->dev, k->dev_count, NULL), 0);
    struct ht_journal_config c = {
        .dev = {k->dev[sb.log_device[0]], k->dev[sb.log_device[1]]},
        .offset = {sb.log_offset[0], sb.log_offset[1]},
        .log_bytes = sb.log_bytes,
        .salt = sb.salt,
        .start = {.pos = sb.start_pos, .seq = sb.start_seq, .chain = sb.start_chain},
        .epoch = sb.epoch - 1,
        .durable_seq = sb.durable_seq,
        .leave_out = true,
        .give_up = true,
    };
    ck_assert_int_eq(ht_journal_open(&c, true, &report, &j), 0);
    uint64_t lsn;
    ck_assert_int_eq(ht_journal_start(j, sb.epoch), 0);
    ck_assert_int_eq(ht_journal_append(j, records, &lsn), 0);
    ck_assert_int_eq(ht_journal_sync(j, lsn), 0);
    ht_journal_abandon(j);
}

void damage_do(const struct damage *d, struct harness *k, const struct damage_ids *ids)
{
    struct ht_buf records = HT_BUF_INIT;

    if (d->put) {
        d->put(ids, &records);
        damage_append(k, &records);
    }
    if (d->harm)
        d->harm(k, ids);
    ht_buf_free(&records);
}

/* --------------------------------------------------------------- superblocks */

static uint8_t *bytes_at(struct harness *k, unsigned dev, uint64_t offset)
{
    return (uint8_t *)ht_dev_ram_data(k->dev[dev]) + offset;
}

static uint8_t *block_at(struct harness *k, uint64_t block)
{
    return bytes_at(k, 0, block * HT_BLOCK_BYTES);
}

static uint8_t *super_copy(struct harness *k, unsigned dev, unsigned copy)
{
    return bytes_at(k, dev, ht_super_offset(ht_dev_size(k->dev[dev]), copy));
}

/* A field of a copy, and the checksum that goes with it. */
static void set_field(uint8_t *copy, size_t at, uint32_t value)
{
    ht_le32_store(copy + at, value);
    ht_le64_store(copy + offsetof(struct ht_disk_super, checksum),
                  ht_hash64(copy + offsetof(struct ht_disk_super, version),
                            HT_BLOCK_BYTES - offsetof(struct ht_disk_super, version), 0));
}

HARM(no_magic, super_copy(k, 0, 1)[3] ^= 1)
HARM(bad_checksum, super_copy(k, 0, 2)[2000] ^= 1)
HARM(other_version, set_field(super_copy(k, 0, 2), offsetof(struct ht_disk_super, version), 99))
HARM(bad_field, set_field(super_copy(k, 0, 0), offsetof(struct ht_disk_super, chunk_bytes), 12345))
HARM(other_store, set_field(super_copy(k, 0, 1), offsetof(struct ht_disk_super, uuid), 1))

static void no_super(struct harness *k, unsigned dev)
{
    for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
        super_copy(k, dev, c)[100] ^= 1;
}

HARM(no_super_of_one, no_super(k, 1))
HARM(no_super_at_all, no_super(k, 0))

static void unknown_feature(struct harness *k, const struct damage_ids *ids)
{
    for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
        set_field(super_copy(k, 0, c), offsetof(struct ht_disk_super, feat_ro), 2);
}

static void truncated(struct harness *k, const struct damage_ids *ids)
{
    struct ht_dev *shorter;

    ck_assert_int_eq(dev_open_ram(SAMPLE_DEVICE_BYTES / 2, 4096, &shorter), 0);
    memcpy(ht_dev_ram_data(shorter), ht_dev_ram_data(k->dev[0]), SAMPLE_DEVICE_BYTES / 2);
    ht_dev_close(k->dev[0]);
    k->dev[0] = shorter;
}

/* ----------------------------------------------------------------------- log */

static uint8_t *log_at(struct harness *k, unsigned copy, uint64_t frame_from_start)
{
    struct ht_super sb = super_of(k, 0);
    uint64_t pos = sb.start_pos + frame_from_start * FRAME_BYTES;

    return bytes_at(k, sb.log_device[copy], sb.log_offset[copy] + pos % sb.log_bytes);
}

HARM(bad_frame, log_at(k, 1, 3)[50] ^= 1)

static void bad_frame_in_both(struct harness *k, const struct damage_ids *ids)
{
    uint64_t last = 0;

    /* The last but three: most of the store is there still. */
    while (ht_le32_load(log_at(k, 0, last + 1)) == HT_FRAME_MAGIC)
        last++;
    ck_assert_uint_gt(last, 4);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        log_at(k, i, last - 3)[60] ^= 1;
}

/* One in each copy, another one. */
static void bad_frame_in_each(struct harness *k, const struct damage_ids *ids)
{
    uint64_t last = 0;

    while (ht_le32_load(log_at(k, 0, last + 1)) == HT_FRAME_MAGIC)
        last++;
    ck_assert_uint_gt(last, 4);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        log_at(k, i, last - 3 + 2 * i)[60] ^= 1;
    log_at(k, 0, last)[60] ^= 1;
}

static void bad_first_frame(struct harness *k, const struct damage_ids *ids)
{
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        log_at(k, i, 0)[60] ^= 1;
}

static void put_record(struct ht_buf *b, const struct ht_ns_record *r)
{
    ht_ns_record_encode(b, r);
}

static void put_inode(struct ht_buf *b, uint64_t ino, uint32_t mode, bool model_root)
{
    put_record(
        b,
        &(struct ht_ns_record){
            .type = HT_REC_NS_INODE, .ino = ino, .attr = {.mode = (uint16_t)(mode | 0755)}, .model_root = model_root});
}

static void put_entry(struct ht_buf *b, uint64_t parent, uint64_t ino, uint32_t type, const char *name)
{
    put_record(b,
               &(struct ht_ns_record){.type = HT_REC_NS_ENTRY,
                                      .parent = parent,
                                      .ino = ino,
                                      .entry_type = (uint16_t)type,
                                      .name = name,
                                      .name_len = (uint32_t)strlen(name)});
}

static void put_fork(struct ht_buf *b, const char *name)
{
    ht_buf_reset(b);
    put_inode(b, NEW_INO, S_IFIFO, false);
    put_entry(b, HT_NS_ROOT_INO, NEW_INO, S_IFIFO, name);
}

/* Each device was mounted without the other, and something was done there. */
static void mounted_apart(struct harness *k, const struct damage_ids *ids)
{
    uint64_t bytes = ht_dev_size(k->dev[1]);
    uint8_t *before[2], *apart = malloc(bytes);
    struct ht_buf b = HT_BUF_INIT;

    for (unsigned i = 0; i < 2; i++) {
        before[i] = malloc(bytes);
        memcpy(before[i], ht_dev_ram_data(k->dev[i]), bytes);
    }
    put_fork(&b, "apart");
    damage_append(k, &b);
    memcpy(apart, ht_dev_ram_data(k->dev[1]), bytes);
    for (unsigned i = 0; i < 2; i++)
        memcpy(ht_dev_ram_data(k->dev[i]), before[i], bytes);
    put_fork(&b, "here");
    damage_append(k, &b);
    memcpy(ht_dev_ram_data(k->dev[1]), apart, bytes);
    ht_buf_free(&b);
    free(apart);
    free(before[0]);
    free(before[1]);
}

/* Of a participant that this program does not have, and will not soon. */
enum { UNKNOWN_TYPE = 1000 };

static void unknown_record(const struct damage_ids *ids, struct ht_buf *b)
{
    ht_record_put(b, UNKNOWN_TYPE, "abc", 3);
    ht_record_put(b, UNKNOWN_TYPE + 1, "abc", 3);
}

/* Of a later version of names. */
PUT(unknown_record_of_names, ht_record_put(b, HT_REC_NS_LAST, "abc", 3))
PUT(cut_record, ht_record_put(b, HT_REC_CHUNK, "abc", 3))

/* --------------------------------------------------------------------- names */

PUT(no_root_dir, put_record(b, &(struct ht_ns_record){.type = HT_REC_NS_INODE_DEL, .ino = HT_NS_ROOT_INO}))

static void in_no_directory(const struct damage_ids *ids, struct ht_buf *b)
{
    put_inode(b, NEW_INO, S_IFREG, false);
    put_entry(b, NEW_INO + 1, NEW_INO, S_IFREG, "stray");
}

PUT(dangling, put_entry(b, HT_NS_ROOT_INO, NEW_INO, S_IFREG, "dang\033ling\302\233"))
PUT(second_directory_name, put_entry(b, HT_NS_ROOT_INO, ids->below, S_IFDIR, "second"))
PUT(attributes_of_nothing,
    put_record(b, &(struct ht_ns_record){.type = HT_REC_NS_XATTR, .ino = NEW_INO, .name = "user.a", .name_len = 6}))

static void no_target(const struct damage_ids *ids, struct ht_buf *b)
{
    put_inode(b, NEW_INO, S_IFLNK, false);
    put_entry(b, HT_NS_ROOT_INO, NEW_INO, S_IFLNK, "nowhere");
}

static void nested_root(const struct damage_ids *ids, struct ht_buf *b)
{
    put_inode(b, NEW_INO, S_IFDIR, true);
    put_entry(b, ids->model, NEW_INO, S_IFDIR, "nested");
}

PUT(link_across_root, put_entry(b, HT_NS_ROOT_INO, ids->w, S_IFREG, "outside"))

static void optimizer_root(const struct damage_ids *ids, struct ht_buf *b)
{
    size_t mark = ht_record_begin(b, HT_REC_OPT_FIRST);

    ht_buf_put_u64(b, NEW_INO);
    ht_buf_put_u64(b, 3);
    ht_record_end(b, mark);
}

/* A kept step without its directory. */
PUT(kept_nowhere,
    put_record(b,
               &(struct ht_ns_record){
                   .type = HT_REC_NS_KEPT, .ino = NEW_INO, .root = ids->model, .step = 1, .name = "1", .name_len = 1}))

/* And the reverse: the directory of a kept step that no record names. */
static void kept_unknown(const struct damage_ids *ids, struct ht_buf *b)
{
    static const char config[] = "adamw lr=0";

    put_record(b,
               &(struct ht_ns_record){.type = HT_REC_NS_INODE,
                                      .ino = NEW_INO,
                                      .attr = {.mode = S_IFDIR | 0755},
                                      .model_root = true,
                                      .frozen = true});
    put_record(b,
               &(struct ht_ns_record){.type = HT_REC_NS_XATTR,
                                      .ino = NEW_INO,
                                      .name = "user.hitrain.optimizer",
                                      .name_len = 22,
                                      .value = config,
                                      .value_len = sizeof(config) - 1});
    put_inode(b, NEW_INO + 1, S_IFREG, false);
    put_entry(b, NEW_INO, NEW_INO + 1, S_IFREG, "kept");
    optimizer_root(ids, b);
}

static void below_itself(const struct damage_ids *ids, struct ht_buf *b)
{
    put_inode(b, NEW_INO, S_IFDIR, false);
    put_inode(b, NEW_INO + 1, S_IFREG, false);
    put_entry(b, NEW_INO, NEW_INO, S_IFDIR, "self");
    put_entry(b, NEW_INO, NEW_INO + 1, S_IFREG, "kept");
}

static void nameless_directory_of(struct ht_buf *b, uint64_t ino)
{
    put_inode(b, ino, S_IFDIR, false);
    put_inode(b, ino + 1, S_IFREG, false);
    put_entry(b, ino, ino + 1, S_IFREG, "kept");
}

PUT(nameless_directory, nameless_directory_of(b, NEW_INO))

/* Names that fill half of the log. */
static void many_long_names(const struct damage_ids *ids, struct ht_buf *b)
{
    char name[HT_NAME_BYTES_MAX + 1];

    put_inode(b, NEW_INO, S_IFREG, false);
    for (unsigned i = 0; b->len < HT_LOG_BYTES_MIN / 2; i++) {
        snprintf(name, sizeof(name), "%0*u", HT_NAME_BYTES_MAX, i);
        put_entry(b, HT_NS_ROOT_INO, NEW_INO, S_IFREG, name);
    }
}

/* Needs a log that is larger than the sample's. */
static void too_many_names(struct harness *k, const struct damage_ids *ids)
{
    struct ht_buf b = HT_BUF_INIT;
    char name[16];

    harness_free(k);
    harness_format(k, 1, 512 << 20, 4096);
    put_inode(&b, HT_NS_ROOT_INO, S_IFDIR, false);
    put_inode(&b, NEW_INO, S_IFREG, false);
    for (unsigned i = 0; i <= HT_LINKS_MAX; i++) {
        snprintf(name, sizeof(name), "n%u", i);
        put_entry(&b, HT_NS_ROOT_INO, NEW_INO, S_IFREG, name);
    }
    damage_append(k, &b);
    ht_buf_free(&b);
}

/* ----------------------------------------------------------------- optimizer */

/* state: object of its one state, or 0. */
static void put_parameter(struct ht_buf *b, uint64_t oid, uint64_t root, uint64_t state)
{
    size_t mark = ht_record_begin(b, REC_OPT_PARAM);

    ht_buf_put_u64(b, oid);
    ht_buf_put_u64(b, root);
    ht_buf_put_u8(b, HT_DTYPE_F32);
    ht_buf_put_u8(b, 0);
    ht_buf_put_u16(b, state != 0);
    ht_buf_put_u32(b, HT_CHUNK_BYTES);
    ht_buf_put_u64(b, 10);
    ht_buf_put_u64(b, 1);
    if (state != 0) {
        ht_buf_put_u64(b, KIND_EXP_AVG);
        ht_buf_put_u64(b, state);
    }
    ht_record_end(b, mark);
}

PUT(parameter_of_no_root, put_parameter(b, NEW_INO, NEW_INO + 1, 0))
PUT(parameter_without_file, put_parameter(b, NEW_INO, ids->model, 0))
PUT(wrong_state, put_parameter(b, ids->w, ids->model, ids->small))

static void put_logged_step(struct ht_buf *b, uint64_t root, uint64_t step, uint64_t oid)
{
    size_t mark = ht_record_begin(b, HT_REC_OPT_FIRST + 4);

    ht_buf_put_u64(b, root);
    ht_buf_put_u64(b, step);
    ht_buf_put_u64(b, oid);
    ht_buf_put_u64(b, 0);
    ht_buf_put_u64(b, sizeof(struct ht_disk_redo));
    ht_record_end(b, mark);
}

/* The model has no logged step; this one would be far ahead, and without gradients. */
PUT(wrong_logged_step, put_logged_step(b, ids->model, 99, NEW_INO))

/* The next step, if its object were no parameter. */
PUT(logged_step_of_parameter, put_logged_step(b, ids->model, 3, ids->w))

static void put_config(struct ht_buf *b, uint64_t root, const char *config)
{
    put_record(b,
               &(struct ht_ns_record){.type = HT_REC_NS_XATTR,
                                      .ino = root,
                                      .name = "user.hitrain.optimizer",
                                      .name_len = 22,
                                      .value = config,
                                      .value_len = (uint32_t)strlen(config)});
}

PUT(bad_config, put_config(b, ids->model, "adamw lr=fast"))

/* ---------------------------------------------------------------- references */

static void put_chunk(struct ht_buf *b, uint64_t oid, const struct ht_ref_place *p, uint8_t codec)
{
    log_put_chunk(b,
                  &(struct log_chunk){.oid = oid,
                                      .generation = 77,
                                      .stored = p->stored,
                                      .visible = p->visible,
                                      .checksum = p->checksum,
                                      .block = p->block,
                                      .codec = codec});
}

void damage_put_chunk(struct ht_buf *b, uint64_t oid, const struct ht_ref_place *p)
{
    put_chunk(b, oid, p, HT_CODEC_RAW);
}

static void put_object(struct ht_buf *b, uint64_t oid, uint64_t size)
{
    log_put_object(b, &(struct log_object){.oid = oid, .size = size, .chunk_bytes = HT_SMALL_CHUNK_BYTES});
}

PUT(undescribed, damage_put_chunk(b, NEW_INO, &ids->of_small))

static void orphan(const struct damage_ids *ids, struct ht_buf *b)
{
    put_object(b, NEW_INO, 10);
    damage_put_chunk(b, NEW_INO, &ids->of_small);
}

/* The names that it would get are taken, and so are two that look like lost+found. */
static void orphan_crowded_out(const struct damage_ids *ids, struct ht_buf *b)
{
    const uint64_t file = NEW_INO + 1, model = NEW_INO + 2, folder = NEW_INO + 3;

    orphan(ids, b);
    put_inode(b, file, S_IFREG, false);
    put_entry(b, HT_NS_ROOT_INO, file, S_IFREG, "lost+found");
    put_inode(b, model, S_IFDIR, true);
    put_config(b, model, "sgd lr=1");
    put_entry(b, HT_NS_ROOT_INO, model, S_IFDIR, "lost+found.1");
    put_inode(b, folder, S_IFDIR, false);
    put_entry(b, HT_NS_ROOT_INO, folder, S_IFDIR, "lost+found.2");
    put_entry(b, folder, file, S_IFREG, "#5000");
}

/* Nothing is outside of the model: lost+found is in it. */
static void orphan_in_a_model(const struct damage_ids *ids, struct ht_buf *b)
{
    orphan(ids, b);
    nameless_directory_of(b, NEW_INO + 1);
    put_inode(b, HT_NS_ROOT_INO, S_IFDIR, true);
    put_config(b, HT_NS_ROOT_INO, "sgd lr=1");
}

/* Its number is a directory's: it can be no file. */
static void orphan_directory(const struct damage_ids *ids, struct ht_buf *b)
{
    put_object(b, ids->below, 10);
    damage_put_chunk(b, ids->below, &ids->of_small);
}

static void move_small(const struct damage_ids *ids, struct ht_buf *b, uint64_t block)
{
    struct ht_ref_place p = ids->of_small;

    p.block = block;
    damage_put_chunk(b, ids->small, &p);
}

PUT(outside, move_small(ids, b, 1u << 30))
PUT(on_superblock, move_small(ids, b, HT_SUPER_BLOCK_1))
PUT(on_log, move_small(ids, b, HT_MIB / HT_BLOCK_BYTES + 1))

static void too_large(const struct damage_ids *ids, struct ht_buf *b)
{
    const struct ht_ref_place p = {FREE_BLOCK, 1, 2 * HT_SMALL_CHUNK_BYTES, 10};

    damage_put_chunk(b, ids->small, &p);
}

PUT(on_another, move_small(ids, b, ids->of_big.block + 1))

/* Both have the right checksum: the bytes of one are a part of the other's. */
static void within_another(struct harness *k, const struct damage_ids *ids)
{
    struct ht_ref_place p = {ids->of_big.block + 1, 0, HT_BLOCK_BYTES, 15};
    struct ht_buf b = HT_BUF_INIT;

    p.checksum = ht_hash64(block_at(k, p.block), HT_BLOCK_BYTES, super_of(k, 0).salt);
    damage_put_chunk(&b, ids->small, &p);
    damage_append(k, &b);
    ht_buf_free(&b);
}

/* The small file has a compressed chunk; bad: its frame has another byte, and the right checksum. */
static void compressed(struct harness *k, const struct damage_ids *ids, bool bad)
{
    struct ht_ref_place p = {.block = FREE_BLOCK, .visible = ids->of_small.visible};
    static uint8_t zeros[2 * HT_BLOCK_BYTES];
    uint8_t *frame = block_at(k, p.block);
    struct ht_buf b = HT_BUF_INIT;
    struct ht_encoder *e;

    ck_assert_int_eq(ht_encoder_new(&e), 0);
    int len = ht_codec_encode(e, zeros, sizeof(zeros), frame);
    ck_assert_int_gt(len, 0);
    frame[0] += bad;
    p.stored = (uint32_t)len;
    p.checksum = ht_hash64(frame, p.stored, super_of(k, 0).salt);
    put_chunk(&b, ids->small, &p, HT_CODEC_PLANES);
    damage_append(k, &b);
    ht_buf_free(&b);
    ht_encoder_free(e);
}

HARM(compressed_unmarked, compressed(k, ids, false))

static void bad_compressed(struct harness *k, const struct damage_ids *ids)
{
    struct ht_super sb = super_of(k, 0);

    sb.feat_refuse |= HT_FEAT_REFUSE_PLANES;
    ck_assert_uint_eq(ht_super_write(&sb, k->dev, k->dev_count, NULL), 0);
    compressed(k, ids, true);
}

/* -------------------------------------------------------------------- random */

static uint64_t any_id(uint64_t *rnd)
{
    return rnd_below(rnd, 8) == 0 ? NEW_INO + rnd_below(rnd, 3) : 1 + rnd_below(rnd, 24);
}

static void any_name_record(struct ht_buf *b, uint64_t *rnd)
{
    static const uint16_t types[] = {S_IFREG, S_IFDIR, S_IFLNK, S_IFREG};
    char name[2] = {(char)('a' + rnd_below(rnd, 4)), '\0'};
    uint16_t type = types[rnd_below(rnd, HT_ARRAY_SIZE(types))];
    struct ht_ns_record r = {.type = (uint16_t)(HT_REC_NS_FIRST + rnd_below(rnd, 7)),
                             .ino = any_id(rnd),
                             .parent = any_id(rnd),
                             .attr = {.mode = type | 0644},
                             .model_root = type == S_IFDIR && rnd_below(rnd, 4) == 0,
                             .entry_type = type,
                             .name = name,
                             .name_len = 1,
                             .value = name,
                             .value_len = 1};

    put_record(b, &r);
}

static void any_store_record(const struct damage_ids *ids, struct ht_buf *b, uint64_t *rnd)
{
    const struct ht_ref_place places[] = {ids->of_small, ids->of_big, {FREE_BLOCK, 1, HT_BLOCK_BYTES, 9}};
    size_t mark;

    switch (rnd_below(rnd, 5)) {
    case 0:
        put_object(b, any_id(rnd), rnd_below(rnd, 100000));
        break;
    case 3:
        put_logged_step(b, rnd_below(rnd, 2) ? ids->model : any_id(rnd), rnd_below(rnd, 6), any_id(rnd));
        break;
    case 1:
        damage_put_chunk(b, any_id(rnd), &places[rnd_below(rnd, HT_ARRAY_SIZE(places))]);
        break;
    case 2:
        put_parameter(b, any_id(rnd), any_id(rnd), rnd_below(rnd, 2) ? any_id(rnd) : 0);
        break;
    default: /* the object, or of the optimizer a root or a parameter, is deleted */
        mark = ht_record_begin(
            b, (uint16_t[]){HT_REC_OBJECT_DEL, HT_REC_OPT_FIRST + 1, HT_REC_OPT_FIRST + 3}[rnd_below(rnd, 3)]);
        ht_buf_put_u64(b, any_id(rnd));
        ht_record_end(b, mark);
        break;
    }
}

void damage_random_records(const struct damage_ids *ids, struct ht_buf *records, uint64_t *rnd)
{
    for (uint64_t n = 1 + rnd_below(rnd, 12); n > 0; n--)
        if (rnd_below(rnd, 3) == 0)
            any_store_record(ids, records, rnd);
        else
            any_name_record(records, rnd);
}

/* ------------------------------------------------------------------- content */

HARM(bad_bytes, block_at(k, ids->of_sparse.block)[5] ^= 1)
HARM(bad_shared_bytes, block_at(k, ids->of_big.block)[70] ^= 1)

/* The first logged step of the model, and a chunk of its parameter. */
struct logged {
    struct harness *k;
    uint64_t w, oid, block, w_block;
};

static int find_logged(void *ctx, const struct ht_chunk_info *info)
{
    struct logged *l = ctx;
    uint64_t root, step;

    if (ht_optim_redo_owner(l->k->optim, info->oid, &root, &step) == 0 && step == 4) {
        l->oid = info->oid;
        l->block = info->extents[0].block;
    } else if (info->oid == l->w) {
        l->w_block = info->extents[0].block;
    }
    return 0;
}

/* Three steps more, of which two are logged; the store stays open. ranges: of elements have numbers of their own. */
static struct logged begin_logged(struct harness *k, const struct damage_ids *ids, bool sparse, bool ranges)
{
    const struct harness_param w_param = {"w", "f32", 700};
    struct logged l = {.k = k, .w = ids->w};

    ck_assert_int_eq(harness_open(k, 1), 0);
    harness_set_word(k, ids->model, "user.hitrain.optimizer", "adamw lr=0.01 redo=on durable_every=100");
    if (ranges)
        harness_set_word(k, ids->w, "user.hitrain.optimizer", "0:3 lr=1 5:9 frozen=1");
    for (uint64_t step = 3; step <= 5; step++) {
        ck_assert_int_eq(ht_optim_wait(k->optim, ids->model, 0), 0);
        if (step == 3) /* written, so that this step is a full one */
            ck_assert_int_eq(harness_write(k, ids->w, 0, "\0\0\0", 4), 0);
        (sparse ? harness_sparse_gradient : harness_gradient)(k, ids->model, &w_param, step);
        ck_assert_int_eq(ht_optim_commit(k->optim, ids->model), 0);
    }
    ck_assert_int_eq(ht_store_walk(k->store, find_logged, &l), 0);
    ck_assert(l.block && l.w_block);
    return l;
}

/* Then a crash. */
static struct logged crash_logged(struct harness *k, const struct damage_ids *ids, bool sparse, bool ranges)
{
    struct logged l = begin_logged(k, ids, sparse, ranges);

    ck_assert_int_eq(harness_close(k, false), 0);
    return l;
}

/* Two bytes in the object of step 4 are others; the checksum is right. Then a crash. */
static void spoil(struct harness *k, const struct logged *l, uint64_t at, const char *bytes)
{
    struct ht_obj *obj = ht_obj_get(k->store, l->oid);

    ck_assert(ht_obj_write(obj, at, bytes, 2) == 2 && !ht_obj_sync(obj));
    ht_obj_put(obj);
    ck_assert_int_eq(harness_close(k, false), 0);
}

/* Its first element lies far beyond the end. */
static void bad_sparse_gradient(struct harness *k, const struct damage_ids *ids)
{
    struct logged l = begin_logged(k, ids, true, false);

    spoil(k, &l, 0, "\xff\xff");
}

void damage_clear_feature(struct harness *k, uint64_t bit)
{
    struct ht_super sb = super_of(k, 0);

    ck_assert(sb.feat_refuse & bit);
    sb.feat_refuse &= ~bit;
    ck_assert_uint_eq(ht_super_write(&sb, k->dev, k->dev_count, NULL), 0);
}

static void sparse_unmarked(struct harness *k, const struct damage_ids *ids)
{
    (void)crash_logged(k, ids, true, false);
    damage_clear_feature(k, HT_FEAT_REFUSE_SPARSE);
}

static void sections_unmarked(struct harness *k, const struct damage_ids *ids)
{
    (void)crash_logged(k, ids, false, true);
    damage_clear_feature(k, HT_FEAT_REFUSE_SECTIONS);
}

/* The first range of elements ends after the last element. 700 gradients of f32 are before the summary. */
static void bad_section(struct harness *k, const struct damage_ids *ids)
{
    struct logged l = begin_logged(k, ids, false, true);
    uint64_t param = 2800 + sizeof(struct ht_disk_redo), section = param + sizeof(struct ht_disk_redo_param);

    spoil(k, &l, section + offsetof(struct ht_disk_redo_section, end), "\xbd\x02");
}

/* A step is kept. */
static void kept_unmarked(struct harness *k, const struct damage_ids *ids)
{
    const struct harness_param w_param = {"w", "f32", 700};

    ck_assert_int_eq(harness_open(k, 1), 0);
    harness_set_word(k, ids->model, "user.hitrain.optimizer", "adamw lr=0.01 retain=1");
    harness_gradient(k, ids->model, &w_param, 3);
    ck_assert_int_eq(ht_optim_commit(k->optim, ids->model), 0);
    ck_assert_int_eq(harness_close(k, true), 0);
    damage_clear_feature(k, HT_FEAT_REFUSE_KEPT);
}

static void lost_unmarked(struct harness *k, const struct damage_ids *ids)
{
    ck_assert_int_eq(harness_open(k, 1), 0);
    ck_assert_int_eq(ht_store_lose_chunk(k->store, ids->small, 0), 0);
    ck_assert_int_eq(harness_close(k, true), 0);
    damage_clear_feature(k, HT_FEAT_REFUSE_LOST);
}

static void logged_unmarked(struct harness *k, const struct damage_ids *ids)
{
    (void)crash_logged(k, ids, false, false);
    damage_clear_feature(k, HT_FEAT_REFUSE_REDO);
}

static void bad_logged_gradient(struct harness *k, const struct damage_ids *ids)
{
    struct logged l = crash_logged(k, ids, false, false);

    block_at(k, l.block)[5] ^= 1;
}

/* Gradients in the place of the summary. */
static void bad_logged_summary(struct harness *k, const struct damage_ids *ids)
{
    struct logged l = crash_logged(k, ids, false, false);
    struct ht_buf b = HT_BUF_INIT;
    size_t mark = ht_record_begin(&b, HT_REC_OPT_FIRST + 5);

    ht_buf_put_u64(&b, ids->model);
    ht_record_end(&b, mark);
    put_logged_step(&b, ids->model, 4, l.oid);
    damage_append(k, &b);
    ht_buf_free(&b);
}

/* The steps after the last full one begin with this content. */
static void bad_content_of_logged(struct harness *k, const struct damage_ids *ids)
{
    struct logged l = crash_logged(k, ids, false, false);

    block_at(k, l.w_block)[5] ^= 1;
}

/* The same, with a place that a repair with -p marks lost. */
static void outside_content_of_logged(struct harness *k, const struct damage_ids *ids)
{
    struct ht_buf b = HT_BUF_INIT;

    (void)crash_logged(k, ids, false, false);
    damage_put_chunk(&b, ids->w, &(struct ht_ref_place){1u << 30, 1, 2800, 9});
    damage_append(k, &b);
    ht_buf_free(&b);
}

const struct damage damages[] = {
    {"SB-READ", .reading_fails = true, .alone = true},
    {"SB-MAGIC", .harm = no_magic},
    {"SB-CSUM", .harm = bad_checksum},
    {"SB-VERSION", .harm = other_version},
    {"SB-FIELD", .harm = bad_field},
    {"SB-OTHER", .harm = other_store},
    {"SB-NONE", .harm = no_super_of_one, .devices = 2, .alone = true},
    {"SB-NONE-alone", .harm = no_super_at_all, .stays = true, .alone = true},
    {"SB-SHORT", .harm = truncated, .stays = true, .alone = true},
    {"SB-FEATURE", .harm = unknown_feature, .stays = true, .alone = true},
    {"LOG-FRAME", .harm = bad_frame},
    {"LOG-FRAME-each", .harm = bad_frame_in_each},
    {"LOG-READ", .devices = 2, .reading_fails = true, .alone = true},
    {"LOG-ALL", .harm = bad_frame_in_both},
    {"LOG-ALL-first", .harm = bad_first_frame, .stays = true, .alone = true},
    {"LOG-FORK", .harm = mounted_apart, .devices = 2, .alone = true},
    {"LOG-TYPE", .put = unknown_record, .stays = true, .alone = true},
    {"LOG-TYPE-names", .put = unknown_record_of_names, .stays = true, .alone = true},
    {"LOG-RECORD", .put = cut_record},
    {"LOG-FULL", .put = many_long_names, .stays = true, .alone = true},
    {"LOG-MEMORY", .harm = hostile_harm, .stays = true, .alone = true},
    {"NS-ROOT", .put = no_root_dir},
    {"NS-PARENT", .put = in_no_directory},
    {"NS-DANGLING", .put = dangling},
    {"NS-DIRECTORY-NAMES", .put = second_directory_name},
    {"NS-LINKS", .harm = too_many_names, .alone = true},
    {"NS-ATTRIBUTES", .put = attributes_of_nothing},
    {"NS-TARGET", .put = no_target},
    {"NS-NESTED-ROOT", .put = nested_root},
    {"NS-LINK-ACROSS-ROOT", .put = link_across_root},
    {"NS-UNREACHABLE", .put = below_itself},
    {"NS-UNREACHABLE-nameless", .put = nameless_directory, .alone = true}, /* NS-NESTED-ROOT gives it a name */
    {"NS-KEPT", .put = kept_nowhere},
    {"NS-KEPT-directory", .put = kept_unknown, .alone = true}, /* with NS-KEPT it makes sense */
    {"OPT-ROOT", .put = optimizer_root},
    {"OPT-ROOT-parameter", .put = parameter_of_no_root},
    {"OPT-PARAM", .put = parameter_without_file},
    {"OPT-STATE", .put = wrong_state},
    {"OPT-CONFIG", .put = bad_config},
    {"OPT-REDO", .put = wrong_logged_step},
    {"OPT-REDO-parameter", .put = logged_step_of_parameter},
    {"REF-OBJECT", .put = undescribed},
    {"REF-RANGE", .put = outside},
    {"REF-META", .put = on_superblock},
    {"REF-META-log", .put = on_log},
    {"REF-SIZE", .put = too_large},
    {"REF-VAULT", .put = damage_in_no_vault, .alone = true},
    {"REF-OVERLAP", .put = on_another},
    {"REF-OVERLAP-both", .harm = within_another, .alone = true},
    {"REF-ORPHAN", .put = orphan},
    {"REF-ORPHAN-crowded", .put = orphan_crowded_out, .alone = true},
    {"REF-ORPHAN-model", .put = orphan_in_a_model, .alone = true},
    {"REF-NUMBER", .put = orphan_directory},
    {"REF-CODEC", .harm = compressed_unmarked, .alone = true},
    {"REF-CODEC-cold", .harm = damage_cold_unmarked, .alone = true},
    {"DATA-READ", .reading_fails = true, .alone = true},
    {"DATA-CSUM", .harm = bad_bytes},
    {"DATA-CSUM-shared", .harm = bad_shared_bytes},
    {"DATA-FRAME", .harm = bad_compressed, .alone = true},
    {"NS-COLD", .harm = damage_cold_unnamed, .alone = true},
    {"DATA-VAULT", .harm = damage_bad_in_vault, .alone = true, .vault = true},
    {"DATA-VAULT-gone", .harm = damage_gone_from_vault, .alone = true, .vault = true},
    {"DATA-REDO", .harm = bad_logged_gradient, .alone = true},
    {"OPT-REDO-summary", .harm = bad_logged_summary, .alone = true},
    {"OPT-REDO-sparse", .harm = bad_sparse_gradient, .alone = true},
    {"OPT-REDO-section", .harm = bad_section, .alone = true},
    {"OPT-FEATURE", .harm = sparse_unmarked, .alone = true},
    {"OPT-REDO-phases", .harm = damage_bad_phases, .alone = true},
    {"OPT-FEATURE-sections", .harm = sections_unmarked, .alone = true},
    {"OPT-FEATURE-phases", .harm = damage_phases_unmarked, .alone = true},
    {"OPT-FEATURE-steps", .harm = logged_unmarked, .alone = true},
    {"OPT-FEATURE-kept", .harm = kept_unmarked, .alone = true},
    {"OPT-FEATURE-forms", .harm = damage_short_state_unmarked, .alone = true},
    {"OPT-STATE-VALUE", .harm = damage_bad_scale, .alone = true},
    {"REF-CODEC-lost", .harm = lost_unmarked, .alone = true},
    {"OPT-REDO-content", .harm = bad_content_of_logged, .alone = true},
    {"OPT-REDO-outside", .harm = outside_content_of_logged, .alone = true},
};
const unsigned damage_count = HT_ARRAY_SIZE(damages);
