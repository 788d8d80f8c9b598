/* SPDX-License-Identifier: Apache-2.0 */
/*
 * digest.h - the engine `digest` of the lane `background`: digests of kept steps. The store does not know names, so an
 * upper folder does the work, step by step (fs/ctl/digest.c); the engine gives it a thread, pace, pause and figures.
 */
#ifndef HITRAIN_TIERING_API_DIGEST_H
#define HITRAIN_TIERING_API_DIGEST_H

#include "tiering/base/base.h"
#include "tiering/api/background.h"

enum ht_digest_figure { HT_DIGEST_DONE, HT_DIGEST_FAILED, HT_DIGEST_LEFT_BYTES, HT_DIGEST_FIGURES };

struct ht_digest_client {
    void *ctx;
    /*
     * As the step of an engine: at most b->most_bytes, and not much longer than until b->until_ns. One at a time, with
     * no lock held. Reads go past the DRAM tier (ht_obj_read).
     */
    enum ht_step (*step)(void *ctx, struct ht_budget *b);
    void (*values)(void *ctx, uint64_t out[HT_DIGEST_FIGURES]); /* any thread */
};
/* After the mount, once. The client lives until ht_store_end_digest. */
void ht_store_begin_digest(struct ht_store *s, const struct ht_digest_client *client);
/* The client is not called any more when this returns. Without a client: nothing. No lock held. WAITS for a step. */
void ht_store_end_digest(struct ht_store *s);
/* There may be work, at once or soon. Any thread; locks above that of engines may be held. */
void ht_store_wake_digest(struct ht_store *s);

#endif
