/* SPDX-License-Identifier: Apache-2.0 */
/* flush.h - which flush covers a write, and which writes a failed flush voids. */
#pragma once

#include "tiering/api/tx.h"
#include "tiering/object/ref.h"

/* ---------------------------------- with the lock, unless said otherwise */

/* The write of ref has ended: flushes that begin from now on cover it. */
void ht_ref_stamp(const struct ht_store *s, struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* The devices (bits) that have to be flushed before ref is durable. */
uint32_t ht_ref_unflushed(const struct ht_store *s, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* The same for all current unpublished references of what these rounds name. Releases the lock in between. */
uint32_t ht_unflushed_locked(struct ht_store *s, const struct ht_rounds *of) HT_REQUIRES(HT_LOCK_STORE);
/*
 * Of unflushed devices (bits): those that took writes since their last flush, and those that are closed. A publication
 * waits for the former, and the content of the latter has to be given up before.
 */
uint32_t ht_flush_needed_locked(const struct ht_store *s, uint32_t devices) HT_REQUIRES(HT_LOCK_STORE);
/* Does the device take no more content? Also without the lock. */
bool ht_device_is_closed(const struct ht_store *s, unsigned device);
/* Was ref voided that way, or does it lie on a device that is not flushed any more? */
bool ht_ref_endangered(struct ht_store *s, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* A record names ref from now on. */
void ht_note_published(struct ht_store *s, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE);
/* Flushes these devices; returns those on which it failed. Earlier writes to the others are covered. */
uint32_t ht_flush_devices(struct ht_store *s, uint32_t devices) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;

/*
 * Flushes the devices of what the rounds name. 0: their current content is on the media; -EAGAIN: a part was given up:
 * write it, and call again; or the error.
 */
int ht_flush_written(struct ht_store *s, struct ht_rounds *r) HT_EXCLUDES(HT_LOCK_STORE) HT_MUST_CHECK;
/* The journal's before_write. */
int ht_flush_before_frame(void *ctx) HT_EXCLUDES(HT_LOCK_STORE);
/*
 * May the content that the round names be published now? -EAGAIN: some was given up, was written to a device since its
 * flush, or lies on a closed device and is not covered: another round mends that. -EIO after too many rounds.
 */
int ht_round_check(struct ht_store *s, struct ht_rounds *r) HT_REQUIRES(HT_LOCK_STORE) HT_MUST_CHECK;

/* -------------------------------------------------------- failed flushes */

/* How many passes over current references followed failed flushes. */
uint64_t ht_flush_error_passes(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE);
/*
 * May a failed flush have voided ref? flush_error_passes: the store's count when the place of ref was taken, or when
 * ref was read.
 */
bool ht_ref_is_void(const struct ht_store *s, const struct ht_ref *ref, uint64_t flush_error_passes)
    HT_REQUIRES(HT_LOCK_STORE);
