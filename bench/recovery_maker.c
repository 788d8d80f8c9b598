/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recovery_maker.c - gives objects of a store as many chunks as one likes, in the log alone.
 *
 * Stored content is zeros of a sparse image, so only the size of the image bounds the number of chunks. The engine
 * itself writes records, frames, checksums and both copies of the log. Places are taken in a scattered order, as in a
 * store that has been used for a while. With --cold they are those of a vault, one behind the other, and no segment is
 * there. The store is left as a crash leaves it.
 */
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/log_records.h"
#include "tiering/api/check.h"
#include "tiering/api/store.h"
#include "tiering/api/tx.h"
#include "optim/optim.h"
#include "fs/ns/ns.h"
#include "fs/participants/participants.h"

enum { RECORDS_PER_GROUP = 512, STAGING_BYTES = 16 << 20, DRAM_BYTES = 8 << 20 };
/* from the log's end to the first of our places: space for the daemon's own writes */
#define APART_BYTES (256 * HT_MIB)
/* Blocks of 1 MiB in a segment, behind its header. */
enum { OF_SEGMENT = 31 };

struct maker {
    struct ht_store *store;
    struct ht_participants participants;        /* they know the records of names: the store refuses to lose any */
    uint64_t first_block, chunk_blocks, chunks; /* where and how many */
    uint64_t stored, checksum;
    bool cold;
};

static void die(const char *what, int error)
{
    fprintf(stderr, "recovery_maker: %s: %s\n", what, strerror(-error));
    exit(1);
}

static void must(int rc, const char *what)
{
    if (rc < 0)
        die(what, rc);
}

/* A step that has no divisor in common with the number of places visits each place once. */
static uint64_t place_of(const struct maker *m, uint64_t k)
{
    const uint64_t prime = 2147483647;

    if (m->cold)
        return k / OF_SEGMENT << HT_VAULT_UNIT_BITS | (1 + k % OF_SEGMENT * m->chunk_blocks);
    return m->first_block + k * prime % m->chunks * m->chunk_blocks;
}

static void put_chunk(const struct maker *m, struct ht_buf *b, uint64_t oid, uint64_t index, uint64_t place)
{
    log_put_chunk(b,
                  &(struct log_chunk){.oid = oid,
                                      .index = index,
                                      .generation = 1,
                                      .stored = (uint32_t)m->stored,
                                      .visible = (uint32_t)m->stored,
                                      .checksum = m->checksum,
                                      .block = place,
                                      .device = m->cold ? HT_DEVICE_VAULT : 0,
                                      .codec = HT_CODEC_RAW});
}

/* Chunks 1 to count of an object; they are number k and following of the store. */
static void fill(struct maker *m, uint64_t oid, uint64_t count, uint64_t k)
{
    struct ht_tx *tx;
    uint64_t lsn = 0;

    for (uint64_t i = 0; i < count;) {
        must(ht_tx_begin(m->store, RECORDS_PER_GROUP * 64, &tx), "log");
        for (unsigned n = 0; n < RECORDS_PER_GROUP && i < count; n++, i++)
            put_chunk(m, ht_tx_records(tx), oid, i + 1, place_of(m, k + i));
        must(ht_tx_commit(tx, &lsn), "log");
        if (i % (RECORDS_PER_GROUP * 8) == 0)
            must(ht_store_sync(m->store, lsn), "log");
    }
    must(ht_store_sync(m->store, lsn), "log");
}

static void open_store(struct maker *m, const char *path, struct ht_dev **dev)
{
    struct ht_store_opts opts = {
        .dram_bytes = DRAM_BYTES, .staging_bytes = STAGING_BYTES, .numa_node = HT_NUMA_OFF, .no_threads = true};
    const struct ht_optim_hooks hooks = {0};
    const struct ht_ns_hooks ns_hooks = {0};
    const struct ht_ns_setup ns = {.hooks = &ns_hooks};
    const struct ht_optim_setup optim = {.threads = 1, .hooks = &hooks};
    const struct ht_participants_setup setup = {{[HT_PARTICIPANT_NS] = &ns, [HT_PARTICIPANT_OPT] = &optim}};
    const struct ht_super *sb;
    void *zeros = calloc(1, m->stored);

    if (!zeros)
        die("memory", -ENOMEM);
    must(ht_dev_open(path, 0, dev), path);
    must(ht_store_new(dev, 1, &opts, &m->store), path);
    must(ht_participants_new(m->store, &setup, &m->participants), path);
    must(ht_store_mount(m->store), path);
    sb = ht_store_super(m->store);
    m->checksum = ht_store_checksum(m->store, zeros, m->stored);
    m->first_block = (sb->log_offset[0] + sb->log_bytes + APART_BYTES) / HT_BLOCK_BYTES;
    free(zeros);
    if (!m->cold && (m->first_block + m->chunks * m->chunk_blocks) * HT_BLOCK_BYTES > sb->log_offset[1])
        die("the image is too small", -ENOSPC);
}

int main(int argc, char **argv)
{
    struct maker m = {0};
    struct ht_dev *dev;

    ht_stdio_fds_open();
    m.cold = argc > 1 && strcmp(argv[1], "--cold") == 0;
    argc -= m.cold;
    argv += m.cold;
    if (argc < 5) {
        fputs("usage: recovery_maker [--cold] IMAGE STORED-BYTES CHUNKS-EACH OBJECT...\n", stderr);
        return 2;
    }
    m.stored = strtoull(argv[2], NULL, 0);
    m.chunk_blocks = m.stored / HT_BLOCK_BYTES;
    uint64_t each = strtoull(argv[3], NULL, 0);
    m.chunks = each * (uint64_t)(argc - 4);
    open_store(&m, argv[1], &dev);
    for (int i = 4; i < argc; i++)
        fill(&m, strtoull(argv[i], NULL, 0), each, each * (uint64_t)(i - 4));
    ht_participants_free(&m.participants);
    ht_store_close(m.store);
    ht_dev_close(dev);
    return 0;
}
