/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slice.h - loops over many chunks or objects that let other threads have the store's lock now and then, and memory
 * that is freed then.
 *
 * Between two slices anything may change but what the caller keeps from changing. It holds a reference to its object,
 * and looks chunks up again.
 */
#pragma once

#include "tiering/base/slice.h"
#include "tiering/object/refcount.h"

/*
 * After each step of the loop. At the end of a slice it releases the lock and takes it again. If threads wait for the
 * lock, one gets it first. A slice that rests gives them more time: most in a thread of a lower class (io/gate.h).
 */
void ht_slice_next(struct ht_store *s, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE);

/*
 * Memory that is given back without the store's lock. The last free() of many megabytes returns these to the system.
 * That takes milliseconds for the tables of a million chunks. So the memory of tables is collected, and the thread that
 * ends a slice or a transaction frees it when it has let the lock go.
 */
enum { HT_TRASH_PIECES_MAX = 2048 }; /* more are freed at once: about a megabyte */

struct ht_trash {
    void *first; /* of malloc; each begins with the address of the next one */
    unsigned pieces;
    struct ht_refcount_table former; /* size 0: none */
};

/* A piece of malloc, as large as an address at least. NULL is none. */
void ht_trash_put(struct ht_store *s, void *piece) HT_REQUIRES(HT_LOCK_STORE);
/* Takes everything, for ht_trash_empty without the lock. */
struct ht_trash ht_trash_take(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
void ht_trash_empty(struct ht_trash *t);
