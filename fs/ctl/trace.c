/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c - readers of .hitrain/trace: the entries of tiering/base/trace.h, with paths. */
#include "fs/ctl/events.h"

#include "tiering/base/json.h"

enum { NAMES = 256, LINES_BYTES = 1 << 16 };

/* Paths of objects that were found of late: a trace names the same ones over and over. */
struct name {
    uint64_t id;
    char path[HT_EVENT_PATH_BYTES];
};

struct trace_feed {
    struct ht_ctl *ctl;
    struct name name[NAMES];
};

static const char *path_of(struct trace_feed *f, uint64_t id)
{
    struct name *n = &f->name[id % NAMES];

    if (n->id != id) {
        n->id = id;
        ht_ctl_find_path(f->ctl, id, n->path);
    }
    return n->path;
}

static void put_access(const struct ht_trace_entry *e, const char *path, FILE *to)
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

static int next_lines(void *ctx, uint64_t *after, FILE *to)
{
    struct trace_feed *f = ctx;
    struct ht_trace *t = ht_store_trace(f->ctl->store);
    struct ht_trace_entry e;
    bool any = false;

    for (unsigned i = 0; i < NAMES; i++) /* files are renamed */
        f->name[i].id = 0;
    while (ftell(to) < LINES_BYTES && ht_trace_next(t, *after, &e)) {
        put_access(&e, path_of(f, e.id), to);
        *after = e.seq;
        any = true;
    }
    return any;
}

int ht_trace_feed_open(struct ht_ctl *c, uint64_t base, const struct ht_caller *caller, struct ht_feed **out)
{
    struct trace_feed *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->ctl = c;
    return ht_feed_open(next_lines, free, f, out);
}
