/* SPDX-License-Identifier: Apache-2.0 */
/* devices.c - the devices of the store, as text: one table of figures for .hitrain/devices and for the metrics. */
#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/feed.h"
#include "tiering/base/json.h"

static const struct row {
    const char *key, *metric, *type, *help;
    size_t offset;
} rows[] = {
#define ROW(key, metric, type, field, help)                                               \
    {                                                                                     \
        key, "hitrain_device_" metric, type, help, offsetof(struct ht_device_stat, field) \
    }
    ROW("bytes", "size_bytes", "gauge", bytes, "Size of the device."),
    ROW("data_bytes", "data_bytes", "gauge", data_bytes, "Part of the device that is for data."),
    ROW("free_bytes", "free_bytes", "gauge", free_bytes, "Part for data that nothing names."),
    ROW("bad_bytes", "bad_bytes", "gauge", bad_bytes, "Places that failed a write."),
    ROW("reads", "reads", "counter", io.reads, "Reads that succeeded."),
    ROW("read_bytes", "read_bytes", "counter", io.read_bytes, "Bytes read."),
    ROW("read_errors", "read_errors", "counter", io.read_errors, "Reads that failed."),
    ROW("writes", "writes", "counter", io.writes, "Writes that succeeded."),
    ROW("written_bytes", "written_bytes", "counter", io.written_bytes, "Bytes written."),
    ROW("write_errors", "write_errors", "counter", io.write_errors, "Writes that failed."),
    ROW("flushes", "flushes", "counter", io.flushes, "Flushes that succeeded."),
    ROW("flush_errors", "flush_errors", "counter", io.flush_errors, "Flushes that failed."),
    ROW("oldest_request_ns", "oldest_request_ns", "gauge", oldest_request_ns, "Age of the oldest request in flight."),
    ROW("urgent_bytes", "urgent_bytes", "gauge", gate.in_flight_bytes[HT_IO_URGENT],
        "Bytes in flight that callers wait for."),
    ROW("planned_bytes", "planned_bytes", "gauge", gate.in_flight_bytes[HT_IO_PLANNED],
        "Bytes in flight of readahead, prefetch and writeback."),
    ROW("background_bytes", "background_bytes", "gauge", gate.in_flight_bytes[HT_IO_BACKGROUND],
        "Bytes in flight of scrub."),
    ROW("urgent_moved_bytes", "urgent_moved_bytes", "counter", gate.moved_bytes[HT_IO_URGENT],
        "Bytes read and written while callers waited for them."),
    ROW("planned_moved_bytes", "planned_moved_bytes", "counter", gate.moved_bytes[HT_IO_PLANNED],
        "Bytes of readahead, prefetch and writeback."),
    ROW("background_moved_bytes", "background_moved_bytes", "counter", gate.moved_bytes[HT_IO_BACKGROUND],
        "Bytes of scrub and other engines in the background."),
    ROW("planned_waits", "planned_waits", "counter", gate.waits[HT_IO_PLANNED],
        "Waits of planned requests for their permission."),
    ROW("planned_wait_ns", "planned_wait_ns", "counter", gate.wait_ns[HT_IO_PLANNED], "Time of these waits."),
    ROW("background_waits", "background_waits", "counter", gate.waits[HT_IO_BACKGROUND],
        "Waits of background requests for their permission."),
    ROW("background_wait_ns", "background_wait_ns", "counter", gate.wait_ns[HT_IO_BACKGROUND], "Time of these waits."),
#undef ROW
};

/* Of one direction. Without a value while the rate is not known. */
static const struct rate_row {
    const char *key, *metric, *help;
    enum ht_direction direction;
    size_t offset;
} rate_rows[] = {
#define RATE(key, direction, field, help)                                                \
    {                                                                                    \
        key, "hitrain_device_" key, help, direction, offsetof(struct ht_dev_rate, field) \
    }
    RATE("read_bytes_per_s", HT_DIRECTION_READ, bytes_per_s, "Bytes read in a second with reads in flight, lately."),
    RATE("read_latency_ns", HT_DIRECTION_READ, latency_ns, "Mean time of the last reads."),
    RATE("read_latency_p99_ns", HT_DIRECTION_READ, latency_p99_ns, "Time that 99 percent of them stay below."),
    RATE("write_bytes_per_s", HT_DIRECTION_WRITE, bytes_per_s,
         "Bytes written in a second with writes in flight, lately."),
    RATE("write_latency_ns", HT_DIRECTION_WRITE, latency_ns, "Mean time of the last writes."),
    RATE("write_latency_p99_ns", HT_DIRECTION_WRITE, latency_p99_ns, "Time that 99 percent of them stay below."),
#undef RATE
};

/* False: it is not known. */
static bool rate_of(const struct rate_row *row, const struct ht_device_stat *st, uint64_t *out)
{
    const struct ht_dev_rate *rate = &st->rate[row->direction];

    *out = ht_metrics_value(rate, row->offset);
    return rate->known;
}

static const char *log_word(enum ht_log_copy_state state)
{
    static const char *const words[] = {"none", "written", "lost"};

    return words[state];
}

int ht_device_lines(void *ctx, uint64_t *after, FILE *to)
{
    struct ht_ctl *c = ctx;
    struct ht_device_stat st;
    struct ht_json j;
    unsigned i = (unsigned)*after;

    if (*after >= ht_store_device_count(c->store))
        return 0;
    ht_store_device_stat(c->store, i, &st);
    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
    ht_json_u64(&j, "index", i);
    ht_json_str(&j, "health", ht_health_word(st.health));
    ht_json_str(&j, "class", st.device_class);
    ht_json_str(&j, "log", log_word(st.log));
    for (size_t k = 0; k < HT_ARRAY_SIZE(rows); k++)
        ht_json_u64(&j, rows[k].key, ht_metrics_value(&st, rows[k].offset));
    for (size_t k = 0; k < HT_ARRAY_SIZE(rate_rows); k++) {
        uint64_t v;
        if (rate_of(&rate_rows[k], &st, &v))
            ht_json_u64(&j, rate_rows[k].key, v);
    }
    if (st.has_share)
        ht_json_u64(&j, "share_per_mille", st.share_per_mille);
    ht_json_str(&j, "path", st.name ? st.name : "");
    ht_json_end(&j);
    *after = i + 1;
    return 1;
}

/* ----------------------------------------------------------------- metrics */

static void put_rates(struct ht_buf *out, const struct ht_device_stat st[], unsigned count)
{
    for (size_t k = 0; k < HT_ARRAY_SIZE(rate_rows); k++) {
        const struct rate_row *row = &rate_rows[k];
        ht_metrics_head(out, row->metric, "gauge", row->help);
        for (unsigned i = 0; i < count; i++) {
            uint64_t v;
            if (rate_of(row, &st[i], &v))
                ht_buf_printf(out, "%s{device=\"%u\"} %llu\n", row->metric, i, (unsigned long long)v);
        }
    }
}

static void put_shares(struct ht_buf *out, const struct ht_device_stat st[], unsigned count)
{
    ht_metrics_head(out, "hitrain_device_share_per_mille", "gauge",
                    "Part of new content that the device gets, of 1000.");
    for (unsigned i = 0; i < count; i++)
        if (st[i].has_share)
            ht_buf_printf(out, "hitrain_device_share_per_mille{device=\"%u\"} %llu\n", i,
                          (unsigned long long)st[i].share_per_mille);
}

void ht_device_metrics(struct ht_ctl *c, struct ht_buf *out)
{
    struct ht_device_stat st[HT_DEVICES_MAX];
    unsigned count = ht_store_device_count(c->store);

    for (unsigned i = 0; i < count; i++)
        ht_store_device_stat(c->store, i, &st[i]);
    for (size_t k = 0; k < HT_ARRAY_SIZE(rows); k++) {
        bool counter = strcmp(rows[k].type, "counter") == 0;
        ht_metrics_head(out, rows[k].metric, rows[k].type, rows[k].help);
        for (unsigned i = 0; i < count; i++)
            ht_buf_printf(out, "%s%s{device=\"%u\"} %llu\n", rows[k].metric, counter ? "_total" : "", i,
                          (unsigned long long)ht_metrics_value(&st[i], rows[k].offset));
    }
    put_rates(out, st, count);
    put_shares(out, st, count);
    ht_metrics_head(out, "hitrain_device_health", "stateset", "How the device does.");
    for (unsigned i = 0; i < count; i++)
        for (enum ht_health h = HT_HEALTH_OK; h <= HT_HEALTH_MISSING; h++)
            ht_buf_printf(out, "hitrain_device_health{device=\"%u\",hitrain_device_health=\"%s\"} %d\n", i,
                          ht_health_word(h), h == st[i].health);
    ht_metrics_head(out, "hitrain_device", "info", "Path and class of each device.");
    for (unsigned i = 0; i < count; i++) {
        char path[512];
        ht_metrics_label(st[i].name ? st[i].name : "", path, sizeof(path));
        ht_buf_printf(out, "hitrain_device_info{device=\"%u\",class=\"%s\",path=\"%s\"} 1\n", i, st[i].device_class,
                      path);
    }
}
