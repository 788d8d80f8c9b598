/* SPDX-License-Identifier: Apache-2.0 */
/* The commands to an NVMe controller and the meaning of its answers, byte by byte as in the specification. */
#include "tests/support/suite.h"
#include "tiering/io/nvme.h"

static uint8_t data[HT_NVME_IDENTIFY_BYTES];

static void begin(void)
{
    memset(data, 0, sizeof(data));
}

TEST(a_transfer_names_its_first_block_and_one_block_less_than_it_moves)
{
    struct nvme_uring_cmd c;
    char buf[8];

    /* Beyond 4 GiB blocks, so that both words of the address count. */
    ht_nvme_transfer(&c, HT_NVME_WRITE, 7, 12, 0x123456789abcull << 12, buf, 256 << 10);
    ck_assert_uint_eq(c.opcode, 0x01);
    ck_assert_uint_eq(c.nsid, 7);
    ck_assert_uint_eq(c.addr, (uintptr_t)buf);
    ck_assert_uint_eq(c.data_len, 256 << 10);
    ck_assert_uint_eq(c.cdw10, 0x56789abc);
    ck_assert_uint_eq(c.cdw11, 0x1234);
    ck_assert_uint_eq(c.cdw12, 63); /* and no FUA, which is bit 30 */
    ck_assert_uint_eq(c.cdw13 | c.cdw14 | c.cdw15 | c.flags | c.metadata_len | c.timeout_ms, 0);

    ht_nvme_transfer(&c, HT_NVME_READ, 1, 9, 512, buf, 32 << 20);
    ck_assert_uint_eq(c.opcode, 0x02);
    ck_assert_uint_eq(c.cdw10, 1);
    ck_assert_uint_eq(c.cdw12, 0xffff);
}

TEST(a_flush_moves_nothing)
{
    struct nvme_uring_cmd c;

    ht_nvme_flush(&c, 3);
    ck_assert_uint_eq(c.opcode, 0x00);
    ck_assert_uint_eq(c.nsid, 3);
    ck_assert_uint_eq(c.addr | c.data_len | c.cdw10 | c.cdw11 | c.cdw12, 0);
}

TEST(deallocate_has_one_range_in_memory)
{
    static const uint8_t wanted[HT_NVME_RANGE_BYTES] = {0, 0, 0, 0, 0x78, 0x56, 0x34, 0x12, 8, 7, 6, 5, 4, 3, 2, 1};
    uint8_t range[HT_NVME_RANGE_BYTES];
    struct nvme_uring_cmd c;

    memset(range, 0xff, sizeof(range));
    ht_nvme_deallocate(&c, 2, 0x0102030405060708, 0x12345678, range);
    ck_assert_uint_eq(c.opcode, 0x09);
    ck_assert_uint_eq(c.nsid, 2);
    ck_assert_uint_eq(c.addr, (uintptr_t)range);
    ck_assert_uint_eq(c.data_len, sizeof(range));
    ck_assert_uint_eq(c.cdw10, 0);
    ck_assert_uint_eq(c.cdw11, 4);
    ck_assert_mem_eq(range, wanted, sizeof(range));
}

TEST(identify_of_a_controller_names_no_namespace)
{
    struct nvme_passthru_cmd c;

    ht_nvme_identify(&c, 0, 5, data);
    ck_assert_uint_eq(c.opcode, 0x06);
    ck_assert_uint_eq(c.nsid, 5);
    ck_assert_uint_eq(c.data_len, 4096);
    ck_assert_uint_eq(c.cdw10, 0);
    ht_nvme_identify(&c, 1, 5, data);
    ck_assert_uint_eq(c.nsid, 0);
    ck_assert_uint_eq(c.cdw10, 1);
}

TEST(a_controller_tells_its_largest_transfer_its_cache_and_whether_it_deallocates)
{
    struct ht_nvme_controller c;

    begin();
    ht_nvme_decode_controller(data, &c);
    ck_assert_uint_eq(c.transfer_bytes_max, UINT64_MAX);
    ck_assert(!c.volatile_cache);
    ck_assert(!c.deallocates);
    data[77] = 7;
    data[525] = 0x07;
    data[520] = 0x5c;
    ht_nvme_decode_controller(data, &c);
    ck_assert_uint_eq(c.transfer_bytes_max, 512 << 10);
    ck_assert(c.volatile_cache);
    ck_assert(c.deallocates);
    data[77] = 255;   /* more than anything can have */
    data[525] = 0x06; /* how flush treats namespaces, and no cache */
    data[520] = 0xfb;
    ht_nvme_decode_controller(data, &c);
    ck_assert_uint_eq(c.transfer_bytes_max, UINT64_MAX);
    ck_assert(!c.volatile_cache);
    ck_assert(!c.deallocates);
}

TEST(a_namespace_tells_its_size_and_the_format_it_has_among_others)
{
    struct ht_nvme_namespace n;

    begin();
    memcpy(data, "\x00\x00\x02\x00\x01\x00\x00\x00", 8);
    data[25] = 3;
    data[26] = 0x12; /* format 2, metadata at the end of the data where there is any */
    memcpy(data + 128 + 2 * 4, "\x08\x00\x0c\x00", 4);
    ck_assert_int_eq(ht_nvme_decode_namespace(data, &n), 0);
    ck_assert_uint_eq(n.blocks, 0x100020000);
    ck_assert_uint_eq(n.block_shift, 12);
    ck_assert_uint_eq(n.metadata_bytes, 8);
    ck_assert(!n.protected);
    ck_assert(!n.write_protected);
    data[29] = 0x09; /* type 1, in the first bytes of the metadata */
    data[99] = 1;
    ck_assert_int_eq(ht_nvme_decode_namespace(data, &n), 0);
    ck_assert(n.protected);
    ck_assert(n.write_protected);
}

TEST(the_number_of_a_format_is_checked_and_may_have_six_bits)
{
    struct ht_nvme_namespace n;

    begin();
    data[25] = 3;
    data[26] = 4;
    ck_assert_int_eq(ht_nvme_decode_namespace(data, &n), -EINVAL);
    data[26] = 0x61; /* bits that count only where there are more than 16 */
    data[128 + 1 * 4 + 2] = 9;
    ck_assert_int_eq(ht_nvme_decode_namespace(data, &n), 0);
    ck_assert_uint_eq(n.block_shift, 9);
    data[25] = 63;
    data[128 + 49 * 4 + 2] = 12;
    ck_assert_int_eq(ht_nvme_decode_namespace(data, &n), 0);
    ck_assert_uint_eq(n.block_shift, 12);
    data[25] = 48;
    ck_assert_int_eq(ht_nvme_decode_namespace(data, &n), -EINVAL);
}

TEST(status_becomes_the_errno_that_block_io_gives)
{
    static const struct {
        unsigned status;
        int err;
    } rows[] = {{0x001, -EOPNOTSUPP}, {0x002, -EOPNOTSUPP}, {0x004, -EIO},        {0x020, -EROFS},   {0x080, -EIO},
                {0x081, -ENOSPC},     {0x083, -EBADE},      {0x10b, -EOPNOTSUPP}, {0x182, -ENODATA}, {0x280, -ENODATA},
                {0x281, -ENODATA},    {0x282, -EILSEQ},     {0x286, -ENODATA},    {0x287, -ENODATA}, {0x7ff, -EIO}};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(rows); i++) {
        ck_assert_int_eq(ht_nvme_errno(rows[i].status), rows[i].err);
        ck_assert_int_eq(ht_nvme_errno(rows[i].status | 0x4000), rows[i].err);
        ck_assert(ht_nvme_may_retry(rows[i].status));
        ck_assert(!ht_nvme_may_retry(rows[i].status | 0x4000));
    }
}

RUN_TESTS("nvme")
