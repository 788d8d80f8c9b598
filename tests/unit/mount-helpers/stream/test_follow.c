/* SPDX-License-Identifier: Apache-2.0 */
/* Streams of logged steps: which version is read, and what the sum of a step depends on. */
#include <stdlib.h>
#include "mount-helpers/stream/follow.h"
#include "tests/support/suite.h"
#include "tests/unit/mount-helpers/stream/memory.h"
#include <hitrain/words.h>

enum { BYTES = 400, AT_VERSION = 8, AT_FEATURES = 12, AT_CHECKSUM = 56 };

static struct ht_hash128 sum;

static void setup(void)
{
    ht_buf_reset(&stream);
}

static void teardown(void)
{
    ht_buf_free(&stream);
}

/* A gradient whose elements are zeros, but for the second one: as a block, in two blocks, or as entries. */
enum how { WHOLE, CUT, SPARSE };

static void put_gradient(struct ht_follow_writer *w, enum how how, float element)
{
    static const uint8_t one_zero[2] = {1};
    uint8_t bytes[BYTES] = {0}, entry[2 + sizeof(element)];
    size_t first = how == CUT ? BYTES / 2 : BYTES;

    memcpy(bytes + sizeof(element), &element, sizeof(element));
    memcpy(entry, one_zero, sizeof(one_zero));
    memcpy(entry + sizeof(one_zero), &element, sizeof(element));
    if (how == SPARSE) {
        ck_assert_int_eq(ht_follow_put_sparse(w, &(struct ht_follow_sparse){0, BYTES, entry, sizeof(entry)}), 0);
        return;
    }
    ck_assert_int_eq(ht_follow_put_block(w, 0, bytes, first), 0);
    if (how == CUT)
        ck_assert_int_eq(ht_follow_put_block(w, first, bytes + first, BYTES - first), 0);
}

static void write_step(enum how how, float element)
{
    const struct ht_follow_head head = {.step = 3, .lineage = 7};
    uint8_t numbers[HT_FOLLOW_NUMBERS_BYTES] = {0};
    struct ht_follow_writer w;

    ht_buf_reset(&stream);
    numbers[offsetof(struct ht_disk_redo_param, dtype)] = HT_DTYPE_F32;
    numbers[offsetof(struct ht_disk_redo_param, grad_dtype)] = HT_DTYPE_F32;
    ck_assert_int_eq(ht_follow_writer_begin(&w, &head, put, NULL), 0);
    ck_assert_int_eq(ht_follow_put_step(&w, &(struct ht_follow_step){4, 1, BYTES, 4}), 0);
    ck_assert_int_eq(ht_follow_put_param(&w, &(struct ht_follow_param){numbers, "w"}), 0);
    put_gradient(&w, how, element);
    ck_assert_int_eq(ht_follow_put_done(&w, false, &sum), 0);
    ck_assert_int_eq(ht_follow_put_end(&w), 0);
    ht_follow_writer_free(&w);
}

static char why[HT_RECORDS_WHY_MAX];

/* Reads the whole stream. The bytes of gradients that came, or a negative errno, with the reason in why. */
static int read_all(void)
{
    struct ht_reader in = ht_reader_of(stream.data, stream.len);
    struct ht_follow_record x = {.type = HT_FOLLOW_STEP};
    struct ht_follow_reader r;
    int rc = ht_follow_reader_begin(&r, get_left, &in), bytes = 0;

    while (rc == 0 && x.type != HT_FOLLOW_END) {
        rc = ht_follow_next(&r, &x);
        bytes += rc == 0 && (x.type == HT_FOLLOW_BLOCK || x.type == HT_FOLLOW_SPARSE) ? (int)x.block.len : 0;
    }
    memcpy(why, r.in.why, sizeof(why));
    ht_follow_reader_free(&r);
    return rc < 0 ? rc : bytes;
}

static void change_header(size_t at, uint32_t value)
{
    ht_le32_store(stream.data + at, value);
    ht_le64_store(stream.data + AT_CHECKSUM, ht_hash64(stream.data, AT_CHECKSUM, 0));
}

static void refused(const char *text)
{
    ck_assert_int_eq(read_all(), -EPROTO);
    ck_assert_msg(strstr(why, text), "%s", why);
    ck_assert_msg(strstr(why, "at byte 64 "), "before the first record: %s", why);
}

/* -------------------------------------------------------------------- tests */

TEST(blocks_and_entries_are_read)
{
    write_step(SPARSE, 3);
    ck_assert_uint_eq(ht_le32_load(stream.data + AT_VERSION), 3);
    ck_assert_int_eq(read_all(), BYTES);
    write_step(WHOLE, 3);
    ck_assert_int_eq(read_all(), BYTES);
}

TEST(another_version_is_refused_at_the_header)
{
    write_step(WHOLE, 3);
    change_header(AT_VERSION, 4);
    refused("this is a stream of version 4, and this program reads version 3: update the receiver");
    change_header(AT_VERSION, UINT32_MAX);
    refused("update the receiver");
    for (uint32_t version = 0; version < HT_FOLLOW_VERSION; version++) {
        change_header(AT_VERSION, version);
        refused("update the sender");
    }
    change_header(AT_VERSION, HT_FOLLOW_VERSION);
    change_header(AT_FEATURES, 0x10);
    refused("features 0x10");
}

/* A parameter and a section, in this order or not, with a block between them or not. */
static int read_section(bool first, bool late, const char *path)
{
    const struct ht_follow_head head = {.step = 3, .lineage = 7};
    uint8_t numbers[2][HT_FOLLOW_NUMBERS_BYTES] = {{0}, {0}};
    struct ht_follow_param p[2] = {{numbers[0], "w", false}, {numbers[1], path, true}};
    struct ht_follow_writer to;

    ht_buf_reset(&stream);
    numbers[0][offsetof(struct ht_disk_redo_param, dtype)] = HT_DTYPE_F32;
    numbers[0][offsetof(struct ht_disk_redo_param, grad_dtype)] = HT_DTYPE_F32;
    ck_assert_int_eq(ht_follow_writer_begin(&to, &head, put, NULL), 0);
    ck_assert_int_eq(ht_follow_put_step(&to, &(struct ht_follow_step){4, 2, BYTES, 4}), 0);
    ck_assert_int_eq(ht_follow_put_param(&to, &p[first]), 0);
    if (late)
        put_gradient(&to, WHOLE, 1);
    ck_assert_int_eq(ht_follow_put_param(&to, &p[!first]), 0);
    if (!late && !first)
        put_gradient(&to, WHOLE, 1);
    ck_assert_int_eq(ht_follow_put_done(&to, false, &sum), 0);
    ck_assert_int_eq(ht_follow_put_end(&to), 0);
    ht_follow_writer_free(&to);
    return read_all();
}

TEST(a_section_follows_its_parameter)
{
    static const char text[] = "there are numbers for a range of elements without their parameter";

    ck_assert_int_eq(read_section(false, false, "w"), BYTES);
    ck_assert_int_eq(read_section(true, false, "w"), -EPROTO);
    ck_assert_msg(strstr(why, text), "%s", why);
    ck_assert_int_eq(read_section(false, true, "w"), -EPROTO);
    ck_assert_msg(strstr(why, text), "%s", why);
    ck_assert_int_eq(read_section(false, false, "v"), -EPROTO);
    ck_assert_msg(strstr(why, text), "%s", why);
}

/* follow.h: one sum, one gradient. The same gradient in another way has another one. */
TEST(a_sum_is_that_of_blocks)
{
    struct ht_hash128 whole, other;

    write_step(WHOLE, 3);
    whole = sum;
    write_step(WHOLE, 3);
    ck_assert_mem_eq(&sum, &whole, sizeof(sum));
    write_step(WHOLE, 4);
    ck_assert_mem_ne(&sum, &whole, sizeof(sum));
    write_step(SPARSE, 3);
    other = sum;
    ck_assert_mem_ne(&sum, &whole, sizeof(sum));
    write_step(CUT, 3);
    ck_assert_mem_ne(&sum, &whole, sizeof(sum));
    ck_assert_mem_ne(&sum, &other, sizeof(sum));
}

int main(void)
{
    return run_tests("follow", .setup = setup, .teardown = teardown);
}
