/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.c - the NUMA nodes that memory comes from, as text: one table of figures for the
 * attribute stats and for the metrics.
 */
#include "fs/ctl/ctl_priv.h"

static const struct row {
    const char *word, *help;
    size_t offset;
} rows[] = {
    {"dram_bytes", "Part of the DRAM tier near the devices of this NUMA node.",
     offsetof(struct ht_node_stat, dram_bytes)},
    {"resident_bytes", "Used part of that.", offsetof(struct ht_node_stat, dram_used_bytes)},
    {"staging_bytes", "Part of the staging pool near them.", offsetof(struct ht_node_stat, staging_bytes)},
    {"away_bytes", "Of both parts what the system took from another node.", offsetof(struct ht_node_stat, away_bytes)},
};

static uint64_t value_of(const struct row *row, const struct ht_node_stat *st)
{
    uint64_t v;

    memcpy(&v, (const char *)st + row->offset, sizeof(v));
    return v;
}

void ht_node_lines(struct ht_ctl *c, struct ht_buf *out)
{
    const struct ht_nodes *nodes = ht_store_nodes(c->store);

    for (unsigned i = 0; i < nodes->count; i++) {
        struct ht_node_stat st;
        ht_store_node_stat(c->store, i, &st);
        for (size_t k = 0; k < HT_ARRAY_SIZE(rows); k++)
            ht_buf_printf(out, "node%d_%s=%llu\n", nodes->node[i], rows[k].word,
                          (unsigned long long)value_of(&rows[k], &st));
    }
}

void ht_node_metrics(struct ht_ctl *c, struct ht_buf *out)
{
    const struct ht_nodes *nodes = ht_store_nodes(c->store);
    struct ht_node_stat st[HT_NODES_MAX];

    for (unsigned i = 0; i < nodes->count; i++)
        ht_store_node_stat(c->store, i, &st[i]);
    for (size_t k = 0; k < HT_ARRAY_SIZE(rows) && nodes->count; k++) {
        ht_buf_printf(out, "# TYPE hitrain_node_%s gauge\n# UNIT hitrain_node_%s bytes\n# HELP hitrain_node_%s %s\n",
                      rows[k].word, rows[k].word, rows[k].word, rows[k].help);
        for (unsigned i = 0; i < nodes->count; i++)
            ht_buf_printf(out, "hitrain_node_%s{node=\"%d\"} %llu\n", rows[k].word, nodes->node[i],
                          (unsigned long long)value_of(&rows[k], &st[i]));
    }
}
