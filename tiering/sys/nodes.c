/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.c - see nodes.h. The only shared state is a note of reported errors, and that of libnuma; any thread.
 *
 * Memory is preferred from a node, not bound to it. If bound memory runs out the system kills processes, although other
 * nodes have some. A page on the wrong node only costs a part of its speed.
 */
#include "tiering/sys/nodes.h"
#include "tiering/base/lock.h"
#include "tiering/base/log.h"

#include <numa.h>
#include <numaif.h>
#include <stdatomic.h>

#define NUMBERS_MAX 1024u /* of nodes; the most that a kernel can be built for */
#define WORD_BITS (8 * sizeof(unsigned long))
enum { LOOK_MAX = 256 };

/* ------------------------------------------------------------------ lists */

int ht_nodes_find(const struct ht_nodes *nodes, int node)
{
    for (unsigned i = 0; i < nodes->count; i++)
        if (nodes->node[i] == node)
            return (int)i;
    return HT_NUMA_INDEX_ANY;
}

void ht_nodes_add(struct ht_nodes *nodes, int node, uint64_t weight)
{
    int at = ht_nodes_find(nodes, node);

    if (node < 0 || (unsigned)node >= NUMBERS_MAX)
        return;
    if (at < 0 && nodes->count == HT_NODES_MAX)
        return;
    if (at < 0) {
        at = (int)nodes->count++;
        nodes->node[at] = node;
        nodes->weight[at] = 0;
    }
    nodes->weight[at] += weight;
}

int ht_nodes_turn(const struct ht_nodes *nodes, int64_t credit[])
{
    int next = HT_NUMA_INDEX_ANY;
    int64_t all = 0;

    for (unsigned i = 0; i < nodes->count; i++) {
        credit[i] += (int64_t)nodes->weight[i];
        all += (int64_t)nodes->weight[i];
        if (next < 0 || credit[i] > credit[next])
            next = (int)i;
    }
    if (next >= 0)
        credit[next] -= all;
    return next;
}

/* One place, or all places. */
static bool is_at(unsigned i, int place)
{
    return place < 0 || i == (unsigned)place;
}

/* ---------------------------------------------------------------- machine */

bool ht_node_exists(int node)
{
    return node >= 0 && (unsigned)node < NUMBERS_MAX && numa_available() >= 0 && node <= numa_max_node() &&
        numa_bitmask_isbitset(numa_nodes_ptr, (unsigned)node);
}

bool ht_nodes_several(void)
{
    return numa_available() >= 0 && numa_num_configured_nodes() > 1;
}

/* ----------------------------------------------------------------- memory */

static void report_once(int node, int error)
{
    static atomic_flag reported = ATOMIC_FLAG_INIT;

    if (!atomic_flag_test_and_set(&reported))
        ht_warn("memory does not come from NUMA node %d: %s (it has none, or a container forbids it)", node,
                strerror(error));
}

void ht_nodes_prefer(const struct ht_nodes *nodes, int place, void *base, size_t bytes)
{
    int policy = place < 0 && nodes->count > 1 ? MPOL_INTERLEAVE : MPOL_PREFERRED;
    unsigned long mask[NUMBERS_MAX / WORD_BITS] = {0};

    if (nodes->count == 0 || bytes == 0)
        return;
    for (unsigned i = 0; i < nodes->count; i++)
        if (is_at(i, place))
            mask[(unsigned)nodes->node[i] / WORD_BITS] |= 1ul << ((unsigned)nodes->node[i] % WORD_BITS);
    if (mbind(base, bytes, policy, mask, NUMBERS_MAX, 0) != 0)
        report_once(nodes->node[place < 0 ? 0 : place], errno);
}

uint64_t ht_nodes_away(const struct ht_nodes *nodes, int place, void *base, size_t bytes, size_t step)
{
    uint64_t away = 0;

    for (size_t at = 0; place >= 0 && at < bytes;) {
        void *page[LOOK_MAX];
        int status[LOOK_MAX];
        unsigned n = 0;
        for (; n < LOOK_MAX && at < bytes; at += step)
            page[n++] = (char *)base + at;
        if (move_pages(0, n, page, NULL, status, 0) < 0)
            return away;
        for (unsigned i = 0; i < n; i++) /* negative: there is no page yet */
            away += status[i] >= 0 && status[i] != nodes->node[place] ? step : 0;
    }
    return away;
}

/* ---------------------------------------------------------------- threads */

static void add_processors(struct bitmask *to, const struct bitmask *of_node)
{
    for (unsigned cpu = 0; cpu < of_node->size && cpu < to->size; cpu++)
        if (numa_bitmask_isbitset(of_node, cpu))
            numa_bitmask_setbit(to, cpu);
}

static void keep_allowed(struct bitmask *wanted, const struct bitmask *allowed)
{
    for (unsigned cpu = 0; cpu < wanted->size; cpu++)
        if (numa_bitmask_isbitset(wanted, cpu) && !(cpu < allowed->size && numa_bitmask_isbitset(allowed, cpu)))
            numa_bitmask_clearbit(wanted, cpu);
}

/* Two threads that ask for a node's processors at once make libnuma lose memory. */
static struct ht_mutex lock = HT_MUTEX_INIT(HT_LOCK_NUMA);

static bool get_processors(int node, struct bitmask *out)
{
    ht_mutex_lock(&lock);
    bool known = numa_node_to_cpus(node, out) == 0;
    ht_mutex_unlock(&lock);
    return known;
}

bool ht_nodes_run_on(const struct ht_nodes *nodes, int place)
{
    bool there = false;

    if (nodes->count == 0 || numa_available() < 0)
        return false;
    struct bitmask *wanted = numa_allocate_cpumask();
    struct bitmask *one = numa_allocate_cpumask();
    struct bitmask *allowed = numa_allocate_cpumask();
    for (unsigned i = 0; i < nodes->count; i++)
        if (is_at(i, place) && get_processors(nodes->node[i], one))
            add_processors(wanted, one);
    if (numa_sched_getaffinity(0, allowed) > 0) {
        keep_allowed(wanted, allowed);
        there = numa_bitmask_weight(wanted) > 0 && numa_sched_setaffinity(0, wanted) == 0;
    }
    numa_free_cpumask(allowed);
    numa_free_cpumask(one);
    numa_free_cpumask(wanted);
    return there;
}
