/* SPDX-License-Identifier: Apache-2.0 */
/* sample.c - a small store with something of everything in it. */
#include "tests/support/sample.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>

enum { ELEMENTS = 700, BIG_BYTES = 150000 };

static const struct ht_cred root_cred = {0, 0, 0};
static const struct harness_param params[] = {{"w", "f32", ELEMENTS}, {"h", "bf16", ELEMENTS}};

void sample_format(struct harness *k)
{
    struct ht_super_report report;
    struct ht_super sb;

    harness_format(k, 1, SAMPLE_DEVICE_BYTES, 4096);
    ck_assert_int_eq(ht_super_read(k->dev[0], &sb, &report), 0);
    sb.salt = SAMPLE_SALT;
    ck_assert_uint_eq(ht_super_write(&sb, k->dev, 1, NULL), 0);
}

static uint64_t make_dir(const struct harness *k, uint64_t dir, const char *name)
{
    struct stat st;

    ck_assert_int_eq(ht_ns_mkdir(k->ns, dir, name, 0755, root_cred, &st), 0);
    return st.st_ino;
}

static void step(const struct harness *k, uint64_t number)
{
    uint64_t root = harness_find(k, HT_NS_ROOT_INO, "model");
    char text[16];

    harness_gradient(k, root, &params[0], 10 * number);
    harness_gradient(k, root, &params[1], 10 * number + 1);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)number);
    harness_put(k, root, "cursor", text, strlen(text));
    ck_assert(ht_optim_commit(k->optim, root) == 0);
}

static void clone_file(const struct harness *k, const char *from, const char *to)
{
    uint64_t src = harness_find(k, HT_NS_ROOT_INO, from), dst = harness_make(k, HT_NS_ROOT_INO, to);
    struct ht_obj *a, *b;

    ck_assert(ht_ns_open(k->ns, src, &a) == 0 && ht_ns_open(k->ns, dst, &b) == 0);
    ck_assert(ht_obj_clone(a, 0, b, 0, BIG_BYTES) == BIG_BYTES);
    ht_ns_close(k->ns, src);
    ht_ns_close(k->ns, dst);
}

static void put_files(const struct harness *k)
{
    uint8_t *p = malloc(BIG_BYTES);
    struct stat st;

    for (unsigned i = 0; i < BIG_BYTES; i++)
        p[i] = (uint8_t)(i * 7 + i / 4096);
    harness_put(k, HT_NS_ROOT_INO, "small", "something short", 15);
    harness_put(k, HT_NS_ROOT_INO, "big", p, BIG_BYTES);
    ck_assert_int_eq(harness_write(k, harness_make(k, HT_NS_ROOT_INO, "sparse"), 300000, "behind a hole", 13), 0);
    free(p);
    ck_assert(ht_ns_symlink(k->ns, HT_NS_ROOT_INO, "symlink", "dir/below", root_cred, &st) == 0);
    ck_assert(ht_ns_mknod(k->ns, HT_NS_ROOT_INO, "fifo", S_IFIFO | 0600, 0, root_cred, &st) == 0);
    ck_assert(ht_ns_mknod(k->ns, HT_NS_ROOT_INO, "device", S_IFCHR | 0600, 0x103, root_cred, &st) == 0);
}

static void put_names(const struct harness *k)
{
    uint64_t dir = make_dir(k, HT_NS_ROOT_INO, "dir"), below = make_dir(k, dir, "below");
    uint64_t small = harness_find(k, HT_NS_ROOT_INO, "small");
    struct stat st;

    ck_assert(ht_ns_link(k->ns, small, below, "hard", &st) == 0);
    ck_assert(ht_ns_setxattr(k->ns, small, "user.note", "a value", 7, 0) == 0);
    ck_assert(ht_ns_setxattr(k->ns, below, "security.label", "another", 7, 0) == 0);
    harness_put(k, below, "gone", "gone", 4);
    ck_assert(ht_ns_rename(k->ns, HT_NS_ROOT_INO, "fifo", below, "pipe", 0, NULL) == 0);
    ck_assert(ht_ns_unlink(k->ns, below, "gone") == 0);
}

static void all_durable(const struct harness *k, void (*after)(void *ctx), void *ctx)
{
    ck_assert(ht_store_commit(k->store) == 0);
    if (after)
        after(ctx);
}

void sample_populate(const struct harness *k, void (*after)(void *ctx), void *ctx)
{
    put_files(k);
    all_durable(k, after, ctx);
    uint64_t root = harness_model(k, "model", params, HT_ARRAY_SIZE(params), "adamw lr=0.01");
    harness_set_word(k, harness_find(k, root, "h"), "user.hitrain.shape", "70,10");
    step(k, 1);
    all_durable(k, after, ctx);
    ck_assert(ht_store_checkpoint(k->store) == 0);
    put_names(k);
    all_durable(k, after, ctx);
    clone_file(k, "big", "clone");
    ck_assert_int_eq(harness_write(k, harness_find(k, HT_NS_ROOT_INO, "clone"), 70000, "not shared", 10), 0);
    ck_assert(ht_ns_removexattr(k->ns, harness_find(k, HT_NS_ROOT_INO, "small"), "user.note") == 0);
    all_durable(k, after, ctx);
    step(k, 2);
    all_durable(k, after, ctx);
}

uint8_t *sample_keep(const struct harness *k)
{
    uint8_t *kept = malloc(SAMPLE_DEVICE_BYTES);

    ck_assert_ptr_nonnull(kept);
    memcpy(kept, ht_dev_ram_data(k->dev[0]), SAMPLE_DEVICE_BYTES);
    memset(dev_touched(k->dev[0]), 0, SAMPLE_DEVICE_BYTES / HT_BLOCK_BYTES);
    return kept;
}

void sample_restore(const struct harness *k, const uint8_t *kept)
{
    uint8_t *touched = dev_touched(k->dev[0]), *ram = ht_dev_ram_data(k->dev[0]);

    for (size_t b = 0; b < SAMPLE_DEVICE_BYTES / HT_BLOCK_BYTES; b++)
        if (touched[b])
            memcpy(ram + b * HT_BLOCK_BYTES, kept + b * HT_BLOCK_BYTES, HT_BLOCK_BYTES);
    memset(touched, 0, SAMPLE_DEVICE_BYTES / HT_BLOCK_BYTES);
}
