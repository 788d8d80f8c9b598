/* SPDX-License-Identifier: Apache-2.0 */
/* follow.c - `hitrainctl follow`: its options. */
#include "mount-helpers/copy/follow.h"

#include <unistd.h>

int ht_cmd_follow(const char *path, const struct ht_cmd_options *o)
{
    if (o->receive && (o->from || o->digest || o->rate || o->since || o->once)) {
        ht_error("--from, --digest, --since, --rate and --once are for the sender");
        return HT_CMD_USAGE;
    }
    if (!o->receive && o->json) {
        ht_error("--json is for the receiver: standard output of the sender is the stream");
        return HT_CMD_USAGE;
    }
    if (o->from && o->since) {
        ht_error("--from is for the first time, and --since for later: not both");
        return HT_CMD_USAGE;
    }
    if (o->digest && !o->from) {
        ht_error("--digest is that of the step of --from");
        return HT_CMD_USAGE;
    }
    if (isatty(o->receive ? STDIN_FILENO : STDOUT_FILENO)) {
        ht_error("the stream goes through a pipe, and standard %s is a terminal", o->receive ? "input" : "output");
        return HT_CMD_USAGE;
    }
    ht_follow_catch_signals();
    return o->receive ? ht_follow_receive(path, o) : ht_follow_send(path, o);
}
