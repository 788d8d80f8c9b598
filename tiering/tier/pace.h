/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pace.h - how fast work in the background may go: at most rate bytes a second, and a quarter of that while others move
 * bytes on the devices. It never stops: it ends also on a store that is always busy. Pure:
 * time and counts are the caller's.
 */
#pragma once

#include "tiering/base/base.h"

struct ht_pace {
    uint64_t rate_bytes; /* a second; not 0 */
    uint64_t next_ns;    /* not before */
    uint64_t seen_bytes, seen_ns;
    bool busy;
};

/*
 * bytes were moved just now; others_bytes: the sum that all other work has moved so far. Returns how long to wait
 * before going on; 0 for waits that are too short: small pieces add up.
 */
uint64_t ht_pace_wait_ns(struct ht_pace *p, uint64_t now_ns, uint64_t bytes, uint64_t others_bytes);
