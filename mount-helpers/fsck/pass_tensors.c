/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pass_tensors.c - read every stored chunk, verify its checksum, and decode it if it is compressed.
 *
 * Chunks are taken in the order of their places. Neighbours are read by one request of up to BATCH_BYTES. Several
 * batches are in flight, as many as the content fills, so that the device works while checksums are computed. When a
 * batch fails, its chunks are read one by one, so that only those that are bad are named.
 *
 * With --vault content in the vault follows, through the program of its scheme, several ranges at a time.
 *
 * With --no-data only contested chunks are read: a repair must know which of two that share space is sound.
 */
#include "mount-helpers/fsck/fsck.h"

#include "tiering/base/hash.h"
#include "tiering/codec/frame.h"
#include "tiering/api/check.h"
#include "tiering/api/cold.h"
#include "tiering/remote/remote.h"

enum { BATCHES_MAX = 8 };
#define BATCH_BYTES (4 * HT_MIB)

struct batch {
    uint8_t *buf;        /* with room for one chunk alone behind BATCH_BYTES */
    size_t first, count; /* items */
    unsigned io_count;
    struct ht_io ios[HT_FRAGS_MAX];
};

struct reader {
    struct ht_fsck *f;
    struct ht_ring *ring;
    size_t next; /* item to submit */
    int error;   /* from noting a repair */
    struct ht_progress progress;
    struct ht_decoder *decoder;
    uint8_t *content; /* of a chunk */
    unsigned batches;
    struct batch batch[BATCHES_MAX];
};

static uint64_t room_bytes(const struct ht_fsck_item *it)
{
    return ht_round_up(it->stored, HT_BLOCK_BYTES);
}

/* -------------------------------------------------------------------- report */

enum verdict { GOOD, BAD_CHECKSUM, BAD_FRAME, BAD_STATE, NO_SEGMENT, SHORT_SEGMENT };
static const char *const reason[] = {
    [BAD_CHECKSUM] = "checksum does not match",
    [BAD_FRAME] = "compressed frame is damaged",
    [NO_SEGMENT] = "segment is missing",
    [SHORT_SEGMENT] = "segment is too short",
    [BAD_STATE] = "scales make no sense, or more is stored than its form has",
};

static enum ht_fsck_code code_of(const struct ht_fsck_item *it, enum verdict bad)
{
    if (bad == BAD_STATE)
        return HT_FSCK_OPT_STATE_VALUE;
    if (it->device == HT_DEVICE_VAULT)
        return HT_FSCK_DATA_VAULT;
    return bad == BAD_FRAME ? HT_FSCK_DATA_FRAME : HT_FSCK_DATA_CSUM;
}

static const char *device_of(const struct ht_fsck *f, const struct ht_fsck_item *it)
{
    static char segment[64];
    const struct ht_remote_get at = ht_remote_range(it->block, it->stored, NULL);

    if (it->device != HT_DEVICE_VAULT)
        return ht_fsck_member_name(f, it->device);
    snprintf(segment, sizeof(segment), "seg/%08x/%04x of the vault", at.lease, at.n);
    return segment;
}

/* The model goes back to the step before this one, and the object goes. */
static void report_logged(struct reader *r, const struct ht_fsck_item *it, const char *text, const char *why,
                          uint64_t offset, const struct ht_fsck_where *w)
{
    uint64_t root, step;

    if (ht_fsck_problem(r->f, HT_FSCK_DATA_REDO, w, "%s: %s, %llu bytes at byte offset %llu of %s", text, why,
                        (unsigned long long)it->stored, (unsigned long long)offset, w->device) &&
        r->error == 0 && ht_optim_redo_owner(r->f->optim, it->oid, &root, &step) == 0)
        r->error = ht_fsck_note(&r->f->cut_steps, root, step);
}

/* error: the device's; 0: bad says the reason. */
static void report_bad(struct reader *r, const struct ht_fsck_item *it, uint64_t offset, int error, enum verdict bad)
{
    static char text[HT_FSCK_PATH_MAX + 128];
    static struct ht_fsck_owner owner;
    bool lose;

    ht_fsck_item_text(r->f, it, text, sizeof(text), &owner);
    const struct ht_fsck_where w = {.device = device_of(r->f, it),
                                    .offset = HT_FSCK_AT(offset),
                                    .bytes = HT_FSCK_AT(it->stored),
                                    .object = HT_FSCK_AT(it->oid),
                                    .path = owner.path,
                                    .state = owner.state,
                                    .chunk = HT_FSCK_AT(it->index),
                                    .first_byte = HT_FSCK_AT((uint64_t)it->index << it->chunk_shift)};
    ht_progress_clear(&r->progress);
    if (owner.logged_step) {
        report_logged(r, it, text, error ? strerror(-error) : reason[bad], offset, &w);
        return;
    }
    if (error != 0)
        lose = ht_fsck_problem(r->f, HT_FSCK_DATA_READ, &w, "%s: cannot be read, byte offset %llu of %s: %s", text,
                               (unsigned long long)offset, w.device, strerror(-error));
    else
        lose = ht_fsck_problem(r->f, code_of(it, bad), &w, "%s: its %s, %llu bytes at byte offset %llu of %s%s", text,
                               reason[bad], (unsigned long long)it->stored, (unsigned long long)offset, w.device,
                               it->frag_count > 1 ? " and further places" : "");
    if (r->error == 0)
        r->error = ht_fsck_lose(r->f, it->oid, it->index, lose);
}

/* As the store: over the stored bytes, seeded with the store's salt; those of a vault belong to no store. */
static enum verdict verify(struct reader *r, const struct ht_fsck_item *it, const uint8_t *buf)
{
    uint64_t sum =
        it->device == HT_DEVICE_VAULT ? ht_hash64(buf, it->stored, 0) : ht_store_checksum(r->f->store, buf, it->stored);

    if (sum != it->checksum)
        return BAD_CHECKSUM;
    if (it->codec == HT_CODEC_PLANES && ht_codec_decode(r->decoder, buf, it->stored, r->content, it->visible))
        return BAD_FRAME;
    const uint8_t *content = it->codec == HT_CODEC_PLANES ? r->content : buf;
    if (!ht_optim_state_sane(r->f->optim, it->oid, it->index, content, it->visible))
        return BAD_STATE;
    r->f->verified_bytes += it->stored;
    return GOOD;
}

/* --------------------------------------------------------------------- batches */

static void add_io(struct reader *r, struct batch *b, uint32_t device, uint64_t block, void *buf, uint64_t bytes)
{
    b->ios[b->io_count] = (struct ht_io){
        .op = HT_IO_READ,
        .dev = r->f->member[device],
        .offset = block * HT_BLOCK_BYTES,
        .buf = buf,
        .len = (uint32_t)bytes,
    };
    ht_ring_submit(r->ring, &b->ios[b->io_count]);
    b->io_count++;
}

/* A chunk in pieces: alone, one request for each piece. */
static void submit_pieces(struct reader *r, struct batch *b, const struct ht_fsck_item *it)
{
    uint8_t *to = b->buf;

    for (unsigned i = 0; i < it->frag_count; i++) {
        struct ht_extent e = ht_fsck_item_extent(r->f, it, i);
        uint64_t bytes = (uint64_t)e.blocks * HT_BLOCK_BYTES;
        add_io(r, b, e.device, e.block, to, bytes);
        to += bytes;
    }
}

static bool is_skipped(const struct ht_fsck *f, const struct ht_fsck_item *it)
{
    return it->unreadable || it->device == HT_DEVICE_VAULT || (f->opt.no_data && !it->contested);
}

/* How many chunks from the next on lie in one row and fit a batch. */
static size_t count_neighbours(const struct reader *r, uint64_t *out_bytes)
{
    const struct ht_fsck_item *first = &r->f->items[r->next], *it = first + 1;
    const struct ht_fsck_item *end = r->f->items + r->f->item_count;
    uint64_t bytes = room_bytes(first);

    while (it < end && !is_skipped(r->f, it) && it->frag_count == 1 && it->device == first->device &&
           it->block == first->block + bytes / HT_BLOCK_BYTES && bytes + room_bytes(it) <= BATCH_BYTES)
        bytes += room_bytes(it++);
    *out_bytes = bytes;
    return (size_t)(it - first);
}

static bool submit(struct reader *r, struct batch *b)
{
    uint64_t bytes;

    while (r->next < r->f->item_count && is_skipped(r->f, &r->f->items[r->next])) {
        ht_progress_add(&r->progress, r->f->items[r->next].stored);
        r->next++;
    }
    if (r->next == r->f->item_count)
        return false;
    const struct ht_fsck_item *it = &r->f->items[r->next];
    b->first = r->next;
    b->count = 1;
    b->io_count = 0;
    if (it->frag_count > 1) {
        submit_pieces(r, b, it);
    } else {
        b->count = count_neighbours(r, &bytes);
        add_io(r, b, it->device, it->block, b->buf, bytes);
    }
    ht_ring_kick(r->ring);
    r->next += b->count;
    return true;
}

/*
 * Reads one chunk by itself: to find the bad one of a failed batch, and to give one with a wrong checksum a second
 * chance.
 */
static void read_alone(struct reader *r, const struct ht_fsck_item *it, uint8_t *buf)
{
    uint8_t *to = buf;

    for (unsigned i = 0; i < it->frag_count; i++) {
        struct ht_extent e = ht_fsck_item_extent(r->f, it, i);
        size_t bytes = (size_t)e.blocks * HT_BLOCK_BYTES;
        int rc = ht_dev_read(r->f->member[e.device], e.block * HT_BLOCK_BYTES, to, bytes);
        if (rc < 0) {
            report_bad(r, it, e.block * HT_BLOCK_BYTES, rc, GOOD);
            return;
        }
        to += bytes;
    }
    enum verdict v = verify(r, it, buf);
    if (v != GOOD)
        report_bad(r, it, it->block * HT_BLOCK_BYTES, 0, v);
}

static void finish(struct reader *r, struct batch *b)
{
    const uint8_t *from = b->buf;
    int error = 0;

    for (unsigned i = 0; i < b->io_count; i++) {
        int rc = ht_ring_wait(r->ring, &b->ios[i]);
        error = error != 0 ? error : rc;
    }
    for (size_t i = b->first; i < b->first + b->count; i++) {
        const struct ht_fsck_item *it = &r->f->items[i];
        if (error != 0 || verify(r, it, from) != GOOD)
            read_alone(r, it, b->buf + BATCH_BYTES);
        from += room_bytes(it);
        ht_progress_add(&r->progress, it->stored);
    }
}

static void read_all(struct reader *r)
{
    unsigned head = 0, tail = 0; /* batches begun and finished */

    for (;;) {
        while (head - tail < r->batches && submit(r, &r->batch[head % r->batches]))
            head++;
        if (head == tail)
            return;
        finish(r, &r->batch[tail % r->batches]);
        tail++;
    }
}

/* ------------------------------------------------------------------- the vault */

enum { FETCHES = 8 };

struct fetch {
    const struct ht_fsck_item *item;
    struct ht_remote_get get;
    int rc; /* of its begin */
};

/* 0, or why the rest of the vault is not read. Each fetch that began ends. */
static int finish_fetches(struct reader *r, struct ht_remote *remote, struct fetch *t, unsigned count)
{
    int first = 0;

    for (; count--; t++) {
        int rc = t->rc ? t->rc : ht_remote_end(remote, &t->get, NULL, NULL);
        enum verdict v = rc == -ENOENT ? NO_SEGMENT : rc == -ENODATA ? SHORT_SEGMENT : GOOD;
        if (!rc)
            v = verify(r, t->item, t->get.to);
        if (v != GOOD)
            report_bad(r, t->item, t->get.offset, 0, v);
        else
            first = first ? first : rc;
    }
    return first;
}

static int fetch_all(struct reader *r, struct ht_remote *remote, uint8_t *bytes)
{
    const struct ht_fsck_item *it = r->f->items, *end = it + r->f->item_count;
    struct fetch fetch[FETCHES];
    int rc = 0;

    while (!rc && it < end) {
        unsigned n = 0;
        for (; it < end && n < FETCHES; it++) {
            if (it->device != HT_DEVICE_VAULT || it->unreadable)
                continue;
            fetch[n] = (struct fetch){it, ht_remote_range(it->block, it->stored, bytes + n * HT_CHUNK_BYTES), 0};
            fetch[n].rc = ht_remote_begin(remote, &fetch[n].get);
            n++;
        }
        rc = finish_fetches(r, remote, fetch, n);
    }
    return rc;
}

static void say_missing(void *ctx, const char *url, const char *why)
{
    ht_error("%s: %s", url, why);
}

static void read_vault(struct reader *r)
{
    struct ht_fsck *f = r->f;
    struct ht_vault_info vault;
    struct ht_remote *remote = NULL;

    if (!f->opt.vault || !f->cold_chunks || ht_store_vault(f->store, &vault))
        return;
    const char *url = f->opt.vault[0] ? f->opt.vault : vault.url;
    const struct ht_remote_config config = {
        .url = url, .programs = f->opt.vault_programs, .uuid = vault.uuid, .missing = say_missing};
    uint8_t *bytes = malloc((size_t)FETCHES * HT_CHUNK_BYTES);
    int rc = bytes ? ht_remote_new(&config, &remote) : -ENOMEM;
    rc = rc ? rc : fetch_all(r, remote, bytes);
    ht_remote_free(remote);
    free(bytes);
    if (rc)
        ht_error("%s: content there was not checked to its end: %s", url, strerror(-rc));
    f->failed |= rc != 0;
}

/* ------------------------------------------------------------------------ pass */

/* As a disk likes to be read. */
static int by_place(const void *a, const void *b)
{
    const struct ht_fsck_item *x = a, *y = b;

    return ht_fsck_order(x->device, y->device, ht_fsck_order(x->block, y->block, 0));
}

int ht_fsck_pass_tensors(struct ht_fsck *f)
{
    static struct reader r;
    const size_t of_batch = BATCH_BYTES + HT_CHUNK_BYTES;
    uint8_t *room = NULL; /* for all batches, and a decoded chunk */

    r = (struct reader){.f = f, .batches = (unsigned)ht_min_u64(BATCHES_MAX, f->stored_bytes / BATCH_BYTES + 1)};
    int rc = -posix_memalign((void **)&room, HT_BLOCK_BYTES, r.batches * of_batch + HT_CHUNK_BYTES);
    if (rc == 0)
        rc = ht_ring_new(HT_RING_DEFERRED, BATCHES_MAX * 8, &r.ring);
    if (rc == 0)
        rc = ht_decoder_new(&r.decoder);
    if (rc == 0) {
        for (unsigned i = 0; i < r.batches; i++)
            r.batch[i].buf = room + i * of_batch;
        r.content = room + r.batches * of_batch;
        if (f->item_count > 1)
            qsort(f->items, f->item_count, sizeof(*f->items), by_place);
        ht_progress_begin(&r.progress, f->opt.progress, "verified", f->stored_bytes);
        read_all(&r);
        read_vault(&r);
        ht_progress_end(&r.progress);
        rc = r.error;
    }
    if (rc < 0)
        ht_error("cannot read the tensors: %s", strerror(-rc));
    if (r.ring)
        ht_ring_free(r.ring);
    ht_decoder_free(r.decoder);
    free(room);
    return rc;
}
