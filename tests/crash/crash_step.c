/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_step.c - the whole daemon except FUSE trains on a recorded device. In every state that a power cut could have
 * left, the model root is at one committed step, wholly (parameters, optimizer state, other files, names). This step is
 * not older than the last acknowledged one. A file that was fsynced outside is there, and hitrain-fsck finds nothing.
 *
 * HITRAIN_STATES=N and HITRAIN_SEED=N override; HITRAIN_LONG=1 does fifty times as many.
 */

#include "tests/support/u64_set.h"
#include "tests/support/harness.h"
#include "tests/support/memory.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/sys/mem.h"

enum { DEVICE_BYTES = 16 << 20, STEPS = 9, PARAMS = 3, STATES = 2500, SCRIPTS = 12, THREADS = 2 };

static const struct harness_param params[PARAMS] = {
    {"embedding", "f32", 70000}, {"bias", "f32", 300}, {"head", "bf16", 50001}};

/* Of those that have a matrix for muon. */
static const char *const shapes[PARAMS] = {"200,350", NULL, "21,2381"};

static const char *const configs[] = {
    "adamw lr=0.01 weight_decay=0.1",
    "adamw lr=0.01 max_grad_norm=1 skip_nonfinite=1",
    "sgd lr=0.01 momentum=0.9 nesterov=1",
    "adagrad lr=0.01",
    "adamw lr=0.01 accumulate=2 accumulate_mode=mean",
    "adamw lr=0.01 accumulate=2 max_grad_norm=1", /* and sparse gradients */
    "adamw lr=0.01 weight_decay=0.1 redo=on durable_every=4",
    "adamw lr=0.01 max_grad_norm=1 skip_nonfinite=1 redo=on durable_every=100",
    "muon lr=0.01",
    "muon lr=0.01 max_grad_norm=1 redo=on durable_every=100 state_bits=8",
    "adamw lr=0.01 state_bits_min=0", /* state is converted by some steps */
    "adamw lr=0.01 state_bits_min=0 redo=on durable_every=4",
};

/* The state after each committed step as one number; index 0: the root without any step. */
struct history {
    uint64_t hash[STEPS + 1];
    unsigned passes;      /* gradients that make a step */
    bool sparse, phases;  /* gradients are sparse; steps of matrices have two phases */
    const char *converts; /* words that some steps change; NULL: none does */
};

/* ---------------------------------------------------------------- training */

/* Two steps have one form. */
static void choose_form(struct harness *k, const struct history *h, uint64_t root, uint64_t step)
{
    static const unsigned bits[] = {32, 8, 16, 8, 32};
    char text[120];

    snprintf(text, sizeof(text), "%s state_bits=%u", h->converts, bits[step / 2 % HT_ARRAY_SIZE(bits)]);
    harness_set_word(k, root, "user.hitrain.optimizer", text);
}

/*
 * Everything a step changes but its commit: gradients (a part of one is taken back first), a file of the step, names.
 */
static void work(struct harness *k, const struct history *h, uint64_t root, uint64_t step)
{
    char text[16], old[16];

    if (h->converts)
        choose_form(k, h, root, step);
    harness_dropped_gradient(k, root, &params[step % PARAMS], step);
    for (unsigned i = 0; i < PARAMS * h->passes; i++)
        (h->sparse ? harness_sparse_gradient : harness_gradient)(k, root, &params[(i + step) % PARAMS], step * 100 + i);
    if (h->phases)
        ck_assert_int_eq(ht_optim_prepare_by(k->optim, root, &(struct ht_optim_steer){0}), 0);
    for (unsigned i = 0; h->phases && i < PARAMS; i++)
        if (shapes[i])
            harness_ortho(k, root, &params[i]);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)step);
    harness_put(k, root, "cursor", text, strlen(text));
    snprintf(text, sizeof(text), "log-%llu", (unsigned long long)step);
    snprintf(old, sizeof(old), "log-%llu", (unsigned long long)step - 1);
    if (harness_find(k, root, old))
        ck_assert_int_eq(ht_ns_rename(k->ns, root, old, root, text, 0, NULL), 0);
    else
        harness_put(k, root, text, text, strlen(text));
}

static uint64_t fingerprint(struct harness *k, uint64_t root)
{
    return harness_model_hash(k, root, params, PARAMS);
}

/* ------------------------------------------------------------------ record */

static void acknowledge(struct harness *k, const char *what, uint64_t step)
{
    char text[32];

    snprintf(text, sizeof(text), "%s %llu", what, (unsigned long long)step);
    ck_assert_int_eq(recorder_mark(k->dev[0], text), 0);
}

static void train(struct harness *k, struct history *h, uint64_t seed, const char *config)
{
    uint64_t root = harness_model(k, "model", params, PARAMS, config);

    for (unsigned i = 0; h->phases && i < PARAMS; i++)
        harness_set_word(k, harness_find(k, root, params[i].name),
                         shapes[i] ? "user.hitrain.shape" : "user.hitrain.optimizer",
                         shapes[i] ? shapes[i] : "adamw lr=0.01");

    ck_assert_int_eq(ht_optim_commit(k->optim, root), 0);
    h->hash[0] = fingerprint(k, root);
    acknowledge(k, "step", 0);
    for (uint64_t step = 1; step <= STEPS; step++) {
        work(k, h, root, step);
        if (rnd_below(&seed, 3) == 0) {
            ck_assert_int_eq(ht_optim_abort(k->optim, root), 0);
            ck_assert_uint_eq(fingerprint(k, root), h->hash[step - 1]);
            work(k, h, root, step);
        }
        if (rnd_below(&seed, 3) == 0)
            ck_assert_int_eq(ht_store_checkpoint(k->store), 0);
        if (rnd_below(&seed, 2) == 0)
            ck_assert_int_eq(ht_store_commit(k->store), 0);
        ck_assert_int_eq(ht_optim_commit(k->optim, root), 0);
        acknowledge(k, "step", step);
        h->hash[step] = fingerprint(k, root);
        harness_put(k, HT_NS_ROOT_INO, "outside", &step, sizeof(step));
        ck_assert_int_eq(ht_ns_fsync(k->ns, harness_find(k, HT_NS_ROOT_INO, "outside")), 0);
        acknowledge(k, "outside", step);
    }
}

/* ------------------------------------------------------------------ verify */

static uint64_t last_mark(const struct recording *rec, size_t point, const char *what)
{
    size_t n = strlen(what);

    for (size_t i = point; i-- > 0;)
        if (rec->entry[i].mark && !memcmp(rec->entry[i].data, what, n))
            return strtoull((const char *)rec->entry[i].data + n, NULL, 10);
    return UINT64_MAX;
}

static const char *compare_root(struct harness *k, const struct history *h, uint64_t acked)
{
    uint64_t root = harness_find(k, HT_NS_ROOT_INO, "model");
    struct ht_ns_tensor t = {0};

    if (root && ht_ns_tensor(k->ns, root, &t))
        return "the root cannot be asked";
    if (!root || !t.is_root || harness_find(k, root, "cursor") == 0)
        return acked == UINT64_MAX ? NULL : "the model root is lost";
    uint64_t step = harness_model_step(k, root);
    if (step > STEPS || (acked != UINT64_MAX && step < acked))
        return "the step is not the last acknowledged one or a later one";
    /* Before the first commit files may be there in part: they were never acknowledged. */
    if (acked == UINT64_MAX && step == 0)
        return NULL;
    return fingerprint(k, root) == h->hash[step] ? NULL : "the root is not at its step wholly";
}

static const char *compare_outside(struct harness *k, uint64_t acked)
{
    uint64_t value = 0, ino = harness_find(k, HT_NS_ROOT_INO, "outside");
    struct ht_obj *o;

    if (!ino)
        return acked == UINT64_MAX ? NULL : "an fsynced file is lost";
    if (ht_ns_open(k->ns, ino, &o))
        return "the file cannot be opened";
    ssize_t n = ht_obj_read(o, 0, &value, sizeof(value));
    ht_ns_close(k->ns, ino);
    return acked != UINT64_MAX && (n != sizeof(value) || value < acked) ? "an fsynced file has older content" : NULL;
}

static const char *verify(struct harness *k, const struct history *h, uint64_t step, uint64_t outside)
{
    const char *wrong = NULL;

    if (harness_fsck(k))
        return "fsck finds problems";
    if (harness_open(k, 1))
        wrong = "it does not mount";
    if (!wrong)
        wrong = compare_root(k, h, step);
    if (!wrong)
        wrong = compare_outside(k, outside);
    uint64_t root = wrong ? 0 : harness_find(k, HT_NS_ROOT_INO, "model");
    if (root && step != UINT64_MAX && harness_model_step(k, root) < STEPS) { /* go on training */
        uint64_t next = harness_model_step(k, root) + 1;
        work(k, h, root, next);
        if (ht_optim_commit(k->optim, root) || fingerprint(k, root) != h->hash[next])
            wrong = "training on from there differs";
    }
    if (harness_close(k, !wrong))
        wrong = "it does not unmount";
    return wrong ? wrong : harness_fsck(k) ? "fsck finds problems after going on" : NULL;
}

/* -------------------------------------------------------------------- test */

static void record(struct harness *k, struct history *h, const char *path, uint64_t seed, unsigned lba,
                   const char *config, uint8_t *base)
{
    harness_format(k, 1, DEVICE_BYTES, lba);
    memcpy(base, ht_dev_ram_data(k->dev[0]), DEVICE_BYTES);
    ck_assert_int_eq(recorder_start(k->dev[0], path), 0);
    ck_assert_int_eq(harness_open(k, THREADS), 0);
    train(k, h, seed, config);
    ck_assert_int_eq(harness_close(k, false), 0);
    ck_assert_int_eq(recorder_stop(k->dev[0]), 0);
}

TEST_LOOP(every_state_holds_one_committed_step, SCRIPTS)
{
    uint64_t seed = setting("HITRAIN_SEED", 42) + (uint64_t)_i, rnd = seed * 77 + 5;
    unsigned states = (unsigned)setting("HITRAIN_STATES", getenv("HITRAIN_LONG") ? 50 * STATES : STATES) / SCRIPTS;
    unsigned lba = _i % 2 ? 4096 : 512, bad = 0;
    char path[64];

    snprintf(path, sizeof(path), "/tmp/hitrain-steps-%d.log", (int)getpid());
    uint8_t *base = malloc(DEVICE_BYTES);
    static_assert(HT_ARRAY_SIZE(configs) == SCRIPTS, "one for each script");
    struct harness k;
    struct history h = {.passes = strstr(configs[_i], "accumulate=2") ? 2 : 1,
                        .sparse = _i == 5,
                        .phases = !strncmp(configs[_i], "muon", 4),
                        .converts = strstr(configs[_i], "state_bits_min") ? configs[_i] : NULL};
    struct recording rec;
    struct state_walk w;
    struct u64_set seen = {0};
    record(&k, &h, path, seed, lba, configs[_i], base);
    recording_load(&rec, path);
    unlink(path);
    walk_begin(&w, &rec, base, k.dev, 1);
    for (unsigned n = 0; n < states; n++) {
        size_t point = (size_t)((uint64_t)rec.count * n / states + rnd_below(&rnd, rec.count / states + 1));
        walk_to(&w, ht_min_u64(ht_max_u64(point, w.at), rec.count));
        enum state_kind kind = (enum state_kind)(n % STATE_DRAWN);
        walk_state(&w, kind, &rnd);
        uint64_t step = last_mark(&rec, w.at, "step "), outside = last_mark(&rec, w.at, "outside ");
        u64_set_add(&seen, walk_hash(&w) + step + outside);
        const char *wrong = verify(&k, &h, step, outside);
        if (!wrong)
            continue;
        printf("seed %llu, entry %zu of %zu, kept %s: %s\n", (unsigned long long)seed, w.at, rec.count,
               state_names[kind], wrong);
        bad++;
    }
    printf("script %d: %d steps, %zu entries, %u states, %u bad\n", _i, STEPS, rec.count, states, bad);
    states_reported(1, recording_flushes(&rec), states, seen.count);
    u64_set_free(&seen);
    walk_end(&w);
    recording_free(&rec);
    harness_free(&k);
    free(base);
    ck_assert_uint_eq(bad, 0);
}

RUN_TESTS("power-cut states of a training run", .timeout_s = getenv("HITRAIN_LONG") ? 7200 : 400, .quiet = ERRORS_ONLY,
          .memory = memory_keep)
