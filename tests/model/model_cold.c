/* SPDX-License-Identifier: Apache-2.0 */
/*
 * model_cold.c - where each chunk of a model lies: nowhere (a hole), in a vault, on a fast device or on one of the
 * class capacity. Long random work on a model root, its kept steps and clones, and on a simple model in memory that
 * knows place and bytes of each chunk, with remounts and crashes between. Both must agree.
 *
 * The simple model cannot know which of two devices with room a new chunk gets: then it learns that at the commit.
 * Nothing moves later, unless the model says so.
 *
 * HITRAIN_SEED=N draws other operations. HITRAIN_LONG=1 draws 20 times as many.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/background.h"
#include "tests/support/harness.h"
#include "tests/support/memory.h"
#include "tests/support/states.h"
#include "tests/support/suite.h"
#include "tiering/api/check.h"
#include "tiering/api/cold.h"
#include "tiering/api/stats.h"
#include "tiering/base/hash.h"
#include "tiering/object/chunk.h"

enum { MIB = 1 << 20, DEVICE_BYTES = 64 * MIB, CHUNKS = 4, MOST = CHUNKS * MIB };
enum { OPERATIONS = 120, SEEDS = 6, NAMED = 3, LEASE = 7 };

/* One file: its bytes, and where they are. */
struct file {
    uint64_t size;
    char at[CHUNKS]; /* Hole, Cold, Fast, Slow; New: here, and not committed yet */
    uint8_t *bytes;  /* MOST; zeros behind the end */
};

struct work {
    struct harness k;
    struct file now, committed, kept[NAMED]; /* no bytes: there is no such kept step */
    bool changed[CHUNKS];                    /* since the commit */
    bool all_paths, is_full;                 /* no fast device has room for a chunk */
    bool freed;                              /* since it was full */
    bool may_move;                           /* to another device: work in the background */
    unsigned segment;
    uint64_t rnd, operations;
    uint64_t fast, slow, recalled, demoted; /* new chunks by their place, and others */
};

static const char *const names[NAMED] = {"a", "b", "c"};
static char folder[] = "/tmp/hitrain-model-cold-XXXXXX";

static void copy(struct file *to, const struct file *from)
{
    if (!to->bytes)
        to->bytes = test_alloc(MOST);
    memcpy(to->bytes, from->bytes, MOST);
    memcpy(to->at, from->at, CHUNKS);
    to->size = from->size;
}

static uint64_t root_of(const struct work *w)
{
    return harness_find(&w->k, HT_NS_ROOT_INO, "model");
}

/* Its file "w". The caller puts it. */
static struct ht_obj *object_of(const struct work *w, uint64_t root)
{
    struct ht_obj *o = ht_obj_get(w->k.store, harness_find(&w->k, root, "w"));

    ck_assert_ptr_nonnull(o);
    return o;
}

static char place_of(const struct work *w, struct ht_obj *o, unsigned i)
{
    ht_store_lock(w->k.store);
    struct ht_chunk *c = ht_chunk_find(o, i);
    bool is_there = c && c->flags & HT_CH_PUB;
    char at = !is_there ? 'H' : ht_ref_is_cold(&c->pub) ? 'C' : ht_ref_home(&c->pub) == 0 ? 'F' : 'S';
    ht_store_unlock(w->k.store);
    return at;
}

static bool may_lie(const struct work *w, const struct file *f, unsigned i, char at)
{
    bool is_whole = f->size >= (i + 1) * (uint64_t)MIB; /* a smaller one may find room */

    if (f->at[i] != 'N')
        return f->at[i] == at || (w->may_move && strchr("FS", f->at[i]) && strchr("FS", at));
    if (w->all_paths || (w->is_full && (w->freed || !is_whole)))
        return at == 'F' || at == 'S';
    return at == (w->is_full ? 'S' : 'F');
}

static void expect_bytes(const struct work *w, struct ht_obj *o, const struct file *f, const char *what)
{
    static uint8_t got[MOST];

    ck_assert_uint_eq(ht_obj_size(o), f->size);
    ck_assert_int_eq(ht_obj_read(o, 0, got, MOST), (ssize_t)f->size);
    ck_assert_msg(memcmp(got, f->bytes, f->size) == 0, "operation %llu: %s has other bytes",
                  (unsigned long long)w->operations, what);
}

/* The published places of the file in root; those that are new are learned. */
static void expect_places(struct work *w, struct ht_obj *o, struct file *f, const char *what)
{
    for (unsigned i = 0; i < CHUNKS; i++) {
        char at = place_of(w, o, i);
        ck_assert_msg(may_lie(w, f, i, at), "operation %llu: chunk %u of %s lies at %c in place of %c%s%s",
                      (unsigned long long)w->operations, i, what, at, f->at[i], w->is_full ? ", full" : "",
                      w->freed ? ", some freed" : "");
        w->fast += f->at[i] == 'N' && at == 'F';
        w->slow += f->at[i] == 'N' && at == 'S';
        f->at[i] = at;
    }
}

static void expect(struct work *w, uint64_t root, struct file *f, const char *what)
{
    struct ht_obj *o = object_of(w, root);

    expect_places(w, o, f, what);
    expect_bytes(w, o, f, what);
    ht_obj_put(o);
}

static void compare(struct work *w)
{
    struct ht_obj *o = object_of(w, root_of(w));
    bool is_cold = false, may_be = false; /* cold bytes that a write replaces count until that is on a device */

    expect_places(w, o, &w->committed, "the model");
    if (rnd_below(&w->rnd, 4) == 0)
        ht_obj_evict(o);
    expect_bytes(w, o, &w->now, "the model");
    for (unsigned i = 0; i < CHUNKS; i++) {
        is_cold |= w->committed.at[i] == 'C' || w->now.at[i] == 'C';
        may_be |= w->changed[i];
    }
    uint64_t cold = ht_scope_cold_bytes(w->k.store, root_of(w));
    ck_assert_msg((cold != 0) == is_cold || (cold && may_be),
                  "operation %llu: %llu bytes are cold, now %.4s, committed %.4s", (unsigned long long)w->operations,
                  (unsigned long long)cold, w->now.at, w->committed.at);
    ht_obj_put(o);
}

static void compare_kept(struct work *w)
{
    struct ht_ns_kept about;

    for (unsigned i = 0; i < NAMED; i++) {
        int rc = ht_ns_kept_find(w->k.ns, root_of(w), names[i], &about);
        ck_assert_int_eq(rc, w->kept[i].bytes ? 0 : -ENOENT);
        if (!rc)
            expect(w, about.ino, &w->kept[i], names[i]);
    }
}

static void op_commit(struct work *w)
{
    ck_assert_int_eq(ht_optim_commit(w->k.optim, root_of(w)), 0);
    for (unsigned i = 0; i < CHUNKS; i++)
        w->freed |= w->committed.at[i] == 'F' && w->now.at[i] != 'F';
    copy(&w->committed, &w->now);
    memset(w->changed, 0, sizeof(w->changed));
    compare(w);
    copy(&w->now, &w->committed);
}

static void taken_back(struct work *w)
{
    copy(&w->now, &w->committed);
    memset(w->changed, 0, sizeof(w->changed));
}

static void op_abort(struct work *w)
{
    ck_assert_int_eq(ht_optim_abort(w->k.optim, root_of(w)), 0);
    taken_back(w);
}

static void op_boundary(struct work *w)
{
    (rnd_below(&w->rnd, 3) ? op_commit : op_abort)(w);
}

static void op_remount(struct work *w)
{
    bool clean = rnd_below(&w->rnd, 2);

    ck_assert_int_eq(harness_close(&w->k, clean), 0);
    ck_assert_uint_eq(harness_fsck(&w->k), 0);
    ck_assert_int_eq(harness_open(&w->k, 1), 0);
    w->freed = true;
    taken_back(w);
    compare_kept(w);
}

static void note_change(struct work *w, unsigned i, char at)
{
    w->now.at[i] = at;
    w->changed[i] = true;
}

static void fill(struct work *w, uint64_t off, uint64_t end, uint64_t period)
{
    for (uint64_t i = off; i < end; i += 4) {
        float x = (float)(1 + (i + w->operations) % period);
        memcpy(w->now.bytes + i, &x, 4);
    }
}

static void op_write(struct work *w)
{
    uint64_t off = 4 * rnd_below(&w->rnd, MOST / 4), len = 4 + 4 * rnd_below(&w->rnd, (MOST - off) / 4);
    struct ht_obj *o = object_of(w, root_of(w));

    if (rnd_below(&w->rnd, 3) == 0) { /* whole chunks: nothing is fetched */
        off &= ~(uint64_t)(MIB - 1);
        len = MIB;
    } else if (rnd_below(&w->rnd, 2)) {
        len = ht_min_u64(len, 4000);
    }
    fill(w, off, off + len, 1000);
    ck_assert_int_eq(ht_obj_write(o, off, w->now.bytes + off, len), (ssize_t)len);
    for (uint64_t i = off / MIB; i * MIB < off + len; i++)
        note_change(w, (unsigned)i, 'N');
    w->now.size = ht_max_u64(w->now.size, off + len);
    ht_obj_put(o);
}

static void op_truncate(struct work *w)
{
    uint64_t size = 4 * rnd_below(&w->rnd, MOST / 4 + 1);
    struct ht_obj *o = object_of(w, root_of(w));

    if (rnd_below(&w->rnd, 3) == 0)
        size &= ~(uint64_t)(MIB - 1);
    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    if (size < w->now.size)
        memset(w->now.bytes + size, 0, w->now.size - size);
    for (unsigned i = 0; i < CHUNKS; i++)
        if (size < w->now.size && size < (i + 1) * (uint64_t)MIB)
            note_change(w, i, size <= i * (uint64_t)MIB ? 'H' : w->now.at[i]);
    w->now.size = size;
    ht_obj_put(o);
}

static void op_punch(struct work *w)
{
    unsigned i = (unsigned)rnd_below(&w->rnd, CHUNKS);
    struct ht_obj *o = object_of(w, root_of(w));

    ck_assert_int_eq(ht_obj_punch(o, (uint64_t)i * MIB, MIB), 0);
    memset(w->now.bytes + i * MIB, 0, MIB);
    note_change(w, i, 'H');
    ht_obj_put(o);
}

/* A step of the optimizer writes all. The simple model computes it, too. */
static void op_update(struct work *w)
{
    const struct harness_param p = {"w", "f32", w->now.size / 4};
    uint64_t seed = 1 + w->operations, rnd = seed;

    if (!p.elements)
        return;
    struct ht_optim_steer by = {0}; /* a state of another size refuses */
    int rc = ht_optim_reset(w->k.optim, root_of(w), harness_find(&w->k, root_of(w), "w"), &by);
    ck_assert(rc == 0 || rc == -ENOENT);
    harness_gradient(&w->k, root_of(w), &p, seed);
    for (uint64_t i = 0; i < p.elements; i++) {
        float x, g = (float)(int32_t)(rnd_next(&rnd) & 0xffff) / 65536.0f - 0.5f;
        memcpy(&x, w->now.bytes + 4 * i, 4);
        x -= g;
        memcpy(w->now.bytes + 4 * i, &x, 4);
    }
    for (unsigned i = 0; i * (uint64_t)MIB < w->now.size; i++)
        note_change(w, i, 'N');
    op_boundary(w);
}

/* A block of the file goes into the newest segment. Returns its place. */
static struct ht_obj_place put_block(const struct work *w, unsigned i)
{
    uint32_t stored = (uint32_t)ht_min_u64(w->now.size - i * (uint64_t)MIB, MIB);
    const uint8_t *bytes = w->now.bytes + i * MIB;
    uint64_t at = HT_BLOCK_BYTES + (uint64_t)i * MIB;
    char path[128];

    snprintf(path, sizeof(path), "%s/seg/%08x/%04x", folder, LEASE, w->segment);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ck_assert_int_eq(pwrite(fd, bytes, stored, (off_t)at), stored);
    ck_assert_int_eq(ftruncate(fd, (off_t)ht_round_up(at + stored, HT_BLOCK_BYTES)), 0);
    close(fd);
    return (struct ht_obj_place){.index = i,
                                 .lease = LEASE,
                                 .segment = w->segment,
                                 .unit = (uint32_t)(at / HT_BLOCK_BYTES),
                                 .stored = stored,
                                 .checksum = ht_hash64(bytes, stored, 0)};
}

static void set_cold(const struct work *w, uint64_t root)
{
    ck_assert_int_eq(ht_ns_setxattr(w->k.ns, root, "user.hitrain.cold", "job@1", 5, 0), 0);
}

/* Each hole gets a place. Chunks with content refuse one, also where their deletion is not committed yet. */
static void op_place(struct work *w)
{
    struct ht_obj *o = object_of(w, root_of(w));

    set_cold(w, root_of(w));
    w->segment++;
    for (unsigned i = 0; i * (uint64_t)MIB < w->now.size; i++) {
        bool is_free = w->now.at[i] == 'H' && w->committed.at[i] == 'H';
        if (is_free)
            fill(w, i * (uint64_t)MIB, ht_min_u64(w->now.size, (i + 1) * (uint64_t)MIB), 777);
        struct ht_obj_place p = put_block(w, i);
        ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &p, 1), is_free ? 0 : -EEXIST);
        if (is_free)
            note_change(w, i, 'C');
    }
    ht_obj_put(o);
}

static bool never(void *ctx)
{
    return false;
}

/* Published content comes, also in mid-step. Chunks that have changed since may stay there until the commit. */
static void op_recall(struct work *w)
{
    ck_assert_int_eq(ht_scope_recall(w->k.store, root_of(w), never, NULL), 0);
    struct ht_obj *o = object_of(w, root_of(w));
    for (unsigned i = 0; i < CHUNKS; i++) {
        if (w->committed.at[i] != 'C' || (w->changed[i] && place_of(w, o, i) == 'C'))
            continue;
        w->committed.at[i] = 'N';
        w->recalled++;
    }
    expect_places(w, o, &w->committed, "a recalled model");
    for (unsigned i = 0; i < CHUNKS; i++)
        if (!w->changed[i])
            w->now.at[i] = w->committed.at[i];
    ht_obj_put(o);
}

static void remove_root(const struct work *w, const char *name)
{
    uint64_t root = harness_find(&w->k, HT_NS_ROOT_INO, name);

    ck_assert_int_eq(ht_ns_unlink(w->k.ns, root, "w"), 0);
    ck_assert_int_eq(ht_ns_unlink(w->k.ns, root, "cursor"), 0);
    ck_assert_int_eq(ht_ns_rmdir(w->k.ns, HT_NS_ROOT_INO, name), 0);
    ck_assert_int_eq(ht_store_commit(w->k.store), 0);
}

static void op_forget(struct work *w)
{
    unsigned i = (unsigned)rnd_below(&w->rnd, NAMED);

    ck_assert_int_eq(ht_ns_kept_forget(w->k.ns, root_of(w), names[i]), w->kept[i].bytes ? 0 : -ENOENT);
    w->kept[i].bytes = NULL;
    w->freed = true;
}

static uint64_t make_root(struct work *w, const char *name, uint64_t size)
{
    uint64_t root = harness_model(&w->k, name, NULL, 0, "sgd lr=1"), file = harness_make(&w->k, root, "w");

    harness_set_word(&w->k, file, "user.hitrain.dtype", "f32");
    if (w->all_paths)
        harness_set_word(&w->k, root, "user.hitrain.paths", "all");
    struct ht_obj *o = object_of(w, root);
    ck_assert_int_eq(ht_obj_truncate(o, size), 0);
    ht_obj_put(o);
    return root;
}

/*
 * As demote does it: the step is in the vault, a cold model is made beside, the names are exchanged, the old one goes.
 */
static void op_demote(struct work *w)
{
    op_boundary(w);
    uint64_t next = make_root(w, "next", w->now.size);
    struct ht_obj *o = object_of(w, next);
    set_cold(w, next);
    w->segment++;
    for (unsigned i = 0; i < CHUNKS; i++) {
        if (w->now.at[i] == 'H')
            continue;
        struct ht_obj_place p = put_block(w, i);
        ck_assert_int_eq(ht_obj_set_places(o, ht_obj_aborts(o), &p, 1), 0);
        w->committed.at[i] = w->now.at[i] = 'C';
    }
    ht_obj_put(o);
    ck_assert_int_eq(ht_optim_commit(w->k.optim, next), 0);
    ck_assert_int_eq(ht_ns_rename(w->k.ns, HT_NS_ROOT_INO, "next", HT_NS_ROOT_INO, "model", RENAME_EXCHANGE, NULL), 0);
    ck_assert_int_eq(ht_store_commit(w->k.store), 0);
    uint64_t old = harness_find(&w->k, HT_NS_ROOT_INO, "next");
    for (unsigned i = 0; i < NAMED; i++)
        if (w->kept[i].bytes)
            ck_assert_int_eq(ht_ns_kept_forget(w->k.ns, old, names[i]), 0);
    memset(w->kept, 0, sizeof(w->kept));
    remove_root(w, "next");
    w->freed = true;
    w->demoted++;
}

static void op_keep(struct work *w)
{
    unsigned i = (unsigned)rnd_below(&w->rnd, NAMED);
    struct ht_optim_steer by = {0};

    op_boundary(w);
    int rc = ht_optim_snapshot_by(w->k.optim, root_of(w), names[i], &by);
    ck_assert_int_eq(rc, w->kept[i].bytes ? -EEXIST : 0);
    if (!rc)
        copy(&w->kept[i], &w->committed);
}

static void op_rollback(struct work *w)
{
    unsigned i = (unsigned)rnd_below(&w->rnd, NAMED);

    op_boundary(w);
    ck_assert_int_eq(harness_rollback(&w->k, root_of(w), names[i]), w->kept[i].bytes ? 0 : -ENOENT);
    if (!w->kept[i].bytes)
        return;
    copy(&w->committed, &w->kept[i]);
    w->freed = true;
    taken_back(w);
}

/* A clone of a kept step has its places. A copy outside of the root has the bytes, and none in the vault. */
static void op_copies(struct work *w)
{
    unsigned i = (unsigned)rnd_below(&w->rnd, NAMED);
    struct ht_obj *o = object_of(w, root_of(w)), *out;
    struct ht_obj_attr attr = {.oid = ht_store_new_id(w->k.store), .chunk_bytes = HT_CHUNK_BYTES};

    ck_assert_int_eq(ht_obj_create(w->k.store, &attr, &out), 0);
    ck_assert_int_eq(ht_obj_clone(o, 0, out, 0, w->now.size), (ssize_t)w->now.size);
    expect_bytes(w, out, &w->now, "a copy");
    struct ht_obj_place p;
    ck_assert_uint_eq(ht_obj_places(out, 0, &p, 1), 0);
    struct ht_tx *tx;
    ck_assert_int_eq(ht_tx_begin(w->k.store, 4096, &tx), 0);
    ht_obj_delete(out, tx);
    ck_assert_int_eq(ht_tx_commit(tx, NULL), 0);
    ht_obj_put(out);
    ht_obj_put(o);
    if (!w->kept[i].bytes)
        return;
    ck_assert_int_eq(harness_clone(&w->k, root_of(w), names[i], HT_NS_ROOT_INO, "clone", 0), 0);
    expect(w, harness_find(&w->k, HT_NS_ROOT_INO, "clone"), &w->kept[i], "a clone");
    remove_root(w, "clone");
}

/* Another file takes all that is left of the fast device, or goes. */
static void op_fill(struct work *w)
{
    static const uint8_t bytes[MIB / 8];
    struct ht_device_stat st;
    uint64_t off = 0;

    op_commit(w);
    w->freed = false;
    w->is_full = !w->is_full;
    if (!w->is_full) {
        ck_assert_int_eq(ht_ns_unlink(w->k.ns, HT_NS_ROOT_INO, "fill"), 0);
        ck_assert_int_eq(ht_store_commit(w->k.store), 0);
        return;
    }
    struct ht_obj *o = ht_obj_get(w->k.store, harness_make(&w->k, HT_NS_ROOT_INO, "fill"));
    for (ht_store_device_stat(w->k.store, 0, &st); st.free_bytes >= MIB / 4; off += sizeof(bytes)) {
        ck_assert_int_eq(ht_obj_write(o, off, bytes, sizeof(bytes)), (ssize_t)sizeof(bytes));
        ck_assert_int_eq(ht_store_commit(w->k.store), 0);
        ht_store_device_stat(w->k.store, 0, &st);
    }
    ht_obj_put(o);
}

/* Bytes that are there twice are stored once: on either device, and never in the vault. */
static void op_background(struct work *w)
{
    if (rnd_below(&w->rnd, 3) == 0) {
        ck_assert_int_eq(ht_store_checkpoint(w->k.store), 0);
        return;
    }
    op_boundary(w);
    ck_assert_int_eq(background_dedup(w->k.store), 0);
    ck_assert_int_eq(background_compact(w->k.store), 0);
    w->may_move = true;
    expect(w, root_of(w), &w->committed, "the model");
    compare_kept(w);
    w->may_move = false;
    taken_back(w);
    w->freed = true;
}

static void one_operation(struct work *w)
{
    static void (*const op[])(struct work *) = {op_write,  op_write,  op_write,      op_truncate, op_punch,
                                                op_place,  op_place,  op_update,     op_commit,   op_commit,
                                                op_abort,  op_recall, op_keep,       op_rollback, op_forget,
                                                op_copies, op_demote, op_background, op_fill,     op_remount};

    w->operations++;
    op[rnd_below(&w->rnd, HT_ARRAY_SIZE(op))](w);
    compare(w);
    if (rnd_below(&w->rnd, 8) == 0)
        compare_kept(w);
    ht_store_verify(w->k.store, true);
}

static void begin(struct work *w, int seed)
{
    static const uint8_t uuid[16] = {7};
    struct ht_format_opts opts = {.capacity = 1u << 1};
    struct ht_super sb;

    harness_format(&w->k, 2, DEVICE_BYTES, seed % 3 ? 512 : 4096);
    ck_assert_int_eq(ht_super_format(w->k.dev, 2, &opts, &sb), 0);
    ck_assert_int_eq(harness_open(&w->k, 1), 0);
    ck_assert_int_eq(ht_store_set_vault(w->k.store, uuid, folder), 0);
    w->now.bytes = test_alloc(MOST);
    memset(w->now.at, 'H', CHUNKS);
    copy(&w->committed, &w->now);
    make_root(w, "model", 0);
    op_commit(w);
}

TEST_LOOP(places_equal_the_model, SEEDS)
{
    struct work w = {.rnd = setting("HITRAIN_SEED", 1) * 1000 + (uint64_t)_i, .all_paths = _i % 3 == 2};
    unsigned count = getenv("HITRAIN_LONG") ? 20 * OPERATIONS : OPERATIONS;

    begin(&w, _i);
    while (w.operations < count)
        one_operation(&w);
    op_boundary(&w);
    ck_assert_int_eq(harness_close(&w.k, true), 0);
    ck_assert_uint_eq(harness_fsck(&w.k), 0);
    printf("seed %d: new on fast devices %llu, on slow ones %llu; %llu recalled, %llu demotions\n", _i,
           (unsigned long long)w.fast, (unsigned long long)w.slow, (unsigned long long)w.recalled,
           (unsigned long long)w.demoted);
    ck_assert(w.fast + w.slow > 5 && w.recalled && w.demoted);
    harness_free(&w.k);
}

static void in_shell(const char *format)
{
    char command[96];

    snprintf(command, sizeof(command), format, folder);
    ck_assert_int_eq(system(command), 0);
}

static void make_vault(void)
{
    ck_assert_ptr_nonnull(mkdtemp(folder));
    in_shell("mkdir -p %s/seg/00000007");
}

static void remove_vault(void)
{
    in_shell("rm -rf %s");
}

RUN_TESTS("places against a model", .timeout_s = 7200, .quiet = SILENT, .memory = memory_keep, .setup = make_vault,
          .teardown = remove_vault)
