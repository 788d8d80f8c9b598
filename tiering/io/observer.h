/* SPDX-License-Identifier: Apache-2.0 */
/*
 * observer.h - an observer sees each request of its device. It may hold the request, fail it, or serve it.
 *
 * No program has one. Tests record what reaches a device, inject failures, and give a device of memory a cache that
 * loses power (tests/support/dev.h). The rings' threads call the functions, without locks.
 */
#pragma once

#include "tiering/io/dev.h"

struct ht_observer {
    /* A valid request begins. 0, or the error with which it ends without reaching the device. */
    int (*begin)(struct ht_observer *o, struct ht_io *io);
    /* Must a request that the ring serves itself wait? The ring asks again. */
    bool (*holds)(struct ht_observer *o, const struct ht_io *io);
    /* Moves the bytes in place of a device of memory. 0 or -errno. */
    int (*perform)(struct ht_observer *o, struct ht_io *io);
    /* A request that reached the device ended; its owner does not know yet. moved: bytes that were moved. */
    void (*end)(struct ht_observer *o, struct ht_io *io, int result, uint32_t moved);
    /* The device closes. */
    void (*close)(struct ht_observer *o);
};
