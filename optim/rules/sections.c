/* SPDX-License-Identifier: Apache-2.0 */
/* sections.c - see sections.h. Nothing from a client is trusted. */
#include "optim/rules/sections.h"

#include <string.h>

#include "optim/rules/rule.h"
#include <hitrain/limits.h>

enum { SHOWN_MAX = 60 }; /* characters of a word in messages */
typedef unsigned long long ull;

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

static int refuse(const struct ht_optim_section *s, const char *why, char err[HT_OPTIM_ERROR_MAX])
{
    char text[HT_OPTIM_ERROR_MAX];

    snprintf(text, sizeof(text), "%llu:%llu: %.200s", (ull)s->begin, (ull)s->end, why);
    memcpy(err, text, sizeof(text));
    return -EINVAL;
}

/* words: those of the section. */
static int parse_section(const char *words, size_t len, uint64_t from, const struct ht_optim_config *base,
                         struct ht_optim_section *s, char err[HT_OPTIM_ERROR_MAX])
{
    if (s->begin < from)
        return refuse(s, "ranges of elements must ascend and may not overlap", err);
    if (ht_optim_config_amend_section(words, len, base, &s->config, err))
        return refuse(s, err, err);
    return same_state(base, &s->config) ? 0 : refuse(s, "needs other state than the rest of its file", err);
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
        const char *words = at;
        while (words < end && !ht_optim_is_space(*words))
            words++;
        if (s.begin >= s.end) {
            rc = ht_optim_refuse(err, -EINVAL,
                                 "\"%.*s\" is no range of elements: it has a first one and an end, as in 0:32",
                                 (int)ht_min_u64((uint64_t)(words - at), SHOWN_MAX), at);
            break;
        }
        at = find_range(words, end);
        rc = parse_section(words, (size_t)(at - words), from, base, &s, err);
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
