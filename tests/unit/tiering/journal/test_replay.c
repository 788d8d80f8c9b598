/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_replay.c - which logs a mount accepts: damage of every kind in one copy or both.
 *
 * The rule: replay gives exactly the state of some whole number of groups, in order. It gives all groups unless only
 * the last frame was damaged; or it refuses.
 */
#include "tests/unit/tiering/journal/kv.h"

#include <limits.h>
#include <sys/resource.h>

#include "tiering/base/hash.h"
#include "tiering/journal/journal_priv.h"

#define STEPS 12u

static struct kv_map history[STEPS + 1]; /* after each group */
static uint64_t frame_pos[STEPS + 2];    /* where its frame lies; one more: the end */
static uint64_t last_lsn;

static uint64_t used(void)
{
    struct ht_journal_stats st;

    ht_journal_stats(kv.j, &st);
    return st.used_bytes;
}

/* A log of small and large frames, crashed: in place of the one that there may be. */
static void make_log(bool two_devices)
{
    struct ht_dev *dev = kv_new_dev();

    kv_end();
    kv_format(&kv, dev, two_devices ? kv_new_dev() : dev);
    ck_assert_int_eq(kv_mount(&kv), 0);
    for (unsigned i = 1; i <= STEPS; i++) {
        uint32_t keys[3] = {i % 7, 10 + i % 5, 20 + i};
        frame_pos[i] = used();
        ck_assert_int_eq(kv_set(&kv, keys, 3, i, i % 4 == 0 ? 5000 : i % 100, &last_lsn), 0);
        ck_assert_int_eq(ht_journal_sync(kv.j, last_lsn), 0);
        history[i] = kv.map;
    }
    frame_pos[STEPS + 1] = used();
    kv_crash(&kv);
}

static void make_usual_log(void)
{
    make_log(true);
}

/* How many groups the state holds; the state must be one of history. */
static unsigned groups_in(const struct kv_map *map)
{
    for (unsigned i = 0; i <= STEPS; i++)
        if (memcmp(map, &history[i], sizeof(*map)) == 0)
            return i;
    ck_abort_msg("a state that never was");
}

static uint8_t saved[2][KV_DEVICE_BYTES];

/*
 * The next byte to flip: every byte of header and payload of small frames, samples of the rest; every byte in the long
 * run.
 */
static uint64_t next_flip(uint64_t pos)
{
    unsigned i = 0;

    if (getenv("HITRAIN_LONG"))
        return pos + 1;
    while (i < STEPS && frame_pos[i + 1] <= pos)
        i++;
    return pos - frame_pos[i] < 200 ? pos + 1 : pos + 197;
}

TEST(every_flipped_byte_in_one_copy_is_repaired_from_the_other)
{
    uint64_t end = frame_pos[STEPS + 1];

    for (uint64_t pos = 0; pos < end; pos = next_flip(pos)) {
        unsigned bad = (unsigned)pos % 2;
        *kv_bytes(&kv, bad, pos) ^= (uint8_t)(1u << (pos % 8));
        ck_assert_int_eq(kv_open(&kv, false, 0), 0);
        if (memcmp(&kv.map, &history[STEPS], sizeof(kv.map)) != 0 || kv.report.chosen == bad)
            ck_abort_msg("flip at %llu", (unsigned long long)pos);
        if (kv.report.copy[bad].state != HT_LOG_DAMAGED && !kv.report.copy[bad].stale)
            ck_abort_msg("flip at %llu was not noticed", (unsigned long long)pos);
        kv_crash(&kv);
        *kv_bytes(&kv, bad, pos) ^= (uint8_t)(1u << (pos % 8));
    }
}

TEST(every_flipped_byte_in_both_copies_is_refused_or_costs_the_last_frame_only)
{
    uint64_t end = frame_pos[STEPS + 1];

    for (uint64_t pos = 0; pos < end; pos = next_flip(pos + 2)) {
        for (unsigned c = 0; c < 2; c++)
            *kv_bytes(&kv, c, pos) ^= 0x10;
        int rc = kv_open(&kv, false, 0);
        bool in_last = pos >= frame_pos[STEPS];
        if (rc != -EUCLEAN && (!in_last || rc || groups_in(&kv.map) != STEPS - 1))
            ck_abort_msg("flip at %llu: %d", (unsigned long long)pos, rc);
        kv_crash(&kv);
        for (unsigned c = 0; c < 2; c++)
            *kv_bytes(&kv, c, pos) ^= 0x10;
    }
}

/* After a clean unmount not even the last frame can be lost unseen. */
TEST(a_clean_superblock_notices_the_loss_of_the_last_frame)
{
    ck_assert_int_eq(kv_mount(&kv), 0);
    uint64_t last = used() - HT_BLOCK_BYTES;
    kv_unmount(&kv);
    *kv_bytes(&kv, 0, last) ^= 1;
    ck_assert_int_eq(kv_open(&kv, false, 0), 0);
    ck_assert_int_eq(kv.report.copy[0].state, HT_LOG_DAMAGED);
    ck_assert_uint_eq(kv.report.copy[0].end_pos, last);
    kv_crash(&kv);
    *kv_bytes(&kv, 1, last) ^= 1;
    ck_assert_int_eq(kv_open(&kv, false, 0), -EUCLEAN);
    ck_assert_uint_eq(kv.report.copy[0].last_seq, last_lsn);
    ck_assert_int_eq(kv_open(&kv, true, 0), 0);
    ck_assert_uint_eq(groups_in(&kv.map), STEPS);
    ck_assert_int_eq(ht_journal_start(kv.j, kv.epoch + 1), -EROFS); /* forced is for looking only */
    kv_crash(&kv);
}

/* The last frame is there with any subset of its blocks, in each copy another one. */
TEST(torn_tails_end_the_chain_before_them)
{
    uint64_t pos = frame_pos[STEPS], blocks = (frame_pos[STEPS + 1] - pos) / HT_BLOCK_BYTES;

    ck_assert_uint_ge(blocks, 3);
    kv_save_images(&kv, saved);

    for (unsigned mask0 = 0; mask0 < 1u << blocks; mask0++)
        for (unsigned mask1 = 0; mask1 < 1u << blocks; mask1++) {
            unsigned all = (1u << blocks) - 1;
            for (unsigned b = 0; b < blocks; b++) {
                if (!(mask0 & 1u << b))
                    memset(kv_bytes(&kv, 0, pos + b * 4096), 0, 4096);
                if (!(mask1 & 1u << b))
                    memset(kv_bytes(&kv, 1, pos + b * 4096), 0x55, 4096);
            }
            ck_assert_int_eq(kv_mount(&kv), 0);
            ck_assert_uint_eq(groups_in(&kv.map), mask0 == all || mask1 == all ? STEPS : STEPS - 1);
            /* and it goes on from there */
            ck_assert_int_eq(kv_set_one(&kv, 400, 77, 10), 0);
            struct kv_map want = kv.map;
            kv_crash(&kv);
            ck_assert_int_eq(kv_open(&kv, false, mask0 % 3), 0);
            ck_assert_mem_eq(&want, &kv.map, sizeof(want));
            kv_crash(&kv);
            kv_restore_images(&kv, saved);
        }
}

TEST(torn_at_512_bytes_too)
{
    make_log(false);
    uint64_t pos = frame_pos[STEPS], bytes = frame_pos[STEPS + 1] - pos;
    kv_save_images(&kv, saved);

    for (uint64_t at = 0; at < bytes; at += 512) {
        memset(kv_bytes(&kv, 0, pos + at), 0, bytes - at);
        memset(kv_bytes(&kv, 1, pos), 0, at + 512);
        ck_assert_int_eq(kv_mount(&kv), 0);
        /* bytes that are zero anyway may be lost */
        ck_assert_uint_ge(groups_in(&kv.map), STEPS - 1);
        kv_crash(&kv);
        kv_restore_images(&kv, saved);
    }
}

TEST(a_stale_copy_is_refilled)
{
    kv_save_images(&kv, saved);

    /* a few more mounts with something in them */
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(kv_mount(&kv), 0);
        ck_assert_int_eq(kv_set_one(&kv, 300 + i, 5, 100), 0);
        kv_crash(&kv);
    }
    struct kv_map want = kv.map;
    memcpy(ht_dev_ram_data(kv.dev[1]), saved[1], KV_DEVICE_BYTES);
    ck_assert_int_eq(kv_open(&kv, false, 0), 0);
    ck_assert_uint_eq(kv_scrub(&kv), 0); /* brought up or not, it is no damage */
    kv_crash(&kv);
    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert(kv.report.copy[1].stale);
    ck_assert_int_eq(kv.report.copy[1].state, HT_LOG_ENDED);
    ck_assert_mem_eq(&want, &kv.map, sizeof(want));
    ck_assert_uint_eq(kv_scrub(&kv), 0);
    *kv_bytes(&kv, 1, 100) ^= 1;
    ck_assert_uint_eq(kv_scrub(&kv), 1);
    kv_crash(&kv);
    ck_assert_int_eq(kv_open(&kv, false, 1), 0);
    ck_assert_mem_eq(&want, &kv.map, sizeof(want));
    kv_crash(&kv);
}

/* One copy is stale. The other is damaged where only it knew how far the log was durable: the mount must refuse. */
TEST(a_stale_copy_is_not_believed_when_the_other_is_damaged)
{
    kv_save_images(&kv, saved);

    ck_assert_int_eq(kv_mount(&kv), 0);
    for (unsigned i = 0; i < 5; i++)
        ck_assert_int_eq(kv_set_one(&kv, 300 + i, 5, 100), 0);
    kv_crash(&kv);
    memcpy(ht_dev_ram_data(kv.dev[1]), saved[1], KV_DEVICE_BYTES);
    *kv_bytes(&kv, 0, frame_pos[STEPS + 1] + 2 * 4096 + 100) ^= 1;
    ck_assert_int_eq(kv_open(&kv, false, 0), -EUCLEAN);
    ck_assert_int_eq(kv.report.copy[0].state, HT_LOG_DAMAGED);
    ck_assert_int_eq(kv.report.copy[1].state, HT_LOG_DAMAGED);
}

/*
 * One copy only in a mount: the other copy got unacknowledged frames alone before, and these lose against the newer
 * epoch.
 */
TEST(a_member_with_an_older_epoch_is_refilled_never_believed)
{
    kv_save_images(&kv, saved);

    /* copy 1 lacks the last frame, which was in flight; it is mounted alone */
    memset(kv_bytes(&kv, 1, frame_pos[STEPS]), 0, frame_pos[STEPS + 1] - frame_pos[STEPS]);
    ck_assert_int_eq(kv_open(&kv, false, 1), 0);
    ck_assert_uint_eq(groups_in(&kv.map), STEPS - 1);
    ck_assert_int_eq(kv_start(&kv), 0);
    ck_assert_int_eq(kv_set_one(&kv, 333, 9, 100), 0);
    struct kv_map want = kv.map;
    kv_crash(&kv);
    ck_assert_int_eq(kv_mount(&kv), 0);
    ck_assert_uint_eq(kv.report.chosen, 1);
    ck_assert(kv.report.copy[0].stale);
    ck_assert_mem_eq(&want, &kv.map, sizeof(want));
    kv_crash(&kv);
    kv_restore_images(&kv, saved);
}

/* By force: the stale copy holds more than the rest of the newer one, until the damage comes later than its end. */
TEST(a_copy_left_behind_helps_out_by_force)
{
    memset(kv_bytes(&kv, 1, frame_pos[8]), 0, frame_pos[STEPS + 1] - frame_pos[8]);
    kv.behind[1] = true;
    ck_assert_int_eq(kv_open(&kv, true, 0), 0);
    ck_assert_uint_eq(groups_in(&kv.map), STEPS);
    kv_crash(&kv);
    for (unsigned damaged = 2; damaged < STEPS; damaged++) {
        *kv_bytes(&kv, 0, frame_pos[damaged] + 90) ^= 1;
        ck_assert_int_eq(kv_open(&kv, false, 0), -EUCLEAN);
        ck_assert_int_eq(kv_open(&kv, true, 0), 0);
        ck_assert_uint_eq(kv.report.chosen, damaged < 8 ? 1 : 0);
        ck_assert_uint_eq(groups_in(&kv.map), ht_max_u64(damaged, 8) - 1);
        kv_crash(&kv);
        *kv_bytes(&kv, 0, frame_pos[damaged] + 90) ^= 1;
    }
}

/* A group that one mount did not see must not come back in the next: its blocks may have been used again. */
TEST(what_was_not_believed_once_stays_gone)
{
    /* the frame in flight reached copy 0 only, and copy 0 is damaged before it */
    memset(kv_bytes(&kv, 1, frame_pos[STEPS]), 0, frame_pos[STEPS + 1] - frame_pos[STEPS]);
    *kv_bytes(&kv, 0, frame_pos[4] + 100) ^= 1;
    kv.before_write_error = -EIO; /* refilled, but no frame is written */
    ck_assert_int_eq(kv_mount(&kv), -EIO);
    ck_assert_uint_eq(groups_in(&kv.map), STEPS - 1);
    kv.before_write_error = 0;
    for (unsigned missing = 0; missing < 3; missing++) {
        ck_assert_int_eq(kv_open(&kv, false, missing), 0);
        ck_assert_uint_eq(groups_in(&kv.map), STEPS - 1);
        kv_crash(&kv);
    }
}

TEST(members_mounted_apart_are_refused)
{
    ck_assert_int_eq(kv_open(&kv, false, 1), 0);
    ck_assert_int_eq(kv_start(&kv), 0);
    ck_assert_int_eq(kv_set_one(&kv, 333, 9, 100), 0);
    kv_crash(&kv);
    ck_assert_int_eq(kv_open(&kv, false, 2), 0);
    ck_assert_uint_eq(kv.map.e[333].stamp, 0);
    ck_assert_int_eq(kv_start(&kv), 0);
    ck_assert_int_eq(kv_set_one(&kv, 334, 9, 100), 0);
    kv_crash(&kv);
    ck_assert_int_eq(kv_open(&kv, false, 0), -EUCLEAN);
    ck_assert_int_eq(kv_open(&kv, true, 0), 0);
    ck_assert_int_eq(ht_journal_start(kv.j, kv.epoch + 1), -EROFS);
    kv_crash(&kv);
}

TEST(an_unreadable_copy_is_damaged_and_the_other_used)
{
    dev_fail(kv.dev[1], HT_IO_READ, 1, true);
    ck_assert_int_eq(kv_open(&kv, false, 0), 0);
    ck_assert_uint_eq(groups_in(&kv.map), STEPS);
    ck_assert_int_eq(kv.report.copy[1].state, HT_LOG_DAMAGED);
    ck_assert_int_eq(kv.report.copy[1].error, -EIO);
    kv_crash(&kv);
    dev_fail(kv.dev[0], HT_IO_READ, 1, true);
    ck_assert_int_eq(kv_open(&kv, false, 0), -EIO);
}

TEST_LOOP(no_read_error_gives_a_wrong_state, 2)
{
    make_log(_i);
    for (unsigned nth = 1; nth < 30; nth++) {
        struct ht_dev *was[2] = {kv.dev[0], kv.dev[1]};
        kv.dev[0] = kv.super = kv_clone_dev(was[0]);
        kv.dev[1] = was[0] == was[1] ? kv.dev[0] : kv_clone_dev(was[1]);
        dev_fail(kv.dev[0], HT_IO_READ, nth, nth % 2);
        int rc = kv_open(&kv, false, 0);
        if (rc == 0)
            ck_assert_uint_eq(groups_in(&kv.map), STEPS);
        else
            ck_assert_int_eq(rc, -EIO);
        kv_crash(&kv);
        kv_free_devs(&kv);
        kv.dev[0] = kv.super = was[0];
        kv.dev[1] = was[1];
    }
}

TEST(no_copy_at_all_is_an_error)
{
    ck_assert_int_eq(kv_open(&kv, false, 3), -EIO);
    ck_assert_int_eq(kv_open(&kv, true, 3), -EIO);
}

static int refuse_third(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    unsigned *n = ctx;

    return ++*n == 3 ? -EBADMSG : 0;
}

TEST(the_clients_refusal_ends_replay)
{
    unsigned n = 0;
    struct ht_journal *j = NULL;
    struct ht_journal_report report;

    kv_super_read(&kv);
    struct ht_journal_config c = {.dev = {kv.dev[0], kv.dev[1]},
                                  .offset = {KV_LOG_OFFSET, KV_LOG_OFFSET},
                                  .log_bytes = KV_LOG_BYTES,
                                  .salt = KV_SALT,
                                  .start = kv.start,
                                  .epoch = kv.epoch,
                                  .ctx = &n,
                                  .replay = refuse_third};
    ck_assert_int_eq(ht_journal_open(&c, false, &report, &j), -EBADMSG);
    ck_assert_uint_eq(n, 3);
    c.log_bytes = 1000;
    ck_assert_int_eq(ht_journal_open(&c, false, &report, &j), -EINVAL);
}

/* -------------------------------------------- frames made by hand: right checksum, wrong content */

struct forged {
    struct ht_frame f;
    uint8_t payload[64];
    size_t len;
};

static struct forged next_frame(void)
{
    struct forged x;
    const uint8_t *last = kv_bytes(&kv, 0, frame_pos[STEPS]);
    struct ht_frame before;

    memset(&x, 0, sizeof(x));
    ck_assert(ht_frame_decode_header(last, &before));
    x.f = before;
    x.f.seq++;
    x.f.pos = frame_pos[STEPS + 1];
    x.f.prev = before.checksum;
    x.f.durable_seq = before.seq;
    struct ht_buf b = HT_BUF_INIT;
    kv_put_set(&b, 500, 1, 4);
    memcpy(x.payload, b.data, b.len);
    x.len = b.len;
    ht_buf_free(&b);
    return x;
}

/* encode() asserts; so the forger does not use it. */
static void forge(struct forged *x, uint64_t claimed_len)
{
    _Alignas(4096) uint8_t mem[4096];
    struct ht_frame empty = x->f;

    empty.payload_len = 0;
    ht_frame_encode(mem, &empty);
    memcpy(mem + HT_FRAME_HEADER_BYTES, x->payload, x->len);
    ht_le64_store(mem + offsetof(struct ht_disk_frame, payload_len), claimed_len);
    uint64_t hashed = claimed_len < 4000 ? 64 + claimed_len : 64;
    ht_le64_store(mem + offsetof(struct ht_disk_frame, checksum), ht_hash64(mem + 16, hashed, 0));
    for (unsigned c = 0; c < 2; c++)
        memcpy(kv_bytes(&kv, c, x->f.pos), mem, sizeof(mem));
}

TEST(malformed_frames_are_never_handed_out)
{
    struct forged good = next_frame(), x = good;

    forge(&x, x.len);
    ck_assert_int_eq(kv_open(&kv, false, 0), 0);
    ck_assert_uint_eq(kv.map.e[500].stamp, 1); /* the forger is able */
    kv_crash(&kv);

    struct {
        const char *what;
        struct forged x;
        uint64_t len;
        int rc;
    } cases[] = {
        {"records that do not tile", good, good.len - 1, -EUCLEAN},
        {"a record longer than the frame", good, good.len, -EUCLEAN},
        {"a payload longer than the region", good, KV_LOG_BYTES, 0},
        {"a payload that wraps the integers", good, UINT64_MAX - 50, 0},
        {"another store's salt", good, good.len, 0},
        {"a place that is not its own", good, good.len, 0},
        {"a gap in the numbers", good, good.len, -EUCLEAN},
        {"an older epoch", good, good.len, 0},
        {"an epoch nobody began", good, good.len, -EUCLEAN},
        {"a predecessor that is not there", good, good.len, -EUCLEAN},
        {"durable before it is written", good, good.len, -EUCLEAN},
    };
    ht_le32_store(cases[1].x.payload + 4, 1 << 16);
    cases[4].x.f.salt++;
    cases[6].x.f.seq++;
    cases[7].x.f.epoch--;
    cases[8].x.f.epoch++;
    cases[9].x.f.prev++;
    cases[10].x.f.durable_seq = cases[10].x.f.seq;
    for (size_t i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        struct forged y = cases[i].x;
        forge(&y, cases[i].len);
        if (i == 5) { /* moved as a whole */
            for (unsigned c = 0; c < 2; c++) {
                memcpy(kv_bytes(&kv, c, y.f.pos + 4096), kv_bytes(&kv, c, y.f.pos), 4096);
                memset(kv_bytes(&kv, c, y.f.pos), 0, 4096);
            }
        }
        int rc = kv_open(&kv, false, 0);
        ck_assert_msg(rc == cases[i].rc, "%s: %d", cases[i].what, rc);
        ck_assert_msg(rc || groups_in(&kv.map) == STEPS, "%s", cases[i].what);
        kv_crash(&kv);
    }
}

/* A region full of headers that claim to be later frames: bounded work, and damage. */
TEST(a_hostile_region_takes_no_longer)
{
    struct forged x = next_frame();

    x.f.seq += 5;
    for (uint64_t pos = frame_pos[STEPS + 1]; pos < KV_LOG_BYTES; pos += 4096) {
        x.f.pos = pos;
        forge(&x, KV_LOG_BYTES - pos - HT_FRAME_HEADER_BYTES);
    }
    struct ht_dev_counters before, after;
    ht_dev_counters(kv.dev[0], &before);
    ck_assert_int_eq(kv_open(&kv, false, 0), -EUCLEAN);
    ht_dev_counters(kv.dev[0], &after);
    ck_assert_uint_le(after.read_bytes - before.read_bytes, 6 * KV_LOG_BYTES);
}

/* A member that did not take the superblock of the last mount, and its log has the frames of that mount. */
TEST(a_clean_superblock_of_before_is_not_believed_when_a_newer_mount_has_written)
{
    uint8_t before[4096];

    ck_assert_int_eq(kv_mount(&kv), 0);
    kv_unmount(&kv);
    ck_assert_int_eq(kv_open(&kv, false, 0), 0);
    kv_crash(&kv);
    memcpy(before, ht_dev_ram_data(kv.super), sizeof(before));
    ck_assert_int_eq(kv_mount(&kv), 0);
    kv_crash(&kv);
    memcpy(ht_dev_ram_data(kv.super), before, sizeof(before));
    ck_assert_int_eq(kv_open(&kv, false, 0), -EUCLEAN);
    ck_assert_int_eq(kv.report.copy[0].state, HT_LOG_DAMAGED);
    kv_crash(&kv);
}

static long peak_kib(void)
{
    struct rusage usage;

    ck_assert_int_eq(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_maxrss;
}

/* A header, and a record for each of so many MiB of the length that it claims. */
static void reserve_much(struct ht_dev *dev, uint64_t seq, uint64_t payload_len, unsigned mib)
{
    static const uint8_t record[HT_RECORD_HEADER_BYTES] = {KV_SET, 0,    0,    0,
                                                           0xf8,   0xff, 0x01, 0}; /* 128 KiB with its header */
    uint8_t *log = (uint8_t *)ht_dev_ram_data(dev) + KV_LOG_OFFSET;
    _Alignas(4096) uint8_t mem[4096];
    struct ht_frame f = {.salt = KV_SALT, .epoch = 1, .seq = seq, .durable_seq = seq - 1};

    ht_frame_encode(mem, &f);
    ht_le64_store(mem + offsetof(struct ht_disk_frame, payload_len), payload_len);
    memcpy(log, mem, HT_FRAME_HEADER_BYTES);
    for (uint64_t at = 0; at < mib * HT_MIB; at += 128 << 10)
        memcpy(log + HT_FRAME_HEADER_BYTES + at, record, sizeof(record));
}

/* In the place of the first frame, and of a later one; the bytes after the last frame are no records. */
TEST(memory_follows_what_is_written_not_what_a_header_claims)
{
    enum { LOG_BYTES = 1 << 30, LITTLE_KIB = 24 << 10 };
    static const struct {
        uint64_t seq;
        unsigned mib, allowed_mib;
    } cases[] = {{1, 0, 8}, {3, 0, 8}, {1, 8, 40}, {3, 8, 40}};
    struct ht_journal_report report;
    struct ht_journal *j;
    struct ht_dev *dev;

    ck_assert_int_eq(dev_open_ram(KV_LOG_OFFSET + LOG_BYTES, 4096, &dev), 0);
    struct ht_journal_config c = {.dev = {dev},
                                  .offset = {KV_LOG_OFFSET},
                                  .log_bytes = LOG_BYTES,
                                  .salt = KV_SALT,
                                  .start = {.seq = 1},
                                  .epoch = 1};
    for (unsigned i = 0; i < HT_ARRAY_SIZE(cases); i++) {
        reserve_much(dev, cases[i].seq, LOG_BYTES - HT_FRAME_HEADER_BYTES, cases[i].mib);
        long before = peak_kib();
        ck_assert_int_eq(ht_journal_open(&c, false, &report, &j), 0);
        ck_assert_uint_eq(report.frames, 0);
        ht_journal_abandon(j);
        ck_assert_int_le(peak_kib() - before, cases[i].allowed_mib * 1024 + LITTLE_KIB);
    }
    ht_dev_close(dev);
}

/* A sparse file of a large log has a later frame far after the end: the mount finds it and does not read the holes. */
TEST_LOOP(holes_of_a_file_are_not_read, 2)
{
    enum { LOG_BYTES = 1 << 30, FAR = 700 << 20, READ_MAX = 64 << 20 };
    _Alignas(4096) uint8_t mem[4096];
    const char *folder = getenv("HITRAIN_BUILD");
    char path[PATH_MAX];
    struct ht_journal_report report;
    struct ht_dev_counters n;
    struct ht_journal *j;
    struct ht_dev *dev;

    snprintf(path, sizeof(path), "%s/replay-XXXXXX", folder ? folder : "/tmp");
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(ftruncate(fd, KV_LOG_OFFSET + LOG_BYTES), 0);
    if (_i) {
        struct ht_frame f = {.salt = KV_SALT, .epoch = 1, .seq = 3, .durable_seq = 2, .pos = FAR};
        ht_frame_encode(mem, &f);
        ck_assert_int_eq(pwrite(fd, mem, sizeof(mem), KV_LOG_OFFSET + FAR), sizeof(mem));
    }
    ck_assert_int_eq(ht_dev_open(path, 0, &dev), 0);
    ck_assert_int_eq(unlink(path), 0);
    struct ht_journal_config c = {.dev = {dev},
                                  .offset = {KV_LOG_OFFSET},
                                  .log_bytes = LOG_BYTES,
                                  .salt = KV_SALT,
                                  .start = {.seq = 1},
                                  .epoch = 1};
    ck_assert_int_eq(ht_journal_open(&c, false, &report, &j), _i ? -EUCLEAN : 0);
    ck_assert_int_eq(report.copy[0].state, _i ? HT_LOG_DAMAGED : HT_LOG_ENDED);
    ht_dev_counters(dev, &n);
    if (lseek(fd, KV_LOG_OFFSET, SEEK_DATA) != KV_LOG_OFFSET) /* else this file system does not report holes */
        ck_assert_uint_le(n.read_bytes, READ_MAX);
    if (!_i)
        ht_journal_abandon(j);
    ht_dev_close(dev);
    close(fd);
}

/* Both copies are damaged: they are made whole in memory, which an empty region takes little of. */
TEST(a_large_empty_log_is_cross_repaired_aside_in_little_memory)
{
    enum { LOG_BYTES = 512 << 20, ALLOWED_KIB = 64 << 10 };
    struct ht_dev *dev, *aside[HT_LOG_COPIES] = {NULL, NULL};
    unsigned frames;

    ck_assert_int_eq(dev_open_ram(KV_LOG_OFFSET + 2 * (uint64_t)LOG_BYTES, 4096, &dev), 0);
    struct ht_journal_config c = {.dev = {dev, dev},
                                  .offset = {KV_LOG_OFFSET, KV_LOG_OFFSET + LOG_BYTES},
                                  .log_bytes = LOG_BYTES,
                                  .salt = KV_SALT,
                                  .start = {.seq = 1},
                                  .epoch = 1};
    reserve_much(dev, 1, 4096, 0);
    long before = peak_kib();
    ck_assert_int_eq(ht_journal_cross_repair_aside(&c, &frames, aside), 0);
    ck_assert_int_le(peak_kib() - before, ALLOWED_KIB);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        ht_dev_close(aside[i]);
    ht_dev_close(dev);
}

RUN_TESTS("replay", .setup = make_usual_log, .teardown = kv_end, .timeout_s = getenv("HITRAIN_LONG") ? 3000 : 300,
          .quiet = ERRORS_ONLY)
