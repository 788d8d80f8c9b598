/* SPDX-License-Identifier: Apache-2.0 */
/* dev.c - see dev.h. The observer of a device, which asks the recorder and the cache, and fails and stalls requests. */
#include <hitrain/limits.h>
#include <stdlib.h>
#include <time.h>

#include "tests/support/dev_priv.h"

/* ------------------------------------------------------------------- hooks */

static void set_hook(struct dev *d, enum ht_io_op op, struct dev_hook hook)
{
    bool armed = false;

    pthread_mutex_lock(&d->hook_lock);
    d->hook[op] = hook;
    for (unsigned i = 0; i < HT_IO_OPS; i++)
        armed |= d->hook[i].left > 0;
    atomic_store(&d->armed, armed);
    pthread_mutex_unlock(&d->hook_lock);
}

void dev_fail(struct ht_dev *dev, enum ht_io_op op, unsigned nth, bool repeat)
{
    dev_fail_with(dev, op, nth, repeat, -EIO);
}

void dev_fail_with(struct ht_dev *dev, enum ht_io_op op, unsigned nth, bool repeat, int error)
{
    set_hook(dev_of(dev), op, (struct dev_hook){.left = nth, .repeat = repeat, .error = error});
}

void dev_stall_at(struct ht_dev *dev, enum ht_io_op op, unsigned nth)
{
    set_hook(dev_of(dev), op, (struct dev_hook){.left = nth, .stalls = true});
}

void dev_stall(struct ht_dev *dev, bool stalled)
{
    struct dev *d = dev_of(dev);

    pthread_mutex_lock(&d->hook_lock);
    for (unsigned i = 0; i < HT_IO_OPS && !stalled; i++)
        if (d->hook[i].stalls)
            d->hook[i] = (struct dev_hook){0};
    d->stalled = stalled;
    pthread_mutex_unlock(&d->hook_lock);
}

void dev_wait_stalled(struct ht_dev *dev)
{
    while (!dev_of(dev)->stalled)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

void dev_set_delay(struct ht_dev *dev, unsigned ms)
{
    dev_of(dev)->delay_ms = ms;
}

void dev_set_error_us(struct ht_dev *dev, uint32_t us)
{
    dev_of(dev)->error_ns = (uint64_t)us * 1000;
}

unsigned dev_errors_pending(struct ht_dev *dev)
{
    return dev_of(dev)->errors_pending;
}

bool dev_is_stalled(struct ht_dev *dev)
{
    return dev_of(dev)->stalled;
}

/* 0, or the error with which the request ends. */
static int pass_hook(struct dev *d, enum ht_io_op op)
{
    struct dev_hook *hook = &d->hook[op];

    if (!atomic_load_explicit(&d->armed, memory_order_relaxed))
        return 0;
    pthread_mutex_lock(&d->hook_lock);
    bool fires = hook->left == 1;
    if (hook->left > 0 && !(fires && hook->repeat))
        hook->left--;
    if (fires && hook->stalls)
        d->stalled = true;
    int rc = fires ? hook->error : 0;
    pthread_mutex_unlock(&d->hook_lock);
    return rc;
}

/* ------------------------------------------------------------------ memory */

uint8_t *dev_touched(struct ht_dev *dev)
{
    return dev_of(dev)->touched;
}

void dev_set_node(struct ht_dev *dev, int node)
{
    dev->facts.numa_node = node;
}

/* memcpy of a write, memset of a discard. */
static void change(struct dev *d, const struct ht_io *io)
{
    uint64_t first = io->offset / HT_BLOCK_BYTES, end = ht_div_up(io->offset + io->len, HT_BLOCK_BYTES);

    dev_cache_note_write(d, io->offset, io->len);
    if (io->op == HT_IO_WRITE)
        memcpy(d->dev->ram + io->offset, io->buf, io->len);
    else
        memset(d->dev->ram + io->offset, DISCARDED_BYTE, io->len);
    memset(d->touched + first, 1, end - first);
}

static void move(struct dev *d, struct ht_io *io)
{
    if (io->op == HT_IO_READ)
        memcpy(io->buf, d->dev->ram + io->offset, io->len);
    else if (io->op == HT_IO_FLUSH)
        dev_cache_end_flush(d);
    else
        change(d, io);
    if (io->op == HT_IO_WRITE)
        dev_cache_end_write(d);
}

/* ---------------------------------------------------------------- observer */

/* A request has failed; its owner does not know yet. */
static void delay_error(struct dev *d)
{
    const struct timespec nap = {.tv_nsec = 50000};
    uint64_t failed_ns = ht_now_ns();

    d->errors_pending++;
    while (ht_now_ns() - failed_ns < d->error_ns)
        nanosleep(&nap, NULL);
    d->errors_pending--;
}

static int begin(struct ht_observer *o, struct ht_io *io)
{
    struct dev *d = (struct dev *)o;
    const struct timespec delay = {.tv_nsec = (long)d->delay_ms * 1000000};
    int rc = pass_hook(d, io->op);

    if (d->before)
        d->before(io->op);
    if (d->delay_ms)
        nanosleep(&delay, NULL);
    if (io->op == HT_IO_FLUSH && d->cache)
        dev_cache_begin_flush(d, rc);
    if (rc)
        delay_error(d);
    if (io->op == HT_IO_FLUSH && d->recording)
        recorder_note_flush(d, io);
    return rc;
}

static bool holds(struct ht_observer *o, const struct ht_io *io)
{
    const struct dev *d = (const struct dev *)o;

    return d->stalled || dev_cache_delays(d, io);
}

static int perform(struct ht_observer *o, struct ht_io *io)
{
    struct dev *d = (struct dev *)o;
    pthread_mutex_t *lock = d->cache ? &dev_cache_lock : &d->ram_lock;

    pthread_mutex_lock(lock);
    bool off = dev_cache_is_off(d);
    if (!off)
        move(d, io);
    pthread_mutex_unlock(lock);
    return off ? -EIO : 0;
}

static void end(struct ht_observer *o, struct ht_io *io, int result, uint32_t moved)
{
    struct dev *d = (struct dev *)o;

    if (io->op == HT_IO_WRITE && d->recording)
        recorder_put_write(d, io, moved);
    if (io->op == HT_IO_DISCARD && result == 0 && d->recording)
        recorder_put_discard(d, io);
    if (io->op == HT_IO_FLUSH && result == 0 && d->recording)
        recorder_put_flush(d, io);
}

static void free_dev(struct dev *d)
{
    dev_cache_free(d);
    free(d->touched);
    pthread_mutex_destroy(&d->record_lock);
    pthread_mutex_destroy(&d->hook_lock);
    pthread_mutex_destroy(&d->ram_lock);
    free(d);
}

static void observer_close(struct ht_observer *o)
{
    struct dev *d = (struct dev *)o;

    recorder_end(d);
    free_dev(d);
}

static struct dev *observe(struct ht_dev *dev)
{
    struct dev *d = calloc(1, sizeof(*d));

    if (!d)
        return NULL;
    d->observer = (struct ht_observer){begin, holds, perform, end, observer_close};
    d->dev = dev;
    pthread_mutex_init(&d->ram_lock, NULL);
    pthread_mutex_init(&d->hook_lock, NULL);
    pthread_mutex_init(&d->record_lock, NULL);
    d->touched = dev->ram ? calloc(1, ht_div_up(dev->size, HT_BLOCK_BYTES)) : NULL;
    if (dev->ram && !d->touched) {
        free_dev(d);
        return NULL;
    }
    dev->observer = &d->observer;
    return d;
}

void dev_call_before(struct ht_dev *dev, void (*fn)(enum ht_io_op op))
{
    dev_of(dev)->before = fn;
}

struct dev *dev_of(struct ht_dev *dev)
{
    struct dev *d = (struct dev *)dev->observer;

    if (!d)
        d = observe(dev);
    if (!d)
        abort();
    return d;
}

int dev_open_ram(uint64_t bytes, uint32_t lba, struct ht_dev **out_dev)
{
    int rc = ht_dev_open_ram(bytes, lba, out_dev);

    if (rc == 0 && !observe(*out_dev)) {
        ht_dev_close(*out_dev);
        rc = -ENOMEM;
    }
    return rc;
}
