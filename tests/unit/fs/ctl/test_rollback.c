/* SPDX-License-Identifier: Apache-2.0 */
/* The command rollback beside other models: they wait for nothing that this one waits for. */
#include "fs/ctl/ctl_priv.h"
#include "optim/state/context.h"
#include "optim/state/root.h"
#include "tests/support/harness.h"
#include "tests/support/suite.h"
#include "tiering/base/activity.h"

enum { DEVICE_BYTES = 64 << 20 };

static const struct harness_param param = {"a", "f32", 1000};
static struct harness k;
static uint64_t root;

static void setup(void)
{
    harness_format(&k, 1, DEVICE_BYTES, 512);
    ck_assert_int_eq(harness_open(&k, 2), 0);
    root = harness_model(&k, "model", &param, 1, "sgd lr=1");
    ck_assert_int_eq(ht_optim_snapshot_by(k.optim, root, "kept", &(struct ht_optim_steer){0}), 0);
}

static void teardown(void)
{
    ck_assert_int_eq(harness_close(&k, true), 0);
    harness_free(&k);
}

static void *roll_back(void *arg)
{
    const struct ht_command cmd = {.id = HT_COMMAND_ROLLBACK, .word = "rollback", .name = "kept"};
    struct ht_seat seat = {0};
    char err[HT_CTL_ERROR_MAX];

    ck_assert_int_eq(ht_command_run(k.ctl, root, root, &seat, &cmd, err), 0);
    return NULL;
}

static bool waits_for_gate(void)
{
    for (unsigned i = 0; i < HT_ACTIVITIES_MAX; i++) {
        const struct ht_activity *a = ht_activity_at(i);
        const char *wait = a ? a->wait : NULL;
        if (wait && !strcmp(wait, "the gate of model root"))
            return true;
    }
    return false;
}

/* As while a step ends whose updates wait for a vault. */
TEST(the_words_of_other_models_do_not_wait)
{
    pthread_t thread;

    lock(k.optim);
    struct ht_root *r = ht_opt_root_find(k.optim, root);
    ck_assert_int_eq(ht_opt_gate_take(r), 0);
    unlock(k.optim);
    ck_assert_int_eq(pthread_create(&thread, NULL, roll_back, NULL), 0);
    while (!waits_for_gate())
        usleep(1000);
    ck_assert_int_eq(ht_mutex_holder(ht_ctl_root_lock(k.ctl)), 0);
    lock(k.optim);
    ht_opt_gate_leave(r);
    unlock(k.optim);
    pthread_join(thread, NULL);
}

RUN_TESTS("rollback", .timeout_s = 60, .setup = setup, .teardown = teardown)
