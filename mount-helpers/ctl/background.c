/* SPDX-License-Identifier: Apache-2.0 */
/* background.c - `hitrainctl background`: the engines that work in the background, and pausing them. */
#include "mount-helpers/ctl/ctl.h"

#include <stdio.h>
#include <stdlib.h>

#include "tiering/base/json.h"
#include "mount-helpers/common/text.h"

enum { ENGINES_MAX = 16 };

/* The first fields of a line are those of every engine; the others are its own. */
static const char *const common[] = {"engine", "state",  "steps",     "blocked_steps",
                                     "bytes",  "cpu_ns", "run_bytes", "run_ns"};

static bool is_common(const char *key)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(common); i++)
        if (strcmp(common[i], key) == 0)
            return true;
    return false;
}

static uint64_t rate(const struct ht_cmd_line *l)
{
    uint64_t ns = ht_cmd_number(l, "run_ns");

    return ns != 0 ? (uint64_t)((double)ht_cmd_number(l, "run_bytes") * 1e9 / (double)ns) : 0;
}

/* 0: not known. */
static uint64_t seconds_left(const struct ht_cmd_line *l)
{
    bool works = strcmp(ht_cmd_value(l, "state"), "working") == 0;

    return works && rate(l) != 0 ? ht_cmd_number(l, "left_bytes") / rate(l) : 0;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);

    return n >= m && strcmp(text + n - m, end) == 0;
}

static void put_own(const struct ht_cmd_field *f)
{
    uint64_t v = strtoull(f->value, NULL, 10);

    fputs("  ", stdout);
    ht_put_printable(f->key, stdout);
    if (ends_with(f->key, "_bytes"))
        printf(" %s", ht_size_text(v));
    else
        printf(" %llu", (unsigned long long)v);
}

static void put_for_people(const struct ht_cmd_line *l)
{
    char per_second[48];

    snprintf(per_second, sizeof(per_second), "%s/s", ht_size_text(rate(l)));
    printf("%-12.12s %-8.8s %11s %13s %9.1f s", ht_cmd_value(l, "engine"), ht_cmd_value(l, "state"),
           ht_size_text(ht_cmd_number(l, "bytes")), per_second, (double)ht_cmd_number(l, "cpu_ns") / 1e9);
    for (unsigned i = 0; i < l->count; i++)
        if (!is_common(l->field[i].key))
            put_own(&l->field[i]);
    if (seconds_left(l) != 0)
        printf("  %llu:%02llu min left", (unsigned long long)seconds_left(l) / 60,
               (unsigned long long)seconds_left(l) % 60);
    putchar('\n');
}

static void put_json(struct ht_json *j, const struct ht_cmd_line *l)
{
    ht_json_object(j, NULL);
    for (unsigned i = 0; i < l->count; i++) {
        const struct ht_cmd_field *f = &l->field[i];
        if (strcmp(f->key, "engine") == 0 || strcmp(f->key, "state") == 0)
            ht_json_str(j, f->key, f->value);
        else
            ht_json_word(j, f->key, f->value);
    }
    ht_json_u64(j, "bytes_per_second", rate(l));
    ht_json_u64(j, "seconds_left", seconds_left(l));
    ht_json_end(j);
}

static void put_all_json(const char *point, const struct ht_cmd_line *lines, unsigned count)
{
    struct ht_json j;

    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "mount", point);
    ht_json_array(&j, "engines");
    for (unsigned i = 0; i < count; i++)
        put_json(&j, &lines[i]);
    ht_json_end(&j);
    ht_json_end(&j);
}

/* Of the engine that the options name, or of all. */
static unsigned select_lines(char *text, const char *engine, struct ht_cmd_line lines[ENGINES_MAX])
{
    unsigned count = 0;
    char *save;

    for (char *one = strtok_r(text, "\n", &save); one && count < ENGINES_MAX; one = strtok_r(NULL, "\n", &save)) {
        ht_cmd_parse_line(one, &lines[count]);
        count += !engine || strcmp(ht_cmd_value(&lines[count], "engine"), engine) == 0;
    }
    return count;
}

static int show(const char *point, const struct ht_cmd_options *o)
{
    struct ht_cmd_line lines[ENGINES_MAX];
    char *text;
    int rc = ht_cmd_attribute(point, "background", false, &text);

    if (rc == -ENODATA)
        ht_error("%s: its daemon is of another version and does not report its engines", point);
    if (rc < 0)
        return HT_CMD_FAILED;
    unsigned count = select_lines(text, o->engine, lines);
    if (o->engine && count == 0)
        ht_error("%s: no engine is called %s", point, o->engine);
    if (o->json && (count || !o->engine))
        put_all_json(point, lines, count);
    if (!o->json && count)
        puts("engine       state          moved          rate        CPU");
    for (unsigned i = 0; !o->json && i < count; i++)
        put_for_people(&lines[i]);
    free(text);
    return o->engine && count == 0 ? HT_CMD_FAILED : HT_CMD_OK;
}

int ht_cmd_background(const char *path, const struct ht_cmd_options *o)
{
    char point[PATH_MAX], line[128];

    if (ht_cmd_mount_point(path, point) < 0)
        return HT_CMD_FAILED;
    if (strcmp(o->verb, "status") != 0) {
        snprintf(line, sizeof(line), "background %s%s%s", o->verb, o->engine ? " engine=" : "",
                 o->engine ? o->engine : "");
        if (ht_cmd_command(path, point, line) < 0)
            return HT_CMD_FAILED;
    }
    return show(point, o);
}
