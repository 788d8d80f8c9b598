/* SPDX-License-Identifier: Apache-2.0 */
/* shutdown.h - while a mount ends: a user who waits for a silent device gets a message and a way out. */
#pragma once

#include "tiering/api/store.h"

/* The devices that the end may have to wait for, and the way out. Must stay as it is until ht_shutdown_end. */
struct ht_shutdown {
    struct ht_dev *const *dev;
    unsigned count;
    unsigned answer_s;         /* a device does not answer when a request is older */
    void (*detach)(void *ctx); /* detach the mount, as well as possible at once */
    void *ctx;
};

/*
 * From now on a thread logs every few seconds which device the end waits for. While a device does not answer, another
 * SIGTERM, SIGINT or SIGHUP (blocked in this thread) ends the process. A second call does nothing.
 */
void ht_shutdown_begin(const struct ht_shutdown *shutdown);
void ht_shutdown_end(void);
