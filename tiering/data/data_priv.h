/* SPDX-License-Identifier: Apache-2.0 */
/* data_priv.h - inside data/: its state. Devices are bits. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "tiering/api/store.h"
#include "tiering/base/list.h"
#include "tiering/base/lock.h"
#include "tiering/object/ref.h"
#include "tiering/sys/processors.h"
#include "tiering/tier/encode_policy.h"
#include "tiering/tier/endurance.h"
#include "tiering/tier/placement.h"
#include <hitrain/limits.h>

/* --------------------------------------------------------------- decode.c */

/*
 * Stored bytes that were read are decoded. A decoder's memory is as large as a chunk. So there is at most one
 * for each processor, made when it is first needed, and a thread has one only while it decodes, never during I/O. A
 * store that has compressed content has one from the mount on. So a thread may have to wait, and always gets one.
 */
struct ht_decoder;

enum { HT_DECODERS_MAX = 256 };
struct ht_decoders {
    struct ht_mutex lock; /* a leaf */
    pthread_cond_t returned;
    HT_GUARDED_BY(HT_LOCK_DECODERS) struct {
        struct ht_decoder *idle[HT_DECODERS_MAX];
        unsigned idle_count, made, most;
        uint64_t bytes; /* of all that were made */
    };
};
HT_MUTEX_OF(ht_decoders_lock, struct ht_decoders, lock, HT_LOCK_DECODERS)

void ht_decoders_init(struct ht_decoders *d);
void ht_decoders_destroy(struct ht_decoders *d);
/*
 * data: the stored bytes of ref, verified; then what ref shows of its content. It has room for either, the stored bytes
 * in whole blocks. -EUCLEAN: they are not what an encoder writes; -ENOMEM: no decoder was made before.
 */
int ht_ref_decode(struct ht_decoders *d, const struct ht_ref *ref, void *data) HT_MUST_CHECK;

/* ---------------------------------------------------------- write_frame.c */

/*
 * Threads that write content compress it at once, where that is faster (tier/encode_policy.h).
 *
 * An encoder's memory is larger than a chunk. So there is at most one for each two processors that the daemon can keep
 * busy, made when it is first needed, and a thread has one only while it encodes, never during I/O. A thread that finds
 * none writes the bytes as they are.
 *
 * Before the first frame the superblocks have to say that there may be some. A writer cannot do that while it holds a
 * chunk. So it asks, writes raw bytes until then, and an engine does it (engine/recompress.c).
 */
struct ht_encoder;
struct ht_batch_write;
struct ht_chunk;
struct ht_obj;
struct ht_write_batch;

enum { HT_ENCODERS_MAX = 128 };
struct ht_encoders {
    struct ht_mutex lock;            /* before those of devices */
    struct ht_processors processors; /* those of the thread that made the store */
    struct ht_cpu_quota quota;       /* of that one's groups; of the thread that looks */
    HT_GUARDED_BY(HT_LOCK_ENCODERS) struct {
        struct ht_encoder *idle[HT_ENCODERS_MAX];
        unsigned idle_count, made, most;
        uint64_t bytes; /* of all that were made */
        struct ht_encode_vain vain;
        bool worth;                   /* what the last look said */
        bool looking;                 /* a thread does, without the lock */
        uint64_t looked_ns, idle_ms;  /* then */
        uint64_t encoding_ns;         /* since then */
        uint64_t rate_bytes, rate_ns; /* of what was encoded, faded */
        uint64_t encoded_at_ns;       /* the last one */
    };
    _Atomic bool durable; /* the superblocks say that there may be frames */
    _Atomic bool asked;   /* they should */
    _Atomic uint64_t chunks, saved_bytes;
};
HT_MUTEX_OF(ht_encoders_lock, struct ht_encoders, lock, HT_LOCK_ENCODERS)

void ht_encoders_init(struct ht_encoders *e);
void ht_encoders_destroy(struct ht_encoders *e);

/*
 * May so many bytes of the image become a frame? Of files outside models that may be compressed, chunks that are whole
 * and new: content that is written again and again would be compressed each time.
 */
bool ht_write_frame_may(const struct ht_obj *o, struct ht_chunk *c, uint32_t bytes) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Prepares a frame of the image's bytes in a staging buffer, which belongs to the job then. The caller holds the chunk;
 * the call may finish older writes of the batch. False: nothing was prepared. *out_vain: a frame would save too little.
 */
bool ht_write_frame_prepare(struct ht_write_batch *w, struct ht_batch_write *j, const void *data, int numa_index,
                            bool *out_vain) HT_EXCLUDES(HT_LOCK_STORE);

/* ------------------------------------------------------------------ state */

/* A request that shows whether a device answers: health.c. */
struct ht_probe {
    struct ht_store *s;
    pthread_t thread;
    bool running, joinable;
};

struct ht_data {
    /* Changed with the store's lock, and read without. */
    _Atomic uint32_t closed;                /* take no more content */
    _Atomic uint64_t given_up;              /* references; with tx_lock, too */
    _Atomic uint8_t health[HT_DEVICES_MAX]; /* as last reported */
    /* flush.c */
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        uint64_t flush_error_passes;      /* passes over the current references */
        uint32_t suspect, unsafe;         /* a flush failed: the pass is due; ever */
        uint32_t resolving;               /* a flush failed, and the pass is running */
        uint64_t flush_clock;             /* flushes of data begun */
        uint64_t covered[HT_DEVICES_MAX]; /* flush_clock of the last that ended well */
        /* content on them was published and maybe not flushed; the part that is being flushed */
        uint32_t published, flushing;
        uint64_t flush_errors[HT_DEVICES_MAX]; /* failures that were handled already */
        bool broken;                           /* published content was not flushed and never will be */
        struct ht_list writing;                /* write batches with images in flight; write_batch.c */
        struct ht_probe probe[HT_DEVICES_MAX]; /* health.c */
        struct ht_endurance endurance;
        struct ht_weights weights; /* shares.c */
    };
    /* cold.c */
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        struct ht_list fetching, ahead; /* fetches that are not done; of these, those ahead */
        struct ht_remote *remote;       /* NULL: no vault */
    };
    pthread_cond_t fetched;
    pthread_cond_t probe_ended;
    struct ht_decoders decoders;
    struct ht_encoders encoders;
    /* members.c */
    HT_GUARDED_BY(HT_LOCK_SUPER) struct {
        uint32_t part;          /* devices (bits) that take part in the epoch */
        uint32_t super_failed;  /* devices that did not take the last superblock */
        struct ht_claim *claim; /* of a store that is being mounted, or NULL */
        bool taken;             /* all writes are stopped: another has the store */
        bool unrecorded;        /* no superblock names the present members of the epoch yet */
    };
};
