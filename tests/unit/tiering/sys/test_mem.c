/* SPDX-License-Identifier: Apache-2.0 */
/* Pinned memory is aligned, zeroed, populated, and given back. */
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include "tests/support/group.h"
#include "tests/support/memory.h"
#include "tests/support/suite.h"
#include "tiering/sys/mem.h"

TEST(memory_is_aligned_populated_and_given_back)
{
    struct ht_pinned m;

    ck_assert_int_eq(ht_pinned_alloc(&m, "test", 5 * HT_MIB, NULL), 0);
    ck_assert_uint_eq(m.bytes, 6 * HT_MIB);
    ck_assert_uint_eq((uintptr_t)m.base % (2 * HT_MIB), 0);
    uint8_t *p = m.base;
    for (size_t i = 0; i < m.bytes; i += 512)
        ck_assert_uint_eq(p[i], 0);
    p[m.bytes - 1] = 0xa5;
    ht_pinned_free(&m);
    ck_assert_ptr_null(m.base);
    ht_pinned_free(&m); /* nothing left to free */
}

TEST(memory_comes_from_a_node)
{
    struct ht_nodes nodes = {.count = 0};
    struct ht_pinned m;

    ht_nodes_add(&nodes, 0, 1);
    ck_assert_int_eq(ht_pinned_alloc(&m, "test", 4 * HT_MIB, &nodes), 0);
    ck_assert_uint_eq(ht_pinned_parts(&m), 1);
    memset(m.base, 1, m.bytes);
    ck_assert_uint_eq(ht_pinned_away_bytes(&m, 0), 0);
    nodes.node[0] = 7; /* as if the memory had been requested there */
    ck_assert_uint_eq(ht_pinned_away_bytes(&m, 0), 4 * HT_MIB);
    ht_pinned_free(&m);
}

TEST(memory_is_divided_in_proportion)
{
    /* A list with this machine's first node at every place: the division of memory does not check numbers. */
    struct ht_nodes nodes = {.count = 2, .node = {0, 0}, .weight = {3, 1}};
    struct ht_pinned m;

    ck_assert_int_eq(ht_pinned_alloc(&m, "test", 20 * HT_MIB, &nodes), 0);
    ck_assert_uint_eq(ht_pinned_parts(&m), 2);
    ck_assert_uint_eq(ht_pinned_part_bytes(&m, 0), 14 * HT_MIB); /* whole huge pages */
    ck_assert_uint_eq(ht_pinned_part_bytes(&m, 1), 6 * HT_MIB);
    uint8_t *p = m.base;
    ck_assert_uint_eq(ht_pinned_part_of(&m, p), 0);
    ck_assert_uint_eq(ht_pinned_part_of(&m, p + 14 * HT_MIB - 1), 0);
    ck_assert_uint_eq(ht_pinned_part_of(&m, p + 14 * HT_MIB), 1);
    ck_assert_uint_eq(ht_pinned_part_of(&m, p + 20 * HT_MIB - 1), 1);
    ht_pinned_free(&m);
}

TEST(a_node_that_is_not_there_costs_nothing)
{
    struct ht_nodes nodes = {.count = 0};
    struct ht_pinned m;

    ck_assert(!ht_node_exists(999));
    ck_assert(!ht_node_exists(HT_NUMA_OFF));
    ht_nodes_add(&nodes, 999, 1);
    ck_assert_int_eq(ht_pinned_alloc(&m, "test", HT_MIB, &nodes), 0);
    memset(m.base, 1, m.bytes);
    ht_pinned_free(&m);
    ck_assert(!ht_nodes_run_on(&nodes, HT_NUMA_INDEX_ANY));
    ck_assert_int_eq(ht_pinned_alloc(&m, "test", 0, NULL), -EINVAL);
    ck_assert_int_eq(ht_pinned_alloc(&m, "test", SIZE_MAX, NULL), -EINVAL);
}

TEST(turns_are_taken_in_proportion)
{
    struct ht_nodes nodes = {.count = 0};
    int64_t credit[HT_NODES_MAX] = {0};
    unsigned turns[2] = {0};

    ck_assert_int_eq(ht_nodes_turn(&nodes, credit), HT_NUMA_INDEX_ANY);
    ht_nodes_add(&nodes, 4, 1);
    ht_nodes_add(&nodes, HT_NUMA_OFF, 9);
    ht_nodes_add(&nodes, 2, 1);
    ht_nodes_add(&nodes, 4, 2);
    ck_assert_uint_eq(nodes.count, 2);
    ck_assert_int_eq(ht_nodes_find(&nodes, 2), 1);
    ck_assert_int_eq(ht_nodes_find(&nodes, 3), HT_NUMA_INDEX_ANY);
    for (unsigned i = 0; i < 40; i++) {
        turns[ht_nodes_turn(&nodes, credit)]++;
        ck_assert_uint_le(turns[1], i / 4 + 1); /* evenly, not in one go */
    }
    ck_assert_uint_eq(turns[0], 30);
    ck_assert_uint_eq(turns[1], 10);
}

TEST(a_thread_stays_within_the_processors_it_was_given)
{
    struct ht_nodes nodes = {.count = 0};
    cpu_set_t given, one, now;

    ht_nodes_add(&nodes, 0, 1);
    if (!ht_node_exists(0)) {
        printf("skipped: this kernel has no NUMA\n");
        return;
    }
    ck_assert_int_eq(sched_getaffinity(0, sizeof(given), &given), 0);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && !CPU_COUNT(&one); i++)
        if (CPU_ISSET(i, &given))
            CPU_SET(i, &one);
    ck_assert_int_eq(sched_setaffinity(0, sizeof(one), &one), 0);
    ht_nodes_run_on(&nodes, 0); /* does nothing where this processor belongs to another node */
    ck_assert_int_eq(sched_getaffinity(0, sizeof(now), &now), 0);
    ck_assert(CPU_EQUAL(&now, &one));
    ck_assert_int_eq(sched_setaffinity(0, sizeof(given), &given), 0);
}

TEST(a_lock_limit_costs_the_lock_only)
{
    struct rlimit none = {0, 0};
    struct ht_pinned m;

    /* Root is not bound by the limit. */
    ck_assert_int_eq(setrlimit(RLIMIT_MEMLOCK, &none), 0);
    if (geteuid() == 0)
        ck_assert_int_eq(seteuid(65534), 0);
    bool limited = mlock(&none, sizeof(none)) != 0; /* sanitizers make mlock a success that does nothing */
    ck_assert_int_eq(ht_pinned_alloc(&m, "test", HT_MIB, NULL), 0);
    ck_assert(!limited || !m.locked);
    memset(m.base, 1, m.bytes);
    ht_pinned_free(&m);
    if (geteuid() != getuid())
        ck_assert_int_eq(seteuid(getuid()), 0);
    prctl(PR_SET_DUMPABLE, 1); /* for the leak check at exit, which traces */
}

TEST(available_memory_is_some_and_not_more_than_there_is)
{
    uint64_t all = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);

    ck_assert_uint_gt(ht_mem_available(), HT_MIB);
    ck_assert_uint_le(ht_mem_available(), all);
}

TEST(a_cgroup_limit_caps_available_memory)
{
    struct group g;

    if (!group_enter("memory", "memory.limit_in_bytes", "67108864", "memory.max", "67108864", &g))
        return;
    uint64_t available = ht_mem_available();
    group_leave(&g);
    ck_assert_uint_le(available, 64 * HT_MIB);
    ck_assert_uint_gt(available, 32 * HT_MIB);
}

static _Atomic unsigned reported;

static void report(void *ctx)
{
    const struct ht_pinned *m = ctx;

    ck_assert_ptr_nonnull(m->base);
    reported++;
}

TEST(who_asks_is_told_once_when_all_is_populated)
{
    struct ht_pinned m;

    ck_assert_int_eq(ht_pinned_alloc(&m, "test", 32 * HT_MIB, NULL), 0); /* it comes when it is touched */
    ht_pinned_when_populated(&m, report, &m);
    ck_assert_uint_eq(reported, 0);
    uint64_t first = ht_pinned_huge_bytes(&m);
    ck_assert(first == 0 || first == 2 * HT_MIB);
    ht_pinned_free(&m);
    ck_assert_int_eq(ht_pinned_alloc(&m, "test", 34 * HT_MIB, NULL), 0);
    ht_pinned_when_populated(&m, report, &m);
    ck_assert_uint_eq(reported, 1);
    ck_assert(!first == !ht_pinned_huge_bytes(&m));
    ht_pinned_free(&m);
    ck_assert_int_eq(ht_pinned_alloc(&m, "test", 80 * HT_MIB, NULL), 0);
    ht_pinned_when_populated(&m, report, &m);
    while (reported < 2)
        sched_yield();
    ht_pinned_stop_populating(&m);
    ht_pinned_free(&m);
    ck_assert_uint_eq(reported, 2);
    /* The result was known before, or reported before: never later. */
    ck_assert_int_eq(ht_pinned_alloc(&m, "test", 80 * HT_MIB, NULL), 0);
    ht_pinned_when_populated(&m, report, &m);
    ht_pinned_stop_populating(&m);
    ck_assert_uint_le(reported, 3);
    ht_pinned_free(&m);
}

TEST(memory_that_is_kept_is_given_again_as_it_is)
{
    struct ht_pinned a, b;

    memory_keep(true);
    ck_assert_int_eq(ht_pinned_alloc(&a, "hitrain-test", 2 * HT_MIB, NULL), 0);
    char *base = a.base;
    base[7] = 'x';
    ht_pinned_free(&a);
    ck_assert_int_eq(ht_pinned_alloc(&b, "hitrain-test", 4 * HT_MIB, NULL), 0);
    ck_assert_ptr_ne(b.base, base);
    ck_assert_int_eq(ht_pinned_alloc(&a, "hitrain-test", 2 * HT_MIB, NULL), 0);
    ck_assert_ptr_eq(a.base, base);
    ck_assert_int_eq(base[7], 'x');
    ht_pinned_free(&a);
    memory_keep(false);
    ht_pinned_free(&b);
}

RUN_TESTS("mem", .timeout_s = 60)
