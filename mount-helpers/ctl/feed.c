/* SPDX-License-Identifier: Apache-2.0 */
/*
 * feed.c - prints the lines of .hitrain/events and .hitrain/trace, for people or as JSON.
 *
 * The lines are JSON already. They are parsed all the same: commands select, and the mount may belong to another
 * program that calls itself hitrain. With --follow the command reads again every so often and keeps nothing open in
 * between, so that it never blocks umount.
 */
#include "mount-helpers/ctl/feed.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "mount-helpers/ctl/event_line.h"
#include <hitrain/words.h>

enum { FOLLOW_MS = 250, READ_BYTES = 1 << 16 };

struct reader {
    const struct ht_feed_kind *kind;
    const struct ht_cmd_options *o;
    char point[PATH_MAX];
    dev_t dev;               /* another one is another mount, which counts from 1 */
    uint64_t after, entries; /* number of the last, and how many there were */
    bool colours;
    char text[READ_BYTES]; /* begins with an unfinished line */
    size_t len;
};

/* -------------------------------------------------------------------- lines */

static int put_line(struct reader *r, char *text)
{
    struct ht_cmd_line l;
    uint64_t seq;
    int rc = ht_cmd_parse_json(text, &l);

    seq = rc ? 0 : ht_cmd_number(&l, "seq");
    if (seq == 0)
        return -EPROTO;
    if (seq > r->after + 1 && (r->after > 0 || r->o->follow))
        ht_warn("%llu %s before number %llu have made room for newer ones", (unsigned long long)(seq - r->after - 1),
                r->kind->entries, (unsigned long long)seq);
    r->after = seq;
    r->entries++;
    if (!r->kind->selects(&l, r->o))
        return 0;
    if (r->o->json)
        ht_event_line_put_json(&l);
    else
        r->kind->put(&l, r->colours);
    return 0;
}

/* Prints whole lines; the rest begins the buffer. */
static int put_lines(struct reader *r)
{
    char *at = r->text, *end;
    int rc = 0;

    while (rc == 0 && (end = memchr(at, '\n', r->len - (size_t)(at - r->text)))) {
        *end = '\0';
        rc = put_line(r, at);
        at = end + 1;
    }
    r->len -= (size_t)(at - r->text);
    memmove(r->text, at, r->len);
    return r->len == sizeof(r->text) ? -EPROTO : rc; /* no line is so long */
}

/* ------------------------------------------------------------------ reading */

/* New entries may come faster than the old ones are printed. */
static bool is_enough(const struct reader *r)
{
    return !r->o->follow && r->kind->most && r->entries >= r->kind->most;
}

/* Reads all present entries after the last shown one. */
static int read_now(struct reader *r)
{
    char path[PATH_MAX + 32];
    struct stat st;
    ssize_t n;
    int fd, rc;

    snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/%s", r->point, r->kind->file);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) == 0 && st.st_dev != r->dev) {
        r->after = r->dev != 0 ? 0 : r->after;
        r->dev = st.st_dev;
    }
    r->len = 0;
    do {
        n = pread(fd, r->text + r->len, sizeof(r->text) - r->len, (off_t)r->after);
        r->len += n > 0 ? (size_t)n : 0;
        rc = n < 0 ? -errno : put_lines(r);
    } while (n > 0 && rc == 0 && !is_enough(r));
    close(fd);
    return rc == 0 && fflush(stdout) != 0 ? -EPIPE : rc;
}

static int report(const struct reader *r, int err)
{
    const char *file = r->kind->file;

    if (err == -EACCES || err == -EPERM)
        ht_error("%s: only root and the owner of the mount's root may read " HT_CTL_DIR "/%s", r->point, file);
    else if (err == -ENOENT)
        ht_error("%s: there is no " HT_CTL_DIR "/%s: is it the root of the store that is mounted there?", r->point,
                 file);
    else if (err == -EPROTO)
        ht_error("%s: " HT_CTL_DIR "/%s has no JSON Lines: its daemon is of another version", r->point, file);
    else
        (void)ht_cmd_explain(r->point, err);
    return HT_CMD_FAILED;
}

static int follow(struct reader *r)
{
    const struct timespec pause = {0, FOLLOW_MS * 1000000L};
    int rc;

    do {
        nanosleep(&pause, NULL);
        rc = read_now(r);
    } while (rc == 0);
    if (rc != -ENOENT && rc != -ENOTDIR)
        return report(r, rc);
    ht_info("%s is not mounted any more", r->point);
    return HT_CMD_OK;
}

static bool colours(void)
{
    const char *term = getenv("TERM"), *never = getenv("NO_COLOR");

    return isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0 && (!never || never[0] == '\0');
}

int ht_feed_print(const struct ht_feed_kind *kind, const char *path, const struct ht_cmd_options *o)
{
    struct reader *r = calloc(1, sizeof(*r));
    int rc, status;

    if (!r) {
        ht_error("%s: %s", path, strerror(ENOMEM));
        return HT_CMD_FAILED;
    }
    r->kind = kind;
    r->o = o;
    r->after = o->since;
    r->colours = colours();
    if (ht_cmd_mount_point(path, r->point) < 0) {
        free(r);
        return HT_CMD_FAILED;
    }
    if (kind->head && !o->json)
        puts(kind->head);
    rc = read_now(r);
    status = rc < 0 ? report(r, rc) : o->follow ? follow(r) : HT_CMD_OK;
    free(r);
    return status;
}
