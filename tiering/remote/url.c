/* SPDX-License-Identifier: Apache-2.0 */
/* url.c - which URLs of a vault a store takes: those that mount-helpers/vault/engine.py takes. Pure functions. */
#include "tiering/remote/remote.h"

#include <ctype.h>
#include <strings.h>

static size_t scheme_length(const char *text)
{
    size_t n = 0;

    if (*text >= 'a' && *text <= 'z')
        while ((text[n] >= 'a' && text[n] <= 'z') || (text[n] >= '0' && text[n] <= '9'))
            n++;
    return text[n] == ':' ? n : 0;
}

/* user:password@host */
static bool has_password(const char *host, size_t len)
{
    const char *at = memrchr(host, '@', len);

    return at && memchr(host, ':', (size_t)(at - host));
}

/* A word of ?word=value&word=value. */
static bool is_secret(const char *word, size_t len)
{
    static const char *const secrets[] = {"key", "secret", "token", "password", "signature", "credential"};

    for (size_t i = 0; i < HT_ARRAY_SIZE(secrets); i++)
        for (size_t at = 0, n = strlen(secrets[i]); at + n <= len; at++)
            if (strncasecmp(word + at, secrets[i], n) == 0)
                return true;
    return false;
}

/* A % could hide a word from the check, and no scheme needs one before a =. */
static bool has_secret(const char *query)
{
    while (*query) {
        size_t len = strcspn(query, "&"), word = strcspn(query, "=&#");
        if (is_secret(query, word) || memchr(query, '%', word))
            return true;
        query += len + (query[len] == '&');
    }
    return false;
}

static int file_url(const char *path, char out_url[HT_REMOTE_URL_BYTES])
{
    size_t at = (size_t)snprintf(out_url, HT_REMOTE_URL_BYTES, "file://");

    for (; *path; path++) {
        unsigned char c = (unsigned char)*path;
        bool is_plain = isalnum(c) ? c < 0x80 : strchr("/_.-~", c) != NULL;
        if (at + 4 > HT_REMOTE_URL_BYTES)
            return -ENAMETOOLONG;
        at += (size_t)snprintf(out_url + at, HT_REMOTE_URL_BYTES - at, is_plain ? "%c" : "%%%02X", c);
    }
    return 0;
}

int ht_remote_url(const char *text, char out_url[HT_REMOTE_URL_BYTES])
{
    size_t scheme = scheme_length(text);

    if (!scheme)
        return *text == '/' ? file_url(text, out_url) : -EINVAL;
    for (const char *c = text; *c; c++)
        if (*c <= ' ' || *c > '~')
            return -EINVAL;
    const char *rest = text + scheme + 1, *query = strchr(rest, '?');
    if (strncmp(rest, "//", 2) == 0 && has_password(rest + 2, strcspn(rest + 2, "/?#")))
        return -EPERM;
    if (query && has_secret(query + 1))
        return -EPERM;
    if (strlen(text) >= HT_REMOTE_URL_BYTES)
        return -ENAMETOOLONG;
    memcpy(out_url, text, strlen(text) + 1);
    return 0;
}
