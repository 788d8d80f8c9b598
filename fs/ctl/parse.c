/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/ctl/parse.h"

#include <strings.h>

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

int ht_parse_bytes(const char *text, size_t len, uint64_t *out)
{
    char word[64];

    if (len >= sizeof(word) || memchr(text, '\0', len))
        return -EINVAL;
    memcpy(word, text, len);
    word[len] = '\0';
    return ht_parse_size(word, out);
}

static bool is_word(const char *text, size_t len, const char *word)
{
    return strlen(word) == len && memcmp(text, word, len) == 0;
}

int ht_parse_next_use(const char *text, size_t len, uint64_t *out_after_ns)
{
    const char *point = memchr(text, '.', len), *end = text + len;
    uint64_t seconds, part = 0, ns = 1000000000;

    if (is_word(text, len, "never")) {
        *out_after_ns = UINT64_MAX;
        return 0;
    }
    if (ht_parse_u64(text, (size_t)((point ? point : end) - text), &seconds) || (point && point + 1 == end))
        return -EINVAL;
    for (const char *p = point ? point + 1 : end; p < end; p++) {
        if (*p < '0' || *p > '9')
            return -EINVAL;
        part += (uint64_t)(*p - '0') * (ns /= 10); /* what is below a nanosecond is dropped */
    }
    if (seconds > HT_NEXT_USE_S_MAX || (seconds == HT_NEXT_USE_S_MAX && part) || (!seconds && !part))
        return -ERANGE;
    *out_after_ns = seconds * 1000000000 + part;
    return 0;
}

/* Names in PyTorch, NumPy and everyday use; case does not matter. */
static const struct {
    const char *word;
    uint8_t dtype;
} other_names[] = {
    {"float", HT_DTYPE_F32},     {"float32", HT_DTYPE_F32}, {"fp32", HT_DTYPE_F32},    {"single", HT_DTYPE_F32},
    {"bfloat16", HT_DTYPE_BF16}, {"half", HT_DTYPE_F16},    {"float16", HT_DTYPE_F16}, {"fp16", HT_DTYPE_F16},
    {"double", HT_DTYPE_F64},    {"float64", HT_DTYPE_F64}, {"fp64", HT_DTYPE_F64},    {"int8", HT_DTYPE_I8},
    {"uint8", HT_DTYPE_U8},      {"int16", HT_DTYPE_I16},   {"uint16", HT_DTYPE_U16},  {"int32", HT_DTYPE_I32},
    {"uint32", HT_DTYPE_U32},    {"int64", HT_DTYPE_I64},   {"uint64", HT_DTYPE_U64},  {"long", HT_DTYPE_I64},
};

const struct ht_dtype_word *ht_parse_dtype(const char *text, size_t len)
{
    if (len > 6 && memcmp(text, "torch.", 6) == 0) {
        text += 6;
        len -= 6;
    }
    for (size_t i = 0; i < HT_DTYPE_WORDS; i++)
        if (strlen(ht_dtype_words[i].word) == len && strncasecmp(text, ht_dtype_words[i].word, len) == 0)
            return &ht_dtype_words[i];
    for (size_t i = 0; i < HT_ARRAY_SIZE(other_names); i++)
        if (strlen(other_names[i].word) == len && strncasecmp(text, other_names[i].word, len) == 0)
            return ht_dtype_row(other_names[i].dtype);
    return NULL;
}

int ht_parse_shape(const char *text, size_t len, struct ht_shape *out)
{
    struct ht_shape shape = {.elements = 1};
    const char *p = text, *end = text + len;

    if (is_word(text, len, HT_SHAPE_SCALAR))
        p = end;
    while (p < end) {
        const char *comma = memchr(p, ',', (size_t)(end - p));
        size_t n = (size_t)((comma ? comma : end) - p);
        uint64_t dim;
        int rc = ht_parse_u64(p, n, &dim);
        if (rc)
            return rc;
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

/* One line of the attribute members: offset, shape, name. Returns the elements of the member, or a negative errno. */
static int64_t parse_member(const char *line, size_t len, uint64_t at)
{
    const char *end = line + len, *shape = memchr(line, ' ', len);
    const char *name = shape ? memchr(shape + 1, ' ', (size_t)(end - shape - 1)) : NULL;
    struct ht_shape s;
    uint64_t offset;

    if (!name || name + 1 == end || end - name - 1 > HT_NAME_BYTES_MAX ||
        memchr(name + 1, '/', (size_t)(end - name - 1)))
        return -EINVAL;
    int rc = ht_parse_u64(line, (size_t)(shape - line), &offset);
    if (!rc)
        rc = ht_parse_shape(shape + 1, (size_t)(name - shape - 1), &s);
    if (rc || offset != at || name == shape + 1 || !s.elements)
        return rc ? rc : -EINVAL;
    return (int64_t)s.elements;
}

int ht_parse_members(const char *text, size_t len, uint64_t *out_elements)
{
    const char *p = text, *end = text + len;
    uint64_t at = 0;

    while (p < end) {
        const char *stop = memchr(p, '\n', (size_t)(end - p));
        int64_t n = parse_member(p, (size_t)((stop ? stop : end) - p), at);
        if (n < 0)
            return (int)n;
        at += (uint64_t)n;
        if (at > HT_FILE_BYTES_MAX)
            return -ERANGE;
        p = stop ? stop + 1 : end;
    }
    *out_elements = at;
    return at ? 0 : -EINVAL;
}

static bool is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\r';
}

/* Where the word ends that begins at a place, or the end of the text. */
static const char *end_of_word(const char *at, const char *end)
{
    while (at < end && !is_blank(*at))
        at++;
    return at;
}

static const char *skip_blanks(const char *at, const char *end)
{
    while (at < end && is_blank(*at))
        at++;
    return at;
}

/* The rest of a text after a prefix, or NULL. */
static const char *behind(const char *at, const char *end, const char *prefix)
{
    size_t n = strlen(prefix);

    return (size_t)(end - at) >= n && memcmp(at, prefix, n) == 0 ? at + n : NULL;
}

static bool is_text(const char *at, const char *end, const char *word)
{
    return is_word(at, (size_t)(end - at), word);
}

static bool copy_name(const char *at, const char *end, char out[HT_CLAIM_NAME_MAX + 1])
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
    size_t len = (size_t)(end - at);

    if (len == 0 || len > HT_CLAIM_NAME_MAX)
        return false;
    memcpy(out, at, len);
    out[len] = 0;
    return strspn(out, allowed) == len;
}

/* Nothing, or a name behind this prefix. */
static bool copy_option(const char *at, const char *end, const char *prefix, char out[HT_CLAIM_NAME_MAX + 1])
{
    at = skip_blanks(at, end);
    const char *name = behind(at, end, prefix);

    return at == end || (name && copy_name(name, end, out));
}

/* ------------------------------------------- arguments; false: it is none of this kind */

static bool take_nothing(const char *at, const char *end, struct ht_command *out)
{
    return at == end;
}

/* The rest of the line is a path: it may have blanks. */
static bool take_path(const char *at, const char *end, struct ht_command *out)
{
    out->path = skip_blanks(at, end);
    out->path_len = (size_t)(end - out->path);
    return out->path_len;
}

static bool take_path_or_nothing(const char *at, const char *end, struct ht_command *out)
{
    return take_path(at, end, out) || at == end;
}

/* The verb becomes the path. */
static bool take_start_or_stop(const char *at, const char *end, struct ht_command *out)
{
    return take_path(at, end, out) && (is_text(at, end, "start") || is_text(at, end, "stop"));
}

/* The verb becomes the path, and the engine the name. */
static bool take_pause(const char *at, const char *end, struct ht_command *out)
{
    const char *stop = end_of_word(at, end);

    return take_path(at, stop, out) && (is_text(at, stop, "pause") || is_text(at, stop, "resume")) &&
        copy_option(stop, end, "engine=", out->name);
}

static bool take_condition(const char *at, const char *end, struct ht_command *out)
{
    const char *number = behind(at, end, "if=");

    if (at == end)
        return true;
    out->conditional = true;
    return number && ht_parse_u64(number, (size_t)(end - number), &out->step_open) == 0;
}

/* A condition, and the word of the command that sets a flag: in any order, each once. */
static bool take_words(const char *at, const char *end, struct ht_command *out)
{
    bool *flag = out->id == HT_COMMAND_STEP ? &out->async : &out->full;

    for (const char *stop; at < end; at = skip_blanks(stop, end)) {
        stop = end_of_word(at, end);
        bool named = is_text(at, stop, out->id == HT_COMMAND_STEP ? "async" : "full");
        if (named ? *flag : out->conditional || !take_condition(at, stop, out))
            return false;
        *flag |= named;
    }
    return true;
}

/* A path; or "ortho/" before it, and a condition after it. Without a condition that is the path of a file in ortho. */
static bool take_apply(const char *at, const char *end, struct ht_command *out)
{
    const char *path = behind(at, end, "ortho/"), *last = end;

    while (path && last > path && !is_blank(last[-1]))
        last--;
    if (!path || !behind(last, end, "if="))
        return take_path(at, end, out);
    for (const char *stop = last; stop > path; stop--) {
        if (is_blank(stop[-1]))
            continue;
        out->ortho = true;
        return take_path(path, stop, out) && take_condition(last, end, out);
    }
    return false;
}

static bool take_name(const char *at, const char *end, struct ht_command *out)
{
    return copy_name(at, end, out->name);
}

/* A name, and a condition: both, either, or nothing. */
static bool take_snapshot(const char *at, const char *end, struct ht_command *out)
{
    const char *stop = end_of_word(at, end);

    if (at < end && !behind(at, stop, "if=")) {
        if (!take_name(at, stop, out))
            return false;
        at = skip_blanks(stop, end);
    }
    return take_condition(at, end, out);
}

static bool take_name_or_all(const char *at, const char *end, struct ht_command *out)
{
    if (!is_text(at, end, "*"))
        return take_name(at, end, out);
    memcpy(out->name, "*", sizeof("*"));
    return true;
}

static bool take_claim(const char *at, const char *end, struct ht_command *out)
{
    const char *stop = end_of_word(at, end);

    return take_name(at, stop, out) && copy_option(stop, end, "takeover=", out->takeover);
}

static bool take_clone(const char *at, const char *end, struct ht_command *out)
{
    const char *stop = end_of_word(at, end);

    return take_name(at, stop, out) && take_path(stop, end, out);
}

/* The number of the directory comes first. An older store knows no such command, and makes nothing. */
static bool take_clone_in(const char *at, const char *end, struct ht_command *out)
{
    const char *stop = end_of_word(at, end);

    return ht_parse_u64(at, (size_t)(stop - at), &out->inside) == 0 && out->inside &&
        take_clone(skip_blanks(stop, end), end, out);
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The digest becomes the path. */
static bool take_archived(const char *at, const char *end, struct ht_command *out)
{
    const char *stop = end_of_word(at, end), *job = skip_blanks(stop, end), *job_end = end_of_word(job, end);

    if (!take_name(at, stop, out) || !copy_name(job, job_end, out->takeover) || !take_path(job_end, end, out))
        return false;
    for (size_t i = 0; i < out->path_len; i++)
        if (digit(out->path[i]) < 0)
            return false;
    return out->path_len == 32;
}

/* Digits of a vault's uuid and its URL, which becomes the path; or of a decision, and a path. */
static bool take_digits(const char *at, const char *end, struct ht_command *out)
{
    size_t bytes = out->id == HT_COMMAND_VAULT ? 16 : HT_DECISION_BYTES;
    const char *stop = end_of_word(at, end);

    if ((size_t)(stop - at) != 2 * bytes)
        return false;
    for (size_t i = 0; i < bytes; i++) {
        int high = digit(at[2 * i]), low = digit(at[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        out->numbers[i] = (uint8_t)(high << 4 | low);
    }
    return take_path(stop, end, out);
}

/* Both become the path. */
static bool take_job_step(const char *at, const char *end, struct ht_command *out)
{
    const char *stop = memchr(at, '@', (size_t)(end - at));
    uint64_t step;

    return stop && copy_name(at, stop, out->name) && !ht_parse_u64(stop + 1, (size_t)(end - stop - 1), &step) &&
        take_path(at, end, out);
}

#define NOTHING take_nothing, "no argument"
#define PATH take_path, "the path of a file"
#define OPEN_STEP "if=N with the number of " HT_XATTR_PREFIX "step_open"

static const struct word {
    const char *word;
    enum ht_command_id id;
    bool takes_turn; /* one at a time on a root */
    bool (*take)(const char *at, const char *end, struct ht_command *out);
    const char *takes;
} commands[] = {
    {"apply", HT_COMMAND_APPLY, false, take_apply, "the path of a file, or ortho/PATH and " OPEN_STEP},
    {"prepare", HT_COMMAND_PREPARE, true, take_condition, "nothing, or " OPEN_STEP},
    {"wait", HT_COMMAND_WAIT, false, take_path_or_nothing, "the path of a file or nothing"},
    {"step", HT_COMMAND_STEP, true, take_words, "async, " OPEN_STEP ", both, or nothing"},
    {"commit", HT_COMMAND_COMMIT, true, take_words, "full, " OPEN_STEP ", both, or nothing"},
    {"abort", HT_COMMAND_ABORT, true, take_condition, "nothing, or " OPEN_STEP},
    {"reset", HT_COMMAND_RESET, true, PATH},
    {"prefetch", HT_COMMAND_PREFETCH, false, PATH},
    {"evict", HT_COMMAND_EVICT, false, PATH},
    {"scrub", HT_COMMAND_SCRUB, false, take_start_or_stop, "start or stop"},
    {"trim", HT_COMMAND_TRIM, false, NOTHING},
    {"background", HT_COMMAND_BACKGROUND, false, take_pause, "pause or resume, and maybe engine=NAME"},
    {"snapshot", HT_COMMAND_SNAPSHOT, true, take_snapshot,
     "a name of 1 to 64 letters, digits and . _ : -, " OPEN_STEP ", both, or nothing"},
    {"forget", HT_COMMAND_FORGET, true, take_name_or_all, "the number or name of a kept step, or * for all"},
    {"rollback", HT_COMMAND_ROLLBACK, true, take_name, "the number or name of a kept step"},
    {"clone", HT_COMMAND_CLONE, true, take_clone,
     "the number or name of a kept step, and the path of a new directory below the mount's root"},
    {"clone_in", HT_COMMAND_CLONE, true, take_clone_in,
     "an inode number, the number or name of a kept step, and the path of a new directory"},
    {"decide", HT_COMMAND_DECIDE, true, take_digits,
     "144 hexadecimal digits from the summary of a logged step, and the path of a file"},
    {"claim", HT_COMMAND_CLAIM, true, take_claim,
     "NAME or NAME takeover=OLDNAME, each of 1 to 64 letters, digits and . _ : -"},
    {"unclaim", HT_COMMAND_UNCLAIM, false, NOTHING},
    {"drop", HT_COMMAND_DROP, true, PATH},
    {"hold", HT_COMMAND_HOLD, false, take_name, "the number or name of a kept step"},
    {"vault", HT_COMMAND_VAULT, false, take_digits, "the 32 hexadecimal digits of a vault's uuid, and its URL"},
    {"cold", HT_COMMAND_COLD, true, take_job_step, "JOB@STEP, as a vault has it"},
    {"recall", HT_COMMAND_RECALL, false, take_path_or_nothing, "the path of a file or nothing"},
    {"archived", HT_COMMAND_ARCHIVED, true, take_archived,
     "the number or name of a kept step, the name of a job, and the 32 digits of the step's digest"},
};

static int unknown_command(const char *word, size_t len, char err[HT_CTL_ERROR_MAX])
{
    int at = snprintf(err, HT_CTL_ERROR_MAX, "unknown command '%.*s': known are", (int)ht_min_u64(len, 64), word);

    for (size_t i = 0; i < HT_ARRAY_SIZE(commands) && at < HT_CTL_ERROR_MAX; i++)
        at += snprintf(err + at, (size_t)(HT_CTL_ERROR_MAX - at), " %s", commands[i].word);
    return -EINVAL;
}

/* Cuts the blanks around a line off. The row of its first word, or NULL. *out_end: of that word. */
static const struct word *first_word(const char **line, size_t *len, const char **out_end)
{
    const char *end = *line + *len;

    *line = skip_blanks(*line, end);
    while (end > *line && is_blank(end[-1]))
        end--;
    *len = (size_t)(end - *line);
    *out_end = end_of_word(*line, end);
    for (size_t i = 0; i < HT_ARRAY_SIZE(commands); i++)
        if (is_word(*line, (size_t)(*out_end - *line), commands[i].word))
            return &commands[i];
    return NULL;
}

int ht_parse_command(const char *line, size_t len, struct ht_command *out, char err[HT_CTL_ERROR_MAX])
{
    const char *at;
    const struct word *w = first_word(&line, &len, &at);

    *out = (struct ht_command){.id = HT_COMMAND_NONE, .word = "command"};
    if (len == 0)
        return 0;
    if (!w)
        return unknown_command(line, (size_t)(at - line), err);
    out->id = w->id;
    at = skip_blanks(at, line + len);
    if (!w->take(at, line + len, out)) {
        snprintf(err, HT_CTL_ERROR_MAX, "'%s' takes %s", w->word, w->takes);
        out->id = HT_COMMAND_NONE;
        return -EINVAL;
    }
    out->word = w->word;
    return 0;
}

bool ht_parse_takes_turn(const char *text, size_t len)
{
    const char *end = text + len;

    while (text < end) {
        const char *newline = memchr(text, '\n', (size_t)(end - text));
        const char *stop = newline ? newline : end, *line = text, *word_end;
        size_t n = (size_t)(stop - text);
        const struct word *w = first_word(&line, &n, &word_end);
        if (w && w->takes_turn)
            return true;
        text = stop + (newline != NULL);
    }
    return false;
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
