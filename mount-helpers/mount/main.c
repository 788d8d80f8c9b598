/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mount.hitrain - mount(8) runs it for `mount -t hitrain DEV MOUNTPOINT`, for fstab and for systemd.
 *
 * Translates the options and becomes the daemon's starter: `hitrain` returns when the mount is ready, or with the
 * reason why not, and its exit status is this program's.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <sched.h>
#include <unistd.h>

#include "tiering/base/buf.h"
#include "tiering/base/log.h"
#include "mount-helpers/common/text.h"
#include "mount-helpers/mount/options.h"

/* Exit codes of mount(8). */
enum { EXIT_USAGE = 1, EXIT_SYSTEM = 2 };

#define DAEMON "hitrain"

static const char hint[] = "mount.hitrain -h";
static const char usage_text[] =
    "Usage: mount.hitrain DEVICE MOUNTPOINT [-fnsvhV] [-o OPTIONS] [-N NAMESPACE] [-t TYPE]\n"
    "\n"
    "Mounts a hitrain store; run by mount(8) for `mount -t hitrain DEVICE MOUNTPOINT`.\n"
    "\n"
    "  -o OPTIONS    options, separated by commas: those of hitrain(8), of libfuse and of fstab(5)\n"
    "  -N NAMESPACE  mount in this mount namespace (a process id, or a file such as /proc/1/ns/mnt)\n"
    "  -f            do everything but mount\n"
    "  -v            print the command that mounts\n"
    "  -n, -s, -t    accepted, without effect: there is no mtab, and options are never ignored\n"
    "  -h, --help    print this text\n"
    "  -V, --version print the version\n";

struct request {
    const char *device, *point, *namespace;
    struct ht_buf options; /* ends with a NUL; empty: none */
    int options_rc;        /* of ht_mount_options: the first error */
    bool fake, verbose;
};

/* ---------------------------------------------------------- find the daemon */

static bool try_folder(const char *folder, size_t len, char out[PATH_MAX])
{
    int n = snprintf(out, PATH_MAX, "%.*s/" DAEMON, (int)len, folder);

    return n > 0 && n < PATH_MAX && access(out, X_OK) == 0;
}

/* Beside this program, or in the bin folder beside its sbin. */
static bool try_beside(char out[PATH_MAX])
{
    char self[PATH_MAX], sibling[PATH_MAX + 8];

    if (!ht_own_folder(0, self))
        return false;
    if (try_folder(self, strlen(self), out))
        return true;
    snprintf(sibling, sizeof(sibling), "%s/../bin", self);
    return try_folder(sibling, strlen(sibling), out);
}

static bool try_path(const char *path, char out[PATH_MAX])
{
    while (path && *path != '\0') {
        size_t len = strcspn(path, ":");
        if (len > 0 && path[0] == '/' && try_folder(path, len, out))
            return true;
        path += len;
        path += *path == ':';
    }
    return false;
}

static bool find_daemon(char out[PATH_MAX])
{
#ifdef HT_BINDIR
    if (try_folder(HT_BINDIR, strlen(HT_BINDIR), out))
        return true;
#endif
    return try_beside(out) || try_path(getenv("PATH"), out) ||
        try_path("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", out);
}

/* -------------------------------------------------------------------- mount */

static int enter_namespace(const char *namespace)
{
    char path[PATH_MAX];
    bool is_pid = namespace[0] != '\0' && namespace[strspn(namespace, "0123456789")] == '\0';

    snprintf(path, sizeof(path), is_pid ? "/proc/%s/ns/mnt" : "%s", namespace);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    int rc = fd < 0 || setns(fd, CLONE_NEWNS) != 0 ? -errno : 0;
    if (rc < 0)
        ht_error("cannot enter the mount namespace %s: %s", path, strerror(-rc));
    if (fd >= 0)
        close(fd);
    return rc;
}

static int run_daemon(const struct request *r)
{
    char path[PATH_MAX];
    const char *options = r->options.len > 0 ? (const char *)r->options.data : NULL;
    const char *argv[] = {DAEMON, r->device, r->point, options ? "-o" : NULL, options, NULL};

    if (!find_daemon(path))
        return ht_fail(EXIT_SYSTEM,
                       "cannot find the program '" DAEMON "': it is neither beside this one nor in PATH; "
                       "is hitrain installed completely?");
    if (r->verbose)
        printf("%s %s %s%s%s\n", path, r->device, r->point, options ? " -o " : "", options ? options : "");
    if (r->fake)
        return EXIT_SUCCESS;
    fflush(NULL);
    if (r->namespace && enter_namespace(r->namespace) != 0)
        return EXIT_SYSTEM;
    execv(path, (char *const *)argv);
    return ht_fail(EXIT_SYSTEM, "cannot run %s: %s", path, strerror(errno));
}

/* ------------------------------------------------------------- command line */

/* -1: go on; else the exit status. */
static int parse_options(int argc, char **argv, struct request *r)
{
    int c;

    while ((c = getopt_long(argc, argv, "fnsvhVo:N:t:", ht_help_and_version, NULL)) != -1) {
        switch (c) {
        case 'o':
            r->options_rc = r->options_rc < 0 ? r->options_rc : ht_mount_options(optarg, &r->options);
            break;
        case 'N':
            r->namespace = optarg;
            break;
        case 'f':
            r->fake = true;
            break;
        case 'v':
            r->verbose = true;
            break;
        case 'n':
        case 's':
        case 't':
            break;
        default:
            return ht_option_status(c, "mount.hitrain", hint, usage_text, EXIT_USAGE);
        }
    }
    if (argc - optind != 2)
        return ht_usage_error(hint, EXIT_USAGE, "expected a device and a mount point");
    r->device = argv[optind];
    r->point = argv[optind + 1];
    if (r->options_rc == -ENOTSUP)
        return ht_fail(EXIT_USAGE, "%s: option 'loop' is not possible: hitrain opens regular files itself", r->point);
    return r->options_rc < 0 ? ht_fail(EXIT_SYSTEM, "%s", strerror(-r->options_rc)) : -1;
}

int main(int argc, char **argv)
{
    struct request r = {.options = HT_BUF_INIT};

    ht_stdio_fds_open();
    int status = parse_options(argc, argv, &r);
    if (status < 0)
        status = run_daemon(&r);
    ht_buf_free(&r.options);
    return status;
}
