/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c - see trace.h. */
#include "fs/ctl/trace.h"

#include <stdio.h>
#include <stdlib.h>

#include "fs/ctl/events.h"
#include "tiering/base/json.h"

enum { NAMES = 256, LINES_BYTES = 1 << 16 };

/* Paths of objects that were found of late: a trace names the same ones over and over. */
struct name {
    uint64_t id;
    char path[HT_EVENT_PATH_BYTES];
};

struct ht_trace_feed {
    struct ht_ctl *ctl;
    struct ht_mutex lock; /* threads may share a descriptor */
    HT_GUARDED_BY(HT_LOCK_FEED) struct {
        bool begun;
        uint64_t after; /* last entry that became a line */
        char *lines;
        size_t len, read; /* of lines */
        struct name name[NAMES];
    };
};

HT_MUTEX_OF(feed_lock, struct ht_trace_feed, lock, HT_LOCK_FEED)

int ht_trace_feed_open(struct ht_ctl *c, struct ht_trace_feed **out)
{
    struct ht_trace_feed *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->ctl = c;
    ht_mutex_init(&f->lock, HT_LOCK_FEED);
    *out = f;
    return 0;
}

void ht_trace_feed_close(struct ht_trace_feed *f)
{
    HT_UNSHARED(HT_LOCK_FEED);
    ht_mutex_destroy(&f->lock);
    free(f->lines);
    free(f);
}

static const char *path_of(struct ht_trace_feed *f, uint64_t id) HT_REQUIRES(HT_LOCK_FEED)
{
    struct name *n = &f->name[id % NAMES];

    if (n->id != id) {
        n->id = id;
        ht_ctl_find_path(f->ctl, id, n->path);
    }
    return n->path;
}

static void put(const struct ht_trace_entry *e, const char *path, FILE *to)
{
    struct ht_json j;

    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
    ht_json_u64(&j, "seq", e->seq);
    ht_json_u64(&j, "time_ns", e->time_ns);
    ht_json_str(&j, "op", ht_trace_op_word(e->op));
    ht_json_u64(&j, "id", e->id);
    if (path[0])
        ht_json_str(&j, "path", path);
    if (e->bytes) {
        ht_json_u64(&j, "offset", e->offset);
        ht_json_u64(&j, "bytes", e->bytes);
    }
    if (e->waited_ns)
        ht_json_u64(&j, "waited_ns", e->waited_ns);
    ht_json_end(&j);
}

static bool put_lines(struct ht_trace_feed *f, FILE *to) HT_REQUIRES(HT_LOCK_FEED)
{
    struct ht_trace *t = ht_store_trace(f->ctl->store);
    struct ht_trace_entry e;
    bool any = false;

    for (unsigned i = 0; i < NAMES; i++) /* files are renamed */
        f->name[i].id = 0;
    while (ftell(to) < LINES_BYTES && ht_trace_next(t, f->after, &e)) {
        put(&e, path_of(f, e.id), to);
        f->after = e.seq;
        any = true;
    }
    return any;
}

/* Makes the next lines when all of the last ones were read. False: there are none, or no memory for them. */
static bool next_lines(struct ht_trace_feed *f) HT_REQUIRES(HT_LOCK_FEED)
{
    if (f->read < f->len)
        return true;
    free(f->lines);
    f->lines = NULL;
    f->len = f->read = 0;
    FILE *to = open_memstream(&f->lines, &f->len);
    if (!to)
        return false;
    uint64_t was = f->after;
    bool any = put_lines(f, to);
    if (fclose(to)) {
        f->len = 0;
        f->after = was;
        return false;
    }
    return any;
}

ssize_t ht_trace_feed_read(struct ht_trace_feed *f, uint64_t off, void *buf, size_t len)
{
    size_t done = 0;

    ht_mutex_lock(feed_lock(f));
    if (!f->begun)
        f->after = off;
    f->begun = true;
    while (done < len && next_lines(f)) {
        size_t n = ht_min_u64(len - done, f->len - f->read);
        memcpy((char *)buf + done, f->lines + f->read, n);
        f->read += n;
        done += n;
    }
    ht_mutex_unlock(feed_lock(f));
    return (ssize_t)done;
}
