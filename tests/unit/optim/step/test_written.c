/* SPDX-License-Identifier: Apache-2.0 */
/* What the store writes for a model counts for its steps. */
#include "fixture.h"

static struct fixture w;

static int unmake(void *ctx)
{
    struct ht_tx *tx;

    ck_assert_int_eq(ht_tx_begin(w.s, 4096, &tx), 0);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_int_eq(ht_obj_set_scope(w.param[i].obj, 0, tx), 0);
    ht_scope_end(w.s, ROOT, HT_SCOPE_DISSOLVED, tx);
    return ht_tx_commit(tx, NULL);
}

static void make_root_again(void)
{
    struct ht_optim_config config = fixture_config(w.config);
    struct ht_tx *tx;

    ck_assert_int_eq(ht_tx_begin(w.s, 4096, &tx), 0);
    ck_assert_int_eq(ht_optim_root_add(w.o, ROOT, &config, tx), 0);
    for (unsigned i = 0; i < w.params; i++)
        ck_assert_int_eq(ht_obj_set_scope(w.param[i].obj, ROOT, tx), 0);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
}

/* The model is larger than memory, so most bytes stream. */
START_TEST(a_step_counts_what_was_written_since_the_one_before)
{
    const uint64_t state = 300000 * 12 + 700001 * 14;
    uint64_t sum = 0, all;

    w.threads = 2;
    fixture_open(&w);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 300000, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_F32, 700001, HT_CHUNK_BYTES);
    ck_assert_uint_eq(fixture_stat(&w).step_written_bytes, 0);
    for (int i = 0; i < 4; i++) {
        step_all(&w);
        ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
        sum += fixture_stat(&w).step_written_bytes;
    }
    all = ht_scope_written_bytes(w.s, ROOT);
    ck_assert_uint_ge(fixture_stat(&w).step_written_bytes, state / 2);
    ck_assert_uint_le(fixture_stat(&w).step_written_bytes, state * 3 / 2);
    ck_assert_uint_le(sum, all); /* without the last commit's own */
    ck_assert_uint_ge(sum, all - state * 3 / 2);

    ck_assert_int_eq(ht_optim_root_end(w.o, ROOT, unmake, NULL), 0);
    make_root_again();
    ck_assert_uint_eq(fixture_stat(&w).step_written_bytes, 0);
    for (unsigned i = 0; i < w.params; i++)
        forget_state(&w.param[i]);
    step_all(&w);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    ck_assert_uint_le(fixture_stat(&w).step_written_bytes, state * 3 / 2);
    fixture_close(&w);
}
END_TEST

int main(void)
{
    TCase *t = tcase_create("all");

    tcase_add_test(t, a_step_counts_what_was_written_since_the_one_before);
    return run_suite("written", t);
}
