/* SPDX-License-Identifier: Apache-2.0 */
/* The promises of rename: which kinds may replace which, nothing in between, data before the name. */
#include "fixture.h"

static int mv(uint64_t from, const char *name, uint64_t to, const char *new_name, unsigned flags)
{
    int rc = ht_ns_rename(w.ns, from, name, to, new_name, flags, NULL);

    fixture_check(&w);
    return rc;
}

TEST(a_name_moves)
{
    uint64_t a = make_dir(&w, ROOT, "a");
    uint64_t b = make_dir(&w, ROOT, "b");
    uint64_t file = make_file(&w, a, "file");
    uint64_t dir = make_dir(&w, a, "dir");

    OK(mv(a, "file", b, "moved", 0));
    OK(mv(a, "dir", b, "dir", 0));
    ck_assert_uint_eq(peek(&w, a, "file"), 0);
    ck_assert_uint_eq(attributes(&w, a).st_nlink, 2);
    ck_assert_uint_eq(attributes(&w, b).st_nlink, 3);
    ck_assert_uint_eq(ht_ns_parent(w.ns, dir), b);
    fixture_synced_crash(&w);
    ck_assert_uint_eq(find(&w, b, "moved"), file);
    ck_assert_uint_eq(ht_ns_parent(w.ns, dir), b);
    ck_assert_uint_eq(find(&w, a, "file"), 0);
}

TEST(files_and_directories_are_told_apart)
{
    uint64_t full = make_dir(&w, ROOT, "full");
    uint64_t empty = make_dir(&w, ROOT, "empty");

    make_file(&w, full, "x");
    make_file(&w, ROOT, "file");
    FAILS(mv(ROOT, "none", ROOT, "file", 0), ENOENT);
    FAILS(mv(ROOT, "file", ROOT, "empty", 0), EISDIR);
    FAILS(mv(ROOT, "empty", ROOT, "file", 0), ENOTDIR);
    FAILS(mv(ROOT, "empty", ROOT, "full", 0), ENOTEMPTY);
    FAILS(mv(ROOT, "full", full, "inside", 0), EINVAL);
    FAILS(mv(ROOT, "full", ROOT, "a/b", 0), EINVAL);
    FAILS(mv(ROOT, "full", ROOT, "empty", 8), EINVAL);
    FAILS(mv(ROOT, "full", ROOT, "empty", RENAME_NOREPLACE | RENAME_EXCHANGE), EINVAL);
    OK(mv(ROOT, "full", ROOT, "full", 0));
    OK(mv(ROOT, "full", ROOT, "empty", 0));
    ck_assert_uint_eq(peek(&w, ROOT, "empty"), full);
    ht_ns_forget(w.ns, empty, 1);
    ck_assert_uint_eq(w.deleted[0], empty);
}

TEST(a_directory_does_not_go_below_itself)
{
    uint64_t a = make_dir(&w, ROOT, "a");
    uint64_t b = make_dir(&w, a, "b");
    uint64_t c = make_dir(&w, b, "c");

    FAILS(mv(ROOT, "a", c, "x", 0), EINVAL);
    FAILS(mv(ROOT, "a", a, "x", 0), EINVAL);
    FAILS(mv(ROOT, "a", b, "c", RENAME_EXCHANGE), EINVAL);
    FAILS(mv(b, "c", ROOT, "a", RENAME_EXCHANGE), EINVAL);
    FAILS(mv(b, "c", ROOT, "a", 0), ENOTEMPTY);
    OK(mv(a, "b", ROOT, "b", 0));
    OK(mv(ROOT, "a", c, "x", 0));
}

TEST(noreplace_and_exchange)
{
    struct stat st;
    uint64_t a = make_file(&w, ROOT, "a");
    uint64_t b = make_dir(&w, ROOT, "b");
    uint64_t dir = make_dir(&w, ROOT, "dir");

    FAILS(mv(ROOT, "a", ROOT, "b", RENAME_NOREPLACE), EEXIST);
    OK(ht_ns_link(w.ns, a, ROOT, "a2", &st));
    FAILS(mv(ROOT, "a", ROOT, "a2", RENAME_NOREPLACE), EEXIST);
    OK(mv(ROOT, "a", ROOT, "a2", 0)); /* the same inode: nothing happens */
    OK(mv(ROOT, "a", ROOT, "a2", RENAME_EXCHANGE));
    ck_assert_uint_eq(peek(&w, ROOT, "a"), a);
    FAILS(mv(ROOT, "a", ROOT, "none", RENAME_EXCHANGE), ENOENT);
    OK(mv(ROOT, "a", dir, "free", RENAME_NOREPLACE));
    OK(mv(dir, "free", ROOT, "b", RENAME_EXCHANGE));
    ck_assert_uint_eq(peek(&w, dir, "free"), b);
    ck_assert_uint_eq(peek(&w, ROOT, "b"), a);
    ck_assert_uint_eq(attributes(&w, dir).st_nlink, 3);
    ck_assert_uint_eq(attributes(&w, ROOT).st_nlink, 3);
    ck_assert_uint_eq(ht_ns_parent(w.ns, b), dir);
    fixture_synced_crash(&w);
    ck_assert_uint_eq(find(&w, dir, "free"), b);
    ck_assert_uint_eq(find(&w, ROOT, "b"), a);
}

static int mv_whiteout(uint64_t from, const char *name, uint64_t to, const char *new_name, unsigned flags)
{
    int rc = ht_ns_rename(w.ns, from, name, to, new_name, flags, &(struct ht_cred){7, 8, 022});

    fixture_check(&w);
    return rc;
}

static void expect_whiteout(uint64_t parent, const char *name)
{
    struct stat st;

    OK(ht_ns_lookup(w.ns, parent, name, &st));
    ck_assert_uint_eq(st.st_mode, S_IFCHR);
    ck_assert_uint_eq(st.st_rdev, 0);
    ck_assert_uint_eq(st.st_nlink, 1);
    ck_assert_uint_eq(st.st_uid, 7);
    ck_assert_uint_eq(st.st_gid, 8);
    ht_ns_forget(w.ns, st.st_ino, 1);
}

TEST(a_whiteout_stays_under_the_old_name)
{
    uint64_t other = make_dir(&w, ROOT, "other");
    uint64_t file = make_file(&w, ROOT, "file");
    uint64_t dir = make_dir(&w, ROOT, "dir");

    make_file(&w, other, "taken");
    FAILS(mv_whiteout(ROOT, "file", other, "x", RENAME_EXCHANGE), EINVAL);
    FAILS(mv_whiteout(ROOT, "file", other, "taken", RENAME_NOREPLACE), EEXIST);
    FAILS(mv_whiteout(ROOT, "none", other, "x", 0), ENOENT);
    OK(mv_whiteout(ROOT, "file", other, "taken", 0));
    OK(mv_whiteout(ROOT, "dir", other, "dir", RENAME_NOREPLACE));
    for (int crash = 0; crash < 2; crash++) {
        ck_assert_uint_eq(peek(&w, other, "taken"), file);
        ck_assert_uint_eq(ht_ns_parent(w.ns, find(&w, other, "dir")), other);
        ck_assert_uint_eq(peek(&w, other, "dir"), dir);
        expect_whiteout(ROOT, "file");
        expect_whiteout(ROOT, "dir");
        ck_assert_uint_eq(attributes(&w, ROOT).st_nlink, 3);
        ck_assert_uint_eq(attributes(&w, other).st_nlink, 3);
        fixture_synced_crash(&w);
    }
    OK(mv(other, "taken", ROOT, "file", 0)); /* over the whiteout */
    ck_assert_uint_eq(peek(&w, ROOT, "file"), file);
    OK(ht_ns_unlink(w.ns, ROOT, "dir"));
}

TEST(a_whiteout_below_a_root_comes_with_the_commit)
{
    uint64_t root = make_dir(&w, ROOT, "root");
    uint64_t file = make_file(&w, root, "file");

    make_root(&w, root);
    for (int round = 0; round < 2; round++) {
        OK(mv_whiteout(root, "file", root, "moved", 0));
        expect_whiteout(root, "file");
        if (round == 0)
            abort_root(&w, root);
        else
            commit(&w, root);
        fixture_crash(&w);
        ck_assert_uint_eq(peek(&w, root, round == 0 ? "file" : "moved"), file);
    }
    expect_whiteout(root, "file");
}

TEST(the_replaced_file_goes_when_nobody_has_it_open)
{
    struct ht_obj *obj;
    uint64_t old = make_file(&w, ROOT, "target");
    uint64_t new = make_file(&w, ROOT, "tmp");

    OK(ht_ns_open(w.ns, old, &obj));
    ht_ns_forget(w.ns, old, 1);
    OK(mv(ROOT, "tmp", ROOT, "target", 0));
    ck_assert_uint_eq(w.deleted_count, 0);
    ht_ns_close(w.ns, old);
    ck_assert_uint_eq(w.deleted_count, 1);
    ck_assert_uint_eq(peek(&w, ROOT, "target"), new);
}

TEST(a_replacing_file_brings_its_data)
{
    uint64_t file = make_file(&w, ROOT, "target");

    write_text(&w, file, "old");
    OK(ht_ns_fsync(w.ns, file));
    file = make_file(&w, ROOT, "tmp");
    write_text(&w, file, "new content");
    OK(mv(ROOT, "tmp", ROOT, "target", 0));
    fixture_synced_crash(&w); /* syncs the log, not the file */
    file = find(&w, ROOT, "target");
    expect_text(&w, file, "new content");
}

TEST(exchanged_files_bring_their_data)
{
    uint64_t a = make_file(&w, ROOT, "a");
    uint64_t b = make_file(&w, ROOT, "b");

    write_text(&w, a, "of a");
    write_text(&w, b, "of b");
    OK(mv(ROOT, "a", ROOT, "b", RENAME_EXCHANGE));
    fixture_synced_crash(&w);
    expect_text(&w, find(&w, ROOT, "b"), "of a");
    expect_text(&w, find(&w, ROOT, "a"), "of b");
}

TEST(times_follow_a_rename)
{
    struct stat zero = {0}, st;
    uint64_t a, b, file, dir[2];

    a = make_dir(&w, ROOT, "a");
    b = make_dir(&w, ROOT, "b");
    file = make_file(&w, a, "file");
    OK(ht_ns_setattr(w.ns, a, HT_SET_MTIME, &zero, &st));
    OK(ht_ns_setattr(w.ns, b, HT_SET_MTIME, &zero, &st));
    OK(ht_ns_setattr(w.ns, file, HT_SET_MTIME | HT_SET_CTIME, &zero, &st));
    OK(mv(a, "file", b, "file", 0));
    dir[0] = a;
    dir[1] = b;
    for (int round = 0; round < 2; round++) {
        for (int n = 0; n < 2; n++)
            ck_assert_int_gt(attributes(&w, dir[n]).st_mtim.tv_sec, 0);
        ck_assert_int_gt(attributes(&w, file).st_ctim.tv_sec, 0);
        ck_assert_int_eq(attributes(&w, file).st_mtim.tv_sec, 0);
        fixture_synced_crash(&w); /* the records of the names carried them */
    }
}

TEST(names_stay_within_their_model_root)
{
    struct stat st;
    uint64_t root = make_dir(&w, ROOT, "root");
    uint64_t other = make_dir(&w, ROOT, "other");
    uint64_t file = make_file(&w, root, "file");

    make_file(&w, other, "file");
    make_dir(&w, other, "dir");
    make_root(&w, root);
    FAILS(mv(root, "file", other, "moved", 0), EXDEV);
    FAILS(mv(other, "file", root, "moved", 0), EXDEV);
    FAILS(mv(other, "file", root, "file", RENAME_EXCHANGE), EXDEV);
    FAILS(mv(other, "dir", root, "dir", 0), EXDEV);
    FAILS(ht_ns_link(w.ns, file, other, "link", &st), EXDEV);
    FAILS(ht_ns_link(w.ns, peek(&w, other, "file"), root, "link", &st), EXDEV);
    OK(mv(ROOT, "root", other, "root", 0)); /* as a whole */
    ck_assert_uint_eq(ht_ns_parent(w.ns, root), other);
    fixture_synced_crash(&w);
    ck_assert_uint_eq(find(&w, other, "root"), root);
    ck_assert_uint_eq(find(&w, root, "file"), file);
}

RUN_TESTS("rename", .setup = fixture_start, .teardown = fixture_end, .timeout_s = 300)
