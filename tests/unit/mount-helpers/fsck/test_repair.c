/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Repair: one store for each problem that fsck has a code for. The tests compare the output of the first run with -y,
 * and the second run must be silent. tests/fsck/NAME.1 and NAME.2 hold both; HITRAIN_REGENERATE=1 writes them anew.
 *
 * After every repair the store mounts, and everything that fsck did not report is unchanged. A store that fsck calls
 * clean does mount. HITRAIN_LONG=1: more pairs of damages; HITRAIN_SEED=N.
 */

#include "optim/state/context.h"
#include "optim/state/param.h"
#include "optim/state/redo.h"
#include "tests/support/fsck_scenario.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/api/object.h"
#include "tiering/api/stats.h"

enum { PAIRS = 20, PAIRS_LONG = 1500, LOGS = 30, LOGS_LONG = 3000, READS_MAX = 200 };

/* --------------------------------------------------------------- expected texts */

static void compare_text(const char *name, unsigned run)
{
    static char expected[FSCK_SCENARIO_TEXT_MAX];
    char path[256];
    FILE *file;

    snprintf(path, sizeof(path), "tests/fsck/%s.%u", name, run);
    if (getenv("HITRAIN_REGENERATE")) {
        file = fopen(path, "w");
        ck_assert_msg(file && fputs(fsck_scenario_text, file) >= 0 && fclose(file) == 0, "%s cannot be written", path);
        return;
    }
    file = fopen(path, "r");
    ck_assert_msg(file, "%s is missing", path);
    expected[fread(expected, 1, FSCK_SCENARIO_TEXT_MAX - 1, file)] = '\0';
    fclose(file);
    ck_assert_msg(strcmp(fsck_scenario_text, expected) == 0, "%s:\n%s--- instead of\n%s", path, fsck_scenario_text,
                  expected);
}

static void add_line(const char *fmt, size_t a, size_t b, size_t c)
{
    fsck_scenario_text_len += (size_t)snprintf(fsck_scenario_text + fsck_scenario_text_len,
                                               FSCK_SCENARIO_TEXT_MAX - fsck_scenario_text_len, fmt, a, b, c);
}

static bool tells(const struct damage *d)
{
    size_t len = 0;
    char code[64];

    /* The small letters after the code are the variant. */
    while (d->name[len] != '\0' && !(d->name[len] == '-' && d->name[len + 1] >= 'a'))
        len++;
    snprintf(code, sizeof(code), "%.*s: ", (int)len, d->name);
    return strncmp(fsck_scenario_text, code, strlen(code)) == 0 || strstr(fsck_scenario_text, code);
}

/* ------------------------------------------------------------------ one damage */

static const struct fsck_scenario_store *fixture_of(const struct damage *d)
{
    return &fsck_scenario_stores[d->devices == 2 ? 1 : 0];
}

static void do_damage(const char *name)
{
    for (unsigned i = 0; i < damage_count; i++)
        if (strcmp(damages[i].name, name) == 0)
            damage_do(&damages[i], &fsck_scenario, &fsck_scenario_stores[0].ids);
}

static uint8_t *copy_of_device(void)
{
    return memcpy(test_alloc(SAMPLE_DEVICE_BYTES), ht_dev_ram_data(fsck_scenario.dev[0]), SAMPLE_DEVICE_BYTES);
}

static void make_damage(const struct damage *d)
{
    fsck_scenario_begin(d->devices == 2 ? 2 : 1);
    damage_do(d, &fsck_scenario, &fixture_of(d)->ids);
}

/* Reading fails from the n-th request on, for the first n with which that is the problem found. */
static int run_with_failing_reads(const struct damage *d)
{
    for (unsigned n = 1; n < READS_MAX; n++) {
        dev_fail(fsck_scenario.dev[fsck_scenario.dev_count - 1], HT_IO_READ, n, true);
        int status = fsck_scenario_fsck(HT_FSCK_YES, false);

        if (tells(d) && strstr(fsck_scenario_text, "1 problem, 1 repaired"))
            return status;
        make_damage(d);
    }
    ck_abort_msg("%s is never told", d->name);
    return -1;
}

static void check_damage(const struct damage *d)
{
    const struct fsck_scenario_store *w = fixture_of(d);
    size_t kept, errors;

    make_damage(d);
    fsck_scenario_reads_vault = d->vault;
    if (!d->reading_fails) {
        ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false) & HT_FSCK_LEFT, HT_FSCK_LEFT);
        ck_assert_msg(tells(d), "%s is not told but\n%s", d->name, fsck_scenario_text);
        ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, true) & HT_FSCK_LEFT, HT_FSCK_LEFT);
    }
    int status = d->reading_fails ? run_with_failing_reads(d) : fsck_scenario_fsck(HT_FSCK_YES, false);
    add_line("exit %zu\n", (size_t)status, 0, 0);
    compare_text(d->name, 1);
    status = fsck_scenario_fsck(HT_FSCK_YES, false);
    add_line("exit %zu\n", (size_t)status, 0, 0);
    if (!d->stays) {
        ck_assert_msg(status == HT_FSCK_CLEAN, "%s, second run:\n%s", d->name, fsck_scenario_text);
        kept = fsck_scenario_count(w, &errors);
        add_line("%zu of %zu things as they were, %zu cannot be read\n", kept, w->items.count, errors);
        compare_text(d->name, 2);
        fsck_scenario_go_on();
    } else {
        compare_text(d->name, 2);
    }
    if (d->vault)
        damage_remove_vault();
}

/* ------------------------------------------------------------------------ tests */

TEST_LOOP(each_problem_is_told_and_repaired_and_then_there_is_none, (int)damage_count)
{
    check_damage(&damages[_i]);
}

/* A repair with -p changes nothing: it may not cut the steps, and without that the model could not be mounted. */
TEST(a_chunk_that_logged_steps_need_is_not_lost_without_them)
{
    const char step[] = "OPT-REDO: step 4 of model /model cannot be computed again";

    fsck_scenario_begin(1);
    do_damage("OPT-REDO-outside");
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_PREEN, false), HT_FSCK_LEFT);
    ck_assert(strstr(fsck_scenario_text, step));
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false), HT_FSCK_LEFT);
    ck_assert(strstr(fsck_scenario_text, "REF-RANGE") && strstr(fsck_scenario_text, step));
}

static void log_steps(const struct damage_ids *ids)
{
    const struct harness_param w_param = {"w", "f32", 700};
    struct ht_root_stat st;

    harness_set_word(&fsck_scenario, ids->model, "user.hitrain.optimizer", "adamw lr=0.01 redo=on durable_every=100");
    for (uint64_t step = 3; step <= 5; step++) {
        harness_gradient(&fsck_scenario, ids->model, &w_param, step);
        ck_assert_int_eq(ht_optim_commit(fsck_scenario.optim, ids->model), 0);
    }
    ck_assert_int_eq(ht_optim_root_stat(fsck_scenario.optim, ids->model, &st), 0);
    ck_assert_uint_gt(st.logged_steps, 0);
}

/* As after a program that does not reserve what a replay needs. */
static void lose_reservations(struct ht_optim *o)
{
    lock(o);
    ht_list_for_each(pos, &o->params) {
        const struct ht_param *p = ht_list_entry(pos, struct ht_param, all);
        for (unsigned i = 0; i < HT_STATES_MAX; i++)
            ck_assert_int_eq(p->state[i] ? ht_obj_rewrite_reserve(p->state[i], 0) : 0, 0);
        ck_assert_int_eq(p->obj ? ht_obj_rewrite_reserve(p->obj, 0) : 0, 0);
        ck_assert_int_eq(p->grad ? ht_obj_rewrite_reserve(p->grad, 0) : 0, 0);
    }
    (void)ht_opt_redo_yield_aside(o);
    unlock(o);
}

/* So many bytes of space stay free, of the blocks that content may have. */
static void fill_but(uint64_t bytes)
{
    uint64_t ino = harness_make(&fsck_scenario, HT_NS_ROOT_INO, "ballast"), left;
    uint8_t block[HT_BLOCK_BYTES] = {1};

    for (uint64_t at = 0; (left = ht_store_available(fsck_scenario.store)) > bytes; at += sizeof(block)) {
        memcpy(block, &at, sizeof(at)); /* no block is stored twice */
        ck_assert_int_eq(harness_write(&fsck_scenario, ino, at, block, sizeof(block)), 0);
    }
    ck_assert_int_eq(ht_store_commit(fsck_scenario.store), 0);
}

static uint64_t lacking(void)
{
    const char *said = strstr(fsck_scenario_text, "a mount may wait until ");

    return said ? strtoull(said + strlen("a mount may wait until "), NULL, 10) : 0;
}

/* It is told how much a mount lacks for its replay; with exactly that the mount computes the steps again. */
TEST(space_that_a_replay_lacks_is_told)
{
    uint64_t left = 0;

    for (unsigned run = 1; run <= 2; run++) {
        fsck_scenario_begin(1);
        ck_assert_int_eq(harness_open(&fsck_scenario, 2), 0);
        log_steps(&fsck_scenario_stores[0].ids);
        lose_reservations(fsck_scenario.optim);
        fill_but(left);
        ck_assert_int_eq(harness_close(&fsck_scenario, false), 0);
        int status = fsck_scenario_fsck(HT_FSCK_CHECK, false);
        add_line("exit %zu\n", (size_t)status, 0, 0);
        compare_text("REDO-SPACE", run);
        ck_assert_int_eq(lacking() > 0, run == 1);
        left += lacking();
        if (run == 2) { /* this would wait without space */
            ck_assert_int_eq(harness_open(&fsck_scenario, 2), 0);
            ht_optim_recovered(fsck_scenario.optim);
            ck_assert_int_eq(harness_close(&fsck_scenario, false), 0);
        }
    }
}

static const char manual[] = "mount-helpers/man/hitrain-fsck.8";

/* And stands in the manual. */
TEST(every_code_has_a_case)
{
#define CODE_OF(id, code, answer, part, repair) code,
    static const char *const codes[] = {HT_FSCK_PROBLEMS(CODE_OF)};
#undef CODE_OF
    static char page[FSCK_SCENARIO_TEXT_MAX];
    FILE *file = fopen(manual, "r");

    ck_assert_msg(file, "%s is missing", manual);
    page[fread(page, 1, sizeof(page) - 1, file)] = '\0';
    fclose(file);
    for (unsigned c = 0; c < HT_FSCK_CODES; c++) {
        const char *name = codes[c];
        char row[128] = "\n";
        size_t len = 1;
        bool found = false;
        for (unsigned i = 0; i < damage_count; i++)
            found |= strcmp(damages[i].name, name) == 0;
        ck_assert_msg(found, "%s", name);
        for (const char *p = name; *p != '\0' && len < sizeof(row) - 4; p++)
            len += (size_t)snprintf(row + len, sizeof(row) - len, "%s%c", *p == '-' ? "\\" : "", *p);
        snprintf(row + len, sizeof(row) - len, "\t");
        ck_assert_msg(strstr(page, row), "%s is not in %s", name, manual);
    }
}

TEST(json_says_of_each_problem_whether_it_was_repaired)
{
    fsck_scenario_begin(1);
    do_damage("SB-MAGIC");
    do_damage("DATA-CSUM");
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_PREEN, true), HT_FSCK_CORRECTED | HT_FSCK_LEFT);
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "\"repaired\": false"));
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "\"repaired\": true"));
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "\"repaired\": 1"));
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_YES, true), HT_FSCK_CORRECTED);
    ck_assert_ptr_null(strstr(fsck_scenario_text, "\"repaired\": false"));
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, true), HT_FSCK_CLEAN);
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "\"lost_chunks\": 1"));
}

/* One problem after the other, as of a store of which nothing is right. */
TEST(json_of_a_repair_keeps_a_bounded_number_of_problems)
{
    enum { PROBLEMS = 20000, TEXT_BYTES = 1500 };
    struct ht_fsck *f = test_alloc(sizeof(*f));
    char *text = NULL, long_text[TEXT_BYTES + 1];
    size_t text_len = 0;
    uint64_t count = 0;

    memset(long_text, 'x', TEXT_BYTES);
    long_text[TEXT_BYTES] = '\0';
    f->opt = (struct ht_fsck_options){.mode = HT_FSCK_YES, .json = true};
    f->out = open_memstream(&text, &text_len);
    ht_json_init(&f->json, f->out);
    ht_json_array(&f->json, NULL);
    for (unsigned i = 0; i < PROBLEMS; i++)
        ck_assert(ht_fsck_problem(f, HT_FSCK_DATA_CSUM, NULL, "%s", long_text));
    ck_assert(ht_fsck_problem(f, HT_FSCK_SB_CSUM, NULL, "%s", long_text));
    ht_fsck_repaired_last(f); /* which is not listed: nor is another one called repaired for it */
    ht_fsck_report_all(f, false);
    ht_json_end(&f->json);
    fclose(f->out);
    /* Not strstr: with a sanitizer it takes the length of all that follows, each time. */
    for (const char *c = text; (c = memchr(c, '"', (size_t)(text + text_len - c))); c++)
        count += c + 6 <= text + text_len && memcmp(c, "\"code\"", 6) == 0;
    ck_assert_ptr_null(strstr(text, "true"));
    ck_assert_uint_eq(f->problems, PROBLEMS + 1);
    ck_assert_uint_eq(count + f->unlisted, PROBLEMS + 1);
    ck_assert_uint_ge(count, 5000);
    ck_assert_uint_le(count * TEXT_BYTES, HT_FSCK_REPORTED_BYTES_MAX);
    ht_fsck_reported_free(f);
    free(text);
}

/*
 * Both copies are damaged, in different places: -n announces the repair that -p then makes, though -n changes nothing.
 */
TEST(checking_and_preening_agree_on_a_log_that_is_whole_in_two_halves)
{
    fsck_scenario_begin(1);
    do_damage("LOG-FRAME-each");
    const uint8_t *before = copy_of_device();
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false), HT_FSCK_LEFT);
    ck_assert_ptr_null(strstr(fsck_scenario_text, "LOG-ALL"));
    ck_assert_ptr_nonnull(
        strstr(fsck_scenario_text, "LOG-FRAME: both copies of the log are damaged, but not in the same places"));
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "1 problem"));
    ck_assert_int_eq(memcmp(before, ht_dev_ram_data(fsck_scenario.dev[0]), SAMPLE_DEVICE_BYTES), 0);
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_PREEN, false), HT_FSCK_CORRECTED);
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false), HT_FSCK_CLEAN);
}

/* A device may return the right bytes the next time. */
TEST(preening_keeps_what_reads_wrong_today)
{
    fsck_scenario_begin(1);
    const uint8_t *right = copy_of_device();
    do_damage("DATA-CSUM");
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_PREEN, false), HT_FSCK_LEFT);
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "left: only -y would mark the chunk lost"));
    memcpy(ht_dev_ram_data(fsck_scenario.dev[0]), right, SAMPLE_DEVICE_BYTES);
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false), HT_FSCK_CLEAN);
    ck_assert_ptr_null(strstr(fsck_scenario_text, "lost"));
}

/* -p gives up nothing and guesses nothing; the rest of the store it does not touch then. */
TEST(what_needs_a_decision_is_left_by_preening)
{
    fsck_scenario_begin(1);
    do_damage("LOG-RECORD");
    do_damage("REF-RANGE");
    const uint8_t *before = copy_of_device();
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_PREEN, false), HT_FSCK_LEFT);
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "left: only -y would leave them out"));
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "left, because of the problems left above: mark the chunk lost"));
    ck_assert_int_eq(memcmp(before, ht_dev_ram_data(fsck_scenario.dev[0]), SAMPLE_DEVICE_BYTES), 0);
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_YES, false), HT_FSCK_CORRECTED);
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_YES, false), HT_FSCK_CLEAN);
}

/* Also where another problem would be repaired without a loss, such as a bad copy of the superblock. */
TEST_LOOP(a_store_of_a_newer_version_is_checked_and_never_written, 3)
{
    static const char *const names[] = {"LOG-TYPE", "LOG-TYPE-names", "SB-FEATURE"};

    fsck_scenario_begin(1);
    do_damage("REF-RANGE");
    do_damage(names[_i]);
    if (_i == 2)
        do_damage("SB-CSUM");
    const uint8_t *before = copy_of_device();
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false), HT_FSCK_LEFT);
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, _i == 2 ? "3 problems" : "2 problems"));
    for (enum ht_fsck_mode mode = HT_FSCK_PREEN; mode <= HT_FSCK_YES; mode++) {
        ck_assert_int_eq(fsck_scenario_fsck(mode, mode == HT_FSCK_PREEN), HT_FSCK_LEFT);
        ck_assert_ptr_null(strstr(fsck_scenario_text, "\"repaired\": true"));
    }
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "left: first use the version of hitrain that wrote"));
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "left, because of the problems left above: mark the chunk lost"));
    ck_assert_int_eq(harness_open(&fsck_scenario, 1), -EPROTONOSUPPORT);
    ck_assert_int_eq(harness_close(&fsck_scenario, false), 0);
    ck_assert_int_eq(memcmp(before, ht_dev_ram_data(fsck_scenario.dev[0]), SAMPLE_DEVICE_BYTES), 0);
}

/* What no file has may belong to what the program does not know. */
TEST(content_is_no_orphan_beside_records_that_nothing_knows)
{
    fsck_scenario_begin(1);
    do_damage("REF-ORPHAN");
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false), HT_FSCK_LEFT);
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "REF-ORPHAN"));
    do_damage("LOG-TYPE");
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false), HT_FSCK_LEFT);
    ck_assert_ptr_null(strstr(fsck_scenario_text, "REF-ORPHAN"));
}

/* Makes one chunk name the place of another, and repairs. Returns the number of unchanged items. */
static size_t repair_an_overlap(uint64_t thief, struct ht_ref_place of, bool no_data)
{
    struct ht_buf records = HT_BUF_INIT;
    size_t kept, errors;

    of.checksum ^= 1;
    fsck_scenario_begin(1);
    damage_put_chunk(&records, thief, &of);
    damage_append(&fsck_scenario, &records);
    ht_buf_free(&records);
    int status = fsck_scenario_fsck_with(&(struct ht_fsck_options){.mode = HT_FSCK_YES, .no_data = no_data});
    ck_assert_msg(status == HT_FSCK_CORRECTED, "exit %d: %s", status, fsck_scenario_text);
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "REF-OVERLAP"));
    ck_assert_ptr_nonnull(strstr(fsck_scenario_text, "DATA-CSUM"));
    ck_assert_int_eq(fsck_scenario_fsck(HT_FSCK_CHECK, false), HT_FSCK_CLEAN);
    kept = fsck_scenario_count(&fsck_scenario_stores[0], &errors);
    fsck_scenario_go_on();
    return kept;
}

/* Whichever of the two comes second: fsck keeps the sound one, also if it reads no other data. */
TEST(of_two_that_share_space_the_sound_one_is_kept_with_no_data_too)
{
    const struct damage_ids *ids = &fsck_scenario_stores[0].ids;
    const struct ht_ref_place of[] = {ids->of_small, ids->of_big, ids->of_sparse};
    const uint64_t owner[] = {ids->small, ids->big, ids->sparse}, thief[] = {ids->small, ids->big, ids->sparse, ids->w};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(owner); i++)
        for (unsigned k = 0; k < HT_ARRAY_SIZE(thief); k++)
            if (thief[k] != owner[i]) {
                size_t kept = repair_an_overlap(thief[k], of[i], true);
                ck_assert_uint_eq(kept, repair_an_overlap(thief[k], of[i], false));
            }
}

/* Records first: appending them repairs superblocks and logs. */
static void damage_both(const struct damage *a, const struct damage *b)
{
    const struct damage *first = a->put ? a : b, *second = first == a ? b : a;

    fsck_scenario_begin(1);
    damage_do(first, &fsck_scenario, &fsck_scenario_stores[0].ids);
    if (second != first)
        damage_do(second, &fsck_scenario, &fsck_scenario_stores[0].ids);
}

static const struct damage *any_damage(uint64_t *rnd)
{
    const struct damage *d;

    do
        d = &damages[rnd_below(rnd, damage_count)];
    while (d->alone || d->stays || d->devices > 1);
    return d;
}

TEST(of_any_two_damages_nothing_is_left)
{
    uint64_t rnd = setting("HITRAIN_SEED", 1);
    unsigned pairs = getenv("HITRAIN_LONG") ? PAIRS_LONG : PAIRS;
    size_t errors;

    for (unsigned i = 0; i < pairs; i++) {
        const struct damage *a = any_damage(&rnd), *b = any_damage(&rnd);
        damage_both(a, b);
        int status = fsck_scenario_fsck(HT_FSCK_CHECK, false);
        ck_assert_msg(status == HT_FSCK_LEFT, "%s and %s: exit %d\n%s", a->name, b->name, status, fsck_scenario_text);
        status = fsck_scenario_fsck(HT_FSCK_YES, false);
        ck_assert_msg(status == HT_FSCK_CORRECTED, "%s and %s: exit %d\n%s", a->name, b->name, status,
                      fsck_scenario_text);
        status = fsck_scenario_fsck(HT_FSCK_YES, false);
        ck_assert_msg(status == HT_FSCK_CLEAN, "%s and %s, second run: exit %d\n%s", a->name, b->name, status,
                      fsck_scenario_text);
        (void)fsck_scenario_count(&fsck_scenario_stores[0], &errors);
        fsck_scenario_go_on();
    }
}

/*
 * Records that are well-formed each and make no sense together. Whatever they say: a store of which fsck finds nothing
 * mounts, and after a repair it finds nothing.
 */
TEST(of_any_records_nothing_is_left)
{
    uint64_t rnd = setting("HITRAIN_SEED", 1);
    unsigned logs = getenv("HITRAIN_LONG") ? LOGS_LONG : LOGS;
    struct ht_buf records = HT_BUF_INIT;
    unsigned clean = 0;
    size_t errors;

    for (unsigned i = 0; i < logs; i++) {
        fsck_scenario_begin(1);
        ht_buf_reset(&records);
        damage_random_records(&fsck_scenario_stores[0].ids, &records, &rnd);
        damage_append(&fsck_scenario, &records);
        int status = fsck_scenario_fsck(HT_FSCK_CHECK, false);
        clean += status == HT_FSCK_CLEAN;
        if (status != HT_FSCK_CLEAN) {
            status = fsck_scenario_fsck(HT_FSCK_YES, false);
            ck_assert_msg(status == HT_FSCK_CORRECTED, "log %u: exit %d\n%s", i, status, fsck_scenario_text);
            status = fsck_scenario_fsck(HT_FSCK_YES, false);
        }
        ck_assert_msg(status == HT_FSCK_CLEAN, "log %u, second run: exit %d\n%s", i, status, fsck_scenario_text);
        (void)fsck_scenario_count(&fsck_scenario_stores[0], &errors);
        fsck_scenario_go_on();
    }
    ht_buf_free(&records);
    printf("%u random logs, %u of them clean\n", logs, clean);
}

RUN_TESTS("fsck repairs", .once = fsck_scenario_setup, .teardown = fsck_scenario_end, .timeout_s = 600)
