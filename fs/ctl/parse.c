/* SPDX-License-Identifier: Apache-2.0 */
/* parse.c - see parse.h. */
#include "fs/ctl/parse.h"

#include <stdio.h>

int ht_parse_u64(const char *text, size_t len, uint64_t *out)
{
    uint64_t v = 0;

    if (len == 0)
        return -EINVAL;
    for (size_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9')
            return -EINVAL;
        if (__builtin_mul_overflow(v, 10u, &v) || __builtin_add_overflow(v, (uint64_t)(text[i] - '0'), &v))
            return -ERANGE;
    }
    *out = v;
    return 0;
}

static bool is_word(const char *text, size_t len, const char *word)
{
    return strlen(word) == len && memcmp(text, word, len) == 0;
}

const struct ht_dtype_word *ht_parse_dtype(const char *text, size_t len)
{
    for (size_t i = 0; i < HT_DTYPE_WORDS; i++)
        if (is_word(text, len, ht_dtype_words[i].word))
            return &ht_dtype_words[i];
    return NULL;
}

const struct ht_dtype_word *ht_dtype_row(uint8_t dtype)
{
    for (size_t i = 0; i < HT_DTYPE_WORDS; i++)
        if (ht_dtype_words[i].dtype == dtype)
            return &ht_dtype_words[i];
    return NULL;
}

int ht_parse_shape(const char *text, size_t len, struct ht_shape *out)
{
    struct ht_shape shape = {.elements = 1};
    const char *p = text, *end = text + len;

    while (p < end) {
        const char *comma = memchr(p, ',', (size_t)(end - p));
        size_t n = (size_t)((comma ? comma : end) - p);
        uint64_t dim;
        int r = ht_parse_u64(p, n, &dim);

        if (r)
            return r;
        if (shape.count == HT_SHAPE_DIMS_MAX || (comma && comma + 1 == end))
            return -EINVAL;
        if (__builtin_mul_overflow(shape.elements, dim, &shape.elements) || shape.elements > HT_FILE_BYTES_MAX)
            return -ERANGE;
        shape.dim[shape.count++] = dim;
        p += n + (comma ? 1 : 0);
    }
    *out = shape;
    return 0;
}

enum argument { ARG_NONE, ARG_OPTIONAL, ARG_REQUIRED, ARG_START_STOP };
static const char *const takes[] = {"no argument", "the path of a file or nothing", "the path of a file",
                                    "start or stop"};

static const struct {
    const char *word;
    enum ht_command_id id;
    enum argument argument;
} commands[] = {
    {"apply", HT_COMMAND_APPLY, ARG_REQUIRED},
    {"wait", HT_COMMAND_WAIT, ARG_OPTIONAL},
    {"step", HT_COMMAND_STEP, ARG_NONE},
    {"commit", HT_COMMAND_COMMIT, ARG_NONE},
    {"abort", HT_COMMAND_ABORT, ARG_NONE},
    {"reset", HT_COMMAND_RESET, ARG_REQUIRED},
    {"prefetch", HT_COMMAND_PREFETCH, ARG_REQUIRED},
    {"evict", HT_COMMAND_EVICT, ARG_REQUIRED},
    {"scrub", HT_COMMAND_SCRUB, ARG_START_STOP},
};

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

static bool fits(enum argument kind, const char *text, size_t len)
{
    switch (kind) {
    case ARG_NONE:
        return len == 0;
    case ARG_REQUIRED:
        return len != 0;
    case ARG_START_STOP:
        return is_word(text, len, "start") || is_word(text, len, "stop");
    default:
        return true;
    }
}

static int unknown_command(const char *word, size_t len, char err[HT_CTL_ERROR_MAX])
{
    int at = snprintf(err, HT_CTL_ERROR_MAX, "unknown command '%.*s': known are", (int)ht_min_u64(len, 64), word);

    for (size_t i = 0; i < HT_ARRAY_SIZE(commands) && at < HT_CTL_ERROR_MAX; i++)
        at += snprintf(err + at, (size_t)(HT_CTL_ERROR_MAX - at), " %s", commands[i].word);
    return -EINVAL;
}

int ht_parse_command(const char *line, size_t len, struct ht_command *out, char err[HT_CTL_ERROR_MAX])
{
    size_t word_len = 0;

    for (; len && is_blank(*line); line++)
        len--;
    while (len && is_blank(line[len - 1]))
        len--;
    *out = (struct ht_command){HT_COMMAND_NONE, NULL, 0};
    if (len == 0)
        return 0;
    while (word_len < len && !is_blank(line[word_len]))
        word_len++;
    for (size_t i = 0; i < HT_ARRAY_SIZE(commands); i++) {
        size_t at = word_len;

        if (!is_word(line, word_len, commands[i].word))
            continue;
        while (at < len && is_blank(line[at]))
            at++;
        if (!fits(commands[i].argument, line + at, len - at)) {
            snprintf(err, HT_CTL_ERROR_MAX, "'%s' takes %s", commands[i].word, takes[commands[i].argument]);
            return -EINVAL;
        }
        *out = (struct ht_command){commands[i].id, line + at, len - at};
        return 0;
    }
    return unknown_command(line, word_len, err);
}

int ht_parse_component(const char **path, size_t *len, char name[HT_NAME_BYTES_MAX + 1])
{
    size_t n = 0;

    for (; *len && **path == '/'; ++*path)
        --*len;
    if (*len == 0)
        return 0;
    while (n < *len && (*path)[n] != '/')
        n++;
    if (n > HT_NAME_BYTES_MAX)
        return -ENAMETOOLONG;
    if (memchr(*path, 0, n) || is_word(*path, n, ".") || is_word(*path, n, ".."))
        return -EINVAL;
    memcpy(name, *path, n);
    name[n] = 0;
    *path += n;
    *len -= n;
    return 1;
}
