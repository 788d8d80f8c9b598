/* SPDX-License-Identifier: Apache-2.0 */
/* states.c - reading a recording, building crash states from it. */
#include <stdio.h>
#include <stdlib.h>

#include "tests/support/states.h"
#include "tiering/base/buf.h"

#define LOG_MAGIC 0x6a736677736872ull
enum { SECTOR = 512, FLAG_FLUSH = 1, FLAG_FUA = 2, FLAG_DISCARD = 4, FLAG_MARK = 8, ENTRY_HEAD = 32 };

const char *const state_names[STATE_KINDS] = {"nothing", "all", "all but one", "only one", "random", "torn"};

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
    size_t n = read_file(path, &r->file);
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

void walk_begin(struct state_walk *w, const struct recording *rec, const uint8_t *base, uint64_t bytes, unsigned lba)
{
    *w = (struct state_walk){.rec = rec, .bytes = bytes, .lba = lba};
    w->durable = must(malloc(bytes));
    memcpy(w->durable, base, bytes);
    w->pending = must(calloc(rec->count + 1, sizeof(*w->pending)));
}

void walk_end(struct state_walk *w)
{
    free(w->durable);
    free(w->pending);
}

static void apply(const struct state_walk *w, uint8_t *image, const struct log_entry *e)
{
    if (e->offset + e->len > w->bytes)
        die("write beyond the device");
    memcpy(image + e->offset, e->data, e->len);
}

void walk_to(struct state_walk *w, size_t point)
{
    for (; w->at < point && w->at < w->rec->count; w->at++) {
        const struct log_entry *e = &w->rec->entry[w->at];
        if (e->flush) {
            for (size_t i = 0; i < w->pending_count; i++)
                apply(w, w->durable, &w->rec->entry[w->pending[i]]);
            w->pending_count = 0;
        }
        if (!e->len)
            continue;
        if (!e->fua) {
            w->pending[w->pending_count++] = w->at;
            continue;
        }
        /* Durable now, and newer than the pending ones that it overlaps: those can no more show there. */
        apply(w, w->durable, e);
        size_t kept = 0;
        for (size_t i = 0; i < w->pending_count; i++) {
            const struct log_entry *p = &w->rec->entry[w->pending[i]];
            bool covered = p->offset >= e->offset && p->offset + p->len <= e->offset + e->len;
            if (!covered)
                w->pending[kept++] = w->pending[i];
        }
        w->pending_count = kept;
    }
}

static void apply_torn(const struct state_walk *w, uint8_t *image, const struct log_entry *e, uint64_t *rnd)
{
    uint64_t unit = w->lba == 512 && rnd_below(rnd, 2) ? 512 : 4096;
    for (uint64_t o = 0; o < e->len; o += unit)
        if (rnd_below(rnd, 2))
            memcpy(image + e->offset + o, e->data + o, ht_min_u64(unit, e->len - o));
}

static void apply_random(const struct state_walk *w, uint8_t *out, uint64_t *rnd, bool tear)
{
    size_t n = w->pending_count;
    size_t *order = must(malloc((n + 1) * sizeof(*order)));
    memcpy(order, w->pending, n * sizeof(*order));
    for (size_t i = n; i > 1; i--) {
        size_t k = rnd_below(rnd, i), t = order[i - 1];
        order[i - 1] = order[k];
        order[k] = t;
    }
    uint64_t keep = rnd_below(rnd, 101);
    for (size_t i = 0; i < n; i++) {
        if (rnd_below(rnd, 100) >= keep)
            continue;
        const struct log_entry *e = &w->rec->entry[order[i]];
        if (tear && rnd_below(rnd, 2))
            apply_torn(w, out, e, rnd);
        else
            apply(w, out, e);
    }
    free(order);
}

void walk_state(const struct state_walk *w, enum state_kind kind, uint64_t *rnd, uint8_t *out)
{
    memcpy(out, w->durable, w->bytes);
    if (kind == STATE_NOTHING || !w->pending_count)
        return;
    if (kind == STATE_RANDOM || kind == STATE_TORN) {
        apply_random(w, out, rnd, kind == STATE_TORN);
        return;
    }
    size_t one = rnd_below(rnd, w->pending_count);
    for (size_t i = 0; i < w->pending_count; i++)
        if (kind == STATE_ALL || (i == one) == (kind == STATE_ONLY_ONE))
            apply(w, out, &w->rec->entry[w->pending[i]]);
}
