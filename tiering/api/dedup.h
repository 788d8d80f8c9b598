/* SPDX-License-Identifier: Apache-2.0 */
/* dedup.h - stored bytes that are the same are stored once. */
#ifndef HITRAIN_TIERING_API_DEDUP_H
#define HITRAIN_TIERING_API_DEDUP_H

#include "tiering/base/base.h"

struct ht_store;

/*
 * Objects that the mount has found, and whose owner reserves their rewrites, have their reserves: the first pass begins
 * now. Without this call it begins two commit periods after the mount.
 */
void ht_store_reserves_complete(struct ht_store *s);

#endif
