/* SPDX-License-Identifier: Apache-2.0 */
/* test_alloc.c - the allocator against its contract, and at random against a naive model. */
#include "tests/support/suite.h"
#include "tiering/space/alloc.h"

#include <sys/resource.h>

static struct ht_alloc *made;

static struct ht_alloc *new_alloc(unsigned count, const uint64_t blocks[])
{
    ck_assert_int_eq(ht_alloc_new(count, blocks, &made), 0);
    return made;
}

static void end(void)
{
    ht_alloc_free(made);
}

static int take(struct ht_alloc *a, uint32_t blocks, int hint, struct ht_extent out[HT_FRAGS_MAX])
{
    ck_assert_int_eq(ht_alloc_reserve(a, blocks), 0);
    return ht_alloc_take(a, blocks, (struct ht_alloc_hint){.device = hint}, out);
}

TEST(counts_follow_marks_and_releases)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){1000});
    struct ht_extent e = {.block = 200, .blocks = 700, .device = 0};

    ck_assert_uint_eq(ht_alloc_total(a), 1000);
    ck_assert_int_eq(ht_alloc_mark(a, &e), 0);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 300);
    ck_assert(!ht_alloc_is_free(a, &(struct ht_extent){199, 2, 0}));
    ck_assert(ht_alloc_is_free(a, &(struct ht_extent){0, 200, 0}));
    ck_assert(ht_alloc_is_free(a, &(struct ht_extent){900, 100, 0}));
    ht_alloc_release(a, &e);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 1000);
}

TEST(mark_refuses_what_is_taken_or_outside)
{
    struct ht_alloc *a = new_alloc(2, (uint64_t[]){1000, 0});
    static const struct ht_extent outside[] = {{1000, 1, 0}, {999, 2, 0}, {UINT64_MAX, 2, 0}, {0, 1, 1},
                                               {0, 1, 2},    {0, 0, 0},   {1, UINT32_MAX, 0}, {UINT64_MAX - 1, 1, 0}};

    for (size_t i = 0; i < HT_ARRAY_SIZE(outside); i++)
        ck_assert_int_eq(ht_alloc_mark(a, &outside[i]), -ERANGE);
    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){300, 1, 0}), 0);
    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){100, 500, 0}), -EEXIST);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 999);
}

TEST(reservations_bound_what_is_available)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){256});
    struct ht_extent out[HT_FRAGS_MAX];

    ck_assert_int_eq(ht_alloc_reserve(a, 200), 0);
    ck_assert_uint_eq(ht_alloc_available(a), 56);
    ck_assert_int_eq(ht_alloc_reserve(a, 57), -ENOSPC);
    ht_alloc_pending_free_add(a, &(struct ht_extent){.blocks = 10});
    ck_assert_int_eq(ht_alloc_reserve(a, 66), 0);
    ck_assert_uint_eq(ht_alloc_available(a), 0);
    ck_assert_int_eq(ht_alloc_take(a, 200, HT_ALLOC_HINT_NONE, out), 1);
    ck_assert_uint_eq(ht_alloc_reserved(a), 66);
    /* 56 are free, the other ten are on their way */
    ck_assert_int_eq(ht_alloc_take(a, 66, HT_ALLOC_HINT_NONE, out), -EAGAIN);
    ck_assert_uint_eq(ht_alloc_reserved(a), 66);
    ht_alloc_release(a, &(struct ht_extent){out[0].block, 10, 0});
    ht_alloc_pending_free_sub(a, &(struct ht_extent){.blocks = 10});
    ck_assert_int_gt(ht_alloc_take(a, 66, HT_ALLOC_HINT_NONE, out), 0);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 0);
}

TEST(what_is_undone_is_reserved_again)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){256});
    struct ht_extent out[HT_FRAGS_MAX];

    for (uint64_t block = 0; block < 256; block += 2)
        ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){block, 1, 0}), 0);
    int n = take(a, 100, 0, out);
    ck_assert_int_eq(n, 100);
    ck_assert_uint_eq(ht_alloc_reserved(a), 0);
    ht_alloc_untake(a, out, n);
    ck_assert_uint_eq(ht_alloc_reserved(a), 100);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 128);
    ck_assert_int_eq(ht_alloc_take(a, 100, HT_ALLOC_HINT_NONE, out), 100);
}

TEST(whole_chunks_are_whole_groups_and_small_ones_share)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){256 * 8});
    struct ht_extent big[HT_FRAGS_MAX], small[HT_FRAGS_MAX];

    ck_assert_int_eq(take(a, 16, -1, small), 1);
    uint64_t group = small[0].block / 256;
    for (int i = 0; i < 15; i++) {
        ck_assert_int_eq(take(a, 16, -1, small), 1);
        ck_assert_uint_eq(small[0].block / 256, group);
    }
    for (int i = 0; i < 7; i++) {
        ck_assert_int_eq(take(a, 256, -1, big), 1);
        ck_assert_uint_eq(big[0].block % 256, 0);
        ck_assert_uint_eq(big[0].blocks, 256);
    }
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 0);
}

TEST(fragments_serve_when_nothing_contiguous_is_left)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){1024});
    struct ht_extent out[HT_FRAGS_MAX];

    for (uint64_t b = 0; b < 1024; b += 2)
        ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){b, 1, 0}), 0);
    ck_assert_int_eq(take(a, 256, -1, out), 256);
    for (unsigned i = 0; i < 256; i++)
        ck_assert_uint_eq(out[i].blocks, 1);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 256);
}

TEST(long_pieces_are_preferred_to_short_ones)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){1024});
    struct ht_extent out[HT_FRAGS_MAX];

    /* 128 single holes in the first half, then two runs of 200 */
    for (uint64_t b = 0; b < 512; b += 2)
        ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){b, 1, 0}), 0);
    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){512, 28, 0}), 0);
    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){740, 60, 0}), 0);
    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){1000, 24, 0}), 0);
    ck_assert_int_le(take(a, 256, -1, out), 3);
}

TEST(devices_take_turns_and_hints_are_heard)
{
    struct ht_alloc *a = new_alloc(3, (uint64_t[]){2560, 5120, 300});
    struct ht_extent out[HT_FRAGS_MAX];
    static const uint32_t turns[] = {0, 1, 2, 1, 0, 1, 1, 0};

    /* by the share that is free: 300 blocks are as much of one as 2560 of the other, once */
    for (unsigned i = 0; i < HT_ARRAY_SIZE(turns); i++) {
        ck_assert_int_eq(take(a, 256, -1, out), 1);
        ck_assert_uint_eq(out[0].device, turns[i]);
    }
    ck_assert_int_eq(take(a, 256, 0, out), 1);
    ck_assert_uint_eq(out[0].device, 0);
    /* 44 blocks are left there: another device serves */
    ck_assert_int_eq(take(a, 256, 2, out), 1);
    ck_assert_uint_ne(out[0].device, 2);
    /* hints beyond the devices are no hints */
    ck_assert_int_eq(take(a, 1, 7, out), 1);
}

TEST(a_device_that_is_not_there_counts_nowhere)
{
    struct ht_alloc *a = new_alloc(2, (uint64_t[]){1000, 2000});
    struct ht_extent out[HT_FRAGS_MAX], there = {100, 50, 1};

    ht_alloc_set_offline(a, 1);
    ck_assert_uint_eq(ht_alloc_total(a), 1000);
    ck_assert_uint_eq(ht_alloc_available(a), 1000);
    ck_assert_int_eq(ht_alloc_mark(a, &there), 0);
    ck_assert_int_eq(ht_alloc_mark(a, &there), -EEXIST);
    ck_assert_uint_eq(ht_alloc_countable(a, &there), 0);
    ck_assert_int_eq(ht_alloc_reserve(a, 1001), -ENOSPC);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert_int_eq(take(a, 256, 1, out), 1);
        ck_assert_uint_eq(out[0].device, 0);
    }
    ht_alloc_release(a, &there);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 1000 - 3 * 256);
}

/* While new content takes more than all, ranges that are rewritten still move until they lie by shares. */
TEST(new_content_does_not_hide_where_rewritten_content_lies)
{
    enum { RANGES = 60 };
    struct ht_alloc *a = new_alloc(2, (uint64_t[]){256 * 4000, 256 * 4000});
    const uint32_t share[] = {HT_PLACE_WHOLE / 4, HT_PLACE_WHOLE - HT_PLACE_WHOLE / 4};
    struct ht_extent out[HT_FRAGS_MAX];
    int on[RANGES] = {0};
    unsigned first = 0, content[2] = {0};

    ht_alloc_set_shares(a, share);
    for (unsigned step = 0; step < 3; step++) {
        for (unsigned i = 0; i < RANGES; i++) {
            for (unsigned k = 0; k < 4; k++) {
                ck_assert_int_eq(take(a, 256, -1, out), 1);
                content[out[0].device]++;
            }
            on[i] = ht_alloc_assign(a, 256, (struct ht_alloc_hint){.device = on[i], .movable = true});
        }
    }
    for (unsigned i = 0; i < RANGES; i++)
        first += on[i] == 0;
    ck_assert_msg(first > RANGES / 4 - 6 && first < RANGES / 4 + 6, "%u ranges on the first", first);
    ck_assert_msg(content[0] * 3 == content[1], "%u and %u of new content", content[0], content[1]);
}

TEST(bad_places_are_kept_up_to_a_share)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){3200});
    struct ht_extent out[HT_FRAGS_MAX];
    struct ht_alloc_device d;

    ck_assert_int_eq(take(a, 60, -1, out), 1);
    ck_assert(ht_alloc_keep_bad(a, &out[0]));
    ck_assert_int_eq(take(a, 60, -1, out), 1);
    ck_assert(!ht_alloc_keep_bad(a, &out[0]));
    ht_alloc_device(a, 0, &d);
    ck_assert_uint_eq(d.bad_blocks, 60);
    ck_assert_uint_eq(d.free_blocks, 3200 - 120);
}

/* Small and whole requests pass it, and the counts of free and available blocks stay. */
TEST(a_closed_group_serves_no_request_that_another_can)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){256 * 4});
    struct ht_extent out[HT_FRAGS_MAX];

    ck_assert_int_eq(take(a, 16, -1, out), 1);
    uint64_t group = out[0].block / 256, free_blocks = ht_alloc_free_blocks(a);
    const struct ht_extent first = out[0];
    ht_alloc_close_group(a, 0, group);
    ck_assert(ht_alloc_is_closed_group(a, 0, group));
    ck_assert_uint_eq(ht_alloc_free_blocks(a), free_blocks);
    ck_assert_uint_eq(ht_alloc_available(a), free_blocks);
    ck_assert_uint_eq(ht_alloc_whole_blocks(a), 3 * 256);
    for (unsigned i = 0; i < 3; i++) { /* 16, 255 and 256 blocks */
        ck_assert_int_eq(take(a, i ? 254 + i : 16, -1, out), 1);
        ck_assert_uint_ne(out[0].block / 256, group);
        ck_assert_uint_ne((out[0].block + out[0].blocks - 1) / 256, group);
        ht_alloc_verify(a, 0);
    }
    ht_alloc_release(a, &first); /* it is empty now, and whole as soon as it is open */
    ht_alloc_verify(a, 0);
    uint64_t whole = ht_alloc_whole_blocks(a);
    ht_alloc_open_group(a, 0, group);
    ck_assert_uint_eq(ht_alloc_whole_blocks(a), whole + 256);
    ht_alloc_verify(a, 0);
}

/* A writer that needs the space gets it, in one run, and to the last block. */
TEST(a_closed_group_opens_for_a_request_that_needs_it)
{
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){256 * 2});
    struct ht_extent out[HT_FRAGS_MAX];

    ck_assert_int_eq(take(a, 16, -1, out), 1);
    uint64_t group = out[0].block / 256;
    ht_alloc_close_group(a, 0, group);
    ck_assert_int_eq(take(a, 200, -1, out), 1);
    ck_assert_uint_ne(out[0].block / 256, group);
    ck_assert(ht_alloc_is_closed_group(a, 0, group));
    ck_assert_int_eq(take(a, 200, -1, out), 1);
    ck_assert_uint_eq(out[0].block / 256, group);
    ck_assert(!ht_alloc_is_closed_group(a, 0, group));
    ht_alloc_close_group(a, 0, group);
    ck_assert_int_eq(ht_alloc_reserve(a, 20), 0); /* compaction takes pieces first */
    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){(1 - group) * 256 + 230, 1, 0}), 0);
    ck_assert_int_gt(ht_alloc_take(a, 20, (struct ht_alloc_hint){.device = 0, .compacts = true}, out), 0);
    ck_assert_uint_ne(out[0].block / 256, group);
    ck_assert(ht_alloc_is_closed_group(a, 0, group));
    ck_assert_int_gt(take(a, (unsigned)ht_alloc_free_blocks(a), -1, out), 0);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 0);
    ht_alloc_verify(a, 0);
}

/* Writers of an almost full device keep its last whole groups. */
TEST(a_discard_takes_no_whole_group_of_few_free_blocks)
{
    struct ht_alloc_freed_walk walk = {.all = true};
    struct ht_alloc *a = new_alloc(1, (uint64_t[]){256 * 8});
    struct ht_extent out[64];

    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){0, 256 * 4 + 1, 0}), 0);
    ck_assert_uint_eq(ht_alloc_take_freed(a, &walk, out, 64), 1);
    ck_assert_uint_eq(out[0].block, 256 * 4 + 1);
    ck_assert_uint_eq(out[0].blocks, 255);
    ck_assert_uint_eq(ht_alloc_whole_blocks(a), 3 * 256);
    ht_alloc_put_freed(a, out, 1);
    ck_assert_uint_eq(ht_alloc_take_freed(a, &walk, out, 64), 0);
    ck_assert(walk.ended);
    ht_alloc_release(a, &(struct ht_extent){256 * 4, 1, 0});
    walk = (struct ht_alloc_freed_walk){.all = true};
    uint64_t blocks = 0;
    for (unsigned n; (n = ht_alloc_take_freed(a, &walk, out, 64)) || !walk.ended; ht_alloc_put_freed(a, out, n))
        for (unsigned i = 0; i < n; i++)
            blocks += out[i].blocks;
    ck_assert_uint_eq(blocks, 256 * 4);
}

TEST(requests_span_devices_when_none_has_enough)
{
    struct ht_alloc *a = new_alloc(3, (uint64_t[]){100, 90, 80});
    struct ht_extent out[HT_FRAGS_MAX];

    ck_assert_int_eq(take(a, 256, -1, out), 3);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), 14);
}

/* ------------------------------------------------------- random against a naive model */

#define MODEL_DEVICES 3
#define MODEL_BLOCKS 3000
#define MODEL_LIVE_MAX 4096

struct model {
    uint8_t taken[MODEL_DEVICES][MODEL_BLOCKS];
    uint64_t blocks[MODEL_DEVICES], free;
    struct ht_extent live[MODEL_LIVE_MAX];
    size_t live_count;
};

static void model_set(struct model *m, const struct ht_extent *e, bool taken)
{
    ck_assert_uint_lt(e->device, MODEL_DEVICES);
    ck_assert_uint_le(e->block + e->blocks, m->blocks[e->device]);
    bool as_expected = true;
    for (uint64_t b = e->block; b < e->block + e->blocks; b++) {
        as_expected = as_expected && m->taken[e->device][b] == !taken;
        m->taken[e->device][b] = taken;
    }
    ck_assert(as_expected);
    m->free = taken ? m->free - e->blocks : m->free + e->blocks;
}

static void model_release(struct model *m, struct ht_alloc *a)
{
    size_t i = (size_t)rand() % m->live_count;
    struct ht_extent e = m->live[i], part = e;

    /* sometimes only the tail */
    if (e.blocks > 1 && rand() % 3 == 0) {
        uint32_t keep = 1 + (uint32_t)rand() % (e.blocks - 1);
        part.block += keep;
        part.blocks -= keep;
        m->live[i].blocks = keep;
    } else {
        m->live[i] = m->live[--m->live_count];
    }
    model_set(m, &part, false);
    ht_alloc_release(a, &part);
}

static void model_take(struct model *m, struct ht_alloc *a)
{
    static const uint32_t sizes[] = {1, 3, 16, 17, 100, 255, 256};
    struct ht_extent out[HT_FRAGS_MAX];
    uint32_t want = sizes[(size_t)rand() % HT_ARRAY_SIZE(sizes)], got = 0;

    if (m->live_count + want > MODEL_LIVE_MAX)
        return;
    if (ht_alloc_reserve(a, want)) {
        ck_assert_uint_lt(m->free, want);
        return;
    }
    int n = ht_alloc_take(a, want, (struct ht_alloc_hint){.device = rand() % 5 - 1}, out);
    ck_assert_int_gt(n, 0);
    for (int i = 0; i < n; i++) {
        model_set(m, &out[i], true);
        m->live[m->live_count++] = out[i];
        got += out[i].blocks;
    }
    ck_assert_uint_eq(got, want);
}

static void model_close(const struct model *m, struct ht_alloc *a)
{
    unsigned device = (unsigned)rand() % MODEL_DEVICES;
    uint64_t groups = m->blocks[device] / HT_GROUP_BLOCKS, group = groups ? (uint64_t)rand() % groups : 0;

    if (groups && rand() % 2)
        ht_alloc_close_group(a, device, group);
    else if (groups)
        ht_alloc_open_group(a, device, group);
}

static bool model_is_sparse(const struct model *m, unsigned device, uint64_t group)
{
    uint64_t first = group * HT_GROUP_BLOCKS;
    unsigned taken = 0;

    for (uint64_t b = first; b < first + HT_GROUP_BLOCKS; b++)
        taken += m->taken[device][b];
    return taken && taken <= HT_SPARSE_TAKEN_MAX;
}

static void model_expect_sparse(const struct model *m, const struct ht_alloc *a)
{
    uint64_t sparse = 0;

    for (unsigned d = 0; d < MODEL_DEVICES; d++) {
        uint64_t next = ht_alloc_next_sparse(a, d, 0);
        for (uint64_t g = 0; g < m->blocks[d] / HT_GROUP_BLOCKS; g++) {
            if (!model_is_sparse(m, d, g))
                continue;
            ck_assert_uint_eq(next, g);
            next = ht_alloc_next_sparse(a, d, g + 1);
            sparse++;
        }
        ck_assert_uint_eq(next, HT_NO_GROUP);
    }
    ck_assert_uint_eq(ht_alloc_sparse_groups(a), sparse);
}

TEST_LOOP(random_operations_agree_with_a_naive_model, 12)
{
    static struct model m;

    memset(&m, 0, sizeof(m));
    srand((unsigned)_i);
    for (unsigned d = 0; d < MODEL_DEVICES; d++) {
        m.blocks[d] = 1 + (uint64_t)rand() % MODEL_BLOCKS;
        m.free += m.blocks[d];
    }
    struct ht_alloc *a = new_alloc(MODEL_DEVICES, m.blocks);

    for (int step = 0; step < 5000; step++) {
        /* drift between full and empty */
        bool fill = rand() % 100 < (step / 500 % 2 ? 70 : 30);
        if (fill || m.live_count == 0)
            model_take(&m, a);
        else
            model_release(&m, a);
        if (_i % 2)
            model_close(&m, a);
        ck_assert_uint_eq(ht_alloc_free_blocks(a), m.free);
        ck_assert_uint_eq(ht_alloc_reserved(a), 0);
        struct ht_extent probe = {(uint64_t)rand() % MODEL_BLOCKS, 1, (uint32_t)rand() % MODEL_DEVICES};
        bool is_free = probe.block < m.blocks[probe.device] && !m.taken[probe.device][probe.block];
        ck_assert_int_eq(ht_alloc_is_free(a, &probe), is_free);
        ht_alloc_verify(a, 0);
        if (step % 100 == 0)
            model_expect_sparse(&m, a);
    }
}

static long peak_kib(void)
{
    struct rusage usage;

    ck_assert_int_eq(getrusage(RUSAGE_SELF, &usage), 0);
    return usage.ru_maxrss;
}

/* The size of an absent device in a superblock costs nothing, nor does a large empty device. */
TEST(memory_follows_what_is_taken_not_the_size_of_a_device)
{
    enum { ALLOWED_KIB = 16 << 10 };
    const uint64_t blocks = (64ull << 40) / HT_BLOCK_BYTES; /* 64 TiB */
    struct ht_extent out[HT_FRAGS_MAX];
    long before = peak_kib();
    struct ht_alloc *a = new_alloc(2, (uint64_t[]){blocks + 100, blocks});

    ht_alloc_set_offline(a, 1);
    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){blocks - 5, 105, 0}), 0);
    ck_assert_int_eq(ht_alloc_mark(a, &(struct ht_extent){blocks - 5, 5, 1}), 0);
    ck_assert_uint_eq(ht_alloc_free_blocks(a), blocks - 5);
    ck_assert_int_eq(take(a, 256, 0, out), 1);
    ck_assert_int_eq(take(a, 7, 0, out), 1);
#ifndef __SANITIZE_ADDRESS__ /* ASan keeps a map of allocated memory */
    ck_assert_int_le(peak_kib() - before, ALLOWED_KIB);
#else
    (void)before;
#endif
}

RUN_TESTS("alloc", .teardown = end, .timeout_s = 120)
