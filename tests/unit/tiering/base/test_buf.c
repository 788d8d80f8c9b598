/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers grow and keep their errors; readers never pass their end. */
#include "tests/support/suite.h"
#include "tiering/base/buf.h"
#include "tiering/base/hash.h"
#include "tiering/base/list.h"

TEST(what_is_put_is_read)
{
    struct ht_buf b = HT_BUF_INIT;

    ht_buf_put_u8(&b, 0xfe);
    ht_buf_put_u16(&b, 0xfedc);
    ht_buf_put_u32(&b, 0xfedcba98u);
    ht_buf_put_u64(&b, 0xfedcba9876543210u);
    ht_buf_put(&b, "tail", 4);
    ck_assert_int_eq(b.err, 0);
    ck_assert_uint_eq(b.len, 19);
    ck_assert_uint_eq(b.data[1], 0xdc); /* little-endian */
    struct ht_reader r = ht_reader_of(b.data, b.len);
    ck_assert_uint_eq(ht_get_u8(&r), 0xfe);
    ck_assert_uint_eq(ht_get_u16(&r), 0xfedc);
    ck_assert_uint_eq(ht_get_u32(&r), 0xfedcba98u);
    ck_assert_uint_eq(ht_get_u64(&r), 0xfedcba9876543210u);
    ck_assert(!ht_reader_done(&r));
    ck_assert_mem_eq(ht_get_bytes(&r, 4), "tail", 4);
    ck_assert(ht_reader_done(&r));
    ht_buf_free(&b);
    ck_assert_ptr_null(b.data);
}

TEST(a_reader_past_its_end_stays_bad_and_gives_zeros)
{
    static const uint8_t bytes[7] = {1, 2, 3, 4, 5, 6, 7};
    struct ht_reader r = ht_reader_of(bytes, sizeof(bytes));

    ck_assert_uint_eq(ht_get_u64(&r), 0);
    ck_assert(r.bad);
    ck_assert_uint_eq(ht_get_u8(&r), 0); /* although a byte is left */
    ck_assert_uint_eq(ht_get_u16(&r), 0);
    ck_assert_uint_eq(ht_get_u32(&r), 0);
    ck_assert_ptr_null(ht_get_bytes(&r, 0));
    ck_assert(!ht_reader_done(&r));

    r = ht_reader_of(bytes, sizeof(bytes));
    ck_assert_ptr_null(ht_get_bytes(&r, SIZE_MAX));
    ck_assert(r.bad);
}

TEST(an_empty_reader_is_done)
{
    struct ht_reader r = ht_reader_of(NULL, 0);

    ck_assert(ht_reader_done(&r));
    ck_assert_uint_eq(ht_get_u8(&r), 0);
    ck_assert(r.bad);
}

TEST(a_buffer_without_memory_ignores_puts_until_reset)
{
    struct ht_buf b = HT_BUF_INIT;

    ht_buf_put_u32(&b, 1);
    ck_assert_int_eq(ht_buf_reserve(&b, SIZE_MAX), -ENOMEM);
    ht_buf_put_u32(&b, 2);
    ht_buf_printf(&b, "%d", 3);
    ck_assert_int_eq(b.err, -ENOMEM);
    ck_assert_uint_eq(b.len, 4);
    ht_buf_reset(&b);
    ht_buf_put_u32(&b, 2);
    ck_assert_int_eq(b.err, 0);
    ck_assert_uint_eq(b.len, 4);
    ht_buf_free(&b);
}

TEST(growing_keeps_the_content)
{
    struct ht_buf b = HT_BUF_INIT;

    for (uint32_t i = 0; i < 100000; i++)
        ht_buf_put_u32(&b, i);
    ck_assert_int_eq(b.err, 0);
    for (uint32_t i = 0; i < 100000; i++)
        ck_assert_uint_eq(ht_le32_load(b.data + 4 * (size_t)i), i);
    ht_buf_free(&b);
}

TEST(text_is_terminated_behind_its_length)
{
    struct ht_buf b = HT_BUF_INIT;

    for (int i = 0; i < 50; i++)
        ht_buf_printf(&b, "%03d", i);
    ck_assert_uint_eq(b.len, 150);
    ck_assert_uint_eq(b.data[150], 0);
    ck_assert_mem_eq(b.data, "000001002", 9);
    ht_buf_free(&b);
}

TEST(unaligned_stores_and_loads)
{
    uint8_t bytes[13] = {0};

    ht_le32_store(bytes + 1, 0x01020304);
    ht_le64_store(bytes + 5, 0x1112131415161718u);
    ck_assert_uint_eq(bytes[0], 0);
    ck_assert_uint_eq(bytes[1], 4);
    ck_assert_uint_eq(bytes[12], 0x11);
    ck_assert_uint_eq(ht_le32_load(bytes + 1), 0x01020304);
    ck_assert_uint_eq(ht_le64_load(bytes + 5), 0x1112131415161718u);
}

/* On disk for ever: these are the values of the XXH3 specification's reference. */
TEST(the_checksum_is_xxh3)
{
    ck_assert_uint_eq(ht_hash64("", 0, 0), 0x2d06800538d394c2u);
    ck_assert_uint_ne(ht_hash64("a", 1, 0), ht_hash64("a", 1, 1));
    ck_assert_uint_ne(ht_hash64("a", 1, 0), ht_hash64("b", 1, 0));
}

/* Sums of long content, which vectors compute, by the reference without any. */
TEST(vectors_compute_the_same_checksums)
{
    static const struct {
        size_t len;
        uint64_t sum;
    } cases[] = {{240, 0xc8f1f35d2ef00a80u},
                 {241, 0x31646dda452dcfa5u},
                 {1024, 0x1920b02c26ed6776u},
                 {65536, 0x0edc1c7bb7f24752u},
                 {1048589, 0xcde45648e4e7aa44u}};
    static const uint8_t want[] = {0x13, 0x99, 0xf3, 0xce, 0x36, 0x3b, 0xac, 0xf3,
                                   0xe9, 0xa9, 0xba, 0xcb, 0x6b, 0x52, 0x08, 0x52};
    static uint8_t data[1048589];
    struct ht_hash128_sum *sum;

    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)(i * i >> 3);
    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++)
        ck_assert_uint_eq(ht_hash64(data, cases[i].len, 77), cases[i].sum);
    struct ht_hash128 whole = ht_hash128(data, sizeof(data));
    ck_assert_int_eq(ht_hash128_sum_new(&sum), 0);
    ht_hash128_sum_add(sum, data, 777);
    ht_hash128_sum_add(sum, data + 777, sizeof(data) - 777);
    struct ht_hash128 parts = ht_hash128_sum_get(sum);
    ht_hash128_sum_free(sum);
    ck_assert_mem_eq(whole.byte, want, sizeof(want));
    ck_assert_mem_eq(parts.byte, want, sizeof(want));
}

struct item {
    int value;
    struct ht_list link;
};

TEST(lists_keep_order_and_allow_removal)
{
    struct item items[4];
    struct ht_list head;
    int sum = 0, last = -1;

    ht_list_init(&head);
    ck_assert(ht_list_empty(&head));
    for (int i = 0; i < 4; i++) {
        items[i].value = i;
        ht_list_add_tail(&head, &items[i].link);
    }
    ht_list_for_each(pos, &head) {
        struct item *it = ht_list_entry(pos, struct item, link);
        ck_assert_int_eq(it->value, last + 1);
        last = it->value;
    }
    ht_list_for_each_safe(pos, tmp, &head) {
        struct item *it = ht_list_entry(pos, struct item, link);
        if (it->value % 2 == 0)
            ht_list_del(pos);
    }
    ht_list_del(&items[0].link); /* twice is harmless */
    ht_list_for_each(pos, &head)
        sum += ht_list_entry(pos, struct item, link)->value;
    ck_assert_int_eq(sum, 4);
}

RUN_TESTS("buf")
