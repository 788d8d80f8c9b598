/* SPDX-License-Identifier: Apache-2.0 */
/* The process that holds a file, and mounts that have gone, on a machine where locks and mounts come and go. */
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>

#include "tests/support/suite.h"
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"

enum { LOCKS = 400, BLINKING = 60, LOOKS = 600 };

static char folder[] = "/tmp/hitrain-holder-XXXXXX";
static _Atomic bool stop;

static int take_lock(const char *name)
{
    char path[64];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(unlink(path), 0);
    ck_assert_int_eq(flock(fd, LOCK_EX), 0);
    return fd;
}

/* Locks that are in front of the others, because they are newer, and go. */
static void *blink(void *arg)
{
    int fd[BLINKING];

    while (!stop) {
        for (int i = 0; i < BLINKING; i++)
            fd[i] = take_lock((const char *)arg);
        for (int i = 0; i < BLINKING; i++)
            close(fd[i]);
    }
    return NULL;
}

TEST(a_holder_is_found_while_other_locks_end)
{
    struct ht_holder *h = test_alloc(sizeof(*h));
    int fd[LOCKS], held;
    char path[64];
    pthread_t thread;

    ck_assert_ptr_nonnull(mkdtemp(folder));
    snprintf(path, sizeof(path), "%s/held", folder);
    held = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ck_assert_int_eq(flock(held, LOCK_EX), 0);
    for (int i = 0; i < LOCKS; i++)
        fd[i] = take_lock("other");
    ck_assert_int_eq(pthread_create(&thread, NULL, blink, (void *)(uintptr_t) "blinking"), 0);
    for (int i = 0; i < LOOKS; i++) {
        ck_assert_int_eq(ht_holder_find(path, h), 0);
        ck_assert_int_eq(h->pid, getpid());
    }
    stop = true;
    pthread_join(thread, NULL);
    ck_assert_int_eq(flock(held, LOCK_UN), 0);
    ck_assert_int_eq(ht_holder_find(path, h), 0);
    ck_assert_int_eq(h->pid, 0);
    for (int i = 0; i < LOCKS; i++)
        close(fd[i]);
    close(held);
    unlink(path);
    rmdir(folder);
}

/* The next mount may have the number of one that has gone. */
TEST(a_mount_is_told_by_number_and_source)
{
    struct ht_mount_entry *m = test_alloc(sizeof(*m));
    struct ht_mount_user user;

    ck_assert_int_eq(ht_mount_of_path("/proc", m), 0);
    ck_assert(ht_mount_is_here(m->major, m->minor, NULL));
    ck_assert(ht_mount_is_here(m->major, m->minor, m->source));
    ck_assert(!ht_mount_is_here(m->major, m->minor, "/of/another store"));
    ck_assert(!ht_mount_is_here(m->major, m->minor + 1000003, m->source));
    /* other processes have files of /proc open, this one among them */
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    pid_t child = fork();
    if (child == 0)
        pause();
    ck_assert_int_gt(child, 0);
    ck_assert_int_eq(ht_mount_user_find(m->major, m->minor, "/of/another store", &user), -ENOENT);
    ck_assert_int_eq(ht_mount_user_find(m->major, m->minor, m->source, &user), 0);
    kill(child, SIGKILL);
    close(fd);
}

RUN_TESTS("holder", .timeout_s = 120)
