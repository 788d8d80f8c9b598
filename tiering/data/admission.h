/* SPDX-License-Identifier: Apache-2.0 */
/* admission.h - the permit of a batch for its next chunk: it has the permit before it takes the chunk (io/gate.h). */
#pragma once

#include "tiering/base/guarded.h"
#include "tiering/io/gate.h"
#include "tiering/object/ref.h"

enum ht_admission {
    HT_ADMITTED,        /* the lock was held all the time */
    HT_ADMISSION_LATER, /* not beside the requests that the batch has: it completes one, and asks again */
    HT_ADMISSION_AGAIN, /* the call released the lock: the caller looks again at what it wants, and asks again */
};
/*
 * *spare: a permit without a request, which the batch keeps between calls. It fits after HT_ADMITTED, and the request
 * takes it over. holds: the batch has requests in flight, and with them chunks.
 */
enum ht_admission ht_admit(struct ht_store *s, struct ht_permit *spare, const struct ht_permit_request *r, bool holds)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* A read of these bytes. NULL: nothing is read. */
struct ht_permit_request ht_admission_of_ref(const struct ht_store *s, const struct ht_ref *ref);
/* The spare permit becomes that of a request. */
struct ht_permit ht_admission_take(struct ht_permit *spare);
