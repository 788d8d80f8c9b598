/* SPDX-License-Identifier: Apache-2.0 */
/* damage_cold.c - damages of content in a vault. */
#include <check.h>

#include "tests/support/damage.h"
#include "tests/support/log_records.h"
#include "tiering/api/cold.h"
#include "tiering/api/object.h"
#include "tiering/api/tx.h"

void damage_in_no_vault(const struct damage_ids *ids, struct ht_buf *b)
{
    log_put_chunk(b,
                  &(struct log_chunk){.oid = ids->small,
                                      .generation = 77,
                                      .stored = ids->of_small.stored,
                                      .visible = ids->of_small.visible,
                                      .checksum = ids->of_small.checksum,
                                      .device = HT_DEVICE_VAULT,
                                      .block = 1});
}

void damage_cold_unmarked(struct harness *k, const struct damage_ids *ids)
{
    const uint8_t uuid[16] = {1};
    struct ht_obj_place place = {.lease = 1, .unit = 1, .checksum = 5};
    uint64_t lsn;

    ck_assert_int_eq(harness_open(k, 1), 0);
    struct ht_obj *o = ht_obj_get(k->store, ids->w);
    uint64_t size = ht_obj_size(o);
    place.stored = (uint32_t)ht_min_u64(size, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_store_set_vault(k->store, uuid, "/nowhere"), 0);
    ck_assert_int_eq(ht_obj_truncate(o, 0), 0);
    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    ck_assert_int_eq(ht_scope_commit(k->store, ids->model, &lsn), 0);
    ck_assert_int_eq(ht_obj_set_places(o, &place, 1), 0);
    ck_assert_int_eq(ht_scope_commit(k->store, ids->model, &lsn), 0);
    ht_obj_put(o);
    ck_assert_int_eq(harness_close(k, true), 0);
    damage_clear_feature(k, HT_FEAT_REFUSE_COLD);
}
