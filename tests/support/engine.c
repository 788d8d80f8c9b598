/* SPDX-License-Identifier: Apache-2.0 */
/* engine.c - random work on a store, a model beside it, and the states that a crash may leave. */
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/background.h"
#include "tests/support/engine.h"
#include "tests/support/recorder.h"
#include "tests/support/states.h"
#include "tiering/base/hash.h"
#include "tiering/api/batch_pin.h"
#include "tiering/api/check.h"
#include "tiering/api/stats.h"
#include "tiering/api/tx.h"

enum { REC_SLOT = HT_REC_OPT_FIRST, REC_STEP = HT_REC_OPT_FIRST + 1 };

#define MUST(x)                                                                                   \
    do {                                                                                          \
        if (!(x)) {                                                                               \
            fprintf(stderr, "%s:%d: %s does not hold (operation %llu)\n", __FILE__, __LINE__, #x, \
                    (unsigned long long)e->operations);                                           \
            abort();                                                                              \
        }                                                                                         \
    } while (0)

static uint64_t hash_of(const uint8_t *content, uint64_t size)
{
    return ht_hash64(content, size, size);
}

static struct version version_now(const struct slot_model *m)
{
    return (struct version){m->exists, m->exists ? m->size : 0, m->exists ? hash_of(m->content, m->size) : 0};
}

static bool same_version(const struct version *a, const struct version *b)
{
    return a->exists == b->exists && a->size == b->size && a->hash == b->hash;
}

static void note_version(struct slot_model *m)
{
    m->history = realloc(m->history, (m->count + 1) * sizeof(*m->history));
    m->history[m->count++] = version_now(m);
}

/* ------------------------------------------------ the metadata client */

static void put_step(struct engine *e, struct ht_tx *tx, uint64_t step)
{
    struct ht_buf *b = ht_tx_records(tx);
    size_t mark = ht_record_begin(b, REC_STEP);

    ht_buf_put_u64(b, step);
    ht_record_end(b, mark);
    e->pub_step = step;
}

static int client_replay(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    struct engine *e = ctx;
    struct ht_reader r = ht_reader_of(payload, len);

    if (type == REC_STEP) {
        e->step = e->pub_step = ht_get_u64(&r);
        return ht_reader_done(&r) ? 0 : -EUCLEAN;
    }
    uint32_t i = ht_get_u32(&r);
    uint64_t oid = ht_get_u64(&r);
    if (!ht_reader_done(&r) || i >= ENGINE_SLOTS)
        return -EUCLEAN;
    e->slot[i].oid = oid;
    e->slot[i].exists = oid != 0;
    return 0;
}

/* Published oids: of slots outside the scope the ones last put, of the scope those of the last commit. */
static uint64_t published_oid[ENGINE_SLOTS];

static int client_emit(void *ctx, struct ht_tx *tx, uint64_t *cursor, size_t max_bytes)
{
    struct engine *e = ctx;

    (void)max_bytes;
    struct ht_buf *b = ht_tx_records(tx);
    unsigned i = (unsigned)(*cursor)++;
    size_t mark = ht_record_begin(b, i < ENGINE_SLOTS ? REC_SLOT : REC_STEP);
    if (i < ENGINE_SLOTS) {
        ht_buf_put_u32(b, i);
        ht_buf_put_u64(b, published_oid[i]);
    } else {
        ht_buf_put_u64(b, e->pub_step);
    }
    ht_record_end(b, mark);
    return i < ENGINE_SLOTS;
}

static void publish_slot(struct engine *e, struct ht_tx *tx, unsigned i)
{
    struct ht_buf *b = ht_tx_records(tx);
    size_t mark = ht_record_begin(b, REC_SLOT);

    ht_buf_put_u32(b, i);
    ht_buf_put_u64(b, e->slot[i].exists ? e->slot[i].oid : 0);
    ht_record_end(b, mark);
    published_oid[i] = e->slot[i].exists ? e->slot[i].oid : 0;
}

static size_t client_pending_bytes(void *ctx, uint64_t scope)
{
    return 4096;
}

static void client_publish(void *ctx, uint64_t scope, size_t expected_bytes, struct ht_tx *tx)
{
    struct engine *e = ctx;

    for (unsigned i = scope ? ROOT_FIRST : 0; i < (scope ? ENGINE_SLOTS : ROOT_FIRST); i++)
        publish_slot(e, tx, i);
    if (scope)
        put_step(e, tx, e->step);
}

/* ----------------------------------------------------------------- life */

void engine_format(struct engine *e, uint64_t bytes, unsigned lba, uint64_t seed)
{
    memset(e, 0, sizeof(*e));
    e->rnd = seed;
    MUST(dev_open_ram(bytes, lba, &e->dev) == 0);
    struct ht_super sb;
    struct ht_format_opts opts = {0};
    MUST(ht_super_format(&e->dev, 1, &opts, &sb) == 0);
    for (unsigned i = 0; i < ENGINE_SLOTS; i++) {
        e->slot[i].content = calloc(1, ENGINE_BYTES_MAX);
        note_version(&e->slot[i]);
    }
    e->commit = calloc(1, sizeof(*e->commit));
    e->commits = 1;
    e->ack = calloc(1, sizeof(*e->ack));
    e->acks = 1;
}

static int mount_store(struct engine *e)
{
    struct ht_store_opts opts = {
        .dram_bytes = 8 << 20, .staging_bytes = 16 << 20, .numa_node = HT_NUMA_OFF, .no_threads = true};
    struct ht_participant client = {.type_first = HT_REC_OPT_FIRST,
                                    .type_last = HT_REC_OPT_LAST,
                                    .ctx = e,
                                    .replay = client_replay,
                                    .emit = client_emit,
                                    .pending_bytes = client_pending_bytes,
                                    .publish = client_publish};
    int rc = ht_store_new(&e->dev, 1, &opts, &e->s);

    if (!rc)
        rc = ht_store_register(e->s, &client);
    if (!rc)
        rc = ht_store_mount(e->s);
    return rc;
}

int engine_mount(struct engine *e)
{
    for (unsigned i = 0; i < ENGINE_SLOTS; i++) {
        e->slot[i].exists = false;
        e->slot[i].oid = 0;
    }
    e->step = e->pub_step = 0;
    int rc = mount_store(e);
    if (rc)
        return rc;
    for (unsigned i = 0; i < ENGINE_SLOTS; i++) {
        struct slot_model *m = &e->slot[i];
        published_oid[i] = m->oid;
        m->obj = m->exists ? ht_obj_get(e->s, m->oid) : NULL;
        if (m->exists && !m->obj)
            return -ENOENT;
    }
    return 0;
}

static void drop_references(struct engine *e)
{
    for (unsigned i = 0; i < ENGINE_SLOTS; i++) {
        ht_obj_put(e->slot[i].obj);
        e->slot[i].obj = NULL;
    }
}

void engine_crash(struct engine *e)
{
    drop_references(e);
    ht_store_close(e->s);
    e->s = NULL;
}

static void load_content(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];

    m->size = m->exists ? ht_obj_size(m->obj) : 0;
    MUST(m->size <= ENGINE_BYTES_MAX);
    if (m->size)
        MUST(ht_obj_read(m->obj, 0, m->content, m->size) == (ssize_t)m->size);
}

void engine_fill(struct engine *e, uint64_t leave)
{
    static uint8_t zeros[HT_CHUNK_BYTES];
    struct ht_obj_attr attr = {.oid = ht_store_new_id(e->s), .chunk_bytes = HT_CHUNK_BYTES};
    struct ht_obj *o;
    struct ht_store_stats st;

    MUST(ht_obj_create(e->s, &attr, &o) == 0);
    ht_store_stats(e->s, &st);
    for (uint64_t at = 0; at + leave < st.available_bytes; at += sizeof(zeros)) {
        uint64_t n = ht_min_u64(sizeof(zeros), st.available_bytes - leave - at);
        MUST(ht_obj_write(o, at, zeros, n) == (ssize_t)n);
    }
    MUST(ht_obj_sync(o) == 0);
    ht_obj_put(o);
}

void engine_unmount(struct engine *e)
{
    drop_references(e);
    MUST(ht_store_unmount(e->s) == 0);
    ht_store_close(e->s);
    e->s = NULL;
}

void engine_free(struct engine *e)
{
    for (unsigned i = 0; i < ENGINE_SLOTS; i++) {
        free(e->slot[i].content);
        free(e->slot[i].history);
    }
    free(e->commit);
    free(e->ack);
    if (e->dev)
        ht_dev_close(e->dev);
}

/* ---------------------------------------------------------- operations */

static void acknowledge(struct engine *e)
{
    struct ack a;

    for (unsigned i = 0; i < ENGINE_SLOTS; i++)
        a.slot[i] = e->slot[i].acked;
    a.commit = e->commit_acked;
    e->ack = realloc(e->ack, (e->acks + 1) * sizeof(*e->ack));
    e->ack[e->acks] = a;
    if (e->recording) {
        char text[32];
        snprintf(text, sizeof(text), "ack %zu", e->acks);
        MUST(recorder_mark(e->dev, text) == 0);
    }
    e->acks++;
}

static void op_create(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];
    struct ht_obj_attr attr = {.oid = ht_store_new_id(e->s),
                               .chunk_bytes = rnd_below(&e->rnd, 3) ? HT_SMALL_CHUNK_BYTES : HT_CHUNK_BYTES,
                               .scope = i >= ROOT_FIRST ? ENGINE_SCOPE : 0};
    int rc = ht_obj_create(e->s, &attr, &m->obj);

    if (rc == -ENOSPC)
        return;
    MUST(rc == 0);
    m->oid = attr.oid;
    m->exists = true;
    m->size = 0;
    note_version(m);
}

static void op_write(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];
    uint64_t off = rnd_below(&e->rnd, 2) ? m->size : rnd_below(&e->rnd, ENGINE_BYTES_MAX);

    off = ht_min_u64(off, ENGINE_BYTES_MAX - 1);
    uint64_t most = rnd_below(&e->rnd, 3) ? 20000 : ENGINE_BYTES_MAX;
    uint64_t len = 1 + rnd_below(&e->rnd, ht_min_u64(most, ENGINE_BYTES_MAX - off));
    static uint8_t buf[ENGINE_BYTES_MAX];
    uint64_t seed = rnd_next(&e->rnd);
    for (uint64_t k = 0; k < len; k++)
        buf[k] = (uint8_t)(seed >> (k & 56) ^ k);
    ssize_t n = ht_obj_write(m->obj, off, buf, len);
    MUST(n == (ssize_t)len || n == -ENOSPC || n > 0);
    if (n <= 0)
        return;
    if (off > m->size)
        memset(m->content + m->size, 0, off - m->size);
    memcpy(m->content + off, buf, (size_t)n);
    m->size = ht_max_u64(m->size, off + (uint64_t)n);
    note_version(m);
}

static void op_truncate(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];
    uint64_t size = rnd_below(&e->rnd, ENGINE_BYTES_MAX);

    if (rnd_below(&e->rnd, 4) == 0)
        size &= ~(uint64_t)0xffff;
    MUST(ht_obj_truncate(m->obj, size) == 0);
    if (size > m->size)
        memset(m->content + m->size, 0, size - m->size);
    m->size = size;
    note_version(m);
}

static void op_punch(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];
    uint64_t off = rnd_below(&e->rnd, ENGINE_BYTES_MAX), len = 1 + rnd_below(&e->rnd, ENGINE_BYTES_MAX);
    int rc = ht_obj_punch(m->obj, off, len);

    MUST(rc == 0 || rc == -ENOSPC);
    if (rc) { /* whole chunks may have gone before the failing one */
        load_content(e, i);
    } else if (off < m->size) {
        memset(m->content + off, 0, ht_min_u64(len, m->size - off));
    }
    note_version(m);
}

static void op_read(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];
    static uint8_t buf[ENGINE_BYTES_MAX];

    MUST(ht_obj_size(m->obj) == m->size);
    uint64_t off = rnd_below(&e->rnd, m->size + 1), len = 1 + rnd_below(&e->rnd, ENGINE_BYTES_MAX);
    ssize_t want = (ssize_t)ht_min_u64(len, m->size - off);
    len = ht_min_u64(len, sizeof(buf));
    MUST(ht_obj_read(m->obj, off, buf, len) == want);
    MUST(memcmp(buf, m->content + off, (size_t)want) == 0);
}

static void op_sync(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];
    int rc = ht_obj_writeback(m->obj);

    MUST(rc == 0);
    struct ht_tx *tx;
    MUST(ht_tx_begin(e->s, 16384, &tx) == 0);
    ht_obj_publish(m->obj, tx);
    publish_slot(e, tx, i);
    uint64_t lsn;
    MUST(ht_tx_commit(tx, &lsn) == 0);
    MUST(ht_store_sync(e->s, lsn) == 0);
    m->acked = m->count - 1;
    acknowledge(e);
}

static void op_delete(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];
    struct ht_tx *tx;

    MUST(ht_tx_begin(e->s, 4096, &tx) == 0);
    ht_obj_delete(m->obj, tx);
    m->exists = false;
    if (i < ROOT_FIRST)
        publish_slot(e, tx, i);
    MUST(ht_tx_commit(tx, NULL) == 0);
    ht_obj_put(m->obj);
    m->obj = NULL;
    m->size = 0;
    note_version(m);
}

static void op_commit_all(struct engine *e)
{
    int rc = ht_store_commit(e->s);

    MUST(rc == 0);
    for (unsigned i = 0; i < ROOT_FIRST; i++)
        e->slot[i].acked = e->slot[i].count - 1;
    acknowledge(e);
}

static void op_commit_scope(struct engine *e)
{
    struct commit_model c = {.step = ++e->step};

    for (unsigned i = ROOT_FIRST; i < ENGINE_SLOTS; i++)
        c.version[i] = version_now(&e->slot[i]);
    e->commit = realloc(e->commit, (e->commits + 1) * sizeof(*e->commit));
    e->commit[e->commits++] = c;
    uint64_t lsn;
    MUST(ht_scope_commit(e->s, ENGINE_SCOPE, &lsn) == 0);
    MUST(ht_store_sync(e->s, lsn) == 0);
    e->commit_acked = e->commits - 1;
    acknowledge(e);
}

static void op_abort_scope(struct engine *e)
{
    for (unsigned i = ROOT_FIRST; i < ENGINE_SLOTS; i++) {
        ht_obj_put(e->slot[i].obj);
        e->slot[i].obj = NULL;
    }
    MUST(ht_scope_abort(e->s, ENGINE_SCOPE) == 0);
    const struct commit_model *c = &e->commit[e->commits - 1];
    for (unsigned i = ROOT_FIRST; i < ENGINE_SLOTS; i++) {
        struct slot_model *m = &e->slot[i];
        m->oid = published_oid[i];
        m->exists = m->oid != 0;
        m->obj = m->exists ? ht_obj_get(e->s, m->oid) : NULL;
        MUST(!m->exists || m->obj);
        load_content(e, i);
        note_version(m);
        MUST(same_version(&m->history[m->count - 1], &c->version[i]));
    }
}

/*
 * An update through a batch pin, as the optimizer does it, but in objects without a rewrite reserve: it may end for
 * want of space, and then the last commit counts.
 */
static void op_batch_pin(struct engine *e, unsigned i)
{
    struct slot_model *m = &e->slot[i];

    if (!m->size)
        return;
    uint32_t cb = ht_obj_chunk_bytes(m->obj);
    struct ht_batch_pin l = {.store = e->s};
    l.count = 1;
    l.chunk[0] = (struct ht_batch_pin_chunk){
        .obj = m->obj, .index = rnd_below(&e->rnd, (m->size - 1) / cb + 1), .mode = HT_BATCH_PIN_UPDATE};
    int rc = ht_batch_pin_begin(&l), end = 0;
    MUST(rc == 0 || rc == -ENOSPC);
    if (!rc) {
        MUST(ht_batch_pin_wait(&l) == 0);
        uint8_t *model = m->content + l.chunk[0].index * cb;
        MUST(memcmp(l.chunk[0].data, model, l.chunk[0].len) == 0);
        for (uint32_t k = 0; k < l.chunk[0].len; k++) {
            l.chunk[0].data[k] = (uint8_t)(l.chunk[0].data[k] * 5 + 1);
            model[k] = (uint8_t)(model[k] * 5 + 1);
        }
        ht_batch_pin_end(&l, 1);
        end = ht_batch_pin_finish(&l);
        MUST(end == 0 || end == -ENOSPC);
    }
    if (end)
        op_abort_scope(e);
    else if (!rc)
        note_version(m);
}

/*
 * A range of one object becomes that of another, or of itself; aligned more often than not, so that chunks are shared.
 */
static void op_clone(struct engine *e, unsigned to)
{
    unsigned from = (unsigned)rnd_below(&e->rnd, ENGINE_SLOTS);
    struct slot_model *m = &e->slot[to], *f = &e->slot[from];

    if (!f->exists)
        return;
    uint64_t mask = rnd_below(&e->rnd, 4) ? ~0xffffull : ~0ull;
    uint64_t src_off = rnd_below(&e->rnd, 3) ? 0 : rnd_below(&e->rnd, ENGINE_BYTES_MAX) & mask;
    uint64_t dst_off = rnd_below(&e->rnd, 3) ? src_off : rnd_below(&e->rnd, ENGINE_BYTES_MAX) & mask;
    uint64_t room = ENGINE_BYTES_MAX - dst_off, len = rnd_below(&e->rnd, 3) ? room : 1 + rnd_below(&e->rnd, room);
    uint64_t want = src_off < f->size ? ht_min_u64(len, f->size - src_off) : 0;
    bool overlap = from == to && (src_off < dst_off ? dst_off - src_off : src_off - dst_off) < want;
    ssize_t n = ht_obj_clone(f->obj, src_off, m->obj, dst_off, len);
    if (overlap) {
        MUST(n == -EINVAL);
        return;
    }
    MUST(n == (ssize_t)want || n == -ENOSPC || (n > 0 && n < (ssize_t)want));
    if (n <= 0)
        return;
    if (dst_off > m->size)
        memset(m->content + m->size, 0, dst_off - m->size);
    memcpy(m->content + dst_off, f->content + src_off, (size_t)n);
    m->size = ht_max_u64(m->size, dst_off + (uint64_t)n);
    note_version(m);
}

/* The content of another object, or zeros, written as if it were new. */
static void op_copy(struct engine *e, unsigned to)
{
    const struct slot_model *f = &e->slot[rnd_below(&e->rnd, ENGINE_SLOTS)];
    struct slot_model *m = &e->slot[to];
    static const uint8_t zeros[2 << 16];
    bool zero = rnd_below(&e->rnd, 4) == 0 || !f->exists || f == m;
    uint64_t size = zero ? sizeof(zeros) : f->size;

    if (!size)
        return;
    ssize_t n = ht_obj_write(m->obj, 0, zero ? zeros : f->content, size);
    MUST(n > 0 || n == -ENOSPC);
    if (n <= 0)
        return;
    memmove(m->content, zero ? zeros : f->content, (size_t)n);
    m->size = ht_max_u64(m->size, (uint64_t)n);
    note_version(m);
}

/* Nothing that a client sees changes. */
static void op_background(struct engine *e)
{
    if (rnd_below(&e->rnd, 2))
        MUST(background_dedup(e->s) == 0);
    else
        MUST(background_compact(e->s) == 0);
}

/* Preallocation has no visible effect except that its space is missing elsewhere. */
static void op_allocate(struct engine *e, unsigned i)
{
    uint64_t off = rnd_below(&e->rnd, ENGINE_BYTES_MAX), len = 1 + rnd_below(&e->rnd, ENGINE_BYTES_MAX - off);
    int rc = ht_obj_prealloc(e->slot[i].obj, off, len);

    MUST(rc == 0 || rc == -ENOSPC);
}

static void op_on_slot(struct engine *e, unsigned i, uint64_t kind)
{
    if (!e->slot[i].exists) {
        op_create(e, i);
        return;
    }
    switch (kind) {
    case 0:
        op_truncate(e, i);
        break;
    case 1:
        op_punch(e, i);
        break;
    case 2:
        op_delete(e, i);
        break;
    case 3:
        ht_obj_evict(e->slot[i].obj);
        op_read(e, i);
        break;
    case 4:
    case 5:
        if (i < ROOT_FIRST)
            op_sync(e, i);
        else
            op_batch_pin(e, i);
        break;
    case 6:
        op_read(e, i);
        break;
    case 7:
    case 8:
        op_clone(e, i);
        break;
    case 9:
        op_allocate(e, i);
        break;
    case 10:
        op_copy(e, i);
        break;
    default:
        op_write(e, i);
    }
}

void engine_step(struct engine *e)
{
    e->operations++;
    uint64_t kind = rnd_below(&e->rnd, 40);
    if (kind == 0)
        op_commit_all(e);
    else if (kind <= 3)
        op_commit_scope(e);
    else if (kind == 4)
        op_abort_scope(e);
    else if (kind == 5 && rnd_below(&e->rnd, 3) == 0)
        MUST(ht_store_checkpoint(e->s) == 0);
    else if (kind == 6)
        MUST(background_clean(e->s) >= 0);
    else if (kind == 7)
        op_background(e);
    else
        op_on_slot(e, (unsigned)rnd_below(&e->rnd, ENGINE_SLOTS), rnd_below(&e->rnd, 15));
    ht_store_verify(e->s, true);
}

void engine_check_exact(struct engine *e)
{
    for (unsigned i = 0; i < ENGINE_SLOTS; i++) {
        struct slot_model *m = &e->slot[i];
        struct version want = m->history[m->count - 1];
        load_content(e, i);
        struct version have = version_now(m);
        MUST(same_version(&want, &have));
    }
}

static int add_stored(void *ctx, const struct ht_chunk_info *info)
{
    *(uint64_t *)ctx += ht_round_up(info->stored_bytes, HT_BLOCK_BYTES);
    return 0;
}

void engine_check_space(struct engine *e)
{
    struct ht_store_stats st;
    uint64_t stored = 0;

    for (unsigned i = 0; i < ENGINE_SLOTS; i++)
        if (e->slot[i].exists)
            op_delete(e, i);
    op_commit_all(e);
    op_commit_scope(e);
    MUST(ht_store_walk(e->s, add_stored, &stored) == 0);
    ht_store_stats(e->s, &st);
    MUST(st.pending_free_bytes == 0 && st.reserved_bytes == 0);
    MUST(st.free_bytes + stored == st.total_bytes);
}

/* ------------------------------------------------------------- recovery */

static bool allowed(const struct slot_model *m, size_t acked, const struct version *v)
{
    for (size_t k = acked; k < m->count; k++)
        if (same_version(&m->history[k], v))
            return true;
    return false;
}

static bool equals_commit(const struct engine *t, const struct commit_model *c)
{
    if (t->step != c->step)
        return false;
    for (unsigned i = ROOT_FIRST; i < ENGINE_SLOTS; i++) {
        struct version v = version_now(&t->slot[i]);
        if (!same_version(&v, &c->version[i]))
            return false;
    }
    return true;
}

static const char *compare(const struct engine *src, size_t ack, struct engine *t)
{
    for (unsigned i = 0; i < ENGINE_SLOTS; i++) {
        struct slot_model *m = &t->slot[i];
        m->size = m->exists ? ht_obj_size(m->obj) : 0;
        if (m->size > ENGINE_BYTES_MAX)
            return "an object is larger than any ever was";
        if (m->size && ht_obj_read(m->obj, 0, m->content, m->size) != (ssize_t)m->size)
            return "an object cannot be read";
        struct version v = version_now(m);
        if (i < ROOT_FIRST && !allowed(&src->slot[i], src->ack[ack].slot[i], &v))
            return "an acknowledged object is lost or wrong";
        note_version(m);
    }
    for (size_t c = src->ack[ack].commit; c < src->commits; c++)
        if (equals_commit(t, &src->commit[c])) {
            t->commit = calloc(1, sizeof(*t->commit));
            *t->commit = src->commit[c];
            t->commits = 1;
            return NULL;
        }
    return "the scope is at no committed step";
}

const char *engine_verify_state(const struct engine *src, size_t ack, struct ht_dev *dev, uint64_t seed)
{
    struct engine t = {.dev = dev, .rnd = seed}, *e = &t;
    const char *wrong = NULL;

    for (unsigned i = 0; i < ENGINE_SLOTS; i++)
        t.slot[i].content = calloc(1, ENGINE_BYTES_MAX);
    t.ack = calloc(1, sizeof(*t.ack));
    t.acks = 1;
    int rc = engine_mount(&t);
    if (rc == -ENOENT)
        wrong = "a name leads to no object";
    else if (rc)
        wrong = "it does not mount";
    if (!wrong)
        wrong = compare(src, ack, &t);
    if (wrong) {
        if (t.s)
            engine_crash(&t);
    } else {
        for (int i = 0; i < 8; i++)
            engine_step(&t);
        op_commit_all(&t);
        op_commit_scope(&t);
        engine_unmount(&t);
        MUST(engine_mount(&t) == 0);
        engine_check_exact(&t);
        engine_check_space(&t);
        engine_unmount(&t);
    }
    t.dev = NULL;
    engine_free(&t);
    return wrong;
}
