/* SPDX-License-Identifier: Apache-2.0 */
/* acl.h - POSIX access control lists as bytes: pure functions. All except ht_ns_acl_valid take a valid list. */
#pragma once

#include "fs/ns/ns.h"

bool ht_ns_acl_valid(const void *value, size_t len);
/* Permission bits of an access list: the new mode when the list is set. */
uint32_t ht_ns_acl_mode(const void *value, size_t len, uint32_t mode);
/* True when it has no more information than mode. */
bool ht_ns_acl_is_plain(const void *value, size_t len);
/* The list after chmod. */
void ht_ns_acl_chmod(void *value, size_t len, uint32_t mode);
/* The list of a new file from its directory's default; returns the rest of the requested mode. */
uint32_t ht_ns_acl_inherit(void *value, size_t len, uint32_t mode);
/* Is that the caller's group, or one of the supplementary ones? */
bool ht_ns_is_member(uint32_t id, struct ht_cred cred, const uint32_t *gids, size_t gid_count);
/* mask: R_OK W_OK X_OK. 0 or -EACCES. */
int ht_ns_acl_permits(const void *value, size_t len, uint32_t uid, uint32_t gid, int mask, struct ht_cred cred,
                      const uint32_t *gids, size_t gid_count) HT_MUST_CHECK;
