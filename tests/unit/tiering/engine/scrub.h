/* SPDX-License-Identifier: Apache-2.0 */
/* scrub.h - damage on the fixture's device, and a run of scrub that finds it. */
#pragma once

#include "tests/unit/tiering/store/fixture.h"

enum { SMALL = HT_SMALL_CHUNK_BYTES, BIG = HT_CHUNK_BYTES, SCOPE = 77 };

static inline uint8_t *ram(void)
{
    return ht_dev_ram_data(dev);
}

/* Where these bytes are on the device. */
static inline uint64_t place_of(const uint8_t *p, size_t n)
{
    uint8_t *at = memmem(ram(), ht_dev_size(dev), p, n);

    ck_assert_ptr_nonnull(at);
    return (uint64_t)(at - ram());
}

static inline void damage(uint64_t place)
{
    ram()[place] ^= 0x10;
}

static inline struct ht_scrub_stats scrub(void)
{
    struct ht_scrub_stats st;

    ck_assert_int_eq(background_scrub(s), 0);
    ht_store_scrub_stats(s, &st);
    ck_assert_uint_eq(st.state, HT_SCRUB_COMPLETE);
    return st;
}

static inline void expect_found(uint64_t found, uint64_t repaired)
{
    struct ht_scrub_stats st = scrub();

    ck_assert_uint_eq(st.run_found, found);
    ck_assert_uint_eq(st.run_repaired, repaired);
}

/* An object of one chunk, stored and published. */
static inline struct ht_obj *stored(const uint8_t *p, size_t n, uint64_t scope)
{
    struct ht_obj *o = object(BIG, scope);

    put_synced(o, 0, p, n);
    return o;
}
