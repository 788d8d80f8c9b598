/* SPDX-License-Identifier: Apache-2.0 */
/* verify.h - asserts the invariants of objects (tiering/base/verify.h). The caller holds the store's lock. */
#pragma once

#include "tiering/base/base.h"

struct ht_store;
struct ht_obj;

/* One object, its chunks and their table. */
void ht_obj_verify(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE);
/*
 * All objects, their images, space and owners. idle: no other thread works on the store, so sums of reservations and
 * space are exact.
 */
void ht_objects_verify(struct ht_store *s, bool idle) HT_REQUIRES(HT_LOCK_STORE);
