/* SPDX-License-Identifier: Apache-2.0 */
/* Lines of the daemon: JSON that other programs wrote is read as it was meant, and everything else is refused. */
#include "mount-helpers/ctl/ctl.h"
#include "tests/support/suite.h"
#include "tiering/base/json.h"

static struct ht_cmd_line line;
static char text[1024];

static int parse(const char *json)
{
    ck_assert_uint_lt(strlen(json), sizeof(text));
    strcpy(text, json);
    return ht_cmd_parse_json(text, &line);
}

TEST(keys_and_values)
{
    ck_assert_int_eq(parse(" {\"seq\": 18446744073709551615, \"a\" :\"b\",\"yes\":true , \"\": -1.5e+3} \r"), 0);
    ck_assert_uint_eq(line.count, 4);
    ck_assert_uint_eq(ht_cmd_number(&line, "seq"), UINT64_MAX);
    ck_assert_str_eq(ht_cmd_value(&line, "a"), "b");
    ck_assert_str_eq(ht_cmd_value(&line, "yes"), "true");
    ck_assert_str_eq(ht_cmd_value(&line, ""), "-1.5e+3");
    ck_assert(line.field[1].is_text && !line.field[0].is_text && !line.field[2].is_text);
    ck_assert_str_eq(ht_cmd_value(&line, "none"), "");
}

static const struct {
    const char *json, *bytes;
} strings[] = {
    {"", ""},
    {"\\\"\\\\\\/\\b\\f\\n\\r\\t", "\"\\/\b\f\n\r\t"},
    {"gr\xc3\xbc\xc3\x9f\x7f", "gr\xc3\xbc\xc3\x9f\x7f"},
    {"\\u0041\\u00fc\\u20AC\\uffff", "A\xc3\xbc\xe2\x82\xac\xef\xbf\xbf"},
    {"\\ud83d\\ude82\\udbff\\udfff", "\xf0\x9f\x9a\x82\xf4\x8f\xbf\xbf"},
    {"a\\udcff\\udc80b",
     "a\xff\x80"
     "b"},
};

TEST_LOOP(escapes, HT_ARRAY_SIZE(strings))
{
    char json[128];

    snprintf(json, sizeof(json), "{\"%s\": \"%s\"}", strings[_i].json, strings[_i].json);
    ck_assert_int_eq(parse(json), 0);
    ck_assert_str_eq(line.field[0].key, strings[_i].bytes);
    ck_assert_str_eq(line.field[0].value, strings[_i].bytes);
}

static const char *const refused[] = {
    "",
    "seq=1\tcode=mounted",
    "[1]",
    "{}",
    "{\"a\"}",
    "{\"a\":}",
    "{\"a\": 1",
    "{\"a\": 1,}",
    "{\"a\": 1} x",
    "{\"a\": 1 2}",
    "{\"a\": {\"b\": 1}}",
    "{\"a\": \"b}",
    "{\"a\": \"b\\\"}",
    "{\"a\": \"\t\"}",
    "{\"a\": \"\\x\"}",
    "{\"a\": \"\\u12",
    "{\"a\": \"\\u12x4\"}",
    "{\"a\": \"\\u0000\"}",
    "{\"a\": \"\\ud83d\"}",
    "{\"a\": \"\\ud83d\\u0041\"}",
    "{\"a\": \"\\ude82\"}",
    "{\"a\\ud83d\": 1}",
    "{a: 1}",
};

TEST_LOOP(what_is_no_flat_object_is_refused, HT_ARRAY_SIZE(refused))
{
    ck_assert_int_eq(parse(refused[_i]), -EPROTO);
}

TEST(fields_beyond_the_last_are_passed_over)
{
    char json[HT_CMD_FIELDS_MAX * 16] = "{";
    int n = 1;

    for (int i = 0; i <= HT_CMD_FIELDS_MAX; i++)
        n += snprintf(json + n, sizeof(json) - (size_t)n, "%s\"k%d\": %d", i ? ", " : "", i, i);
    strcat(json, "}");
    ck_assert_int_eq(parse(json), 0);
    ck_assert_uint_eq(line.count, HT_CMD_FIELDS_MAX);
    char last[16];
    snprintf(last, sizeof(last), "k%d", HT_CMD_FIELDS_MAX - 1);
    ck_assert_str_eq(line.field[HT_CMD_FIELDS_MAX - 1].key, last);
}

TEST(any_bytes_come_back)
{
    char bytes[256], *json = NULL;
    struct ht_json j;
    size_t len = 0;
    FILE *to = open_memstream(&json, &len);

    for (int i = 0; i < 255; i++)
        bytes[i] = (char)(255 - i);
    bytes[255] = '\0';
    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", bytes);
    ht_json_end(&j);
    ck_assert_int_eq(fclose(to), 0);
    ck_assert_int_eq(ht_cmd_parse_json(json, &line), 0);
    ck_assert_str_eq(ht_cmd_value(&line, "path"), bytes);
    free(json);
}

RUN_TESTS("line")
