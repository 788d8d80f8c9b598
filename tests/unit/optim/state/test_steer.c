/* SPDX-License-Identifier: Apache-2.0 */
/* A step has a number, commands may require one, and one client may claim a root. */
#include "tests/unit/optim/step/fixture.h"

static void one_param(void)
{
    w.threads = 2;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 5000, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

static uint64_t step_open(void)
{
    return fixture_stat(&w).step_open;
}

static struct ht_optim_steer only_if(uint64_t number)
{
    return (struct ht_optim_steer){.conditional = true, .step_open = number};
}

TEST(every_step_has_another_number)
{
    uint64_t seen[8];
    unsigned n = 0;

    ck_assert_uint_eq(step_open(), 0);
    for (unsigned i = 0; i < 6; i++) {
        step_all(&w);
        seen[n] = step_open();
        ck_assert(seen[n] != 0 && seen[n] < 1ull << 63);
        ck_assert_uint_eq(step_open(), seen[n]);
        for (unsigned k = 0; k < n; k++)
            ck_assert_uint_ne(seen[k], seen[n]);
        n++;
        if (i == 4) {
            crash_and_mount();
        } else if (i == 2) {
            ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
            remount();
        } else {
            ck_assert_int_eq(i & 1 ? ht_optim_abort(w.o, ROOT) : ht_optim_step(w.o, ROOT), 0);
        }
        ck_assert_uint_eq(step_open(), 0);
    }
    forget_state(&w.param[0]);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_uint_eq(step_open(), 0);
}

TEST(a_condition_that_does_not_hold_changes_nothing)
{
    int (*const verb[])(struct ht_optim *, uint64_t, struct ht_optim_steer *) = {ht_optim_commit_by, ht_optim_step_by,
                                                                                 ht_optim_abort_by};
    char numbers[64];

    for (unsigned i = 0; i < HT_ARRAY_SIZE(verb); i++) {
        struct ht_optim_steer by = only_if(77);
        struct ht_root_stat before = fixture_stat(&w);
        ck_assert_int_eq(verb[i](w.o, ROOT, &by), -ESTALE);
        ck_assert_ptr_nonnull(strstr(by.why, "if=77: the open step is 0"));
        by = only_if(0);
        ck_assert_int_eq(verb[i](w.o, ROOT, &by), 0);
        step_all(&w);
        uint64_t number = step_open();
        for (unsigned k = 0; k < 3; k++) {
            by = only_if(k == 0 ? 0 : k == 1 ? number - 1 : number + 1);
            ck_assert_int_eq(verb[i](w.o, ROOT, &by), -ESTALE);
            snprintf(numbers, sizeof(numbers), "if=%llu: the open step is %llu", (unsigned long long)by.step_open,
                     (unsigned long long)number);
            ck_assert_str_eq(by.why, numbers);
            ck_assert_str_eq(fixture_stat(&w).error, numbers);
            ck_assert(step_open() == number && fixture_stat(&w).step == before.step);
        }
        ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
        by = only_if(number);
        ck_assert_int_eq(verb[i](w.o, ROOT, &by), 0);
        ck_assert_uint_eq(fixture_stat(&w).step, before.step + (i < 2));
    }
    forget_state(&w.param[0]);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
}

/* ------------------------------------------------------------------- a race */

static _Atomic bool stop;
static _Atomic unsigned aborted;

static void *abort_all_the_time(void *arg)
{
    (void)arg;
    while (!stop) {
        uint64_t number = step_open();
        struct ht_optim_steer by = only_if(number);
        if (number && !ht_optim_abort_by(w.o, ROOT, &by))
            aborted++;
    }
    return NULL;
}

/* Each number is ended by one command: either its commit counts, or its abort took it back. */
TEST(of_a_commit_and_an_abort_of_one_step_one_wins)
{
    pthread_t thread;
    unsigned committed = 0, stale = 0;

    stop = false;
    aborted = 0;
    struct test_param *p = &w.param[0];
    uint8_t *g = random_gradient(&w, p);
    uint64_t before = fixture_stat(&w).step;
    ck_assert_int_eq(pthread_create(&thread, NULL, abort_all_the_time, NULL), 0);
    for (unsigned i = 0; i < 300; i++) {
        struct ht_grad *open = open_grad(&w, p);
        ssize_t n = ht_grad_write(open, 0, g, p->n * 4);
        ck_assert_int_eq(n, (ssize_t)(p->n * 4));
        ck_assert_int_eq(ht_grad_flush(open), 0);
        struct ht_optim_steer by = only_if(step_open());
        ht_grad_release(open);
        if (!by.step_open) /* the abort was quicker than the look */
            continue;
        int rc = ht_optim_commit_by(w.o, ROOT, &by);
        ck_assert(rc == 0 || rc == -ESTALE);
        committed += !rc;
        stale += rc != 0;
        ck_assert_uint_eq(fixture_stat(&w).step, before + committed);
    }
    stop = true;
    pthread_join(thread, NULL);
    ck_assert_uint_le(stale, aborted);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, before + committed);
    forget_state(p);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
}

/* ------------------------------------------------------------------- claims */

static int claim_as(const char *name, const char *takeover, uint64_t *held, char why[HT_OPTIM_ERROR_MAX])
{
    struct ht_optim_claim want = {.held = *held, .name = name, .takeover = takeover, .pid = 4711};
    int rc = ht_optim_claim(w.o, ROOT, &want, why);

    *held = want.held;
    return rc;
}

static struct ht_optim_steer holder(uint64_t claim)
{
    return (struct ht_optim_steer){.claim = claim};
}

TEST(who_has_claimed_a_root_steers_it_alone)
{
    char why[HT_OPTIM_ERROR_MAX];
    uint64_t first = 0, second = 0;
    int pid = 0;

    ck_assert_int_eq(claim_as("trainer", NULL, &first, why), 0);
    ck_assert_str_eq(fixture_stat(&w).claimed_by, "trainer");
    ck_assert_int_eq(fixture_stat(&w).claimed_pid, 4711);
    ck_assert(ht_optim_claimed(w.o, ROOT, &pid, why) && pid == 4711);
    ck_assert_str_eq(why, "claimed by trainer (pid 4711)");
    step_all(&w); /* any client may write gradients */
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    ck_assert_str_eq(fixture_stat(&w).error, "claimed by trainer (pid 4711)");
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), -EBUSY);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), -EBUSY);
    ck_assert_int_eq(claim_as("other", NULL, &second, why), -EBUSY);
    ck_assert_str_eq(why, "claimed by trainer (pid 4711)");
    ck_assert_int_eq(claim_as("other", "somebody", &second, why), -EBUSY);
    ck_assert_uint_eq(second, 0);
    struct ht_optim_steer by = holder(first);
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &by), 0);
    ck_assert_int_eq(claim_as("trainer.2", NULL, &first, why), 0); /* its own, under another name */
    ck_assert_int_eq(ht_optim_unclaim(w.o, ROOT, first), 0);
    ck_assert_int_eq(ht_optim_unclaim(w.o, ROOT, first), -ESTALE);
    ck_assert(!ht_optim_claimed(w.o, ROOT, &pid, why));
    ck_assert_str_eq(fixture_stat(&w).claimed_by, "");
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &by), -ESTALE);
    ck_assert_int_eq(claim_as("other", "trainer", &second, why), 0); /* there is no holder to take it from */
    check_all(&w);
}

/* The verdict is that of the moment when the command runs, and not of an earlier one. */
TEST(drop_and_reset_are_judged_where_they_run)
{
    int (*const verb[])(struct ht_optim *, uint64_t, uint64_t, struct ht_optim_steer *) = {ht_optim_drop,
                                                                                           ht_optim_reset};
    char why[HT_OPTIM_ERROR_MAX];
    uint64_t claim = 0;

    step_once();
    for (unsigned i = 0; i < HT_ARRAY_SIZE(verb); i++) {
        struct ht_optim_steer by = holder(0);
        uint64_t oid = w.param[0].oid;
        ck_assert_int_eq(ht_optim_may_steer(w.o, ROOT, &by), 0);
        ck_assert_int_eq(claim_as("trainer", NULL, &claim, why), 0);
        uint64_t refusals = fixture_stat(&w).refusals;
        ck_assert_int_eq(verb[i](w.o, ROOT, oid, &by), -EBUSY);
        ck_assert_str_eq(by.why, "claimed by trainer (pid 4711)");
        ck_assert_uint_eq(fixture_stat(&w).refusals, refusals); /* by->why alone says so */
        ck_assert_int_eq(verb[i](w.o, ROOT, oid, NULL), -EBUSY);
        ck_assert_uint_eq(fixture_stat(&w).parameters, 1);
        by = holder(claim);
        ck_assert_int_eq(verb[i](w.o, ROOT, oid, &by), 0);
        ck_assert_uint_eq(fixture_stat(&w).parameters, i == 0);
        ck_assert_int_eq(ht_optim_unclaim(w.o, ROOT, claim), 0);
        ck_assert_int_eq(verb[i](w.o, ROOT, oid, &by), -ESTALE);
    }
    forget_state(&w.param[0]);
    check_all(&w);
}

TEST(a_claim_is_taken_over_by_name_only)
{
    char why[HT_OPTIM_ERROR_MAX];
    uint64_t first = 0, second = 0;

    ck_assert_int_eq(claim_as("a", NULL, &first, why), 0);
    ck_assert_int_eq(claim_as("b", "a", &second, why), 0);
    struct ht_optim_steer by = holder(first);
    ck_assert_int_eq(ht_optim_abort_by(w.o, ROOT, &by), -ESTALE);
    ck_assert_ptr_nonnull(strstr(by.why, "now claimed by b (pid 4711)"));
    ck_assert_int_eq(ht_optim_may_steer(w.o, ROOT, &by), -ESTALE);
    ck_assert_int_eq(claim_as("a", NULL, &first, why), -EBUSY);
    ck_assert_int_eq(ht_optim_unclaim(w.o, ROOT, first), -ESTALE);
    by = holder(second);
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &by), 0);
    fixture_unmount(&w); /* a claim then blocks no client, and is not kept */
    fixture_mount(&w);
    ck_assert_str_eq(fixture_stat(&w).claimed_by, "");
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

RUN_TESTS("steer", .setup = one_param, .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
