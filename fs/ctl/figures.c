/* SPDX-License-Identifier: Apache-2.0 */
/*
 * figures.c - what all tables of figures need, and the tables of the parts of a store: its devices, its engines in the
 * background, and the NUMA nodes that memory comes from. A part has one table, for lines of text (.hitrain/devices,
 * .hitrain/background, the attribute stats) and for metrics. A new figure is one row; engines bring figures of their
 * own, so a new one needs nothing here.
 */
#include "fs/ctl/hidden_priv.h"

/* ----------------------------------------------------------------- metrics */

uint64_t ht_metrics_value(const void *of, size_t offset)
{
    uint64_t v;

    memcpy(&v, (const char *)of + offset, sizeof(v));
    return v;
}

void ht_metrics_head(struct ht_buf *out, const char *name, const char *type, const char *help)
{
    size_t len = strlen(name);

    ht_buf_printf(out, "# TYPE %s %s\n", name, type);
    if (len > 6 && strcmp(name + len - 6, "_bytes") == 0)
        ht_buf_printf(out, "# UNIT %s bytes\n", name);
    ht_buf_printf(out, "# HELP %s %s\n", name, help);
}

void ht_metrics_label(const char *path, char *out, size_t cap)
{
    size_t n = 0;

    for (; *path && n + 3 < cap; path++) {
        if (*path == '\\' || *path == '"' || *path == '\n')
            out[n++] = '\\';
        out[n++] = *path == '\n' ? 'n' : *path;
    }
    out[n] = 0;
}

/* ------------------------------------------------------------------- parts */

#define PARTS_MAX 32u
static_assert(HT_DEVICES_MAX <= PARTS_MAX && HT_NODES_MAX <= PARTS_MAX, "all devices and nodes are shown");

struct part {
    char name[32];
    union {
        struct ht_device_stat device;
        struct ht_background_stat engine;
        struct ht_node_stat node;
    };
};

struct row {
    const char *key, *metric; /* in lines and in metrics */
    const char *type, *help;
    size_t offset, known; /* in struct part: the value, and whether it is known (a bool; 0: always) */
};

struct kind {
    const char *metric, *label; /* what its metrics are called, and what names a part in them */
    bool (*look)(struct ht_ctl *c, unsigned i, struct part *out); /* false: there are fewer */
    const struct row *row;
    size_t rows;
};

#define ROW(of, key, metric, type, field, help)                     \
    {                                                               \
        key, metric, type, help, offsetof(struct part, of.field), 0 \
    }
#define DEVICE(key, type, field, help) ROW(device, key, key, type, field, help)
#define RATE(key, of, field, help)                                                            \
    {                                                                                         \
        key, key, "gauge", help, offsetof(struct part, device.rate[HT_DIRECTION_##of].field), \
            offsetof(struct part, device.rate[HT_DIRECTION_##of].known)                       \
    }

static const struct row device_rows[] = {
    ROW(device, "bytes", "size_bytes", "gauge", bytes, "Size of the device."),
    DEVICE("data_bytes", "gauge", data_bytes, "Part of the device that is for data."),
    DEVICE("free_bytes", "gauge", free_bytes, "Part for data that nothing names."),
    DEVICE("bad_bytes", "gauge", bad_bytes, "Places that failed a write."),
    DEVICE("reads", "counter", io.reads, "Reads that succeeded."),
    DEVICE("read_bytes", "counter", io.read_bytes, "Bytes read."),
    DEVICE("read_errors", "counter", io.read_errors, "Reads that failed."),
    DEVICE("writes", "counter", io.writes, "Writes that succeeded."),
    DEVICE("written_bytes", "counter", io.written_bytes, "Bytes written."),
    DEVICE("write_errors", "counter", io.write_errors, "Writes that failed."),
    DEVICE("flushes", "counter", io.flushes, "Flushes that succeeded."),
    DEVICE("flush_errors", "counter", io.flush_errors, "Flushes that failed."),
    DEVICE("oldest_request_ns", "gauge", oldest_request_ns, "Age of the oldest request in flight."),
    DEVICE("urgent_bytes", "gauge", gate.in_flight_bytes[HT_IO_URGENT], "Bytes in flight that callers wait for."),
    DEVICE("planned_bytes", "gauge", gate.in_flight_bytes[HT_IO_PLANNED],
           "Bytes in flight of readahead, prefetch and writeback."),
    DEVICE("background_bytes", "gauge", gate.in_flight_bytes[HT_IO_BACKGROUND], "Bytes in flight of scrub."),
    DEVICE("urgent_moved_bytes", "counter", gate.moved_bytes[HT_IO_URGENT],
           "Bytes read and written while callers waited for them."),
    DEVICE("planned_moved_bytes", "counter", gate.moved_bytes[HT_IO_PLANNED],
           "Bytes of readahead, prefetch and writeback."),
    DEVICE("background_moved_bytes", "counter", gate.moved_bytes[HT_IO_BACKGROUND],
           "Bytes of scrub and other engines in the background."),
    DEVICE("planned_waits", "counter", gate.waits[HT_IO_PLANNED], "Waits of planned requests for their permission."),
    DEVICE("planned_wait_ns", "counter", gate.wait_ns[HT_IO_PLANNED], "Time of these waits."),
    DEVICE("background_waits", "counter", gate.waits[HT_IO_BACKGROUND],
           "Waits of background requests for their permission."),
    DEVICE("background_wait_ns", "counter", gate.wait_ns[HT_IO_BACKGROUND], "Time of these waits."),
    RATE("read_bytes_per_s", READ, bytes_per_s, "Bytes read in a second with reads in flight, lately."),
    RATE("read_latency_ns", READ, latency_ns, "Mean time of the last reads."),
    RATE("read_latency_p99_ns", READ, latency_p99_ns, "Time that 99 percent of them stay below."),
    RATE("write_bytes_per_s", WRITE, bytes_per_s, "Bytes written in a second with writes in flight, lately."),
    RATE("write_latency_ns", WRITE, latency_ns, "Mean time of the last writes."),
    RATE("write_latency_p99_ns", WRITE, latency_p99_ns, "Time that 99 percent of them stay below."),
    {"share_per_mille", "share_per_mille", "gauge", "Part of new content that the device gets, of 1000.",
     offsetof(struct part, device.share_per_mille), offsetof(struct part, device.has_share)},
};

static const struct row engine_rows[] = {
    ROW(engine, "steps", "steps", "counter", steps, "Steps of the engine."),
    ROW(engine, "blocked_steps", "blocked_steps", "counter", blocked, "Of these, steps that could do nothing then."),
    ROW(engine, "bytes", "moved_bytes", "counter", bytes, "Bytes that the engine read and wrote."),
    ROW(engine, "cpu_ns", "cpu_ns", "counter", cpu_ns, "Processor time of the engine, nanoseconds."),
    ROW(engine, "run_bytes", "run_bytes", "gauge", run_bytes, "Bytes since the engine was idle last."),
    ROW(engine, "run_ns", "run_ns", "gauge", run_ns, "Time since then, nanoseconds."),
};

#define NODE(key, field, help) ROW(node, key, key, "gauge", field, help)
static const struct row node_rows[] = {
    NODE("dram_bytes", dram_bytes, "Part of the DRAM tier near the devices of this NUMA node."),
    NODE("resident_bytes", dram_used_bytes, "Used part of that."),
    NODE("staging_bytes", staging_bytes, "Part of the staging pool near them."),
    NODE("away_bytes", away_bytes, "Of both parts what the system took from another node."),
};

static bool look_at_device(struct ht_ctl *c, unsigned i, struct part *out)
{
    if (i >= ht_store_device_count(c->store))
        return false;
    snprintf(out->name, sizeof(out->name), "%u", i);
    ht_store_device_stat(c->store, i, &out->device);
    return true;
}

static bool look_at_engine(struct ht_ctl *c, unsigned i, struct part *out)
{
    if (ht_store_background_stat(c->store, i, &out->engine))
        return false;
    snprintf(out->name, sizeof(out->name), "%s", out->engine.engine);
    return true;
}

static bool look_at_node(struct ht_ctl *c, unsigned i, struct part *out)
{
    const struct ht_nodes *nodes = ht_store_nodes(c->store);

    if (i >= nodes->count)
        return false;
    snprintf(out->name, sizeof(out->name), "%d", nodes->node[i]);
    ht_store_node_stat(c->store, i, &out->node);
    return true;
}

#define ROWS(rows) rows, HT_ARRAY_SIZE(rows)
static const struct kind devices = {"device", "device", look_at_device, ROWS(device_rows)};
static const struct kind engines = {"background", "engine", look_at_engine, ROWS(engine_rows)};
static const struct kind nodes = {"node", "node", look_at_node, ROWS(node_rows)};

static bool is_known(const struct row *row, const struct part *p)
{
    bool known = true;

    if (row->known)
        memcpy(&known, (const char *)p + row->known, sizeof(known));
    return known;
}

/* ------------------------------------------------------------------- lines */

static void put_keys(struct ht_json *j, const struct kind *k, const struct part *p)
{
    for (size_t i = 0; i < k->rows; i++)
        if (is_known(&k->row[i], p))
            ht_json_u64(j, k->row[i].key, ht_metrics_value(p, k->row[i].offset));
}

int ht_device_lines(void *ctx, uint64_t *after, FILE *to)
{
    static const char *const log_words[] = {
        [HT_LOG_COPY_NONE] = "none", [HT_LOG_COPY_WRITTEN] = "written", [HT_LOG_COPY_LOST] = "lost"};
    struct part p;

    if (!look_at_device(ctx, (unsigned)ht_min_u64(*after, HT_DEVICES_MAX), &p))
        return 0;
    struct ht_json j = ht_feed_line(to);
    ht_json_u64(&j, "index", *after);
    ht_json_str(&j, "health", ht_health_word(p.device.health));
    ht_json_str(&j, "class", p.device.device_class);
    ht_json_str(&j, "log", log_words[p.device.log]);
    put_keys(&j, &devices, &p);
    ht_json_str(&j, "path", p.device.name ? p.device.name : "");
    ht_json_end(&j);
    ++*after;
    return 1;
}

/* Bytes per second since the engine was idle last; and the seconds that its bytes to come take at that rate, or 0. */
static void put_speed(struct ht_json *j, const struct ht_background_stat *st)
{
    uint64_t rate = st->run_ns ? (uint64_t)((double)st->run_bytes * 1e9 / (double)st->run_ns) : 0, left = 0;

    for (unsigned k = 0; k < st->figures; k++)
        if (strcmp(st->figure[k].key, "left_bytes") == 0 && st->state == HT_BACKGROUND_WORKING && rate)
            left = st->value[k] / rate;
    ht_json_u64(j, "bytes_per_second", rate);
    ht_json_u64(j, "seconds_left", left);
}

int ht_background_lines(void *ctx, uint64_t *after, FILE *to)
{
    struct part p;

    if (!look_at_engine(ctx, (unsigned)*after, &p))
        return 0;
    struct ht_json j = ht_feed_line(to);
    ht_json_str(&j, "engine", p.name);
    ht_json_str(&j, "state", ht_background_state_word(p.engine.state));
    put_keys(&j, &engines, &p);
    for (unsigned k = 0; k < p.engine.figures; k++)
        ht_json_u64(&j, p.engine.figure[k].key, p.engine.value[k]);
    put_speed(&j, &p.engine);
    ht_json_end(&j);
    ++*after;
    return 1;
}

void ht_node_lines(struct ht_ctl *c, struct ht_buf *out)
{
    struct part p;

    for (unsigned i = 0; look_at_node(c, i, &p); i++)
        for (size_t k = 0; k < nodes.rows; k++)
            ht_buf_printf(out, "node%s_%s=%llu\n", p.name, nodes.row[k].key,
                          (unsigned long long)ht_metrics_value(&p, nodes.row[k].offset));
}

/* ------------------------------------------------------ metrics of the parts */

static unsigned look_at_all(struct ht_ctl *c, const struct kind *k, struct part all[PARTS_MAX])
{
    unsigned count = 0;

    while (count < PARTS_MAX && k->look(c, count, &all[count]))
        count++;
    return count;
}

static void put_metrics(struct ht_buf *out, const struct kind *k, const struct part *all, unsigned count)
{
    for (size_t r = 0; r < k->rows; r++) {
        const struct row *row = &k->row[r];
        const char *suffix = strcmp(row->type, "counter") == 0 ? "_total" : "";
        char name[96];
        snprintf(name, sizeof(name), "hitrain_%s_%s", k->metric, row->metric);
        ht_metrics_head(out, name, row->type, row->help);
        for (unsigned i = 0; i < count; i++)
            if (is_known(row, &all[i]))
                ht_buf_printf(out, "%s%s{%s=\"%s\"} %llu\n", name, suffix, k->label, all[i].name,
                              (unsigned long long)ht_metrics_value(&all[i], row->offset));
    }
}

static void put_devices(struct ht_ctl *c, struct ht_buf *out)
{
    struct part all[PARTS_MAX];
    unsigned count = look_at_all(c, &devices, all);

    put_metrics(out, &devices, all, count);
    ht_metrics_head(out, "hitrain_device_health", "stateset", "How the device does.");
    for (unsigned i = 0; i < count; i++)
        for (enum ht_health h = HT_HEALTH_OK; h <= HT_HEALTH_MISSING; h++)
            ht_buf_printf(out, "hitrain_device_health{device=\"%u\",hitrain_device_health=\"%s\"} %d\n", i,
                          ht_health_word(h), h == all[i].device.health);
    ht_metrics_head(out, "hitrain_device", "info", "Path and class of each device.");
    for (unsigned i = 0; i < count; i++) {
        char path[512];
        ht_metrics_label(all[i].device.name ? all[i].device.name : "", path, sizeof(path));
        ht_buf_printf(out, "hitrain_device_info{device=\"%u\",class=\"%s\",path=\"%s\"} 1\n", i,
                      all[i].device.device_class, path);
    }
}

/* An engine's own figures have its name: two engines may call theirs the same. */
static void put_own(struct ht_buf *out, const struct part *p)
{
    for (unsigned k = 0; k < p->engine.figures; k++) {
        const struct ht_engine_figure *f = &p->engine.figure[k];
        char name[96];
        snprintf(name, sizeof(name), "hitrain_background_%s_%s", p->engine.engine, f->key);
        ht_metrics_head(out, name, f->gauge ? "gauge" : "counter", f->help);
        ht_buf_printf(out, "%s%s %llu\n", name, f->gauge ? "" : "_total", (unsigned long long)p->engine.value[k]);
    }
}

static void put_engines(struct ht_ctl *c, struct ht_buf *out)
{
    struct part all[PARTS_MAX];
    unsigned count = look_at_all(c, &engines, all);

    put_metrics(out, &engines, all, count);
    for (unsigned i = 0; i < count; i++)
        put_own(out, &all[i]);
    ht_metrics_head(out, "hitrain_background_state", "stateset", "What it does.");
    for (unsigned i = 0; i < count; i++)
        for (enum ht_background_state state = HT_BACKGROUND_IDLE; state <= HT_BACKGROUND_OFF; state++)
            ht_buf_printf(out, "hitrain_background_state{engine=\"%s\",hitrain_background_state=\"%s\"} %d\n",
                          all[i].name, ht_background_state_word(state), all[i].engine.state == state);
}

void ht_part_metrics(struct ht_ctl *c, struct ht_buf *out)
{
    struct part all[PARTS_MAX];
    unsigned count = look_at_all(c, &nodes, all);

    put_devices(c, out);
    put_engines(c, out);
    if (count)
        put_metrics(out, &nodes, all, count);
}
