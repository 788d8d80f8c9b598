/* SPDX-License-Identifier: Apache-2.0 */
/* cold.c - see cold.h. The store's lock guards the list of fetches, and who uses the client of the vault. */

#include "tiering/data/cold.h"
#include "tiering/base/activity.h"
#include "tiering/base/event.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"
#include "tiering/object/image.h"
#include "tiering/remote/remote.h"
#include "tiering/data/chunk_io.h"
#include "tiering/data/data_priv.h"

#define LOOK_NS 20000000ull

struct ht_cold_fetch {
    struct ht_list link; /* among the fetches that are not done */
    struct ht_list ahead;
    struct ht_obj *obj; /* with a reference */
    uint64_t index;
    struct ht_ref ref;
    struct ht_remote *remote; /* that has the get; NULL: none took it, or it has ended */
    struct ht_remote_get get;
    uint8_t *bytes; /* a chunk */
    unsigned users;
    bool done;
    int rc;
};

bool ht_chunk_is_away(const struct ht_store *s, struct ht_chunk *c)
{
    const struct ht_ref *ref = ht_chunk_ref(c);

    if (!ref || !ht_ref_is_cold(ref) || (c->flags & HT_CH_BAD))
        return false;
    if (c->slot == HT_SLOT_NONE)
        return true;
    const struct ht_image *im = ht_arena_image(s->arena, c->slot);
    return im->valid_lo > 0 || im->valid_hi < ref->visible;
}

/* ------------------------------------------------------------------ a fetch */

static struct ht_cold_fetch *find(struct ht_obj *o, uint64_t index, const struct ht_ref *ref) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_list_for_each_entry(f, &o->s->data->fetching, struct ht_cold_fetch, link)
        if (f->obj == o && f->index == index && ht_ref_same_place(&f->ref, ref) && f->ref.visible >= ref->visible)
            return f;
    return NULL;
}

bool ht_cold_is_coming(struct ht_obj *o, uint64_t index)
{
    struct ht_chunk *c = ht_chunk_find(o, index);

    return c && ht_chunk_is_away(o->s, c) && find(o, index, ht_chunk_ref(c));
}

static void free_fetch(struct ht_cold_fetch *f)
{
    free(f->bytes);
    free(f);
}

static struct ht_cold_fetch *new_fetch(struct ht_obj *o, uint64_t index, const struct ht_ref *ref)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_cold_fetch *f = calloc(1, sizeof(*f));
    uint8_t *bytes = f ? aligned_alloc(HT_BLOCK_BYTES, HT_CHUNK_BYTES) : NULL;

    if (!bytes) {
        free(f);
        return NULL;
    }
    *f = (struct ht_cold_fetch){.obj = o, .index = index, .ref = *ref, .bytes = bytes, .users = 1};
    ht_list_init(&f->ahead);
    return f;
}

static int ask(struct ht_store *s, struct ht_cold_fetch *f, bool ahead) HT_REQUIRES(HT_LOCK_STORE)
{
    f->get = ht_remote_range(ht_ref_extent(&f->ref, 0).block, f->ref.stored, f->bytes);
    f->get.is_ahead = ahead;
    int rc = s->data->remote ? ht_remote_begin(s->data->remote, &f->get) : -ENOTCONN;
    f->remote = rc ? NULL : s->data->remote;
    return rc;
}

int ht_cold_begin(struct ht_obj *o, uint64_t index, bool ahead, bool anyway, struct ht_cold_want *out)
{
    struct ht_store *s = o->s;
    struct ht_chunk *c = ht_chunk_find(o, index);
    const struct ht_ref *ref = c ? ht_chunk_ref(c) : NULL;

    *out = (struct ht_cold_want){NULL, false};
    if (!ref || !(anyway ? ht_ref_is_cold(ref) : ht_chunk_is_away(s, c)))
        return 0;
    out->fetch = find(o, index, ref);
    if (out->fetch) {
        out->fetch->users++;
        return 0;
    }
    struct ht_cold_fetch *f = new_fetch(o, index, ref);
    if (!f)
        return -ENOMEM;
    f->rc = ask(s, f, ahead);
    if (f->rc == -EAGAIN || (ahead && f->rc)) {
        int rc = f->rc;
        free_fetch(f);
        return rc;
    }
    o->refs++;
    ht_list_add_tail(&s->data->fetching, &f->link);
    *out = (struct ht_cold_want){f, true};
    return 0;
}

static const char *why(int rc)
{
    switch (rc) {
    case -EUCLEAN:
        return "its checksum is wrong";
    case -ENOENT:
        return "there is no such segment";
    case -ENODATA:
        return "the segment is too short";
    case -ENOTCONN:
        return "the store was mounted without its vault";
    default:
        return strerror(-rc);
    }
}

/* That a vault is silent or missing has an event of its own. */
static void report(const struct ht_cold_fetch *f, int rc)
{
    const struct ht_event_about about = {f->obj->oid, "the vault", f->get.offset, rc == -EUCLEAN ? -EIO : rc};
    bool damage = rc == -EUCLEAN || rc == -ENOENT || rc == -ENODATA;

    if (rc != -ETIMEDOUT && rc != -ENXIO)
        ht_event(damage ? HT_EVENT_VAULT_DAMAGE : HT_EVENT_READ_ERROR, &about,
                 "chunk %llu of object %llu, seg/%08x/%04x at %u of the vault: %s; the read fails with EIO",
                 (unsigned long long)f->index, (unsigned long long)f->obj->oid, f->get.lease, f->get.n, f->get.offset,
                 why(rc));
}

/* Without the lock: the client's answer, verified. */
static int receive(struct ht_store *s, struct ht_cold_fetch *f, ht_remote_stop *stop, void *ctx)
{
    int rc = f->remote ? ht_remote_end(f->remote, &f->get, stop, ctx) : f->rc;

    if (!rc && !ht_ref_matches(s, &f->ref, f->bytes) && !HT_MUTANT("cold-checksum"))
        rc = -EUCLEAN;
    if (!rc)
        rc = ht_ref_decode(&s->data->decoders, &f->ref, f->bytes);
    if (!rc || rc == -ENOMEM || rc == -EINTR)
        return rc;
    report(f, rc);
    return -EIO;
}

int ht_cold_wait_or_stop(const struct ht_cold_want *w, ht_remote_stop *stop, void *ctx)
{
    struct ht_cold_fetch *f = w->fetch;
    struct ht_store *s = f->obj->s;

    if (!w->leads) {
        ht_activity_wait("the vault, for object", f->obj->oid);
        while (!f->done && !(stop && stop(ctx)))
            ht_store_wait(s, &s->data->fetched, stop ? ht_now_ns() + LOOK_NS : 0);
        ht_activity_go_on();
        return !f->done ? -EINTR : f->rc == -EINTR ? -EREMOTE : f->rc;
    }
    ht_store_unlock(s);
    ht_activity_wait("the vault, for object", f->obj->oid);
    int rc = receive(s, f, stop, ctx);
    ht_activity_go_on();
    ht_store_lock(s);
    f->remote = NULL;
    s->counts.cold_read_bytes += rc ? 0 : ht_ref_blocks(&f->ref) * HT_BLOCK_BYTES;
    s->counts.read_errors += rc && rc != -EINTR;
    f->rc = rc;
    f->done = true;
    ht_list_del(&f->link);
    pthread_cond_broadcast(&s->data->fetched);
    return rc;
}

int ht_cold_wait(const struct ht_cold_want *w)
{
    struct ht_obj *o = w->fetch->obj;
    uint64_t began_ns = ht_now_ns();
    int rc = ht_cold_wait_or_stop(w, NULL, NULL);

    o->s->counts.cold_waits++;
    o->s->counts.cold_wait_ns += ht_now_ns() - began_ns;
    if (ht_obj_need_extra(o) == 0)
        ht_obj_extra(o)->cold_waits++;
    return rc;
}

const struct ht_ref *ht_cold_ref(const struct ht_cold_want *w)
{
    return &w->fetch->ref;
}

uint8_t *ht_cold_bytes(const struct ht_cold_want *w)
{
    return w->fetch->bytes;
}

void ht_cold_put(struct ht_cold_want *w)
{
    struct ht_cold_fetch *f = w->fetch;

    w->fetch = NULL;
    if (!f)
        return;
    assert(f->done || !w->leads);
    struct ht_obj *o = w->leads ? f->obj : NULL; /* who began it has taken the reference */
    if (!--f->users)
        free_fetch(f);
    if (o)
        ht_obj_put_locked(o);
}

static bool wants(const struct ht_cold_fetch *f, struct ht_chunk *c) HT_REQUIRES(HT_LOCK_STORE)
{
    return ht_chunk_is_away(f->obj->s, c) && ht_ref_same_place(ht_chunk_ref(c), &f->ref) &&
        ht_chunk_ref(c)->visible <= f->ref.visible;
}

int ht_cold_install(const struct ht_cold_want *w)
{
    struct ht_cold_fetch *f = w->fetch;
    struct ht_obj *o = f->obj;
    struct ht_chunk *c = ht_chunk_find(o, f->index);
    int rc = 0;

    if (!c || !wants(f, c))
        return 0;
    ht_chunk_lock_exclusive(o, c, f->index);
    if (wants(f, c))
        rc = ht_image_attach(o, c, f->index, 0, false); /* may let the chunk go in between */
    if (!rc && wants(f, c))
        rc = ht_chunk_fill(o, c, f->index, f->bytes);
    if (rc)
        ht_chunk_drop_empty(o, c, f->index);
    ht_chunk_unlock_exclusive(o, c, f->index);
    return rc;
}

/* -------------------------------------------------------------- for callers */

int ht_cold_bring(struct ht_obj *o, struct ht_chunk *c, uint64_t index)
{
    struct ht_cold_want w;

    ht_chunk_leaf(c)->users++;
    int rc = ht_cold_begin(o, index, false, false, &w);
    if (!rc && w.fetch) {
        rc = ht_cold_wait(&w);
        if (!rc)
            rc = ht_cold_install(&w);
        else if (rc == -EREMOTE)
            rc = 0;
        ht_cold_put(&w);
    }
    ht_chunk_leaf(c)->users--;
    if (rc && !ht_chunk_in_use(c))
        ht_chunk_trim(o, index);
    return rc;
}

static int bring_end(struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_chunk *c = ht_chunk_find(o, index);

    return c && ht_chunk_is_away(o->s, c) ? ht_cold_bring(o, c, index) : 0;
}

int ht_cold_bring_ends(struct ht_obj *o, uint64_t off, uint64_t len)
{
    uint64_t last = off + (len ? len - 1 : 0);

    ht_store_lock(o->s);
    int rc = bring_end(o, off >> o->chunk_shift);
    if (!rc)
        rc = bring_end(o, last >> o->chunk_shift);
    ht_store_unlock(o->s);
    return rc;
}

/* ------------------------------------------------------------------- ahead */

bool ht_cold_ahead(struct ht_obj *o, uint64_t index)
{
    struct ht_store *s = o->s;
    struct ht_cold_want w;

    if (s->opts.no_threads)
        return false;
    int rc = ht_cold_begin(o, index, true, false, &w);
    if (rc)
        return false;
    if (!w.leads) { /* it comes anyway */
        ht_cold_put(&w);
        return true;
    }
    ht_list_add_tail(&s->data->ahead, &w.fetch->ahead);
    s->waits.wakes.cold = s->waits.wakes.any = true;
    return true;
}

static bool stops(void *ctx)
{
    const struct ht_store *s = ctx;

    return s->waits.stopping;
}

void ht_cold_finish_ahead(struct ht_store *s)
{
    ht_store_lock(s);
    while (!ht_list_empty(&s->data->ahead)) {
        struct ht_cold_want w = {ht_list_entry(s->data->ahead.next, struct ht_cold_fetch, ahead), true};
        ht_list_del(&w.fetch->ahead);
        int rc = ht_cold_wait_or_stop(&w, stops, s);
        if (!rc)
            rc = ht_cold_install(&w); /* without room its reader fetches it */
        ht_cold_put(&w);
    }
    ht_store_unlock(s);
}

/* ------------------------------------------------------------------ the vault */

static void changed(void *ctx, bool silent)
{
    const struct ht_store *s = ctx;
    const struct ht_event_about about = {.device = "the vault", .error = silent ? -ETIMEDOUT : 0};
    unsigned timeout_ms = s->opts.vault_timeout_ms ? s->opts.vault_timeout_ms : HT_REMOTE_TIMEOUT_MS;

    if (silent)
        ht_event(HT_EVENT_VAULT_SILENT, &about,
                 "the vault has not answered for %u ms; reads of cold content fail at once until it does, and nothing "
                 "else waits for it",
                 timeout_ms);
    else
        ht_event(HT_EVENT_VAULT_ANSWERS, &about, "the vault answers again");
}

static void missing(void *ctx, const char *url, const char *why)
{
    const struct ht_event_about about = {.device = "the vault", .error = -ENXIO};

    ht_event(HT_EVENT_VAULT_MISSING, &about, "%s: %s; cold content that it lacks cannot be read", url, why);
}

static bool has_gets(const struct ht_store *s, const struct ht_remote *r) HT_REQUIRES(HT_LOCK_STORE)
{
    ht_list_for_each_entry(f, &s->data->fetching, const struct ht_cold_fetch, link)
        if (f->remote == r)
            return true;
    return false;
}

/* New fetches go to the next one; the caller frees the one before, which has no get. */
static struct ht_remote *exchange(struct ht_store *s, struct ht_remote *next)
{
    ht_store_lock(s);
    struct ht_remote *was = s->data->remote;
    s->data->remote = next;
    while (was && has_gets(s, was))
        ht_store_wait(s, &s->data->fetched, 0);
    ht_store_unlock(s);
    return was;
}

int ht_cold_connect(struct ht_store *s)
{
    struct ht_remote_config config = {
        .programs = s->opts.vault_programs,
        .timeout_ms = s->opts.vault_timeout_ms,
        .slots = s->opts.vault_slots,
        .changed = changed,
        .missing = missing,
        .ctx = s,
    };
    char url[HT_REMOTE_URL_BYTES];
    uint8_t uuid[sizeof(s->vault.uuid)];
    struct ht_remote *remote;

    ht_store_lock(s);
    memcpy(uuid, s->vault.uuid, sizeof(uuid));
    bool is_needed = s->objects.cold_blocks;
    snprintf(url, sizeof(url), "%s", s->vault.url);
    ht_store_unlock(s);
    config.url = s->opts.vault_url ? s->opts.vault_url : url;
    config.uuid = uuid;
    int rc = ht_remote_new(&config, &remote);
    if (!rc && is_needed)
        ht_remote_look(remote);
    if (!rc)
        ht_remote_free(exchange(s, remote));
    return rc;
}

void ht_cold_disconnect(struct ht_store *s)
{
    ht_remote_free(exchange(s, NULL));
}

int ht_cold_state(struct ht_store *s, struct ht_remote_state *out)
{
    ht_store_lock(s);
    int rc = s->data->remote ? 0 : -ENOTCONN;
    if (!rc)
        ht_remote_state(s->data->remote, out);
    ht_store_unlock(s);
    return rc;
}
