/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Openers of a gradient are counted: each keeps the shape as it is, until it closes. One that failed to open does not.
 */
#include "optim/state/context.h"
#include "optim/state/param.h"
#include "tests/support/wrap.h"
#include "tests/unit/optim/step/fixture.h"

enum { ELEMENTS = 1000, CALLS_MAX = 100, OBJECTS_MAX = 4096 };

static struct test_param *p;

static void setup(void)
{
    fixture_open_as(&w, "adamw lr=1e-2", 1);
    p = fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, ELEMENTS, HT_SMALL_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
}

/* An open gradient of either kind. */
struct opener {
    struct ht_grad *grad;
    struct ht_topk *topk;
};

static int open_as(struct opener *n, uint8_t grad_dtype, bool sparse)
{
    struct ht_param_desc desc = fixture_desc(p);

    desc.grad_dtype = grad_dtype;
    *n = (struct opener){.grad = NULL};
    return sparse ? ht_topk_open(w.o, &desc, &n->topk) : ht_grad_open(w.o, &desc, &n->grad);
}

static void close_it(struct opener *n)
{
    if (n->topk)
        ht_topk_release(n->topk);
    else
        ht_grad_release(n->grad);
}

/* Neither an opener nor a reference is left. */
static void expect_unused(void)
{
    lock(w.o);
    const struct ht_param *param = ht_opt_param_find(w.o, p->oid);
    unsigned openers = param ? param->openers : 0, refs = param ? param->refs : 0;
    unlock(w.o);
    ck_assert_uint_eq(openers, 0);
    ck_assert_uint_eq(refs, 0);
}

TEST_LOOP(the_last_opener_that_closes_frees_the_shape, 4)
{
    struct opener a, b, c;

    ck_assert_int_eq(open_as(&a, HT_DTYPE_F32, _i & 1), 0);
    ck_assert_int_eq(open_as(&b, HT_DTYPE_F32, _i & 2), 0);
    ck_assert_int_eq(open_as(&c, HT_DTYPE_BF16, false), -EBUSY);
    close_it(&a);
    ck_assert_int_eq(open_as(&c, HT_DTYPE_BF16, true), -EBUSY);
    close_it(&b);
    expect_unused();
    ck_assert_int_eq(open_as(&c, HT_DTYPE_BF16, false), 0);
    close_it(&c);
    expect_unused();
}

/* Each allocation of an opening fails once; each opening has another shape than the one before, so it builds anew. */
TEST_LOOP(one_that_fails_to_open_is_not_counted, 2)
{
    unsigned failed = 0;
    bool reached = true;

    for (unsigned nth = 1; reached && nth < CALLS_MAX; nth++) {
        uint8_t dtype = nth % 2 ? HT_DTYPE_BF16 : HT_DTYPE_F32;
        struct opener a;
        wrap_fail(WRAP_MEMORY, nth, false);
        int rc = open_as(&a, dtype, _i);
        reached = wrap_reached(WRAP_MEMORY);
        wrap_fail(WRAP_MEMORY, 0, false);
        ck_assert(rc == 0 || (reached && rc == -ENOMEM));
        failed += rc != 0;
        if (!rc)
            close_it(&a);
        expect_unused();
        ht_optim_verify(w.o);
    }
    ck_assert(!reached);
    ck_assert_uint_ge(failed, 3);
}

/* Takes all memory that the store has for objects. Returns how many took it; they are in all[]. */
static unsigned use_up_objects(struct ht_obj *all[OBJECTS_MAX])
{
    unsigned count = 0;
    int rc = 0;

    wrap_fail(WRAP_MEMORY, 1, true);
    while (!rc && count < OBJECTS_MAX) {
        struct ht_obj_attr a = {
            .oid = ht_store_new_id(w.s), .chunk_bytes = HT_SMALL_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH};
        rc = ht_obj_create(w.s, &a, &all[count]);
        count += !rc;
    }
    wrap_fail(WRAP_MEMORY, 0, false);
    ck_assert_int_eq(rc, -ENOMEM);
    return count;
}

/* It has opened the gradient when there is no memory for the object of its bytes. */
TEST(a_sparse_one_without_an_object_is_not_counted)
{
    struct ht_obj *all[OBJECTS_MAX];
    struct opener first, a;

    ck_assert_int_eq(open_as(&first, HT_DTYPE_F32, false), 0); /* nothing is left to be built */
    unsigned count = use_up_objects(all);
    wrap_fail(WRAP_MEMORY, 3, false); /* after the two for the opener */
    ck_assert_int_eq(open_as(&a, HT_DTYPE_F32, true), -ENOMEM);
    wrap_fail(WRAP_MEMORY, 0, false);
    close_it(&first);
    expect_unused();
    ck_assert_int_eq(open_as(&a, HT_DTYPE_BF16, true), 0);
    close_it(&a);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(w.s, 0, &tx), 0);
    for (unsigned i = 0; i < count; i++) {
        ht_obj_delete(all[i], tx);
        ht_obj_put(all[i]);
    }
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
}

RUN_TESTS("open", .setup = setup, .teardown = fixture_end, .timeout_s = 300, .memory = memory_keep)
