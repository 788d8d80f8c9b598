/* SPDX-License-Identifier: Apache-2.0 */
/*
 * show.c - prints a hidden file of JSON Lines as tables, or as JSON. See show.h.
 *
 * --json prints the lines as they are. They are parsed all the same: commands select, and the mount may belong to
 * another program that calls itself hitrain. With --follow the command reads again every so often and keeps nothing
 * open in between, so that it never blocks umount.
 */
#include "mount-helpers/look/show.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hitrain/words.h>

enum { FOLLOW_MS = 250, READ_BYTES = 1 << 16 };

/* ------------------------------------------------------------------- lines */

struct reader {
    const struct ht_show *show;
    const struct ht_column *table;
    const struct ht_cmd_options *o;
    const char *path, *folder; /* as given; that .hitrain is in */
    struct ht_json json;
    bool as_json, colours, begun;
    dev_t dev;               /* another one is another mount, which counts from 1 */
    uint64_t after, entries; /* number of the last, and how many there were */
    char text[READ_BYTES];   /* begins with an unfinished line */
    size_t len;
};

static bool selects(const struct reader *r, const struct ht_cmd_line *l)
{
    if (r->o->engine && strcmp(ht_cmd_value(l, "engine"), r->o->engine) != 0)
        return false;
    return strcmp(r->show->command, "events") != 0 || ht_show_level(l) <= r->o->level;
}

/* What comes before the first line. */
static void begin(struct reader *r)
{
    if (r->begun)
        return;
    r->begun = true;
    if (r->as_json && r->show->list) {
        ht_json_init(&r->json, stdout);
        ht_json_object(&r->json, NULL);
        ht_json_str(&r->json, r->show->place, r->show->path_given ? r->path : r->folder);
        ht_json_array(&r->json, r->show->list);
    } else if (r->as_json) {
        ht_json_init_lines(&r->json, stdout);
    } else if (r->table[0].head) {
        ht_show_head(r->table);
    }
}

static int take_number(struct reader *r, const struct ht_cmd_line *l)
{
    uint64_t seq = ht_cmd_number(l, "seq");

    if (seq == 0)
        return -EPROTO;
    if (seq > r->after + 1 && (r->after > 0 || r->o->follow))
        ht_warn("%llu %s before number %llu have made room for newer ones", (unsigned long long)(seq - r->after - 1),
                r->show->entries, (unsigned long long)seq);
    r->after = seq;
    return 0;
}

static int take_line(struct reader *r, char *text)
{
    struct ht_cmd_line l;
    int rc = ht_cmd_parse_json(text, &l);

    if (rc == 0 && r->show->entries)
        rc = take_number(r, &l);
    if (rc < 0)
        return rc;
    r->entries++;
    if (!selects(r, &l))
        return 0;
    begin(r);
    if (r->as_json)
        ht_show_json(&r->json, r->show->keys, &l);
    else
        ht_show_line(r->table, r->colours, &l);
    return 0;
}

/* Takes whole lines; the rest begins the buffer. */
static int take_lines(struct reader *r)
{
    char *at = r->text, *end;
    int rc = 0;

    while (rc == 0 && (end = memchr(at, '\n', r->len - (size_t)(at - r->text)))) {
        *end = '\0';
        rc = take_line(r, at);
        at = end + 1;
    }
    r->len -= (size_t)(at - r->text);
    memmove(r->text, at, r->len);
    return r->len == sizeof(r->text) ? -EPROTO : rc; /* no line is so long */
}

/* ------------------------------------------------------------------ reading */

/* Reads all present lines after the last shown one. New entries may come faster than the old ones are printed. */
static int read_now(struct reader *r)
{
    char path[PATH_MAX + 32];
    uint64_t most = r->o->follow || !r->show->most ? UINT64_MAX : r->show->most;
    struct stat st;
    ssize_t n;
    int fd, rc;

    snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/%s", r->folder, r->show->file);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (!r->o->engine) /* else an engine of that name comes first */
        begin(r);
    if (fstat(fd, &st) == 0 && st.st_dev != r->dev) {
        r->after = r->dev != 0 ? 0 : r->after;
        r->dev = st.st_dev;
    }
    r->len = 0;
    do {
        n = pread(fd, r->text + r->len, sizeof(r->text) - r->len, (off_t)r->after);
        r->len += n > 0 ? (size_t)n : 0;
        rc = n < 0 ? -errno : take_lines(r);
    } while (n > 0 && rc == 0 && r->entries < most);
    close(fd);
    return rc;
}

static int report_file(const struct reader *r, int err)
{
    const char *file = r->show->file;

    if (err == -EACCES || err == -EPERM)
        ht_error("%s: only root and the owner of %s may read " HT_CTL_DIR "/%s", r->folder,
                 r->show->of_root ? "the model" : "the mount's root", file);
    else if ((err == -ENOENT || err == -ENOTDIR) && r->show->of_root)
        ht_error("%s is no model root", r->folder);
    else if (err == -ENOENT)
        ht_error("%s: there is no " HT_CTL_DIR "/%s: is it the root of the store that is mounted there?", r->folder,
                 file);
    else if (err == -EPROTO)
        ht_error("%s: " HT_CTL_DIR "/%s has no JSON Lines: its daemon is of another version", r->folder, file);
    else
        (void)ht_cmd_explain(r->folder, err);
    return HT_CMD_FAILED;
}

static int print_table(struct reader *r)
{
    int rc = read_now(r);

    if (r->as_json && r->show->list && r->begun) {
        ht_json_end(&r->json);
        ht_json_end(&r->json);
    }
    if (rc < 0)
        return report_file(r, rc);
    if (r->begun)
        return HT_CMD_OK;
    ht_error("%s: no engine is called %s", r->folder, r->o->engine);
    return HT_CMD_FAILED;
}

static int follow(struct reader *r)
{
    int rc = 0;

    while (rc == 0 && fflush(stdout) == 0) {
        ht_sleep_ns(FOLLOW_MS * UINT64_C(1000000));
        rc = read_now(r);
    }
    if (rc != 0 && rc != -ENOENT && rc != -ENOTDIR)
        return report_file(r, rc);
    if (rc != 0)
        ht_info("%s is not mounted any more", r->folder);
    return HT_CMD_OK;
}

static bool colours(void)
{
    const char *term = getenv("TERM"), *never = getenv("NO_COLOR");

    return isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0 && (!never || never[0] == '\0');
}

static int print_tables(struct reader *r)
{
    int status = HT_CMD_OK;

    for (unsigned i = 0; status == HT_CMD_OK && i < HT_SHOW_TABLES_MAX && r->show->table[i] && !(r->as_json && i);
         i++) {
        if (i)
            putchar('\n');
        r->table = r->show->table[i];
        r->begun = false;
        status = print_table(r);
    }
    return status == HT_CMD_OK && r->o->follow ? follow(r) : status;
}

int ht_cmd_show(const char *path, const struct ht_cmd_options *o)
{
    struct reader *r = calloc(1, sizeof(*r));

    if (!r) {
        ht_error("%s: %s", path, strerror(ENOMEM));
        return HT_CMD_FAILED;
    }
    r->show = ht_show_find(o->command);
    r->path = path;
    r->o = o;
    r->as_json = o->json || (o->verb && strcmp(o->verb, "save") == 0);
    r->after = o->since;
    r->colours = colours();
    r->folder = r->show->of_root ? path : o->point;
    int status = print_tables(r);
    free(r);
    return status;
}

/* Pauses engines, or lets them go on; then shows them. */
int ht_cmd_background(const char *path, const struct ht_cmd_options *o)
{
    char line[128];

    snprintf(line, sizeof(line), "background %s%s%s", o->verb, o->engine ? " engine=" : "", o->engine ? o->engine : "");
    if (strcmp(o->verb, "status") != 0 && ht_cmd_command(path, o->point, line) < 0)
        return HT_CMD_FAILED;
    return ht_cmd_show(path, o);
}
