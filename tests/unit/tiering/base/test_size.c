/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes as people write and read them. */
#include "tests/support/suite.h"
#include "tiering/base/base.h"

struct parsed {
    const char *text;
    int err;
    uint64_t bytes;
};

static const struct parsed cases[] = {
    {"0", 0, 0},
    {"1048576", 0, HT_MIB},
    {"64k", 0, 64 * HT_KIB},
    {"64K", 0, 64 * HT_KIB},
    {"8G", 0, 8 * HT_GIB},
    {"8GB", 0, 8 * HT_GIB},
    {"8GiB", 0, 8 * HT_GIB},
    {"8gib", 0, 8 * HT_GIB},
    {"1.5G", 0, HT_GIB + HT_GIB / 2},
    {"0.25m", 0, HT_MIB / 4},
    {"2T", 0, 2048 * HT_GIB},
    {"3p", 0, 3 * 1024 * 1024 * HT_GIB},
    {"0001k", 0, HT_KIB},
    {"18446744073709551615", 0, UINT64_MAX},
    {"16383p", 0, 16383ull << 50},
    {"18446744073709551616", -ERANGE, 0},
    {"16384p", -ERANGE, 0},
    {"99999999999999999999999999999999999999999999999999g", -ERANGE, 0},
    {"", -EINVAL, 0},
    {"G", -EINVAL, 0},
    {"-1", -EINVAL, 0},
    {"+1", -EINVAL, 0},
    {" 1", -EINVAL, 0},
    {"1 ", -EINVAL, 0},
    {"1.5", -EINVAL, 0},
    {".5G", -EINVAL, 0},
    {"1.G", -EINVAL, 0},
    {"1.5.5G", -EINVAL, 0},
    {"1.0000000001G", -EINVAL, 0},
    {"1x", -EINVAL, 0},
    {"1kk", -EINVAL, 0},
    {"1ki", -EINVAL, 0},
    {"1ib", -EINVAL, 0},
    {"1kib2", -EINVAL, 0},
    {"0x10", -EINVAL, 0},
};

TEST_LOOP(parses_or_refuses, HT_ARRAY_SIZE(cases))
{
    const struct parsed *c = &cases[_i];
    uint64_t bytes = 7;

    ck_assert_msg(ht_parse_size(c->text, &bytes) == c->err, "'%s'", c->text);
    ck_assert_msg(bytes == (c->err == 0 ? c->bytes : 7), "'%s'", c->text);
}

TEST(formats_short)
{
    char buf[32];

    ck_assert_str_eq(ht_format_size(0, buf, sizeof(buf)), "0 B");
    ck_assert_str_eq(ht_format_size(1023, buf, sizeof(buf)), "1023 B");
    ck_assert_str_eq(ht_format_size(1024, buf, sizeof(buf)), "1 KiB");
    ck_assert_str_eq(ht_format_size(HT_GIB + HT_GIB / 2, buf, sizeof(buf)), "1.5 GiB");
    ck_assert_str_eq(ht_format_size(HT_MIB - 1, buf, sizeof(buf)), "1 MiB");
    ck_assert_str_eq(ht_format_size(100 * HT_MIB + HT_MIB / 10, buf, sizeof(buf)), "100.1 MiB");
    ck_assert_str_eq(ht_format_size(UINT64_MAX, buf, sizeof(buf)), "16 EiB");
}

TEST(formatting_stays_in_its_buffer)
{
    char buf[4] = {'x', 'x', 'x', 'x'};

    ht_format_size(1023, buf, 3);
    ck_assert_str_eq(buf, "10");
    ck_assert_int_eq(buf[3], 'x');
}

TEST(divides_and_rounds_up)
{
    ck_assert_uint_eq(ht_div_up(0, 4), 0);
    ck_assert_uint_eq(ht_div_up(1, 4), 1);
    ck_assert_uint_eq(ht_div_up(UINT64_MAX, 4), UINT64_MAX / 4 + 1);
    ck_assert_uint_eq(ht_round_up(4097, 4096), 8192);
    ck_assert_uint_eq(ht_round_up(4096, 4096), 4096);
}

TEST(clocks_run_and_random_bytes_differ)
{
    uint8_t a[300] = {0}, b[300] = {0};
    uint64_t before = ht_now_ns();

    ck_assert_int_eq(ht_random(a, sizeof(a)), 0);
    ck_assert_int_eq(ht_random(b, sizeof(b)), 0);
    ck_assert_int_ne(memcmp(a, b, sizeof(a)), 0);
    ck_assert_uint_ge(ht_now_ns(), before);
    ck_assert_uint_gt(ht_wall_ns(), 1600000000ull * 1000000000);
}

RUN_TESTS("size")
