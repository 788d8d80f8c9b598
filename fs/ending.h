/* SPDX-License-Identifier: Apache-2.0 */
/* ending.h - while a mount ends: nobody waits for a silent device without being told, nor without a way out. */
#ifndef HITRAIN_FS_ENDING_H
#define HITRAIN_FS_ENDING_H

#include "tiering/store/store.h"

/* What the end may have to wait for, and the way out. Must stay as it is until ht_ending_end. */
struct ht_ending {
    struct ht_dev *const *dev;
    unsigned count;
    unsigned answer_s;         /* a device does not answer when a request is older */
    void (*detach)(void *ctx); /* take the mount away, as well as can be done at once */
    void *ctx;
};

/*
 * From now on a thread tells every few seconds which device the end waits for. While one does not answer, another SIGTERM, SIGINT or SIGHUP
 * (blocked in this thread) ends the process. Called once more it does nothing.
 */
void ht_ending_begin(const struct ht_ending *ending);
void ht_ending_end(void);

#endif
