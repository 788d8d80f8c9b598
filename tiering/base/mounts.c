/* SPDX-License-Identifier: Apache-2.0 */
/* mounts.c - see mounts.h. Lines are "id parent major:minor root point options [tags...] - type source options". */
#include "tiering/base/mounts.h"
#include "tiering/base/namespace.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

static bool is_octal(const char *p)
{
    return p[0] >= '0' && p[0] <= '3' && p[1] >= '0' && p[1] <= '7' && p[2] >= '0' && p[2] <= '7';
}

/* The kernel writes blank, tab, newline and backslash as \ooo. */
static void unescape(const char *from, char *to, size_t cap)
{
    size_t n = 0;

    while (*from != '\0' && n + 1 < cap) {
        if (from[0] == '\\' && is_octal(from + 1)) {
            to[n++] = (char)((from[1] - '0') * 64 + (from[2] - '0') * 8 + (from[3] - '0'));
            from += 4;
        } else {
            to[n++] = *from++;
        }
    }
    to[n] = '\0';
}

static bool parse_line(char *line, struct ht_mount_entry *out)
{
    char *save, *words[6], *word = strtok_r(line, " \n", &save), *type, *source, *super;

    for (unsigned i = 0; i < HT_ARRAY_SIZE(words); i++) {
        if (word == NULL)
            return false;
        words[i] = word;
        word = strtok_r(NULL, " \n", &save);
    }
    while (word != NULL && strcmp(word, "-") != 0)
        word = strtok_r(NULL, " \n", &save);
    type = strtok_r(NULL, " \n", &save);
    source = strtok_r(NULL, " \n", &save);
    super = strtok_r(NULL, " \n", &save);
    if (word == NULL || type == NULL || source == NULL || sscanf(words[2], "%u:%u", &out->major, &out->minor) != 2)
        return false;
    unescape(words[4], out->point, sizeof(out->point));
    unescape(type, out->type, sizeof(out->type));
    unescape(source, out->source, sizeof(out->source));
    unescape(words[5], out->options, sizeof(out->options));
    unescape(super != NULL ? super : "", out->super_options, sizeof(out->super_options));
    return true;
}

/* Of the entries that match best the last one: it is the one on top. */
static int find(int (*match)(const void *what, const struct ht_mount_entry *m), const void *what,
                struct ht_mount_entry *out)
{
    FILE *f = fopen("/proc/self/mountinfo", "re");
    struct ht_mount_entry *m = malloc(sizeof(*m));
    int ret = -ENOENT, best = 1;
    char *line = NULL;
    size_t cap = 0;

    if (f == NULL || m == NULL) {
        ret = f == NULL ? -errno : -ENOMEM;
        goto out;
    }
    while (getline(&line, &cap, f) > 0) {
        int grade = parse_line(line, m) ? match(what, m) : 0;

        if (grade >= best) {
            best = grade;
            *out = *m;
            ret = 0;
        }
    }
out:
    free(line);
    free(m);
    if (f != NULL)
        fclose(f);
    return ret;
}

/* -------------------------------------------------------- the mount of a source */

struct source {
    struct stat st;
    char path[PATH_MAX];
};

/* Whom a FUSE mount belongs to. The kernel writes it after everything that a security module may have said. */
static bool user_of(const struct ht_mount_entry *m, unsigned long *out_uid)
{
    bool known = false;

    for (const char *p = m->super_options; p != NULL; p = strchr(p, ',')) {
        p += *p == ',';
        known |= sscanf(p, "user_id=%lu", out_uid) == 1;
    }
    return known;
}

/*
 * 0: no. What a FUSE mount says about its source is what its user said, so that only root and the owner of the source
 * are believed, and root rather than the owner.
 */
static int match_source(const void *what, const struct ht_mount_entry *m)
{
    enum { NO, OWNER, ROOT };
    const struct source *s = what;
    unsigned long uid = 0;
    struct stat st;

    if (S_ISBLK(s->st.st_mode) && makedev(m->major, m->minor) == s->st.st_rdev)
        return ROOT;
    if (ht_mount_is_fuse(m) && (!user_of(m, &uid) || (uid != 0 && uid != s->st.st_uid)))
        return NO;
    if (strcmp(m->source, s->path) == 0)
        return uid == 0 ? ROOT : OWNER;
    /* Another name of a device. Looking anywhere but where root keeps them could hang in some other mount. */
    if (uid != 0 || !S_ISBLK(s->st.st_mode) || strncmp(m->source, "/dev/", 5) != 0)
        return NO;
    return ht_namespace_stat(m->source, &st) == 0 && S_ISBLK(st.st_mode) && st.st_rdev == s->st.st_rdev ? ROOT : NO;
}

int ht_mount_of_source(const char *path, struct ht_mount_entry *out)
{
    struct source s;
    int ret = ht_namespace_stat(path, &s.st);

    if (ret < 0)
        return ret;
    if (realpath(path, s.path) == NULL)
        return -errno;
    return find(match_source, &s, out);
}

/* -------------------------------------------------------------- other questions */

static int match_device(const void *what, const struct ht_mount_entry *m)
{
    return makedev(m->major, m->minor) == *(const dev_t *)what;
}

int ht_mount_of_path(const char *path, struct ht_mount_entry *out)
{
    struct stat st;

    if (stat(path, &st) != 0)
        return -errno;
    return find(match_device, &st.st_dev, out);
}

static int match_point(const void *what, const struct ht_mount_entry *m)
{
    return strcmp(m->point, what) == 0;
}

int ht_mount_at(const char *path, struct ht_mount_entry *out)
{
    return find(match_point, path, out);
}

bool ht_mount_is_fuse(const struct ht_mount_entry *m)
{
    return strcmp(m->type, "fuse") == 0 || strncmp(m->type, "fuse.", 5) == 0 || strcmp(m->type, "fuseblk") == 0 ||
        strncmp(m->type, "fuseblk.", 8) == 0;
}

bool ht_mount_is_hitrain(const struct ht_mount_entry *m)
{
    return strcmp(m->type, "fuse.hitrain") == 0 || strcmp(m->type, "hitrain") == 0;
}
