/* SPDX-License-Identifier: Apache-2.0 */
/* progress.h - the progress of long work, on stderr. */
#pragma once

#include "tiering/base/base.h"

struct ht_progress {
    const char *done; /* the action on the bytes: "verified" */
    bool on, terminal;
    uint64_t total_bytes, done_bytes, began_ns, shown_ns;
};
/* wanted: also where stderr is no terminal. */
void ht_progress_begin(struct ht_progress *p, bool wanted, const char *done, uint64_t total_bytes);
void ht_progress_add(struct ht_progress *p, uint64_t bytes);
/* Removes the bar, for a message or for good. */
void ht_progress_clear(struct ht_progress *p);
void ht_progress_end(struct ht_progress *p);
