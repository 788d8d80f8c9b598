/* SPDX-License-Identifier: Apache-2.0 */
/* request.h - what a request of the kernel asks for. */
#pragma once

#include "tiering/base/activity.h"

/* Of the first len bytes that the kernel gave; it began now. */
struct ht_request ht_request_of(const void *header, size_t len);
