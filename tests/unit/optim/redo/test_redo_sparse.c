/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gradients that are mostly zeros are logged without them: bytes, bits after a crash, the bit that keeps older programs
 * away, and logged steps that cannot be right.
 */
#include "tests/unit/optim/redo/logged.h"

#include <hitrain/format.h>
#include <hitrain/topk.h>

#include "tiering/base/buf.h"
#include "tiering/base/sparse.h"

enum { STEPS = 4 };

static const char logs[] = "adamw lr=1e-2 redo=on durable_every=100";

/* An element in `rarely` has a value; in the way of a client that knows that, or as a whole gradient. */
static uint8_t *sparse_gradient(const struct test_param *p, uint64_t rarely, uint64_t *out_count)
{
    size_t size = dtype_bytes(p->grad_dtype);
    uint8_t *g = calloc(p->n, size);

    *out_count = 0;
    for (uint64_t i = 0; i < p->n; i++)
        if (fixture_random(&w) % rarely == 0) {
            put_value(g, p->grad_dtype, i, random_value(&w) * 3);
            *out_count += memcmp(g + i * size, "\0\0\0\0", size) != 0;
        }
    return g;
}

static void send_topk(const struct test_param *p, const uint8_t *g, uint64_t count)
{
    struct ht_param_desc desc = fixture_desc(p);
    struct ht_topk_header head = {.magic = HT_TOPK_MAGIC, .dtype = p->grad_dtype};
    struct ht_buf b = HT_BUF_INIT;
    size_t size = dtype_bytes(p->grad_dtype);
    struct ht_topk *t;

    ht_le32_store(&head.version, HT_TOPK_VERSION);
    ht_le64_store(&head.elements, p->n);
    ht_le64_store(&head.count, count);
    ht_buf_put(&b, &head, sizeof(head));
    for (unsigned values = 0; values < 2; values++)
        for (uint32_t i = 0; i < p->n; i++) {
            if (!memcmp(g + i * size, "\0\0\0\0", size))
                continue;
            if (values)
                ht_buf_put(&b, g + i * size, size);
            else
                ht_buf_put_u32(&b, i);
        }
    ck_assert_int_eq(ht_topk_open(w.o, &desc, &t), 0);
    ck_assert_int_eq(ht_topk_write(t, 0, b.data, b.len), (ssize_t)b.len);
    ck_assert_int_eq(ht_topk_flush(t), 0);
    ht_topk_release(t);
    ht_buf_free(&b);
}

/* Bytes of the entries. */
static uint64_t step_sparse(struct test_param *p, uint64_t rarely, bool topk)
{
    struct ht_optim_config c = fixture_config(w.config);
    uint64_t count;
    uint8_t *g = sparse_gradient(p, rarely, &count);

    if (topk)
        send_topk(p, g, count);
    else
        write_gradient(&w, p, g);
    model_update(p, &c, g, 0, p->n, true);
    free(g);
    return count * ht_sparse_entry_bytes((unsigned)dtype_bytes(p->grad_dtype));
}

/* -------------------------------------------------------------------- bytes */

static const uint64_t rarely[] = {3, 100, 1ull << 60};

/* Steps of all kinds beside each other; the last one is dense. */
TEST_LOOP(sparse_gradients_are_logged_without_zeros, HT_ARRAY_SIZE(rarely))
{
    fixture_begin_mixed(&w, logs, 1 + (unsigned)_i % 2);
    step_once();
    step_once();
    uint64_t dense = last_step(&w).at;
    ck_assert_uint_eq(dense, 70001 * 4 + 100003 * 2 + 50000 * 4 + 17 * 2);
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_REDO) && !is_marked(&w, HT_FEAT_REFUSE_SPARSE));
    for (unsigned step = 3; step <= STEPS; step++) {
        uint64_t least = 0;
        for (unsigned i = 0; i < w.params; i++)
            least += step_sparse(&w.param[i], rarely[_i], step % 2);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        uint64_t bytes = last_step(&w).at;
        ck_assert_msg(rarely[_i] < 5 || (bytes >= least && bytes <= least + 256), "%llu bytes for %llu of entries",
                      (unsigned long long)bytes, (unsigned long long)least);
        ck_assert_uint_le(bytes, dense);
    }
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_SPARSE));
    for (unsigned i = 0; i < w.params; i++)
        if (i % 2)
            step_sparse(&w.param[i], rarely[_i], true);
        else
            step_param(&w, &w.param[i]);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, STEPS);
    check_all(&w);
    crash_and_mount();
    ck_assert(is_marked(&w, HT_FEAT_REFUSE_REDO) && is_marked(&w, HT_FEAT_REFUSE_SPARSE)); /* on the device */
    ck_assert_uint_eq(fixture_stat(&w).step, STEPS + 1);
    ck_assert_str_eq(fixture_stat(&w).error, "");
    check_all(&w);
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check_all(&w);
}

/* Of whole chunks and a little more, with few elements: zeros of more than an entry can name. */
TEST(large_ranges_are_logged_without_zeros)
{
    enum { F32 = HT_CHUNK_BYTES / 4 + 1001, BF16 = HT_CHUNK_BYTES / 2 + 1001 };

    memset(&w, 0, sizeof(w));
    fixture_open_as(&w, logs, 2);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, F32, HT_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, BF16, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    for (unsigned step = 1; step <= 2; step++) {
        step_sparse(&w.param[0], 4 + 200000 * (step % 2), false);
        step_sparse(&w.param[1], 200000 - 199996 * (step % 2), false);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    }
    ck_assert_uint_lt(last_step(&w).at, F32 * 4 * 5 / 8);
    crash_and_mount();
    check_all_at(2);
}

/* A sum of sparse gradients is sparse, too. */
TEST_LOOP(sums_are_logged_without_zeros, 2)
{
    static const char *const config[] = {"adamw lr=1e-2 accumulate=3", "adamw lr=1e-2 accumulate=3 max_grad_norm=0.1"};
    uint64_t hash[2], count;
    char text[128];

    for (unsigned redo = 0; redo < 2; redo++) {
        snprintf(text, sizeof(text), "%s%s", config[_i], redo ? " redo=on durable_every=100" : "");
        fixture_begin_mixed(&w, text, 2);
        for (unsigned pass = 0; pass < 6; pass++) {
            for (unsigned i = 0; i < w.params; i++) {
                w.rnd = 88172645463325252ull + 1000 * i + pass;
                uint8_t *g = sparse_gradient(&w.param[i], 50, &count);
                write_gradient(&w, &w.param[i], g);
                free(g);
            }
            if (pass % 3 == 2)
                ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        }
        if (redo) {
            ck_assert_uint_lt(last_step(&w).at, (70001 + 100003 + 50000) * 4 / 8);
            crash_and_mount();
        }
        ck_assert_uint_eq(fixture_stat(&w).step, 2);
        hash[redo] = fixture_hash(&w);
        fixture_close(&w);
    }
    ck_assert(hash[0] == hash[1]);
}

/* ---------------------------------------------------------------- hostility */

#define PIECES (sizeof(struct ht_disk_redo) + 2 * sizeof(struct ht_disk_redo_param))
#define PIECE(field) (PIECES + offsetof(struct ht_disk_redo_coded, field))

/* Of the third step, in its summary or, with bytes 0, in the entries of its first piece. */
static const struct {
    const char *what;
    size_t at, bytes;
    uint64_t value;
} wrong[] = {
    {"no coding", offsetof(struct ht_disk_redo, version), 4, HT_REDO_VERSION},
    {"another version", offsetof(struct ht_disk_redo, version), 4, 5},
    {"a coding that there is not", PIECE(coding), 4, 2},
    {"entries that are none", PIECE(coding), 4, HT_REDO_PLAIN},
    {"a part of an entry", PIECE(bytes), 4, 7},
    {"more entries than there may be", PIECE(bytes), 4, HT_REDO_SPARSE_BYTES_MAX + 2},
    {"entries beyond the end", PIECE(bytes), 4, 600000},
    {"entries at another place", PIECE(piece.at), 8, 3},
    {"entries beyond the object", PIECE(piece.at), 8, 1ull << 40},
    {"elements beyond the piece", PIECE(piece.end), 4, 400},
    {"a piece longer than its range", PIECE(piece.end), 4, 1 << 20},
    {"a piece that ends within an element", PIECE(piece.end), 4, 65534},
    {"an element beyond the end", 0, 0, 0xffff},
};

/* Where it is in the object of the step. */
static uint64_t place_of(struct ht_obj *obj, const struct ht_redo_step *s, unsigned i)
{
    struct ht_redo_summary read;
    struct ht_redo_piece piece;
    uint8_t *summary;
    uint32_t param;

    if (wrong[i].bytes)
        return s->at + wrong[i].at;
    ck_assert_int_eq(ht_opt_redo_read(obj, s, &summary, &read), 0);
    ck_assert_int_eq(ht_opt_redo_piece_at(&read, 0, &param, &piece), 0);
    ck_assert(piece.sparse);
    free(summary);
    return piece.at;
}

/* Puts it in, sees that the step is refused, and takes it back. */
static void check_refused(const struct ht_redo_step *s, unsigned i)
{
    size_t bytes = wrong[i].bytes ? wrong[i].bytes : 2;
    struct ht_obj *obj = ht_obj_get(w.s, s->oid);
    uint64_t at = place_of(obj, s, i), value = 0;

    memcpy(&value, &wrong[i].value, bytes); /* the machine has the order of the disk */
    exchange(obj, at, bytes, &value);
    ck_assert_msg(value != wrong[i].value, "%s: it is so", wrong[i].what);
    ht_obj_put(obj);
    crash_and_mount();
    struct ht_root_stat st = fixture_stat(&w);
    ck_assert_msg(strstr(st.error, "step 3 cannot be computed again") != NULL, "%s: error is \"%s\"", wrong[i].what,
                  st.error);
    ck_assert_uint_eq(st.step, 1);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EIO);
    obj = ht_obj_get(w.s, s->oid);
    exchange(obj, at, bytes, &value);
    ht_obj_put(obj);
}

TEST(a_sparse_piece_that_cannot_be_right_is_refused)
{
    memset(&w, 0, sizeof(w));
    fixture_open_as(&w, logs, 1);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 20001, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 1003, HT_SMALL_CHUNK_BYTES);
    for (unsigned step = 1; step <= 3; step++) {
        if (step == 1)
            step_all(&w);
        else
            for (unsigned i = 0; i < w.params; i++)
                step_sparse(&w.param[i], 20, true);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    }
    const struct ht_redo_step s = last_step(&w);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(wrong); i++)
        check_refused(&s, i);
    crash_and_mount();
    check_all_at(3);
}

RUN_TESTS("logged gradients that are mostly zeros", .teardown = fixture_end, .timeout_s = 300, .quiet = ERRORS_ONLY,
          .memory = memory_keep)
