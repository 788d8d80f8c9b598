/* SPDX-License-Identifier: Apache-2.0 */
/* json.c - see json.h. It does not know the meaning of its output. */
#include "tiering/base/json.h"

#define DIGITS "0123456789"

void ht_json_init(struct ht_json *j, FILE *to)
{
    *j = (struct ht_json){.to = to};
}

void ht_json_init_lines(struct ht_json *j, FILE *to)
{
    ht_json_init(j, to);
    j->lines = true;
}

static const unsigned char *put_char(FILE *to, const unsigned char *p)
{
    if (*p == '"' || *p == '\\') {
        fprintf(to, "\\%c", *p);
        return p + 1;
    }
    if (*p < 0x20 || *p == 0x7f) {
        fprintf(to, "\\u%04x", *p);
        return p + 1;
    }
    if (*p < 0x80) {
        fputc(*p, to);
        return p + 1;
    }
    unsigned n = ht_utf8_length((const char *)p);
    if (n == 0) {
        fprintf(to, "\\udc%02x", *p);
        return p + 1;
    }
    fwrite(p, 1, n, to);
    return p + n;
}

static void put_string(FILE *to, const char *text)
{
    const unsigned char *p = (const unsigned char *)text;

    fputc('"', to);
    while (*p != '\0')
        p = put_char(to, p);
    fputc('"', to);
}

/* Writes the text before a value: comma, line break, key. */
static void lead(struct ht_json *j, const char *key)
{
    if (j->depth > 0) {
        unsigned d = j->depth - 1;
        if (j->level[d].any)
            fputc(',', j->to);
        if (j->level[d].one_line)
            fputs(j->level[d].any ? " " : "", j->to);
        else
            fprintf(j->to, "\n%*s", (int)j->depth * 2, "");
        j->level[d].any = true;
    }
    if (key) {
        put_string(j->to, key);
        fputs(": ", j->to);
    }
}

static void open_level(struct ht_json *j, const char *key, char opening, char closing)
{
    bool one_line =
        j->lines || (j->depth > 0 && (j->level[j->depth - 1].close == ']' || j->level[j->depth - 1].one_line));

    assert(j->depth < HT_JSON_DEPTH_MAX);
    lead(j, key);
    fputc(opening, j->to);
    j->level[j->depth].close = closing;
    j->level[j->depth].any = false;
    j->level[j->depth].one_line = one_line;
    j->depth++;
}

void ht_json_object(struct ht_json *j, const char *key)
{
    open_level(j, key, '{', '}');
}

void ht_json_array(struct ht_json *j, const char *key)
{
    open_level(j, key, '[', ']');
}

void ht_json_end(struct ht_json *j)
{
    assert(j->depth > 0);
    j->depth--;
    if (j->level[j->depth].any && !j->level[j->depth].one_line)
        fprintf(j->to, "\n%*s", (int)j->depth * 2, "");
    fputc(j->level[j->depth].close, j->to);
    if (j->depth == 0)
        fputc('\n', j->to);
}

void ht_json_str(struct ht_json *j, const char *key, const char *text)
{
    lead(j, key);
    put_string(j->to, text);
}

void ht_json_u64(struct ht_json *j, const char *key, uint64_t value)
{
    lead(j, key);
    fprintf(j->to, "%llu", (unsigned long long)value);
}

void ht_json_bool(struct ht_json *j, const char *key, bool value)
{
    lead(j, key);
    fputs(value ? "true" : "false", j->to);
}

/* -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)? */
static bool is_number(const char *p)
{
    p += *p == '-';
    const char *begin = p;
    p += strspn(p, DIGITS);
    if (p == begin || (*begin == '0' && p > begin + 1))
        return false;
    if (*p == '.') {
        begin = ++p;
        p += strspn(p, DIGITS);
        if (p == begin)
            return false;
    }
    if (*p == 'e' || *p == 'E') {
        p++;
        p += *p == '-' || *p == '+';
        begin = p;
        p += strspn(p, DIGITS);
        if (p == begin)
            return false;
    }
    return *p == '\0';
}

void ht_json_word(struct ht_json *j, const char *key, const char *text)
{
    lead(j, key);
    if (is_number(text))
        fputs(text, j->to);
    else
        put_string(j->to, text);
}
