/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of one size. */

#include "tests/support/suite.h"
#include "tiering/base/pool.h"

enum { COUNT = 2000 };

static void fill(unsigned char *piece, size_t n, unsigned i)
{
    size_t wrong = 0;

    for (size_t k = 0; k < n; k++) {
        wrong += piece[k] != 0;
        piece[k] = (unsigned char)(i + k);
    }
    ck_assert_uint_eq(wrong, 0);
}

static void empty(unsigned char *piece, size_t n, unsigned i)
{
    size_t wrong = 0;

    for (size_t k = 0; k < n; k++)
        wrong += piece[k] != (unsigned char)(i + k);
    ck_assert_uint_eq(wrong, 0);
}

/* Pieces may return in any order. They hold zeros, are aligned, and never overlap. */
static void use(size_t bytes)
{
    static unsigned char *piece[COUNT];
    struct ht_pool p;

    ht_pool_init(&p, bytes);
    for (unsigned round = 0; round < 3; round++) {
        for (unsigned i = 0; i < COUNT; i++) {
            if (piece[i])
                continue;
            ck_assert_ptr_nonnull(piece[i] = ht_pool_get(&p));
            ck_assert_uint_eq((uintptr_t)piece[i] % 8, 0);
            fill(piece[i], bytes, i);
        }
        for (unsigned i = 0; i < COUNT; i++) {
            unsigned k = (unsigned)(i * 1103ull % COUNT);
            if (round < 2 && k % (round + 2) == 0)
                continue;
            empty(piece[k], bytes, k);
            free(ht_pool_put(&p, piece[k]));
            piece[k] = NULL;
        }
    }
    ck_assert_uint_le(p.idle, 1);
    free(ht_pool_put(&p, NULL));
    ht_pool_destroy(&p);
}

TEST(pieces_are_apart_and_zeros)
{
    use(1);
    use(8);
    use(61);
    use(192);
    use(HT_POOL_PIECE_BYTES_MAX);
}

TEST(what_is_put_is_used_again)
{
    struct ht_pool p;
    void *kept, *piece;

    ht_pool_init(&p, 104);
    ck_assert_ptr_nonnull(kept = ht_pool_get(&p));
    for (unsigned i = 0; i < COUNT; i++) {
        ck_assert_ptr_nonnull(piece = ht_pool_get(&p));
        free(ht_pool_put(&p, piece));
    }
    ck_assert_uint_eq(p.idle, 0);
    free(ht_pool_put(&p, kept));
    ht_pool_destroy(&p);
}

RUN_TESTS("pool")
