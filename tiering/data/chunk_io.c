/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk_io.c - a chunk's bytes between memory and devices: verified when they are read, and written with a checksum.
 * Only this file computes checksums for devices, and moves chunks.
 */
#include "tiering/data/chunk_io.h"
#include "tiering/base/event.h"
#include "tiering/io/rings.h"
#include "tiering/api/check.h"
#include "tiering/object/chunk.h"
#include "tiering/object/context.h"
#include "tiering/object/object.h"
#include "tiering/object/ref.h"
#include "tiering/object/space.h"
#include "tiering/data/data_priv.h"
#include "tiering/data/checksum.h"
#include "tiering/data/write_retry.h"
#include "tiering/data/xfer.h"

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

/* --------------------------------------------------------------- reading */

static void report_wrong_checksum(const struct ht_chunk_io *io)
{
    struct ht_event_about about = ht_chunk_io_about(io, -EIO);

    about.error = -EIO;
    ht_event(
        HT_EVENT_CHECKSUM, &about,
        "chunk %llu of object %llu at byte %llu of %s: its checksum is wrong; the read fails with EIO; run hitrain-fsck",
        (unsigned long long)io->index, (unsigned long long)about.id, (unsigned long long)about.offset, about.device);
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
    *(io->mismatch ? &s->flow.checksum_errors : &s->flow.read_errors) += 1;
    ht_store_unlock(s);
}

void ht_chunk_read_start(struct ht_chunk_io *io, struct ht_ring *ring, void *buf)
{
    io->data = buf;
    io->mismatch = false;
    io->rc = ht_xfer_queue(&io->xfer, io->obj->s, ring, &io->ref, buf, HT_IO_READ);
}

int ht_chunk_read_finish_quietly(struct ht_chunk_io *io, struct ht_ring *ring)
{
    int rc = ht_xfer_wait(&io->xfer, ring);

    if (!io->rc)
        io->rc = rc;
    if (!io->rc && ht_ref_verify(io->obj->s, &io->ref, io->data)) {
        ht_xfer_blame(&io->xfer, &io->ref, -EUCLEAN);
        io->mismatch = true;
        io->rc = -EIO;
    }
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

/* --------------------------------------------------------------- writing */

int ht_chunk_write_place(struct ht_chunk_io *io, uint32_t bytes, struct ht_alloc_hint hint)
{
    int rc = ht_chunk_take_space(io->obj, io->chunk, bytes, hint, &io->ref);

    io->xfer.flush_error_passes = io->obj->s->data->flush_error_passes;
    return rc;
}

void ht_chunk_write_start(struct ht_chunk_io *io, struct ht_ring *ring, void *data, void *copy)
{
    struct ht_store *s = io->obj->s;
    uint32_t bytes = io->ref.stored;

    io->data = copy ? copy : data;
    s->flow.writing_blocks += ht_ref_blocks(&io->ref);
    ht_store_unlock(s);
    if (copy) {
        memcpy(copy, data, bytes);
        ht_chunk_pad(copy, bytes);
    }
    io->ref.checksum = ht_store_checksum(s, io->data, bytes);
    io->rc = ht_xfer_queue(&io->xfer, s, ring, &io->ref, io->data, HT_IO_WRITE);
}

void ht_chunk_write_wait(struct ht_chunk_io *io, struct ht_ring *ring)
{
    int rc = ht_xfer_wait(&io->xfer, ring);

    if (!io->rc)
        io->rc = rc;
}

int ht_chunk_write_finish(struct ht_chunk_io *io, struct ht_ring *ring)
{
    struct ht_store *s = io->obj->s;
    uint32_t blocks = ht_ref_blocks(&io->ref);

    if (!io->rc)
        io->rc = ht_xfer_validate(s, &io->xfer, &io->ref);
    if (io->rc)
        io->rc = ht_write_retry(io, ring);
    s->flow.writing_blocks -= blocks;
    if (io->rc)
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
    io->obj->s->flow.write_errors++;
    ht_event(HT_EVENT_WRITE_ERROR, &about, "chunk %llu of object %llu could not be written at byte %llu of %s: %s; %s",
             (unsigned long long)io->index, (unsigned long long)about.id, (unsigned long long)about.offset,
             about.device, strerror(-about.error), then);
}

int ht_chunk_write_at(struct ht_store *s, struct ht_ring *ring, struct ht_ref *ref, void *data)
{
    struct ht_xfer x;

    ht_chunk_pad(data, ref->stored);
    ref->checksum = ht_store_checksum(s, data, ref->stored);
    return ht_xfer_run(&x, s, ring, ref, data, HT_IO_WRITE);
}
