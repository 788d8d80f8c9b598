/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dump.h - text about a process that may hang: what `hitrainctl dump` prints.
 *
 * Each folder appends what it knows. No function here or there waits for long: a lock that a thread does not release in
 * time is named together with that thread.
 */
#pragma once

#include "tiering/base/buf.h"
#include "tiering/base/lock.h"

enum { HT_DUMP_IDS_MAX = 256 };

struct ht_dump {
    struct ht_buf text;
    uint64_t id[HT_DUMP_IDS_MAX]; /* inodes that the text names: their paths follow at its end */
    unsigned ids;
};

#define HT_DUMP_PATIENCE_NS 500000000u /* for one lock */

#define ht_dump_put(d, ...) ht_buf_printf(&(d)->text, __VA_ARGS__)
/* A name that any user could have chosen, of any length. '?' replaces control characters, so that it forges no line. */
void ht_dump_name(struct ht_dump *d, const char *name);
/* "31.2 s": from then until now. */
void ht_dump_age(struct ht_dump *d, uint64_t since_ns);
/* "thread 17 (ht-fuse)"; 0: "an unknown thread". */
void ht_dump_thread(struct ht_dump *d, int thread);
void ht_dump_id(struct ht_dump *d, uint64_t id);
/* Takes the lock. False: another thread keeps it, which a line says; what names the lock. */
bool ht_dump_lock(struct ht_dump *d, struct ht_mutex *m, const char *what)
    HT_ATTRIBUTE(try_acquire_capability(true, *m));
bool ht_dump_rdlock(struct ht_dump *d, struct ht_rwlock *l, const char *what)
    HT_ATTRIBUTE(try_acquire_shared_capability(true, *l));
/* All threads of the process, with their state in activity.h. */
void ht_dump_threads(struct ht_dump *d);
