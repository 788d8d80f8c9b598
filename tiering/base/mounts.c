/* SPDX-License-Identifier: Apache-2.0 */
/* mounts.c - see mounts.h. Lines are "id parent major:minor root point options [tags...] - type source options". */
#include "tiering/base/mounts.h"

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

/* The last entry that matches: it is the one on top. */
static int find(bool (*match)(const void *what, const struct ht_mount_entry *m), const void *what,
                struct ht_mount_entry *out)
{
    FILE *f = fopen("/proc/self/mountinfo", "re");
    struct ht_mount_entry *m = malloc(sizeof(*m));
    char *line = NULL;
    size_t cap = 0;
    int ret = -ENOENT;

    if (f == NULL || m == NULL) {
        ret = f == NULL ? -errno : -ENOMEM;
        goto out;
    }
    while (getline(&line, &cap, f) > 0) {
        if (parse_line(line, m) && match(what, m)) {
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

struct source {
    struct stat st;
    char path[PATH_MAX];
};

static bool match_source(const void *what, const struct ht_mount_entry *m)
{
    const struct source *s = what;
    struct stat st;

    if (S_ISBLK(s->st.st_mode) && makedev(m->major, m->minor) == s->st.st_rdev)
        return true;
    if (m->source[0] != '/')
        return false;
    if (strcmp(m->source, s->path) == 0)
        return true;
    /* another name of the same file or device */
    if (stat(m->source, &st) != 0 || (st.st_mode & S_IFMT) != (s->st.st_mode & S_IFMT))
        return false;
    return S_ISBLK(st.st_mode) ? st.st_rdev == s->st.st_rdev
                               : S_ISREG(st.st_mode) && st.st_dev == s->st.st_dev && st.st_ino == s->st.st_ino;
}

int ht_mount_of_source(const char *path, struct ht_mount_entry *out)
{
    struct source s;

    if (stat(path, &s.st) != 0 || realpath(path, s.path) == NULL)
        return -errno;
    return find(match_source, &s, out);
}

static bool match_device(const void *what, const struct ht_mount_entry *m)
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

static bool match_point(const void *what, const struct ht_mount_entry *m)
{
    return strcmp(m->point, what) == 0;
}

int ht_mount_at(const char *path, struct ht_mount_entry *out)
{
    return find(match_point, path, out);
}

bool ht_mount_is_hitrain(const struct ht_mount_entry *m)
{
    return strcmp(m->type, "fuse.hitrain") == 0 || strcmp(m->type, "hitrain") == 0;
}
