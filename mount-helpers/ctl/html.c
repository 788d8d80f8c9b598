/* SPDX-License-Identifier: Apache-2.0 */
/* html.c - see html.h. */
#include "mount-helpers/ctl/html.h"

#include <math.h>
#include <stdio.h>

enum { LEFT = 80, RIGHT = 990, TOP = 14, BOTTOM = 180, HEIGHT = 206, WIDTH = 1000 };

/* --------------------------------------------------------------------- text */

/* Bytes of the printable character at p, or 0. Characters that reverse the direction of writing are none. */
static unsigned printable(const char *p)
{
    const unsigned char *u = (const unsigned char *)p;

    if (u[0] < 0x20 || u[0] == 0x7f || (u[0] == 0xc2 && u[1] < 0xa0))
        return 0;
    if (u[0] == 0xe2 &&
        ((u[1] == 0x80 && u[2] >= 0xa8 && u[2] <= 0xae) || (u[1] == 0x81 && u[2] >= 0xa0 && u[2] <= 0xaf)))
        return 0;
    return ht_utf8_length(p);
}

void ht_html_text(struct ht_buf *out, const char *text)
{
    for (const char *p = text; *p != '\0';) {
        unsigned n = printable(p);
        if (n == 0)
            ht_buf_printf(out, "\xef\xbf\xbd");
        else if (strchr("<>&\"'", *p))
            ht_buf_printf(out, "&#%u;", (unsigned)(unsigned char)*p);
        else
            ht_buf_put(out, p, n);
        p += n ? n : 1;
    }
}

void ht_html_name(struct ht_buf *out, const char *text, size_t most)
{
    size_t len = strlen(text);

    ht_buf_printf(out, "<bdi class=\"name\">");
    if (len > most) {
        ht_buf_printf(out, "\xe2\x80\xa6");
        text += len - most;
        while (((unsigned char)*text & 0xc0) == 0x80)
            text++;
    }
    ht_html_text(out, text);
    ht_buf_printf(out, "</bdi>");
}

const char *ht_chart_bytes(double value, char *buf, size_t cap)
{
    return ht_format_size(value > 0 && value < 1e18 ? (uint64_t)value : 0, buf, cap);
}

const char *ht_chart_number(double value, char *buf, size_t cap)
{
    snprintf(buf, cap, "%.4g", value);
    return buf;
}

/* ---------------------------------------------------------------- coordinates */

struct axes {
    const struct ht_chart *c;
    double y_from, y_to;
};

static double x_of(const struct axes *a, double x)
{
    double whole = a->c->x_to - a->c->x_from;

    return LEFT + (RIGHT - LEFT) * (whole > 0 ? (x - a->c->x_from) / whole : 0.5);
}

static double y_of(const struct axes *a, double y)
{
    double whole = a->y_to - a->y_from;

    return BOTTOM - (BOTTOM - TOP) * (whole > 0 ? (y - a->y_from) / whole : 0.5);
}

static void begin(struct ht_buf *out, const struct axes *a)
{
    char text[64];

    ht_buf_printf(out, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, HEIGHT);
    ht_html_text(out, a->c->label);
    ht_buf_printf(out, "\">\n");
    for (int i = 0; i <= 2; i++) {
        double value = a->y_from + (a->y_to - a->y_from) * i / 2;
        ht_buf_printf(out, "<path class=\"grid\" d=\"M%d %.1fH%d\"/><text x=\"%d\" y=\"%.1f\" class=\"end\">", LEFT,
                      y_of(a, value), RIGHT, LEFT - 6, y_of(a, value) + 4);
        ht_html_text(out, a->c->y_text(value, text, sizeof(text)));
        ht_buf_printf(out, "</text>\n");
    }
    ht_buf_printf(out, "<text x=\"%d\" y=\"%d\">%.6g</text><text x=\"%d\" y=\"%d\" class=\"end\">%.6g ", LEFT,
                  BOTTOM + 18, a->c->x_from, RIGHT, BOTTOM + 18, a->c->x_to);
    ht_html_text(out, a->c->x_unit);
    ht_buf_printf(out, "</text>\n");
}

/* ------------------------------------------------------------------ drawings */

static void put_legend(struct ht_buf *out, const struct ht_chart_columns *d)
{
    ht_buf_printf(out, "<p class=\"legend\">");
    for (unsigned s = 0; s < d->series; s++) {
        ht_buf_printf(out, "<span class=\"key s%u\"></span>", s);
        ht_html_text(out, d->name[s]);
        ht_buf_printf(out, " ");
    }
    ht_buf_printf(out, "</p>\n");
}

void ht_chart_columns(struct ht_buf *out, const struct ht_chart *c, const struct ht_chart_columns *d)
{
    double base[HT_CHART_COLUMNS] = {0}, most = 0, width = (double)(RIGHT - LEFT) / HT_CHART_COLUMNS;
    struct axes a = {.c = c};

    for (unsigned i = 0; i < HT_CHART_COLUMNS; i++) {
        double sum = 0;
        for (unsigned s = 0; s < d->series; s++)
            sum += d->value[s][i];
        most = sum > most ? sum : most;
    }
    a.y_to = most > 0 ? most : 1;
    begin(out, &a);
    for (unsigned s = 0; s < d->series; s++) {
        ht_buf_printf(out, "<path class=\"s%u\" d=\"", s);
        for (unsigned i = 0; i < HT_CHART_COLUMNS; i++) {
            if (d->value[s][i] <= 0)
                continue;
            double low = y_of(&a, base[i]), high = y_of(&a, base[i] + d->value[s][i]);
            ht_buf_printf(out, "M%.1f %.1fV%.1fh%.1fV%.1fz", LEFT + width * i, low, high, width, low);
            base[i] += d->value[s][i];
        }
        ht_buf_printf(out, "\"/>\n");
    }
    for (unsigned i = 0; i < d->marks; i++)
        ht_buf_printf(out, "<path class=\"mark\" d=\"M%.1f %dV%d\"/>", x_of(&a, d->mark[i]), TOP, BOTTOM);
    ht_buf_printf(out, "</svg>\n");
    if (d->series > 1)
        put_legend(out, d);
}

void ht_chart_line(struct ht_buf *out, const struct ht_chart *c, const double *x, const double *y, unsigned count)
{
    struct axes a = {.c = c, .y_from = INFINITY, .y_to = -INFINITY};
    bool pen = false;

    for (unsigned i = 0; i < count; i++) {
        a.y_from = isfinite(y[i]) && y[i] < a.y_from ? y[i] : a.y_from;
        a.y_to = isfinite(y[i]) && y[i] > a.y_to ? y[i] : a.y_to;
    }
    if (a.y_from > a.y_to)
        a.y_from = a.y_to = 0;
    begin(out, &a);
    ht_buf_printf(out, "<path class=\"line\" d=\"");
    for (unsigned i = 0; i < count; i++) {
        if (isfinite(y[i]))
            ht_buf_printf(out, "%c%.1f %.1f", pen ? 'L' : 'M', x_of(&a, x[i]), y_of(&a, y[i]));
        pen = isfinite(y[i]);
    }
    ht_buf_printf(out, "\"/>\n</svg>\n");
}
