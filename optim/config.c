/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - the text of user.hitrain.optimizer. A new word is one row of a table; a new rule one row of another.
 * Pure: the caller stores the text. Nothing from a client is trusted: every message quotes at most a few clean
 * characters of it.
 */
#include "optim/optim.h"

#include <ctype.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { WORD_CHARS_MAX = 64 };

enum kind { NUMBER, COUNT, FLAG };

struct word {
    const char *name;
    enum kind kind;
    size_t offset; /* in struct ht_optim_config */
    double min, max;
    bool below_max; /* max itself is not allowed */
    const char *allowed;
};

#define FIELD(name) offsetof(struct ht_optim_config, name)
static const struct word words[] = {
    {"lr", NUMBER, FIELD(lr), 0, FLT_MAX, false, "a number >= 0"},
    {"beta1", NUMBER, FIELD(beta1), 0, 1, true, "a number >= 0 and < 1"},
    {"beta2", NUMBER, FIELD(beta2), 0, 1, true, "a number >= 0 and < 1"},
    {"eps", NUMBER, FIELD(eps), 0, FLT_MAX, false, "a number >= 0"},
    {"weight_decay", NUMBER, FIELD(weight_decay), 0, FLT_MAX, false, "a number >= 0"},
    {"durable_every", COUNT, FIELD(durable_every), 1, 1000000, false, "a whole number from 1 to 1000000"},
    {"partial", FLAG, FIELD(partial), 0, 1, false, "0 or 1"},
    {"maximize", FLAG, FIELD(maximize), 0, 1, false, "0 or 1"},
};

/* The defaults of torch.optim.AdamW. */
static const struct ht_optim_config adamw_defaults = {
    .rule = HT_RULE_ADAMW,
    .lr = 1e-3,
    .beta1 = 0.9,
    .beta2 = 0.999,
    .eps = 1e-8,
    .weight_decay = 1e-2,
    .durable_every = 1,
};

static const struct {
    const char *name;
    const struct ht_optim_config *defaults;
} rules[] = {{"adamw", &adamw_defaults}};

/* One word, cut to a length that messages can hold, with unprintable characters replaced. */
struct token {
    char text[WORD_CHARS_MAX + 1];
    bool cut;
};

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* The next word of [*pos, end). False: there is none. */
static bool next_token(const char **pos, const char *end, struct token *out)
{
    size_t n = 0;

    while (*pos < end && is_space(**pos))
        (*pos)++;
    if (*pos == end)
        return false;
    out->cut = false;
    for (; *pos < end && !is_space(**pos); (*pos)++) {
        if (n == WORD_CHARS_MAX)
            out->cut = true;
        else
            out->text[n++] = isprint((unsigned char)**pos) ? **pos : '?';
    }
    out->text[n] = '\0';
    return true;
}

static HT_PRINTF(2, 3) int refuse(char *err, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(err, HT_OPTIM_ERROR_MAX, fmt, ap);
    va_end(ap);
    return -EINVAL;
}

static int parse_rule(const struct token *t, struct ht_optim_config *out, char *err)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(rules); i++) {
        if (!strcmp(t->text, rules[i].name)) {
            *out = *rules[i].defaults;
            return 0;
        }
    }
    return refuse(err, "optimizer \"%s\" is not known; known: adamw", t->text);
}

static const struct word *find_word(const char *name, size_t len)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(words); i++) {
        if (strlen(words[i].name) == len && !memcmp(words[i].name, name, len))
            return &words[i];
    }
    return NULL;
}

/* Decimal numbers only: strtod also takes hexadecimal ones, infinities and NaN. */
static bool parse_number(const char *text, double *out)
{
    char *end;

    if (!*text || text[strspn(text, "0123456789.eE+-")] != '\0')
        return false;
    *out = strtod(text, &end);
    return *end == '\0' && isfinite(*out);
}

static bool in_range(const struct word *w, double value)
{
    if (w->kind != NUMBER && value != floor(value))
        return false;
    return value >= w->min && (w->below_max ? value < w->max : value <= w->max);
}

static void set_word(const struct word *w, double value, struct ht_optim_config *config)
{
    void *field = (char *)config + w->offset;

    if (w->kind == NUMBER)
        *(double *)field = value;
    else if (w->kind == COUNT)
        *(uint32_t *)field = (uint32_t)value;
    else
        *(bool *)field = value != 0;
}

/* seen: bit i: words[i] was there. */
static int parse_word(const struct token *t, unsigned *seen, struct ht_optim_config *out, char *err)
{
    const char *equals = strchr(t->text, '=');
    const struct word *w = equals ? find_word(t->text, (size_t)(equals - t->text)) : NULL;
    double value;

    if (!w)
        return refuse(
            err,
            "\"%s\" is no word=value of adamw; words: lr beta1 beta2 eps weight_decay durable_every partial maximize",
            t->text);
    if (*seen & 1u << (w - words))
        return refuse(err, "%s is given twice", w->name);
    if (t->cut || !parse_number(equals + 1, &value) || !in_range(w, value))
        return refuse(err, "%s=%s: must be %s", w->name, equals + 1, w->allowed);
    *seen |= 1u << (w - words);
    set_word(w, value, out);
    return 0;
}

int ht_optim_config_parse(const char *text, size_t len, struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    const char *pos = text, *end = text + len;
    struct ht_optim_config config;
    struct token t;
    unsigned seen = 0;
    int ret;

    if (len > HT_OPTIM_CONFIG_TEXT_MAX)
        return refuse(err, "optimizer: %zu characters; at most %d", len, HT_OPTIM_CONFIG_TEXT_MAX);
    if (!next_token(&pos, end, &t))
        return refuse(err, "optimizer: empty; e.g. \"adamw lr=3e-4\"");
    ret = parse_rule(&t, &config, err);
    while (!ret && next_token(&pos, end, &t))
        ret = parse_word(&t, &seen, &config, err);
    if (ret)
        return ret;
    /* Both are finite, their product may not be. */
    if (config.lr * config.weight_decay > FLT_MAX)
        return refuse(err, "weight_decay: lr * weight_decay is too large");
    *out = config;
    return 0;
}
