/* SPDX-License-Identifier: Apache-2.0 */
/* problem.c - the table of problems, and reporting them. */
#include "mount-helpers/fsck/fsck.h"

#include <stdarg.h>

#include "mount-helpers/common/text.h"

enum { TEXT_MAX = HT_FSCK_PATH_MAX + 512 };

/* The consent that a repair needs. */
enum answer {
    BY_HAND, /* no option: repair prints what to do */
    ASK,     /* -y: the repair gives something up, or guesses */
    SAFE,    /* -p, too */
};

/* The effect of a no on the other repairs. */
enum part {
    COPY,  /* nothing: a copy of the superblock stands for itself */
    MARK,  /* nothing: the store can be written with it */
    STORE, /* the store cannot be written: fsck repairs nothing else either */
};

static const struct row {
    const char *code;
    enum answer answer;
    enum part part;
    const char *repair;
} table[HT_FSCK_CODES] = {
#define ROW(id, code, answer, part, repair) {code, answer, part, repair},
    HT_FSCK_PROBLEMS(ROW)
#undef ROW
};

/* -------------------------------------------------------------------- json */

struct ht_fsck_reported {
    const char *code;
    char *text, *path; /* ours */
    struct ht_fsck_where where;
    enum { LEFT, PLANNED, REPAIRED } fate;
};

static void put_string(struct ht_json *j, const char *key, const char *value)
{
    if (value)
        ht_json_str(j, key, value);
}

static void put_number(struct ht_json *j, const char *key, uint64_t value)
{
    if (value != HT_FSCK_NONE)
        ht_json_u64(j, key, value);
}

static void put_problem(struct ht_json *j, const struct ht_fsck_reported *t, bool repaired)
{
    const struct ht_fsck_where *w = &t->where;

    ht_json_object(j, NULL);
    ht_json_str(j, "code", t->code);
    ht_json_str(j, "text", t->text);
    ht_json_bool(j, "repaired", repaired);
    put_string(j, "device", w->device);
    put_number(j, "copy", w->copy);
    put_number(j, "offset", w->offset);
    put_number(j, "bytes", w->bytes);
    put_number(j, "position", w->position);
    put_number(j, "frame", w->frame);
    put_number(j, "object", w->object);
    put_string(j, "path", t->path);
    put_string(j, "state", w->state);
    put_number(j, "chunk", w->chunk);
    put_number(j, "first_byte", w->first_byte);
    ht_json_end(j);
}

/* A copy of t at the end of the list. False: it would be more than is kept, or there is no memory for it. */
static bool add_reported(struct ht_fsck *f, const struct ht_fsck_reported *t)
{
    size_t bytes = sizeof(*t) + strlen(t->text) + (t->path ? strlen(t->path) : 0);
    struct ht_fsck_reported copy = *t;

    if (f->reported_bytes + bytes > HT_FSCK_REPORTED_BYTES_MAX ||
        ht_array_grow((void **)&f->reported, &f->reported_cap, f->reported_count + 1, sizeof(*f->reported)) != 0)
        return false;
    copy.text = strdup(t->text);
    copy.path = t->path ? strdup(t->path) : NULL;
    if (!copy.text || (!copy.path && t->path)) {
        free(copy.text);
        free(copy.path);
        return false;
    }
    f->reported[f->reported_count++] = copy;
    f->reported_bytes += bytes;
    return true;
}

void ht_fsck_report_all(struct ht_fsck *f, bool repaired)
{
    for (size_t i = 0; i < f->reported_count; i++) {
        const struct ht_fsck_reported *t = &f->reported[i];
        put_problem(&f->json, t, t->fate == REPAIRED || (t->fate == PLANNED && repaired));
    }
}

void ht_fsck_reported_free(struct ht_fsck *f)
{
    for (size_t i = 0; i < f->reported_count; i++) {
        free(f->reported[i].text);
        free(f->reported[i].path);
    }
    free(f->reported);
}

/* -------------------------------------------------------------------- text */

/* NULL: it is to be repaired. Else the reason against it, in front of the planned repair; empty: no reason to print. */
static const char *why_left(const struct ht_fsck *f, const struct row *row, bool by_hand)
{
    if (f->opt.mode == HT_FSCK_CHECK)
        return "";
    if (by_hand)
        return "left: no program can repair this";
    if (row->answer == BY_HAND)
        return "left: first ";
    if (row->answer == ASK && f->opt.mode != HT_FSCK_YES)
        return "left: only -y would ";
    if ((row->part != COPY || f->newer) && f->blocked)
        return "left, because of the problems left above: ";
    return NULL;
}

static void report_text(struct ht_fsck *f, const struct row *row, const char *text, const char *left, bool by_hand)
{
    if (f->of_code[row - table]++ >= HT_FSCK_LINES_MAX)
        return;
    ht_pass_watch_clear(&f->watch);
    fprintf(f->out, "%s: ", row->code);
    ht_put_printable(text, f->out);
    fputc('\n', f->out);
    if (!left)
        fprintf(f->out, "    repair: %s\n", row->repair);
    else if (left[0] != '\0')
        fprintf(f->out, "    %s%s\n", left, by_hand ? "" : row->repair);
    fflush(f->out);
}

void ht_fsck_sum_up(struct ht_fsck *f)
{
    for (unsigned i = 0; i < HT_FSCK_CODES; i++)
        if (f->of_code[i] > HT_FSCK_LINES_MAX)
            fprintf(f->out, "%s: ... and %llu more\n", table[i].code,
                    (unsigned long long)(f->of_code[i] - HT_FSCK_LINES_MAX));
}

static bool report(struct ht_fsck *f, const struct row *row, const struct ht_fsck_where *w, char *text)
{
    const char *left = why_left(f, row, w->by_hand);
    struct ht_fsck_reported t = {row->code, text, (char *)(uintptr_t)w->path, *w, !left ? PLANNED : LEFT};

    f->problems++;
    f->blocked |= left && row->part == STORE;
    f->planned += !left && row->part != COPY;
    if (!f->opt.json)
        report_text(f, row, text, left, w->by_hand);
    else if (f->opt.mode == HT_FSCK_CHECK)
        put_problem(&f->json, &t, false);
    else {
        /*
         * Until its fate is known. The store may have any number of problems: those beyond the
         * bound are counted, not listed.
         */
        f->last_reported = add_reported(f, &t) ? f->reported_count : 0;
        f->unlisted += f->last_reported == 0;
    }
    if (!left && row->part == COPY && f->last_reported != 0)
        f->reported[f->last_reported - 1].fate = LEFT; /* until ht_fsck_repaired_last */
    return !left;
}

bool ht_fsck_problem(struct ht_fsck *f, enum ht_fsck_code code, const struct ht_fsck_where *where, const char *fmt, ...)
{
    static const struct ht_fsck_where nowhere = {HT_FSCK_NOWHERE};
    char text[TEXT_MAX];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    return report(f, &table[code], where ? where : &nowhere, text);
}

bool ht_fsck_problem_named(struct ht_fsck *f, const char *code, const char *text)
{
    for (unsigned i = 0; i < HT_FSCK_CODES; i++)
        if (strcmp(table[i].code, code) == 0)
            return ht_fsck_problem(f, (enum ht_fsck_code)i, NULL, "%s", text);
    fprintf(stderr, "hitrain-fsck: %s: %s: a mistake of this program\n", code, text);
    f->failed = true;
    return false;
}

void ht_fsck_repaired_last(struct ht_fsck *f)
{
    f->repaired++;
    if (f->last_reported != 0)
        f->reported[f->last_reported - 1].fate = REPAIRED;
}
