/* SPDX-License-Identifier: Apache-2.0 */
/* command.c - one line for the daemon, through .hitrain/ctl of the mount's root. */
#include "mount-helpers/ctl/ctl.h"

#include <fcntl.h>
#include <unistd.h>

#include <hitrain/words.h>

static int write_line(int fd, const char *line)
{
    char text[PATH_MAX + 64];
    int n = snprintf(text, sizeof(text), "%s\n", line);

    if (n < 0 || (size_t)n >= sizeof(text))
        return -E2BIG;
    return write(fd, text, (size_t)n) < 0 ? -errno : 0;
}

static int hand_line(int fd, const char *line)
{
    struct ht_ioctl_line l = {{0}};

    if (strlen(line) >= sizeof(l.text))
        return -E2BIG;
    memcpy(l.text, line, strlen(line));
    return ioctl(fd, HT_IOCTL_COMMAND, &l) < 0 ? -errno : 0;
}

/* 0, or -errno with the daemon's reason, if it gave one, in answer. */
static int run_line(const char *control, const char *line, char *answer, size_t cap)
{
    int fd = open(control, O_RDWR | O_CLOEXEC), rc;
    bool writable = fd >= 0;

    if (fd < 0 && errno == EROFS)
        fd = open(control, O_RDONLY | O_CLOEXEC);
    answer[0] = '\0';
    if (fd < 0)
        return -errno;
    rc = writable ? write_line(fd, line) : hand_line(fd, line);
    ssize_t n = rc < 0 ? read(fd, answer, cap - 1) : 0;
    answer[n > 0 ? n : 0] = '\0';
    answer[strcspn(answer, "\n")] = '\0';
    close(fd);
    return rc;
}

int ht_cmd_command(const char *path, const char *point, const char *line)
{
    char control[PATH_MAX + 32], answer[512];

    snprintf(control, sizeof(control), "%s/" HT_CTL_DIR "/ctl", point);
    int rc = run_line(control, line, answer, sizeof(answer));
    if (rc < 0 && answer[0] != '\0')
        ht_error("%s: %s", path, answer);
    else if (rc < 0)
        ht_error("%s: %s", control, strerror(-rc));
    return rc;
}
