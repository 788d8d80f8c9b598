/* SPDX-License-Identifier: Apache-2.0 */
/*
 * content.h - how long the content of a file stays in memory, and whether it is compressed: its attributes say so, and
 * the store does it.
 */
#pragma once

#include "fs/ns/ns_priv.h"

#define HT_NS_COMPRESS_NAME HT_XATTR_PREFIX "compress"

/* Is it one of these attributes? The content has to know of a change. */
bool ht_ns_is_of_content(const char *attribute);
/* A directory is a model root now, or was one at the mount: the store hears which devices its content goes to. */
void ht_ns_root_paths(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
void ht_ns_content_changed(struct ht_ns *ns, const struct ht_ns_inode *i) HT_REQUIRES_SHARED(HT_LOCK_NAMES);
