/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - readers of .hitrain/plan: the plan that the store follows (tiering/api/stats.h), with paths.
 *
 * The first line is about the whole plan, each other one about one use of a part of a file. Lines have no numbers, so
 * offsets do not count. They end where the plan does, and also when another plan takes its place.
 */
#include "fs/ctl/events.h"

#include "tiering/api/stats.h"
#include "tiering/base/json.h"

enum { LINES = 256 }; /* at once */

struct plan_feed {
    struct ht_ctl *ctl;
    bool begun;
    struct ht_plan_place at;
    uint64_t id; /* whose path this is: lines of a file are neighbours */
    char path[HT_EVENT_PATH_BYTES];
    struct ht_plan_line line[LINES];
};

static void put_head(const struct ht_plan_stats *st, FILE *to)
{
    const struct ht_forecast_figures *g = &st->figures;
    struct ht_json j;

    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
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

static void put_line(const struct ht_plan_line *l, const char *path, FILE *to)
{
    static const char *const words[] = {[HT_PLAN_READ] = "read",
                                        [HT_PLAN_CONSUME] = "consume",
                                        [HT_PLAN_UPDATE] = "update",
                                        [HT_PLAN_OVERWRITE] = "overwrite"};
    struct ht_json j;

    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
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

static int next_lines(void *ctx, uint64_t *after, FILE *to)
{
    struct plan_feed *f = ctx;
    struct ht_plan_stats st;

    if (!f->begun) {
        ht_store_plan_stats(f->ctl->store, &st);
        f->at = (struct ht_plan_place){.made = st.active ? st.made : 0};
        f->begun = true;
        put_head(&st, to);
        return true;
    }
    unsigned n = f->at.made ? ht_store_plan_lines(f->ctl->store, &f->at, f->line, LINES) : 0;
    for (unsigned i = 0; i < n; i++) {
        if (f->id != f->line[i].object) {
            f->id = f->line[i].object;
            ht_ctl_find_path(f->ctl, f->id, f->path);
        }
        put_line(&f->line[i], f->path, to);
    }
    return n > 0;
}

int ht_plan_feed_open(struct ht_ctl *c, uint64_t base, const struct ht_caller *caller, struct ht_feed **out)
{
    struct plan_feed *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    f->ctl = c;
    return ht_feed_open(next_lines, free, f, out);
}
