/* SPDX-License-Identifier: Apache-2.0 */
/* Logs whose records would take memory out of proportion to them: a mount and fsck refuse them before they have it. */

#include "mount-helpers/fsck/fsck.h"
#include "tests/support/hostile.h"
#include "tests/support/suite.h"
#include "tiering/api/stats.h"

enum { RECORDS_BYTES = 28 << 20 };
#define DEVICE_BYTES HT_GIB                                 /* its log has 32 MiB */
#define BOUND_BYTES (64 * HT_MIB + 4 * (DEVICE_BYTES / 32)) /* for all that a log of this size describes */

static struct harness k;

static uint64_t memory_bytes(void)
{
    struct ht_store_stats st;
    struct ht_ns_stats names;

    ht_store_stats(k.store, &st);
    ht_ns_stats(k.ns, &names);
    return st.meta_bytes + names.meta_bytes + ht_optim_meta_bytes(k.optim);
}

TEST_LOOP(a_log_that_needs_too_much_memory_is_refused, HOSTILE_KINDS)
{
    int rc;

    harness_format(&k, 1, DEVICE_BYTES, 4096);
    hostile_append(&k, (unsigned)_i, RECORDS_BYTES);
    ck_assert_int_eq(harness_open(&k, 1), -EOVERFLOW);
    ck_assert_uint_le(memory_bytes(), BOUND_BYTES + HT_MIB);
    (void)harness_close(&k, false);
    ck_assert_uint_eq(harness_problems(&k, &rc), 1);
    ck_assert_int_eq(rc, -EUCLEAN);
    ck_assert_int_eq(harness_repair(&k), HT_FSCK_LEFT);
    harness_free(&k);
}

/* As many bytes as the log reserves. */
static uint64_t reserved_bytes(void)
{
    struct ht_store_stats st;

    ht_store_stats(k.store, &st);
    return st.log.reserved_bytes;
}

static void make_thing(unsigned kind, const char *name)
{
    struct ht_cred cred = {0, 0, 0};
    struct stat st;

    if (kind == 0)
        (void)harness_model(&k, name, NULL, 0, "sgd lr=1 retain=2");
    ck_assert_int_eq(kind ? ht_ns_mkdir(k.ns, HT_NS_ROOT_INO, name, 0755, cred, &st) : 0, 0);
    if (kind == 1)
        harness_set_word(&k, st.st_ino, "user.hitrain.optimizer", "sgd lr=1");
    if (kind)
        ht_ns_forget(k.ns, st.st_ino, 1);
}

/* Models with a kept step, model roots alone, directories. */
TEST_LOOP(programs_write_less_than_the_bound, 3)
{
    enum { COUNT = 300, MEMORY_OF_LOG_BYTE = 13 };
    char name[8];

    harness_format(&k, 1, 64 << 20, 4096);
    ck_assert_int_eq(harness_open(&k, 1), 0);
    uint64_t memory = memory_bytes(), log = reserved_bytes();
    for (unsigned i = 0; i < COUNT; i++) {
        snprintf(name, sizeof(name), "%x", i);
        make_thing((unsigned)_i, name);
        uint64_t root = harness_find(&k, HT_NS_ROOT_INO, name);
        ck_assert_int_eq(_i == 2 ? 0 : ht_optim_commit(k.optim, root), 0);
    }
    ck_assert_int_eq(harness_close(&k, true), 0);
    ck_assert_int_eq(harness_open(&k, 1), 0);
    memory = memory_bytes() - memory;
    log = reserved_bytes() - log;
    ck_assert_uint_le(memory, MEMORY_OF_LOG_BYTE * log);
    ck_assert_int_eq(harness_close(&k, true), 0);
    harness_free(&k);
}

RUN_TESTS("mount-helpers/fsck/memory", .timeout_s = 300)
