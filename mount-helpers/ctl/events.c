/* SPDX-License-Identifier: Apache-2.0 */
/* events.c - `hitrainctl events`: the lines of .hitrain/events. */
#include "mount-helpers/ctl/event_line.h"
#include "mount-helpers/ctl/feed.h"

static bool selects(const struct ht_cmd_line *l, const struct ht_cmd_options *o)
{
    return ht_event_line_level(l) <= o->level;
}

int ht_cmd_events(const char *path, const struct ht_cmd_options *o)
{
    static const struct ht_feed_kind kind = {"events", "events", NULL, 0, selects, ht_event_line_put};

    return ht_feed_print(&kind, path, o);
}
