/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_cold.c - a model gets places in a vault, is written in part, is recalled, and its file is deleted: in each
 * state of a power cut fsck finds nothing, and each block lies where the last acknowledged change put it, or a later
 * one. No state needs the vault to mount.
 */
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/harness.h"
#include "tests/support/memory.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/api/cold.h"
#include "tiering/api/tx.h"
#include "tiering/base/hash.h"
#include "tiering/object/context.h"

enum { MIB = 1 << 20, BLOCKS = 3, DEVICE_BYTES = 32 * MIB, LETTERS = BLOCKS + 1, BAD_MAX = 5 };

static char folder[] = "/tmp/hitrain-crash-cold-XXXXXX";
static uint8_t *content, *written; /* of the vault; of block 1 later */

/* What the blocks are in turn: Hole, Cold, Here, or no file. */
static const char *const stages[] = {"HHH", "CCC", "CWC", "LWC", "LWL", "---"};
enum { BEFORE, PLACED, CHANGED, RECALLED = 4, DELETED, STAGES };

static void fill(uint8_t *p, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)((i + seed) * 2654435761u >> 24);
}

static void make_vault(void)
{
    char path[128];

    content = test_alloc(BLOCKS * MIB);
    written = test_alloc(MIB);
    fill(content, BLOCKS * MIB, 1);
    fill(written, MIB, 99);
    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(path, sizeof(path), "mkdir -p %s/seg/00000007", folder);
    ck_assert_int_eq(system(path), 0);
    snprintf(path, sizeof(path), "%s/seg/00000007/0003", folder);
    FILE *f = fopen(path, "w");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fseek(f, HT_BLOCK_BYTES, SEEK_SET), 0);
    ck_assert_uint_eq(fwrite(content, 1, BLOCKS * MIB, f), BLOCKS * MIB);
    ck_assert_int_eq(fclose(f), 0);
}

static void remove_vault(void)
{
    char command[96];

    snprintf(command, sizeof(command), "rm -rf %s", folder);
    ck_assert_int_eq(system(command), 0);
}

/* ------------------------------------------------------------------- the story */

static void acknowledge(struct harness *k, unsigned stage)
{
    char text[16];

    snprintf(text, sizeof(text), "ack %u", stage);
    ck_assert_int_eq(recorder_mark(k->dev[0], text), 0);
}

static void commit(struct harness *k, uint64_t root)
{
    uint64_t lsn;

    ck_assert_int_eq(ht_scope_commit(k->store, root, &lsn), 0);
    ck_assert_int_eq(ht_store_sync(k->store, lsn), 0);
}

static bool never(void *ctx)
{
    return false;
}

static uint64_t file_of(const struct harness *k, uint64_t *out_root)
{
    *out_root = harness_find(k, HT_NS_ROOT_INO, "model");
    return *out_root ? harness_find(k, *out_root, "w") : 0;
}

static void play(struct harness *k)
{
    static const uint8_t uuid[16] = {7};
    struct ht_obj_place p[BLOCKS];
    uint64_t root, file = file_of(k, &root);
    struct ht_obj *o = ht_obj_get(k->store, file);

    for (unsigned i = 0; i < BLOCKS; i++)
        p[i] = (struct ht_obj_place){.index = i,
                                     .lease = 7,
                                     .segment = 3,
                                     .unit = 1 + i * (MIB / HT_BLOCK_BYTES),
                                     .stored = MIB,
                                     .checksum = ht_hash64(content + i * MIB, MIB, 0)};
    ck_assert_int_eq(ht_store_set_vault(k->store, uuid, folder), 0);
    ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), p, BLOCKS), 0);
    commit(k, root);
    acknowledge(k, PLACED);
    ck_assert_int_eq(ht_store_checkpoint(k->store), 0);
    ck_assert_int_eq(ht_obj_write(o, MIB, written, MIB), MIB);
    commit(k, root);
    acknowledge(k, CHANGED);
    ck_assert_int_eq(ht_obj_recall(o, never, NULL), 0);
    acknowledge(k, RECALLED);
    ht_obj_put(o);
    ck_assert_int_eq(ht_ns_unlink(k->ns, root, "w"), 0);
    commit(k, root);
    acknowledge(k, DELETED);
}

/* ------------------------------------------------------------------- the states */

static void look(struct harness *k, char out[LETTERS])
{
    struct ht_obj_place p[BLOCKS];
    uint64_t root, file = file_of(k, &root);
    struct ht_obj *o = file ? ht_obj_get(k->store, file) : NULL;
    static uint8_t buf[MIB], zeros[MIB];

    memcpy(out, "---", LETTERS);
    if (!o)
        return;
    unsigned cold = ht_obj_places(o, 0, p, BLOCKS);
    for (unsigned i = 0; i < BLOCKS; i++)
        out[i] = ' ';
    for (unsigned i = 0; i < cold; i++)
        out[p[i].index] = 'C';
    for (unsigned i = 0; i < BLOCKS; i++) {
        if (out[i] == 'C')
            continue;
        if (ht_obj_read(o, (uint64_t)i * MIB, buf, MIB) != MIB)
            out[i] = 'E';
        else if (memcmp(buf, content + i * MIB, MIB) == 0)
            out[i] = 'L';
        else
            out[i] = memcmp(buf, zeros, MIB) == 0 ? 'H' : memcmp(buf, written, MIB) == 0 ? 'W' : '?';
    }
    ht_obj_put(o);
}

struct explorer {
    struct harness k;
    uint64_t ack, made, bad;
    bool reached[STAGES];
};

static const char *check(struct explorer *x, enum state_kind kind, char got[LETTERS])
{
    unsigned stage = 0;

    memcpy(got, "", 1);
    if (kind != STATE_NOISE && harness_fsck(&x->k))
        return "fsck finds problems";
    int rc = harness_open(&x->k, 1);
    if (!rc)
        look(&x->k, got);
    if (!rc)
        ht_store_verify(x->k.store, true);
    harness_close(&x->k, false);
    while (stage < STAGES && strcmp(stages[stage], got) != 0)
        stage++;
    if (rc || stage == STAGES)
        return rc ? "it does not mount" : "the blocks are as they never were";
    x->reached[stage] = true;
    return stage < x->ack ? "an acknowledged change is gone" : NULL;
}

static bool visit(void *ctx, enum state_kind kind)
{
    struct explorer *x = ctx;
    char got[LETTERS];

    x->made++;
    const char *wrong = check(x, kind, got);
    if (wrong) {
        printf("state %llu, kept %s, ack %llu, blocks %s: %s\n", (unsigned long long)x->made, state_names[kind],
               (unsigned long long)x->ack, got, wrong);
        x->bad++;
    }
    return x->bad < BAD_MAX;
}

static uint64_t ack_at(const struct recording *rec, size_t point)
{
    for (size_t i = point; i-- > 0;)
        if (rec->entry[i].mark && memcmp(rec->entry[i].data, "ack ", 4) == 0)
            return strtoull((const char *)rec->entry[i].data + 4, NULL, 10);
    return BEFORE;
}

static void explore(struct explorer *x, const struct recording *rec, const uint8_t *base)
{
    uint64_t rnd = setting("HITRAIN_SEED", 1);
    struct state_walk w;

    walk_begin(&w, rec, base, x->k.dev, 1);
    do {
        walk_to(&w, walk_next_flush(&w));
        x->ack = ack_at(rec, w.at);
    } while (walk_each(&w, true, &rnd, visit, x) && w.at < rec->count);
    walk_end(&w);
}

TEST(places_a_recall_and_a_deletion)
{
    struct harness k = {0};
    struct explorer x = {0};
    struct recording rec;
    char path[64];

    harness_format(&k, 1, DEVICE_BYTES, 512);
    ck_assert_int_eq(harness_open(&k, 1), 0);
    uint64_t root = harness_model(&k, "model", NULL, 0, "sgd lr=1");
    uint64_t file = harness_make(&k, root, "w");
    harness_set_word(&k, file, "user.hitrain.dtype", "f32");
    ck_assert_int_eq(ht_ns_setxattr(k.ns, root, "user.hitrain.cold", "job@1", 5, 0), 0);
    struct ht_obj *o = ht_obj_get(k.store, file);
    ck_assert_int_eq(ht_obj_truncate(o, BLOCKS * MIB), 0);
    ht_obj_put(o);
    commit(&k, root);
    uint8_t *base = test_alloc(DEVICE_BYTES);
    memcpy(base, ht_dev_ram_data(k.dev[0]), DEVICE_BYTES);
    snprintf(path, sizeof(path), "/tmp/hitrain-crash-cold-%d.log", (int)getpid());
    harness_record(&k, path);
    play(&k);
    ck_assert_int_eq(recorder_stop(k.dev[0]), 0);
    harness_close(&k, false);
    harness_free(&k);
    recording_load(&rec, path);
    unlink(path);
    x.k.dev_count = 1;
    ck_assert_int_eq(dev_open_ram(DEVICE_BYTES, 512, &x.k.dev[0]), 0);
    explore(&x, &rec, base);
    states_reported(1, recording_flushes(&rec), x.made, x.made);
    ck_assert_uint_eq(x.bad, 0);
    for (unsigned i = 0; i < STAGES; i++) /* one frame may have all of a recall */
        ck_assert_msg(x.reached[i] || i == RECALLED - 1, "no state is %s", stages[i]);
    recording_free(&rec);
    harness_free(&x.k);
}

RUN_TESTS("power cuts of cold models", .timeout_s = 300, .quiet = ERRORS_ONLY, .memory = memory_keep,
          .setup = make_vault, .teardown = remove_vault)
