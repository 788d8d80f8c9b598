/* SPDX-License-Identifier: Apache-2.0 */
/* shadow.h - the published attributes of an inode, kept while the current ones differ. */
#pragma once

#include "tiering/base/list.h"

struct ht_ns;
struct ht_ns_inode;
struct ht_ns_root;
struct ht_ns_shadow;

/* Memory for so many shadows, which then cannot fail. -ENOMEM. */
int ht_ns_shadow_reserve(struct ht_ns *ns, uint32_t count) HT_REQUIRES(HT_LOCK_NAMES) HT_MUST_CHECK;
/* The inode gets a shadow, if it has none, with the present values. One was reserved. */
void ht_ns_shadow_take(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_shadow_drop(struct ht_ns *ns, struct ht_ns_inode *i) HT_REQUIRES(HT_LOCK_NAMES);
/* Gives the inode this shadow, which is on no list of its root's yet, or (NULL) none. */
void ht_ns_shadow_set(struct ht_ns_inode *i, struct ht_ns_shadow *s) HT_REQUIRES(HT_LOCK_NAMES);
/* Moves it from its list to the free ones. */
void ht_ns_shadow_recycle(struct ht_ns *ns, struct ht_ns_shadow *s) HT_REQUIRES(HT_LOCK_NAMES);
/* Takes it from its list. */
void ht_ns_shadow_leave(struct ht_ns *ns, struct ht_ns_shadow *s) HT_REQUIRES(HT_LOCK_NAMES);

/* A walk over the shadows that are on a list when it begins. The lock may be released between two. */
struct ht_ns_shadow_walk {
    struct ht_ns_shadow_walk *next;
    struct ht_list *at, *last; /* at NULL: there is none */
};
void ht_ns_shadow_walk_begin(struct ht_ns *ns, struct ht_ns_shadow_walk *w, struct ht_list *list)
    HT_REQUIRES(HT_LOCK_NAMES);
struct ht_ns_shadow *ht_ns_shadow_walk_next(struct ht_ns_shadow_walk *w) HT_REQUIRES(HT_LOCK_NAMES);
void ht_ns_shadow_walk_end(struct ht_ns *ns, struct ht_ns_shadow_walk *w) HT_REQUIRES(HT_LOCK_NAMES);

/* Moves it to another scope's lists; the caller moves its object. */
void ht_ns_inode_set_root(struct ht_ns *ns, struct ht_ns_inode *i, struct ht_ns_root *root) HT_REQUIRES(HT_LOCK_NAMES);
