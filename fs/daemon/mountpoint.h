/* SPDX-License-Identifier: Apache-2.0 */
/* mountpoint.h - checks that a place can be mounted on. */
#pragma once

#include <limits.h>
#include "tiering/base/base.h"

/* The absolute path of a directory. Detaches a dead hitrain mount there. Negative errno: logs the reason. */
int ht_mountpoint_prepare(const char *path, char out[PATH_MAX]) HT_MUST_CHECK;
/* Can FUSE be used at all? Reports the reason if not. */
int ht_mountpoint_check_fuse(void) HT_MUST_CHECK;
