/* SPDX-License-Identifier: Apache-2.0 */
/*
 * doctor.c - `hitrainctl doctor`: what is slow or unsafe, and the remedy. The checks are in doctor_*.c.
 *
 * A mount or device that does not answer must not hold this program: a child asks, and adds its findings to memory that
 * it shares with its parent.
 */
#include "mount-helpers/look/doctor.h"

#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <hitrain/words.h>

/* For each answer: a slow machine is not a mount that hangs. One that hangs is found within two seconds. */
enum { ANSWER_MS = 1500, END_MS = 20, EXIT_WARN = 3, EXIT_ERROR = 4 };

static const char more = '.', end = '!';

static const char *const level_words[HT_DOCTOR_LEVELS] = {"ok", "note", "warn", "error"};

/* -------------------------------------------------------------------- paths */

/* 0: the mount answers. */
static int ask_path(const char *path)
{
    struct stat st;

    if (stat(path, &st) != 0)
        return errno;
    if (getxattr(path, HT_XATTR_PREFIX "stats", NULL, 0) < 0 && errno == ENOTCONN)
        return errno;
    return 0;
}

/* A folder of another file system is a mistake of the caller; a file there may be a store. */
static void look_at(struct ht_doctor *d, const char *path)
{
    struct ht_mount_entry m;
    struct stat st;
    int rc = ask_path(path);

    ht_doctor_answered(d);
    if (rc == ENOTCONN) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "mount", "%s: the daemon of this mount is gone", path);
        ht_doctor_remedy(d, "umount %s, mount it again, and read the daemon's messages in the system's log", path);
    } else if (rc == 0 && ht_mount_of_path(path, &m) == 0 && ht_mount_is_hitrain(&m)) {
        d->mount = true;
        ht_doctor_mount(d, &m);
    } else if (rc == 0 && stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "mount", "%s is not on a hitrain mount", path);
        ht_doctor_remedy(d, "mount -t hitrain DEVICE %s", path);
    } else {
        ht_doctor_device(d, path);
    }
}

/* -------------------------------------------------------------------- child */

/* Standard input, output and error are the caller's pipes: a child that stays must not hold them. */
static void in_child(struct ht_doctor *d, const char *path, int told)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fd != told)
            (void)close(fd);
    d->told = told;
    look_at(d, path);
    _exit(write(told, &end, 1) != 1);
}

static void not_in_time(struct ht_doctor *d, const char *path)
{
    if (d->device[0] != '\0') {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "device", "%s does not answer", d->device);
        ht_doctor_remedy(d, "read the kernel's log; look at the device, its cable or its network");
    } else {
        ht_doctor_add(d, HT_DOCTOR_ERROR, "mount", "%s does not answer", path);
        ht_doctor_remedy(d, "%shitrainctl dump %s shows what its daemon waits for%s",
                         d->mount ? "" : "on a mount of hitrain, ", path,
                         d->mount ? "" : "; elsewhere read the kernel's log");
    }
}

/* 1: it has ended; 0: no answer in time; -1: it died. */
static int follow(int told)
{
    struct pollfd p = {.fd = told, .events = POLLIN};
    char said = more;

    while (said == more) {
        if (poll(&p, 1, ANSWER_MS) == 0)
            return 0;
        if (read(told, &said, 1) != 1)
            return -1;
    }
    return 1;
}

/* It adds nothing after this, unless the kernel holds it: then it does not run. */
static void end_of(pid_t child, bool ends)
{
    for (int i = 0; !ends && i < END_MS; i++) {
        if (waitpid(child, NULL, WNOHANG) != 0)
            return;
        (void)usleep(1000);
    }
    if (ends)
        (void)waitpid(child, NULL, 0);
}

/*
 * What the child has found until an answer is late counts. A child that the kernel does not end yet stays, and does
 * nothing more; it ends with the mount. False: errno says why.
 */
static bool look_in_time(struct ht_doctor *d, const char *path)
{
    int ends[2], rc;

    if (pipe(ends) != 0)
        return false;
    pid_t child = fork();
    if (child == 0)
        in_child(d, path, ends[1]);
    int err = errno;
    close(ends[1]);
    rc = child < 0 ? -1 : follow(ends[0]);
    close(ends[0]);
    if (child > 0) {
        kill(child, SIGKILL);
        end_of(child, rc != 0);
        err = EIO;
    }
    if (rc == 0)
        not_in_time(d, path);
    errno = err;
    return rc >= 0;
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
    ht_json_str(&j, "level", level_words[ht_doctor_worst(d, 0)]);
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
    /* The child tells in it what it finds. */
    struct ht_doctor *d = mmap(NULL, sizeof(*d), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (d != MAP_FAILED) {
        d->root = "";
        ht_doctor_machine(d);
    }
    if (d == MAP_FAILED || (path && !look_in_time(d, path)))
        return ht_fail(HT_CMD_FAILED, "cannot finish: %s", strerror(errno));
    if (!d->mount)
        ht_doctor_cgroup(d, 0, 0);
    if (o->json)
        put_json(d, path);
    else
        put_for_people(d);
    enum ht_doctor_level worst = ht_doctor_worst(d, 0);
    (void)munmap(d, sizeof(*d));
    return worst == HT_DOCTOR_ERROR ? EXIT_ERROR : worst == HT_DOCTOR_WARN ? EXIT_WARN : HT_CMD_OK;
}
