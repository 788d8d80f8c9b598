/* SPDX-License-Identifier: Apache-2.0 */
/*
 * umount.hitrain - umount(8) runs it for a mount of hitrain: it unmounts, and returns when the daemon has ended.
 *
 * For the kernel a FUSE mount has gone when no process can reach it any more. The daemon writes the rest after that and
 * then gives up its device. The next user of the device wants to wait for that end, and this program does so. It finds
 * the process through the held device, before the unmount; it never asks the file system itself, which may be dead.
 *
 * It does not wait after a lazy or forced unmount, nor if another mount of the same store remains.
 */
#include <getopt.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mount-helpers/common/text.h"
#include "tiering/base/log.h"
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"

/* Exit codes of umount(8). */
enum { EXIT_USAGE = 1, EXIT_SYSTEM = 2 };
enum { PATIENCE_MS = 3000, REPORT_MS = 10000, FLAGS_MAX = 8 };

static const char hint[] = "umount.hitrain -h";
static const char usage_text[] = "Usage: umount.hitrain MOUNTPOINT [-flnrvhV] [-N NAMESPACE] [-t TYPE]\n"
                                 "\n"
                                 "Unmounts a hitrain store and waits for the end of its daemon; run by umount(8).\n"
                                 "\n"
                                 "  -f, -l        as in umount(8): forced, lazy; nothing is waited for\n"
                                 "  -N NAMESPACE  unmount in this mount namespace; nothing is waited for\n"
                                 "  -n, -r, -v    as in umount(8)\n"
                                 "  -t TYPE       accepted, without effect\n"
                                 "  -h, --help    print this text\n"
                                 "  -V, --version print the version\n";

struct request {
    const char *point, *namespace;
    char flags[FLAGS_MAX]; /* letters for umount(8), each once, behind a '-' */
    bool waits;
};

/* The daemon that is to end. */
struct daemon {
    struct ht_mount_entry mount;
    pid_t pid;
    int fd; /* of the process; -1: not known */
};

/* ------------------------------------------------------------------- before */

/* umount(8) gives the path as in the table of mounts; people may give another form. */
static bool find_mount(const char *point, struct ht_mount_entry *out)
{
    char path[PATH_MAX];

    if (ht_mount_at(point, out) != 0 && (!realpath(point, path) || ht_mount_at(path, out) != 0))
        return false;
    return ht_mount_is_hitrain(out);
}

static void find_daemon(const char *point, struct daemon *d)
{
    struct ht_holder h;

    if (find_mount(point, &d->mount) && ht_holder_find(d->mount.source, &h) == 0 && h.pid > 0 && !h.opener) {
        d->pid = h.pid;
        d->fd = (int)syscall(SYS_pidfd_open, h.pid, 0);
    }
}

/* ------------------------------------------------------------------ unmount */

/* Runs umount(8) itself, with the option not to call this program: it knows which users may unmount what. */
static int unmount(const struct request *r)
{
    const char *argv[8] = {"umount", r->flags};
    unsigned n = 2;
    int status;

    if (r->namespace) {
        argv[n++] = "-N";
        argv[n++] = r->namespace;
    }
    argv[n++] = "--";
    argv[n++] = r->point;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        execv("/bin/umount", (char *const *)argv);
        execvp(argv[0], (char *const *)argv);
        ht_error("cannot run umount: %s", strerror(errno));
        _exit(EXIT_SYSTEM);
    }
    if (child < 0)
        return ht_fail(EXIT_SYSTEM, "cannot run umount: %s", strerror(errno));
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return EXIT_SYSTEM;
    return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_SYSTEM;
}

/* -------------------------------------------------------------------- after */

static bool has_ended(const struct daemon *d, int ms)
{
    struct pollfd p = {.fd = d->fd, .events = POLLIN};
    int n;

    while ((n = poll(&p, 1, ms)) < 0 && errno == EINTR)
        ;
    return n != 0;
}

/* A process keeps it: then there is no end to wait for. */
static bool is_kept(const struct daemon *d)
{
    struct ht_mount_user user;

    if (ht_mount_user_find(d->mount.major, d->mount.minor, d->mount.source, &user) != 0)
        return false;
    ht_warn("%s is unmounted here, but process %d (%s) %s: process %d and the device stay until that ends",
            d->mount.point, (int)user.pid, user.command,
            user.has_mount ? "has it in its mount namespace" : "uses its files", (int)d->pid);
    return true;
}

static void wait_for_end(const struct daemon *d)
{
    unsigned waited_s = 0;

    if (d->fd < 0 || ht_mount_is_here(d->mount.major, d->mount.minor, d->mount.source) || has_ended(d, PATIENCE_MS) ||
        is_kept(d))
        return;
    while (!has_ended(d, REPORT_MS)) {
        waited_s += REPORT_MS / 1000;
        ht_info("%s is unmounted; waiting for process %d, which writes the rest to %s, for %u s", d->mount.point,
                (int)d->pid, d->mount.source, waited_s);
    }
}

/* ------------------------------------------------------------- command line */

/* -1: go on; else the exit status. */
static int parse_options(int argc, char **argv, struct request *r)
{
    int c;

    while ((c = getopt_long(argc, argv, "flnrvhVN:t:", ht_help_and_version, NULL)) != -1) {
        switch (c) {
        case 'f':
        case 'l':
        case 'n':
        case 'r':
        case 'v':
            r->waits &= c != 'f' && c != 'l';
            if (!strchr(r->flags, c))
                r->flags[strlen(r->flags)] = (char)c;
            break;
        case 'N':
            r->waits = false;
            r->namespace = optarg;
            break;
        case 't':
            break;
        default:
            return ht_option_status(c, "umount.hitrain", hint, usage_text, EXIT_USAGE);
        }
    }
    if (argc - optind != 1)
        return ht_usage_error(hint, EXIT_USAGE, "expected a mount point");
    r->point = argv[optind];
    return -1;
}

int main(int argc, char **argv)
{
    struct request r = {.flags = "-i", .waits = true};
    struct daemon d = {.fd = -1};

    ht_stdio_fds_open();
    int status = parse_options(argc, argv, &r);
    if (status >= 0)
        return status;
    if (r.waits)
        find_daemon(r.point, &d);
    status = unmount(&r);
    if (status == EXIT_SUCCESS)
        wait_for_end(&d);
    return status;
}
