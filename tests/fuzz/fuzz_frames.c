/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames of the log: the input is the content of the first copy's region, from its beginning, and of the second from an
 * offset that the input's first byte gives. In copies that the second byte selects, bytes that look like a frame get a
 * right checksum and predecessor. The target opens a journal, with and without force, works on, and opens it again.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/support/dev.h"
#include "tiering/base/hash.h"
#include "tiering/base/log.h"
#include "tiering/journal/journal.h"

enum { LOG_BYTES = HT_LOG_BYTES_MIN, HEADER_BYTES = sizeof(struct ht_disk_frame), SALT = 0x68697472, EPOCH = 3 };

static struct ht_dev *dev;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    ht_log_set_level(HT_LOG_ERROR - 1);
    MUST(dev_open_ram(HT_LOG_COPIES * LOG_BYTES, 4096, &dev) == 0);
    return 0;
}

static uint8_t *region(unsigned copy)
{
    return (uint8_t *)ht_dev_ram_data(dev) + copy * (size_t)LOG_BYTES;
}

static void make_right(uint8_t *log)
{
    uint64_t checksum = 0;

    for (uint64_t at = 0; at < LOG_BYTES;) {
        struct ht_disk_frame *f = (struct ht_disk_frame *)(log + at);
        uint64_t len = ht_le64_load(f->payload_len.b);
        if (ht_le32_load(f->magic.b) != HT_FRAME_MAGIC || len > LOG_BYTES - at - HEADER_BYTES) {
            at += HT_BLOCK_BYTES;
            continue;
        }
        ht_le64_store(f->prev.b, checksum);
        checksum = ht_hash64(log + at + 16, HEADER_BYTES - 16 + len, 0);
        ht_le64_store(f->checksum.b, checksum);
        at += ht_round_up(HEADER_BYTES + len, HT_BLOCK_BYTES);
    }
}

static int mix_record(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    uint64_t *sum = ctx;

    *sum += ht_hash64(payload, len, type);
    return 0;
}

static struct ht_journal_config configure(uint64_t epoch, uint64_t *sum)
{
    return (struct ht_journal_config){
        .dev = {dev, dev},
        .offset = {0, LOG_BYTES},
        .log_bytes = LOG_BYTES,
        .salt = SALT,
        .start = {.pos = 0, .seq = 1, .chain = 0},
        .epoch = epoch,
        .ctx = sum,
        .replay = mix_record,
    };
}

static int write_record(struct ht_journal *j, const void *record, size_t len)
{
    struct ht_buf group = HT_BUF_INIT;
    uint64_t lsn;

    ht_record_put(&group, HT_REC_IDS, record, len);
    int rc = ht_journal_start(j, EPOCH + 1);
    if (!rc)
        rc = ht_journal_append(j, &group, &lsn);
    if (!rc)
        rc = ht_journal_sync(j, lsn);
    ht_buf_free(&group);
    return rc;
}

/* A new mount has written, and the accepted records are there again. */
static void go_on(struct ht_journal *j, uint64_t sum)
{
    static const uint8_t record[8];
    struct ht_journal_report report;
    uint64_t again = 0;

    int rc = write_record(j, record, sizeof(record));
    ht_journal_abandon(j);
    if (rc)
        return;
    struct ht_journal_config c = configure(EPOCH + 1, &again);
    MUST(ht_journal_open(&c, false, &report, &j) == 0);
    MUST(again == sum + ht_hash64(record, sizeof(record), HT_REC_IDS));
    ht_journal_abandon(j);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ht_journal_report report;
    struct ht_journal *j;
    uint64_t sum = 0, forced = 0;

    if (size < 2 || size - 2 > LOG_BYTES)
        return -1;
    uint64_t second = ht_min_u64(data[0] * 512ull, size - 2);
    memset(region(0), 0, (size_t)HT_LOG_COPIES * LOG_BYTES);
    memcpy(region(0), data + 2, size - 2);
    memcpy(region(1), data + 2 + second, size - 2 - second);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (data[1] & 1u << i)
            make_right(region(i));
    struct ht_journal_config c = configure(EPOCH, &forced);
    if (ht_journal_open(&c, true, &report, &j) == 0)
        ht_journal_abandon(j);
    c = configure(EPOCH, &sum);
    if (ht_journal_open(&c, false, &report, &j) == 0)
        go_on(j, sum);
    return 0;
}
