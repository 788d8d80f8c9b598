/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The passes of hitrain-fsck on a store in memory: for cases that a file cannot produce, such as read errors, and
 * references that no program would write.
 */
#include <sys/mman.h>
#include "mount-helpers/fsck/fsck.h"
#include "tests/support/dev.h"
#include "tests/support/log_records.h"
#include "tests/support/suite.h"
#include "tiering/sys/mem.h"

#define DEVICE_BYTES (64 * HT_MIB)

static struct ht_dev *dev;
static struct ht_store *store;

/* ------------------------------------------------------------------ the store */

static void setup(void)
{
    struct ht_format_opts format = {.label = "ram"};
    struct ht_store_opts opts = {
        .dram_bytes = 8 * HT_MIB, .staging_bytes = 24 * HT_MIB, .numa_node = HT_NUMA_OFF, .no_threads = true};
    struct ht_super sb;

    ck_assert_int_eq(dev_open_ram(DEVICE_BYTES, 4096, &dev), 0);
    ck_assert_int_eq(ht_super_format(&dev, 1, &format, &sb), 0);
    ck_assert_int_eq(ht_store_new(&dev, 1, &opts, &store), 0);
    ck_assert_int_eq(ht_store_mount(store), 0);
}

static void teardown(void)
{
    if (store)
        ht_store_close(store);
    store = NULL;
    ht_dev_close(dev);
}

static uint64_t make_object(size_t bytes)
{
    struct ht_obj_attr attr = {.oid = ht_store_new_id(store), .chunk_bytes = HT_CHUNK_BYTES};
    struct ht_obj *obj;
    uint8_t *data = test_alloc(bytes);

    for (size_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(i * 7 + i / 4096);
    ck_assert_int_eq(ht_obj_create(store, &attr, &obj), 0);
    ck_assert_int_eq(ht_obj_write(obj, 0, data, bytes), (ssize_t)bytes);
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    ht_obj_put(obj);
    return attr.oid;
}

/* A reference of one block that nothing checks before it is in the log. */
static void put_reference(uint64_t oid, uint64_t index, uint64_t block)
{
    struct ht_tx *tx;
    uint64_t lsn;

    ck_assert_int_eq(ht_tx_begin(store, 256, &tx), 0);
    log_put_chunk(ht_tx_records(tx),
                  &(struct log_chunk){.oid = oid,
                                      .index = index,
                                      .generation = 1,
                                      .stored = HT_BLOCK_BYTES,
                                      .visible = HT_BLOCK_BYTES,
                                      .checksum = 0x1234,
                                      .block = block,
                                      .codec = HT_CODEC_RAW});
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(store, lsn), 0);
}

/* ------------------------------------------------------------------- the check */

static struct ht_fsck f;
static char *text; /* problems, as JSON */
static size_t text_len;

/* The store ends, as in a crash. */
static void begin_run(void)
{
    ht_store_close(store);
    store = NULL;
    memset(&f, 0, sizeof(f));
    f.opt.json = true;
    f.devs[0] = dev;
    f.dev_count = 1;
    f.out = stdout;
    ht_json_init(&f.json, open_memstream(&text, &text_len));
    ht_json_array(&f.json, NULL);
    ck_assert_int_eq(ht_fsck_pass_super(&f), 0);
}

static void begin_and_read_log(void)
{
    begin_run();
    ck_assert_int_eq(ht_fsck_pass_log(&f), 0);
    ck_assert_uint_eq(f.problems, 0);
    ck_assert_int_eq(ht_fsck_pass_refs(&f), 0);
}

static void read_all(void)
{
    ck_assert_int_eq(ht_fsck_pass_tensors(&f), 0);
}

static void end_run(void)
{
    ht_json_end(&f.json);
    fclose(f.json.to);
    test_keep(text);
    f.dev_count = 0; /* the device stays the test's */
    ht_fsck_close(&f);
}

static void run(void)
{
    begin_and_read_log();
    read_all();
    end_run();
}

static unsigned count_code(const char *code)
{
    char quoted[64];
    unsigned n = 0;

    snprintf(quoted, sizeof(quoted), "\"code\": \"%s\"", code);
    for (const char *p = text; (p = strstr(p, quoted)); p++)
        n++;
    return n;
}

static bool says(const char *fmt, unsigned long long n)
{
    char words[128];

    snprintf(words, sizeof(words), fmt, n);
    return strstr(text, words) != NULL;
}

/* ------------------------------------------------------------------------ tests */

TEST(an_object_without_file_and_optimizer_is_an_orphan)
{
    uint64_t oid = make_object(3 * HT_MIB + 5);

    run();
    ck_assert_uint_eq(f.problems, 1);
    ck_assert_uint_eq(count_code("REF-ORPHAN"), 1);
    ck_assert(says("object %llu (4 chunks, 3145733 bytes)", oid));
    ck_assert_uint_eq(f.verified_bytes, 3 * HT_MIB + 5);
}

TEST(an_empty_store_is_clean)
{
    run();
    ck_assert_uint_eq(f.problems, 0);
    ck_assert_uint_eq(f.item_count, 0);
}

TEST(what_cannot_be_read_is_named_and_the_rest_is_verified)
{
    make_object(20 * HT_MIB);
    begin_and_read_log();
    dev_fail(dev, HT_IO_READ, 2, false); /* one request of several chunks: each is read again by itself */
    read_all();
    ck_assert_uint_eq(f.problems, 1); /* the orphan */
    ck_assert_uint_eq(f.verified_bytes, 20 * HT_MIB);
    f.verified_bytes = 0;
    dev_fail(dev, HT_IO_READ, 1, true);
    read_all();
    dev_fail(dev, HT_IO_READ, 0, false);
    end_run();
    ck_assert_uint_eq(f.verified_bytes, 0);
    ck_assert_uint_eq(count_code("DATA-READ"), 20);
    ck_assert(says("chunk 19 (bytes %llu to 20971519)", 19 * HT_MIB));
}

TEST(a_place_that_two_references_claim_is_told_with_both)
{
    uint64_t first = make_object(HT_MIB), second = make_object(HT_MIB), block;

    begin_and_read_log();
    block = f.items[0].block + 3;
    end_run();
    teardown();

    setup();
    ck_assert_uint_eq(make_object(HT_MIB), first);
    ck_assert_uint_eq(make_object(HT_MIB), second);
    put_reference(second, 1, block);
    run();
    ck_assert_uint_eq(count_code("REF-OVERLAP"), 1);
    ck_assert(says("\"offset\": %llu", block * HT_BLOCK_BYTES));
    ck_assert(says("object %llu without an owner, chunk 0", first));
    ck_assert(says("object %llu without an owner, chunk", second));
    ck_assert_uint_ge(count_code("DATA-CSUM"), 1);
}

TEST(a_place_outside_the_device_is_told_and_not_read)
{
    uint64_t oid = make_object(HT_MIB);

    put_reference(oid, 1, DEVICE_BYTES / HT_BLOCK_BYTES + 7);
    run();
    ck_assert_uint_eq(count_code("REF-RANGE"), 1);
    ck_assert_uint_eq(count_code("DATA-READ") + count_code("DATA-CSUM"), 0);
    ck_assert_uint_eq(f.verified_bytes, HT_MIB);
}

TEST(a_place_of_the_stores_own_is_told)
{
    uint64_t oid = make_object(HT_MIB), log_block = ht_store_super(store)->log_offset[1] / HT_BLOCK_BYTES;

    put_reference(oid, 1, HT_SUPER_BLOCK_1);
    put_reference(oid, 2, log_block);
    begin_and_read_log();
    end_run();
    ck_assert_uint_eq(count_code("REF-META"), 2);
    ck_assert(says("is that of a superblock", 0) && says("is that of the log", 0));
}

static unsigned count_lines(const char *p)
{
    unsigned lines = 0;

    for (; *p; p++)
        lines += *p == '\n';
    return lines;
}

/* A line for each problem, up to a bound for each code; the last lines have the sums, and the status counts all. */
TEST(problems_of_one_code_beyond_a_bound_are_summed_up)
{
    enum { MORE = 1234 };

    f.out = open_memstream(&text, &text_len);
    for (unsigned i = 0; i < HT_FSCK_LINES_MAX + MORE; i++)
        (void)ht_fsck_problem(&f, HT_FSCK_DATA_CSUM, NULL, "chunk %u", i);
    (void)ht_fsck_problem(&f, HT_FSCK_REF_ORPHAN, NULL, "another");
    ht_fsck_summary(&f, "store", HT_FSCK_LEFT);
    fclose(f.out);
    ck_assert_uint_eq(f.problems, HT_FSCK_LINES_MAX + MORE + 1);
    ck_assert_uint_eq(count_lines(text), HT_FSCK_LINES_MAX + 3);
    ck_assert_ptr_nonnull(strstr(text, "\nREF-ORPHAN: another\nDATA-CSUM: ... and 1234 more\nstore: 2235 problems"));
}

/* A log may be full of them: the problem has their number. */
TEST(few_malformed_records_have_a_message_each)
{
    enum { RECORDS = 1000, LINES_MAX = 30 };
    int saved = dup(STDERR_FILENO), to = memfd_create("messages", 0);
    static char messages[1 << 20];
    struct ht_tx *tx;
    uint64_t lsn;

    ck_assert_int_eq(ht_tx_begin(store, RECORDS * 16, &tx), 0);
    for (unsigned i = 0; i < RECORDS; i++)
        ht_record_put(ht_tx_records(tx), HT_REC_OBJECT, "\1\0\0\0\0\0\0", 8);
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(store, lsn), 0);
    begin_run();
    dup2(to, STDERR_FILENO);
    ck_assert_int_eq(ht_fsck_pass_log(&f), 0);
    dup2(saved, STDERR_FILENO);
    end_run();
    ck_assert_int_ge(pread(to, messages, sizeof(messages) - 1, 0), 1);
    ck_assert_uint_le(count_lines(messages), LINES_MAX);
    ck_assert(says("%llu records of the log make no sense", RECORDS));
    close(to);
    close(saved);
}

RUN_TESTS("fsck passes", .setup = setup, .teardown = teardown)
