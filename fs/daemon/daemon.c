/* SPDX-License-Identifier: Apache-2.0 */
/* daemon.c - owns the pipe between the command and the daemon. */
#include "fs/daemon/daemon_priv.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tiering/base/log.h"
#include "tiering/sys/stdio_fds.h"

static int ready_fd = -1;
static pid_t waited_for;

/* The mount was not reported yet, so a signal that ends the command ends the daemon, too; the store survives that. */
static void end_child(int sig)
{
    kill(waited_for, SIGKILL);
    _exit(128 + sig);
}

static int exit_status(pid_t child)
{
    int status;

    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return EXIT_FAILURE;
    if (WIFSIGNALED(status))
        ht_error("the daemon was ended by signal %d before the mount was ready", WTERMSIG(status));
    else if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS)
        ht_error("the mount was gone again before it was ready");
    return WIFEXITED(status) && WEXITSTATUS(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}

static void wait_in_parent(int fd, pid_t child)
{
    char byte;
    ssize_t n;

    waited_for = child;
    signal(SIGINT, end_child);
    signal(SIGTERM, end_child);
    signal(SIGHUP, end_child);
    do
        n = read(fd, &byte, 1);
    while (n < 0 && errno == EINTR);
    _exit(n == 1 ? EXIT_SUCCESS : exit_status(child));
}

/* A daemon needs none of the starter's descriptors: they would keep files, locks and pipes of other programs alive. */
static int keep_only(int fd)
{
    int kept = STDERR_FILENO + 1;

    if (fd != kept && dup3(fd, kept, O_CLOEXEC) != kept)
        return fd;
    (void)close_range((unsigned)kept + 1, ~0u, 0);
    return kept;
}

int ht_daemon_fork(void)
{
    int fds[2];

    if (pipe2(fds, O_CLOEXEC))
        return -errno;
    pid_t child = fork();
    if (child < 0) {
        int rc = -errno;
        close(fds[0]);
        close(fds[1]);
        return rc;
    }
    if (child) {
        close(fds[1]);
        wait_in_parent(fds[0], child);
    }
    ready_fd = keep_only(fds[1]);
    umask(S_IRWXG | S_IRWXO);
    setsid();
    return 0;
}

void ht_daemon_detach(void)
{
    if (ready_fd < 0)
        return;
    ht_log_to_syslog("hitrain");
    if (chdir("/"))
        ht_warn("cannot change to /: %s", strerror(errno));
    ht_stdio_fds_detach();
}

void ht_daemon_ready(void)
{
    if (ready_fd < 0)
        return;
    (void)!write(ready_fd, "", 1); /* the command may be gone: then no process reads this */
    close(ready_fd);
    ready_fd = -1;
}
