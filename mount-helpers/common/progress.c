/* SPDX-License-Identifier: Apache-2.0 */
/* progress.c - see progress.h: a bar on a terminal, else a line every few seconds. */
#include "mount-helpers/common/progress.h"

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

static void show_progress(struct ht_progress *p, uint64_t now_ns)
{
    double seconds = (double)(now_ns - p->began_ns) / 1e9;
    double rate = seconds > 0 ? (double)p->done_bytes / seconds : 0;
    unsigned permille = p->total_bytes != 0 ? (unsigned)(p->done_bytes * 1000.0 / p->total_bytes) : 1000;

    if (p->terminal) {
        fputc('\r', stderr);
        put_bar(permille);
    }
    fprintf(stderr, "%u.%u %%  %s of %s %s, %s/s", permille / 10, permille % 10, ht_size_text(p->done_bytes),
            ht_size_text(p->total_bytes), p->done, ht_size_text((uint64_t)rate));
    if (p->done_bytes < p->total_bytes && rate > 0)
        fprintf(stderr, ", %.0f s left", (double)(p->total_bytes - p->done_bytes) / rate);
    fputs(p->terminal ? "\033[K" : "\n", stderr);
    fflush(stderr);
    p->shown_ns = now_ns;
}

void ht_progress_begin(struct ht_progress *p, bool wanted, const char *done, uint64_t total_bytes)
{
    *p = (struct ht_progress){.done = done, .total_bytes = total_bytes, .began_ns = ht_now_ns()};
    p->terminal = isatty(STDERR_FILENO);
    p->on = wanted || p->terminal;
    p->shown_ns = p->began_ns;
}

void ht_progress_add(struct ht_progress *p, uint64_t bytes)
{
    p->done_bytes += bytes;
    if (!p->on)
        return;
    uint64_t now_ns = ht_now_ns();
    if (now_ns - p->shown_ns >= (p->terminal ? TERMINAL_MS : LINES_MS) * 1000000ull)
        show_progress(p, now_ns);
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
    show_progress(p, ht_now_ns());
    if (p->terminal)
        fputc('\n', stderr);
    p->on = false;
}
