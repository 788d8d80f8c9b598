/* SPDX-License-Identifier: Apache-2.0 */
/* fixture.h - names over a real store on a device of memory, for the tests of this folder. */
#pragma once

#include <sys/xattr.h>

#include "fs/ns/ns.h"
#include "tests/support/dev.h"
#include "tests/support/suite.h"
#include "tiering/engine/engine.h"
#include "tiering/space/super.h"
#include "tiering/api/object.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"

#define UNUSED __attribute__((unused))
#define OK(call) ck_assert_int_eq((call), 0)
#define FAILS(call, error) ck_assert_int_eq((call), -(error))

enum { ROOT = HT_NS_ROOT_INO, MIB = 1 << 20 };

struct fixture {
    struct ht_dev *dev;
    struct ht_store *s;
    struct ht_ns *ns;
    bool read_only, threads;
    uint64_t deleted[64]; /* the arguments of the hook */
    unsigned deleted_count;
    void (*stale)(void *ctx, uint64_t ino, uint64_t parent, const char *name); /* may be NULL */
    void *stale_ctx;
};

static void noted_deleted(void *ctx, uint64_t ino, bool pending, struct ht_tx *tx)
{
    struct fixture *w = ctx;

    ck_assert_ptr_nonnull(tx);
    w->deleted[w->deleted_count++ % 64] = ino;
}

static void noted_stale(void *ctx, uint64_t ino, uint64_t parent, const char *name)
{
    struct fixture *w = ctx;

    if (w->stale)
        w->stale(w->stale_ctx, ino, parent, name);
}

static void print_problem(void *ctx, const char *code, const char *text)
{
    (void)ctx;
    fprintf(stderr, "%s: %s\n", code, text);
}

static void fixture_check(struct fixture *w)
{
    ck_assert_uint_eq(ht_ns_check(w->ns, print_problem, NULL), 0);
}

/* Registered after the names, if a test wants one. */
static UNUSED const struct ht_participant *fixture_participant;

static int fixture_try_mount(struct fixture *w)
{
    struct ht_store_opts opts = {.dram_bytes = 8 * MIB,
                                 .staging_bytes = 24 * MIB,
                                 .numa_node = HT_NUMA_OFF,
                                 .no_threads = !w->threads,
                                 .read_only = w->read_only};
    struct ht_ns_hooks hooks = {.ctx = w, .deleted = noted_deleted, .stale = noted_stale};
    const struct ht_ns_setup setup = {&hooks, 100, 200};
    void *ns;
    int rc;

    OK(ht_store_new(&w->dev, 1, &opts, &w->s));
    OK(ht_participant_ns.make(w->s, &setup, &ns));
    w->ns = ns;
    if (fixture_participant)
        OK(ht_store_register(w->s, fixture_participant));
    rc = ht_store_mount(w->s);
    return rc != 0 ? rc : ht_participant_ns.start(w->ns);
}

static UNUSED void fixture_mount(struct fixture *w)
{
    OK(fixture_try_mount(w));
    fixture_check(w);
}

/* As a killed daemon leaves it. A checkpoint may be emitting names. */
static UNUSED void fixture_kill(struct fixture *w)
{
    ht_engine_stop(w->s);
    ht_participant_ns.free(w->ns);
    ht_store_close(w->s);
    w->s = NULL;
}

static UNUSED void fixture_free(struct fixture *w)
{
    fixture_check(w);
    if (!w->read_only)
        OK(ht_store_unmount(w->s));
    fixture_kill(w);
    ht_dev_close(w->dev);
}

/* In place of the one that there may be. */
static UNUSED void fixture_new_log(struct fixture *w, uint64_t bytes, uint64_t log_bytes)
{
    struct ht_format_opts opts = {.log_bytes = log_bytes};
    struct ht_super sb;

    if (w->s)
        fixture_free(w);
    *w = (struct fixture){.threads = w->threads};
    OK(dev_open_ram(bytes, 512, &w->dev));
    OK(ht_super_format(&w->dev, 1, &opts, &sb));
    fixture_mount(w);
}

static UNUSED void fixture_new(struct fixture *w)
{
    fixture_new_log(w, 64 * MIB, 0);
}

static UNUSED void fixture_crash(struct fixture *w)
{
    fixture_kill(w);
    fixture_mount(w);
}

/* Everything appended to the log becomes durable, then the crash. */
static UNUSED void fixture_synced_crash(struct fixture *w)
{
    OK(ht_ns_fsync(w->ns, ROOT));
    fixture_crash(w);
}

static UNUSED void fixture_remount(struct fixture *w)
{
    OK(ht_store_unmount(w->s));
    fixture_crash(w);
}

/* -------------------------------------------------------------- shortcuts */

static UNUSED struct stat attributes(struct fixture *w, uint64_t ino)
{
    struct stat st;

    OK(ht_ns_getattr(w->ns, ino, &st));
    return st;
}

static UNUSED uint64_t make_file(struct fixture *w, uint64_t parent, const char *name)
{
    struct stat st;

    OK(ht_ns_mknod(w->ns, parent, name, S_IFREG | 0644, 0, (struct ht_cred){1000, 1001, 0}, &st));
    ck_assert_uint_ne(st.st_ino, 0);
    return st.st_ino;
}

static UNUSED uint64_t make_dir(struct fixture *w, uint64_t parent, const char *name)
{
    struct stat st;

    OK(ht_ns_mkdir(w->ns, parent, name, 0755, (struct ht_cred){1000, 1001, 0}, &st));
    return st.st_ino;
}

/* Inode of a name, with a count that is not given back; 0: none. */
static UNUSED uint64_t find(struct fixture *w, uint64_t parent, const char *name)
{
    struct stat st;
    int rc = ht_ns_lookup(w->ns, parent, name, &st);

    if (rc == -ENOENT)
        return 0;
    OK(rc);
    return st.st_ino;
}

/* The same, without a count. */
static UNUSED uint64_t peek(struct fixture *w, uint64_t parent, const char *name)
{
    uint64_t ino = find(w, parent, name);

    if (ino != 0)
        ht_ns_forget(w->ns, ino, 1);
    return ino;
}

static UNUSED void write_text(struct fixture *w, uint64_t ino, const char *text)
{
    struct ht_obj *obj;

    OK(ht_ns_open(w->ns, ino, &obj));
    ck_assert_int_eq(ht_obj_write(obj, 0, text, strlen(text)), (ssize_t)strlen(text));
    OK(ht_obj_truncate(obj, strlen(text)));
    ht_ns_touch(w->ns, ino, true);
    ht_ns_close(w->ns, ino);
}

static UNUSED void expect_text(struct fixture *w, uint64_t ino, const char *text)
{
    char buf[256] = {0};
    struct ht_obj *obj;

    OK(ht_ns_open(w->ns, ino, &obj));
    ck_assert_int_eq(ht_obj_read(obj, 0, buf, sizeof(buf) - 1), (ssize_t)strlen(text));
    ck_assert_str_eq(buf, text);
    ht_ns_close(w->ns, ino);
}

static UNUSED void set_text(struct fixture *w, uint64_t ino, const char *name, const char *value)
{
    OK(ht_ns_setxattr(w->ns, ino, name, value, strlen(value), 0));
}

static UNUSED void expect_xattr(struct fixture *w, uint64_t ino, const char *name, const char *value)
{
    char buf[256] = {0};

    ck_assert_int_eq(ht_ns_getxattr(w->ns, ino, name, buf, sizeof(buf) - 1), (ssize_t)strlen(value));
    ck_assert_str_eq(buf, value);
}

static UNUSED void make_root(struct fixture *w, uint64_t ino)
{
    OK(ht_ns_root_make(w->ns, ino, "adamw", NULL, NULL, NULL));
}

static UNUSED void commit(struct fixture *w, uint64_t root)
{
    uint64_t lsn;

    OK(ht_scope_commit(w->s, root, &lsn));
    OK(ht_store_sync(w->s, lsn));
    fixture_check(w);
}

static UNUSED void abort_root(struct fixture *w, uint64_t root)
{
    OK(ht_scope_abort(w->s, root));
    fixture_check(w);
}

/* --------------------------------------------------------- of the program */

static struct fixture w;

/* Alone in a new store. */
static UNUSED uint64_t new_file(void)
{
    return make_file(&w, ROOT, "file");
}

static UNUSED uint64_t new_dir(void)
{
    return make_dir(&w, ROOT, "dir");
}

/* For run_tests(): before a test. */
static UNUSED void fixture_start(void)
{
    fixture_new(&w);
}

/* And after it, unless it freed w itself. */
static UNUSED void fixture_end(void)
{
    if (w.s)
        fixture_free(&w);
}
