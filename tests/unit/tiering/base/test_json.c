/* SPDX-License-Identifier: Apache-2.0 */
/* JSON always parses, whatever bytes a name holds. */
#include "tiering/base/json.h"
#include "tests/support/suite.h"

struct written {
    struct ht_json json;
    char *text;
    size_t len;
};

static struct ht_json *begin(struct written *w)
{
    FILE *f = open_memstream(&w->text, &w->len);

    ck_assert_ptr_nonnull(f);
    ht_json_init(&w->json, f);
    return &w->json;
}

static void expect(struct written *w, const char *text)
{
    ck_assert_int_eq(fclose(w->json.to), 0);
    ck_assert_str_eq(w->text, text);
    free(w->text);
}

TEST(objects_and_arrays_nest)
{
    struct written w;
    struct ht_json *j = begin(&w);

    ht_json_object(j, NULL);
    ht_json_u64(j, "n", UINT64_MAX);
    ht_json_array(j, "list");
    ht_json_object(j, NULL);
    ht_json_bool(j, "yes", true);
    ht_json_str(j, "s", "x");
    ht_json_end(j);
    ht_json_object(j, NULL);
    ht_json_end(j);
    ht_json_end(j);
    ht_json_array(j, "none");
    ht_json_end(j);
    ht_json_end(j);
    expect(&w,
           "{\n  \"n\": 18446744073709551615,\n  \"list\": [\n    {\"yes\": true, \"s\": \"x\"},\n    {}\n  ],\n"
           "  \"none\": []\n}\n");
}

TEST(streams_have_a_line_for_each_value)
{
    struct written w;
    struct ht_json *j = begin(&w);

    ht_json_init_lines(j, j->to);
    for (unsigned i = 0; i < 2; i++) {
        ht_json_object(j, NULL);
        ht_json_u64(j, "n", i);
        ht_json_object(j, "in");
        ht_json_str(j, "s", "x");
        ht_json_end(j);
        ht_json_end(j);
    }
    expect(&w, "{\"n\": 0, \"in\": {\"s\": \"x\"}}\n{\"n\": 1, \"in\": {\"s\": \"x\"}}\n");
}

static const struct {
    const char *bytes, *json;
} strings[] = {
    {"", "\"\""},
    {"a\"b\\c/d", "\"a\\\"b\\\\c/d\""},
    {"line\nbreak\ttab\x7f\x1b[31m", "\"line\\u000abreak\\u0009tab\\u007f\\u001b[31m\""},
    {"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x9a\x82", "\"gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x9a\x82\""},
    {"latin \xfc.", "\"latin \\udcfc.\""},
    {"cut \xe2\x82", "\"cut \\udce2\\udc82\""},
    {"long form \xc0\xaf", "\"long form \\udcc0\\udcaf\""},
    {"surrogate \xed\xa0\x80", "\"surrogate \\udced\\udca0\\udc80\""},
    {"beyond \xf4\x90\x80\x80", "\"beyond \\udcf4\\udc90\\udc80\\udc80\""},
};

TEST_LOOP(any_bytes_make_a_string, HT_ARRAY_SIZE(strings))
{
    struct written w;

    ht_json_str(begin(&w), NULL, strings[_i].bytes);
    expect(&w, strings[_i].json);
}

static const struct {
    const char *text;
    bool number;
} values[] = {
    {"0", true},     {"-1", true},  {"12.5", true}, {"1e-08", true}, {"1E+3", true}, {"00", false},
    {"01", false},   {".5", false}, {"5.", false},  {"1e", false},   {"nan", false}, {"inf", false},
    {"0x10", false}, {"1 ", false}, {"-", false},   {"", false},     {"+1", false},  {"1,2", false},
};

TEST_LOOP(only_what_json_calls_a_number_is_one, HT_ARRAY_SIZE(values))
{
    struct written w;
    char quoted[32];

    snprintf(quoted, sizeof(quoted), values[_i].number ? "%s" : "\"%s\"", values[_i].text);
    ht_json_word(begin(&w), NULL, values[_i].text);
    expect(&w, quoted);
}

RUN_TESTS("json")
