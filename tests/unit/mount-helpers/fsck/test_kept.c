/* SPDX-License-Identifier: Apache-2.0 */
/* Kept steps: what they hold, when they are made and go, what they refuse, what they cost. */

#include "tests/support/harness.h"
#include "tests/support/suite.h"
#include "tiering/api/keep.h"
#include "tiering/api/object.h"
#include "tiering/api/stats.h"

enum { DEVICE_BYTES = 64 << 20, SMALL_DEVICE_BYTES = 16 << 20, PARAMS = 3, THREADS = 2, NAMES_MAX = 16 };

static const struct harness_param params[PARAMS] = {
    {"embedding", "f32", 70000}, {"bias", "f32", 300}, {"head", "bf16", 50001}};

static struct harness k;
static uint64_t root, hashes[64];
static bool full; /* files beside the model's reserve no space */

static void open_with(uint64_t bytes, const char *config)
{
    memset(&k, 0, sizeof(k));
    full = false;
    harness_format(&k, 1, bytes, 512);
    ck_assert_int_eq(harness_open(&k, THREADS), 0);
    root = harness_model(&k, "model", params, PARAMS, config);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
}

static void remount(bool clean)
{
    ck_assert_int_eq(harness_close(&k, clean), 0);
    ck_assert_uint_eq(harness_fsck(&k), 0);
    ck_assert_int_eq(harness_open(&k, THREADS), 0);
    ht_store_verify(k.store, false);
}

static void finish(void)
{
    if (!k.store)
        return;
    ht_store_verify(k.store, false);
    ck_assert_int_eq(harness_close(&k, true), 0);
    ck_assert_uint_eq(harness_fsck(&k), 0);
    harness_free(&k);
}

static uint64_t fingerprint(uint64_t dir)
{
    return harness_model_hash(&k, dir, params, PARAMS);
}

static void work_on(uint64_t model, uint64_t step)
{
    char text[16];

    for (unsigned i = 0; i < PARAMS; i++)
        harness_gradient(&k, model, &params[i], step * 10 + i);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)step);
    if (!full)
        harness_put(&k, model, "cursor", text, strlen(text));
}

static void work(uint64_t step)
{
    work_on(root, step);
}

static uint64_t step_of(uint64_t dir)
{
    return harness_model_step(&k, dir);
}

/* Takes a step; its fingerprint is remembered. */
static int step(void)
{
    uint64_t n = step_of(root) + 1;

    work(n);
    int rc = ht_optim_commit(k.optim, root);
    hashes[n] = fingerprint(root);
    return rc;
}

static void steps(unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        ck_assert_int_eq(step(), 0);
}

/* The names of all, oldest first, each followed by a space. */
static const char *names(void)
{
    static char text[NAMES_MAX * (HT_KEPT_NAME_MAX + 1)];
    struct ht_ns_kept *all;
    size_t count, at = 0;

    text[0] = '\0';
    ck_assert_int_eq(ht_ns_kept_list(k.ns, root, &all, &count), 0);
    for (size_t i = 0; i < count && i < NAMES_MAX; i++)
        at += (size_t)snprintf(text + at, sizeof(text) - at, "%s ", all[i].name);
    free(all);
    return text;
}

/* Its directory. */
static uint64_t kept(const char *name)
{
    struct ht_ns_kept about = {0};

    ck_assert_int_eq(ht_ns_kept_find(k.ns, root, name, &about), 0);
    ck_assert_uint_eq(about.root, root);
    ck_assert_uint_eq(step_of(about.ino), about.step);
    return about.ino;
}

static void check_kept(uint64_t n)
{
    char name[24];

    snprintf(name, sizeof(name), "%llu", (unsigned long long)n);
    ck_assert_msg(fingerprint(kept(name)) == hashes[n], "kept step %s is not that step", name);
}

static int snapshot(const char *name)
{
    struct ht_optim_steer by = {0};

    return ht_optim_snapshot_by(k.optim, root, name, &by);
}

/* ------------------------------------------------------------------- tests */

TEST(a_kept_step_is_the_step_that_its_commit_published)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01 weight_decay=0.1 retain=10");
    steps(4);
    for (unsigned n = 1; n <= 4; n++)
        check_kept(n);
    remount(true);
    for (unsigned n = 1; n <= 4; n++)
        check_kept(n);
    ck_assert_int_eq(ht_store_checkpoint(k.store), 0);
    steps(2);
    remount(false);
    for (unsigned n = 1; n <= 6; n++)
        check_kept(n);
    ck_assert_uint_eq(fingerprint(root), hashes[6]);
}

TEST(names_attributes_and_links_are_those_of_the_step)
{
    struct stat st, link;
    char value[8] = "";

    open_with(DEVICE_BYTES, "adamw lr=0.01 retain=3");
    ck_assert_int_eq(ht_ns_mkdir(k.ns, root, "d", 0750, (struct ht_cred){5, 6, 0}, &st), 0);
    harness_put(&k, st.st_ino, "f", "one", 3);
    uint64_t d = st.st_ino, f = harness_find(&k, d, "f");
    ck_assert_int_eq(ht_ns_link(k.ns, f, root, "hard", &st), 0);
    ck_assert_int_eq(ht_ns_symlink(k.ns, root, "soft", "d/f", (struct ht_cred){0}, &st), 0);
    ck_assert_int_eq(ht_ns_setxattr(k.ns, f, "user.note", "v1", 2, 0), 0);
    steps(1);
    ck_assert_int_eq(ht_ns_setxattr(k.ns, f, "user.note", "v2", 2, 0), 0);
    ck_assert_int_eq(ht_ns_unlink(k.ns, root, "hard"), 0);
    ck_assert_int_eq(ht_ns_unlink(k.ns, root, "soft"), 0);
    ck_assert_int_eq(ht_ns_rename(k.ns, d, "f", root, "moved", 0, NULL), 0);
    steps(1);
    ck_assert_int_eq(harness_clone(&k, root, "1", HT_NS_ROOT_INO, "clone", 0), 0);
    for (unsigned pass = 0; pass < 4; pass++) {
        bool clone = pass % 2;
        uint64_t old = clone ? harness_find(&k, HT_NS_ROOT_INO, "clone") : kept("1"), in = harness_find(&k, old, "d");
        ck_assert_int_eq(ht_ns_getattr(k.ns, in, &st), 0);
        ck_assert(st.st_mode == (S_IFDIR | 0750) && st.st_uid == 5 && st.st_gid == 6 && st.st_nlink == 2);
        ck_assert_int_eq(ht_ns_getattr(k.ns, harness_find(&k, in, "f"), &st), 0);
        ck_assert_int_eq(ht_ns_getattr(k.ns, harness_find(&k, old, "hard"), &link), 0);
        ck_assert(st.st_ino == link.st_ino && st.st_nlink == 2 && st.st_ino != f);
        ck_assert_int_eq(ht_ns_getxattr(k.ns, st.st_ino, "user.note", value, sizeof(value)), 2);
        ck_assert(memcmp(value, "v1", 2) == 0);
        ck_assert_int_eq(ht_ns_readlink(k.ns, harness_find(&k, old, "soft"), value, sizeof(value)), 3);
        ck_assert_uint_eq(harness_find(&k, old, "moved"), 0);
        char path[128];
        ht_ns_path(k.ns, in, path, sizeof(path));
        ck_assert_str_eq(path, clone ? "clone/d" : "model/.hitrain/snap/1/d");
        if (clone)
            remount(pass == 1);
    }
}

TEST(the_oldest_expire_and_those_with_names_stay)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01 retain=2");
    ck_assert_str_eq(names(), "");
    steps(1);
    ck_assert_int_eq(snapshot("first"), 0);
    steps(3);
    ck_assert_str_eq(names(), "first 3 4 ");
    ck_assert_int_eq(snapshot("first"), -EEXIST);
    ck_assert_int_eq(snapshot(NULL), 0); /* in place of the one with this number */
    ck_assert_str_eq(names(), "first 3 4 ");
    remount(false);
    ck_assert_str_eq(names(), "first 3 4 ");
    ck_assert_uint_eq(fingerprint(kept("first")), hashes[1]);
    check_kept(3);
    check_kept(4);
}

TEST(a_commit_keeps_the_first_step_from_each_multiple_on)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01 retain=9 retain_every=4 durable_every=3");
    for (unsigned n = 1; n <= 13; n++) {
        work(n);
        ck_assert_int_eq(ht_optim_step(k.optim, root), 0);
    }
    ck_assert_str_eq(names(), "6 9 12 "); /* durable at 3, 6, 9 and 12 */
}

static void expect_frozen(uint64_t dir)
{
    struct stat st = {.st_mode = 0600, .st_size = 1};
    uint64_t f = harness_find(&k, dir, "embedding");
    struct ht_cred me = {0};
    struct ht_obj *o;

    ck_assert(ht_ns_is_frozen(k.ns, f) && ht_ns_is_frozen(k.ns, dir) && !ht_ns_is_frozen(k.ns, root));
    ck_assert_int_eq(ht_ns_mknod(k.ns, dir, "new", S_IFREG | 0600, 0, me, &st), -EROFS);
    ck_assert_int_eq(ht_ns_mkdir(k.ns, dir, "new", 0700, me, &st), -EROFS);
    ck_assert_int_eq(ht_ns_symlink(k.ns, dir, "new", "x", me, &st), -EROFS);
    ck_assert_int_eq(ht_ns_tmpfile(k.ns, dir, 0600, me, &st), -EROFS);
    ck_assert_int_eq(ht_ns_link(k.ns, f, dir, "new", &st), -EROFS);
    ck_assert_int_eq(ht_ns_link(k.ns, f, HT_NS_ROOT_INO, "new", &st), -EXDEV);
    ck_assert_int_eq(ht_ns_unlink(k.ns, dir, "embedding"), -EROFS);
    ck_assert_int_eq(ht_ns_rename(k.ns, dir, "embedding", dir, "new", 0, NULL), -EROFS);
    ck_assert_int_eq(ht_ns_rename(k.ns, root, "cursor", dir, "new", 0, NULL), -EROFS);
    ck_assert_int_eq(ht_ns_setxattr(k.ns, f, "user.a", "b", 1, 0), -EROFS);
    ck_assert_int_eq(ht_ns_removexattr(k.ns, f, "user.hitrain.dtype"), -EROFS);
    st = (struct stat){.st_mode = 0600, .st_size = 1};
    ck_assert_int_eq(ht_ns_setattr(k.ns, f, HT_SET_MODE, &st, &st), -EROFS);
    st.st_size = 1;
    ck_assert_int_eq(ht_ns_setattr(k.ns, f, HT_SET_SIZE, &st, &st), -EROFS);
    ck_assert_int_eq(ht_ns_open(k.ns, f, &o), 0);
    ck_assert_int_eq(ht_obj_write(o, 0, "x", 1), -EROFS);
    ck_assert_int_eq(ht_obj_truncate(o, 1), -EROFS);
    ck_assert_int_eq(ht_obj_punch(o, 0, 10), -EROFS);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, 10), -EROFS);
    struct ht_param_desc desc = {dir, o, HT_DTYPE_F32, HT_DTYPE_F32};
    struct ht_grad *g;
    float one = 1;
    ck_assert_int_eq(ht_grad_open(k.optim, &desc, &g), -EROFS);
    ck_assert_int_eq(ht_optim_state_write(k.optim, &desc, "exp_avg", 0, &one, 4), -EROFS);
    ht_ns_close(k.ns, f);
    ht_ns_touch(k.ns, f, false);
    ck_assert(!ht_ns_atime_due(k.ns, f, true));
    ck_assert_int_eq(ht_ns_fsync(k.ns, f), 0);
    ck_assert_int_eq(ht_optim_commit(k.optim, dir), -EROFS);
    ck_assert_int_eq(ht_optim_abort(k.optim, dir), -EROFS);
    ck_assert_int_eq(ht_optim_root_set_step(k.optim, dir, 7), -EROFS);
}

TEST(nothing_of_a_kept_step_changes)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01 retain=3");
    steps(2);
    for (unsigned pass = 0; pass < 2; pass++) {
        expect_frozen(kept("1"));
        check_kept(1);
        remount(!pass);
    }
}

TEST(a_forgotten_step_goes_and_open_files_stay_readable)
{
    struct ht_obj *o;
    struct stat st;
    char text[4] = "";

    open_with(DEVICE_BYTES, "adamw lr=0.01 retain=5");
    steps(3);
    uint64_t cursor = harness_find(&k, kept("2"), "cursor");
    ck_assert_int_eq(ht_ns_lookup(k.ns, kept("2"), "cursor", &st), 0);
    ck_assert_int_eq(ht_ns_open(k.ns, cursor, &o), 0);
    ck_assert_int_eq(ht_ns_kept_forget(k.ns, root, "7"), -ENOENT);
    ck_assert_int_eq(ht_ns_kept_forget(k.ns, root, "2"), 0);
    ck_assert_str_eq(names(), "1 3 ");
    ck_assert_int_eq(ht_obj_read(o, 0, text, sizeof(text)), 1);
    ck_assert_str_eq(text, "2");
    ck_assert_int_eq(ht_ns_getattr(k.ns, cursor, &st), -ESTALE);
    ht_ns_close(k.ns, cursor);
    ht_ns_forget(k.ns, cursor, 1);
    check_kept(1);
    check_kept(3);
    remount(false);
    ck_assert_str_eq(names(), "1 3 ");
    check_kept(1);
}

TEST(a_model_root_with_kept_steps_cannot_go)
{
    char value[64];

    open_with(DEVICE_BYTES, "adamw lr=0.01 retain=5");
    steps(1);
    ck_assert_int_eq(ht_ns_root_unmake(k.ns, root), -EBUSY);
    static const char *const files[] = {"embedding", "bias", "head", "cursor"};
    for (unsigned i = 0; i < HT_ARRAY_SIZE(files); i++)
        ck_assert_int_eq(ht_ns_unlink(k.ns, root, files[i]), 0);
    ck_assert_int_eq(ht_ns_rmdir(k.ns, HT_NS_ROOT_INO, "model"), -EBUSY);
    ck_assert_int_gt(ht_ns_getxattr(k.ns, root, "user.hitrain.optimizer", value, sizeof(value)), 0);
    check_kept(1);
    ck_assert_int_eq(ht_ns_kept_forget(k.ns, root, "1"), 0);
    ck_assert_int_eq(ht_ns_rmdir(k.ns, HT_NS_ROOT_INO, "model"), 0);
}

static struct ht_store_stats figures(void)
{
    struct ht_store_stats st;

    ck_assert_int_eq(ht_store_commit(k.store), 0);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    ht_store_stats(k.store, &st);
    return st;
}

TEST(memory_and_claims_are_exact_after_a_thousand)
{
    struct ht_ns_stats names_before, names_after;

    open_with(DEVICE_BYTES, "adamw lr=0.01");
    steps(2);
    for (unsigned i = 0; i < 70; i++) { /* tables reach their size */
        ck_assert_int_eq(snapshot("x"), 0);
        ck_assert_int_eq(ht_ns_kept_forget(k.ns, root, "x"), 0);
    }
    steps(1);
    struct ht_store_stats before = figures();
    uint64_t optim = ht_optim_meta_bytes(k.optim);
    ht_ns_stats(k.ns, &names_before);
    for (unsigned i = 0; i < 1000; i++) {
        ck_assert_int_eq(snapshot("x"), 0);
        ck_assert_int_eq(ht_ns_kept_forget(k.ns, root, "x"), 0);
    }
    steps(1);
    struct ht_store_stats after = figures();
    ht_ns_stats(k.ns, &names_after);
    ck_assert_uint_eq(after.log.reserved_bytes, before.log.reserved_bytes);
    ck_assert_uint_eq(after.meta_bytes, before.meta_bytes);
    ck_assert_uint_eq(after.free_bytes + after.pending_free_bytes, before.free_bytes + before.pending_free_bytes);
    ck_assert_uint_eq(after.reserved_bytes, before.reserved_bytes);
    ck_assert_uint_eq(after.objects, before.objects);
    ck_assert_uint_eq(after.chunks, before.chunks);
    ck_assert_uint_eq(names_after.meta_bytes, names_before.meta_bytes);
    ck_assert_uint_eq(names_after.inodes, names_before.inodes);
    ck_assert_uint_eq(ht_optim_meta_bytes(k.optim), optim);
}

/* Takes all space but so many bytes. */
static void fill(uint64_t leave)
{
    uint64_t ino = harness_make(&k, HT_NS_ROOT_INO, "filler");
    struct stat st = {.st_size = 0};
    struct ht_obj *o;

    ck_assert_int_eq(ht_ns_setattr(k.ns, ino, HT_SET_SIZE, &st, &st), 0);
    ck_assert_int_eq(ht_store_commit(k.store), 0);
    ck_assert_uint_gt(ht_store_available(k.store), leave);
    ck_assert_int_eq(ht_ns_open(k.ns, ino, &o), 0);
    ck_assert_int_eq(ht_obj_prealloc(o, 0, ht_store_available(k.store) - leave), 0);
    ht_ns_close(k.ns, ino);
}

TEST_LOOP(without_space_for_the_next_rewrite_a_step_is_not_kept, 2)
{
    bool must = _i;
    struct ht_root_stat st;

    open_with(DEVICE_BYTES, must ? "adamw lr=0.01 retain=20 retain_must=1" : "adamw lr=0.01 retain=20");
    steps(2);
    fill(64 << 10);
    uint64_t was = fingerprint(root);
    int rc = step();
    ck_assert_int_eq(rc, must ? -ENOSPC : 0);
    ck_assert_str_eq(names(), "1 2 ");
    ck_assert_int_eq(ht_optim_root_stat(k.optim, root, &st), 0);
    ck_assert_uint_eq(st.durable_step, must ? 2 : 3);
    ck_assert_msg(must || strstr(st.error, "step 3 is not kept: the devices lack "), "error is \"%s\"", st.error);
    if (must)
        ck_assert_int_eq(ht_optim_abort(k.optim, root), 0);
    ck_assert_uint_eq(fingerprint(root), must ? was : hashes[3]);
    fill(0); /* and the model trains on, on what it has reserved */
    full = true;
    for (unsigned i = 0; !must && i < 3; i++)
        ck_assert_int_eq(step(), 0);
    full = false;
    check_kept(1);
    check_kept(2);
    fill(16 << 20);
    steps(1);
    check_kept(step_of(root));
    ck_assert_int_eq(ht_optim_root_stat(k.optim, root, &st), 0);
    ck_assert_str_eq(st.error, "");
}

/* Nothing is written between them, so the log ends before the space. */
TEST_LOOP(more_steps_than_the_log_holds_are_not_kept, 2)
{
    char name[16];
    unsigned kept_count = 0;
    int rc = 0;

    open_with(SMALL_DEVICE_BYTES, "adamw lr=0.01 retain=1000000");
    steps(1);
    while (!rc && kept_count < 100000) {
        snprintf(name, sizeof(name), "s%u", kept_count);
        rc = snapshot(name);
        kept_count += !rc;
    }
    ck_assert_int_eq(rc, -ENOSPC);
    /* The refusal says how much the log holds, as the figures do, and what helps. */
    struct ht_root_stat st;
    char most[32], want[128];
    ht_format_size(figures().log.reserve_limit_bytes, most, sizeof(most));
    snprintf(want, sizeof(want), "step 1 is not kept: the log has room for %s of records, and ", most);
    ck_assert_int_eq(ht_optim_root_stat(k.optim, root, &st), 0);
    ck_assert_msg(strncmp(st.error, want, strlen(want)) == 0 && strstr(st.error, "(mkfs.hitrain --log-size=)"),
                  "error is \"%s\"", st.error);
    ck_assert_uint_gt(kept_count, 10);
    ck_assert_uint_gt(ht_store_available(k.store), SMALL_DEVICE_BYTES / 4);
    work(2);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0); /* the step is there, and not kept */
    ck_assert_uint_eq(step_of(root), 2);
    remount(_i);
    ck_assert_uint_eq(fingerprint(kept("s0")), hashes[1]);
    ck_assert_int_eq(ht_ns_kept_forget(k.ns, root, "s1"), 0);
    ck_assert_int_eq(ht_ns_kept_forget(k.ns, root, "s2"), 0);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    ck_assert_int_eq(snapshot("s1"), 0);
}

TEST(a_step_after_a_kept_one_has_its_space)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01");
    steps(2);
    ck_assert_int_eq(snapshot("full"), 0);
    fill(0);
    full = true;
    steps(2);
    ck_assert_uint_eq(fingerprint(kept("full")), hashes[2]);
}

/* ------------------------------------------------------------------- clones */

static uint64_t clone_of(const char *name)
{
    ck_assert_int_eq(harness_clone(&k, root, name, HT_NS_ROOT_INO, "clone", 0), 0);
    return harness_find(&k, HT_NS_ROOT_INO, "clone");
}

static void end_clone(void)
{
    static const char *const files[] = {"embedding", "bias", "head", "cursor"};
    uint64_t clone = harness_find(&k, HT_NS_ROOT_INO, "clone");

    for (unsigned i = 0; i < HT_ARRAY_SIZE(files); i++)
        ck_assert_int_eq(ht_ns_unlink(k.ns, clone, files[i]), 0);
    ck_assert_int_eq(ht_ns_rmdir(k.ns, HT_NS_ROOT_INO, "clone"), 0);
}

TEST_LOOP(a_clone_goes_its_own_way_from_the_step, 2)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01 weight_decay=0.1 retain=10");
    steps(4);
    uint64_t clone = clone_of("2");
    ck_assert(fingerprint(clone) == hashes[2] && step_of(clone) == 2);
    remount(_i);
    ck_assert(fingerprint(clone) == hashes[2] && step_of(clone) == 2);
    for (uint64_t n = 3; n <= 4; n++) { /* the same gradients give the same bits */
        work_on(clone, n);
        ck_assert_int_eq(ht_optim_commit(k.optim, clone), 0);
        ck_assert(fingerprint(clone) == hashes[n] && step_of(clone) == n);
    }
    work_on(clone, 77);
    ck_assert_int_eq(ht_optim_abort(k.optim, clone), 0);
    ck_assert_uint_eq(fingerprint(clone), hashes[4]);
    ck_assert_int_eq(ht_ns_kept_forget(k.ns, root, "2"), 0);
    steps(1);
    ck_assert_uint_eq(fingerprint(clone), hashes[4]);
    remount(!_i);
    for (unsigned n = 3; n <= 5; n++)
        check_kept(n);
    ck_assert(fingerprint(root) == hashes[5] && fingerprint(clone) == hashes[4]);
    struct ht_ns_kept *all;
    size_t count;
    ck_assert_int_eq(ht_ns_kept_list(k.ns, clone, &all, &count), 0);
    free(all);
    ck_assert_uint_eq(count, 2); /* it keeps steps of its own */
}

static void expect_unchanged(const struct ht_store_stats *was)
{
    struct ht_store_stats is = figures();

    ck_assert_uint_eq(is.log.reserved_bytes, was->log.reserved_bytes);
    ck_assert_uint_eq(is.free_bytes + is.pending_free_bytes, was->free_bytes + was->pending_free_bytes);
    ck_assert_uint_eq(is.reserved_bytes, was->reserved_bytes);
    ck_assert_uint_eq(is.objects, was->objects);
    ck_assert_uint_eq(is.chunks, was->chunks);
}

TEST(claims_are_exact_after_many_clones)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01");
    steps(2);
    ck_assert_int_eq(snapshot("x"), 0);
    steps(1); /* the kept step has all of its content alone */
    clone_of("x");
    end_clone();
    struct ht_store_stats was = figures();
    uint64_t optim = ht_optim_meta_bytes(k.optim);
    for (unsigned i = 0; i < 100; i++) {
        uint64_t clone = clone_of("x");
        if (i % 10 == 0) {
            work_on(clone, i);
            ck_assert_int_eq(ht_optim_commit(k.optim, clone), 0);
        }
        end_clone();
    }
    expect_unchanged(&was);
    ck_assert_uint_eq(ht_optim_meta_bytes(k.optim), optim);
    ck_assert_uint_eq(fingerprint(kept("x")), hashes[2]);
}

TEST_LOOP(a_clone_has_space_for_its_next_step_or_is_not_made, 2)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01");
    steps(2);
    ck_assert_int_eq(snapshot("x"), 0);
    fill(64 << 10);
    struct ht_store_stats was = figures();
    for (unsigned i = 0; i < 3; i++)
        ck_assert_int_eq(harness_clone(&k, root, "x", HT_NS_ROOT_INO, "clone", 0), -ENOSPC);
    ck_assert_msg(strncmp(harness_why, "the devices lack ", 17) == 0, "said \"%s\"", harness_why);
    ck_assert_uint_eq(figures().meta_bytes, was.meta_bytes);
    ck_assert_uint_eq(harness_find(&k, HT_NS_ROOT_INO, "clone"), 0);
    expect_unchanged(&was);
    remount(_i);
    ck_assert_uint_eq(harness_find(&k, HT_NS_ROOT_INO, "clone"), 0);
    fill(16 << 20);
    uint64_t clone = clone_of("x");
    for (unsigned i = 0; i < 2 * PARAMS; i++) /* as after a mount, the first gradient reserves its own space */
        harness_dropped_gradient(&k, i < PARAMS ? clone : root, &params[i % PARAMS], i);
    fill(0);
    full = true;
    for (uint64_t n = 3; n < 6; n++) {
        work_on(clone, n);
        ck_assert_int_eq(ht_optim_commit(k.optim, clone), 0);
        steps(1);
    }
    full = false;
    ck_assert_uint_eq(fingerprint(kept("x")), hashes[2]);
}

TEST(clones_are_refused_by_name)
{
    struct stat st;

    open_with(DEVICE_BYTES, "adamw lr=0.01 retain=4");
    steps(1);
    ck_assert_int_eq(ht_ns_mkdir(k.ns, HT_NS_ROOT_INO, "gone", 0700, (struct ht_cred){0}, &st), 0);
    ck_assert_int_eq(ht_ns_rmdir(k.ns, HT_NS_ROOT_INO, "gone"), 0);
    struct ht_store_stats was = figures();
    ck_assert_int_eq(harness_clone(&k, root, "7", HT_NS_ROOT_INO, "clone", 0), -ENOENT);
    ck_assert_int_eq(harness_clone(&k, root, "1", HT_NS_ROOT_INO, "model", 0), -EEXIST);
    ck_assert_int_eq(harness_clone(&k, root, "1", root, "clone", 0), -EINVAL);
    ck_assert_int_eq(harness_clone(&k, root, "1", kept("1"), "clone", 0), -EROFS);
    ck_assert_int_eq(harness_clone(&k, root, "1", harness_find(&k, root, "bias"), "clone", 0), -ENOTDIR);
    ck_assert_int_lt(harness_clone(&k, root, "1", st.st_ino, "clone", 0), 0);
    ck_assert_int_eq(harness_clone(&k, root, "1", HT_NS_ROOT_INO, "clone", 4711), -EPERM);
    expect_unchanged(&was);
    ck_assert_int_eq(harness_clone(&k, root, "1", HT_NS_ROOT_INO, "clone", 0), 0);
    ck_assert_int_eq(harness_clone(&k, root, "1", HT_NS_ROOT_INO, "clone", 0), -EEXIST);
}

/* ---------------------------------------------------------------- rollbacks */

static void check_figures_of(uint64_t n)
{
    struct ht_root_stat st;

    ck_assert_int_eq(ht_optim_root_stat(k.optim, root, &st), 0);
    ck_assert(st.step == n && st.durable_step == n && !st.open);
}

TEST(a_rollback_is_the_step_and_goes_on_as_the_first_time)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01 weight_decay=0.1 retain=10");
    steps(5);
    for (unsigned round = 0; round < 3; round++) {
        ck_assert_int_eq(harness_rollback(&k, root, "2"), 0);
        ck_assert_uint_eq(fingerprint(root), hashes[2]);
        check_figures_of(2);
        if (round)
            remount(round == 1);
        for (uint64_t n = 1; n <= 5; n++)
            check_kept(n);
        for (uint64_t n = 3; n <= 5; n++) { /* the same gradients give the same bits, and take the places of the kept */
            uint64_t expected = hashes[n];
            steps(1);
            ck_assert_uint_eq(hashes[n], expected);
        }
        ck_assert_str_eq(names(), "1 2 3 4 5 ");
    }
    ck_assert_int_eq(harness_rollback(&k, root, "1"), 0);
    ck_assert_int_eq(harness_rollback(&k, root, "4"), 0); /* forward is possible, too */
    ck_assert_uint_eq(fingerprint(root), hashes[4]);
    work(77);
    ck_assert_int_eq(harness_rollback(&k, root, "1"), -EBUSY);
    ck_assert_int_eq(ht_optim_abort(k.optim, root), 0);
    ck_assert_uint_eq(fingerprint(root), hashes[4]);
    ck_assert_int_eq(harness_rollback(&k, root, "9"), -ENOENT);
}

/* Everything that a program can see of a model without its state, as one number. */
static uint64_t tree_of(uint64_t dir)
{
    static const char *const paths[] = {"embedding", "bias", "head", "cursor", "d",   "d/f",   "d/e",
                                        "d/e/g",     "hard", "soft", "moved",  "new", "new/x", "kind"};
    uint64_t hash = 7;

    for (unsigned i = 0; i < HT_ARRAY_SIZE(paths); i++) {
        char path[32], *rest = NULL;
        uint64_t ino = dir;
        struct stat st;
        snprintf(path, sizeof(path), "%s", paths[i]);
        for (char *name = strtok_r(path, "/", &rest); name && ino; name = strtok_r(NULL, "/", &rest))
            ino = harness_find(&k, ino, name);
        hash = hash * 31 + (ino != 0);
        if (!ino)
            continue;
        ck_assert_int_eq(ht_ns_getattr(k.ns, ino, &st), 0);
        hash = hash * 31 + st.st_mode;
        hash = hash * 31 + st.st_nlink;
        hash = hash * 31 + st.st_uid;
        hash = hash * 31 + (uint64_t)st.st_size;
        hash = hash * 31 + (uint64_t)st.st_mtim.tv_nsec;
        char value[32] = "";
        ssize_t n = ht_ns_getxattr(k.ns, ino, "user.note", value, sizeof(value));
        hash = hash * 31 + (uint64_t)n;
        for (ssize_t c = 0; c < n; c++)
            hash = hash * 31 + (uint64_t)value[c];
        if (S_ISREG(st.st_mode))
            hash = harness_file_hash(&k, ino, hash);
    }
    return hash;
}

static void check_entries(uint64_t dir, uint64_t of)
{
    struct stat a, b;

    ck_assert_int_eq(ht_ns_getattr(k.ns, dir, &a), 0);
    ck_assert_int_eq(ht_ns_getattr(k.ns, of, &b), 0);
    ck_assert_uint_eq(a.st_nlink, b.st_nlink);
    ck_assert_int_eq(a.st_size, b.st_size);
}

TEST_LOOP(a_rollback_brings_names_attributes_and_links_back, 2)
{
    struct stat st;
    struct ht_cred me = {5, 6, 0};
    struct ht_obj *open;
    char text[4] = "";

    open_with(DEVICE_BYTES, "adamw lr=0.01 retain=5");
    ck_assert_int_eq(ht_ns_mkdir(k.ns, root, "d", 0750, me, &st), 0);
    uint64_t d = st.st_ino;
    harness_put(&k, d, "f", "one", 3);
    uint64_t f = harness_find(&k, d, "f");
    ck_assert_int_eq(ht_ns_link(k.ns, f, root, "hard", &st), 0);
    ck_assert_int_eq(ht_ns_symlink(k.ns, root, "soft", "d/f", me, &st), 0);
    ck_assert_int_eq(ht_ns_mkdir(k.ns, d, "e", 0700, me, &st), 0);
    harness_put(&k, st.st_ino, "g", "deep", 4);
    harness_put(&k, root, "kind", "file", 4);
    ck_assert_int_eq(ht_ns_setxattr(k.ns, f, "user.note", "v1", 2, 0), 0);
    ck_assert_int_eq(ht_ns_setxattr(k.ns, root, "user.note", "root", 4, 0), 0);
    steps(1);
    uint64_t was = tree_of(root), e = harness_find(&k, d, "e");
    ck_assert_int_eq(ht_ns_open(k.ns, f, &open), 0);
    /* Everything is otherwise afterwards. */
    ck_assert_int_eq(ht_ns_setxattr(k.ns, f, "user.note", "v2", 2, 0), 0);
    ck_assert_int_eq(ht_ns_setxattr(k.ns, d, "user.note", "more", 4, 0), 0);
    ck_assert_int_eq(ht_ns_removexattr(k.ns, root, "user.note"), 0);
    ck_assert_int_eq(harness_write(&k, f, 0, "two!", 4), 0);
    ck_assert_int_eq(ht_ns_rename(k.ns, root, "hard", root, "moved", 0, NULL), 0);
    ck_assert_int_eq(ht_ns_unlink(k.ns, root, "soft"), 0);
    ck_assert_int_eq(ht_ns_symlink(k.ns, root, "soft", "elsewhere", me, &st), 0);
    ck_assert_int_eq(ht_ns_unlink(k.ns, e, "g"), 0);
    ck_assert_int_eq(ht_ns_rmdir(k.ns, d, "e"), 0);
    ck_assert_int_eq(ht_ns_unlink(k.ns, root, "kind"), 0);
    ck_assert_int_eq(ht_ns_mkdir(k.ns, root, "kind", 0700, me, &st), 0);
    harness_put(&k, st.st_ino, "below", "x", 1);
    ck_assert_int_eq(ht_ns_mkdir(k.ns, root, "new", 0700, me, &st), 0);
    harness_put(&k, st.st_ino, "x", "x", 1);
    ck_assert_int_eq(ht_ns_unlink(k.ns, root, "bias"), 0); /* a parameter, with its state */
    if (_i)
        ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    ck_assert_int_eq(harness_rollback(&k, root, "1"), 0);
    for (unsigned pass = 0; pass < 3; pass++) {
        ck_assert_uint_eq(fingerprint(root), hashes[1]);
        ck_assert_uint_eq(tree_of(root), was);
        check_entries(root, kept("1"));
        check_entries(d, harness_find(&k, kept("1"), "d"));
        ck_assert_uint_eq(harness_find(&k, root, "d"), d);
        ck_assert_uint_eq(harness_find(&k, d, "f"), f); /* the same file, also for those that have it open */
        ck_assert_uint_eq(harness_find(&k, root, "hard"), f);
        if (!pass) {
            ck_assert_int_eq(ht_obj_read(open, 0, text, sizeof(text)), 3);
            ck_assert_str_eq(text, "one");
            ht_ns_close(k.ns, f);
        }
        remount(pass);
    }
    steps(1);
    remount(false);
    ck_assert_uint_eq(fingerprint(root), hashes[2]);
}

TEST(a_rollback_without_space_changes_nothing)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01");
    steps(1);
    ck_assert_int_eq(snapshot("x"), 0);
    steps(2);
    ck_assert_int_eq(ht_ns_unlink(k.ns, root, "head"), 0);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    fill(64 << 10); /* the space of the model's rewrites stays reserved, but that of head is gone */
    struct ht_store_stats was = figures();
    uint64_t tree = tree_of(root);
    for (unsigned i = 0; i < 3; i++)
        ck_assert_int_eq(harness_rollback(&k, root, "x"), -ENOSPC);
    ck_assert_uint_eq(tree_of(root), tree);
    check_figures_of(3);
    expect_unchanged(&was);
    fill(16 << 20);
    ck_assert_int_eq(harness_rollback(&k, root, "x"), 0);
    ck_assert_uint_eq(fingerprint(root), hashes[1]);
    harness_dropped_gradient(&k, root, &params[2], 1); /* reserves its space, as the first one after a mount */
    fill(0);
    full = true;
    steps(3);
    full = false;
    remount(false);
    ck_assert_uint_eq(fingerprint(root), hashes[4]);
    ck_assert_uint_eq(fingerprint(kept("x")), hashes[1]);
}

TEST(claims_are_exact_after_many_rollbacks)
{
    open_with(DEVICE_BYTES, "adamw lr=0.01");
    steps(1);
    ck_assert_int_eq(snapshot("a"), 0);
    steps(1);
    ck_assert_int_eq(snapshot("b"), 0);
    ck_assert_int_eq(harness_rollback(&k, root, "a"), 0);
    ck_assert_int_eq(harness_rollback(&k, root, "b"), 0);
    struct ht_store_stats was = figures();
    uint64_t optim = ht_optim_meta_bytes(k.optim);
    struct ht_ns_stats names_before, names_after;
    ht_ns_stats(k.ns, &names_before);
    for (unsigned i = 0; i < 60; i++) {
        harness_put(&k, root, "more", "x", 1);
        if (i % 7 == 0)
            ck_assert_int_eq(ht_ns_unlink(k.ns, root, "head"), 0);
        ck_assert_int_eq(harness_rollback(&k, root, "a"), 0);
        ck_assert_uint_eq(fingerprint(root), hashes[1]);
        ck_assert_int_eq(harness_rollback(&k, root, "b"), 0);
        ck_assert_uint_eq(fingerprint(root), hashes[2]);
    }
    harness_dropped_gradient(&k, root, &params[2], 1); /* head has a gradient again, with its space */
    expect_unchanged(&was);
    ck_assert_uint_eq(ht_optim_meta_bytes(k.optim), optim);
    ht_ns_stats(k.ns, &names_after);
    ck_assert_uint_eq(names_after.inodes, names_before.inodes);
    ck_assert_uint_eq(names_after.entries, names_before.entries);
}

TEST(a_rollback_leaves_scratch_files_and_keeps_sizes_of_chunks)
{
    static const struct harness_param small = {"small", "f32", 40000};
    static uint8_t bytes[160000];
    struct stat st;

    open_with(DEVICE_BYTES, "adamw lr=0.01 partial=1");
    ck_assert_int_eq(ht_ns_mkdir(k.ns, root, "tmp", 0700, (struct ht_cred){0}, &st), 0);
    harness_set_word(&k, st.st_ino, "user.hitrain.class", "scratch");
    uint64_t scratch = harness_make(&k, st.st_ino, "x");
    memset(bytes, 0, sizeof(bytes));
    harness_put(&k, root, "late", bytes, sizeof(bytes)); /* without dtype at first */
    uint64_t late = harness_find(&k, root, "late");
    ck_assert_int_eq(ht_ns_rename(k.ns, root, "late", root, "small", 0, NULL), 0);
    harness_set_word(&k, late, "user.hitrain.dtype", "f32");
    harness_gradient(&k, root, &small, 5);
    steps(1);
    ck_assert_int_eq(snapshot("x"), 0);
    struct ht_obj *o;
    ck_assert_int_eq(ht_ns_open(k.ns, late, &o), 0);
    uint32_t chunk_bytes = ht_obj_chunk_bytes(o);
    ht_ns_close(k.ns, late);
    uint64_t was = harness_file_hash(&k, late, 1);
    ck_assert_int_eq(harness_write(&k, scratch, 0, "later", 5), 0);
    ck_assert_int_eq(ht_ns_unlink(k.ns, root, "small"), 0);
    ck_assert_int_eq(ht_optim_commit(k.optim, root), 0);
    ck_assert_int_eq(harness_rollback(&k, root, "x"), 0);
    ck_assert_uint_eq(fingerprint(root), hashes[1]);
    ck_assert_uint_eq(harness_find(&k, st.st_ino, "x"), scratch);
    late = harness_find(&k, root, "small");
    ck_assert_uint_eq(harness_file_hash(&k, late, 1), was);
    ck_assert_int_eq(ht_ns_open(k.ns, late, &o), 0);
    ck_assert_uint_eq(ht_obj_chunk_bytes(o), chunk_bytes);
    ht_ns_close(k.ns, late);
    harness_gradient(&k, root, &small, 6); /* its state is there, and fits */
    steps(1);
}

TEST(names_are_checked)
{
    static const char *const bad[] = {"", "a/b", ".", "..", "7", "a b", "\xc3\xa4"};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_int_eq(ht_ns_kept_check_name(bad[i]), -EINVAL);
    ck_assert_int_eq(ht_ns_kept_check_name("v1.0_a:b-c"), 0);
}

RUN_TESTS("kept steps", .teardown = finish, .timeout_s = 300, .quiet = ERRORS_ONLY)
