/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ending.c - see ending.h.
 *
 * An end that waits for a device goes on when the device answers, as with any file system: a request cannot be taken back, and
 * until it is done its bytes may change on the device. Whoever does not want to wait ends the process, which is as good as a
 * crash: what was synced is there, and the device stays held until its last request has ended.
 */
#include "fs/ending.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "fs/process.h"
#include "tiering/base/log.h"

enum { LOOK_S = 1, TELL_S = 5 };
#define NS_PER_S 1000000000ull

static struct {
    struct ht_ending about;
    pthread_t thread;
    bool running;
    _Atomic bool over;
} the;

/* Seconds that the oldest request of all has taken; 0 and no device: none is waited for. */
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

static void tell(uint64_t waited_s, const struct ht_dev *dev, uint64_t age_s)
{
    unsigned long long waited = waited_s, age = age_s;

    if (dev == NULL)
        ht_info("unmounting for %llu s", waited);
    else if (age_s < the.about.answer_s)
        ht_info("unmounting for %llu s: %s has been busy with a request for %llu s", waited, ht_dev_name(dev), age);
    else
        ht_warn(
            "unmounting for %llu s: %s has not answered a request for %llu s; this goes on when it answers; another SIGTERM "
            "to process %d ends it without, and what was not synced is lost",
            waited, ht_dev_name(dev), age, getpid());
}

static void give_up(const struct ht_dev *dev, uint64_t age_s)
{
    ht_error(
        "ended by a signal while %s has not answered for %llu s: what was synced is there at the next mount, the rest is "
        "lost; %s is held until its last request has ended",
        ht_dev_name(dev), (unsigned long long)age_s, ht_dev_name(dev));
    the.about.detach(the.about.ctx);
    _exit(EXIT_FAILURE);
}

static void *watch(void *arg)
{
    const struct timespec look = {LOOK_S, 0};
    uint64_t began_ns = ht_now_ns(), told_ns = began_ns;
    sigset_t set;

    ht_signals_set(&set);
    while (!the.over) {
        const struct ht_dev *dev;
        int sig = sigtimedwait(&set, NULL, &look);
        uint64_t now_ns = ht_now_ns(), age_s = slowest(&dev);

        if (the.over)
            break;
        if (sig > 0 && dev != NULL && age_s >= the.about.answer_s)
            give_up(dev, age_s);
        if (now_ns - told_ns < TELL_S * NS_PER_S)
            continue;
        tell((now_ns - began_ns) / NS_PER_S, dev, age_s);
        told_ns = now_ns;
    }
    return NULL;
}

void ht_ending_begin(const struct ht_ending *ending)
{
    if (the.running)
        return;
    the.about = *ending;
    the.running = pthread_create(&the.thread, NULL, watch, NULL) == 0;
}

void ht_ending_end(void)
{
    if (!the.running)
        return;
    the.over = true;
    pthread_kill(the.thread, SIGTERM);
    pthread_join(the.thread, NULL);
    the.running = false;
}
