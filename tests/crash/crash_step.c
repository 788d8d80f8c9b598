/* SPDX-License-Identifier: Apache-2.0 */
/*
 * crash_step.c - the whole daemon but FUSE, training on a recorded device: in every state that a power cut could have left
 * the model root is at one committed step, wholly (parameters, optimizer state, other files, names), the step is
 * not older than the last one acknowledged, a file fsynced outside is there, and hitrain-fsck finds nothing.
 *
 * HITRAIN_STATES=N and HITRAIN_SEED=N override; HITRAIN_LONG=1 does fifty times as many.
 */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fs/ctl/ctl.h"
#include "mount-helpers/fsck/fsck.h"
#include "tests/support/states.h"
#include "tiering/base/hash.h"
#include "tiering/base/log.h"

enum { DEVICE_BYTES = 16 << 20, STEPS = 9, PARAMS = 3, STATES = 2000, SCRIPTS = 4 };

static const struct {
    const char *name, *dtype;
    uint64_t elements;
} params[PARAMS] = {{"embedding", "f32", 70000}, {"bias", "f32", 300}, {"head", "bf16", 50001}};

struct stack {
    struct ht_dev *dev;
    struct ht_store *store;
    struct ht_ctl *ctl;
    struct ht_ns *ns;
    struct ht_optim *optim;
    const char *config;
};

static const char *const configs[] = {
    "adamw lr=0.01 weight_decay=0.1",
    "adamw lr=0.01 max_grad_norm=1 skip_nonfinite=1",
    "sgd lr=0.01 momentum=0.9 nesterov=1",
    "adagrad lr=0.01",
};

/* What one committed step looks like, as one number, by step; index 0: the root without any step. */
struct history {
    uint64_t hash[STEPS + 1];
    uint64_t issued, acked; /* steps */
    bool root_acked;
};

/* ------------------------------------------------------------------ stack */

static int stack_open(struct stack *k, bool threads)
{
    struct ht_store_opts opts = {
        .dram_bytes = 8 << 20, .staging_bytes = 16 << 20, .numa_node = HT_NUMA_OFF, .no_threads = true};
    int rc = ht_store_new(&k->dev, 1, &opts, &k->store);
    if (!rc)
        rc = ht_ctl_new(k->store, &k->ctl);
    if (!rc)
        rc = ht_ns_new(k->store, ht_ctl_ns_hooks(k->ctl), 0, 0, &k->ns);
    if (!rc)
        rc = ht_optim_new(k->store, threads ? 2 : 1, ht_ctl_optim_hooks(k->ctl), &k->optim);
    if (rc)
        return rc;
    ht_ctl_attach(k->ctl, k->ns, k->optim);
    rc = ht_store_mount(k->store);
    if (!rc)
        rc = ht_ns_start(k->ns);
    if (!rc)
        rc = ht_optim_start(k->optim);
    return rc ? rc : ht_ctl_start(k->ctl);
}

static int stack_close(struct stack *k, bool clean)
{
    int rc = 0;
    if (k->optim)
        ht_optim_stop(k->optim);
    if (clean)
        rc = ht_store_unmount(k->store);
    if (k->ctl)
        ht_ctl_detach(k->ctl);
    if (k->optim)
        ht_optim_free(k->optim);
    if (k->ns)
        ht_ns_free(k->ns);
    if (k->ctl)
        ht_ctl_free(k->ctl);
    if (k->store)
        ht_store_close(k->store);
    *k = (struct stack){.dev = k->dev};
    return rc;
}

/* ------------------------------------------------------------------- files */

static uint64_t find(struct stack *k, uint64_t dir, const char *name)
{
    struct stat st;
    return ht_ns_lookup(k->ns, dir, name, &st) ? 0 : st.st_ino;
}

static uint64_t make_file(struct stack *k, uint64_t dir, const char *name)
{
    struct stat st;
    uint64_t ino = find(k, dir, name);
    if (ino)
        return ino;
    ck_assert_int_eq(ht_ns_mknod(k->ns, dir, name, S_IFREG | 0644, 0, (struct ht_cred){0, 0}, &st), 0);
    return st.st_ino;
}

static void put_file(struct stack *k, uint64_t dir, const char *name, const void *data, size_t len)
{
    struct ht_obj *o;
    uint64_t ino = make_file(k, dir, name);
    ck_assert_int_eq(ht_ns_open(k->ns, ino, &o), 0);
    ck_assert_int_eq(ht_obj_write(o, 0, data, len), (ssize_t)len);
    ht_ns_touch(k->ns, ino, true);
    ht_ns_close(k->ns, ino);
}

static void set_word(struct stack *k, uint64_t ino, const char *name, const char *value)
{
    struct ht_caller root = {{0, 0}, NULL, NULL};
    ck_assert_int_eq(ht_words_set(k->ctl, ino, name, value, strlen(value), 0, &root), 0);
}

/* ---------------------------------------------------------------- training */

static uint64_t element_bytes(unsigned i)
{
    return strcmp(params[i].dtype, "f32") == 0 ? 4 : 2;
}

static void fill(uint8_t *p, unsigned i, uint64_t seed)
{
    for (uint64_t e = 0; e < params[i].elements; e++) {
        float x = (float)(int32_t)(rnd_next(&seed) & 0xffff) / 65536.0f - 0.5f;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if (element_bytes(i) == 4)
            ht_le32_store(p + 4 * e, bits);
        else
            memcpy(p + 2 * e, (uint8_t *)&bits + 2, 2);
    }
}

static void make_root(struct stack *k)
{
    struct stat st;
    struct ht_cred cred = {0, 0};
    ck_assert_int_eq(ht_ns_mkdir(k->ns, HT_NS_ROOT_INO, "model", 0755, cred, &st), 0);
    uint64_t root = st.st_ino;
    uint8_t *p = malloc(70000 * 4);
    for (unsigned i = 0; i < PARAMS; i++) {
        set_word(k, make_file(k, root, params[i].name), "user.hitrain.dtype", params[i].dtype);
        fill(p, i, i + 1);
        put_file(k, root, params[i].name, p, params[i].elements * element_bytes(i));
    }
    free(p);
    put_file(k, root, "cursor", "0", 1);
    set_word(k, root, "user.hitrain.optimizer", k->config);
}

static void write_gradient(struct stack *k, uint64_t root, unsigned i, uint64_t step)
{
    struct ht_obj *o;
    struct ht_grad *g;
    uint64_t ino = find(k, root, params[i].name);
    uint8_t dtype = element_bytes(i) == 4 ? HT_DTYPE_F32 : HT_DTYPE_BF16;
    uint64_t bytes = params[i].elements * element_bytes(i);
    ck_assert_int_eq(ht_ns_open(k->ns, ino, &o), 0);
    struct ht_param_desc desc = {.root = root, .obj = o, .dtype = dtype, .grad_dtype = dtype};
    ck_assert_int_eq(ht_grad_open(k->optim, &desc, &g), 0);
    uint8_t *p = malloc(bytes);
    fill(p, i, step * 100 + i);
    ck_assert_int_eq(ht_grad_write(g, 0, p, bytes), (ssize_t)bytes);
    ck_assert_int_eq(ht_grad_flush(g), 0);
    ht_grad_release(g);
    ht_ns_close(k->ns, ino);
    free(p);
}

/* Everything a step changes but its commit: gradients, a file of the step, names. */
static void work(struct stack *k, uint64_t root, uint64_t step)
{
    char text[16], old[16];
    for (unsigned i = 0; i < PARAMS; i++)
        write_gradient(k, root, (unsigned)(i + step) % PARAMS, step);
    snprintf(text, sizeof(text), "%llu", (unsigned long long)step);
    put_file(k, root, "cursor", text, strlen(text));
    snprintf(text, sizeof(text), "log-%llu", (unsigned long long)step);
    snprintf(old, sizeof(old), "log-%llu", (unsigned long long)step - 1);
    if (find(k, root, old))
        ck_assert_int_eq(ht_ns_rename(k->ns, root, old, root, text, 0), 0);
    else
        put_file(k, root, text, text, strlen(text));
}

/* --------------------------------------------------------------- one number */

static uint64_t mix_file(struct stack *k, uint64_t ino, uint64_t hash)
{
    struct ht_obj *o;
    if (ht_ns_open(k->ns, ino, &o))
        return 1;
    uint64_t size = ht_obj_size(o);
    uint8_t *p = malloc(size + 1);
    ssize_t n = ht_obj_read(o, 0, p, size);
    hash = n == (ssize_t)size ? ht_hash64(p, size, hash ^ size) : 2;
    free(p);
    ht_ns_close(k->ns, ino);
    return hash;
}

static uint64_t mix_state(struct stack *k, uint64_t root, unsigned i, uint64_t hash)
{
    static const char *const names[] = {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "step", "master"};
    struct ht_obj *o;
    uint64_t ino = find(k, root, params[i].name);
    ck_assert_int_eq(ht_ns_open(k->ns, ino, &o), 0);
    uint8_t dtype = element_bytes(i) == 4 ? HT_DTYPE_F32 : HT_DTYPE_BF16;
    struct ht_param_desc desc = {.root = root, .obj = o, .dtype = dtype, .grad_dtype = dtype};
    uint8_t *p = malloc(params[i].elements * 4);
    for (unsigned s = 0; s < HT_ARRAY_SIZE(names); s++) {
        ssize_t n = ht_optim_state_read(k->optim, &desc, names[s], 0, p, params[i].elements * 4);
        if (n > 0)
            hash = ht_hash64(p, (size_t)n, hash + s);
    }
    free(p);
    ht_ns_close(k->ns, ino);
    return hash;
}

static int mix_name(void *ctx, const struct ht_ns_dirent *e)
{
    uint64_t *sum = ctx;
    *sum += ht_hash64(e->name, strlen(e->name), 3); /* whatever the order */
    return 0;
}

static uint64_t fingerprint(struct stack *k, uint64_t root)
{
    uint64_t hash = 0, names = 0;
    for (unsigned i = 0; i < PARAMS; i++) {
        uint64_t ino = find(k, root, params[i].name);
        if (!ino)
            return 0;
        hash = mix_file(k, ino, hash);
        hash = mix_state(k, root, i, hash);
    }
    hash = mix_file(k, find(k, root, "cursor"), hash);
    ck_assert_int_eq(ht_ns_readdir(k->ns, root, 0, mix_name, &names), 0);
    return hash ^ names;
}

static uint64_t step_of(struct stack *k, uint64_t root)
{
    struct ht_root_stat st;
    return ht_optim_root_stat(k->optim, root, &st) ? UINT64_MAX : st.durable_step;
}

/* ------------------------------------------------------------------ record */

static void acknowledge(struct stack *k, const char *what, uint64_t step)
{
    char text[32];
    snprintf(text, sizeof(text), "%s %llu", what, (unsigned long long)step);
    ck_assert_int_eq(ht_recorder_mark(k->dev, text), 0);
}

static void train(struct stack *k, struct history *h, uint64_t seed)
{
    make_root(k);
    uint64_t root = find(k, HT_NS_ROOT_INO, "model");
    ck_assert_int_eq(ht_optim_commit(k->optim, root), 0);
    h->hash[0] = fingerprint(k, root);
    acknowledge(k, "step", 0);
    for (uint64_t step = 1; step <= STEPS; step++) {
        work(k, root, step);
        if (rnd_below(&seed, 3) == 0) {
            ck_assert_int_eq(ht_optim_abort(k->optim, root), 0);
            ck_assert_uint_eq(fingerprint(k, root), h->hash[step - 1]);
            work(k, root, step);
        }
        if (rnd_below(&seed, 3) == 0)
            ck_assert_int_eq(ht_store_compact(k->store), 0);
        if (rnd_below(&seed, 2) == 0)
            ck_assert_int_eq(ht_store_commit(k->store), 0);
        ck_assert_int_eq(ht_optim_commit(k->optim, root), 0);
        acknowledge(k, "step", step);
        h->hash[step] = fingerprint(k, root);
        put_file(k, HT_NS_ROOT_INO, "outside", &step, sizeof(step));
        ck_assert_int_eq(ht_ns_fsync(k->ns, find(k, HT_NS_ROOT_INO, "outside")), 0);
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

static unsigned fsck_problems(struct ht_dev *dev)
{
    char *text = NULL;
    size_t len = 0;
    struct ht_fsck *f = calloc(1, sizeof(*f));
    f->opt.json = true;
    f->devs[0] = dev;
    f->dev_count = 1;
    ht_json_init(&f->json, open_memstream(&text, &len));
    ht_json_array(&f->json, NULL);
    int rc = ht_fsck_pass_super(f);
    if (!rc)
        rc = ht_fsck_pass_log(f);
    if (!rc)
        rc = ht_fsck_pass_refs(f);
    if (!rc)
        rc = ht_fsck_pass_tensors(f);
    if (!rc)
        rc = ht_fsck_pass_names(f);
    ht_json_end(&f->json);
    fclose(f->json.to);
    unsigned n = (unsigned)f->problems + (rc != 0);
    if (n)
        printf("fsck: %s\n", text);
    f->dev_count = 0;
    ht_fsck_close(f);
    free(f);
    free(text);
    return n;
}

static const char *compare_root(struct stack *k, const struct history *h, uint64_t acked)
{
    uint64_t root = find(k, HT_NS_ROOT_INO, "model");
    struct ht_ns_tensor t = {0};
    if (root && ht_ns_tensor(k->ns, root, &t))
        return "the root cannot be asked";
    if (!root || !t.is_root || find(k, root, "cursor") == 0)
        return acked == UINT64_MAX ? NULL : "the model root is lost";
    uint64_t step = step_of(k, root);
    if (step > STEPS || (acked != UINT64_MAX && step < acked))
        return "the step is not the last acknowledged one or a later one";
    /* Before the first commit files may be there in part: nothing was promised of them. */
    if (acked == UINT64_MAX && step == 0)
        return NULL;
    return fingerprint(k, root) == h->hash[step] ? NULL : "the root is not at its step wholly";
}

static const char *compare_outside(struct stack *k, uint64_t acked)
{
    uint64_t value = 0, ino = find(k, HT_NS_ROOT_INO, "outside");
    struct ht_obj *o;
    if (!ino)
        return acked == UINT64_MAX ? NULL : "an fsynced file is lost";
    if (ht_ns_open(k->ns, ino, &o))
        return "the file cannot be opened";
    ssize_t n = ht_obj_read(o, 0, &value, sizeof(value));
    ht_ns_close(k->ns, ino);
    return acked != UINT64_MAX && (n != sizeof(value) || value < acked) ? "an fsynced file has older content" : NULL;
}

static const char *verify(struct stack *k, const struct history *h, uint64_t step, uint64_t outside)
{
    const char *wrong = NULL;
    if (fsck_problems(k->dev))
        return "fsck finds problems";
    if (stack_open(k, false))
        wrong = "it does not mount";
    if (!wrong)
        wrong = compare_root(k, h, step);
    if (!wrong)
        wrong = compare_outside(k, outside);
    uint64_t root = wrong ? 0 : find(k, HT_NS_ROOT_INO, "model");
    if (root && step != UINT64_MAX && step_of(k, root) < STEPS) { /* go on training */
        uint64_t next = step_of(k, root) + 1;
        work(k, root, next);
        if (ht_optim_commit(k->optim, root) || fingerprint(k, root) != h->hash[next])
            wrong = "training on from there differs";
    }
    if (stack_close(k, !wrong))
        wrong = "it does not unmount";
    return wrong ? wrong : fsck_problems(k->dev) ? "fsck finds problems after going on" : NULL;
}

/* -------------------------------------------------------------------- test */

static void record(struct stack *k, struct history *h, const char *path, uint64_t seed, unsigned lba, uint8_t *base)
{
    struct ht_super sb;
    struct ht_format_opts opts = {0};
    ck_assert_int_eq(ht_dev_open_ram(DEVICE_BYTES, lba, &k->dev), 0);
    ck_assert_int_eq(ht_super_format(&k->dev, 1, &opts, &sb), 0);
    memcpy(base, ht_dev_ram_data(k->dev), DEVICE_BYTES);
    ck_assert_int_eq(ht_recorder_start(k->dev, path), 0);
    ck_assert_int_eq(stack_open(k, true), 0);
    train(k, h, seed);
    ck_assert_int_eq(stack_close(k, false), 0);
    ck_assert_int_eq(ht_recorder_stop(k->dev), 0);
}

START_TEST(every_state_holds_one_committed_step)
{
    uint64_t seed = setting("HITRAIN_SEED", 42) + (uint64_t)_i, rnd = seed * 77 + 5;
    unsigned states = (unsigned)setting("HITRAIN_STATES", getenv("HITRAIN_LONG") ? 50 * STATES : STATES) / SCRIPTS;
    unsigned lba = _i % 2 ? 4096 : 512, bad = 0;
    char path[64];
    snprintf(path, sizeof(path), "/tmp/hitrain-steps-%d.log", (int)getpid());
    uint8_t *base = malloc(DEVICE_BYTES);
    static_assert(HT_ARRAY_SIZE(configs) == SCRIPTS, "one for each script");
    struct stack k = {.config = configs[_i]};
    struct history h = {0};
    struct recording rec;
    struct state_walk w;
    record(&k, &h, path, seed, lba, base);
    recording_load(&rec, path);
    unlink(path);
    walk_begin(&w, &rec, base, DEVICE_BYTES, lba);
    for (unsigned n = 0; n < states; n++) {
        size_t point = (size_t)((uint64_t)rec.count * n / states + rnd_below(&rnd, rec.count / states + 1));
        walk_to(&w, ht_min_u64(ht_max_u64(point, w.at), rec.count));
        enum state_kind kind = (enum state_kind)(n % STATE_KINDS);
        walk_state(&w, kind, &rnd, ht_dev_ram_data(k.dev));
        const char *wrong = verify(&k, &h, last_mark(&rec, w.at, "step "), last_mark(&rec, w.at, "outside "));
        if (!wrong)
            continue;
        printf("seed %llu, entry %zu of %zu, kept %s: %s\n", (unsigned long long)seed, w.at, rec.count,
               state_names[kind], wrong);
        bad++;
    }
    printf("script %d: %d steps, %zu entries, %u states, %u bad\n", _i, STEPS, rec.count, states, bad);
    walk_end(&w);
    recording_free(&rec);
    ht_dev_close(k.dev);
    free(base);
    ck_assert_uint_eq(bad, 0);
}
END_TEST

int main(void)
{
    ht_log_set_level(HT_LOG_ERROR);
    Suite *suite = suite_create("power-cut states of a training run");
    TCase *tc = tcase_create("steps");
    tcase_add_loop_test(tc, every_state_holds_one_committed_step, 0, SCRIPTS);
    tcase_set_timeout(tc, getenv("HITRAIN_LONG") ? 7200 : 400);
    suite_add_tcase(suite, tc);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed != 0;
}
