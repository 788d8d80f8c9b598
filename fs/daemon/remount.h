/* SPDX-License-Identifier: Apache-2.0 */
/*
 * remount.h - change the flags of a mount that is there already: mount -o remount.
 *
 * The kernel keeps the flags. The daemon's own options cannot change. Naming one again, as mount(8) does with
 * everything in fstab, is allowed if it has its present value. The attribute "options" of the mount's root has the
 * values, so a remount needs a daemon that answers.
 */
#pragma once

#include "fs/daemon/options.h"

/* Logs errors. Before a mount becomes read-only every write to it is made durable. */
int ht_remount(const struct ht_options *o) HT_MUST_CHECK;
/* For a mount that has just been made: sets flags that it could not be given at once. */
int ht_remount_later_flags(const char *mountpoint, const struct ht_options *o) HT_MUST_CHECK;
