/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk_io.c - a chunk's bytes between memory and devices: verified when they are read, and written with a checksum.
 * Only this file computes checksums for devices, and moves chunks.
 */
#include "tiering/data/chunk_io.h"
#include "tiering/base/fault.h"
#include "tiering/base/hash.h"
#include "tiering/base/mutant.h"
#include "tiering/io/rings.h"
#include "tiering/cache/staging.h"
#include "tiering/api/check.h"
#include "tiering/object/context.h"
#include "tiering/object/space.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/flush.h"
#include "tiering/data/data.h"

struct ht_ring *ht_store_ring(struct ht_store *s)
{
    return ht_ring_mine(s->rings);
}

struct ht_event_about ht_chunk_io_about(const struct ht_chunk_io *io, int rc)
{
    const struct ht_xfer *x = &io->xfer;

    if (!x->bad_dev)
        return (struct ht_event_about){.id = io->obj->oid, .error = rc};
    return (struct ht_event_about){io->obj->oid, ht_device_name(io->obj->s, x->bad_dev - 1), x->bad_offset,
                                   x->bad_error};
}

/* -------------------------------------------------------------- checksums */

uint64_t ht_store_checksum(const struct ht_store *s, const void *stored, size_t len)
{
    return ht_hash64(stored, len, s->layout.salt);
}

bool ht_ref_has_checksum_of(const struct ht_ref *ref, uint32_t bytes)
{
    return ref->codec == HT_CODEC_RAW && ref->stored == bytes;
}

bool ht_ref_matches(const struct ht_store *s, const struct ht_ref *ref, const void *stored)
{
    uint64_t salt = ht_ref_is_cold(ref) ? 0 : s->layout.salt; /* many stores read one vault */

    return ht_hash64(stored, ref->stored, salt) == ref->checksum;
}

/* ------------------------------------------------ requests for the extents */

/* The error is that of the i-th extent. */
static void blame(struct ht_chunk_io *io, unsigned i, int error)
{
    struct ht_extent e = ht_ref_extent(&io->ref, i);

    io->xfer.bad_dev = e.device + 1;
    io->xfer.bad_offset = e.block * HT_BLOCK_BYTES;
    io->xfer.bad_error = error;
}

/* A device that is missing, or has not answered for long, gets no request: no thread should wait for it. */
static bool all_answer(struct ht_chunk_io *io)
{
    const struct ht_store *s = io->obj->s;

    for (unsigned i = 0; i < io->xfer.count; i++) {
        struct ht_extent e = ht_ref_extent(&io->ref, i);
        if (s->data->health[e.device] < HT_HEALTH_NOT_ANSWERING)
            continue;
        blame(io, i, s->data->health[e.device] == HT_HEALTH_MISSING ? -ENODEV : -ETIMEDOUT);
        io->xfer.count = 0;
        return false;
    }
    return true;
}

/* To the ring, and no further: they go to the device with the next ht_ring_kick or ht_ring_offer, or a wait. */
static int queue(struct ht_chunk_io *io, struct ht_ring *ring, enum ht_io_op op)
{
    struct ht_xfer *x = &io->xfer;

    x->lost = ht_ref_lost(&io->ref);
    x->count = x->lost ? 0 : ht_ref_extents(&io->ref);
    x->ios = x->io_;
    x->bad_dev = 0;
    if (!x->lost && ht_ref_is_cold(&io->ref)) { /* no request for a device: data/cold.c fetches it */
        x->count = 0;
        return -EIO;
    }
    if (!all_answer(io))
        return -EIO;
    if (x->count > HT_ARRAY_SIZE(x->io_)) {
        x->ios = malloc(x->count * sizeof(*x->ios));
        if (!x->ios) {
            x->count = 0;
            return -ENOMEM;
        }
    }
    uint8_t *p = io->data;
    for (unsigned i = 0; i < x->count; i++) {
        struct ht_extent e = ht_ref_extent(&io->ref, i);
        x->ios[i] = (struct ht_io){
            .op = op,
            .dev = io->obj->s->dev[e.device],
            .offset = e.block * HT_BLOCK_BYTES,
            .buf = p,
            .len = e.blocks * HT_BLOCK_BYTES,
        };
        p += x->ios[i].len;
        ht_ring_submit(ring, &x->ios[i]);
    }
    return 0;
}

/* Frees what queue took. Every error of a device is -EIO: a full one below us (thin, or a file) is not a full store. */
static int wait(struct ht_chunk_io *io, struct ht_ring *ring)
{
    struct ht_xfer *x = &io->xfer;
    int first = x->lost ? -EIO : 0;

    for (unsigned i = 0; i < x->count; i++) {
        int rc = ht_ring_wait(ring, &x->ios[i]);
        if (!rc)
            rc = ht_fault(x->ios[i].op == HT_IO_READ ? HT_FAULT_STORE_READ : HT_FAULT_STORE_WRITE);
        if (rc && !first) {
            first = -EIO;
            blame(io, i, rc);
        }
    }
    if (x->count && x->ios != x->io_)
        free(x->ios);
    x->count = 0;
    return first;
}

/* A write succeeded and is about to be installed; -EIO if a flush of its device has failed since. */
static int validate(struct ht_chunk_io *io) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = io->obj->s;

    ht_ref_stamp(s, &io->ref);
    if (!ht_ref_is_void(s, &io->ref, io->xfer.flush_error_passes))
        return 0;
    blame(io, 0, -EIO);
    return -EIO;
}

/* ---------------------------------------------------------------- permits */

/* The device of a write is known when it gets its place: the permit moves there. */
static bool is_for(const struct ht_permit *p, const struct ht_permit_request *r)
{
    bool there = p->dev == r->dev || (p->dev && r->direction == HT_DIRECTION_WRITE);

    return there && p->direction == r->direction && p->bytes >= r->bytes;
}

enum ht_admission ht_admit(struct ht_store *s, struct ht_permit *spare, const struct ht_permit_request *r, bool holds)
{
    if (!r->dev || ht_io_class() == HT_IO_URGENT || is_for(spare, r))
        return HT_ADMITTED;
    ht_permit_put(spare);
    if (ht_permit_try(&s->gate, r, spare))
        return HT_ADMITTED;
    if (holds)
        return HT_ADMISSION_LATER;
    ht_store_unlock(s);
    ht_permit_get(&s->gate, r, spare);
    ht_store_lock(s);
    return HT_ADMISSION_AGAIN;
}

struct ht_permit_request ht_admission_of_ref(const struct ht_store *s, const struct ht_ref *ref)
{
    if (!ref || !ht_ref_holds(ref))
        return (struct ht_permit_request){.dev = NULL};
    return (struct ht_permit_request){
        .dev = ht_ref_dev(s, ref),
        .direction = HT_DIRECTION_READ,
        .bytes = ht_ref_blocks(ref) * HT_BLOCK_BYTES,
    };
}

struct ht_permit ht_admission_take(struct ht_permit *spare)
{
    struct ht_permit p = *spare;

    spare->dev = NULL;
    return p;
}

/* --------------------------------------------------------------- reading */

static void report_wrong_checksum(const struct ht_chunk_io *io)
{
    struct ht_event_about about = ht_chunk_io_about(io, -EIO);

    about.error = -EIO;
    ht_event(HT_EVENT_CHECKSUM, &about,
             "chunk %llu of object %llu at byte %llu of %s: %s; the read fails with EIO; run hitrain-fsck",
             (unsigned long long)io->index, (unsigned long long)about.id, (unsigned long long)about.offset,
             about.device, io->undecodable ? "its compressed frame is damaged" : "its checksum is wrong");
}

static void report_failed_read(const struct ht_chunk_io *io, int rc)
{
    struct ht_event_about about = ht_chunk_io_about(io, rc);
    unsigned long long index = io->index, oid = about.id, offset = about.offset;

    if (io->xfer.lost)
        ht_event(HT_EVENT_READ_ERROR, &about, "chunk %llu of object %llu is marked lost: write it anew, or delete it",
                 index, oid);
    else
        ht_event(HT_EVENT_READ_ERROR, &about, "chunk %llu of object %llu cannot be read at byte %llu of %s: %s", index,
                 oid, offset, about.device ? about.device : "any device", strerror(-about.error));
}

static void count_and_report(struct ht_chunk_io *io, int rc)
{
    struct ht_store *s = io->obj->s;

    if (io->mismatch)
        report_wrong_checksum(io);
    else
        report_failed_read(io, rc);
    ht_store_lock(s);
    *(io->mismatch ? &s->counts.checksum_errors : &s->counts.read_errors) += 1;
    ht_store_unlock(s);
}

void ht_chunk_read_start(struct ht_chunk_io *io, struct ht_ring *ring, void *buf)
{
    io->data = buf;
    io->mismatch = io->undecodable = false;
    io->rc = queue(io, ring, HT_IO_READ);
}

/* The bytes came: are they right? Then the caller gets the content. */
static int verify_and_decode(struct ht_chunk_io *io)
{
    struct ht_store *s = io->obj->s;
    bool right = ht_ref_matches(s, &io->ref, io->data) && !ht_fault(HT_FAULT_STORE_CHECKSUM);
    int rc = right || HT_MUTANT("chunk-checksum") ? 0 : -EUCLEAN;

    if (!rc && !io->as_stored) {
        rc = ht_ref_decode(&s->data->decoders, &io->ref, io->data);
        io->undecodable = rc == -EUCLEAN;
    }
    if (rc != -EUCLEAN)
        return rc;
    blame(io, 0, -EUCLEAN);
    io->mismatch = true;
    return -EIO;
}

int ht_chunk_read_finish_quietly(struct ht_chunk_io *io, struct ht_ring *ring)
{
    int rc = wait(io, ring);

    if (!io->rc)
        io->rc = rc;
    if (!io->rc)
        io->rc = verify_and_decode(io);
    return io->rc;
}

int ht_chunk_read_finish(struct ht_chunk_io *io, struct ht_ring *ring)
{
    int rc = ht_chunk_read_finish_quietly(io, ring);

    if (rc)
        count_and_report(io, rc);
    return rc;
}

int ht_chunk_read(struct ht_obj *o, uint64_t index, const struct ht_ref *ref, void *buf)
{
    struct ht_chunk_io io = {.obj = o, .index = index, .ref = *ref};
    struct ht_ring *ring = ht_store_ring(o->s);

    if (!ring)
        return -ENOMEM;
    ht_chunk_read_start(&io, ring, buf);
    return ht_chunk_read_finish(&io, ring);
}

/* -------------------------------------------------- reading with a permit */

/* How many of the first ones share a permit: they are on one device, and no longer than a chunk. */
static unsigned request_of(const struct ht_chunk_io io[], unsigned n, struct ht_permit_request *out)
{
    const struct ht_store *s = io->obj->s;
    unsigned same = 1;

    *out = ht_admission_of_ref(s, &io->ref);
    for (; same < n; same++) {
        const struct ht_permit_request next = ht_admission_of_ref(s, &io[same].ref);
        if (next.dev != out->dev || out->bytes + next.bytes > HT_CHUNK_BYTES)
            break;
        out->bytes += next.bytes;
    }
    return same;
}

static void start_permitted(struct ht_chunk_io *io, struct ht_ring *ring)
{
    struct ht_store *s = io->obj->s;

    if (!io->data)
        io->rc = ht_staging_get(s->staging, HT_STAGING_FILL, 1, false, ht_ref_numa_index(s, &io->ref), &io->data);
    if (!io->rc)
        ht_chunk_read_start(io, ring, io->data);
}

static int finish_permitted(struct ht_chunk_io io[], unsigned n, struct ht_ring *ring)
{
    int first = 0;

    for (unsigned i = 0; i < n; i++) {
        int rc = ring ? ht_chunk_read_finish_quietly(&io[i], ring) : -ENOMEM;
        io[i].rc = rc;
        first = first ? first : rc;
        ht_permit_put(&io[i].permit);
    }
    return first;
}

int ht_chunks_read_permitted(struct ht_chunk_io io[], unsigned n)
{
    struct ht_store *s = io->obj->s;
    struct ht_ring *ring = ht_store_ring(s);
    struct ht_permit_request request;
    unsigned finished = 0;
    int rc = 0;

    for (unsigned i = 0, end; ring && i < n; i = end) {
        end = i + request_of(&io[i], n - i, &request);
        struct ht_permit *permit = &io[end - 1].permit;
        if (finished == i || !ht_permit_try(&s->gate, &request, permit)) {
            int failed = finish_permitted(io + finished, i - finished, ring);
            rc = rc ? rc : failed;
            finished = i;
            ht_permit_get(&s->gate, &request, permit);
        }
        for (unsigned k = i; k < end; k++)
            start_permitted(&io[k], ring);
    }
    int failed = finish_permitted(io + finished, n - finished, ring);
    return rc ? rc : failed;
}

/* --------------------------------------------------------------- writing */

void ht_chunk_write_prepare(struct ht_chunk_io *io, void *data, uint32_t bytes, uint8_t codec, uint32_t visible)
{
    memset((uint8_t *)data + bytes, 0, ht_round_up(bytes, HT_BLOCK_BYTES) - bytes);
    io->data = data;
    io->ref = (struct ht_ref){
        .stored = bytes,
        .visible = visible & HT_VISIBLE_MASK,
        .codec = codec,
        .checksum = ht_store_checksum(io->obj->s, data, bytes),
    };
}

void ht_chunk_write_prepare_copy(struct ht_chunk_io *io, void *stored, const struct ht_ref *was)
{
    memset((uint8_t *)stored + was->stored, 0, ht_round_up(was->stored, HT_BLOCK_BYTES) - was->stored);
    io->data = stored;
    io->ref =
        (struct ht_ref){.stored = was->stored, .visible = was->visible, .codec = was->codec, .checksum = was->checksum};
}

/* The current reference stays as it is, if it can: a publication that runs at the same time names that one. */
static int take_chunk_space(struct ht_chunk_io *io, struct ht_alloc_hint hint) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_obj *o = io->obj;
    struct ht_chunk *c = io->chunk;
    int rc = ht_chunk_take_space(o, c, hint, false, &io->ref);

    if (rc != -ENOSPC || !o->extra->rewrite_reserve_blocks || !(c->flags & HT_CH_CUR) || (c->flags & HT_CH_SHARE))
        return rc;
    struct ht_chunk_before was = ht_chunk_before(c);
    ht_chunk_drop_cur(o, c);
    ht_chunk_note_unpublished(o, c, io->index, was);
    return ht_chunk_take_space(o, c, hint, false, &io->ref);
}

int ht_chunk_write_place(struct ht_chunk_io *io, struct ht_alloc_hint hint)
{
    struct ht_store *s = io->obj->s;

    ht_shares_update(s);
    int rc = io->chunk ? take_chunk_space(io, hint) : ht_ref_take_space(s, hint, &io->ref);

    if (rc)
        memset(&io->ref, 0, sizeof(io->ref));
    io->xfer.flush_error_passes = s->data->flush_error_passes;
    return rc;
}

void ht_chunk_write_cancel(struct ht_chunk_io *io)
{
    uint32_t blocks = ht_ref_blocks(&io->ref);

    ht_free_ref_now(io->obj->s, &io->ref);
    if (!io->chunk)
        return;
    io->obj->stored_blocks -= blocks;
    ht_obj_refill_rewrite_reserve(io->obj, blocks);
}

/* The log has to have room for the pieces of a chunk that is being written. */
static void count_writing(const struct ht_chunk_io *io, int64_t blocks) HT_REQUIRES(HT_LOCK_STORE)
{
    if (io->chunk)
        io->obj->s->flow.writing_blocks += (uint64_t)blocks;
}

void ht_chunk_write_start(struct ht_chunk_io *io, struct ht_ring *ring)
{
    struct ht_store *s = io->obj->s;

    count_writing(io, ht_ref_blocks(&io->ref));
    ht_store_unlock(s);
    io->rc = queue(io, ring, HT_IO_WRITE);
}

void ht_chunk_write_wait(struct ht_chunk_io *io, struct ht_ring *ring)
{
    int rc = wait(io, ring);

    if (!io->rc)
        io->rc = rc;
}

unsigned ht_chunk_write_pieces_left(const struct ht_chunk_io *io)
{
    unsigned n = 0;

    for (unsigned i = 0; i < io->xfer.count; i++)
        n += ht_io_pieces_left(&io->xfer.ios[i]);
    return n;
}

/* ------------------------------------------------------- another place */

/*
 * A write that failed goes to another place.
 *
 *   place fails --> another place of that device --fails--> other devices, one place each
 *                                                             --none left--> the caller's error
 *
 * A place also fails when a flush of its device fails while the write is in flight (validate).
 *
 * A device that fails every write is not tried twice, nor one that does not answer. When one place took the bytes, the
 * failed places stay taken until the next mount (up to a share of the device, alloc.h); when none did, it is not the
 * places' fault: they are free again. PLACES_MAX bounds what one write may cost.
 */
enum { PLACES_MAX = 5 };

struct search {
    struct ht_ref failed[PLACES_MAX];
    unsigned count;
    uint32_t avoid;
    int last; /* device of the last failure */
};

static void note_failure(struct ht_store *s, struct search *f, const struct ht_chunk_io *io) HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned device = io->xfer.bad_dev ? io->xfer.bad_dev - 1 : ht_ref_extent(&io->ref, 0).device;
    bool failing = ht_store_check_device(s, device) >= HT_HEALTH_FAILING;

    if (failing || f->last == (int)device)
        f->avoid |= 1u << device;
    f->last = (int)device;
    f->failed[f->count++] = io->ref;
}

/* Takes space on a device that is not to be avoided; all else that io->ref says stays. */
static int take_place(struct ht_chunk_io *io, const struct search *f) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_alloc_hint hint = ht_obj_hint(io->obj, f->avoid >> f->last & 1 ? -1 : f->last);

    hint.avoid = f->avoid;
    int device = ht_alloc_choose(io->obj->s->alloc, ht_ref_blocks(&io->ref), hint);

    if (device < 0 || f->avoid >> device & 1)
        return -ENOSPC;
    return ht_chunk_take_space(io->obj, io->chunk, hint, true, &io->ref);
}

static void release_places(struct ht_obj *o, struct search *f, bool found) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = o->s;

    for (unsigned i = 0; i < f->count; i++) {
        struct ht_ref *ref = &f->failed[i];
        uint32_t blocks = ht_ref_blocks(ref);
        o->stored_blocks -= blocks;
        for (unsigned k = 0; k < ht_ref_extents(ref); k++) {
            struct ht_extent e = ht_ref_extent(ref, k);
            if (!found || !ht_alloc_keep_bad(s->alloc, &e))
                ht_alloc_release(s->alloc, &e);
        }
        ht_obj_refill_rewrite_reserve(o, blocks);
        ht_ref_forget(ref);
    }
}

/* Writes to the taken place. Lock held, released in between. */
static int write_there(struct ht_chunk_io *io, struct ht_ring *ring) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_store *s = io->obj->s;

    io->xfer.flush_error_passes = s->data->flush_error_passes;
    ht_store_unlock(s);
    int rc = queue(io, ring, HT_IO_WRITE);
    rc = rc ? rc : wait(io, ring);
    ht_store_lock(s);
    return rc ? rc : validate(io);
}

/*
 * A write failed with io->rc: finds a place that takes its bytes, which do not change until then. Releases the lock in
 * between. 0: io->ref names the place. Else the last error: io->ref names nothing, and the object has no space for the
 * bytes.
 */
static int write_elsewhere(struct ht_chunk_io *io, struct ht_ring *ring) HT_REQUIRES(HT_LOCK_STORE)
{
    struct search f = {.last = -1};
    int rc = io->rc;

    while (rc) {
        note_failure(io->obj->s, &f, io);
        if (rc != -EIO || !io->xfer.bad_dev || f.count == PLACES_MAX || take_place(io, &f))
            break;
        ht_chunk_write_report(io, rc, "it is written elsewhere");
        rc = write_there(io, ring);
    }
    if (rc)
        memset(&io->ref, 0, sizeof(io->ref));
    release_places(io->obj, &f, !rc);
    return rc;
}

int ht_chunk_write_finish(struct ht_chunk_io *io, struct ht_ring *ring)
{
    uint32_t blocks = ht_ref_blocks(&io->ref);

    if (!io->rc)
        io->rc = validate(io);
    if (io->rc && io->chunk)
        io->rc = write_elsewhere(io, ring);
    else if (io->rc)
        ht_chunk_write_cancel(io);
    count_writing(io, -(int64_t)blocks);
    if (io->rc || !io->chunk)
        return io->rc;
    ht_chunk_install(io->obj, io->chunk, io->index, &io->ref);
    ht_obj_count_written(io->obj, &io->ref);
    return 0;
}

void ht_chunk_write_report(const struct ht_chunk_io *io, int rc, const char *then)
{
    struct ht_event_about about = ht_chunk_io_about(io, rc);

    if (!about.device)
        about.device = "any device";
    io->obj->s->counts.write_errors++;
    ht_event(HT_EVENT_WRITE_ERROR, &about, "chunk %llu of object %llu could not be written at byte %llu of %s: %s; %s",
             (unsigned long long)io->index, (unsigned long long)about.id, (unsigned long long)about.offset,
             about.device, strerror(-about.error), then);
}
