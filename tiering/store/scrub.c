/* SPDX-License-Identifier: Apache-2.0 */
/*
 * scrub.c - a run over everything on the media, in the background: superblocks, log copies, chunks.
 *
 *   never --start--> running --everything was read--> complete
 *                       |------stop, or unmount------> stopped     each of them: start again
 *                       '------no memory, ...--------> failed
 *
 * What is looked at and in which order is here; how fast it goes is pace.c's, what becomes of a bad chunk scrub_chunk.c's. The thread
 * holds no lock over I/O but super_lock, and its requests have the idle class where the device's scheduler knows one. Its processor
 * time is not lowered: who holds the store's lock must get on.
 *
 * What is written while it runs, it may see or not: that was verified by nobody, but written just now.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "tiering/base/event.h"
#include "tiering/space/members.h"
#include "tiering/store/pace.h"
#include "tiering/store/store_priv.h"

#define RATE_BYTES_DEFAULT (64 * HT_MIB)
#define LOG_PAUSE_NS 100000000u

struct run {
    struct ht_store *s;
    struct ht_scrub *c;
    struct ht_ring *ring;
    struct ht_pace pace;
    bool paced, repair;
};

/* ---------------------------------------------------------------- figures */

void ht_store_scrub_stats(struct ht_store *s, struct ht_scrub_stats *out)
{
    struct ht_scrub *c = &s->scrub;
    ht_mutex_lock(&c->lock);
    *out = c->st;
    if (out->state == HT_SCRUB_RUNNING)
        out->run_ns = ht_now_ns() - c->began_ns;
    ht_mutex_unlock(&c->lock);
    out->run_total_bytes = ht_max_u64(out->run_total_bytes, out->run_bytes); /* it may have grown meanwhile */
}

static void count_bytes(struct run *r, uint64_t bytes)
{
    ht_mutex_lock(&r->c->lock);
    r->c->st.run_bytes += bytes;
    r->c->st.bytes += bytes;
    ht_mutex_unlock(&r->c->lock);
}

static void count_found(struct run *r, bool repaired)
{
    ht_mutex_lock(&r->c->lock);
    r->c->st.run_found++;
    r->c->st.found++;
    r->c->st.run_repaired += repaired;
    r->c->st.repaired += repaired;
    ht_mutex_unlock(&r->c->lock);
}

static enum ht_event_code code_of(bool repaired)
{
    return repaired ? HT_EVENT_SCRUB_REPAIRED : HT_EVENT_SCRUB_DAMAGE;
}

/* ------------------------------------------------------------------ pace */

/* True: it is to stop. */
static bool sleep_for(struct run *r, uint64_t ns)
{
    uint64_t until = ht_now_ns() + ns;
    ht_mutex_lock(&r->c->lock);
    while (!r->c->stop && ht_now_ns() < until)
        ht_cond_wait_until(&r->c->changed, &r->c->lock, until);
    bool stop = r->c->stop;
    ht_mutex_unlock(&r->c->lock);
    return stop;
}

static uint64_t device_bytes(struct ht_store *s)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < s->dev_count; i++) {
        struct ht_dev_counters n;
        if (!s->dev[i])
            continue;
        ht_dev_counters(s->dev[i], &n);
        sum += n.read_bytes + n.written_bytes;
    }
    return sum;
}

/* After bytes were read. True: it is to stop. */
static bool go_on(struct run *r, uint64_t bytes, bool *out_stop)
{
    count_bytes(r, bytes);
    ht_mutex_lock(&r->c->lock);
    uint64_t own = r->c->st.bytes;
    ht_mutex_unlock(&r->c->lock);
    uint64_t all = device_bytes(r->s), others = all > own ? all - own : 0;
    *out_stop = sleep_for(r, r->paced ? ht_pace_wait_ns(&r->pace, ht_now_ns(), bytes, others) : 0);
    return !*out_stop;
}

/* ------------------------------------------------------------ superblocks */

static void tell_super(struct run *r, unsigned device, unsigned copy, const struct ht_super_scrub *f)
{
    struct ht_event_about about = {0, ht_dev_name(r->s->dev[device]), f->offset[copy], -EUCLEAN};
    count_found(r, f->repaired[copy]);
    ht_event(code_of(f->repaired[copy]), &about, "scrub: superblock copy %u on %s is %s; %s", copy, about.device,
             f->stale[copy] ? "older than the others" : ht_super_problem_text(f->problem[copy]),
             f->repaired[copy] ? "it was written anew" : "it could not be written anew");
}

static bool scrub_supers(struct run *r, bool *out_stop)
{
    struct ht_store *s = r->s;
    bool more = true;
    for (unsigned i = 0; more && i < s->dev_count; i++) {
        struct ht_super_scrub f;
        if (!s->dev[i] || !ht_members_takes_part(&s->sb, i)) /* one that was left behind keeps saying so */
            continue;
        ht_mutex_lock(&s->super_lock);
        unsigned bad = ht_super_scrub(&s->sb, s->dev[i], i, r->repair, &f);
        ht_mutex_unlock(&s->super_lock);
        for (unsigned k = 0; bad && k < HT_SUPER_COPIES; k++)
            if (f.stale[k] || f.problem[k] != HT_SUPER_OK)
                tell_super(r, i, k, &f);
        more = go_on(r, HT_SUPER_COPIES * HT_BLOCK_BYTES, out_stop);
    }
    return more;
}

/* -------------------------------------------------------------------- log */

static void tell_log(struct run *r, unsigned copy, const struct ht_log_scrub_damage *d)
{
    struct ht_event_about about = {0, ht_dev_name(d->dev), d->offset, d->error};
    count_found(r, d->repaired);
    ht_event(code_of(d->repaired), &about, "scrub: copy %u of the log is damaged at byte %llu of %s: %s; %s", copy,
             (unsigned long long)d->offset, about.device,
             d->error == -EUCLEAN ? "a frame does not verify" : strerror(-d->error),
             d->repaired ? "it was written anew from the other copy" : "it could not be written anew");
}

/* A frame that is in no copy any more: what it said is in memory, so a compaction replaces it. */
static void rewrite_log(struct run *r)
{
    ht_event(HT_EVENT_LOG_DAMAGED, NULL, "scrub: a frame of the log is in none of its copies any more; %s",
             r->repair ? "a compaction writes everything anew; run scrub again afterwards" : "run hitrain-fsck");
    if (r->repair)
        ht_journal_compact_poke(r->s->journal);
}

static int scrub_log(struct run *r, bool *out_stop)
{
    struct ht_log_scrub cursor = {.repair = r->repair};
    struct ht_log_scrub_found f;
    int rc;
    do {
        rc = ht_journal_scrub_step(r->s->journal, &cursor, &f);
        for (unsigned i = 0; i < HT_LOG_COPIES; i++)
            if (f.copy[i].damaged)
                tell_log(r, i, &f.copy[i]);
        if (rc == -EAGAIN)
            *out_stop = sleep_for(r, LOG_PAUSE_NS);
    } while ((rc == 1 && go_on(r, f.bytes, out_stop)) || (rc == -EAGAIN && !*out_stop));
    ht_log_scrub_end(&cursor);
    if (rc == -EUCLEAN)
        rewrite_log(r);
    return rc == -ENOMEM ? rc : 0;
}

/* ----------------------------------------------------------------- chunks */

static void tell_chunk(struct run *r, const struct ht_suspect *x)
{
    struct ht_event_about about = {x->obj->oid, x->device, x->offset, x->error};
    bool repaired = x->repair_error == 0;
    char text[128];
    count_found(r, repaired);
    if (x->repair_error == -ENODATA)
        snprintf(text, sizeof(text),
                 "there is no second copy: reading it fails with EIO; restore the file or delete it");
    else if (!repaired)
        snprintf(text, sizeof(text), "it could not be written anew: %s", strerror(-x->repair_error));
    ht_event(code_of(repaired), &about, "scrub: chunk %llu of object %llu at byte %llu of %s is bad: %s; %s",
             (unsigned long long)x->index, (unsigned long long)about.id, (unsigned long long)about.offset, about.device,
             x->error == -EUCLEAN ? "its checksum is wrong" : strerror(-x->error),
             repaired ? "it was written to another place from memory" : text);
}

/* Copies of what the chunk names: none, one or two; nothing of one that is known to be lost. Lock held. */
static int copy_refs(const struct ht_chunk *c, struct ht_ref out[2])
{
    int n = 0;
    if ((c->flags & CH_PUB) && !ht_ref_lost(&c->pub)) {
        if (ht_ref_copy(&out[n], &c->pub))
            return -ENOMEM;
        n++;
    }
    if ((c->flags & CH_CUR) && !(c->flags & CH_SHARE)) {
        if (ht_ref_copy(&out[n], &c->cur)) {
            while (n)
                ht_ref_forget(&out[--n]);
            return -ENOMEM;
        }
        n++;
    }
    return n;
}

static int scrub_ref(struct run *r, struct ht_obj *o, uint64_t index, struct ht_ref *ref, bool *out_stop)
{
    struct ht_suspect x = {.obj = o, .index = index, .ref = *ref, .ring = r->ring, .repair = r->repair};
    int rc = ht_suspect_check(&x);
    if (rc == HT_SUSPECT_BAD)
        tell_chunk(r, &x);
    if (rc >= 0 && rc != HT_SUSPECT_ABSENT)
        (void)go_on(r, (uint64_t)ht_ref_blocks(ref) * HT_BLOCK_BYTES, out_stop);
    return rc < 0 ? rc : 0;
}

/* One after the other; a deleted object is let go at once, for it keeps its space as long as it is held. Lock held, let go meanwhile. */
static int scrub_chunks(struct run *r, struct ht_obj *o, bool *out_stop)
{
    struct ht_store *s = r->s;
    struct ht_chunk *c;
    uint64_t index = 0;
    int rc = 0;
    ht_chunk_for_each_from(c, o, index)
    {
        struct ht_ref ref[2];
        if (rc < 0 || *out_stop || o->dead)
            break;
        int n = copy_refs(c, ref);
        if (n <= 0) {
            rc = n;
            continue;
        }
        ht_store_unlock(s);
        for (int i = 0; i < n; i++) {
            if (!rc && !*out_stop)
                rc = scrub_ref(r, o, index, &ref[i], out_stop);
            ht_ref_forget(&ref[i]);
        }
        ht_store_lock(s);
    }
    return rc;
}

static int scrub_objects(struct run *r, bool *out_stop)
{
    struct ht_store *s = r->s;
    uint64_t *oids;
    size_t count;
    int rc = ht_store_oids(s, &oids, &count);
    if (rc)
        return rc;
    for (size_t i = 0; !rc && !*out_stop && i < count; i++) {
        ht_store_lock(s);
        struct ht_obj *o = ht_obj_find_locked(s, oids[i]);
        if (o && !o->dead) {
            o->refs++;
            rc = scrub_chunks(r, o, out_stop);
            ht_obj_put_locked(o);
        }
        ht_store_unlock(s);
    }
    free(oids);
    return rc;
}

/* -------------------------------------------------------------------- run */

static uint64_t total_bytes(struct ht_store *s)
{
    struct ht_journal_stats log;
    ht_journal_stats(s->journal, &log);
    uint64_t blocks = (uint64_t)s->dev_count * HT_SUPER_COPIES, bytes = HT_LOG_COPIES * log.used_bytes;
    ht_store_lock(s);
    for (size_t b = 0; b < s->table_size; b++)
        for (const struct ht_obj *o = s->table[b]; o; o = o->next)
            blocks += ht_obj_stored_blocks(o);
    ht_store_unlock(s);
    return bytes + blocks * HT_BLOCK_BYTES;
}

static int begin(struct ht_store *s)
{
    uint64_t total = total_bytes(s);
    struct ht_scrub *c = &s->scrub;
    ht_mutex_lock(&c->lock);
    int rc = c->st.state == HT_SCRUB_RUNNING ? -EBUSY : 0;
    if (!rc && c->joinable) { /* it has ended */
        pthread_join(c->thread, NULL);
        c->joinable = false;
    }
    if (!rc) {
        c->stop = false;
        c->began_ns = ht_now_ns();
        c->st.state = HT_SCRUB_RUNNING;
        c->st.run_bytes = c->st.run_ns = c->st.run_found = c->st.run_repaired = 0;
        c->st.run_total_bytes = total;
    }
    ht_mutex_unlock(&c->lock);
    return rc;
}

static void tell_end(const struct ht_scrub_stats *st, int rc)
{
    struct ht_event_about about = {.error = rc};
    char size[32];
    ht_event(HT_EVENT_SCRUB_ENDED, &about, "scrub: %s%s after %s: %llu bad, %llu of them repaired",
             rc                                  ? "failed: "
                 : st->state == HT_SCRUB_STOPPED ? "stopped"
                                                 : "complete",
             rc ? strerror(-rc) : "", ht_format_size(st->run_bytes, size, sizeof(size)),
             (unsigned long long)st->run_found, (unsigned long long)st->run_repaired);
}

static void end(struct ht_store *s, int rc, bool stopped)
{
    struct ht_scrub *c = &s->scrub;
    struct ht_scrub_stats st;
    ht_mutex_lock(&c->lock);
    c->st.run_ns = ht_now_ns() - c->began_ns;
    st = c->st;
    st.state = rc ? HT_SCRUB_FAILED : stopped ? HT_SCRUB_STOPPED : HT_SCRUB_COMPLETE;
    st.runs += st.state == HT_SCRUB_COMPLETE;
    ht_mutex_unlock(&c->lock);
    tell_end(&st, rc); /* before anybody can see that it has ended */
    ht_mutex_lock(&c->lock);
    c->st = st;
    pthread_cond_broadcast(&c->changed);
    ht_mutex_unlock(&c->lock);
}

static int run(struct ht_store *s, bool paced)
{
    struct run r = {.s = s, .c = &s->scrub, .paced = paced, .repair = !ht_store_read_only(s)};
    bool stop = false;
    r.pace.rate_bytes = s->opts.scrub_rate_bytes ? s->opts.scrub_rate_bytes : RATE_BYTES_DEFAULT;
    r.ring = ht_store_ring(s);
    int rc = r.ring ? 0 : -ENOMEM;
    if (!rc) {
        if (scrub_supers(&r, &stop))
            rc = scrub_log(&r, &stop);
        if (!rc && !stop)
            rc = scrub_objects(&r, &stop);
    }
    end(s, rc, stop);
    return rc;
}

/* So that the device's scheduler, if it has one, serves everybody else first. Not a word if it cannot be. */
static void go_idle(void)
{
    enum { WHO_PROCESS = 1, CLASS_IDLE = 3, CLASS_SHIFT = 13 };
    (void)syscall(SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE << CLASS_SHIFT);
}

static void *scrub_main(void *s)
{
    go_idle();
    (void)run(s, true);
    return NULL;
}

/* -------------------------------------------------------------- interface */

int ht_store_scrub_start(struct ht_store *s)
{
    struct ht_scrub *c = &s->scrub;
    int rc = begin(s);
    if (rc)
        return rc;
    ht_mutex_lock(&c->lock);
    rc = -pthread_create(&c->thread, NULL, scrub_main, s);
    c->joinable = rc == 0;
    ht_mutex_unlock(&c->lock);
    if (rc)
        end(s, rc, false);
    return rc;
}

int ht_store_scrub_stop(struct ht_store *s)
{
    struct ht_scrub *c = &s->scrub;
    ht_mutex_lock(&c->lock);
    int rc = c->st.state == HT_SCRUB_RUNNING ? 0 : -ESRCH;
    c->stop = true;
    pthread_cond_broadcast(&c->changed);
    while (c->st.state == HT_SCRUB_RUNNING)
        ht_cond_wait(&c->changed, &c->lock);
    ht_mutex_unlock(&c->lock);
    return rc;
}

int ht_store_scrub(struct ht_store *s)
{
    int rc = begin(s);
    return rc ? rc : run(s, false);
}

void ht_scrub_init(struct ht_scrub *c)
{
    ht_mutex_init(&c->lock, HT_LOCK_SCRUB);
    ht_cond_init(&c->changed);
}

void ht_scrub_destroy(struct ht_scrub *c)
{
    if (c->joinable)
        pthread_join(c->thread, NULL);
    pthread_cond_destroy(&c->changed);
    ht_mutex_destroy(&c->lock);
}
