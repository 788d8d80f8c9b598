/* SPDX-License-Identifier: Apache-2.0 */
/* Logged steps of a model with names: deleted files, clones, rollbacks. fsck finds nothing after each crash. */

#include "tests/support/harness.h"
#include "tests/support/suite.h"
#include "tiering/api/object.h"
#include "tiering/base/fault.h"

enum { DEVICE_BYTES = 64 << 20, PARAMS = 3, THREADS = 2 };

static const struct harness_param params[PARAMS] = {
    {"embedding", "f32", 70000}, {"bias", "f32", 300}, {"head", "bf16", 50001}};

static struct harness k;
static uint64_t root;

static void open_with(const char *config)
{
    memset(&k, 0, sizeof(k));
    harness_format(&k, 1, DEVICE_BYTES, 512);
    ck_assert_int_eq(harness_open(&k, THREADS), 0);
    root = harness_model(&k, "model", params, PARAMS, config);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
}

static void crash(void)
{
    ck_assert_int_eq(harness_close(&k, false), 0);
    ck_assert_uint_eq(harness_fsck(&k), 0);
    ck_assert_int_eq(harness_open(&k, THREADS), 0);
}

static void finish(void)
{
    ht_store_verify(k.store, false);
    ck_assert_int_eq(harness_close(&k, true), 0);
    ck_assert_uint_eq(harness_fsck(&k), 0);
    harness_free(&k);
}

static void take_step(uint64_t model, const struct harness_param *first, unsigned count)
{
    uint64_t n = harness_model_step(&k, model) + 1;
    char text[24];

    for (unsigned i = 0; i < count; i++)
        harness_gradient(&k, model, &first[i], n * 10 + i);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)n);
    harness_put(&k, model, "cursor", text, strlen(text));
    ck_assert_int_eq(ht_optim_commit(k.optim, model), 0);
}

static void take_steps(uint64_t model, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        take_step(model, params, PARAMS);
}

static size_t logged(uint64_t model)
{
    struct ht_root_stat st;

    ck_assert_int_eq(ht_optim_root_stat(k.optim, model, &st), 0);
    return st.logged_steps;
}

static const char logs[] = "adamw lr=0.01 redo=on durable_every=100";

/* Unlinked, or another file renamed over it. The commit publishes that it has no name; the crash closes it. */
TEST_LOOP(an_open_parameter_without_a_name_is_skipped, 2)
{
    struct ht_obj *obj;

    open_with(logs);
    take_steps(root, 3);
    uint64_t bias = harness_find(&k, root, "bias");
    ck_assert_int_eq(ht_ns_open(k.ns, bias, &obj), 0);
    if (_i) {
        harness_put(&k, root, "bias.new", "new", 3);
        ck_assert_int_eq(ht_ns_rename(k.ns, root, "bias.new", root, "bias", 0, NULL), 0);
    } else {
        ck_assert_int_eq(ht_ns_unlink(k.ns, root, "bias"), 0);
    }
    for (unsigned i = 0; i < 2; i++)
        take_step(root, params, 1);
    ck_assert_uint_eq(logged(root), 4);
    uint64_t hash = harness_model_hash(&k, root, params, 1);
    ck_assert(hash);
    ht_ns_close(k.ns, bias); /* the process dies with the mount */
    crash();
    ck_assert_uint_eq(harness_model_step(&k, root), 5);
    ck_assert(harness_model_hash(&k, root, params, 1) == hash);
    take_step(root, params, 1);
    crash();
    ck_assert_uint_eq(harness_model_step(&k, root), 6);
}

/* A parameter of a rule without state has nothing but its record that would say how many steps it has. */
TEST(a_clone_logs_its_own_steps)
{
    struct ht_optim_steer by = {0};
    uint64_t hash[4];

    open_with("sgd lr=0.01");
    take_steps(root, 2);
    ck_assert_int_eq(ht_optim_snapshot_by(k.optim, root, "first", &by), 0);
    for (unsigned again = 0; again < 2; again++) {
        const char *name = again ? "logged" : "plain";
        ck_assert_int_eq(harness_clone(&k, root, "first", HT_NS_ROOT_INO, name, 0), 0);
        uint64_t twin = harness_find(&k, HT_NS_ROOT_INO, name);
        ck_assert(twin);
        harness_set_word(&k, twin, "user.hitrain.optimizer",
                         again ? "sgd lr=0.01 redo=on durable_every=100" : "sgd lr=0.01");
        take_steps(twin, 3);
        ck_assert_uint_eq(logged(twin), again ? 2 : 0); /* the first one makes the clone's own state known */
        hash[2 * again] = harness_model_hash(&k, twin, params, PARAMS);
        crash();
        hash[2 * again + 1] = harness_model_hash(&k, twin, params, PARAMS);
    }
    for (unsigned i = 1; i < 4; i++)
        ck_assert_msg(hash[i] == hash[0], "%u", i);
}

/* A rollback ends the log with a full step; the steps after it are logged again. */
TEST(a_rollback_goes_back_from_logged_steps)
{
    struct ht_optim_steer by = {0};

    open_with(logs);
    take_steps(root, 2);
    ck_assert_int_eq(ht_optim_snapshot_by(k.optim, root, "first", &by), 0);
    uint64_t first = harness_model_hash(&k, root, params, PARAMS);
    take_steps(root, 3);
    uint64_t last = harness_model_hash(&k, root, params, PARAMS);
    ck_assert_uint_eq(logged(root), 3);
    ck_assert_int_eq(harness_rollback(&k, root, "first"), 0);
    ck_assert_uint_eq(logged(root), 0);
    ck_assert(harness_model_hash(&k, root, params, PARAMS) == first);
    take_steps(root, 3);
    ck_assert(harness_model_hash(&k, root, params, PARAMS) == last);
    crash();
    ck_assert_uint_eq(harness_model_step(&k, root), 5);
    ck_assert(harness_model_hash(&k, root, params, PARAMS) == last);
}

static void crash_and_fail_to_replay(void)
{
    struct ht_root_stat st;

    ck_assert_int_eq(harness_close(&k, false), 0);
    ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 3, false);
    ck_assert_int_eq(harness_open(&k, THREADS), 0);
    ht_optim_recovered(k.optim);
    ht_fault_disarm_all();
    ck_assert_int_eq(ht_optim_root_stat(k.optim, root, &st), 0);
    ck_assert_ptr_nonnull(strstr(st.error, "cannot be computed again"));
    ck_assert_int_eq(ht_optim_commit(k.optim, root), -EIO);
}

/* One that fails itself takes nothing away: the steps are computed again then. */
TEST(a_rollback_gives_up_steps_that_cannot_be_computed_again)
{
    struct ht_optim_steer by = {0};

    open_with(logs);
    take_steps(root, 2);
    ck_assert_int_eq(ht_optim_snapshot_by(k.optim, root, "first", &by), 0);
    uint64_t first = harness_model_hash(&k, root, params, PARAMS);
    take_steps(root, 3);
    uint64_t last = harness_model_hash(&k, root, params, PARAMS);
    crash_and_fail_to_replay();
    ht_fault_arm(HT_FAULT_JOURNAL_SPACE, 1, false);
    ck_assert_int_ne(harness_rollback(&k, root, "first"), 0);
    ht_fault_disarm_all();
    ck_assert_uint_eq(logged(root), 3);
    ck_assert(harness_model_hash(&k, root, params, PARAMS) == last);
    crash_and_fail_to_replay();
    ck_assert_int_eq(harness_rollback(&k, root, "first"), 0);
    for (unsigned again = 0; again < 2; again++) {
        ck_assert_uint_eq(logged(root), 0);
        ck_assert_uint_eq(harness_model_step(&k, root), 2);
        ck_assert(harness_model_hash(&k, root, params, PARAMS) == first);
        crash();
    }
    take_steps(root, 3);
    ck_assert(harness_model_hash(&k, root, params, PARAMS) == last);
}

RUN_TESTS("logged", .teardown = finish, .timeout_s = 120)
