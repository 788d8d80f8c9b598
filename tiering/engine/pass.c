/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/engine/pass.h"

#include "tiering/base/mutant.h"
#include "tiering/api/background.h"
#include "tiering/api/object.h"
#include "tiering/object/context.h"

#define HASHES_ALL (UINT64_C(1) << 32)
#define REST_NS_MAX UINT64_C(1000000)

enum {
    SLICE_CHUNKS = 256, /* looked at under the lock */
    REST_SHARE = 50,    /* between walks, at least so many times what the last one took */
    LONE_MAX = 4096,    /* places without a twin that are passed at once */
    SPARE = 4,          /* notes fill less than this part of their bound: the next part has twice as many hashes */
};

/* What follows a chunk of the walk. */
enum {
    WALK_ON,    /* the next chunk */
    WALK_PAUSE, /* the slice ends, and the next one begins with this chunk */
    WALK_TAKEN, /* the slice ends behind this chunk */
};

/* ------------------------------------------------------------------- notes */

unsigned ht_owners_max(const struct ht_store *s)
{
    return s->opts.owners_max ? s->opts.owners_max : HT_OWNERS_MAX;
}

bool ht_owners_are_too_many(const struct ht_store *s, const struct ht_ref *ref)
{
    const struct ht_refcount *e = ht_refcount_find(s, ref);

    return e &&
        (e->owners > ht_owners_max(s) ||
         e->owners * (uint64_t)ht_move_record_bytes(ref) > ht_owners_max(s) * (uint64_t)HT_OWNERS_RECORD_BYTES);
}

void ht_owners_begin(struct ht_owners *w, size_t most, struct ht_owners_part part)
{
    *w = (struct ht_owners){.most = most, .groups = part.hashes ? part.hashes : HASHES_ALL, .from = part.from};
}

uint32_t ht_owners_group_of(const struct ht_owners *w, uint64_t hashed)
{
    return (uint32_t)ht_id_hash(hashed) - w->from;
}

struct ht_owners_part ht_owners_then(const struct ht_owners *w)
{
    bool more = w->groups < HASHES_ALL && w->count < w->most / SPARE;

    return (struct ht_owners_part){.from = (uint32_t)(w->from + w->groups), .hashes = w->groups << more};
}

static bool is_full(const struct ht_owners *w)
{
    return w->count >= w->most && w->groups > 1;
}

bool ht_owners_lack_room(struct ht_owners *w, uint32_t group)
{
    w->lacks_room = is_full(w) && group < w->groups;
    return w->lacks_room;
}

static void halve(struct ht_owners *w)
{
    size_t n = 0;

    w->groups /= 2;
    for (size_t i = 0; i < w->count; i++)
        if (w->found[i].group < w->groups)
            w->found[n++] = w->found[i];
    w->count = n;
}

void ht_owners_make_room(struct ht_owners *w)
{
    ht_lock_expect_none("looking through all notes");
    while (w->lacks_room && is_full(w))
        halve(w);
    w->lacks_room = false;
}

bool ht_owners_are_full(const struct ht_owners *w, uint32_t group)
{
    return group < w->groups && w->groups == 1 && w->count >= w->most;
}

int ht_owners_note(struct ht_owners *w, const struct ht_owner_found *f)
{
    if (f->group >= w->groups || ht_owners_are_full(w, f->group))
        return 0;
    if (ht_array_grow((void **)&w->found, &w->cap, w->count + 1, sizeof(*w->found)))
        return -ENOMEM;
    w->found[w->count++] = *f;
    return 0;
}

static int by_group_and_place(const struct ht_owner_found *x, const struct ht_owner_found *y)
{
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    if (x->content != y->content)
        return x->content < y->content ? -1 : 1;
    return x->place < y->place ? -1 : x->place > y->place;
}

static int by_place(const void *a, const void *b)
{
    const struct ht_owner_found *x = a, *y = b;
    int order = by_group_and_place(x, y);

    if (order)
        return order;
    if (x->oid != y->oid)
        return x->oid < y->oid ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

/* The notes at `from` and at `end - 1` are of one place: does a neighbour have the same content elsewhere? */
static bool place_has_twin(const struct ht_owners *w, size_t from, size_t end)
{
    const struct ht_owner_found *f = w->found;

    return f[from].content &&
        ((from > 0 && f[from - 1].content == f[from].content) || (end < w->count && f[end].content == f[from].content));
}

void ht_owners_sort(struct ht_owners *w)
{
    if (w->count)
        qsort(w->found, w->count, sizeof(*w->found), by_place);
    w->twin_bytes = 0;
    for (size_t i = 0, same; i < w->count; i += same) {
        same = ht_owners_same(w, i);
        w->twin_bytes += place_has_twin(w, i, i + same) ? w->found[i].bytes : 0;
    }
}

size_t ht_owners_same(const struct ht_owners *w, size_t at)
{
    size_t next = at + 1;

    if (next < w->count && by_group_and_place(&w->found[next], &w->found[at]))
        return 1; /* as most */
    HT_PARTITION_POINT(next, w->count, i, by_group_and_place(&w->found[i], &w->found[at]) == 0);
    return next - at;
}

/* Has the place that came last, of n owners, a twin: another place, probably with the same content? */
static bool had_twin(const struct ht_owners *w, size_t n)
{
    return place_has_twin(w, w->at - n, w->at);
}

const struct ht_owner_found *ht_owners_next(struct ht_owners *w, size_t *out_n)
{
    if (w->at == 0)
        ht_owners_sort(w);
    if (w->at == w->count)
        return NULL;
    const struct ht_owner_found *f = &w->found[w->at];
    *out_n = ht_owners_same(w, w->at);
    w->at += *out_n;
    w->twin_bytes -= had_twin(w, *out_n) ? f->bytes : 0;
    return f;
}

bool ht_owners_are_over(const struct ht_owners *w)
{
    return w->at == w->count;
}

bool ht_owners_are_long(const struct ht_owners *w)
{
    if (ht_owners_are_over(w))
        return false;
    return (w->at ? ht_owners_same(w, w->at) : w->count) > HT_OWNERS_LONG;
}

size_t ht_owners_first_of(const struct ht_owners *w, unsigned group)
{
    size_t first = 0;

    HT_PARTITION_POINT(first, w->count, i, w->found[i].group < group);
    return first;
}

static uint64_t notes_bytes(const struct ht_owners *w)
{
    return w->cap * sizeof(*w->found);
}

void ht_owners_end(struct ht_owners *w)
{
    free(w->found);
    *w = (struct ht_owners){0};
}

/* -------------------------------------------------------------- what it found */

/* -ENOMEM */
static int need_owners(struct ht_pass *p, size_t n)
{
    unsigned had = p->owners_cap;
    int rc = ht_move_make_room(&p->found.owner, &p->owners_cap, (unsigned)n, NULL, 0);

    *p->bytes += (p->owners_cap - had) * sizeof(*p->found.owner);
    return rc;
}

/*
 * One is held, only while the engine works on the content: a deleted object keeps its space as long as it is held.
 */
static void add_owner(struct ht_pass *p, struct ht_obj *o, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    if (!p->found.owners) {
        o->refs++;
        p->found.obj = o;
    }
    p->found.owner[p->found.owners++] = (struct ht_move_owner){o->oid, index};
}

static void put_found(struct ht_pass *p)
{
    ht_obj_put(p->found.obj);
    ht_ref_forget(&p->found.was);
    p->found = (struct ht_move){.owner = p->found.owner};
    p->content = 0;
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
    uint64_t before = notes_bytes(&p->shared);
    int rc = ht_owners_note(&p->shared, f);

    *p->bytes += notes_bytes(&p->shared) - before;
    return rc ? rc : WALK_ON;
}

static int note_groups(struct ht_pass *p, const struct ht_obj *o, const struct ht_ref *ref, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_owner_found f = {.place = ht_ref_place(ref), .oid = o->oid, .index = index};
    uint32_t group[HT_CHUNK_BYTES / HT_BLOCK_BYTES];
    int rc = WALK_ON;

    if (ht_owners_lack_room(&p->shared, 0))
        return WALK_PAUSE;
    for (unsigned i = 0, n = p->user->groups(p->ctx, ref, group); rc == WALK_ON && i < n; i++) {
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

    return ht_owners_lack_room(&p->shared, f.group) ? WALK_PAUSE : note(p, &f);
}

static int take(struct ht_pass *p, struct ht_obj *o, const struct ht_ref *ref, uint64_t index)
    HT_REQUIRES(HT_LOCK_STORE)
{
    int rc = need_owners(p, 1);

    if (!rc)
        rc = ht_ref_copy(&p->found.was, ref);
    if (rc)
        return rc;
    add_owner(p, o, index);
    return WALK_TAKEN;
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
    return want == HT_PASS_NONE || p->again ? WALK_ON : take(p, o, ref, index);
}

/* Of a chunk with two references the published one comes first. */
static int look_at(struct ht_pass *p, struct ht_obj *o, struct ht_chunk *c, uint64_t index) HT_REQUIRES(HT_LOCK_STORE)
{
    bool published = (c->flags & HT_CH_PUB) && ht_ref_holds(&c->pub) && !ht_ref_is_cold(&c->pub);
    bool came =
        published && p->current.oid == o->oid && p->current.index == index && p->current.place == ht_ref_place(&c->pub);
    bool current = p->user->current && ht_chunk_has_place(c) && !ht_ref_is_cold(&c->cur);
    int rc = WALK_ON;

    p->current.oid = 0;
    if (published && !came)
        rc = p->user->groups ? note_groups(p, o, &c->pub, index)
                             : come(p, o, &c->pub, index, p->user->content(p->ctx, o, c));
    if (!current || (rc != WALK_ON && rc != WALK_TAKEN))
        return rc;
    if (rc == WALK_ON) {
        rc = come(p, o, &c->cur, index, p->user->content(p->ctx, o, c));
        if (rc != WALK_PAUSE)
            return rc;
    }
    p->current.oid = o->oid;
    p->current.index = index;
    p->current.place = published ? ht_ref_place(&c->pub) : 0;
    return WALK_PAUSE;
}

/* -------------------------------------------------------------------- slices */

bool ht_walk_is_over(const struct ht_walk *w)
{
    return w->at == w->count;
}

size_t ht_walk_find(const struct ht_walk *w, uint64_t oid)
{
    const uint64_t *at = bsearch(&oid, w->oids, w->count, sizeof(*w->oids), ht_compare_numbers);

    return at ? (size_t)(at - w->oids) : w->count;
}

uint64_t ht_walk_next_ns(const struct ht_walk *w, uint64_t period_ns)
{
    return ht_now_ns() + ht_max_u64(period_ns, REST_SHARE * w->ns);
}

static uint64_t walk_bytes(const struct ht_walk *w)
{
    return w->count * sizeof(*w->oids);
}

static void next_object(struct ht_walk *w, unsigned *left)
{
    w->chunk = 0;
    w->at++;
    *left -= *left > 0;
}

/* 1: the object is done; 0: the slice ends here. */
static int walk_object(struct ht_pass *p, unsigned *left) HT_REQUIRES(HT_LOCK_STORE)
{
    struct ht_walk *w = &p->walk;
    struct ht_obj *o = ht_obj_find_locked(p->s, w->oids[w->at]);

    if (!o || o->dead || (p->user->object && !p->user->object(p->ctx, o)))
        return 1;
    /* bounded: so many chunks as left says */
    ht_chunk_for_each_from(c, o, w->chunk) {
        if (!*left)
            return 0;
        int rc = look_at(p, o, c, w->chunk);
        if (rc < 0 || rc == WALK_PAUSE)
            return rc < 0 ? rc : 0;
        --*left;
        if (rc == WALK_TAKEN) {
            w->chunk++;
            return 0;
        }
    }
    return 1;
}

/* As many objects as *left allows; of a user that wants to be asked without the lock one. */
static int walk_objects(struct ht_pass *p, unsigned *left) HT_EXCLUDES(HT_LOCK_STORE)
{
    int rc;

    ht_store_lock(p->s);
    uint64_t began_ns = ht_now_ns();
    do {
        rc = walk_object(p, left);
        if (rc == 1)
            next_object(&p->walk, left);
    } while (rc == 1 && *left && !p->user->wants && !ht_walk_is_over(&p->walk));
    p->walk.ns += ht_now_ns() - began_ns;
    ht_store_unlock(p->s);
    return rc;
}

static int walk_slice(struct ht_pass *p)
{
    struct ht_walk *w = &p->walk;
    uint64_t before_ns = w->ns;
    unsigned left = SLICE_CHUNKS;
    int rc = 1;

    ht_owners_make_room(&p->shared);
    while (rc == 1 && left && !ht_walk_is_over(w)) {
        if (p->user->wants && w->chunk == 0 && !p->user->wants(p->ctx, w->oids[w->at]))
            next_object(w, &left);
        else
            rc = walk_objects(p, &left);
    }
    ht_sleep_ns(ht_min_u64(w->ns - before_ns, REST_NS_MAX));
    return rc < 0 ? rc : 0;
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
        struct ht_obj *o;
        const struct ht_chunk *c = ht_chunk_find_in(p->s, f[i].oid, f[i].index, &o);
        const struct ht_ref *ref = c ? ref_at(p, c, f->place) : NULL;
        if (!ref)
            continue;
        if (!p->found.owners)
            rc = ht_ref_copy(most, ref);
        if (rc)
            break;
        if (ref->visible > most->visible && !HT_MUTANT("frame-too-short"))
            most->visible = ref->visible;
        add_owner(p, o, f[i].index);
    }
    return rc;
}

/* The next place that comes. NULL: none, or none among so many. */
static const struct ht_owner_found *next_place(struct ht_pass *p, size_t *out_n)
{
    const struct ht_owner_found *f;

    for (unsigned passed = 0; passed < LONE_MAX && (f = ht_owners_next(&p->shared, out_n)); passed++)
        if (!f->content || p->user->lone || had_twin(&p->shared, *out_n))
            return f;
    return NULL;
}

static int next_shared(struct ht_pass *p)
{
    size_t n;
    const struct ht_owner_found *f = next_place(p, &n);

    if (!f)
        return 0;
    p->content = had_twin(&p->shared, n) ? f->content : 0;
    if (HT_MUTANT("owner-left-behind"))
        n = 1;
    return ht_store_locked(p->s, find_owners(p, f, n));
}

static void next_part(struct ht_pass *p)
{
    struct ht_owners_part part = ht_owners_then(&p->shared);

    p->hashes_left -= p->shared.groups;
    part.hashes = ht_min_u64(part.hashes, p->hashes_left);
    *p->bytes -= notes_bytes(&p->shared);
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
    int rc = ht_store_oids(s, &p->walk.oids, &p->walk.count);
    if (!rc)
        qsort(p->walk.oids, p->walk.count, sizeof(*p->walk.oids), ht_compare_numbers);
    *bytes += walk_bytes(&p->walk);
    return rc;
}

void ht_pass_end(struct ht_pass *p)
{
    if (!p->s)
        return;
    *p->bytes -= walk_bytes(&p->walk) + notes_bytes(&p->shared) + p->owners_cap * sizeof(*p->found.owner);
    ht_owners_end(&p->shared);
    free(p->walk.oids);
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

bool ht_pass_may_go_on(const struct ht_pass *p, struct ht_budget *b)
{
    if (b->begun && (b->bytes >= b->most_bytes || ht_now_ns() >= b->until_ns))
        return false;
    b->begun = true;
    b->next_is_long = !b->may_be_long && ht_pass_is_long(p);
    return !b->next_is_long;
}

int ht_pass_next(struct ht_pass *p, struct ht_budget *b)
{
    int rc = 0;

    if (!ht_walk_is_over(&p->walk))
        rc = walk_slice(p);
    else if (!ht_owners_are_over(&p->shared))
        rc = next_shared(p);
    else
        next_part(p);
    if (!rc && p->found.owners)
        rc = p->user->came(p->ctx, b);
    put_found(p);
    return rc;
}
