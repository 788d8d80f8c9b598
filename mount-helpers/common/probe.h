/* SPDX-License-Identifier: Apache-2.0 */
/* probe.h - what a device holds already. The only file pair that knows libblkid. */
#ifndef HITRAIN_MOUNT_HELPERS_COMMON_PROBE_H
#define HITRAIN_MOUNT_HELPERS_COMMON_PROBE_H

#include "tiering/base/base.h"

enum { HT_PROBE_TEXT_MAX = 160 };

/*
 * 1: something known, described in text ("an ext4 file system labelled \"x\""); 0: nothing known; or -errno.
 * Stores of hitrain are not among what it knows: see ht_super_read.
 */
int ht_probe(const char *path, char text[HT_PROBE_TEXT_MAX]) HT_CHECK;
/* Erase the signatures that ht_probe recognises, so that nothing takes the device for what it was. */
int ht_probe_wipe(const char *path) HT_CHECK;

#endif
