/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/engine/pass.h"

#include "tiering/base/idhash.h"
#include "tiering/base/mutant.h"
#include "tiering/object/context.h"

enum {
    SLICE_CHUNKS = 256, /* looked at under the lock */
    LONE_MAX = 4096,    /* places without a twin that are passed at once */
};

/* -------------------------------------------------------------- what it found */

/* -ENOMEM */
static int need_owners(struct ht_pass *p, size_t n)
{
    unsigned had = p->owners_cap;
    int rc = ht_move_make_room(&p->found.owner, &p->owners_cap, (unsigned)n, NULL, 0);

    *p->bytes += (p->owners_cap - had) * sizeof(*p->found.owner);
    return rc;
}

/* Only while the engine works on it: a deleted object keeps its space as long as it is held. */
static void hold(struct ht_pass *p, struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    o->refs++;
    p->found.owner[p->found.owners++] = (struct ht_move_owner){o, index};
}

void ht_pass_put(struct ht_pass *p)
{
    struct ht_slice slice = {0};

    if (!p->found.owners)
        return;
    ht_store_lock(p->s);
    for (; p->found.owners; ht_slice_next(p->s, &slice))
        ht_obj_put_locked(p->found.owner[--p->found.owners].obj);
    ht_store_unlock(p->s);
    p->content = 0;
    ht_ref_forget(&p->found.was);
    memset(&p->found.was, 0, sizeof(p->found.was));
}

/* ------------------------------------------------------------------ walking */

/* Twins have the same; never 0. */
static uint64_t content_of(const struct ht_obj *o, const struct ht_ref *ref)
{
    uint64_t form = (uint64_t)ref->stored << 16 | (uint64_t)ref->codec << 8 | o->chunk_shift;

    return ht_id_hash(ref->checksum ^ ht_id_hash(form)) | 1;
}

static int note(struct ht_pass *p, const struct ht_owner_found *f)
{
    uint64_t before = ht_owners_bytes(&p->shared);
    int rc = ht_owners_note(&p->shared, f);

    *p->bytes += ht_owners_bytes(&p->shared) - before;
    return rc ? rc : HT_WALK_ON;
}

static int note_groups(struct ht_pass *p, const struct ht_obj *o, const struct ht_ref *ref, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_owner_found f = {.place = ht_ref_place(ref), .oid = o->oid, .index = index};
    uint32_t group[HT_CHUNK_BYTES / HT_BLOCK_BYTES];
    int rc = HT_WALK_ON;

    if (ht_owners_lack_room(&p->shared, 0))
        return HT_WALK_PAUSE;
    for (unsigned i = 0, n = p->user->groups(p->ctx, ref, group); rc == HT_WALK_ON && i < n; i++) {
        f.group = group[i];
        rc = note(p, &f);
    }
    return rc;
}

static int note_owner(struct ht_pass *p, const struct ht_obj *o, const struct ht_ref *ref, uint64_t index, bool twins)
    HT_REQUIRES(HT_LOCK_STORE)
{
    uint64_t place = ht_ref_place(ref);
    uint64_t content = twins ? content_of(o, ref) : 0;
    const struct ht_owner_found f = {.place = place,
                                     .oid = o->oid,
                                     .index = index,
                                     .group = ht_owners_group_of(&p->shared, twins ? content : place),
                                     .bytes = ref->stored,
                                     .content = content};

    return ht_owners_lack_room(&p->shared, f.group) ? HT_WALK_PAUSE : note(p, &f);
}

static int take(struct ht_pass *p, struct ht_obj *o, const struct ht_ref *ref, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = need_owners(p, 1);

    if (!rc)
        rc = ht_ref_copy(&p->found.was, ref);
    if (rc)
        return rc;
    hold(p, o, index);
    return HT_WALK_TAKEN;
}

/* Very many places may have the same content. Those that the notes have no room for come at once, as if alone. */
static int come(struct ht_pass *p, struct ht_obj *o, const struct ht_ref *ref, uint64_t index, enum ht_pass_want want)
    HT_REQUIRES(HT_LOCK_STORE)
{
    bool twins = want == HT_PASS_TWINS;

    if (twins && p->user->lone && ht_owners_are_full(&p->shared, ht_owners_group_of(&p->shared, content_of(o, ref))))
        return take(p, o, ref, index);
    if (twins || (want == HT_PASS_ONCE && ref->shared))
        return note_owner(p, o, ref, index, twins);
    return want == HT_PASS_NONE || p->again ? HT_WALK_ON : take(p, o, ref, index);
}

/* Of a chunk with two references the published one comes first. */
static int look_at(void *ctx, struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_pass *p = ctx;
    bool published = (c->flags & HT_CH_PUB) && ht_ref_holds(&c->pub) && !ht_ref_is_cold(&c->pub);
    bool came =
        published && p->current.oid == o->oid && p->current.index == index && p->current.place == ht_ref_place(&c->pub);
    bool current = p->user->current && ht_chunk_has_place(c) && !ht_ref_is_cold(&c->cur);
    int rc = HT_WALK_ON;

    p->current.oid = 0;
    if (published && !came)
        rc = p->user->groups ? note_groups(p, o, &c->pub, index)
                             : come(p, o, &c->pub, index, p->user->content(p->ctx, o, c));
    if (!current || (rc != HT_WALK_ON && rc != HT_WALK_TAKEN))
        return rc;
    if (rc == HT_WALK_ON) {
        rc = come(p, o, &c->cur, index, p->user->content(p->ctx, o, c));
        if (rc != HT_WALK_PAUSE)
            return rc;
    }
    p->current.oid = o->oid;
    p->current.index = index;
    p->current.place = published ? ht_ref_place(&c->pub) : 0;
    return HT_WALK_PAUSE;
}

static bool wants(void *ctx, uint64_t oid)
{
    const struct ht_pass *p = ctx;

    return p->user->wants(p->ctx, oid);
}

static bool wants_object(void *ctx, const struct ht_obj *o) HT_REQUIRES(HT_LOCK_STORE)
{
    const struct ht_pass *p = ctx;

    return p->user->object(p->ctx, o);
}

static int walk(struct ht_pass *p)
{
    const struct ht_walk_visitor visitor = {
        .wants = p->user->wants ? wants : NULL, .object = p->user->object ? wants_object : NULL, .chunk = look_at};

    ht_owners_make_room(&p->shared);
    return ht_walk_slice(&p->walk, &visitor, p, SLICE_CHUNKS);
}

/* ------------------------------------------------------------- noted places */

static const struct ht_ref *ref_at(const struct ht_pass *p, const struct ht_chunk *c, uint64_t place)
{
    if ((c->flags & HT_CH_PUB) && ht_ref_holds(&c->pub) && ht_ref_place(&c->pub) == place)
        return &c->pub;
    return p->user->current && (c->flags & HT_CH_CUR) && ht_ref_place(&c->cur) == place ? &c->cur : NULL;
}

/* Owners that have left are none. The bytes may be others by now: whoever changes something compares. */
static int find_owners(struct ht_pass *p, const struct ht_owner_found *f, size_t n) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_ref *most = &p->found.was;
    struct ht_slice slice = {0};
    int rc = need_owners(p, n);

    for (size_t i = 0; !rc && i < n; i++, ht_slice_next(p->s, &slice)) {
        struct ht_obj *o = ht_obj_find_locked(p->s, f[i].oid);
        struct ht_chunk *c = o && !o->dead ? ht_chunk_find(o, f[i].index) : NULL;
        const struct ht_ref *ref = c ? ref_at(p, c, f->place) : NULL;
        if (!ref)
            continue;
        if (!p->found.owners)
            rc = ht_ref_copy(most, ref);
        if (rc)
            break;
        if (ref->visible > most->visible && !HT_MUTANT("frame-too-short"))
            most->visible = ref->visible;
        hold(p, o, f[i].index);
    }
    return rc;
}

/* Was the last place wanted beside its twins, and has it one? */
static bool has_twin(const struct ht_pass *p, const struct ht_owner_found *f, size_t n)
{
    return f->content && ht_owners_had_twin(&p->shared, n);
}

/* The next place that comes. NULL: none, or none among so many. */
static const struct ht_owner_found *next_place(struct ht_pass *p, size_t *out_n)
{
    const struct ht_owner_found *f;

    for (unsigned passed = 0; passed < LONE_MAX && (f = ht_owners_next(&p->shared, out_n)); passed++)
        if (!f->content || p->user->lone || has_twin(p, f, *out_n))
            return f;
    return NULL;
}

static int next_shared(struct ht_pass *p)
{
    size_t n;
    const struct ht_owner_found *f = next_place(p, &n);

    if (!f)
        return 0;
    p->content = has_twin(p, f, n) ? f->content : 0;
    if (HT_MUTANT("owner-left-behind"))
        n = 1;
    ht_store_lock(p->s);
    int rc = find_owners(p, f, n);
    ht_store_unlock(p->s);
    return rc;
}

static void next_part(struct ht_pass *p)
{
    struct ht_owners_part part = ht_owners_then(&p->shared);

    p->hashes_left -= p->shared.groups;
    part.hashes = ht_min_u64(part.hashes, p->hashes_left);
    *p->bytes -= ht_owners_bytes(&p->shared);
    ht_owners_end(&p->shared);
    ht_owners_begin(&p->shared, p->notes_max, part);
    p->walk.at = p->walk.chunk = 0;
    p->again = true;
}

/* ------------------------------------------------------------------- a pass */

int ht_pass_begin(struct ht_pass *p, struct ht_store *s, const struct ht_pass_user *user, void *ctx, size_t notes,
                  uint64_t groups, _Atomic uint64_t *bytes)
{
    *p = (struct ht_pass){.s = s, .user = user, .ctx = ctx, .bytes = bytes};
    p->notes_max = notes ? notes : 2 * (size_t)ht_owners_max(s);
    ht_owners_begin(&p->shared, p->notes_max, (struct ht_owners_part){.hashes = groups});
    p->hashes_left = p->shared.groups;
    int rc = ht_walk_begin(&p->walk, s);
    *bytes += ht_walk_bytes(&p->walk);
    return rc;
}

void ht_pass_end(struct ht_pass *p)
{
    if (!p->s)
        return;
    *p->bytes -= ht_walk_bytes(&p->walk) + ht_owners_bytes(&p->shared) + p->owners_cap * sizeof(*p->found.owner);
    ht_owners_end(&p->shared);
    ht_walk_end(&p->walk);
    free(p->found.owner);
    *p = (struct ht_pass){0};
}

bool ht_pass_is_over(const struct ht_pass *p)
{
    return ht_walk_is_over(&p->walk) && ht_owners_are_over(&p->shared) && p->hashes_left <= p->shared.groups;
}

bool ht_pass_is_long(const struct ht_pass *p)
{
    return ht_walk_is_over(&p->walk) && ht_owners_are_long(&p->shared);
}

int ht_pass_next(struct ht_pass *p)
{
    if (!ht_walk_is_over(&p->walk))
        return walk(p);
    if (!ht_owners_are_over(&p->shared))
        return next_shared(p);
    next_part(p);
    return 0;
}
