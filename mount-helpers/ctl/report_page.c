/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_page.c - the page of `hitrainctl report`: one file, readable without a network. It has no program and asks for
 * nothing, which its policy also tells the browser. Each name and text of the store goes through html.h.
 */
#include "mount-helpers/ctl/report.h"

#include <hitrain/version.h>
#include <stdio.h>
#include <time.h>

#include "mount-helpers/common/text.h"

enum { NAME_BYTES = 120 };

static const char head[] =
    "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
    "<link rel=\"icon\" href=\"data:,\">\n"
    "<style>\n"
    ":root{color-scheme:light dark;--back:#fff;--text:#1a1a1a;--soft:#666;--line:#ccc;--a:#2f6fb0;--b:#c2651b;--c:#3f8f46;"
    "--d:#8a55b5;--bad:#b3261e;--warn:#8a5a00}\n"
    "@media(prefers-color-scheme:dark){:root{--back:#16181c;--text:#e6e6e6;--soft:#a0a0a0;--line:#444;--a:#6aa9e9;"
    "--b:#f0a35e;--c:#7cc983;--d:#c39be6;--bad:#ff8a80;--warn:#ffca6b}}\n"
    "body{background:var(--back);color:var(--text);font:15px/1.5 sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}\n"
    "h1{font-size:1.6rem}h2{margin-top:2.2rem;border-bottom:1px solid var(--line)}h3{margin-bottom:.2rem}\n"
    "p{margin:.4rem 0}.soft,.legend{color:var(--soft)}.name{font-family:monospace;overflow-wrap:anywhere}\n"
    "svg{width:100%;height:auto;display:block}svg.bar{width:200px;height:12px}\n"
    "text{fill:var(--soft);font:13px sans-serif}.end{text-anchor:end}\n"
    ".grid{stroke:var(--line);fill:none}.mark{stroke:var(--soft);stroke-dasharray:4;fill:none}.empty{fill:var(--line)}\n"
    ".line{stroke:var(--a);stroke-width:1.6;fill:none}\n"
    ".s0{fill:var(--a);background:var(--a)}.s1{fill:var(--b);background:var(--b)}.s2{fill:var(--c);background:var(--c)}"
    ".s3{fill:var(--d);background:var(--d)}\n"
    ".key{display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 .8em}\n"
    ".wide{overflow-x:auto}table{border-collapse:collapse;width:100%}th,td{text-align:left;padding:.15rem .6rem .15rem 0;"
    "border-bottom:1px solid var(--line);vertical-align:top}\n"
    ".tiles{display:flex;flex-wrap:wrap;gap:.6rem}.tile{border:1px solid var(--line);border-radius:.4rem;padding:.5rem .9rem}"
    ".tile b{display:block;font-size:1.25rem}.error{color:var(--bad)}.warn{color:var(--warn)}\n"
    "</style>\n";

static void put_time(struct ht_buf *out, uint64_t ns)
{
    time_t at = (time_t)(ns / 1000000000);
    char text[64];
    struct tm tm;

    if (localtime_r(&at, &tm) && strftime(text, sizeof(text), "%F %T %z", &tm))
        ht_buf_printf(out, "%s", text);
}

static void put_head(const struct ht_report *r, struct ht_buf *out)
{
    ht_buf_printf(out, "%s<title>hitrain: ", head);
    ht_html_text(out, r->point);
    ht_buf_printf(out, "</title>\n</head>\n<body>\n<h1>Store at ");
    ht_html_name(out, r->point, NAME_BYTES);
    ht_buf_printf(out, "</h1>\n<p class=\"soft\">");
    put_time(out, r->wall_ns);
    ht_buf_printf(out, ", hitrain %s</p>\n", HT_VERSION);
}

static void put_tile(struct ht_buf *out, const char *value, const char *what)
{
    ht_buf_printf(out, "<div class=\"tile\"><b>%s</b>%s</div>\n", value, what);
}

static void put_tiles(const struct ht_report *r, struct ht_buf *out)
{
    const struct ht_top_sample *s = r->sample;
    const uint64_t *v = s->store;
    uint64_t read = 0, written = 0, all = v[HT_TOP_HITS] + v[HT_TOP_MISSES];
    char text[64];

    for (unsigned i = 0; i < s->devices; i++) {
        read += s->device[i].value[HT_TOP_READ];
        written += s->device[i].value[HT_TOP_WRITTEN];
    }
    ht_buf_printf(out, "<div class=\"tiles\">\n");
    snprintf(text, sizeof(text), "%s of %s",
             ht_size_text(v[HT_TOP_TOTAL] - ht_min_u64(v[HT_TOP_AVAILABLE], v[HT_TOP_TOTAL])),
             ht_size_text(v[HT_TOP_TOTAL]));
    put_tile(out, text, "space in use");
    snprintf(text, sizeof(text), "%s of %s", ht_size_text(v[HT_TOP_RESIDENT]), ht_size_text(v[HT_TOP_DRAM]));
    put_tile(out, text, "in the DRAM tier");
    snprintf(text, sizeof(text), "%.1f %%", all ? (double)v[HT_TOP_HITS] * 100 / (double)all : 0);
    put_tile(out, text, "of accesses found in memory");
    put_tile(out, ht_size_text(read), "read from devices");
    put_tile(out, ht_size_text(written), "written to devices");
    snprintf(text, sizeof(text), "%llu, %llu", (unsigned long long)s->errors, (unsigned long long)s->warnings);
    put_tile(out, text, "errors and warnings");
    ht_buf_printf(out, "</div>\n");
}

static void put_loss(const struct ht_report *r, struct ht_buf *out)
{
    const struct ht_report_loss *l = &r->loss;
    struct ht_chart c = {.label = "loss", .x_unit = "steps", .y_text = ht_chart_number};

    if (!r->loss_path)
        return;
    c.x_from = c.x_to = l->step[0];
    for (unsigned i = 0; i < l->count; i++) {
        c.x_from = l->step[i] < c.x_from ? l->step[i] : c.x_from;
        c.x_to = l->step[i] > c.x_to ? l->step[i] : c.x_to;
    }
    ht_buf_printf(out, "<h2>Loss</h2>\n<p>%llu points of ", (unsigned long long)l->points);
    ht_html_name(out, r->loss_path, NAME_BYTES);
    ht_buf_printf(out, ", the last %.5g", l->loss[l->count - 1]);
    if (l->each > 1)
        ht_buf_printf(out, "; each point here is the mean of %llu", (unsigned long long)l->each);
    if (l->skipped)
        ht_buf_printf(out, "; %llu lines have no finite loss", (unsigned long long)l->skipped);
    ht_buf_printf(out, ".</p>\n");
    ht_chart_line(out, &c, l->step, l->loss, l->count);
}

static void put_models(const struct ht_report *r, struct ht_buf *out)
{
    const struct ht_top_sample *s = r->sample;

    ht_buf_printf(out, "<h2>Models</h2>\n");
    if (s->roots == 0) {
        ht_buf_printf(out, "<p>The caller finds no model in this store.</p>\n");
        return;
    }
    ht_buf_printf(
        out, "<div class=\"wide\"><table><tr><th>model<th>step<th>durable<th>state<th>gradients<th>optimizer</tr>\n");
    for (unsigned i = 0; i < s->roots && i < HT_REPORT_MODELS_MAX; i++) {
        const struct ht_top_part *p = &s->root[i];
        ht_buf_printf(out, "<tr><td>");
        ht_html_name(out, p->name, NAME_BYTES);
        ht_buf_printf(out, "</td><td>%llu%s</td><td>%llu</td><td>%s</td><td>%s</td><td>",
                      (unsigned long long)p->value[HT_TOP_STEP], p->value[HT_TOP_OPEN] ? ", one open" : "",
                      (unsigned long long)p->value[HT_TOP_DURABLE], ht_size_text(p->value[HT_TOP_STATE]),
                      ht_size_text(p->value[HT_TOP_GRAD]));
        for (unsigned k = 0; k < r->models; k++)
            if (strcmp(r->model[k].path, p->name) == 0)
                ht_html_text(out, r->model[k].config);
        ht_buf_printf(out, "</td></tr>\n");
    }
    ht_buf_printf(out, "</table></div>\n");
    if (s->roots > HT_REPORT_MODELS_MAX)
        ht_buf_printf(out, "<p>These are the first %d of at least %u models.</p>\n", HT_REPORT_MODELS_MAX, s->roots);
}

static void put_event(const struct ht_report_event *e, struct ht_buf *out)
{
    bool marked = strcmp(e->level, "error") == 0 || strcmp(e->level, "warn") == 0;

    ht_buf_printf(out, "<tr><td>");
    put_time(out, e->time_ns);
    ht_buf_printf(out, "</td><td class=\"%s\">", marked ? e->level : "");
    ht_html_text(out, e->level);
    ht_buf_printf(out, "</td><td>");
    ht_html_text(out, e->code);
    ht_buf_printf(out, "</td><td>");
    if (e->path[0] != '\0') {
        ht_html_name(out, e->path, NAME_BYTES);
        ht_buf_printf(out, ": ");
    }
    ht_html_text(out, e->text);
    if (e->count > 1)
        ht_buf_printf(out, " (%llu times)", (unsigned long long)e->count);
    ht_buf_printf(out, "</td></tr>\n");
}

static void put_events(const struct ht_report *r, struct ht_buf *out)
{
    uint64_t shown = ht_min_u64(r->events, HT_REPORT_EVENTS_MAX);

    ht_buf_printf(out, "<h2>Events</h2>\n");
    if (!r->events_known) {
        ht_buf_printf(out, "<p>Only root and the owner of the mount's root may read events.</p>\n");
        return;
    }
    ht_buf_printf(out, "<p>The newest %llu of %llu since the mount.</p>\n", (unsigned long long)shown,
                  (unsigned long long)r->events);
    ht_buf_printf(out, "<div class=\"wide\"><table><tr><th>time<th>level<th>code<th>what</tr>\n");
    for (uint64_t i = 0; i < shown; i++)
        put_event(&r->event[(r->events - 1 - i) % HT_REPORT_EVENTS_MAX], out);
    ht_buf_printf(out, "</table></div>\n");
}

static void put_setting(struct ht_buf *out, const char *what, const char *value)
{
    if (value[0] == '\0')
        return;
    ht_buf_printf(out, "<tr><th>%s</th><td>", what);
    ht_html_name(out, value, 512);
    ht_buf_printf(out, "</td></tr>\n");
}

static void put_configuration(const struct ht_report *r, struct ht_buf *out)
{
    char format[32] = "";

    if (r->format)
        snprintf(format, sizeof(format), "%u", r->format);
    ht_buf_printf(out, "<h2>Configuration</h2>\n<div class=\"wide\"><table>\n");
    put_setting(out, "source", r->source);
    put_setting(out, "store", r->store);
    put_setting(out, "label", r->label);
    put_setting(out, "format", format);
    put_setting(out, "daemon", r->command);
    put_setting(out, "mount", r->options);
    ht_buf_printf(out, "</table></div>\n");
}

void ht_report_page(const struct ht_report *r, struct ht_buf *out)
{
    put_head(r, out);
    put_tiles(r, out);
    ht_report_put_steps(r, out);
    put_loss(r, out);
    ht_report_put_memory(r, out);
    ht_report_put_traffic(r, out);
    put_models(r, out);
    put_events(r, out);
    put_configuration(r, out);
    ht_buf_printf(out, "</body>\n</html>\n");
}
