/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watch.c - of passes that do not know how far they are: which one it is, on stderr, every few seconds. Their thread holds watch.lock
 * while it writes.
 */
#include "mount-helpers/fsck/fsck.h"

#include <unistd.h>

#include "mount-helpers/common/text.h"

static void tell_pass(struct ht_pass_watch *w, uint64_t began_ns)
{
    uint64_t bytes = 0, seconds = (ht_now_ns() - began_ns) / 1000000000;
    char text[HT_SIZE_TEXT_MAX];

    for (unsigned i = 0; i < w->dev_count; i++) {
        struct ht_dev_counters c;

        ht_dev_counters(w->devs[i], &c);
        bytes += c.read_bytes;
    }
    fprintf(stderr, "%s%s: %llu s, %s read%s", w->terminal ? "\r" : "", w->pass, (unsigned long long)seconds,
            ht_format_size(bytes, text, sizeof(text)), w->terminal ? "\033[K" : "\n");
    fflush(stderr);
    w->shown = true;
}

static void *watch_main(void *arg)
{
    struct ht_pass_watch *w = arg;
    uint64_t began_ns = ht_now_ns();

    ht_mutex_lock(&w->lock);
    for (unsigned n = 1; !w->done; n++) {
        uint64_t at = began_ns + (uint64_t)n * w->after_ms * 1000000;

        while (!w->done && ht_cond_wait_until(&w->ended, &w->lock, at) == 0)
            ;
        if (!w->done)
            tell_pass(w, began_ns);
    }
    ht_mutex_unlock(&w->lock);
    return NULL;
}

void ht_pass_watch_begin(struct ht_pass_watch *w, bool wanted, unsigned after_ms, const char *pass,
                         struct ht_dev *const devs[], unsigned dev_count)
{
    *w = (struct ht_pass_watch){.pass = pass, .devs = devs, .dev_count = dev_count, .after_ms = after_ms};
    w->terminal = isatty(STDERR_FILENO);
    if (!wanted && !w->terminal)
        return;
    ht_mutex_init(&w->lock, HT_LOCK_PROGRESS);
    ht_cond_init(&w->ended);
    w->on = pthread_create(&w->thread, NULL, watch_main, w) == 0;
}

void ht_pass_watch_clear(struct ht_pass_watch *w)
{
    if (!w->on || !w->terminal)
        return;
    ht_mutex_lock(&w->lock);
    if (w->shown) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    w->shown = false;
    ht_mutex_unlock(&w->lock);
}

void ht_pass_watch_end(struct ht_pass_watch *w)
{
    if (!w->on)
        return;
    ht_pass_watch_clear(w);
    ht_mutex_lock(&w->lock);
    w->done = true;
    pthread_cond_signal(&w->ended);
    ht_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->ended);
    ht_mutex_destroy(&w->lock);
    w->on = false;
}
