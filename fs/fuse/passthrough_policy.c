/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Passthrough is worth it for content that is read whole in every step, and for files that their owner wants in memory.
 * Where the DRAM tier lends the memory, others may have no use for it, and rely on reads that wait for updates: so the
 * opener asks. An inode has one mode while it is open, so a file that is open in the ordinary way stays ordinary. An
 * open with O_DIRECT wants a device's bytes in a buffer of its own, and nothing kept in memory.
 */
#include "fs/fuse/passthrough_policy.h"

#include <fcntl.h>

bool ht_passthrough_wanted(const struct ht_passthrough_case *c)
{
    return (c->asked || (!c->lent && (c->parameter || c->pinned))) && c->bytes && !c->direct && !c->opens && !c->frozen;
}

bool ht_passthrough_may_store(int flags)
{
    return (flags & O_ACCMODE) == O_RDWR;
}

bool ht_passthrough_may_resize(bool stores, uint64_t from_bytes, uint64_t to_bytes)
{
    return !stores || to_bytes >= from_bytes;
}
