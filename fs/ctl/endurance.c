/* SPDX-License-Identifier: Apache-2.0 */
/*
 * endurance.c - the attribute endurance of the mount's root: how many bytes the devices may take per day. Names keep
 * it; the store watches it.
 */
#include "fs/ctl/ctl_priv.h"

/* 0: there is none, or it is senseless, which only another program can have stored. */
static uint64_t budget_of(struct ht_ctl *c)
{
    char text[64];
    ssize_t n = ht_ns_getxattr(c->ns, HT_NS_ROOT_INO, HT_XATTR_PREFIX "endurance", text, sizeof(text));
    uint64_t bytes;

    return n > 0 && ht_parse_bytes(text, (size_t)n, &bytes) == 0 ? bytes : 0;
}

/* The thread that changed it last finds no other value than its own, so the store has that in the end. */
void ht_endurance_apply(struct ht_ctl *c)
{
    uint64_t bytes;

    do {
        bytes = budget_of(c);
        ht_store_set_endurance(c->store, bytes);
    } while (budget_of(c) != bytes);
}
