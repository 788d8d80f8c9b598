/* SPDX-License-Identifier: Apache-2.0 */
/* damage_cold.c - damages of content in a vault. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

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

static const uint8_t uuid[16] = {1};
static char folder[] = "/tmp/hitrain-vault-XXXXXX";

static void write_object(const char *name, size_t bytes, size_t at)
{
    char path[96];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(ftruncate(fileno(f), (off_t)bytes), 0);
    ck_assert_int_eq(fseek(f, (long)at, SEEK_SET), 0);
    ck_assert_uint_eq(fwrite(uuid, 1, sizeof(uuid), f), sizeof(uuid));
    ck_assert_int_eq(fclose(f), 0);
}

/* A vault with a segment of zeros, or with none. */
static void make_vault(bool segment)
{
    char command[128];

    damage_remove_vault();
    memcpy(folder + sizeof(folder) - 7, "XXXXXX", 6);
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(command, sizeof(command), "mkdir -p %s/vault %s/seg/00000001", folder, folder);
    ck_assert_int_eq(system(command), 0);
    write_object("vault/0000000000000001", 64, 24);
    if (segment)
        write_object("seg/00000001/0000", 2 * HT_MIB, 0);
}

void damage_remove_vault(void)
{
    char command[80];

    snprintf(command, sizeof(command), "rm -rf %s", folder);
    ck_assert_int_eq(system(command), 0);
}

/* The first chunk of w lies in this vault. marked: its model says so. */
static void make_cold(struct harness *k, const struct damage_ids *ids, const char *url, bool marked)
{
    struct ht_obj_place place = {.lease = 1, .unit = 1, .checksum = 5};
    uint64_t lsn;

    ck_assert_int_eq(harness_open(k, 1), 0);
    struct ht_obj *o = ht_obj_get(k->store, ids->w);
    uint64_t size = ht_obj_size(o);
    place.stored = (uint32_t)ht_min_u64(size, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_store_set_vault(k->store, uuid, url), 0);
    ck_assert_int_eq(ht_obj_truncate(o, 0), 0);
    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    ck_assert_int_eq(ht_scope_commit(k->store, ids->model, &lsn), 0);
    ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &place, 1), 0);
    if (marked)
        ck_assert_int_eq(ht_ns_setxattr(k->ns, ids->model, "user.hitrain.cold", "job@1", 5, 0), 0);
    ck_assert_int_eq(ht_scope_commit(k->store, ids->model, &lsn), 0);
    ht_obj_put(o);
}

void damage_cold_unmarked(struct harness *k, const struct damage_ids *ids)
{
    make_cold(k, ids, "/nowhere", true);
    ck_assert_int_eq(harness_close(k, true), 0);
    damage_clear_feature(k, HT_FEAT_REFUSE_COLD);
}

void damage_cold_unnamed(struct harness *k, const struct damage_ids *ids)
{
    make_cold(k, ids, "/nowhere", false);
    ck_assert_int_eq(harness_close(k, true), 0);
}

void damage_bad_in_vault(struct harness *k, const struct damage_ids *ids)
{
    make_vault(true);
    make_cold(k, ids, folder, true);
    ck_assert_int_eq(harness_close(k, true), 0);
}

void damage_gone_from_vault(struct harness *k, const struct damage_ids *ids)
{
    make_vault(false);
    make_cold(k, ids, folder, true);
    ck_assert_int_eq(harness_close(k, true), 0);
}
