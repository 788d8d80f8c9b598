/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handout_policy.c - see handout_policy.h.
 *
 * What is worth it: content that is read whole in every step, and what its owner wants in memory. An inode has one mode while it is
 * open, so a file that somebody has open in the ordinary way stays ordinary. Who asks for O_DIRECT wants a device's bytes in a
 * buffer of its own, and nothing kept in memory for it.
 */
#include "fs/fuse/handout_policy.h"

#include <fcntl.h>

bool ht_handout_wanted(const struct ht_handout_case *c)
{
    return (c->parameter || c->pinned) && c->bytes && !c->direct && !c->opens;
}

bool ht_handout_may_store(int flags)
{
    return (flags & O_ACCMODE) == O_RDWR;
}
