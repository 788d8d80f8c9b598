/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/background.h"
#include "tests/support/fault_scenario.h"
#include "tests/support/states.h"
#include "tiering/api/batch_pin.h"

enum { DEVICE_BYTES = 8 << 20, BYTES = 40000, STEPS = 3, PARAMS = 2, PASSES = 2, SHM_BYTES = 2 << 20 };
enum { ABSENT, EMPTY, HOLE }; /* versions; larger ones are seeds of content. HOLE: its size, and zeros */

static const struct harness_param params[PARAMS] = {{"w", "f32", 1500}, {"h", "bf16", 700}};
static const struct ht_cred root_cred = {0, 0};

static uint64_t step_hash[STEPS + 1]; /* of the model, from a run without faults */

static void expect(struct fault_scenario *p, bool holds, const char *otherwise)
{
    if (!holds && !p->wrong)
        p->wrong = otherwise;
}

/* Counts failed calls. */
static int op(struct fault_scenario *p, int rc)
{
    p->failures += rc < 0;
    return rc;
}

/* ------------------------------------------------------------------ files */

/* It is smaller when it is compressed. */
static void pattern(uint8_t *out, uint64_t seed)
{
    for (size_t i = 0; i < BYTES; i++)
        out[i] = i % 2 ? 60 : (uint8_t)(1 + (seed * 37 + i / 11) % 250);
}

static uint64_t now(const struct fault_scenario_file *f)
{
    return f->version[f->count - 1];
}

static void set(struct fault_scenario_file *f, uint64_t version)
{
    f->version[f->count++] = version;
}

static uint64_t find(struct fault_scenario *p, uint64_t dir, const char *name, int *rc)
{
    struct stat st;

    *rc = ht_ns_lookup(p->k.ns, dir, name, &st);
    if (*rc)
        return 0;
    ht_ns_forget(p->k.ns, st.st_ino, 1);
    return st.st_ino;
}

/* A version; UINT64_MAX: none of these. Negative: it could not be read. */
static int inspect(struct fault_scenario *p, const struct fault_scenario_file *f, uint64_t *out)
{
    static uint8_t have[BYTES + 1], want[BYTES];
    struct ht_obj *o;
    int rc;
    uint64_t ino = find(p, HT_NS_ROOT_INO, f->name, &rc);

    *out = ABSENT;
    if (!ino)
        return rc == -ENOENT ? 0 : rc;
    rc = ht_ns_open(p->k.ns, ino, &o);
    if (rc)
        return rc;
    ssize_t n = ht_obj_read(o, 0, have, sizeof(have));
    ht_ns_close(p->k.ns, ino);
    *out = n == 0 ? EMPTY : UINT64_MAX;
    if (n == BYTES && have[0] == 0 && memcmp(have, have + 1, BYTES - 1) == 0)
        *out = HOLE;
    for (unsigned i = 0; n == BYTES && i < f->count; i++) {
        pattern(want, f->version[i]);
        if (f->version[i] > HOLE && memcmp(have, want, BYTES) == 0)
            *out = f->version[i];
    }
    return n < 0 ? (int)n : 0;
}

/* A read returns the last write. After the log has failed nothing can be undone, and nothing becomes durable. */
static void check_now(struct fault_scenario *p, const struct fault_scenario_file *f)
{
    uint64_t have;

    if (ht_store_failed(p->k.store) || inspect(p, f, &have) != 0)
        return;
    if (have != now(f))
        fprintf(stderr, "%s: version %llu, not %llu\n", f->name, (unsigned long long)have, (unsigned long long)now(f));
    expect(p, have == now(f), "what is read is not what was written");
}

static void make(struct fault_scenario *p, struct fault_scenario_file *f)
{
    struct stat st;

    if (op(p, ht_ns_mknod(p->k.ns, HT_NS_ROOT_INO, f->name, S_IFREG | 0644, 0, root_cred, &st)) == 0) {
        ht_ns_forget(p->k.ns, st.st_ino, 1);
        set(f, EMPTY);
    }
    check_now(p, f);
}

static void put(struct fault_scenario *p, struct fault_scenario_file *f, uint64_t seed)
{
    static uint8_t data[BYTES];
    struct ht_obj *o;
    int rc;

    if (now(f) == ABSENT)
        make(p, f);
    uint64_t ino = find(p, HT_NS_ROOT_INO, f->name, &rc);
    if (!ino || op(p, ht_ns_open(p->k.ns, ino, &o)))
        return;
    pattern(data, seed);
    ssize_t n = ht_obj_write(o, 0, data, BYTES);
    expect(p, n < 0 || n == BYTES, "a chunk was written in part");
    if (op(p, n < 0 ? (int)n : 0) == 0)
        set(f, seed);
    ht_ns_touch(p->k.ns, ino, true);
    ht_ns_close(p->k.ns, ino);
    check_now(p, f);
}

static void sync_file(struct fault_scenario *p, struct fault_scenario_file *f)
{
    int rc;
    uint64_t ino = find(p, HT_NS_ROOT_INO, f->name, &rc);

    if (ino && op(p, ht_ns_fsync(p->k.ns, ino)) == 0)
        f->acked = f->count - 1;
}

static void commit_all(struct fault_scenario *p)
{
    if (op(p, ht_store_commit(p->k.store)) == 0)
        for (unsigned i = 0; i < FAULT_SCENARIO_FILES; i++)
            p->file[i].acked = p->file[i].count - 1;
}

static void cut(struct fault_scenario *p, struct fault_scenario_file *f)
{
    struct stat st = {.st_size = 0};
    int rc;
    uint64_t ino = find(p, HT_NS_ROOT_INO, f->name, &rc);

    if (ino && op(p, ht_ns_setattr(p->k.ns, ino, HT_SET_SIZE | HT_SET_MTIME_NOW, &st, &st)) == 0)
        set(f, EMPTY);
    check_now(p, f);
}

static void drop(struct fault_scenario *p, struct fault_scenario_file *f)
{
    if (now(f) != ABSENT && op(p, ht_ns_unlink(p->k.ns, HT_NS_ROOT_INO, f->name)) == 0)
        set(f, ABSENT);
    check_now(p, f);
}

static void clone_file(struct fault_scenario *p, const struct fault_scenario_file *from, struct fault_scenario_file *to)
{
    struct ht_obj *a, *b;
    int rc;

    if (now(to) == ABSENT)
        make(p, to);
    uint64_t source = find(p, HT_NS_ROOT_INO, from->name, &rc), target = find(p, HT_NS_ROOT_INO, to->name, &rc);
    if (!source || !target || now(from) <= EMPTY || op(p, ht_ns_open(p->k.ns, source, &a)))
        return;
    if (op(p, ht_ns_open(p->k.ns, target, &b)) == 0) {
        ssize_t n = ht_obj_clone(a, 0, b, 0, BYTES);
        expect(p, n < 0 || n == BYTES, "a chunk was cloned in part");
        if (op(p, n < 0 ? (int)n : 0) == 0)
            set(to, now(from));
        ht_ns_close(p->k.ns, target);
    }
    ht_ns_close(p->k.ns, source);
    check_now(p, to);
}

static void evict(struct fault_scenario *p, const struct fault_scenario_file *f)
{
    struct ht_obj *o;
    int rc;
    uint64_t ino = find(p, HT_NS_ROOT_INO, f->name, &rc);

    if (!ino || ht_ns_open(p->k.ns, ino, &o))
        return;
    (void)op(p, ht_obj_writeback(o));
    ht_obj_evict(o);
    ht_ns_close(p->k.ns, ino);
    check_now(p, f);
}

/* ------------------------------------------------------------------ model */

static int set_word(struct fault_scenario *p, uint64_t ino, const char *name, const char *value)
{
    struct ht_caller caller = {root_cred, NULL, NULL};

    return ht_attribute_set(p->k.ctl, ino, name, value, strlen(value), 0, &caller);
}

static void fill_gradient(uint8_t *out, const struct harness_param *q, uint64_t seed)
{
    uint64_t size = harness_element_bytes(q);

    for (uint64_t e = 0; e < q->elements; e++) {
        float x = (float)(int32_t)(rnd_next(&seed) & 0xffff) / 65536.0f - 0.5f;
        memcpy(out + size * e, (uint8_t *)&x + 4 - size, size);
    }
}

/* dtype NULL: a file that is no parameter. */
static int make_file(struct fault_scenario *p, uint64_t root, const char *name, const char *dtype, const void *data,
                     size_t bytes)
{
    struct ht_obj *o;
    struct stat st;
    int rc = ht_ns_mknod(p->k.ns, root, name, S_IFREG | 0644, 0, root_cred, &st);

    if (rc)
        return rc;
    if (dtype)
        rc = set_word(p, st.st_ino, "user.hitrain.dtype", dtype);
    if (!rc)
        rc = ht_ns_open(p->k.ns, st.st_ino, &o);
    if (!rc) {
        ssize_t n = ht_obj_write(o, 0, data, bytes);
        rc = n < 0 ? (int)n : n == (ssize_t)bytes ? 0 : -EIO;
        ht_ns_close(p->k.ns, st.st_ino);
    }
    ht_ns_forget(p->k.ns, st.st_ino, 1);
    return rc;
}

static int make_param(struct fault_scenario *p, uint64_t root, const struct harness_param *q)
{
    static uint8_t data[8192];

    fill_gradient(data, q, 5);
    return make_file(p, root, q->name, q->dtype, data, q->elements * harness_element_bytes(q));
}

#define MODEL_WORDS "adamw lr=0.01 weight_decay=0.1 accumulate=2 max_grad_norm=1 delta=on delta_max=1"

static void model(struct fault_scenario *p)
{
    struct stat st;
    int rc = op(p, ht_ns_mkdir(p->k.ns, HT_NS_ROOT_INO, "model", 0755, root_cred, &st));

    if (rc)
        return;
    for (unsigned i = 0; !rc && i < PARAMS; i++)
        rc = op(p, make_param(p, st.st_ino, &params[i]));
    if (!rc)
        rc = op(p, make_file(p, st.st_ino, "cursor", NULL, "0", 1));
    if (!rc)
        rc = op(p, set_word(p, st.st_ino, "user.hitrain.optimizer", MODEL_WORDS));
    if (!rc)
        p->model = st.st_ino;
    ht_ns_forget(p->k.ns, st.st_ino, 1);
    if (!rc && op(p, ht_optim_commit(p->k.optim, p->model)) == 0)
        p->model_acked = true;
}

static int write_dense(struct fault_scenario *p, const struct ht_param_desc *desc, const struct harness_param *q,
                       uint64_t seed)
{
    static uint8_t data[8192];
    uint64_t bytes = q->elements * harness_element_bytes(q);
    struct ht_grad *g;
    int rc = ht_grad_open(p->k.optim, desc, &g);

    if (rc)
        return rc;
    fill_gradient(data, q, seed);
    ssize_t n = ht_grad_write(g, 0, data, bytes);
    rc = n < 0 ? (int)n : n == (ssize_t)bytes ? ht_grad_flush(g) : -EIO;
    ht_grad_release(g);
    return rc;
}

static int write_sparse(struct fault_scenario *p, const struct ht_param_desc *desc, const struct harness_param *q,
                        uint64_t seed)
{
    static uint8_t data[16384];
    struct ht_topk *t;
    size_t bytes = harness_sparse_content(data, q, seed);
    int rc = ht_topk_open(p->k.optim, desc, &t);

    if (rc)
        return rc;
    ssize_t n = ht_topk_write(t, 0, data, bytes);
    rc = n < 0 ? (int)n : n == (ssize_t)bytes ? ht_topk_flush(t) : -EIO;
    ht_topk_release(t);
    return rc;
}

/* Its content is kept until it is closed. */
static int describe(struct fault_scenario *p, const struct harness_param *q, struct ht_param_desc *out)
{
    uint8_t dtype = harness_element_bytes(q) == 4 ? HT_DTYPE_F32 : HT_DTYPE_BF16;
    struct ht_obj *o;
    int rc;
    uint64_t ino = find(p, p->model, q->name, &rc);

    if (!ino)
        return rc;
    rc = ht_ns_open(p->k.ns, ino, &o);
    if (!rc)
        *out = (struct ht_param_desc){.root = p->model, .obj = o, .dtype = dtype, .grad_dtype = dtype};
    return rc;
}

static int gradient(struct fault_scenario *p, const struct harness_param *q, uint64_t seed, bool sparse)
{
    struct ht_param_desc desc;
    int rc = describe(p, q, &desc);

    if (rc)
        return rc;
    rc = (sparse ? write_sparse : write_dense)(p, &desc, q, seed);
    ht_ns_close(p->k.ns, ht_obj_id(desc.obj));
    return rc;
}

/* A part of a gradient that is taken back before the whole one comes. */
static int write_and_drop(struct fault_scenario *p, const struct harness_param *q)
{
    static const uint8_t part[64] = {1};
    struct ht_param_desc desc;
    struct ht_grad *g;
    int rc = describe(p, q, &desc);

    if (rc)
        return rc;
    rc = ht_grad_open(p->k.optim, &desc, &g);
    if (!rc) {
        ssize_t n = ht_grad_write(g, 4, part, sizeof(part));
        rc = n < 0 ? (int)n : ht_grad_flush(g);
        int dropped = ht_optim_drop(p->k.optim, p->model, ht_obj_id(desc.obj), NULL);
        rc = rc ? rc : dropped;
        ht_grad_release(g);
    }
    ht_ns_close(p->k.ns, ht_obj_id(desc.obj));
    return rc;
}

/* The second one asynchronously. */
static int end_step(struct fault_scenario *p)
{
    if (p->steps_acked != 1)
        return ht_optim_commit(p->k.optim, p->model);
    int rc = ht_optim_step_async(p->k.optim, p->model);
    return rc ? rc : ht_optim_wait(p->k.optim, p->model, 0);
}

/* A step, or back to the one before it. */
static void step(struct fault_scenario *p, bool give_up)
{
    int rc = p->model && p->model_acked ? 0 : -ENOENT;

    if (rc)
        return;
    if (p->steps_acked == 1) /* it converts state */
        rc = op(p, set_word(p, p->model, "user.hitrain.optimizer", MODEL_WORDS " state_bits=16 state_bits_min=0"));
    if (!rc)
        rc = op(p, write_and_drop(p, &params[0]));
    for (unsigned i = 0; !rc && i < PASSES * PARAMS; i++)
        rc = op(p, gradient(p, &params[i % PARAMS], p->steps_acked * 100 + i, i == 0 && p->steps_acked == 1));
    if (!rc && !give_up) {
        p->steps = p->steps_acked + 1; /* it may become durable, whatever it says */
        rc = op(p, end_step(p));
        if (!rc)
            p->steps_acked = p->steps;
    }
    if (rc || give_up)
        (void)op(p, ht_optim_abort(p->k.optim, p->model));
    uint64_t at = harness_model_step(&p->k, p->model);
    if (at == p->steps) /* the step became durable, but its commit returned an error */
        p->steps_acked = at;
}

/*
 * A program maps the memory of a parameter and sees in it the bytes that a reader sees. Without such memory the script
 * works as ever.
 */
static void step_seen(struct fault_scenario *p, bool give_up)
{
    static uint8_t seen[8192], read[8192];
    struct ht_obj *o;
    int rc, fd = -1;
    uint64_t ino = p->model ? find(p, p->model, params[0].name, &rc) : 0;

    if (!ino || op(p, ht_ns_open(p->k.ns, ino, &o)))
        return;
    bool out = op(p, ht_obj_shm_open_for(o, 0, &fd)) == 0;
    step(p, give_up);
    ssize_t n = ht_obj_read(o, 0, read, sizeof(read));
    if (out && n > 0 && !ht_store_failed(p->k.store))
        expect(p, pread(fd, seen, sizeof(seen), 0) == n && memcmp(seen, read, (size_t)n) == 0,
               "shared memory is not what is read");
    if (out)
        ht_obj_shm_close(o);
    ht_ns_close(p->k.ns, ino);
}

/* ---------------------------------------------------------------- engines */

/* Work in the background. Whatever fails, files and models stay as they are. */
static void engines(struct fault_scenario *p)
{
    struct ht_store *s = p->k.store;

    (void)op(p, background_scrub(s));
    (void)op(p, background_dedup(s));
    ht_store_set_compress(s, all_may, NULL);
    for (unsigned round = 0; round < 2; round++)
        (void)op(p, background_compress(s));
    (void)op(p, background_compact(s));
    background_discard(s);
}

/* ----------------------------------------------------------------- script */

static void script(struct fault_scenario *p)
{
    struct fault_scenario_file *a = &p->file[0], *b = &p->file[1], *c = &p->file[2], *d = &p->file[3], *e = &p->file[4];

    put(p, a, 10);
    sync_file(p, a);
    put(p, b, 20);
    put(p, d, 40);
    commit_all(p);
    model(p);
    step(p, false);
    put(p, a, 11);
    clone_file(p, a, c);
    drop(p, d);
    sync_file(p, c);
    (void)op(p, ht_store_checkpoint(p->k.store));
    evict(p, a);
    step_seen(p, true);
    put(p, e, 50);
    commit_all(p);
    cut(p, b);
    sync_file(p, b);
    step_seen(p, false);
    put(p, b, 50);
    commit_all(p); /* b and e have the same content */
    evict(p, b);
    engines(p);
    sync_file(p, a);
}

static void begin(struct fault_scenario *p)
{
    p->k.shm_bytes = SHM_BYTES;
    static const char *const names[FAULT_SCENARIO_FILES] = {"a", "b", "c", "d", "e"};
    for (unsigned i = 0; i < FAULT_SCENARIO_FILES; i++)
        p->file[i] = (struct fault_scenario_file){.name = names[i], .version = {ABSENT}, .count = 1};
}

void fault_scenario_begin(struct fault_scenario *p, unsigned devices)
{
    *p = (struct fault_scenario){.steps = 0};
    harness_format(&p->k, devices, DEVICE_BYTES, 512);
    begin(p);
}

bool fault_scenario_begin_file(struct fault_scenario *p)
{
    *p = (struct fault_scenario){.steps = 0};
    if (!harness_format_file(&p->k, DEVICE_BYTES))
        return false;
    begin(p);
    return true;
}

/*
 * With all that may be kept in memory, so that updates pass through staging buffers. A fault
 * may come between: then they do not.
 */
static void fill_protected_set(struct fault_scenario *p)
{
    enum { CHUNKS = 6 };
    struct ht_store *s = p->k.store;
    struct ht_obj *o;
    struct ht_obj_attr attr = {.oid = ht_store_new_id(s), .chunk_bytes = HT_CHUNK_BYTES, .obj_class = HT_CLASS_SCRATCH};

    if (ht_obj_create(s, &attr, &o))
        return;
    struct ht_batch_pin l = {.store = s, .count = CHUNKS};
    for (unsigned i = 0; i < CHUNKS; i++)
        l.chunk[i] = (struct ht_batch_pin_chunk){.obj = o, .index = i, .mode = HT_BATCH_PIN_UPDATE};
    if (!ht_obj_truncate(o, (uint64_t)CHUNKS * HT_CHUNK_BYTES) && !ht_batch_pin_begin(&l)) {
        int rc = ht_batch_pin_wait(&l);
        ht_batch_pin_end(&l, 0);
        rc = ht_batch_pin_finish(&l) ? -EIO : rc;
        (void)rc;
    }
    ht_obj_put(o);
}

void fault_scenario_run(struct fault_scenario *p, bool clean)
{
    int rc = harness_open(&p->k, 1);

    if (rc == 0 && p->k.dev_count > 1)
        fill_protected_set(p);
    if (rc == 0)
        script(p);
    (void)harness_close(&p->k, rc == 0 && clean);
}

/* -------------------------------------------------------------- checking */

static void check_file(struct fault_scenario *p, struct fault_scenario_file *f)
{
    uint64_t have;
    bool allowed = false, newer = f->count - 1 > f->acked;

    expect(p, inspect(p, f, &have) == 0, "a file cannot be read");
    for (unsigned i = f->acked; i < f->count; i++)
        allowed |=
            f->version[i] == have || (newer && have == HOLE); /* its size became durable, its content could not */
    if (!allowed)
        fprintf(stderr, "%s: version %llu, acknowledged was %llu, last was %llu\n", f->name, (unsigned long long)have,
                (unsigned long long)f->version[f->acked], (unsigned long long)now(f));
    expect(p, allowed, "a file is not what was acknowledged, nor newer");
}

static void check_model(struct fault_scenario *p)
{
    int rc;
    uint64_t root = find(p, HT_NS_ROOT_INO, "model", &rc);
    uint64_t at = root ? harness_model_step(&p->k, root) : UINT64_MAX;

    if (!p->model_acked)
        return;
    expect(p, root && at != UINT64_MAX, "the model is gone");
    expect(p, at == UINT64_MAX || (at >= p->steps_acked && at <= p->steps), "the model is at another step than it was");
    if (root && at <= STEPS && harness_model_hash(&p->k, root, params, PARAMS) != step_hash[at])
        fprintf(stderr, "model at step %llu, acknowledged was %llu, tried %llu\n", (unsigned long long)at,
                (unsigned long long)p->steps_acked, (unsigned long long)p->steps);
    if (root && at <= STEPS)
        expect(p, harness_model_hash(&p->k, root, params, PARAMS) == step_hash[at],
               "a step is not the bits that it should be");
    p->model = root;
    p->steps = p->steps_acked = at;
}

static void work_on(struct fault_scenario *p)
{
    unsigned failures = p->failures;

    for (unsigned i = 0; i < FAULT_SCENARIO_FILES; i++) {
        p->file[i] = (struct fault_scenario_file){.name = p->file[i].name, .version = {EMPTY}, .count = 1};
        int rc;
        if (!find(p, HT_NS_ROOT_INO, p->file[i].name, &rc))
            p->file[i].version[0] = ABSENT;
        put(p, &p->file[i], 100 + i);
    }
    commit_all(p);
    step(p, false);
    expect(p, p->failures == failures, "it does not work on");
}

const char *fault_scenario_check(struct fault_scenario *p)
{
    int rc = harness_open(&p->k, 1);

    expect(p, rc == 0, "it does not mount");
    if (rc == 0) {
        for (unsigned i = 0; i < FAULT_SCENARIO_FILES; i++)
            check_file(p, &p->file[i]);
        check_model(p);
        work_on(p);
    }
    expect(p, harness_close(&p->k, rc == 0) == 0, "it does not unmount");
    expect(p, harness_fsck(&p->k) == 0, "fsck finds problems");
    harness_free(&p->k);
    return p->wrong;
}

void fault_scenario_learn(void)
{
    static struct fault_scenario p;

    fault_scenario_begin(&p, 1);
    ck_assert_int_eq(harness_open(&p.k, 1), 0);
    model(&p);
    for (unsigned i = 0; i <= STEPS; i++) {
        step_hash[i] = harness_model_hash(&p.k, p.model, params, PARAMS);
        ck_assert_uint_ne(step_hash[i], 0);
        ck_assert_uint_eq(harness_model_step(&p.k, p.model), i);
        step(&p, false);
    }
    ck_assert_int_eq(harness_close(&p.k, true), 0);
    ck_assert_uint_eq(p.failures, 0);
    harness_free(&p.k);
}
