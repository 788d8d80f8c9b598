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

#include "mount-helpers/common/json.h"
#include "mount-helpers/common/text.h"
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

static enum ht_log_level level_of(const struct ht_ctl_line *l)
{
    for (enum ht_log_level level = HT_LOG_ERROR; level < HT_LOG_DEBUG; level++)
        if (strcmp(ht_log_level_word(level), ht_ctl_value(l, "level")) == 0)
            return level;
    return HT_LOG_DEBUG;
}

/* In place. */
static void unescape(char *text)
{
    char *to = text;

    for (const char *p = text; *p != '\0';) {
        if (p[0] == '\\' && p[1] >= '0' && p[1] <= '3' && p[2] >= '0' && p[2] <= '7' && p[3] >= '0' && p[3] <= '7') {
            *to++ = (char)((p[1] - '0') * 64 + (p[2] - '0') * 8 + (p[3] - '0'));
            p += 4;
        } else {
            *to++ = *p++;
        }
    }
    *to = '\0';
}

/* ------------------------------------------------------------------- output */

static void put_json(struct ht_ctl_line *l)
{
    static const char *const texts[] = {"level", "code", "path", "device", "error", "text"};
    struct ht_json j;

    ht_json_init_lines(&j, stdout);
    ht_json_object(&j, NULL);
    for (unsigned i = 0; i < l->count; i++) {
        struct ht_ctl_field *f = &l->field[i];
        bool text = false;

        for (size_t k = 0; k < HT_ARRAY_SIZE(texts); k++)
            text |= strcmp(f->key, texts[k]) == 0;
        unescape(f->value);
        if (text)
            ht_json_str(&j, f->key, f->value);
        else
            ht_json_word(&j, f->key, f->value);
    }
    ht_json_end(&j);
}

static void put_time(uint64_t ns)
{
    time_t seconds = (time_t)(ns / 1000000000);
    char text[32];
    struct tm tm;

    if (localtime_r(&seconds, &tm) == NULL || strftime(text, sizeof(text), "%F %T", &tm) == 0)
        text[0] = '\0';
    printf("%s.%03u", text, (unsigned)(ns / 1000000 % 1000));
}

/* Padded to width and with a blank after it. */
static void put_column(const char *text, int width)
{
    ht_put_printable(text, stdout);
    printf("%*s ", width > (int)strlen(text) ? width - (int)strlen(text) : 0, "");
}

/* hitrain escapes its texts, but the mount may be anybody's who calls it hitrain. */
static void put_for_people(const struct reader *r, const struct ht_ctl_line *l)
{
    static const char *const colour[] = {"\033[31m", "\033[33m", "", ""};
    enum ht_log_level level = level_of(l);
    const char *path = ht_ctl_value(l, "path");
    uint64_t count = ht_ctl_number(l, "count");

    printf("%6llu  ", (unsigned long long)ht_ctl_number(l, "seq"));
    put_time(ht_ctl_number(l, "time_ns"));
    printf("  %s", r->colours ? colour[level] : "");
    put_column(ht_ctl_value(l, "level"), 6);
    put_column(ht_ctl_value(l, "code"), 17);
    if (r->colours && colour[level][0] != '\0')
        fputs("\033[0m", stdout);
    if (path[0] != '\0') {
        putchar('/');
        ht_put_printable(path, stdout);
        fputs(": ", stdout);
    }
    ht_put_printable(ht_ctl_value(l, "text"), stdout);
    if (count > 1)
        printf(" (and %llu more%s)", (unsigned long long)count - 1,
               ht_ctl_value(l, "various")[0] != '\0' ? ", of various files or devices" : "");
    putchar('\n');
}

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
    if (level_of(&l) > r->o->level)
        return;
    if (r->o->json)
        put_json(&l);
    else
        put_for_people(r, &l);
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
