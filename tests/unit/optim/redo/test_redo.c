/* SPDX-License-Identifier: Apache-2.0 */
/* Logged steps: their bits after a crash or an abort, what makes a commit full, and errors in between. */

#include "tests/unit/optim/step/fixture.h"

#include "optim/state/context.h"
#include "optim/state/records.h"
#include "optim/state/redo.h"
#include "optim/state/root.h"
#include "optim/redo/logged.h"
#include "tiering/base/event.h"

static struct ht_root *root_of(void)
{
    lock(w.o);
    struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    unlock(w.o);
    return root;
}

static size_t logged_steps(void)
{
    struct ht_root *root = root_of();

    lock(w.o);
    size_t steps = root->redo.steps;
    unlock(w.o);
    return steps;
}

static void begin(const char *config, unsigned threads)
{
    fixture_begin_mixed(&w, config, threads);
}

/* -------------------------------------------------------------------- bits */

static const struct {
    const char *plain, *redo;
} ways[] = {
    {"adamw lr=1e-2 weight_decay=0.1", "adamw lr=1e-2 weight_decay=0.1 redo=on durable_every=100"},
    {"adam lr=1e-2 maximize=1 grad_scale=8", "adam lr=1e-2 maximize=1 grad_scale=8 redo=on durable_every=3"},
    {"adamw lr=1e-2 max_grad_norm=0.5", "adamw lr=1e-2 max_grad_norm=0.5 redo=on durable_every=100"},
    {"adamw lr=1e-2 skip_nonfinite=1 max_grad_norm=2",
     "adamw lr=1e-2 skip_nonfinite=1 max_grad_norm=2 redo=on durable_every=5"},
    {"sgd lr=1e-2 momentum=0.9 nesterov=1", "sgd lr=1e-2 momentum=0.9 nesterov=1 redo=on durable_every=100"},
    {"sgd lr=1e-2", "sgd lr=1e-2 redo=on durable_every=100"},
    {"lion lr=1e-3", "lion lr=1e-3 redo=on durable_every=100"},
    {"adagrad lr=1e-2", "adagrad lr=1e-2 redo=on durable_every=100"},
    {"adamw lr=1e-2 accumulate=3", "adamw lr=1e-2 accumulate=3 redo=on durable_every=100"},
    {"adamw lr=1e-2 accumulate=2 accumulate_mode=mean max_grad_norm=0.5 grad_scale=8",
     "adamw lr=1e-2 accumulate=2 accumulate_mode=mean max_grad_norm=0.5 grad_scale=8 redo=on durable_every=100"},
    {"sgd lr=1e-2 momentum=0.9 accumulate=2 skip_nonfinite=1",
     "sgd lr=1e-2 momentum=0.9 accumulate=2 skip_nonfinite=1 redo=on durable_every=4"},
};

/* A crash after every number of steps: the model has the bits of an undisturbed run, and goes on with them. */
TEST_LOOP(a_crash_loses_no_step, HT_ARRAY_SIZE(ways))
{
    enum { STEPS = 7 };
    uint64_t hash[STEPS + 1];

    /* The model after each step of a run without logged steps. */
    begin(ways[_i].plain, 2);
    for (unsigned step = 1; step <= STEPS; step++) {
        fixture_train(&w, step, step);
        hash[step] = fixture_hash(&w);
    }
    fixture_close(&w);
    for (unsigned crash = 2 - _i % 2; crash < STEPS; crash += 3) {
        begin(ways[_i].redo, 1 + crash % 2);
        fixture_train(&w, 1, crash);
        ck_assert_uint_eq(fixture_stat(&w).durable_step, crash);
        ck_assert(fixture_hash(&w) == hash[crash]);
        size_t logged = logged_steps();
        crash_and_mount();
        ck_assert_uint_eq(fixture_stat(&w).step, crash);
        ck_assert_uint_eq(fixture_stat(&w).durable_step, crash);
        ck_assert_uint_eq(logged_steps(), logged); /* as if nothing had happened */
        ck_assert(fixture_hash(&w) == hash[crash]);
        fixture_train(&w, crash + 1, STEPS);
        crash_and_mount();
        ck_assert_uint_eq(fixture_stat(&w).step, STEPS);
        ck_assert(fixture_hash(&w) == hash[STEPS]);
        ht_optim_verify(w.o);
        ht_store_verify(w.s, false);
        fixture_close(&w);
    }
}

TEST(steps_are_logged_up_to_a_full_one)
{
    static const size_t logged[] = {0, 1, 2, 3, 0, 1, 2, 3, 0};

    begin("adamw lr=1e-2 redo=on durable_every=4", 2);
    for (unsigned step = 1; step <= 9; step++) { /* with the first one state is made */
        for (unsigned i = 0; i < w.params; i++)
            step_param(&w, &w.param[i]);
        ck_assert_int_eq(step % 2 ? ht_optim_step(w.o, ROOT) : ht_optim_commit(w.o, ROOT), 0);
        ck_assert_uint_eq(fixture_stat(&w).durable_step, step);
        ck_assert_msg(logged_steps() == logged[step - 1], "step %u: %zu", step, logged_steps());
    }
}

/* --------------------------------------------------- what makes a commit full */

static const char logs[] = "adamw lr=1e-2 redo=on durable_every=100";

/* Two steps, of which the second is logged. */
static void two_steps(const char *config)
{
    begin(config, 2);
    for (unsigned step = 1; step <= 2; step++)
        step_once();
    ck_assert_uint_eq(logged_steps(), strstr(config, "redo=on") ? 1 : 0);
}

/* The next step publishes everything, and nothing is lost with a crash. */
static void next_is_full(void)
{
    step_once();
    ck_assert_uint_eq(logged_steps(), 0);
    check_all(&w);
    crash_and_check();
    step_once();
    ck_assert_uint_eq(logged_steps(), 1);
    crash_and_check();
}

TEST(a_written_parameter_makes_the_next_step_full)
{
    float x = 0.25f;

    two_steps(logs);
    struct test_param *p = &w.param[0];
    memcpy(p->p + 400, &x, 4);
    ck_assert_int_eq(ht_obj_write(p->obj, 400, &x, 4), 4);
    next_is_full();
}

/* After the updates of the step, before its commit. */
TEST(a_parameter_that_is_written_during_a_step_makes_it_full)
{
    float x = 0.25f;

    two_steps(logs);
    struct test_param *p = &w.param[0];
    step_all(&w);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    memcpy(p->p + 400, &x, 4);
    ck_assert_int_eq(ht_obj_write(p->obj, 400, &x, 4), 4);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(logged_steps(), 0);
    crash_and_check();
}

TEST(written_state_makes_the_next_step_full)
{
    float x = 0.125f, t = 40;

    two_steps(logs);
    struct test_param *p = &w.param[1];
    struct ht_param_desc desc = fixture_desc(p);
    p->m[7] = x;
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "exp_avg", 28, &x, 4), 4);
    p->t = 40;
    ck_assert_int_eq(ht_optim_state_write(w.o, &desc, "step", 0, &t, 4), 4);
    next_is_full();
}

TEST(a_reset_makes_the_next_step_full)
{
    two_steps(logs);
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, w.param[2].oid, NULL), 0);
    forget_state(&w.param[2]);
    next_is_full();
}

/* A rule without state has no new objects that would say so. */
TEST(a_reset_without_state_makes_the_next_step_full)
{
    two_steps("sgd lr=1e-2 redo=on durable_every=100");
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, w.param[0].oid, NULL), 0);
    forget_state(&w.param[0]);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0); /* without its record */
    ck_assert_uint_eq(logged_steps(), 0);
    next_is_full();
}

/* Whoever did it: the summary says nothing about a count that is not its record's and that of logged steps. */
TEST(a_count_that_does_not_follow_makes_a_step_full)
{
    two_steps(logs);
    struct ht_root *root = root_of();
    lock(w.o);
    ht_list_for_each(pos, &root->params)
        ht_list_entry(pos, struct ht_param, of_root)->cur.t += 3;
    unlock(w.o);
    for (unsigned i = 0; i < w.params; i++)
        w.param[i].t += 3;
    next_is_full();
}

TEST(a_number_that_a_client_set_makes_the_next_step_full)
{
    two_steps(logs);
    ck_assert_int_eq(ht_optim_root_set_step(w.o, ROOT, 70), 0);
    step_once();
    ck_assert_uint_eq(logged_steps(), 0);
    step_once();
    ck_assert_uint_eq(logged_steps(), 1);
    crash_and_mount();
    check_all_at(72);
}

/* The end of logged steps is announced to the log even if the number is that of the full step again. */
TEST(setting_the_number_of_the_full_step_announces_the_end_of_logged_ones)
{
    two_steps(logs);
    size_t before = ht_scope_pending_bytes(w.s, ROOT);
    ck_assert_int_eq(ht_optim_root_set_step(w.o, ROOT, 1), 0);
    ck_assert_uint_eq(ht_scope_pending_bytes(w.s, ROOT), before - HT_OPT_ROOT_RECORD_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(logged_steps(), 0);
    crash_and_mount();
    check_all_at(1);
}

/* There are never more than a mount accepts, also when the step before is counted and not published yet. */
TEST(the_number_of_logged_steps_has_a_limit)
{
    two_steps(logs);
    struct ht_root *root = root_of();
    lock(w.o);
    struct ht_redo *redo = &root->redo, was = *redo;
    uint64_t undurable = root->undurable;
    root->latched = root->config;
    root->latched.durable_every = root->config.durable_every = HT_REDO_STEPS_MAX + 100;
    redo->steps = HT_REDO_STEPS_MAX - 1;
    redo->counted = true;
    root->undurable = HT_REDO_STEPS_MAX;
    ck_assert(ht_opt_redo_may_log(root));
    ht_opt_redo_open(root);
    ck_assert(!redo->wanted);
    redo->steps = HT_REDO_STEPS_MAX;
    root->undurable = HT_REDO_STEPS_MAX + 1;
    ck_assert(!ht_opt_redo_may_log(root));
    redo->counted = false;
    redo->steps = root->undurable = HT_REDO_STEPS_MAX - 1;
    ht_opt_redo_open(root);
    ck_assert(redo->wanted);
    was.aside_bytes = redo->aside_bytes;
    *redo = was;
    root->undurable = undurable;
    root->config.durable_every = 100;
    unlock(w.o);
    step_once();
    crash_and_check();
}

TEST(a_new_parameter_makes_its_first_step_full)
{
    two_steps(logs);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 3000, HT_SMALL_CHUNK_BYTES);
    next_is_full();
}

/* Of one parameter only a part, of another one gradient too few: the sum has what came. _i: with the norm. */
TEST_LOOP(incomplete_sums_are_logged, 2)
{
    static const char *const config[] = {"adamw lr=1e-2 accumulate=3 partial=1",
                                         "adamw lr=1e-2 accumulate=3 partial=1 max_grad_norm=0.5"};
    uint64_t hash[2][5];
    char text[128];

    for (unsigned redo = 0; redo < 2; redo++) {
        snprintf(text, sizeof(text), "%s%s", config[_i], redo ? " redo=on durable_every=100" : "");
        begin(text, 2);
        for (unsigned step = 1; step <= 4; step++) {
            fixture_send_most(&w, 1);
            ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
            for (unsigned pass = 0; pass < 2; pass++)
                fixture_send_pass(&w, 2 + step, pass);
            struct ht_param_desc desc = fixture_desc(&w.param[1]);
            uint8_t some[8000];
            struct ht_grad *g;
            memset(some, 60 + (int)step, sizeof(some));
            ck_assert_int_eq(ht_grad_open(w.o, &desc, &g), 0);
            ck_assert_int_eq(ht_grad_write(g, 131072 - 4000, some, sizeof(some)), sizeof(some));
            close_grad(g);
            ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
            if (redo)
                crash_and_mount();
            ck_assert_uint_eq(fixture_stat(&w).step, 2 * step);
            ck_assert(!redo || step < 3 || logged_steps() > 1);
            hash[redo][step] = fixture_hash(&w);
            ck_assert_msg(!redo || hash[0][step] == hash[1][step], "step %u", 2 * step);
        }
        fixture_close(&w);
    }
}

/* Taken back after its last addition and before the boundary: no replay has it. */
TEST(a_dropped_sum_is_not_replayed)
{
    two_steps("adamw lr=1e-2 skip_nonfinite=1 redo=on durable_every=100");
    struct ht_optim_config sums =
                               fixture_config("adamw lr=1e-2 skip_nonfinite=1 accumulate=2 redo=on durable_every=100"),
                           one = fixture_config(w.config);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &sums), 0);
    uint8_t *g = random_gradient(&w, &w.param[1]);
    write_gradient(&w, &w.param[1], g);
    write_gradient(&w, &w.param[1], g);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    lock(w.o);
    ck_assert_uint_gt(ht_opt_root_find(w.o, ROOT)->redo.used, 0);
    unlock(w.o);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, w.param[1].oid, NULL), 0);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &one), 0);
    step_once();
    ck_assert_uint_eq(logged_steps(), 2);
    crash_and_check();
}

/* _i: with a step open, that is logged already, or with none. */
TEST_LOOP(a_full_commit_leaves_no_logged_steps, 2)
{
    struct ht_optim_steer full = {.full = true};

    two_steps(logs);
    if (_i)
        step_all(&w);
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &full), 0);
    ck_assert_uint_eq(logged_steps(), 0);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 2 + (unsigned)_i);
    crash_and_mount();
    ck_assert_uint_eq(fixture_stat(&w).replay_steps, 0);
    check_all(&w);
    step_once();
    ck_assert_uint_eq(logged_steps(), 1);
}

/* It changes nothing: the next commit logs its step. */
TEST(a_full_commit_that_is_refused_is_forgotten)
{
    struct ht_optim_steer full = {.full = true, .conditional = true, .step_open = 1};

    two_steps(logs);
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &full), -ESTALE);
    step_once();
    ck_assert_uint_eq(logged_steps(), 2);
}

TEST(without_redo_everything_is_published_again)
{
    struct ht_optim_config plain = fixture_config("adamw lr=1e-2");

    two_steps(logs);
    w.config = "adamw lr=1e-2";
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &plain), 0);
    step_all(&w);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert_uint_eq(logged_steps(), 0);
    crash_and_check();
}

/* ------------------------------------------------------------------- errors */

static struct ht_event dropped;

static void note_dropped(void *ctx, const struct ht_event *e)
{
    (void)ctx;
    if (e->code == HT_EVENT_STEP_DROPPED)
        dropped = *e;
}

static int finish_and_note(void)
{
    ht_event_set_sink(note_dropped, NULL);
    int rc = ht_optim_finish(w.o);
    ht_event_set_sink(NULL, NULL);
    return rc;
}

/* The object of a step that was taken back is deleted sooner or later, and never published. */
TEST(an_object_that_cannot_be_deleted_is_not_published)
{
    two_steps("adamw lr=1e-2 skip_nonfinite=1 redo=on durable_every=100");
    struct ht_root *root = root_of();
    send_random(&w.param[1]);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    lock(w.o);
    ck_assert_ptr_nonnull(root->redo.obj);
    uint64_t oid = ht_obj_id(root->redo.obj);
    unlock(w.o);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, w.param[1].oid, NULL), 0);
    ht_fault_arm(HT_FAULT_JOURNAL_SPACE, 1, false);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(ht_fault_passed(HT_FAULT_JOURNAL_SPACE) > 0, 1);
    ht_fault_disarm_all();
    step_once();
    crash_and_mount();
    ck_assert_ptr_null(ht_obj_get(w.s, oid));
    check_all(&w);
}

/* Its size was published alone, which no client can do. */
TEST_LOOP(a_parameter_of_another_size_is_not_computed_again, 2)
{
    static const uint64_t bytes[] = {4000, MIB};

    two_steps(logs);
    ck_assert_int_eq(ht_obj_truncate(w.param[0].obj, bytes[_i]), 0);
    ck_assert_int_eq(ht_obj_sync(w.param[0].obj), 0);
    crash_and_mount();
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_msg(strstr(st.error, "step 2 cannot be computed again") != NULL, "error is \"%s\"", st.error);
}

/* With a step open: the next mount finds the last logged one. */
TEST(an_end_within_a_step_names_the_last_logged_one)
{
    two_steps(logs);
    send_random(&w.param[1]);
    ck_assert_int_eq(finish_and_note(), 0);
    ck_assert_msg(strstr(dropped.text, "the next mount finds step 2") != NULL, "event is \"%s\"", dropped.text);
    crash_and_check();
}

TEST(a_write_error_of_a_logged_gradient_loses_nothing)
{
    two_steps(logs);
    step_all(&w);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ht_fault_arm(HT_FAULT_STORE_WRITE, 1, false);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ht_fault_disarm_all();
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 3);
    crash_and_check();
}

/*
 * Steps that cannot be computed again keep their model from every change, and from readers: the store has the full step
 * for it, no mixture. _i: at the mount, or at an abort after an update.
 */
TEST_LOOP(a_replay_that_fails_lets_nothing_change, 2)
{
    begin(logs, 2);
    step_once();
    uint64_t full = fixture_stored_hash(&w);
    step_once();
    ck_assert_uint_eq(logged_steps(), 1);
    struct test_param *p = &w.param[0];
    struct ht_grad *g = NULL;
    if (_i == 0) {
        fixture_crash(&w);
    } else {
        struct ht_param_desc opened = fixture_desc(p);
        ck_assert_int_eq(ht_grad_open(w.o, &opened, &g), 0);
        fixture_send(&w, 0, 3, 0);
        ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    }
    ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 2, false);
    if (_i == 0)
        fixture_mount(&w);
    else
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), -EIO);
    ht_fault_disarm_all();
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_uint_eq(st.step, 1);
    ck_assert(fixture_stored_hash(&w) == full);
    ck_assert_msg(strstr(st.error, "step 2 cannot be computed again") != NULL, "error is \"%s\"", st.error);
    ck_assert_msg(strstr(st.error, "hitrain-fsck -y") != NULL, "error is \"%s\"", st.error);
    struct ht_param_desc desc = fixture_desc(p);
    struct ht_grad *late;
    float m;
    ck_assert_int_eq(ht_optim_readable(w.o, p->oid, 0, 4, NULL), -EIO);
    ck_assert_int_eq(ht_optim_state_read(w.o, &desc, "exp_avg", 0, &m, 4), -EIO);
    ck_assert_int_eq(ht_grad_open(w.o, &desc, &late), -EIO);
    if (g) { /* it was open before */
        ck_assert_int_eq(ht_grad_write(g, 0, &desc, 4), -EIO);
        ht_grad_release(g);
    }
    ht_optim_root_clear_error(w.o, ROOT);
    struct ht_optim_claim want = {.name = "trainer"};
    char why[HT_OPTIM_ERROR_MAX];
    ck_assert_int_eq(ht_optim_claim(w.o, ROOT, &want, why), -EIO);
    ck_assert_str_eq(fixture_stat(&w).error, st.error); /* each refusal names the same cause */
    ck_assert_uint_gt(fixture_stat(&w).refusals, st.refusals);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EIO);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), -EIO);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), -EIO);
    ck_assert_int_eq(finish_and_note(), 0);
    ck_assert_msg(strstr(dropped.text, "tries again, up to step 2") != NULL, "event is \"%s\"", dropped.text);
    fixture_unmount(&w);
    fixture_mount(&w); /* the next mount can */
    check_all_at(2);
}

/* -------------------------------------------------------------------- abort */

TEST(an_abort_returns_to_the_last_logged_step)
{
    begin(logs, 2);
    for (unsigned step = 1; step <= 6; step++) {
        if (step > 1) { /* not the first, which makes state */
            send_random(&w.param[step % 3]);
            ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
            ck_assert_uint_eq(fixture_stat(&w).step, step - 1);
            ck_assert_uint_eq(fixture_stat(&w).durable_step, step - 1);
            check_all(&w);
        }
        step_once();
        ck_assert_uint_eq(logged_steps(), step - 1);
    }
    crash_and_mount();
    check_all_at(6);
}

/* They have seen the last logged step, and shall not see an older one. */
TEST(readers_wait_while_steps_are_computed_again)
{
    two_steps(logs);
    struct ht_root *root = root_of();
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, w.param[2].oid, NULL), 0); /* the abort brings its state back */
    lock(w.o);
    root->redo.replaying = true;
    uint64_t shapeless = ht_store_new_id(w.s); /* its first gradient is being opened */
    ck_assert_ptr_nonnull(ht_opt_param_make(root, shapeless));
    unlock(w.o);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 0, 4, NULL), -EAGAIN);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[2].oid, 0, 4, NULL), -EAGAIN);
    ck_assert_int_eq(ht_optim_readable(w.o, shapeless, 0, 4, NULL), 0);
    lock(w.o);
    root->redo.replaying = false;
    unlock(w.o);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 0, 4, NULL), 0);
}

/* A step of which all gradients were taken back is none. */
TEST(a_commit_after_a_dropped_step_publishes_the_rest)
{
    struct ht_obj_attr attr = {.chunk_bytes = HT_CHUNK_BYTES, .scope = ROOT};
    struct ht_obj *file;

    two_steps("adamw lr=1e-2 skip_nonfinite=1 redo=on durable_every=100");
    send_random(&w.param[1]);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, w.param[1].oid, NULL), 0);
    attr.oid = ht_store_new_id(w.s);
    ck_assert_int_eq(ht_obj_create(w.s, &attr, &file), 0);
    ck_assert_int_eq(ht_obj_write(file, 0, "cursor", 6), 6);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(logged_steps(), 1);
    struct ht_root *root = root_of();
    lock(w.o);
    ck_assert_ptr_null(root->redo.obj);
    unlock(w.o);
    ht_obj_put(file);
    crash_and_check();
    char text[7] = "";
    file = ht_obj_get(w.s, attr.oid);
    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(ht_obj_read(file, 0, text, 6), 6);
    ck_assert_str_eq(text, "cursor");
    ht_obj_put(file);
}

/* Its bytes in the object of the step do not count. */
TEST(a_dropped_gradient_is_not_replayed)
{
    two_steps("adamw lr=1e-2 skip_nonfinite=1 redo=on durable_every=100");
    send_random(&w.param[1]);
    ck_assert_int_eq(ht_optim_drop(w.o, ROOT, w.param[1].oid, NULL), 0);
    step_once();
    ck_assert_uint_eq(logged_steps(), 2);
    crash_and_check();
}

/* ---------------------------------------------------------------- and the rest */

TEST(asynchronous_steps_are_logged)
{
    two_steps(logs);
    for (unsigned step = 3; step <= 6; step++) {
        step_all(&w);
        ck_assert_int_eq(ht_optim_step_async(w.o, ROOT), 0);
    }
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 6);
    ck_assert_uint_eq(logged_steps(), 5);
    crash_and_check();
}

TEST(an_orderly_end_leaves_nothing_logged)
{
    two_steps(logs);
    ck_assert_int_eq(ht_optim_finish(w.o), 0);
    ck_assert_uint_eq(logged_steps(), 0);
    remount_and_check();
}

/* A checkpoint names the logged steps, and no more than those. */
TEST(a_checkpoint_keeps_logged_steps)
{
    two_steps(logs);
    ck_assert_int_eq(ht_store_checkpoint(w.s), 0);
    step_once();
    crash_and_mount();
    check_all_at(3);
    ck_assert_int_eq(ht_store_checkpoint(w.s), 0);
    crash_and_mount();
    check_all_at(3);
}

static atomic_uint beside; /* 0: the checkpoint has not emitted; 1: it waits for a commit; 2: that is durable */

static int wait_for_commit(void)
{
    if (beside == 0)
        beside = 1;
    return beside == 1;
}

static void *checkpoint(void *arg)
{
    (void)arg;
    return (void *)(intptr_t)ht_store_checkpoint(w.s);
}

/* A step is logged after the checkpoint has begun: its record comes before those that the checkpoint emits. */
TEST(a_step_is_logged_beside_a_checkpoint)
{
    pthread_t thread;
    void *rc;

    two_steps(logs);
    step_once();
    step_all(&w);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    beside = 0;
    w.emitting = wait_for_commit;
    ck_assert_int_eq(pthread_create(&thread, NULL, checkpoint, NULL), 0);
    while (beside == 0)
        sched_yield();
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(logged_steps(), 3);
    beside = 2;
    pthread_join(thread, &rc);
    ck_assert_int_eq((intptr_t)rc, 0);
    w.emitting = NULL;
    crash_and_mount();
    check_all_at(4);
}

static void *end_root(void *arg)
{
    struct ht_tx *tx;

    for (unsigned i = *(unsigned *)arg; i; i--)
        sched_yield();
    ck_assert_int_eq(ht_tx_begin(w.s, 1 << 16, &tx), 0);
    ht_scope_end(w.s, ROOT, HT_SCOPE_DELETED, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    return NULL;
}

/* At any time of a step: the log of the step, and its object, are used by no thread afterwards. */
TEST(a_root_is_deleted_beside_its_commits)
{
    for (unsigned wait = 1; wait < 1 << 14; wait *= 2) {
        pthread_t thread;
        begin(logs, 2);
        step_once();
        ck_assert_int_eq(pthread_create(&thread, NULL, end_root, &wait), 0);
        for (unsigned i = 0; i < w.params; i++) {
            struct ht_param_desc desc = fixture_desc(&w.param[i]);
            struct ht_grad *g;
            if (ht_grad_open(w.o, &desc, &g))
                continue;
            uint8_t *bytes = random_gradient(&w, &w.param[i]);
            ssize_t n = ht_grad_write(g, 0, bytes, w.param[i].n * dtype_bytes(w.param[i].grad_dtype));
            int rc = n > 0 ? ht_grad_flush(g) : 0;
            (void)rc;
            ht_grad_release(g);
        }
        int rc = ht_optim_commit(w.o, ROOT);
        ck_assert_msg(rc == 0 || rc == -ENOENT || rc == -ESTALE || rc == -EIO, "%d", rc);
        pthread_join(thread, NULL);
        ht_optim_verify(w.o);
        fixture_close(&w);
    }
}

/* Workers that come to the log afterwards make no object that nothing would delete. */
TEST(a_root_that_has_ended_gets_no_object)
{
    unsigned now = 0;

    two_steps(logs);
    struct ht_root *root = ht_opt_root_get(w.o, ROOT);
    lock(w.o);
    root->redo.making = true; /* they wait */
    unlock(w.o);
    send_random(&w.param[1]);
    for (bool running = false; !running;) {
        lock(w.o);
        running = root->running > 0;
        unlock(w.o);
        sched_yield();
    }
    end_root(&now);
    lock(w.o);
    root->redo.making = false;
    notify_changed(w.o);
    while (root->running)
        wait_changed(w.o);
    ck_assert_ptr_null(root->redo.obj);
    ht_opt_root_put(root);
    unlock(w.o);
}

/* The space that was set aside is for logged steps alone. When it is used up a step is full, and none fails. */
TEST(a_full_store_takes_steps)
{
    struct ht_optim_config config = fixture_config(logs);
    size_t most = 0;

    two_steps("adamw lr=1e-2");
    struct ht_obj *some = fixture_fill(&w, 8 * MIB);
    w.config = logs;
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &config), 0);
    uint64_t aside = fixture_stat(&w).redo_reserved_bytes;
    ck_assert_uint_gt(aside, 3 * MIB);
    ck_assert_uint_le(aside, 4 * MIB);
    struct ht_obj *rest = fixture_fill(&w, 0);
    ck_assert_uint_lt(ht_store_available(w.s), 16 * 4096);
    for (unsigned step = 3; step <= 12; step++) {
        step_once();
        ck_assert_uint_eq(fixture_stat(&w).durable_step, step);
        size_t logged = logged_steps();
        if (!logged && most) /* a full step came long before the hundredth, and space is set aside again */
            ck_assert_uint_gt(fixture_stat(&w).redo_reserved_bytes, MIB);
        most = logged > most ? logged : most;
        ck_assert(!logged || fixture_stat(&w).logged_bytes / logged * (logged + 1) < aside + MIB);
    }
    ck_assert_uint_ge(most, 3);
    ck_assert_uint_lt(most, 9);
    ht_obj_put(some);
    ht_obj_put(rest);
    crash_and_check();
}

/* As much as is set aside is what `df` does not show any more. */
TEST(settings_set_space_aside)
{
    struct ht_optim_config plain = fixture_config("adamw lr=1e-2"),
                           some = fixture_config("adamw lr=1e-2 redo=on durable_every=4"),
                           more = fixture_config("adamw lr=1e-2 redo=on durable_every=7");

    two_steps("adamw lr=1e-2");
    uint64_t available = ht_store_available(w.s);
    ck_assert_uint_eq(fixture_stat(&w).redo_reserved_bytes, 0);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &some), 0);
    uint64_t three = fixture_stat(&w).redo_reserved_bytes;
    ck_assert_uint_gt(three, 0);
    ck_assert_uint_eq(ht_store_available(w.s), available - three);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &more), 0);
    ck_assert_uint_eq(fixture_stat(&w).redo_reserved_bytes, 2 * three);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &some), 0);
    ck_assert_uint_eq(fixture_stat(&w).redo_reserved_bytes, three);
    ht_store_verify(w.s, false);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &plain), 0);
    ck_assert_uint_eq(fixture_stat(&w).redo_reserved_bytes, 0);
    ck_assert_uint_eq(ht_store_available(w.s), available);
}

RUN_TESTS("redo", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
