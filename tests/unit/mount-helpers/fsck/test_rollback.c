/* SPDX-License-Identifier: Apache-2.0 */
/* Rollbacks of things unlike the kept step: sparse files, parameters of another shape, open gradients and files. */

#include "tests/support/harness.h"
#include "tests/support/suite.h"
#include "tiering/api/object.h"
#include "tiering/api/stats.h"

enum { DEVICE_BYTES = 64 << 20, PARAMS = 2 };

static const struct harness_param params[PARAMS] = {{"w", "f32", 1000}, {"v", "f32", 300}},
                                  longer = {"w", "f32", 90001};

static struct harness k;
static uint64_t root;
static unsigned sums; /* gradients of a step */

static void open_with(const char *config)
{
    sums = strstr(config, "accumulate=2") ? 2 : 1;
    memset(&k, 0, sizeof(k));
    harness_format(&k, 1, DEVICE_BYTES, 512);
    ck_assert_int_eq(harness_open(&k, 2), 0);
    root = harness_model(&k, "model", params, PARAMS, config);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
}

static void finish(void)
{
    ht_store_verify(k.store, false);
    ck_assert_int_eq(harness_close(&k, true), 0);
    ck_assert_uint_eq(harness_fsck(&k), 0);
    harness_free(&k);
}

static void snapshot(const char *name)
{
    struct ht_optim_steer by = {0};

    ck_assert_int_eq(ht_optim_snapshot_by(k.optim, root, name, &by), 0);
}

static uint64_t fingerprint(void)
{
    return harness_model_hash(&k, root, params, PARAMS);
}

/* A step from the same gradients for the same seed. */
static void step(uint64_t seed)
{
    for (unsigned i = 0; i < sums * PARAMS; i++)
        harness_gradient(&k, root, &params[i % PARAMS], seed + i);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
}

/* ------------------------------------------------------------ sparse files */

enum { SPARSE = 8, ROUNDS = 10 };

static const uint64_t places[] = {0, 4096, 1ull << 21, 1ull << 33, (1ull << 44) - 4096};

static uint64_t sparse_file(unsigned n)
{
    char name[8];

    snprintf(name, sizeof(name), "f%u", n);
    return harness_make(&k, root, name);
}

static void resize(uint64_t ino, uint64_t size)
{
    struct ht_obj *o;

    ck_assert_int_eq(ht_ns_open(k.ns, ino, &o), 0);
    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    ht_ns_close(k.ns, ino);
}

static void check_sparse(uint64_t ino, const char *expected)
{
    char text[3] = "";
    struct ht_obj *o;

    ck_assert_int_eq(ht_ns_open(k.ns, ino, &o), 0);
    ck_assert_uint_eq(ht_obj_size(o), HT_FILE_BYTES_MAX);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(places); i++) {
        ck_assert_int_eq(ht_obj_read(o, places[i], text, 2), 2);
        ck_assert_mem_eq(text, expected[i] == '.' ? "\0\0" : "ab", 2);
    }
    ht_ns_close(k.ns, ino);
}

/* A visit of each chunk that may be there would take many minutes. */
TEST(a_sparse_file_of_the_largest_size_goes_back)
{
    open_with("adamw lr=0.01");
    for (unsigned n = 0; n < SPARSE; n++) {
        resize(sparse_file(n), HT_FILE_BYTES_MAX);
        for (unsigned i = 0; i < HT_ARRAY_SIZE(places); i += 2)
            ck_assert_int_eq(harness_write(&k, sparse_file(n), places[i], "ab", 2), 0);
    }
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    snapshot("x");
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned n = 0; n < SPARSE; n++) {
            uint64_t ino = sparse_file(n);
            resize(ino,
                   round % 3 == 0       ? 0
                       : round % 3 == 1 ? places[3]
                                        : HT_FILE_BYTES_MAX); /* cut, and with more content */
            resize(ino, round % 2 ? places[4] : HT_FILE_BYTES_MAX);
            for (unsigned i = 1; i < HT_ARRAY_SIZE(places); i += 2)
                ck_assert_int_eq(harness_write(&k, ino, places[i], "ab", 2), 0);
        }
        if (round & 1)
            ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
        ck_assert_int_eq(harness_rollback(&k, root, "x"), 0);
        for (unsigned n = 0; n < SPARSE; n++)
            check_sparse(sparse_file(n), "a.a.a");
    }
}

/* ------------------------------------------------------------ other shapes */

/* The parameter gets more elements; and a step with them. */
static void make_longer(bool steps)
{
    static const float more[90001];
    struct ht_optim_steer by = {0};

    ck_assert_int_eq(ht_optim_reset(k.optim, root, harness_find(&k, root, "w"), &by), 0);
    harness_put(&k, root, "w", more, sizeof(more));
    for (unsigned n = 0; steps && n < sums; n++) {
        harness_gradient(&k, root, &longer, 40 + n);
        harness_gradient(&k, root, &params[1], 50 + n);
    }
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
}

/* With accumulation each parameter has a sum, whose size is that of the shape, too. */
TEST_LOOP(a_parameter_gets_its_shape_back, 2)
{
    open_with(_i ? "adamw lr=0.01 accumulate=2" : "adamw lr=0.01");
    step(1);
    snapshot("x");
    uint64_t was = fingerprint();
    step(3);
    uint64_t next = fingerprint();
    ck_assert_uint_ne(was, next);
    for (unsigned round = 0; round < 3; round++) {
        make_longer(round != 0);
        uint64_t other = harness_model_hash(&k, root, (struct harness_param[]){longer, params[1]}, round ? PARAMS : 0);
        snapshot(round == 1 ? "longer" : NULL);
        ck_assert_int_eq(harness_rollback(&k, root, "x"), 0);
        ck_assert_uint_eq(fingerprint(), was);
        step(3);
        ck_assert_uint_eq(fingerprint(), next);
        if (round != 1)
            continue;
        ck_assert_int_eq(harness_rollback(&k, root, "longer"), 0);
        ck_assert_uint_eq(harness_model_hash(&k, root, (struct harness_param[]){longer, params[1]}, PARAMS), other);
        for (unsigned n = 0; n < sums; n++) {
            harness_gradient(&k, root, &longer, 60 + n);
            harness_gradient(&k, root, &params[1], 70 + n);
        }
        ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
        ck_assert_int_eq(harness_rollback(&k, root, "x"), 0);
    }
}

/* Takes all space but so many bytes. */
static void fill(uint64_t leave)
{
    uint64_t ino = harness_make(&k, HT_NS_ROOT_INO, "filler");
    struct ht_obj *o;

    resize(ino, 0);
    ck_assert_int_eq(ht_store_commit(k.store), 0);
    ck_assert_uint_gt(ht_store_available(k.store), leave);
    ck_assert_int_eq(ht_ns_open(k.ns, ino, &o), 0);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, ht_store_available(k.store) - leave), 0);
    ht_ns_close(k.ns, ino);
}

/* The state of the step is larger than that of the model, and finds no space. */
TEST(without_space_for_another_shape_the_model_trains_on)
{
    static const float few[1000];
    struct ht_optim_steer by = {0};
    struct harness_param then[] = {longer, params[1]};

    open_with("adamw lr=0.01");
    step(1);
    make_longer(true);
    snapshot("longer");
    uint64_t was = harness_model_hash(&k, root, then, PARAMS), w = harness_find(&k, root, "w");
    ck_assert_int_eq(ht_optim_reset(k.optim, root, w, &by), 0);
    resize(w, 0);
    harness_put(&k, root, "w", few, sizeof(few));
    step(1);
    fill(64 << 10);
    uint64_t now = fingerprint();
    for (unsigned n = 0; n < 3; n++) {
        ck_assert_int_eq(harness_rollback(&k, root, "longer"), -ENOSPC);
        ck_assert_uint_eq(fingerprint(), now);
    }
    fill(0);
    for (uint64_t n = 0; n < 4; n++) /* its space is reserved, as before */
        step(10 * n);
    fill(16 << 20);
    ck_assert_int_eq(harness_rollback(&k, root, "longer"), 0);
    ck_assert_uint_eq(harness_model_hash(&k, root, then, PARAMS), was);
}

/* ----------------------------------------------------------- open by others */

static struct ht_grad *open_gradient(const struct harness_param *p)
{
    struct ht_obj *o;
    struct ht_grad *g;

    ck_assert_int_eq(ht_ns_open(k.ns, harness_find(&k, root, p->name), &o), 0);
    const struct ht_param_desc desc = {.root = root, .obj = o, .dtype = HT_DTYPE_F32, .grad_dtype = HT_DTYPE_F32};
    ck_assert_int_eq(ht_grad_open(k.optim, &desc, &g), 0);
    return g;
}

static void close_gradient(struct ht_grad *g, const struct harness_param *p)
{
    ht_grad_release(g);
    ht_ns_close(k.ns, harness_find(&k, root, p->name));
}

TEST(an_open_gradient_fits_or_the_rollback_is_refused)
{
    static float ones[1000];

    open_with("adamw lr=0.01 partial=1");
    step(1);
    snapshot("x");
    uint64_t was = fingerprint();
    struct ht_grad *g = open_gradient(&params[0]); /* without a byte: it is of the same shape */
    ck_assert_int_eq(harness_rollback(&k, root, "x"), 0);
    ck_assert_uint_eq(fingerprint(), was);
    ck_assert_int_eq(ht_grad_write(g, 0, ones, sizeof(ones)), (ssize_t)sizeof(ones));
    ck_assert_int_eq(harness_rollback(&k, root, "x"), -EBUSY); /* bytes that no client has closed */
    ck_assert_int_eq(ht_grad_flush(g), 0);
    close_gradient(g, &params[0]);
    ck_assert_int_eq(harness_rollback(&k, root, "x"), -EBUSY); /* a step is open */
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);

    make_longer(true);
    struct harness_param now[] = {longer, params[1]};
    uint64_t other = harness_model_hash(&k, root, now, PARAMS);
    g = open_gradient(&longer);
    ck_assert_int_eq(harness_rollback(&k, root, "x"), -EBUSY);
    ck_assert_uint_eq(harness_model_hash(&k, root, now, PARAMS), other);
    close_gradient(g, &longer);
    harness_gradient(&k, root, &longer, 70); /* nothing of the refusal is left */
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    ck_assert_int_eq(harness_rollback(&k, root, "x"), 0);
    ck_assert_uint_eq(fingerprint(), was);
}

TEST(an_open_file_is_the_files_of_the_step_or_no_longer_there)
{
    struct ht_obj *w, *late;
    float before[1000], after[1000];
    char text[4] = "";

    open_with("adamw lr=0.01");
    step(1);
    snapshot("x");
    harness_put(&k, root, "late", "late", 4);
    uint64_t ino = harness_find(&k, root, "w"), gone = harness_find(&k, root, "late");
    ck_assert_int_eq(ht_ns_open(k.ns, ino, &w), 0);
    ck_assert_int_eq(ht_ns_open(k.ns, gone, &late), 0);
    ck_assert_int_eq(ht_obj_read(w, 0, before, sizeof(before)), (ssize_t)sizeof(before));
    step(3);
    ck_assert_int_eq(ht_obj_read(w, 0, after, sizeof(after)), (ssize_t)sizeof(after));
    ck_assert_mem_ne(after, before, sizeof(before));
    ck_assert_int_eq(harness_rollback(&k, root, "x"), 0);
    ck_assert_int_eq(ht_obj_read(w, 0, after, sizeof(after)), (ssize_t)sizeof(after));
    ck_assert_mem_eq(after, before, sizeof(before));
    ck_assert_uint_eq(harness_find(&k, root, "late"), 0);
    ck_assert_int_eq(ht_obj_read(late, 0, text, 4), 4); /* as after unlink */
    ck_assert_mem_eq(text, "late", 4);
    ht_ns_close(k.ns, ino);
    ht_ns_close(k.ns, gone);
}

/* ------------------------------------------------------- beside other threads */

enum { ROLLBACKS = 60, NAMES = 4, OTHERS = 3 };

static uint64_t second_root;
static _Atomic bool over;

/* What another thread's rollback, or commit, may answer. */
static void check_expected(int rc)
{
    ck_assert_msg(rc == 0 || rc == -EBUSY || rc == -ENOENT || rc == -ESTALE || rc == -EEXIST, "%d", rc);
}

/* Writes into a file of this name, which others end and make. */
static void use_file(const char *name)
{
    char text[8] = "others";
    struct ht_obj *o;
    struct stat st;

    if (ht_ns_lookup(k.ns, root, name, &st))
        return;
    int rc = ht_ns_open(k.ns, st.st_ino, &o);
    if (!rc) {
        ssize_t n = ht_obj_write(o, 0, text, sizeof(text));
        check_expected(n < 0 ? (int)n : 0);
        ht_ns_touch(k.ns, st.st_ino, true);
        n = ht_obj_read(o, 0, text, sizeof(text));
        check_expected(n < 0 ? (int)n : 0);
        ht_ns_close(k.ns, st.st_ino);
    }
    check_expected(rc);
    ht_ns_forget(k.ns, st.st_ino, 1);
}

/* Makes, writes and ends files of the model, one of its parameters among them. */
static void *change_names(void *ctx)
{
    unsigned own = *(unsigned *)ctx;
    struct stat st;

    for (unsigned n = own; !over; n++) {
        char name[8];
        snprintf(name, sizeof(name), "t%u", n % NAMES);
        int rc = ht_ns_mknod(k.ns, root, name, S_IFREG | 0600, 0, (struct ht_cred){0}, &st);
        check_expected(rc);
        if (!rc)
            ht_ns_forget(k.ns, st.st_ino, 1);
        use_file(name);
        use_file("v");
        check_expected(ht_ns_unlink(k.ns, root, n % 5 ? name : "v"));
    }
    return NULL;
}

/* Another model takes steps, and takes some back. */
static void *train_another(void *ctx)
{
    for (unsigned n = *(unsigned *)ctx; !over; n++) {
        for (unsigned i = 0; i < PARAMS; i++)
            harness_gradient(&k, second_root, &params[i], n + i);
        ck_assert_int_eq(n % 3 ? ht_optim_commit(k.optim, second_root) : ht_optim_abort(k.optim, second_root), 0);
    }
    return NULL;
}

TEST(rollbacks_beside_threads_that_change_the_model)
{
    static void *(*const does[OTHERS])(void *) = {change_names, change_names, train_another};
    static unsigned number[OTHERS];
    pthread_t thread[OTHERS];

    open_with("adamw lr=0.01");
    second_root = harness_model(&k, "second", params, PARAMS, "adamw lr=0.01");
    ck_assert_int_eq(ht_optim_commit(k.optim, second_root), 0);
    step(1);
    snapshot("a");
    uint64_t was = fingerprint();
    step(5);
    snapshot("b");
    over = false;
    for (unsigned i = 0; i < OTHERS; i++) {
        number[i] = i;
        ck_assert_int_eq(pthread_create(&thread[i], NULL, does[i], &number[i]), 0);
    }
    for (unsigned n = 0; n < ROLLBACKS; n++)
        check_expected(harness_rollback(&k, root, n % 2 ? "a" : "b"));
    over = true;
    for (unsigned i = 0; i < OTHERS; i++)
        pthread_join(thread[i], NULL);
    ck_assert_int_eq(harness_rollback(&k, root, "a"), 0);
    ck_assert_uint_eq(fingerprint(), was);
    step(9);
}

RUN_TESTS("rollback", .teardown = finish, .timeout_s = 300, .quiet = ERRORS_ONLY)
