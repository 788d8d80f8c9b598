/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of the log, of all layers together: the input is a sequence of records (type, length, payload), which a
 * journal writes into the empty log of a small device. A record may come many times, with other numbers each time. So a
 * short input fills the log. Memory that a mount takes has a limit in proportion to the log.
 *
 * fsck's passes look at it: a store without problems mounts. If it mounts, everything is read, written, committed,
 * checkpointed and unmounted; then it mounts again and shows the same. Inputs of an odd length are repaired first:
 * whatever the records say, fsck repairs it and finds nothing then, unless records have a type that no participant
 * knows, or are too many.
 */
#include "fs/ns/records.h"
#include "mount-helpers/fsck/fsck.h"
#include "optim/state/records.h"
#include "tiering/base/idtable.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/memory.h"
#include "tests/support/sample.h"
#include "tiering/api/stats.h"
#include "tiering/base/log.h"
#include "tiering/sys/mem.h"

enum { NEW_FRAME = 0xff, MANY = 0xfe, EPOCH = 1, INPUT_MAX = 1 << 16, LOG_BYTES = SAMPLE_DEVICE_BYTES / 4 };
enum { MEMORY_MAX = (64 << 20) + 5 * LOG_BYTES }; /* for what the log describes */

static struct harness k;
static uint8_t *base;
static struct ht_super sb;
static bool unknown_in_group, unknown_in_log; /* a type of record that no participant knows */
static bool many_in_log; /* so many records that the log may be too full, or need too much memory */

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const struct ht_format_opts opts = {.log_bytes = LOG_BYTES};

    (void)argc;
    (void)argv;
    ht_log_set_level(HT_LOG_ERROR - 1);
    memory_keep(true);
    ht_id_hash_fix(); /* an input does the same each time */
    sample_format(&k);
    MUST(ht_super_format(k.dev, 1, &opts, &sb) == 0);
    sb.salt = SAMPLE_SALT;
    sb.epoch = sb.member_epoch[0] = EPOCH;
    sb.flags = HT_SUPER_IN_USE;
    MUST(ht_super_write(&sb, k.dev, 1, NULL) == 0);
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
    return (type >= HT_REC_EPOCH && type <= HT_REC_CHECKPOINT_END) || (type >= HT_REC_IDS && type <= HT_REC_VAULT) ||
        (type >= HT_REC_NS_FIRST && type <= HT_REC_NS_TARGET) ||
        (type >= HT_REC_OPT_FIRST && type <= HT_REC_OPT_REDO_DEL);
}

static void raise_number(uint8_t *payload, size_t len, size_t at, unsigned by)
{
    uint64_t number;

    if (at + sizeof(number) > len)
        return;
    memcpy(&number, payload + at, sizeof(number));
    number += by;
    memcpy(payload + at, &number, sizeof(number));
}

/* Each time its first number is one higher, and its second one so much. */
static void put_many(struct ht_buf *group, uint8_t type, const uint8_t *payload, size_t len, unsigned times,
                     unsigned more)
{
    uint8_t copy[UINT16_MAX];

    if (len)
        memcpy(copy, payload, len);
    for (unsigned i = 0; i < times && group->len < LOG_BYTES / 4 * 3; i++) {
        ht_record_put(group, type, copy, len);
        raise_number(copy, len, 0, 1);
        raise_number(copy, len, 8, more);
    }
}

static void put_records(struct ht_journal *j, const uint8_t *data, size_t size)
{
    struct ht_reader in = ht_reader_of(data, size);
    unsigned times = 1, more = 0;
    struct ht_buf group = HT_BUF_INIT;
    bool fits = true;

    while (fits && !ht_reader_done(&in)) {
        uint8_t type = ht_get_u8(&in);
        size_t len;
        if (type == NEW_FRAME) {
            fits = !group.len || append(j, &group);
            continue;
        }
        if (type == MANY) {
            times = ht_get_u16(&in);
            more = ht_get_u16(&in);
            many_in_log = true;
            continue;
        }
        const uint8_t *payload = fuzz_piece(&in, &len);
        type = type ? type : HT_REC_OBJECT;
        put_many(&group, type, payload, len, times, more);
        unknown_in_group |= times && !is_known(type);
        times = 1;
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
    ht_journal_abandon(j);
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

/* Mounts. After an error, too, all that was replayed is still there. */
static int open_store(void)
{
    struct ht_store_stats st;
    struct ht_ns_stats names;
    int rc = harness_open(&k, 1);

    ht_store_stats(k.store, &st);
    ht_ns_stats(k.ns, &names);
    MUST(st.meta_bytes + names.meta_bytes + ht_optim_meta_bytes(k.optim) <= MEMORY_MAX);
    return rc;
}

static void use(void)
{
    struct sample_items before = {0}, after = {0};

    write_something();
    sample_read(&k, &before);
    if (harness_close(&k, true) == 0) {
        MUST(open_store() == 0);
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

    if (unknown_in_log || (many_in_log && status == HT_FSCK_LEFT)) { /* nothing was repaired */
        MUST(status == HT_FSCK_LEFT && open_store() != 0);
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
    unknown_in_group = unknown_in_log = many_in_log = false;
    write_log(data, size);
    if (size % 2)
        repair();
    bool clean = harness_problems(&k, &rc) == 0 && rc == 0;
    rc = open_store();
    MUST(!clean || rc == 0);
    if (rc == 0)
        use();
    else
        (void)harness_close(&k, false);
    return 0;
}
