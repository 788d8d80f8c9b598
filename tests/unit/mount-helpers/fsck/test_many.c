/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Logs that repeat one kind of record very often: the time of mounting and checking is proportional to the number of
 * records. The test compares the processor time for one number with that for four times as many.
 */
#include <time.h>

#include "fs/ns/records.h"
#include "tests/support/damage.h"
#include "tests/support/suite.h"

enum { FEW = 4000, MANY = 4 * FEW, RATIO_MAX = 9, FIRST_INO = 1000, REC_OPT_ROOT = HT_REC_OPT_FIRST };
#define DEVICE_BYTES ((uint64_t)1 << 30)

static void put_inode(struct ht_buf *b, uint64_t ino, uint32_t mode, bool model_root)
{
    ht_ns_record_encode(
        b,
        &(struct ht_ns_record){
            .type = HT_REC_NS_INODE, .ino = ino, .attr = {.mode = (uint16_t)(mode | 0755)}, .model_root = model_root});
}

static void put_entry(struct ht_buf *b, uint64_t ino, uint32_t type)
{
    char name[32];
    int len = snprintf(name, sizeof(name), "n%llu", (unsigned long long)ino);

    ht_ns_record_encode(b,
                        &(struct ht_ns_record){.type = HT_REC_NS_ENTRY,
                                               .parent = HT_NS_ROOT_INO,
                                               .ino = ino,
                                               .entry_type = (uint16_t)type,
                                               .name = name,
                                               .name_len = (uint32_t)len});
}

static void put_attribute(struct ht_buf *b, uint64_t ino, const char *name, const char *value)
{
    ht_ns_record_encode(b,
                        &(struct ht_ns_record){.type = HT_REC_NS_XATTR,
                                               .ino = ino,
                                               .name = name,
                                               .name_len = (uint32_t)strlen(name),
                                               .value = value,
                                               .value_len = (uint32_t)strlen(value)});
}

static void put_numbers(struct ht_buf *b, uint16_t type, const uint64_t *numbers, unsigned count)
{
    size_t mark = ht_record_begin(b, type);

    for (unsigned i = 0; i < count; i++)
        ht_buf_put_u64(b, numbers[i]);
    ht_record_end(b, mark);
}

/* ------------------------------------------------------------------- kinds */

static void model_root(struct ht_buf *b, uint64_t n)
{
    uint64_t ino = FIRST_INO + n;

    put_inode(b, ino, S_IFDIR, true);
    put_entry(b, ino, S_IFDIR);
    put_attribute(b, ino, "user.hitrain.optimizer", "sgd lr=1");
    put_numbers(b, REC_OPT_ROOT, (uint64_t[]){ino, n}, 2);
}

/* An object in a scope of its own that no file has. */
static void scope(struct ht_buf *b, uint64_t n)
{
    put_numbers(b, HT_REC_OBJECT, (uint64_t[]){FIRST_INO + n, HT_CHUNK_BYTES, 0, FIRST_INO + MANY + n}, 4);
}

static void optimizer_root(struct ht_buf *b, uint64_t n)
{
    put_numbers(b, REC_OPT_ROOT, (uint64_t[]){FIRST_INO + n, n}, 2);
}

static void attribute(struct ht_buf *b, uint64_t n)
{
    char name[32];

    snprintf(name, sizeof(name), "user.%llu", (unsigned long long)n);
    if (n == 0) {
        put_inode(b, FIRST_INO, S_IFDIR, false);
        put_entry(b, FIRST_INO, S_IFDIR);
    }
    put_attribute(b, FIRST_INO, name, "");
}

static void attribute_of_nothing(struct ht_buf *b, uint64_t n)
{
    put_attribute(b, FIRST_INO + n, "user.a", "");
}

static void hard_link(struct ht_buf *b, uint64_t n)
{
    char name[32];

    snprintf(name, sizeof(name), "l%llu", (unsigned long long)n);
    if (n == 0)
        put_inode(b, FIRST_INO, S_IFREG, false);
    ht_ns_record_encode(b,
                        &(struct ht_ns_record){.type = HT_REC_NS_ENTRY,
                                               .parent = HT_NS_ROOT_INO,
                                               .ino = FIRST_INO,
                                               .entry_type = S_IFREG,
                                               .name = name,
                                               .name_len = (uint32_t)strlen(name)});
}

/* The answer of a mount: nothing, or that so many records make no sense. */
enum refused { NEVER, MANY_OF_THEM, ALWAYS };

static const struct kind {
    const char *name;
    void (*put)(struct ht_buf *b, uint64_t n);
    enum refused refused;
} kinds[] = {
    {"model roots", model_root},
    {"scopes", scope},
    {"roots of the optimizer", optimizer_root},
    {"attributes of one inode", attribute, MANY_OF_THEM},
    {"attributes of nothing", attribute_of_nothing, ALWAYS},
    {"names of one file", hard_link},
};

/* -------------------------------------------------------------------- time */

static double cpu_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double seconds_for(const struct kind *kind, uint64_t count)
{
    struct ht_buf records = HT_BUF_INIT;
    struct harness k;
    int rc;

    harness_format(&k, 1, DEVICE_BYTES, 4096);
    ck_assert_int_eq(harness_open(&k, 1), 0);
    ck_assert_int_eq(harness_close(&k, true), 0);
    for (uint64_t n = 0; n < count; n++)
        kind->put(&records, n);
    damage_append(&k, &records);
    ht_buf_free(&records);
    double begin = cpu_s();
    (void)harness_problems(&k, &rc);
    rc = harness_open(&k, 1); /* or refused */
    (void)harness_close(&k, false);
    double end = cpu_s();
    harness_free(&k);
    ck_assert_int_eq(rc, count == MANY || kind->refused == ALWAYS ? kind->refused == NEVER ? 0 : -EUCLEAN : 0);
    return end - begin;
}

TEST_LOOP(time_goes_with_the_number_of_records, HT_ARRAY_SIZE(kinds))
{
    const struct kind *kind = &kinds[_i];
    double few = seconds_for(kind, FEW), many = seconds_for(kind, MANY);

    ck_assert_msg(many < RATIO_MAX * few + 0.1, "%s: %.3f s for %d, %.3f s for %d", kind->name, few, FEW, many, MANY);
}

RUN_TESTS("many", .timeout_s = 100)
