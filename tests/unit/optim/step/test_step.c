/* SPDX-License-Identifier: Apache-2.0 */
/* Steps end as a whole: durable, aborted, or lost in a crash. */
#include "tests/unit/optim/step/fixture.h"
#include "tiering/object/context.h"

#include <sched.h>

/* A copy of the model, to go back to: for each parameter its values, masters and moments, one after the other. */
static struct {
    uint8_t *arrays;
    uint64_t t;
} saved[PARAMS_MAX];

static void copy_model(struct test_param *p, uint8_t *arrays, bool back)
{
    void *const of_model[] = {p->p, p->master, p->m, p->v};

    for (unsigned k = 0; k < HT_ARRAY_SIZE(of_model); k++) {
        uint8_t *of_copy = arrays + k * p->n * 4;
        memcpy(back ? of_model[k] : of_copy, back ? of_copy : of_model[k], p->n * 4);
    }
}

static void save_model(void)
{
    for (unsigned i = 0; i < w.params; i++) {
        struct test_param *p = &w.param[i];
        saved[i].arrays = realloc(saved[i].arrays, 4 * p->n * 4);
        copy_model(p, saved[i].arrays, false);
        saved[i].t = p->t;
    }
}

static void restore_model(void)
{
    for (unsigned i = 0; i < w.params; i++) {
        copy_model(&w.param[i], saved[i].arrays, true);
        w.param[i].t = saved[i].t;
    }
}

static void check_restored(void)
{
    restore_model();
    check_all(&w);
}

static void abort_and_check(void)
{
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check_restored();
}

static void commit(void)
{
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    save_model();
}

static void step_and_save(void)
{
    step_all(&w);
    commit();
}

static void step_and_check(void)
{
    step_and_save();
    check_all(&w);
}

static void two_params(void)
{
    w.threads = 2;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 300000, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, 700001, HT_CHUNK_BYTES);
}

/* With a step. */
static void begin(void)
{
    two_params();
    step_and_save();
}

/* ------------------------------------------------------------------- abort */

TEST_LOOP(abort_returns_to_the_last_commit, 4)
{
    begin();
    step_all(&w);
    if (_i & 1)
        ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    abort_and_check();
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(st.step == 1 && st.durable_step == 1 && !st.open && w.aborts == 1);
    step_and_check();
    ck_assert_uint_eq(fixture_stat(&w).step, 2);
}

TEST(abort_of_the_first_step_leaves_no_state)
{
    two_params();
    commit();
    step_all(&w);
    abort_and_check();
    ck_assert_uint_eq(fixture_stat(&w).parameters, 0);
    ck_assert_uint_eq(fixture_stat(&w).step, 0);
    step_and_check();
    ck_assert_uint_eq(fixture_stat(&w).parameters, 2);
    remount_and_check();
}

TEST(a_parameter_that_abort_takes_away_is_stale)
{
    begin();
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1000, HT_SMALL_CHUNK_BYTES);
    struct ht_grad *g = open_grad(&w, p);
    uint8_t *bytes = random_gradient(&w, p);
    write_all(g, 0, bytes, 4000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_int_eq(ht_grad_write(g, 0, bytes, 4), -ESTALE);
    ht_grad_release(g);
    ht_obj_put(p->obj);
    forget_model(p);
    w.params--;
    step_and_check();
}

TEST(a_deleted_parameter_comes_back_with_abort)
{
    begin();
    fixture_delete(&w, 0);
    ck_assert_uint_eq(fixture_stat(&w).parameters, 1);
    step_param(&w, &w.param[1]);
    abort_and_check();
    ck_assert_uint_eq(fixture_stat(&w).parameters, 2);
    step_and_check();
}

TEST(a_deleted_parameter_is_gone_after_the_commit)
{
    begin();
    uint64_t objects = store_stats().objects;
    /* In the middle of a step, with its updates queued or running. */
    step_all(&w);
    fixture_delete(&w, 1);
    ht_obj_put(w.param[1].obj);
    forget_model(&w.param[1]);
    w.params = 1;
    commit_and_check();
    /* the parameter, two moments, missing bits and their blocks, its gradient */
    ck_assert_uint_eq(store_stats().objects, objects - 6);
    remount_and_check();
    ck_assert_uint_eq(fixture_stat(&w).parameters, 1);
}

/* ------------------------------------------------------------------- crash */

TEST(a_crash_lands_on_the_last_durable_step)
{
    w.config = "adamw lr=1e-2 durable_every=3";
    two_params();
    commit();
    for (unsigned step = 1; step <= 10; step++) {
        step_all(&w);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        struct ht_root_stat st = fixture_stat(&w);
        ck_assert_uint_eq(st.step, step);
        ck_assert_uint_eq(st.durable_step, step / 3 * 3);
        if (step % 3 == 0)
            save_model();
    }
    check_all(&w);
    step_param(&w, &w.param[0]); /* half a step more */
    crash_and_mount();
    check_restored();
    ck_assert_uint_eq(fixture_stat(&w).step, 9);
    step_and_check();
}

TEST(every_moment_of_a_crash_is_a_whole_step)
{
    /* Writes fail from some write on: the device then holds the bytes that a crash would have left. */
    begin();
    for (unsigned nth = 1; nth < 60; nth += 3) {
        uint64_t step = fixture_stat(&w).durable_step;
        step_all(&w);
        dev_fail(w.dev, HT_IO_WRITE, nth, true);
        int rc = ht_optim_commit(w.o, ROOT);
        dev_fail(w.dev, HT_IO_WRITE, 0, false);
        crash_and_mount();
        uint64_t now = fixture_stat(&w).step;
        ck_assert_uint_ge(now, step);
        ck_assert_uint_le(now, step + 1);
        ck_assert(rc || now == step + 1);
        if (now == step)
            restore_model();
        else
            save_model();
        check_all(&w);
    }
}

TEST(checkpoint_keeps_what_is_published)
{
    begin();
    step_all(&w);
    ck_assert_int_eq(ht_store_checkpoint(w.s), 0);
    crash_and_mount();
    check_restored();
    for (unsigned i = 0; i < 3; i++) {
        step_all(&w);
        ck_assert_int_eq(ht_store_checkpoint(w.s), 0);
        commit();
    }
    crash_and_check();
    ck_assert_uint_eq(fixture_stat(&w).step, 4);
}

/*
 * The parameter's file was made to vanish durably without the root's commit: its state goes at the next mount's commit.
 */
TEST_LOOP(state_without_a_parameter_is_buried, 2)
{
    struct ht_tx *tx;

    begin();
    uint64_t objects = store_stats().objects;
    ck_assert_int_eq(ht_tx_begin(w.s, 0, &tx), 0);
    ck_assert_int_eq(ht_obj_set_scope(w.param[1].obj, 0, tx), 0);
    ht_obj_delete(w.param[1].obj, tx);
    uint64_t lsn;
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(w.s, lsn), 0);
    ht_obj_put(w.param[1].obj);
    forget_model(&w.param[1]);
    w.params = 1;
    crash_and_check();
    if (_i) /* an abort before it changes nothing */
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    commit_and_check();
    remount();
    ck_assert_uint_eq(fixture_stat(&w).parameters, 1);
    ck_assert_uint_le(store_stats().objects, objects - 5);
}

/* ---------------------------------------------------------------- boundary */

TEST(a_partly_covered_parameter_ends_no_step)
{
    two_params();
    commit();
    struct test_param *p = &w.param[0];
    struct ht_grad *g = open_grad(&w, p);
    uint8_t *bytes = random_gradient(&w, p);
    write_all(g, 0, bytes, 700000);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EBUSY);
    check_error(&w, p, "only a part");
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), -EBUSY);
    ck_assert(fixture_stat(&w).open && fixture_stat(&w).step == 0);
    ck_assert(ht_optim_param_unpublished(w.o, p->oid) && !ht_optim_param_unpublished(w.o, w.param[1].oid));
    write_all(g, 700000, bytes, 500000);
    ck_assert_int_eq(ht_optim_apply(w.o, ROOT, p->oid), 0);
    ht_grad_release(g);
    struct ht_optim_config c = fixture_config(w.config);
    model_update(p, &c, bytes, 0, p->n, true);
    commit_and_check();
    ck_assert(!ht_optim_param_unpublished(w.o, p->oid));
}

TEST_LOOP(partial_updates_exactly_what_is_covered, 3)
{
    static const uint8_t g_dtype[] = {HT_DTYPE_F32, HT_DTYPE_BF16, HT_DTYPE_F32};
    static const uint8_t p_dtype[] = {HT_DTYPE_F32, HT_DTYPE_F32, HT_DTYPE_BF16};

    w.config = "adamw lr=1e-2 partial=1";
    w.threads = 2;
    fixture_open(&w);
    struct ht_optim_config c = fixture_config(w.config);
    struct test_param *p = fixture_param(&w, p_dtype[_i], g_dtype[_i], 200000, HT_SMALL_CHUNK_BYTES);
    size_t size = dtype_bytes(p->grad_dtype);
    for (unsigned step = 0; step < 4; step++) {
        struct ht_grad *g = open_grad(&w, p);
        uint8_t *bytes = random_gradient(&w, p);
        bool first = true;
        for (uint64_t at = fixture_random(&w) % 5000, n; at < p->n; at += n + 1 + fixture_random(&w) % 20000) {
            n = ht_min_u64(1 + fixture_random(&w) % 50000, p->n - at);
            write_all(g, at * size, bytes, n * size);
            if (fixture_random(&w) & 1)
                ck_assert_int_eq(ht_grad_flush(g), 0);
            model_update(p, &c, bytes, at, at + n, first);
            first = false;
        }
        close_grad(g);
        commit();
    }
    check_all(&w);
}

TEST(a_parameter_without_a_gradient_keeps_its_count)
{
    begin();
    step_param(&w, &w.param[1]);
    commit();
    ck_assert(w.param[0].t == 1 && w.param[1].t == 2);
    check_all(&w);
    /* Nothing open: no step is counted, by either command. */
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).step, 2);
}

TEST(hyper_parameters_are_latched_by_the_first_gradient)
{
    struct ht_optim_config slow = fixture_config("adamw lr=1e-4"), fast = fixture_config("adamw lr=1e-1 maximize=1");

    two_params();
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &slow), 0);
    for (unsigned i = 0; i < 2; i++) {
        uint8_t *g = random_gradient(&w, &w.param[i]);
        write_gradient(&w, &w.param[i], g);
        ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &fast), 0);
        model_update(&w.param[i], &slow, g, 0, w.param[i].n, true);
    }
    commit_and_check();
    for (unsigned i = 0; i < 2; i++) {
        uint8_t *g = random_gradient(&w, &w.param[i]);
        write_gradient(&w, &w.param[i], g);
        model_update(&w.param[i], &fast, g, 0, w.param[i].n, true);
    }
    commit_and_check();
}

TEST(another_rule_needs_parameters_without_state)
{
    struct ht_optim_config adam = fixture_config("adam"), lion = fixture_config("lion"),
                           faster = fixture_config("adamw lr=1");

    two_params();
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &lion), 0);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &adam), 0);
    struct ht_optim_config before = fixture_config(w.config);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &before), 0);
    step_and_save();
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &adam), -EBUSY);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &lion), -EBUSY);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &faster), 0);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &before), 0);
    check_all(&w);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_int_eq(ht_optim_reset(w.o, ROOT, w.param[i].oid, NULL), 0);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &lion), 0);
    w.config = "lion";
    for (unsigned i = 0; i < w.params; i++)
        forget_state(&w.param[i]);
    step_and_check();
}

static int override_with_lion(void *ctx, uint64_t oid, uint64_t as_of, const struct ht_optim_config *base,
                              struct ht_optim_config *out, struct ht_optim_sections *sections,
                              char err[HT_OPTIM_ERROR_MAX])
{
    static const char text[] = "lion lr=0.5";
    struct fixture *me = ctx;

    (void)as_of, (void)sections;
    return oid == me->param[0].oid ? ht_optim_config_amend(text, strlen(text), base, out, err) : 0;
}

TEST(a_gradient_for_state_of_another_rule_is_refused)
{
    begin();
    w.hooks.override = override_with_lion;
    remount();
    uint8_t *bytes = random_gradient(&w, &w.param[0]);
    struct ht_grad *g = open_grad(&w, &w.param[0]);
    ck_assert_int_eq(ht_grad_write(g, 0, bytes, w.param[0].n * 4), (ssize_t)(w.param[0].n * 4));
    ck_assert_int_eq(ht_grad_flush(g), -EBUSY);
    check_error(&w, &w.param[0], "another rule");
    ht_grad_release(g);
    step_param(&w, &w.param[1]);
    commit_and_check();
}

static int override_first(void *ctx, uint64_t oid, uint64_t as_of, const struct ht_optim_config *base,
                          struct ht_optim_config *out, struct ht_optim_sections *sections, char err[HT_OPTIM_ERROR_MAX])
{
    static const char text[] = "lr=0.5 weight_decay=0";
    struct fixture *me = ctx;

    (void)as_of, (void)sections;
    return oid == me->param[0].oid ? ht_optim_config_amend(text, strlen(text), base, out, err) : 0;
}

TEST(a_parameter_may_have_its_own_configuration)
{
    w.hooks.override = override_first;
    two_params();
    struct ht_optim_config own = fixture_config("adamw lr=0.5 weight_decay=0");
    uint8_t *g = random_gradient(&w, &w.param[0]);
    write_gradient(&w, &w.param[0], g);
    model_update(&w.param[0], &own, g, 0, w.param[0].n, true);
    step_param(&w, &w.param[1]);
    commit_and_check();
}

TEST(the_step_number_can_be_set)
{
    two_params();
    commit();
    ck_assert_int_eq(ht_optim_root_set_step(w.o, ROOT, 500), 0);
    ck_assert_uint_eq(fixture_stat(&w).step, 500);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 0);
    commit();
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 500);
    step_all(&w);
    ck_assert_int_eq(ht_optim_root_set_step(w.o, ROOT, 7), -EBUSY);
    commit();
    crash_and_mount();
    check_all_at(501);
}

/* ------------------------------------------------------------------ errors */

/* On the devices, or in the log for the records of its chunks. */
enum { LEFT_BYTES = 512 };

TEST_LOOP(without_space_for_a_step_the_first_gradient_is_refused, 2)
{
    uint64_t others = 0;

    w.threads = 2;
    w.device_bytes = (_i ? 48ull : 24) * MIB;
    fixture_open(&w);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1 << 20, HT_CHUNK_BYTES);
    commit();
    struct ht_grad *g = open_grad(&w, p);
    uint8_t *bytes = random_gradient(&w, p);
    for (size_t off = 0; off < 4u << 20; off += MIB)
        write_all(g, off, bytes, MIB);
    while (_i && ht_store_log_reserve(w.s, LEFT_BYTES) == 0)
        others += LEFT_BYTES;
    ht_store_log_unreserve(w.s, _i ? LEFT_BYTES : 0); /* for the objects, and not for all of their chunks */
    others -= _i ? LEFT_BYTES : 0;
    struct ht_store_stats before = store_stats();
    ck_assert_int_eq(ht_grad_flush(g), -ENOSPC);
    check_error(&w, p, "no space");
    struct ht_store_stats after = store_stats();
    ck_assert_uint_eq(after.objects, before.objects);
    ck_assert_uint_eq(after.reserved_bytes, before.reserved_bytes);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert(!st.open && st.parameters == 0);
    check_all(&w);
    ht_store_log_unreserve(w.s, others);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ht_grad_release(g);
}

TEST(a_full_store_still_takes_steps)
{
    struct ht_obj_attr attr = {.chunk_bytes = HT_CHUNK_BYTES};
    struct ht_obj *filler;
    uint8_t *junk = test_alloc(MIB);
    uint64_t end = 0;

    w.threads = 2;
    w.device_bytes = 40ull * MIB;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1 << 19, HT_CHUNK_BYTES);
    step_and_save();
    attr.oid = ht_store_new_id(w.s);
    ck_assert_int_eq(ht_obj_create(w.s, &attr, &filler), 0);
    while (ht_obj_write(filler, end, junk, MIB) > 0)
        end += MIB;
    ck_assert_uint_ge(end, 8 * MIB);
    for (unsigned i = 0; i < 12; i++) {
        step_all(&w);
        if (i % 3)
            commit();
        else
            ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    }
    check_all(&w);
    ht_obj_put(filler);
}

TEST(a_failed_update_can_only_be_aborted)
{
    begin();
    ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 3, false);
    step_all(&w);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), -EIO);
    ht_fault_disarm_all();
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), -EIO);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EIO);
    ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "update of bytes"));
    ck_assert_uint_eq(fixture_stat(&w).step, 1);
    abort_and_check();
    step_and_check();
}

TEST(device_errors_never_leave_half_a_step)
{
    w.threads = 2;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 3 << 19, HT_CHUNK_BYTES);
    step_and_save();
    for (unsigned i = 0; i < 12; i++) {
        dev_fail(w.dev, i & 1 ? HT_IO_READ : HT_IO_WRITE, 1 + i * 3, false);
        struct ht_grad *g = open_grad(&w, &w.param[0]);
        uint8_t *bytes = random_gradient(&w, &w.param[0]);
        int rc = 0;
        for (size_t off = 0; !rc && off < 6u << 20; off += MIB)
            rc = ht_grad_write(g, off, bytes + off, MIB) == MIB ? 0 : -EIO;
        if (!rc)
            rc = ht_grad_flush(g);
        ht_grad_release(g);
        struct ht_optim_config c = fixture_config(w.config);
        model_update(&w.param[0], &c, bytes, 0, w.param[0].n, true);
        if (!rc)
            rc = ht_optim_commit(w.o, ROOT);
        dev_fail(w.dev, HT_IO_READ, 0, false);
        dev_fail(w.dev, HT_IO_WRITE, 0, false);
        if (rc) {
            ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
            restore_model();
        } else {
            save_model();
        }
        check_all(&w);
        fixture_crash(&w); /* a copy of the log that dropped out comes back; without any there would be no abort */
        fixture_mount(&w);
        check_all(&w);
    }
}

TEST(a_truncate_in_mid_step_is_an_error_and_abort_repairs_it)
{
    begin();
    struct test_param *p = &w.param[0];
    struct ht_grad *g = open_grad(&w, p);
    uint8_t *bytes = random_gradient(&w, p);
    write_all(g, 0, bytes, p->n * 4);
    ck_assert_int_eq(ht_obj_truncate(p->obj, 1000), 0);
    ck_assert_int_eq(ht_grad_flush(g), -EINVAL);
    check_error(&w, p, "not as long");
    ht_grad_release(g);
    struct ht_param_desc desc = fixture_desc(p);
    ck_assert_int_eq(ht_grad_open(w.o, &desc, &g), -EINVAL);
    check_error(&w, p, "reset");
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check_all(&w);
    step_and_check();
}

TEST_LOOP(reset_forgets_the_state_and_abort_remembers_it, 2)
{
    begin();
    struct test_param *p = &w.param[1];
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, p->oid, NULL), 0);
    ck_assert_uint_eq(fixture_stat(&w).parameters, 1);
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, 424242, NULL), -ENOENT);
    if (_i) {
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
        restore_model();
    } else {
        forget_state(p);
    }
    step_param(&w, p);
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, p->oid, NULL), -EBUSY);
    commit_and_check();
    crash_and_check();
}

/* Its file alone is not published: also where its count is that of the last commit again. */
TEST(a_reset_does_not_hide_a_step_that_is_not_durable)
{
    fixture_open_as(&w, "adamw lr=1e-2 durable_every=10", 2);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 1000, HT_CHUNK_BYTES);
    step_param(&w, p);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert(ht_optim_param_unpublished(w.o, p->oid));
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, p->oid, NULL), 0);
    ck_assert(ht_optim_param_unpublished(w.o, p->oid));
    commit();
    ck_assert(!ht_optim_param_unpublished(w.o, p->oid));
}

static uint8_t *gradient;
static atomic_bool writing;

static void *write_whole(void *open)
{
    writing = true;
    write_all(open, 0, gradient, w.param[0].n * 4);
    return NULL;
}

/* A gradient counts as written by the bytes that were written, not by those that a reset left. */
TEST(a_gradient_written_during_a_reset_is_there_or_not)
{
    two_params();
    struct test_param *p = &w.param[0];
    size_t bytes = p->n * 4;
    uint8_t *got = test_alloc(bytes), *nothing = test_alloc(bytes);
    step_and_save();
    gradient = random_gradient(&w, p);
    struct ht_grad *g = open_grad(&w, p);
    for (unsigned round = 0; round < 20; round++) {
        pthread_t writer;
        writing = false;
        ck_assert_int_eq(pthread_create(&writer, NULL, write_whole, g), 0);
        while (!writing)
            sched_yield();
        ck_assert_int_eq(ht_optim_reset(w.o, ROOT, p->oid, NULL), 0);
        pthread_join(writer, NULL);
        ssize_t n = ht_grad_read(g, 0, got, bytes);
        bool all = n == (ssize_t)bytes && !memcmp(got, gradient, bytes);
        ck_assert(all || n == 0 || !memcmp(got, nothing, (size_t)n));
        ck_assert_int_eq(ht_grad_flush(g), 0);
        ck_assert(fixture_stat(&w).open == all);
        commit();
    }
    ht_grad_release(g);
}

TEST(after_reset_another_size_is_fine)
{
    begin();
    struct test_param *p = &w.param[0];
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, p->oid, NULL), 0);
    ck_assert_int_eq(ht_obj_truncate(p->obj, 4 * 1000), 0);
    p->n = 1000;
    memset(p->m, 0, p->n * 4);
    memset(p->v, 0, p->n * 4);
    p->t = 0;
    step_and_check();
}

/* A step of which one parameter has all of its gradient, and the other a part. */
static struct ht_grad *half_a_step(void)
{
    static const uint8_t ones[400];

    step_param(&w, &w.param[0]);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0);
    struct ht_grad *g = open_grad(&w, &w.param[1]);
    write_all(g, 0, ones, sizeof(ones));
    ck_assert_int_eq(ht_grad_flush(g), 0);
    return g;
}

static int no_unmake(void *ctx)
{
    ck_abort_msg("asked for a root that may not end");
    return 0;
}

TEST_LOOP(a_refused_end_of_a_root_publishes_nothing, 2)
{
    begin();
    struct ht_grad *g = half_a_step();
    ck_assert_int_eq(ht_optim_root_end(w.o, ROOT, no_unmake, NULL), -EBUSY);
    check_error(&w, &w.param[1], "only a part");
    ck_assert(fixture_stat(&w).open && fixture_stat(&w).step == 1);
    ht_grad_release(g);
    ck_assert_int_eq(ht_store_commit(w.s), 0);
    if (_i) {
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    } else {
        crash_and_mount();
    }
    check_restored();
    ck_assert_uint_eq(fixture_stat(&w).step, 1);
}

static atomic_bool stepped;

static void *next_step(void *arg)
{
    step_param(&w, &w.param[0]);
    stepped = true;
    return arg;
}

/* The root ends only when this returns 0: a gradient that is closed during the call waits for that. */
static int unmake_beside_a_gradient(void *ctx)
{
    pthread_t *thread = ctx;

    ck_assert_int_eq(pthread_create(thread, NULL, next_step, NULL), 0);
    for (int i = 0; i < 100; i++) {
        ck_assert(!stepped && !fixture_stat(&w).open);
        usleep(1000);
    }
    return -EIO;
}

TEST(nobody_begins_a_step_while_a_root_ends)
{
    pthread_t thread;

    stepped = false;
    two_params();
    step_all(&w);
    save_model();
    ck_assert_int_eq(ht_optim_root_end(w.o, ROOT, unmake_beside_a_gradient, &thread), -EIO);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert(fixture_stat(&w).open && fixture_stat(&w).durable_step == 1);
    crash_and_mount();
    check_restored();
}

TEST(a_root_ends_with_everything_it_kept)
{
    struct ht_root_stat st;

    two_params();
    commit();
    struct ht_store_stats before = store_stats();
    step_all(&w);
    ck_assert_int_eq(ht_optim_root_end(w.o, ROOT, fixture_unmake, NULL), 0);
    ck_assert_int_eq(ht_optim_root_stat(w.o, ROOT, &st), -ENOENT);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -ENOENT);
    struct ht_store_stats after = store_stats();
    ck_assert_uint_eq(after.objects, before.objects);
    ck_assert_uint_eq(after.reserved_bytes, before.reserved_bytes);
    for (unsigned i = 0; i < w.params; i++)
        w.param[i].t = 0; /* no state to compare */
    remount_and_check();
    ck_assert_uint_eq(fixture_stat(&w).parameters, 0);
}

RUN_TESTS("step", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
