/* SPDX-License-Identifier: Apache-2.0 */
/* stats.c - figures, and the walk over references for fsck. */

#include "tiering/base/mutant.h"
#include "tiering/io/rings.h"
#include "tiering/cache/staging.h"
#include "tiering/api/check.h"
#include "tiering/api/stats.h"
#include "tiering/object/context.h"
#include "tiering/data/data.h"
#include "tiering/data/flush.h"
#include "tiering/shm/shm.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/engine.h"
#include "tiering/store/store_priv.h"

static uint64_t locked_bytes(const struct ht_store *s)
{
    const struct ht_pinned *arena = ht_arena_memory(s->arena), *staging = ht_staging_memory(s->staging);

    return (arena->locked ? arena->bytes : 0) + (staging->locked ? staging->bytes : 0);
}

void ht_store_node_stat(struct ht_store *s, unsigned place, struct ht_node_stat *out)
{
    const struct ht_pinned *arena = ht_arena_memory(s->arena), *staging = ht_staging_memory(s->staging);

    *out = (struct ht_node_stat){
        .dram_bytes = ht_pinned_part_bytes(arena, place),
        .staging_bytes = ht_pinned_part_bytes(staging, place),
        .away_bytes = ht_pinned_away_bytes(arena, place) + ht_pinned_away_bytes(staging, place),
    };
    ht_store_lock(s);
    out->dram_used_bytes = ht_arena_sums(s->arena)->used_on[place];
    ht_store_unlock(s);
}

static uint64_t working_bytes(const struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_arena_meta_bytes(s->arena) + ht_staging_meta_bytes(s->staging) + ht_alloc_meta_bytes(s->alloc) +
        ht_refs_hung_bytes() + s->frees.deferred * sizeof(struct ht_deferred_free) +
        ht_id_table_bytes(&s->objects.scopes_by_id) + ht_engine_memory_bytes(s);
}

void ht_store_stats(struct ht_store *s, struct ht_store_stats *out)
{
    ht_store_lock(s);
    *out = s->counts;
    ht_endurance_stats(s, out);
    out->locked_bytes = locked_bytes(s);
    out->total_bytes = ht_store_data_bytes(s);
    out->free_bytes = ht_alloc_free_blocks(s->alloc) * HT_BLOCK_BYTES;
    out->available_bytes = ht_alloc_available(s->alloc) * HT_BLOCK_BYTES;
    out->reserved_bytes = ht_alloc_reserved(s->alloc) * HT_BLOCK_BYTES;
    out->pending_free_bytes = out->available_bytes + out->reserved_bytes - out->free_bytes;
    out->objects = s->objects.table.count;
    out->chunks = s->objects.chunks;
    out->lost_chunks = s->objects.lost_chunks;
    out->dram_bytes = ht_arena_bytes(s->arena);
    out->dram_passing_bytes = out->dram_bytes - ht_arena_protected_max(out->dram_bytes);
    out->dram_used_bytes = ht_arena_sums(s->arena)->used_bytes;
    out->dram_dirty_bytes = s->flow.dirty_bytes;
    out->dram_protected_bytes = ht_arena_sums(s->arena)->protected_bytes;
    out->dram_protectable_bytes = ht_arena_protected_max_now(s->arena);
    out->dram_pinned_bytes = ht_arena_sums(s->arena)->pinned_bytes;
    out->dram_workingset_bytes = ht_arena_sums(s->arena)->workingset_bytes;
    out->readahead_chunks = ht_arena_sums(s->arena)->readahead_chunks;
    out->readahead_hits = ht_arena_sums(s->arena)->readahead_hits;
    out->readahead_wasted = ht_arena_sums(s->arena)->readahead_wasted;
    out->cold_bytes = s->objects.cold_blocks * HT_BLOCK_BYTES;
    out->meta_bytes = s->objects.meta_bytes;
    out->working_bytes = working_bytes(s);
    ht_shm_stats(s, out);
    ht_txn_stats(s, out);
    ht_store_unlock(s);
    const struct ht_dev_counters devices = ht_devs_totals(s->dev, s->dev_count);
    out->device_read_bytes = devices.read_bytes;
    out->device_written_bytes = devices.written_bytes;
    out->device_discarded_bytes = devices.discarded_bytes;
    out->device_flushes = devices.flushes;
    out->staging_bytes = ht_staging_bytes(s->staging);
    out->staging_used_bytes = ht_staging_used_bytes(s->staging);
    out->huge_bytes =
        ht_pinned_huge_bytes(ht_arena_memory(s->arena)) + ht_pinned_huge_bytes(ht_staging_memory(s->staging));
    ht_rings_stats(s->rings, &out->io);
    if (s->journal)
        ht_journal_stats(s->journal, &out->log);
    out->working_bytes += out->log.memory_bytes + ht_data_bytes(s);
    out->heap_spare_bytes = ht_heap_spare_bytes();
}

uint64_t ht_store_free(struct ht_store *s)
{
    ht_obj_wait_ended(s);
    return ht_store_locked(s,
                           ht_alloc_available(s->alloc) + (HT_MUTANT("free-late") ? 0 : s->objects.superseded_blocks)) *
        HT_BLOCK_BYTES;
}

bool ht_store_has_space(struct ht_store *s, uint64_t bytes)
{
    uint64_t available = ht_store_available(s);

    return bytes <= available || ht_lack_space(bytes - available) == 0;
}

uint64_t ht_store_available(struct ht_store *s)
{
    return ht_store_locked(s, ht_alloc_available(s->alloc)) * HT_BLOCK_BYTES;
}

/* ------------------------------------------------------------------ walk */

static int walk_object(struct ht_obj *o, int (*fn)(void *, const struct ht_chunk_info *), void *ctx)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_extent e[HT_FRAGS_MAX];

    /* bounded: fsck alone, which has no other thread */
    ht_chunk_for_each(c, o, i) {
        if (!(c->flags & HT_CH_PUB))
            continue;
        struct ht_chunk_info info = {
            .oid = o->oid,
            .index = i,
            .chunk_bytes = ht_obj_bytes_per_chunk(o),
            .stored_bytes = c->pub.stored,
            .visible_bytes = c->pub.visible,
            .generation = c->generation,
            .codec = c->pub.codec,
            .checksum = c->pub.checksum,
            .extent_count = ht_ref_holds(&c->pub) ? ht_ref_extents(&c->pub) : 0,
            .extents = e,
        };
        for (unsigned k = 0; k < info.extent_count; k++)
            e[k] = ht_ref_extent(&c->pub, k);
        int rc = fn(ctx, &info);
        if (rc)
            return rc;
    }
    return 0;
}

/* For fsck, whose store has no other thread. */
int ht_store_walk(struct ht_store *s, int (*fn)(void *ctx, const struct ht_chunk_info *info), void *ctx)
{
    uint64_t *oids;
    size_t count;
    int rc = ht_store_oids(s, &oids, &count);

    if (rc)
        return rc;
    HT_UNSHARED(HT_LOCK_STORE);
    qsort(oids, count, sizeof(*oids), ht_compare_numbers);
    for (size_t i = 0; !rc && i < count; i++)
        rc = walk_object(ht_obj_find_locked(s, oids[i]), fn, ctx);
    free(oids);
    return rc;
}

/* ------------------------------------------------------------ space of a scope */

enum { SPACE_SLICE = 4096 }; /* chunks that a caller looks at with the lock */

/* The chunks of one slice; true: there may be more, from *index on. */
static bool add_space(struct ht_obj *o, uint64_t *index, uint64_t *stored_blocks, uint64_t *own_blocks)
    HT_REQUIRES(HT_LOCK_STORE)
{
    unsigned looked_at = 0;

    /* bounded: SPACE_SLICE chunks */
    ht_chunk_for_each_from(c, o, *index) {
        if (looked_at++ == SPACE_SLICE)
            return true;
        if (!(c->flags & HT_CH_PUB) || !ht_ref_holds(&c->pub) || ht_ref_is_cold(&c->pub)) /* the vault frees nothing */
            continue;
        const struct ht_refcount *e = ht_refcount_find(o->s, &c->pub);
        *stored_blocks += ht_ref_blocks(&c->pub);
        *own_blocks += e && e->owners > 1 ? 0 : ht_ref_blocks(&c->pub);
    }
    return false;
}

int ht_store_scope_space(struct ht_store *s, uint64_t scope, uint64_t *out_stored_bytes, uint64_t *out_own_bytes)
{
    uint64_t *oids, stored_blocks = 0, own_blocks = 0;
    size_t count;
    int rc = ht_store_oids(s, &oids, &count);

    if (rc)
        return rc;
    for (size_t i = 0; i < count; i++) {
        uint64_t index = 0;
        for (bool more = true; more;) {
            ht_store_lock(s);
            struct ht_obj *o = ht_obj_find_locked(s, oids[i]);
            more = o && !o->dead && o->published && o->scope->id == scope &&
                add_space(o, &index, &stored_blocks, &own_blocks);
            ht_store_unlock(s);
        }
    }
    free(oids);
    *out_stored_bytes = stored_blocks * HT_BLOCK_BYTES;
    *out_own_bytes = own_blocks * HT_BLOCK_BYTES;
    return 0;
}
