/* SPDX-License-Identifier: Apache-2.0 */
/* request.h - what a request of the kernel asks for. */
#ifndef HITRAIN_FS_FUSE_REQUEST_H
#define HITRAIN_FS_FUSE_REQUEST_H

#include "tiering/base/activity.h"

/* Of the first len bytes that the kernel gave; it began now. */
struct ht_request ht_request_of(const void *header, size_t len);

#endif
