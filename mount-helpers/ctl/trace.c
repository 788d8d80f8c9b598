/* SPDX-License-Identifier: Apache-2.0 */
/* trace.c - `hitrainctl trace`: the lines of .hitrain/trace, as a table (show) or as they are (save). */
#include <stdio.h>

#include "mount-helpers/common/text.h"
#include "mount-helpers/ctl/feed.h"

static bool selects(const struct ht_cmd_line *l, const struct ht_cmd_options *o)
{
    (void)l;
    (void)o;
    return true;
}

static void put(const struct ht_cmd_line *l, bool with_colours)
{
    uint64_t time_us = ht_cmd_number(l, "time_ns") / 1000, waited_us = ht_cmd_number(l, "waited_ns") / 1000;
    const char *path = ht_cmd_value(l, "path"), *op = ht_cmd_value(l, "op");

    (void)with_colours;
    printf("%8llu %12llu.%06llu ", (unsigned long long)ht_cmd_number(l, "seq"), (unsigned long long)(time_us / 1000000),
           (unsigned long long)(time_us % 1000000));
    ht_put_printable(op, stdout);
    printf("%*s %8llu us %12llu +%-10llu ", strlen(op) < 8 ? 8 - (int)strlen(op) : 0, "", (unsigned long long)waited_us,
           (unsigned long long)ht_cmd_number(l, "offset"), (unsigned long long)ht_cmd_number(l, "bytes"));
    if (path[0] == '\0')
        printf("(%llu)\n", (unsigned long long)ht_cmd_number(l, "id"));
    else {
        ht_put_printable(path, stdout);
        putchar('\n');
    }
}

int ht_cmd_trace(const char *path, const struct ht_cmd_options *o)
{
    static const struct ht_feed_kind kind = {
        "trace", "entries", "  number             time, s op            waited       offset  bytes      path",
        65536,   selects,   put};
    struct ht_cmd_options as_asked = *o;

    as_asked.json = strcmp(o->verb, "save") == 0;
    return ht_feed_print(&kind, path, &as_asked);
}
