/* SPDX-License-Identifier: Apache-2.0 */
/*
 * staging.h - a directory that is filled out of sight and gets its name at the end.
 *
 * It lies beside its future name, on a store, as .hitrain-receive-XXXXXXXX, and holds a lock (flock) as long as its
 * program runs. So the next program of that user that stages something there knows, and removes, one whose program was
 * killed. Others may write in the directory above: so everything goes by descriptors, and no symlink is followed.
 */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_STAGING_H
#define HITRAIN_MOUNT_HELPERS_CTL_STAGING_H

#include <limits.h>
#include "tiering/base/base.h"

struct ht_staging {
    int parent, dir; /* descriptors */
    char temporary[32];
    char name[NAME_MAX + 1];
};

/* 0 or -errno, with a message printed. -EEXIST: there is something at path. */
int ht_staging_begin(struct ht_staging *s, const char *path) HT_MUST_CHECK;
/* Gives it its name, durably. 0 or -errno, with a message printed; the caller then drops it. */
int ht_staging_publish(struct ht_staging *s, const char *path) HT_MUST_CHECK;
/* Removes it with everything in it. Prints a message if that fails. */
void ht_staging_drop(struct ht_staging *s);
/* Releases the descriptors. */
void ht_staging_end(struct ht_staging *s);

#endif
