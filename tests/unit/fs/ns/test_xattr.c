/* SPDX-License-Identifier: Apache-2.0 */
/* Extended attributes and the words of tensors. */
#include "fixture.h"

#include <linux/limits.h>

TEST(attributes_are_set_read_listed_and_removed)
{
    char buf[128];

    uint64_t file = new_file();
    set_text(&w, file, "user.a", "one");
    set_text(&w, file, "trusted.b", "");
    set_text(&w, file, "user.a", "another");
    fixture_check(&w);
    fixture_synced_crash(&w);
    expect_xattr(&w, file, "user.a", "another");
    expect_xattr(&w, file, "trusted.b", "");
    ck_assert_int_eq(ht_ns_getxattr(w.ns, file, "user.a", NULL, 0), 7);
    FAILS(ht_ns_getxattr(w.ns, file, "user.a", buf, 6), ERANGE);
    FAILS(ht_ns_getxattr(w.ns, file, "user.none", buf, 6), ENODATA);
    ck_assert_int_eq(ht_ns_listxattr(w.ns, file, true, NULL, 0), 17);
    FAILS(ht_ns_listxattr(w.ns, file, true, buf, 16), ERANGE);
    ck_assert_int_eq(ht_ns_listxattr(w.ns, file, true, buf, sizeof(buf)), 17);
    OK(ht_ns_removexattr(w.ns, file, "user.a"));
    FAILS(ht_ns_removexattr(w.ns, file, "user.a"), ENODATA);
    fixture_synced_crash(&w);
    FAILS(ht_ns_getxattr(w.ns, file, "user.a", NULL, 0), ENODATA);
    ck_assert_int_eq(ht_ns_listxattr(w.ns, file, true, buf, sizeof(buf)), 10);
    ck_assert_str_eq(buf, "trusted.b");
}

TEST(flags_and_limits_hold)
{
    static char value[HT_XATTR_VALUE_BYTES_MAX + 1];
    char name[300] = "user.";
    uint64_t file;

    fixture_new_log(&w, 64 * MIB, 16 * MIB);
    file = make_file(&w, ROOT, "file");
    FAILS(ht_ns_setxattr(w.ns, file, "user.a", "", 0, XATTR_REPLACE), ENODATA);
    OK(ht_ns_setxattr(w.ns, file, "user.a", "", 0, XATTR_CREATE));
    FAILS(ht_ns_setxattr(w.ns, file, "user.a", "", 0, XATTR_CREATE), EEXIST);
    OK(ht_ns_setxattr(w.ns, file, "user.a", "", 0, XATTR_REPLACE));
    FAILS(ht_ns_setxattr(w.ns, file, "user.a", "", 0, 64), EINVAL);
    FAILS(ht_ns_setxattr(w.ns, file, "", "", 0, 0), ERANGE);
    memset(name + 5, 'x', sizeof(name) - 6);
    FAILS(ht_ns_setxattr(w.ns, file, name, "", 0, 0), ERANGE);
    name[255] = '\0';
    FAILS(ht_ns_setxattr(w.ns, file, name, value, sizeof(value), 0), E2BIG);
    OK(ht_ns_setxattr(w.ns, file, name, value, sizeof(value) - 1, 0));
    for (int n = 0; n < 14; n++) {
        snprintf(name, sizeof(name), "user.%d", n);
        OK(ht_ns_setxattr(w.ns, file, name, value, sizeof(value) - 1, 0));
    }
    FAILS(ht_ns_setxattr(w.ns, file, "user.last", value, sizeof(value) - 1, 0), ENOSPC);
    OK(ht_ns_setxattr(w.ns, file, name, value, sizeof(value) - 1, 0)); /* replaces the present value */
    OK(ht_store_checkpoint(w.s));
    fixture_synced_crash(&w);
    ck_assert_int_eq(ht_ns_getxattr(w.ns, file, name, NULL, 0), HT_XATTR_VALUE_BYTES_MAX);
}

TEST(words_are_fields_and_checked)
{
    struct ht_ns_tensor t;

    uint64_t file = new_file();
    FAILS(ht_ns_getxattr(w.ns, file, "user.hitrain.dtype", NULL, 0), ENODATA);
    FAILS(ht_ns_setxattr(w.ns, file, "user.hitrain.dtype", "f3", 2, 0), EINVAL);
    FAILS(ht_ns_setxattr(w.ns, file, "user.hitrain.dtype", "", 0, 0), EINVAL);
    FAILS(ht_ns_setxattr(w.ns, file, "user.hitrain.class", "any", 3, 0), EINVAL);
    set_text(&w, file, "user.hitrain.dtype", "bf16");
    FAILS(ht_ns_setxattr(w.ns, file, "user.hitrain.dtype", "f32", 3, XATTR_CREATE), EEXIST);
    set_text(&w, file, "user.hitrain.grad_dtype", "f32");
    expect_xattr(&w, file, "user.hitrain.class", "durable");
    fixture_synced_crash(&w);
    OK(ht_ns_tensor(w.ns, file, &t));
    ck_assert_uint_eq(t.dtype, HT_DTYPE_BF16);
    ck_assert_uint_eq(t.grad_dtype, HT_DTYPE_F32);
    ck_assert_uint_eq(t.root, 0);
    expect_xattr(&w, file, "user.hitrain.dtype", "bf16");
    OK(ht_ns_removexattr(w.ns, file, "user.hitrain.dtype"));
    FAILS(ht_ns_removexattr(w.ns, file, "user.hitrain.dtype"), ENODATA);
    FAILS(ht_ns_removexattr(w.ns, file, "user.hitrain.class"), ENODATA);
}

TEST(words_are_inherited_at_creation)
{
    struct ht_ns_tensor t;
    uint64_t dir, before, file;

    dir = new_dir();
    before = make_file(&w, dir, "before");
    set_text(&w, dir, "user.hitrain.dtype", "f32");
    set_text(&w, dir, "user.hitrain.grad_dtype", "bf16");
    set_text(&w, dir, "user.hitrain.class", "scratch");
    set_text(&w, dir, "user.hitrain.tier", "capacity");
    set_text(&w, dir, "user.hitrain.shape", "2,2");
    file = make_file(&w, make_dir(&w, dir, "sub"), "file");
    fixture_synced_crash(&w);
    OK(ht_ns_tensor(w.ns, file, &t));
    ck_assert_uint_eq(t.dtype, HT_DTYPE_F32);
    ck_assert_uint_eq(t.grad_dtype, HT_DTYPE_BF16);
    ck_assert_uint_eq(t.obj_class, HT_CLASS_SCRATCH);
    expect_xattr(&w, file, "user.hitrain.tier", "capacity");
    FAILS(ht_ns_getxattr(w.ns, file, "user.hitrain.shape", NULL, 0), ENODATA);
    OK(ht_ns_tensor(w.ns, before, &t));
    ck_assert_uint_eq(t.dtype, HT_DTYPE_NONE);
}

TEST(what_makes_roots_is_not_listed)
{
    char buf[256];

    uint64_t file = new_file();
    set_text(&w, file, "user.hitrain.optimizer", "adamw");
    set_text(&w, file, "user.hitrain.pin", "dram");
    set_text(&w, file, "user.hitrain.shape", "4");
    ck_assert_int_eq(ht_ns_listxattr(w.ns, file, true, buf, sizeof(buf)), 19);
    ck_assert_str_eq(buf, "user.hitrain.shape");
    expect_xattr(&w, file, "user.hitrain.optimizer", "adamw");
}

TEST(a_dtype_makes_chunks_large)
{
    struct ht_obj *obj;

    uint64_t file = new_file();
    OK(ht_ns_open(w.ns, file, &obj));
    ck_assert_uint_eq(ht_obj_chunk_bytes(obj), HT_SMALL_CHUNK_BYTES);
    set_text(&w, file, "user.hitrain.dtype", "f32");
    ck_assert_uint_eq(ht_obj_chunk_bytes(obj), HT_CHUNK_BYTES);
    ht_ns_close(w.ns, file);
    write_text(&w, file, "1234");
    OK(ht_ns_removexattr(w.ns, file, "user.hitrain.dtype")); /* it has content: keeps them */
    OK(ht_ns_open(w.ns, file, &obj));
    ck_assert_uint_eq(ht_obj_chunk_bytes(obj), HT_CHUNK_BYTES);
    ht_ns_close(w.ns, file);
}

TEST(the_class_of_an_empty_file_changes)
{
    struct ht_obj *obj;
    struct ht_obj_stat st;

    uint64_t file = new_file();
    OK(ht_ns_open(w.ns, file, &obj));
    FAILS(ht_ns_setxattr(w.ns, file, "user.hitrain.class", "scratch", 7, 0), EOPNOTSUPP);
    ht_ns_close(w.ns, file);
    set_text(&w, file, "user.hitrain.class", "scratch");
    OK(ht_ns_open(w.ns, file, &obj));
    ht_obj_stat(obj, &st);
    ck_assert_uint_eq(st.obj_class, HT_CLASS_SCRATCH);
    ht_ns_close(w.ns, file);
    write_text(&w, file, "text");
    FAILS(ht_ns_setxattr(w.ns, file, "user.hitrain.class", "durable", 7, 0), EOPNOTSUPP);
    OK(ht_ns_fsync(w.ns, file));
    fixture_remount(&w); /* a scratch file keeps its name and loses its content */
    ck_assert_int_eq(attributes(&w, file).st_size, 0);
    expect_text(&w, file, "");
    set_text(&w, file, "user.hitrain.class", "durable");
    write_text(&w, file, "kept");
    OK(ht_ns_fsync(w.ns, file));
    fixture_crash(&w);
    expect_text(&w, file, "kept");
    set_text(&w, file, "user.hitrain.class", "scratch"); /* as a program that copies does */
    expect_xattr(&w, file, "user.hitrain.class", "scratch");
    OK(ht_store_commit(w.s));
    fixture_crash(&w);
    expect_text(&w, file, "kept");
    expect_xattr(&w, file, "user.hitrain.class", "scratch");
    set_text(&w, file, "user.hitrain.class", "durable");
    write_text(&w, file, "more");
    OK(ht_ns_fsync(w.ns, file));
    fixture_crash(&w);
    expect_text(&w, file, "more");
}

TEST(lists_of_names_are_bounded_and_keep_secrets)
{
    char name[XATTR_NAME_MAX + 1];
    int rc = 0, count = 0;

    uint64_t file = new_file();
    set_text(&w, file, "trusted.t", "x");
    ck_assert_int_eq(ht_ns_listxattr(w.ns, file, true, NULL, 0), 10);
    ck_assert_int_eq(ht_ns_listxattr(w.ns, file, false, NULL, 0), 0);
    while (rc == 0) {
        snprintf(name, sizeof(name), "user.%0250d", count++);
        rc = ht_ns_setxattr(w.ns, file, name, "", 0, 0);
    }
    ck_assert_int_eq(rc, -ENOSPC);
    ck_assert_int_le(ht_ns_listxattr(w.ns, file, true, NULL, 0), XATTR_LIST_MAX);
    ck_assert_int_gt(ht_ns_listxattr(w.ns, file, true, NULL, 0), XATTR_LIST_MAX - 512);
}

TEST(an_access_list_of_a_stranger_ends_setgid)
{
    /* user::rwx user:7:r-- group::r-x mask::r-x other::--- */
    static const uint32_t acl[] = {2, 7 << 16 | 1, ~0u, 4 << 16 | 2, 7, 5 << 16 | 4, ~0u, 5 << 16 | 16, ~0u, 32, ~0u};
    struct stat v = {.st_mode = 02755}, st;

    uint64_t file = new_file();
    OK(ht_ns_setattr(w.ns, file, HT_SET_MODE, &v, &st));
    OK(ht_ns_setxattr(w.ns, file, HT_NS_ACL_ACCESS, acl, sizeof(acl), 0));
    ck_assert_uint_eq(attributes(&w, file).st_mode, S_IFREG | 02750);
    OK(ht_ns_setxattr(w.ns, file, HT_NS_ACL_ACCESS, acl, sizeof(acl), HT_XATTR_KILL_SGID));
    ck_assert_uint_eq(attributes(&w, file).st_mode, S_IFREG | 0750);
}

RUN_TESTS("xattr", .setup = fixture_start, .teardown = fixture_end, .timeout_s = 300)
