/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model_kept.c - long random work on a model root, its kept steps and its clones, against a simple model, with remounts
 * and crashes between.
 *
 * The simple model knows the hash of each living root and of each kept step. It cannot compute a step. But it knows the
 * results of past ones: the same gradients on the same bits must give the same bits, also in a clone, or after a
 * rollback or a crash.
 *
 * HITRAIN_SEED=N draws other operations, and shows the daemon's messages. HITRAIN_LONG=1 draws 50 times as many.
 */

#include "tests/support/background.h"
#include "tests/support/harness.h"
#include "tests/support/memory.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/api/check.h"
#include "tiering/api/stats.h"

enum {
    DEVICE_BYTES = 24 << 20,
    OPERATIONS = 600,
    SEEDS = 6,
    PARAMS = 2,
    ROOTS = 3, /* the model, and clones */
    RETAIN = 2,
    NAMED = 3, /* kept steps of one root that have names */
    KEPT_MAX = RETAIN + NAMED,
    NAME_BYTES = 16,
    SEEDS_OF_STEPS = 2, /* few, so that steps repeat */
};

static const struct harness_param params[PARAMS] = {{"w", "f32", 40000}, {"h", "bf16", 700}};
static const char *const root_names[ROOTS] = {"model", "first", "second"};

struct kept {
    char name[NAME_BYTES];
    uint64_t step, hash;
    bool is_named;
};

struct living {
    bool exists;
    uint64_t step, hash;
    struct kept kept[KEPT_MAX + 1]; /* oldest first; one more until the oldest expires */
    unsigned count;
};

struct result {
    uint64_t before, seed, after;
};

struct work {
    struct harness k;
    struct living root[ROOTS];
    struct result *results;
    size_t result_count, repeated;
    uint64_t rnd, operations, rollbacks, clones;
};

static uint64_t ino_of(const struct work *w, unsigned r)
{
    return harness_find(&w->k, HT_NS_ROOT_INO, root_names[r]);
}

static uint64_t hash_of(const struct work *w, uint64_t ino)
{
    return harness_model_hash(&w->k, ino, params, PARAMS);
}

/* ------------------------------------------------------------------ compare */

static void compare_kept(const struct work *w, const struct living *l, uint64_t ino)
{
    struct ht_ns_kept *all;
    size_t count;

    ck_assert_int_eq(ht_ns_kept_list(w->k.ns, ino, &all, &count), 0);
    ck_assert_uint_eq(count, l->count);
    for (unsigned i = 0; i < l->count; i++) {
        ck_assert_str_eq(all[i].name, l->kept[i].name);
        ck_assert_uint_eq(all[i].step, l->kept[i].step);
        ck_assert_msg(hash_of(w, all[i].ino) == l->kept[i].hash, "operation %llu: kept step %s is another one",
                      (unsigned long long)w->operations, all[i].name);
        ck_assert_uint_eq(harness_model_step(&w->k, all[i].ino), l->kept[i].step);
    }
    free(all);
}

static void compare(const struct work *w, unsigned r)
{
    const struct living *l = &w->root[r];
    uint64_t ino = ino_of(w, r);

    ck_assert_int_eq(ino != 0, l->exists);
    if (!ino)
        return;
    ck_assert_msg(hash_of(w, ino) == l->hash, "operation %llu: %s is not what it was",
                  (unsigned long long)w->operations, root_names[r]);
    ck_assert_uint_eq(harness_model_step(&w->k, ino), l->step);
    compare_kept(w, l, ino);
}

static void compare_all(const struct work *w)
{
    for (unsigned r = 0; r < ROOTS; r++)
        compare(w, r);
}

/* ------------------------------------------------------------------- model */

static void drop(struct living *l, unsigned i)
{
    memmove(&l->kept[i], &l->kept[i + 1], (l->count - i - 1) * sizeof(l->kept[0]));
    l->count--;
}

static int find(const struct living *l, const char *name)
{
    for (unsigned i = 0; i < l->count; i++)
        if (strcmp(l->kept[i].name, name) == 0)
            return (int)i;
    return -1;
}

/* The newest without a name stay. */
static void expire(struct living *l)
{
    unsigned unnamed = 0, oldest = 0;

    for (unsigned i = l->count; i-- > 0;)
        if (!l->kept[i].is_named) {
            unnamed++;
            oldest = i;
        }
    if (unnamed > RETAIN)
        drop(l, oldest);
}

/* NULL: under its number, in place of an older one. */
static void keep(struct living *l, const char *name)
{
    struct kept new = {.step = l->step, .hash = l->hash, .is_named = name};

    snprintf(new.name, sizeof(new.name), "%llu", (unsigned long long)l->step);
    if (name)
        snprintf(new.name, sizeof(new.name), "%s", name);
    int old = find(l, new.name);
    if (old >= 0)
        drop(l, (unsigned)old);
    l->kept[l->count++] = new;
    expire(l);
}

/* A step gives what it gave before, if it was taken before. */
static void check_result(struct work *w, uint64_t before, uint64_t seed, uint64_t after)
{
    for (size_t i = 0; i < w->result_count; i++)
        if (w->results[i].before == before && w->results[i].seed == seed) {
            w->repeated++;
            ck_assert_msg(w->results[i].after == after, "operation %llu: a repeated step has other bits",
                          (unsigned long long)w->operations);
            return;
        }
    w->results = realloc(w->results, (w->result_count + 1) * sizeof(*w->results));
    w->results[w->result_count++] = (struct result){before, seed, after};
}

/* -------------------------------------------------------------- operations */

static void gradients(const struct work *w, uint64_t ino, uint64_t seed)
{
    char text[16];

    for (unsigned i = 0; i < PARAMS; i++)
        harness_gradient(&w->k, ino, &params[i], seed * 10 + i);
    snprintf(text, sizeof(text), "seed %llu", (unsigned long long)seed);
    harness_put(&w->k, ino, "cursor", text, strlen(text));
}

static void op_step(struct work *w, unsigned r)
{
    struct living *l = &w->root[r];
    uint64_t ino = ino_of(w, r), seed = 1 + rnd_below(&w->rnd, SEEDS_OF_STEPS), before = l->hash;

    gradients(w, ino, seed);
    ck_assert_int_eq(ht_optim_commit(w->k.optim, ino), 0);
    l->hash = hash_of(w, ino);
    l->step++;
    check_result(w, before, seed, l->hash);
    keep(l, NULL);
}

static void op_given_up(struct work *w, unsigned r)
{
    uint64_t ino = ino_of(w, r);

    gradients(w, ino, 77);
    if (rnd_below(&w->rnd, 2))
        ck_assert_int_ge(background_clean(w->k.store), 0);
    ck_assert_int_eq(ht_optim_abort(w->k.optim, ino), 0);
}

static void op_snapshot(struct work *w, unsigned r)
{
    static const char *const names[NAMED] = {"best", "last", "good"};
    const char *name = names[rnd_below(&w->rnd, NAMED)];
    struct living *l = &w->root[r];
    struct ht_optim_steer by = {0};
    int rc = ht_optim_snapshot_by(w->k.optim, ino_of(w, r), name, &by), there = find(l, name);

    ck_assert_int_eq(rc, there >= 0 ? -EEXIST : 0);
    if (!rc)
        keep(l, name);
}

static void op_forget(struct work *w, unsigned r)
{
    struct living *l = &w->root[r];
    uint64_t ino = ino_of(w, r);

    ck_assert_int_eq(ht_ns_kept_forget(w->k.ns, ino, "none"), -ENOENT);
    if (!l->count)
        return;
    unsigned i = (unsigned)rnd_below(&w->rnd, l->count);
    ck_assert_int_eq(ht_ns_kept_forget(w->k.ns, ino, l->kept[i].name), 0);
    drop(l, i);
}

/* Now and then in an open step, which refuses it. */
static void op_rollback(struct work *w, unsigned r)
{
    struct living *l = &w->root[r];
    uint64_t ino = ino_of(w, r);

    ck_assert_int_eq(harness_rollback(&w->k, ino, "none"), -ENOENT);
    if (!l->count)
        return;
    struct kept *to = &l->kept[rnd_below(&w->rnd, l->count)];
    if (rnd_below(&w->rnd, 4) == 0) {
        gradients(w, ino, 78);
        ck_assert_int_eq(harness_rollback(&w->k, ino, to->name), -EBUSY);
        ck_assert_int_eq(ht_optim_abort(w->k.optim, ino), 0);
        return;
    }
    ck_assert_int_eq(harness_rollback(&w->k, ino, to->name), 0);
    l->hash = to->hash;
    l->step = to->step;
    w->rollbacks++;
}

static void op_clone(struct work *w, unsigned from)
{
    struct living *l = &w->root[from];
    unsigned to = 1 + (unsigned)rnd_below(&w->rnd, ROOTS - 1);

    if (!l->count)
        return;
    const struct kept *of = &l->kept[rnd_below(&w->rnd, l->count)];
    int rc = harness_clone(&w->k, ino_of(w, from), of->name, HT_NS_ROOT_INO, root_names[to], 0);
    ck_assert_int_eq(rc, w->root[to].exists ? -EEXIST : 0);
    if (rc)
        return;
    w->root[to] = (struct living){.exists = true, .step = of->step, .hash = of->hash};
    w->clones++;
}

static void op_remove(struct work *w, unsigned r)
{
    struct living *l = &w->root[r];
    uint64_t ino = ino_of(w, r);

    if (r == 0)
        return;
    while (l->count) {
        ck_assert_int_eq(ht_ns_kept_forget(w->k.ns, ino, l->kept[0].name), 0);
        drop(l, 0);
    }
    for (unsigned i = 0; i < PARAMS; i++)
        ck_assert_int_eq(ht_ns_unlink(w->k.ns, ino, params[i].name), 0);
    ck_assert_int_eq(ht_ns_unlink(w->k.ns, ino, "cursor"), 0);
    ck_assert_int_eq(ht_ns_rmdir(w->k.ns, HT_NS_ROOT_INO, root_names[r]), 0);
    ck_assert_int_eq(ht_store_commit(w->k.store), 0); /* else a crash may bring the names back */
    *l = (struct living){.exists = false};
}

/* No client sees a change. */
static void op_background(struct work *w)
{
    switch (rnd_below(&w->rnd, 4)) {
    case 0:
        ck_assert_int_eq(ht_store_checkpoint(w->k.store), 0);
        break;
    case 1:
        ck_assert_int_eq(background_dedup(w->k.store), 0);
        break;
    case 2:
        ck_assert_int_eq(background_compact(w->k.store), 0);
        break;
    default:
        ck_assert_int_ge(background_clean(w->k.store), 0);
    }
}

/* A crash may fall into an open step. */
static void op_remount(struct work *w)
{
    bool clean = rnd_below(&w->rnd, 2);

    if (rnd_below(&w->rnd, 2))
        gradients(w, ino_of(w, 0), 79);
    ck_assert_int_eq(harness_close(&w->k, clean), 0);
    ck_assert_uint_eq(harness_fsck(&w->k), 0);
    ck_assert_int_eq(harness_open(&w->k, 1), 0);
    compare_all(w);
}

static void one_operation(struct work *w)
{
    static void (*const on_root[])(struct work *, unsigned) = {
        op_step, op_step, op_step, op_given_up, op_snapshot, op_rollback, op_rollback, op_forget, op_clone, op_remove};
    unsigned r = (unsigned)rnd_below(&w->rnd, ROOTS);
    uint64_t kind = rnd_below(&w->rnd, 30);

    w->operations++;
    r = w->root[r].exists ? r : 0;
    if (kind == 0)
        op_remount(w);
    else if (kind <= 2)
        op_background(w);
    else
        on_root[kind % HT_ARRAY_SIZE(on_root)](w, r);
    compare(w, r);
    ht_store_verify(w->k.store, true);
}

static void finish(struct work *w)
{
    for (unsigned r = 1; r < ROOTS; r++)
        if (w->root[r].exists)
            op_remove(w, r);
    while (w->root[0].count) {
        ck_assert_int_eq(ht_ns_kept_forget(w->k.ns, ino_of(w, 0), w->root[0].kept[0].name), 0);
        drop(&w->root[0], 0);
    }
    compare_all(w);
    ck_assert_int_eq(harness_close(&w->k, true), 0);
    ck_assert_uint_eq(harness_fsck(&w->k), 0);
}

TEST_LOOP(kept_steps_equal_the_model, SEEDS)
{
    struct work w = {.rnd = setting("HITRAIN_SEED", 1) * 1000 + (uint64_t)_i};
    unsigned count = getenv("HITRAIN_LONG") ? 50 * OPERATIONS : OPERATIONS;

    harness_format(&w.k, 1 + (unsigned)_i % 2, DEVICE_BYTES, _i % 3 ? 512 : 4096);
    ck_assert_int_eq(harness_open(&w.k, 1), 0);
    uint64_t ino = harness_model(&w.k, root_names[0], params, PARAMS, "adamw lr=0.01 weight_decay=0.1 retain=2");
    harness_put(&w.k, ino, "cursor", "seed 0", 6);
    ck_assert_int_eq(ht_optim_commit(w.k.optim, ino), 0);
    w.root[0] = (struct living){.exists = true, .hash = hash_of(&w, ino)};
    while (w.operations < count) {
        one_operation(&w);
        if (rnd_below(&w.rnd, 20) == 0)
            compare_all(&w);
    }
    finish(&w);
    printf("seed %d: %llu operations, %llu rollbacks, %llu clones, %zu repeated steps\n", _i,
           (unsigned long long)w.operations, (unsigned long long)w.rollbacks, (unsigned long long)w.clones, w.repeated);
    ck_assert(w.rollbacks > 10 && w.clones > 3 && w.repeated > 5);
    free(w.results);
    harness_free(&w.k);
}

int main(void)
{
    if (!getenv("HITRAIN_SEED") && !freopen("/dev/null", "w", stderr)) /* the daemon reports each refused name */
        return 1;
    memory_keep(true);
    return run_tests("kept steps against a model", .timeout_s = getenv("HITRAIN_LONG") ? 7200 : 600);
}
