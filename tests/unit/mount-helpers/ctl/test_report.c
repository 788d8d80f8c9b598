/* SPDX-License-Identifier: Apache-2.0 */
/* The page of `hitrainctl report`: what it escapes, how it reads losses and accesses, and that it stays small. */
#include <check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "mount-helpers/ctl/report.h"
#include "tests/support/suite.h"

static struct ht_buf out;
static struct ht_report r;

static void begin(void)
{
    ht_buf_reset(&out);
    r = (struct ht_report){.point = "/mnt", .source = "/dev/x", .options = "rw"};
    r.sample = calloc(1, sizeof(*r.sample));
    r.event = calloc(HT_REPORT_EVENTS_MAX, sizeof(*r.event));
    ck_assert(r.sample && r.event && ht_report_trace_new(&r.trace) == 0);
    r.trace_known = r.plan_known = r.events_known = true;
}

static void end(void)
{
    ht_report_trace_free(&r.trace);
    free(r.sample);
    free(r.event);
    ht_buf_free(&out);
}

static int access_line(const char *text)
{
    char *copy = strdup(text);
    struct ht_cmd_line l;

    ck_assert_int_eq(ht_cmd_parse_json(copy, &l), 0);
    int rc = ht_report_trace_add(&r.trace, &l);
    free(copy);
    return rc;
}

static const char *page(void)
{
    ht_buf_reset(&out);
    ht_report_page(&r, &out);
    ck_assert_int_eq(out.err, 0);
    ht_buf_put_u8(&out, 0);
    return (const char *)out.data;
}

static unsigned count(const char *text, const char *word)
{
    unsigned n = 0;

    for (const char *p = text; (p = strstr(p, word)); p++)
        n++;
    return n;
}

/* ------------------------------------------------------------------- escaping */

#define SUBST "\xef\xbf\xbd"
static const struct {
    const char *text, *html;
} texts[] = {
    {"plain /a-b_c.1 \xc3\xa4\xe2\x80\xa6", "plain /a-b_c.1 \xc3\xa4\xe2\x80\xa6"},
    {"<script>&\"'", "&#60;script&#62;&#38;&#34;&#39;"},
    {"(\n)\t(\x7f)\x1b[", "(" SUBST ")" SUBST "(" SUBST ")" SUBST "["},
    {"\xff\xc2\x9b", SUBST SUBST SUBST}, /* no UTF-8, and a control character of two bytes */
    {"\xe2\x80\xae", SUBST SUBST SUBST}, /* writes to the left */
    {"\xe2\x81\xa6", SUBST SUBST SUBST},
};

START_TEST(texts_are_escaped)
{
    ht_html_text(&out, texts[_i].text);
    ht_buf_put_u8(&out, 0);
    ck_assert_str_eq((const char *)out.data, texts[_i].html);
}
END_TEST

START_TEST(long_names_keep_their_end)
{
    ht_html_name(&out, "aaaa\xc3\xa4/end", 5);
    ht_buf_put_u8(&out, 0);
    ck_assert_str_eq((const char *)out.data, "<bdi class=\"name\">\xe2\x80\xa6/end</bdi>");
}
END_TEST

/* --------------------------------------------------------------------- losses */

static struct ht_report_loss *read_lines(const char *text)
{
    static struct ht_report_loss l;
    struct ht_loss_columns columns = {0};
    char *copy = strdup(text), *at = copy;

    l = (struct ht_report_loss){0};
    for (char *line; (line = strsep(&at, "\n"));)
        ht_report_loss_line(&l, &columns, line);
    free(copy);
    return &l;
}

static const struct {
    const char *text;
    unsigned points, skipped;
    double step, loss; /* of the last */
} losses[] = {
    {"step,loss\n1,2.5\n2,2.25\n", 2, 0, 2, 2.25},
    {"\"loss\", time, \"step\"\r\n1.5,x,7\r\n", 1, 0, 7, 1.5},
    {"1,3\n2,nan\n3,1\n", 2, 1, 3, 1},
    {"4.5\n4.25", 2, 0, 2, 4.25},
    {"{\"step\": 5, \"loss\": 0.5}\n{\"loss\": 0.25, \"other\": \"x\"}\n{\"loss\": \"<b>\"}\n{\"loss\"\n", 2, 2, 2,
     0.25},
    {"a,b\nc,d\n", 0, 2, 0, 0},
    {"", 0, 0, 0, 0},
};

START_TEST(losses_of_csv_and_json)
{
    const struct ht_report_loss *l = read_lines(losses[_i].text);

    ck_assert_uint_eq(l->points, losses[_i].points);
    ck_assert_uint_eq(l->skipped, losses[_i].skipped);
    ck_assert_uint_eq(l->count, losses[_i].points);
    if (l->count) {
        ck_assert_double_eq(l->step[l->count - 1], losses[_i].step);
        ck_assert_double_eq(l->loss[l->count - 1], losses[_i].loss);
    }
}
END_TEST

START_TEST(many_points_become_means)
{
    struct ht_report_loss l = {0};
    struct ht_loss_columns columns = {0};
    enum { POINTS = 10 * HT_REPORT_LOSS_MAX };

    for (int i = 1; i <= POINTS; i++) {
        char line[64];
        snprintf(line, sizeof(line), "%d,%d", i, 2 * i);
        ht_report_loss_line(&l, &columns, line);
    }
    ck_assert_uint_eq(l.points, POINTS);
    ck_assert_uint_eq(l.each, 16);
    ck_assert_uint_eq(l.count, POINTS / 16);
    for (unsigned i = 0; i < l.count; i++) {
        ck_assert_double_eq_tol(l.step[i], 16 * i + 8.5, 1e-6);
        ck_assert_double_eq_tol(l.loss[i], 2 * l.step[i], 1e-6);
    }
}
END_TEST

/* ------------------------------------------------------------------- accesses */

START_TEST(accesses_are_summed_by_file)
{
    ck_assert_int_eq(
        access_line("{\"time_ns\": 5, \"op\": \"read\", \"id\": 9, \"path\": \"a\", \"bytes\": 10, \"waited_ns\": 3}"),
        0);
    ck_assert_int_eq(access_line("{\"time_ns\": 6, \"op\": \"update\", \"id\": 7, \"path\": \"b\", \"bytes\": 100}"),
                     0);
    ck_assert_int_eq(access_line("{\"time_ns\": 7, \"op\": \"read\", \"id\": 9, \"path\": \"a\", \"bytes\": 20}"), 0);
    ck_assert_int_eq(access_line("{\"time_ns\": 8, \"op\": \"open\", \"id\": 8, \"path\": \"c\"}"), 0);
    ck_assert_int_eq(access_line("{\"time_ns\": 9, \"op\": \"step\", \"id\": 2, \"path\": \"model\"}"), 0);
    uint32_t largest[4];
    ck_assert_uint_eq(ht_report_trace_largest(&r.trace, largest, 4), 2);
    ck_assert_str_eq(r.trace.file[largest[0]].path, "b");
    ck_assert_uint_eq(r.trace.file[largest[1]].bytes[HT_REPORT_READ], 30);
    ck_assert_uint_eq(r.trace.file[largest[1]].waited_ns, 3);
    ck_assert_uint_eq(r.trace.steps, 1);
    ck_assert_uint_eq(ht_report_trace_largest(&r.trace, largest, 1), 1);
    ck_assert_int_eq(access_line("{\"time_ns\": 9}"), -EPROTO);
}
END_TEST

/* It publishes what asynchronous steps have done: their own ends are there already. */
START_TEST(a_commit_without_a_gradient_ends_no_step)
{
    static const struct {
        const char *op;
        unsigned steps;
    } lines[] = {{"gradient", 0}, {"step", 1},   {"commit", 1}, {"gradient", 1},
                 {"commit", 2},   {"commit", 2}, {"step", 3}};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(lines); i++) {
        char line[128];
        snprintf(line, sizeof(line), "{\"time_ns\": %u, \"op\": \"%s\", \"id\": 2, \"path\": \"m\"}", i + 1,
                 lines[i].op);
        ck_assert_int_eq(access_line(line), 0);
        ck_assert_uint_eq(r.trace.steps, lines[i].steps);
    }
}
END_TEST

START_TEST(a_page_of_nothing_is_a_page)
{
    const char *text = page();

    ck_assert_ptr_nonnull(strstr(text, "no access yet"));
    ck_assert_ptr_nonnull(strstr(text, "</html>"));
    r.trace_known = r.plan_known = r.events_known = false;
    text = page();
    ck_assert_ptr_null(strstr(text, "no access yet"));
    ck_assert_uint_ge(count(text, "Only root"), 2);
}
END_TEST

/* Nothing of a name or a text is markup, wherever it stands. */
START_TEST(no_name_is_markup)
{
    static const char bad[] = "<i onx='\">&";
    char line[256];

    r.point = r.source = r.options = bad;
    snprintf(r.command, sizeof(r.command), "%s", bad);
    snprintf(r.label, sizeof(r.label), "%s", bad);
    r.loss_path = bad;
    r.loss = *read_lines("1,2");
    snprintf(line, sizeof(line),
             "{\"time_ns\": 1, \"op\": \"read\", \"id\": 3, \"path\": \"<i onx='\\\">&\", \"bytes\": 5}");
    ck_assert_int_eq(access_line(line), 0);
    for (int i = 2; i < 5; i++) {
        snprintf(line, sizeof(line), "{\"time_ns\": %d, \"op\": \"step\", \"id\": 4, \"path\": \"<i onx='\\\">&\"}", i);
        ck_assert_int_eq(access_line(line), 0);
    }
    r.events = 1;
    r.event[0] = (struct ht_report_event){.level = "<i>", .code = "<i>", .path = "<i>", .text = "<i>"};
    r.sample->roots = r.sample->devices = r.models = 1;
    snprintf(r.sample->root[0].name, sizeof(r.sample->root[0].name), "%s", bad);
    snprintf(r.sample->device[0].name, sizeof(r.sample->device[0].name), "%s", bad);
    snprintf(r.sample->device[0].state, sizeof(r.sample->device[0].state), "%s", bad);
    r.model[0].path = r.sample->root[0].name;
    snprintf(r.model[0].config, sizeof(r.model[0].config), "%s", bad);
    const char *text = page();
    ck_assert_uint_eq(count(text, "<i"), 0);
    ck_assert_uint_ge(count(text, "&#60;i onx=&#39;&#34;&#62;&#38;"), 10);
    ck_assert_uint_eq(count(text, "&#60;i&#62;"), 4);
}
END_TEST

/* More of everything than a page shows. */
START_TEST(a_page_is_small)
{
    char line[512];

    for (unsigned i = 0; i <= HT_REPORT_ACCESSES_MAX; i++) {
        snprintf(line, sizeof(line),
                 "{\"time_ns\": %u, \"op\": \"%s\", \"id\": %u, \"path\": \"model/%0200u\", \"bytes\": %u}",
                 i * 1000 + 1, i % 100 ? "gradient" : "step", i % 100 ? i : i % 1000, i, i);
        ck_assert_int_eq(access_line(line), i == HT_REPORT_ACCESSES_MAX);
    }
    r.sample->roots = HT_TOP_ROOTS_MAX;
    r.sample->devices = HT_DEVICES_MAX;
    r.events = 5000;
    for (unsigned i = 0; i < HT_REPORT_EVENTS_MAX; i++) {
        memset(r.event[i].text, 'x', sizeof(r.event[i].text) - 1);
        memset(r.event[i].path, '<', sizeof(r.event[i].path) - 1);
    }
    const char *text = page();
    ck_assert_uint_lt(out.len, 1 << 20);
    ck_assert_ptr_nonnull(strstr(text, "The newest 200 of 5000"));
    ck_assert_ptr_nonnull(strstr(text, "The 50 files"));
    ck_assert_ptr_nonnull(strstr(text, "the first 64 of at least 256 models"));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("report");
    TCase *t = tcase_create("report");

    tcase_add_checked_fixture(t, begin, end);
    tcase_set_timeout(t, 120);
    tcase_add_loop_test(t, texts_are_escaped, 0, (int)HT_ARRAY_SIZE(texts));
    tcase_add_test(t, long_names_keep_their_end);
    tcase_add_loop_test(t, losses_of_csv_and_json, 0, (int)HT_ARRAY_SIZE(losses));
    tcase_add_test(t, many_points_become_means);
    tcase_add_test(t, accesses_are_summed_by_file);
    tcase_add_test(t, a_commit_without_a_gradient_ends_no_step);
    tcase_add_test(t, a_page_of_nothing_is_a_page);
    tcase_add_test(t, no_name_is_markup);
    tcase_add_test(t, a_page_is_small);
    suite_add_tcase(s, t);
    return run_all(s);
}
