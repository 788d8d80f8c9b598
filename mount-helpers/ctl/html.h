/* SPDX-License-Identifier: Apache-2.0 */
/*
 * html.h - text and drawings of a page of HTML. Names of files and texts of events may hold anything: they go through
 * ht_html_text alone. Drawings are inline SVG, whose colours are classes of the page's style sheet.
 */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_HTML_H
#define HITRAIN_MOUNT_HELPERS_CTL_HTML_H

#include "tiering/base/buf.h"

enum { HT_CHART_COLUMNS = 240, HT_CHART_SERIES_MAX = 4 };

/* Escaped for text and for attributes in quotes. What is no printable UTF-8 becomes U+FFFD. */
void ht_html_text(struct ht_buf *out, const char *text);
/*
 * The same, at most `most` bytes of it, with the beginning left out. Its direction of writing
 * changes nothing around it.
 */
void ht_html_name(struct ht_buf *out, const char *text, size_t most);

/* How the values of a drawing are written, as "1.5 GiB" or "3.2". */
typedef const char *ht_chart_text_fn(double value, char *buf, size_t cap);

struct ht_chart {
    const char *label; /* for readers that do not see the drawing */
    double x_from, x_to;
    const char *x_unit;
    ht_chart_text_fn *y_text;
};

/* Columns of bars; series stand on each other. marks: places between x_from and x_to that get a vertical line. */
struct ht_chart_columns {
    double value[HT_CHART_SERIES_MAX][HT_CHART_COLUMNS];
    unsigned series;
    const char *name[HT_CHART_SERIES_MAX];
    const double *mark;
    unsigned marks;
};
void ht_chart_columns(struct ht_buf *out, const struct ht_chart *c, const struct ht_chart_columns *d);
/* A line through count points, in ascending or any order of x; y that is no number breaks it. */
void ht_chart_line(struct ht_buf *out, const struct ht_chart *c, const double *x, const double *y, unsigned count);

ht_chart_text_fn ht_chart_bytes, ht_chart_number;

#endif
