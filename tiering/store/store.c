/* SPDX-License-Identifier: Apache-2.0 */
/* store.c - the life of a store: attach, mount, the background threads, unmount, close. */

#include "tiering/base/trace.h"
#include "tiering/base/log.h"
#include "tiering/base/verify.h"
#include "tiering/io/rings.h"
#include "tiering/space/super.h"
#include "tiering/cache/staging.h"
#include "tiering/api/tx.h"
#include "tiering/object/context.h"
#include "tiering/data/cold.h"
#include "tiering/data/data.h"
#include "tiering/data/flush.h"
#include "tiering/shm/shm.h"
#include "tiering/txn/txn.h"
#include "tiering/engine/engine.h"
#include "tiering/store/store_priv.h"

enum { META_OF_LOG = 4 }; /* txn/replay.c */
enum { DRAM_BYTES_MIN = 8 << 20, STAGING_BYTES_DEFAULT = 64 << 20, STAGING_BYTES_MIN = 16 << 20 };

/* ---------------------------------------------------------------- attach */

static int reserve_fixed_areas(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = 0;

    for (unsigned i = 0; !rc && i < s->dev_count; i++)
        for (unsigned k = 0; !rc && k < HT_SUPER_COPIES; k++) {
            struct ht_extent e = {ht_super_offset(s->layout.device_bytes[i], k) / HT_BLOCK_BYTES, 1, i};
            rc = ht_alloc_mark(s->alloc, &e);
            if (!rc)
                ht_alloc_fix(s->alloc, &e);
        }
    for (unsigned k = 0; !rc && k < HT_LOG_COPIES; k++) {
        struct ht_extent e = {s->layout.log_offset[k] / HT_BLOCK_BYTES,
                              (uint32_t)(s->layout.log_bytes / HT_BLOCK_BYTES), s->layout.log_device[k]};
        rc = ht_alloc_mark(s->alloc, &e);
        if (!rc)
            ht_alloc_fix(s->alloc, &e);
    }
    return rc;
}

static int make_allocator(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t blocks[HT_DEVICES_MAX];

    for (unsigned i = 0; i < s->dev_count; i++)
        blocks[i] = s->layout.device_bytes[i] / HT_BLOCK_BYTES;
    int rc = ht_alloc_new(s->dev_count, blocks, &s->alloc);
    for (unsigned i = 0; !rc && i < s->dev_count; i++) {
        if (s->layout.device_class[i] == HT_DEVICE_CAPACITY)
            ht_alloc_set_capacity(s->alloc, i);
        if (!s->dev[i])
            ht_alloc_set_offline(s->alloc, i);
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
    if (o->shm_bytes > o->dram_bytes * HT_SHM_PERCENT_MAX / 100 || o->dram_bytes - o->shm_bytes < DRAM_BYTES_MIN) {
        char share[32], dram[32];
        ht_error(
            "passthrough=%s is too much of dram=%s: at most %u %% of it can be passed through, and 8 MiB must be left",
            ht_format_size(o->shm_bytes, share, sizeof(share)), ht_format_size(o->dram_bytes, dram, sizeof(dram)),
            HT_SHM_PERCENT_MAX);
        return -EINVAL;
    }
    int rc = ht_store_find_nodes(s);
    if (!rc)
        rc = ht_arena_new(o->dram_bytes - o->shm_bytes, &s->numa.nodes, ht_store_evict_image, s, &s->arena);
    if (!rc)
        ht_passing_init(&s->own->passing, ht_arena_bytes(s->arena),
                        ht_arena_bytes(s->arena) - ht_arena_protected_max(ht_arena_bytes(s->arena)));
    if (!rc)
        rc = ht_shm_init(s);
    return rc ? rc : ht_staging_new(o->staging_bytes, &s->numa.nodes, &s->staging);
}

static struct ht_pinned_area area_of(const struct ht_pinned *p)
{
    return (struct ht_pinned_area){p->base, p->bytes, ht_pinned_huge_bytes(p) > 0};
}

static int make_rings(struct ht_store *s)
{
    struct ht_rings_of of = {.area[0] = area_of(ht_staging_memory(s->staging)), .area_count = 1};

    memcpy(of.dev, s->dev, sizeof(of.dev));
    memcpy(s->gate.dev, s->dev, sizeof(s->gate.dev));
    return ht_rings_new(&of, &s->rings);
}

/*
 * Not before: registering pins every page, and the mount would wait for that. A device uses the pages that were
 * registered, so slots that are lent must not be.
 */
static void register_arena(void *ctx)
{
    struct ht_store *s = ctx;
    const struct ht_pinned_area area = area_of(ht_arena_memory(s->arena));

    ht_rings_share(s->rings, &area);
}

/* The state of the folders below. */
static int make_state(struct ht_store *s)
{
    int rc = ht_data_setup(s);

    if (!rc)
        rc = ht_shm_setup(s);
    if (!rc)
        rc = ht_txn_setup(s);
    return rc ? rc : ht_engine_setup(s);
}

int ht_store_new(struct ht_dev *devs[], unsigned dev_count, const struct ht_store_opts *opts,
                 struct ht_store **out_store)
{
    if (!dev_count || dev_count > HT_DEVICES_MAX)
        return -EINVAL;
    struct ht_store *s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    HT_UNSHARED(HT_LOCK_STORE);
    s->own = calloc(1, sizeof(*s->own));
    if (!s->own) {
        free(s);
        return -ENOMEM;
    }
    s->opts = *opts;
    s->opts.read_only |= opts->force_damaged_log && !opts->repair;
    ht_pool_init(&s->objects.pool, sizeof(struct ht_obj));
    ht_owners_init(s);
    ht_mutex_init(&s->lock, HT_LOCK_STORE);
    ht_mutex_init(&s->tx_lock, HT_LOCK_TX);
    ht_mutex_init(&s->super_lock, HT_LOCK_SUPER);
    ht_waits_init(&s->waits);
    ht_list_init(&s->objects.ending);
    s->objects.scope0 = ht_scope_find(s, 0, true);
    int rc = s->objects.scope0 ? make_state(s) : -ENOMEM;
    if (!rc)
        rc = ht_trace_new(HT_TRACE_ENTRIES, &s->own->trace);
    if (!rc)
        rc = ht_store_gather(s, devs, dev_count);
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
    if (!opts->shm_lent)
        ht_pinned_when_populated(ht_arena_memory(s->arena), register_arena, s);
    *out_store = s;
    return 0;
}

int ht_store_register(struct ht_store *s, const struct ht_participant *participant)
{
    return s->own->mounted ? -EBUSY : ht_txn_add_participant(s, participant);
}

/* ----------------------------------------------------------------- mount */

#define TABLES_BYTES_MIN (64 * HT_MIB) /* of memory for tables of chunks: see object/chunk.h */

static int replay_record(void *ctx, uint16_t type, const uint8_t *payload, uint32_t len)
{
    HT_UNSHARED(HT_LOCK_STORE);
    return ht_store_replay(ctx, type, payload, len);
}

static void log_durable(void *ctx, uint64_t lsn)
{
    struct ht_store *s = ctx;

    ht_store_lock(s);
    ht_deferred_frees_durable(s, lsn);
    ht_store_unlock(s);
}

/* Of a store that is being opened. */
static struct ht_journal_config journal_config(struct ht_store *s)
{
    HT_UNSHARED(HT_LOCK_SUPER);
    struct ht_journal_config c = {
        .log_bytes = s->layout.log_bytes,
        .salt = s->layout.salt,
        .start = {.pos = s->sb.start_pos, .seq = s->sb.start_seq, .chain = s->sb.start_chain},
        .epoch = s->sb.epoch,
        .durable_seq = s->sb.durable_seq,
        .clean = s->sb.flags & HT_SUPER_CLEAN,
        .rings = s->rings,
        .gate = &s->gate,
        .ctx = s,
        .replay = replay_record,
        .leave_out = s->opts.leave_out,
        .give_up = s->opts.repair,
        .before_write = ht_flush_before_frame,
        .copy_lost = ht_store_copy_lost,
        .copy_back = ht_store_copy_back,
        .durable = log_durable,
        .wake = ht_engine_wake_checkpoint,
    };

    ht_host_ids(c.host_id, c.boot_id);
    for (unsigned k = 0; k < HT_LOG_COPIES; k++) {
        c.dev[k] = s->dev[s->layout.log_device[k]];
        c.offset[k] = s->layout.log_offset[k];
        if (s->own->log_aside[k]) {
            c.dev[k] = s->own->log_aside[k];
            c.offset[k] = 0;
        }
        c.behind[k] = !ht_members_takes_part(&s->sb, s->layout.log_device[k]);
    }
    return c;
}

static int open_journal(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_journal_config c = journal_config(s);

    s->objects.tables_bytes_max = ht_max_u64(c.log_bytes / 2, TABLES_BYTES_MIN);
    s->objects.meta_bytes_max = s->objects.tables_bytes_max + META_OF_LOG * c.log_bytes;
    s->objects.replaying = true;
    return ht_journal_open(&c, s->opts.force_damaged_log, &s->own->report, &s->journal);
}

int ht_store_cross_repair_log(struct ht_store *s, unsigned *out_frames)
{
    struct ht_journal_config c = journal_config(s);

    return ht_journal_cross_repair(&c, out_frames);
}

int ht_store_cross_repair_log_aside(struct ht_store *s, unsigned *out_frames)
{
    struct ht_journal_config c = journal_config(s);

    return s->opts.read_only ? ht_journal_cross_repair_aside(&c, out_frames, s->own->log_aside) : -EINVAL;
}

/* Durable before the first number is given out. A mount does not fail if the log has no room for it. */
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

/* Before the store has threads. */
static int replay(struct ht_store *s)
{
    HT_UNSHARED(HT_LOCK_STORE);
    ht_alloc_set_marking(s->alloc, true);
    int rc = open_journal(s);
    if (!rc)
        rc = ht_store_replayed(s);
    ht_alloc_set_marking(s->alloc, false);
    s->objects.replaying = false;
    return rc;
}

/* Older programs may read a store with such a feature, and would destroy something when they write. */
static int check_features(const struct ht_store *s)
{
    HT_UNSHARED(HT_LOCK_SUPER); /* the store is being opened */
    uint64_t unknown = s->sb.feat_ro & ~HT_FEAT_RO_KNOWN;

    if (!unknown || s->opts.read_only)
        return 0;
    char lacks[256];
    ht_super_unknown_text(s->dev[s->sb.device_index], lacks, sizeof(lacks));
    ht_error(
        "this version of hitrain lacks features of the store: %s; mount it read-only, or use a version that has them",
        lacks);
    return -EPROTONOSUPPORT;
}

/* A chunk may be compressed. */
static int prepare_for_frames(struct ht_store *s)
{
    HT_UNSHARED(HT_LOCK_SUPER); /* the store is being opened */
    if (!(s->sb.feat_refuse & HT_FEAT_REFUSE_PLANES))
        return 0;
    int rc = ht_data_need_decoder(s);
    if (!rc)
        ht_write_frames_durable(s);
    return rc;
}

/* fsck reads no vault. */
static int connect_vault(struct ht_store *s)
{
    bool known = ht_store_locked(s, s->vault.known && !s->opts.leave_out);
    int rc = known ? ht_cold_connect(s) : 0;

    if (rc)
        ht_error("the vault %s cannot be used: %s", s->opts.vault_url ? s->opts.vault_url : "that the store remembers",
                 strerror(-rc));
    return rc;
}

int ht_store_mount(struct ht_store *s)
{
    int rc = check_features(s);

    if (!rc)
        rc = prepare_for_frames(s);
    if (!rc && !s->opts.read_only)
        rc = ht_store_claim(s);
    if (!rc)
        rc = replay(s);
    if (!rc)
        rc = connect_vault(s);
    if (rc)
        ht_store_unclaim(s);
    if (rc || s->opts.read_only)
        return rc;
    HT_VERIFY(ht_store_verify(s, true));
    rc = ht_store_begin_epoch(s, &s->own->report);
    if (s->opts.repair) /* no checkpoint runs beside it, and its last action can split */
        ht_journal_checkpoint_stop(s->journal);
    if (!rc)
        rc = ht_engine_start(s);
    if (!rc)
        rc = reserve_ids(s); /* may have to wait for a checkpoint */
    if (rc)
        ht_engine_stop(s);
    s->own->mounted = rc == 0;
    if (!rc)
        ht_store_report_missing(s);
    return rc;
}

/* --------------------------------------------------------------- unmount */

int ht_store_unmount(struct ht_store *s)
{
    (void)ht_store_scrub_stop(s);
    if (!s->own->mounted)
        return 0;
    /* While the checkpoint thread still runs: the commit may need the room that it makes. */
    int rc = ht_store_commit(s);
    if (rc) /* a write that failed may succeed elsewhere */
        rc = ht_store_commit(s);
    ht_engine_stop(s);
    ht_obj_free_ended(s);
    HT_VERIFY(ht_store_verify(s, true));
    if (!rc) {
        uint64_t lsn = s->frees.last_lsn;
        rc = lsn ? ht_journal_sync(s->journal, lsn) : 0;
    }
    if (!rc) {
        ht_mutex_lock(ht_super_mutex(s));
        s->sb.flags = HT_SUPER_CLEAN;
        s->sb.writer = 0;
        s->sb.durable_seq = ht_journal_durable(s->journal);
        rc = ht_store_write_super(s);
        ht_mutex_unlock(ht_super_mutex(s));
    }
    s->own->mounted = false;
    return rc;
}

/* Only the memory. */
static void forget_content(struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    /* bounded: the store ends, and has no other thread */
    ht_chunk_for_each(c, o, index) {
        if ((c->flags & HT_CH_CUR) && !(c->flags & HT_CH_SHARE))
            ht_ref_forget(&c->cur);
        if (c->flags & HT_CH_PUB)
            ht_ref_forget(&c->pub);
    }
}

static void free_objects(struct ht_store *s) HT_REQUIRES(HT_LOCK_STORE)
{
    /* bounded: the same */
    for (size_t b = 0; b < s->objects.table.buckets.count; b++)
        for (struct ht_obj *o = ht_obj_of_link(*ht_bucket_at(&s->objects.table.buckets, b)), *next; o; o = next) {
            next = ht_obj_of_link(o->by_oid.next);
            forget_content(o);
            ht_shm_free(o);
            ht_obj_free_memory(o);
        }
    ht_id_table_free(&s->objects.table);
    ht_pool_destroy(&s->objects.pool);
    ht_id_table_free(&s->objects.scopes_by_id);
    while (s->objects.scopes) {
        struct ht_scope *next = s->objects.scopes->next;
        free(s->objects.scopes);
        s->objects.scopes = next;
    }
}

void ht_store_stop(struct ht_store *s)
{
    ht_engine_stop(s);
}

void ht_store_close(struct ht_store *s)
{
    if (!s)
        return;
    ht_engine_stop(s);
    HT_UNSHARED(HT_LOCK_STORE);
    if (s->arena)
        ht_pinned_stop_populating(ht_arena_memory(s->arena));
    ht_rings_free(s->rings);
    if (s->journal)
        ht_journal_abandon(s->journal);
    for (unsigned k = 0; k < HT_LOG_COPIES; k++)
        ht_dev_close(s->own->log_aside[k]);
    free_objects(s);
    ht_owners_free(s);
    struct ht_trash trash = ht_trash_take(s);
    ht_trash_empty(&trash);
    ht_staging_free(s->staging);
    ht_arena_free(s->arena);
    ht_alloc_free(s->alloc);
    ht_engine_teardown(s);
    ht_txn_teardown(s);
    ht_shm_teardown(s);
    ht_data_teardown(s);
    ht_waits_destroy(&s->waits);
    ht_mutex_destroy(&s->super_lock);
    ht_mutex_destroy(&s->tx_lock);
    ht_mutex_destroy(&s->lock);
    ht_trace_free(s->own->trace);
    free(s->own);
    free(s);
}

/* ------------------------------------------------------------- inspection */

const struct ht_super_layout *ht_store_layout(const struct ht_store *s)
{
    return &s->layout;
}

const struct ht_super *ht_store_super(const struct ht_store *s)
{
    HT_UNSHARED(HT_LOCK_SUPER);
    return &s->sb;
}

struct ht_trace *ht_store_trace(const struct ht_store *s)
{
    return s->own->trace;
}

const struct ht_journal_report *ht_store_log_report(const struct ht_store *s)
{
    return &s->own->report;
}

bool ht_store_leaves_out(const struct ht_store *s)
{
    return s->opts.leave_out;
}

bool ht_store_read_only(const struct ht_store *s)
{
    return ht_is_read_only(s);
}

bool ht_store_failed(const struct ht_store *s)
{
    return s->failed;
}
