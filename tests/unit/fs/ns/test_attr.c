/* SPDX-License-Identifier: Apache-2.0 */
/* Attributes, times, access, access lists. */
#include "fs/ns/pending.h"
#include "tiering/base/fault.h"
#include "fixture.h"

static const struct ht_cred cred = {1000, 1001, 0};

static struct stat set(uint64_t ino, unsigned what, struct stat values)
{
    struct stat st;

    OK(ht_ns_setattr(w.ns, ino, what, &values, &st));
    fixture_check(&w);
    return st;
}

TEST(attributes_are_set_and_durable)
{
    struct stat v = {.st_mode = 0751, .st_uid = 5, .st_gid = 6, .st_atim = {10, 11}, .st_mtim = {-5, 22}}, st;

    uint64_t file = new_file();
    st = set(file, HT_SET_MODE | HT_SET_UID | HT_SET_GID | HT_SET_ATIME | HT_SET_MTIME, v);
    ck_assert_uint_eq(st.st_mode, S_IFREG | 0751);
    fixture_synced_crash(&w);
    st = attributes(&w, file);
    ck_assert_uint_eq(st.st_uid, 5);
    ck_assert_uint_eq(st.st_gid, 6);
    ck_assert_int_eq(st.st_atim.tv_sec, 10);
    ck_assert_int_eq(st.st_atim.tv_nsec, 11);
    ck_assert_int_eq(st.st_mtim.tv_sec, -5);
    ck_assert_int_eq(st.st_mtim.tv_nsec, 22);
    ck_assert_int_gt(st.st_ctim.tv_sec, 1000);
}

TEST(times_of_now_and_far_away)
{
    struct stat v = {.st_atim = {INT64_MAX, 0}, .st_mtim = {INT64_MIN, 0}}, st;

    uint64_t file = new_file();
    st = set(file, HT_SET_ATIME | HT_SET_MTIME, v);
    ck_assert_int_gt(st.st_atim.tv_sec, 9000000000);
    ck_assert_int_lt(st.st_mtim.tv_sec, -9000000000);
    st = set(file, HT_SET_ATIME_NOW | HT_SET_MTIME_NOW, v);
    ck_assert_int_eq(st.st_atim.tv_sec, st.st_ctim.tv_sec);
    ck_assert_int_eq(st.st_mtim.tv_nsec, st.st_ctim.tv_nsec);
}

TEST(size_is_the_contents)
{
    struct stat v = {.st_size = 100000}, st;
    uint64_t file, dir;

    file = new_file();
    dir = make_dir(&w, ROOT, "dir");
    st = set(file, HT_SET_MTIME, v);
    st = set(file, HT_SET_SIZE, v);
    ck_assert_int_eq(st.st_size, 100000);
    ck_assert_int_eq(st.st_blocks, 0);
    ck_assert_int_gt(st.st_mtim.tv_sec, 0);
    write_text(&w, file, "text");
    st = attributes(&w, file);
    ck_assert_int_eq(st.st_size, 4);
    ck_assert_int_eq(st.st_blocks, 8); /* though it is not on a device yet */
    FAILS(ht_ns_setattr(w.ns, dir, HT_SET_SIZE, &v, &st), EISDIR);
    v.st_size = -1;
    FAILS(ht_ns_setattr(w.ns, file, HT_SET_SIZE, &v, &st), EINVAL);
    v.st_size = (off_t)HT_FILE_BYTES_MAX + 1;
    FAILS(ht_ns_setattr(w.ns, file, HT_SET_SIZE, &v, &st), EFBIG);
    OK(ht_ns_fsync(w.ns, file));
    fixture_crash(&w);
    ck_assert_int_eq(attributes(&w, file).st_size, 4);
}

TEST(a_log_without_room_keeps_nobody_from_truncating)
{
    struct stat v = {.st_size = 10, .st_mtim = {10, 11}}, st;

    uint64_t file = new_file();
    set(file, HT_SET_MTIME, v);
    ht_fault_arm(HT_FAULT_JOURNAL_SPACE, 1, true);
    FAILS(ht_ns_setattr(w.ns, file, HT_SET_MODE, &v, &st), ENOSPC);
    st = set(file, HT_SET_SIZE, v);
    ht_fault_disarm_all();
    ck_assert_int_eq(st.st_size, 10);
    ck_assert_int_gt(st.st_mtim.tv_sec, 1000);
    OK(ht_ns_fsync(w.ns, file));
    fixture_crash(&w);
    st = attributes(&w, file);
    ck_assert_int_eq(st.st_size, 10);
    ck_assert_int_gt(st.st_mtim.tv_sec, 1000);
}

TEST(size_with_a_mode_that_is_refused_stays)
{
    struct stat v = {.st_size = 10, .st_mode = 0600}, st;

    uint64_t file = new_file();
    set(file, HT_SET_SIZE | HT_SET_MODE, (struct stat){.st_size = 5000, .st_mode = 0644});
    ht_fault_arm(HT_FAULT_JOURNAL_SPACE, 1, true);
    FAILS(ht_ns_setattr(w.ns, file, HT_SET_SIZE | HT_SET_MODE, &v, &st), ENOSPC);
    ht_fault_disarm_all();
    st = attributes(&w, file);
    ck_assert_int_eq(st.st_size, 5000);
    ck_assert_uint_eq(st.st_mode, S_IFREG | 0644);
    st = set(file, HT_SET_SIZE | HT_SET_MODE, v);
    ck_assert_int_eq(st.st_size, 10);
    ck_assert_uint_eq(st.st_mode, S_IFREG | 0600);
}

TEST(suid_is_cleared)
{
    struct stat v = {.st_mode = 06755};

    uint64_t file = new_file();
    set(file, HT_SET_MODE, v);
    ck_assert_uint_eq(set(file, HT_KILL_SUID, v).st_mode, S_IFREG | 0755);
    v.st_mode = 06745; /* setgid without execution for the group means locking */
    set(file, HT_SET_MODE, v);
    ck_assert_uint_eq(set(file, HT_KILL_SUID, v).st_mode, S_IFREG | 02745);
    ck_assert_uint_eq(set(file, HT_KILL_SUID | HT_KILL_SGID, v).st_mode, S_IFREG | 0745);
}

TEST(reading_and_writing_touch)
{
    struct stat zero = {0}, st;

    uint64_t file = new_file();
    set(file, HT_SET_ATIME | HT_SET_MTIME | HT_SET_CTIME, zero);
    ck_assert(ht_ns_atime_due(w.ns, file, false));
    ht_ns_touch(w.ns, file, false);
    st = attributes(&w, file);
    ck_assert_int_gt(st.st_atim.tv_sec, 0);
    ck_assert_int_eq(st.st_mtim.tv_sec, 0);
    zero.st_atim = st.st_atim; /* newer than the content, younger than a day: stays */
    zero.st_atim.tv_sec -= 60;
    set(file, HT_SET_ATIME | HT_SET_MTIME | HT_SET_CTIME, zero);
    ck_assert(!ht_ns_atime_due(w.ns, file, false));
    ck_assert(ht_ns_atime_due(w.ns, file, true));
    zero.st_atim.tv_sec -= 25 * 3600;
    set(file, HT_SET_ATIME | HT_SET_MTIME | HT_SET_CTIME, zero);
    ck_assert(ht_ns_atime_due(w.ns, file, false));
    ht_ns_touch(w.ns, file, false);
    ck_assert_int_gt(attributes(&w, file).st_atim.tv_sec, zero.st_atim.tv_sec);
    ht_ns_touch(w.ns, file, true);
    st = attributes(&w, file);
    ck_assert_int_gt(st.st_mtim.tv_sec, 0);
    ck_assert_int_gt(st.st_ctim.tv_sec, 0);
    fixture_check(&w);
}

TEST(touched_times_are_published_by_fsync_commit_and_unmount)
{
    struct stat zero = {0};
    uint64_t file[3];

    fixture_new(&w);
    file[0] = make_file(&w, ROOT, "a");
    file[1] = make_file(&w, ROOT, "b");
    file[2] = make_file(&w, ROOT, "c");
    for (int n = 0; n < 3; n++)
        set(file[n], HT_SET_MTIME, zero);
    ht_ns_touch(w.ns, file[0], true);
    fixture_synced_crash(&w);
    ck_assert_int_eq(attributes(&w, file[0]).st_mtim.tv_sec, 0);
    ht_ns_touch(w.ns, file[0], true);
    OK(ht_ns_fsync(w.ns, file[0]));
    ht_ns_touch(w.ns, file[1], true);
    OK(ht_store_checkpoint(w.s)); /* a checkpoint writes published changes only */
    fixture_crash(&w);
    ck_assert_int_gt(attributes(&w, file[0]).st_mtim.tv_sec, 0);
    ck_assert_int_eq(attributes(&w, file[1]).st_mtim.tv_sec, 0);
    ht_ns_touch(w.ns, file[1], true);
    OK(ht_store_commit(w.s));
    fixture_crash(&w);
    ck_assert_int_gt(attributes(&w, file[1]).st_mtim.tv_sec, 0);
    ht_ns_touch(w.ns, file[2], true);
    fixture_remount(&w);
    ck_assert_int_gt(attributes(&w, file[2]).st_mtim.tv_sec, 0);
}

TEST(times_touched_after_the_reservation_wait_for_the_next_commit)
{
    struct stat zero = {0};
    struct ht_tx *tx;

    fixture_new(&w);
    uint64_t first = make_file(&w, ROOT, "first");
    uint64_t second = make_file(&w, ROOT, "second");
    set(first, HT_SET_MTIME, zero);
    set(second, HT_SET_MTIME, zero);
    OK(ht_store_commit(w.s));
    ht_ns_touch(w.ns, first, true);
    size_t bytes = ht_ns_pending_bytes(w.ns, 0);
    ck_assert_uint_gt(bytes, 0);
    OK(ht_tx_begin(w.s, bytes, &tx));
    ht_ns_touch(w.ns, second, true);
    ht_ns_publish(w.ns, 0, bytes, tx);
    ck_assert_uint_eq(ht_tx_records(tx)->len, bytes);
    OK(ht_tx_commit(tx, NULL));
    ck_assert_uint_eq(ht_ns_pending_bytes(w.ns, 0), bytes);
    OK(ht_store_commit(w.s));
    ck_assert_uint_eq(ht_ns_pending_bytes(w.ns, 0), 0);
}

TEST(many_touched_files_fit_a_small_log)
{
    uint64_t first = 0, last = 0;
    char name[32];

    fixture_new_log(&w, 16 * MIB, 512 << 10);
    for (int n = 0; n < 900; n++) {
        snprintf(name, sizeof(name), "f%d", n);
        last = make_file(&w, ROOT, name);
        first = first != 0 ? first : last;
    }
    for (int round = 0; round < 50; round++) {
        for (uint64_t ino = first; ino <= last; ino++)
            ht_ns_touch(w.ns, ino, true);
        OK(ht_store_commit(w.s));
    }
    fixture_remount(&w);
}

TEST(fsync_makes_everything_before_it_durable)
{
    uint64_t dir, file;

    dir = new_dir();
    file = make_file(&w, dir, "file");
    write_text(&w, file, "text");
    OK(ht_ns_fsync(w.ns, file));
    fixture_crash(&w);
    ck_assert_uint_eq(find(&w, ROOT, "dir"), dir);
    ck_assert_uint_eq(find(&w, dir, "file"), file);
    expect_text(&w, file, "text");
    FAILS(ht_ns_fsync(w.ns, 4711), ESTALE);
    OK(ht_ns_fsync(w.ns, dir));
}

TEST(access_follows_the_mode)
{
    struct stat v = {.st_mode = 0640};
    const uint32_t groups[] = {7, 1001};

    uint64_t file = new_file();
    set(file, HT_SET_MODE, v);
    OK(ht_ns_access(w.ns, file, R_OK | W_OK, cred, NULL, 0));
    OK(ht_ns_access(w.ns, file, R_OK, (struct ht_cred){5, 1001, 0}, NULL, 0));
    OK(ht_ns_access(w.ns, file, R_OK, (struct ht_cred){5, 5, 0}, groups, 2));
    FAILS(ht_ns_access(w.ns, file, W_OK, (struct ht_cred){5, 5, 0}, groups, 2), EACCES);
    FAILS(ht_ns_access(w.ns, file, R_OK, (struct ht_cred){5, 5, 0}, groups, 1), EACCES);
    OK(ht_ns_access(w.ns, file, R_OK | W_OK, (struct ht_cred){0, 0, 0}, NULL, 0));
    FAILS(ht_ns_access(w.ns, file, X_OK, (struct ht_cred){0, 0, 0}, NULL, 0), EACCES);
    OK(ht_ns_access(w.ns, ROOT, X_OK, (struct ht_cred){0, 0, 0}, NULL, 0));
    FAILS(ht_ns_access(w.ns, 99, R_OK, cred, NULL, 0), ESTALE);
}

/* ---------------------------------------------------------- access lists */

struct acl {
    uint8_t bytes[64];
    size_t len;
};

static void acl_add(struct acl *a, unsigned tag, unsigned perm, uint32_t id)
{
    uint8_t *p = a->bytes + (a->len == 0 ? 4 : a->len);

    ht_le32_store(a->bytes, 2);
    p[0] = (uint8_t)tag;
    p[2] = (uint8_t)perm;
    p[1] = p[3] = 0;
    ht_le32_store(p + 4, id);
    a->len = (size_t)(p + 8 - a->bytes);
}

/* owner rwx, user 50 rw-, group r-x, mask r-x or the given one, other --- */
static struct acl sample(unsigned mask)
{
    struct acl a = {.len = 0};

    acl_add(&a, 1, 7, UINT32_MAX);
    acl_add(&a, 2, 6, 50);
    acl_add(&a, 4, 5, UINT32_MAX);
    acl_add(&a, 16, mask, UINT32_MAX);
    acl_add(&a, 32, 0, UINT32_MAX);
    return a;
}

static const char access_list[] = "system.posix_acl_access", default_list[] = "system.posix_acl_default";

TEST(mode_and_access_list_are_in_step)
{
    struct acl a = sample(5), got = {.len = 0}, plain = {.len = 0};
    struct stat v = {.st_mode = 0770};

    uint64_t file = new_file();
    OK(ht_ns_setxattr(w.ns, file, access_list, a.bytes, a.len, 0));
    ck_assert_uint_eq(attributes(&w, file).st_mode, S_IFREG | 0750);
    OK(ht_ns_access(w.ns, file, R_OK, (struct ht_cred){50, 50, 0}, NULL, 0));
    FAILS(ht_ns_access(w.ns, file, W_OK, (struct ht_cred){50, 50, 0}, NULL, 0), EACCES); /* the mask */
    OK(ht_ns_access(w.ns, file, X_OK, (struct ht_cred){51, 1001, 0}, NULL, 0));
    FAILS(ht_ns_access(w.ns, file, R_OK, (struct ht_cred){51, 51, 0}, NULL, 0), EACCES);
    set(file, HT_SET_MODE, v);
    OK(ht_ns_access(w.ns, file, W_OK, (struct ht_cred){50, 50, 0}, NULL, 0));
    fixture_synced_crash(&w);
    a = sample(7);
    ck_assert_int_eq(ht_ns_getxattr(w.ns, file, access_list, got.bytes, sizeof(got.bytes)), (ssize_t)a.len);
    ck_assert_int_eq(memcmp(got.bytes, a.bytes, a.len), 0);
    acl_add(&plain, 1, 6, UINT32_MAX);
    acl_add(&plain, 4, 4, UINT32_MAX);
    acl_add(&plain, 32, 4, UINT32_MAX);
    OK(ht_ns_setxattr(w.ns, file, access_list, plain.bytes, plain.len, 0));
    FAILS(ht_ns_getxattr(w.ns, file, access_list, NULL, 0), ENODATA);
    ck_assert_uint_eq(attributes(&w, file).st_mode, S_IFREG | 0644);
}

TEST(default_lists_are_inherited)
{
    struct acl a = sample(7), got;
    struct stat st;

    uint64_t dir = new_dir();
    OK(ht_ns_setxattr(w.ns, dir, default_list, a.bytes, a.len, 0));
    ck_assert_uint_eq(attributes(&w, dir).st_mode, S_IFDIR | 0755);
    OK(ht_ns_mknod(w.ns, dir, "file", S_IFREG | 0666, 0, (struct ht_cred){1, 1, 077}, &st));
    ck_assert_uint_eq(st.st_mode, S_IFREG | 0660);
    OK(ht_ns_access(w.ns, st.st_ino, R_OK | W_OK, (struct ht_cred){50, 50, 0}, NULL, 0));
    FAILS(ht_ns_getxattr(w.ns, st.st_ino, default_list, NULL, 0), ENODATA);
    OK(ht_ns_mkdir(w.ns, dir, "sub", 0777, cred, &st));
    fixture_synced_crash(&w);
    ck_assert_int_eq(ht_ns_getxattr(w.ns, st.st_ino, default_list, got.bytes, sizeof(got.bytes)), (ssize_t)a.len);
    ck_assert_int_eq(memcmp(got.bytes, a.bytes, a.len), 0);
    ck_assert_int_eq(ht_ns_getxattr(w.ns, st.st_ino, access_list, NULL, 0), (ssize_t)a.len);
}

TEST(bad_lists_are_refused)
{
    struct acl a = sample(7);

    uint64_t file = new_file();
    for (size_t len = 0; len < a.len; len++)
        FAILS(ht_ns_setxattr(w.ns, file, access_list, a.bytes, len, 0), EINVAL);
    for (size_t at = 0; at < a.len; at += at % 8 == 2 ? 2 : 1) {
        struct acl bad = a;
        bad.bytes[at] ^= 0x48;
        if (at < 4 || (at - 4) % 8 < 4)
            FAILS(ht_ns_setxattr(w.ns, file, access_list, bad.bytes, bad.len, 0), EINVAL);
    }
    FAILS(ht_ns_setxattr(w.ns, file, default_list, a.bytes, a.len, 0), EACCES);
}

RUN_TESTS("attr", .setup = fixture_start, .teardown = fixture_end, .timeout_s = 300)
