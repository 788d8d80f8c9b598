/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of the log, of all layers together: the input is a sequence of records (type, length, payload), which a
 * journal writes into the empty log of a small device. fsck's passes look at it: a store without problems mounts. If it
 * mounts, everything is read, written, committed, checkpointed and unmounted; then it mounts again and shows the same.
 * Inputs of an odd length are repaired first: whatever the records say, fsck repairs it and finds nothing then, unless
 * records have a type that no participant knows.
 */
#include "fs/ns/records.h"
#include "mount-helpers/fsck/fsck.h"
#include "optim/state/records.h"
#include "tiering/base/idhash.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/memory.h"
#include "tests/support/sample.h"
#include "tiering/base/log.h"
#include "tiering/sys/mem.h"

enum { NEW_FRAME = 0xff, EPOCH = 1, INPUT_MAX = 1 << 16 };

static struct harness k;
static uint8_t *base;
static struct ht_super sb;
static bool unknown_in_group, unknown_in_log; /* a type of record that no participant knows */

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    struct ht_super_report report;

    (void)argc;
    (void)argv;
    ht_log_set_level(HT_LOG_ERROR - 1);
    memory_keep(true);
    ht_id_hash_fix(); /* an input does the same each time */
    sample_format(&k);
    MUST(ht_super_read(k.dev[0], &sb, &report) == 0);
    sb.epoch = EPOCH;
    sb.flags = HT_SUPER_IN_USE;
    MUST(ht_super_write(&sb, k.dev, 1) == 0);
    base = sample_keep(&k);
    return 0;
}

/* ----------------------------------------------------------------- the log */

static bool append(struct ht_journal *j, struct ht_buf *group)
{
    uint64_t lsn;
    bool fits = ht_journal_append(j, group, &lsn) == 0 && ht_journal_sync(j, lsn) == 0;

    group->len = 0;
    unknown_in_log |= fits && unknown_in_group;
    unknown_in_group = false;
    return fits;
}

static bool is_known(uint8_t type)
{
    return (type >= HT_REC_EPOCH && type <= HT_REC_CHECKPOINT_END) ||
        (type >= HT_REC_IDS && type <= HT_REC_CHUNK_DEL) || (type >= HT_REC_NS_FIRST && type <= HT_REC_NS_TARGET) ||
        (type >= HT_REC_OPT_FIRST && type <= HT_REC_OPT_REDO_DEL);
}

static void put_records(struct ht_journal *j, const uint8_t *data, size_t size)
{
    struct ht_reader in = ht_reader_of(data, size);
    struct ht_buf group = HT_BUF_INIT;
    bool fits = true;

    while (fits && !ht_reader_done(&in)) {
        uint8_t type = ht_get_u8(&in);
        size_t len;
        if (type == NEW_FRAME) {
            fits = !group.len || append(j, &group);
            continue;
        }
        const uint8_t *payload = fuzz_piece(&in, &len);
        type = type ? type : HT_REC_OBJECT;
        ht_record_put(&group, type, payload, len);
        unknown_in_group |= !is_known(type);
    }
    if (group.len)
        (void)append(j, &group);
    ht_buf_free(&group);
}

static void write_log(const uint8_t *data, size_t size)
{
    struct ht_journal_config c = {
        .dev = {k.dev[0], k.dev[0]},
        .offset = {sb.log_offset[0], sb.log_offset[1]},
        .log_bytes = sb.log_bytes,
        .salt = sb.salt,
        .start = {.pos = sb.start_pos, .seq = sb.start_seq, .chain = sb.start_chain},
    };
    struct ht_journal_report report;
    struct ht_journal *j;

    MUST(ht_journal_open(&c, false, &report, &j) == 0);
    MUST(ht_journal_start(j, EPOCH) == 0);
    put_records(j, data, size);
    MUST(ht_journal_close(j) == 0);
}

/* ----------------------------------------------------------------- the use */

static int commit_root(void *ctx, uint64_t ino)
{
    (void)ctx;
    int rc = ht_optim_commit(k.optim, ino);
    (void)rc; /* may well be impossible */
    return 0;
}

static void write_something(void)
{
    struct ht_cred cred = {0, 0, 0};
    struct stat st;
    int rc;

    if (ht_ns_mknod(k.ns, HT_NS_ROOT_INO, "later", S_IFREG | 0644, 0, cred, &st) == 0) {
        rc = harness_write(&k, st.st_ino, 70000, "later", 5);
        ht_ns_forget(k.ns, st.st_ino, 1);
    }
    rc = ht_ns_roots(k.ns, commit_root, NULL);
    if (!rc)
        rc = ht_store_commit(k.store);
    if (!rc)
        rc = ht_store_checkpoint(k.store);
    (void)rc;
}

static bool same(struct sample_items *a, struct sample_items *b)
{
    sample_sort(a);
    sample_sort(b);
    return a->errors == b->errors && a->count == b->count &&
        (!a->count || memcmp(a->item, b->item, a->count * sizeof(*a->item)) == 0);
}

static void use(void)
{
    struct sample_items before = {0}, after = {0};

    write_something();
    sample_read(&k, &before);
    if (harness_close(&k, true) == 0) {
        MUST(harness_open(&k, 1) == 0);
        sample_read(&k, &after);
        MUST(same(&before, &after));
        (void)harness_close(&k, false);
    }
    sample_free(&before);
    sample_free(&after);
}

static void repair(void)
{
    int status = harness_repair(&k), rc;

    if (unknown_in_log) { /* nothing was repaired */
        MUST(status == HT_FSCK_LEFT && harness_open(&k, 1) != 0);
        (void)harness_close(&k, false);
        return;
    }
    MUST((status & ~HT_FSCK_CORRECTED) == 0);
    MUST(harness_problems(&k, &rc) == 0 && rc == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int rc;

    if (size > INPUT_MAX)
        return -1;
    sample_restore(&k, base);
    unknown_in_group = unknown_in_log = false;
    write_log(data, size);
    if (size % 2)
        repair();
    bool clean = harness_problems(&k, &rc) == 0 && rc == 0;
    rc = harness_open(&k, 1);
    MUST(!clean || rc == 0);
    if (rc == 0)
        use();
    else
        (void)harness_close(&k, false);
    return 0;
}
