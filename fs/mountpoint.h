/* SPDX-License-Identifier: Apache-2.0 */
/* mountpoint.h - is this a place to mount on? */
#ifndef HITRAIN_FS_MOUNTPOINT_H
#define HITRAIN_FS_MOUNTPOINT_H

#include <limits.h>
#include "tiering/base/base.h"

/* The absolute path of a directory. A dead hitrain mount in the way is detached. Negative errno: said why. */
int ht_mountpoint_prepare(const char *path, char out[PATH_MAX]) HT_CHECK;
/* Can FUSE be used at all? Says why not. */
int ht_mountpoint_check_fuse(void) HT_CHECK;

#endif
