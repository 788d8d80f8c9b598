/* SPDX-License-Identifier: Apache-2.0 */
/*
 * remount.h - change the flags of a mount that is there already: mount -o remount.
 *
 * The kernel keeps the flags, so the daemon need not be asked. What the daemon was started with cannot change; naming it
 * again, as mount(8) does with everything in fstab, is allowed when it is what is in force.
 */
#ifndef HITRAIN_FS_REMOUNT_H
#define HITRAIN_FS_REMOUNT_H

#include "fs/options.h"

/* Errors are told. Before a mount becomes read-only everything written to it is made durable. */
int ht_remount(const struct ht_options *o) HT_CHECK;
/* Of a mount that has just been made: flags that it could not be given at once. */
int ht_remount_later_flags(const char *mountpoint, const struct ht_options *o) HT_CHECK;

#endif
