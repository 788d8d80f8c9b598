/* SPDX-License-Identifier: Apache-2.0 */
/* event_line.c - prints one line of .hitrain/events. The line may hold anything. */
#include "mount-helpers/ctl/event_line.h"

#include <stdio.h>
#include <time.h>

#include "tiering/base/json.h"
#include "mount-helpers/common/text.h"

enum ht_log_level ht_event_line_level(const struct ht_cmd_line *l)
{
    for (enum ht_log_level level = HT_LOG_ERROR; level < HT_LOG_DEBUG; level++)
        if (strcmp(ht_log_level_word(level), ht_cmd_value(l, "level")) == 0)
            return level;
    return HT_LOG_DEBUG;
}

/* ------------------------------------------------------------------- output */

void ht_event_line_put_json(const struct ht_cmd_line *l)
{
    struct ht_json j;

    ht_json_init_lines(&j, stdout);
    ht_json_object(&j, NULL);
    for (unsigned i = 0; i < l->count; i++) {
        const struct ht_cmd_field *f = &l->field[i];
        if (f->is_text)
            ht_json_str(&j, f->key, f->value);
        else if (strcmp(f->value, "true") == 0)
            ht_json_bool(&j, f->key, true);
        else
            ht_json_word(&j, f->key, f->value);
    }
    ht_json_end(&j);
}

static void put_time(uint64_t ns)
{
    time_t seconds = (time_t)(ns / 1000000000);
    char text[32];
    struct tm tm;

    if (!localtime_r(&seconds, &tm) || strftime(text, sizeof(text), "%F %T", &tm) == 0)
        text[0] = '\0';
    printf("%s.%03u", text, (unsigned)(ns / 1000000 % 1000));
}

/* Padded to width and with a blank after it. */
static void put_column(const char *text, int width)
{
    ht_put_printable(text, stdout);
    printf("%*s ", width > (int)strlen(text) ? width - (int)strlen(text) : 0, "");
}

/* Names and texts hold any bytes: a terminal must not obey them. */
void ht_event_line_put(const struct ht_cmd_line *l, bool with_colours)
{
    static const char *const colour[] = {"\033[31m", "\033[33m", "", ""};
    enum ht_log_level level = ht_event_line_level(l);
    const char *path = ht_cmd_value(l, "path");
    uint64_t count = ht_cmd_number(l, "count");

    printf("%6llu  ", (unsigned long long)ht_cmd_number(l, "seq"));
    put_time(ht_cmd_number(l, "time_ns"));
    printf("  %s", with_colours ? colour[level] : "");
    put_column(ht_cmd_value(l, "level"), 6);
    put_column(ht_cmd_value(l, "code"), 17);
    if (with_colours && colour[level][0] != '\0')
        fputs("\033[0m", stdout);
    if (path[0] != '\0') {
        putchar('/');
        ht_put_printable(path, stdout);
        fputs(": ", stdout);
    }
    ht_put_printable(ht_cmd_value(l, "text"), stdout);
    if (count > 1)
        printf(" (and %llu more%s)", (unsigned long long)count - 1,
               ht_cmd_value(l, "various")[0] != '\0' ? ", of various files or devices" : "");
    putchar('\n');
}
