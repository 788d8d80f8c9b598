/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dump.c - `hitrainctl dump`: what a mount that answers nothing is doing. Sends it no request: the table of mounts says
 * which socket its daemon listens to. Any user may take that name first: only root's programs and those of the user of
 * the mount are believed.
 */
#include "mount-helpers/ctl/ctl.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "tiering/base/buf.h"
#include "tiering/sys/mounts.h"
#include <hitrain/words.h>

enum {
    ANSWER_S = 60, /* for the whole text: the daemon gives up a lock after half a second; there are few */
    TEXT_BYTES_MAX = 64 << 20,
    TRIES = 30, /* a tenth of a second apart: each second a daemon tries to take a name that an earlier one held */
};

/* The absolute path of a mount point. Makes no call to the mounted file system. */
static int absolute(const char *path, char out[PATH_MAX])
{
    char copy[PATH_MAX], parent[PATH_MAX];
    size_t len = strlen(path);

    while (len > 1 && path[len - 1] == '/')
        len--;
    if (len >= sizeof(copy))
        return -ENAMETOOLONG;
    memcpy(copy, path, len);
    copy[len] = '\0';
    char *slash = strrchr(copy, '/');
    const char *name = slash ? slash + 1 : copy;
    if (slash)
        *slash = '\0';
    if (!realpath(!slash ? "." : slash == copy ? "/" : copy, parent))
        return -errno;
    int n = snprintf(out, PATH_MAX, "%s/%s", strcmp(parent, "/") == 0 ? "" : parent, name);
    return n < PATH_MAX ? 0 : -ENAMETOOLONG;
}

static int find_mount(const char *path, struct ht_mount_entry *out)
{
    char point[PATH_MAX];
    int rc = ht_mount_at(path, out);

    if (rc != -ENOENT)
        return rc;
    rc = absolute(path, point);
    return rc ? rc : ht_mount_at(point, out);
}

static bool is_of_daemon(int fd, const struct ht_mount_entry *m)
{
    struct ucred peer;
    socklen_t len = sizeof(peer);
    unsigned long user;

    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0 &&
        (peer.uid == 0 || (ht_mount_user(m, &user) && peer.uid == user));
}

/* A descriptor, or -errno; -EPERM: another user's program answers. */
static int connect_to(const struct ht_mount_entry *m)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const struct timeval patience = {.tv_sec = ANSWER_S};
    int n = snprintf(address.sun_path + 1, sizeof(address.sun_path) - 1, HT_DUMP_SOCKET, m->major, m->minor);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0)
        return -errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    int rc = connect(fd, (const struct sockaddr *)&address, len) == 0 ? fd : -errno;
    if (rc == fd && !is_of_daemon(fd, m))
        rc = -EPERM;
    if (rc < 0)
        close(fd);
    return rc;
}

/* Bytes that are there by then: 0 at the end, or -errno. */
static ssize_t read_part(int fd, uint64_t end_ns, char *part, size_t cap)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    uint64_t now = ht_now_ns();
    int n = now < end_ns ? poll(&p, 1, (int)((end_ns - now) / 1000000 + 1)) : 0;

    if (n == 0)
        return -ETIMEDOUT;
    ssize_t got = n < 0 ? -1 : recv(fd, part, cap, 0);
    return got < 0 ? -errno : got;
}

/* 0 or -errno; *text is all that came. */
static int read_text(int fd, struct ht_buf *text)
{
    uint64_t end_ns = ht_now_ns() + ANSWER_S * UINT64_C(1000000000);
    char part[16384];
    ssize_t n;

    while ((n = read_part(fd, end_ns, part, sizeof(part))) > 0) {
        ht_buf_put(text, part, (size_t)n);
        if (text->err || text->len > TEXT_BYTES_MAX)
            return text->err ? text->err : -EFBIG;
    }
    return (int)n;
}

/* Names of files may hold anything; a terminal gets printable characters. True: the text is whole. */
static bool print_text(struct ht_buf *text)
{
    bool whole = false;
    char *line, *rest;

    ht_buf_put_u8(text, 0);
    if (text->err)
        return false;
    for (rest = (char *)text->data; (line = strsep(&rest, "\n")) && (rest || *line);) {
        ht_put_printable(line, stdout);
        putchar('\n');
        whole = rest && strcmp(line, HT_DUMP_END) == 0;
    }
    return whole;
}

static int explain_silence(const struct ht_mount_entry *m, int error)
{
    return ht_fail(HT_CMD_FAILED, "%s: %s", m->point,
                   error == -ECONNREFUSED ? "no daemon answers for this mount: it has ended, it is older than this "
                                            "program, or it is in another network namespace"
                       : error == -EPERM  ? "another user's program has taken the name of its socket"
                       : error            ? strerror(-error)
                                          : "the daemon said nothing");
}

static int show_dump(const struct ht_mount_entry *m, int fd)
{
    struct ht_buf text = HT_BUF_INIT;
    int rc = read_text(fd, &text);

    if (!text.len)
        return explain_silence(m, rc);
    bool whole = print_text(&text);
    ht_buf_free(&text);
    if (rc || !whole)
        return ht_fail(HT_CMD_FAILED, "%s: the dump is cut%s%s", m->point, rc ? ": " : "", rc ? strerror(-rc) : "");
    return HT_CMD_OK;
}

int ht_cmd_dump(const char *path, const struct ht_cmd_options *o)
{
    static struct ht_mount_entry m;
    int fd, rc = find_mount(path, &m);

    if (rc == 0 && !ht_mount_is_hitrain(&m))
        rc = -ENOENT;
    if (rc)
        return ht_fail(HT_CMD_FAILED, "%s: %s", path,
                       rc == -ENOENT ? "not where a hitrain store is mounted" : strerror(-rc));
    if (geteuid() != 0)
        return ht_fail(HT_CMD_FAILED, "%s: only root may see what the daemon is doing", m.point);
    for (int i = 0; (fd = connect_to(&m)) == -ECONNREFUSED && i < TRIES; i++)
        usleep(100000);
    if (fd < 0)
        return explain_silence(&m, fd);
    rc = show_dump(&m, fd);
    close(fd);
    return rc;
}
