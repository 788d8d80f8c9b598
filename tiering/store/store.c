/* SPDX-License-Identifier: Apache-2.0 */
/* store.c - the life of a store: attach, mount, the background threads, unmount, close. */
#include <assert.h>
#include <stdlib.h>

#include "tiering/base/log.h"
#include "tiering/base/twin.h"
#include "tiering/space/members.h"
#include "tiering/store/store_priv.h"

enum { DRAM_BYTES_MIN = 8 << 20, STAGING_BYTES_DEFAULT = 64 << 20, STAGING_BYTES_MIN = 16 << 20, FIRST_ID = 2 };

/* ---------------------------------------------------------------- attach */

static int reserve_fixed_areas(struct ht_store *s)
{
    int rc = 0;
    for (unsigned i = 0; !rc && i < s->dev_count; i++)
        for (unsigned k = 0; !rc && k < HT_SUPER_COPIES; k++) {
            struct ht_extent e = {ht_super_offset(s->sb.device_bytes[i], k) / HT_BLOCK_BYTES, 1, i};
            rc = ht_alloc_mark(s->alloc, &e);
        }
    for (unsigned k = 0; !rc && k < HT_LOG_COPIES; k++) {
        struct ht_extent e = {s->sb.log_offset[k] / HT_BLOCK_BYTES, (uint32_t)(s->sb.log_bytes / HT_BLOCK_BYTES),
                              s->sb.log_device[k]};
        rc = ht_alloc_mark(s->alloc, &e);
    }
    return rc;
}

static int make_allocator(struct ht_store *s)
{
    uint64_t blocks[HT_DEVICES_MAX];
    for (unsigned i = 0; i < s->dev_count; i++)
        blocks[i] = s->sb.device_bytes[i] / HT_BLOCK_BYTES;
    int rc = ht_alloc_new(s->dev_count, blocks, &s->alloc);
    for (unsigned i = 0; !rc && i < s->dev_count; i++)
        if (!s->dev[i]) {
            ht_alloc_set_offline(s->alloc, i);
            s->health[i] = HT_HEALTH_MISSING;
        }
    return rc ? rc : reserve_fixed_areas(s);
}

static int make_memory(struct ht_store *s)
{
    struct ht_store_opts *o = &s->opts;
    if (!o->dram_bytes)
        o->dram_bytes = ht_max_u64(ht_mem_available() / 4, DRAM_BYTES_MIN);
    if (!o->staging_bytes)
        o->staging_bytes = STAGING_BYTES_DEFAULT;
    if (o->dram_bytes < DRAM_BYTES_MIN || o->staging_bytes < STAGING_BYTES_MIN) {
        ht_error("at least 8 MiB of dram and 16 MiB of staging are needed");
        return -EINVAL;
    }
    if (o->handout_bytes > o->dram_bytes * HT_HANDED_PERCENT_MAX / 100 ||
        o->dram_bytes - o->handout_bytes < DRAM_BYTES_MIN) {
        char share[32], dram[32];
        ht_error("handout=%s is too much of dram=%s: at most %u %% of it can be handed out, and 8 MiB must be left",
                 ht_format_size(o->handout_bytes, share, sizeof(share)),
                 ht_format_size(o->dram_bytes, dram, sizeof(dram)), HT_HANDED_PERCENT_MAX);
        return -EINVAL;
    }
    int rc = ht_store_find_nodes(s);
    if (!rc)
        rc = ht_arena_new(o->dram_bytes - o->handout_bytes, &s->nodes, ht_store_evict_image, s, &s->arena);
    if (!rc)
        rc = ht_handed_init(s);
    return rc ? rc : ht_staging_new(o->staging_bytes, &s->nodes, &s->staging);
}

static struct ht_pinned_area area_of(const struct ht_pinned *p)
{
    return (struct ht_pinned_area){p->base, p->bytes, ht_pinned_huge_bytes(p) > 0};
}

static int make_rings(struct ht_store *s)
{
    struct ht_rings_of of = {.area[0] = area_of(ht_staging_memory(s->staging)), .area_count = 1};
    memcpy(of.dev, s->dev, sizeof(of.dev));
    return ht_rings_new(&of, &s->rings);
}

/* Not before: registering pins every page, and whoever mounts would wait for them. */
static void register_arena(void *ctx)
{
    struct ht_store *s = ctx;
    const struct ht_pinned_area area = area_of(ht_arena_memory(s->arena));
    ht_rings_share(s->rings, &area);
}

static void init_locks(struct ht_store *s)
{
    ht_mutex_init(&s->lock, HT_LOCK_STORE);
    ht_mutex_init(&s->tx_lock, HT_LOCK_TX);
    ht_mutex_init(&s->super_lock, HT_LOCK_SUPER);
    ht_scrub_init(&s->scrub);
    for (unsigned i = 0; i < COND_COUNT; i++)
        pthread_cond_init(&s->chunk_cond[i], NULL);
    pthread_cond_init(&s->settled, NULL);
    ht_cond_init(&s->wake);
    ht_cond_init(&s->slot_cond);
    ht_cond_init(&s->watch);
}

int ht_store_new(struct ht_dev *devs[], unsigned dev_count, const struct ht_store_opts *opts,
                 struct ht_store **out_store)
{
    if (!dev_count || dev_count > HT_DEVICES_MAX)
        return -EINVAL;
    struct ht_store *s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    s->opts = *opts;
    s->opts.read_only |= opts->force_damaged_log && !opts->repair;
    s->tx.s = s;
    ht_pool_init(&s->objs, sizeof(struct ht_obj));
    ht_list_init(&s->tx.deleted);
    s->next_id = FIRST_ID;
    init_locks(s);
    ht_list_init(&s->handed);
    ht_ahead_init(&s->ahead);
    s->scope0 = ht_scope_find(s, 0, true);
    int rc = s->scope0 ? ht_store_gather(s, devs, dev_count) : -ENOMEM;
    if (!rc)
        rc = make_allocator(s);
    if (!rc)
        rc = make_memory(s);
    if (!rc)
        rc = make_rings(s);
    if (rc) {
        ht_store_close(s);
        return rc;
    }
    ht_store_put_in_order(s, devs, dev_count);
    ht_arena_when_populated(s->arena, register_arena, s);
    *out_store = s;
    return 0;
}

int ht_store_register(struct ht_store *s, const struct ht_meta_client *client)
{
    if (s->clients == CLIENTS_MAX || s->mounted)
        return -EBUSY;
    s->client[s->clients++] = *client;
    return 0;
}

/* ----------------------------------------------------------------- mount */

#define TABLES_BYTES_MIN (64 * HT_MIB) /* of what tables of chunks may have: see store_priv.h */

static int replay_record(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    return ht_store_replay(ctx, type, payload, len);
}

static void log_durable(void *ctx, uint64_t lsn)
{
    struct ht_store *s = ctx;
    ht_store_lock(s);
    ht_limbo_durable(s, lsn);
    ht_store_unlock(s);
}

static struct ht_journal_config journal_config(struct ht_store *s)
{
    struct ht_journal_config c = {
        .log_bytes = s->sb.log_bytes,
        .salt = s->sb.salt,
        .start = {.pos = s->sb.start_pos, .seq = s->sb.start_seq, .chain = s->sb.start_chain},
        .epoch = s->sb.epoch,
        .durable_seq = s->sb.durable_seq,
        .clean = s->sb.flags & HT_SUPER_CLEAN,
        .rings = s->rings,
        .ctx = s,
        .replay = replay_record,
        .leave_out = s->opts.leave_out,
        .give_up = s->opts.repair,
        .before_write = ht_flush_before_frame,
        .copy_lost = ht_store_copy_lost,
        .copy_back = ht_store_copy_back,
        .durable = log_durable,
    };
    ht_host_ids(c.host_id, c.boot_id);
    for (unsigned k = 0; k < HT_LOG_COPIES; k++) {
        c.dev[k] = s->dev[s->sb.log_device[k]];
        c.offset[k] = s->sb.log_offset[k];
        if (s->log_aside[k]) {
            c.dev[k] = s->log_aside[k];
            c.offset[k] = 0;
        }
        c.behind[k] = !ht_members_takes_part(&s->sb, s->sb.log_device[k]);
    }
    return c;
}

static int open_journal(struct ht_store *s)
{
    struct ht_journal_config c = journal_config(s);
    s->tables_bytes_max = ht_max_u64(s->sb.log_bytes / 2, TABLES_BYTES_MIN);
    s->replaying = true;
    return ht_journal_open(&c, s->opts.force_damaged_log, &s->report, &s->journal);
}

int ht_store_mend_log(struct ht_store *s, unsigned *out_frames)
{
    struct ht_journal_config c = journal_config(s);
    return ht_journal_mend(&c, out_frames);
}

int ht_store_mend_log_aside(struct ht_store *s, unsigned *out_frames)
{
    struct ht_journal_config c = journal_config(s);
    return s->opts.read_only ? ht_journal_mend_aside(&c, out_frames, s->log_aside) : -EINVAL;
}

static void stop_scrub(struct ht_store *s)
{
    int none = ht_store_scrub_stop(s);
    (void)none;
}

static void stop_threads(struct ht_store *s)
{
    stop_scrub(s);
    ht_ahead_stop(s);
    if (!s->threads && !s->reliefs)
        return;
    ht_store_lock(s);
    s->stopping = true;
    pthread_cond_broadcast(&s->wake);
    pthread_cond_broadcast(&s->watch);
    ht_store_unlock(s);
    ht_journal_stop_compaction(s->journal);
    while (s->threads)
        pthread_join(s->thread[--s->threads], NULL);
    while (s->reliefs)
        pthread_join(s->relief[--s->reliefs].thread, NULL);
}

/* Before the writeback thread begins, which does their work when there are none. */
static int start_reliefs(struct ht_store *s)
{
    int rc = 0;
    for (unsigned i = 0; s->nodes.count > 1 && !rc && i < s->nodes.count; i++) {
        s->relief[i] = (struct ht_relief){s, (int)i, 0};
        rc = pthread_create(&s->relief[i].thread, NULL, ht_relief_main, &s->relief[i]);
        s->reliefs += rc == 0;
    }
    return rc;
}

static int start_threads(struct ht_store *s)
{
    if (s->opts.no_threads)
        return 0;
    static void *(*const mains[])(void *) = {ht_writeback_main, ht_compaction_main, ht_health_main};
    int rc = start_reliefs(s);
    for (; !rc && s->threads < HT_ARRAY_SIZE(mains); s->threads += rc == 0)
        rc = pthread_create(&s->thread[s->threads], NULL, mains[s->threads], s);
    if (rc)
        stop_threads(s);
    return -rc;
}

/* Durable before the first is given out. A log without room for it is no reason not to mount. */
static int reserve_ids(struct ht_store *s)
{
    struct ht_tx *tx;
    uint64_t lsn;
    int rc = ht_tx_begin(s, 64, &tx);
    if (rc == -ENOSPC)
        return 0;
    if (rc)
        return rc;
    ht_tx_reserve_ids(tx);
    rc = ht_tx_commit(tx, &lsn);
    return rc ? rc : ht_store_sync(s, lsn);
}

int ht_store_mount(struct ht_store *s)
{
    int rc = open_journal(s);
    if (!rc)
        rc = ht_store_replayed(s);
    s->replaying = false;
    if (rc || s->opts.read_only)
        return rc;
    rc = ht_store_begin_epoch(s);
    if (s->opts.repair) /* nobody compacts beside it, and the last thing that it does can split */
        ht_journal_stop_compaction(s->journal);
    if (!rc)
        rc = start_threads(s);
    if (!rc)
        rc = reserve_ids(s); /* may have to wait for a compaction */
    if (rc)
        stop_threads(s);
    s->mounted = rc == 0;
    if (!rc)
        ht_store_tell_missing(s);
    return rc;
}

/* --------------------------------------------------------------- unmount */

int ht_store_unmount(struct ht_store *s)
{
    stop_scrub(s);
    if (!s->mounted)
        return 0;
    /* While compaction still runs: the commit may need the room it makes. */
    int rc = ht_store_commit(s);
    if (rc) /* a write that failed may succeed elsewhere */
        rc = ht_store_commit(s);
    stop_threads(s);
    if (!rc) {
        uint64_t lsn = s->last_lsn;
        rc = lsn ? ht_journal_sync(s->journal, lsn) : 0;
    }
    if (!rc) {
        ht_mutex_lock(&s->super_lock);
        s->sb.flags = HT_SUPER_CLEAN;
        s->sb.durable_seq = ht_journal_durable(s->journal);
        rc = ht_store_write_super(s);
        ht_mutex_unlock(&s->super_lock);
    }
    s->mounted = false;
    return rc;
}

/* Only the memory. */
static void forget_content(struct ht_obj *o)
{
    struct ht_chunk *c;
    uint64_t index = 0;
    ht_chunk_for_each_from(c, o, index)
    {
        if ((c->flags & CH_CUR) && !(c->flags & CH_SHARE))
            ht_ref_forget(&c->cur);
        if (c->flags & CH_PUB)
            ht_ref_forget(&c->pub);
    }
}

static void free_objects(struct ht_store *s)
{
    for (size_t b = 0; b < s->table_size; b++)
        while (s->table[b]) {
            struct ht_obj *o = s->table[b];
            s->table[b] = o->next;
            forget_content(o);
            ht_handed_free(o);
            ht_obj_free_memory(o);
        }
    free(s->table);
    ht_pool_destroy(&s->objs);
    ht_id_table_free(&s->scopes_by_id);
    while (s->scopes) {
        struct ht_scope *next = s->scopes->next;
        free(s->scopes);
        s->scopes = next;
    }
}

static void free_limbo(struct ht_limbo_queue *q)
{
    for (size_t i = 0; i < q->count; i++)
        ht_ref_forget(&q->items[(q->head + i) % q->cap].ref);
    free(q->items);
}

static void destroy_locks(struct ht_store *s)
{
    for (unsigned i = 0; i < COND_COUNT; i++)
        pthread_cond_destroy(&s->chunk_cond[i]);
    pthread_cond_destroy(&s->slot_cond);
    pthread_cond_destroy(&s->settled);
    pthread_cond_destroy(&s->wake);
    ht_scrub_destroy(&s->scrub);
    ht_ahead_destroy(&s->ahead);
    pthread_cond_destroy(&s->watch);
    ht_mutex_destroy(&s->super_lock);
    ht_mutex_destroy(&s->tx_lock);
    ht_mutex_destroy(&s->lock);
}

void ht_store_close(struct ht_store *s)
{
    if (!s)
        return;
    stop_threads(s);
    if (s->arena)
        ht_arena_settle(s->arena);
    ht_rings_free(s->rings);
    if (s->journal)
        ht_journal_abandon(s->journal);
    for (unsigned k = 0; k < HT_LOG_COPIES; k++)
        ht_dev_close(s->log_aside[k]);
    free_objects(s);
    ht_shares_free(s);
    free_limbo(&s->limbo);
    free_limbo(&s->tx.frees);
    ht_buf_free(&s->tx.records);
    ht_lease_works_free(s);
    ht_staging_free(s->staging);
    ht_arena_free(s->arena);
    ht_alloc_free(s->alloc);
    free(s->conflicts);
    destroy_locks(s);
    free(s);
}

/* ------------------------------------------------------------- inspection */

const struct ht_super *ht_store_super(const struct ht_store *s)
{
    return &s->sb;
}

const struct ht_journal_report *ht_store_log_report(const struct ht_store *s)
{
    return &s->report;
}

bool ht_store_leaves_out(const struct ht_store *s)
{
    return s->opts.leave_out;
}

bool ht_store_read_only(const struct ht_store *s)
{
    return s->opts.read_only || s->failed;
}

bool ht_store_failed(const struct ht_store *s)
{
    return s->failed;
}
