/* SPDX-License-Identifier: Apache-2.0 */
/* options.h - translates options of mount(8), fstab and systemd into those of the daemon and libfuse. Pure. */
#pragma once

#include "tiering/base/buf.h"

/*
 * Appends the options of text (separated by commas; commas within double quotes belong to the option) that are meant
 * for the daemon to out, separated by commas and ended by a NUL. May be called several times for one out: each -o adds.
 * 0, -ENOMEM, or -ENOTSUP for the option loop, which cannot be followed.
 */
int ht_mount_options(const char *text, struct ht_buf *out) HT_MUST_CHECK;
