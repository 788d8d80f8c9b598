/* SPDX-License-Identifier: Apache-2.0 */
/* Texts of clients: an accepted text has its literal meaning, and every other text is refused with a reason. */
#include "fs/ctl/parse.h"
#include "tests/support/suite.h"

/* Of the 144 digits of a decision, all but the last two. */
#define ZEROS_71 "00000000000000000000000000000000000000000000000000000000000000000000000"
#define ZEROS ZEROS_71 ZEROS_71

static int number(const char *text, uint64_t *out)
{
    return ht_parse_u64(text, strlen(text), out);
}

TEST(numbers_are_decimal_digits_and_nothing_else)
{
    static const char *const bad[] = {"", " 1", "1 ", "-1", "+1", "0x10", "1.0", "one"};
    uint64_t v = 0;

    ck_assert_int_eq(number("0", &v), 0);
    ck_assert_uint_eq(v, 0);
    ck_assert_int_eq(number("18446744073709551615", &v), 0);
    ck_assert(v == UINT64_MAX);
    ck_assert_int_eq(number("18446744073709551616", &v), -ERANGE);
    ck_assert_int_eq(number("99999999999999999999", &v), -ERANGE);
    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_int_eq(number(bad[i], &v), -EINVAL);
    ck_assert_int_eq(ht_parse_u64("1\0002", 3, &v), -EINVAL);
}

TEST(sizes_have_units_and_a_length)
{
    static const char *const bad[] = {"", "T", "-1", "1 T", "1.5", "1x"};
    uint64_t v = 0;

    ck_assert_int_eq(ht_parse_bytes("20M", 3, &v), 0);
    ck_assert_uint_eq(v, UINT64_C(20) << 20);
    ck_assert_int_eq(ht_parse_bytes("1.5Txyz", 4, &v), 0);
    ck_assert_uint_eq(v, UINT64_C(3) << 39);
    ck_assert_int_eq(ht_parse_bytes("18446744073709551615", 20, &v), 0);
    ck_assert(v == UINT64_MAX);
    ck_assert_int_eq(ht_parse_bytes("18446744073709551616", 20, &v), -ERANGE);
    ck_assert_int_eq(ht_parse_bytes("16384P", 6, &v), -ERANGE);
    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_int_eq(ht_parse_bytes(bad[i], strlen(bad[i]), &v), -EINVAL);
    ck_assert_int_eq(ht_parse_bytes("1\0M", 3, &v), -EINVAL);
    char zeros[200];
    memset(zeros, '0', sizeof(zeros));
    ck_assert_int_eq(ht_parse_bytes(zeros, sizeof(zeros), &v), -EINVAL);
}

TEST(times_until_a_use_are_seconds_or_never)
{
    static const struct {
        const char *text;
        int rc;
        uint64_t ns;
    } cases[] = {
        {"1", 0, 1000000000},
        {"2.5", 0, 2500000000},
        {"0.000000001", 0, 1},
        {"0.0000000019", 0, 1},
        {"1000000", 0, UINT64_C(1000000000000000)},
        {"1000000.0", 0, UINT64_C(1000000000000000)},
        {"never", 0, UINT64_MAX},
        {"0", -ERANGE, 0},
        {"0.0000000001", -ERANGE, 0},
        {"1000000.1", -ERANGE, 0},
        {"1000001", -ERANGE, 0},
        {"99999999999999999999", -EINVAL, 0},
        {"", -EINVAL, 0},
        {".5", -EINVAL, 0},
        {"5.", -EINVAL, 0},
        {"-1", -EINVAL, 0},
        {"1e3", -EINVAL, 0},
        {"1.5s", -EINVAL, 0},
        {"1.2.3", -EINVAL, 0},
        {" 1", -EINVAL, 0},
        {"nan", -EINVAL, 0},
        {"neve", -EINVAL, 0},
    };

    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        uint64_t ns = 0;
        ck_assert_int_eq(ht_parse_next_use(cases[i].text, strlen(cases[i].text), &ns), cases[i].rc);
        ck_assert(ns == cases[i].ns);
    }
}

TEST(every_dtype_is_found_by_word_and_number)
{
    for (size_t i = 0; i < HT_DTYPE_WORDS; i++) {
        const struct ht_dtype_word *w = &ht_dtype_words[i];
        ck_assert_uint_eq(ht_parse_dtype(w->word, strlen(w->word))->dtype, w->dtype);
        ck_assert_str_eq(ht_dtype_row(w->dtype)->word, w->word);
    }
    ck_assert_ptr_null(ht_parse_dtype("", 0));
    ck_assert_ptr_null(ht_parse_dtype("f3", 2));
    ck_assert_ptr_null(ht_parse_dtype("f32 ", 4));
    ck_assert_ptr_null(ht_parse_dtype("torch.", 6));
    ck_assert_ptr_null(ht_parse_dtype("torch.torch.f32", 15));
    ck_assert_ptr_null(ht_parse_dtype("floats", 6));
    static const struct {
        const char *text;
        uint8_t dtype;
    } other[] = {{"F32", HT_DTYPE_F32},     {"float32", HT_DTYPE_F32},     {"fp32", HT_DTYPE_F32},
                 {"float", HT_DTYPE_F32},   {"bfloat16", HT_DTYPE_BF16},   {"torch.bfloat16", HT_DTYPE_BF16},
                 {"float16", HT_DTYPE_F16}, {"half", HT_DTYPE_F16},        {"Float64", HT_DTYPE_F64},
                 {"double", HT_DTYPE_F64},  {"torch.int64", HT_DTYPE_I64}, {"uint8", HT_DTYPE_U8}};
    for (size_t i = 0; i < HT_ARRAY_SIZE(other); i++)
        ck_assert_uint_eq(ht_parse_dtype(other[i].text, strlen(other[i].text))->dtype, other[i].dtype);
    ck_assert_ptr_null(ht_dtype_row(HT_DTYPE_NONE));
    ck_assert_ptr_null(ht_dtype_row(255));
}

static int shape(const char *text, struct ht_shape *out)
{
    return ht_parse_shape(text, strlen(text), out);
}

TEST(shapes_are_bounded_lists)
{
    static const char *const bad[] = {",",
                                      "1,",
                                      ",1",
                                      "1,,2",
                                      "1, 2",
                                      "a",
                                      "-1",
                                      "scalar,1",
                                      "1,scalar",
                                      "Scalar",
                                      "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1"};
    struct ht_shape s;

    ck_assert_int_eq(shape("", &s), 0);
    ck_assert_uint_eq(s.count, 0);
    ck_assert_uint_eq(s.elements, 1);
    ck_assert_int_eq(shape("scalar", &s), 0);
    ck_assert_uint_eq(s.count, 0);
    ck_assert_uint_eq(s.elements, 1);
    ck_assert_int_eq(shape("1024,768", &s), 0);
    ck_assert_uint_eq(s.count, 2);
    ck_assert_uint_eq(s.dim[1], 768);
    ck_assert_uint_eq(s.elements, 1024 * 768);
    ck_assert_int_eq(shape("3,0,5", &s), 0);
    ck_assert_uint_eq(s.elements, 0);
    ck_assert_int_eq(shape("1,2,3,4,5,6,7,8,9,10,11,12,1,1,1,1", &s), 0);
    ck_assert_uint_eq(s.count, 16);
    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_int_eq(shape(bad[i], &s), -EINVAL);
    ck_assert_int_eq(shape("17592186044417", &s), -ERANGE);
    ck_assert_int_eq(shape("4294967296,4294967296", &s), -ERANGE);
}

TEST(members_lie_one_after_the_other)
{
    static const char *const bad[] = {"",          "0",
                                      "0 2",       "0 2 ",
                                      "0 2 a/b",   "1 2 a",
                                      " 0 2 a",    "0 2,3 a\n5 1 b",
                                      "0 2 a\n\n", "0 2 a\n2 0 b",
                                      "0  a",      "0 2 a\n2 1",
                                      "-0 2 a",    "0 , a",
                                      "\n"};
    char longest[300];
    uint64_t n;

    ck_assert_int_eq(ht_parse_members("0 2,3 a", 7, &n), 0);
    ck_assert_uint_eq(n, 6);
    ck_assert_int_eq(ht_parse_members("0 scalar a\n1 2 b", 16, &n), 0);
    ck_assert_uint_eq(n, 3);
    ck_assert_int_eq(ht_parse_members("0 2,3 a b\n6 1 c\n7 16 d\n", 23, &n), 0);
    ck_assert_uint_eq(n, 23);
    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++)
        ck_assert_int_eq(ht_parse_members(bad[i], strlen(bad[i]), &n), -EINVAL);
    ck_assert_int_eq(ht_parse_members("0 17592186044415 a\n17592186044415 17592186044415 b", 50, &n), -ERANGE);
    ck_assert_int_eq(ht_parse_members("0 18446744073709551616 a", 24, &n), -ERANGE);
    memset(longest, 'n', sizeof(longest));
    memcpy(longest, "0 1 ", 4);
    ck_assert_int_eq(ht_parse_members(longest, 4 + 255, &n), 0);
    ck_assert_int_eq(ht_parse_members(longest, 4 + 256, &n), -EINVAL);
}

static int command(const char *line, struct ht_command *out, char *err)
{
    return ht_parse_command(line, strlen(line), out, err);
}

TEST(commands_take_what_they_need)
{
    static const struct {
        const char *line;
        enum ht_command_id id;
        const char *path;
    } good[] = {
        {"", HT_COMMAND_NONE, ""},
        {" \t\r", HT_COMMAND_NONE, ""},
        {"commit", HT_COMMAND_COMMIT, ""},
        {"  step  ", HT_COMMAND_STEP, ""},
        {"abort\r", HT_COMMAND_ABORT, ""},
        {"wait", HT_COMMAND_WAIT, ""},
        {"wait w.0", HT_COMMAND_WAIT, "w.0"},
        {"apply a/b c", HT_COMMAND_APPLY, "a/b c"},
        {"reset x", HT_COMMAND_RESET, "x"},
        {"drop x", HT_COMMAND_DROP, "x"},
        {"prefetch x", HT_COMMAND_PREFETCH, "x"},
        {"evict   x", HT_COMMAND_EVICT, "x"},
        {"scrub start", HT_COMMAND_SCRUB, "start"},
        {"scrub stop ", HT_COMMAND_SCRUB, "stop"},
        {"trim", HT_COMMAND_TRIM, ""},
        {"background pause", HT_COMMAND_BACKGROUND, "pause"},
        {"background  resume  engine=scrub ", HT_COMMAND_BACKGROUND, "resume"},
        {"commit if=12", HT_COMMAND_COMMIT, ""},
        {"commit full", HT_COMMAND_COMMIT, ""},
        {"commit if=12  full ", HT_COMMAND_COMMIT, ""},
        {"step if=0", HT_COMMAND_STEP, ""},
        {"step async", HT_COMMAND_STEP, ""},
        {"step  if=5  async ", HT_COMMAND_STEP, ""},
        {"abort  if=9223372036854775807 ", HT_COMMAND_ABORT, ""},
        {"decide " ZEROS "0a  a b ", HT_COMMAND_DECIDE, "a b"},
        {"rollback best-1 ", HT_COMMAND_ROLLBACK, ""},
        {"snapshot", HT_COMMAND_SNAPSHOT, ""},
        {"snapshot if=0", HT_COMMAND_SNAPSHOT, ""},
        {"hold 7 ", HT_COMMAND_HOLD, ""},
        {"archived 7  job.1  0123456789abcdef0123456789abcdef ", HT_COMMAND_ARCHIVED,
         "0123456789abcdef0123456789abcdef"},
        {"clone 7 models/a b ", HT_COMMAND_CLONE, "models/a b"},
        {"clone 7 in=12 models/a", HT_COMMAND_CLONE, "in=12 models/a"},
        {"clone_in 12 7  models/a b ", HT_COMMAND_CLONE, "models/a b"},
        {"claim a.B:c-d_9", HT_COMMAND_CLAIM, ""},
        {"claim a  takeover=b ", HT_COMMAND_CLAIM, ""},
        {"unclaim", HT_COMMAND_UNCLAIM, ""},
    };
    char err[HT_CTL_ERROR_MAX];
    struct ht_command c;

    for (size_t i = 0; i < HT_ARRAY_SIZE(good); i++) {
        ck_assert_int_eq(command(good[i].line, &c, err), 0);
        ck_assert_int_eq(c.id, good[i].id);
        ck_assert_uint_eq(c.path_len, strlen(good[i].path));
        if (c.path_len)
            ck_assert_mem_eq(c.path, good[i].path, c.path_len);
    }
}

TEST(refused_commands_say_why)
{
    char err[HT_CTL_ERROR_MAX];
    struct ht_command c;
    char long_line[1000];

    ck_assert_int_eq(command("commit now", &c, err), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "commit"));
    ck_assert_int_eq(command("apply", &c, err), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "path"));
    ck_assert_int_eq(command("scrub", &c, err), -EINVAL);
    ck_assert_int_eq(command("scrub sto", &c, err), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "start or stop"));
    ck_assert_int_eq(command("trim all", &c, err), -EINVAL);
    ck_assert_int_eq(command("background", &c, err), -EINVAL);
    ck_assert_int_eq(command("background status", &c, err), -EINVAL);
    ck_assert_int_eq(command("background pause scrub", &c, err), -EINVAL);
    ck_assert_int_eq(command("background pause engine=", &c, err), -EINVAL);
    ck_assert_int_eq(command("background pause engine=a b", &c, err), -EINVAL);
    ck_assert_int_eq(command("background pause engine=scrub", &c, err), 0);
    ck_assert_str_eq(c.name, "scrub");
    ck_assert_int_eq(command("comit", &c, err), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "'comit'"));
    ck_assert_ptr_nonnull(strstr(err, "commit"));
    memset(long_line, 'x', sizeof(long_line));
    ck_assert_int_eq(ht_parse_command(long_line, sizeof(long_line), &c, err), -EINVAL);
    ck_assert_uint_lt(strlen(err), sizeof(err));
}

TEST(conditions_and_claims_are_read_whole)
{
    char err[HT_CTL_ERROR_MAX], line[200];
    struct ht_command c;

    ck_assert_int_eq(command("commit", &c, err), 0);
    ck_assert(!c.conditional);
    ck_assert_int_eq(command("commit if=17", &c, err), 0);
    ck_assert(c.conditional && c.step_open == 17 && !c.full);
    ck_assert_int_eq(command("commit full if=16", &c, err), 0);
    ck_assert(c.conditional && c.step_open == 16 && c.full && !c.async);
    ck_assert_int_eq(command("step", &c, err), 0);
    ck_assert(!c.async && !c.conditional);
    ck_assert_int_eq(command("step async if=18", &c, err), 0);
    ck_assert(c.async && c.conditional && c.step_open == 18);
    ck_assert_int_eq(command("snapshot best  if=19 ", &c, err), 0);
    ck_assert(c.conditional && c.step_open == 19);
    ck_assert_str_eq(c.name, "best");
    ck_assert_int_eq(command("claim trainer-1", &c, err), 0);
    ck_assert_str_eq(c.name, "trainer-1");
    ck_assert_str_eq(c.takeover, "");
    ck_assert_int_eq(command("claim new takeover=old", &c, err), 0);
    ck_assert_str_eq(c.name, "new");
    ck_assert_str_eq(c.takeover, "old");
    snprintf(line, sizeof(line), "claim %064d", 0);
    ck_assert_int_eq(command(line, &c, err), 0);
    snprintf(line, sizeof(line), "claim %065d", 0);
    ck_assert_int_eq(command(line, &c, err), -EINVAL);
}

TEST(what_a_command_does_not_take_is_refused)
{
    static const char *const bad[] = {
        "commit if=",
        "commit if=-1",
        "commit if=1 2",
        "abort if",
        "step IF=1",
        "step asynchronous",
        "step async async",
        "step if=1 if=1",
        "commit async",
        "commit full full",
        "step full",
        "abort full",
        "snapshot if=0 best",
        "snapshot a b",
        "commit if=99999999999999999999",
        "claim",
        "claim a/b",
        "claim a b",
        "claim a takeover=",
        "claim a takeover=b c",
        "claim a takeover",
        "unclaim a",
        "decide",
        "decide " ZEROS "0a",
        "decide " ZEROS " w",
        "decide " ZEROS "00f w",
        "decide " ZEROS "0A w",
        "decide " ZEROS "0g w",
        "rollback",
        "rollback *",
        "hold",
        "hold *",
        "archived 7",
        "archived 7 job",
        "archived 7 a/b 0123456789abcdef0123456789abcdef",
        "archived 7 job 0123456789abcdef0123456789abcde",
        "archived 7 job 0123456789abcdef0123456789abcdeg",
        "archived 7 job 0123456789abcdef0123456789abcdef0",
        "rollback 7 8",
        "clone",
        "clone 7",
        "clone a/b c",
        "clone * c",
        "clone_in",
        "clone_in 12",
        "clone_in 12 7",
        "clone_in 0 7 c",
        "clone_in x 7 c",
        "clone_in 12 a/b c",
    };
    char err[HT_CTL_ERROR_MAX];
    struct ht_command c;

    for (size_t i = 0; i < HT_ARRAY_SIZE(bad); i++) {
        ck_assert_int_eq(command(bad[i], &c, err), -EINVAL);
        ck_assert_ptr_nonnull(strstr(err, " takes "));
    }
}

TEST(paths_stay_below_where_they_begin)
{
    char name[HT_NAME_BYTES_MAX + 1], too_long[HT_NAME_BYTES_MAX + 1];
    const char *path = "a//b/c.d/";
    size_t len = strlen(path);

    ck_assert_int_eq(ht_parse_component(&path, &len, name), 1);
    ck_assert_str_eq(name, "a");
    ck_assert_int_eq(ht_parse_component(&path, &len, name), 1);
    ck_assert_str_eq(name, "b");
    ck_assert_int_eq(ht_parse_component(&path, &len, name), 1);
    ck_assert_str_eq(name, "c.d");
    ck_assert_int_eq(ht_parse_component(&path, &len, name), 0);

    for (const char *const *bad = (const char *const[]){"..", ".", "../a", "./a", NULL}; *bad; bad++) {
        path = *bad;
        len = strlen(path);
        ck_assert_int_eq(ht_parse_component(&path, &len, name), -EINVAL);
    }
    path = "a\0b";
    len = 3;
    ck_assert_int_eq(ht_parse_component(&path, &len, name), -EINVAL);
    memset(too_long, 'n', sizeof(too_long));
    path = too_long;
    len = sizeof(too_long);
    ck_assert_int_eq(ht_parse_component(&path, &len, name), -ENAMETOOLONG);
}

RUN_TESTS("parse")
