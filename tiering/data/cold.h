/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cold.h - content that lies in the vault comes into memory.
 *
 *   begin: asked for, or a thread asks already --wait--> bytes, verified --install--> the chunk's image --put-->
 *
 * No thread holds a chunk, a transaction or a buffer of a pool while it waits for the vault. Places in a vault never
 * change, so bytes that come late are still those of their reference: who installs them looks whether the chunk names
 * it still. So a vault that does not answer holds the threads alone that want its content, for the timeout once: then
 * the vault is silent, and fetches fail at once (tiering/remote/remote.h).
 */
#pragma once

#include "tiering/object/ref.h"

struct ht_chunk;
struct ht_obj;
struct ht_remote_state;

/* Has its newest content bytes in the vault that its image lacks? */
bool ht_chunk_is_away(const struct ht_store *s, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE);

/* Bytes that are on their way, for all threads that want them. */
struct ht_cold_fetch;
struct ht_cold_want {
    struct ht_cold_fetch *fetch; /* NULL: nothing is away */
    bool leads;                  /* the others wait for this thread */
};
/*
 * Begins to fetch the content of a chunk, if it is away; never waits. ahead: no thread waits yet. anyway: also if it is
 * in memory. After 0 the caller waits and puts; a thread with several waits first for those that it leads. -EAGAIN:
 * half of the slots fetch ahead; -ENOMEM.
 */
int ht_cold_begin(struct ht_obj *o, uint64_t index, bool ahead, bool anyway, struct ht_cold_want *out)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/*
 * Waits. -EIO: the vault does not answer, or has other bytes; an event says which. -EREMOTE: the thread that led was
 * stopped, and the caller may begin again. Releases the lock.
 */
int ht_cold_wait(const struct ht_cold_want *w) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The same, for a wait that no counter shows. -EINTR: stop said so, as in ht_remote_end. */
int ht_cold_wait_or_stop(const struct ht_cold_want *w, bool (*stop)(void *ctx), void *ctx)
    HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* After a wait without an error, until put. */
const struct ht_ref *ht_cold_ref(const struct ht_cold_want *w);
uint8_t *ht_cold_bytes(const struct ht_cold_want *w);
/* The chunk gets the bytes as its image, if it still wants them. Releases the lock in between. */
int ht_cold_install(const struct ht_cold_want *w) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_cold_put(struct ht_cold_want *w) HT_REQUIRES(HT_LOCK_STORE);

/*
 * All of that for a chunk that no thread of the caller holds. After 0 the chunk is still there, and the caller looks at
 * it again: the image may have gone. After an error the chunk may be gone. Releases the lock in between.
 */
int ht_cold_bring(struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;
/* For a caller that found first or last chunk of this range away (-EREMOTE) while it could not wait. No lock held. */
int ht_cold_bring_ends(struct ht_obj *o, uint64_t off, uint64_t len) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* Begins to fetch it, and leaves the rest to ht_cold_finish_ahead. False: enough is on the way. */
bool ht_cold_ahead(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* Does a thread fetch what the chunk lacks? */
bool ht_cold_is_coming(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE);
/* Installs chunks that were fetched ahead, until all are. */
void ht_cold_finish_ahead(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);

/* Reads go to the store's vault from now on, by the URL of the options or of the log. WAITS for those under way. */
int ht_cold_connect(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
void ht_cold_disconnect(struct ht_store *s) HT_EXCLUDES(HT_LOCK_STORE);
/* -ENOTCONN: there is no vault. */
int ht_cold_state(struct ht_store *s, struct ht_remote_state *out) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
