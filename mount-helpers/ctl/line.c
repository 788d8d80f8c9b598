/* SPDX-License-Identifier: Apache-2.0 */
/*
 * line.c - decodes one line of a hidden file of JSON Lines, in place.
 *
 * The mount may belong to another program that calls itself hitrain, so a line may hold anything. Strings are the
 * reverse of tiering/base/json.h: \udcXX is the byte XX.
 */
#include "mount-helpers/ctl/ctl.h"

/* The four digits at p, or -1. */
static int hex_value(const char *p)
{
    char digits[5] = "";

    if (strspn(p, "0123456789abcdefABCDEF") < 4)
        return -1;
    memcpy(digits, p, 4);
    return (int)strtol(digits, NULL, 16);
}

static char *put_utf8(char *to, unsigned c)
{
    unsigned follow = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    static const unsigned char first[] = {0, 0xc0, 0xe0, 0xf0};

    *to++ = (char)(first[follow] | c >> 6 * follow);
    while (follow-- > 0)
        *to++ = (char)(0x80 | (c >> 6 * follow & 0x3f));
    return to;
}

/* Decodes \uXXXX, or a pair of these for a character beyond 0xffff. A NUL and half a pair are refused. */
static char *decode_number(char *p, char **to)
{
    int c = hex_value(p + 2), low;

    if (c <= 0)
        return NULL;
    p += 6;
    if (c >= 0xdc80 && c <= 0xdcff) {
        *(*to)++ = (char)c;
        return p;
    }
    if (c >= 0xd800 && c < 0xdc00) {
        low = p[0] == '\\' && p[1] == 'u' ? hex_value(p + 2) : -1;
        if (low < 0xdc00 || low > 0xdfff)
            return NULL;
        c = 0x10000 + ((c & 0x3ff) << 10 | (low & 0x3ff));
        p += 6;
    }
    if (c >= 0xdc00 && c <= 0xdfff)
        return NULL;
    *to = put_utf8(*to, (unsigned)c);
    return p;
}

/* Decodes a string in place, after its opening quote. Returns the text after the closing one; NULL: no string. */
static char *decode_string(char *p)
{
    static const char names[] = "\"\\/bfnrt", bytes[] = "\"\\/\b\f\n\r\t";
    char *to = p;

    while (p && *p != '"') {
        const char *name = p[0] == '\\' && p[1] != '\0' ? strchr(names, p[1]) : NULL;
        if ((unsigned char)*p < 0x20) {
            return NULL;
        } else if (*p != '\\') {
            *to++ = *p++;
        } else if (name) {
            *to++ = bytes[name - names];
            p += 2;
        } else {
            p = p[1] == 'u' ? decode_number(p, &to) : NULL;
        }
    }
    *to = '\0';
    return p ? p + 1 : NULL;
}

static char *skip_blanks(char *p)
{
    return p + strspn(p, " \t\r\n");
}

/* One value, and the comma or brace after it. Returns the text after these; NULL: neither a string nor a word. */
static char *take_value(char *p, struct ht_cmd_field *f, char *out_end)
{
    f->is_text = *p == '"';
    f->value = p + f->is_text;
    char *end = f->is_text ? decode_string(f->value) : p + strspn(p, "+-.0123456789Eaeflnrstu");
    if (!end || end == p)
        return NULL;
    p = skip_blanks(end);
    *out_end = *p;
    *end = '\0';
    return *out_end == ',' || *out_end == '}' ? p + 1 : NULL;
}

int ht_cmd_parse_json(char *text, struct ht_cmd_line *out)
{
    char *p = skip_blanks(text), end = ',';

    out->count = 0;
    if (*p != '{')
        return -EPROTO;
    for (p++; p && end == ',';) {
        struct ht_cmd_field f;
        p = skip_blanks(p);
        if (*p != '"')
            return -EPROTO;
        f.key = p + 1;
        p = decode_string(p + 1);
        p = p ? skip_blanks(p) : NULL;
        p = p && *p == ':' ? take_value(skip_blanks(p + 1), &f, &end) : NULL;
        if (p && out->count < HT_CMD_FIELDS_MAX)
            out->field[out->count++] = f;
    }
    return p && *skip_blanks(p) == '\0' ? 0 : -EPROTO;
}

/* ------------------------------------------------------------------ values */

const char *ht_cmd_value(const struct ht_cmd_line *l, const char *key)
{
    for (unsigned i = 0; i < l->count; i++)
        if (strcmp(l->field[i].key, key) == 0)
            return l->field[i].value;
    return "";
}

uint64_t ht_cmd_number(const struct ht_cmd_line *l, const char *key)
{
    return strtoull(ht_cmd_value(l, key), NULL, 10);
}
