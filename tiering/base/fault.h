/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fault.h - named fault points. A test arms a point; the code under test checks it at the place where the real failure
 * would show. While nothing is armed, which is always so outside tests, a passage costs one load.
 *
 * The list is complete: tests/unit/faults/test_points.c fires each of its rows on a whole store, and fails when one was
 * not reached. Some failures need no point, because tests can cause them directly: a request before it reaches its
 * device (tests/support/dev.h), any allocation and any thread (tests/support/wrap.h).
 */
#pragma once

#include <stdatomic.h>

#include "tiering/base/base.h"

/* P(identifier, name, errno, the failure) */
#define HT_FAULT_POINTS(P)                                                                          \
    P(PINNED, "base.pinned", ENOMEM, "large memory cannot be had")                                  \
    P(SHARED, "base.shared", ENOMEM, "memory that others map cannot be had")                        \
    P(IO_RING, "io.ring", ENOMEM, "a ring cannot be had")                                           \
    P(IO_REGISTER, "io.register", ENOMEM, "memory is not registered with a ring")                   \
    P(IO_DEFERRED, "io.deferred", EINVAL, "a ring cannot leave completions to its one thread")      \
    P(IO_COOPERATIVE, "io.cooperative", EINVAL, "a ring cannot spare interrupts, either")           \
    P(IO_FILES, "io.files", EINVAL, "devices are not registered with a ring")                       \
    P(IO_CLONE, "io.clone", EINVAL, "memory is not registered for all rings at once")               \
    P(IO_COMMANDS, "io.commands", EOPNOTSUPP, "a ring cannot pass NVMe commands on")                \
    P(IO_COMMAND_MEMORY, "io.command_memory", EINVAL, "no command is taken from registered memory") \
    P(IO_SUBMIT, "io.submit", EAGAIN, "the kernel takes no submission now")                         \
    P(IO_REFUSED, "io.refused", EBADF, "the kernel refuses a submission")                           \
    P(IO_WAIT, "io.wait", EINTR, "a wait is interrupted")                                           \
    P(IO_AGAIN, "io.again", EAGAIN, "a request is interrupted before it moved anything")            \
    P(IO_SHORT, "io.short", EIO, "half of a transfer is moved")                                     \
    P(IO_TORN, "io.torn", EIO, "a transfer ends inside a block")                                    \
    P(IO_READ, "io.read", EIO, "a device says that it could not read")                              \
    P(IO_WRITE, "io.write", EIO, "a device says that it could not write, having written")           \
    P(IO_FULL, "io.full", ENOSPC, "a device, or what is below it, is full")                         \
    P(IO_FLUSH, "io.flush", EIO, "a device says that it could not flush, having done it")           \
    P(IO_SILENT, "io.silent", ETIMEDOUT, "a device of memory does not answer while this fires")     \
    P(JOURNAL_FRAME, "journal.frame", ENOMEM, "no memory for a frame")                              \
    P(JOURNAL_RESERVE, "journal.reserve", ENOSPC, "the log has no room for what is to live in it")  \
    P(JOURNAL_SPACE, "journal.space", ENOSPC, "the log has no room for a group")                    \
    P(JOURNAL_WRITE, "journal.write", EIO, "a copy of the log cannot be written")                   \
    P(JOURNAL_FLUSH, "journal.flush", EIO, "a copy of the log cannot be flushed")                   \
    P(JOURNAL_REFILL, "journal.refill", EIO, "a copy of the log cannot be brought up to date")      \
    P(SPACE_SUPER, "space.super", EIO, "a copy of the superblock cannot be written")                \
    P(SPACE_RESERVE, "space.reserve", ENOSPC, "no space can be set aside")                          \
    P(CACHE_SLOT, "cache.slot", ENOMEM, "no image can go to make room for another")                 \
    P(CACHE_STAGING, "cache.staging", EAGAIN, "no staging buffer is free for one who cannot wait")  \
    P(STORE_READ, "store.read", EIO, "a chunk cannot be read")                                      \
    P(STORE_CHECKSUM, "store.checksum", EIO, "a chunk that was read is not what was written")       \
    P(STORE_WRITE, "store.write", EIO, "a chunk cannot be written where it was to go")              \
    P(OPTIM_UPDATE, "optim.update", EIO, "the update of a range fails")                             \
    P(OPTIM_CONVERT, "optim.convert", ENOSPC, "state cannot be converted to another form")

enum ht_fault_point {
#define HT_FAULT_ID(id, name, error, what) HT_FAULT_##id,
    HT_FAULT_POINTS(HT_FAULT_ID)
#undef HT_FAULT_ID
        HT_FAULT_COUNT
};

const char *ht_fault_name(enum ht_fault_point point);
/* The n-th passage from now (1 = next) fails; repeat: all later ones, too. */
void ht_fault_arm(enum ht_fault_point point, unsigned nth, bool repeat);
void ht_fault_disarm_all(void);
/* How often the point was passed since it was armed. */
unsigned ht_fault_passed(enum ht_fault_point point);

/* Of tests, while a point is armed (tests/unit/tiering/base/verify_faults.c), else NULL. */
extern int (*_Atomic ht_fault_pass)(enum ht_fault_point point);

/* 0, or the point's negative errno where this passage is to fail. */
static inline int ht_fault(enum ht_fault_point point)
{
    int (*pass)(enum ht_fault_point point) = atomic_load_explicit(&ht_fault_pass, memory_order_relaxed);

    return pass ? pass(point) : 0;
}
