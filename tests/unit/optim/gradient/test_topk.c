/* SPDX-License-Identifier: Apache-2.0 */
/* Sparse gradients are the dense ones they stand for, bit for bit; a wrong one is named and changes nothing. */
#include "tests/unit/optim/step/fixture.h"

#include <hitrain/topk.h>
#include "tiering/base/buf.h"

enum { HEADER = sizeof(struct ht_topk_header), FILE_MAX = HEADER + 200000 * 8 };

static uint8_t file[FILE_MAX];
static size_t file_len;

static struct ht_topk *open_topk(const struct test_param *p)
{
    struct ht_param_desc desc = fixture_desc(p);
    struct ht_topk *t = NULL;

    ck_assert_int_eq(ht_topk_open(w.o, &desc, &t), 0);
    return t;
}

static void put_header(uint8_t dtype, uint64_t elements, uint64_t count)
{
    memset(file, 0, HEADER);
    memcpy(file, HT_TOPK_MAGIC, 8);
    ht_le32_store(file + 8, HT_TOPK_VERSION);
    file[12] = dtype;
    ht_le64_store(file + 16, elements);
    ht_le64_store(file + 24, count);
}

/* Every element with a chance of one in `rarely`: the file, and the gradient it stands for. */
static uint8_t *make_sparse(const struct test_param *p, uint8_t dtype, uint64_t rarely)
{
    uint8_t *dense = test_alloc(p->n * 4);
    uint64_t count = 0, k = 0;
    uint8_t *chosen = test_alloc(p->n);

    for (uint64_t i = 0; i < p->n; i++)
        count += chosen[i] = fixture_random(&w) % rarely == 0;
    put_header(dtype, p->n, count);
    for (uint64_t i = 0; i < p->n; i++) {
        if (!chosen[i])
            continue;
        uint8_t *value = file + HEADER + count * 4;
        ht_le32_store(file + HEADER + k * 4, (uint32_t)i);
        put_value(value, dtype, k, random_value(&w));
        put_value(dense, p->grad_dtype, i, ht_kernel_element(value, dtype, k));
        k++;
    }
    file_len = HEADER + count * (4 + dtype_bytes(dtype));
    return dense;
}

static void write_file(struct ht_topk *t, size_t piece)
{
    for (size_t off = 0; off < file_len; off += piece) {
        size_t len = ht_min_u64(piece, file_len - off);
        ck_assert_int_eq(ht_topk_write(t, off, file + off, len), (ssize_t)len);
    }
}

static void send(const struct test_param *p, size_t piece)
{
    struct ht_topk *t = open_topk(p);

    write_file(t, piece);
    ck_assert_int_eq(ht_topk_flush(t), 0);
    ck_assert_int_eq(ht_topk_flush(t), 0); /* nothing more */
    ht_topk_release(t);
}

static void step_sparse(struct test_param *p, uint8_t dtype, uint64_t rarely)
{
    struct ht_optim_config c = fixture_config(w.config);
    uint8_t *dense = make_sparse(p, dtype, rarely);

    send(p, 100001);
    model_update(p, &c, dense, 0, p->n, true);
}

TEST_LOOP(it_is_the_dense_gradient_bit_for_bit, 4)
{
    static const char *const configs[] = {"adamw lr=1e-2 weight_decay=0.1", "sgd lr=1e-2 momentum=0.9",
                                          "lion lr=1e-3 weight_decay=0.1", "adagrad lr=1e-2"};

    fixture_open_as(&w, configs[_i], (unsigned)_i % 3 + 1);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 70001, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 100003, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, 50000, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F16, HT_DTYPE_F16, 17, HT_SMALL_CHUNK_BYTES);
    static const uint64_t rarely[] = {1, 3, 50, 1000000};
    for (unsigned step = 0; step < 4; step++) {
        for (unsigned i = 0; i < w.params; i++) {
            uint8_t dtype = step & 1 && w.param[i].grad_dtype == HT_DTYPE_F32 ? HT_DTYPE_BF16 : w.param[i].grad_dtype;
            step_sparse(&w.param[i], dtype, rarely[(step + i) % 4]);
        }
        commit_and_check();
    }
}

TEST(without_an_entry_moments_decay)
{
    struct test_param *p = open_with_param("adamw lr=1e-2", 2, 70001);

    step_param(&w, p);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_optim_config c = fixture_config(w.config);
    uint8_t *zeros = test_alloc(p->n * 4);
    put_header(HT_DTYPE_F32, p->n, 0);
    file_len = HEADER;
    send(p, HEADER);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    model_update(p, &c, zeros, 0, p->n, true);
    check_all(&w);
}

TEST(sums_take_dense_and_sparse_ones)
{
    struct test_param *p = open_with_param("adamw lr=1e-2 accumulate=3", 2, 70001);
    float *sum = test_alloc(p->n * sizeof(float));

    for (unsigned pass = 0; pass < 3; pass++) {
        uint8_t *g = pass == 1 ? random_gradient(&w, p) : make_sparse(p, HT_DTYPE_F32, 10);
        if (pass == 1)
            write_gradient(&w, p, g);
        else
            send(p, 4096);
        for (uint64_t i = 0; i < p->n; i++)
            sum[i] += ht_kernel_element(g, HT_DTYPE_F32, i);
    }
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_optim_config c = fixture_config(w.config);
    model_update(p, &c, (const uint8_t *)sum, 0, p->n, true);
    check_all(&w);
}

/* ------------------------------------------------------------------- wrong */

static void beyond(void)
{
    uint32_t count = (uint32_t)ht_le64_load(file + 24);

    ht_le32_store(file + HEADER + (count - 1) * 4, 70001);
}
static void twice(void)
{
    ht_le32_store(file + HEADER + 9000 * 4, ht_le32_load(file + HEADER + 8999 * 4));
}
static void longer(void)
{
    file[file_len++] = 0;
}

/* A number in the file, or a function that spoils it. */
static const struct {
    const char *words;
    size_t at, bytes;
    uint64_t value;
    void (*spoil)(void);
} wrong[] = {
    {"magic", 3, 1, 0},
    {"version 2; 1 is known", 8, 1, 2},
    {"bytes 13 to 15", 14, 1, 1},
    {"dtype 99", 12, 1, 99},
    {"dtype 3", 12, 1, HT_DTYPE_F16},
    {"70000 elements, but the parameter has 70001", 16, 8, 70000},
    {"70002 entries for 70001", 24, 8, 70002},
    {"18446744073709551615 entries", 24, 8, UINT64_MAX},
    {"entry 8192: index 5 after", HEADER + 8192 * 4, 4, 5},
    {"index 70001 of 70001", .spoil = beyond},
    {"entry 9000: index", .spoil = twice},
    {"where the header says", .spoil = longer},
};

TEST_LOOP(what_is_wrong_is_named_and_changes_nothing, HT_ARRAY_SIZE(wrong))
{
    fixture_open_as(&w, "adamw lr=1e-2", 2);
    struct test_param *p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 70001, HT_SMALL_CHUNK_BYTES);
    step_sparse(p, HT_DTYPE_BF16, 2);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_topk *t = open_topk(p);
    (void)make_sparse(p, HT_DTYPE_BF16, 2);
    memcpy(file + wrong[_i].at, &wrong[_i].value, wrong[_i].bytes); /* the machine has the order of the disk */
    if (wrong[_i].spoil)
        wrong[_i].spoil();
    write_file(t, 65536);
    ck_assert_int_eq(ht_topk_flush(t), -EINVAL);
    check_error(&w, p, wrong[_i].words);
    ck_assert_int_eq(ht_topk_flush(t), 0); /* it is forgotten */
    ck_assert(!fixture_stat(&w).open);
    commit_and_check();
    ht_topk_release(t);
    step_sparse(p, HT_DTYPE_BF16, 2);
    commit_and_check();
}

/* A forked child's exec flushes in mid-write; the writer goes on. */
TEST_LOOP(what_is_not_complete_yet_stays_for_the_next_flush, 4)
{
    static const size_t cut[] = {1, HEADER - 1, HEADER + 1, 5000};

    struct test_param *p = open_with_param("adamw lr=1e-2", 2, 70001);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_optim_config c = fixture_config(w.config);
    struct ht_topk *t = open_topk(p);
    ck_assert_int_eq(ht_topk_flush(t), 0);
    uint8_t *dense = make_sparse(p, HT_DTYPE_F32, 3);
    size_t at = cut[_i];
    ck_assert_int_eq(ht_topk_write(t, 0, file, at), (ssize_t)at);
    ck_assert_int_eq(ht_topk_flush(t), -EINVAL);
    check_error(&w, p, _i < 2 ? "no whole header" : "ends after");
    ck_assert(!fixture_stat(&w).open);
    /* The end first: a hole is no content. */
    ck_assert_int_eq(ht_topk_write(t, file_len - 1, file + file_len - 1, 1), 1);
    ck_assert_int_eq(ht_topk_flush(t), -EINVAL);
    check_error(&w, p, _i < 2 ? "no whole header" : "holes");
    ck_assert_int_eq(ht_topk_write(t, at, file + at, file_len - at), (ssize_t)(file_len - at));
    ck_assert_int_eq(ht_topk_flush(t), 0);
    ht_topk_release(t);
    model_update(p, &c, dense, 0, p->n, true);
    commit_and_check();
}

/* An abort and a drop remove all elements that were kept aside. */
TEST_LOOP(what_was_written_before_it_was_taken_back_is_not_handed_over, 2)
{
    struct test_param *p = open_with_param("adamw lr=1e-2", 2, 70001);

    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_optim_config c = fixture_config(w.config);
    struct ht_topk *t = open_topk(p);
    uint8_t *dense = make_sparse(p, HT_DTYPE_F32, 3);
    write_file(t, _i ? 100001 : 5000);
    ck_assert_int_eq(_i ? ht_optim_drop(w.o, ROOT, p->oid, NULL) : ht_optim_abort(w.o, ROOT), 0);
    ck_assert_int_eq(ht_topk_flush(t), 0);
    ck_assert(!fixture_stat(&w).open);
    write_file(t, 100001);
    ck_assert_int_eq(ht_topk_flush(t), 0);
    ht_topk_release(t);
    model_update(p, &c, dense, 0, p->n, true);
    commit_and_check();
}

TEST(a_second_one_in_a_step_is_refused_wholly)
{
    struct test_param *p = open_with_param("adamw lr=1e-2", 2, 70001);

    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    struct ht_optim_config c = fixture_config(w.config);
    uint8_t *g = random_gradient(&w, p);
    struct ht_grad *dense = open_grad(&w, p);
    write_all(dense, 0, g, 4000); /* not a whole range */
    ck_assert_int_eq(ht_grad_flush(dense), 0);
    (void)make_sparse(p, HT_DTYPE_F32, 3);
    struct ht_topk *t = open_topk(p);
    write_file(t, FILE_MAX);
    ck_assert_int_eq(ht_topk_flush(t), -EBUSY);
    check_error(&w, p, "belong to this step");
    ht_topk_release(t);
    write_all(dense, 4000, g, p->n * 4 - 4000);
    close_grad(dense);
    model_update(p, &c, g, 0, p->n, true);
    commit_and_check();
}

TEST(bytes_no_gradient_can_have_are_refused)
{
    struct test_param *p = open_with_param("adamw lr=1e-2", 1, 17);
    struct ht_topk *t = open_topk(p);

    ck_assert_int_eq(ht_topk_write(t, HT_TOPK_BYTES_MAX, file, 1), -EINVAL);
    check_error(&w, p, "reach beyond");
    ck_assert_int_eq(ht_topk_write(t, UINT64_MAX, file, 8), -EINVAL);
    ck_assert_int_eq(ht_topk_write(t, HEADER + 17 * 8, file, 1), -EINVAL); /* more than an entry for each */
    ck_assert_int_eq(ht_topk_write(t, HEADER, file, 17 * 8 + 1), -EINVAL);
    ck_assert_int_eq(ht_topk_write(t, 0, file, 0), 0);
    ck_assert_int_eq(ht_topk_flush(t), 0);
    ht_topk_release(t);
    check_all(&w);
}

/* Arbitrary bytes lead to a refusal or a step, and to nothing else. */
TEST(noise_is_safe)
{
    struct test_param *p = open_with_param("adamw lr=1e-2", 2, 1000);

    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (unsigned n = 0; n < 500; n++) {
        (void)make_sparse(p, HT_DTYPE_F32, 4);
        for (unsigned k = fixture_random(&w) % 4; k; k--)
            file[fixture_random(&w) % (n % 2 ? HEADER : file_len)] = (uint8_t)fixture_random(&w);
        if (n % 5 == 0)
            file_len = 1 + fixture_random(&w) % file_len;
        struct ht_topk *t = open_topk(p);
        write_file(t, 777);
        int rc = ht_topk_flush(t);
        ck_assert(!rc || rc == -EINVAL);
        ht_topk_release(t);
        ck_assert_int_eq(ht_optim_step(w.o, ROOT), 0);
    }
}

RUN_TESTS("topk", .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
