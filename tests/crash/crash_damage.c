/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_damage.c - damaged stores: every byte of the metadata changed, one at a time and in both copies, random damage,
 * zeroed ranges, truncated devices, members of other stores.
 *
 * Damage to one copy loses nothing: the store mounts and shows exactly its content, fsck names the damage, and the next
 * mount has repaired it. After other damage the mount is refused, or each read returns bytes that were once written
 * there, or an error. Never wrong bytes, a crash, a hang, or memory without bound.
 *
 * Superblock and log alone read every damaged byte. The whole daemon reads every STRIDE-th, and hitrain-fsck -y repairs
 * half as many first. HITRAIN_LONG=1: every byte, with three patterns. HITRAIN_SEED=N seeds the random damage.
 */
#include <sys/resource.h>

#include "mount-helpers/fsck/fsck.h"
#include "tests/support/memory.h"
#include "tests/support/sample.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/base/hash.h"
#include "tiering/sys/mem.h"

enum {
    STRIDE = 151,  /* of all bytes: no divisor of anything, so that every field is met in some frame */
    BEHIND = 8192, /* bytes after the end of the log that are changed, too */
    RANDOM = 300,  /* states of random damage */
    AREAS = HT_SUPER_COPIES + HT_LOG_COPIES,
    RSS_KIB_MAX = 400 << 10,
};

static struct harness k;
static uint8_t *base; /* the undamaged device */
static struct sample_items all, last;
static struct ht_super sb;
static uint64_t end_pos, records_hash;
static bool clean; /* unmounted; else the log is open at its end, as after a crash */

struct area {
    uint64_t offset, bytes;
    uint64_t used;  /* damage in front of this offset is found */
    uint64_t doubt; /* damage between the two may be found: a write that was cut off looks alike */
};
static struct area area[AREAS];

/* ---------------------------------------------------------------- the store */

static void remember(void *ctx)
{
    (void)ctx;
    sample_free(&last);
    sample_read(&k, &last);
    ck_assert(last.errors == 0);
    sample_read(&k, &all);
}

static int mix_record(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    uint64_t *hash = ctx;

    *hash = ht_hash64(payload, len, *hash + type);
    return 0;
}

/* Returns the log's content as one number, from superblock and log alone. */
static int read_log(uint64_t *out_hash)
{
    struct ht_super_report report;
    struct ht_journal_report log;
    struct ht_journal *j;
    struct ht_super s;
    int rc = ht_super_read(k.dev[0], &s, &report);

    if (rc)
        return rc;
    struct ht_journal_config c = {
        .dev = {k.dev[0], k.dev[0]},
        .offset = {s.log_offset[0], s.log_offset[1]},
        .log_bytes = s.log_bytes,
        .salt = s.salt,
        .start = {.pos = s.start_pos, .seq = s.start_seq, .chain = s.start_chain},
        .epoch = s.epoch,
        .durable_seq = s.durable_seq,
        .ctx = out_hash,
        .replay = mix_record,
    };
    *out_hash = 0;
    rc = ht_journal_open(&c, false, &log, &j);
    if (rc)
        return rc;
    end_pos = log.copy[log.chosen].end_pos;
    ht_journal_abandon(j);
    return 0;
}

/* The last frame of a log that was not ended by an unmount may as well never have been written. */
static void note_areas(void)
{
    for (unsigned i = 0; i < HT_SUPER_COPIES; i++)
        area[i] = (struct area){ht_super_offset(SAMPLE_DEVICE_BYTES, i), HT_BLOCK_BYTES, HT_BLOCK_BYTES, 0};
    for (unsigned i = 0; i < HT_LOG_COPIES; i++) {
        uint64_t used = end_pos - sb.start_pos;
        area[HT_SUPER_COPIES + i] = (struct area){sb.log_offset[i] + sb.start_pos % sb.log_bytes, used + BEHIND,
                                                  clean ? used : used - HT_BLOCK_BYTES, used};
        ck_assert(sb.start_pos % sb.log_bytes + used + BEHIND <= sb.log_bytes); /* does not wrap around */
    }
}

static void make_store(bool unmounted)
{
    struct ht_super_report report;

    clean = unmounted;
    ht_log_set_level(HT_LOG_ERROR - 1); /* thousands of damaged stores would have much to say */
    memory_keep(true);
    sample_format(&k);
    ck_assert(harness_open(&k, 1) == 0);
    sample_populate(&k, remember, NULL);
    ck_assert(harness_close(&k, clean) == 0);
    ck_assert(ht_super_read(k.dev[0], &sb, &report) == 0 && read_log(&records_hash) == 0);
    note_areas();
    sample_sort(&all);
    sample_sort(&last);
    base = malloc(SAMPLE_DEVICE_BYTES);
    ck_assert(base);
    memcpy(base, ht_dev_ram_data(k.dev[0]), SAMPLE_DEVICE_BYTES);
}

static void drop_store(void)
{
    struct rusage usage;

    ck_assert_int_eq(getrusage(RUSAGE_SELF, &usage), 0);
#ifndef __SANITIZE_ADDRESS__
    ck_assert_int_le(usage.ru_maxrss, RSS_KIB_MAX);
#endif
    harness_free(&k);
    memory_keep(false);
    sample_free(&all);
    sample_free(&last);
    free(base);
}

static uint8_t *bytes_of_device(void)
{
    return ht_dev_ram_data(k.dev[0]);
}

static void restore_block(uint64_t block)
{
    memcpy(bytes_of_device() + block * HT_BLOCK_BYTES, base + block * HT_BLOCK_BYTES, HT_BLOCK_BYTES);
}

/* Restores the blocks that the store has written since. The caller undoes its own damage. */
static void restore(void)
{
    uint8_t *touched = dev_touched(k.dev[0]);

    for (uint64_t block = 0; block < SAMPLE_DEVICE_BYTES / HT_BLOCK_BYTES; block++)
        if (touched[block])
            restore_block(block);
    memset(touched, 0, SAMPLE_DEVICE_BYTES / HT_BLOCK_BYTES);
}

/* ------------------------------------------------------------------ verdict */

static bool same_items(struct sample_items *now)
{
    sample_sort(now);
    return now->errors == 0 && now->count == last.count &&
        memcmp(now->item, last.item, last.count * sizeof(*last.item)) == 0;
}

static bool all_known(const struct sample_items *now)
{
    for (size_t i = 0; i < now->count; i++)
        if (!sample_has(&all, now->item[i]))
            return false;
    return true;
}

/* It goes on working, and the next fsck is silent. */
static const char *go_on(void)
{
    int rc;

    harness_put(&k, HT_NS_ROOT_INO, "later", "later", 5);
    if (ht_store_commit(k.store))
        return "it cannot commit";
    if (harness_close(&k, true))
        return "it does not unmount";
    return harness_problems(&k, &rc) || rc ? "the next mount has not repaired it" : NULL;
}

/* One copy of something is damaged. */
static const char *verify_harmless(bool found, bool doubt)
{
    struct sample_items now = {0};
    const char *wrong = NULL;
    int rc;
    uint64_t problems = harness_problems(&k, &rc);

    if (rc || (!doubt && (problems != 0) != found))
        return found ? "fsck does not name it" : "fsck names what is none";
    if (harness_open(&k, 1)) {
        wrong = "it does not mount";
    } else {
        sample_read(&k, &now);
        wrong = same_items(&now) ? go_on() : "something is lost or different";
    }
    (void)harness_close(&k, false);
    sample_free(&now);
    return wrong;
}

/* hitrain-fsck -y makes it as if nothing had been. */
static const char *verify_undone(bool found, bool doubt)
{
    int status = harness_repair(&k);

    if (doubt ? (status & ~HT_FSCK_CORRECTED) != 0 : status != (found ? HT_FSCK_CORRECTED : HT_FSCK_CLEAN))
        return "fsck -y ends otherwise than it should";
    return verify_harmless(false, false);
}

/* A repaired store is clean, and mounts. test_repair checks its content. */
static const char *verify_repair(void)
{
    int status = harness_repair(&k), rc;

    if (status & ~HT_FSCK_CORRECTED)
        return NULL; /* it says so */
    if (harness_problems(&k, &rc) || rc)
        return "fsck finds problems after its repair";
    rc = harness_open(&k, 1);
    (void)harness_close(&k, false);
    return rc ? "what was repaired does not mount" : NULL;
}

/* Any damage. An error from anything is as good as an old content. */
static const char *verify_any(bool *out_mounted)
{
    struct sample_items now = {0};
    const char *wrong = NULL;
    int rc;

    uint64_t problems = harness_problems(&k, &rc);
    *out_mounted = harness_open(&k, 1) == 0;
    if (problems == 0 && rc == 0 && !*out_mounted)
        wrong = "fsck finds nothing, and it does not mount";
    if (*out_mounted) {
        sample_read(&k, &now);
        if (!all_known(&now))
            wrong = "something is read that nobody wrote there";
    }
    (void)harness_close(&k, false);
    sample_free(&now);
    return wrong;
}

/* -------------------------------------------------------------------- flips */

static uint8_t changed(uint8_t byte, unsigned pattern)
{
    static const uint8_t flip[] = {0xff, 0x01};

    return pattern < HT_ARRAY_SIZE(flip) ? byte ^ flip[pattern] : (uint8_t)(byte ? 0 : 0x80);
}

static void show(const char *wrong, uint64_t offset, unsigned pattern)
{
    if (wrong)
        printf("byte %llu, pattern %u: %s\n", (unsigned long long)offset, pattern, wrong);
}

/* By superblocks and log alone. */
static unsigned flip_lightly(uint64_t offset, unsigned pattern)
{
    uint8_t *byte = bytes_of_device() + offset;
    uint64_t hash = 0;

    *byte = changed(*byte, pattern);
    int rc = read_log(&hash);
    *byte = base[offset];
    show(rc || hash != records_hash ? "the log is not what it was" : NULL, offset, pattern);
    return rc || hash != records_hash;
}

static unsigned flip_wholly(const struct area *a, uint64_t at, unsigned pattern,
                            const char *(*verify)(bool found, bool doubt))
{
    uint8_t *byte = bytes_of_device() + a->offset + at;

    *byte = changed(*byte, pattern);
    const char *wrong = verify(at < a->used, at >= a->used && at < a->doubt);
    show(wrong, a->offset + at, pattern);
    restore();
    restore_block((a->offset + at) / HT_BLOCK_BYTES);
    return wrong != NULL;
}

/* _i, here and below: after an unmount, not after a crash. */
TEST_LOOP(a_changed_byte_of_one_copy_is_named_repaired_and_no_loss, 2)
{
    bool thorough = getenv("HITRAIN_LONG") != NULL;
    unsigned patterns = thorough ? 3 : 1, bad = 0, light = 0, whole = 0;

    make_store(_i);
    for (unsigned i = 0; i < AREAS; i++)
        for (uint64_t at = 0; at < area[i].bytes; at++)
            for (unsigned p = 0; p < patterns; p++) {
                unsigned pattern = (unsigned)(at + p) % 3;
                bool wholly = thorough || at % STRIDE == 0;
                if (wholly)
                    bad += flip_wholly(&area[i], at, pattern, verify_harmless);
                else if (clean)
                    bad += flip_lightly(area[i].offset + at, pattern);
                light += !wholly && clean;
                whole += wholly;
            }
    printf("figures: changed bytes: %u read by superblock and log, %u mounted and checked; %u bad\n", light, whole,
           bad);
    ck_assert_uint_eq(bad, 0);
    drop_store();
}

TEST_LOOP(a_changed_byte_of_one_copy_is_undone_by_a_repair, 2)
{
    unsigned stride = getenv("HITRAIN_LONG") ? 1 : 2 * STRIDE + 1, bad = 0, states = 0;

    make_store(_i);
    for (unsigned i = 0; i < AREAS; i++)
        for (uint64_t at = 0; at < area[i].bytes; at += stride, states++)
            bad += flip_wholly(&area[i], at, (unsigned)at % 3, verify_undone);
    printf("figures: %u changed bytes repaired, mounted and checked; %u bad\n", states, bad);
    ck_assert_uint_eq(bad, 0);
    drop_store();
}

/* The same byte of all superblocks, or of both logs. Every second one is repaired. */
static unsigned flip_together(unsigned first, unsigned count, uint64_t at, unsigned pattern, unsigned *mounted)
{
    bool is_mounted = false;

    for (unsigned i = first; i < first + count; i++) {
        uint8_t *byte = bytes_of_device() + area[i].offset + at;
        *byte = changed(*byte, pattern);
    }
    const char *wrong = at % 2 ? verify_repair() : verify_any(&is_mounted);
    show(wrong, area[first].offset + at, pattern);
    *mounted += is_mounted;
    restore();
    for (unsigned i = first; i < first + count; i++)
        restore_block((area[i].offset + at) / HT_BLOCK_BYTES);
    return wrong != NULL;
}

static void flip_all_copies(void)
{
    unsigned stride = getenv("HITRAIN_LONG") ? 1 : STRIDE, bad = 0, states = 0, mounted = 0;

    for (uint64_t at = 0; at < area[0].bytes; at += stride, states++)
        bad += flip_together(0, HT_SUPER_COPIES, at, (unsigned)at % 3, &mounted);
    ck_assert_uint_eq(mounted, 0);
    for (uint64_t at = 0; at < area[HT_SUPER_COPIES].bytes; at += stride, states++)
        bad += flip_together(HT_SUPER_COPIES, HT_LOG_COPIES, at, (unsigned)at % 3, &mounted);
    printf("figures: %u bytes changed in all copies, %u mounted; %u bad\n", states, mounted, bad);
    ck_assert_uint_eq(bad, 0);
}

TEST_LOOP(a_byte_changed_in_all_copies_gives_an_error_or_what_was_there, 2)
{
    make_store(_i);
    flip_all_copies();
    drop_store();
}

/* ------------------------------------------------------------- other damage */

static void damage_bytes(uint64_t *rnd)
{
    for (uint64_t n = 1 + rnd_below(rnd, 30); n > 0; n--) {
        const struct area *a = &area[rnd_below(rnd, AREAS)];
        bytes_of_device()[a->offset + rnd_below(rnd, a->bytes)] = (uint8_t)rnd_next(rnd);
    }
}

static void zero_range(uint64_t *rnd)
{
    uint64_t unit = rnd_below(rnd, 2) ? 512 : 4096, len = unit << rnd_below(rnd, 11);
    uint64_t at = rnd_below(rnd, (SAMPLE_DEVICE_BYTES - len) / unit) * unit;

    memset(bytes_of_device() + at, 0, len);
}

/* Moves bytes to a place where they do not belong. */
static void misplace(uint64_t *rnd)
{
    uint64_t blocks = SAMPLE_DEVICE_BYTES / 4096, to = rnd_below(rnd, blocks), from = rnd_below(rnd, blocks);

    if (rnd_below(rnd, 2)) { /* from one place of the metadata to another */
        to = area[rnd_below(rnd, AREAS)].offset / 4096 + rnd_below(rnd, 5);
        from = area[rnd_below(rnd, AREAS)].offset / 4096 + rnd_below(rnd, 5);
    }
    memcpy(bytes_of_device() + ht_min_u64(to, blocks - 1) * 4096, base + ht_min_u64(from, blocks - 1) * 4096, 4096);
}

static void damage_anything(uint64_t *rnd)
{
    for (uint64_t n = 1 + rnd_below(rnd, 4000); n > 0; n--)
        bytes_of_device()[rnd_below(rnd, SAMPLE_DEVICE_BYTES)] ^= (uint8_t)(1 + rnd_below(rnd, 255));
}

static void (*const damage[])(uint64_t *rnd) = {damage_bytes, zero_range, misplace, damage_anything};

static void damage_anew(uint64_t rnd)
{
    memcpy(bytes_of_device(), base, SAMPLE_DEVICE_BYTES);
    for (uint64_t times = 1 + rnd_below(&rnd, 3); times > 0; times--)
        damage[rnd_below(&rnd, HT_ARRAY_SIZE(damage))](&rnd);
}

TEST_LOOP(random_damage_gives_an_error_or_what_was_there, 2)
{
    unsigned states = getenv("HITRAIN_LONG") ? 100 * RANDOM : RANDOM, bad = 0, mounted = 0;
    uint64_t seed = setting("HITRAIN_SEED", 7);

    make_store(_i);
    for (unsigned n = 0; n < states; n++) {
        bool is_mounted;
        damage_anew(seed * 1000003 + n);
        const char *wrong = verify_any(&is_mounted);
        if (!wrong && n % 2) {
            damage_anew(seed * 1000003 + n);
            wrong = verify_repair();
        }
        if (wrong)
            printf("seed %llu, state %u: %s\n", (unsigned long long)seed, n, wrong);
        bad += wrong != NULL;
        mounted += is_mounted;
    }
    printf("figures: %u states of random damage, %u mounted; %u bad\n", states, mounted, bad);
    ck_assert_uint_eq(bad, 0);
    ck_assert_uint_gt(mounted, 0);
    ck_assert_uint_lt(mounted, states);
    drop_store();
}

static void resize(uint64_t bytes)
{
    struct ht_dev *other;

    ck_assert_int_eq(dev_open_ram(bytes, 4096, &other), 0);
    memcpy(ht_dev_ram_data(other), base, ht_min_u64(bytes, SAMPLE_DEVICE_BYTES));
    ht_dev_close(k.dev[0]);
    k.dev[0] = other;
}

TEST(a_truncated_device_is_refused_and_a_longer_one_is_not)
{
    bool mounted;
    int rc;

    make_store(true);
    for (uint64_t bytes = 4096; bytes < SAMPLE_DEVICE_BYTES; bytes += 37 * 4096) {
        resize(bytes);
        ck_assert(harness_problems(&k, &rc) || rc);
        ck_assert_ptr_null(verify_any(&mounted));
        ck_assert(!mounted);
    }
    resize(2 * SAMPLE_DEVICE_BYTES);
    ck_assert_ptr_null(verify_any(&mounted));
    ck_assert(mounted);
    drop_store();
}

/* ------------------------------------------------------------------ members */

enum { MEMBERS = 2 };

static void make_members(struct ht_dev *dev[MEMBERS])
{
    struct ht_format_opts opts = {0};
    struct ht_super s;

    for (unsigned i = 0; i < MEMBERS; i++)
        ck_assert_int_eq(dev_open_ram(SAMPLE_DEVICE_BYTES, 4096, &dev[i]), 0);
    ck_assert_int_eq(ht_super_format(dev, MEMBERS, &opts, &s), 0);
}

static int attach(struct ht_dev *a, struct ht_dev *b)
{
    struct ht_store_opts opts = {
        .dram_bytes = 8 << 20, .staging_bytes = 16 << 20, .numa_node = HT_NUMA_OFF, .no_threads = true};
    struct ht_dev *dev[MEMBERS] = {a, b};
    struct ht_store *s = NULL;
    int rc = ht_store_new(dev, b ? 2 : 1, &opts, &s);

    if (!rc)
        rc = ht_store_mount(s);
    if (s)
        ht_store_close(s);
    return rc;
}

TEST(members_of_other_stores_and_the_same_one_twice_are_refused)
{
    struct ht_dev *x[MEMBERS], *y[MEMBERS];

    make_members(x);
    make_members(y);
    ck_assert_int_eq(attach(x[0], x[1]), 0);
    ck_assert_int_eq(attach(x[1], x[0]), 0);
    ck_assert_int_ne(attach(x[0], y[1]), 0);
    ck_assert_int_ne(attach(y[0], x[1]), 0);
    ck_assert_int_ne(attach(x[0], x[0]), 0);
    memcpy(ht_dev_ram_data(x[1]), ht_dev_ram_data(x[0]), SAMPLE_DEVICE_BYTES);
    ck_assert_int_ne(attach(x[0], x[1]), 0);
    for (unsigned i = 0; i < MEMBERS; i++) {
        ht_dev_close(x[i]);
        ht_dev_close(y[i]);
    }
}

/* A member's newest superblock is valid in itself and gives sizes of the others: blocks of that size must exist. */
TEST(a_member_cannot_say_that_another_one_is_larger_than_it_is)
{
    struct ht_dev *x[MEMBERS];
    struct ht_super_report report;
    struct ht_super s;

    make_members(x);
    ck_assert_int_eq(ht_super_read(x[0], &s, &report), 0);
    s.device_bytes[1] = 1ull << 44;
    s.generation += 10;
    ck_assert_uint_eq(ht_super_write(&s, (struct ht_dev *[]){x[0], NULL}, MEMBERS, NULL), 0);
    ck_assert_int_ne(attach(x[0], x[1]), 0);
    for (unsigned i = 0; i < MEMBERS; i++)
        ht_dev_close(x[i]);
}

RUN_TESTS("damaged stores", .timeout_s = getenv("HITRAIN_LONG") ? 7200 : 400)
