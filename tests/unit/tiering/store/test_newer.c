/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store that has more than this program knows: records of a participant that is not registered, records of a later
 * version, features. Such a store can be read, and nothing is ever written to it.
 */
#include "tests/unit/tiering/store/fixture.h"
#include "tiering/base/buf.h"

enum { DEVICE_MIB = 16, TYPE = 1000, VALUE = 77, BYTES = 100000 };

static uint64_t value; /* the participant's metadata */

static int replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    struct ht_reader in = ht_reader_of(payload, len);

    ck_assert_uint_eq(type, TYPE);
    value = ht_get_u64(&in);
    return ht_reader_done(&in) ? 0 : -EUCLEAN;
}

static void put(struct ht_tx *tx, uint16_t type, uint64_t number)
{
    size_t mark = ht_record_begin(ht_tx_records(tx), type);

    ht_buf_put_u64(ht_tx_records(tx), number);
    ht_record_end(ht_tx_records(tx), mark);
}

static int emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes)
{
    put(tx, TYPE, value);
    return 0;
}

/* Returns the mount's result. */
static int open_store(bool registered, bool read_only)
{
    const struct ht_participant client = {.type_first = TYPE, .type_last = TYPE, .replay = replay, .emit = emit};
    struct ht_store_opts opts = {.dram_bytes = 8 * MIB,
                                 .staging_bytes = 16 * MIB,
                                 .numa_node = HT_NUMA_OFF,
                                 .no_threads = true,
                                 .read_only = read_only};

    value = 0;
    ck_assert_int_eq(ht_store_new(&dev, 1, &opts, &s), 0);
    if (registered)
        ck_assert_int_eq(ht_store_register(s, &client), 0);
    return ht_store_mount(s);
}

/* A clean store with an object of one pattern, and with one record of this type. Returns the object's number. */
static uint64_t make_store(uint16_t type)
{
    struct ht_format_opts format = {0};
    struct ht_super sb;
    struct ht_tx *tx;
    uint8_t *bytes = pattern(BYTES, 1);

    ck_assert_int_eq(dev_open_ram(DEVICE_MIB * MIB, 512, &dev), 0);
    ck_assert_int_eq(ht_super_format(&dev, 1, &format, &sb), 0);
    ck_assert_int_eq(open_store(true, false), 0);
    struct ht_obj *o = synced_object(HT_CHUNK_BYTES, 0, bytes, BYTES);
    uint64_t oid = ht_obj_id(o);
    put_object(o);
    ck_assert_int_eq(ht_tx_begin(s, 64, &tx), 0);
    put(tx, type, VALUE);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    unmount_store();
    return oid;
}

/* Refused for writing, readable without, and neither changes a byte. */
static void expect_read_only(uint64_t oid)
{
    uint8_t *before = malloc((size_t)DEVICE_MIB * MIB), *bytes = pattern(BYTES, 1);

    memcpy(before, ht_dev_ram_data(dev), (size_t)DEVICE_MIB * MIB);
    ck_assert_int_eq(open_store(false, false), -EPROTONOSUPPORT);
    unmount_store();
    ck_assert_int_eq(open_store(false, true), 0);
    struct ht_obj *o = get_object(oid);
    expect(o, 0, bytes, BYTES);
    unmount_store();
    ck_assert_int_eq(memcmp(before, ht_dev_ram_data(dev), (size_t)DEVICE_MIB * MIB), 0);
    free(before);
}

TEST(records_of_a_participant_that_is_missing_survive)
{
    uint64_t oid = make_store(TYPE);

    expect_read_only(oid);
    for (unsigned i = 0; i < 2; i++) { /* the second time from the checkpoint */
        ck_assert_int_eq(open_store(true, false), 0);
        ck_assert_uint_eq(value, VALUE);
        ck_assert_uint_eq(ht_store_unknown_records(s).count, 0);
        ck_assert_int_eq(ht_store_checkpoint(s), 0);
        unmount_store();
    }
    ht_dev_close(dev);
}

/* In the numbers of the journal, of the store, of names and of the optimizer, and beyond. */
TEST_LOOP(no_type_of_a_later_version_is_dropped, 5)
{
    static const uint16_t types[] = {HT_REC_CHECKPOINT_END + 1, HT_REC_VAULT + 1, HT_REC_NS_LAST, HT_REC_OPT_LAST,
                                     UINT16_MAX};
    uint64_t oid = make_store(types[_i]);

    expect_read_only(oid);
    ck_assert_int_eq(open_store(false, true), 0);
    ck_assert_uint_eq(ht_store_unknown_records(s).count, 1);
    ck_assert_uint_eq(ht_store_unknown_records(s).type, types[_i]);
    close_store();
    ht_dev_close(dev);
}

TEST(a_feature_that_only_readers_may_ignore_refuses_a_writer)
{
    uint64_t oid = make_store(HT_REC_IDS);
    struct ht_super_report report;
    struct ht_super sb;

    ck_assert_int_eq(ht_super_read(dev, &sb, &report), 0);
    sb.feat_ro = HT_FEAT_RO_KNOWN + 1;
    ck_assert_uint_eq(ht_super_write(&sb, &dev, 1, NULL), 0);
    expect_read_only(oid);
    sb.feat_ro = HT_FEAT_RO_KNOWN;
    sb.feat_ignore = 1;
    ck_assert_uint_eq(ht_super_write(&sb, &dev, 1, NULL), 0);
    ck_assert_int_eq(open_store(false, false), 0);
    done();
}

RUN_TESTS("newer")
