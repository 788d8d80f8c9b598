/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor.c - `hitrainctl doctor`: what is slow or unsafe, and the remedy. The checks are in doctor_*.c.
 *
 * A mount that does not answer must not hold this program: a child asks it first.
 */
#include "mount-helpers/ctl/doctor.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "mount-helpers/common/text.h"
#include "tiering/base/json.h"
#include <hitrain/words.h>

enum { ANSWER_MS = 5000, EXIT_WARN = 3, EXIT_ERROR = 4 };

static const char *const level_words[HT_DOCTOR_LEVELS] = {"ok", "note", "warn", "error"};

/* -------------------------------------------------------------------- paths */

/* In a child: the mount answers, or the error. */
static int ask(const char *path)
{
    struct stat st;

    if (stat(path, &st) != 0)
        return errno;
    if (getxattr(path, HT_XATTR_PREFIX "stats", NULL, 0) < 0 && errno == ENOTCONN)
        return errno;
    return 0;
}

/* 0, an errno, or -ETIMEDOUT. A child that the kernel does not end yet stays; it ends with the mount. */
static int ask_in_time(const char *path)
{
    struct pollfd p = {.events = POLLIN};
    int ends[2], answer = EIO;

    if (pipe(ends) != 0)
        return errno;
    pid_t child = fork();
    if (child == 0) {
        /* A child that stays must not hold the caller's pipes. */
        for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
            if (fd != ends[1])
                close(fd);
        answer = ask(path);
        _exit(write(ends[1], &answer, sizeof(answer)) != (ssize_t)sizeof(answer));
    }
    close(ends[1]);
    p.fd = ends[0];
    if (child < 0)
        answer = EAGAIN;
    else if (poll(&p, 1, ANSWER_MS) <= 0)
        answer = -ETIMEDOUT;
    else if (read(ends[0], &answer, sizeof(answer)) != (ssize_t)sizeof(answer))
        answer = EIO;
    close(ends[0]);
    if (child > 0) {
        kill(child, SIGKILL);
        (void)waitpid(child, NULL, answer == -ETIMEDOUT ? WNOHANG : 0);
    }
    return answer;
}

static bool is_of_hitrain(const char *path, struct ht_mount_entry *m)
{
    return ht_mount_of_path(path, m) == 0 && ht_mount_is_hitrain(m);
}

/* A folder of another file system is a mistake of the caller; a file there may be a store. True: it is a mount. */
static bool look_at(struct ht_doctor *d, const char *path, struct ht_mount_entry *m)
{
    struct stat st;
    int rc = ask_in_time(path);

    if (rc == -ETIMEDOUT) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "mount", "%s does not answer", path);
        ht_doctor_remedy(d, "hitrainctl dump %s shows what its daemon waits for", path);
    } else if (rc == ENOTCONN) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "mount", "%s: the daemon of this mount is gone", path);
        ht_doctor_remedy(d, "umount %s, mount it again, and read the daemon's messages in the system's log", path);
    } else if (rc == 0 && is_of_hitrain(path, m)) {
        ht_doctor_mount(d, m);
        return true;
    } else if (rc == 0 && stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "mount", "%s is not on a hitrain mount", path);
        ht_doctor_remedy(d, "mount -t hitrain DEVICE %s", path);
    } else {
        ht_doctor_device(d, path);
    }
    return false;
}

/* ------------------------------------------------------------------- output */

static void put_for_people(const struct ht_doctor *d)
{
    for (unsigned i = 0; i < d->count; i++) {
        const struct ht_doctor_finding *f = &d->finding[i];
        printf("%-5s %-18s ", level_words[f->level], f->check);
        ht_put_printable(f->text, stdout);
        putchar('\n');
        if (f->remedy[0] != '\0') {
            printf("%24s -> ", "");
            ht_put_printable(f->remedy, stdout);
            putchar('\n');
        }
    }
    if (d->cut)
        puts("(there are more findings)");
}

static void put_json(const struct ht_doctor *d, const char *path)
{
    struct ht_json j;

    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    if (path)
        ht_json_str(&j, "path", path);
    ht_json_str(&j, "level", level_words[ht_doctor_worst(d)]);
    ht_json_array(&j, "findings");
    for (unsigned i = 0; i < d->count; i++) {
        const struct ht_doctor_finding *f = &d->finding[i];
        ht_json_object(&j, NULL);
        ht_json_str(&j, "level", level_words[f->level]);
        ht_json_str(&j, "check", f->check);
        ht_json_str(&j, "text", f->text);
        if (f->remedy[0] != '\0')
            ht_json_str(&j, "remedy", f->remedy);
        ht_json_end(&j);
    }
    ht_json_end(&j);
    ht_json_end(&j);
}

int ht_cmd_doctor(const char *path, const struct ht_cmd_options *o)
{
    struct ht_doctor *d = calloc(1, sizeof(*d));
    struct ht_mount_entry *m = malloc(sizeof(*m));
    enum ht_doctor_level worst = HT_DOCTOR_ERROR;
    bool ok = d && m;

    if (ok) {
        d->root = "";
        ht_doctor_machine(d);
        if (!path || !look_at(d, path, m))
            ht_doctor_cgroup(d, 0, 0);
        worst = ht_doctor_worst(d);
        if (o->json)
            put_json(d, path);
        else
            put_for_people(d);
        ok = fflush(stdout) == 0;
    }
    if (!ok)
        ht_error("cannot finish: %s", strerror(errno));
    free(m);
    free(d);
    return !ok                     ? HT_CMD_FAILED
        : worst == HT_DOCTOR_ERROR ? EXIT_ERROR
        : worst == HT_DOCTOR_WARN  ? EXIT_WARN
                                   : HT_CMD_OK;
}
