/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/replay/trace_text.h"

#include <stdlib.h>

enum { NAMES_MIN = 64, WORDS_MAX = 5 };

/* How many numbers follow the name of a tensor; a number of microseconds; nothing. */
enum form { FORM_RANGE, FORM_TENSOR, FORM_TIME, FORM_NOTHING };

static const struct {
    const char *word;
    enum form form;
} ops[REPLAY_OPS] = {
    [REPLAY_COMPUTE] = {"compute", FORM_TIME},     [REPLAY_READ] = {"read", FORM_RANGE},
    [REPLAY_WRITE] = {"write", FORM_RANGE},        [REPLAY_GRADIENT] = {"gradient", FORM_TENSOR},
    [REPLAY_PREFETCH] = {"prefetch", FORM_TENSOR}, [REPLAY_EVICT] = {"evict", FORM_TENSOR},
    [REPLAY_STEP] = {"step", FORM_NOTHING},        [REPLAY_COMMIT] = {"commit", FORM_NOTHING},
};

void replay_trace_init(struct replay_trace *t)
{
    *t = (struct replay_trace){0};
}

void replay_trace_free(struct replay_trace *t)
{
    for (uint32_t i = 0; i < t->tensors; i++)
        free(t->tensor[i].name);
    free(t->tensor);
    free(t->entry);
    free(t->names);
    replay_trace_init(t);
}

static bool is_boundary(const struct replay_entry *e)
{
    return e->op == REPLAY_STEP || e->op == REPLAY_COMMIT;
}

bool replay_ends_step(const struct replay_trace *t, uint64_t entry)
{
    return is_boundary(&t->entry[entry]) && (entry == 0 || !is_boundary(&t->entry[entry - 1]));
}

uint64_t replay_trace_steps(const struct replay_trace *t)
{
    uint64_t n = 0;

    for (uint64_t i = 0; i < t->entries; i++)
        n += replay_ends_step(t, i);
    return n;
}

/* ------------------------------------------------------------------- names */

static uint32_t hash_name(const char *name)
{
    uint64_t h = 14695981039346656037ull; /* FNV-1a */

    for (; *name; name++)
        h = (h ^ (uint8_t)*name) * 1099511628211ull;
    return (uint32_t)(h ^ h >> 32);
}

/* The place of the name in the table, or the free one where it would be. */
static uint32_t *find_name(const struct replay_trace *t, const char *name)
{
    uint32_t at = hash_name(name) & t->names_mask;

    while (t->names[at] && strcmp(t->tensor[t->names[at] - 1].name, name) != 0)
        at = (at + 1) & t->names_mask;
    return &t->names[at];
}

/* The table is at most half full. */
static int grow_names(struct replay_trace *t)
{
    uint32_t places = t->names ? 2 * (t->names_mask + 1) : NAMES_MIN;

    if (t->names && 2 * (t->tensors + 1) <= t->names_mask + 1)
        return 0;
    uint32_t *names = calloc(places, sizeof(*names));
    if (!names)
        return -ENOMEM;
    free(t->names);
    t->names = names;
    t->names_mask = places - 1;
    for (uint32_t i = 0; i < t->tensors; i++)
        *find_name(t, t->tensor[i].name) = i + 1;
    return 0;
}

static bool is_name(const char *name)
{
    size_t len = strlen(name);

    for (size_t i = 0; i < len; i++)
        if ((uint8_t)name[i] <= ' ' || name[i] == 0x7f)
            return false;
    return len >= 1 && len <= REPLAY_NAME_BYTES_MAX;
}

int replay_trace_add_tensor(struct replay_trace *t, const char *name, uint64_t bytes, uint64_t state_bytes,
                            uint32_t *out_tensor)
{
    if (!is_name(name) || !bytes)
        return -EINVAL;
    if (t->tensors == REPLAY_TENSORS_MAX || bytes > REPLAY_TENSOR_BYTES_MAX || state_bytes > REPLAY_TENSOR_BYTES_MAX ||
        t->bytes + bytes + state_bytes > REPLAY_BYTES_MAX)
        return -E2BIG;
    if (t->tensors == t->tensors_room) {
        uint32_t room = t->tensors_room ? 2 * t->tensors_room : NAMES_MIN;
        struct replay_tensor *tensor = realloc(t->tensor, room * sizeof(*tensor));
        if (!tensor)
            return -ENOMEM;
        t->tensor = tensor;
        t->tensors_room = room;
    }
    int rc = grow_names(t);
    if (rc)
        return rc;
    uint32_t *place = find_name(t, name);
    if (*place)
        return -EINVAL;
    char *copy = strdup(name);
    if (!copy)
        return -ENOMEM;
    *out_tensor = t->tensors++;
    t->tensor[*out_tensor] = (struct replay_tensor){copy, bytes, state_bytes};
    t->bytes += bytes + state_bytes;
    *place = *out_tensor + 1;
    return 0;
}

int replay_trace_add(struct replay_trace *t, enum replay_op op, uint32_t tensor, uint64_t offset, uint64_t bytes)
{
    if (t->entries == REPLAY_ENTRIES_MAX)
        return -E2BIG;
    if (t->entries == t->entries_room) {
        uint64_t room = t->entries_room ? 2 * t->entries_room : 1024;
        struct replay_entry *entry = realloc(t->entry, room * sizeof(*entry));
        if (!entry)
            return -ENOMEM;
        t->entry = entry;
        t->entries_room = room;
    }
    t->entry[t->entries++] = (struct replay_entry){offset, bytes, tensor, op};
    return 0;
}

/* ----------------------------------------------------------------- reading */

struct reader {
    struct replay_trace *t;
    char *err;
    uint64_t line;
    bool begun; /* the header was read */
};

static int refuse(const struct reader *r, const char *why, const char *word)
{
    snprintf(r->err, REPLAY_ERROR_MAX, "line %llu: %s%s%.80s", (unsigned long long)r->line, why, word ? ": " : "",
             word ? word : "");
    for (char *p = r->err; *p; p++)
        if ((uint8_t)*p < ' ' || *p == 0x7f)
            *p = '?';
    return -EINVAL;
}

/* A decimal number up to max. False: it is none. */
static bool parse_number(const char *word, uint64_t max, uint64_t *out)
{
    uint64_t n = 0;

    if (!*word)
        return false;
    for (; *word; word++) {
        if (*word < '0' || *word > '9' || n > (UINT64_MAX - 9) / 10)
            return false;
        n = n * 10 + (uint64_t)(*word - '0');
    }
    *out = n;
    return n <= max;
}

/* The words of a line, which spaces and tabs separate. Returns WORDS_MAX + 1 for more. */
static unsigned split(char *line, char *word[WORDS_MAX])
{
    unsigned n = 0;

    for (char *p = line;;) {
        p += strspn(p, " \t");
        if (!*p)
            return n;
        if (n == WORDS_MAX)
            return n + 1;
        word[n++] = p;
        p += strcspn(p, " \t");
        if (*p)
            *p++ = '\0';
    }
}

/* tensor NAME BYTES, parameter NAME BYTES STATE_BYTES */
static int take_tensor(const struct reader *r, char *word[], unsigned words)
{
    bool parameter = strcmp(word[0], "parameter") == 0;
    uint64_t bytes, state_bytes = 0;
    uint32_t tensor;

    if (words != (parameter ? 4 : 3))
        return refuse(r, parameter ? "a name, bytes and bytes of state follow" : "a name and bytes follow", word[0]);
    if (!is_name(word[1]))
        return refuse(r, "not a name", word[1]);
    if (!parse_number(word[2], REPLAY_TENSOR_BYTES_MAX, &bytes) || !bytes)
        return refuse(r, "not a number of bytes from 1 to 2^44", word[2]);
    if (parameter && (!parse_number(word[3], REPLAY_TENSOR_BYTES_MAX, &state_bytes) || !state_bytes))
        return refuse(r, "not a number of bytes from 1 to 2^44", word[3]);
    if (r->t->bytes + bytes + state_bytes > REPLAY_BYTES_MAX)
        return refuse(r, "more than 2^60 bytes of tensors and states", NULL);
    int rc = replay_trace_add_tensor(r->t, word[1], bytes, state_bytes, &tensor);
    if (rc == -EINVAL)
        return refuse(r, "a second tensor of this name", word[1]);
    return rc == -E2BIG ? refuse(r, "more than 1048576 tensors", NULL) : rc;
}

static int find_tensor(const struct reader *r, const char *name, uint32_t *out)
{
    uint32_t place = r->t->names ? *find_name(r->t, name) : 0;

    if (!place)
        return refuse(r, "no tensor before this line has the name", name);
    *out = place - 1;
    return 0;
}

/* NAME, NAME OFFSET BYTES */
static int take_access(const struct reader *r, enum replay_op op, char *word[], unsigned words)
{
    uint64_t offset = 0, bytes;
    uint32_t tensor = 0;

    if (words != 2 && (words != 4 || ops[op].form != FORM_RANGE))
        return refuse(r,
                      ops[op].form == FORM_RANGE ? "a name follows, or a name, an offset and bytes" : "a name follows",
                      word[0]);
    int rc = find_tensor(r, word[1], &tensor);
    if (rc)
        return rc;
    const struct replay_tensor *n = &r->t->tensor[tensor];
    bytes = n->bytes;
    if (op == REPLAY_GRADIENT && !n->state_bytes)
        return refuse(r, "only parameters have gradients", word[1]);
    if (words == 4 && !parse_number(word[2], n->bytes - 1, &offset))
        return refuse(r, "not an offset in the tensor", word[2]);
    if (words == 4 && (!parse_number(word[3], n->bytes - offset, &bytes) || !bytes))
        return refuse(r, "not a number of bytes from there to the tensor's end", word[3]);
    rc = replay_trace_add(r->t, op, tensor, offset, bytes);
    return rc == -E2BIG ? refuse(r, "more than 16777216 entries", NULL) : rc;
}

static int take_entry(const struct reader *r, enum replay_op op, char *word[], unsigned words)
{
    uint64_t us = 0;

    if (ops[op].form == FORM_RANGE || ops[op].form == FORM_TENSOR)
        return take_access(r, op, word, words);
    if (ops[op].form == FORM_NOTHING && words != 1)
        return refuse(r, "nothing follows", word[0]);
    if (ops[op].form == FORM_TIME && (words != 2 || !parse_number(word[1], REPLAY_COMPUTE_US_MAX, &us)))
        return refuse(r, "a whole number of microseconds follows, at most a day", word[0]);
    int rc = replay_trace_add(r->t, op, 0, us, 0);
    return rc == -E2BIG ? refuse(r, "more than 16777216 entries", NULL) : rc;
}

static int take_words(const struct reader *r, char *word[], unsigned words)
{
    if (words > WORDS_MAX - 1)
        return refuse(r, "too many words", NULL);
    if (strcmp(word[0], "tensor") == 0 || strcmp(word[0], "parameter") == 0)
        return take_tensor(r, word, words);
    for (unsigned op = 0; op < REPLAY_OPS; op++)
        if (strcmp(word[0], ops[op].word) == 0)
            return take_entry(r, op, word, words);
    return refuse(r, "not a word that begins a line", word[0]);
}

/* A line without its end. */
static int take_line(struct reader *r, char *line, size_t len)
{
    char *word[WORDS_MAX];

    r->line++;
    if (memchr(line, '\0', len))
        return refuse(r, "a NUL byte", NULL);
    if (!r->begun) {
        r->begun = strcmp(line, REPLAY_HEADER) == 0;
        return r->begun ? 0 : refuse(r, "the first line is not \"" REPLAY_HEADER "\"", NULL);
    }
    if (line[strspn(line, " \t")] == '#')
        return 0;
    unsigned words = split(line, word);
    return words ? take_words(r, word, words) : 0;
}

/* One line, of at most REPLAY_LINE_BYTES_MAX bytes, and a NUL. False: the end. */
static bool next_line(FILE *from, char line[REPLAY_LINE_BYTES_MAX + 2], size_t *out_len)
{
    size_t len = 0;
    int c;

    while ((c = getc_unlocked(from)) != EOF && c != '\n' && len <= REPLAY_LINE_BYTES_MAX)
        line[len++] = (char)c;
    line[len] = '\0';
    *out_len = len;
    return c != EOF || len;
}

int replay_trace_read(FILE *from, struct replay_trace *out, char err[REPLAY_ERROR_MAX])
{
    struct reader r = {.t = out, .err = err};
    char line[REPLAY_LINE_BYTES_MAX + 2];
    size_t len;
    int rc = 0;

    replay_trace_init(out);
    err[0] = '\0';
    while (!rc && next_line(from, line, &len)) {
        if (len <= REPLAY_LINE_BYTES_MAX) {
            rc = take_line(&r, line, len);
            continue;
        }
        r.line++;
        rc = refuse(&r, "more than 1023 bytes", NULL);
    }
    if (!rc && ferror(from))
        rc = -EIO;
    if (!rc && !r.begun) {
        r.line = 1;
        rc = refuse(&r, "the first line is not \"" REPLAY_HEADER "\"", NULL);
    }
    if (rc && !err[0])
        snprintf(err, REPLAY_ERROR_MAX, "line %llu: %s", (unsigned long long)r.line, strerror(-rc));
    if (rc)
        replay_trace_free(out);
    return rc;
}

/* ----------------------------------------------------------------- writing */

static void write_entry(const struct replay_trace *t, const struct replay_entry *e, FILE *to)
{
    fputs(ops[e->op].word, to);
    if (ops[e->op].form == FORM_TIME)
        fprintf(to, " %llu", (unsigned long long)e->offset);
    if (ops[e->op].form == FORM_RANGE || ops[e->op].form == FORM_TENSOR)
        fprintf(to, " %s", t->tensor[e->tensor].name);
    if (ops[e->op].form == FORM_RANGE && (e->offset || e->bytes != t->tensor[e->tensor].bytes))
        fprintf(to, " %llu %llu", (unsigned long long)e->offset, (unsigned long long)e->bytes);
    putc('\n', to);
}

int replay_trace_write(const struct replay_trace *t, FILE *to)
{
    fprintf(to, "%s\n", REPLAY_HEADER);
    for (uint32_t i = 0; i < t->tensors; i++) {
        const struct replay_tensor *n = &t->tensor[i];
        fprintf(to, "%s %s %llu", n->state_bytes ? "parameter" : "tensor", n->name, (unsigned long long)n->bytes);
        if (n->state_bytes)
            fprintf(to, " %llu", (unsigned long long)n->state_bytes);
        putc('\n', to);
    }
    for (uint64_t i = 0; i < t->entries; i++)
        write_entry(t, &t->entry[i], to);
    return fflush(to) || ferror(to) ? -EIO : 0;
}
