/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines of the daemon as hitrainctl reads them, as JSON and as key=value, from a mount of any user. The text for people
 * holds nothing that a terminal obeys; the JSON output is JSON.
 */
#include "mount-helpers/ctl/event_line.h"
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
    size_t n = strncmp(p, "true", 4) == 0 ? 4 : strspn(p, "-+.eE0123456789");
    MUST(n > 0);
    return p + n;
}

/* One object of strings, numbers and true on one line. */
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

static void check_printable(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        MUST((unsigned char)text[i] >= 0x20 || (text[i] == '\n' && i + 1 == len));
    MUST(len > 0 && text[len - 1] == '\n' && !memchr(text, 0x7f, len));
}

/* ------------------------------------------------------------------- input */

/* Returns the output of a call on stdout. */
static char *output_of(struct ht_cmd_line *l, bool json, size_t *len)
{
    FILE *out = stdout;
    char *text = NULL;

    stdout = open_memstream(&text, len);
    MUST(stdout);
    if (json)
        ht_event_line_put_json(l);
    else
        ht_event_line_put(l, false);
    fclose(stdout);
    stdout = out;
    return text;
}

static void check_output(struct ht_cmd_line *l)
{
    size_t len = 0;
    char *text;

    (void)ht_cmd_number(l, "seq");
    text = output_of(l, false, &len);
    check_printable(text, len);
    free(text);
    text = output_of(l, true, &len);
    MUST(strlen(text) == len);
    check_object(text);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *line = fuzz_text(data, size), *copy;
    struct ht_cmd_line l;

    for (char *p = line; *p; p++)
        if (*p == '\n')
            *p = ' '; /* a line is without one */
    copy = strdup(line);
    MUST(copy);
    if (ht_cmd_parse_json(copy, &l) == 0)
        check_output(&l);
    ht_cmd_parse_line(line, &l);
    check_output(&l);
    free(copy);
    free(line);
    return 0;
}
