/* SPDX-License-Identifier: Apache-2.0 */
/*
 * activity.h - what each thread works on, waits for and holds, for `hitrainctl dump`.
 *
 * Each thread has a record and is the only one that writes it. Any thread may read all records without a lock, also
 * while other threads hang. What it reads may be half old and half new: it is for people.
 *
 * A thread gets its record with its first note and gives it back when it ends. A thread that finds no free record notes
 * nothing.
 */
#pragma once

#include <stdatomic.h>

#include "tiering/base/base.h"

enum { HT_ACTIVITIES_MAX = 1024, HT_ACTIVITY_HELD_MAX = 64 };

struct ht_activity {
    _Atomic int thread;             /* the kernel's number; 0: the record is free */
    _Atomic(const char *) request;  /* NULL: none */
    _Atomic uint64_t ino, began_ns; /* of the request */
    _Atomic(const char *) wait;     /* "a device", "the gate of model root"; NULL: the thread runs */
    _Atomic uint64_t wait_id, wait_ns;
    _Atomic(const void *) wanted;                     /* the chunk that the thread waits for */
    _Atomic(const void *) held[HT_ACTIVITY_HELD_MAX]; /* chunks */
    unsigned waits;                                   /* the thread's own: waits inside a wait */
};

/* A request that moves from one thread to another. */
struct ht_request {
    const char *what; /* lives for ever */
    uint64_t ino, began_ns;
};

/* The calling thread works on this request; what NULL: on none. */
void ht_activity_set_request(const struct ht_request *r);
struct ht_request ht_activity_request(void);
/*
 * Another thread sets *flag when the client does not want the request any more. NULL: the request goes on in any case.
 */
void ht_activity_set_interrupt(const _Atomic bool *flag);
/* The client does not want the calling thread's request any more. */
bool ht_activity_interrupted(void);
/* Can that happen? */
bool ht_activity_interruptible(void);
/* The calling thread waits. what lives for ever; id follows it unless it is 0. The outermost wait counts. */
void ht_activity_wait(const char *what, uint64_t id);
void ht_activity_go_on(void);
/* How long the calling thread has waited in all. */
uint64_t ht_activity_waited_ns(void);
/* The calling thread waits for a chunk; NULL: no longer. */
void ht_activity_want(const void *chunk);
void ht_activity_hold(const void *chunk);
void ht_activity_release(const void *chunk);
/* The calling thread gets so many staging buffers, or gives them back (negative). */
void ht_activity_hold_buffers(int count);
/* The calling thread holds no chunk and no staging buffer. */
bool ht_activity_holds_nothing(void);
/* The kernel's number of the calling thread. */
int ht_activity_thread(void);

/* The record at this place below HT_ACTIVITIES_MAX, or NULL. */
const struct ht_activity *ht_activity_at(unsigned i);
bool ht_activity_holds(const struct ht_activity *a, const void *chunk);
