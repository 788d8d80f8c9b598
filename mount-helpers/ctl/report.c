/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.c - `hitrainctl report`: gathers what a mounted store says about itself, and writes one page of HTML. It reads
 * each hidden file once.
 */
#include "mount-helpers/ctl/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mount-helpers/common/features.h"
#include "mount-helpers/common/text.h"
#include "mount-helpers/ctl/figures.h"
#include "mount-helpers/ctl/lines.h"
#include "tiering/base/files.h"
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"

enum { PLAN_LINES_MAX = 1 << 20, EVENT_LINES_MAX = 1 << 16 }; /* a daemon has fewer */

/* ------------------------------------------------------------------ gathering */

static int take_trace(struct ht_cmd_line *l, void *ctx)
{
    return ht_report_trace_add(ctx, l);
}

struct plan_reader {
    struct ht_plan_columns *columns;
    bool begun;
};

static int take_plan(struct ht_cmd_line *l, void *ctx)
{
    struct plan_reader *p = ctx;

    if (p->begun)
        return ht_plan_columns_add(p->columns, l);
    p->begun = true;
    return ht_plan_columns_begin(p->columns, l);
}

static int take_event(struct ht_cmd_line *l, void *ctx)
{
    struct ht_report *r = ctx;
    struct ht_report_event *e = &r->event[r->events++ % HT_REPORT_EVENTS_MAX];

    e->time_ns = ht_cmd_number(l, "time_ns");
    e->count = ht_cmd_number(l, "count");
    snprintf(e->level, sizeof(e->level), "%s", ht_cmd_value(l, "level"));
    snprintf(e->code, sizeof(e->code), "%s", ht_cmd_value(l, "code"));
    snprintf(e->path, sizeof(e->path), "%s", ht_cmd_value(l, "path"));
    snprintf(e->text, sizeof(e->text), "%s", ht_cmd_value(l, "text"));
    return 0;
}

/* A hidden file that the caller may not read is left out; *out_known says so. */
static int read_hidden(const char *point, const char *name, uint64_t most, ht_line_fn *fn, void *ctx, bool *out_known)
{
    int rc = ht_lines_read(point, name, most, fn, ctx);

    *out_known = rc == 0;
    if (rc == 0 || rc == -EACCES || rc == -EPERM)
        return 0;
    if (rc == -EPROTO)
        ht_error("%s: .hitrain/%s is not as this program knows it: the daemon is of another version", point, name);
    else
        (void)ht_cmd_explain(point, rc);
    return rc;
}

static void read_models(struct ht_report *r)
{
    for (unsigned i = 0; i < r->sample->roots && r->models < HT_REPORT_MODELS_MAX; i++) {
        struct ht_report_model *m = &r->model[r->models];
        char path[PATH_MAX + HT_TOP_NAME_MAX], *text;
        m->path = r->sample->root[i].name;
        snprintf(path, sizeof(path), "%s%s", r->point, m->path);
        if (ht_cmd_attribute(path, "optimizer", true, &text) < 0)
            continue;
        snprintf(m->config, sizeof(m->config), "%s", text);
        free(text);
        r->models++;
    }
}

static void read_configuration(struct ht_report *r)
{
    struct ht_holder *h = malloc(sizeof(*h));
    struct ht_store_features f;
    char uuid[HT_UUID_TEXT_MAX];

    if (h && ht_holder_find(r->source, h) == 0 && h->pid && !h->opener)
        snprintf(r->command, sizeof(r->command), "%s", h->command);
    free(h);
    if (ht_features_read(r->source, &f) < 0)
        return;
    snprintf(r->store, sizeof(r->store), "%s", ht_uuid_text(f.uuid, uuid));
    snprintf(r->label, sizeof(r->label), "%s", f.label);
    r->format = f.version;
}

static int gather(struct ht_report *r)
{
    struct plan_reader p = {.columns = &r->plan};
    int rc = ht_top_read(r->point, r->sample);

    if (rc < 0)
        return ht_cmd_explain(r->point, rc);
    r->wall_ns = ht_wall_ns();
    rc = read_hidden(r->point, "trace", HT_REPORT_ACCESSES_MAX, take_trace, &r->trace, &r->trace_known);
    if (rc == 0)
        rc = read_hidden(r->point, "plan", PLAN_LINES_MAX, take_plan, &p, &r->plan_known);
    if (rc == 0)
        rc = read_hidden(r->point, "events", EVENT_LINES_MAX, take_event, r, &r->events_known);
    if (rc == 0) {
        read_models(r);
        read_configuration(r);
    }
    return rc;
}

/* ---------------------------------------------------------------------- output */

/* Other things than regular files are not replaced: root may write /dev/null. */
static int check_output(const char *path)
{
    struct stat st;

    if (strcmp(path, "-") == 0 || stat(path, &st) != 0 || S_ISREG(st.st_mode))
        return 0;
    ht_error("%s is no regular file: name a file, or - for standard output", path);
    return -EINVAL;
}

static int put_page(const char *path, const struct ht_buf *page)
{
    mode_t mask = umask(0);
    int rc = page->err;

    umask(mask);
    if (rc == 0)
        rc = strcmp(path, "-") == 0 ? ht_write_all(STDOUT_FILENO, page->data, page->len)
                                    : ht_file_replace(path, page->data, page->len, 0666 & ~mask);
    if (rc < 0)
        ht_error("%s: the report cannot be written: %s", strcmp(path, "-") == 0 ? "standard output" : path,
                 strerror(-rc));
    return rc;
}

static int read_loss(struct ht_report *r)
{
    int rc = r->loss_path ? ht_report_loss_read(r->loss_path, &r->loss) : 0;

    if (rc == -ENODATA)
        ht_error("%s: no line has a loss: expected CSV with the columns step and loss, or JSON Lines with these keys",
                 r->loss_path);
    else if (rc == -EINVAL)
        ht_error("%s is no regular file", r->loss_path);
    else if (rc < 0)
        ht_error("%s: %s", r->loss_path, strerror(-rc));
    return rc;
}

/* No option names losses: the newest of these files in a model's root has them, if one has any. */
static void find_loss(struct ht_report *r)
{
    static const char *const names[] = {"loss.jsonl", "loss.csv"};
    struct timespec newest = {0};
    char path[PATH_MAX];
    struct stat st;

    for (unsigned i = 0; i < r->models * HT_ARRAY_SIZE(names); i++) {
        const struct ht_report_model *m = &r->model[i / HT_ARRAY_SIZE(names)];
        int len = snprintf(path, sizeof(path), "%s%s/%s", r->point, m->path, names[i % HT_ARRAY_SIZE(names)]);
        if (len >= (int)sizeof(path) || lstat(path, &st) != 0 || !S_ISREG(st.st_mode) ||
            st.st_mtim.tv_sec < newest.tv_sec ||
            (st.st_mtim.tv_sec == newest.tv_sec && st.st_mtim.tv_nsec < newest.tv_nsec))
            continue;
        newest = st.st_mtim;
        memcpy(r->found_loss, path, (size_t)len + 1);
    }
    if (r->found_loss[0] != '\0' && ht_report_loss_read(r->found_loss, &r->loss) == 0)
        r->loss_path = r->found_loss;
}

static int report(struct ht_report *r, const char *output)
{
    struct ht_buf page = HT_BUF_INIT;
    int rc = check_output(output);

    if (rc == 0)
        rc = read_loss(r);
    if (rc == 0)
        rc = gather(r);
    if (rc == 0) {
        if (!r->loss_path)
            find_loss(r);
        ht_report_page(r, &page);
        rc = put_page(output, &page);
    }
    ht_buf_free(&page);
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}

int ht_cmd_report(const char *path, const struct ht_cmd_options *o)
{
    struct ht_report *r = calloc(1, sizeof(*r));
    struct ht_mount_entry *m = malloc(sizeof(*m));
    char point[PATH_MAX];
    int status = HT_CMD_FAILED;

    if (!o->output) {
        ht_error("expected -o and the name of the page, as in -o report.html");
        status = HT_CMD_USAGE;
    } else if (!r || !m || !(r->sample = calloc(1, sizeof(*r->sample))) ||
               !(r->event = calloc(HT_REPORT_EVENTS_MAX, sizeof(*r->event))) || ht_report_trace_new(&r->trace) < 0) {
        ht_error("%s: %s", path, strerror(ENOMEM));
    } else if (ht_cmd_mount_point(path, point) == 0 && ht_mount_at(point, m) == 0) {
        r->point = point;
        r->source = m->source;
        r->options = m->super_options;
        r->loss_path = o->loss;
        status = report(r, o->output);
    }
    if (r) {
        ht_report_trace_free(&r->trace);
        free(r->event);
        free(r->sample);
    }
    free(m);
    free(r);
    return status;
}
