/* SPDX-License-Identifier: Apache-2.0 */
/*
 * show.c - prints a hidden file of JSON Lines as tables, or as JSON. See show.h. A row of the table of commands has the
 * file of a command, and the columns. The lines may hold anything.
 *
 * --json prints the lines as they are. They are parsed all the same: commands select, and the mount may belong to
 * another program that calls itself hitrain. With --follow the command reads again every so often and keeps nothing
 * open in between, so that it never blocks umount.
 */
#include "mount-helpers/look/show.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <hitrain/words.h>

enum { CELL_BYTES = 2 * PATH_MAX };

/* ------------------------------------------------------------------- cells */

static void cell_text(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    const char *value = ht_cmd_value(l, c->key);

    snprintf(buf, cap, "%s", value[0] != '\0' ? value : "-");
}

/* Ten characters tell enough of a number. */
static void cell_short(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    cell_text(l, c, buf, cap < 11 ? cap : 11);
}

static void cell_path(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    const char *path = ht_cmd_value(l, "path"), *id = ht_cmd_value(l, "id");

    if (path[0] == '\0' && id[0] != '\0')
        snprintf(buf, cap, "(%s)", id);
    else
        snprintf(buf, cap, "%s", path[0] != '\0' ? path : "(missing)");
}

static void cell_size(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    uint64_t less = c->other ? ht_cmd_number(l, c->other) : 0, bytes = ht_cmd_number(l, c->key);

    snprintf(buf, cap, "%s", ht_size_text(bytes > less ? bytes - less : 0));
}

static void cell_rate(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    if (ht_cmd_value(l, c->key)[0] == '\0')
        snprintf(buf, cap, "-");
    else
        snprintf(buf, cap, "%s/s", ht_size_text(ht_cmd_number(l, c->key)));
}

/* "12/0": done and failed. */
static void cell_counts(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    snprintf(buf, cap, "%s/%s", ht_cmd_value(l, c->key), ht_cmd_value(l, c->other));
}

static void cell_share(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    if (ht_cmd_value(l, c->key)[0] == '\0')
        snprintf(buf, cap, "-");
    else
        snprintf(buf, cap, "%.1f %%", (double)ht_cmd_number(l, c->key) / 10);
}

/* In three digits; of each of so many. */
static void cell_ns(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    static const char *const units[] = {"us", "ms", "s"};
    uint64_t ns = ht_cmd_number(l, c->key), count = c->other ? ht_cmd_number(l, c->other) : 1;
    double v = count ? (double)(ns / count) / 1000 : 0;
    unsigned unit = 0;

    for (; v >= 999.5 && unit + 1 < HT_ARRAY_SIZE(units); unit++)
        v /= 1000;
    if (ht_cmd_value(l, c->key)[0] == '\0')
        snprintf(buf, cap, "-");
    else
        snprintf(buf, cap, "%.*f %s", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v, units[unit]);
}

static void cell_us(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    snprintf(buf, cap, "%llu us", (unsigned long long)ht_cmd_number(l, c->key) / 1000);
}

static void cell_seconds(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    snprintf(buf, cap, "%.1f s", (double)ht_cmd_number(l, c->key) / 1e9);
}

/* Since the mount. */
static void cell_time(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    uint64_t us = ht_cmd_number(l, c->key) / 1000;

    snprintf(buf, cap, "%llu.%06llu", (unsigned long long)(us / 1000000), (unsigned long long)(us % 1000000));
}

static void cell_date(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    time_t at = (time_t)(ht_cmd_number(l, c->key) / 1000000000);
    struct tm tm;

    if (!localtime_r(&at, &tm) || strftime(buf, cap, "%F %T", &tm) == 0)
        buf[0] = '\0';
}

static void cell_date_ms(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    cell_date(l, c, buf, cap);
    size_t len = strlen(buf);
    snprintf(buf + len, cap - len, ".%03u", (unsigned)(ht_cmd_number(l, c->key) / 1000000 % 1000));
}

static void cell_yes(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    snprintf(buf, cap, "%s", strcmp(ht_cmd_value(l, c->key), "true") == 0 ? "yes" : "no");
}

static void cell_offset(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    snprintf(buf, cap, "%llu +%llu", (unsigned long long)ht_cmd_number(l, c->key),
             (unsigned long long)ht_cmd_number(l, c->other));
}

static void cell_claim(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    const char *name = ht_cmd_value(l, c->key);

    if (name[0] == '\0')
        snprintf(buf, cap, "-");
    else
        snprintf(buf, cap, "%.80s (%s)", name, ht_cmd_value(l, c->other));
}

static void cell_digest(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    const char *digest = ht_cmd_value(l, c->key), *error = ht_cmd_value(l, c->other);

    snprintf(buf, cap, "%s", digest[0] != '\0' ? digest : error[0] != '\0' ? "none: see --json" : "not yet");
}

static void cell_event(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    const char *path = ht_cmd_value(l, "path");
    uint64_t more = ht_cmd_number(l, "count");
    size_t len = (size_t)snprintf(buf, cap, "%s%s%s%s", path[0] != '\0' ? "/" : "", path, path[0] != '\0' ? ": " : "",
                                  ht_cmd_value(l, c->key));

    if (more > 1 && len < cap)
        snprintf(buf + len, cap - len, " (and %llu more%s)", (unsigned long long)more - 1,
                 ht_cmd_value(l, "various")[0] != '\0' ? ", of various files or devices" : "");
}

/* The figures of an engine's own: those after run_ns. */
static void cell_own(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap)
{
    uint64_t left = ht_cmd_number(l, "seconds_left");
    size_t len = 0;
    unsigned i = 0;

    while (i < l->count && strcmp(l->field[i].key, c->key) != 0)
        i++;
    for (i++; i < l->count && strcmp(l->field[i].key, c->other) != 0 && len < cap; i++) {
        const char *key = l->field[i].key, *value = l->field[i].value;
        bool bytes = ht_text_ends_with(key, "_bytes");
        len += (size_t)snprintf(buf + len, cap - len, "%s%s %s", len ? "  " : "", key,
                                bytes ? ht_size_text(strtoull(value, NULL, 10)) : value);
    }
    if (left && len < cap)
        snprintf(buf + len, cap - len, "  %llu:%02llu min left", (unsigned long long)left / 60,
                 (unsigned long long)left % 60);
}

/* ------------------------------------------------------------------ tables */

static const char *const root_keys[] = {"path",      "step",       "durable_step", "open", "parameters",
                                        "grad_norm", "claimed_by", "pid",          NULL};

#define COLUMNS(...) ((const struct ht_column[]){__VA_ARGS__, {NULL}})

static const struct ht_show shows[] = {
    {.command = "background",
     .file = "background",
     .place = "mount",
     .list = "engines",
     .table = {COLUMNS({"engine", -12, cell_text, "engine"}, {"state", -8, cell_text, "state"},
                       {"moved", 11, cell_size, "bytes"}, {"rate", 13, cell_rate, "bytes_per_second"},
                       {"CPU", 11, cell_seconds, "cpu_ns"}, {"", 0, cell_own, "run_ns", "bytes_per_second"})}},
    {.command = "device",
     .file = "devices",
     .place = "path",
     .list = "devices",
     .path_given = true,
     .table = {COLUMNS({"#", -2, cell_text, "index"}, {"size", 11, cell_size, "bytes"},
                       {"used", 11, cell_size, "data_bytes", "free_bytes"}, {"health", -14, cell_text, "health"},
                       {"log", -7, cell_text, "log"}, {"reads/err", 13, cell_counts, "reads", "read_errors"},
                       {"writes/err", 13, cell_counts, "writes", "write_errors"},
                       {"flushes/err", 13, cell_counts, "flushes", "flush_errors"}, {"path", 0, cell_path}),
               COLUMNS({"#", -2, cell_text, "index"}, {"class", -8, cell_text, "class"},
                       {"share", 7, cell_share, "share_per_mille"}, {"read/s", 13, cell_rate, "read_bytes_per_s"},
                       {"mean", 10, cell_ns, "read_latency_ns"}, {"p99", 10, cell_ns, "read_latency_p99_ns"},
                       {"write/s", 13, cell_rate, "write_bytes_per_s"}, {"mean", 10, cell_ns, "write_latency_ns"},
                       {"p99", 10, cell_ns, "write_latency_p99_ns"}),
               COLUMNS({"#", -2, cell_text, "index"}, {"urgent", 11, cell_size, "urgent_bytes"},
                       {"planned", 11, cell_size, "planned_bytes"}, {"background", 11, cell_size, "background_bytes"},
                       {"waits", 11, cell_text, "planned_waits"},
                       {"mean", 10, cell_ns, "planned_wait_ns", "planned_waits"},
                       {"waits", 11, cell_text, "background_waits"},
                       {"mean", 10, cell_ns, "background_wait_ns", "background_waits"})}},
    {.command = "events",
     .file = "events",
     .entries = "events",
     .table = {COLUMNS({NULL, 6, cell_text, "seq"}, {"", -23, cell_date_ms, "time_ns"}, {"", -5, cell_text, "level"},
                       {"", -16, cell_text, "code"}, {"", 0, cell_event, "text"})}},
    {.command = "roots",
     .file = "roots",
     .place = "path",
     .list = "roots",
     .keys = root_keys,
     .table = {COLUMNS({"step", 12, cell_text, "step"}, {"durable", 12, cell_text, "durable_step"},
                       {"open", -4, cell_yes, "open"}, {"parameters", 10, cell_text, "parameters"},
                       {"grad_norm", -10, cell_short, "grad_norm"},
                       {"claimed by", -10, cell_claim, "claimed_by", "pid"}, {"path", 0, cell_path})}},
    {.command = "steps",
     .file = "kept",
     .place = "path",
     .list = "steps",
     .of_root = true,
     .table = {COLUMNS({"step", 12, cell_text, "step"}, {"kept", -19, cell_date, "time_ns"},
                       {"shared", 10, cell_size, "shared_bytes"}, {"own", 10, cell_size, "own_bytes"},
                       {"digest", -32, cell_digest, "digest", "digest_error"}, {"in job", -8, cell_text, "archived"},
                       {"name", 0, cell_text, "name"})}},
    {.command = "trace",
     .file = "trace",
     .entries = "entries",
     .most = 65536,
     .table = {COLUMNS({"number", 8, cell_text, "seq"}, {"time, s", 19, cell_time, "time_ns"},
                       {"op", -8, cell_text, "op"}, {"waited", 11, cell_us, "waited_ns"},
                       {"offset +bytes", 24, cell_offset, "offset", "bytes"}, {"path", 0, cell_path})}},
};

const struct ht_show *ht_show_find(const char *command)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(shows); i++)
        if (strcmp(shows[i].command, command) == 0)
            return &shows[i];
    return NULL;
}

/* ------------------------------------------------------------------ output */

enum ht_log_level ht_show_level(const struct ht_cmd_line *l)
{
    for (enum ht_log_level level = HT_LOG_ERROR; level < HT_LOG_LEVELS; level++)
        if (strcmp(ht_log_level_word(level), ht_cmd_value(l, "level")) == 0)
            return level;
    return HT_LOG_LEVELS;
}

static bool is_one_of(const char *const *keys, const char *key)
{
    while (*keys && strcmp(*keys, key) != 0)
        keys++;
    return *keys;
}

void ht_show_json(struct ht_json *j, const char *const *keys, const struct ht_cmd_line *l)
{
    ht_json_object(j, NULL);
    for (unsigned i = 0; i < l->count; i++) {
        const struct ht_cmd_field *f = &l->field[i];
        if (keys && !is_one_of(keys, f->key))
            continue;
        if (f->is_text)
            ht_json_str(j, f->key, f->value);
        else if (f->value[0] == 't' || f->value[0] == 'f')
            ht_json_bool(j, f->key, f->value[0] == 't');
        else
            ht_json_word(j, f->key, f->value);
    }
    ht_json_end(j);
}

/* Padded to its width. Names and texts hold any bytes: a terminal must not obey them. */
static void put_cell(const char *text, int width, const char *colour)
{
    int pad = abs(width) - (int)ht_min_u64(strlen(text), INT_MAX / 2);

    if (width > 0 && pad > 0)
        printf("%*s", pad, "");
    fputs(colour, stdout);
    ht_put_printable(text, stdout);
    fputs(colour[0] != '\0' ? "\033[0m" : "", stdout);
    if (width < 0 && pad > 0)
        printf("%*s", pad, "");
}

void ht_show_line(const struct ht_column *table, bool colours, const struct ht_cmd_line *l)
{
    static const char *const colour[] = {"\033[31m", "\033[33m", "", ""};
    char text[CELL_BYTES];

    for (const struct ht_column *c = table; c->text; c++) {
        bool coloured = l && colours && c->key && strcmp(c->key, "level") == 0;
        text[0] = '\0';
        if (l)
            c->text(l, c, text, sizeof(text));
        fputs(c > table ? "  " : "", stdout);
        put_cell(l ? text : c->head, c->width, coloured ? colour[ht_show_level(l)] : "");
    }
    putchar('\n');
}

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
        ht_cmd_json_begin(&r->json, r->show->place, r->show->path_given ? r->path : r->folder);
        ht_json_array(&r->json, r->show->list);
    } else if (r->as_json) {
        ht_json_init_lines(&r->json, stdout);
    } else if (r->table[0].head) {
        ht_show_line(r->table, false, NULL);
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
    return ht_fail(HT_CMD_FAILED, "%s: no engine is called %s", r->folder, r->o->engine);
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
    static struct reader r; /* large, and used once */

    r.show = ht_show_find(o->command);
    r.path = path;
    r.o = o;
    r.as_json = o->json || (o->verb && strcmp(o->verb, "save") == 0);
    r.after = o->since;
    r.colours = colours();
    r.folder = r.show->of_root ? path : o->point;
    return print_tables(&r);
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
