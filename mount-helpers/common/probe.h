/* SPDX-License-Identifier: Apache-2.0 */
/* probe.h - detects content that a device holds already. The only file pair that knows libblkid. */
#pragma once

#include "tiering/base/base.h"

enum { HT_PROBE_TEXT_MAX = 160 };

/*
 * 1: known content, described in text ("an ext4 file system labelled \"x\""); 0: nothing known; or -errno. It does not
 * know stores of hitrain: see ht_super_read.
 */
int ht_probe(const char *path, char text[HT_PROBE_TEXT_MAX]) HT_MUST_CHECK;
/* Erases the signatures that ht_probe recognises, so that no program takes the device for its former content. */
int ht_probe_wipe(const char *path) HT_MUST_CHECK;
