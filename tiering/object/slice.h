/* SPDX-License-Identifier: Apache-2.0 */
/*
 * slice.h - loops over many chunks or objects that let other threads have the store's lock now and then.
 *
 * Between two slices anything may change but what the caller keeps from changing. It holds a reference to its object,
 * and looks chunks up again.
 */
#ifndef HITRAIN_TIERING_OBJECT_SLICE_H
#define HITRAIN_TIERING_OBJECT_SLICE_H

#include "tiering/base/base.h"
#include "tiering/base/guarded.h"
#include "tiering/base/slice.h"

struct ht_store;

/*
 * After each step of the loop. At the end of a slice it releases the lock and takes it again. If threads wait for the
 * lock, one gets it first. A slice that rests gives them more time: most in a thread of a lower class (io/gate.h).
 */
void ht_slice_next(struct ht_store *s, struct ht_slice *slice) HT_REQUIRES(HT_LOCK_STORE);

#endif
