/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_small.c - short scenarios, and every state in which a power cut could have left the devices. In each, fsck
 * finds nothing, the store mounts, and work continues. Each group of names is at its acknowledged state or a later one.
 * The recovery itself is cut in every way, too. In each 16th state engines make a pass first, and change no content.
 *
 * HITRAIN_SCRIPT=NAME plays one scenario; HITRAIN_STATE=NAME:N examines the one state that a failure names;
 * HITRAIN_SEED=N draws other random states; HITRAIN_STATES=N examines no more than N states of each scenario.
 * HITRAIN_LONG=1 tears the writes of recoveries, too, and plays all scenarios with 100 seeds. HITRAIN_SAVE=FOLDER saves
 * the first content of each scenario and its recording there, as NAME.base and NAME.log, for other programs that read
 * the dm-log-writes format.
 */
#include <sys/mman.h>

#include "tests/support/background_priv.h"
#include "tests/support/u64_set.h"
#include "tests/support/crash_scenario.h"
#include "tests/support/memory.h"
#include "tests/support/suite.h"
#include "tiering/base/hash.h"
#include "tiering/sys/mem.h"

enum { BAD_MAX = 5, SCRIPTS_MAX = 64, LONG_SEEDS = 100, BACKGROUND_EVERY = 16 };

/* In memory that the test's process shares with the one that prints. */
struct figures {
    uint64_t points, made[STATE_KINDS], images, recoveries, recovery_states, contents, bad, ns;
    uint64_t at; /* the state that is looked at */
};
static struct figures *figures;

/* ----------------------------------------------------------------- explorer */

struct explorer {
    const struct crash_scenario *s;
    struct harness k; /* on devices that hold one state after the other */
    struct figures *f;
    struct state_walk w;
    struct u64_set images, shapes, contents;
    size_t ack; /* acknowledgements that hold at the point */
    uint64_t rnd, made, only, most;
    int log_fd; /* recordings of recoveries */
    char log_path[64];
    /* A recovery that is being cut. */
    struct state_walk inner;
    struct kept_state began; /* the state that it recovers */
    bool noise;              /* in that state */
};

static const char *check_again(struct explorer *x, enum state_kind kind)
{
    uint64_t content;

    if (kind != STATE_NOISE && !x->noise && harness_fsck(&x->k))
        return "a cut recovery leaves problems for fsck";
    int rc = harness_open(&x->k, 1);
    const char *wrong = rc ? "it does not mount after a cut recovery" : scenario_compare(x->s, x->ack, &x->k, &content);
    harness_close(&x->k, false);
    return wrong;
}

static void report(struct explorer *x, const char *where, enum state_kind kind, const char *wrong)
{
    printf("%s: state %llu (entry %zu of %zu, kept %s%s): %s; once more: %sHITRAIN_SEED=%llu HITRAIN_STATE=%s:%llu\n",
           x->s->script->name, (unsigned long long)x->made, x->w.at, x->w.rec->count, state_names[kind], where, wrong,
           getenv("HITRAIN_LONG") ? "HITRAIN_LONG=1 " : "", (unsigned long long)setting("HITRAIN_SEED", 1),
           x->s->script->name, (unsigned long long)x->made);
    x->f->bad++;
}

static bool visit_inner(void *ctx, enum state_kind kind)
{
    struct explorer *x = ctx;

    x->f->recovery_states++;
    if (!u64_set_add(&x->images, walk_hash(&x->inner) + x->ack))
        return true;
    x->f->images++;
    const char *wrong = check_again(x, kind);
    if (wrong)
        report(x, " in a cut recovery", kind, wrong);
    return x->f->bad < BAD_MAX;
}

/* Encodes which copies of the superblock exist, and which are the newest. */
static uint64_t super_shape(const struct harness *k)
{
    uint64_t shape = 0;

    for (unsigned i = 0; i < k->dev_count; i++) {
        struct ht_super sb = {0};
        struct ht_super_report r;
        int rc = ht_super_read(k->dev[i], &sb, &r);
        for (unsigned c = 0; c < HT_SUPER_COPIES; c++)
            shape = shape << 2 | (rc || r.copy[c] != HT_SUPER_OK ? 0 : r.generation[c] == sb.generation ? 1 : 2);
    }
    return shape;
}

/* The places of a recovery's writes, and the times of its flushes: recoveries that are and began alike are cut once. */
static uint64_t shape_of(const struct recording *rec, uint64_t began)
{
    uint64_t hash = began;

    for (size_t i = 0; i < rec->count; i++) {
        const struct log_entry *e = &rec->entry[i];
        const uint64_t shape[3] = {e->offset, e->len, e->flush};
        hash = ht_hash64(shape, sizeof(shape), hash);
    }
    return hash;
}

static void cut_recovery(struct explorer *x, const struct recording *rec, uint64_t began)
{
    bool more = true;
    uint64_t rnd = x->made; /* of its own, so that one state alone is made as among all */

    if (!u64_set_add(&x->shapes, shape_of(rec, began + x->ack)))
        return;
    x->f->recoveries++;
    walk_begin_inside(&x->inner, &x->w, &x->began, rec);
    do {
        walk_to(&x->inner, walk_next_flush(&x->inner));
        more = walk_each(&x->inner, x->inner.pending_count == 1 || getenv("HITRAIN_LONG"), &rnd, visit_inner, x);
    } while (more && x->inner.at < rec->count);
    walk_end(&x->inner);
}

/* Engines begin with a mount. Not in each state: deduplication takes as long as all the rest. */
static const char *work_in_background(struct explorer *x)
{
    struct ht_store *s = x->k.store;
    uint64_t content;

    if (x->made % BACKGROUND_EVERY)
        return NULL;
    int rc = background_dedup(s);
    if (!rc)
        rc = background_compact(s);
    background_discard(s);
    return rc ? "an engine fails" : scenario_compare(x->s, x->ack, &x->k, &content);
}

static const char *recover_and_go_on(struct explorer *x)
{
    uint64_t content;
    int rc = harness_open(&x->k, 1);
    const char *wrong = rc ? "it does not mount" : NULL;

    ck_assert_int_eq(recorder_mark(x->k.dev[0], "recovered"), 0);
    if (!wrong)
        wrong = scenario_compare(x->s, x->ack, &x->k, &content);
    if (wrong)
        harness_close(&x->k, false);
    else
        u64_set_add(&x->contents, content);
    if (!wrong)
        wrong = work_in_background(x);
    return wrong ? wrong : scenario_go_on(x->s, &x->k);
}

/* Noise may be in the place of a superblock's copy: fsck says so until the next mount has written it. */
static const char *check_state(struct explorer *x, enum state_kind kind)
{
    struct recording rec;

    if (kind != STATE_NOISE && harness_fsck(&x->k))
        return "fsck finds problems";
    walk_keep(&x->w, &x->began);
    uint64_t began = super_shape(&x->k) << 32;
    harness_record(&x->k, x->log_path);
    const char *wrong = recover_and_go_on(x);
    ck_assert_int_eq(recorder_stop(x->k.dev[0]), 0);
    if (!wrong) {
        recording_load(&rec, x->log_path);
        for (size_t i = 0; i < rec.count; i++)
            if (rec.entry[i].mark)
                rec.count = i;
        x->noise = kind == STATE_NOISE;
        cut_recovery(x, &rec, began);
        recording_free(&rec);
    }
    return wrong;
}

static bool visit(void *ctx, enum state_kind kind)
{
    struct explorer *x = ctx;

    x->f->at = ++x->made;
    x->f->made[kind]++;
    if (x->only && x->made != x->only)
        return x->made < x->only;
    if (!u64_set_add(&x->images, walk_hash(&x->w) + x->ack))
        return true;
    x->f->images++;
    const char *wrong = check_state(x, kind);
    if (wrong)
        report(x, "", kind, wrong);
    return x->f->bad < BAD_MAX && x->f->images < x->most;
}

static void open_explorer(struct explorer *x, const struct crash_scenario *s, struct figures *f)
{
    *x = (struct explorer){.s = s, .f = f, .most = setting("HITRAIN_STATES", UINT64_MAX)};
    const char *one = getenv("HITRAIN_STATE");
    x->only = one && strchr(one, ':') ? strtoull(strchr(one, ':') + 1, NULL, 10) : 0;
    x->log_fd = memfd_create("hitrain-recovery", MFD_CLOEXEC);
    snprintf(x->log_path, sizeof(x->log_path), "/proc/self/fd/%d", x->log_fd);
    x->k.dev_count = s->script->devices;
    for (unsigned i = 0; i < x->k.dev_count; i++)
        ck_assert_int_eq(dev_open_ram(SCENARIO_DEVICE_BYTES, s->script->lba, &x->k.dev[i]), 0);
}

/* One pass over all points. False: it shall be the last. */
static bool explore(struct explorer *x, const struct recording *rec, const uint8_t *base, uint64_t seed)
{
    bool more = true;

    x->rnd = seed;
    walk_begin(&x->w, rec, base, x->k.dev, x->k.dev_count);
    do {
        walk_to(&x->w, walk_next_flush(&x->w));
        x->ack = scenario_ack_at(rec, x->w.at);
        x->f->points++;
        more = walk_each(&x->w, true, &x->rnd, visit, x);
    } while (more && x->w.at < rec->count);
    walk_end(&x->w);
    return more;
}

/* -------------------------------------------------------------------- test */

static bool is_wanted(const struct scenario_script *s)
{
    const char *name = s->name;
    const char *script = getenv("HITRAIN_SCRIPT"), *state = getenv("HITRAIN_STATE");

    if (state)
        return !strncmp(state, name, strlen(name)) && state[strlen(name)] == ':';
    return script ? !strcmp(script, name) : !s->seldom || getenv("HITRAIN_LONG");
}

static void save_one(const char *name, const char *what, const uint8_t *data, size_t len)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/%s.%s", getenv("HITRAIN_SAVE"), name, what);
    FILE *f = fopen(path, "wb");
    ck_assert_msg(f && fwrite(data, 1, len, f) == len && fclose(f) == 0, "%s cannot be written", path);
}

static void save(const struct scenario_script *script, const struct recording *rec, const uint8_t *base)
{
    if (!getenv("HITRAIN_SAVE"))
        return;
    save_one(script->name, "base", base, (size_t)script->devices * SCENARIO_DEVICE_BYTES);
    save_one(script->name, "log", rec->file, rec->bytes);
}

TEST_LOOP(every_state_recovers, (int)scenario_script_count)
{
    struct crash_scenario s;
    struct recording rec;
    struct explorer x;
    uint8_t *base;
    struct figures *f = &figures[_i];

    if (!is_wanted(&scenario_scripts[_i]))
        return;
    uint64_t began = ht_now_ns(), seeds = getenv("HITRAIN_LONG") ? LONG_SEEDS : 1;
    scenario_play(&s, &scenario_scripts[_i], &rec, &base);
    save(&scenario_scripts[_i], &rec, base);
    open_explorer(&x, &s, f);
    for (uint64_t i = 0; i < seeds; i++)
        if (!explore(&x, &rec, base, (setting("HITRAIN_SEED", 1) + i) * 77 + (uint64_t)_i))
            break;
    x.f->contents = x.contents.count;
    close(x.log_fd);
    harness_free(&x.k);
    kept_free(&x.began);
    u64_set_free(&x.images);
    u64_set_free(&x.shapes);
    u64_set_free(&x.contents);
    f->ns = ht_now_ns() - began;
    recording_free(&rec);
    free(base);
    scenario_free(&s);
    ck_assert_uint_eq(f->bad, 0);
}

/* By groups of kinds, as a table has room for. */
enum { COLUMN_SUBSETS, COLUMN_RANDOM, COLUMN_TORN, COLUMN_NOISE, COLUMNS };
static const unsigned column_of[STATE_KINDS] = {
    [STATE_RANDOM] = COLUMN_RANDOM, [STATE_TORN] = COLUMN_TORN, [STATE_NOISE] = COLUMN_NOISE};

static void print_row(const char *name, const struct figures *f)
{
    uint64_t made[COLUMNS] = {0};

    for (unsigned i = 0; i < STATE_KINDS; i++)
        made[column_of[i]] += f->made[i];
    const uint64_t column[] = {
        f->points,     made[COLUMN_SUBSETS], made[COLUMN_RANDOM], made[COLUMN_TORN], made[COLUMN_NOISE],
        f->recoveries, f->recovery_states,   f->images,           f->contents,       f->bad};
    printf("figures: %-12s", name);
    for (unsigned i = 0; i < HT_ARRAY_SIZE(column); i++)
        printf(" %9llu", (unsigned long long)column[i]);
    printf(" %8.1f\n", (double)f->ns / 1e9);
}

static void print_figures(void)
{
    struct figures sum = {0};
    unsigned scripts = 0;

    printf("figures: %-12s %9s %9s %9s %9s %9s %9s %9s %9s %9s %9s %8s\n", "scenario", "points", "subsets", "random",
           "torn", "noise", "recovered", "cut again", "distinct", "contents", "bad", "seconds");
    for (unsigned i = 0; i < scenario_script_count; i++) {
        const uint64_t *from = (const uint64_t *)&figures[i];
        for (unsigned k = 0; k < sizeof(sum) / sizeof(*from); k++)
            ((uint64_t *)&sum)[k] += from[k];
        if (is_wanted(&scenario_scripts[i]))
            print_row(scenario_scripts[i].name, &figures[i]);
        scripts += figures[i].points > 0;
    }
    print_row("all", &sum);
    uint64_t made = sum.recovery_states;
    for (unsigned i = 0; i < STATE_KINDS; i++)
        made += sum.made[i];
    states_reported(scripts, sum.points, made, sum.images);
}

int main(void)
{
    ht_log_set_level(HT_LOG_ERROR);
    setvbuf(stdout, NULL, _IOLBF, 0); /* the output of a failing child is not lost */
    memory_keep(true);
    figures = mmap(NULL, SCRIPTS_MAX * sizeof(*figures), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int status =
        run_tests("every power-cut state of short scenarios", .timeout_s = getenv("HITRAIN_LONG") ? 7200 : 300);
    print_figures();
    return status;
}
