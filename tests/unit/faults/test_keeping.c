/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_keeping.c - something fails in the middle of a step that is kept, a snapshot, a clone, a rollback, a received
 * step or a forgotten one: the N-th read, write, flush, allocation or thread, or passage of a fault point.
 *
 * A call that fails has changed nothing, or has done all; it works when it is repeated. A step may become durable and
 * not be kept. After an unmount or a crash all is as it was, fsck finds nothing, and the next step works.
 *
 * HITRAIN_LONG=1 takes every N, else those beyond the first ones are a sample. HITRAIN_FAULT=N looks at one only, and
 * shows messages.
 */

#include "tests/support/memory.h"
#include "tests/support/receive.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tests/support/wrap.h"
#include "tiering/base/fault.h"
#include "tiering/base/hash.h"

enum { DEVICE_BYTES = 8 << 20, PARAMS = RECEIVE_PARAMS, GRADIENT_BYTES_MAX = 8192 };

static const struct harness_param params[PARAMS] = {{"w", "f32", 1500}, {"h", "bf16", 700}};

static struct harness k;
static uint64_t root;

/* -------------------------------------------------------------- operations */

static int write_gradient(const struct harness_param *p, uint64_t seed)
{
    static uint8_t data[GRADIENT_BYTES_MAX];
    uint64_t size = harness_element_bytes(p), ino = harness_find(&k, root, p->name);
    uint8_t dtype = size == 4 ? HT_DTYPE_F32 : HT_DTYPE_BF16;
    struct ht_param_desc desc = {.root = root, .dtype = dtype, .grad_dtype = dtype};
    struct ht_grad *g;

    for (uint64_t e = 0; e < p->elements; e++) {
        float x = (float)(int32_t)(rnd_next(&seed) & 0xffff) / 65536.0f - 0.5f;
        memcpy(data + size * e, (uint8_t *)&x + 4 - size, size);
    }
    int rc = ino ? ht_ns_open(k.ns, ino, &desc.obj) : -ENOMEM;
    if (rc)
        return rc;
    rc = ht_grad_open(k.optim, &desc, &g);
    if (!rc) {
        ssize_t n = ht_grad_write(g, 0, data, size * p->elements);
        rc = n < 0 ? (int)n : ht_grad_flush(g);
        ht_grad_release(g);
    }
    ht_ns_close(k.ns, ino);
    return rc;
}

static int step(void)
{
    uint64_t seed = harness_model_step(&k, root) + 1;
    int rc = 0;

    for (unsigned i = 0; !rc && i < PARAMS; i++)
        rc = write_gradient(&params[i], seed * 10 + i);
    return rc ? rc : ht_optim_commit(k.optim, root);
}

#define OPERATION(name, expression) \
    static int name(void)           \
    {                               \
        return expression;          \
    }

OPERATION(give_up, ht_optim_abort(k.optim, root))

static int keep(void)
{
    struct ht_optim_steer by = {0};

    return ht_optim_snapshot_by(k.optim, root, "named", &by);
}

OPERATION(clone_model, harness_clone(&k, root, "1", HT_NS_ROOT_INO, "clone", 0))
OPERATION(go_back, harness_rollback(&k, root, "1"))

static int receive(void)
{
    struct receive r = {.k = &k, .params = params, .seed = 3};
    struct ht_ns_kept base;
    int rc = ht_ns_kept_find(k.ns, root, "1", &base);

    if (rc)
        return rc;
    r.base = base.ino;
    rc = receive_begin(&r);
    if (!rc)
        rc = receive_files(&r);
    if (!rc)
        rc = receive_commit(&r);
    if (!rc)
        rc = receive_publish(&r);
    return rc ? rc : receive_clean(&k);
}

OPERATION(clean, receive_clean(&k))
OPERATION(forget, ht_ns_kept_forget(k.ns, root, "named"))

/* In this order. After each there is one more thing that the next ones must not touch. */
static const struct operation {
    const char *name;
    int (*run)(void);
    int (*undo)(void); /* what a client does after a failure; NULL: nothing */
} operations[] = {
    {"a step that is kept", step, give_up},
    {"snapshot", keep, NULL},
    {"clone", clone_model, NULL},
    {"rollback", go_back, NULL},
    {"a step again under its number", step, give_up},
    {"receive", receive, clean},
    {"forget", forget, NULL},
    {"a step that ends the oldest", step, give_up},
};
enum { OPERATIONS = HT_ARRAY_SIZE(operations) };

/* ----------------------------------------------------------------- judging */

struct state {
    uint64_t model, kept, others;
};

static struct state learned[OPERATIONS + 1]; /* before the first operation, and after each */

static uint64_t mix(uint64_t hash, uint64_t value)
{
    return ht_hash64(&value, sizeof(value), hash);
}

static uint64_t model_hash(uint64_t ino)
{
    return ino ? mix(harness_model_hash(&k, ino, params, PARAMS), harness_model_step(&k, ino)) : 0;
}

static struct state look(void)
{
    struct state s = {.model = model_hash(root)};
    struct ht_ns_kept *all;
    size_t count;

    ck_assert_int_eq(ht_ns_kept_list(k.ns, root, &all, &count), 0);
    for (size_t i = 0; i < count; i++)
        s.kept = mix(ht_hash64(all[i].name, strlen(all[i].name), s.kept), model_hash(all[i].ino));
    free(all);
    s.others = mix(model_hash(harness_find(&k, HT_NS_ROOT_INO, "clone")), receive_hash(&k, params));
    return s;
}

static bool same(const struct state *a, const struct state *b)
{
    return a->model == b->model && a->kept == b->kept && a->others == b->others;
}

static void start(void)
{
    memset(&k, 0, sizeof(k));
    harness_format(&k, 1, DEVICE_BYTES, 512);
    ck_assert_int_eq(harness_open(&k, 1), 0);
    root = harness_model(&k, "model", params, PARAMS, "adamw lr=0.01 weight_decay=0.1 retain=2");
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    ck_assert_int_eq(step(), 0);
}

static void learn(void)
{
    start();
    learned[0] = look();
    for (unsigned i = 0; i < OPERATIONS; i++) {
        ck_assert_msg(operations[i].run() == 0, "%s fails by itself", operations[i].name);
        learned[i + 1] = look();
        ck_assert(!same(&learned[i], &learned[i + 1]));
    }
    ck_assert_int_eq(harness_close(&k, true), 0);
    harness_free(&k);
}

/* -------------------------------------------------------------------- faults */

enum { MEMORY = HT_IO_FLUSH + 1, THREAD, POINTS };

static const char *const kinds[POINTS] = {[HT_IO_READ] = "read",
                                          [HT_IO_WRITE] = "write",
                                          [HT_IO_FLUSH] = "flush",
                                          [MEMORY] = "allocation",
                                          [THREAD] = "thread"};

static const char *kind_name(unsigned kind)
{
    return kind < POINTS ? kinds[kind] : ht_fault_name((enum ht_fault_point)(kind - POINTS));
}

/* nth 0: never. */
static void arm(unsigned kind, unsigned nth, bool repeat)
{
    if (kind < MEMORY)
        dev_fail(k.dev[0], (enum ht_io_op)kind, nth, repeat);
    else if (kind < POINTS)
        wrap_fail(kind == MEMORY ? WRAP_MEMORY : WRAP_THREAD, nth, repeat);
    else if (nth)
        ht_fault_arm((enum ht_fault_point)(kind - POINTS), nth, repeat);
    else
        ht_fault_disarm_all();
}

static bool reached(unsigned kind, unsigned nth, const struct ht_dev_counters *was)
{
    struct ht_dev_counters now;

    if (kind >= POINTS)
        return ht_fault_passed((enum ht_fault_point)(kind - POINTS)) >= nth;
    if (kind >= MEMORY)
        return wrap_reached(kind == MEMORY ? WRAP_MEMORY : WRAP_THREAD);
    ht_dev_counters(k.dev[0], &now);
    return now.read_errors + now.write_errors + now.flush_errors >
        was->read_errors + was->write_errors + was->flush_errors;
}

static bool is_named(int rc)
{
    static const int names[] = {-ENOMEM, -EIO, -ENOSPC, -EROFS, -EAGAIN};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(names); i++)
        if (rc == names[i])
            return true;
    return false;
}

/* The operation returned rc, and nothing fails any more. Returns what is wrong. *now: what must be there later. */
static const char *judge(unsigned at, int rc, struct state *now)
{
    const struct operation *o = &operations[at];
    const struct state *before = &learned[at], *after = &learned[at + 1];

    if (rc && !is_named(rc))
        return "the error has no name that it should have";
    if (rc && o->undo && o->undo() && !ht_store_failed(k.store))
        return "it cannot be undone";
    *now = look();
    if (ht_store_failed(k.store))
        return NULL;
    if (same(now, after))
        return NULL;
    if (!rc && o->run == step && now->model == after->model && now->kept == before->kept)
        return NULL; /* it is not kept */
    if (!rc)
        return "it says that it has done what it has not";
    if (!same(now, before))
        return "it has failed and changed something";
    rc = o->run();
    *now = look();
    if (ht_store_failed(k.store))
        return NULL;
    return rc ? "it does not work when it is repeated" : same(now, after) ? NULL : "repeated it does something else";
}

static const char *judge_mount(unsigned at, bool failed, const struct state *was)
{
    if (harness_open(&k, 1))
        return "it does not mount";
    root = harness_find(&k, HT_NS_ROOT_INO, "model");
    ck_assert_int_eq(receive_clean(&k), 0);
    struct state now = look();
    if (!same(&now, was) && !(failed && (same(&now, &learned[at]) || same(&now, &learned[at + 1]))))
        return "after a mount it is something else";
    if (step())
        return "no step works after it";
    if (harness_close(&k, true))
        return "it does not unmount";
    return harness_fsck(&k) ? "fsck finds problems at the end" : NULL;
}

/* False: the operation ended before the N-th. */
static bool play(unsigned at, unsigned kind, unsigned nth, bool repeat)
{
    struct ht_dev_counters was;
    struct state now;

    start();
    for (unsigned i = 0; i < at; i++)
        ck_assert_int_eq(operations[i].run(), 0);
    ht_dev_counters(k.dev[0], &was);
    arm(kind, nth, repeat);
    int rc = operations[at].run();
    bool is_reached = reached(kind, nth, &was);
    arm(kind, 0, false);
    const char *wrong = judge(at, rc, &now);
    bool failed = ht_store_failed(k.store);
    int end = harness_close(&k, nth % 2);
    if (!wrong && nth % 2 && end && !failed)
        wrong = "it does not unmount";
    if (!wrong)
        wrong = judge_mount(at, failed, &now);
    ck_assert_msg(!wrong, "%s %u fails%s in %s (%d): %s", kind_name(kind), nth, repeat ? " and all after it" : "",
                  operations[at].name, rc, wrong);
    harness_free(&k);
    return is_reached;
}

#ifdef __SANITIZE_ADDRESS__
enum { ALL = 8, STRIDE = 13 };
#else
enum { ALL = 25, STRIDE = 7 };
#endif

TEST_LOOP(a_failure_changes_nothing_or_is_none, OPERATIONS)
{
    unsigned at = (unsigned)_i, ran = 0, only = (unsigned)setting("HITRAIN_FAULT", 0);

    learn();
    for (unsigned kind = 0; kind < POINTS + HT_FAULT_COUNT; kind++)
        for (unsigned repeat = 0; repeat < (kind < POINTS ? 2 : 1); repeat++)
            for (unsigned nth = only ? only : 1; play(at, kind, nth, repeat) && !only;
                 nth += nth < ALL || getenv("HITRAIN_LONG") ? 1 : STRIDE)
                ran++;
    ck_assert(only || ran > 5);
    printf("%s: %u failures\n", operations[at].name, ran);
}

int main(void)
{
    if (!getenv("HITRAIN_FAULT") && !freopen("/dev/null", "w", stderr)) /* the daemon logs each failure */
        return 1;
    memory_keep(true);
    return run_tests("kept steps and failures", .timeout_s = getenv("HITRAIN_LONG") ? 3600 : 300);
}
