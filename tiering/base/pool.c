/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/pool.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EACH_ALONE true
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define EACH_ALONE true
#endif
#ifndef EACH_ALONE
#define EACH_ALONE false
#endif

/* Blocks are aligned, so that a piece finds its own; the head of malloc's fits between two blocks. */
enum { BLOCK_ALIGN = 16 << 10, BLOCK_BYTES = BLOCK_ALIGN - 2 * sizeof(size_t) };

struct piece {
    struct piece *next;
};

struct block {
    struct ht_list link;  /* in the pool's list of open blocks, or alone: it is full */
    struct piece *free;   /* that were in use before */
    uint32_t used, fresh; /* pieces in use; the first byte that was never part of one */
    char data[];
};

static struct block *block_of(void *piece)
{
    return (struct block *)((uintptr_t)piece & ~(uintptr_t)(BLOCK_ALIGN - 1));
}

void ht_pool_init(struct ht_pool *p, size_t piece_bytes)
{
    assert(piece_bytes > 0 && piece_bytes <= HT_POOL_PIECE_BYTES_MAX);
    *p = (struct ht_pool){.piece_bytes = (uint32_t)ht_round_up(piece_bytes, 8)};
    ht_list_init(&p->open);
}

static bool has_fresh(const struct ht_pool *p, const struct block *b)
{
    return offsetof(struct block, data) + b->fresh + p->piece_bytes <= BLOCK_BYTES;
}

static struct block *open_block(struct ht_pool *p)
{
    void *memory;

    if (!ht_list_empty(&p->open))
        return ht_list_entry(p->open.next, struct block, link);
    if (posix_memalign(&memory, BLOCK_ALIGN, BLOCK_BYTES))
        return NULL;
    struct block *b = memory;
    b->free = NULL;
    b->used = b->fresh = 0;
    ht_list_add_tail(&p->open, &b->link);
    p->idle++;
    return b;
}

void *ht_pool_get(struct ht_pool *p)
{
    if (EACH_ALONE)
        return calloc(1, p->piece_bytes);
    struct block *b = open_block(p);
    if (!b)
        return NULL;
    void *piece = b->free;
    if (piece) {
        b->free = b->free->next;
    } else {
        piece = b->data + b->fresh;
        b->fresh += p->piece_bytes;
    }
    p->idle -= b->used++ == 0;
    if (!b->free && !has_fresh(p, b))
        ht_list_del(&b->link);
    return memset(piece, 0, p->piece_bytes);
}

static struct block *put_in_block(struct ht_pool *p, struct piece *piece)
{
    struct block *b = block_of(piece);

    assert(b->used > 0);
    if (!b->free && !has_fresh(p, b))
        ht_list_add_tail(&p->open, &b->link);
    piece->next = b->free;
    b->free = piece;
    if (--b->used > 0)
        return NULL;
    if (p->idle > 0) {
        ht_list_del(&b->link);
        return b;
    }
    p->idle++;
    return NULL;
}

void *ht_pool_put(struct ht_pool *p, void *piece)
{
    return EACH_ALONE || !piece ? piece : put_in_block(p, piece);
}

bool ht_pool_is_apart(void)
{
    return EACH_ALONE;
}

void ht_pool_destroy(struct ht_pool *p)
{
    ht_list_for_each_entry_safe(b, &p->open, struct block, link) {
        assert(b->used == 0);
        free(b);
    }
    ht_list_init(&p->open);
    p->idle = 0;
}
