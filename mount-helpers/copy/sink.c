/* SPDX-License-Identifier: Apache-2.0 */
/* sink.c - see sink.h. */
#include "mount-helpers/copy/sink.h"

#include <limits.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include "tiering/base/files.h"
#include "tiering/base/log.h"

enum { WAIT_MS = 200, WAITS_MAX = 25 };

/* Once stopped, no write is larger than what a pipe with room takes at once. */
static int put_stoppable(const struct ht_sink *s, const uint8_t *data, size_t len)
{
    unsigned waits = 0;

    while (len) {
        struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
        bool stopped = s->stopped();
        int ready = poll(&out, 1, WAIT_MS);
        if (ready == 0 && stopped && ++waits == WAITS_MAX)
            return -EINTR;
        if (ready == 0 || (ready < 0 && errno == EINTR))
            continue;
        ssize_t n = ready < 0 ? -1 : write(STDOUT_FILENO, data, stopped && len > PIPE_BUF ? PIPE_BUF : len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        data += n;
        len -= (size_t)n;
        waits = 0;
    }
    return 0;
}

/* Waits until so many bytes may have been written. */
static void keep_rate(const struct ht_sink *s)
{
    uint64_t due_ns = (uint64_t)((double)s->written / (double)s->rate * 1e9), now_ns = ht_now_ns() - s->began_ns;

    if (due_ns > now_ns) {
        struct timespec t = {(time_t)((due_ns - now_ns) / 1000000000), (long)((due_ns - now_ns) % 1000000000)};
        (void)nanosleep(&t, NULL);
    }
}

int ht_sink_put(void *ctx, const void *data, size_t len)
{
    struct ht_sink *s = ctx;
    int rc = s->stopped ? put_stoppable(s, data, len) : ht_write_all(STDOUT_FILENO, data, len);

    s->written += len;
    s->error = rc;
    if (rc == 0 && s->rate)
        keep_rate(s);
    return rc;
}

void ht_sink_explain(int error, const char *reader, const char *again)
{
    if (error == -EPIPE)
        ht_error("cannot write the stream: the %s has ended, or was killed; start both programs again: %s", reader,
                 again);
    else
        ht_error("cannot write the stream: %s", strerror(-error));
}
