/* SPDX-License-Identifier: Apache-2.0 */
/* feed.c - see hidden_priv.h; and the lines of .hitrain/trace and .hitrain/plan, which name objects by their paths. */
#include "fs/ctl/events.h"

#include "tiering/api/stats.h"

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

struct ht_json ht_feed_line(FILE *to)
{
    struct ht_json j;

    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
    return j;
}

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

/* --------------------------------------------------------- lines with paths */

enum { NAMES = 256, TRACE_LINES_BYTES = 1 << 16, PLAN_LINES = 256 /* at once */ };

struct named_feed {
    struct ht_ctl *ctl;
    struct {
        uint64_t id;
        char path[HT_EVENT_PATH_BYTES];
    } name[NAMES]; /* paths of objects that were found of late: lines name the same ones over and over */

    /* Of a plan. */
    bool begun;
    struct ht_plan_place at;
    struct ht_plan_line line[PLAN_LINES];
};

static int open_named(struct ht_ctl *c, ht_feed_next *next, struct ht_feed **out)
{
    struct named_feed *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->ctl = c;
    return ht_feed_open(next, free, f, out);
}

/* Before each call's lines: files are renamed. */
static void forget_paths(struct named_feed *f)
{
    for (unsigned i = 0; i < NAMES; i++)
        f->name[i].id = 0;
}

static const char *path_of(struct named_feed *f, uint64_t id)
{
    unsigned i = id % NAMES;

    if (f->name[i].id != id)
        ht_ctl_find_path(f->ctl, id, f->name[i].path);
    f->name[i].id = id;
    return f->name[i].path;
}

/* --------------------------------------------- trace: tiering/base/trace.h */

static void put_access(const struct ht_trace_entry *e, const char *path, FILE *to)
{
    struct ht_json j = ht_feed_line(to);

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

static int next_accesses(void *ctx, uint64_t *after, FILE *to)
{
    struct named_feed *f = ctx;
    struct ht_trace *t = ht_store_trace(f->ctl->store);
    struct ht_trace_entry e;
    bool any = false;

    forget_paths(f);
    while (ftell(to) < TRACE_LINES_BYTES && ht_trace_next(t, *after, &e)) {
        put_access(&e, path_of(f, e.id), to);
        *after = e.seq;
        any = true;
    }
    return any;
}

int ht_trace_feed_open(struct ht_ctl *c, uint64_t base, const struct ht_caller *caller, struct ht_feed **out)
{
    return open_named(c, next_accesses, out);
}

/* ------------------------------------------------ plan: tiering/api/stats.h */

/*
 * The first line is about the whole plan, each other one about one use of a part of a file. Lines have no numbers, so
 * offsets do not count. They end where the plan does, and also when another plan takes its place.
 */
static void put_head(const struct ht_plan_stats *st, FILE *to)
{
    const struct ht_forecast_figures *g = &st->figures;
    struct ht_json j = ht_feed_line(to);

    ht_json_bool(&j, "active", st->active);
    ht_json_u64(&j, "made", st->made);
    ht_json_u64(&j, "dropped", st->dropped);
    if (st->active) {
        ht_json_u64(&j, "step_ns", g->step_ns);
        ht_json_u64(&j, "now_ns", g->now_ns);
        ht_json_u64(&j, "steps", g->steps);
        ht_json_u64(&j, "matched_steps", g->matched_steps);
        ht_json_u64(&j, "hits", g->hits);
        ht_json_u64(&j, "strangers", g->strangers);
        ht_json_u64(&j, "bytes", g->bytes);
        ht_json_u64(&j, "stay_bytes", g->stay_bytes);
    }
    ht_json_end(&j);
}

static void put_use(const struct ht_plan_line *l, const char *path, FILE *to)
{
    static const char *const words[] = {[HT_PLAN_READ] = "read",
                                        [HT_PLAN_CONSUME] = "consume",
                                        [HT_PLAN_UPDATE] = "update",
                                        [HT_PLAN_OVERWRITE] = "overwrite"};
    struct ht_json j = ht_feed_line(to);

    ht_json_u64(&j, "id", l->object);
    if (path[0])
        ht_json_str(&j, "path", path);
    ht_json_u64(&j, "offset", l->offset);
    ht_json_u64(&j, "bytes", l->bytes);
    ht_json_str(&j, "use", words[l->idle.use]);
    ht_json_u64(&j, "used_ns", l->idle.used_ns);
    ht_json_u64(&j, "next_ns", l->idle.next_ns);
    ht_json_bool(&j, "leaves", l->idle.leaves);
    if (l->idle.leaves)
        ht_json_u64(&j, "fetch_ns", l->idle.fetch_ns);
    ht_json_end(&j);
}

static int next_uses(void *ctx, uint64_t *after, FILE *to)
{
    struct named_feed *f = ctx;
    struct ht_plan_stats st;

    if (!f->begun) {
        ht_store_plan_stats(f->ctl->store, &st);
        f->at = (struct ht_plan_place){.made = st.active ? st.made : 0};
        f->begun = true;
        put_head(&st, to);
        return true;
    }
    forget_paths(f);
    unsigned n = f->at.made ? ht_store_plan_lines(f->ctl->store, &f->at, f->line, PLAN_LINES) : 0;
    for (unsigned i = 0; i < n; i++)
        put_use(&f->line[i], path_of(f, f->line[i].object), to);
    return n > 0;
}

int ht_plan_feed_open(struct ht_ctl *c, uint64_t base, const struct ht_caller *caller, struct ht_feed **out)
{
    return open_named(c, next_uses, out);
}
