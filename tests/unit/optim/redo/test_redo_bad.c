/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Logged steps that cannot be right, with right checksums: the mount shows the last full step, names the first bad one,
 * and lets nothing change. And steps that only look so.
 */
#include "tests/unit/optim/step/fixture.h"

#include <hitrain/format.h>

#include "optim/state/context.h"
#include "optim/state/redo.h"
#include "optim/state/root.h"

enum { STEPS = 4, FIRST = 70001 };

static const char logs[] = "adamw lr=1e-2 redo=on durable_every=100";

/* A full step, and logged ones up to STEPS. */
static void begin(void)
{
    fixture_begin_mixed(&w, logs, 2);
    for (unsigned step = 1; step <= STEPS; step++)
        step_once();
    ck_assert_uint_eq(fixture_stat(&w).logged_steps, STEPS - 1);
}

static struct ht_root *locked_root(void)
{
    lock(w.o);
    return ht_opt_root_find(w.o, ROOT);
}

/* Nothing of the logged steps is to be seen, and nothing may change. */
static void refused_from(unsigned step)
{
    char words[64];

    crash_and_mount();
    struct ht_root_stat st = fixture_stat(&w);
    snprintf(words, sizeof(words), "step %u cannot be computed again", step);
    ck_assert_msg(strstr(st.error, words) != NULL, "error is \"%s\"", st.error);
    ck_assert_uint_eq(st.step, 1);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), -EIO);
    ck_assert_int_eq(ht_optim_step(w.o, ROOT), -EIO);
    ht_optim_verify(w.o);
    fixture_close(&w);
}

static void equals_the_model(void)
{
    crash_and_mount();
    ck_assert_uint_eq(fixture_stat(&w).step, STEPS);
    ck_assert_str_eq(fixture_stat(&w).error, "");
    check_all(&w);
    fixture_close(&w);
}

/* ----------------------------------------------------------------- summaries */

#define HEAD(field) offsetof(struct ht_disk_redo, field)
#define PARAM(field) (sizeof(struct ht_disk_redo) + offsetof(struct ht_disk_redo_param, field))
enum { PIECES = sizeof(struct ht_disk_redo) + 4 * sizeof(struct ht_disk_redo_param) };
#define PIECE(field) (PIECES + offsetof(struct ht_disk_redo_piece, field))

static const struct {
    const char *what;
    size_t at, bytes;
    uint64_t value;
} wrong[] = {
    {"another version", HEAD(version), 4, 2},
    {"another step", HEAD(step), 8, 4},
    {"fewer parameters", HEAD(params), 8, 3},
    {"parameters beyond the end", HEAD(params), 8, UINT64_MAX},
    {"fewer pieces", HEAD(pieces), 8, 1},
    {"a shorter parameter", PARAM(elements), 8, FIRST - 1},
    {"a longer parameter", PARAM(elements), 8, FIRST + 1},
    {"a parameter without elements", PARAM(elements), 8, 0},
    {"a parameter of another type", PARAM(dtype), 1, HT_DTYPE_F16},
    {"a type that there is not", PARAM(dtype), 1, 77},
    {"a gradient of a shorter type", PARAM(grad_dtype), 1, HT_DTYPE_BF16},
    {"a gradient of no type", PARAM(grad_dtype), 1, 77},
    {"other chunks", PARAM(chunk_bytes), 4, 4096},
    {"a kernel that there is not", PARAM(kernel), 1, HT_KERNEL_COUNT},
    {"a kernel with other state", PARAM(kernel), 1, HT_KERNEL_SGD},
    {"another sign than two", PARAM(maximize), 1, 2},
    {"an update too many", PARAM(steps), 8, 4},
    {"an update too few", PARAM(steps), 8, 2},
    {"a number that is none", PARAM(scalar[1]), 4, 0x7fc00000},
    {"the last number is none", PARAM(scalar[HT_REDO_SCALARS - 1]), 4, 0xffc00001},
    {"bytes beyond the end", PIECE(at), 8, 1ull << 40},
    {"a parameter that is not in the step", PIECE(param), 4, 4},
    {"a range that there is not", PIECE(range), 4, 999},
    {"a gradient longer than its range", PIECE(end), 4, 1 << 20},
    {"a gradient that ends within an element", PIECE(end), 4, 1022},
    {"an empty gradient", PIECE(end), 4, 0},
    {"a gradient that begins within an element", PIECE(begin), 4, 2},
};

/* The third step. */
static struct ht_obj *logged(uint64_t *out_at)
{
    const struct ht_root *root = locked_root();
    const struct ht_redo_step *s = &root->redo.step[1];

    ck_assert_uint_eq(s->step, 3);
    struct ht_obj *obj = ht_obj_get(w.s, s->oid);
    *out_at = s->at;
    unlock(w.o);
    ck_assert_ptr_nonnull(obj);
    return obj;
}

static void write_wrong(unsigned i)
{
    uint64_t at, was = 0, now = 0;
    struct ht_obj *obj = logged(&at);

    memcpy(&now, &wrong[i].value, sizeof(now)); /* the machine has the order of the disk */
    ck_assert_int_eq(ht_obj_read(obj, at + wrong[i].at, &was, wrong[i].bytes), (ssize_t)wrong[i].bytes);
    ck_assert_msg(memcmp(&was, &now, wrong[i].bytes) != 0, "%s: it is so", wrong[i].what);
    ck_assert_int_eq(ht_obj_write(obj, at + wrong[i].at, &now, wrong[i].bytes), (ssize_t)wrong[i].bytes);
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    ht_obj_put(obj);
}

TEST_LOOP(a_summary_that_cannot_be_right_is_refused, HT_ARRAY_SIZE(wrong))
{
    begin();
    write_wrong((unsigned)_i);
    refused_from(3);
}

/* ----------------------------------------------------------------- rollbacks */

static struct ht_event aborted;
static unsigned not_reserved;

static void note_events(void *ctx, const struct ht_event *e)
{
    (void)ctx;
    not_reserved += e->code == HT_EVENT_NOT_RESERVED;
    if (e->code == HT_EVENT_STEP_ABORTED)
        aborted = *e;
}

static int no_names(void *ctx, uint64_t root, uint64_t kept, struct ht_copy_id **out, size_t *out_count)
{
    (void)ctx, (void)root, (void)kept, (void)out, (void)out_count;
    return -ENOSPC;
}

/* It takes nothing back that was to be read before, and has nothing to do with reserves. */
TEST(a_rollback_that_fails_after_a_failed_replay_says_that_the_model_is_not_back)
{
    struct ht_optim_config config;
    char err[HT_OPTIM_ERROR_MAX];
    const struct ht_rollback to = {.step = 1, .config = &config, .names = no_names};

    ck_assert_int_eq(ht_optim_config_parse(logs, strlen(logs), &config, err), 0);
    begin();
    write_wrong(0);
    fixture_crash(&w);
    fixture_mount(&w);
    ht_event_set_sink(note_events, NULL);
    ck_assert_int_eq(ht_optim_rollback_by(w.o, ROOT, &to, &(struct ht_optim_steer){0}), -ENOSPC);
    ht_event_set_sink(NULL, NULL);
    ck_assert_ptr_nonnull(strstr(aborted.text, "a rollback failed: No space left on device; so did taking it back"));
    ck_assert_uint_eq(not_reserved, 0);
    fixture_close(&w);
}

/* The same way of writing it, with the bytes that it has. */
TEST(a_summary_that_was_written_again_is_right)
{
    uint8_t bytes[PIECES];
    uint64_t at;

    begin();
    struct ht_obj *obj = logged(&at);
    ck_assert_int_eq(ht_obj_read(obj, at, bytes, sizeof(bytes)), sizeof(bytes));
    ck_assert_int_eq(ht_obj_write(obj, at, bytes, sizeof(bytes)), sizeof(bytes));
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    ht_obj_put(obj);
    equals_the_model();
}

/* -------------------------------------------------------------------- records */

/* Ways to put the records of steps 2, 3 and 4 into the log. */
static const struct {
    unsigned count, step[4];
    bool bad;
} chains[] = {
    {2, {3, 4}, true},        /* a gap after the full step */
    {2, {2, 4}, true},        /* a gap */
    {4, {2, 3, 3, 4}, false}, /* a step twice */
    {3, {4, 3, 2}, false},    /* the last one first: a step may be logged beside a checkpoint */
    {3, {3, 2, 4}, false},
};

/* fsck names it: OPT-REDO. */
static void mount_refused(void)
{
    struct ht_store_opts opts = {.dram_bytes = w.dram_bytes, .staging_bytes = 24 * MIB, .numa_node = HT_NUMA_OFF};
    struct ht_participant names = {HT_REC_NS_FIRST, HT_REC_NS_LAST, .ctx = &w};
    const struct ht_optim_setup setup = {.threads = 1, .hooks = &w.hooks};
    void *o;

    fixture_crash(&w);
    ck_assert_int_eq(ht_store_new(&w.dev, 1, &opts, &w.s), 0);
    ck_assert_int_eq(ht_store_register(w.s, &names), 0);
    ck_assert_int_eq(ht_participant_optim.make(w.s, &setup, &o), 0);
    w.o = o;
    ck_assert_int_eq(ht_store_mount(w.s), -EUCLEAN);
    ht_optim_stop(w.o);
    ht_store_close(w.s);
    ht_participant_optim.free(w.o);
    ht_dev_close(w.dev);
    for (unsigned i = 0; i < w.params; i++)
        forget_model(&w.param[i]);
}

TEST_LOOP(a_chain_with_a_gap_is_refused, HT_ARRAY_SIZE(chains))
{
    struct ht_redo_step was[STEPS];

    begin();
    struct ht_root *root = locked_root();
    struct ht_redo *redo = &root->redo;
    ck_assert_uint_ge(redo->steps_max, chains[_i].count);
    memcpy(was, redo->step, redo->steps * sizeof(*was));
    for (unsigned i = 0; i < chains[_i].count; i++)
        redo->step[i] = was[chains[_i].step[i] - 2];
    redo->steps = chains[_i].count;
    unlock(w.o);
    ck_assert_int_eq(ht_store_checkpoint(w.s), 0);
    if (chains[_i].bad)
        mount_refused();
    else
        equals_the_model();
}

RUN_TESTS("logged steps that cannot be right", .timeout_s = 300, .quiet = ERRORS_ONLY, .memory = memory_keep)
