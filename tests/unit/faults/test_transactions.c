/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that a transaction lacks is missed before it changes anything: the log goes on. */
#include "tests/support/wrap.h"
#include "tests/unit/tiering/store/fixture.h"

enum { CHUNKS = 1500, STEP = 50 };

/* Some 90 KiB of metadata, made by small transactions. */
static struct ht_obj *fill(void)
{
    struct ht_obj *o = object(HT_SMALL_CHUNK_BYTES, 0);

    for (uint64_t i = 0; i < CHUNKS; i++) {
        put_all(o, i * HT_SMALL_CHUNK_BYTES, (const uint8_t *)&i, sizeof(i));
        if (i % STEP == STEP - 1)
            ck_assert_int_eq(ht_obj_sync(o), 0);
    }
    ck_assert_int_eq(ht_obj_sync(o), 0);
    return o;
}

TEST(a_checkpoint_without_memory_is_put_off)
{
    bool reached = true, refused = false;

    wrap_pause(true);
    fresh(64, false);
    put_object(fill());
    for (unsigned nth = 1; reached; nth++) {
        remount(); /* buffers are small again */
        wrap_fail(WRAP_MEMORY, nth, true);
        wrap_pause(false);
        int rc = ht_store_checkpoint(s);
        wrap_pause(true);
        reached = wrap_reached(WRAP_MEMORY);
        wrap_fail(WRAP_MEMORY, 0, false);
        ck_assert(rc == 0 || (rc == -ENOMEM && reached)); /* 0 also when another thread met the failure */
        refused |= rc == -ENOMEM;
        ck_assert(!ht_store_failed(s));
        ck_assert_int_eq(ht_store_checkpoint(s), 0);
    }
    ck_assert(refused);
}

/* When the transaction opens, more is pending than its request said. */
TEST(a_publication_that_has_grown_is_refused_whole)
{
    struct ht_tx *tx;

    wrap_pause(true);
    fresh(64, false);
    struct ht_obj *o = fill();
    uint64_t oid = ht_obj_id(o);
    remount(); /* buffers are small again */
    o = get_object(oid);
    ck_assert_int_eq(ht_tx_begin(s, ht_obj_pending_bytes(o), &tx), 0);
    for (uint64_t i = 0; i < CHUNKS; i++)
        put_all(o, i * HT_SMALL_CHUNK_BYTES, (const uint8_t *)"x", 1);
    ck_assert_int_eq(ht_obj_writeback(o), 0);
    wrap_fail(WRAP_MEMORY, 1, true);
    wrap_pause(false);
    int rc = ht_tx_expect(tx, ht_obj_pending_bytes(o));
    wrap_pause(true);
    wrap_fail(WRAP_MEMORY, 0, false);
    ck_assert_int_eq(rc, -ENOMEM);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    ck_assert(!ht_store_failed(s));
    ck_assert_int_eq(ht_obj_sync(o), 0);
}

RUN_TESTS("transactions", .teardown = done, .timeout_s = 60)
