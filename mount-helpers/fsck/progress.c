/* SPDX-License-Identifier: Apache-2.0 */
/*
 * progress.c - how far the reading is, on stderr: a bar on a terminal, else a line every few seconds. Of passes that do not know how far
 * they are: which one it is. Their thread holds watch.lock while it writes.
 */
#include "mount-helpers/fsck/fsck.h"

#include <time.h>
#include <unistd.h>

#include "mount-helpers/common/text.h"

enum { BAR_WIDTH = 24, TERMINAL_MS = 200, LINES_MS = 5000 };

static void put_bar(unsigned permille)
{
    unsigned full = permille * BAR_WIDTH / 1000;

    fputc('[', stderr);
    for (unsigned i = 0; i < BAR_WIDTH; i++)
        fputc(i < full ? '#' : '.', stderr);
    fputs("] ", stderr);
}

static void show(struct ht_progress *p, uint64_t now_ns)
{
    double seconds = (double)(now_ns - p->began_ns) / 1e9;
    double rate = seconds > 0 ? (double)p->done_bytes / seconds : 0;
    unsigned permille = p->total_bytes != 0 ? (unsigned)(p->done_bytes * 1000.0 / p->total_bytes) : 1000;

    if (p->terminal) {
        fputc('\r', stderr);
        put_bar(permille);
    }
    fprintf(stderr, "%u.%u %%  %s of %s verified, %s/s", permille / 10, permille % 10, ht_size_text(p->done_bytes),
            ht_size_text(p->total_bytes), ht_size_text((uint64_t)rate));
    if (p->done_bytes < p->total_bytes && rate > 0)
        fprintf(stderr, ", %.0f s left", (double)(p->total_bytes - p->done_bytes) / rate);
    fputs(p->terminal ? "\033[K" : "\n", stderr);
    fflush(stderr);
    p->shown_ns = now_ns;
}

void ht_progress_begin(struct ht_progress *p, bool wanted, uint64_t total_bytes)
{
    *p = (struct ht_progress){.total_bytes = total_bytes, .began_ns = ht_now_ns()};
    p->terminal = isatty(STDERR_FILENO);
    p->on = wanted || p->terminal;
    p->shown_ns = p->began_ns;
}

void ht_progress_add(struct ht_progress *p, uint64_t bytes)
{
    uint64_t now_ns;

    p->done_bytes += bytes;
    if (!p->on)
        return;
    now_ns = ht_now_ns();
    if (now_ns - p->shown_ns >= (p->terminal ? TERMINAL_MS : LINES_MS) * 1000000ull)
        show(p, now_ns);
}

void ht_progress_clear(struct ht_progress *p)
{
    if (p->on && p->terminal) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
}

void ht_progress_end(struct ht_progress *p)
{
    if (!p->on)
        return;
    show(p, ht_now_ns());
    if (p->terminal)
        fputc('\n', stderr);
    p->on = false;
}

/* ------------------------------------------------------------------ passes */

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
        struct timespec until = {(time_t)(at / 1000000000), (long)(at % 1000000000)};

        while (!w->done && ht_cond_timedwait(&w->ended, &w->lock, &until) == 0)
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
    pthread_condattr_t attr;

    *w = (struct ht_pass_watch){.pass = pass, .devs = devs, .dev_count = dev_count, .after_ms = after_ms};
    w->terminal = isatty(STDERR_FILENO);
    if (!wanted && !w->terminal)
        return;
    ht_mutex_init(&w->lock, HT_LOCK_PROGRESS);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->ended, &attr);
    pthread_condattr_destroy(&attr);
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
