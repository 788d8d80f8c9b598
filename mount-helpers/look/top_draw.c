/* SPDX-License-Identifier: Apache-2.0 */
/*
 * top_draw.c - one frame of `hitrainctl top` as text. See top.h.
 *
 * Each line is cut at the width, so that no terminal wraps it. A table leaves out its columns from the right when they
 * do not fit; the name is always the last column and gets the rest.
 */
#include "mount-helpers/look/top.h"

#include <stdarg.h>

enum { CELL_MAX = 64, BAR_MAX = 24, NAME_WIDTH_MIN = 10, WIDE = 60, INDENT = 8 };

static const char *const order_words[HT_TOP_ORDERS] = {"traffic", "steps", "state", "name"};

struct frame {
    const struct ht_top_view *v;
    struct ht_buf *out;
    unsigned column, line;
};

static bool is_full(const struct frame *f)
{
    return f->v->height && f->line >= f->v->height;
}

/* ASCII text. */
static void put_text(struct frame *f, const char *fmt, ...) HT_PRINTF(2, 3);
static void put_text(struct frame *f, const char *fmt, ...)
{
    char text[512];
    va_list args;

    va_start(args, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (n < 0 || is_full(f))
        return;
    size_t len = ht_min_u64((uint64_t)n, sizeof(text) - 1);
    len = ht_min_u64(len, f->v->width - f->column);
    ht_buf_put(f->out, text, len);
    f->column += (unsigned)len;
}

static void end_line(struct frame *f);

/* The same, on a new line if it does not fit on this one. */
static void put_item(struct frame *f, const char *fmt, ...) HT_PRINTF(2, 3);
static void put_item(struct frame *f, const char *fmt, ...)
{
    char text[256];
    va_list args;

    va_start(args, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (n > 0 && f->column + 2 + (unsigned)n > f->v->width && f->column > INDENT) {
        end_line(f);
        put_text(f, "%*s", INDENT, "");
    }
    put_text(f, "%s%s", f->column > INDENT ? "  " : "", text);
}

/* A name may hold any bytes. A character of UTF-8 takes one column. */
static void put_name(struct frame *f, const char *name)
{
    char *shown = NULL;
    size_t len;
    FILE *to = open_memstream(&shown, &len);

    if (!to)
        return;
    ht_put_printable(name, to);
    if (fclose(to) == 0 && !is_full(f))
        for (const char *p = shown; *p && f->column < f->v->width; f->column++) {
            unsigned n = ht_utf8_length(p);
            ht_buf_put(f->out, p, n ? n : 1);
            p += n ? n : 1;
        }
    free(shown);
}

static void end_line(struct frame *f)
{
    if (is_full(f))
        return;
    f->line++;
    /* The last line of a terminal has no end: it would scroll. */
    ht_buf_printf(f->out, "%s%s", f->v->terminal ? "\033[0m\033[K" : "",
                  is_full(f)           ? ""
                      : f->v->terminal ? "\r\n"
                                       : "\n");
    f->column = 0;
}

/* ------------------------------------------------------- numbers and texts */

static const char *size_text(double bytes, char out[CELL_MAX])
{
    return ht_format_size((uint64_t)bytes, out, CELL_MAX);
}

/* In three digits. */
static const char *number_text(double v, char out[CELL_MAX])
{
    snprintf(out, CELL_MAX, "%.*f", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v);
    return out;
}

static const char *time_text(double ns, char out[CELL_MAX])
{
    double us = ns / 1000;

    number_text(us < 999.5 ? us : us < 999500 ? us / 1000 : us / 1e6, out);
    size_t len = strlen(out);
    snprintf(out + len, CELL_MAX - len, " %s", us < 999.5 ? "us" : us < 999500 ? "ms" : "s");
    return out;
}

/* Change per second of a counter; 0 if it fell, because the store was mounted again. */
static double rate_of(uint64_t now, uint64_t before, uint64_t ns)
{
    return now > before && ns ? (double)(now - before) * 1e9 / (double)ns : 0;
}

/* The same part of an earlier sample; NULL: it is new. hint: the place of part. */
static const struct ht_top_part *find_same(const struct ht_top_part *part, const struct ht_top_part *list,
                                           unsigned count, unsigned hint)
{
    if (hint < count && strcmp(list[hint].name, part->name) == 0)
        return &list[hint];
    for (unsigned i = 0; i < count; i++)
        if (strcmp(list[i].name, part->name) == 0)
            return &list[i];
    return NULL;
}

static void put_bar(struct frame *f, uint64_t dirty, uint64_t used, uint64_t all)
{
    unsigned width = f->v->width >= WIDE ? BAR_MAX : BAR_MAX / 3;
    unsigned marks = all ? (unsigned)(ht_min_u64(dirty, all) * width / all) : 0;
    unsigned clean = all ? (unsigned)(ht_min_u64(used, all) * width / all) : 0;

    put_text(f, "[");
    for (unsigned i = 0; i < width; i++)
        put_text(f, "%c", i < marks ? '#' : i < clean ? '=' : '.');
    put_text(f, "] ");
}

/* ----------------------------------------------------------------- summary */

static void put_tier(struct frame *f, const uint64_t *s)
{
    uint64_t used = s[HT_TOP_RESIDENT], dirty = s[HT_TOP_DIRTY];

    put_text(f, "tier    ");
    put_bar(f, dirty, used, s[HT_TOP_DRAM]);
    put_text(f, "%s of %s", ht_size_text(used), ht_size_text(s[HT_TOP_DRAM]));
    end_line(f);
    put_text(f, "%*s", INDENT, "");
    put_item(f, "dirty %s", ht_size_text(dirty));
    put_item(f, "clean %s", ht_size_text(used > dirty ? used - dirty : 0));
    put_item(f, "protected %s", ht_size_text(s[HT_TOP_PROTECTED]));
    put_item(f, "passthrough %s", ht_size_text(s[HT_TOP_PASSTHROUGH]));
    end_line(f);
    put_text(f, "staging ");
    put_bar(f, s[HT_TOP_STAGING_USED], s[HT_TOP_STAGING_USED], s[HT_TOP_STAGING]);
    put_text(f, "%s of %s", ht_size_text(s[HT_TOP_STAGING_USED]), ht_size_text(s[HT_TOP_STAGING]));
    end_line(f);
    put_text(f, "space   ");
    put_bar(f, 0, s[HT_TOP_TOTAL] - ht_min_u64(s[HT_TOP_AVAILABLE], s[HT_TOP_TOTAL]), s[HT_TOP_TOTAL]);
    put_text(f, "%s left", ht_size_text(s[HT_TOP_AVAILABLE]));
    put_item(f, "log %s of %s", ht_size_text(s[HT_TOP_LOG_USED]), ht_size_text(s[HT_TOP_LOG]));
    end_line(f);
}

static void put_rates(struct frame *f, const struct ht_top_sample *now, const struct ht_top_sample *before)
{
    static const struct {
        enum ht_top_store figure;
        const char *word;
    } rates[] = {
        {HT_TOP_REQUESTS, "requests"},     {HT_TOP_HITS, "hits"},
        {HT_TOP_MISSES, "misses"},         {HT_TOP_EVICTIONS, "evictions"},
        {HT_TOP_WRITEBACKS, "writebacks"},
    };
    uint64_t ns = now->at_ns - before->at_ns;
    char number[CELL_MAX];

    put_text(f, "each s  ");
    for (size_t i = 0; i < HT_ARRAY_SIZE(rates); i++) {
        enum ht_top_store row = rates[i].figure;
        put_item(f, "%s %s", rates[i].word, number_text(rate_of(now->store[row], before->store[row], ns), number));
    }
    end_line(f);
}

/* Requests that wait, and for what. */
static void put_waits(struct frame *f, const struct ht_top_sample *now, const struct ht_top_sample *before)
{
    uint64_t ns = now->at_ns - before->at_ns, oldest = 0;
    double planned = 0, background = 0;
    char a[CELL_MAX];

    for (unsigned i = 0; i < now->devices && i < before->devices; i++) {
        const uint64_t *n = now->device[i].value, *o = before->device[i].value;
        planned += rate_of(n[HT_TOP_PLANNED_WAITS], o[HT_TOP_PLANNED_WAITS], ns);
        background += rate_of(n[HT_TOP_BACKGROUND_WAITS], o[HT_TOP_BACKGROUND_WAITS], ns);
        oldest = n[HT_TOP_OLDEST] > oldest ? n[HT_TOP_OLDEST] : oldest;
    }
    put_text(f, "waits/s ");
    put_item(f, "update %s", number_text(rate_of(now->store[HT_TOP_PARKED], before->store[HT_TOP_PARKED], ns), a));
    put_item(f, "room %s",
             number_text(rate_of(now->store[HT_TOP_ROOM_WAITS], before->store[HT_TOP_ROOM_WAITS], ns), a));
    put_item(f, "planned %s", number_text(planned, a));
    put_item(f, "background %s", number_text(background, a));
    end_line(f);
    put_text(f, "oldest  %s", oldest ? time_text((double)oldest, a) : "no request in a device");
    end_line(f);
    put_text(f, "events  %llu errors, %llu warnings", (unsigned long long)now->store[HT_TOP_ERRORS],
             (unsigned long long)now->store[HT_TOP_WARNINGS]);
    end_line(f);
}

/* ------------------------------------------------------------------ tables */

struct column {
    const char *heading;
    unsigned width;
};

/* How many columns fit beside a name. */
static unsigned columns_that_fit(const struct frame *f, const struct column *c, unsigned count)
{
    unsigned used = NAME_WIDTH_MIN, n = 0;

    while (n < count && used + c[n].width + 1 <= f->v->width)
        used += c[n++].width + 1;
    return n;
}

/* On a terminal inverse, up to its edge. */
static void put_head(struct frame *f, const struct column *c, unsigned columns, const char *last)
{
    if (f->v->terminal && !is_full(f))
        ht_buf_printf(f->out, "\033[7m");
    for (unsigned i = 0; i < columns; i++)
        put_text(f, "%*s ", (int)c[i].width, c[i].heading);
    put_text(f, "%s", last);
    while (f->v->terminal && !is_full(f) && f->column < f->v->width)
        put_text(f, " ");
    end_line(f);
}

static void put_cells(struct frame *f, const struct column *c, unsigned columns, const char (*cells)[CELL_MAX],
                      const char *name)
{
    for (unsigned i = 0; i < columns; i++)
        put_text(f, "%*.*s ", (int)c[i].width, (int)c[i].width, cells[i]);
    put_name(f, name);
    end_line(f);
}

static void put_devices(struct frame *f, const struct ht_top_sample *now, const struct ht_top_sample *before)
{
    static const struct column columns[] = {{"READ/s", 10},   {"WRITE/s", 10},   {"HEALTH", 8},
                                            {"URGENT/s", 10}, {"PLANNED/s", 10}, {"BACKGR./s", 10}};
    unsigned count = columns_that_fit(f, columns, HT_ARRAY_SIZE(columns));
    uint64_t ns = now->at_ns - before->at_ns;
    char cells[HT_ARRAY_SIZE(columns)][CELL_MAX];

    put_head(f, columns, count, "DEVICE");
    for (unsigned i = 0; i < now->devices; i++) {
        const struct ht_top_part *p = &now->device[i], *o = i < before->devices ? &before->device[i] : p;
        size_text(rate_of(p->value[HT_TOP_READ], o->value[HT_TOP_READ], ns), cells[0]);
        size_text(rate_of(p->value[HT_TOP_WRITTEN], o->value[HT_TOP_WRITTEN], ns), cells[1]);
        snprintf(cells[2], CELL_MAX, "%.31s", p->state);
        for (unsigned k = 0; k < 3; k++)
            size_text(rate_of(p->value[HT_TOP_URGENT_MOVED + k], o->value[HT_TOP_URGENT_MOVED + k], ns), cells[3 + k]);
        put_cells(f, columns, count, cells, p->name);
    }
}

/* --------------------------------------------------------------- the models */

struct model {
    const struct ht_top_part *now;
    double traffic, steps, update_ns, commit_ns; /* each second; of a step */
};

/* 0 if the counter fell: the store was mounted again. */
static double growth(const struct ht_top_part *now, const struct ht_top_part *before, enum ht_top_root figure)
{
    uint64_t n = now->value[figure], b = before->value[figure];

    return n > b ? (double)(n - b) : 0;
}

static struct model model_of(const struct ht_top_sample *now, unsigned i, const struct ht_top_sample *before,
                             const struct ht_top_sample *base)
{
    const struct ht_top_part *p = &now->root[i];
    const struct ht_top_part *o = find_same(p, before->root, before->roots, i);
    const struct ht_top_part *b = find_same(p, base->root, base->roots, i);
    struct model m = {.now = p};

    if (o)
        m.traffic = rate_of(p->value[HT_TOP_GRAD], o->value[HT_TOP_GRAD], now->at_ns - before->at_ns);
    if (!b || p->value[HT_TOP_STEP] <= b->value[HT_TOP_STEP])
        return m;
    double count = (double)(p->value[HT_TOP_STEP] - b->value[HT_TOP_STEP]);
    m.steps = rate_of(p->value[HT_TOP_STEP], b->value[HT_TOP_STEP], now->at_ns - base->at_ns);
    m.update_ns = growth(p, b, HT_TOP_UPDATE_NS) / count;
    m.commit_ns = growth(p, b, HT_TOP_COMMIT_NS) / count;
    return m;
}

static double key_of(const struct model *m, enum ht_top_order order)
{
    return order == HT_TOP_BY_TRAFFIC ? m->traffic
        : order == HT_TOP_BY_STEPS    ? m->steps
                                      : (double)m->now->value[HT_TOP_STATE];
}

static int compare(const void *a, const void *b, void *order)
{
    const struct model *x = a, *y = b;
    enum ht_top_order by = *(enum ht_top_order *)order;

    if (by != HT_TOP_BY_NAME && key_of(x, by) != key_of(y, by))
        return key_of(x, by) < key_of(y, by) ? 1 : -1;
    return strcmp(x->now->name, y->now->name);
}

static unsigned sort_models(const struct ht_top_sample *now, const struct ht_top_sample *before,
                            const struct ht_top_sample *base, enum ht_top_order order, struct model *out)
{
    for (unsigned i = 0; i < now->roots; i++)
        out[i] = model_of(now, i, before, base);
    qsort_r(out, now->roots, sizeof(*out), compare, &order);
    return now->roots;
}

static void put_models(struct frame *f, const struct ht_top_sample *now, const struct ht_top_sample *before,
                       const struct ht_top_sample *base)
{
    static const struct column columns[] = {{"STEP", 9},   {"STEPS/s", 8}, {"GRAD/s", 10}, {"UPDATE", 8},
                                            {"COMMIT", 8}, {"DURABLE", 9}, {"STATE", 10}};
    unsigned count = columns_that_fit(f, columns, HT_ARRAY_SIZE(columns));
    struct model models[HT_TOP_ROOTS_MAX];
    unsigned n = sort_models(now, before, base, f->v->order, models);
    char cells[HT_ARRAY_SIZE(columns)][CELL_MAX];

    put_head(f, columns, count, "MODEL");
    for (unsigned i = 0; i < n; i++) {
        const struct model *m = &models[i];
        const uint64_t *v = m->now->value;
        snprintf(cells[0], CELL_MAX, "%llu%s", (unsigned long long)v[HT_TOP_STEP], v[HT_TOP_OPEN] ? "+" : "");
        number_text(m->steps, cells[1]);
        size_text(m->traffic, cells[2]);
        time_text(m->update_ns, cells[3]);
        time_text(m->commit_ns, cells[4]);
        snprintf(cells[5], CELL_MAX, "%llu", (unsigned long long)v[HT_TOP_DURABLE]);
        size_text((double)v[HT_TOP_STATE], cells[6]);
        put_cells(f, columns, count, cells, m->now->name);
    }
    if (n == HT_TOP_ROOTS_MAX) {
        put_text(f, "(the first %u models)", n);
        end_line(f);
    }
}

static void put_engines(struct frame *f, const struct ht_top_sample *now, const struct ht_top_sample *before)
{
    uint64_t ns = now->at_ns - before->at_ns;
    bool any = false;
    char rate[CELL_MAX];

    for (unsigned i = 0; i < now->engines; i++) {
        const struct ht_top_part *p = &now->engine[i];
        const struct ht_top_part *o = find_same(p, before->engine, before->engines, i);
        if (strcmp(p->state, "off") == 0 || strcmp(p->state, "idle") == 0)
            continue;
        put_text(f, "%s%.12s %.8s %s/s", any ? ", " : "backgr. ", p->name, p->state,
                 size_text(o ? rate_of(p->value[HT_TOP_READ], o->value[HT_TOP_READ], ns) : 0, rate));
        any = true;
    }
    if (any)
        end_line(f);
}

void ht_top_frame(const struct ht_top_view *v, const struct ht_top_sample *now, const struct ht_top_sample *before,
                  const struct ht_top_sample *base, struct ht_buf *out)
{
    struct frame f = {.v = v, .out = out};

    put_text(&f, "hitrain ");
    put_name(&f, v->point);
    if (v->silent_s)
        put_text(&f, "  NO ANSWER for %llu s", (unsigned long long)v->silent_s);
    else if (v->paused)
        put_text(&f, "  PAUSED");
    end_line(&f);
    if (v->terminal) {
        put_text(&f, "q quit, p pause, s sort (%s), +/- interval (%g s)", order_words[v->order], v->interval_s);
        end_line(&f);
    }
    put_tier(&f, now->store);
    put_rates(&f, now, before);
    put_waits(&f, now, before);
    put_engines(&f, now, before);
    put_devices(&f, now, before);
    put_models(&f, now, before, base);
}

/* -------------------------------------------------------------------- JSON */

static void put_number(struct ht_json *j, const char *key, double v)
{
    char text[CELL_MAX];

    snprintf(text, sizeof(text), "%.3f", v);
    ht_json_word(j, key, text);
}

/* A figure, or its change per second. The place of a row is that of the figure. */
#define ROW(name, word, key, rate) {key, rate},
static const struct json_row {
    const char *key;
    bool rate;
} store_rows[] = {HT_TOP_STORE(ROW)}, device_rows[] = {HT_TOP_DEVICE(ROW)};
#undef ROW

static void put_rows(struct ht_json *j, const struct json_row *rows, size_t count, const uint64_t *now,
                     const uint64_t *before, uint64_t ns)
{
    for (size_t i = 0; i < count; i++) {
        if (rows[i].rate)
            put_number(j, rows[i].key, rate_of(now[i], before[i], ns));
        else
            ht_json_u64(j, rows[i].key, now[i]);
    }
}

static void put_devices_json(struct ht_json *j, const struct ht_top_sample *now, const struct ht_top_sample *before)
{
    ht_json_array(j, "devices");
    for (unsigned i = 0; i < now->devices; i++) {
        const struct ht_top_part *p = &now->device[i], *o = i < before->devices ? &before->device[i] : p;
        ht_json_object(j, NULL);
        ht_json_str(j, "path", p->name);
        ht_json_str(j, "health", p->state);
        put_rows(j, device_rows, HT_ARRAY_SIZE(device_rows), p->value, o->value, now->at_ns - before->at_ns);
        ht_json_end(j);
    }
    ht_json_end(j);
}

static void put_models_json(struct ht_json *j, const struct model *models, unsigned count)
{
    ht_json_array(j, "models");
    for (unsigned i = 0; i < count; i++) {
        const struct model *m = &models[i];
        ht_json_object(j, NULL);
        ht_json_str(j, "path", m->now->name);
        ht_json_u64(j, "step", m->now->value[HT_TOP_STEP]);
        ht_json_u64(j, "durable_step", m->now->value[HT_TOP_DURABLE]);
        ht_json_bool(j, "open", m->now->value[HT_TOP_OPEN] != 0);
        ht_json_u64(j, "state_bytes", m->now->value[HT_TOP_STATE]);
        put_number(j, "steps_per_s", m->steps);
        put_number(j, "grad_bytes_per_s", m->traffic);
        put_number(j, "update_ns_per_step", m->update_ns);
        put_number(j, "commit_ns_per_step", m->commit_ns);
        ht_json_end(j);
    }
    ht_json_end(j);
}

static void put_engines_json(struct ht_json *j, const struct ht_top_sample *now)
{
    ht_json_array(j, "engines");
    for (unsigned i = 0; i < now->engines; i++) {
        ht_json_object(j, NULL);
        ht_json_str(j, "engine", now->engine[i].name);
        ht_json_str(j, "state", now->engine[i].state);
        ht_json_u64(j, "moved_bytes", now->engine[i].value[HT_TOP_READ]);
        ht_json_end(j);
    }
    ht_json_end(j);
}

void ht_top_json(const struct ht_top_view *v, const struct ht_top_sample *now, const struct ht_top_sample *before,
                 const struct ht_top_sample *base, bool in_lines)
{
    struct model models[HT_TOP_ROOTS_MAX];
    unsigned count = sort_models(now, before, base, v->order, models);
    struct ht_json j;

    if (in_lines)
        ht_json_init_lines(&j, stdout);
    else
        ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", v->point);
    put_number(&j, "seconds", (double)(now->at_ns - before->at_ns) / 1e9);
    put_rows(&j, store_rows, HT_ARRAY_SIZE(store_rows), now->store, before->store, now->at_ns - before->at_ns);
    put_devices_json(&j, now, before);
    put_models_json(&j, models, count);
    put_engines_json(&j, now);
    ht_json_end(&j);
}
