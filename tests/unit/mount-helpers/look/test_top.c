/* SPDX-License-Identifier: Apache-2.0 */
/* The figures and frames of `hitrainctl top`. */

#include "mount-helpers/look/top.h"
#include "tests/support/suite.h"

static struct ht_top_sample before, now;
static struct ht_top_view view;
static struct ht_buf out;

struct texts {
    const char *stats, *devices, *roots, *background;
};

static void parse(const struct texts *t, uint64_t at_ns, struct ht_top_sample *s)
{
    struct ht_top_texts copy = {strdup(t->stats), strdup(t->devices), strdup(t->roots), strdup(t->background)};

    ht_top_parse(&copy, at_ns, s);
    free(copy.stats);
    free(copy.devices);
    free(copy.roots);
    free(copy.background);
}

static const struct texts first = {
    .stats = "total_bytes=1000\navailable_bytes=500\ndram_bytes=4096\nresident_bytes=2048\ndirty_bytes=1024\nhits=10\n"
             "error_events=3\n",
    .devices = "{\"index\": 0, \"health\": \"ok\", \"read_bytes\": 0, \"written_bytes\": 1048576, "
               "\"planned_moved_bytes\": 1048576, \"path\": \"/dev/x\"}\n",
    .roots = "{\"path\": \"/a\", \"step\": 5, \"update_ns\": 0}\n"
             "{\"path\": \"/b \\\"1\\\"\", \"step\": 7, \"grad_bytes\": 0}\n",
    .background = "{\"engine\": \"scrub\", \"state\": \"working\", \"bytes\": 0}\n"};
static const struct texts second = {
    .stats = "total_bytes=1000\navailable_bytes=500\ndram_bytes=4096\nresident_bytes=2048\ndirty_bytes=1024\nhits=30\n",
    .devices =
        "{\"read_bytes\": 2097152, \"written_bytes\": 0, \"planned_moved_bytes\": 7340032, \"path\": \"/dev/x\"}\n",
    .roots = "{\"path\": \"/b \\\"1\\\"\", \"step\": 7, \"grad_bytes\": 2048}\n"
             "{\"path\": \"/a\", \"step\": 9, \"update_ns\": 8000000}\n",
    .background = "{\"engine\": \"scrub\", \"state\": \"working\", \"bytes\": 4194304}\n"};

static void begin(void)
{
    view = (struct ht_top_view){.point = "/mnt", .width = 80, .interval_s = 1};
    parse(&first, 1000000000, &before);
    parse(&second, 3000000000, &now);
    ht_buf_reset(&out);
}

static const char *frame(void)
{
    ht_buf_reset(&out);
    ht_top_frame(&view, &now, &before, &before, &out);
    ht_buf_put_u8(&out, 0);
    ck_assert_int_eq(out.err, 0);
    return (const char *)out.data;
}

TEST(figures_are_found)
{
    ck_assert_uint_eq(before.store[HT_TOP_HITS], 10);
    ck_assert_uint_eq(before.devices, 1);
    ck_assert_str_eq(before.device[0].name, "/dev/x");
    ck_assert_str_eq(before.device[0].state, "ok");
    ck_assert_uint_eq(before.roots, 2);
    ck_assert_str_eq(before.root[1].name, "/b \"1\"");
    ck_assert_uint_eq(before.store[HT_TOP_ERRORS], 3);
    ck_assert_uint_eq(before.store[HT_TOP_WARNINGS], 0);
}

TEST(rates_are_differences)
{
    const char *text = frame();

    ck_assert_ptr_nonnull(strstr(text, "hits 10.0"));
    ck_assert_ptr_nonnull(strstr(text, "    1 MiB        0 B")); /* the second counter fell: mounted again */
    ck_assert_ptr_nonnull(strstr(text, "2.00 ms"));              /* 8 ms in 4 steps */
    ck_assert_ptr_nonnull(strstr(text, "scrub working 2 MiB/s"));
    ck_assert_ptr_nonnull(strstr(text, "       0 B      3 MiB        0 B /dev/x")); /* of its classes */
    ck_assert_ptr_nonnull(strstr(text, "[######======............]"));
}

TEST(a_counter_that_fell_has_no_rate)
{
    before.root[0].value[HT_TOP_UPDATE_NS] = 9000000; /* of the mount before; steps went on */
    ck_assert_ptr_null(strstr(frame(), "2.00 ms"));
    ck_assert_ptr_nonnull(strstr(frame(), "0.00 us"));
    ck_assert_uint_lt(strlen(frame()), 2000);
}

/* The place of a name in the frame. */
static size_t place(const char *text, const char *name)
{
    const char *at = strstr(text, name);

    ck_assert_ptr_nonnull(at);
    return (size_t)(at - text);
}

TEST(models_are_sorted)
{
    view.order = HT_TOP_BY_TRAFFIC;
    ck_assert_uint_lt(place(frame(), "/b \"1\""), place(frame(), " /a"));
    view.order = HT_TOP_BY_STEPS;
    ck_assert_uint_gt(place(frame(), "/b \"1\""), place(frame(), " /a"));
    view.order = HT_TOP_BY_NAME;
    ck_assert_uint_gt(place(frame(), "/b \"1\""), place(frame(), " /a"));
}

/* Escape sequences that a terminal gets take no column. */
static unsigned columns_of(const char *line, const char *end)
{
    unsigned n = 0;

    for (; line < end; line++) {
        if (*line == '\033')
            line += strcspn(line, "mKJH");
        else if (*line != '\r')
            n++;
    }
    return n;
}

TEST(no_line_is_wider_and_no_frame_is_higher)
{
    for (unsigned width = 1; width <= 100; width++)
        for (unsigned height = 0; height < 30; height++) {
            view.width = width;
            view.height = height;
            view.terminal = height > 0;
            unsigned lines = 0;
            const char *line = frame();
            for (const char *end; (end = strchr(line, '\n')); line = end + 1, lines++)
                ck_assert_uint_le(columns_of(line, end), width);
            ck_assert_uint_le(columns_of(line, line + strlen(line)), width);
            if (height)
                ck_assert_uint_lt(lines, height); /* the last line has no end */
        }
}

TEST(names_cannot_control_the_terminal)
{
    strcpy(now.root[0].name, "/x\033[2J\n\xff");
    view.point = "/mnt\033[2J";
    const char *text = frame();
    ck_assert_ptr_null(strchr(text, '\033'));
    ck_assert_ptr_nonnull(strstr(text, "/x?[2J??"));
}

static const char *const nonsense[] = {
    "",
    "\n\n\n",
    "=",
    "total_bytes",
    "total_bytes=99999999999999999999999",
    "total_bytes=-1",
    "{\"path\": ",
    "{\"path\": \"x\", \"step\": -5}",
    "{\"path\": \"x\", \"step\": {}}",
    "[1]",
    "<html>{}</html> 1",
};

TEST_LOOP(nonsense_is_passed_over, HT_ARRAY_SIZE(nonsense))
{
    parse(&(struct texts){nonsense[_i], nonsense[_i], nonsense[_i], nonsense[_i]}, 3000000000, &now);
    ck_assert_uint_le(now.roots, 1);
    ck_assert_ptr_nonnull(strstr(frame(), "hitrain /mnt"));
    before = now;
    frame(); /* no time between them */
}

TEST(more_models_than_there_is_room_for)
{
    struct ht_buf text = HT_BUF_INIT;

    for (unsigned i = 0; i < HT_TOP_ROOTS_MAX + 5; i++)
        ht_buf_printf(&text, "{\"path\": \"/m%u\", \"step\": 1}\n", i);
    ck_assert_int_eq(text.err, 0);
    parse(&(struct texts){"", "", (const char *)text.data, ""}, 3000000000, &now);
    ht_buf_free(&text);
    ck_assert_uint_eq(now.roots, HT_TOP_ROOTS_MAX);
    ck_assert_ptr_nonnull(strstr(frame(), "(the first 256 models)"));
}

RUN_TESTS("top", .setup = begin)
