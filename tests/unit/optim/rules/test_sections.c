/* SPDX-License-Identifier: Apache-2.0 */
/* Words for ranges of elements: which texts are accepted, and the message for every other text. */

#include "optim/rules/config.h"
#include "tests/support/suite.h"

static struct ht_optim_sections found;
static char err[HT_OPTIM_ERROR_MAX];

static int parse(const char *base_text, const char *text)
{
    struct ht_optim_config base;

    ht_optim_sections_free(&found);
    ck_assert_int_eq(ht_optim_config_parse(base_text, strlen(base_text), &base, err), 0);
    memset(err, 0, sizeof(err));
    return ht_optim_sections_parse(text, strlen(text), &base, &found, err);
}

TEST(a_section_amends_the_words_of_its_file)
{
    ck_assert_int_eq(
        parse("adamw lr=0.25 weight_decay=0.5 partial=1",
              "0:32 weight_decay=0\n32:33\tlr=0.125 beta1=0 \r\n 17592186044415:17592186044416 maximize=1"),
        0);
    ck_assert_uint_eq(found.count, 3);
    const struct ht_optim_section *s = found.section;
    ck_assert(s[0].begin == 0 && s[0].end == 32 && s[0].config.weight_decay == 0 && s[0].config.lr == 0.25);
    ck_assert(s[1].begin == 32 && s[1].end == 33 && s[1].config.lr == 0.125 && s[1].config.weight_decay == 0.5);
    ck_assert(s[1].config.beta1 == 0 && !s[1].config.maximize && s[1].config.partial);
    ck_assert(s[2].end == 1ull << 44 && s[2].config.maximize && s[2].config.lr == 0.25);
    ck_assert_int_eq(parse("lion", "5:6 frozen=1 missed=4294967295"), 0);
    ck_assert(found.count == 1 && found.section->config.frozen && found.section->config.missed == UINT32_MAX);
    ck_assert_int_eq(parse("sgd momentum=0.9", "5:6 nesterov=1"), 0);
    ck_assert_int_eq(parse("adamw", ""), 0);
    ck_assert(!found.count && !found.section);
}

TEST(sections_begin_at_the_first_range)
{
    static const struct {
        const char *text;
        size_t at;
    } row[] = {
        {"", 0},  {"adamw lr=1", 10}, {"0:1 lr=1", 0},  {"adamw  0:1 lr=1", 7}, {"lr=1\n3:x lr=2", 5},
        {":", 0}, {"a=0:1 b", 7},     {"adamw a:b", 6},
    };

    for (size_t i = 0; i < HT_ARRAY_SIZE(row); i++)
        ck_assert_msg(ht_optim_sections_at(row[i].text, strlen(row[i].text)) == row[i].at, "\"%s\"", row[i].text);
}

/* words of the file, text, and a part of the message */
static const char *const wrong[][3] = {
    {"adamw", "0:0 lr=1", "\"0:0\" is no range of elements: it has a first one and an end"},
    {"adamw", "3:2 lr=1", "\"3:2\" is no range of elements"},
    {"adamw", "x:2 lr=1", "\"x:2\" is no range of elements"},
    {"adamw", "1:2: lr=1", "\"1:2:\" is no range of elements"},
    {"adamw", "-1:2 lr=1", "\"-1:2\" is no range of elements"},
    {"adamw", "1:+2 lr=1", "\"1:+2\" is no range of elements"},
    {"adamw", "1: lr=1", "\"1:\" is no range of elements"},
    {"adamw", ":9 lr=1", "\":9\" is no range of elements"},
    {"adamw", "0:17592186044417 lr=1", "\"0:17592186044417\" is no range of elements"},
    {"adamw", "0:18446744073709551617 lr=1", "\"0:18446744073709551617\" is no range of elements"},
    {"adamw", "0:5 lr=1 4:6 lr=1", "4:6: ranges of elements must ascend"},
    {"adamw", "4:6 lr=1 0:3 lr=1", "must ascend"},
    {"adamw", "0:5", "0:5: the range has no words"},
    {"adamw", "0:5 5:6 lr=1", "0:5: the range has no words"},
    {"adamw", "0:5 lr=-1", "0:5: lr=-1: must be a number >= 0"},
    {"adamw", "0:5 lr=1 lr=2", "lr is given twice"},
    {"adamw", "0:5 momentum=1", "0:5: \"momentum=1\" is no word=value of adamw; words: lr beta1"},
    {"adamw", "0:5 adamw lr=1", "\"adamw\" is no word=value"},
    {"adamw", "0:5 sgd lr=1", "\"sgd\" is no word=value"},
    {"adamw", "0:5 max_grad_norm=1", "maximize frozen missed"},
    {"adamw", "0:5 accumulate=2", "\"accumulate=2\" is no word=value"},
    {"adamw", "0:5 redo=on", "\"redo=on\" is no word=value"},
    {"adamw", "0:5 frozen=2", "frozen=2: must be 0 or 1"},
    {"adamw", "0:5 missed=4294967296", "must be a whole number from 0 to 4294967295"},
    {"adamw", "0:5 missed=1.5", "must be a whole number"},
    {"sgd", "0:5 momentum=0.9", "0:5: needs other state than the rest of its file"},
    {"sgd momentum=0.9", "0:5 momentum=0", "needs other state"},
    {"sgd momentum=0.9", "0:5 nesterov=1 dampening=0.1", "nesterov=1 needs"},
    {"lion", "0:5 lr=1e30 weight_decay=1e30", "too large"},
};

TEST_LOOP(other_texts_are_refused_by_name, HT_ARRAY_SIZE(wrong))
{
    const char *const *row = wrong[_i];

    ck_assert_msg(parse(row[0], row[1]) == -EINVAL, "\"%s\" is accepted", row[1]);
    ck_assert_msg(strstr(err, row[2]) != NULL, "\"%s\": \"%s\" lacks \"%s\"", row[1], err, row[2]);
}

/* A text is as long as an attribute may be, and every message ends. */
TEST(texts_of_any_length_are_read)
{
    char *text = test_alloc(HT_OPTIM_SECTIONS_TEXT_MAX + 1);
    size_t len = 0, count = 0;

    while (len + 24 < HT_OPTIM_SECTIONS_TEXT_MAX)
        len += (size_t)sprintf(text + len, "%zu:%zu lr=0 ", count, count + 1), count++;
    ck_assert_int_eq(parse("adamw", text), 0);
    ck_assert(found.count == count && count > 3000 && found.section[count - 1].begin == count - 1);
    memset(text, '9', HT_OPTIM_SECTIONS_TEXT_MAX);
    memcpy(text, "0:9 ", 4);
    ck_assert_int_eq(parse("adamw", text), -EINVAL);
    ck_assert(strstr(err, "0:9: ") == err && memchr(err, '\0', sizeof(err)));
    ht_optim_sections_free(&found);
}

TEST(a_file_or_root_has_no_words_of_a_section)
{
    struct ht_optim_config c;

    ck_assert_int_eq(ht_optim_config_parse("adamw frozen=1", 14, &c, err), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "\"frozen=1\" is no word=value"));
    ck_assert_int_eq(ht_optim_config_parse("adamw 0:5 lr=1", 14, &c, err), -EINVAL);
    ck_assert_int_eq(ht_optim_config_parse("adamw", 5, &c, err), 0);
    ck_assert(!c.frozen && !c.missed);
}

static void forget(void)
{
    ht_optim_sections_free(&found);
}

RUN_TESTS("words for ranges of elements", .teardown = forget)
