/* SPDX-License-Identifier: Apache-2.0 */
/* Commit, abort and end of a scope: which participants they ask, in which order, and what a crash leaves. */

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/base/buf.h"

enum { SCOPE = 9, BYTES = 3 * MIB };

struct participant {
    const char *name;
    uint64_t value, published; /* its metadata */
    size_t claims;             /* bytes that it announces beyond those of its record */
};

static struct participant names = {.name = "names"}, optimizer = {.name = "optimizer"};
static struct ht_obj *obj;
static uint8_t *first, *second;
static char calls[256];

static void note(const struct participant *p, const char *what, uint64_t scope)
{
    size_t len = strlen(calls);

    snprintf(calls + len, sizeof(calls) - len, "%s %s %llu, ", p->name, what, (unsigned long long)scope);
}

static int replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    struct participant *p = ctx;
    struct ht_reader in = ht_reader_of(payload, len);

    p->value = p->published = ht_get_u64(&in);
    return ht_reader_done(&in) ? 0 : -EUCLEAN;
}

static void put(const struct participant *p, uint64_t value, struct ht_tx *tx)
{
    size_t mark = ht_record_begin(ht_tx_records(tx), p == &names ? HT_REC_NS_FIRST : HT_REC_OPT_FIRST);

    ht_buf_put_u64(ht_tx_records(tx), value);
    ht_record_end(ht_tx_records(tx), mark);
}

static int emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes)
{
    const struct participant *p = ctx;

    put(p, p->published, tx);
    return 0;
}

static size_t pending_bytes(void *ctx, uint64_t scope)
{
    const struct participant *p = ctx;

    return (p->value == p->published ? 0 : 64) + p->claims;
}

/* The objects follow: theirs is not published yet. */
static void publish(void *ctx, uint64_t scope, size_t expected_bytes, struct ht_tx *tx)
{
    struct participant *p = ctx;

    note(p, "publish", scope);
    ck_assert(!scope || obj_stat(obj).unpublished);
    ck_assert_uint_eq(expected_bytes, pending_bytes(p, scope));
    put(p, p->value, tx);
    p->published = p->value;
}

/* The objects follow. */
static void take_back(void *ctx, uint64_t scope)
{
    struct participant *p = ctx;

    note(p, "abort", scope);
    ck_assert(obj_stat(obj).unpublished);
    p->value = p->published;
}

/* The objects follow. */
static void forget(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx)
{
    struct participant *p = ctx;

    note(p, how == HT_SCOPE_DELETED ? "deleted" : "dissolved", scope);
    ck_assert(obj_stat(obj).unpublished);
    put(p, 0, tx);
    p->value = p->published = 0;
}

static void mount(void)
{
    struct ht_store_opts opts = {.dram_bytes = 8 * MIB, .staging_bytes = 16 * MIB, .numa_node = HT_NUMA_OFF};
    struct ht_participant client[] = {
        {HT_REC_NS_FIRST, HT_REC_NS_LAST, &names, replay, NULL, emit, pending_bytes, publish, take_back, forget},
        {HT_REC_OPT_FIRST, HT_REC_OPT_LAST, &optimizer, replay, NULL, emit, pending_bytes, publish, take_back, forget},
    };

    names.value = names.published = optimizer.value = optimizer.published = 0;
    ck_assert_int_eq(ht_store_new(&dev, 1, &opts, &s), 0);
    for (size_t i = 0; i < HT_ARRAY_SIZE(client); i++)
        ck_assert_int_eq(ht_store_register(s, &client[i]), 0);
    ck_assert_int_eq(ht_store_mount(s), 0);
    calls[0] = '\0';
}

static void change(uint64_t value, const uint8_t *bytes)
{
    names.value = value;
    optimizer.value = value * 2;
    put_all(obj, 0, bytes, BYTES);
}

/* One commit with the value 1. */
static void begin(void)
{
    struct ht_format_opts opts = {0};
    struct ht_super sb;

    ck_assert_int_eq(dev_open_ram(64 * MIB, 512, &dev), 0);
    ck_assert_int_eq(ht_super_format(&dev, 1, &opts, &sb), 0);
    mount();
    first = pattern(BYTES, 1);
    second = pattern(BYTES, 2);
    obj = object(HT_CHUNK_BYTES, SCOPE);
    change(1, first);
    publish_scope(SCOPE);
    calls[0] = '\0';
}

static void expect_all(uint64_t value, const uint8_t *bytes)
{
    ck_assert_uint_eq(names.value, value);
    ck_assert_uint_eq(optimizer.value, value * 2);
    expect(obj, 0, bytes, BYTES);
}

static void crash_and_expect(uint64_t value, const uint8_t *bytes)
{
    uint64_t oid = ht_obj_id(obj);

    close_store();
    mount();
    obj = get_object(oid);
    expect_all(value, bytes);
}

TEST(a_commit_asks_names_then_the_optimizer_then_objects)
{
    change(2, second);
    ck_assert_uint_gt(ht_scope_pending_bytes(s, SCOPE), 2 * 64);
    publish_scope(SCOPE);
    ck_assert_str_eq(calls, "names publish 9, optimizer publish 9, ");
    ck_assert_uint_eq(ht_scope_pending_bytes(s, SCOPE), 0);
    crash_and_expect(2, second);
}

TEST(a_crash_before_the_commit_leaves_the_one_before_whole)
{
    change(2, second);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    crash_and_expect(1, first);
}

/* The whole is one transaction: the log counts groups. */
TEST(a_commit_is_one_group_of_the_log)
{
    change(2, second);
    uint64_t before = stats().log.groups;
    publish_scope(SCOPE);
    ck_assert_uint_eq(stats().log.groups, before + 1);
}

TEST(a_commit_that_does_not_fit_asks_no_participant)
{
    uint64_t lsn;

    change(2, second);
    optimizer.claims = (size_t)stats().log.log_bytes;
    ck_assert_int_eq(ht_scope_commit(s, SCOPE, &lsn), -ENOSPC);
    ck_assert_str_eq(calls, "");
    ck_assert(!ht_store_failed(s));
    optimizer.claims = 0;
    crash_and_expect(1, first);
}

TEST(an_abort_asks_names_then_the_optimizer_then_objects)
{
    change(2, second);
    uint64_t before = stats().log.groups;
    ck_assert_int_eq(ht_scope_abort(s, SCOPE), 0);
    ck_assert_str_eq(calls, "names abort 9, optimizer abort 9, ");
    ck_assert_uint_eq(stats().log.groups, before);
    expect_all(1, first);
    crash_and_expect(1, first);
}

TEST_LOOP(the_end_of_a_scope_asks_names_then_the_optimizer_then_objects, 2)
{
    static const char *const said[] = {"names dissolved 9, optimizer dissolved 9, ",
                                       "names deleted 9, optimizer deleted 9, "};
    struct ht_tx *tx;

    change(2, second);
    ck_assert_int_eq(ht_scope_writeback(s, SCOPE), 0);
    uint64_t before = stats().log.groups;
    ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
    ht_scope_end(s, SCOPE, _i ? HT_SCOPE_DELETED : HT_SCOPE_DISSOLVED, tx);
    ck_assert(!obj_stat(obj).unpublished);
    commit_durably(tx);
    ck_assert_str_eq(calls, said[_i]);
    ck_assert_uint_eq(stats().log.groups, before + 1);
    crash_and_expect(0, second);
}

/* ------------------------------------------------- without derived content */

static void overwrite_pinned(struct ht_obj *o, uint64_t index, const uint8_t *bytes)
{
    struct ht_batch_pin pin = {
        .store = s, .count = 1, .chunk[0] = {.obj = o, .index = index, .mode = HT_BATCH_PIN_OVERWRITE}};

    pin_now(&pin);
    memcpy(pin.chunk[0].data, bytes, pin.chunk[0].len);
    unpin(&pin, 1);
}

TEST(a_commit_of_the_rest_leaves_derived_content_as_it_was)
{
    uint64_t lsn;

    ck_assert_int_eq(ht_obj_set_derived(obj, false), 0);
    ck_assert(ht_obj_is_derived(obj));
    struct ht_obj *other = object(HT_CHUNK_BYTES, SCOPE);
    ck_assert(!ht_obj_is_derived(other));
    uint64_t id = ht_obj_id(other);
    put_all(other, 0, second, BYTES);
    names.value = 2;
    optimizer.value = 4;
    for (unsigned i = 0; i < BYTES / MIB; i++)
        overwrite_pinned(obj, i, second + i * MIB);
    ck_assert_int_eq(ht_scope_commit_rest(s, SCOPE, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(s, lsn), 0);
    ck_assert_str_eq(calls, "names publish 9, optimizer publish 9, ");
    expect(obj, 0, second, BYTES);
    put_object(other);
    crash_and_expect(2, first);
    other = get_object(id);
    expect(other, 0, second, BYTES);
}

/* New, written, cut, or deleted: then everything has to be published. */
TEST_LOOP(a_commit_of_the_rest_refuses_derived_content_that_was_changed, 4)
{
    struct ht_obj *other = NULL;
    struct ht_tx *tx;
    uint64_t lsn;

    ck_assert_int_eq(ht_obj_set_derived(obj, false), 0);
    overwrite_pinned(obj, 0, second);
    ck_assert_int_eq(ht_scope_commit_rest(s, SCOPE, &lsn), 0);
    calls[0] = '\0';
    if (_i == 0) {
        other = object(HT_CHUNK_BYTES, SCOPE);
        put_all(other, 0, second, BYTES);
        ck_assert_int_eq(ht_obj_set_derived(other, false), 0);
    } else if (_i == 1) {
        put_all(obj, 100, second, 4);
    } else if (_i == 2) {
        ck_assert_int_eq(ht_obj_truncate(obj, 100), 0);
    } else {
        ck_assert_int_eq(ht_tx_begin(s, 4096, &tx), 0);
        ht_obj_delete(obj, tx);
        ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    }
    ck_assert_int_eq(ht_scope_commit_rest(s, SCOPE, &lsn), -EBUSY);
    ck_assert_str_eq(calls, "");
    publish_scope(SCOPE);
    if (_i == 1) { /* published whole, it is clean again */
        overwrite_pinned(obj, 0, second);
        ck_assert_int_eq(ht_scope_commit_rest(s, SCOPE, &lsn), 0);
    }
}

TEST(a_commit_outside_of_roots_asks_for_scope_0)
{
    ck_assert_int_eq(ht_store_commit(s), 0);
    ck_assert_str_eq(calls, "names publish 0, optimizer publish 0, ");
}

/* Without a thread for checkpoints, the one that it would wait for, it makes one itself and then gives up. */
TEST_LOOP(a_transaction_without_room_ends, 2)
{
    enum { TRANSACTION = 32 << 10 };

    fresh_with_log(32, HT_LOG_BYTES_MIN, _i);
    uint64_t aside = crowd_log(TRANSACTION);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(s, TRANSACTION, &tx), -ENOSPC);
    ht_store_log_unreserve(s, aside);
    ck_assert_int_eq(ht_tx_begin(s, TRANSACTION, &tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
}

RUN_TESTS("commit", .setup = begin, .teardown = fixture_end)
