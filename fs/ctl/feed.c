/* SPDX-License-Identifier: Apache-2.0 */
#include "fs/ctl/feed.h"

#include "tiering/base/lock.h"

struct ht_feed {
    ht_feed_next *next;
    void (*free_ctx)(void *ctx);
    void *ctx;
    struct ht_mutex lock; /* threads may share a descriptor */
    HT_GUARDED_BY(HT_LOCK_FEED) struct {
        bool begun;
        uint64_t after; /* last entry that became a line */
        char *lines;
        size_t len, read; /* of lines */
    };
};

HT_MUTEX_OF(feed_lock, struct ht_feed, lock, HT_LOCK_FEED)

int ht_feed_open(ht_feed_next *next, void (*free_ctx)(void *ctx), void *ctx, struct ht_feed **out)
{
    struct ht_feed *f = calloc(1, sizeof(*f));

    if (!f) {
        if (free_ctx)
            free_ctx(ctx);
        return -ENOMEM;
    }
    f->next = next;
    f->free_ctx = free_ctx;
    f->ctx = ctx;
    ht_mutex_init(&f->lock, HT_LOCK_FEED);
    *out = f;
    return 0;
}

void ht_feed_close(struct ht_feed *f)
{
    HT_UNSHARED(HT_LOCK_FEED);
    ht_mutex_destroy(&f->lock);
    if (f->free_ctx)
        f->free_ctx(f->ctx);
    free(f->lines);
    free(f);
}

/* Makes the next lines when all of the last ones were read. 1, or 0: there are none; or -errno. */
static int next_lines(struct ht_feed *f) HT_REQUIRES(HT_LOCK_FEED)
{
    if (f->read < f->len)
        return 1;
    free(f->lines);
    f->lines = NULL;
    f->len = f->read = 0;
    FILE *to = open_memstream(&f->lines, &f->len);
    if (!to)
        return -ENOMEM;
    uint64_t was = f->after;
    int rc = f->next(f->ctx, &f->after, to);
    if (fclose(to) && rc >= 0)
        rc = -ENOMEM;
    if (rc < 0) {
        f->len = 0;
        f->after = was;
    }
    return rc;
}

ssize_t ht_feed_read(struct ht_feed *f, uint64_t off, void *buf, size_t len)
{
    size_t n = 0;

    ht_mutex_lock(feed_lock(f));
    if (!f->begun)
        f->after = off;
    f->begun = true;
    int rc = next_lines(f);
    if (rc > 0) {
        n = ht_min_u64(len, f->len - f->read);
        memcpy(buf, f->lines + f->read, n);
        f->read += n;
    }
    ht_mutex_unlock(feed_lock(f));
    return rc < 0 ? rc : (ssize_t)n;
}
