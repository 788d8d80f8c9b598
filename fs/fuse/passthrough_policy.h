/* SPDX-License-Identifier: Apache-2.0 */
/*
 * passthrough_policy.h - which opens of a file make the kernel get its pages (passthrough.c):
 * a decision, and nothing else.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

struct ht_passthrough_case {
    bool parameter; /* of a model root */
    bool pinned;    /* pin=dram */
    bool direct;    /* opened with O_DIRECT */
    bool asked;     /* by its opener, or by the file's attribute */
    bool lent;      /* the memory is, so that only those that ask get it */
    bool frozen;    /* of a kept step */
    uint64_t bytes; /* of the file */
    unsigned opens; /* others that are open, and not passed through */
};

/* Does this file, which is ordinary so far, become a passthrough file with this open? */
bool ht_passthrough_wanted(const struct ht_passthrough_case *c);
/*
 * May an opener with these flags change pages without a call? Only a mapping that is shared and writable does, which
 * needs both.
 */
bool ht_passthrough_may_store(int flags);
/*
 * May a passthrough file get another size? A device or the kernel may have pinned pages of a mapping for its transfers.
 * Pages that are cut off leave the file, and the pin keeps them: what is transferred to them reaches nobody. stores: a
 * program has it open for reading and writing, or had and may still map it.
 */
bool ht_passthrough_may_resize(bool stores, uint64_t from_bytes, uint64_t to_bytes);
