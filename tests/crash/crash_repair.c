/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_repair.c - power cuts while fsck repairs. In every state that a cut could leave, the next run repairs the rest,
 * and the run after it finds nothing. The store mounts, and has everything that a repair without a cut keeps.
 *
 * HITRAIN_LONG=1: torn writes, too. HITRAIN_SEED=N seeds the random states.
 */
#include <sys/mman.h>

#include "tests/support/fsck_scenario.h"
#include "tests/support/u64_set.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"

struct cut {
    const struct damage *d;
    struct state_walk w;
    struct u64_set images;
    uint64_t rnd, states;
    size_t kept; /* items that a repair without a cut keeps */
};

static bool visit(void *ctx, enum state_kind kind)
{
    struct cut *c = ctx;
    size_t errors, kept;

    c->states++;
    if (!u64_set_add(&c->images, walk_hash(&c->w)))
        return true;
    int status = fsck_scenario_fsck(HT_FSCK_YES, false);
    ck_assert_msg(status == HT_FSCK_CLEAN || status == HT_FSCK_CORRECTED, "%s, state %llu (%s): exit %d\n%s",
                  c->d->name, (unsigned long long)c->states, state_names[kind], status, fsck_scenario_text);
    status = fsck_scenario_fsck(HT_FSCK_YES, false);
    ck_assert_msg(status == HT_FSCK_CLEAN, "%s, state %llu (%s), second run: exit %d\n%s", c->d->name,
                  (unsigned long long)c->states, state_names[kind], status, fsck_scenario_text);
    kept = fsck_scenario_count(&fsck_scenario_stores[0], &errors);
    ck_assert_msg(kept >= c->kept, "%s, state %llu (%s): %zu kept of %zu", c->d->name, (unsigned long long)c->states,
                  state_names[kind], kept, c->kept);
    harness_close(&fsck_scenario, false);
    return true;
}

/* Records the repair of one damage, then examines all states. */
static void cut_repair(const struct damage *d, uint64_t *out_states, uint64_t *out_images, uint64_t *out_flushes)
{
    struct cut *c = calloc(1, sizeof(*c));
    uint8_t *base = malloc(SAMPLE_DEVICE_BYTES);
    int fd = memfd_create("hitrain-repair", MFD_CLOEXEC);
    struct recording rec;
    char path[64];
    size_t errors;

    c->d = d;
    c->rnd = setting("HITRAIN_SEED", 1);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    fsck_scenario_begin(1);
    damage_do(d, &fsck_scenario, &fsck_scenario_stores[0].ids);
    memcpy(base, ht_dev_ram_data(fsck_scenario.dev[0]), SAMPLE_DEVICE_BYTES);
    ck_assert_int_eq(recorder_start(fsck_scenario.dev[0], path), 0);
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_YES, false), HT_FSCK_CORRECTED);
    ck_assert_int_eq(recorder_stop(fsck_scenario.dev[0]), 0);
    c->kept = fsck_scenario_count(&fsck_scenario_stores[0], &errors);
    harness_close(&fsck_scenario, false);
    recording_load(&rec, path);
    walk_begin(&c->w, &rec, base, fsck_scenario.dev, 1);
    do {
        walk_to(&c->w, walk_next_flush(&c->w));
        walk_each(&c->w, getenv("HITRAIN_LONG") != NULL, &c->rnd, visit, c);
    } while (c->w.at < rec.count);
    walk_end(&c->w);
    *out_states += c->states;
    *out_images += c->images.count;
    *out_flushes += recording_flushes(&rec);
    recording_free(&rec);
    fsck_scenario_end();
    close(fd);
    free(base);
    u64_set_free(&c->images);
    free(c);
}

TEST(a_repair_that_is_cut_short_is_completed_by_the_next)
{
    uint64_t states = 0, images = 0, flushes = 0;
    unsigned repairs = 0;

    fsck_scenario_setup();
    for (unsigned i = 0; i < damage_count; i++) {
        const struct damage *d = &damages[i];
        if (d->stays || d->reading_fails || d->vault || d->devices > 1 || strcmp(d->name, "NS-LINKS") == 0)
            continue;
        cut_repair(d, &states, &images, &flushes);
        repairs++;
    }
    states_reported(repairs, flushes, states, images);
}

RUN_TESTS("cut repairs", .timeout_s = 3600)
