/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.c - the NUMA nodes that memory comes from, as text: one table of figures for the
 * attribute stats and for the metrics.
 */
#include "fs/ctl/ctl_priv.h"

static const struct row {
    const char *word, *metric, *help;
    size_t offset;
} rows[] = {
#define ROW(word, field, help)                                                 \
    {                                                                          \
        word, "hitrain_node_" word, help, offsetof(struct ht_node_stat, field) \
    }
    ROW("dram_bytes", dram_bytes, "Part of the DRAM tier near the devices of this NUMA node."),
    ROW("resident_bytes", dram_used_bytes, "Used part of that."),
    ROW("staging_bytes", staging_bytes, "Part of the staging pool near them."),
    ROW("away_bytes", away_bytes, "Of both parts what the system took from another node."),
#undef ROW
};

void ht_node_lines(struct ht_ctl *c, struct ht_buf *out)
{
    const struct ht_nodes *nodes = ht_store_nodes(c->store);

    for (unsigned i = 0; i < nodes->count; i++) {
        struct ht_node_stat st;
        ht_store_node_stat(c->store, i, &st);
        for (size_t k = 0; k < HT_ARRAY_SIZE(rows); k++)
            ht_buf_printf(out, "node%d_%s=%llu\n", nodes->node[i], rows[k].word,
                          (unsigned long long)ht_metrics_value(&st, rows[k].offset));
    }
}

void ht_node_metrics(struct ht_ctl *c, struct ht_buf *out)
{
    const struct ht_nodes *nodes = ht_store_nodes(c->store);
    struct ht_node_stat st[HT_NODES_MAX];

    for (unsigned i = 0; i < nodes->count; i++)
        ht_store_node_stat(c->store, i, &st[i]);
    for (size_t k = 0; k < HT_ARRAY_SIZE(rows) && nodes->count; k++) {
        ht_metrics_head(out, rows[k].metric, "gauge", rows[k].help);
        for (unsigned i = 0; i < nodes->count; i++)
            ht_buf_printf(out, "%s{node=\"%d\"} %llu\n", rows[k].metric, nodes->node[i],
                          (unsigned long long)ht_metrics_value(&st[i], rows[k].offset));
    }
}
