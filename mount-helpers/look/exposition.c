/* SPDX-License-Identifier: Apache-2.0 */
/* exposition.c - see exposition.h. No input and output here, so that tests need no socket. */
#include "mount-helpers/look/exposition.h"

/* ---------------------------------------------------------------- text format */

struct family {
    char name[128], type[16]; /* of the last line # TYPE */
};

/* The name of the samples of a family, for which the text format wants # TYPE and # HELP. */
static const char *suffix_of(const struct family *f)
{
    return strcmp(f->type, "counter") == 0 ? "_total" : strcmp(f->type, "info") == 0 ? "_info" : "";
}

/* # TYPE, # HELP, # UNIT and # EOF: the last two are not known. */
static void put_comment(const char *line, struct family *f, struct ht_buf *out)
{
    char name[128];
    int n = 0;

    if (sscanf(line, "# TYPE %127s %15s", f->name, f->type) == 2)
        ht_buf_printf(out, "# TYPE %s%s %s\n", f->name, suffix_of(f),
                      strcmp(f->type, "counter") == 0 ? "counter" : "gauge");
    else if (sscanf(line, "# HELP %127s %n", name, &n) == 1 && n > 0)
        ht_buf_printf(out, "# HELP %s%s %s\n", name, strcmp(name, f->name) == 0 ? suffix_of(f) : "", line + n);
}

void ht_exposition_text(char *text, struct ht_buf *out)
{
    struct family f = {"", ""};
    char *save;

    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        if (line[0] == '#')
            put_comment(line, &f, out);
        else
            ht_buf_printf(out, "%s\n", line);
    }
}

/* -------------------------------------------------------------------- requests */

/* The header's value contains a word. Names of headers know no case. */
static bool header_has(const char *request, const char *name, const char *word)
{
    size_t len = strlen(name);

    for (const char *line = request; (line = strchr(line, '\n'));) {
        line++;
        if (strncasecmp(line, name, len) != 0)
            continue;
        const char *end = line + strcspn(line, "\r\n"), *at = strstr(line, word);
        if (at && at < end)
            return true;
    }
    return false;
}

enum ht_http_answer ht_http_parse(const char *request, bool *out_head)
{
    char method[16], target[256], version[16];

    *out_head = false;
    if (sscanf(request, "%15s %255s %15[^\r\n]", method, target, version) != 3 || strncmp(version, "HTTP/1.", 7) != 0)
        return HT_HTTP_BAD;
    *out_head = strcmp(method, "HEAD") == 0;
    if (!*out_head && strcmp(method, "GET") != 0)
        return HT_HTTP_METHOD;
    target[strcspn(target, "?")] = '\0';
    if (strcmp(target, "/") == 0)
        return HT_HTTP_INDEX;
    if (strcmp(target, "/metrics") != 0)
        return HT_HTTP_NONE;
    return header_has(request, "accept:", "application/openmetrics-text") ? HT_HTTP_OPENMETRICS : HT_HTTP_METRICS;
}

bool ht_http_address(const char *text, char host[64], char port[8])
{
    const char *colon = strrchr(text, ':');
    size_t len = colon ? (size_t)(colon - text) : 0;
    bool brackets = len >= 2 && text[0] == '[' && text[len - 1] == ']';

    if (!colon || len >= 64 || strlen(colon + 1) > 5 || colon[1] == '\0' ||
        colon[1 + strspn(colon + 1, "0123456789")] != '\0' || strtoul(colon + 1, NULL, 10) > UINT16_MAX)
        return false;
    if (!brackets && memchr(text, ':', len))
        return false;
    snprintf(port, 8, "%s", colon + 1);
    if (len == 0)
        strcpy(host, "127.0.0.1");
    else
        snprintf(host, 64, "%.*s", (int)(brackets ? len - 2 : len), text + brackets);
    return true;
}
