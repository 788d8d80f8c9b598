/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events.c - `hitrainctl events`: the lines of .hitrain/events for people or as JSON.
 *
 * A line is key=value, separated by tabs, with control characters and backslashes as \ooo (fs/ctl/events.h). Following asks again
 * every so often and keeps nothing open in between, so that it is never in the way of umount.
 */
#include "mount-helpers/ctl/ctl.h"

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
    const struct ht_ctl_options *o;
    char point[PATH_MAX];
    dev_t dev; /* another one is another mount, which counts from 1 */
    uint64_t after;
    bool colours;
    char text[READ_BYTES]; /* begins with an unfinished line */
    size_t len;
};

/* -------------------------------------------------------------------- lines */

static void put_line(struct reader *r, char *text)
{
    struct ht_ctl_line l;
    uint64_t seq;

    ht_ctl_parse_line(text, &l);
    seq = ht_ctl_number(&l, "seq");
    if (seq == 0)
        return;
    if (seq > r->after + 1 && (r->after > 0 || r->o->follow))
        ht_warn("%llu events before number %llu have made room for newer ones",
                (unsigned long long)(seq - r->after - 1), (unsigned long long)seq);
    r->after = seq;
    if (ht_event_line_level(&l) > r->o->level)
        return;
    if (r->o->json)
        ht_event_line_put_json(&l);
    else
        ht_event_line_put(&l, r->colours);
}

/* Whole lines; what is left begins the buffer. */
static void put_lines(struct reader *r)
{
    char *at = r->text, *end;

    while ((end = memchr(at, '\n', r->len - (size_t)(at - r->text))) != NULL) {
        *end = '\0';
        put_line(r, at);
        at = end + 1;
    }
    r->len -= (size_t)(at - r->text);
    memmove(r->text, at, r->len);
    if (r->len == sizeof(r->text)) /* no line is so long */
        r->len = 0;
}

/* ------------------------------------------------------------------ reading */

/* What there is now, after the last one shown. */
static int read_now(struct reader *r)
{
    char path[PATH_MAX + 32];
    struct stat st;
    ssize_t n;
    int fd, ret = 0;

    snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/events", r->point);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) == 0 && st.st_dev != r->dev) {
        r->after = r->dev != 0 ? 0 : r->after;
        r->dev = st.st_dev;
    }
    r->len = 0;
    while ((n = pread(fd, r->text + r->len, sizeof(r->text) - r->len, (off_t)r->after)) > 0) {
        r->len += (size_t)n;
        put_lines(r);
    }
    if (n < 0)
        ret = -errno;
    close(fd);
    return ret == 0 && fflush(stdout) != 0 ? -EPIPE : ret;
}

static int tell(const struct reader *r, int err)
{
    if (err == -EACCES || err == -EPERM)
        ht_error("%s: only root and the owner of the mount's root may read its events", r->point);
    else if (err == -ENOENT)
        ht_error("%s: there is no " HT_CTL_DIR "/events: is it the root of the store that is mounted there?", r->point);
    else
        (void)ht_ctl_explain(r->point, err);
    return HT_CTL_FAILED;
}

static int follow(struct reader *r)
{
    const struct timespec pause = {0, FOLLOW_MS * 1000000L};
    int err;

    do {
        nanosleep(&pause, NULL);
        err = read_now(r);
    } while (err == 0);
    if (err != -ENOENT && err != -ENOTDIR)
        return tell(r, err);
    ht_info("%s is not mounted any more", r->point);
    return HT_CTL_OK;
}

static bool colours(void)
{
    const char *term = getenv("TERM"), *never = getenv("NO_COLOR");

    return isatty(STDOUT_FILENO) && term != NULL && strcmp(term, "dumb") != 0 && (never == NULL || never[0] == '\0');
}

int ht_ctl_events(const char *path, const struct ht_ctl_options *o)
{
    struct reader *r = calloc(1, sizeof(*r));
    int err, status;

    if (r == NULL) {
        ht_error("%s: %s", path, strerror(ENOMEM));
        return HT_CTL_FAILED;
    }
    r->o = o;
    r->after = o->since;
    r->colours = colours();
    if (ht_ctl_mount_point(path, r->point) < 0) {
        free(r);
        return HT_CTL_FAILED;
    }
    err = read_now(r);
    status = err < 0 ? tell(r, err) : o->follow ? follow(r) : HT_CTL_OK;
    free(r);
    return status;
}
