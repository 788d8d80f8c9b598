/* SPDX-License-Identifier: Apache-2.0 */
/* dev_priv.h - what tests know of a device: its observer, with the parts that dev.c, dev_cache.c and recorder.c own. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include "tests/support/dev.h"
#include "tiering/io/io_priv.h"

#define DISCARDED_BYTE 0xd1 /* what a device of memory reads after a discard */

struct dev_cache;
struct recorder;

struct dev_hook {
    unsigned left; /* passages until it fires; 0: disarmed */
    bool repeat;
    bool stalls; /* the device stops answering; the request does not fail */
    int error;   /* of a request that fails */
};

struct dev {
    struct ht_observer observer; /* first */
    struct ht_dev *dev;

    pthread_mutex_t ram_lock; /* the bytes of a device of memory without a cache, and touched */
    uint8_t *touched;
    struct dev_cache *cache; /* or NULL */

    _Atomic bool stalled, armed;
    void (*before)(enum ht_io_op op);
    _Atomic unsigned delay_ms;
    _Atomic uint64_t error_ns;
    _Atomic unsigned errors_pending;
    pthread_mutex_t hook_lock;
    struct dev_hook hook[HT_IO_OPS]; /* hook_lock */

    _Atomic bool recording;      /* changes under record_lock */
    pthread_mutex_t record_lock; /* what follows */
    struct recorder *recorder;
    uint64_t writes; /* that were recorded */
};

/* The observer, which it gets if it has none. */
struct dev *dev_of(struct ht_dev *dev);

/* dev_cache.c. One lock for all caches; dev_cache_begin_flush takes it, the others need it, but for _delays, _free. */
extern pthread_mutex_t dev_cache_lock;
/* The bytes of these sectors are about to change. */
void dev_cache_note_write(struct dev *d, uint64_t offset, uint64_t bytes);
void dev_cache_end_write(struct dev *d);
bool dev_cache_is_off(const struct dev *d);
void dev_cache_end_flush(struct dev *d);
void dev_cache_free(struct dev *d);
/* A flush was submitted; error: the one that it will end with. */
void dev_cache_begin_flush(struct dev *d, int error);
/* Does a flush that was submitted end later? */
bool dev_cache_delays(const struct dev *d, const struct ht_io *io);

/* recorder.c: a flush begins; a write of so many bytes, and a flush, ended. */
void recorder_note_flush(struct dev *d, struct ht_io *io);
void recorder_put_write(struct dev *d, const struct ht_io *io, uint32_t bytes);
void recorder_put_discard(struct dev *d, const struct ht_io *io);
void recorder_put_flush(struct dev *d, const struct ht_io *io);
/* End a recording that the test left running. */
void recorder_end(struct dev *d);
