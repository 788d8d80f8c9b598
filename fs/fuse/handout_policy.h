/* SPDX-License-Identifier: Apache-2.0 */
/* handout_policy.h - which opens of a file make the kernel get its pages (handout.c): a decision, and nothing else. */
#ifndef HITRAIN_FS_FUSE_HANDOUT_POLICY_H
#define HITRAIN_FS_FUSE_HANDOUT_POLICY_H

#include <stdbool.h>
#include <stdint.h>

struct ht_handout_case {
    bool parameter; /* of a model root */
    bool pinned;    /* pin=dram */
    bool direct;    /* opened with O_DIRECT */
    uint64_t bytes; /* of the file */
    unsigned opens; /* others that are open, and not handed out */
};

/* Is this file, of which nothing is handed out, to be handed out with this open? */
bool ht_handout_wanted(const struct ht_handout_case *c);
/* May an opener with these flags change pages without a word? Only a mapping that is shared and writable does, which asks for both. */
bool ht_handout_may_store(int flags);

#endif
