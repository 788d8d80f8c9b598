/* SPDX-License-Identifier: Apache-2.0 */
/* Logged steps that are computed again while clients use the store. */
#include <semaphore.h>
#include <sys/mman.h>

#include "tests/unit/optim/redo/held.h"

#include "optim/state/redo.h"
#include "tiering/base/activity.h"
#include "tiering/base/event.h"

static const char logs[] = "adamw lr=1e-2 redo=on durable_every=100";
enum { STEPS = 5 };

/* A gate may hold updates back; here nobody lets them go before the test does. */
static void go_on(void)
{
    set_hold(&w, false);
}

static void train(unsigned steps)
{
    for (unsigned i = 0; i < steps; i++) {
        step_all(&w);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    }
}

static void begin(void)
{
    memset(&w, 0, sizeof(w));
    open_mixed(logs, 2, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    train(STEPS);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, STEPS - 1);
}

/* A crash and a mount whose replay waits in its first step. */
static void crash_and_hold(void)
{
    fixture_crash(&w);
    w.before_start = hold_updates;
    fixture_mount(&w);
    w.before_start = NULL;
}

static void wait_and_check(void)
{
    ht_optim_recovered(w.o);
    ck_assert_uint_eq(fixture_stat(&w).replay_steps, 0);
    check_all_at(STEPS);
}

/* ---------------------------------------------------------------- reading */

static uint64_t resident_bytes(uint64_t oid)
{
    struct ht_obj *obj = ht_obj_get(w.s, oid);
    struct ht_obj_stat st;

    ck_assert_ptr_nonnull(obj);
    ht_obj_stat(obj, &st);
    ht_obj_put(obj);
    return st.resident_bytes;
}

/* While updates of a step run, the gradients of the next one are read. Those of a step that has ended leave memory. */
TEST(the_next_step_is_read_while_updates_run)
{
    uint64_t oid[2];

    crash_and_hold();
    lock(w.o);
    const struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    ck_assert_uint_ge(root->redo.steps, 2);
    for (unsigned i = 0; i < 2; i++)
        oid[i] = root->redo.step[i].oid;
    unlock(w.o);
    WAIT_FOR(resident_bytes(oid[1]) > 0);
    ck_assert_uint_eq(fixture_stat(&w).replay_steps_left, STEPS - 1);
    go_on();
    wait_and_check();
    for (unsigned i = 0; i < 2; i++)
        ck_assert_uint_eq(resident_bytes(oid[i]), 0);
}

/* ------------------------------------------------------------------ clients */

struct client {
    pthread_t thread;
    int (*run)(void);
    atomic_bool ended;
    int rc;
};

static void *client_main(void *arg)
{
    struct client *c = arg;

    c->rc = c->run();
    c->ended = true;
    return NULL;
}

static void client_begin(struct client *c, int (*run)(void))
{
    *c = (struct client){.run = run};
    ck_assert_int_eq(pthread_create(&c->thread, NULL, client_main, c), 0);
}

static int client_end(struct client *c)
{
    pthread_join(c->thread, NULL);
    return c->rc;
}

#define CALL(name, expression) \
    static int name(void)      \
    {                          \
        return expression;     \
    }

CALL(commit, ht_optim_commit(w.o, ROOT))
CALL(abort_step, ht_optim_abort(w.o, ROOT))
CALL(finish, ht_optim_finish(w.o))
CALL(wait_for_root, ht_optim_wait(w.o, ROOT, 0))

static int read_state(void)
{
    struct ht_param_desc desc = fixture_desc(&w.param[0]);
    float m;
    ssize_t n = ht_optim_state_read(w.o, &desc, "exp_avg", 0, &m, 4);

    return n < 0 ? (int)n : n != 4 || memcmp(&m, w.param[0].m, 4) != 0;
}

static int open_gradient(void)
{
    struct ht_param_desc desc = fixture_desc(&w.param[0]);
    struct ht_grad *g;
    int rc = ht_grad_open(w.o, &desc, &g);

    if (!rc)
        ht_grad_release(g);
    return rc;
}

static struct {
    struct ht_waiter waiter;
    sem_t woken;
} reader;

static void wake(struct ht_waiter *waiter)
{
    (void)waiter;
    sem_post(&reader.woken);
}

/* The first parameter is not readable; someone waits for that. */
static void read_later(void)
{
    sem_init(&reader.woken, 0, 0);
    reader.waiter = (struct ht_waiter){.wake = wake};
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 0, 4, &reader.waiter), -EAGAIN);
}

static atomic_uint progress_events, replayed_events;

static void note(void *ctx, const struct ht_event *e)
{
    (void)ctx;
    progress_events += e->code == HT_EVENT_REPLAY_PROGRESS;
    replayed_events += e->code == HT_EVENT_STEPS_REPLAYED;
}

/* -------------------------------------------------------------------- tests */

/* The mount is there at once; what the replay changes waits, and nothing else does. */
TEST(a_mount_does_not_wait_for_logged_steps)
{
    static int (*const waits[])(void) = {commit, abort_step, wait_for_root, read_state, open_gradient};
    struct client client[HT_ARRAY_SIZE(waits)];

    progress_events = replayed_events = 0;
    ht_event_set_sink(note, NULL);
    crash_and_hold();
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_uint_eq(st.step, STEPS);
    ck_assert_uint_eq(st.durable_step, STEPS);
    ck_assert_uint_eq(st.step_open, 0);
    ck_assert(!st.open);
    ck_assert_uint_eq(st.replay_steps, STEPS - 1);
    ck_assert_uint_eq(st.replay_steps_left, STEPS - 1);
    ck_assert_uint_eq(st.replay_seconds_left, 0);
    ck_assert_uint_eq(progress_events, 1);
    read_later();
    for (unsigned i = 0; i < w.params; i++) {
        ck_assert_int_eq(ht_optim_readable(w.o, w.param[i].oid, 0, 4, NULL), -EAGAIN);
        ck_assert(ht_optim_replaying(w.o, w.param[i].oid));
        ck_assert(ht_optim_param_unpublished(w.o, w.param[i].oid));
    }
    ck_assert_int_eq(ht_optim_readable(w.o, ht_store_new_id(w.s), 0, 4, NULL), 0);
    ck_assert_int_eq(ht_optim_root_set_step(w.o, ROOT, 70), -EBUSY);
    struct ht_optim_steer by = {.conditional = true};
    ck_assert_int_eq(ht_optim_may_steer(w.o, ROOT, &by), 0);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(waits); i++)
        client_begin(&client[i], waits[i]);
    usleep(20000); /* those that do not wait have ended by then, nearly always */
    for (unsigned i = 0; i < HT_ARRAY_SIZE(waits); i++)
        ck_assert_msg(!client[i].ended, "client %u did not wait", i);
    ck_assert_int_eq(sem_trywait(&reader.woken), -1);
    ht_optim_verify(w.o);
    go_on();
    for (unsigned i = 0; i < HT_ARRAY_SIZE(waits); i++)
        ck_assert_msg(client_end(&client[i]) == 0, "client %u: %d", i, client[i].rc);
    sem_wait(&reader.woken);
    wait_and_check();
    ck_assert(!ht_optim_replaying(w.o, w.param[0].oid));
    ht_event_set_sink(NULL, NULL);
    ck_assert_uint_eq(replayed_events, 1);
    train(2);
    check_all(&w);
    crash_and_check();
}

static atomic_bool interrupt[5];

static int interruptible(unsigned i, int (*run)(void))
{
    ht_activity_set_interrupt(&interrupt[i]);
    int rc = run();
    ht_activity_set_interrupt(NULL);
    return rc;
}

CALL(commit_interruptible, interruptible(0, commit))
CALL(abort_interruptible, interruptible(1, abort_step))
CALL(wait_interruptible, interruptible(2, wait_for_root))
CALL(read_interruptible, interruptible(3, read_state))
CALL(open_interruptible, interruptible(4, open_gradient))

/* Each of these clients ends alone, and nothing has changed. */
TEST(a_client_that_waits_for_logged_steps_can_be_interrupted)
{
    static int (*const waits[])(void) = {commit_interruptible, abort_interruptible, wait_interruptible,
                                         read_interruptible, open_interruptible};
    struct client client[HT_ARRAY_SIZE(waits)];

    crash_and_hold();
    ck_assert(ht_optim_root_replaying(w.o, ROOT));
    for (unsigned i = 0; i < HT_ARRAY_SIZE(waits); i++) {
        interrupt[i] = false;
        client_begin(&client[i], waits[i]);
    }
    usleep(20000); /* they wait by then, nearly always */
    for (unsigned i = 0; i < HT_ARRAY_SIZE(waits); i++) {
        ck_assert_msg(!client[i].ended, "client %u did not wait", i);
        interrupt[i] = true;
        ht_optim_interrupt(w.o);
        ck_assert_msg(client_end(&client[i]) == -EINTR, "client %u: %d", i, client[i].rc);
    }
    ck_assert_uint_eq(fixture_stat(&w).replay_steps_left, STEPS - 1);
    go_on();
    wait_and_check();
    ck_assert(!ht_optim_root_replaying(w.o, ROOT));
    for (unsigned i = 0; i < HT_ARRAY_SIZE(waits); i++) /* without a replay they do not end early */
        ck_assert_msg(waits[i]() == 0, "client %u", i);
    train(1);
    check_all(&w);
}

/* It publishes nothing. */
TEST(a_crash_during_the_replay_begins_it_again)
{
    for (unsigned i = 0; i < 3; i++)
        crash_and_hold();
    crash_and_mount();
    wait_and_check();
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, STEPS - 1);
}

/* A crash at some time of the replay that no test chooses. */
TEST(a_crash_at_any_time_of_the_replay_begins_it_again)
{
    for (unsigned wait = 1; wait < 1 << 13; wait *= 2) {
        crash_and_hold();
        go_on();
        for (unsigned i = wait; i; i--)
            sched_yield();
    }
    crash_and_mount();
    wait_and_check();
}

/* A file of the model that no commit has published. Returns its number. */
static uint64_t cursor_file(void)
{
    const struct ht_obj_attr attr = {.oid = ht_store_new_id(w.s), .chunk_bytes = HT_CHUNK_BYTES, .scope = ROOT};
    struct ht_obj *file;

    ck_assert_int_eq(ht_obj_create(w.s, &attr, &file), 0);
    ck_assert_int_eq(ht_obj_write(file, 0, "cursor", 6), 6);
    ht_obj_put(file);
    return attr.oid;
}

/* What clients have changed becomes durable with all steps. */
TEST(an_orderly_end_waits_for_the_replay)
{
    struct client c;

    crash_and_hold();
    uint64_t oid = cursor_file();
    client_begin(&c, finish);
    usleep(20000);
    ck_assert(!c.ended);
    go_on();
    ck_assert_int_eq(client_end(&c), 0);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 0);
    crash_and_mount();
    wait_and_check();
    struct ht_obj *file = ht_obj_get(w.s, oid);
    ck_assert_ptr_nonnull(file);
    ht_obj_put(file);
}

/* A change that no client has committed is not durable because a replay has ended. */
TEST(a_replay_publishes_nothing)
{
    crash_and_hold();
    uint64_t oid = cursor_file();
    go_on();
    wait_and_check();
    crash_and_mount();
    wait_and_check();
    ck_assert_ptr_null(ht_obj_get(w.s, oid));
}

/* _i: its updates are queued, or may be at any place. */
TEST_LOOP(a_parameter_is_deleted_beside_the_replay, 12)
{
    crash_and_hold();
    unsigned last = w.params - 1;
    if (_i)
        go_on();
    for (unsigned i = 1u << _i; i; i--)
        sched_yield();
    fixture_delete(&w, last);
    go_on();
    ht_optim_recovered(w.o);
    ck_assert_str_eq(fixture_stat(&w).error, "");
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0); /* it comes back */
    wait_and_check();
    fixture_delete(&w, last);
    ht_obj_put(w.param[last].obj);
    forget_model(&w.param[last]);
    w.params--;
    step_all(&w);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, 0);
    crash_and_check();
}

/* With all its files: nothing is left to compute, and nothing fails. */
TEST_LOOP(a_root_is_deleted_beside_the_replay, 12)
{
    struct ht_tx *tx;

    crash_and_hold();
    if (_i)
        go_on();
    for (unsigned i = 1u << _i; i; i--)
        sched_yield();
    ck_assert_int_eq(ht_tx_begin(w.s, 1 << 16, &tx), 0);
    ht_scope_end(w.s, ROOT, HT_SCOPE_DELETED, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    go_on();
    ht_optim_recovered(w.o);
    ck_assert_ptr_null(ht_opt_root_get(w.o, ROOT));
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -ENOENT);
    ht_optim_verify(w.o);
}

static atomic_uint taken_back;

static void note_taken_back(void *ctx)
{
    (void)ctx;
    taken_back++;
}

/* Who waited for the last step learns that it cannot be had: nobody gets the full step for it. */
TEST(a_replay_that_fails_lets_nobody_wait)
{
    struct client c[2];

    taken_back = 0;
    w.hooks.taken_back = note_taken_back;
    crash_and_hold();
    read_later();
    client_begin(&c[0], commit);
    client_begin(&c[1], wait_for_root);
    usleep(20000);
    ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 2, false);
    go_on();
    ck_assert_int_eq(client_end(&c[0]), -EIO);
    ck_assert_int_eq(client_end(&c[1]), -EIO);
    sem_wait(&reader.woken);
    ht_fault_disarm_all();
    ht_optim_recovered(w.o);
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_uint_eq(st.step, 1);
    ck_assert_uint_eq(st.durable_step, 1);
    ck_assert_msg(strstr(st.error, "cannot be computed again") != NULL, "error is \"%s\"", st.error);
    ck_assert_int_eq(open_gradient(), -EIO);
    ck_assert_int_eq(read_state(), -EIO);
    ck_assert_int_eq(ht_optim_readable(w.o, w.param[0].oid, 0, 4, NULL), -EIO);
    ck_assert_int_eq(ht_optim_finish(w.o), 0);
    fixture_unmount(&w);
    ck_assert_uint_eq(taken_back, 1);
    fixture_mount(&w);
    wait_and_check();
}

/* Files of memory, which clients have mapped, show the full step again, too. */
TEST(mapped_parameters_show_the_full_step_after_a_replay_that_fails)
{
    enum { CHUNKS = 3 };
    int fd;

    fixture_close(&w);
    memset(&w, 0, sizeof(w));
    w.dram_bytes = 24 * MIB;
    w.shm_bytes = 12 * MIB;
    fixture_open_as(&w, logs, 2);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, CHUNKS * HT_CHUNK_BYTES / 4, HT_CHUNK_BYTES);
    size_t len = p->n * 4;
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    train(1);
    uint8_t *full = test_alloc(len);
    memcpy(full, p->p, len);
    train(STEPS - 1);
    crash_and_hold();
    ck_assert_int_eq(ht_obj_shm_open_for(p->obj, 0, &fd), 0);
    const uint8_t *mapped = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, 0);
    ck_assert_ptr_ne(mapped, MAP_FAILED);
    ck_assert_int_eq(memcmp(mapped, full, len), 0);
    ht_fault_arm(HT_FAULT_OPTIM_UPDATE, 2 * CHUNKS, false); /* in the second logged step */
    go_on();
    ht_optim_recovered(w.o);
    ht_fault_disarm_all();
    ck_assert_uint_eq(fixture_stat(&w).step, 1);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, 1);
    ck_assert_int_eq(memcmp(mapped, full, len), 0);
    munmap((void *)(uintptr_t)mapped, len);
    ht_obj_shm_close(p->obj);
    crash_and_mount();
    wait_and_check();
}

static bool is_replaying_updates(void)
{
    lock(w.o);
    const struct ht_root *root = ht_opt_root_find(w.o, ROOT);
    bool yes = root->redo.replaying && root->pending;
    unlock(w.o);
    return yes;
}

/* A client asked for another size before the abort began, and its request ends late: the abort takes it back, too. */
TEST_LOOP(a_size_that_comes_late_is_taken_back, 2)
{
    struct client aborter;
    uint64_t hash = fixture_hash(&w), bytes = w.param[0].n * dtype_bytes(w.param[0].dtype);

    fixture_send(&w, 1, STEPS + 1, 0);
    ck_assert_int_eq(ht_optim_wait(w.o, ROOT, 0), 0); /* so the logged steps are computed again */
    set_hold(&w, true);
    client_begin(&aborter, abort_step);
    while (!is_replaying_updates())
        usleep(1000);
    ck_assert_int_eq(ht_obj_truncate(w.param[0].obj, _i ? bytes + 4096 : 4), 0);
    go_on();
    ck_assert_int_eq(client_end(&aborter), 0);
    ck_assert_str_eq(fixture_stat(&w).error, "");
    ck_assert_uint_eq(ht_obj_size(w.param[0].obj), bytes);
    ck_assert_uint_eq(fixture_stat(&w).durable_step, STEPS);
    ck_assert(fixture_hash(&w) == hash);
    wait_and_check();
    step_all(&w);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    crash_and_check();
}

RUN_TESTS("recover", .setup = begin, .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
