/* SPDX-License-Identifier: Apache-2.0 */
/* states.c - reading a recording, building crash states from it. */
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/dev.h"
#include "tests/support/states.h"
#include "tiering/base/buf.h"
#include "tiering/base/hash.h"
#include <hitrain/limits.h>

#define LOG_MAGIC 0x6a736677736872ull
enum { SECTOR = 512, FLAG_FLUSH = 1, FLAG_FUA = 2, FLAG_DISCARD = 4, FLAG_MARK = 8, ENTRY_HEAD = 32 };

const char *const state_names[STATE_KINDS] = {"nothing", "all",      "all but one", "only one", "random",
                                              "torn",    "a subset", "a prefix",    "noise"};

uint64_t rnd_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

uint64_t setting(const char *name, uint64_t standard)
{
    const char *text = getenv(name);

    return text ? strtoull(text, NULL, 0) : standard;
}

static void die(const char *why)
{
    fprintf(stderr, "recording: %s\n", why);
    abort();
}

static void *must(void *p)
{
    if (!p)
        die("out of memory");
    return p;
}

static size_t read_file(const char *path, uint8_t **out)
{
    FILE *f = fopen(path, "rb");

    if (!f)
        die("cannot be opened");
    fseek(f, 0, SEEK_END);
    size_t n = (size_t)ftell(f);
    rewind(f);
    *out = must(malloc(n + 1));
    if (fread(*out, 1, n, f) != n)
        die("short read");
    fclose(f);
    return n;
}

void recording_load(struct recording *r, const char *path)
{
    size_t n = r->bytes = read_file(path, &r->file);

    if (n < SECTOR || ht_le64_load(r->file) != LOG_MAGIC)
        die("no log of writes");
    uint64_t count = ht_le64_load(r->file + 16);
    r->entry = must(calloc(count + 1, sizeof(*r->entry)));
    r->count = count;
    size_t at = SECTOR;
    for (size_t i = 0; i < count; i++) {
        if (at + SECTOR > n)
            die("ends early");
        const uint8_t *h = r->file + at;
        uint64_t flags = ht_le64_load(h + 16);
        struct log_entry *e = &r->entry[i];
        e->offset = ht_le64_load(h) * SECTOR;
        e->len = ht_le64_load(h + 8) * SECTOR;
        e->flush = flags & FLAG_FLUSH;
        e->fua = flags & FLAG_FUA;
        e->mark = flags & FLAG_MARK;
        e->data = e->mark ? h + ENTRY_HEAD : h + SECTOR;
        at += SECTOR + (e->mark ? 0 : e->len);
        if (e->mark)
            e->len = 0;
        if (at > n)
            die("ends early");
    }
}

void recording_free(struct recording *r)
{
    free(r->file);
    free(r->entry);
}

size_t recording_flushes(const struct recording *r)
{
    size_t n = 0;

    for (size_t i = 0; i < r->count; i++)
        n += r->entry[i].flush || r->entry[i].fua;
    return n;
}

void states_reported(unsigned scripts, uint64_t flushes, uint64_t made, uint64_t distinct)
{
    printf("states: %u scripts, %llu flush points, %llu made, %llu distinct\n", scripts, (unsigned long long)flushes,
           (unsigned long long)made, (unsigned long long)distinct);
}

/* ------------------------------------------------------- devices as one */

static struct ht_dev *device_of(const struct state_walk *w, uint64_t *offset)
{
    for (unsigned i = 0; i < w->dev_count; i++) {
        if (*offset < ht_dev_size(w->dev[i]))
            return w->dev[i];
        *offset -= ht_dev_size(w->dev[i]);
    }
    die("write beyond the devices");
    return NULL;
}

/* len does not reach over the end of a device. */
static void put(const struct state_walk *w, uint64_t offset, const uint8_t *data, uint64_t len)
{
    struct ht_dev *dev = device_of(w, &offset);

    if (len > ht_dev_size(dev) - offset)
        die("write beyond the device");
    memcpy((uint8_t *)ht_dev_ram_data(dev) + offset, data, len);
    for (uint64_t b = offset / HT_BLOCK_BYTES; b * HT_BLOCK_BYTES < offset + len; b++)
        dev_touched(dev)[b] = 1;
}

/* Calls fn for every block of a device that was written to since the last reset. */
static void each_touched(const struct state_walk *w,
                         void (*fn)(void *ctx, uint64_t block, uint8_t *now, uint8_t *touched), void *ctx)
{
    uint64_t first = 0;

    for (unsigned i = 0; i < w->dev_count; i++) {
        uint8_t *touched = dev_touched(w->dev[i]), *ram = ht_dev_ram_data(w->dev[i]);
        uint64_t blocks = ht_dev_size(w->dev[i]) / HT_BLOCK_BYTES;
        for (uint8_t *t = touched; (t = memchr(t, 1, blocks - (uint64_t)(t - touched))); t++)
            fn(ctx, first + (uint64_t)(t - touched), ram + (uint64_t)(t - touched) * HT_BLOCK_BYTES, t);
        first += blocks;
    }
}

static uint64_t hash_block(uint64_t block, const uint8_t *data)
{
    return ht_hash64(data, HT_BLOCK_BYTES, block);
}

static void note_durable(struct state_walk *w, uint64_t block)
{
    uint64_t hash = hash_block(block, w->durable + block * HT_BLOCK_BYTES);

    w->sum += hash - w->block_hash[block];
    w->block_hash[block] = hash;
}

/* ------------------------------------------------------------------ walk */

static void begin(struct state_walk *w, const struct recording *rec, struct ht_dev *const dev[], unsigned dev_count)
{
    *w = (struct state_walk){.rec = rec, .dev = dev, .dev_count = dev_count, .lba = ht_dev_facts(dev[0])->lba};
    for (unsigned i = 0; i < dev_count; i++)
        w->bytes += ht_dev_size(dev[i]);
    w->durable = must(malloc(w->bytes));
    w->block_hash = must(calloc(w->bytes / HT_BLOCK_BYTES, sizeof(*w->block_hash)));
    w->pending = must(calloc(rec->count + 1, sizeof(*w->pending)));
}

void walk_begin(struct state_walk *w, const struct recording *rec, const uint8_t *base, struct ht_dev *const dev[],
                unsigned dev_count)
{
    begin(w, rec, dev, dev_count);
    memcpy(w->durable, base, w->bytes);
    for (uint64_t b = 0; b < w->bytes / HT_BLOCK_BYTES; b++)
        note_durable(w, b);
    for (unsigned i = 0; i < dev_count; i++)
        memset(dev_touched(dev[i]), 1, ht_dev_size(dev[i]) / HT_BLOCK_BYTES);
    walk_reset(w);
}

static void keep(struct kept_state *k, uint64_t block, const uint8_t *data)
{
    if (k->count == k->cap) {
        k->cap = k->cap ? 2 * k->cap : 64;
        k->block = must(realloc(k->block, k->cap * sizeof(*k->block)));
        k->data = must(realloc(k->data, k->cap * HT_BLOCK_BYTES));
    }
    k->block[k->count] = block;
    memcpy(k->data + k->count++ * HT_BLOCK_BYTES, data, HT_BLOCK_BYTES);
}

static void set_durable(struct state_walk *w, uint64_t block, const uint8_t *data)
{
    memcpy(w->durable + block * HT_BLOCK_BYTES, data, HT_BLOCK_BYTES);
    note_durable(w, block);
}

void walk_begin_inside(struct state_walk *w, struct state_walk *outer, const struct kept_state *from,
                       const struct recording *rec)
{
    *w = *outer;
    w->rec = rec;
    w->at = w->pending_count = 0;
    w->pending = must(calloc(rec->count + 1, sizeof(*w->pending)));
    w->inside = true;
    w->under = (struct kept_state){0};
    for (size_t i = 0; i < from->count; i++) {
        keep(&w->under, from->block[i], w->durable + from->block[i] * HT_BLOCK_BYTES);
        set_durable(w, from->block[i], from->data + i * HT_BLOCK_BYTES);
    }
    for (const struct log_entry *e = rec->entry; e < rec->entry + rec->count; e++)
        for (uint64_t b = e->offset / HT_BLOCK_BYTES; e->len && b * HT_BLOCK_BYTES < e->offset + e->len; b++)
            keep(&w->under, b, w->durable + b * HT_BLOCK_BYTES);
    walk_reset(w);
}

void walk_end(struct state_walk *w)
{
    if (w->inside) {
        /* In reverse: the first that was kept of a block is what the outer walk has. */
        while (w->under.count-- > 0) {
            uint64_t block = w->under.block[w->under.count], offset = block * HT_BLOCK_BYTES;
            set_durable(w, block, w->under.data + w->under.count * HT_BLOCK_BYTES);
            struct ht_dev *dev = device_of(w, &offset);
            dev_touched(dev)[offset / HT_BLOCK_BYTES] = 1;
        }
        kept_free(&w->under);
    } else {
        free(w->durable);
        free(w->block_hash);
    }
    free(w->pending);
}

static void make_durable(struct state_walk *w, const struct log_entry *e)
{
    if (e->offset + e->len > w->bytes)
        die("write beyond the devices");
    memcpy(w->durable + e->offset, e->data, e->len);
    for (uint64_t b = e->offset / HT_BLOCK_BYTES; b * HT_BLOCK_BYTES < e->offset + e->len; b++)
        note_durable(w, b);
    put(w, e->offset, e->data, e->len); /* so that they differ only where touched */
}

/* Durable now, and newer than the pending ones that it covers: those can no more show there. */
static void drop_covered(struct state_walk *w, const struct log_entry *e)
{
    size_t kept = 0;

    for (size_t i = 0; i < w->pending_count; i++) {
        const struct log_entry *p = &w->rec->entry[w->pending[i]];
        bool covered = p->offset >= e->offset && p->offset + p->len <= e->offset + e->len;
        if (!covered)
            w->pending[kept++] = w->pending[i];
    }
    w->pending_count = kept;
}

void walk_to(struct state_walk *w, size_t point)
{
    for (; w->at < point && w->at < w->rec->count; w->at++) {
        const struct log_entry *e = &w->rec->entry[w->at];
        if (e->flush) {
            for (size_t i = 0; i < w->pending_count; i++)
                make_durable(w, &w->rec->entry[w->pending[i]]);
            w->pending_count = 0;
        }
        if (!e->len)
            continue;
        if (!e->fua) {
            w->pending[w->pending_count++] = w->at;
            continue;
        }
        make_durable(w, e);
        drop_covered(w, e);
    }
}

size_t walk_next_flush(const struct state_walk *w)
{
    const struct log_entry *e = w->rec->entry;
    size_t i = w->at, n = w->rec->count;

    while (i < n && (e[i].flush || e[i].fua))
        i++;
    while (i < n && !e[i].flush && !e[i].fua)
        i++;
    return i;
}

static void reset_block(void *ctx, uint64_t block, uint8_t *now, uint8_t *touched)
{
    const struct state_walk *w = ctx;

    memcpy(now, w->durable + block * HT_BLOCK_BYTES, HT_BLOCK_BYTES);
    *touched = 0;
}

void walk_reset(struct state_walk *w)
{
    each_touched(w, reset_block, w);
}

struct hashing {
    const struct state_walk *w;
    uint64_t sum;
};

static void add_block(void *ctx, uint64_t block, uint8_t *now, uint8_t *touched)
{
    struct hashing *h = ctx;

    h->sum += hash_block(block, now) - h->w->block_hash[block];
}

uint64_t walk_hash(const struct state_walk *w)
{
    struct hashing h = {w, w->sum};

    each_touched(w, add_block, &h);
    return h.sum;
}

static void keep_block(void *ctx, uint64_t block, uint8_t *now, uint8_t *touched)
{
    keep(ctx, block, now);
}

void walk_keep(const struct state_walk *w, struct kept_state *k)
{
    k->count = 0;
    each_touched(w, keep_block, k);
}

void kept_free(struct kept_state *k)
{
    free(k->block);
    free(k->data);
}

/* ---------------------------------------------------------------- states */

static void apply(const struct state_walk *w, size_t i)
{
    const struct log_entry *e = &w->rec->entry[w->pending[i]];

    put(w, e->offset, e->data, e->len);
}

/* The parts of a write that arrived: one bit for each unit. */
enum tear { TEAR_FIRST_HALF, TEAR_LAST_HALF, TEAR_ALL_BUT_ONE, TEAR_RANDOM, TEARS };

static bool unit_is_there(enum tear tear, uint64_t i, uint64_t units, uint64_t *rnd)
{
    switch (tear) {
    case TEAR_FIRST_HALF:
        return i < units / 2;
    case TEAR_LAST_HALF:
        return i >= units / 2;
    case TEAR_ALL_BUT_ONE:
        return i != units / 2;
    default:
        return rnd_below(rnd, 2);
    }
}

static void apply_noise(const struct state_walk *w, size_t i, uint64_t *rnd)
{
    const struct log_entry *e = &w->rec->entry[w->pending[i]];
    uint64_t noise[512 / sizeof(uint64_t)];

    for (uint64_t at = 0; at < e->len; at += sizeof(noise)) {
        for (size_t k = 0; k < HT_ARRAY_SIZE(noise); k++)
            noise[k] = rnd_next(rnd);
        put(w, e->offset + at, (const uint8_t *)noise, sizeof(noise));
    }
}

static void apply_torn(const struct state_walk *w, size_t i, uint64_t unit, enum tear tear, uint64_t *rnd)
{
    const struct log_entry *e = &w->rec->entry[w->pending[i]];
    uint64_t units = ht_div_up(e->len, unit);

    for (uint64_t u = 0; u < units; u++)
        if (unit_is_there(tear, u, units, rnd))
            put(w, e->offset + u * unit, e->data + u * unit, ht_min_u64(unit, e->len - u * unit));
}

static void apply_random(const struct state_walk *w, uint64_t *rnd, bool tear)
{
    size_t n = w->pending_count;
    size_t *order = must(malloc((n + 1) * sizeof(*order)));

    for (size_t i = 0; i < n; i++)
        order[i] = i;
    for (size_t i = n; i > 1; i--) {
        size_t k = rnd_below(rnd, i), t = order[i - 1];
        order[i - 1] = order[k];
        order[k] = t;
    }
    uint64_t keep = rnd_below(rnd, 101);
    for (size_t i = 0; i < n; i++) {
        if (rnd_below(rnd, 100) >= keep)
            continue;
        if (tear && rnd_below(rnd, 2))
            apply_torn(w, order[i], w->lba == 512 && rnd_below(rnd, 2) ? 512 : 4096, TEAR_RANDOM, rnd);
        else
            apply(w, order[i]);
    }
    free(order);
}

void walk_state(struct state_walk *w, enum state_kind kind, uint64_t *rnd)
{
    walk_reset(w);
    if (kind == STATE_NOTHING || !w->pending_count)
        return;
    if (kind == STATE_RANDOM || kind == STATE_TORN) {
        apply_random(w, rnd, kind == STATE_TORN);
        return;
    }
    size_t one = rnd_below(rnd, w->pending_count);
    for (size_t i = 0; i < w->pending_count; i++)
        if (kind == STATE_ALL || (i == one) == (kind == STATE_ONLY_ONE))
            apply(w, i);
}

/* ------------------------------------------------------------ every state */

enum { RANDOMS_OF_MANY = 64, RANDOMS = 4 };

struct each {
    struct state_walk *w;
    uint64_t *rnd;
    bool (*fn)(void *ctx, enum state_kind kind);
    void *ctx;
};

static bool visit(const struct each *a, enum state_kind kind)
{
    bool more = a->fn(a->ctx, kind);

    walk_reset(a->w);
    return more;
}

static bool each_subset(const struct each *a)
{
    size_t n = a->w->pending_count;

    for (unsigned mask = 0; mask < 1u << n; mask++) {
        for (size_t i = 0; i < n; i++)
            if (mask >> i & 1)
                apply(a->w, i);
        if (!visit(a, mask == 0 ? STATE_NOTHING : mask + 1 == 1u << n ? STATE_ALL : STATE_SUBSET))
            return false;
    }
    return true;
}

static bool each_of_many(const struct each *a)
{
    size_t n = a->w->pending_count;

    for (size_t k = 0; k <= n; k++) {
        for (size_t i = 0; i < k; i++)
            apply(a->w, i);
        if (!visit(a, k == 0 ? STATE_NOTHING : k == n ? STATE_ALL : STATE_PREFIX))
            return false;
    }
    for (size_t one = 0; one < 2 * n; one++) {
        for (size_t i = 0; i < n; i++)
            if ((one < n) != (i == one % n))
                apply(a->w, i);
        if (!visit(a, one < n ? STATE_ALL_BUT_ONE : STATE_ONLY_ONE))
            return false;
    }
    return true;
}

static bool each_random(const struct each *a, unsigned count)
{
    for (unsigned k = 0; k < count; k++) {
        enum state_kind kind = k % 2 ? STATE_TORN : STATE_RANDOM;
        apply_random(a->w, a->rnd, kind == STATE_TORN);
        if (!visit(a, kind))
            return false;
    }
    return true;
}

/* Write i is torn, with the writes before it or with all others; i == count: all writes are torn alike. */
static bool torn_beside(const struct each *a, size_t i, uint64_t unit, enum tear tear)
{
    size_t n = a->w->pending_count;

    for (unsigned all = 0; all < 2; all++) {
        for (size_t k = 0; k < n; k++)
            if (k == i || i == n)
                apply_torn(a->w, k, unit, tear, a->rnd);
            else if (all || k < i)
                apply(a->w, k);
        if (!visit(a, STATE_TORN))
            return false;
    }
    return true;
}

static bool each_tear(const struct each *a)
{
    size_t n = a->w->pending_count;

    for (uint64_t unit = a->w->lba; unit <= 4096; unit *= 8)
        for (size_t i = 0; i <= n && n; i++)
            for (enum tear tear = 0; tear < TEARS; tear++)
                if ((i == n || a->w->rec->entry[a->w->pending[i]].len > unit) && !torn_beside(a, i, unit, tear))
                    return false;
    return true;
}

static bool each_noise(const struct each *a)
{
    size_t n = a->w->pending_count;

    for (size_t i = 0; i <= n && n; i++)
        for (unsigned all = 0; all < 2; all++) {
            for (size_t k = 0; k < n; k++)
                if (k == i || i == n)
                    apply_noise(a->w, k, a->rnd);
                else if (all || k < i)
                    apply(a->w, k);
            if (!visit(a, STATE_NOISE))
                return false;
        }
    return true;
}

bool walk_each(struct state_walk *w, bool tears, uint64_t *rnd, bool (*fn)(void *ctx, enum state_kind kind), void *ctx)
{
    struct each a = {w, rnd, fn, ctx};
    bool few = w->pending_count <= (getenv("HITRAIN_LONG") ? 10 : 8);

    walk_reset(w);
    if (!(few ? each_subset(&a) : each_of_many(&a)))
        return false;
    if (w->pending_count > 1 && !each_random(&a, few ? RANDOMS : RANDOMS_OF_MANY))
        return false;
    return !tears || (each_tear(&a) && each_noise(&a));
}
