/* SPDX-License-Identifier: Apache-2.0 */
/* Many threads at once, with the store's own: no torn metadata, no deadlock; for the thread sanitizer most of all. */

#include "fixture.h"

enum { THREADS = 6, STEPS = 4000, NAMES = 12 };

static uint64_t dirs[3], root; /* the last of dirs is below the root */
static _Atomic unsigned running;

struct worker {
    pthread_t thread;
    uint64_t rnd;
    unsigned number;
};

static unsigned dice(struct worker *k, unsigned n)
{
    return (unsigned)(random_next(&k->rnd) >> 11) % n;
}

/* Errors that another thread's changes can cause are expected. */
static bool expected(int rc)
{
    return rc == 0 || rc == -ENOENT || rc == -EEXIST || rc == -EXDEV || rc == -ESTALE || rc == -EISDIR ||
        rc == -ENOTDIR || rc == -ENOTEMPTY || rc == -EINVAL || rc == -ENODATA;
}

static int see(void *ctx, const struct ht_ns_dirent *e)
{
    struct stat st;

    (*(unsigned *)ctx)++;
    return ht_ns_getattr_locked(w.ns, e->ino, false, &st);
}

static int use_file(uint64_t ino)
{
    struct ht_obj *obj;
    char text[16] = "0123456789abcde";
    int rc = ht_ns_open(w.ns, ino, &obj);

    if (rc != 0)
        return rc;
    ssize_t written = ht_obj_write(obj, 0, text, sizeof(text)); /* -ESTALE: an abort took the file back */
    ht_ns_touch(w.ns, ino, true);
    ssize_t got = ht_obj_read(obj, 0, text, sizeof(text));
    ht_ns_touch(w.ns, ino, false);
    ht_ns_close(w.ns, ino);
    return written < 0 ? (int)written : got < 0 ? (int)got : 0;
}

/* Looks the name up first, as the kernel does, so that the inode is held during the call. */
static int with_inode(struct worker *k, uint64_t dir, const char *name)
{
    struct stat st, mode = {.st_mode = 0600 + dice(k, 0100)};
    struct ht_ns_tensor t;
    char buf[64];
    int rc = ht_ns_lookup(w.ns, dir, name, &st);

    if (rc != 0)
        return rc;
    switch (dice(k, 6)) {
    case 0:
        rc = ht_ns_setattr(w.ns, st.st_ino, HT_SET_MODE, &mode, &mode);
        break;
    case 1:
        rc = ht_ns_setxattr(w.ns, st.st_ino, "user.x", buf, 0, 0);
        break;
    case 2:
        rc = ht_ns_removexattr(w.ns, st.st_ino, "user.x");
        break;
    case 3:
        rc = ht_ns_fsync(w.ns, st.st_ino);
        break;
    case 4:
        ht_ns_path(w.ns, st.st_ino, buf, sizeof(buf));
        rc = ht_ns_tensor(w.ns, st.st_ino, &t);
        break;
    default:
        rc = S_ISREG(st.st_mode) ? use_file(st.st_ino) : 0;
    }
    ht_ns_forget(w.ns, st.st_ino, 1);
    return rc;
}

static int change_names(struct worker *k, uint64_t dir, const char *name, const char *other)
{
    struct ht_cred cred = {1, 1, 0};
    uint64_t other_dir = dirs[dice(k, 3)];
    struct stat st;
    int rc;

    switch (dice(k, 5)) {
    case 0:
    case 1:
        rc = ht_ns_mknod(w.ns, dir, name, S_IFREG | 0644, 0, cred, &st);
        break;
    case 2:
        rc = ht_ns_mkdir(w.ns, dir, name, 0755, cred, &st);
        break;
    case 3:
        rc = ht_ns_unlink(w.ns, dir, name);
        return rc == -EISDIR ? ht_ns_rmdir(w.ns, dir, name) : rc;
    default:
        return ht_ns_rename(w.ns, dir, name, other_dir, other, dice(k, 2) ? RENAME_EXCHANGE : 0, NULL);
    }
    if (rc == 0)
        ht_ns_forget(w.ns, st.st_ino, 1);
    return rc;
}

static void *work(void *arg)
{
    struct worker *k = arg;
    char name[8], other[8];
    unsigned count = 0;

    for (int step = 0; step < STEPS; step++) {
        uint64_t dir = dirs[dice(k, 3)];
        unsigned n = dice(k, 20);
        int rc;
        snprintf(name, sizeof(name), "n%u", dice(k, NAMES));
        snprintf(other, sizeof(other), "n%u", dice(k, NAMES));
        if (n < 9)
            rc = change_names(k, dir, name, other);
        else if (n < 17)
            rc = with_inode(k, dir, name);
        else
            rc = ht_ns_readdir(w.ns, dir, 0, see, &count);
        ck_assert_msg(expected(rc), "thread %u: %s", k->number, strerror(-rc));
    }
    running--;
    return NULL;
}

/* At the same time the root is committed and aborted, as the optimizer does, and made and unmade. */
static void step_the_root(unsigned round)
{
    uint64_t lsn;

    if (round % 7 == 3) {
        OK(ht_ns_root_unmake(w.ns, root));
        int rc = ht_ns_root_make(w.ns, root, "adamw", NULL, NULL, NULL);
        ck_assert(rc == 0 || rc == -EBUSY); /* another thread may have made links across */
    }
    if (round % 2 == 0) {
        OK(ht_scope_commit(w.s, root, &lsn));
    } else {
        OK(ht_scope_abort(w.s, root));
    }
    OK(ht_store_commit(w.s));
}

TEST(threads_keep_names_whole)
{
    static struct worker workers[THREADS];

    w.threads = true;
    fixture_new(&w);
    root = make_dir(&w, ROOT, "root");
    dirs[0] = make_dir(&w, ROOT, "a");
    dirs[1] = make_dir(&w, ROOT, "b");
    dirs[2] = make_dir(&w, root, "c");
    make_root(&w, root);
    running = THREADS;
    for (unsigned n = 0; n < THREADS; n++) {
        workers[n] = (struct worker){.rnd = 0x9e3779b97f4a7c15ull * (n + 1), .number = n};
        ck_assert_int_eq(pthread_create(&workers[n].thread, NULL, work, &workers[n]), 0);
    }
    for (unsigned round = 0; running > 0; round++) {
        step_the_root(round);
        fixture_check(&w);
        usleep(2000);
    }
    for (unsigned n = 0; n < THREADS; n++)
        pthread_join(workers[n].thread, NULL);
    fixture_check(&w);
    fixture_crash(&w);
    fixture_remount(&w);
    fixture_free(&w);
}

RUN_TESTS("threads", .timeout_s = 300)
