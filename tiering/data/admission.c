/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/data/admission.h"
#include "tiering/object/context.h"

/* The device of a write is known when it gets its place: the permit moves there. */
static bool is_for(const struct ht_permit *p, const struct ht_permit_request *r)
{
    bool there = p->dev == r->dev || (p->dev && r->direction == HT_DIRECTION_WRITE);

    return there && p->direction == r->direction && p->bytes >= r->bytes;
}

enum ht_admission ht_admit(struct ht_store *s, struct ht_permit *spare, const struct ht_permit_request *r, bool holds)
{
    if (!r->dev || ht_io_class() == HT_IO_URGENT || is_for(spare, r))
        return HT_ADMITTED;
    ht_permit_put(spare);
    if (ht_permit_try(&s->gate, r, spare))
        return HT_ADMITTED;
    if (holds)
        return HT_ADMISSION_LATER;
    ht_store_unlock(s);
    ht_permit_get(&s->gate, r, spare);
    ht_store_lock(s);
    return HT_ADMISSION_AGAIN;
}

struct ht_permit_request ht_admission_of_ref(const struct ht_store *s, const struct ht_ref *ref)
{
    if (!ref || !ht_ref_holds(ref))
        return (struct ht_permit_request){.dev = NULL};
    return (struct ht_permit_request){
        .dev = ht_ref_dev(s, ref),
        .direction = HT_DIRECTION_READ,
        .bytes = ht_ref_blocks(ref) * HT_BLOCK_BYTES,
    };
}

struct ht_permit ht_admission_take(struct ht_permit *spare)
{
    struct ht_permit p = *spare;

    spare->dev = NULL;
    return p;
}
