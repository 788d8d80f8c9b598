/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mount.c - how commands talk with a mount: attributes, hidden files and lines for the daemon;
 * and what its answers say.
 *
 * The mount may belong to another program that calls itself hitrain, so a line may hold anything.
 */
#include "mount-helpers/ctl/ctl.h"

#include <fcntl.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "tiering/base/buf.h"
#include "tiering/sys/mounts.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

enum {
    TRIES = 4,                 /* the value may grow between asking for its size and for itself */
    TEXT_BYTES_MAX = 16 << 20, /* of a hidden file */
};

int ht_cmd_explain(const char *path, int err)
{
    return ht_fail(err, "%s: %s", path,
                   err == -ENOTCONN ? "the daemon of this mount is gone; unmount it and mount it again"
                                    : strerror(-err));
}

int ht_cmd_mount_point(const char *path, char out[PATH_MAX])
{
    struct ht_mount_entry m;
    int rc = ht_mount_of_path(path, &m);

    if (rc < 0)
        return ht_cmd_explain(path, rc);
    if (!ht_mount_is_hitrain(&m))
        return ht_fail(-ENOTSUP, "%s is not on a hitrain mount: it is on %s (%s); name a folder of a mounted store",
                       path, m.point, m.type);
    memcpy(out, m.point, sizeof(m.point));
    return 0;
}

static ssize_t get(const char *path, const char *name, char **out_text)
{
    for (unsigned i = 0; i < TRIES; i++) {
        ssize_t n = getxattr(path, name, NULL, 0);
        if (n < 0)
            return -errno;
        if (n > (ssize_t)HT_XATTR_VALUE_BYTES_MAX)
            return -E2BIG;
        n += n / 2 + 64; /* counters grow */
        char *text = malloc((size_t)n + 1);
        if (!text)
            return -ENOMEM;
        n = getxattr(path, name, text, (size_t)n);
        if (n >= 0) {
            text[n] = '\0';
            *out_text = text;
            return n;
        }
        free(text);
        if (errno != ERANGE)
            return -errno;
    }
    return -ERANGE;
}

int ht_cmd_attribute(const char *path, const char *word, bool quiet, char **out_text)
{
    char name[HT_XATTR_NAME_BYTES_MAX + 1];

    snprintf(name, sizeof(name), "%s%s", HT_XATTR_PREFIX, word);
    ssize_t n = get(path, name, out_text);
    if (n < 0 && !quiet && n != -ENODATA)
        return ht_cmd_explain(path, (int)n);
    return n < 0 ? (int)n : 0;
}

/* ------------------------------------------------------- lines for the daemon */

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
    if (rc < 0)
        ht_error("%s: %s", answer[0] != '\0' ? path : control, answer[0] != '\0' ? answer : strerror(-rc));
    return rc;
}

/* ------------------------------------------------ figures and hidden files */

uint64_t ht_figure(const char *text, const char *word)
{
    size_t len = strlen(word);

    for (const char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        if (strncmp(line, word, len) != 0 || line[len] != '=')
            continue;
        size_t digits = strspn(line + len + 1, "0123456789");
        if (digits != 0 && strchr("\n", line[len + 1 + digits]))
            return strtoull(line + len + 1, NULL, 10);
    }
    return 0;
}

int ht_figures_read(const char *path, char **out_text)
{
    int rc = ht_cmd_attribute(path, "stats", false, out_text);

    if (rc == -ENODATA)
        ht_error("%s has no statistics", path);
    return rc;
}

int ht_hidden_text(const char *point, const char *name, char **out_text)
{
    char path[PATH_MAX + 64], part[1 << 16];
    struct ht_buf text = HT_BUF_INIT;
    size_t n;

    snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/%s", point, name);
    FILE *f = fopen(path, "re");
    if (!f)
        return -errno;
    while (text.len <= TEXT_BYTES_MAX && (n = fread(part, 1, sizeof(part), f)) > 0)
        ht_buf_put(&text, part, n);
    int rc = ferror(f) ? -EIO : text.len > TEXT_BYTES_MAX ? -EFBIG : 0;
    fclose(f);
    ht_buf_put_u8(&text, 0);
    rc = rc < 0 ? rc : text.err;
    if (rc < 0)
        ht_buf_free(&text);
    *out_text = (char *)text.data;
    return rc;
}

/* --------------------------------------------------------------- JSON Lines */

/* The four digits at p, or -1. */
static int hex_value(const char *p)
{
    char digits[5] = "";

    if (strspn(p, "0123456789abcdefABCDEF") < 4)
        return -1;
    memcpy(digits, p, 4);
    return (int)strtol(digits, NULL, 16);
}

static char *put_utf8(char *to, unsigned c)
{
    unsigned follow = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const unsigned char first[] = {0, 0xc0, 0xe0, 0xf0};

    *to++ = (char)(first[follow] | c >> 6 * follow);
    while (follow-- > 0)
        *to++ = (char)(0x80 | (c >> 6 * follow & 0x3f));
    return to;
}

/* Decodes \uXXXX, or a pair of these for a character beyond 0xffff. A NUL and half a pair are refused. */
static char *decode_number(char *p, char **to)
{
    int c = hex_value(p + 2), low;

    if (c <= 0)
        return NULL;
    p += 6;
    if (c >= 0xdc80 && c <= 0xdcff) {
        *(*to)++ = (char)c;
        return p;
    }
    if (c >= 0xd800 && c < 0xdc00) {
        low = p[0] == '\\' && p[1] == 'u' ? hex_value(p + 2) : -1;
        if (low < 0xdc00 || low > 0xdfff)
            return NULL;
        c = 0x10000 + ((c & 0x3ff) << 10 | (low & 0x3ff));
        p += 6;
    }
    if (c >= 0xdc00 && c <= 0xdfff)
        return NULL;
    *to = put_utf8(*to, (unsigned)c);
    return p;
}

/* Decodes a string in place, after its opening quote. Returns the text after the closing one; NULL: no string. */
static char *decode_string(char *p)
{
    static const char names[] = "\"\\/bfnrt", bytes[] = "\"\\/\b\f\n\r\t";
    char *to = p;

    while (p && *p != '"') {
        const char *name = p[0] == '\\' && p[1] != '\0' ? strchr(names, p[1]) : NULL;
        if ((unsigned char)*p < 0x20) {
            return NULL;
        } else if (*p != '\\') {
            *to++ = *p++;
        } else if (name) {
            *to++ = bytes[name - names];
            p += 2;
        } else {
            p = p[1] == 'u' ? decode_number(p, &to) : NULL;
        }
    }
    *to = '\0';
    return p ? p + 1 : NULL;
}

static char *skip_blanks(char *p)
{
    return p + strspn(p, " \t\r\n");
}

/* One value, and the comma or brace after it. Returns the text after these; NULL: neither a string nor a word. */
static char *take_value(char *p, struct ht_cmd_field *f, char *out_end)
{
    f->is_text = *p == '"';
    f->value = p + f->is_text;
    char *end = f->is_text ? decode_string(f->value) : p + strspn(p, "+-.0123456789Eaeflnrstu");
    if (!end || end == p)
        return NULL;
    p = skip_blanks(end);
    *out_end = *p;
    *end = '\0';
    return *out_end == ',' || *out_end == '}' ? p + 1 : NULL;
}

int ht_cmd_parse_json(char *text, struct ht_cmd_line *out)
{
    char *p = skip_blanks(text), end = ',';

    out->count = 0;
    if (*p != '{')
        return -EPROTO;
    for (p++; p && end == ',';) {
        struct ht_cmd_field f;
        p = skip_blanks(p);
        if (*p != '"')
            return -EPROTO;
        f.key = p + 1;
        p = decode_string(p + 1);
        p = p ? skip_blanks(p) : NULL;
        p = p && *p == ':' ? take_value(skip_blanks(p + 1), &f, &end) : NULL;
        if (p && out->count < HT_CMD_FIELDS_MAX)
            out->field[out->count++] = f;
    }
    return p && *skip_blanks(p) == '\0' ? 0 : -EPROTO;
}

const char *ht_cmd_value(const struct ht_cmd_line *l, const char *key)
{
    for (unsigned i = 0; i < l->count; i++)
        if (strcmp(l->field[i].key, key) == 0)
            return l->field[i].value;
    return "";
}

uint64_t ht_cmd_number(const struct ht_cmd_line *l, const char *key)
{
    return strtoull(ht_cmd_value(l, key), NULL, 10);
}
