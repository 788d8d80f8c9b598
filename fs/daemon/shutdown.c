/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An end that waits for a device goes on when the device answers, as with any file system: a request cannot be taken
 * back, and until it is done its bytes may change on the device. A user who does not want to wait ends the process,
 * which is as good as a crash: synced content is there, and the device stays held until its last request has ended.
 */
#include "fs/daemon/daemon_priv.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "tiering/base/log.h"

enum { LOOK_S = 1, REPORT_S = 5 };
#define NS_PER_S 1000000000ull

static struct {
    struct ht_shutdown about;
    pthread_t thread;
    bool running;
    _Atomic bool over;
} the;

/* Seconds since the start of the oldest request; 0 and no device: no request is in flight. */
static uint64_t slowest(const struct ht_dev **out_dev)
{
    uint64_t age_ns = 0;

    *out_dev = NULL;
    for (unsigned i = 0; i < the.about.count; i++) {
        uint64_t ns = ht_dev_oldest_ns(the.about.dev[i]);
        if (ns <= age_ns)
            continue;
        age_ns = ns;
        *out_dev = the.about.dev[i];
    }
    return age_ns / NS_PER_S;
}

static void report_wait(uint64_t waited_s, const struct ht_dev *dev, uint64_t age_s)
{
    unsigned long long waited = waited_s, age = age_s;

    if (!dev)
        ht_info("unmounting for %llu s", waited);
    else if (age_s < the.about.answer_s)
        ht_info("unmounting for %llu s: %s has been busy with a request for %llu s", waited, ht_dev_name(dev), age);
    else
        ht_warn(
            "unmounting for %llu s: %s has not answered a request for %llu s; this goes on when it answers; another SIGTERM "
            "to process %d ends it without, and loses everything that was not synced",
            waited, ht_dev_name(dev), age, getpid());
}

static void give_up(const struct ht_dev *dev, uint64_t age_s)
{
    ht_error(
        "ended by a signal while %s has not answered for %llu s: the next mount has everything that was synced; the rest "
        "is lost; %s is held until its last request has ended",
        ht_dev_name(dev), (unsigned long long)age_s, ht_dev_name(dev));
    the.about.detach(the.about.ctx);
    _exit(EXIT_FAILURE);
}

static void *watch(void *arg)
{
    const struct timespec look = {LOOK_S, 0};
    uint64_t began_ns = ht_now_ns(), reported_ns = began_ns;
    sigset_t set;

    ht_signals_set(&set);
    while (!the.over) {
        const struct ht_dev *dev;
        int sig = sigtimedwait(&set, NULL, &look);
        uint64_t now_ns = ht_now_ns(), age_s = slowest(&dev);
        if (the.over)
            break;
        if (sig > 0 && dev && age_s >= the.about.answer_s)
            give_up(dev, age_s);
        if (now_ns - reported_ns < REPORT_S * NS_PER_S)
            continue;
        report_wait((now_ns - began_ns) / NS_PER_S, dev, age_s);
        reported_ns = now_ns;
    }
    return NULL;
}

void ht_shutdown_begin(const struct ht_shutdown *shutdown)
{
    if (the.running)
        return;
    the.about = *shutdown;
    the.running = pthread_create(&the.thread, NULL, watch, NULL) == 0;
}

void ht_shutdown_end(void)
{
    if (!the.running)
        return;
    the.over = true;
    pthread_kill(the.thread, SIGTERM);
    pthread_join(the.thread, NULL);
    the.running = false;
}
