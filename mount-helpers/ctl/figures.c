/* SPDX-License-Identifier: Apache-2.0 */
/* figures.c - see figures.h. The mount may belong to another program: a line may hold anything. */
#include "mount-helpers/ctl/figures.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiering/base/files.h"
#include <hitrain/words.h>

enum { TEXT_BYTES_MAX = 16 << 20 };

uint64_t ht_figure(const struct ht_figures *f, const char *word)
{
    for (unsigned i = 0; i < f->count; i++)
        if (strcmp(f->one[i].word, word) == 0)
            return f->one[i].value;
    return 0;
}

static void take_line(char *line, struct ht_figures *out)
{
    char *equal = strchr(line, '='), *end;

    if (!equal || equal[1] < '0' || equal[1] > '9' || out->count == HT_FIGURES_MAX)
        return;
    uint64_t value = strtoull(equal + 1, &end, 10);
    if (*end != '\0')
        return;
    *equal = '\0';
    out->one[out->count].word = line;
    out->one[out->count++].value = value;
}

void ht_figures_parse(char *text, struct ht_figures *out)
{
    char *save;

    out->text = text;
    out->count = 0;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        take_line(line, out);
}

int ht_figures_read(const char *point, struct ht_figures *out)
{
    char *text;
    int rc = ht_cmd_attribute(point, "stats", false, &text);

    if (rc == -ENODATA)
        ht_error("%s has no statistics", point);
    if (rc < 0)
        return rc;
    ht_figures_parse(text, out);
    return 0;
}

void ht_figures_free(struct ht_figures *f)
{
    free(f->text);
    f->text = NULL;
    f->count = 0;
}

static int read_all(FILE *f, size_t cap, char **text, size_t *len, size_t *room)
{
    while (!feof(f) && !ferror(f)) {
        if (*len + 1 == *room) {
            char *more = *room > cap ? NULL : realloc(*text, *room * 2);
            if (!more)
                return *room > cap ? -EFBIG : -ENOMEM;
            *text = more;
            *room *= 2;
        }
        *len += fread(*text + *len, 1, *room - 1 - *len, f);
    }
    return ferror(f) ? -EIO : 0;
}

int ht_hidden_text(const char *point, const char *name, char **out_text)
{
    char path[PATH_MAX + 64], *text;
    size_t len = 0, room = 1 << 16;

    snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/%s", point, name);
    FILE *f = fopen(path, "re");
    if (!f)
        return -errno;
    text = malloc(room);
    int rc = text ? read_all(f, TEXT_BYTES_MAX, &text, &len, &room) : -ENOMEM;
    fclose(f);
    if (rc < 0) {
        free(text);
        return rc;
    }
    text[len] = '\0';
    *out_text = text;
    return 0;
}

int ht_file_replace(const char *path, const void *data, size_t len, mode_t mode)
{
    char name[PATH_MAX];

    if (snprintf(name, sizeof(name), "%s.XXXXXX", path) >= (int)sizeof(name))
        return -ENAMETOOLONG;
    int fd = mkostemp(name, O_CLOEXEC);
    if (fd < 0)
        return -errno;
    int rc = ht_write_all(fd, data, len);
    if (rc == 0 && fchmod(fd, mode) != 0)
        rc = -errno;
    if (close(fd) != 0 && rc == 0)
        rc = -errno;
    if (rc == 0 && rename(name, path) != 0)
        rc = -errno;
    if (rc < 0)
        unlink(name);
    return rc;
}
