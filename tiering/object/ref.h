/* SPDX-License-Identifier: Apache-2.0 */
/* ref.h - references: the place of a stored chunk on the devices. */
#pragma once

#include "tiering/space/alloc.h"
#include <hitrain/format.h>

struct ht_store;

/* Log bytes of objects and chunks. */
enum {
    HT_OBJECT_RECORD_BYTES = 8 + 8 + 4 + 4 + 8 + 8,
    HT_OBJECT_DEL_RECORD_BYTES = 8 + 8,
    HT_CHUNK_RECORD_BYTES = 8 + 8 + 8 + 4 + 1 + 1 + 2 + 4 + 4 + 8,
    HT_CHUNK_DEL_RECORD_BYTES = 8 + 8 + 8 + 8,
    HT_FRAG_RECORD_BYTES = 12,
    HT_CHUNK_LOG_BYTES = HT_CHUNK_RECORD_BYTES + HT_FRAG_RECORD_BYTES, /* of content in one piece */
};

/*
 * Where stored bytes are. One extent is kept inline; more hang off a pointer. Aligned to 4, so
 * that a chunk is no longer than its fields.
 */
struct ht_ref {
    uint64_t place;        /* 48 bits: first block, or a pointer to extents; 8: device; 8: extents - 1 */
    uint32_t stored : 24;  /* bytes on the device, covered by the checksum */
    uint32_t clock : 8;    /* low bits of the flush clock when its write had ended; 0 from the log: flush.c */
    uint32_t visible : 23; /* how many of these count; the rest of the chunk is zeros */
    uint32_t shared : 1;   /* has or had other owners: owners.c knows */
    uint32_t codec : 7;
    uint32_t kept_raw : 1; /* compression was tried, and saves too little; not in the log */
    uint64_t checksum;
} __attribute__((packed, aligned(4)));
static_assert(sizeof(struct ht_ref) == 24, "memory per chunk is bounded");
#define HT_VISIBLE_MASK 0x7fffffu
static_assert(HT_CHUNK_BYTES <= HT_VISIBLE_MASK, "visible counts a whole chunk");

/* Whole blocks that so many bytes take. */
static inline uint32_t ht_blocks(uint32_t bytes)
{
    return bytes / HT_BLOCK_BYTES + (bytes % HT_BLOCK_BYTES != 0);
}
static inline unsigned ht_ref_extents(const struct ht_ref *r)
{
    return (unsigned)(r->place >> 56) + 1;
}
/* Is any content on a device? Not if the reference is empty, or the content lost. */
static inline bool ht_ref_holds(const struct ht_ref *r)
{
    return r->stored;
}
/*
 * Does the content lie in the vault (HT_VAULT_*_BITS in format.h)? Such a reference has one extent and the bit shared:
 * the vault is the other owner, and never ends. So its space is in no table, and comes from no allocator.
 */
static inline bool ht_ref_is_cold(const struct ht_ref *r)
{
    return r->stored && r->place >> 48 == HT_DEVICE_VAULT;
}
/* Can these blocks be content of a segment? */
static inline bool ht_vault_place_valid(uint64_t block, uint32_t blocks)
{
    uint32_t unit = block & (HT_VAULT_UNITS - 1);

    return block < 1ull << 48 && unit && blocks && unit + blocks <= HT_VAULT_UNITS;
}
/* Bytes that an image needs for what is stored, and for what counts. */
static inline uint32_t ht_ref_image_bytes(const struct ht_ref *r)
{
    return r->stored > r->visible ? r->stored : r->visible;
}
/* Nothing is stored, and the former content is lost: reading it is -EIO, writing the whole chunk heals it. */
static inline bool ht_ref_lost(const struct ht_ref *r)
{
    return r->codec == HT_CODEC_LOST;
}
/* Blocks that come free with it: none on devices that are missing. */
uint32_t ht_ref_countable(const struct ht_store *s, const struct ht_ref *r) HT_REQUIRES(HT_LOCK_STORE);
/* -ENOMEM only when n > 1. */
int ht_ref_set(struct ht_ref *r, const struct ht_extent *e, unsigned n) HT_MUST_CHECK;
/* A block of a device, or a group of blocks, as one number. */
static inline uint64_t ht_place(unsigned device, uint64_t number)
{
    return (uint64_t)device << 48 | number;
}
/* Of the first block: all owners of the same bytes have the same one. */
uint64_t ht_ref_place(const struct ht_ref *r);
/* i-th extent. */
struct ht_extent ht_ref_extent(const struct ht_ref *r, unsigned i);
/*
 * For who uses a device as an index or a bit: the devices of all extents, as bits. And that of the first extent; -1: it
 * has none. A reference that holds nothing, or lies in the vault, has no devices.
 */
uint32_t ht_ref_devices(const struct ht_ref *r);
int ht_ref_home(const struct ht_ref *r);
/* Another reference to the same, with an array of its own; it is no owner yet. */
int ht_ref_copy(struct ht_ref *out, const struct ht_ref *r) HT_MUST_CHECK;
bool ht_ref_same_place(const struct ht_ref *a, const struct ht_ref *b);
void ht_ref_forget(struct ht_ref *r); /* frees a hung-off array */
uint64_t ht_refs_hung_bytes(void);    /* heap of all of these, in the process */
static inline uint32_t ht_ref_blocks(const struct ht_ref *r)
{
    return ht_blocks(r->stored);
}
/* Bytes of its record beyond the one extent that every chunk reserves. */
uint32_t ht_ref_extra_bytes(const struct ht_ref *r);
