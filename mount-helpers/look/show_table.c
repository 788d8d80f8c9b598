/* SPDX-License-Identifier: Apache-2.0 */
/*
 * show_table.c - the commands of show.h with their tables: a row has the file of a command, and the columns. The lines
 * may hold anything.
 */
#include "mount-helpers/look/show.h"

#include <time.h>

#include "mount-helpers/common/text.h"

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

#define COLUMNS(...) ((const struct ht_column[]){__VA_ARGS__, {NULL, 0, NULL, NULL, NULL}})

static const struct ht_show shows[] = {
    {.command = "background",
     .file = "background",
     .place = "mount",
     .list = "engines",
     .table = {COLUMNS({"engine", -12, cell_text, "engine", NULL}, {"state", -8, cell_text, "state", NULL},
                       {"moved", 11, cell_size, "bytes", NULL}, {"rate", 13, cell_rate, "bytes_per_second", NULL},
                       {"CPU", 11, cell_seconds, "cpu_ns", NULL}, {"", 0, cell_own, "run_ns", "bytes_per_second"})}},
    {.command = "device",
     .file = "devices",
     .place = "path",
     .list = "devices",
     .path_given = true,
     .table = {COLUMNS({"#", -2, cell_text, "index", NULL}, {"size", 11, cell_size, "bytes", NULL},
                       {"used", 11, cell_size, "data_bytes", "free_bytes"}, {"health", -14, cell_text, "health", NULL},
                       {"log", -7, cell_text, "log", NULL}, {"reads/err", 13, cell_counts, "reads", "read_errors"},
                       {"writes/err", 13, cell_counts, "writes", "write_errors"},
                       {"flushes/err", 13, cell_counts, "flushes", "flush_errors"}, {"path", 0, cell_path, NULL, NULL}),
               COLUMNS(
                   {"#", -2, cell_text, "index", NULL}, {"class", -8, cell_text, "class", NULL},
                   {"share", 7, cell_share, "share_per_mille", NULL},
                   {"read/s", 13, cell_rate, "read_bytes_per_s", NULL}, {"mean", 10, cell_ns, "read_latency_ns", NULL},
                   {"p99", 10, cell_ns, "read_latency_p99_ns", NULL},
                   {"write/s", 13, cell_rate, "write_bytes_per_s", NULL},
                   {"mean", 10, cell_ns, "write_latency_ns", NULL}, {"p99", 10, cell_ns, "write_latency_p99_ns", NULL}),
               COLUMNS({"#", -2, cell_text, "index", NULL}, {"urgent", 11, cell_size, "urgent_bytes", NULL},
                       {"planned", 11, cell_size, "planned_bytes", NULL},
                       {"background", 11, cell_size, "background_bytes", NULL},
                       {"waits", 11, cell_text, "planned_waits", NULL},
                       {"mean", 10, cell_ns, "planned_wait_ns", "planned_waits"},
                       {"waits", 11, cell_text, "background_waits", NULL},
                       {"mean", 10, cell_ns, "background_wait_ns", "background_waits"})}},
    {.command = "events",
     .file = "events",
     .entries = "events",
     .table = {COLUMNS({NULL, 6, cell_text, "seq", NULL}, {"", -23, cell_date_ms, "time_ns", NULL},
                       {"", -5, cell_text, "level", NULL}, {"", -16, cell_text, "code", NULL},
                       {"", 0, cell_event, "text", NULL})}},
    {.command = "roots",
     .file = "roots",
     .place = "path",
     .list = "roots",
     .keys = root_keys,
     .table = {COLUMNS({"step", 12, cell_text, "step", NULL}, {"durable", 12, cell_text, "durable_step", NULL},
                       {"open", -4, cell_yes, "open", NULL}, {"parameters", 10, cell_text, "parameters", NULL},
                       {"grad_norm", -10, cell_short, "grad_norm", NULL},
                       {"claimed by", -10, cell_claim, "claimed_by", "pid"}, {"path", 0, cell_path, NULL, NULL})}},
    {.command = "steps",
     .file = "kept",
     .place = "path",
     .list = "steps",
     .of_root = true,
     .table = {COLUMNS({"step", 12, cell_text, "step", NULL}, {"kept", -19, cell_date, "time_ns", NULL},
                       {"shared", 10, cell_size, "shared_bytes", NULL}, {"own", 10, cell_size, "own_bytes", NULL},
                       {"digest", -32, cell_digest, "digest", "digest_error"},
                       {"in job", -8, cell_text, "archived", NULL}, {"name", 0, cell_text, "name", NULL})}},
    {.command = "trace",
     .file = "trace",
     .entries = "entries",
     .most = 65536,
     .table = {COLUMNS({"number", 8, cell_text, "seq", NULL}, {"time, s", 19, cell_time, "time_ns", NULL},
                       {"op", -8, cell_text, "op", NULL}, {"waited", 11, cell_us, "waited_ns", NULL},
                       {"offset +bytes", 24, cell_offset, "offset", "bytes"}, {"path", 0, cell_path, NULL, NULL})}},
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
        bool coloured = colours && c->key && strcmp(c->key, "level") == 0;
        text[0] = '\0';
        c->text(l, c, text, sizeof(text));
        fputs(c > table ? "  " : "", stdout);
        put_cell(text, c->width, coloured ? colour[ht_show_level(l)] : "");
    }
    putchar('\n');
}

void ht_show_head(const struct ht_column *table)
{
    for (const struct ht_column *c = table; c->text; c++) {
        fputs(c > table ? "  " : "", stdout);
        put_cell(c->head, c->width, "");
    }
    putchar('\n');
}
