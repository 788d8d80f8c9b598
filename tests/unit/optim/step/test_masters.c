/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Masters in two bytes: as a file of f32, with parameters that others change, and beside stores that keep four bytes.
 */
#include "tests/unit/optim/step/fixture.h"

#include <sched.h>

#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/root.h"

enum { ELEMENTS = 600000, BLOCK = HT_MASTER_BLOCK };

static struct test_param *p;

static void begin(const char *config, uint64_t n, uint32_t chunk_bytes)
{
    w.config = config;
    fixture_open(&w);
    p = fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, n, chunk_bytes);
}

static void step(void)
{
    step_param(&w, p);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

static ssize_t read_master(uint64_t off, void *buf, size_t len)
{
    struct ht_param_desc desc = fixture_desc(p);

    return ht_optim_state_read(w.o, &desc, "master", off, buf, len);
}

static ssize_t write_master(uint64_t off, const void *buf, size_t len)
{
    struct ht_param_desc desc = fixture_desc(p);

    return ht_optim_state_write(w.o, &desc, "master", off, buf, len);
}

TEST_LOOP(they_take_two_bytes_and_a_block_of_each_range, 4)
{
    static const struct {
        uint64_t n, bytes;
    } cases[] = {{1, 2 + 16}, {2049, 2 * 2049 + 32}, {524288, 2 * 524288 + 4096}, {524289, 2 * 524289 + 4096 + 16}};

    begin("sgd lr=0.1", cases[_i].n, HT_CHUNK_BYTES);
    step();
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, cases[_i].bytes);
    struct ht_param_desc desc = fixture_desc(p);
    ck_assert_int_eq(ht_optim_state_size(w.o, &desc, "master"), (int64_t)(p->n * 4));
    const char *name;
    ck_assert_int_eq(ht_optim_state_name(w.o, &desc, 0, &name), 0);
    ck_assert_str_eq(name, "master");
    ck_assert_int_eq(ht_optim_state_name(w.o, &desc, 1, &name), 0);
    ck_assert_str_eq(name, "step");
    ck_assert_int_eq(ht_optim_state_name(w.o, &desc, 2, &name), -ENOENT);
    check_all(&w);
}

TEST_LOOP(any_bytes_of_the_file_can_be_read, 2)
{
    begin("adamw lr=0.01", ELEMENTS, _i ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES);
    step();
    uint8_t *got = test_alloc(p->n * 4);
    for (unsigned round = 0; round < 20; round++) {
        uint64_t off = fixture_random(&w) % (p->n * 4), len = fixture_random(&w) % (round % 2 ? 100 : p->n * 4);
        ssize_t want = (ssize_t)ht_min_u64(len, p->n * 4 - off);
        ck_assert_int_eq(read_master(off, got, len), want);
        ck_assert(!memcmp(got, (const uint8_t *)p->master + off, (size_t)want));
    }
    ck_assert_int_eq(read_master(p->n * 4, got, 1), 0);
}

/* Masters of the model between its parameters, other ones than those that are there. */
static void move_masters(uint64_t first, uint64_t n)
{
    for (uint64_t i = first; i < first + n; i++) {
        float x = ht_kernel_element(p->p, p->dtype, i);
        uint32_t bits;
        memcpy(&bits, &x, 4);
        bits += (uint32_t)(fixture_random(&w) % 0xffff) - 0x7fff;
        memcpy(&p->master[i], &bits, 4);
    }
}

TEST_LOOP(what_is_written_is_what_the_next_step_begins_with, 2)
{
    begin("adamw lr=0.01", ELEMENTS, _i ? HT_CHUNK_BYTES : HT_SMALL_CHUNK_BYTES);
    if (_i)
        step();
    move_masters(0, p->n);
    ck_assert_int_eq(write_master(0, p->master, p->n * 4), (ssize_t)(p->n * 4));
    check_all(&w);
    for (unsigned round = 0; round < 20; round++) {
        uint64_t first = fixture_random(&w) % p->n, n = ht_min_u64(fixture_random(&w) % 5000, p->n - first);
        move_masters(first, n);
        ck_assert_int_eq(write_master(first * 4, p->master + first, n * 4), (ssize_t)(n * 4));
    }
    step();
    check_all(&w);
    remount();
    step();
    check_all(&w);
}

TEST(a_master_that_is_not_the_parameters_is_refused)
{
    float wrong[3] = {0};

    begin("adamw lr=0.01", ELEMENTS, HT_CHUNK_BYTES);
    step();
    memcpy(wrong, p->master + 5, sizeof(wrong));
    wrong[2] *= 1.5f;
    ck_assert_int_eq(write_master(20, wrong, sizeof(wrong)), -EINVAL);
    ck_assert_ptr_nonnull(strstr(fixture_stat(&w).error, "element 7 does not round to the parameter; write"));
    ck_assert_int_eq(write_master(21, wrong, 4), -EINVAL);
    ck_assert_int_eq(write_master(20, wrong, 3), -EINVAL);
    ck_assert_int_eq(write_master(p->n * 4 - 4, wrong, 8), -EINVAL);
    check_all(&w);
    step();
    check_all(&w);
}

/*
 * Another program writes elements [first, first + n) of the parameter, as cp does; the model continues from these
 * values.
 */
static void load(uint64_t first, uint64_t n, uint64_t restart_first, uint64_t restart_n)
{
    for (uint64_t i = first; i < first + n; i++)
        put_value(p->p, p->dtype, i, random_value(&w));
    ck_assert_int_eq(ht_obj_write(p->obj, first * 2, p->p + first * 2, n * 2), (ssize_t)(n * 2));
    for (uint64_t i = restart_first; i < restart_first + restart_n; i++)
        p->master[i] = ht_kernel_element(p->p, p->dtype, i);
}

TEST(a_loaded_parameter_starts_again_with_what_it_is)
{
    begin("adamw lr=0.01", ELEMENTS, HT_CHUNK_BYTES);
    step();
    load(0, p->n, 0, p->n);
    check_all(&w);
    step();
    check_all(&w);
    /* One element: its block, and no other. */
    load(3 * BLOCK + 17, 1, 3 * BLOCK, BLOCK);
    check_all(&w);
    step();
    check_all(&w);
    load(p->n - 1, 1, p->n / BLOCK * BLOCK, p->n % BLOCK);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    remount_and_check();
    step();
    check_all(&w);
}

/* ------------------------------------------------------------ while it runs */

static atomic_bool over;
static atomic_uint reads;

/* All elements are alike in every step, so in every read; and never a value that bf16 has. */
static void *read_on(void *arg)
{
    float *got = malloc(p->n * 4);

    (void)arg;
    do {
        reads++;
        ck_assert_int_eq(read_master(0, got, p->n * 4), (ssize_t)(p->n * 4));
        for (uint64_t i = 0; i < p->n; i++)
            ck_assert_msg(got[i] == got[0] && (int)((1 - got[i]) * 4096) % 2, "element %llu: %a, and %a",
                          (unsigned long long)i, (double)got[i], (double)got[0]);
    } while (!over);
    free(got);
    return NULL;
}

/* A gradient of the new shape was open: its ranges do not count for masters that an abort brings back. */
TEST(masters_come_back_after_a_reset_and_another_size)
{
    begin("adamw lr=0.01", ELEMENTS, HT_SMALL_CHUNK_BYTES);
    step();
    ck_assert_int_eq(ht_optim_reset(w.o, ROOT, p->oid, NULL), 0);
    ck_assert_int_eq(ht_obj_truncate(p->obj, (p->n + 3000) * 2), 0);
    struct ht_grad *g = open_grad(&w, p);
    ht_grad_release(g);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check_all(&w);
    step();
    check_all(&w);
}

/* Masters that are alike, and a gradient that makes each of them 2^-11 smaller. */
static float *begin_alike(struct ht_optim_config *c)
{
    w.threads = 2;
    begin("sgd lr=1", 140000, HT_CHUNK_BYTES);
    for (uint64_t i = 0; i < p->n; i++)
        put_value(p->p, p->dtype, i, 1.0f);
    forget_state(p);
    ck_assert_int_eq(ht_obj_write(p->obj, 0, p->p, p->n * 2), (ssize_t)(p->n * 2));
    float *g = test_alloc(p->n * 4);
    for (uint64_t i = 0; i < p->n; i++) {
        g[i] = 0x1p-11f;
        p->master[i] = 1 - 0x1p-12f;
    }
    ck_assert_int_eq(write_master(0, p->master, p->n * 4), (ssize_t)(p->n * 4));
    *c = fixture_config(w.config);
    over = false;
    reads = 0;
    return g;
}

TEST(a_reader_never_sees_half_a_step)
{
    struct ht_optim_config c;
    pthread_t reader;
    unsigned seen = 0;
    float *g = begin_alike(&c);

    write_gradient(&w, p, (const uint8_t *)g);
    model_update(p, &c, (const uint8_t *)g, 0, p->n, true);
    ck_assert_int_eq(pthread_create(&reader, NULL, read_on, NULL), 0);
    for (unsigned i = 0; i < 10; i++) {
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
        while (seen == reads) /* until one is on its way */
            sched_yield();
        seen = reads;
        write_gradient(&w, p, (const uint8_t *)g);
        model_update(p, &c, (const uint8_t *)g, 0, p->n, true);
    }
    over = true;
    pthread_join(reader, NULL);
    commit_and_check();
}

TEST(a_reader_never_sees_half_an_abort)
{
    struct ht_optim_config c;
    pthread_t reader;
    float *g = begin_alike(&c);

    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_int_eq(pthread_create(&reader, NULL, read_on, NULL), 0);
    for (unsigned i = 0; i < 20; i++) {
        write_gradient(&w, p, (const uint8_t *)g);
        for (unsigned seen = reads; reads < seen + 2;) /* one has seen the step, and the next is on its way */
            sched_yield();
        ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    }
    over = true;
    pthread_join(reader, NULL);
    check_all(&w);
}

/* ---------------------------------------------------------------- older ones */

/* State as it was made before there were masters in two bytes. */
static void make_f32_masters(void)
{
    struct ht_grad *g = open_grad(&w, p);
    struct ht_param *param = ht_opt_param_get(w.o, p->oid);
    struct ht_layout layout = {3, {HT_STATE_EXP_AVG, HT_STATE_EXP_AVG_SQ, HT_STATE_MASTER}};

    ht_mutex_lock(&w.o->lock);
    ck_assert_int_eq(ht_opt_gate_enter(param->root), 0);
    ht_mutex_unlock(&w.o->lock);
    ck_assert_int_eq(ht_opt_state_create(param, &layout), 0);
    ht_mutex_lock(&w.o->lock);
    ht_opt_gate_leave(param->root);
    ht_mutex_unlock(&w.o->lock);
    ht_opt_param_put(param);
    ht_grad_release(g);
}

TEST(state_with_f32_masters_goes_on)
{
    begin("adamw lr=0.01", ELEMENTS, HT_CHUNK_BYTES);
    make_f32_masters();
    step();
    step();
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, p->n * 12);
    check_all(&w);
    remount_and_check();
    step();
    check_all(&w);
    ck_assert_uint_eq(fixture_stat(&w).state_bytes, p->n * 12);
}

RUN_TESTS("masters", .teardown = fixture_end, .timeout_s = 300)
