/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - the text of user.hitrain.optimizer, with words for ranges of elements. A new word is one row of a table;
 * rules say which they have. Pure: the caller stores the text. Nothing from a client is trusted: every message quotes
 * at most a few clean characters.
 */
#include "optim/rules/config.h"
#include "optim/rules/rule.h"

#include <ctype.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <hitrain/limits.h>

enum { WORD_CHARS_MAX = 128, VALUE_MAX = 192, SHOWN_MAX = 60 }; /* SHOWN_MAX: characters of a word in messages */
typedef unsigned long long ull;

enum kind { NUMBER, COUNT, BITS, FLAG, CHOICE, SPLIT }; /* BITS, FLAG and CHOICE have one byte */

struct word {
    const char *name;
    enum kind kind;
    size_t offset; /* in struct ht_optim_config */
    double min, max;
    bool below_max; /* max itself is not allowed */
    const char *allowed;
    const char *choices; /* of a CHOICE: the words for 0, 1, ... */
};

#define FIELD(name) offsetof(struct ht_optim_config, name)
static const struct word words[] = {
    {"lr", NUMBER, FIELD(lr), 0, FLT_MAX, false, "a number >= 0"},
    {"beta1", NUMBER, FIELD(beta1), 0, 1, true, "a number >= 0 and < 1"},
    {"beta2", NUMBER, FIELD(beta2), 0, 1, true, "a number >= 0 and < 1"},
    {"eps", NUMBER, FIELD(eps), 0, FLT_MAX, false, "a number >= 0"},
    {"weight_decay", NUMBER, FIELD(weight_decay), 0, FLT_MAX, false, "a number >= 0"},
    {"momentum", NUMBER, FIELD(momentum), 0, FLT_MAX, false, "a number >= 0"},
    {"dampening", NUMBER, FIELD(dampening), -FLT_MAX, FLT_MAX, false, "a number"},
    {"lr_decay", NUMBER, FIELD(lr_decay), 0, FLT_MAX, false, "a number >= 0"},
    {"nesterov", FLAG, FIELD(nesterov), 0, 1, false, "0 or 1"},
    {"grad_scale", NUMBER, FIELD(grad_scale), 1e-30, 1e30, false, "a number from 1e-30 to 1e30"},
    {"max_grad_norm", NUMBER, FIELD(max_grad_norm), 0, FLT_MAX, false, "a number >= 0 (0: no clipping)"},
    {"skip_nonfinite", FLAG, FIELD(skip_nonfinite), 0, 1, false, "0 or 1"},
    {"durable_every", COUNT, FIELD(durable_every), 1, 1000000, false, "a whole number from 1 to 1000000"},
    {"retain", COUNT, FIELD(retain), 0, HT_RETAIN_MAX, false, "a whole number from 0 to 1000000 (0: no step is kept)"},
    {"retain_every", COUNT, FIELD(retain_every), 1, 1000000, false, "a whole number from 1 to 1000000"},
    {"retain_must", FLAG, FIELD(retain_must), 0, 1, false, "0 or 1"},
    {"accumulate", COUNT, FIELD(accumulate), 1, HT_ACCUMULATE_MAX, false, "a whole number from 1 to 65536"},
    {"accumulate_mode", CHOICE, FIELD(accumulate_mean), 0, 1, false, "sum or mean", "sum mean"},
    {"state_bits", BITS, FIELD(state_bits), 8, 32, false, "32, 16 or 8"},
    {"state_bits_min", COUNT, FIELD(state_bits_min), 0, UINT32_MAX, false, "a whole number from 0 to 4294967295"},
    {"redo_keep", COUNT, FIELD(redo_keep), 0, HT_REDO_KEEP_MAX, false, "a whole number from 0 to 128 (0: none)"},
    {"redo", CHOICE, FIELD(redo), 0, 1, false, "off or on", "off on"},
    {"delta", CHOICE, FIELD(delta), 0, 1, false, "off or on", "off on"},
    {"delta_keep", COUNT, FIELD(delta_keep), 1, HT_DELTA_KEEP_MAX, false, "a whole number from 1 to 128"},
    {"delta_max", NUMBER, FIELD(delta_max), 0, 1, false, "a number from 0 to 1"},
    {"delta_dtype", CHOICE, FIELD(delta_bf16), 0, 1, false, "same or bf16", "same bf16"},
    {"partial", FLAG, FIELD(partial), 0, 1, false, "0 or 1"},
    {"maximize", FLAG, FIELD(maximize), 0, 1, false, "0 or 1"},
    {"frozen", FLAG, FIELD(frozen), 0, 1, false, "0 or 1"},
    {"adjust_lr", CHOICE, FIELD(adjust_lr), 0, HT_MUON_SPECTRAL_UNCLAMPED, false,
     "original, match_rms_adamw or spectral_unclamped", "original match_rms_adamw spectral_unclamped"},
    {"muon_split", SPLIT, FIELD(muon_split), 0, 0, false,
     "rows of blocks, as in 4096,1024*2 (at most 4 numbers from 1 on, each times how often), or 0 for one block"},
    {"ns", CHOICE, FIELD(ns_store), 0, 1, false, "client or store", "client store"},
    {"ns_steps", COUNT, FIELD(ns_steps), 1, 100, false, "a whole number from 1 to 100"},
    {"ns_a", NUMBER, FIELD(ns_a), -FLT_MAX, FLT_MAX, false, "a number"},
    {"ns_b", NUMBER, FIELD(ns_b), -FLT_MAX, FLT_MAX, false, "a number"},
    {"ns_c", NUMBER, FIELD(ns_c), -FLT_MAX, FLT_MAX, false, "a number"},
    {"missed", COUNT, FIELD(missed), 0, UINT32_MAX, false, "a whole number from 0 to 4294967295"},
};

/* Beside those of the rule. */
static const char common_words[] = "durable_every partial maximize grad_scale max_grad_norm skip_nonfinite "
                                   "accumulate accumulate_mode retain retain_every retain_must redo redo_keep "
                                   "state_bits state_bits_min delta delta_keep delta_max delta_dtype";

/* The same, of a section of a parameter. */
static const char section_words[] = "maximize frozen missed";

/* Words that people try because torch.optim has them. */
static const struct {
    const char *name, *why;
} absent_words[] = {
    {"amsgrad", "is not implemented: the largest second moment is not kept"},
    {"initial_accumulator_value", "is not implemented: state begins with zeros; write .hitrain/state/P/sum instead"},
    {"betas", "is given as beta1= and beta2="},
};

/* One word, cut to a length that messages can hold, with unprintable characters replaced. */
struct token {
    char text[WORD_CHARS_MAX + 1];
    bool cut;
};

/* The next word of [*pos, end). False: there is none. */
static bool next_token(const char **pos, const char *end, struct token *out)
{
    size_t n = 0;

    while (*pos < end && ht_optim_is_space(**pos))
        (*pos)++;
    if (*pos == end)
        return false;
    out->cut = false;
    for (; *pos < end && !ht_optim_is_space(**pos); (*pos)++) {
        if (n == WORD_CHARS_MAX)
            out->cut = true;
        else
            out->text[n++] = isprint((unsigned char)**pos) ? **pos : '?';
    }
    out->text[n] = '\0';
    return true;
}

int ht_optim_refuse(char err[HT_OPTIM_ERROR_MAX], int error, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    vsnprintf(err, HT_OPTIM_ERROR_MAX, fmt, ap);
    va_end(ap);
    return error;
}

/* The place of name among the words of a list, or -1. */
static int place_in(const char *list, const char *name, size_t len)
{
    int place = 0;

    for (size_t n; *list; list += n + (list[n] == ' '), place++) {
        n = strcspn(list, " ");
        if (n == len && !memcmp(list, name, len))
            return place;
    }
    return -1;
}

/* others: those beside the words of the rule. */
static const struct word *find_word(const struct ht_rule *rule, const char *others, const char *name, size_t len)
{
    if (place_in(rule->words, name, len) < 0 && place_in(others, name, len) < 0)
        return NULL;
    for (size_t i = 0; i < HT_ARRAY_SIZE(words); i++)
        if (strlen(words[i].name) == len && !memcmp(words[i].name, name, len))
            return &words[i];
    return NULL;
}

static int refuse_word(const struct ht_rule *rule, const char *others, const char *text, size_t len, char *err)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(absent_words); i++)
        if (strlen(absent_words[i].name) == len && !memcmp(absent_words[i].name, text, len))
            return ht_optim_refuse(err, -EINVAL, "%s %s", absent_words[i].name, absent_words[i].why);
    return ht_optim_refuse(err, -EINVAL, "\"%s\" is no word=value of %s; words: %s %s", text, rule->name, rule->words,
                           others);
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

/* A number from 1 to 999999999 at *text. */
static bool take_rows(const char **text, uint32_t *out)
{
    int n = 0;

    if (!isdigit((unsigned char)**text) || sscanf(*text, "%9u%n", out, &n) != 1)
        return false;
    *text += n;
    return *out > 0;
}

/* "4096,1024*2", or "0". */
static bool parse_split(const char *text, struct ht_muon_split *out)
{
    struct ht_muon_split split = {.count = 0};
    bool more = strcmp(text, "0") != 0;

    while (more) {
        uint32_t rows, times = 1;
        if (split.count == HT_MUON_SPLIT_MAX || !take_rows(&text, &rows))
            return false;
        if (*text == '*' && (text++, !take_rows(&text, &times)))
            return false;
        split.of[split.count].rows = rows;
        split.of[split.count++].times = times;
        more = *text == ',';
        if (*text && *text++ != ',')
            return false;
    }
    *out = split;
    return true;
}

static bool parse_value(const struct word *w, const char *text, double *out)
{
    if (w->kind != CHOICE)
        return parse_number(text, out);
    *out = place_in(w->choices, text, strlen(text));
    return true;
}

static bool in_range(const struct word *w, double value)
{
    if (w->kind != NUMBER && value != floor(value))
        return false;
    if (w->kind == BITS && value != 8 && value != 16 && value != 32)
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
        *(uint8_t *)field = (uint8_t)value;
}

/* seen: bit i: words[i] was there. */
static int parse_word(const struct token *t, const char *others, uint64_t *seen, struct ht_optim_config *out, char *err)
{
    const struct ht_rule *rule = ht_rule_of(out->rule);
    const char *equals = strchr(t->text, '=');
    size_t len = equals ? (size_t)(equals - t->text) : strlen(t->text);
    const struct word *w = equals ? find_word(rule, others, t->text, len) : NULL;
    double value;

    if (!w)
        return refuse_word(rule, others, t->text, len, err);
    if (*seen & UINT64_C(1) << (w - words))
        return ht_optim_refuse(err, -EINVAL, "%s is given twice", w->name);
    bool split = w->kind == SPLIT;
    if (t->cut ||
        (split ? !parse_split(equals + 1, &out->muon_split)
               : !parse_value(w, equals + 1, &value) || !in_range(w, value)))
        return ht_optim_refuse(err, -EINVAL, "%s=%s: must be %s", w->name, equals + 1, w->allowed);
    *seen |= UINT64_C(1) << (w - words);
    if (!split)
        set_word(w, value, out);
    return 0;
}

/* Copies the values of words that every rule has. */
static void copy_common(const struct ht_optim_config *from, struct ht_optim_config *to)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(words); i++) {
        const struct word *w = &words[i];
        size_t bytes = w->kind == NUMBER ? sizeof(double) : w->kind == COUNT ? sizeof(uint32_t) : 1;
        if (place_in(common_words, w->name, strlen(w->name)) >= 0)
            memcpy((char *)to + w->offset, (const char *)from + w->offset, bytes);
    }
}

/* Sets the words to start from: base, or the defaults of the named rule. *pos: after that name. */
static int begin_config(const char **pos, const char *end, const struct ht_optim_config *base,
                        struct ht_optim_config *out, char *err)
{
    const char *words_at = *pos;
    struct token t;

    if (!next_token(pos, end, &t))
        return ht_optim_refuse(err, -EINVAL, "empty; e.g. \"adamw lr=3e-4\"");
    const struct ht_rule *rule = ht_rule_named(t.text);
    if (!rule && (!base || !strchr(t.text, '='))) {
        char names[128];
        ht_rule_names(names, sizeof(names));
        return ht_optim_refuse(err, -EINVAL, "\"%s\" is not known; known: %s", t.text, names);
    }
    if (!rule)
        *pos = words_at;
    if (base && (!rule || rule->defaults.rule == base->rule)) {
        *out = *base;
        return 0;
    }
    *out = rule->defaults;
    if (base)
        copy_common(base, out);
    return 0;
}

/* Words from pos on amend config. */
static int parse_words(const char *pos, const char *end, const char *others, struct ht_optim_config config,
                       struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    struct token t;
    uint64_t seen = 0;

    while (next_token(&pos, end, &t)) {
        int rc = parse_word(&t, others, &seen, &config, err);
        if (rc)
            return rc;
    }
    const char *wrong = ht_rule_of(config.rule)->refuse ? ht_rule_of(config.rule)->refuse(&config) : NULL;
    if (wrong)
        return ht_optim_refuse(err, -EINVAL, "%s", wrong);
    *out = config;
    return 0;
}

int ht_optim_config_amend(const char *text, size_t len, const struct ht_optim_config *base, struct ht_optim_config *out,
                          char err[HT_OPTIM_ERROR_MAX])
{
    const char *pos = text, *end = text + len;
    struct ht_optim_config config;

    if (len > HT_OPTIM_CONFIG_TEXT_MAX)
        return ht_optim_refuse(err, -EINVAL, "%zu characters; at most %d", len, HT_OPTIM_CONFIG_TEXT_MAX);
    int rc = begin_config(&pos, end, base, &config, err);
    return rc ? rc : parse_words(pos, end, common_words, config, out, err);
}

int ht_optim_config_parse(const char *text, size_t len, struct ht_optim_config *out, char err[HT_OPTIM_ERROR_MAX])
{
    return ht_optim_config_amend(text, len, NULL, out, err);
}

/* As few digits as give the same number. */
static void put_number(double value, char buf[32])
{
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(buf, 32, "%.*g", digits, value);
        if (strtod(buf, NULL) == value)
            return;
    }
}

static void put_split(const struct ht_muon_split *split, char buf[VALUE_MAX])
{
    int at = snprintf(buf, VALUE_MAX, "%s", split->count ? "" : "0");

    for (uint32_t i = 0; i < split->count && at < VALUE_MAX; i++) {
        const char *comma = i ? "," : "";
        bool once = split->of[i].times == 1;
        at += once
            ? snprintf(buf + at, (size_t)(VALUE_MAX - at), "%s%u", comma, split->of[i].rows)
            : snprintf(buf + at, (size_t)(VALUE_MAX - at), "%s%u*%u", comma, split->of[i].rows, split->of[i].times);
    }
}

static void put_value(const struct word *w, const struct ht_optim_config *c, char buf[VALUE_MAX])
{
    const void *field = (const char *)c + w->offset;

    if (w->kind == SPLIT) {
        put_split(field, buf);
    } else if (w->kind == NUMBER) {
        put_number(*(const double *)field, buf);
    } else if (w->kind == COUNT) {
        snprintf(buf, VALUE_MAX, "%u", *(const uint32_t *)field);
    } else if (w->kind != CHOICE) {
        snprintf(buf, VALUE_MAX, "%u", *(const uint8_t *)field);
    } else {
        const char *choice = w->choices;
        for (unsigned i = *(const uint8_t *)field; i; i--)
            choice = strchr(choice, ' ') + 1;
        snprintf(buf, VALUE_MAX, "%.*s", (int)strcspn(choice, " "), choice);
    }
}

void ht_optim_config_text(const struct ht_optim_config *c, char *buf, size_t cap)
{
    const struct ht_rule *rule = ht_rule_of(c->rule);
    size_t used = (size_t)snprintf(buf, cap, "%s", rule->name);
    char value[VALUE_MAX];

    for (size_t i = 0; i < HT_ARRAY_SIZE(words) && used < cap; i++) {
        const struct word *w = &words[i];
        if (!find_word(rule, common_words, w->name, strlen(w->name)))
            continue;
        put_value(w, c, value);
        used += (size_t)snprintf(buf + used, cap - used, " %s=%s", w->name, value);
    }
}

/* ---------------------------------------------------------------- sections */

/* Words of the rule, maximize, frozen and missed, and no other. */
static int amend_section(const char *text, size_t len, const struct ht_optim_config *base, struct ht_optim_config *out,
                         char err[HT_OPTIM_ERROR_MAX])
{
    const char *pos = text;
    struct token t;

    if (len > HT_OPTIM_CONFIG_TEXT_MAX)
        return ht_optim_refuse(err, -EINVAL, "%zu characters; at most %d", len, HT_OPTIM_CONFIG_TEXT_MAX);
    if (!next_token(&pos, text + len, &t))
        return ht_optim_refuse(err, -EINVAL, "the range has no words");
    return parse_words(text, text + len, section_words, *base, out, err);
}

/* The number of [*at, end), which digits alone make. False: there is none, or it is beyond any file. */
static bool take_number(const char **at, const char *end, uint64_t *out)
{
    const char *first = *at;
    uint64_t n = 0;

    while (*at < end && **at >= '0' && **at <= '9' && n <= HT_FILE_BYTES_MAX)
        n = n * 10 + (uint64_t)(*(*at)++ - '0');
    *out = n;
    return *at > first && n <= HT_FILE_BYTES_MAX;
}

/* The word at *at is a range, as in 0:32. A word with a colon that makes no sense is one, too: *out is empty then. */
static bool is_range(const char *at, const char *end, struct ht_optim_section *out)
{
    const char *stop = at;

    while (stop < end && !ht_optim_is_space(*stop) && *stop != '=')
        stop++;
    if ((stop < end && *stop == '=') || !memchr(at, ':', (size_t)(stop - at)))
        return false;
    *out = (struct ht_optim_section){.begin = 0};
    if (!take_number(&at, stop, &out->begin) || *at++ != ':' || !take_number(&at, stop, &out->end) || at != stop)
        out->end = 0;
    return true;
}

/* The next range from at on, or end. */
static const char *find_range(const char *at, const char *end)
{
    struct ht_optim_section s;

    while (at < end) {
        while (at < end && ht_optim_is_space(*at))
            at++;
        if (at < end && is_range(at, end, &s))
            return at;
        while (at < end && !ht_optim_is_space(*at))
            at++;
    }
    return end;
}

size_t ht_optim_sections_at(const char *text, size_t len)
{
    return (size_t)(find_range(text, text + len) - text);
}

bool ht_optim_sections_alone(const char *text, size_t own)
{
    while (own && ht_optim_is_space(text[own - 1]))
        own--;
    return !own;
}

/* All elements of a file have the same kinds of state. */
static bool same_state(const struct ht_optim_config *a, const struct ht_optim_config *b)
{
    return a->rule == b->rule && ht_kernel_same_states(ht_rule_kernel(a), ht_rule_kernel(b));
}

static int refuse_section(const struct ht_optim_section *s, const char *why, char err[HT_OPTIM_ERROR_MAX])
{
    char text[HT_OPTIM_ERROR_MAX];

    snprintf(text, sizeof(text), "%llu:%llu: %.200s", (ull)s->begin, (ull)s->end, why);
    memcpy(err, text, sizeof(text));
    return -EINVAL;
}

/* own: the words of the section. */
static int parse_section(const char *own, size_t len, uint64_t from, const struct ht_optim_config *base,
                         struct ht_optim_section *s, char err[HT_OPTIM_ERROR_MAX])
{
    if (s->begin < from)
        return refuse_section(s, "ranges of elements must ascend and may not overlap", err);
    if (amend_section(own, len, base, &s->config, err))
        return refuse_section(s, err, err);
    return same_state(base, &s->config) ? 0 : refuse_section(s, "needs other state than the rest of its file", err);
}

int ht_optim_sections_parse(const char *text, size_t len, const struct ht_optim_config *base,
                            struct ht_optim_sections *out, char err[HT_OPTIM_ERROR_MAX])
{
    const char *end = text + len, *at = find_range(text, end);
    struct ht_optim_section s;
    uint64_t from = 0;
    size_t room = 0;
    int rc = 0;

    *out = (struct ht_optim_sections){.section = NULL};
    while (rc == 0 && at < end && is_range(at, end, &s)) {
        const char *stop = at;
        while (stop < end && !ht_optim_is_space(*stop))
            stop++;
        if (s.begin >= s.end) {
            rc = ht_optim_refuse(err, -EINVAL,
                                 "\"%.*s\" is no range of elements: it has a first one and an end, as in 0:32",
                                 (int)ht_min_u64((uint64_t)(stop - at), SHOWN_MAX), at);
            break;
        }
        at = find_range(stop, end);
        rc = parse_section(stop, (size_t)(at - stop), from, base, &s, err);
        if (rc == 0)
            rc = ht_array_grow((void **)&out->section, &room, out->count + 1, sizeof(s));
        if (rc == 0)
            out->section[out->count++] = s;
        from = s.end;
    }
    if (rc == -ENOMEM)
        snprintf(err, HT_OPTIM_ERROR_MAX, "no memory for ranges of elements");
    return rc;
}

void ht_optim_sections_free(struct ht_optim_sections *s)
{
    free(s->section);
    *s = (struct ht_optim_sections){.section = NULL};
}
