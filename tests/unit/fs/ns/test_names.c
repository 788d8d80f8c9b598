/* SPDX-License-Identifier: Apache-2.0 */
/* Making and removing names, and the references that keep an inode in memory. */
#include "fixture.h"
#include "tiering/api/stats.h"

#include <sys/sysmacros.h>

static const struct ht_cred cred = {1000, 1001, 0};

TEST(a_new_store_has_a_root_directory)
{
    struct stat st = attributes(&w, ROOT);

    ck_assert(S_ISDIR(st.st_mode));
    ck_assert_uint_eq(st.st_uid, 100);
    ck_assert_uint_eq(st.st_gid, 200);
    ck_assert_uint_eq(st.st_nlink, 2);
    ck_assert_uint_eq(ht_ns_parent(w.ns, ROOT), 0);
    fixture_crash(&w);
    ck_assert_uint_eq(attributes(&w, ROOT).st_uid, 100);
}

TEST(a_new_store_mounted_read_only_is_empty)
{
    fixture_kill(&w);
    w.read_only = true;
    fixture_mount(&w);
    ck_assert(S_ISDIR(attributes(&w, ROOT).st_mode));
}

TEST(every_type_survives_a_crash)
{
    struct stat st;
    char buf[64];

    OK(ht_ns_mknod(w.ns, ROOT, "file", S_IFREG | 0640, 0, cred, &st));
    OK(ht_ns_mknod(w.ns, ROOT, "fifo", S_IFIFO | 0600, 0, cred, &st));
    OK(ht_ns_mknod(w.ns, ROOT, "socket", S_IFSOCK | 0600, 0, cred, &st));
    OK(ht_ns_mknod(w.ns, ROOT, "char", S_IFCHR | 0600, makedev(10, 300), cred, &st));
    OK(ht_ns_mknod(w.ns, ROOT, "block", S_IFBLK | 0600, makedev(8, 1), cred, &st));
    OK(ht_ns_symlink(w.ns, ROOT, "link", "some/where", cred, &st));
    ck_assert_int_eq(st.st_size, 10);
    make_dir(&w, ROOT, "dir");
    fixture_synced_crash(&w);
    ck_assert_uint_eq(attributes(&w, find(&w, ROOT, "file")).st_mode, S_IFREG | 0640);
    ck_assert_uint_eq(attributes(&w, find(&w, ROOT, "file")).st_gid, 1001);
    ck_assert_uint_eq(attributes(&w, find(&w, ROOT, "fifo")).st_mode, S_IFIFO | 0600);
    ck_assert_uint_eq(attributes(&w, find(&w, ROOT, "socket")).st_mode, S_IFSOCK | 0600);
    ck_assert_uint_eq(attributes(&w, find(&w, ROOT, "char")).st_rdev, makedev(10, 300));
    ck_assert_uint_eq(attributes(&w, find(&w, ROOT, "block")).st_rdev, makedev(8, 1));
    ck_assert_uint_eq(attributes(&w, find(&w, ROOT, "dir")).st_nlink, 2);
    ck_assert_uint_eq(attributes(&w, ROOT).st_nlink, 3);
    ck_assert_int_eq(ht_ns_readlink(w.ns, find(&w, ROOT, "link"), buf, sizeof(buf)), 10);
    ck_assert_int_eq(memcmp(buf, "some/where", 10), 0);
    FAILS(ht_ns_readlink(w.ns, ROOT, buf, sizeof(buf)), EINVAL);
}

TEST(bad_names_are_refused)
{
    char name[300];
    struct stat st;

    uint64_t file = new_file();
    memset(name, 'n', sizeof(name));
    name[256] = '\0';
    FAILS(ht_ns_mkdir(w.ns, ROOT, name, 0755, cred, &st), ENAMETOOLONG);
    FAILS(ht_ns_lookup(w.ns, ROOT, name, &st), ENAMETOOLONG);
    FAILS(ht_ns_unlink(w.ns, ROOT, name), ENAMETOOLONG);
    name[255] = '\0';
    OK(ht_ns_mkdir(w.ns, ROOT, name, 0755, cred, &st));
    FAILS(ht_ns_mkdir(w.ns, ROOT, name, 0755, cred, &st), EEXIST);
    FAILS(ht_ns_mkdir(w.ns, ROOT, "", 0755, cred, &st), EINVAL);
    FAILS(ht_ns_mkdir(w.ns, ROOT, "a/b", 0755, cred, &st), EINVAL);
    FAILS(ht_ns_mkdir(w.ns, ROOT, "..", 0755, cred, &st), EINVAL);
    FAILS(ht_ns_mknod(w.ns, file, "x", S_IFREG | 0600, 0, cred, &st), ENOTDIR);
    FAILS(ht_ns_mknod(w.ns, 12345, "x", S_IFREG | 0600, 0, cred, &st), ESTALE);
    FAILS(ht_ns_mknod(w.ns, ROOT, "x", S_IFDIR | 0600, 0, cred, &st), EINVAL);
    FAILS(ht_ns_symlink(w.ns, ROOT, "x", "", cred, &st), ENOENT);
    ck_assert_uint_eq(find(&w, ROOT, "x"), 0);
}

TEST(setgid_directories_pass_their_group_on)
{
    struct stat st = {.st_mode = 02775, .st_gid = 77}, got;

    uint64_t dir = new_dir();
    OK(ht_ns_setattr(w.ns, dir, HT_SET_MODE | HT_SET_GID, &st, &got));
    ck_assert_uint_eq(attributes(&w, make_file(&w, dir, "file")).st_gid, 77);
    ck_assert_uint_eq(attributes(&w, make_file(&w, dir, "other")).st_mode, S_IFREG | 0644);
    ck_assert_uint_eq(attributes(&w, make_dir(&w, dir, "sub")).st_mode, S_IFDIR | 02755);
}

TEST(umask_counts_where_there_is_no_default_list)
{
    struct stat st;

    OK(ht_ns_mknod(w.ns, ROOT, "file", S_IFREG | 0666, 0, (struct ht_cred){1, 1, 027}, &st));
    ck_assert_uint_eq(st.st_mode, S_IFREG | 0640);
}

TEST(hard_links_share_the_inode)
{
    struct stat st;
    uint64_t file = make_file(&w, ROOT, "a");
    uint64_t dir = make_dir(&w, ROOT, "dir");

    write_text(&w, file, "content");
    OK(ht_ns_link(w.ns, file, dir, "b", &st));
    ck_assert_uint_eq(st.st_nlink, 2);
    FAILS(ht_ns_link(w.ns, file, dir, "b", &st), EEXIST);
    FAILS(ht_ns_link(w.ns, dir, ROOT, "d", &st), EPERM);
    OK(ht_ns_unlink(w.ns, ROOT, "a"));
    ck_assert_uint_eq(attributes(&w, file).st_nlink, 1);
    fixture_remount(&w);
    ck_assert_uint_eq(find(&w, dir, "b"), file);
    expect_text(&w, file, "content");
}

TEST(links_have_a_limit)
{
    struct stat st;
    char name[32];

    fixture_new_log(&w, 128 * MIB, 32 * MIB);
    uint64_t file = make_file(&w, ROOT, "0");
    for (unsigned n = 1; n < HT_LINKS_MAX; n++) {
        snprintf(name, sizeof(name), "%u", n);
        OK(ht_ns_link(w.ns, file, ROOT, name, &st));
    }
    ck_assert_uint_eq(st.st_nlink, HT_LINKS_MAX);
    FAILS(ht_ns_link(w.ns, file, ROOT, "more", &st), EMLINK);
    for (unsigned n = 0; n < HT_LINKS_MAX; n++) {
        snprintf(name, sizeof(name), "%u", n);
        OK(ht_ns_unlink(w.ns, ROOT, name));
    }
}

TEST(removing_checks_the_type)
{
    uint64_t dir = new_dir();

    make_file(&w, dir, "file");
    FAILS(ht_ns_unlink(w.ns, ROOT, "none"), ENOENT);
    FAILS(ht_ns_unlink(w.ns, ROOT, "dir"), EISDIR);
    FAILS(ht_ns_rmdir(w.ns, dir, "file"), ENOTDIR);
    FAILS(ht_ns_rmdir(w.ns, ROOT, "dir"), ENOTEMPTY);
    OK(ht_ns_unlink(w.ns, dir, "file"));
    OK(ht_ns_rmdir(w.ns, ROOT, "dir"));
    ck_assert_uint_eq(attributes(&w, ROOT).st_nlink, 2);
    ck_assert_uint_eq(attributes(&w, dir).st_nlink, 0);
}

TEST(nothing_is_made_in_a_removed_directory)
{
    struct stat st;
    uint64_t dir, file;

    dir = new_dir();
    file = make_file(&w, ROOT, "file");
    OK(ht_ns_rmdir(w.ns, ROOT, "dir"));
    FAILS(ht_ns_mkdir(w.ns, dir, "x", 0755, cred, &st), ENOENT);
    FAILS(ht_ns_link(w.ns, file, dir, "x", &st), ENOENT);
    FAILS(ht_ns_rename(w.ns, ROOT, "file", dir, "x", 0, NULL), ENOENT);
    ht_ns_forget(w.ns, dir, 1);
    FAILS(ht_ns_getattr(w.ns, dir, &st), ESTALE);
}

TEST(an_unlinked_open_file_lives_until_closed)
{
    struct ht_obj *obj;
    struct stat st;
    char c = 0;

    uint64_t file = new_file();
    write_text(&w, file, "text");
    OK(ht_ns_open(w.ns, file, &obj));
    OK(ht_ns_unlink(w.ns, ROOT, "file"));
    ht_ns_forget(w.ns, file, 1);
    ck_assert_uint_eq(attributes(&w, file).st_nlink, 0);
    ck_assert_int_eq(ht_obj_read(obj, 1, &c, 1), 1);
    ck_assert_int_eq(c, 'e');
    OK(ht_ns_fsync(w.ns, file));
    FAILS(ht_ns_link(w.ns, file, ROOT, "again", &st), ENOENT);
    ck_assert_uint_eq(w.deleted_count, 0);
    ht_ns_close(w.ns, file);
    ck_assert_uint_eq(w.deleted_count, 1);
    ck_assert_uint_eq(w.deleted[0], file);
    FAILS(ht_ns_getattr(w.ns, file, &st), ESTALE);
    ck_assert_ptr_null(ht_obj_get(w.s, file));
}

TEST(lookups_keep_an_unlinked_inode)
{
    struct stat st;

    uint64_t file = new_file();
    ck_assert_uint_eq(find(&w, ROOT, "file"), file);
    OK(ht_ns_unlink(w.ns, ROOT, "file"));
    ht_ns_forget(w.ns, file, 1);
    OK(ht_ns_getattr(w.ns, file, &st));
    ht_ns_forget(w.ns, file, 1000); /* more than there are */
    FAILS(ht_ns_getattr(w.ns, file, &st), ESTALE);
}

TEST(a_mount_deletes_what_has_no_links)
{
    struct ht_store_stats st;
    struct ht_ns_stats ns;

    uint64_t file = new_file();
    write_text(&w, file, "text");
    OK(ht_ns_fsync(w.ns, file));
    make_dir(&w, ROOT, "dir");
    OK(ht_ns_unlink(w.ns, ROOT, "file"));
    OK(ht_ns_rmdir(w.ns, ROOT, "dir"));
    fixture_synced_crash(&w);
    ck_assert_uint_eq(w.deleted_count, 2);
    ht_ns_stats(w.ns, &ns);
    ck_assert_uint_eq(ns.inodes, 1);
    ck_assert_uint_eq(ns.entries, 0);
    ht_store_stats(w.s, &st);
    ck_assert_uint_eq(st.objects, 0);
}

TEST(a_full_log_refuses_new_names_and_can_be_emptied)
{
    struct stat st;
    unsigned made = 0, at_first;
    char name[32];
    int rc;

    fixture_new_log(&w, 16 * MIB, 512 << 10);
    for (int round = 0; round < 3; round++) {
        made = 0;
        for (;;) {
            snprintf(name, sizeof(name), "file-%u", made);
            rc = ht_ns_mknod(w.ns, ROOT, name, S_IFREG | 0600, 0, cred, &st);
            if (rc != 0)
                break;
            ht_ns_forget(w.ns, st.st_ino, 1);
            made++;
        }
        ck_assert_int_eq(rc, -ENOSPC);
        ck_assert_uint_gt(made, 500);
        if (round == 0)
            at_first = made;
        ck_assert_uint_eq(made, at_first); /* all reserves came back */
        FAILS(ht_ns_setxattr(w.ns, find(&w, ROOT, "file-0"), "user.x", name, sizeof(name), 0), ENOSPC);
        fixture_check(&w);
        if (round == 1)
            fixture_remount(&w);
        for (unsigned n = 0; n < made; n++) {
            snprintf(name, sizeof(name), "file-%u", n);
            OK(ht_ns_unlink(w.ns, ROOT, name));
        }
        ht_ns_forget(w.ns, st.st_ino, 1);
        fixture_remount(&w);
    }
}

TEST(a_read_only_store_refuses_changes)
{
    struct stat st = {0};
    struct ht_obj *obj;

    uint64_t file = new_file();
    write_text(&w, file, "text");
    OK(ht_store_unmount(w.s));
    fixture_kill(&w);
    w.read_only = true;
    fixture_mount(&w);
    ck_assert_uint_eq(find(&w, ROOT, "file"), file);
    expect_text(&w, file, "text");
    FAILS(ht_ns_mkdir(w.ns, ROOT, "dir", 0755, cred, &st), EROFS);
    FAILS(ht_ns_unlink(w.ns, ROOT, "file"), EROFS);
    FAILS(ht_ns_setattr(w.ns, file, HT_SET_SIZE, &st, &st), EROFS);
    FAILS(ht_ns_setattr(w.ns, file, HT_SET_MODE, &st, &st), EROFS);
    OK(ht_ns_open(w.ns, file, &obj));
    ht_ns_touch(w.ns, file, false);
    OK(ht_ns_fsync(w.ns, file));
    ht_ns_close(w.ns, file);
    ht_ns_forget(w.ns, file, 1);
}

TEST(paths_are_told)
{
    char buf[64];
    uint64_t a = make_dir(&w, ROOT, "a");
    uint64_t b = make_dir(&w, a, "bb");
    uint64_t file = make_file(&w, b, "ccc");

    ht_ns_path(w.ns, file, buf, sizeof(buf));
    ck_assert_str_eq(buf, "a/bb/ccc");
    ht_ns_path(w.ns, file, buf, 8);
    ck_assert_str_eq(buf, "bb/ccc");
    ht_ns_path(w.ns, ROOT, buf, sizeof(buf));
    ck_assert_str_eq(buf, "");
    ht_ns_path(w.ns, 999, buf, sizeof(buf));
    ck_assert_str_eq(buf, "");
    ck_assert_uint_eq(ht_ns_parent(w.ns, b), a);
    ck_assert_uint_eq(ht_ns_parent(w.ns, file), 0);
}

TEST(memory_is_counted_and_given_back)
{
    struct ht_ns_stats before, with, after;
    char name[32];

    fixture_new_log(&w, 64 * MIB, 16 * MIB);
    make_dir(&w, ROOT, "dir");
    ht_ns_stats(w.ns, &before);
    for (int n = 0; n < 10000; n++) {
        snprintf(name, sizeof(name), "f%d", n);
        ht_ns_forget(w.ns, make_file(&w, ROOT, name), 1);
    }
    ht_ns_stats(w.ns, &with);
    ck_assert_uint_eq(with.inodes - before.inodes, 10000);
    ck_assert_uint_le((with.meta_bytes - before.meta_bytes) / 10000, 204);
    for (int n = 0; n < 10000; n++) {
        snprintf(name, sizeof(name), "f%d", n);
        OK(ht_ns_unlink(w.ns, ROOT, name));
    }
    ht_ns_stats(w.ns, &after);
    ck_assert_uint_eq(after.inodes, before.inodes);
    ck_assert_uint_eq(after.entries, before.entries);
    ck_assert_uint_le(after.meta_bytes - before.meta_bytes, 10000 * 40); /* tables do not shrink */
}

TEST(a_file_without_a_name_may_get_one)
{
    struct stat st;
    uint64_t dir, ino;

    dir = new_dir();
    OK(ht_ns_tmpfile(w.ns, dir, 0640, cred, &st));
    ino = st.st_ino;
    ck_assert_uint_eq(st.st_mode, S_IFREG | 0640);
    ck_assert_uint_eq(st.st_nlink, 0);
    fixture_check(&w);
    write_text(&w, ino, "text");
    OK(ht_ns_fsync(w.ns, ino));
    OK(ht_ns_link(w.ns, ino, dir, "named", &st));
    ck_assert_uint_eq(st.st_nlink, 1);
    fixture_synced_crash(&w);
    expect_text(&w, find(&w, find(&w, ROOT, "dir"), "named"), "text");
}

TEST(a_file_without_a_name_goes_with_its_last_user)
{
    struct stat st;
    struct ht_obj *obj;

    OK(ht_ns_tmpfile(w.ns, ROOT, 0600, cred, &st));
    uint64_t ino = st.st_ino;
    OK(ht_ns_open(w.ns, ino, &obj));
    ht_ns_forget(w.ns, ino, 1);
    OK(ht_ns_getattr(w.ns, ino, &st));
    ht_ns_close(w.ns, ino);
    FAILS(ht_ns_getattr(w.ns, ino, &st), ESTALE);
    ck_assert_uint_eq(w.deleted[0], ino);
    OK(ht_ns_tmpfile(w.ns, ROOT, 0600, cred, &st));
    fixture_synced_crash(&w);
    FAILS(ht_ns_getattr(w.ns, st.st_ino, &st), ESTALE);
}

TEST(a_file_that_lost_its_names_gets_no_other)
{
    struct stat st;

    OK(ht_ns_tmpfile(w.ns, ROOT, 0600, cred, &st));
    uint64_t ino = st.st_ino;
    OK(ht_ns_link(w.ns, ino, ROOT, "first", &st));
    OK(ht_ns_unlink(w.ns, ROOT, "first"));
    FAILS(ht_ns_link(w.ns, ino, ROOT, "second", &st), ENOENT);
}

TEST(a_file_without_a_name_below_a_root)
{
    struct stat st;
    uint64_t root = make_dir(&w, ROOT, "root");

    make_root(&w, root);
    OK(ht_ns_tmpfile(w.ns, root, 0600, cred, &st));
    uint64_t kept = st.st_ino;
    FAILS(ht_ns_link(w.ns, kept, ROOT, "outside", &st), EXDEV);
    write_text(&w, kept, "kept");
    OK(ht_ns_fsync(w.ns, kept));
    OK(ht_ns_tmpfile(w.ns, root, 0600, cred, &st));
    uint64_t dropped = st.st_ino;
    OK(ht_ns_link(w.ns, dropped, root, "dropped", &st));
    abort_root(&w, root);
    FAILS(ht_ns_getattr(w.ns, dropped, &st), ESTALE);
    ck_assert_uint_eq(peek(&w, root, "dropped"), 0);
    OK(ht_ns_link(w.ns, kept, root, "kept", &st));
    fixture_check(&w);
    commit(&w, root);
    fixture_crash(&w);
    ck_assert_uint_eq(find(&w, find(&w, ROOT, "root"), "kept"), kept);
    expect_text(&w, kept, "kept");
}

TEST(inodes_are_found_by_number)
{
    struct stat st;
    struct ht_obj *obj;
    uint64_t dir, file;

    dir = new_dir();
    file = make_file(&w, dir, "file");
    ht_ns_forget(w.ns, file, 1);
    ht_ns_forget(w.ns, dir, 1);
    OK(ht_ns_lookup_ino(w.ns, file, false, &st));
    ck_assert_uint_eq(st.st_ino, file);
    OK(ht_ns_lookup_ino(w.ns, dir, true, &st));
    ck_assert_uint_eq(st.st_ino, ROOT);
    FAILS(ht_ns_lookup_ino(w.ns, file, true, &st), ESTALE);
    FAILS(ht_ns_lookup_ino(w.ns, file + 100, false, &st), ESTALE);
    OK(ht_ns_open(w.ns, file, &obj));
    OK(ht_ns_unlink(w.ns, dir, "file"));
    OK(ht_ns_lookup_ino(w.ns, file, false, &st));
    ht_ns_forget(w.ns, file, 1);
    ht_ns_close(w.ns, file);
    FAILS(ht_ns_lookup_ino(w.ns, file, false, &st), ESTALE); /* waits for the last forget */
    ht_ns_forget(w.ns, file, 1);
}

TEST(a_full_store_takes_no_new_files)
{
    enum { PIECE = 1 << 16 };
    static const char bytes[PIECE];
    struct ht_obj *obj;
    struct stat st;
    uint64_t off = 0, file;
    ssize_t n;

    file = make_file(&w, ROOT, "large");
    OK(ht_ns_open(w.ns, file, &obj));
    while ((n = ht_obj_write(obj, off, bytes, PIECE)) == PIECE) {
        off += PIECE;
        if (off % MIB == 0)
            OK(ht_obj_writeback(obj));
    }
    FAILS(ht_ns_mknod(w.ns, ROOT, "new", S_IFREG | 0600, 0, cred, &st), ENOSPC);
    FAILS(ht_ns_tmpfile(w.ns, ROOT, 0600, cred, &st), ENOSPC);
    make_dir(&w, ROOT, "dir");
    OK(ht_ns_symlink(w.ns, ROOT, "link", "target", cred, &st));
    OK(ht_ns_link(w.ns, file, ROOT, "second", &st));
    OK(ht_obj_truncate(obj, MIB));
    make_file(&w, ROOT, "new");
    ht_ns_close(w.ns, file);
}

RUN_TESTS("names", .setup = fixture_start, .teardown = fixture_end, .timeout_s = 300)
