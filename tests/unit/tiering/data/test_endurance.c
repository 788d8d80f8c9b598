/* SPDX-License-Identifier: Apache-2.0 */
/* What a store counts as written: in a day, beside its budget, and for a scope. */

#include "tests/unit/tiering/store/fixture.h"
#include "tiering/base/event.h"

static _Atomic unsigned warnings;
static char text[HT_EVENT_TEXT_BYTES];

static void count_warning(void *ctx, const struct ht_event *e)
{
    (void)ctx;
    if (e->code != HT_EVENT_ENDURANCE)
        return;
    memcpy(text, e->text, sizeof(text));
    warnings++;
}

static void setup(void)
{
    warnings = 0;
    ht_event_set_sink(count_warning, NULL);
}

static void teardown(void)
{
    fixture_end();
    ht_event_set_sink(NULL, NULL);
}

static void write_synced(unsigned mib, uint64_t scope)
{
    struct ht_obj *o = object(HT_CHUNK_BYTES, scope);
    uint8_t *p = pattern(mib * MIB, mib);

    put_all(o, 0, p, mib * MIB);
    if (scope)
        ck_assert_int_eq(ht_scope_writeback(s, scope), 0);
    else
        ck_assert_int_eq(ht_obj_sync(o), 0);
    put_object(o);
}

TEST(all_that_devices_take_counts_for_the_day)
{
    fresh(64, false);
    struct ht_store_stats before = stats();
    ck_assert_uint_eq(before.day_written_bytes, before.device_written_bytes);
    write_synced(4, 0);
    struct ht_store_stats after = stats();
    ck_assert_uint_ge(after.day_written_bytes, before.day_written_bytes + 4 * MIB);
    ck_assert_uint_eq(after.day_written_bytes, after.device_written_bytes); /* log and superblocks, too */
    ck_assert_uint_eq(after.endurance_bytes, 0);
}

TEST(the_warning_names_bytes_and_budget_and_comes_once)
{
    char wanted[64];

    fresh(64, false);
    ht_store_set_endurance(s, 3 * MIB);
    ck_assert_uint_eq(stats().endurance_bytes, 3 * MIB);
    ht_store_watch_devices(s);
    ck_assert_uint_eq(warnings, 0);
    write_synced(4, 0);
    for (unsigned i = 0; i < 3; i++)
        ht_store_watch_devices(s);
    ck_assert_uint_eq(warnings, 1);
    snprintf(wanted, sizeof(wanted), "%llu bytes", (unsigned long long)stats().day_written_bytes);
    ck_assert_ptr_nonnull(strstr(text, wanted));
    snprintf(wanted, sizeof(wanted), "allows %u", 3 * MIB);
    ck_assert_ptr_nonnull(strstr(text, wanted));
    write_synced(4, 0);
    ht_store_watch_devices(s);
    ck_assert_uint_eq(warnings, 1);
    ht_store_set_endurance(s, 0);
    write_synced(4, 0);
    ht_store_watch_devices(s);
    ck_assert_uint_eq(warnings, 1);
}

TEST(a_thread_of_the_store_looks_at_the_budget)
{
    fresh(64, true);
    ht_store_set_endurance(s, MIB);
    write_synced(4, 0);
    for (unsigned i = 0; i < 6000 && warnings == 0; i++)
        usleep(10000);
    ck_assert_uint_eq(warnings, 1);
}

TEST(what_is_written_counts_for_the_scope_of_its_object)
{
    enum { ONE = 100, OTHER = 200 };

    fresh(64, false);
    ck_assert_uint_eq(ht_scope_written_bytes(s, ONE), 0);
    write_synced(2, ONE);
    write_synced(3, OTHER);
    write_synced(4, 0);
    ck_assert_uint_eq(ht_scope_written_bytes(s, ONE), 2 * MIB);
    ck_assert_uint_eq(ht_scope_written_bytes(s, OTHER), 3 * MIB);
    ck_assert_uint_eq(ht_scope_written_bytes(s, 0), 4 * MIB);
    write_synced(1, ONE);
    ck_assert_uint_eq(ht_scope_written_bytes(s, ONE), 3 * MIB);
    ck_assert_uint_eq(ht_scope_written_bytes(s, 300), 0);
}

TEST(each_device_of_the_store_has_its_rates)
{
    struct ht_device_stat st;

    fresh(64, false);
    ht_store_device_stat(s, 0, &st);
    ck_assert(!st.rate[HT_DIRECTION_WRITE].known);
    for (unsigned i = 0; i < 5; i++)
        write_synced(4, 0);
    ht_store_device_stat(s, 0, &st);
    ck_assert(st.rate[HT_DIRECTION_WRITE].known);
    ck_assert_uint_gt(st.rate[HT_DIRECTION_WRITE].bytes_per_s, 0);
}

RUN_TESTS("endurance", .setup = setup, .teardown = teardown, .timeout_s = 60)
