/* SPDX-License-Identifier: Apache-2.0 */
/*
 * background.c - the engines of the store, as text: for .hitrain/background and for the metrics, and their
 * commands. Each engine brings its own figures, so a new one needs nothing here.
 */
#include "fs/ctl/ctl_priv.h"
#include "fs/ctl/feed.h"
#include "tiering/base/json.h"

static const struct row {
    const char *key, *metric, *type, *help;
    size_t offset;
} rows[] = {
#define ROW(key, metric, type, field, help)                                                       \
    {                                                                                             \
        key, "hitrain_background_" metric, type, help, offsetof(struct ht_background_stat, field) \
    }
    ROW("steps", "steps", "counter", steps, "Steps of the engine."),
    ROW("blocked_steps", "blocked_steps", "counter", blocked, "Of these, steps that could do nothing then."),
    ROW("bytes", "moved_bytes", "counter", bytes, "Bytes that the engine read and wrote."),
    ROW("cpu_ns", "cpu_ns", "counter", cpu_ns, "Processor time of the engine, nanoseconds."),
    ROW("run_bytes", "run_bytes", "gauge", run_bytes, "Bytes since the engine was idle last."),
    ROW("run_ns", "run_ns", "gauge", run_ns, "Time since then, nanoseconds."),
#undef ROW
};

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
    const struct ht_ctl *c = ctx;
    struct ht_background_stat st;
    struct ht_json j;

    if (ht_store_background_stat(c->store, (unsigned)*after, &st))
        return 0;
    ht_json_init_lines(&j, to);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "engine", st.engine);
    ht_json_str(&j, "state", ht_background_state_word(st.state));
    for (size_t k = 0; k < HT_ARRAY_SIZE(rows); k++)
        ht_json_u64(&j, rows[k].key, ht_metrics_value(&st, rows[k].offset));
    for (unsigned k = 0; k < st.figures; k++)
        ht_json_u64(&j, st.figure[k].key, st.value[k]);
    put_speed(&j, &st);
    ht_json_end(&j);
    ++*after;
    return 1;
}

/* ----------------------------------------------------------------- metrics */

static void put_common(struct ht_ctl *c, const struct row *row, struct ht_buf *out)
{
    bool counter = strcmp(row->type, "counter") == 0;
    struct ht_background_stat st;

    ht_metrics_head(out, row->metric, row->type, row->help);
    for (unsigned i = 0; !ht_store_background_stat(c->store, i, &st); i++)
        ht_buf_printf(out, "%s%s{engine=\"%s\"} %llu\n", row->metric, counter ? "_total" : "", st.engine,
                      (unsigned long long)ht_metrics_value(&st, row->offset));
}

/* An engine's own figures have its name: two engines may call theirs the same. */
static void put_own(const struct ht_background_stat *st, struct ht_buf *out)
{
    for (unsigned k = 0; k < st->figures; k++) {
        const struct ht_engine_figure *f = &st->figure[k];
        char name[96];
        snprintf(name, sizeof(name), "hitrain_background_%s_%s", st->engine, f->key);
        ht_metrics_head(out, name, f->gauge ? "gauge" : "counter", f->help);
        ht_buf_printf(out, "%s%s %llu\n", name, f->gauge ? "" : "_total", (unsigned long long)st->value[k]);
    }
}

void ht_background_metrics(struct ht_ctl *c, struct ht_buf *out)
{
    struct ht_background_stat st;

    for (size_t k = 0; k < HT_ARRAY_SIZE(rows); k++)
        put_common(c, &rows[k], out);
    for (unsigned i = 0; !ht_store_background_stat(c->store, i, &st); i++)
        put_own(&st, out);
    ht_metrics_head(out, "hitrain_background_state", "stateset", "What it does.");
    for (unsigned i = 0; !ht_store_background_stat(c->store, i, &st); i++)
        for (enum ht_background_state state = HT_BACKGROUND_IDLE; state <= HT_BACKGROUND_OFF; state++)
            ht_buf_printf(out, "hitrain_background_state{engine=\"%s\",hitrain_background_state=\"%s\"} %d\n",
                          st.engine, ht_background_state_word(state), st.state == state);
}

/* ---------------------------------------------------------------- commands */

static void name_engines(struct ht_ctl *c, const char *unknown, char err[HT_CTL_ERROR_MAX])
{
    struct ht_background_stat st;
    int at = snprintf(err, HT_CTL_ERROR_MAX, "no engine is called '%s': there are", unknown);

    for (unsigned i = 0; at < HT_CTL_ERROR_MAX && !ht_store_background_stat(c->store, i, &st); i++)
        at += snprintf(err + at, (size_t)(HT_CTL_ERROR_MAX - at), " %s", st.engine);
}

int ht_background_command(struct ht_call *q, uint64_t ino)
{
    const char *engine = q->cmd->name[0] ? q->cmd->name : NULL;
    bool pause = q->cmd->path_len == strlen("pause");
    int rc = (pause ? ht_store_background_pause : ht_store_background_resume)(q->ctl->store, engine);

    if (rc == -ENOENT)
        name_engines(q->ctl, q->cmd->name, q->err);
    return rc;
}
