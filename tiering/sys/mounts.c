/* SPDX-License-Identifier: Apache-2.0 */
/* mounts.c - see mounts.h. Lines are "id parent major:minor root point options [tags...] - type source options". */
#include "tiering/sys/mounts.h"
#include "tiering/sys/nvme_namespace.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

static bool is_octal(const char *p)
{
    return p[0] >= '0' && p[0] <= '3' && p[1] >= '0' && p[1] <= '7' && p[2] >= '0' && p[2] <= '7';
}

void ht_proc_unescape(char *text)
{
    char *to = text;

    for (const char *p = text; *p; p++)
        if (p[0] == '\\' && is_octal(p + 1)) {
            *to++ = (char)((p[1] - '0') * 64 + (p[2] - '0') * 8 + (p[3] - '0'));
            p += 3;
        } else {
            *to++ = *p;
        }
    *to = '\0';
}

/* word: NULL is nothing. */
static void take_word(char *word, char *to, size_t cap)
{
    if (word)
        ht_proc_unescape(word);
    snprintf(to, cap, "%s", word ? word : "");
}

static bool parse_line(char *line, struct ht_mount_entry *out)
{
    char *save, *words[6], *word = strtok_r(line, " \n", &save), *type, *source, *super;

    for (unsigned i = 0; i < HT_ARRAY_SIZE(words); i++) {
        if (!word)
            return false;
        words[i] = word;
        word = strtok_r(NULL, " \n", &save);
    }
    while (word && strcmp(word, "-") != 0)
        word = strtok_r(NULL, " \n", &save);
    type = strtok_r(NULL, " \n", &save);
    source = strtok_r(NULL, " \n", &save);
    super = strtok_r(NULL, " \n", &save);
    if (!word || !type || !source || sscanf(words[0], "%u", &out->id) != 1 ||
        sscanf(words[2], "%u:%u", &out->major, &out->minor) != 2)
        return false;
    take_word(words[3], out->root, sizeof(out->root));
    take_word(words[4], out->point, sizeof(out->point));
    take_word(type, out->type, sizeof(out->type));
    take_word(source, out->source, sizeof(out->source));
    take_word(words[5], out->options, sizeof(out->options));
    take_word(super, out->super_options, sizeof(out->super_options));
    return true;
}

int ht_mount_find(const char *table, ht_mount_match *match, const void *what, struct ht_mount_entry *out)
{
    FILE *f = fopen(table, "re");
    struct ht_mount_entry *m = malloc(sizeof(*m));
    int rc = -ENOENT, best = 1;
    char *line = NULL;
    size_t cap = 0;

    if (!f || !m) {
        rc = !f ? -errno : -ENOMEM;
        goto out;
    }
    while (getline(&line, &cap, f) > 0) {
        int grade = parse_line(line, m) ? match(what, m) : 0;
        if (grade >= best) {
            best = grade;
            *out = *m;
            rc = 0;
        }
    }
out:
    free(line);
    free(m);
    if (f)
        fclose(f);
    return rc;
}

/* The kernel writes the user after all options of security modules. */
bool ht_mount_user(const struct ht_mount_entry *m, unsigned long *out_uid)
{
    bool known = false;

    for (const char *p = m->super_options; p; p = strchr(p, ',')) {
        p += *p == ',';
        known |= sscanf(p, "user_id=%lu", out_uid) == 1;
    }
    return known;
}

/* -------------------------------------------------------- the mount of a source */

struct source {
    struct stat st;
    char path[PATH_MAX];
};

/*
 * 0: no. The user of a FUSE mount chooses its source. So only root and the owner of the source are believed, and root
 * rather than the owner.
 */
static int match_source(const void *what, const struct ht_mount_entry *m)
{
    enum { NO, OWNER, ROOT };
    const struct source *s = what;
    unsigned long uid = 0;
    struct stat st;

    if (S_ISBLK(s->st.st_mode) && makedev(m->major, m->minor) == s->st.st_rdev)
        return ROOT;
    if (ht_mount_is_fuse(m) && (!ht_mount_user(m, &uid) || (uid != 0 && uid != s->st.st_uid)))
        return NO;
    if (strcmp(m->source, s->path) == 0)
        return uid == 0 ? ROOT : OWNER;
    /*
     * Is it another name of a device? Searches only the folder where root keeps them: any other could hang in some
     * mount.
     */
    if (uid != 0 || !S_ISBLK(s->st.st_mode) || strncmp(m->source, "/dev/", 5) != 0)
        return NO;
    return ht_nvme_namespace_stat(m->source, &st) == 0 && S_ISBLK(st.st_mode) && st.st_rdev == s->st.st_rdev ? ROOT
                                                                                                             : NO;
}

int ht_mount_of_source(const char *path, struct ht_mount_entry *out)
{
    struct source s;
    int rc = ht_nvme_namespace_stat(path, &s.st);

    if (rc < 0)
        return rc;
    if (!realpath(path, s.path))
        return -errno;
    return ht_mount_find(HT_MOUNTS_HERE, match_source, &s, out);
}

static int match_name(const void *what, const struct ht_mount_entry *m)
{
    unsigned long uid;

    return ht_mount_is_hitrain(m) && ht_mount_user(m, &uid) && uid == 0 && strcmp(m->source, what) == 0;
}

int ht_mount_named(const char *source, struct ht_mount_entry *out)
{
    return ht_mount_find(HT_MOUNTS_HERE, match_name, source, out);
}

/* -------------------------------------------------------------- other questions */

/* By its number, else by its file system. */
static int match_path(const void *what, const struct ht_mount_entry *m)
{
    const struct statx *st = what;

    if ((st->stx_mask & STATX_MNT_ID) && m->id == st->stx_mnt_id)
        return 2;
    return m->major == st->stx_dev_major && m->minor == st->stx_dev_minor;
}

int ht_mount_of_path(const char *path, struct ht_mount_entry *out)
{
    struct statx st;

    if (statx(AT_FDCWD, path, 0, STATX_BASIC_STATS | STATX_MNT_ID, &st) != 0)
        return -errno;
    return ht_mount_find(HT_MOUNTS_HERE, match_path, &st, out);
}

static int match_point(const void *what, const struct ht_mount_entry *m)
{
    return strcmp(m->point, what) == 0;
}

int ht_mount_at(const char *path, struct ht_mount_entry *out)
{
    return ht_mount_find(HT_MOUNTS_HERE, match_point, path, out);
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
