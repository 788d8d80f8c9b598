/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.h - the NUMA nodes that memory is divided among and threads run on.
 *
 * A place is an index into the list of nodes in use; -1 stands for any. So nothing above this file knows the numbers
 * that the system gives to nodes, and tests can divide memory on a machine that has one.
 */
#pragma once

#include "tiering/base/base.h"

enum { HT_NUMA_OFF = -1, HT_NUMA_AUTO = -2, HT_NODES_MAX = 16, HT_NUMA_INDEX_ANY = -1 };

struct ht_nodes {
    unsigned count; /* 0: any place that the system chooses */
    int node[HT_NODES_MAX];
    uint64_t weight[HT_NODES_MAX]; /* memory is divided in proportion */
};

/* Adds a node, or weight to a present one. HT_NUMA_OFF, and more than HT_NODES_MAX, add nothing. */
void ht_nodes_add(struct ht_nodes *nodes, int node, uint64_t weight);
/* Its index, or HT_NUMA_INDEX_ANY. */
int ht_nodes_find(const struct ht_nodes *nodes, int node);
/*
 * The next node in turn, in proportion to weights: credit has one for each place, zeros at first. With none:
 * HT_NUMA_INDEX_ANY.
 */
int ht_nodes_turn(const struct ht_nodes *nodes, int64_t credit[]);

/* The nodes of the machine. */
bool ht_node_exists(int node);
bool ht_nodes_several(void);

/*
 * Pages of this memory, before they are touched, come from the node at a place, or from all in turn
 * (HT_NUMA_INDEX_ANY), while those have any. If the system forbids it, that is logged once, and memory comes from
 * anywhere.
 */
void ht_nodes_prefer(const struct ht_nodes *nodes, int place, void *base, size_t bytes);
/* Bytes of this memory that lie on another node than the one at this place; checks one page in each step. */
uint64_t ht_nodes_away(const struct ht_nodes *nodes, int place, void *base, size_t bytes, size_t step);

/*
 * Moves this thread, and those that it starts, to the processors of the node at a place, or of all (HT_NUMA_INDEX_ANY),
 * as far as they may run there. Otherwise they stay where they are. Returns whether they run there.
 */
bool ht_nodes_run_on(const struct ht_nodes *nodes, int place);
