/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Superblocks: the first byte says which copies of a small device the rest becomes, and whether its checksum is made
 * right. A superblock that decodes encodes to the same bytes. If the device can be read, its superblock can be written
 * and read again. A mount of the store succeeds or is refused.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/support/memory.h"
#include "tests/support/sample.h"
#include "tiering/base/hash.h"
#include "tiering/base/log.h"
#include "tiering/sys/mem.h"

enum { RIGHT_CHECKSUM = 8, COPIES = 7 };

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    ht_log_set_level(HT_LOG_ERROR - 1);
    memory_keep(true);
    return 0;
}

static void decode(const uint8_t *block)
{
    uint8_t again[HT_BLOCK_BYTES];
    struct ht_super sb, same;

    if (ht_super_decode(block, &sb) != HT_SUPER_OK)
        return;
    ht_super_encode(&sb, again);
    MUST(ht_super_decode(again, &same) == HT_SUPER_OK && memcmp(&sb, &same, sizeof(sb)) == 0);
}

static void use(struct harness *k)
{
    struct ht_super_report report;
    struct ht_super sb, again;
    struct sample_items items = {0};
    int rc;

    if (ht_super_read(k->dev[0], &sb, &report))
        return;
    (void)harness_problems(k, &rc);
    if (harness_open(k, 1) == 0)
        sample_read(k, &items);
    (void)harness_close(k, false);
    sample_free(&items);
    if (sb.device_count == 1 && ht_super_write(&sb, k->dev, 1, NULL) == 0)
        MUST(ht_super_read(k->dev[0], &again, &report) == 0 && again.generation >= sb.generation);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    _Alignas(8) uint8_t block[HT_BLOCK_BYTES] = {0};
    struct harness k = {.dev_count = 1};

    if (size < 1 || size - 1 > sizeof(block))
        return -1;
    memcpy(block, data + 1, size - 1);
    if (data[0] & RIGHT_CHECKSUM)
        ht_le64_store(block + 8, ht_hash64(block + 16, sizeof(block) - 16, 0));
    decode(block);
    if (!(data[0] & COPIES))
        return 0;
    MUST(dev_open_ram(SAMPLE_DEVICE_BYTES, 4096, &k.dev[0]) == 0);
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++)
        if (data[0] & 1u << i)
            memcpy((uint8_t *)ht_dev_ram_data(k.dev[0]) + ht_super_offset(SAMPLE_DEVICE_BYTES, i), block,
                   sizeof(block));
    use(&k);
    harness_free(&k);
    return 0;
}
