/* SPDX-License-Identifier: Apache-2.0 */
/* feed.h - the common part of `hitrainctl events` and `hitrainctl trace`. */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_FEED_H
#define HITRAIN_MOUNT_HELPERS_CTL_FEED_H

#include "mount-helpers/ctl/ctl.h"

struct ht_feed_kind {
    const char *file;    /* below .hitrain */
    const char *entries; /* what it has, in a message */
    const char *head;    /* a line before the first one for people, or NULL */
    uint64_t most;       /* entries to print at most without --follow; 0: all */
    bool (*selects)(const struct ht_cmd_line *l, const struct ht_cmd_options *o);
    void (*put)(const struct ht_cmd_line *l, bool with_colours); /* one line for people, on stdout */
};

/* Prints what the options ask for. Returns an exit code, and prints errors. */
int ht_feed_print(const struct ht_feed_kind *kind, const char *path, const struct ht_cmd_options *o);

#endif
