/* SPDX-License-Identifier: Apache-2.0 */
/* Logged steps for readers: which are there, what they are, and the same updates in another store. */
#include "tests/unit/optim/step/fixture.h"

#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/redo.h"
#include "optim/redo/logged.h"
#include "optim/state/root.h"
#include "tiering/base/event.h"
#include "tiering/object/context.h"
#include <hitrain/redo.h>

static const char keep_3[] = "adamw lr=1e-2 redo=on durable_every=4 redo_keep=3";
static const char keeps[] = "adamw lr=1e-2 max_grad_norm=0.5 redo=on durable_every=3 redo_keep=9";

static struct ht_redo_steps steps(void)
{
    struct ht_redo_steps s;

    ck_assert_int_eq(ht_optim_redo_steps(w.o, ROOT, &s), 0);
    return s;
}

/* A whole step; the caller frees it. */
static uint8_t *read_step(uint64_t step)
{
    struct ht_optim_redo *r;
    struct ht_redo_file head;

    ck_assert_int_eq(ht_optim_redo_open(w.o, ROOT, step, &r), 0);
    uint64_t len = ht_optim_redo_bytes(r);
    uint8_t *all = test_alloc(len + 1);
    ck_assert_int_eq(ht_optim_redo_read(r, 0, all, len + 1), (ssize_t)len);
    uint8_t byte;
    for (uint64_t at = 0; at < len; at += len / 7 + 1) {
        ck_assert_int_eq(ht_optim_redo_read(r, at, &byte, 1), 1);
        ck_assert_uint_eq(byte, all[at]);
    }
    ht_optim_redo_close(r);
    memcpy(&head, all, sizeof(head));
    ck_assert_mem_eq(head.magic, HT_REDO_FILE_MAGIC, sizeof(head.magic));
    ck_assert_uint_eq(ht_le64_load(&head.step), step);
    ck_assert_uint_eq(ht_le64_load(&head.lineage), steps().lineage);
    ck_assert_uint_eq(sizeof(head) + ht_le64_load(&head.summary_bytes) + ht_le64_load(&head.gradient_bytes), len);
    return all;
}

static void check_all_readable(void)
{
    struct ht_redo_steps s = steps();

    for (uint64_t step = s.first; s.last && step <= s.last; step++)
        (void)read_step(step);
    struct ht_optim_redo *r;
    ck_assert_int_eq(ht_optim_redo_open(w.o, ROOT, s.last + 1, &r), -ENOENT);
    ck_assert_int_eq(ht_optim_redo_open(w.o, ROOT, s.first - !!s.last, &r), -ENOENT);
}

TEST(the_last_steps_stay_readable)
{
    fixture_begin_mixed(&w, keep_3, 2);
    for (unsigned step = 1; step <= 14; step++) {
        fixture_train(&w, step, step);
        struct ht_redo_steps s = steps();
        ck_assert(s.last == step || (s.last == 0 && step < 4)); /* full: a parameter got its state */
        ck_assert(step < 8 || (s.last - s.first >= 2 && s.last - s.first <= 6));
        check_all_readable();
    }
}

/* Those that a mount computes again stay readable, too. */
TEST(logged_steps_are_readable_after_a_crash)
{
    fixture_begin_mixed(&w, keep_3, 2);
    fixture_train(&w, 1, 7);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 1);
    uint64_t before = steps().lineage;
    crash_and_mount();
    ck_assert_uint_eq(steps().first, 7);
    ck_assert_uint_eq(steps().last, 7);
    ck_assert_uint_ne(steps().lineage, before);
    check_all_readable();
    fixture_train(&w, 8, 8);
    ck_assert_uint_eq(steps().first, 7);
    ck_assert_uint_eq(steps().last, 8);
    check_all_readable();
}

/* What follows is no function of the steps before. */
TEST_LOOP(a_change_that_is_not_logged_begins_another_lineage, 2)
{
    uint8_t zeros[64] = {0};

    fixture_begin_mixed(&w, keep_3, 2);
    fixture_train(&w, 1, 6);
    uint64_t before = steps().lineage;
    if (_i == 0)
        ck_assert_int_eq(ht_obj_write(w.param[1].obj, 0, zeros, sizeof(zeros)), sizeof(zeros));
    else
        ck_assert_int_eq(ht_optim_root_set_step(w.o, ROOT, 5), 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(steps().last, 0);
    ck_assert_uint_ne(steps().lineage, before);
}

/* An abort comes back to the last durable step, and to no other history. */
TEST(an_abort_keeps_the_lineage)
{
    fixture_begin_mixed(&w, keep_3, 2);
    fixture_train(&w, 1, 6);
    struct ht_redo_steps before = steps();
    fixture_send_most(&w, 7);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_uint_eq(steps().lineage, before.lineage);
    ck_assert_uint_eq(steps().last, 6);
    ck_assert_uint_gt(steps().publications, before.publications);
    check_all_readable();
    fixture_train(&w, 7, 9);
    ck_assert_uint_eq(steps().last, 9);
}

/* Nothing that gradients do not explain has changed. _i: with a step open, or with none. */
TEST_LOOP(a_full_commit_keeps_the_lineage, 2)
{
    struct ht_optim_steer full = {.full = true};

    fixture_begin_mixed(&w, keep_3, 2);
    fixture_train(&w, 1, 6);
    uint64_t before = steps().lineage;
    if (_i)
        fixture_send_most(&w, 7);
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &full), 0);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 0);
    ck_assert_uint_eq(steps().lineage, before);
    ck_assert_uint_eq(steps().last, 6 + (unsigned)_i);
    check_all_readable();
    fixture_train(&w, 7 + (unsigned)_i, 9);
    ck_assert_uint_eq(steps().lineage, before);
    ck_assert_uint_eq(steps().last, 9);
}

/* Its gradients may come while the full step before it is being published. */
TEST(a_step_that_opens_before_a_full_one_is_durable_is_logged)
{
    fixture_begin_mixed(&w, keep_3, 2);
    fixture_train(&w, 1, 6);
    lock(w.o);
    struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    struct ht_redo was = root->redo;
    uint64_t undurable = root->undurable;
    root->redo.counted = root->hold = true;
    root->undurable = root->config.durable_every;
    root->redo.steps = root->undurable - 1;
    ht_opt_redo_open(root);
    ck_assert(root->redo.wanted);
    root->redo.steps--; /* one was not logged: that ends with the full step, too */
    root->redo.gap = true;
    ht_opt_redo_open(root);
    ck_assert(root->redo.wanted);
    root->hold = false; /* nothing is being published */
    ht_opt_redo_open(root);
    ck_assert(!root->redo.wanted);
    was.aside_bytes = root->redo.aside_bytes;
    root->redo = was;
    root->undurable = undurable;
    unlock(w.o);
    fixture_train(&w, 7, 9);
    ck_assert_uint_eq(steps().last, 9);
}

/* Steps of the log stay readable until the next full one. */
TEST(words_end_it)
{
    struct ht_optim_config none = fixture_config("adamw lr=1e-2 redo=on durable_every=4");

    fixture_begin_mixed(&w, keep_3, 2);
    fixture_train(&w, 1, 6);
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &none), 0);
    for (unsigned step = 7; step <= 14; step++) {
        fixture_train(&w, step, step);
        uint64_t logged = fixture_stat(&w).logged_steps;
        if (step < 11) /* a full one came meanwhile */
            continue;
        ck_assert_uint_eq(steps().last, logged ? step : 0);
        ck_assert_uint_eq(steps().first, logged ? step - logged + 1 : 0);
    }
}

/* --------------------------------------------------------------------- decide */

/* The parameters of a step decide those of this store. */
static int decide_all(const uint8_t *file, uint64_t elements_off)
{
    const uint8_t *summary = file + sizeof(struct ht_redo_file);
    uint64_t params = ht_le64_load(summary + 16);
    int rc = 0;

    for (uint64_t i = 0; i < params && !rc; i++) {
        const uint8_t *one = summary + 32 + i * 72;
        struct ht_optim_steer by = {.claim = 0};
        struct ht_decision d = {.root = ROOT, .oid = ht_le64_load(one)};
        for (unsigned p = 0; p < w.params; p++)
            if (w.param[p].oid == d.oid)
                d.grad_dtype = w.param[p].grad_dtype;
        memcpy(d.bytes, one, sizeof(d.bytes));
        ht_le64_store(d.bytes + 16, ht_le64_load(one + 16) + elements_off);
        rc = ht_optim_decide(w.o, &d, &by);
        ck_assert(!rc == !by.why[0]);
    }
    return rc;
}

/* Another rate, no clipping, other loss scales: the numbers of the first store count. */
TEST(decided_updates_have_the_same_bits)
{
    enum { LAST = 9 };
    uint64_t hash[LAST + 1];
    uint8_t *file[LAST + 1] = {NULL};

    fixture_begin_mixed(&w, keeps, 2);
    for (unsigned step = 1; step <= LAST; step++) {
        fixture_train(&w, step, step);
        hash[step] = fixture_hash(&w);
        if (step > 2)
            file[step] = read_step(step);
    }
    fixture_close(&w);
    fixture_begin_mixed(&w, keeps, 3);
    fixture_train(&w, 1, 2);
    ck_assert_uint_eq(fixture_hash(&w), hash[2]);
    struct ht_optim_config other = fixture_config(
        "adamw lr=7 grad_scale=64 accumulate=3 skip_nonfinite=1 redo=on durable_every=4 redo_keep=9 delta=on");
    ck_assert_int_eq(ht_optim_root_configure(w.o, ROOT, &other), 0);
    for (unsigned step = 3; step <= LAST; step++) {
        ck_assert_int_eq(decide_all(file[step], 0), 0);
        fixture_train(&w, step, step);
        ck_assert_uint_eq(fixture_stat(&w).step, step);
        ck_assert_msg(fixture_hash(&w) == hash[step], "step %u", step);
        /* Its delta says that readers take the model: the numbers are of another store. */
        struct ht_delta *d;
        struct ht_delta_stat st;
        ck_assert_int_eq(ht_optim_delta_open(w.o, ROOT, step, &d), 0);
        ht_optim_delta_stat(d, &st);
        ht_optim_delta_close(d);
        ck_assert_uint_eq(st.base_step, 0);
    }
    ck_assert_uint_eq(steps().last, LAST); /* it logs the numbers of the client */
    crash_and_mount();
    ck_assert_uint_eq(fixture_hash(&w), hash[LAST]);
}

TEST(decisions_that_do_not_fit_are_refused)
{
    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 4);
    uint8_t *file = read_step(4);
    ck_assert_int_eq(decide_all(file, 0), -EINVAL); /* it has that step */
    ck_assert_int_eq(decide_all(file, 1), -EINVAL);
    crash_and_mount();
    fixture_train(&w, 5, 5);
    file = read_step(5);
    uint64_t hash = fixture_hash(&w);
    fixture_close(&w);

    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 4);
    ck_assert_int_eq(decide_all(file, 1), -EINVAL);
    fixture_send(&w, 0, 5, 0);
    ck_assert_int_eq(decide_all(file, 0), -EBUSY); /* a step is open without */
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    ck_assert_int_eq(decide_all(file, 0), 0);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0); /* that is over */
    fixture_train(&w, 5, 5);
    ck_assert_uint_eq(fixture_hash(&w), hash);
}

/* Numbers of the step before, and of a parameter that was reset since: neither is used. */
TEST(a_parameter_without_numbers_takes_no_gradient)
{
    uint8_t *g;

    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 3);
    uint8_t *file = read_step(3);
    fixture_close(&w);
    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 2);
    ck_assert_int_eq(decide_all(file, 0), 0);
    struct ht_optim_steer by = {.claim = 0};
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, w.param[0].oid, &by), 0);
    for (unsigned i = 0; i < 2; i++) {
        struct ht_grad *grad;
        struct ht_param_desc d = {ROOT, w.param[i].obj, w.param[i].dtype, w.param[i].grad_dtype};
        size_t bytes = w.param[i].n * (w.param[i].grad_dtype == HT_DTYPE_F32 ? 4 : 2);
        g = test_alloc(bytes);
        ck_assert_int_eq(ht_grad_open(w.o, &d, &grad), 0);
        ck_assert_int_eq(ht_grad_write(grad, 0, g, bytes), (ssize_t)bytes);
        ck_assert_int_eq(ht_grad_flush(grad), i == 0 || (3 + i) % 5 == 4 ? -EPERM : 0);
        lock(w.o);
        ck_assert(ht_opt_param_find(w.o, w.param[i].oid)->cur.exists == (i > 0)); /* nor does it get state */
        unlock(w.o);
        ht_grad_release(grad);
    }
    lock(w.o);
    ck_assert_ptr_nonnull(strstr(ht_opt_root_find(w.o, ROOT)->error.text, "A commit or an abort ends that step"));
    unlock(w.o);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    fixture_send(&w, 1, 3, 0);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
}

static void punch_second(struct fixture *f)
{
    ck_assert_int_eq(ht_obj_punch(f->param[1].obj, 0, ht_obj_size(f->param[1].obj)), 0);
    f->publish = NULL;
}

static void write_second(struct fixture *f)
{
    ck_assert_int_eq(ht_obj_write(f->param[1].obj, 0, "late", 4), 4);
    ck_assert_int_eq(ht_obj_writeback(f->param[1].obj), 0);
    f->publish = NULL;
}

TEST_LOOP(a_change_while_a_full_step_is_published_begins_another_lineage, 2)
{
    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 6);
    struct ht_redo_steps before = steps();
    struct ht_optim_steer full = {.full = true};
    w.publish = _i ? write_second : punch_second;
    ck_assert_int_eq(ht_optim_commit_by(w.o, ROOT, &full), 0);
    ck_assert_ptr_null(w.publish);
    ck_assert_uint_ne(steps().lineage, before.lineage);
    before = steps();
    fixture_train(&w, 7, 9);
    ck_assert_uint_eq(steps().lineage, before.lineage);
    ck_assert_uint_ge(steps().first, 7);
}

/* ------------------------------------------------------------------ space */

static struct ht_event given_up;
static unsigned given_up_count;

static void note_given_up(void *ctx, const struct ht_event *e)
{
    (void)ctx;
    if (e->code != HT_EVENT_STEPS_GIVEN_UP)
        return;
    given_up = *e;
    given_up_count++;
}

/* A call of this thread was refused, for so many bytes. */
static void lack(uint64_t bytes)
{
    ck_assert(!ht_store_has_space(w.s, ht_store_available(w.s) + bytes));
}

static uint64_t spare_aside(void)
{
    lock(w.o);
    uint64_t bytes = ht_opt_redo_spare_aside(w.o);
    unlock(w.o);
    return bytes;
}

/* The oldest go first, and a reader that has one open keeps it. The log's own steps stay. */
TEST(a_full_store_gives_up_kept_steps)
{
    struct ht_optim_redo *r;

    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 12);
    struct ht_redo_steps before = steps();
    uint64_t logged = fixture_stat(&w).logged_steps, kept = before.last - before.first + 1 - logged;
    ck_assert_uint_ge(kept, 4);
    ck_assert_int_eq(ht_optim_redo_open(w.o, ROOT, before.first, &r), 0);
    ht_event_set_sink(note_given_up, NULL);
    uint64_t available = ht_store_available(w.s), spare = spare_aside();
    ck_assert_uint_gt(spare, 0);
    lack(spare);
    ck_assert_int_eq(ht_store_make_space(w.s, true), 0); /* space that is set aside, and no step */
    ck_assert_uint_eq(ht_store_available(w.s), available + spare);
    ck_assert_uint_eq(steps().first, before.first);
    available = ht_store_available(w.s);
    for (uint64_t i = 1; i < kept; i++) {
        uint64_t gone = i == 1 ? 0 : i; /* the first one alone would bring nothing */
        lack(1);
        ck_assert_int_eq(ht_store_make_space(w.s, false), 0); /* a commit alone */
        ck_assert_uint_eq(steps().first, before.first + gone);
        lack(1);
        ck_assert_int_eq(ht_store_make_space(w.s, true), 0);
        ck_assert_uint_eq(given_up_count, i + 1);
        ck_assert_uint_eq(given_up.id, ROOT);
        ck_assert_uint_gt(ht_store_available(w.s), available);
        available = ht_store_available(w.s);
        ck_assert(i + 1 == kept ? steps().first > before.last - logged || !logged
                                : steps().first == before.first + i + 1);
    }
    lack(1);
    ck_assert_int_eq(ht_store_make_space(w.s, true), -ENOSPC);
    ht_event_set_sink(NULL, NULL);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, logged);
    uint8_t byte;
    ck_assert_int_eq(ht_optim_redo_read(r, 0, &byte, 1), 1);
    ht_optim_redo_close(r);
    check_all_readable();
    fixture_train(&w, 13, 14);
    uint64_t hash = fixture_hash(&w);
    crash_and_mount();
    ck_assert(fixture_hash(&w) == hash);
}

/* All together have less than is lacking: each keeps what it has. So it is where no space for data is lacking. */
TEST(what_cannot_be_served_makes_nobody_give_up_anything)
{
    given_up_count = 0;
    ht_event_set_sink(note_given_up, NULL);
    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 12);
    struct ht_redo_steps before = steps();
    uint64_t aside = fixture_stat(&w).redo_reserved_bytes, could = ht_store_could_give(w.s);
    uint64_t available = ht_store_available(w.s);
    ck_assert_uint_gt(could, spare_aside());
    const uint64_t hopeless[] = {could + HT_BLOCK_BYTES, 1ull << 40, 0};
    for (size_t i = 0; i < HT_ARRAY_SIZE(hopeless); i++) {
        if (hopeless[i])
            lack(hopeless[i]);
        ck_assert_int_eq(ht_store_make_space(w.s, true), -ENOSPC);
    }
    ck_assert_uint_eq(given_up_count, 0);
    ck_assert_uint_eq(steps().first, before.first);
    ck_assert_uint_eq(fixture_stat(&w).redo_reserved_bytes, aside);
    ck_assert_uint_eq(ht_store_available(w.s), available);
    lack(could);
    ck_assert_int_eq(ht_store_make_space(w.s, true), 0);
    ck_assert_uint_eq(ht_store_available(w.s), available + could);
    ck_assert_uint_gt(given_up_count, 0);
    ht_event_set_sink(NULL, NULL);
}

/* A store full of kept steps takes the gradient, and the state, of a new parameter. */
TEST(kept_steps_are_given_up_before_a_gradient_is_refused)
{
    struct ht_obj_attr attr = {.chunk_bytes = HT_CHUNK_BYTES};
    uint8_t *bytes = calloc(1, MIB);
    struct ht_obj *filler;
    uint64_t off = 0;

    given_up_count = 0;
    ht_event_set_sink(note_given_up, NULL);
    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 12);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 300, HT_SMALL_CHUNK_BYTES);
    attr.oid = ht_store_new_id(w.s);
    ck_assert_int_eq(ht_obj_create(w.s, &attr, &filler), 0);
    for (unsigned pass = 0; pass < 2; pass++) {
        for (size_t len = MIB; len >= 4096; len /= 2) {
            memset(bytes, (int)(off >> 12) + 1, MIB);
            while (ht_obj_write(filler, off, bytes, len) == (ssize_t)len)
                off += len;
        }
        if (pass == 0) { /* the filler takes the space that is set aside, too */
            lack(spare_aside());
            ck_assert_int_eq(ht_store_make_space(w.s, true), 0);
        }
        ck_assert_uint_eq(given_up_count, 0);
    }
    free(bytes);
    step_param(&w, p);
    ht_event_set_sink(NULL, NULL);
    ck_assert_uint_gt(given_up_count, 0);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ht_obj_put(filler);
}

/* The log is full, and giving up a kept step would make no room there. */
TEST(a_full_log_gives_up_no_kept_step)
{
    uint64_t reserved = 0;

    given_up_count = 0;
    ht_event_set_sink(note_given_up, NULL);
    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 12);
    struct ht_redo_steps before = steps();
    uint64_t aside = fixture_stat(&w).redo_reserved_bytes;
    while (!ht_store_log_reserve(w.s, 64))
        reserved += 64;
    lack(1);
    ck_assert_int_eq(ht_store_make_space(w.s, true), -ENOSPC);
    ck_assert_uint_eq(given_up_count, 0);
    ck_assert_uint_eq(steps().first, before.first);
    ck_assert_uint_eq(fixture_stat(&w).redo_reserved_bytes, aside);
    ht_store_log_unreserve(w.s, reserved);
    lack(1);
    ck_assert_int_eq(ht_store_make_space(w.s, true), 0);
    ht_event_set_sink(NULL, NULL);
}

struct taker {
    pthread_t thread;
    struct ht_root *root;
    struct ht_obj *obj;
    uint64_t at, len;
    int rc;
};

static void *take_space(void *arg)
{
    struct taker *t = arg;

    t->rc = ht_opt_redo_prealloc(t->root, t->obj, t->at, t->len);
    return NULL;
}

/* Two workers need all that is set aside of a full store: neither finds it gone while the other one takes its part. */
TEST(workers_share_the_space_that_is_set_aside)
{
    enum { TAKERS = 2, TRIES = 4 };
    struct taker taker[TAKERS];

    given_up_count = 0;
    fixture_begin_mixed(&w, keeps, 2);
    fixture_train(&w, 1, 12);
    struct ht_obj *filler = fixture_fill(&w, 0);
    struct ht_root *root = ht_opt_root_get(w.o, ROOT);
    uint64_t part = fixture_stat(&w).redo_reserved_bytes / TAKERS / 4096 * 4096;
    ck_assert_uint_gt(part, 0);
    ck_assert_uint_lt(ht_store_available(w.s), part);
    ht_event_set_sink(note_given_up, NULL);
    for (unsigned try = 0; try < TRIES; try++) {
        struct ht_obj_attr attr = {.oid = ht_store_new_id(w.s), .chunk_bytes = HT_CHUNK_BYTES, .scope = ROOT};
        struct ht_obj *obj;
        ck_assert_int_eq(ht_obj_create(w.s, &attr, &obj), 0);
        ht_store_lock(w.s); /* so that the one is still at it when the other comes */
        for (unsigned i = 0; i < TAKERS; i++) {
            taker[i] = (struct taker){.root = root, .obj = obj, .at = (uint64_t)i * 64 * MIB, .len = part};
            ck_assert_int_eq(pthread_create(&taker[i].thread, NULL, take_space, &taker[i]), 0);
        }
        usleep(20000);
        ht_store_unlock(w.s);
        for (unsigned i = 0; i < TAKERS; i++) {
            ck_assert_int_eq(pthread_join(taker[i].thread, NULL), 0);
            ck_assert_int_eq(taker[i].rc, 0);
        }
        ck_assert_int_eq(ht_opt_delete_objects(w.s, &obj, 1), 0);
        ht_obj_put(obj);
        ck_assert_uint_eq(given_up_count, 0);
        lock(w.o); /* the space of the object is free again */
        ht_opt_redo_set_aside(root);
        unlock(w.o);
    }
    ht_event_set_sink(NULL, NULL);
    lock(w.o);
    ht_opt_root_put(root);
    unlock(w.o);
    ht_obj_put(filler);
}

RUN_TESTS("redo_read", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
