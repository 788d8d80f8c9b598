/* SPDX-License-Identifier: Apache-2.0 */
/* An open .hitrain/gather: what a write that must wait has written, what a close drops, who waits, shares of users. */
#include <fcntl.h>

#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/hidden_priv.h"
#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "tests/support/harness.h"
#include "tests/support/suite.h"
#include "tiering/api/batch_pin.h"

enum {
    ELEMENTS = 1000,
    BYTES = 4 * ELEMENTS,
    DEVICE_BYTES = 64 << 20,
    LINES_BYTES = 8191,
    OWNER = 7,
    USER = 8,
    OTHER = 9,
    SUBUID = 524288
};

static const struct harness_param params[] = {{"a", "f32", ELEMENTS}, {"b", "f32", ELEMENTS}};
static const struct ht_caller nobody_else = {{0, 0, 0}, NULL, NULL, NULL};
static const char both[] = "4000 a\n4000 b\n";
static struct harness k;
static uint64_t root, b_ino;
static uint8_t bytes[2 * BYTES];

static void setup(void)
{
    harness_format(&k, 1, DEVICE_BYTES, 512);
    ck_assert_int_eq(harness_open(&k, 2), 0);
    root = harness_model(&k, "model", params, 2, "sgd lr=1");
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    b_ino = harness_find(&k, root, "b");
}

static void teardown(void)
{
    ck_assert_int_eq(harness_close(&k, true), 0);
    harness_free(&k);
}

static struct ht_gather *open_for(uint32_t uid, int flags)
{
    const struct ht_caller caller = {.cred = {.uid = uid}};
    struct ht_gather *g;

    ck_assert_int_eq(ht_gather_new(k.ctl, root, flags, &caller, &g), 0);
    return g;
}

static int name(struct ht_gather *g, const char *lines)
{
    return ht_gather_add(g, lines, strlen(lines), &nobody_else);
}

/* The gradient of b, as a client of its own has it. */
static struct ht_grad *open_b(void)
{
    struct ht_param_desc desc = {.root = root, .dtype = HT_DTYPE_F32, .grad_dtype = HT_DTYPE_F32};
    struct ht_grad *grad;

    ck_assert_int_eq(ht_ns_open(k.ns, b_ino, &desc.obj), 0);
    ck_assert_int_eq(ht_grad_open(k.optim, &desc, &grad), 0);
    return grad;
}

static void close_b(struct ht_grad *grad)
{
    ht_grad_release(grad);
    ht_ns_close(k.ns, b_ino);
}

TEST(a_refusal_says_why)
{
    struct ht_gather *g = open_for(0, O_RDWR);
    struct ht_redo_steps s;
    struct ht_last_error e;
    char text[HT_MAKING_MAX];

    ck_assert_int_eq(ht_optim_redo_steps(k.optim, root, &s), 0);
    snprintf(text, sizeof(text), "maker %llu %llu", (unsigned long long)s.lineage, (unsigned long long)s.publications);
    harness_set_word(&k, root, HT_XATTR_PREFIX "making", text);
    ck_assert_int_eq(name(g, both), -EBUSY);
    ck_assert(ht_last_error_get(k.ctl, root, &e) && strstr(e.text, "gather: '4000 a': this model is half-made"));
    ck_assert_int_eq(ht_ns_removexattr(k.ns, root, HT_XATTR_PREFIX "making"), 0);
    ck_assert_int_eq(name(g, both), 0);
    ht_gather_free(g);
}

/* ------------------------------------------------------------------ writes */

static void *write_b(void *grad)
{
    ck_assert_int_eq(ht_grad_write(grad, 0, bytes, BYTES), BYTES);
    return NULL;
}

static bool is_being_written(struct ht_param *p)
{
    lock(k.optim);
    bool busy = !ht_list_empty(&p->inflight);
    unlock(k.optim);
    return busy;
}

TEST(a_write_that_must_wait_returns_what_it_has_written)
{
    struct ht_gather *g = open_for(0, O_RDWR);
    struct ht_grad *grad = open_b();
    pthread_t writer;

    ck_assert_int_eq(name(g, both), 0);
    write_b(grad);
    struct ht_param *p = ht_opt_param_get(k.optim, b_ino);
    struct ht_batch_pin pin = {
        .store = k.store, .count = 1, .chunk = {{.obj = p->grad, .index = 0, .mode = HT_BATCH_PIN_READ}}};
    ck_assert_int_eq(ht_batch_pin_begin(&pin), 0);
    ck_assert_int_eq(ht_batch_pin_wait(&pin), 0);
    ck_assert_int_eq(pthread_create(&writer, NULL, write_b, grad), 0);
    while (!is_being_written(p))
        usleep(1000);
    ck_assert_int_eq(ht_gather_write(g, 0, bytes, 2 * BYTES, false), BYTES);
    ck_assert_int_eq(ht_gather_write(g, BYTES, bytes, BYTES, false), -EAGAIN);
    ht_batch_pin_end(&pin, 0);
    ck_assert_int_eq(ht_batch_pin_finish(&pin), 0);
    pthread_join(writer, NULL);
    ck_assert_int_eq(ht_gather_write(g, BYTES, bytes, BYTES, false), BYTES);
    ht_opt_param_put(p);
    close_b(grad);
    ht_gather_free(g);
}

TEST(a_close_drops_nothing_that_others_wrote_in_between)
{
    struct ht_gather *g = open_for(0, O_WRONLY);
    struct ht_grad *grad = open_b();

    ck_assert_int_eq(name(g, "4000 b"), 0);
    ck_assert_int_eq(ht_gather_write(g, BYTES - 4, bytes, 4, true), 4);
    ck_assert_int_eq(ht_gather_write(g, 1, bytes, 3, true), 3);
    ck_assert_int_eq(ht_gather_write(g, 0, bytes, 1, true), 1);
    ck_assert_int_eq(ht_grad_write(grad, 4, bytes, BYTES - 8), BYTES - 8);
    ht_gather_free(g);
    ck_assert_int_eq(ht_grad_flush(grad), 0);
    harness_gradient(&k, root, &params[0], 1);
    ck_assert_int_eq(ht_optim_step(k.optim, root), -EBUSY); /* what the gather wrote is dropped, */
    ck_assert_int_eq(ht_grad_write(grad, 0, bytes, 4), 4);
    ck_assert_int_eq(ht_grad_write(grad, BYTES - 4, bytes, 4), 4);
    ck_assert_int_eq(ht_grad_flush(grad), 0);
    ck_assert_int_eq(ht_optim_step(k.optim, root), 0); /* and nothing else */
    close_b(grad);
}

/* -------------------------------------------------------------------- names */

struct naming {
    struct ht_gather *g;
    atomic_bool done;
};

static void *name_both(void *arg)
{
    struct naming *n = arg;

    ck_assert_int_eq(name(n->g, both), 0);
    n->done = true;
    return NULL;
}

static void set_gate(bool held)
{
    lock(k.optim);
    ht_opt_root_find(k.optim, root)->gate = held;
    notify_changed(k.optim);
    unlock(k.optim);
}

/* The members of one call wait for the gate, as at a boundary; another call on the same file does not. */
TEST(nobody_waits_for_one_who_waits_for_a_boundary)
{
    struct naming n = {.g = open_for(0, O_RDWR)};
    pthread_t namer;

    set_gate(true);
    ck_assert_int_eq(pthread_create(&namer, NULL, name_both, &n), 0);
    usleep(100000);
    ck_assert_int_eq(name(n.g, "4000 none"), -ENOENT);
    ck_assert(!n.done);
    set_gate(false);
    pthread_join(namer, NULL);
    ck_assert_int_eq(ht_gather_read(n.g, 0, bytes, 2 * BYTES), 2 * BYTES);
    ht_gather_free(n.g);
}

/* a becomes so many members. */
static int name_many(struct ht_gather *g, unsigned count)
{
    static char lines[LINES_BYTES + 1];

    ck_assert_uint_le(7 * count, LINES_BYTES);
    for (unsigned i = 0; i < count; i++)
        memcpy(lines + 7 * (size_t)i, "4000 a\n", 7);
    return ht_gather_add(g, lines, 7 * (size_t)count, &nobody_else);
}

static void set_owner_of_store(uint32_t uid)
{
    struct stat st = {.st_uid = uid}, out;

    ck_assert_int_eq(ht_ns_setattr(k.ns, HT_NS_ROOT_INO, HT_SET_UID, &st, &out), 0);
}

/* Two users halve the part of users; the owner of the store and root have the rest. */
TEST(no_user_takes_all_members)
{
    enum { MAX = 800, FIRST = 300, SECOND = 150, THIRD = 175 };

    set_owner_of_store(OWNER);
    struct ht_gather *first = open_for(USER, O_RDONLY), *second = open_for(USER, O_RDONLY);
    struct ht_gather *other = open_for(OTHER, O_RDONLY), *own = open_for(OWNER, O_RDONLY), *all = open_for(0, O_RDONLY);

    k.ctl->gathers.members.max = MAX;
    ck_assert_int_eq(name_many(first, FIRST + 1), -EDQUOT);
    ck_assert_int_eq(name_many(first, FIRST), 0);
    ck_assert_int_eq(name_many(second, 1), -EDQUOT);
    ck_assert_int_eq(name_many(other, SECOND + 1), -EDQUOT);
    ck_assert_int_eq(name_many(other, SECOND), 0);
    ck_assert_int_eq(name_many(own, THIRD + 1), -EDQUOT);
    ck_assert_int_eq(name_many(own, THIRD), 0);
    ck_assert_int_eq(name_many(all, THIRD + 1), -ENOMEM);
    ck_assert_int_eq(name_many(all, THIRD), 0);
    ht_gather_free(first);
    ck_assert_int_eq(name_many(second, SECOND), 0);
    ck_assert_int_eq(ht_gather_read(second, 0, bytes, 2 * BYTES), 2 * BYTES);
    ht_gather_free(second);
    ht_gather_free(other);
    ht_gather_free(own);
    ht_gather_free(all);
    ck_assert_uint_eq(ht_quota_taken(&k.ctl->gathers.members), 0);
    ck_assert(ht_list_empty(&k.ctl->gathers.users));
}

/* Writes every second element, each of which is a piece of its own, until that is refused. How many there were. */
static unsigned fill_account(struct ht_gather *g)
{
    unsigned pieces = 0;
    ssize_t n;

    ck_assert_int_eq(name(g, both), 0);
    while ((n = ht_gather_write(g, 8 * pieces, bytes, 4, false)) == 4)
        pieces++;
    ck_assert_int_eq(n, -EDQUOT);
    return pieces;
}

/* The same for the memory of what they have written. */
TEST(no_user_takes_all_memory_of_accounts)
{
    enum { MAX = 4096, PIECES_LEAST = 30 };

    set_owner_of_store(OWNER);
    struct ht_gather *first = open_for(USER, O_RDWR), *second = open_for(USER, O_RDWR);
    struct ht_gather *own = open_for(OWNER, O_RDWR), *all = open_for(0, O_RDWR);

    lock(k.optim);
    k.optim->accounts.max = MAX;
    unlock(k.optim);
    unsigned of_first = fill_account(first), of_second = fill_account(second);
    lock(k.optim);
    ck_assert_uint_le(k.optim->accounts.taken[HT_QUOTA_OTHERS], MAX / 4 * 3 / 2); /* they are one user */
    unlock(k.optim);
    ck_assert_uint_gt(of_first, 2 * of_second);
    ck_assert_uint_gt(fill_account(own), PIECES_LEAST);
    ck_assert_uint_gt(fill_account(all), PIECES_LEAST);
    ht_gather_free(first);
    ck_assert_int_eq(ht_gather_write(second, 8 * of_second, bytes, 4, false), 4);
    ht_gather_free(second);
    ht_gather_free(own);
    ht_gather_free(all);
    lock(k.optim);
    ck_assert_uint_eq(ht_quota_taken(&k.optim->accounts), 0);
    unlock(k.optim);
}

/* A subordinate uid of the same block is no user of its own. */
TEST(uids_of_containers_share_a_part)
{
    struct ht_gather *first = open_for(SUBUID, O_RDONLY), *second = open_for(SUBUID + 1, O_RDONLY);

    k.ctl->gathers.members.max = 800;
    ck_assert_int_eq(name_many(first, 300), 0);
    ck_assert_int_eq(name_many(second, 1), -EDQUOT);
    ht_gather_free(first);
    ht_gather_free(second);
}

RUN_TESTS("gather", .timeout_s = 60, .setup = setup, .teardown = teardown)
