/* SPDX-License-Identifier: Apache-2.0 */
/* hostile.h - logs whose records would make many times their own size in memory. */
#pragma once

#include "tests/support/damage.h"

/* Far chunks of many objects, chunks apart in one, objects of many scopes, model roots, places that are taken. */
enum { HOSTILE_KINDS = 5 };
/* Appends records of one kind, of so many bytes, to the log. */
void hostile_append(struct harness *k, unsigned kind, size_t bytes);
/* For fsck: a store with a log of 2 MiB that needs more memory than it may. */
void hostile_harm(struct harness *k, const struct damage_ids *ids);
