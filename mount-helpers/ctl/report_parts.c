/* SPDX-License-Identifier: Apache-2.0 */
/* report_parts.c - the parts of the page of `hitrainctl report` that are drawn: steps, traffic, memory. */
#include "mount-helpers/ctl/report.h"

#include <stdio.h>
#include <stdlib.h>

#include "mount-helpers/common/text.h"

enum { WINDOW_STEPS = 4, STEPS_SHOWN = 240, FILES_SHOWN = 50, MODELS_SHOWN = 16, NAME_BYTES = 120 };

static double seconds(uint64_t ns)
{
    return (double)ns / 1e9;
}

static const char *text_seconds(double value, char *buf, size_t cap)
{
    snprintf(buf, cap, "%.3g s", value);
    return buf;
}

/* --------------------------------------------------------------------- steps */

/* Ends of the steps of one model, at most `most`, the newest ones, in order. */
static unsigned ends_of(const struct ht_report_trace *t, uint32_t model, uint64_t *out, unsigned most)
{
    unsigned count = 0;

    for (uint32_t i = t->steps; i > 0 && count < most; i--)
        if (t->step[i - 1].file == model)
            out[count++] = t->step[i - 1].time_ns;
    for (unsigned i = 0; i < count / 2; i++) {
        uint64_t swap = out[i];
        out[i] = out[count - 1 - i];
        out[count - 1 - i] = swap;
    }
    return count;
}

static void put_model_steps(const struct ht_report *r, uint32_t model, struct ht_buf *out)
{
    static uint64_t end[STEPS_SHOWN + 1];
    struct ht_chart_columns *d = calloc(1, sizeof(*d));
    unsigned count = ends_of(&r->trace, model, end, STEPS_SHOWN + 1);

    if (!d || count < 2) {
        free(d);
        return;
    }
    for (unsigned i = 0; i < HT_CHART_COLUMNS; i++) {
        unsigned k = i * (count - 1) / HT_CHART_COLUMNS;
        d->value[0][i] = end[k + 1] > end[k] ? seconds(end[k + 1] - end[k]) : 0;
    }
    d->series = 1;
    double whole = seconds(end[count - 1] - end[0]);
    ht_buf_printf(out, "<h3>/");
    ht_html_name(out, r->trace.file[model].path, NAME_BYTES);
    ht_buf_printf(out, "</h3>\n<p>%u steps in %.3f s: %.3f steps per second. The drawing has the time of each.</p>\n",
                  count - 1, whole, whole > 0 ? (count - 1) / whole : 0);
    ht_chart_columns(
        out,
        &(struct ht_chart){
            .label = "time of each step", .x_from = 1, .x_to = count - 1, .x_unit = "steps", .y_text = text_seconds},
        d);
    free(d);
}

void ht_report_put_steps(const struct ht_report *r, struct ht_buf *out)
{
    const struct ht_report_trace *t = &r->trace;
    unsigned shown = 0;

    ht_buf_printf(out, "<h2>Steps</h2>\n");
    for (uint32_t i = 0; i < t->steps && shown < MODELS_SHOWN; i++) {
        uint64_t two[2];
        bool first = true;
        for (uint32_t k = 0; k < i && first; k++)
            first = t->step[k].file != t->step[i].file;
        if (first && ends_of(t, t->step[i].file, two, 2) == 2) {
            put_model_steps(r, t->step[i].file, out);
            shown++;
        }
    }
    if (!r->trace_known)
        ht_buf_printf(out, "<p>Only root and the owner of the mount's root may read the trace.</p>\n");
    else if (shown == 0)
        ht_buf_printf(out, "<p>The trace has no two ends of steps of one model.</p>\n");
}

/* ------------------------------------------------------------------- traffic */

/* The last steps of the model that ended one last; the whole trace where there are no two ends. */
static unsigned window(const struct ht_report_trace *t, uint64_t *from, uint64_t *to, double mark[WINDOW_STEPS + 1])
{
    uint64_t end[WINDOW_STEPS + 1];
    unsigned count = t->steps ? ends_of(t, t->step[t->steps - 1].file, end, WINDOW_STEPS + 1) : 0;

    *from = count >= 2 ? end[0] : t->first_ns;
    *to = count >= 2 ? end[count - 1] : t->last_ns;
    for (unsigned i = 0; i < count; i++)
        mark[i] = seconds(end[i]);
    return count >= 2 ? count : 0;
}

static unsigned column_of(uint64_t time_ns, uint64_t from, uint64_t to)
{
    double at = (double)(time_ns - from) * HT_CHART_COLUMNS / (double)(to - from);

    return at < HT_CHART_COLUMNS ? (unsigned)at : HT_CHART_COLUMNS - 1;
}

static void put_over_time(const struct ht_report *r, struct ht_buf *out)
{
    const struct ht_report_trace *t = &r->trace;
    struct ht_chart_columns *d = calloc(2, sizeof(*d));
    double mark[WINDOW_STEPS + 1];
    uint64_t from, to;
    unsigned marks = window(t, &from, &to, mark);

    if (!d || to <= from) {
        free(d);
        return;
    }
    for (uint32_t i = 0; i < t->accesses; i++) {
        const struct ht_report_access *a = &t->access[i];
        if (a->time_ns < from || a->time_ns > to)
            continue;
        unsigned column = column_of(a->time_ns, from, to);
        d[0].value[a->op][column] += (double)a->bytes;
        d[1].value[0][column] += seconds(a->waited_ns);
    }
    struct ht_chart c = {.label = "bytes of accesses over time",
                         .x_from = seconds(from),
                         .x_to = seconds(to),
                         .x_unit = "s after the mount",
                         .y_text = ht_chart_bytes};
    for (unsigned s = 0; s < HT_REPORT_OPS; s++)
        d[0].name[s] = ht_report_op_words[s];
    d[0].series = HT_REPORT_OPS;
    d[1].series = 1;
    d[0].mark = d[1].mark = mark;
    d[0].marks = d[1].marks = marks;
    ht_buf_printf(
        out,
        "<h3>Input and output %s</h3>\n<p>Bytes that programs and the optimizer accessed in 1/%d of %.3f s.%s</p>\n",
        marks ? "over the last steps" : "over the trace", HT_CHART_COLUMNS, seconds(to - from),
        marks ? " A dashed line is the end of a step." : "");
    ht_chart_columns(out, &c, &d[0]);
    ht_buf_printf(out, "<p>How long these accesses waited, in seconds.</p>\n");
    c.label = "time that accesses waited";
    c.y_text = text_seconds;
    ht_chart_columns(out, &c, &d[1]);
    free(d);
}

static void put_bytes_cell(struct ht_buf *out, uint64_t bytes)
{
    if (bytes)
        ht_buf_printf(out, "<td>%s</td>", ht_size_text(bytes));
    else
        ht_buf_printf(out, "<td></td>");
}

static void put_files(const struct ht_report *r, struct ht_buf *out)
{
    uint32_t number[FILES_SHOWN];
    unsigned count = ht_report_trace_largest(&r->trace, number, FILES_SHOWN);

    ht_buf_printf(out, "<h3>By tensor</h3>\n<p>The %u files with the most bytes, of %u in the last %u accesses.</p>\n",
                  count, r->trace.files, r->trace.accesses);
    ht_buf_printf(out,
                  "<div class=\"wide\"><table><tr><th>file<th>read<th>written<th>gradient<th>updated<th>waited</tr>\n");
    for (unsigned i = 0; i < count; i++) {
        const struct ht_report_file *f = &r->trace.file[number[i]];
        ht_buf_printf(out, "<tr><td>");
        if (f->path[0] != '\0')
            ht_html_name(out, f->path, NAME_BYTES);
        else
            ht_buf_printf(out, "(inode %llu, deleted)", (unsigned long long)f->id);
        ht_buf_printf(out, "</td>");
        for (int op = 0; op < HT_REPORT_OPS; op++)
            put_bytes_cell(out, f->bytes[op]);
        ht_buf_printf(out, "<td>%.3f s</td></tr>\n", seconds(f->waited_ns));
    }
    ht_buf_printf(out, "</table></div>\n");
}

static void put_devices(const struct ht_report *r, struct ht_buf *out)
{
    const struct ht_top_sample *s = r->sample;
    uint64_t most = 1;

    for (unsigned i = 0; i < s->devices; i++)
        most = ht_max_u64(most, s->device[i].value[HT_TOP_READ] + s->device[i].value[HT_TOP_WRITTEN]);
    ht_buf_printf(
        out,
        "<h3>By device</h3>\n<p>Since the mount.</p>\n<div class=\"wide\"><table><tr><th>device<th>health<th>read<th>"
        "written<th></tr>\n");
    for (unsigned i = 0; i < s->devices; i++) {
        const struct ht_top_part *d = &s->device[i];
        uint64_t read = d->value[HT_TOP_READ], written = d->value[HT_TOP_WRITTEN];
        ht_buf_printf(out, "<tr><td>");
        ht_html_name(out, d->name[0] ? d->name : "(missing)", NAME_BYTES);
        ht_buf_printf(out, "</td><td>");
        ht_html_text(out, d->state);
        ht_buf_printf(out, "</td><td>%s</td><td>%s</td>", ht_size_text(read), ht_size_text(written));
        double a = 200.0 * (double)read / (double)most, b = 200.0 * (double)written / (double)most;
        ht_buf_printf(
            out,
            "<td><svg class=\"bar\" viewBox=\"0 0 200 12\" role=\"img\" aria-label=\"read and written\"><path "
            "class=\"s0\" d=\"M0 0h%.1fv12H0z\"/><path class=\"s1\" d=\"M%.1f 0h%.1fv12h-%.1fz\"/></svg></td></tr>\n",
            a, a, b, b);
    }
    ht_buf_printf(out, "</table></div>\n");
}

void ht_report_put_traffic(const struct ht_report *r, struct ht_buf *out)
{
    ht_buf_printf(out, "<h2>Traffic</h2>\n");
    if (r->trace_known && r->trace.accesses) {
        put_over_time(r, out);
        put_files(r, out);
    } else if (r->trace_known) {
        ht_buf_printf(out, "<p>The trace has no access yet.</p>\n");
    }
    put_devices(r, out);
}

/* -------------------------------------------------------------------- memory */

static void put_tier(const struct ht_report *r, struct ht_buf *out)
{
    const uint64_t *v = r->sample->store;
    uint64_t dirty = ht_min_u64(v[HT_TOP_DIRTY], v[HT_TOP_RESIDENT]), all = ht_max_u64(v[HT_TOP_DRAM], 1);
    uint64_t part[] = {ht_min_u64(v[HT_TOP_PASSTHROUGH], v[HT_TOP_RESIDENT]), dirty, 0};
    static const char *const names[] = {"passthrough", "dirty", "clean"};
    double at = 0;

    part[0] = ht_min_u64(part[0], v[HT_TOP_RESIDENT] - dirty);
    part[2] = v[HT_TOP_RESIDENT] - dirty - part[0];
    ht_buf_printf(
        out,
        "<p>%s of %s in the DRAM tier hold content; %s are protected; the staging pool has %s, of which %s are used.</p>\n",
        ht_size_text(v[HT_TOP_RESIDENT]), ht_size_text(v[HT_TOP_DRAM]), ht_size_text(v[HT_TOP_PROTECTED]),
        ht_size_text(v[HT_TOP_STAGING]), ht_size_text(v[HT_TOP_STAGING_USED]));
    ht_buf_printf(out,
                  "<svg class=\"tier\" viewBox=\"0 0 1000 24\" role=\"img\" aria-label=\"use of the DRAM tier\"><path "
                  "class=\"empty\" d=\"M0 0h1000v24H0z\"/>");
    for (unsigned i = 0; i < HT_ARRAY_SIZE(part); i++) {
        double width = ht_min_u64(part[i], all) * 1000.0 / (double)all;
        ht_buf_printf(out, "<path class=\"s%u\" d=\"M%.1f 0h%.1fv24h-%.1fz\"/>", i, at, width, width);
        at += width;
    }
    ht_buf_printf(out, "</svg>\n<p class=\"legend\">");
    for (unsigned i = 0; i < HT_ARRAY_SIZE(part); i++)
        ht_buf_printf(out, "<span class=\"key s%u\"></span>%s %s ", i, names[i], ht_size_text(part[i]));
    ht_buf_printf(out, "</p>\n");
}

static void put_plan(const struct ht_report *r, struct ht_buf *out)
{
    struct ht_chart_columns *d = calloc(2, sizeof(*d));
    struct ht_chart c = {.label = "content in memory over one step",
                         .x_to = seconds(r->plan.step_ns),
                         .x_unit = "s of a step",
                         .y_text = ht_chart_bytes};

    if (!d)
        return;
    for (unsigned i = 0; i < HT_PLAN_COLUMNS; i++) {
        d[0].value[0][i * HT_CHART_COLUMNS / HT_PLAN_COLUMNS] +=
            r->plan.in_memory[i] * HT_CHART_COLUMNS / HT_PLAN_COLUMNS;
        d[1].value[0][i * HT_CHART_COLUMNS / HT_PLAN_COLUMNS] += r->plan.read[i];
    }
    d[0].series = d[1].series = 1;
    ht_buf_printf(out, "<h3>Over one step</h3>\n<p>The plan that the store follows: content in memory.</p>\n");
    ht_chart_columns(out, &c, &d[0]);
    ht_buf_printf(out, "<p>What devices read in 1/%d of a step, because it has no room.</p>\n", HT_CHART_COLUMNS);
    c.label = "reads of a step";
    ht_chart_columns(out, &c, &d[1]);
    free(d);
}

void ht_report_put_memory(const struct ht_report *r, struct ht_buf *out)
{
    ht_buf_printf(out, "<h2>Memory</h2>\n");
    put_tier(r, out);
    if (r->plan_known && r->plan.active)
        put_plan(r, out);
    else if (r->plan_known)
        ht_buf_printf(
            out, "<p>No plan of a step is followed: either all content has room, or steps do not repeat yet.</p>\n");
}
