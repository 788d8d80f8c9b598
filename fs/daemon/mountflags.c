/* SPDX-License-Identifier: Apache-2.0 */
/* mountflags.c - see mountflags.h. A new word is one row. */
#include "fs/daemon/mountflags.h"

#include <sys/mount.h>

#ifndef MS_NOSYMFOLLOW
#define MS_NOSYMFOLLOW 256
#endif

/* Kinds of access times exclude each other, nodiratime apart. */
#define ATIMES ((unsigned long)(MS_NOATIME | MS_RELATIME | MS_STRICTATIME))

static const struct row {
    const char *word;
    unsigned long set, clear;
    bool at_start; /* libfuse knows it */
} rows[] = {
    {"ro", MS_RDONLY, 0, true},
    {"rw", 0, MS_RDONLY, true},
    {"nosuid", MS_NOSUID, 0, true},
    {"suid", 0, MS_NOSUID, true},
    {"nodev", MS_NODEV, 0, true},
    {"dev", 0, MS_NODEV, true},
    {"noexec", MS_NOEXEC, 0, true},
    {"exec", 0, MS_NOEXEC, true},
    {"sync", MS_SYNCHRONOUS, 0, true},
    {"async", 0, MS_SYNCHRONOUS, true},
    {"dirsync", MS_DIRSYNC, 0, true},
    {"noatime", MS_NOATIME, ATIMES, true},
    {"atime", MS_RELATIME, ATIMES, false},
    {"relatime", MS_RELATIME, ATIMES, false},
    {"norelatime", MS_STRICTATIME, ATIMES, false},
    {"strictatime", MS_STRICTATIME, ATIMES, false},
    {"nostrictatime", MS_RELATIME, ATIMES, false},
    {"nodiratime", MS_NODIRATIME, 0, true},
    {"diratime", 0, MS_NODIRATIME, false},
    {"nosymfollow", MS_NOSYMFOLLOW, 0, false},
    {"symfollow", 0, MS_NOSYMFOLLOW, false},
};

static const struct row *find_flag(const char *word, size_t len)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        if (strlen(rows[i].word) == len && memcmp(rows[i].word, word, len) == 0)
            return &rows[i];
    return NULL;
}

static void add(struct ht_mount_flags *f, const struct row *row)
{
    f->set = (f->set & ~row->clear) | row->set;
    f->clear = (f->clear | row->clear) & ~row->set;
}

bool ht_mount_flags_add(struct ht_mount_flags *f, const char *word, bool *out_at_start)
{
    const struct row *row = find_flag(word, strlen(word));

    if (!row)
        return false;
    add(f, row);
    *out_at_start = row->at_start;
    return true;
}

const char *ht_mount_flag_word(unsigned i)
{
    return i < HT_ARRAY_SIZE(rows) ? rows[i].word : NULL;
}

unsigned long ht_mount_flags_of(const char *options)
{
    struct ht_mount_flags f = {0, 0};

    while (*options) {
        size_t len = strcspn(options, ",");
        const struct row *row = find_flag(options, len);
        if (row)
            add(&f, row);
        options += len;
        options += *options == ',';
    }
    return f.set;
}

unsigned long ht_mount_flags_later(const struct ht_mount_flags *f)
{
    return f->set & (MS_STRICTATIME | MS_NOSYMFOLLOW);
}
