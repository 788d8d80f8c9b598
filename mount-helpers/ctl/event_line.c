/* SPDX-License-Identifier: Apache-2.0 */
/* event_line.c - one line of .hitrain/events, shown. Nothing of it is trusted. */
#include "mount-helpers/ctl/event_line.h"

#include <stdio.h>
#include <time.h>

#include "mount-helpers/common/json.h"
#include "mount-helpers/common/text.h"

enum ht_log_level ht_event_line_level(const struct ht_ctl_line *l)
{
    for (enum ht_log_level level = HT_LOG_ERROR; level < HT_LOG_DEBUG; level++)
        if (strcmp(ht_log_level_word(level), ht_ctl_value(l, "level")) == 0)
            return level;
    return HT_LOG_DEBUG;
}

/* In place. */
static void unescape(char *text)
{
    char *to = text;

    for (const char *p = text; *p != '\0';) {
        if (p[0] == '\\' && p[1] >= '0' && p[1] <= '3' && p[2] >= '0' && p[2] <= '7' && p[3] >= '0' && p[3] <= '7') {
            *to++ = (char)((p[1] - '0') * 64 + (p[2] - '0') * 8 + (p[3] - '0'));
            p += 4;
        } else {
            *to++ = *p++;
        }
    }
    *to = '\0';
}

/* ------------------------------------------------------------------- output */

void ht_event_line_put_json(struct ht_ctl_line *l)
{
    static const char *const texts[] = {"level", "code", "path", "device", "error", "text"};
    struct ht_json j;

    ht_json_init_lines(&j, stdout);
    ht_json_object(&j, NULL);
    for (unsigned i = 0; i < l->count; i++) {
        struct ht_ctl_field *f = &l->field[i];
        bool text = false;

        for (size_t k = 0; k < HT_ARRAY_SIZE(texts); k++)
            text |= strcmp(f->key, texts[k]) == 0;
        unescape(f->value);
        if (text)
            ht_json_str(&j, f->key, f->value);
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

    if (localtime_r(&seconds, &tm) == NULL || strftime(text, sizeof(text), "%F %T", &tm) == 0)
        text[0] = '\0';
    printf("%s.%03u", text, (unsigned)(ns / 1000000 % 1000));
}

/* Padded to width and with a blank after it. */
static void put_column(const char *text, int width)
{
    ht_put_printable(text, stdout);
    printf("%*s ", width > (int)strlen(text) ? width - (int)strlen(text) : 0, "");
}

/* hitrain escapes its texts, but the mount may be anybody's who calls it hitrain. */
void ht_event_line_put(const struct ht_ctl_line *l, bool with_colours)
{
    static const char *const colour[] = {"\033[31m", "\033[33m", "", ""};
    enum ht_log_level level = ht_event_line_level(l);
    const char *path = ht_ctl_value(l, "path");
    uint64_t count = ht_ctl_number(l, "count");

    printf("%6llu  ", (unsigned long long)ht_ctl_number(l, "seq"));
    put_time(ht_ctl_number(l, "time_ns"));
    printf("  %s", with_colours ? colour[level] : "");
    put_column(ht_ctl_value(l, "level"), 6);
    put_column(ht_ctl_value(l, "code"), 17);
    if (with_colours && colour[level][0] != '\0')
        fputs("\033[0m", stdout);
    if (path[0] != '\0') {
        putchar('/');
        ht_put_printable(path, stdout);
        fputs(": ", stdout);
    }
    ht_put_printable(ht_ctl_value(l, "text"), stdout);
    if (count > 1)
        printf(" (and %llu more%s)", (unsigned long long)count - 1,
               ht_ctl_value(l, "various")[0] != '\0' ? ", of various files or devices" : "");
    putchar('\n');
}
