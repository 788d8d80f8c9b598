/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - a run over everything on the media, in the background: superblocks, log copies, chunks.
 *
 *   never --start--> running --everything was read--> complete
 *                       |------stop, or unmount------> stopped     each of these: start again
 *                       '------no memory, ...--------> failed
 *
 * This file says which places are read, and in which order; scrub_chunk.c what becomes of a bad chunk. The scheduler
 * sets the pace. A step reads superblocks, frames or chunks until its budget is used up, and holds no object and no
 * lock for the next one. Only a second look at superblocks holds super_lock over I/O. The thread has the usual share of
 * processor time: while it holds the store's lock it must get on.
 *
 * Bytes that are written during a run may be read or not: no run has verified them, but they were written just now.
 *
 * Sound bytes of several owners, as those of kept steps and clones, are read once in a run (pass.h). Bad ones are read
 * for each owner, because each may have another remedy. But images of other owners are looked for once.
 *
 * A run reads for others, too: meanwhile recompression and deduplication wait and read nothing. They get each content
 * that is sound. If deduplication waits, content comes beside its twins. After an hour both go on without the run.
 */

#include "tiering/base/event.h"
#include "tiering/space/super.h"
#include "tiering/object/context.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/data.h"
#include "tiering/engine/engine_priv.h"
#include "tiering/engine/pass.h"
#include "tiering/engine/scrub_chunk.h"

enum {
    LOG_PAUSE_MS = 100,
    REASON_BYTES = 128,
    FRAME_BYTES = 256 << 10, /* of most frames, at most */
};
enum phase { SUPERS, LOG, CHUNKS };

#define AWAITED_NS UINT64_C(3600000000000)

/* Where the run is: what comes next. */
struct ht_scrub_run {
    struct ht_store *s;
    struct ht_scrub *c;
    struct ht_ring *ring;
    bool repair;
    enum phase phase;
    unsigned device;
    struct ht_log_scrub log;
    struct ht_pass pass;
    bool twins; /* deduplication waits */
    uint8_t *buf;
    uint64_t *bytes; /* moved in this step */
    struct ht_permit permit;
};

/* Before a request that holds nothing; the run gives the permit back after it. */
static void get_permit(struct ht_scrub_run *r, struct ht_dev *dev, uint32_t bytes)
{
    const struct ht_permit_request request = {.dev = dev, .direction = HT_DIRECTION_READ, .bytes = bytes};

    ht_permit_get(&r->s->gate, &request, &r->permit);
}

/* ---------------------------------------------------------------- figures */

void ht_store_scrub_stats(struct ht_store *s, struct ht_scrub_stats *out)
{
    struct ht_scrub *c = &s->engine->scrub;

    ht_mutex_lock(ht_scrub_lock(c));
    *out = c->st;
    if (out->state == HT_SCRUB_RUNNING)
        out->run_ns = ht_now_ns() - c->began_ns;
    ht_mutex_unlock(ht_scrub_lock(c));
    out->run_total_bytes = ht_max_u64(out->run_total_bytes, out->run_bytes); /* the store may have grown */
}

static void count_bytes(struct ht_scrub_run *r, uint64_t bytes)
{
    *r->bytes += bytes;
    ht_mutex_lock(ht_scrub_lock(r->c));
    r->c->st.run_bytes += bytes;
    r->c->st.bytes += bytes;
    ht_mutex_unlock(ht_scrub_lock(r->c));
}

static void count_found(struct ht_scrub_run *r, bool repaired)
{
    ht_mutex_lock(ht_scrub_lock(r->c));
    r->c->st.run_found++;
    r->c->st.found++;
    r->c->st.run_repaired += repaired;
    r->c->st.repaired += repaired;
    ht_mutex_unlock(ht_scrub_lock(r->c));
}

static enum ht_event_code code_of(bool repaired)
{
    return repaired ? HT_EVENT_SCRUB_REPAIRED : HT_EVENT_SCRUB_DAMAGE;
}

/* Why bytes are bad: they differ from the written ones, or the device reports an error, which may be any. */
static const char *reason_of(bool mismatch, const char *what, int error, char buf[REASON_BYTES])
{
    if (mismatch)
        return what;
    snprintf(buf, REASON_BYTES, "the device reports: %s", strerror(-error));
    return buf;
}

/* ------------------------------------------------------------ superblocks */

static void report_super(struct ht_scrub_run *r, unsigned device, unsigned copy, const struct ht_super_scrub *f)
{
    int error = f->problem[copy] == HT_SUPER_UNREADABLE ? -EIO : -EUCLEAN;
    struct ht_event_about about = {0, ht_dev_name(r->s->dev[device]), f->offset[copy], error};

    count_found(r, f->repaired[copy]);
    ht_event(code_of(f->repaired[copy]), &about, "scrub: superblock copy %u on %s: %s; %s", copy, about.device,
             f->stale[copy] ? "older than the others" : ht_super_problem_text(f->problem[copy]),
             f->repaired[copy] ? "it was written anew" : "it could not be written anew");
}

/*
 * The first look holds no lock, so a device that falls silent then holds up the scrub alone. A superblock that is being
 * written looks bad: the second look decides. Returns how many copies are bad.
 */
static unsigned scrub_super(struct ht_scrub_run *r, unsigned device, struct ht_super_scrub *out)
{
    struct ht_store *s = r->s;

    struct ht_super sb = ht_locked(ht_super_mutex(s), s->sb);
    if (!ht_super_scrub(&sb, s->dev[device], device, false, out))
        return 0;
    /* Others wait for super_lock. */
    enum ht_io_class was = ht_io_class_set(HT_IO_URGENT);
    ht_mutex_lock(ht_super_mutex(s));
    unsigned bad = ht_super_scrub(&s->sb, s->dev[device], device, r->repair, out);
    ht_mutex_unlock(ht_super_mutex(s));
    (void)ht_io_class_set(was);
    return bad;
}

/* One device. Returns 1: there may be more to read. */
static int next_super(struct ht_scrub_run *r)
{
    struct ht_store *s = r->s;
    unsigned i = r->device++;
    struct ht_super_scrub f;

    if (i == s->dev_count) {
        r->phase = LOG;
        return 1;
    }
    if (!s->dev[i] || !ht_members_takes_part(&s->sb, i)) /* an excluded device reports the same each time */
        return 1;
    if (ht_probe_devices(s, 1u << i))
        return 1;
    get_permit(r, s->dev[i], HT_SUPER_COPIES * HT_BLOCK_BYTES);
    unsigned bad = scrub_super(r, i, &f);
    ht_permit_put(&r->permit);
    for (unsigned k = 0; bad && k < HT_SUPER_COPIES; k++)
        if (f.stale[k] || f.problem[k] != HT_SUPER_OK)
            report_super(r, i, k, &f);
    count_bytes(r, HT_SUPER_COPIES * HT_BLOCK_BYTES);
    return 1;
}

/* -------------------------------------------------------------------- log */

static void report_log(struct ht_scrub_run *r, unsigned copy, const struct ht_log_scrub_damage *d)
{
    struct ht_event_about about = {0, ht_dev_name(d->dev), d->offset, d->error};
    char reason[REASON_BYTES];

    count_found(r, d->repaired);
    ht_event(code_of(d->repaired), &about, "scrub: copy %u of the log is damaged at byte %llu of %s: %s; %s", copy,
             (unsigned long long)d->offset, about.device,
             reason_of(d->mismatch, "a frame does not verify", d->error, reason),
             d->repaired ? "it was written anew from the other copy" : "it could not be written anew");
}

static const struct ht_pass_user user;

/* One frame. As next_super; -EAGAIN: not now; -ENOMEM. */
static int next_frame(struct ht_scrub_run *r)
{
    struct ht_log_scrub_found f;

    get_permit(r, r->s->dev[r->s->layout.log_device[0]], FRAME_BYTES);
    int rc = ht_journal_scrub_step(r->s->journal, &r->log, &f);
    ht_permit_put(&r->permit);
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        if (f.copy[i].damaged)
            report_log(r, i, &f.copy[i]);
    if (rc == 1)
        count_bytes(r, f.bytes);
    if (rc == 1 || rc == -EAGAIN || rc == -ENOMEM)
        return rc;
    if (rc == -EUCLEAN) {
        /* A frame is in no copy any more: its content is in memory, so a checkpoint replaces it. */
        ht_event(HT_EVENT_LOG_DAMAGED, NULL, "scrub: a frame of the log is in none of its copies any more; %s",
                 r->repair ? "a checkpoint writes everything anew; run scrub again afterwards" : "run hitrain-fsck");
        if (r->repair)
            ht_journal_checkpoint_poke(r->s->journal);
    }
    r->phase = CHUNKS;
    r->twins = ht_dedup_waits(r->s);
    rc = ht_pass_begin(&r->pass, r->s, &user, r, 0, 0, &r->c->bytes);
    return rc ? rc : 1;
}

/* ----------------------------------------------------------------- chunks */

static void report_chunk(struct ht_scrub_run *r, const struct ht_suspect *x)
{
    struct ht_event_about about = {x->owner[0].oid, x->device, x->offset, x->error};
    bool repaired = x->repair_error == 0;
    char text[128], reason[REASON_BYTES];

    count_found(r, repaired);
    if (x->repair_error == -ENODATA)
        snprintf(text, sizeof(text),
                 "there is no second copy: reading it fails with EIO; restore the file or delete it");
    else if (!repaired)
        snprintf(text, sizeof(text), "it could not be written anew: %s", strerror(-x->repair_error));
    ht_event(code_of(repaired), &about, "scrub: chunk %llu of object %llu at byte %llu of %s is bad: %s; %s",
             (unsigned long long)x->index, (unsigned long long)about.id, (unsigned long long)about.offset, about.device,
             reason_of(x->mismatch, "its checksum is wrong", x->error, reason),
             repaired ? "it was written to another place from memory" : text);
}

/* Bad bytes: each owner, with its own remedy. */
static int scrub_owners(struct ht_scrub_run *r, struct ht_suspect *x)
{
    int rc = 0;

    for (unsigned i = 0; rc >= 0 && i < x->owners && !r->c->stop; i++) {
        rc = ht_suspect_check(x, i);
        if (rc == HT_SUSPECT_BAD)
            report_chunk(r, x);
    }
    return rc < 0 ? rc : 0;
}

/* Sound bytes. Those that are stored twice are compressed later, when it is known who keeps them. */
static void show(struct ht_scrub_run *r)
{
    const struct ht_move *m = &r->pass.found;

    if (m->was.codec != HT_CODEC_RAW)
        return;
    ht_dedup_saw(r->s, &r->pass, r->buf);
    if (!r->pass.content)
        ht_recompress_saw(r->s, m, r->buf, r->bytes);
}

static int scrub_content(void *ctx, struct ht_budget *b)
{
    struct ht_scrub_run *r = ctx;
    const struct ht_move *m = &r->pass.found;
    uint64_t bytes = (uint64_t)ht_ref_blocks(&m->was) * HT_BLOCK_BYTES;
    struct ht_suspect x = {
        .s = r->s,
        .ref = m->was,
        .obj = m->obj,
        .owner = m->owner,
        .owners = m->owners,
        .buf = r->buf,
        .ring = r->ring,
        .stop = &r->c->stop,
        .repair = r->repair,
    };
    int rc = ht_suspect_read(&x);

    if (rc < 0 || rc == HT_SUSPECT_ABSENT)
        return rc < 0 ? rc : 0;
    count_bytes(r, bytes);
    if (rc == HT_SUSPECT_BAD)
        return scrub_owners(r, &x);
    show(r);
    return 0;
}

static enum ht_pass_want wants(void *ctx, const struct ht_obj *o, const struct ht_chunk *c)
{
    const struct ht_scrub_run *r = ctx;

    (void)o, (void)c;
    return r->twins ? HT_PASS_TWINS : HT_PASS_ONCE;
}

static const struct ht_pass_user user = {.content = wants, .came = scrub_content, .current = true, .lone = true};

/* -------------------------------------------------------------------- run */

/* Content in use lies once on the devices, however many owners it has; also on one that takes no new content. */
static uint64_t total_bytes(struct ht_store *s)
{
    uint64_t blocks = 0, fixed = 0, supers = (uint64_t)s->dev_count * HT_SUPER_COPIES * HT_BLOCK_BYTES;
    struct ht_journal_stats log;
    struct ht_alloc_device d;

    ht_journal_stats(s->journal, &log);
    ht_store_lock(s);
    for (unsigned i = 0; i < s->dev_count; i++) {
        if (!s->dev[i])
            continue;
        ht_alloc_device(s->alloc, i, &d);
        blocks += d.blocks - d.free_blocks - d.bad_blocks - d.ending_blocks;
        fixed += ht_store_fixed_bytes(s, i);
    }
    blocks -= ht_min_u64(s->frees.lost_blocks, blocks);
    ht_store_unlock(s);
    return blocks * HT_BLOCK_BYTES - ht_min_u64(fixed, blocks * HT_BLOCK_BYTES) + supers +
        HT_LOG_COPIES * log.used_bytes;
}

int ht_store_scrub_start(struct ht_store *s)
{
    struct ht_scrub *c = &s->engine->scrub;
    struct ht_scrub_run *r = calloc(1, sizeof(*r));
    uint8_t *buf = aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES);

    if (!r || !buf) {
        free(r);
        free(buf);
        return -ENOMEM;
    }
    r->s = s;
    r->c = c;
    r->buf = buf;
    r->repair = r->log.repair = !ht_is_read_only(s);
    uint64_t total = total_bytes(s);
    ht_mutex_lock(ht_scrub_lock(c));
    int rc = c->st.state == HT_SCRUB_RUNNING ? -EBUSY : 0;
    if (!rc) /* before others can see the run, for the row may end it at once */
        rc = ht_row_wake(&s->engine->row[HT_ENGINE_SCRUB]);
    if (!rc) {
        c->run = r;
        c->stop = false;
        c->began_ns = ht_now_ns();
        c->awaited_until_ns = c->began_ns + AWAITED_NS;
        c->st.state = HT_SCRUB_RUNNING;
        c->st.run_bytes = c->st.run_ns = c->st.run_found = c->st.run_repaired = 0;
        c->st.run_total_bytes = total;
    }
    ht_mutex_unlock(ht_scrub_lock(c));
    if (rc) {
        free(r->buf);
        free(r);
    }
    return rc;
}

static void report_end(const struct ht_scrub_stats *st, int rc)
{
    struct ht_event_about about = {.error = rc};
    char size[32];

    ht_event(HT_EVENT_SCRUB_ENDED, &about, "scrub: %s%s after %s: %llu bad, %llu repaired",
             rc                                  ? "failed: "
                 : st->state == HT_SCRUB_STOPPED ? "stopped"
                                                 : "complete",
             rc ? strerror(-rc) : "", ht_format_size(st->run_bytes, size, sizeof(size)),
             (unsigned long long)st->run_found, (unsigned long long)st->run_repaired);
}

static void end(struct ht_scrub_run *r, int rc, bool stopped)
{
    struct ht_scrub *c = r->c;
    struct ht_scrub_stats st;

    ht_mutex_lock(ht_scrub_lock(c));
    c->run = NULL;
    c->awaited_until_ns = 0;
    c->st.run_ns = ht_now_ns() - c->began_ns;
    st = c->st;
    st.state = rc ? HT_SCRUB_FAILED : stopped ? HT_SCRUB_STOPPED : HT_SCRUB_COMPLETE;
    st.runs += st.state == HT_SCRUB_COMPLETE;
    ht_mutex_unlock(ht_scrub_lock(c));
    report_end(&st, rc); /* before any caller can see the end of the run */
    ht_mutex_lock(ht_scrub_lock(c));
    c->st = st;
    pthread_cond_broadcast(&c->changed);
    ht_mutex_unlock(ht_scrub_lock(c));
    ht_log_scrub_end(&r->log);
    ht_pass_end(&r->pass);
    free(r->buf);
    free(r);
}

/* As next_super; 0: that was all; -ENOMEM. */
static int next(struct ht_scrub_run *r, struct ht_budget *b)
{
    if (r->phase != CHUNKS)
        return r->phase == SUPERS ? next_super(r) : next_frame(r);
    if (ht_pass_is_over(&r->pass))
        return 0;
    int rc = ht_pass_next(&r->pass, b);
    return rc ? rc : 1;
}

/*
 * Reads about as much as the budget allows. 1: there is more; 0: the run has ended; -EAGAIN: not now.
 */
static int go_on(struct ht_scrub_run *r, struct ht_budget *b)
{
    bool stop = false;

    r->bytes = &b->bytes;
    r->ring = ht_store_ring(r->s);
    int rc = r->ring ? 1 : -ENOMEM;
    while (rc > 0 && !(stop = r->c->stop) && ht_pass_may_go_on(&r->pass, b))
        rc = next(r, b);
    ht_dedup_share_seen(r->s);
    if (!stop && (rc > 0 || rc == -EAGAIN))
        return rc;
    end(r, rc < 0 && rc != -EAGAIN ? rc : 0, stop);
    return 0;
}

static enum ht_step step(void *ctx, struct ht_budget *b)
{
    struct ht_scrub *c = &((struct ht_store *)ctx)->engine->scrub;

    struct ht_scrub_run *r = ht_locked(ht_scrub_lock(c), c->run);
    int rc = r ? go_on(r, b) : 0;
    if (!rc)
        return HT_STEP_IDLE;
    return rc > 0 ? HT_STEP_WORKED : HT_STEP_BLOCKED;
}

enum { FOUND, REPAIRED, LEFT_BYTES, FIGURES };

static const struct ht_engine_figure figures[FIGURES] = {
    [FOUND] = {"found", "Bad copies and chunks that scrubs found."},
    [REPAIRED] = {"repaired", "Of these, repaired."},
    [LEFT_BYTES] = {"left_bytes", "Bytes that the scrub that runs has still to read.", .gauge = true},
};

static void values(void *ctx, uint64_t out[])
{
    struct ht_scrub_stats st;

    ht_store_scrub_stats(ctx, &st);
    out[FOUND] = st.found;
    out[REPAIRED] = st.repaired;
    out[LEFT_BYTES] = st.state == HT_SCRUB_RUNNING ? st.run_total_bytes - st.run_bytes : 0;
}

const struct ht_engine_type ht_scrub_engine = {
    .name = "scrub",
    .pause_ms = LOG_PAUSE_MS,
    .step = step,
    .figure = figures,
    .figures = FIGURES,
    .values = values,
};

/* -------------------------------------------------------------- interface */

int ht_store_scrub_stop(struct ht_store *s)
{
    struct ht_scrub *c = &s->engine->scrub;

    ht_mutex_lock(ht_scrub_lock(c));
    int rc = c->st.state == HT_SCRUB_RUNNING ? 0 : -ESRCH;
    c->stop = true;
    if (!rc && ht_row_wake_to_end(&s->engine->row[HT_ENGINE_SCRUB])) {
        /* The lane has no thread and gets none, so no step runs. A later one finds no run. */
        struct ht_scrub_run *r = c->run;
        c->run = NULL;
        ht_mutex_unlock(ht_scrub_lock(c));
        end(r, 0, true);
        return 0;
    }
    while (c->st.state == HT_SCRUB_RUNNING)
        ht_cond_wait(&c->changed, ht_scrub_lock(c));
    ht_mutex_unlock(ht_scrub_lock(c));
    return rc;
}

void ht_scrub_init(struct ht_scrub *c)
{
    ht_mutex_init(&c->lock, HT_LOCK_SCRUB);
    ht_cond_init(&c->changed);
}

void ht_scrub_destroy(struct ht_scrub *c)
{
    pthread_cond_destroy(&c->changed);
    ht_mutex_destroy(&c->lock);
}
