/* SPDX-License-Identifier: Apache-2.0 */
/* Reading directories: large ones, and while they change. */
#include "fixture.h"

enum { STEADY = 300 };

struct walk {
    uint64_t cookie; /* where to go on */
    unsigned left;   /* entries to take before stopping */
    unsigned *seen;  /* by number in the name "s<number>"; STEADY entries */
    unsigned total;
    bool stopped;
};

static int take(void *ctx, const struct ht_ns_dirent *e)
{
    struct walk *k = ctx;
    struct stat st;

    if (k->left == 0) {
        k->stopped = true;
        return 1;
    }
    k->left--;
    k->total++;
    ck_assert_uint_gt(e->cookie, k->cookie);
    k->cookie = e->cookie;
    OK(ht_ns_getattr_locked(w.ns, e->ino, false, &st));
    ck_assert_uint_eq(st.st_mode & S_IFMT, e->type);
    if (k->seen && e->name[0] == 's')
        k->seen[atoi(e->name + 1)]++;
    return 0;
}

/* Up to count entries more; false at the end. */
static bool walk_on(struct walk *k, uint64_t dir, unsigned count)
{
    k->left = count;
    k->stopped = false;
    OK(ht_ns_readdir(w.ns, dir, k->cookie, take, k));
    return k->stopped;
}

static unsigned count_entries(uint64_t dir)
{
    struct walk k = {.cookie = 0};

    while (walk_on(&k, dir, 100))
        ;
    return k.total;
}

TEST(entries_are_told_with_their_types)
{
    uint64_t dir = new_dir();

    ck_assert_uint_eq(count_entries(dir), 0);
    make_file(&w, dir, "s1");
    make_dir(&w, dir, "sub");
    ck_assert_uint_eq(count_entries(dir), 2);
    FAILS(ht_ns_readdir(w.ns, find(&w, dir, "s1"), 0, take, NULL), ENOTDIR);
    FAILS(ht_ns_readdir(w.ns, 777, 0, take, NULL), ESTALE);
}

TEST(a_reference_can_be_taken_while_reading)
{
    struct stat st;

    uint64_t file = new_file();
    OK(ht_ns_getattr_locked(w.ns, file, true, &st));
    OK(ht_ns_unlink(w.ns, ROOT, "file"));
    ht_ns_forget(w.ns, file, 1);
    OK(ht_ns_getattr(w.ns, file, &st));
    ht_ns_forget(w.ns, file, 1);
    FAILS(ht_ns_getattr(w.ns, file, &st), ESTALE);
}

TEST(entries_are_known_while_they_have_references)
{
    uint64_t dir, last = 0;
    char name[32];

    dir = new_dir();
    ck_assert(ht_ns_entries_known(w.ns, dir));
    for (unsigned n = 0; n < 10; n++) {
        snprintf(name, sizeof(name), "file-%u", n);
        last = make_file(&w, dir, name);
    }
    ck_assert(ht_ns_entries_known(w.ns, dir));
    ht_ns_forget(w.ns, last, 1);
    ck_assert(!ht_ns_entries_known(w.ns, dir));
    OK(ht_ns_unlink(w.ns, dir, "file-9"));
    ck_assert(ht_ns_entries_known(w.ns, dir));
    for (unsigned n = 10; n < 1000; n++) {
        snprintf(name, sizeof(name), "file-%u", n);
        ht_ns_forget(w.ns, make_file(&w, dir, name), 1);
    }
    ck_assert(!ht_ns_entries_known(w.ns, dir));
    ck_assert(!ht_ns_entries_known(w.ns, 777));
}

/* Names "x<n>" come and go; "s<n>" stay, some replaced and exchanged in place. */
static void disturb(uint64_t dir, unsigned round)
{
    char name[32], other[32];

    for (unsigned n = 0; n < 40; n++) {
        snprintf(name, sizeof(name), "x%u", (round * 7 + n) % 97);
        if (peek(&w, dir, name) != 0)
            OK(ht_ns_unlink(w.ns, dir, name));
        else
            ht_ns_forget(w.ns, make_file(&w, dir, name), 1);
    }
    snprintf(name, sizeof(name), "s%u", round * 13 % STEADY);
    snprintf(other, sizeof(other), "s%u", (round * 31 + 5) % STEADY);
    OK(ht_ns_rename(w.ns, dir, name, dir, other, RENAME_EXCHANGE, NULL));
    ht_ns_forget(w.ns, make_file(&w, dir, "tmp"), 1);
    OK(ht_ns_rename(w.ns, dir, "tmp", dir, name, 0, NULL));
}

static void walk_while_disturbed(uint64_t dir)
{
    static unsigned seen[STEADY];
    struct walk k = {.seen = seen};
    char name[32];

    memset(seen, 0, sizeof(seen));
    for (unsigned n = 0; n < STEADY; n++) {
        snprintf(name, sizeof(name), "s%u", n);
        ht_ns_forget(w.ns, make_file(&w, dir, name), 1);
    }
    for (unsigned round = 0; walk_on(&k, dir, 10); round++)
        disturb(dir, round);
    for (unsigned n = 0; n < STEADY; n++)
        ck_assert_uint_eq(seen[n], 1);
    fixture_check(&w);
}

TEST(what_stays_is_seen_exactly_once)
{
    fixture_new_log(&w, 64 * MIB, 16 * MIB);
    walk_while_disturbed(make_dir(&w, ROOT, "dir"));
}

TEST(what_stays_is_seen_exactly_once_below_a_root)
{
    uint64_t dir;

    fixture_new_log(&w, 64 * MIB, 16 * MIB);
    dir = make_dir(&w, ROOT, "dir");
    make_root(&w, dir);
    walk_while_disturbed(dir);
    commit(&w, dir);
}

/* Removes the entries that it has read, as rm -r does. */
TEST(a_directory_is_emptied_while_read)
{
    struct walk k = {.cookie = 0};
    uint64_t dir;
    char name[32];

    fixture_new_log(&w, 64 * MIB, 16 * MIB);
    dir = make_dir(&w, ROOT, "dir");
    for (unsigned n = 0; n < 5000; n++) {
        snprintf(name, sizeof(name), "f%u", n);
        ht_ns_forget(w.ns, make_file(&w, dir, name), 1);
    }
    for (unsigned n = 0, more = 1; more; n += 50) {
        more = walk_on(&k, dir, 50);
        for (unsigned m = n; m < n + 50 && m < 5000; m++) {
            snprintf(name, sizeof(name), "f%u", m);
            OK(ht_ns_unlink(w.ns, dir, name));
        }
    }
    ck_assert_uint_eq(k.total, 5000);
    OK(ht_ns_rmdir(w.ns, ROOT, "dir"));
}

/* Nothing here is quadratic: each part would take minutes. */
TEST(large_directories_work)
{
    enum { FILES = 200000 };
    uint64_t dir;
    char name[32];

    fixture_new_log(&w, 448 * MIB, 96 * MIB);
    dir = make_dir(&w, ROOT, "dir");
    for (unsigned n = 0; n < FILES; n++) {
        snprintf(name, sizeof(name), "file-%u", n);
        ht_ns_forget(w.ns, make_file(&w, dir, name), 1);
    }
    ck_assert_uint_eq(count_entries(dir), FILES);
    for (unsigned n = 0; n < FILES; n += 2) {
        snprintf(name, sizeof(name), "file-%u", n);
        OK(ht_ns_unlink(w.ns, dir, name));
    }
    ck_assert_uint_eq(count_entries(dir), FILES / 2);
    OK(ht_store_checkpoint(w.s));
    fixture_remount(&w);
    ck_assert_uint_eq(count_entries(dir), FILES / 2);
    for (unsigned n = 1; n < FILES; n += 2) {
        snprintf(name, sizeof(name), "file-%u", n);
        OK(ht_ns_unlink(w.ns, dir, name));
    }
    OK(ht_ns_rmdir(w.ns, ROOT, "dir"));
}

RUN_TESTS("dir", .setup = fixture_start, .teardown = fixture_end, .timeout_s = 300)
