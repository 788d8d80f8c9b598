/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines of .hitrain/events as hitrainctl reads them, of a mount that may be anybody's: for people they hold nothing that a terminal
 * obeys, as JSON they are JSON.
 */
#include "mount-helpers/ctl/event_line.h"
#include "tests/fuzz/fuzz.h"

/* ------------------------------------------------------------ what JSON is */

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
    size_t n = strspn(p, "-+.eE0123456789");
    MUST(n > 0);
    return p + n;
}

/* One object of strings and numbers on one line. */
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

/* What a call puts on stdout. */
static char *output_of(struct ht_ctl_line *l, bool json, size_t *len)
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *line = fuzz_text(data, size), *text;
    struct ht_ctl_line l;
    size_t len = 0;

    for (char *p = line; *p; p++)
        if (*p == '\n')
            *p = ' '; /* a line is without one */
    ht_ctl_parse_line(line, &l);
    (void)ht_ctl_number(&l, "seq");
    text = output_of(&l, false, &len);
    check_printable(text, len);
    free(text);
    text = output_of(&l, true, &len);
    MUST(strlen(text) == len);
    check_object(text);
    free(text);
    free(line);
    return 0;
}
