/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_add.c - power cuts while a device is added to a store. In every state that a cut could leave, the store mounts
 * with the device or without it, and has all its content. A store that went on without the device refuses it by name
 * until it is added again.
 *
 * HITRAIN_SEED=N seeds the random states.
 */
#include <sys/mman.h>

#include "tests/support/harness.h"
#include "tests/support/u64_set.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/space/super.h"

enum { MEMBERS = 2, ALL, DEVICE_BYTES = 8 << 20, FILE_BYTES = 256 << 10 };

struct cut {
    struct harness k;
    struct state_walk w;
    struct u64_set images;
    uint8_t *content, *kept;
    uint64_t rnd, states, without, with, either;
};

static void save(struct cut *c, bool back)
{
    for (unsigned i = 0; i < ALL; i++) {
        uint8_t *device = ht_dev_ram_data(c->k.dev[i]), *kept = c->kept + (size_t)i * DEVICE_BYTES;
        memcpy(back ? device : kept, back ? kept : device, DEVICE_BYTES);
    }
}

static void expect(struct cut *c, const char *name)
{
    uint64_t ino = harness_find(&c->k, HT_NS_ROOT_INO, name), found = harness_file_hash(&c->k, ino, 0);

    harness_put(&c->k, HT_NS_ROOT_INO, "same", c->content, FILE_BYTES);
    ck_assert_msg(ino && found == harness_file_hash(&c->k, harness_find(&c->k, HT_NS_ROOT_INO, "same"), 0),
                  "%s, state %llu", name, (unsigned long long)c->states);
}

/* Mounts so many devices; then they have the content, and take more. */
static bool go_on(struct cut *c, unsigned count, const char *more)
{
    c->k.dev_count = count;
    int rc = harness_open(&c->k, 1);
    if (rc == 0) {
        expect(c, "file");
        if (more)
            harness_put(&c->k, HT_NS_ROOT_INO, more, c->content, FILE_BYTES);
        else
            expect(c, "more");
    }
    harness_close(&c->k, rc == 0);
    ck_assert(rc != 0 || harness_fsck(&c->k) == 0);
    return rc == 0;
}

static int add(struct cut *c)
{
    struct ht_super_report report;
    struct ht_super sb;

    ck_assert_int_eq(ht_super_read(c->k.dev[0], &sb, &report), 0);
    return ht_super_add(&sb, c->k.dev, c->k.dev[MEMBERS], HT_DEVICE_CAPACITY);
}

static bool visit(void *ctx, enum state_kind kind)
{
    struct cut *c = ctx;

    c->states++;
    if (!u64_set_add(&c->images, walk_hash(&c->w)))
        return true;
    save(c, false);
    bool without = go_on(c, MEMBERS, "more");
    if (without) {
        c->k.dev_count = ALL;
        int rc = harness_open(&c->k, 1);
        harness_close(&c->k, false);
        ck_assert_msg(rc != 0, "state %llu (%s): a device that the store left behind is taken in",
                      (unsigned long long)c->states, state_names[kind]);
        ck_assert_int_eq(add(c), 0);
        ck_assert(go_on(c, ALL, NULL));
    }
    save(c, true);
    bool with = go_on(c, ALL, "more") && go_on(c, ALL, NULL);
    ck_assert_msg(with || without, "state %llu (%s): it mounts neither with the device nor without it",
                  (unsigned long long)c->states, state_names[kind]);
    c->with += with && !without;
    c->without += without && !with;
    c->either += with && without;
    return true;
}

TEST(an_addition_that_is_cut_short_leaves_the_store_with_or_without_the_device)
{
    struct cut *c = calloc(1, sizeof(*c));
    uint8_t *base = malloc((size_t)ALL * DEVICE_BYTES);
    int fd = memfd_create("hitrain-add", MFD_CLOEXEC);
    struct recording rec;
    char path[64];

    c->kept = malloc((size_t)ALL * DEVICE_BYTES);
    c->content = malloc(FILE_BYTES);
    c->rnd = setting("HITRAIN_SEED", 1);
    for (size_t i = 0; i < FILE_BYTES; i++)
        c->content[i] = (uint8_t)(i * 7 + i / 4096);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    harness_format(&c->k, MEMBERS, DEVICE_BYTES, 512);
    ck_assert_int_eq(dev_open_ram(DEVICE_BYTES, 512, &c->k.dev[MEMBERS]), 0);
    /* An older store with higher generations was on the device. */
    for (unsigned i = 0; i < 40; i++)
        ck_assert_int_eq(ht_super_format(&c->k.dev[MEMBERS], 1, &(struct ht_format_opts){0}, &(struct ht_super){0}), 0);
    ck_assert_int_eq(harness_open(&c->k, 1), 0);
    harness_put(&c->k, HT_NS_ROOT_INO, "file", c->content, FILE_BYTES);
    harness_close(&c->k, true);

    c->k.dev_count = ALL;
    save(c, false);
    memcpy(base, c->kept, (size_t)ALL * DEVICE_BYTES);
    harness_record(&c->k, path);
    ck_assert_int_eq(add(c), 0);
    ck_assert_int_eq(recorder_stop(c->k.dev[0]), 0);
    recording_load(&rec, path);
    walk_begin(&c->w, &rec, base, c->k.dev, ALL);
    walk_each(&c->w, true, &c->rnd, visit, c);
    do {
        walk_to(&c->w, walk_next_flush(&c->w));
        walk_each(&c->w, true, &c->rnd, visit, c);
    } while (c->w.at < rec.count);
    walk_end(&c->w);
    ck_assert_msg(c->without && c->with && c->either, "%llu without, %llu with, %llu either",
                  (unsigned long long)c->without, (unsigned long long)c->with, (unsigned long long)c->either);
    states_reported(1, recording_flushes(&rec), c->states, c->images.count);
    recording_free(&rec);
    c->k.dev_count = ALL;
    harness_free(&c->k);
    close(fd);
    free(base);
    u64_set_free(&c->images);
    free(c->kept);
    free(c->content);
    free(c);
}

RUN_TESTS("cut additions", .timeout_s = 900)
