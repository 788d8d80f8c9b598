/* SPDX-License-Identifier: Apache-2.0 */
/* plan_columns.c - see plan_columns.h. */
#include "mount-helpers/ctl/plan_columns.h"

#include "tiering/base/base.h"

bool ht_plan_line_leaves(const struct ht_cmd_line *l)
{
    return strcmp(ht_cmd_value(l, "leaves"), "true") == 0;
}

/* Adds bytes in the columns of [from, to), in ns of a step that repeats. */
static void add_over(double column[HT_PLAN_COLUMNS], uint64_t step_ns, uint64_t from_ns, uint64_t to_ns, double bytes)
{
    double each = (double)step_ns / HT_PLAN_COLUMNS;
    uint64_t first = (uint64_t)((double)from_ns / each), end = (uint64_t)((double)to_ns / each);

    end = ht_min_u64(ht_max_u64(end, first + 1), first + HT_PLAN_COLUMNS);
    for (uint64_t i = first; i < end; i++)
        column[i % HT_PLAN_COLUMNS] += bytes;
}

static void add(struct ht_plan_columns *c, const struct ht_cmd_line *l)
{
    uint64_t used = ht_cmd_number(l, "used_ns"), next = ht_cmd_number(l, "next_ns"),
             fetch = ht_cmd_number(l, "fetch_ns");
    double bytes = (double)ht_cmd_number(l, "bytes");

    if (!ht_plan_line_leaves(l)) {
        add_over(c->in_memory, c->step_ns, used, next, bytes);
        return;
    }
    add_over(c->in_memory, c->step_ns, used, used, bytes);
    if (fetch >= next)
        return;
    add_over(c->in_memory, c->step_ns, fetch, next, bytes);
    double columns = ht_max_u64((uint64_t)((double)(next - fetch) * HT_PLAN_COLUMNS / (double)c->step_ns), 1);
    add_over(c->read, c->step_ns, fetch, next, bytes / columns);
}

int ht_plan_columns_begin(struct ht_plan_columns *c, const struct ht_cmd_line *head)
{
    c->active = strcmp(ht_cmd_value(head, "active"), "true") == 0;
    c->step_ns = ht_cmd_number(head, "step_ns");
    c->now_ns = ht_cmd_number(head, "now_ns");
    if (ht_cmd_value(head, "active")[0] == '\0' || c->step_ns > INT64_MAX / 2 ||
        (c->active && (!c->step_ns || c->now_ns >= c->step_ns)))
        return -EPROTO;
    return 0;
}

int ht_plan_columns_add(struct ht_plan_columns *c, const struct ht_cmd_line *l)
{
    uint64_t used = ht_cmd_number(l, "used_ns"), next = ht_cmd_number(l, "next_ns");

    if (used >= c->step_ns || next < used || next - used > c->step_ns || ht_cmd_number(l, "fetch_ns") > 2 * c->step_ns)
        return -EPROTO;
    add(c, l);
    return 0;
}
