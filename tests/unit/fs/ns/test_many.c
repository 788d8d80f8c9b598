/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Changes of many files hold the lock of names for short slices only, and other threads find
 * and change files meanwhile.
 *
 * Builds that check locks count the steps of each hold, and with LOCKS=1 the basic blocks: these depend on no machine.
 * HITRAIN_TEST_FILES is the number of files, and the test prints the longest holds then:
 *
 *   make LOCKS=1 tests && HITRAIN_TEST_FILES=1000000 build/locks/tests/unit/fs/ns/test_many
 */

#include "fixture.h"
#include "tiering/api/keep.h"
#include "tiering/base/lock.h"
#include "tiering/base/slice.h"

enum { FEW_FILES = 6000, DIRS = 8, STEPS_MAX = 4 * HT_SLICE_STEPS, BLOCKS_MAX = 600000, LINKS = 100 };

static uint64_t root, dirs[DIRS], *files;
static size_t count;
static bool prints;

/* ------------------------------------------------------------ other threads */

static _Atomic bool stop;
static _Atomic uint64_t looked, touched, failed;

/* Each name is there, and leads to its file. */
static void *look_up(void *arg)
{
    uint64_t state = 88172645463325252;
    char name[32];
    struct stat st;

    while (!stop) {
        size_t n = random_next(&state) % count;
        snprintf(name, 32, "f%zu", n);
        failed += ht_ns_lookup(w.ns, dirs[n % DIRS], name, &st) != 0 || st.st_ino != files[n];
        ht_ns_forget(w.ns, files[n], 1);
        looked++;
    }
    return arg;
}

static void *touch(void *arg)
{
    uint64_t state = 11400714819323198485u;

    while (!stop) {
        ht_ns_touch(w.ns, files[random_next(&state) % count], true);
        touched++;
    }
    return arg;
}

/* -------------------------------------------------------------- operations */

static uint64_t began_ns;

static void begin(void)
{
    ht_lock_longest(HT_LOCK_NAMES);
    began_ns = ht_now_ns();
}

static void expect_slices(const char *what)
{
    uint64_t ns = ht_now_ns() - began_ns;
    struct ht_lock_hold longest = ht_lock_longest(HT_LOCK_NAMES);

    if (prints)
        printf("%-28s %9.1f ms  longest hold: %8.3f ms  %6llu steps  %8llu blocks\n", what, (double)ns / 1e6,
               (double)longest.ns / 1e6, (unsigned long long)longest.steps, (unsigned long long)longest.blocks);
    ck_assert_msg(longest.steps <= STEPS_MAX && longest.blocks <= BLOCKS_MAX, "%s: %llu steps, %llu blocks in one hold",
                  what, (unsigned long long)longest.steps, (unsigned long long)longest.blocks);
}

static uint64_t keep(uint64_t step)
{
    struct ht_copy k = {.must = true, .step = step, .retain = 1};
    uint64_t lsn;

    OK(ht_scope_commit_copying(w.s, root, &k, &lsn));
    OK(ht_store_sync(w.s, lsn));
    return k.to;
}

static uint64_t make_clone(uint64_t kept, const char *name)
{
    const struct ht_clone_target target = {.parent = ROOT, .name = name, .uid = 1000};
    struct ht_copy k = {.clone = &target};
    uint64_t lsn;

    OK(ht_scope_clone(w.s, kept, &k, &lsn));
    OK(ht_store_sync(w.s, lsn));
    return k.to;
}

/* ------------------------------------------------------------------- tests */

static void make_files(void)
{
    char name[32];

    for (unsigned d = 0; d < DIRS; d++) {
        snprintf(name, sizeof(name), "d%u", d);
        dirs[d] = make_dir(&w, root, name);
    }
    for (size_t n = 0; n < count; n++) {
        snprintf(name, 32, "f%zu", n);
        files[n] = make_file(&w, dirs[n % DIRS], name);
    }
    for (size_t n = 0; n < LINKS; n++) {
        struct stat st;
        snprintf(name, sizeof(name), "link%zu", n);
        OK(ht_ns_link(w.ns, files[n], dirs[(n + 1) % DIRS], name, &st));
    }
}

static void setup(void)
{
    const char *text = getenv("HITRAIN_TEST_FILES");

    prints = text != NULL;
    setlinebuf(stdout);
    count = text ? strtoull(text, NULL, 10) : FEW_FILES;
    files = calloc(count, sizeof(*files));
    uint64_t log_bytes = ht_round_up(64 * MIB + count * 4096, MIB);
    fixture_new_log(&w, 8 * log_bytes, log_bytes);
    root = make_dir(&w, ROOT, "model");
    make_root(&w, root);
    ht_lock_measure(prints);
}

/* Every other file has another mode, and some have no name any more. */
static void change_files(void)
{
    struct stat mode = {.st_mode = 0600}, st;

    for (size_t n = 0; n < count; n += 2)
        OK(ht_ns_setattr(w.ns, files[n], HT_SET_MODE, &mode, &st));
    for (size_t n = 0; n < LINKS; n++) {
        char name[32];
        snprintf(name, sizeof(name), "link%zu", n);
        OK(ht_ns_unlink(w.ns, dirs[(n + 1) % DIRS], name));
    }
}

static void expect_step(uint64_t at)
{
    uint64_t d = peek(&w, at, "d1"), i = peek(&w, d, "link0");

    ck_assert_uint_ne(i, 0);
    ck_assert_uint_eq(attributes(&w, i).st_mode, S_IFREG | 0644);
    ck_assert_uint_eq(attributes(&w, i).st_nlink, 2);
    ck_assert_uint_eq(i, peek(&w, peek(&w, at, "d0"), "f0"));
}

/* Its chunks are copies of the first one, which no record names yet. */
static struct ht_obj *file_of_many_chunks(const char *name, uint64_t *out_ino)
{
    uint8_t block[4096] = {1};

    *out_ino = make_file(&w, ROOT, name);
    struct ht_obj *obj = ht_obj_get(w.s, *out_ino);
    uint64_t bytes = ht_obj_chunk_bytes(obj);
    ck_assert_int_eq(ht_obj_write(obj, 0, block, sizeof(block)), sizeof(block));
    OK(ht_obj_truncate(obj, bytes));
    for (uint64_t n = 1; n < count; n *= 2)
        ck_assert_int_eq(ht_obj_clone(obj, 0, obj, n * bytes, n * bytes), (int64_t)(n * bytes));
    return obj;
}

TEST(no_change_of_a_file_of_many_chunks_holds_the_lock_of_names_for_long)
{
    uint64_t ino[2];

    setup();
    struct ht_obj *a = file_of_many_chunks("a", &ino[0]);
    begin();
    OK(ht_ns_fsync(w.ns, ino[0]));
    expect_slices("fsync");
    ht_obj_put(a);
    struct ht_obj *b = file_of_many_chunks("b", &ino[1]);
    off_t size = (off_t)ht_obj_size(b);
    begin();
    OK(ht_ns_rename(w.ns, ROOT, "b", ROOT, "a", 0, NULL));
    expect_slices("rename over a file");
    ht_obj_put(b);
    OK(ht_ns_fsync(w.ns, ino[1]));
    ck_assert_uint_eq(peek(&w, ROOT, "a"), ino[1]);
    fixture_check(&w);
    fixture_crash(&w);
    ck_assert_uint_eq(peek(&w, ROOT, "a"), ino[1]);
    ck_assert_uint_eq(attributes(&w, ino[1]).st_size, size);
    fixture_free(&w);
    free(files);
}

TEST(no_change_of_many_files_holds_the_lock_of_names_for_long)
{
    pthread_t reader, writer;

    setup();
    begin();
    make_files();
    expect_slices("making files");
    OK(pthread_create(&reader, NULL, look_up, NULL));
    OK(pthread_create(&writer, NULL, touch, NULL));
    begin();
    uint64_t kept = keep(1);
    expect_slices("first commit, kept");
    ck_assert(ht_ns_is_frozen(w.ns, kept));
    begin();
    uint64_t copy = make_clone(kept, "copy");
    expect_slices("clone");
    expect_step(copy);
    change_files();
    begin();
    struct ht_copy_id *ids = NULL;
    uint64_t lsn;
    size_t n;
    OK(ht_ns_rollback(w.ns, root, kept, 1000, &ids, &n));
    ck_assert_uint_eq(n, count);
    free(ids);
    OK(ht_scope_commit(w.s, root, &lsn));
    expect_slices("going back");
    expect_step(root);
    begin();
    kept = keep(2); /* the first one expires */
    expect_slices("kept, and one expires");
    begin();
    OK(ht_ns_kept_forget(w.ns, root, "2"));
    expect_slices("end of a kept step");
    ck_assert(!ht_ns_is_frozen(w.ns, kept));
    stop = true;
    pthread_join(reader, NULL);
    pthread_join(writer, NULL);
    ck_assert_uint_eq(failed, 0);
    ck_assert_uint_gt(looked, 0);
    ck_assert_uint_gt(touched, 0);
    fixture_check(&w);
    fixture_synced_crash(&w);
    expect_step(peek(&w, ROOT, "model"));
    expect_step(peek(&w, ROOT, "copy"));
    fixture_free(&w);
    free(files);
}

RUN_TESTS("many files", .timeout_s = 300)
