/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.c - what hitrain-fsck prints: how far a pass is, problems by their table, where chunks lie, and the sums.
 *
 * A pass that does not measure its progress is told on stderr, every few seconds. The ticker's lock is held meanwhile.
 */
#include "mount-helpers/fsck/fsck.h"

#include <stdarg.h>
#include <unistd.h>

/* ------------------------------------------------------------------ progress */

static void report_pass(void *ctx, uint64_t since_begin_ns)
{
    struct ht_fsck *f = ctx;
    uint64_t bytes = 0, seconds = since_begin_ns / 1000000000;
    char text[HT_SIZE_TEXT_MAX];

    for (unsigned i = 0; i < f->dev_count; i++) {
        struct ht_dev_counters c;
        ht_dev_counters(f->devs[i], &c);
        bytes += c.read_bytes;
    }
    fprintf(stderr, "%s%s: %llu s, %s read%s", f->watch.terminal ? "\r" : "", f->watch.pass,
            (unsigned long long)seconds, ht_format_size(bytes, text, sizeof(text)),
            f->watch.terminal ? "\033[K" : "\n");
    fflush(stderr);
    f->watch.shown = true;
}

void ht_fsck_watch_begin(struct ht_fsck *f, const char *pass, unsigned after_ms)
{
    f->watch.pass = pass;
    f->watch.shown = false;
    f->watch.terminal = isatty(STDERR_FILENO);
    f->watch.on = f->opt.progress || f->watch.terminal;
    if (f->watch.on)
        ht_ticker_begin(&f->watch.ticker, after_ms * UINT64_C(1000000), report_pass, f);
}

void ht_fsck_watch_clear(struct ht_fsck *f)
{
    if (!f->watch.on || !f->watch.terminal)
        return;
    ht_mutex_lock(&f->watch.ticker.lock);
    if (f->watch.shown) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    f->watch.shown = false;
    ht_mutex_unlock(&f->watch.ticker.lock);
}

void ht_fsck_watch_end(struct ht_fsck *f)
{
    if (!f->watch.on)
        return;
    ht_fsck_watch_clear(f);
    ht_ticker_end(&f->watch.ticker);
    f->watch.on = false;
}

/* ----------------------------------------------------------------- problems */

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

static void put_number(struct ht_json *j, const char *key, struct ht_fsck_number n)
{
    if (n.plus_one != 0)
        ht_json_u64(j, key, n.plus_one - 1);
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
    ht_fsck_watch_clear(f);
    fprintf(f->out, "%s: ", row->code);
    ht_put_printable(text, f->out);
    fputc('\n', f->out);
    if (!left)
        fprintf(f->out, "    repair: %s\n", row->repair);
    else if (left[0] != '\0')
        fprintf(f->out, "    %s%s\n", left, by_hand ? "" : row->repair);
    fflush(f->out);
}

/* How many problems of a code have no line. */
static void sum_up(struct ht_fsck *f)
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
    static const struct ht_fsck_where nowhere;
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

/* ------------------------------------------------------------------- extents */

static void list_piece(struct ht_fsck *f, const struct ht_fsck_item *it, const struct ht_fsck_owner *owner,
                       const struct ht_extent *e)
{
    const char *device = ht_fsck_member_name(f, e->device);
    uint64_t offset = e->block * HT_BLOCK_BYTES, bytes = (uint64_t)e->blocks * HT_BLOCK_BYTES;

    if (!f->opt.json) {
        ht_put_printable(owner->path, f->out);
        fprintf(f->out, "%s%s  chunk %u  %s  offset %llu  bytes %llu\n", owner->state ? "  state " : "",
                owner->state ? owner->state : "", it->index, device, (unsigned long long)offset,
                (unsigned long long)bytes);
        return;
    }
    ht_json_object(&f->json, NULL);
    ht_json_u64(&f->json, "object", it->oid);
    ht_json_str(&f->json, "path", owner->path);
    put_string(&f->json, "state", owner->state);
    ht_json_u64(&f->json, "chunk", it->index);
    ht_json_str(&f->json, "device", device);
    ht_json_u64(&f->json, "offset", offset);
    ht_json_u64(&f->json, "bytes", bytes);
    ht_json_u64(&f->json, "stored", it->stored);
    put_string(&f->json, "codec", it->codec == HT_CODEC_PLANES ? "planes" : NULL);
    ht_json_end(&f->json);
}

void ht_fsck_list_extents(struct ht_fsck *f)
{
    static struct ht_fsck_owner owner;

    if (f->opt.json)
        ht_json_array(&f->json, "extents");
    for (size_t i = 0; i < f->item_count; i++) {
        ht_fsck_owner(f, f->items[i].oid, &owner);
        for (unsigned k = 0; k < f->items[i].frag_count; k++) {
            struct ht_extent e = ht_fsck_item_extent(f, &f->items[i], k);
            list_piece(f, &f->items[i], &owner, &e);
        }
    }
    if (f->opt.json)
        ht_json_end(&f->json);
}

/* ------------------------------------------------------------------- summary */

static const char *state_text(enum ht_log_state s)
{
    return s == HT_LOG_MISSING ? "missing" : s == HT_LOG_ENDED ? "whole" : "damaged";
}

static void log_json(struct ht_fsck *f)
{
    const struct ht_super *sb = &f->super;
    struct ht_json *j = &f->json;

    ht_json_array(j, "log");
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        ht_json_object(j, NULL);
        ht_json_u64(j, "copy", i);
        ht_json_str(j, "state", state_text(f->log.copy[i].state));
        ht_json_str(j, "device", ht_fsck_member_name(f, sb->log_device[i]));
        ht_json_u64(j, "offset", sb->log_offset[i]);
        ht_json_u64(j, "bytes", sb->log_bytes);
        ht_json_u64(j, "start_position", sb->start_pos);
        ht_json_u64(j, "end_position", f->log.copy[i].end_pos);
        ht_json_u64(j, "last_frame", f->log.copy[i].last_seq);
        ht_json_end(j);
    }
    ht_json_end(j);
}

static void store_json(struct ht_fsck *f)
{
    char uuid[HT_UUID_TEXT_MAX];

    ht_json_str(&f->json, "uuid", ht_uuid_text(f->super.uuid, uuid));
    ht_json_str(&f->json, "label", f->super.label);
    ht_json_u64(&f->json, "generation", f->super.generation);
    ht_json_bool(&f->json, "clean", (f->super.flags & HT_SUPER_CLEAN) != 0);
    ht_json_array(&f->json, "classes");
    for (unsigned i = 0; i < f->super.device_count; i++)
        ht_json_str(&f->json, NULL, ht_device_class_word(f->super.device_class[i]));
    ht_json_end(&f->json);
}

static void summary_json(struct ht_fsck *f, int status)
{
    struct ht_json *j = &f->json;

    if (f->super.device_count != 0)
        store_json(f);
    if (f->log_known)
        log_json(f);
    ht_json_object(j, "summary");
    ht_json_u64(j, "exit", (uint64_t)status);
    ht_json_u64(j, "problems", f->problems);
    ht_json_u64(j, "repaired", f->repaired);
    ht_json_u64(j, "unlisted", f->unlisted);
    ht_json_u64(j, "objects", f->objects);
    ht_json_u64(j, "chunks", f->item_count);
    ht_json_u64(j, "lost_chunks", f->lost_chunks);
    ht_json_u64(j, "missing_chunks", f->missing_chunks);
    ht_json_u64(j, "cold_chunks", f->cold_chunks);
    ht_json_u64(j, "cold_bytes", f->cold_bytes);
    ht_json_u64(j, "stored_bytes", f->stored_bytes);
    ht_json_u64(j, "verified_bytes", f->verified_bytes);
    ht_json_u64(j, "replay_lacks_bytes", f->replay_lacks_bytes);
    ht_json_u64(j, "log_frames", f->log.frames);
    ht_json_u64(j, "log_records", f->log.records);
    ht_json_end(j);
    ht_json_end(j);
}

/* Counts of unread data, as text. */
static const char *unread_text(const struct ht_fsck *f)
{
    static char text[192];
    int used = 0;

    text[0] = '\0';
    if (f->lost_chunks != 0)
        used = snprintf(text, sizeof(text), "; %llu %s marked lost", (unsigned long long)f->lost_chunks,
                        ht_plural(f->lost_chunks, "chunk"));
    if (f->cold_chunks != 0 && !f->opt.vault)
        used += snprintf(text + used, sizeof(text) - (size_t)used, "; %llu %s, %llu MiB, in the vault and not read",
                         (unsigned long long)f->cold_chunks, ht_plural(f->cold_chunks, "chunk"),
                         (unsigned long long)ht_div_up(f->cold_bytes, HT_MIB));
    if (f->missing_chunks != 0)
        snprintf(text + used, sizeof(text) - (size_t)used, "; %llu %s on missing devices",
                 (unsigned long long)f->missing_chunks, ht_plural(f->missing_chunks, "chunk"));
    return text;
}

static void summary_text(struct ht_fsck *f, const char *name)
{
    unsigned long long problems = f->problems, repaired = f->repaired;

    sum_up(f);
    fprintf(f->out, "%s: ", name);
    if (f->problems == 0 && !f->failed)
        fprintf(f->out, "clean, %llu %s in %zu %s, %s %s%s\n", (unsigned long long)f->objects,
                ht_plural(f->objects, "object"), f->item_count, ht_plural(f->item_count, "chunk"),
                ht_size_text(f->opt.no_data ? f->stored_bytes : f->verified_bytes),
                f->opt.no_data ? "not read" : "verified", unread_text(f));
    else if (f->problems == 0)
        fputs("not checked to the end\n", f->out);
    else if (f->opt.mode == HT_FSCK_CHECK)
        fprintf(f->out, "%llu %s left", problems, ht_plural(f->problems, "problem"));
    else
        fprintf(f->out, "%llu %s, %llu repaired, %llu left", problems, ht_plural(f->problems, "problem"), repaired,
                problems - repaired);
    if (f->problems != 0)
        fprintf(f->out, "%s\n", f->failed ? ", and not everything could be checked" : "");
    else if (f->replay_lacks_bytes != 0)
        fprintf(f->out, "%s: a mount may wait until %llu bytes more are free, to compute logged steps again\n", name,
                (unsigned long long)f->replay_lacks_bytes);
}

void ht_fsck_summary(struct ht_fsck *f, const char *name, int status)
{
    if (f->opt.json)
        summary_json(f, status);
    else
        summary_text(f, name);
}
