/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines of the daemon as hitrainctl reads them, from a mount of any user. The text for people, of each command that
 * shows lines, holds nothing that a terminal obeys; the JSON output is JSON.
 */
#include "mount-helpers/look/show.h"
#include "tests/fuzz/fuzz.h"

/* -------------------------------------------------------- a parser of JSON */

static const char *skip_string(const char *p)
{
    MUST(*p++ == '"');
    for (; *p != '"'; p++) {
        MUST((unsigned char)*p >= 0x20);
        if (*p == '\\') {
            MUST(p[1] != '\0' && strchr("\"\\u", p[1]));
            p++;
        }
    }
    return p + 1;
}

static const char *skip_value(const char *p)
{
    if (*p == '"')
        return skip_string(p);
    size_t n = strncmp(p, "true", 4) == 0 ? 4 : strncmp(p, "false", 5) == 0 ? 5 : strspn(p, "-+.eE0123456789");
    MUST(n > 0);
    return p + n;
}

/* One object of strings, numbers, true and false on one line. */
static void check_object(const char *p)
{
    MUST(*p++ == '{');
    while (*p != '}') {
        p = skip_string(p);
        MUST(p[0] == ':' && p[1] == ' ');
        p = skip_value(p + 2);
        MUST(*p == '}' || (p[0] == ',' && p[1] == ' '));
        p += *p == ',' ? 2 : 0;
    }
    MUST(p[1] == '\n' && p[2] == '\0');
}

/* ------------------------------------------------------------------- input */

/* Returns the line on stdout: as a row of the table, or as JSON if it is NULL. */
static char *output_of(const struct ht_cmd_line *l, const struct ht_column *table, size_t *len)
{
    struct ht_json j;
    FILE *out = stdout;
    char *text = NULL;

    stdout = open_memstream(&text, len);
    MUST(stdout);
    ht_json_init_lines(&j, stdout);
    if (table)
        ht_show_line(table, false, l);
    else
        ht_show_json(&j, NULL, l);
    fclose(stdout);
    stdout = out;
    return text;
}

static const char *const commands[] = {"background", "device", "events", "roots", "steps", "trace"};

static void check_output(const struct ht_cmd_line *l)
{
    size_t len = 0;
    char *text;

    for (unsigned i = 0; i < HT_SHOW_TABLES_MAX * HT_ARRAY_SIZE(commands); i++) {
        const struct ht_column *table = ht_show_find(commands[i / HT_SHOW_TABLES_MAX])->table[i % HT_SHOW_TABLES_MAX];
        if (!table)
            continue;
        text = output_of(l, table, &len);
        for (size_t at = 0; at < len; at++)
            MUST((unsigned char)text[at] >= 0x20 || (text[at] == '\n' && at + 1 == len));
        MUST(len > 0 && text[len - 1] == '\n' && !memchr(text, 0x7f, len));
        free(text);
    }
    text = output_of(l, NULL, &len);
    MUST(strlen(text) == len);
    check_object(text);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *line = fuzz_text(data, size);
    struct ht_cmd_line l;

    for (char *p = line; *p; p++)
        if (*p == '\n')
            *p = ' '; /* a line is without one */
    if (ht_cmd_parse_json(line, &l) == 0)
        check_output(&l);
    free(line);
    return 0;
}
