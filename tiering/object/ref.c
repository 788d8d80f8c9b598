/* SPDX-License-Identifier: Apache-2.0 */
/* ref.c - references to stored chunks. */

#include "tiering/object/ref.h"
#include "tiering/object/context.h"

/* Bytes of arrays of extents of all references in the process. */
static _Atomic uint64_t hung_bytes;

uint64_t ht_refs_hung_bytes(void)
{
    return hung_bytes;
}

#define PLACE_MASK ((1ull << 48) - 1)

int ht_ref_set(struct ht_ref *r, const struct ht_extent *e, unsigned n)
{
    assert(n >= 1 && n <= HT_FRAGS_MAX);
    if (n == 1) {
        r->place = ht_place(e->device, e->block);
        return 0;
    }
    struct ht_extent *copy = malloc(n * sizeof(*copy));
    if (!copy)
        return -ENOMEM;
    hung_bytes += n * sizeof(*copy);
    memcpy(copy, e, n * sizeof(*copy));
    assert(((uint64_t)(uintptr_t)copy & ~PLACE_MASK) == 0);
    r->place = (uint64_t)(uintptr_t)copy | (uint64_t)(n - 1) << 56;
    return 0;
}

static const struct ht_extent *hung(const struct ht_ref *r)
{
    return (const struct ht_extent *)(uintptr_t)(r->place & PLACE_MASK);
}

struct ht_extent ht_ref_extent(const struct ht_ref *r, unsigned i)
{
    if (ht_ref_extents(r) > 1)
        return hung(r)[i];
    return (struct ht_extent){
        .block = r->place & PLACE_MASK,
        .blocks = ht_ref_blocks(r),
        .device = (uint32_t)(r->place >> 48) & 0xff,
    };
}

uint64_t ht_ref_place(const struct ht_ref *r)
{
    struct ht_extent first = ht_ref_extent(r, 0);

    return ht_place(first.device, first.block);
}

void ht_ref_forget(struct ht_ref *r)
{
    if (ht_ref_extents(r) > 1) {
        hung_bytes -= ht_ref_extents(r) * sizeof(struct ht_extent);
        free((void *)(uintptr_t)(r->place & PLACE_MASK));
    }
    memset(r, 0, sizeof(*r));
}

int ht_ref_copy(struct ht_ref *out, const struct ht_ref *r)
{
    struct ht_ref copy = *r;
    unsigned n = ht_ref_extents(r);
    int rc = n > 1 ? ht_ref_set(&copy, hung(r), n) : 0;

    if (!rc)
        *out = copy;
    return rc;
}

bool ht_ref_same_place(const struct ht_ref *a, const struct ht_ref *b)
{
    unsigned n = ht_ref_extents(a);

    if (n != ht_ref_extents(b) || a->stored != b->stored || a->codec != b->codec || a->checksum != b->checksum)
        return false;
    for (unsigned i = 0; i < n; i++) {
        struct ht_extent x = ht_ref_extent(a, i), y = ht_ref_extent(b, i);
        if (x.block != y.block || x.blocks != y.blocks || x.device != y.device)
            return false;
    }
    return true;
}

uint32_t ht_ref_devices(const struct ht_ref *r)
{
    uint32_t devices = 0;

    for (unsigned i = 0; ht_ref_holds(r) && i < ht_ref_extents(r); i++) {
        unsigned device = ht_ref_extent(r, i).device;
        devices |= device < HT_DEVICES_MAX ? 1u << device : 0;
    }
    return devices;
}

int ht_ref_home(const struct ht_ref *r)
{
    unsigned device = ht_ref_holds(r) ? ht_ref_extent(r, 0).device : HT_DEVICES_MAX;

    return device < HT_DEVICES_MAX ? (int)device : -1;
}

uint32_t ht_ref_extra_bytes(const struct ht_ref *r)
{
    return (ht_ref_extents(r) - 1) * HT_FRAG_RECORD_BYTES;
}

uint32_t ht_ref_countable(const struct ht_store *s, const struct ht_ref *r)
{
    uint32_t blocks = 0;

    for (unsigned i = 0; i < ht_ref_extents(r); i++) {
        struct ht_extent e = ht_ref_extent(r, i);
        blocks += ht_alloc_countable(s->alloc, &e);
    }
    return blocks;
}
