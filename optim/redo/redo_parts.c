/* SPDX-License-Identifier: Apache-2.0 */
/*
 * redo_parts.c - a replay of content that the DRAM tier cannot hold at once.
 *
 * The update of a range needs its content, its gradient and the numbers of the step's summary, and nothing of another
 * range. So all steps of some ranges may be computed before the first step of the others. Parameters with their state
 * lie in a row, which is cut into parts. The protected set has room for two:
 *
 *   part 0: all steps, in order --its images may leave--> part 1: all steps, in order --> ... --> the last part
 *
 * So a part is read once and written once. In the order of the steps alone each step would move what finds no room.
 * Images of a part are final after its last step: they are written and leave while the next part is computed. Steps are
 * counted with the last part: before that all counts are those of the full step.
 */
#include "tiering/api/stats.h"
#include "optim/state/param.h"
#include "optim/state/root.h"
#include "optim/redo/logged.h"

enum {
    PARTS_MAX = 256,    /* each reads all summaries */
    ROOM_SHARE_MIN = 4, /* with less of the protected set than that part most content has no room in any order */
};

/* Of a parameter and its state: its part of the row. One without state has none. */
static uint64_t row_bytes(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    return p->counted.param_bytes + p->counted.state_bytes;
}

/* Of these those of a whole range. */
static uint64_t range_bytes(const struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_layout *l = &p->cur.layout;
    struct ht_param_shape shape;

    if (!row_bytes(p) || ht_opt_state_shape(p, &shape))
        return 0;
    uint64_t bytes = shape.chunk_bytes;
    for (unsigned i = 0; i < l->count; i++)
        bytes += ht_opt_state_range_bytes(l->kind[i], l->form[i], shape.range_elements);
    return bytes;
}

/* Gives all parameters their place. Returns the bytes of the row. */
static uint64_t lay_out(struct ht_root *root, uint64_t *out_largest) HT_REQUIRES(HT_LOCK_OPTIM)
{
    uint64_t at = 0;

    *out_largest = 0;
    ht_list_for_each_entry(p, &root->params, struct ht_param, of_root) {
        p->redo_at = at;
        p->redo_place = 0;
        at += row_bytes(p);
        *out_largest = ht_max_u64(*out_largest, ht_min_u64(range_bytes(p), row_bytes(p)));
    }
    return at;
}

/* Its images go when others need their memory. Releases the lock in between. */
static void let_go(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    struct ht_store *s = p->o->store;
    struct ht_obj *obj[1 + HT_STATES_MAX] = {p->gone ? NULL : ht_obj_get(s, p->oid)};
    unsigned count = 1;

    for (unsigned i = 0; p->cur.exists && !p->gone && i < p->cur.layout.count; i++)
        obj[count++] = ht_obj_get(s, p->cur.oid[i]);
    unlock(p->o);
    for (unsigned i = 0; i < count; i++) {
        if (obj[i])
            ht_obj_unprotect(obj[i]);
        ht_obj_put(obj[i]);
    }
    lock(p->o);
}

static uint64_t room_now(struct ht_store *s, uint64_t *out_most)
{
    struct ht_store_stats st;

    ht_store_stats(s, &st);
    *out_most = st.dram_protectable_bytes;
    return st.dram_protectable_bytes - ht_min_u64(st.dram_protected_bytes, st.dram_protectable_bytes);
}

/* After an abort much of the content has images already, and is in its own way. */
struct ht_redo_parts ht_opt_parts_cut(struct ht_root *root)
{
    uint64_t largest, most, room = room_now(root->o->store, &most);
    struct ht_redo_parts parts = {.count = 1};

    lock(root->o);
    uint64_t bytes = lay_out(root, &largest);
    if (bytes > room) {
        ht_opt_each_param(root, let_go);
        unlock(root->o);
        room = room_now(root->o->store, &most);
        lock(root->o);
    }
    parts.bytes = ht_max_u64(ht_max_u64(room / 2, largest), ht_div_up(bytes, PARTS_MAX));
    if (bytes > room && room >= most / ROOM_SHARE_MIN)
        parts.count = ht_div_up(bytes, parts.bytes);
    root->redo.parts = parts;
    root->redo.part = 0;
    unlock(root->o);
    return parts;
}

struct ht_redo_place ht_opt_part_place(const struct ht_param *p)
{
    struct ht_redo_place place = {.at = p->redo_at, .range_bytes = range_bytes(p)};

    place.ranges = place.range_bytes ? ht_div_up(row_bytes(p), place.range_bytes) : 0;
    return place;
}

/* A range that is outside of its parameter lies in the last part: there it is found to be senseless. */
size_t ht_opt_part_of(const struct ht_redo_parts *parts, struct ht_redo_place place, uint32_t range)
{
    uint64_t part = (place.at + range * place.range_bytes) / parts->bytes;

    if (range >= place.ranges)
        part = parts->count;
    return (size_t)ht_min_u64(part, parts->count - 1);
}

static bool lies_in(const struct ht_param *p, size_t part) HT_REQUIRES(HT_LOCK_OPTIM)
{
    const struct ht_redo *redo = &p->root->redo;
    uint64_t begin = part * redo->parts.bytes, end = p->redo_at + row_bytes(p);

    return p->redo_at < begin + redo->parts.bytes && begin < end;
}

bool ht_opt_part_takes(const struct ht_param *p)
{
    const struct ht_redo *redo = &p->root->redo;

    return redo->part + 1 == redo->parts.count || lies_in(p, redo->part);
}

static void leave_part(struct ht_param *p) HT_REQUIRES(HT_LOCK_OPTIM)
{
    p->redo_place = 0;
    if (lies_in(p, p->root->redo.part))
        let_go(p);
}

void ht_opt_part_next(struct ht_root *root)
{
    lock(root->o);
    ht_opt_each_param(root, leave_part);
    root->redo.part++;
    unlock(root->o);
}
