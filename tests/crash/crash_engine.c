/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_engine.c - random scripts on the engine, recorded; then the states that a power cut could have left. Each must
 * mount, hold all acknowledged changes and whole commits only, and work on.
 *
 * HITRAIN_SCRIPT=N plays one script, counted from 0. HITRAIN_STATES=N and HITRAIN_SEED=N override; HITRAIN_LONG=1 does
 * fifty times as many.
 */

#include "tests/support/engine.h"
#include "tests/support/memory.h"
#include "tests/support/recorder.h"
#include "tests/support/u64_set.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/sys/mem.h"

enum { DEVICE_BYTES = 12 << 20, SCRIPTS = 12, OPS = 120, STATES = 2400, TIGHT_BYTES = 1200 << 10 };

static size_t ack_at(const struct recording *rec, size_t point)
{
    for (size_t i = point; i-- > 0;)
        if (rec->entry[i].mark && !memcmp(rec->entry[i].data, "ack ", 4))
            return (size_t)strtoull((const char *)rec->entry[i].data + 4, NULL, 10);
    return 0;
}

static void record_script(struct engine *e, const char *path, uint64_t seed, unsigned lba, bool tight, uint8_t *base)
{
    engine_format(e, DEVICE_BYTES, lba, seed);
    if (tight) {
        ck_assert_int_eq(engine_mount(e), 0);
        engine_fill(e, TIGHT_BYTES);
        engine_unmount(e);
    }
    memcpy(base, ht_dev_ram_data(e->dev), DEVICE_BYTES);
    ck_assert_int_eq(recorder_start(e->dev, path), 0);
    e->recording = true;
    ck_assert_int_eq(engine_mount(e), 0);
    for (int i = 0; i < OPS; i++)
        engine_step(e);
    engine_crash(e);
    ck_assert_int_eq(recorder_stop(e->dev), 0);
}

static unsigned check_states(struct engine *e, const struct recording *rec, const uint8_t *base, unsigned lba,
                             uint64_t seed, unsigned states)
{
    struct u64_set seen = {0};
    struct state_walk w;
    struct ht_dev *dev;
    uint64_t rnd = seed * 31 + 7;
    unsigned bad = 0;

    ck_assert_int_eq(dev_open_ram(DEVICE_BYTES, lba, &dev), 0);
    walk_begin(&w, rec, base, &dev, 1);
    for (unsigned n = 0; n < states; n++) {
        size_t point = (size_t)((uint64_t)rec->count * n / states + rnd_below(&rnd, rec->count / states + 1));
        point = ht_max_u64(point, w.at);
        walk_to(&w, ht_min_u64(point, rec->count));
        enum state_kind kind = (enum state_kind)(n % STATE_DRAWN);
        walk_state(&w, kind, &rnd);
        u64_set_add(&seen, walk_hash(&w) + ack_at(rec, w.at));
        const char *wrong = engine_verify_state(e, ack_at(rec, w.at), dev, rnd);
        if (wrong) {
            printf("seed %llu, lba %u, entry %zu of %zu, kept %s: %s\n", (unsigned long long)seed, lba, w.at,
                   rec->count, state_names[kind], wrong);
            bad++;
        }
    }
    states_reported(1, recording_flushes(rec), states, seen.count);
    u64_set_free(&seen);
    walk_end(&w);
    ht_dev_close(dev);
    return bad;
}

TEST_LOOP(every_state_of_a_power_cut_recovers, SCRIPTS)
{
    unsigned script = (unsigned)_i;

    if (setting("HITRAIN_SCRIPT", script) != script)
        return;
    uint64_t seed = setting("HITRAIN_SEED", 1000) + script;
    unsigned states = (unsigned)setting("HITRAIN_STATES", getenv("HITRAIN_LONG") ? 50 * STATES : STATES) / SCRIPTS;
    unsigned lba = script % 2 ? 512 : 4096;
    char path[64];
    snprintf(path, sizeof(path), "/tmp/hitrain-states-%d.log", (int)getpid());
    uint8_t *base = test_alloc(DEVICE_BYTES);
    struct engine e;
    struct recording rec;
    record_script(&e, path, seed, lba, script % 3 != 0, base);
    recording_load(&rec, path);
    unlink(path);
    unsigned bad = check_states(&e, &rec, base, lba, seed, states);
    printf("script %u: %zu entries, %zu commits, %u states, %u bad\n", script, rec.count, e.commits - 1, states, bad);
    ck_assert_uint_eq(bad, 0);
    recording_free(&rec);
    engine_free(&e);
}

RUN_TESTS("power-cut states of the engine", .timeout_s = getenv("HITRAIN_LONG") ? 3600 : 300, .quiet = ERRORS_ONLY,
          .memory = memory_keep)
