/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random operations on names beside a simple model: two trees, the current one and the one that a crash must find.
 * Outside the two model roots they are the same; below, commit copies one way and abort, crash and remount the other.
 */
#include "fixture.h"

enum { NODES = 64, ENTRIES = 160, FS_ROOT = 0, ROOT_A = 1, ROOT_B = 2, NAMES = 5, OPENS = 4 };

struct node {
    uint64_t ino;
    bool dir;
    unsigned mode;
    int content, xattr; /* numbers; 0: empty, none */
};

struct entry {
    bool used;
    int parent, child;
    char name[2];
};

struct tree {
    struct node node[NODES];
    struct entry entry[ENTRIES];
};

static struct tree cur, pub;
static uint64_t rnd, commits, aborts, crashes;
static uint64_t opened[OPENS]; /* inodes held open, or 0 */

static unsigned dice(unsigned n)
{
    return (unsigned)(random_next(&rnd) >> 11) % n;
}

/* ------------------------------------------------------------- the model */

static struct entry *find_entry(struct tree *t, int parent, const char *name)
{
    for (int n = 0; n < ENTRIES; n++)
        if (t->entry[n].used && t->entry[n].parent == parent && t->entry[n].name[0] == name[0])
            return &t->entry[n];
    return NULL;
}

static struct entry *name_of(struct tree *t, int child)
{
    for (int n = 0; n < ENTRIES; n++)
        if (t->entry[n].used && t->entry[n].child == child)
            return &t->entry[n];
    return NULL;
}

static int links_of(struct tree *t, int child)
{
    int links = 0;

    for (int n = 0; n < ENTRIES; n++)
        links += t->entry[n].used && t->entry[n].child == child ? 1 : 0;
    return links;
}

static int count_children(struct tree *t, int parent, bool dirs_only)
{
    int count = 0;

    for (int n = 0; n < ENTRIES; n++)
        if (t->entry[n].used && t->entry[n].parent == parent)
            count += !dirs_only || t->node[t->entry[n].child].dir ? 1 : 0;
    return count;
}

static void add_entry(struct tree *t, int parent, const char *name, int child)
{
    for (int n = 0; n < ENTRIES; n++)
        if (!t->entry[n].used) {
            t->entry[n] = (struct entry){true, parent, child, {name[0], '\0'}};
            return;
        }
    ck_abort_msg("the model is too small");
}

/* Model root that a directory is at or below, else FS_ROOT. */
static int scope_of(struct tree *t, int dir)
{
    while (dir != FS_ROOT && dir != ROOT_A && dir != ROOT_B)
        dir = name_of(t, dir)->parent;
    return dir;
}

static bool is_at_or_below(struct tree *t, int dir, int above)
{
    while (dir != above && dir != FS_ROOT)
        dir = name_of(t, dir)->parent;
    return dir == above;
}

/* Copies the part of a tree that belongs to a root from another tree. */
static void copy_scope(struct tree *from, struct tree *to, int root)
{
    bool in[ENTRIES];

    for (int n = 0; n < ENTRIES; n++)
        in[n] = to->entry[n].used && scope_of(to, to->entry[n].parent) == root;
    for (int n = 0; n < ENTRIES; n++)
        if (in[n])
            to->entry[n].used = false;
    to->node[root] = from->node[root];
    for (int n = 0; n < ENTRIES; n++) {
        struct entry *e = &from->entry[n];
        if (!e->used || scope_of(from, e->parent) != root)
            continue;
        add_entry(to, e->parent, e->name, e->child);
        if (e->child != ROOT_A && e->child != ROOT_B) /* whose attributes are their own affair */
            to->node[e->child] = from->node[e->child];
    }
}

static void outside_is_published(int scope)
{
    if (scope == FS_ROOT)
        copy_scope(&cur, &pub, FS_ROOT);
}

static int free_node(void)
{
    for (int n = ROOT_B + 1; n < NODES; n++)
        if (!name_of(&cur, n) && !name_of(&pub, n))
            return n;
    return -1;
}

/* ------------------------------------------------------------ comparison */

static int names_seen;

static int see_name(void *ctx, const struct ht_ns_dirent *e)
{
    const struct entry *m = find_entry(&cur, *(const int *)ctx, e->name);

    ck_assert_ptr_nonnull(m);
    ck_assert_uint_eq(e->ino, cur.node[m->child].ino);
    names_seen++;
    return 0;
}

static void compare_content(const struct node *m)
{
    char text[16] = "";

    if (m->content != 0)
        snprintf(text, sizeof(text), "c%d", m->content);
    expect_text(&w, m->ino, text);
}

static void compare_node(int n)
{
    const struct node *m = &cur.node[n];
    struct stat st = attributes(&w, m->ino);
    char text[16];

    ck_assert_uint_eq(st.st_mode, (m->dir ? S_IFDIR : S_IFREG) | m->mode);
    ck_assert_uint_eq(st.st_nlink, m->dir ? 2 + count_children(&cur, n, true) : links_of(&cur, n));
    if (!m->dir)
        compare_content(m);
    snprintf(text, sizeof(text), "x%d", m->xattr);
    if (m->xattr != 0)
        expect_xattr(&w, m->ino, "user.x", text);
    else
        FAILS(ht_ns_getxattr(w.ns, m->ino, "user.x", NULL, 0), ENODATA);
    if (!m->dir)
        return;
    names_seen = 0;
    OK(ht_ns_readdir(w.ns, m->ino, 0, see_name, &n));
    ck_assert_int_eq(names_seen, count_children(&cur, n, false));
}

static void compare_all(void)
{
    struct ht_ns_stats st;

    compare_node(FS_ROOT);
    for (int n = 0; n < ENTRIES; n++)
        if (cur.entry[n].used) {
            const struct entry *e = &cur.entry[n];
            ck_assert_uint_eq(peek(&w, cur.node[e->parent].ino, e->name), cur.node[e->child].ino);
            compare_node(e->child);
        }
    fixture_check(&w);
    ht_ns_stats(w.ns, &st);
    ck_assert_uint_le(st.inodes, 2 * NODES + OPENS);
}

/* ------------------------------------------------------------ operations */

static int pick_dir(void)
{
    int n;

    do
        n = (int)dice(NODES);
    while (!cur.node[n].dir || (n != FS_ROOT && !name_of(&cur, n)));
    return n;
}

static const char *pick_name(void)
{
    static const char *const names[NAMES] = {"a", "b", "c", "d", "e"};

    return names[dice(NAMES)];
}

/* A file with a name, or -1. */
static int pick_file(void)
{
    for (int tries = 0; tries < 50; tries++) {
        int n = (int)dice(NODES);
        if (!cur.node[n].dir && name_of(&cur, n))
            return n;
    }
    return -1;
}

/* First the file, then its name. */
static int make_unnamed(uint64_t parent, const char *name, struct ht_cred cred, struct stat *out_st)
{
    OK(ht_ns_tmpfile(w.ns, parent, 0644, cred, out_st));
    uint64_t ino = out_st->st_ino;
    if (dice(2) == 0)
        OK(ht_ns_fsync(w.ns, ino));
    int rc = ht_ns_link(w.ns, ino, parent, name, out_st);
    ht_ns_forget(w.ns, ino, 1);
    return rc;
}

static int make_file_of_model(uint64_t parent, const char *name, struct ht_cred cred, struct stat *out_st)
{
    if (dice(3) == 0)
        return make_unnamed(parent, name, cred, out_st);
    return ht_ns_mknod(w.ns, parent, name, S_IFREG | 0644, 0, cred, out_st);
}

static void make(bool dir)
{
    int parent = pick_dir(), node = free_node(), rc, expected;
    const char *name = pick_name();
    struct stat st;
    struct ht_cred cred = {1, 1, 0};

    if (node < 0)
        return;
    expected = find_entry(&cur, parent, name) ? -EEXIST : 0;
    rc = dir ? ht_ns_mkdir(w.ns, cur.node[parent].ino, name, 0755, cred, &st)
             : make_file_of_model(cur.node[parent].ino, name, cred, &st);
    ck_assert_int_eq(rc, expected);
    if (rc != 0)
        return;
    ht_ns_forget(w.ns, st.st_ino, 1);
    cur.node[node] = (struct node){st.st_ino, dir, dir ? 0755 : 0644, 0, 0};
    add_entry(&cur, parent, name, node);
    outside_is_published(scope_of(&cur, parent));
}

static void unmake(bool dir)
{
    int parent = pick_dir(), rc, expected = 0;
    const char *name = pick_name();
    struct entry *e = find_entry(&cur, parent, name);

    if (!e)
        expected = -ENOENT;
    else if (cur.node[e->child].dir != dir)
        expected = dir ? -ENOTDIR : -EISDIR;
    else if (dir && count_children(&cur, e->child, false) > 0)
        expected = -ENOTEMPTY;
    rc = dir ? ht_ns_rmdir(w.ns, cur.node[parent].ino, name) : ht_ns_unlink(w.ns, cur.node[parent].ino, name);
    ck_assert_int_eq(rc, expected);
    if (rc != 0)
        return;
    e->used = false;
    outside_is_published(scope_of(&cur, parent));
}

static int expected_rename(int from_dir, struct entry *from, int to_dir, struct entry *to, unsigned flags)
{
    bool exchange = flags == RENAME_EXCHANGE;

    if (!from || (exchange && !to))
        return -ENOENT;
    if (scope_of(&cur, from_dir) != scope_of(&cur, to_dir))
        return -EXDEV;
    if (cur.node[from->child].dir && is_at_or_below(&cur, to_dir, from->child))
        return -EINVAL;
    if (exchange)
        return cur.node[to->child].dir && is_at_or_below(&cur, from_dir, to->child) ? -EINVAL : 0;
    if (!to)
        return 0;
    if (flags == RENAME_NOREPLACE)
        return -EEXIST;
    if (to->child == from->child)
        return 0;
    if (cur.node[from->child].dir != cur.node[to->child].dir)
        return cur.node[from->child].dir ? -ENOTDIR : -EISDIR;
    return cur.node[to->child].dir && count_children(&cur, to->child, false) > 0 ? -ENOTEMPTY : 0;
}

static void rename_in_model(struct entry *from, int to_dir, const char *to_name, struct entry *to, unsigned flags)
{
    int child = from->child;

    if (to && to->child == child)
        return;
    if (flags == RENAME_EXCHANGE) {
        from->child = to->child;
        to->child = child;
        return;
    }
    from->used = false;
    if (to)
        to->used = false;
    add_entry(&cur, to_dir, to_name, child);
}

static void move(void)
{
    static const unsigned flag_choices[] = {0, 0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE};
    int from_dir = pick_dir(), to_dir = pick_dir();
    const char *from_name = pick_name(), *to_name = pick_name();
    unsigned flags = flag_choices[dice(HT_ARRAY_SIZE(flag_choices))];
    struct entry *from = find_entry(&cur, from_dir, from_name), *to = find_entry(&cur, to_dir, to_name);
    int expected = expected_rename(from_dir, from, to_dir, to, flags);

    ck_assert_int_eq(ht_ns_rename(w.ns, cur.node[from_dir].ino, from_name, cur.node[to_dir].ino, to_name, flags, NULL),
                     expected);
    if (expected != 0)
        return;
    rename_in_model(from, to_dir, to_name, to, flags);
    outside_is_published(scope_of(&cur, from_dir));
}

static void link_file(void)
{
    int node = pick_file(), dir = pick_dir(), expected = 0;
    const char *name = pick_name();
    struct stat st;

    if (node < 0)
        return;
    if (find_entry(&cur, dir, name))
        expected = -EEXIST;
    else if (scope_of(&cur, name_of(&cur, node)->parent) != scope_of(&cur, dir))
        expected = -EXDEV;
    ck_assert_int_eq(ht_ns_link(w.ns, cur.node[node].ino, cur.node[dir].ino, name, &st), expected);
    if (expected != 0)
        return;
    ht_ns_forget(w.ns, st.st_ino, 1);
    add_entry(&cur, dir, name, node);
    outside_is_published(scope_of(&cur, dir));
}

static int scope_of_node(int node)
{
    return cur.node[node].dir ? scope_of(&cur, node) : scope_of(&cur, name_of(&cur, node)->parent);
}

static void write_file(void)
{
    int node = pick_file();
    char text[16];

    if (node < 0)
        return;
    cur.node[node].content = 1 + (int)dice(1000);
    snprintf(text, sizeof(text), "c%d", cur.node[node].content);
    write_text(&w, cur.node[node].ino, text);
    if (scope_of_node(node) == FS_ROOT)
        OK(ht_ns_fsync(w.ns, cur.node[node].ino));
    outside_is_published(scope_of_node(node));
}

static void change_node(void)
{
    int node = dice(2) ? pick_file() : pick_dir();
    struct stat values, st;
    char text[16];

    if (node < 0)
        return;
    if (dice(2)) {
        values.st_mode = cur.node[node].mode = dice(0777);
        OK(ht_ns_setattr(w.ns, cur.node[node].ino, HT_SET_MODE, &values, &st));
    } else if (cur.node[node].xattr != 0 && dice(3) == 0) {
        cur.node[node].xattr = 0;
        OK(ht_ns_removexattr(w.ns, cur.node[node].ino, "user.x"));
    } else {
        cur.node[node].xattr = 1 + (int)dice(1000);
        snprintf(text, sizeof(text), "x%d", cur.node[node].xattr);
        set_text(&w, cur.node[node].ino, "user.x", text);
    }
    outside_is_published(scope_of_node(node));
}

static void open_or_close(void)
{
    unsigned n = dice(OPENS);
    int node = pick_file();
    struct ht_obj *obj;

    if (opened[n] != 0) {
        ht_ns_close(w.ns, opened[n]);
        opened[n] = 0;
    } else if (node >= 0) {
        opened[n] = cur.node[node].ino;
        OK(ht_ns_open(w.ns, opened[n], &obj));
    }
}

static void commit_or_abort(void)
{
    int root = dice(2) ? ROOT_A : ROOT_B;

    if (dice(2)) {
        commit(&w, cur.node[root].ino);
        copy_scope(&cur, &pub, root);
        commits++;
    } else {
        abort_root(&w, cur.node[root].ino);
        copy_scope(&pub, &cur, root);
        aborts++;
        compare_all();
    }
}

static void come_back(void)
{
    if (dice(2))
        fixture_synced_crash(&w);
    else
        fixture_remount(&w);
    cur = pub;
    memset(opened, 0, sizeof(opened));
    crashes++;
    compare_all();
}

static void random_step(void)
{
    unsigned n = dice(400);

    if (n < 80)
        make(false);
    else if (n < 120)
        make(true);
    else if (n < 160)
        unmake(false);
    else if (n < 185)
        unmake(true);
    else if (n < 270)
        move();
    else if (n < 295)
        link_file();
    else if (n < 325)
        write_file();
    else if (n < 365)
        change_node();
    else if (n < 380)
        open_or_close();
    else if (n < 393)
        commit_or_abort();
    else if (n < 396)
        OK(ht_store_checkpoint(w.s));
    else if (n < 398)
        compare_all();
    else
        come_back();
}

static void begin(uint64_t seed)
{
    rnd = seed * 0x9e3779b97f4a7c15ull + 1;
    fixture_new(&w);
    memset(&cur, 0, sizeof(cur));
    cur.node[FS_ROOT] = (struct node){ROOT, true, 0755, 0, 0};
    cur.node[ROOT_A] = (struct node){make_dir(&w, ROOT, "A"), true, 0755, 0, 0};
    cur.node[ROOT_B] = (struct node){make_dir(&w, ROOT, "B"), true, 0755, 0, 0};
    add_entry(&cur, FS_ROOT, "A", ROOT_A);
    add_entry(&cur, FS_ROOT, "B", ROOT_B);
    make_root(&w, cur.node[ROOT_A].ino);
    make_root(&w, cur.node[ROOT_B].ino);
    pub = cur;
    memset(opened, 0, sizeof(opened));
}

TEST(names_follow_the_model)
{
    unsigned runs = getenv("HITRAIN_LONG") ? 40 : 6;

    for (unsigned run = 1; run <= runs; run++) {
        begin(run);
        for (int step = 0; step < 2500; step++) {
            random_step();
            fixture_check(&w);
        }
        come_back();
        fixture_free(&w);
    }
    ck_assert_uint_gt(commits, 20);
    ck_assert_uint_gt(aborts, 20);
    ck_assert_uint_gt(crashes, 20);
}

/* ------------------------------------------------------- with single fsyncs */

/*
 * fsync of single files below a root publishes parts of the pending changes. A crash then finds a mixture of states. It
 * must be whole, hold the fsynced content, and still have every published file that was not deleted.
 */
static int count_names(struct ht_ns *ns, uint64_t ino)
{
    struct stat st;

    return ht_ns_getattr(ns, ino, &st) == 0 ? (int)st.st_nlink : 0;
}

static void fsync_one(bool *published)
{
    int node = dice(3) == 0 ? pick_dir() : pick_file();

    if (node < 0 || node <= ROOT_B || scope_of_node(node) == FS_ROOT)
        return;
    OK(ht_ns_fsync(w.ns, cur.node[node].ino));
    published[node] = true;
}

static void check_nothing_lost(const bool *published)
{
    static uint64_t inos[NODES];
    int count = 0;

    for (int n = ROOT_B + 1; n < NODES; n++)
        if (published[n] && name_of(&cur, n))
            inos[count++] = cur.node[n].ino;
    OK(ht_store_checkpoint(w.s));
    fixture_synced_crash(&w);
    memset(opened, 0, sizeof(opened));
    for (int n = 0; n < count; n++)
        ck_assert_int_ge(count_names(w.ns, inos[n]), 1);
}

TEST(single_fsyncs_keep_the_tree_whole)
{
    unsigned runs = getenv("HITRAIN_LONG") ? 400 : 60;

    for (unsigned run = 1; run <= runs; run++) {
        bool published[NODES] = {false};
        begin(1000 + run);
        for (int step = 0; step < 300; step++) {
            unsigned n = dice(20);
            int node = free_node();
            if (node >= 0)
                published[node] = false; /* a number that is used again */
            if (n < 5)
                make(n < 2);
            else if (n < 8)
                unmake(n == 5);
            else if (n < 13)
                move();
            else if (n < 14)
                link_file();
            else if (n < 15)
                write_file();
            else
                fsync_one(published);
            fixture_check(&w);
        }
        if (run % 2 == 0) { /* an abort after them must leave a tree that is whole, too */
            abort_root(&w, cur.node[ROOT_A].ino);
            commit(&w, cur.node[ROOT_A].ino);
            fixture_synced_crash(&w);
        } else {
            check_nothing_lost(published);
        }
        fixture_free(&w);
    }
}

RUN_TESTS("model", .timeout_s = 300)
