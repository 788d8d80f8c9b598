/* SPDX-License-Identifier: Apache-2.0 */
/* Model roots: pending changes, commit, abort, and fsync of a single file. */
#include "fixture.h"
#include "tiering/api/stats.h"

static const struct ht_cred cred = {1000, 1001, 0};

/* A root with a committed tree: d/ with f ("old"), g, and h in the root itself. */
static uint64_t root, d, f, g, h;

static void new_tree(void)
{
    fixture_new(&w);
    root = make_dir(&w, ROOT, "root");
    d = make_dir(&w, root, "d");
    f = make_file(&w, d, "f");
    g = make_file(&w, d, "g");
    h = make_file(&w, root, "h");
    write_text(&w, f, "old");
    set_text(&w, f, "user.a", "old");
    make_root(&w, root);
    fixture_check(&w);
}

static void expect_old_tree(void)
{
    ck_assert_uint_eq(peek(&w, root, "d"), d);
    ck_assert_uint_eq(peek(&w, d, "f"), f);
    ck_assert_uint_eq(peek(&w, d, "g"), g);
    ck_assert_uint_eq(peek(&w, root, "h"), h);
    expect_text(&w, f, "old");
    expect_xattr(&w, f, "user.a", "old");
    ck_assert_uint_eq(attributes(&w, f).st_mode, S_IFREG | 0644);
    ck_assert_uint_eq(attributes(&w, root).st_nlink, 3);
    ck_assert_uint_eq(attributes(&w, d).st_nlink, 2);
    fixture_check(&w);
}

/* Something of every kind. */
static void change_everything(void)
{
    struct stat st, mode = {.st_mode = 0600};

    write_text(&w, f, "new");
    set_text(&w, f, "user.a", "new");
    set_text(&w, f, "user.b", "b");
    OK(ht_ns_setattr(w.ns, f, HT_SET_MODE, &mode, &st));
    uint64_t n = make_dir(&w, root, "n");
    uint64_t file = make_file(&w, n, "file");
    write_text(&w, file, "made");
    OK(ht_ns_symlink(w.ns, n, "link", "target", cred, &st));
    OK(ht_ns_rename(w.ns, root, "d", n, "moved", 0, NULL));
    OK(ht_ns_unlink(w.ns, d, "g"));
    OK(ht_ns_rename(w.ns, d, "f", root, "h", 0, NULL));
    OK(ht_ns_link(w.ns, f, d, "f2", &st));
    fixture_check(&w);
}

static void expect_new_tree(void)
{
    uint64_t n = peek(&w, root, "n");
    char buf[16];

    ck_assert_uint_ne(n, 0);
    ck_assert_uint_eq(peek(&w, n, "moved"), d);
    ck_assert_uint_eq(peek(&w, root, "d"), 0);
    ck_assert_uint_eq(peek(&w, root, "h"), f);
    ck_assert_uint_eq(peek(&w, d, "f2"), f);
    ck_assert_uint_eq(peek(&w, d, "g"), 0);
    ck_assert_uint_eq(attributes(&w, f).st_mode, S_IFREG | 0600);
    ck_assert_uint_eq(attributes(&w, f).st_nlink, 2);
    ck_assert_uint_eq(attributes(&w, n).st_nlink, 3);
    expect_text(&w, f, "new");
    expect_text(&w, peek(&w, n, "file"), "made");
    expect_xattr(&w, f, "user.a", "new");
    expect_xattr(&w, f, "user.b", "b");
    ck_assert_int_eq(ht_ns_readlink(w.ns, peek(&w, n, "link"), buf, sizeof(buf)), 6);
    fixture_check(&w);
}

/* ---------------------------------------------------------------- making */

static int one_root(void *ctx, uint64_t ino)
{
    uint64_t *count = ctx;

    ck_assert_uint_eq(ino, root);
    (*count)++;
    return 0;
}

TEST(a_directory_becomes_a_root_and_stays_one)
{
    struct ht_ns_tensor t;
    struct ht_obj_stat st;
    struct ht_obj *obj;
    uint64_t count = 0;

    for (int mounts = 0; mounts < 2; mounts++) {
        OK(ht_ns_roots(w.ns, one_root, &count));
        OK(ht_ns_tensor(w.ns, f, &t));
        ck_assert_uint_eq(t.root, root);
        ck_assert(!t.is_root);
        OK(ht_ns_tensor(w.ns, root, &t));
        ck_assert(t.is_root);
        obj = ht_obj_get(w.s, f);
        ht_obj_stat(obj, &st);
        ck_assert_uint_eq(st.scope, root);
        ht_obj_put(obj);
        expect_xattr(&w, root, "user.hitrain.optimizer", "adamw");
        expect_old_tree();
        fixture_synced_crash(&w);
    }
    ck_assert_uint_eq(count, 2);
}

TEST(roots_do_not_nest_and_links_do_not_leave)
{
    struct stat st;

    FAILS(ht_ns_root_make(w.ns, d, "adamw", NULL, NULL, NULL), EINVAL);
    FAILS(ht_ns_root_make(w.ns, root, "adamw", NULL, NULL, NULL), EINVAL);
    FAILS(ht_ns_root_make(w.ns, ROOT, "adamw", NULL, NULL, NULL), EINVAL);
    FAILS(ht_ns_root_make(w.ns, f, "adamw", NULL, NULL, NULL), ENOTDIR);
    uint64_t out = make_dir(&w, ROOT, "out");
    uint64_t in = make_file(&w, out, "in");
    OK(ht_ns_link(w.ns, in, out, "second", &st));
    OK(ht_ns_link(w.ns, in, ROOT, "outside", &st));
    FAILS(ht_ns_root_make(w.ns, out, "adamw", NULL, NULL, NULL), EBUSY);
    OK(ht_ns_unlink(w.ns, ROOT, "outside"));
    OK(ht_ns_root_make(w.ns, out, "adamw", NULL, NULL, NULL));
    FAILS(ht_ns_root_unmake(w.ns, d), EINVAL);
}

TEST(a_root_takes_in_only_what_is_its_makers)
{
    struct ht_ns_claimant by = {.uid = 1000};
    struct stat st, chown = {.st_uid = 7, .st_gid = 7};

    fixture_new(&w);
    uint64_t mine = make_dir(&w, ROOT, "mine");
    uint64_t theirs = make_dir(&w, mine, "theirs");
    uint64_t deep = make_file(&w, theirs, "deep");
    OK(ht_ns_setattr(w.ns, theirs, HT_SET_UID, &chown, &st));
    OK(ht_ns_setattr(w.ns, deep, HT_SET_UID, &chown, &st));
    by.uid = attributes(&w, mine).st_uid;
    FAILS(ht_ns_root_make(w.ns, mine, "adamw", &by, NULL, NULL), EPERM);
    ck_assert_uint_eq(by.foreign, theirs);
    by.uid = 7;
    FAILS(ht_ns_root_make(w.ns, mine, "adamw", &by, NULL, NULL), EPERM);
    ck_assert_uint_eq(by.foreign, mine);
    fixture_check(&w);
    by.uid = 0;
    OK(ht_ns_root_make(w.ns, mine, "adamw", &by, NULL, NULL));
}

struct also {
    int rc;
    uint64_t calls;
};

static int also_in_tx(void *ctx, struct ht_tx *tx)
{
    struct also *a = ctx;
    struct ht_ns_tensor t;

    ck_assert_ptr_nonnull(tx);
    a->calls++;
    OK(ht_ns_tensor(w.ns, f, &t)); /* no lock is held */
    ht_ns_touch(w.ns, f, true);
    return a->rc;
}

TEST(a_root_that_is_refused_leaves_nothing)
{
    struct also a = {.rc = -ENOSPC};
    struct ht_ns_tensor t;

    OK(ht_ns_root_unmake(w.ns, root));
    FAILS(ht_ns_root_make(w.ns, root, "adamw", NULL, also_in_tx, &a), ENOSPC);
    fixture_check(&w);
    OK(ht_ns_tensor(w.ns, f, &t));
    ck_assert_uint_eq(t.root, 0);
    FAILS(ht_ns_getxattr(w.ns, root, "user.hitrain.optimizer", NULL, 0), ENODATA);
    fixture_synced_crash(&w);
    expect_old_tree();
    OK(ht_ns_tensor(w.ns, root, &t));
    ck_assert(!t.is_root);
    a.rc = 0;
    OK(ht_ns_root_make(w.ns, root, "adamw", NULL, also_in_tx, &a));
    ck_assert_uint_eq(a.calls, 2);
    change_everything();
    abort_root(&w, root);
    expect_old_tree();
}

static void write_at_the_end(void *ctx, uint64_t scope, enum ht_scope_end how, struct ht_tx *tx)
{
    uint64_t *calls = ctx;

    ck_assert_ptr_nonnull(tx);
    ck_assert_uint_eq(scope, root);
    ck_assert_int_eq(how, HT_SCOPE_DISSOLVED);
    (*calls)++;
    write_text(&w, f, "while it ended"); /* no lock is held */
}

/* It is too late to refuse: the file is an ordinary one with content that is not synced. */
TEST(a_file_that_is_written_does_not_keep_a_root_from_ending)
{
    struct ht_obj_stat st;
    uint64_t calls = 0;
    const struct ht_participant writer = {HT_REC_OPT_FIRST, HT_REC_OPT_LAST, .ctx = &calls, .ended = write_at_the_end};

    fixture_participant = &writer;
    new_tree();
    write_text(&w, f, "before");
    OK(ht_ns_root_unmake(w.ns, root));
    ck_assert_uint_eq(calls, 1);
    fixture_check(&w);
    struct ht_obj *obj = ht_obj_get(w.s, f);
    ht_obj_stat(obj, &st);
    ck_assert_uint_eq(st.scope, 0);
    ht_obj_put(obj);
    expect_text(&w, f, "while it ended");
    OK(ht_store_commit(w.s));
    fixture_synced_crash(&w);
    expect_text(&w, f, "while it ended");
    fixture_free(&w);
    fixture_participant = NULL;
}

/* Another thread may write between writeback and transaction: that content is dirty, and moves. */
TEST(content_that_is_dirty_may_leave_a_scope)
{
    struct ht_obj_stat st;
    struct ht_tx *tx;
    struct ht_obj *obj = ht_obj_get(w.s, f);

    write_text(&w, f, "dirty");
    OK(ht_tx_begin(w.s, 4096, &tx));
    FAILS(ht_obj_set_scope(obj, ROOT, tx), EBUSY);
    OK(ht_obj_set_scope(obj, 0, tx));
    OK(ht_tx_commit(tx, NULL));
    ht_obj_stat(obj, &st);
    ck_assert(st.scope == 0 && st.unpublished);
    OK(ht_store_commit(w.s));
    ht_obj_stat(obj, &st);
    ck_assert(!st.unpublished);
    ht_obj_put(obj);
    expect_text(&w, f, "dirty");
}

TEST(a_root_becomes_a_directory_again)
{
    struct ht_ns_tensor t;
    struct ht_obj_stat st;

    change_everything();
    OK(ht_ns_root_unmake(w.ns, root));
    fixture_check(&w);
    fixture_synced_crash(&w);
    OK(ht_ns_tensor(w.ns, root, &t));
    ck_assert(!t.is_root);
    FAILS(ht_ns_getxattr(w.ns, root, "user.hitrain.optimizer", NULL, 0), ENODATA);
    expect_new_tree();
    struct ht_obj *obj = ht_obj_get(w.s, f);
    ht_obj_stat(obj, &st);
    ck_assert_uint_eq(st.scope, 0);
    ht_obj_put(obj);
}

TEST(an_empty_root_is_removed_with_all_that_is_pending)
{
    struct ht_ns_stats ns;
    struct ht_store_stats st;
    struct ht_obj *obj;

    FAILS(ht_ns_rmdir(w.ns, ROOT, "root"), ENOTEMPTY);
    OK(ht_ns_open(w.ns, h, &obj));
    OK(ht_ns_unlink(w.ns, root, "h"));
    OK(ht_ns_unlink(w.ns, d, "f"));
    OK(ht_ns_unlink(w.ns, d, "g"));
    OK(ht_ns_rmdir(w.ns, root, "d"));
    OK(ht_ns_rmdir(w.ns, ROOT, "root"));
    fixture_check(&w);
    ht_ns_forget(w.ns, root, 1);
    ht_ns_forget(w.ns, d, 100);
    ht_ns_forget(w.ns, f, 100);
    ht_ns_forget(w.ns, g, 100);
    ht_ns_forget(w.ns, h, 100);
    fixture_check(&w);
    ht_ns_close(w.ns, h); /* its root is no more */
    ht_ns_stats(w.ns, &ns);
    ck_assert_uint_eq(ns.inodes, 1);
    ck_assert_uint_eq(ns.entries, 0);
    fixture_synced_crash(&w);
    ht_store_stats(w.s, &st);
    ck_assert_uint_eq(st.objects, 0);
}

TEST(a_removed_root_leaves_nothing_after_a_crash)
{
    struct ht_ns_stats ns;
    struct ht_store_stats st;

    OK(ht_ns_unlink(w.ns, root, "h"));
    OK(ht_ns_unlink(w.ns, d, "f"));
    OK(ht_ns_unlink(w.ns, d, "g"));
    OK(ht_ns_rmdir(w.ns, root, "d"));
    OK(ht_ns_rmdir(w.ns, ROOT, "root")); /* the kernel still knows them all */
    fixture_synced_crash(&w);
    ht_ns_stats(w.ns, &ns);
    ck_assert_uint_eq(ns.inodes, 1);
    ht_store_stats(w.s, &st);
    ck_assert_uint_eq(st.objects, 0);
}

/* ------------------------------------------------------- commit and abort */

TEST(nothing_pending_survives_a_crash)
{
    change_everything();
    expect_new_tree();
    fixture_synced_crash(&w);
    expect_old_tree();
}

TEST(checkpoint_writes_what_is_published_only)
{
    change_everything();
    OK(ht_store_checkpoint(w.s));
    OK(ht_store_checkpoint(w.s));
    expect_new_tree();
    fixture_crash(&w);
    expect_old_tree();
    change_everything();
    OK(ht_store_checkpoint(w.s));
    commit(&w, root);
    fixture_crash(&w);
    expect_new_tree();
}

TEST(a_commit_publishes_everything)
{
    struct ht_ns_stats before, after;

    change_everything();
    ck_assert_uint_gt(ht_scope_pending_bytes(w.s, root), 0);
    commit(&w, root);
    ck_assert_uint_eq(ht_scope_pending_bytes(w.s, root), 0);
    fixture_crash(&w);
    expect_new_tree();
    ht_ns_stats(w.ns, &before);
    ck_assert_uint_eq(before.inodes, 6 - 2 + 3); /* root directories, d, f, g, h; g and h went; n, file, link came */
    commit(&w, root);
    fixture_crash(&w);
    ht_ns_stats(w.ns, &after);
    ck_assert_uint_eq(after.inodes, before.inodes);
}

struct reported {
    unsigned inodes, names;
    bool moved_back;
};

static void report(void *ctx, uint64_t ino, uint64_t parent, const char *name)
{
    struct reported *t = ctx;
    struct stat st;

    (void)!ht_ns_getattr(w.ns, ino, &st); /* no lock is held */
    if (!name)
        t->inodes++;
    else
        t->names++;
    t->moved_back |= name && parent == root && strcmp(name, "d") == 0;
}

TEST(an_abort_takes_everything_back)
{
    struct reported t = {0};
    struct stat st;
    uint64_t n;

    for (int round = 0; round < 3; round++) {
        change_everything();
        n = find(&w, root, "n");
        w.stale = report;
        w.stale_ctx = &t;
        abort_root(&w, root);
        ck_assert_uint_ge(t.names, 8);
        ck_assert_uint_ge(t.inodes, 6);
        ck_assert(t.moved_back);
        FAILS(ht_ns_getattr(w.ns, n, &st), ESTALE);
        FAILS(ht_ns_lookup(w.ns, n, "file", &st), ESTALE);
        ht_ns_forget(w.ns, n, 2);
        expect_old_tree();
    }
    commit(&w, root);
    fixture_crash(&w);
    expect_old_tree();
    change_everything();
    commit(&w, root);
    fixture_crash(&w);
    expect_new_tree();
}

TEST(an_abort_brings_back_what_the_kernel_forgot)
{
    OK(ht_ns_unlink(w.ns, d, "f"));
    OK(ht_ns_unlink(w.ns, d, "g"));
    OK(ht_ns_rmdir(w.ns, root, "d"));
    ht_ns_forget(w.ns, f, 100);
    ht_ns_forget(w.ns, g, 100);
    ht_ns_forget(w.ns, d, 100);
    ck_assert_uint_eq(w.deleted_count, 3);
    fixture_check(&w);
    abort_root(&w, root);
    expect_old_tree();
    OK(ht_ns_unlink(w.ns, d, "g"));
    ht_ns_forget(w.ns, g, 100);
    commit(&w, root);
    ck_assert_ptr_null(ht_obj_get(w.s, g));
    fixture_crash(&w);
    ck_assert_uint_eq(peek(&w, d, "g"), 0);
    ck_assert_ptr_null(ht_obj_get(w.s, g));
}

TEST(an_open_file_that_an_abort_takes_away_is_stale)
{
    struct ht_obj *obj;
    struct stat st;
    uint64_t file;
    struct ht_ns_stats before, after;

    ht_ns_stats(w.ns, &before);
    file = make_file(&w, root, "file");
    OK(ht_ns_open(w.ns, file, &obj));
    abort_root(&w, root);
    FAILS(ht_ns_getattr(w.ns, file, &st), ESTALE);
    FAILS(ht_ns_fsync(w.ns, file), ESTALE);
    ht_ns_touch(w.ns, file, true);
    FAILS(ht_ns_open(w.ns, file, &obj), ESTALE);
    ht_ns_forget(w.ns, file, 1);
    ht_ns_close(w.ns, file);
    ht_ns_stats(w.ns, &after);
    ck_assert_uint_eq(after.inodes, before.inodes);
}

TEST(orphans_of_a_root_are_deleted_by_commit_or_mount)
{
    struct ht_obj *obj;

    OK(ht_ns_open(w.ns, f, &obj));
    OK(ht_ns_unlink(w.ns, d, "f"));
    commit(&w, root);
    ht_ns_forget(w.ns, f, 100);
    ht_ns_close(w.ns, f);
    commit(&w, root);
    ck_assert_ptr_null(ht_obj_get(w.s, f));
    OK(ht_ns_open(w.ns, g, &obj));
    OK(ht_ns_unlink(w.ns, d, "g"));
    commit(&w, root);
    fixture_crash(&w);
    ck_assert_ptr_null(ht_obj_get(w.s, g));
    fixture_remount(&w);
    ck_assert_ptr_null(ht_obj_get(w.s, g));
}

/* ------------------------------------------------------- single files */

TEST(fsync_publishes_one_file_with_its_path)
{
    uint64_t a = make_dir(&w, root, "a");
    uint64_t b = make_dir(&w, a, "b");

    set_text(&w, a, "user.x", "of a");
    uint64_t file = make_file(&w, b, "file");
    uint64_t other = make_file(&w, b, "other");
    write_text(&w, file, "text");
    write_text(&w, other, "text");
    write_text(&w, f, "new");
    OK(ht_ns_fsync(w.ns, file));
    fixture_check(&w);
    fixture_crash(&w);
    ck_assert_uint_eq(find(&w, root, "a"), a);
    ck_assert_uint_eq(find(&w, a, "b"), b);
    ck_assert_uint_eq(find(&w, b, "file"), file);
    ck_assert_uint_eq(find(&w, b, "other"), 0);
    expect_text(&w, file, "text");
    expect_xattr(&w, a, "user.x", "of a");
    ck_assert_uint_eq(find(&w, d, "f"), f);
    expect_text(&w, f, "old");
}

TEST(an_abort_keeps_what_was_fsynced)
{
    uint64_t file;

    file = make_file(&w, d, "file");
    write_text(&w, file, "text");
    OK(ht_ns_fsync(w.ns, file));
    write_text(&w, file, "more text");
    make_file(&w, d, "unsynced");
    abort_root(&w, root);
    ck_assert_uint_eq(peek(&w, d, "file"), file);
    expect_text(&w, file, "text");
    ck_assert_uint_eq(peek(&w, d, "unsynced"), 0);
    expect_old_tree();
}

TEST(fsync_of_a_replacing_file_loses_nobody)
{
    OK(ht_ns_rename(w.ns, d, "f", d, "f.old", 0, NULL));
    uint64_t new = make_file(&w, d, "f");
    write_text(&w, new, "new");
    OK(ht_ns_fsync(w.ns, new));
    fixture_check(&w);
    fixture_crash(&w);
    ck_assert_uint_eq(find(&w, d, "f"), new);
    expect_text(&w, new, "new");
    ck_assert_uint_eq(find(&w, d, "f.old"), f); /* only renamed: must not be lost */
    expect_text(&w, f, "old");
}

TEST(fsync_after_a_replacing_rename_ends_the_replaced)
{
    uint64_t tmp;

    for (int aborted = 0; aborted < 2; aborted++) {
        tmp = make_file(&w, d, "tmp");
        write_text(&w, tmp, aborted ? "two" : "one");
        OK(ht_ns_rename(w.ns, d, "tmp", d, "f", 0, NULL));
        ht_ns_forget(w.ns, f, 100); /* a ghost of which the last published name goes now */
        OK(ht_ns_fsync(w.ns, tmp));
        fixture_check(&w);
        if (aborted) {
            abort_root(&w, root);
            ck_assert_uint_eq(peek(&w, d, "f"), tmp);
            commit(&w, root);
            ck_assert_ptr_null(ht_obj_get(w.s, f));
        } else {
            fixture_crash(&w);
        }
        ck_assert_uint_eq(find(&w, d, "f"), tmp);
        expect_text(&w, tmp, aborted ? "two" : "one");
        ck_assert_ptr_null(ht_obj_get(w.s, f));
        f = tmp;
    }
}

TEST(fsync_below_a_moved_directory_moves_it)
{
    uint64_t n;

    n = make_dir(&w, root, "n");
    OK(ht_ns_rename(w.ns, root, "d", n, "d", 0, NULL));
    write_text(&w, f, "new");
    OK(ht_ns_fsync(w.ns, f));
    fixture_check(&w);
    fixture_crash(&w);
    ck_assert_uint_eq(find(&w, root, "d"), 0);
    ck_assert_uint_eq(find(&w, root, "n"), n);
    ck_assert_uint_eq(find(&w, n, "d"), d);
    ck_assert_uint_eq(find(&w, d, "g"), g);
    expect_text(&w, f, "new");
}

TEST(fsync_of_a_directory_publishes_its_entries)
{
    struct stat st;
    uint64_t file = make_file(&w, d, "file");

    write_text(&w, file, "text");
    uint64_t sub = make_dir(&w, d, "sub");
    OK(ht_ns_rename(w.ns, d, "f", root, "f", 0, NULL));
    OK(ht_ns_unlink(w.ns, d, "g"));
    OK(ht_ns_link(w.ns, file, sub, "inside", &st)); /* a name of a published inode: comes along */
    make_file(&w, sub, "deep");
    make_file(&w, root, "elsewhere");
    OK(ht_ns_fsync(w.ns, d));
    fixture_check(&w);
    fixture_crash(&w);
    ck_assert_uint_eq(find(&w, d, "file"), file);
    ck_assert_uint_eq(find(&w, d, "sub"), sub);
    ck_assert_uint_eq(find(&w, d, "f"), 0);
    ck_assert_uint_eq(find(&w, root, "f"), f);
    ck_assert_uint_eq(find(&w, d, "g"), 0);
    ck_assert_uint_eq(find(&w, sub, "deep"), 0);
    ck_assert_uint_eq(find(&w, root, "elsewhere"), 0);
}

TEST(an_exchange_below_a_root_is_pending)
{
    OK(ht_ns_rename(w.ns, d, "f", root, "h", RENAME_EXCHANGE, NULL));
    OK(ht_ns_rename(w.ns, d, "f", d, "g", RENAME_EXCHANGE, NULL));
    fixture_check(&w);
    ck_assert_uint_eq(peek(&w, d, "f"), g);
    ck_assert_uint_eq(peek(&w, d, "g"), h);
    abort_root(&w, root);
    expect_old_tree();
    OK(ht_ns_rename(w.ns, d, "f", d, "g", RENAME_EXCHANGE, NULL));
    OK(ht_ns_fsync(w.ns, f));
    fixture_check(&w);
    fixture_crash(&w);
    ck_assert_uint_eq(find(&w, d, "g"), f);
    ck_assert_uint_eq(find(&w, d, "f"), g);
}

TEST(the_mounts_root_directory_can_be_a_root)
{
    uint64_t file;

    fixture_new(&w);
    make_root(&w, ROOT);
    file = make_file(&w, ROOT, "file");
    write_text(&w, file, "text");
    fixture_crash(&w);
    ck_assert_uint_eq(find(&w, ROOT, "file"), 0);
    file = make_file(&w, ROOT, "file");
    write_text(&w, file, "text");
    commit(&w, ROOT);
    fixture_crash(&w);
    expect_text(&w, find(&w, ROOT, "file"), "text");
}

RUN_TESTS("roots", .setup = new_tree, .teardown = fixture_end, .timeout_s = 300)
