/* SPDX-License-Identifier: Apache-2.0 */
/* data_priv.h - inside data/: its state. Devices are bits. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "tiering/base/list.h"
#include "tiering/data/decode.h"
#include "tiering/data/encode.h"
#include "tiering/tier/endurance.h"
#include "tiering/tier/weights.h"
#include <hitrain/limits.h>

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
    /* flush.c, flush_error.c */
    HT_GUARDED_BY(HT_LOCK_STORE) struct {
        uint64_t flush_error_passes;      /* passes over the current references */
        uint32_t suspect, unsafe;         /* a flush failed: the pass is due; ever */
        uint32_t resolving;               /* a flush failed, and the pass is running */
        uint64_t flush_clock;             /* flushes of data begun; flush.c */
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
