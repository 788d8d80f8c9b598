/* SPDX-License-Identifier: Apache-2.0 */
/* Loads of `hitrainctl bench`: which bytes they read and write, and when they end. */
#include <check.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "mount-helpers/ctl/bench.h"
#include "tests/support/suite.h"

enum { BLOCKS = 16, BLOCK = 4096 };
static const uint64_t no_limit = 600000000000u, soon = 20000000;

static int fd;
static struct ht_bench_result result;

static void begin(void)
{
    char path[] = "/tmp/hitrain-bench-XXXXXX";
    static uint8_t zeros[BLOCKS * BLOCK];

    fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(unlink(path), 0);
    ck_assert_int_eq(write(fd, zeros, sizeof(zeros)), sizeof(zeros));
}

static void end(void)
{
    close(fd);
}

static int run(struct ht_bench_load l)
{
    l.fd = fd;
    l.block_bytes = BLOCK;
    return ht_bench_run(&l, &result);
}

START_TEST(one_pass_reads_each_block_once)
{
    ck_assert_int_eq(
        run((struct ht_bench_load){.range_bytes = BLOCKS * BLOCK + 100, .depth = 5, .once = true, .ns = no_limit}), 0);
    ck_assert_uint_eq(result.requests, BLOCKS);
    ck_assert_uint_eq(result.bytes, BLOCKS * BLOCK);
    ck_assert(result.ns > 0 && result.mean_ns > 0 && ht_bench_rate(&result) > 0);
    /* with more places than blocks, too */
    ck_assert_int_eq(run((struct ht_bench_load){.range_bytes = 2 * BLOCK, .depth = 64, .once = true, .ns = no_limit}),
                     0);
    ck_assert_uint_eq(result.requests, 2);
}
END_TEST

START_TEST(time_ends_other_loads)
{
    for (int random = 0; random < 2; random++) {
        ck_assert_int_eq(
            run((struct ht_bench_load){.range_bytes = BLOCKS * BLOCK, .depth = 1, .random = random, .ns = soon}), 0);
        ck_assert_uint_ge(result.ns, soon);
        ck_assert_uint_ge(result.requests, 1);
    }
}
END_TEST

START_TEST(a_write_fills_the_range_and_nothing_behind_it)
{
    uint8_t block[BLOCK], zeros[BLOCK] = {0};

    ck_assert_int_eq(
        run((struct ht_bench_load){.range_bytes = 8 * BLOCK, .depth = 3, .once = true, .write = true, .ns = no_limit}),
        0);
    for (unsigned i = 0; i < BLOCKS; i++) {
        ck_assert_int_eq(pread(fd, block, BLOCK, i * BLOCK), BLOCK);
        ck_assert_int_eq(memcmp(block, zeros, BLOCK) != 0, i < 8);
    }
    ck_assert_int_eq(lseek(fd, 0, SEEK_END), BLOCKS * BLOCK);
}
END_TEST

START_TEST(errors)
{
    ck_assert_int_eq(run((struct ht_bench_load){.range_bytes = BLOCK - 1, .depth = 1, .ns = no_limit}), -ENODATA);
    /* the file is shorter than the range */
    ck_assert_int_eq(
        run((struct ht_bench_load){.range_bytes = 2 * BLOCKS * BLOCK, .depth = 4, .once = true, .ns = no_limit}),
        -ENODATA);
    close(fd);
    fd = open("/", O_RDONLY | O_DIRECTORY);
    ck_assert_int_eq(run((struct ht_bench_load){.range_bytes = BLOCK, .depth = 2, .once = true, .ns = no_limit}),
                     -EISDIR);
}
END_TEST

START_TEST(copies_of_memory)
{
    for (unsigned threads = 1; threads <= 2; threads++) {
        ck_assert_int_eq(ht_bench_copy(threads, soon, &result), 0);
        ck_assert_uint_ge(result.ns, soon);
        ck_assert_uint_ge(result.bytes, threads * HT_MIB);
        ck_assert_uint_eq(result.bytes % HT_MIB, 0);
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("bench");
    TCase *t = tcase_create("bench");

    tcase_add_checked_fixture(t, begin, end);
    tcase_set_timeout(t, 60);
    tcase_add_test(t, one_pass_reads_each_block_once);
    tcase_add_test(t, time_ends_other_loads);
    tcase_add_test(t, a_write_fills_the_range_and_nothing_behind_it);
    tcase_add_test(t, errors);
    tcase_add_test(t, copies_of_memory);
    suite_add_tcase(s, t);
    return run_all(s);
}
