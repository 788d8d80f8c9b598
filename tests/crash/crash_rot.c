/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_rot.c - content of a device that no power cut explains: flipped bytes, frames of another past, half a format. A
 * reader gets the written bytes or an error, never anything else; if a second copy has the bytes, it gets them.
 *
 * HITRAIN_SEED=N flips other bytes.
 */
#include <sys/mman.h>

#include "tests/support/crash_scenario.h"
#include "tests/support/memory.h"
#include "tests/support/suite.h"
#include "tiering/base/buf.h"
#include "tiering/sys/mem.h"
#include "tiering/space/alloc.h"
#include "tiering/api/check.h"
#include "tiering/api/stats.h"

/* A store as a scenario left it, to be damaged again and again. */
struct patient {
    struct crash_scenario s;
    struct recording rec, nothing;
    struct state_walk w;
    uint8_t *base, *sound;
    uint64_t rnd;
    unsigned damages, refusals, errors, bad;
};

static const struct scenario_script *script_named(const char *name)
{
    for (unsigned i = 0; i < scenario_script_count; i++)
        if (strcmp(scenario_scripts[i].name, name) == 0)
            return &scenario_scripts[i];
    ck_abort_msg("no scenario is called %s", name);
}

static void admit(struct patient *p, const char *script)
{
    *p = (struct patient){.rnd = setting("HITRAIN_SEED", 1)};
    scenario_play(&p->s, script_named(script), &p->rec, &p->base);
    ck_assert_uint_eq(p->s.k.dev_count, 1);
    p->sound = malloc(SCENARIO_DEVICE_BYTES);
    memcpy(p->sound, ht_dev_ram_data(p->s.k.dev[0]), SCENARIO_DEVICE_BYTES);
    p->nothing.entry = calloc(1, sizeof(struct log_entry));
    walk_begin(&p->w, &p->nothing, p->sound, p->s.k.dev, 1);
}

static void discharge(struct patient *p, const char *what)
{
    printf("figures: rot: %-12s %-32s %5u damages, %4u refused, %4u read errors, %u bad\n", p->s.script->name, what,
           p->damages, p->refusals, p->errors, p->bad);
    unsigned bad = p->bad;
    walk_end(&p->w);
    recording_free(&p->rec);
    recording_free(&p->nothing);
    free(p->base);
    free(p->sound);
    scenario_free(&p->s);
    ck_assert_uint_eq(bad, 0);
}

static void flip(struct patient *p, uint64_t offset)
{
    ((uint8_t *)ht_dev_ram_data(p->s.k.dev[0]))[offset] ^= (uint8_t)(1 + rnd_below(&p->rnd, 255));
    dev_touched(p->s.k.dev[0])[offset / HT_BLOCK_BYTES] = 1;
}

enum outcome { WHOLE = 1, REFUSED = 2, UNREADABLE = 4 };

static enum outcome inspect(struct patient *p, const char **out_wrong)
{
    uint64_t content;
    struct ht_store_stats st = {0};

    if (harness_open(&p->s.k, 1)) {
        harness_close(&p->s.k, false);
        return REFUSED;
    }
    *out_wrong = scenario_compare(&p->s, p->s.ack_count - 1, &p->s.k, &content);
    ht_store_stats(p->s.k.store, &st);
    harness_close(&p->s.k, false);
    return !*out_wrong ? WHOLE : st.checksum_errors ? UNREADABLE : 0;
}

/* The devices hold a damage: checks that the outcome is allowed. Then they are sound again. */
static void validate(struct patient *p, const char *what, uint64_t offset, unsigned allowed)
{
    const char *wrong = NULL;
    enum outcome found = inspect(p, &wrong);

    p->damages++;
    p->refusals += found == REFUSED;
    p->errors += found == UNREADABLE;
    if (!(found & allowed)) {
        printf("%s: byte %llu of %s flipped: %s\n", p->s.script->name, (unsigned long long)offset, what,
               found == REFUSED ? "it does not mount" : wrong);
        p->bad++;
    }
    walk_reset(&p->w);
}

static struct ht_super super_of(const struct patient *p)
{
    struct ht_super sb;
    struct ht_super_report report;

    ck_assert_int_eq(ht_super_read(p->s.k.dev[0], &sb, &report), 0);
    return sb;
}

static const char *const rotten[] = {"overwrite", "xattr", "clone", "step", "checkpoint"};

TEST_LOOP(rot_in_one_superblock_is_survived, HT_ARRAY_SIZE(rotten))
{
    static const unsigned fields[] = {8, 50, 96, 104, 136, 144, 168, 176, 184, 192, 200, 376, 504};
    struct patient p;

    admit(&p, rotten[_i]);
    for (unsigned copy = 0; copy < HT_SUPER_COPIES; copy++)
        for (unsigned i = 0; i < HT_ARRAY_SIZE(fields); i++) {
            uint64_t at = ht_super_offset(SCENARIO_DEVICE_BYTES, copy) + fields[i];
            flip(&p, at);
            validate(&p, "a superblock", at, WHOLE);
        }
    discharge(&p, "one superblock");
}

static bool is_used(const struct patient *p, uint64_t block_offset)
{
    for (unsigned i = 0; i < HT_BLOCK_BYTES; i++)
        if (p->sound[block_offset + i])
            return true;
    return false;
}

/* Where the last frame of the log begins, for a log that has not gone round yet. */
static uint64_t last_frame(const struct patient *p, const struct ht_super *sb)
{
    uint64_t at = sb->log_bytes;

    do
        at -= HT_BLOCK_BYTES;
    while (at && ht_le32_load(p->sound + sb->log_offset[0] + at) != HT_FRAME_MAGIC);
    return at;
}

/*
 * copies: mask of the copies that are damaged in the same place. If both lose the last frame, it looks as if it had
 * never been written.
 */
static void rot_log(struct patient *p, unsigned copies, unsigned allowed)
{
    struct ht_super sb = super_of(p);
    uint64_t end = copies == 3 ? last_frame(p, &sb) : sb.log_bytes;

    for (uint64_t at = 0; at < end; at += HT_BLOCK_BYTES) {
        uint64_t in_block = rnd_below(&p->rnd, 2) ? rnd_below(&p->rnd, 80) : rnd_below(&p->rnd, HT_BLOCK_BYTES);
        if (!is_used(p, sb.log_offset[0] + at))
            continue;
        for (unsigned c = 0; c < HT_LOG_COPIES; c++)
            if (copies >> c & 1)
                flip(p, sb.log_offset[c] + at + in_block);
        validate(p, "the log", at + in_block, allowed);
    }
}

TEST_LOOP(rot_in_one_log_is_survived, HT_ARRAY_SIZE(rotten))
{
    struct patient p;

    admit(&p, rotten[_i]);
    rot_log(&p, 1, WHOLE);
    rot_log(&p, 2, WHOLE);
    discharge(&p, "one copy of the log");
}

TEST_LOOP(rot_in_both_logs_is_survived_or_refused, HT_ARRAY_SIZE(rotten))
{
    struct patient p;

    admit(&p, rotten[_i]);
    rot_log(&p, 3, WHOLE | REFUSED);
    discharge(&p, "both copies of the log");
}

struct places {
    uint64_t offset[4096];
    unsigned count;
};

static int note_places(void *ctx, const struct ht_chunk_info *info)
{
    struct places *all = ctx;

    for (unsigned i = 0; i < info->extent_count; i++)
        for (unsigned b = 0; b < info->extents[i].blocks && all->count < HT_ARRAY_SIZE(all->offset); b++)
            all->offset[all->count++] = (info->extents[i].block + b) * HT_BLOCK_BYTES;
    return 0;
}

TEST_LOOP(rot_in_content_is_an_error, HT_ARRAY_SIZE(rotten))
{
    struct patient p;
    static struct places all;

    all.count = 0;
    admit(&p, rotten[_i]);
    ck_assert_int_eq(harness_open(&p.s.k, 1), 0);
    ck_assert_int_eq(ht_store_walk(p.s.k.store, note_places, &all), 0);
    harness_close(&p.s.k, false);
    walk_reset(&p.w);
    for (unsigned i = 0; i < all.count; i++) {
        flip(&p, all.offset[i] + rnd_below(&p.rnd, 30));
        validate(&p, "content", all.offset[i], WHOLE | UNREADABLE);
    }
    unsigned seen = p.errors;
    discharge(&p, "content");
    ck_assert_uint_gt(seen + (unsigned)(all.count == 0), 0);
}

/* ------------------------------------------------------------ another past */

static void put_and_sync(struct harness *k, unsigned value)
{
    uint64_t ino = harness_make(k, HT_NS_ROOT_INO, "a");

    ck_assert_int_eq(harness_write(k, ino, 0, &value, sizeof(value)), 0);
    ck_assert_int_eq(ht_ns_fsync(k->ns, ino), 0);
}

/*
 * From the present content of the device: a mount that syncs two contents, and dies. Returns the place of its last
 * frame in the log.
 */
static uint64_t live_a_past(struct harness *k, unsigned value)
{
    struct ht_store_stats st;

    ck_assert_int_eq(harness_open(k, 1), 0);
    put_and_sync(k, value);
    put_and_sync(k, value + 1);
    ht_store_stats(k->store, &st);
    const struct ht_super *sb = ht_store_super(k->store);
    uint64_t last = (sb->start_pos + st.log.used_bytes - HT_BLOCK_BYTES) % sb->log_bytes;
    harness_close(k, false);
    return last;
}

/*
 * As when a mirror below brings back one half as another day left it: both pasts have the same
 * epoch, numbers and places.
 */
TEST(frames_of_another_past_are_not_continued)
{
    struct harness k;

    harness_format(&k, 1, SCENARIO_DEVICE_BYTES, 4096);
    uint8_t *ram = ht_dev_ram_data(k.dev[0]), *before = malloc(SCENARIO_DEVICE_BYTES),
            *other = malloc(SCENARIO_DEVICE_BYTES);
    live_a_past(&k, 10);
    memcpy(before, ram, SCENARIO_DEVICE_BYTES);
    uint64_t at = live_a_past(&k, 20);
    memcpy(other, ram, SCENARIO_DEVICE_BYTES);
    memcpy(ram, before, SCENARIO_DEVICE_BYTES);
    ck_assert_uint_eq(live_a_past(&k, 30), at);
    struct ht_super sb;
    struct ht_super_report report;
    ck_assert_int_eq(ht_super_read(k.dev[0], &sb, &report), 0);
    for (unsigned c = 0; c < HT_LOG_COPIES; c++)
        memcpy(ram + sb.log_offset[c] + at, other + sb.log_offset[c] + at, HT_BLOCK_BYTES);
    int rc = harness_open(&k, 1);
    harness_close(&k, false);
    harness_free(&k);
    free(before);
    free(other);
    ck_assert_msg(rc != 0, "state 1: the log goes on with a frame of another past");
}

/* ------------------------------------------------------------------ format */

struct format {
    struct harness k;
    uint8_t old_uuid[16];
    bool done; /* format had returned at this point */
    unsigned states;
    const char *wrong;
};

static bool old_or_new(void *ctx, enum state_kind kind)
{
    struct format *f = ctx;
    struct ht_super sb;
    struct ht_super_report report;

    f->states++;
    if (ht_super_read(f->k.dev[0], &sb, &report) || harness_open(&f->k, 1)) {
        f->wrong = "no store is there at all";
    } else {
        bool old = memcmp(sb.uuid, f->old_uuid, sizeof(sb.uuid)) == 0;
        bool has_file = harness_find(&f->k, HT_NS_ROOT_INO, "a") != 0;
        if (old != has_file)
            f->wrong = "the store is neither the old one nor the new";
        if (old && f->done)
            f->wrong = "the old store is back after the format";
    }
    harness_close(&f->k, false);
    if (f->wrong)
        printf("format: state %u, kept %s: %s\n", f->states, state_names[kind], f->wrong);
    return !f->wrong;
}

TEST_LOOP(a_cut_format_leaves_the_old_store_or_the_new, 2)
{
    struct format f = {.states = 0};
    struct recording rec;
    struct state_walk w;
    struct ht_super sb;
    struct ht_format_opts opts = {0};
    char path[64];
    uint64_t rnd = setting("HITRAIN_SEED", 1);
    int fd = memfd_create("hitrain-format", MFD_CLOEXEC);

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    harness_format(&f.k, 1, SCENARIO_DEVICE_BYTES, _i ? 512 : 4096);
    live_a_past(&f.k, 1);
    struct ht_super_report report;
    ck_assert_int_eq(ht_super_read(f.k.dev[0], &sb, &report), 0);
    memcpy(f.old_uuid, sb.uuid, sizeof(f.old_uuid));
    uint8_t *base = malloc(SCENARIO_DEVICE_BYTES);
    memcpy(base, ht_dev_ram_data(f.k.dev[0]), SCENARIO_DEVICE_BYTES);
    ck_assert_int_eq(recorder_start(f.k.dev[0], path), 0);
    ck_assert_int_eq(ht_super_format(f.k.dev, 1, &opts, &sb), 0);
    ck_assert_int_eq(recorder_stop(f.k.dev[0]), 0);
    recording_load(&rec, path);
    walk_begin(&w, &rec, base, f.k.dev, 1);
    do {
        walk_to(&w, walk_next_flush(&w));
        f.done = w.at == rec.count;
    } while (walk_each(&w, true, &rnd, old_or_new, &f) && w.at < rec.count);
    printf("figures: format: %u states\n", f.states);
    walk_end(&w);
    recording_free(&rec);
    free(base);
    close(fd);
    harness_free(&f.k);
    ck_assert_ptr_null(f.wrong);
}

RUN_TESTS("rot", .timeout_s = 300, .quiet = ERRORS_ONLY, .memory = memory_keep)
