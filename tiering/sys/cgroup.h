/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cgroup.h - the control groups of this process, in both hierarchies: v2, and the one of a controller of v1. From the
 * process's own group to the top of the mounted tree. No state; any thread.
 */
#pragma once

#include <limits.h>

#include "tiering/base/base.h"

struct ht_cgroup {
    bool v2;
    size_t top; /* so long is the directory of the topmost group that is seen here */
    char dir[PATH_MAX];
};

/* The process's own group. False: that hierarchy is not mounted, or has no such controller. */
bool ht_cgroup_find(bool v2, const char *controller, struct ht_cgroup *out);
/* Goes to the group above. False: there is none. */
bool ht_cgroup_up(struct ht_cgroup *g);
/*
 * The first number of a file, and the second one if the caller wants it. False: "max", a negative one, or a file that
 * cannot be read.
 */
bool ht_cgroup_numbers(const struct ht_cgroup *g, const char *file, uint64_t *out, uint64_t *out_second);
/* The value after "key value". False: there is none. */
bool ht_cgroup_keyed(const struct ht_cgroup *g, const char *file, const char *key, uint64_t *out);
