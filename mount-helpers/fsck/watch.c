/* SPDX-License-Identifier: Apache-2.0 */
/*
 * watch.c - for passes that do not measure their progress: prints the pass on stderr, every few seconds. The ticker's
 * lock is held while it writes.
 */
#include "mount-helpers/fsck/fsck.h"

#include <unistd.h>

#include "mount-helpers/common/text.h"

static void report_pass(void *ctx, uint64_t since_begin_ns)
{
    struct ht_pass_watch *w = ctx;
    uint64_t bytes = 0, seconds = since_begin_ns / 1000000000;
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

void ht_pass_watch_begin(struct ht_pass_watch *w, bool wanted, unsigned after_ms, const char *pass,
                         struct ht_dev *const devs[], unsigned dev_count)
{
    *w = (struct ht_pass_watch){.pass = pass, .devs = devs, .dev_count = dev_count};
    w->terminal = isatty(STDERR_FILENO);
    if (!wanted && !w->terminal)
        return;
    w->on = true;
    ht_ticker_begin(&w->ticker, after_ms * UINT64_C(1000000), report_pass, w);
}

void ht_pass_watch_clear(struct ht_pass_watch *w)
{
    if (!w->on || !w->terminal)
        return;
    ht_mutex_lock(&w->ticker.lock);
    if (w->shown) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    w->shown = false;
    ht_mutex_unlock(&w->ticker.lock);
}

void ht_pass_watch_end(struct ht_pass_watch *w)
{
    if (!w->on)
        return;
    ht_pass_watch_clear(w);
    ht_ticker_end(&w->ticker);
    w->on = false;
}
