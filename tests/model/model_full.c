/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model_full.c - logged steps in a store that others fill up to its last block, at every point: between steps, before
 * and after crashes, and while logged steps are computed again.
 *
 * Each step is acknowledged as durable. So the root has the bits of the last one after each crash, each mount and each
 * abort, however full the store is. HITRAIN_SEED=N runs other work, HITRAIN_LONG=1 does ten times as much.
 */
#include <sched.h>

#include "tests/unit/optim/step/fixture.h"

#include "tiering/base/event.h"

enum { OPS = 60, FILLERS_MAX = 256 };

static const char *const configs[] = {
    "adamw lr=1e-2 partial=1 redo=on durable_every=100",
    "adamw lr=1e-2 partial=1 redo=on durable_every=5 redo_keep=3",
    "adamw lr=1e-2 partial=1 redo=on durable_every=7 accumulate=2",
    "sgd lr=1e-2 momentum=0.9 partial=1 redo=on durable_every=6 redo_keep=100",
    "sgd lr=1e-2 partial=1 redo=on durable_every=9 max_grad_norm=1",
    "adamw lr=1e-2 partial=1 redo=on durable_every=2 accumulate=3",
};

static uint64_t rnd, hash, step, filler[FILLERS_MAX];
static unsigned fillers;
static struct {
    unsigned logged, full, refused, crashes, replayed, fills, fills_in_replay;
} seen;

static atomic_uint told; /* a replay lacks room */

static void note_event(void *ctx, const struct ht_event *e)
{
    (void)ctx;
    told += e->code == HT_EVENT_NOT_RESERVED && strstr(e->text, "delete other files");
}

static uint64_t below(uint64_t n)
{
    return random_next(&rnd) % n;
}

static void check(void)
{
    struct ht_root_stat st = fixture_stat(&w);

    ck_assert_str_eq(st.error, "");
    ck_assert_uint_eq(st.step, step);
    ck_assert_uint_eq(st.durable_step, step);
    ck_assert_msg(fixture_hash(&w) == hash, "step %llu has other bits", (unsigned long long)step);
}

static void forget(struct ht_obj *obj)
{
    struct ht_tx *tx;
    uint64_t lsn;

    ck_assert_ptr_nonnull(obj);
    ck_assert_int_eq(ht_tx_begin(w.s, 0, &tx), 0);
    ht_obj_delete(obj, tx);
    ck_assert_int_eq(ht_tx_commit(tx, &lsn), 0);
    ht_obj_put(obj);
    ck_assert_int_eq(ht_store_sync(w.s, lsn), 0);
}

/* As a client of the mount does: what the store gives up for others is filled, too. */
static void fill(void)
{
    struct ht_obj_attr attr = {.oid = ht_store_new_id(w.s), .chunk_bytes = HT_CHUNK_BYTES};
    uint8_t *bytes = malloc(MIB);
    uint64_t off = 0;
    struct ht_obj *obj;

    if (fillers == FILLERS_MAX)
        return;
    ck_assert_int_eq(ht_obj_create(w.s, &attr, &obj), 0);
    memset(bytes, (int)below(255) + 1, MIB);
    do {
        for (size_t len = MIB; len >= 4096; len /= 2) {
            ssize_t n;
            while ((n = ht_obj_write(obj, off, bytes, len)) == (ssize_t)len)
                off += len;
            ck_assert(n == -ENOSPC || (n > 0 && n < (ssize_t)len));
        }
    } while (!ht_store_make_space(w.s, true));
    free(bytes);
    ck_assert_int_eq(ht_obj_sync(obj), 0);
    filler[fillers++] = attr.oid;
    ht_obj_put(obj);
    seen.fills++;
}

static void delete_one(void)
{
    if (!fillers)
        return;
    uint64_t at = below(fillers);
    forget(ht_obj_get(w.s, filler[at]));
    filler[at] = filler[--fillers];
}

/* Nothing is promised to a gradient that begins in a full store. False: it was refused for want of space. */
static bool send_one(const struct test_param *p)
{
    size_t len = p->n * dtype_bytes(p->grad_dtype);
    uint8_t *bytes = random_gradient(&w, p);
    struct ht_grad *g = open_grad(&w, p);
    ssize_t n = 0;

    for (size_t off = 0; n >= 0 && off < len; off += (size_t)n)
        n = ht_grad_write(g, off, bytes + off, ht_min_u64(128 * 1024, len - off));
    int rc = n < 0 ? (int)n : ht_grad_flush(g);
    ht_grad_release(g);
    free(bytes);
    ck_assert(!rc || rc == -ENOSPC);
    return !rc;
}

/* Of all parameters but one, or of all. */
static bool send(unsigned without)
{
    struct ht_optim_config c = fixture_config(w.config);
    bool all = true;

    for (unsigned pass = 0; all && pass < c.accumulate; pass++)
        for (unsigned i = 0; all && i < w.params; i++)
            all = i == without || send_one(&w.param[i]);
    return all;
}

static void abort_step(void)
{
    ck_assert_int_eq(ht_optim_abort(w.o, ROOT), 0);
    check();
}

static void train(unsigned without)
{
    if (!send(without)) {
        abort_step();
        delete_one();
        seen.refused++;
        return;
    }
    int rc = below(4) ? ht_optim_step(w.o, ROOT) : ht_optim_commit(w.o, ROOT);
    ck_assert_int_eq(rc, 0);
    step++;
    hash = fixture_hash(&w);
    bool logged = fixture_stat(&w).logged_steps > 0;
    seen.logged += logged;
    seen.full += !logged;
}

static void mount_and_fill(void)
{
    fixture_mount_and_go_on(&w);
    for (uint64_t i = below(1 << below(9)); i; i--)
        sched_yield();
    seen.fills_in_replay += fixture_stat(&w).replay_steps_left > 0;
    fill();
}

/* A crash takes the reset back: its space is the logged steps' until then. */
static void reset(unsigned i)
{
    int rc = ht_optim_reset(w.o, ROOT, w.param[i].oid, NULL);

    ck_assert(!rc || rc == -EBUSY); /* the open step has a gradient for it */
}

static void crash(void)
{
    if (!below(3)) {
        (void)send((unsigned)below(4));
    } else if (!below(3)) {
        reset((unsigned)below(w.params));
        fill();
    }
    seen.replayed += fixture_stat(&w).logged_steps > 0;
    fixture_crash(&w);
    for (uint64_t again = below(3); again; again--) {
        mount_and_fill();
        fixture_crash(&w);
    }
    if (below(2))
        mount_and_fill();
    else
        fixture_mount_and_go_on(&w);
    while (fixture_stat(&w).replay_steps_left && !told)
        usleep(1000);
    ck_assert_msg(!told, "a replay has no room");
    ht_optim_recovered(w.o);
    seen.crashes++;
}

static void work(void)
{
    switch (below(16)) {
    case 0:
        (void)send((unsigned)below(4));
        abort_step();
        break;
    case 1:
    case 2:
    case 3:
        crash();
        break;
    case 4:
        ck_assert_int_eq(ht_optim_finish(w.o), 0);
        remount();
        break;
    case 5:
        ck_assert_int_eq(ht_store_checkpoint(w.s), 0);
        break;
    case 6:
    case 7:
        delete_one();
        break;
    case 8:
    case 9:
    case 10:
        fill();
        break;
    default:
        train((unsigned)below(5));
        break;
    }
}

/* However the work ended: the mount finds a logged step, in a store that is full since. */
static void finish(void)
{
    while (fillers)
        delete_one();
    for (unsigned i = 0; i < 20 && (i < 2 || !fixture_stat(&w).logged_steps); i++)
        train(w.params);
    for (unsigned i = 0; i < w.params; i++)
        reset(i);
    fill();
    crash();
    check();
}

TEST_LOOP(a_full_store_keeps_acknowledged_steps, HT_ARRAY_SIZE(configs))
{
    const char *seed = getenv("HITRAIN_SEED");
    unsigned ops = getenv("HITRAIN_LONG") ? 10 * OPS : OPS;

    memset(&w, 0, sizeof(w));
    memset(&seen, 0, sizeof(seen));
    rnd = 88172645463325252ull + 7919 * (unsigned)_i + 1000003 * (seed ? strtoull(seed, NULL, 10) : 0);
    fillers = 0;
    told = 0;
    ht_event_set_sink(note_event, NULL);
    w.device_bytes = 96ull * MIB;
    fixture_open_as(&w, configs[_i], 2);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_F32, 300001, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_BF16, HT_DTYPE_BF16, 400001, HT_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F16, HT_DTYPE_F32, 17, HT_SMALL_CHUNK_BYTES);
    fixture_param(&w, HT_DTYPE_F32, HT_DTYPE_BF16, 65539, HT_CHUNK_BYTES);
    ck_assert_int_eq(ht_optim_commit(w.o, ROOT), 0);
    step = fixture_stat(&w).step;
    train(w.params);
    train(w.params);
    for (unsigned i = 0; i < ops; i++) {
        work();
        check();
    }
    finish();
    printf(
        "%s: %u logged and %u full steps, %u refused, %u crashes (%u with logged steps), %u fills (%u in a replay)\n",
        configs[_i], seen.logged, seen.full, seen.refused, seen.crashes, seen.replayed, seen.fills,
        seen.fills_in_replay);
    ck_assert(seen.logged && seen.full && seen.replayed && seen.fills);
    fixture_close(&w);
}

RUN_TESTS("logged steps in a full store", .timeout_s = getenv("HITRAIN_LONG") ? 3600 : 300, .quiet = ERRORS_ONLY)
