/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report.h - the parts of `hitrainctl report`: what it gathers, and the page.
 *
 * All of it is bounded: the trace has 65536 accesses, and the page shows the largest and the newest of everything.
 */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_REPORT_H
#define HITRAIN_MOUNT_HELPERS_CTL_REPORT_H

#include "mount-helpers/ctl/html.h"
#include "mount-helpers/ctl/plan_columns.h"
#include "mount-helpers/ctl/top.h"

/* What is drawn of an access: the others have no bytes. */
enum ht_report_op { HT_REPORT_READ, HT_REPORT_WRITE, HT_REPORT_GRADIENT, HT_REPORT_UPDATE, HT_REPORT_OPS };
enum {
    HT_REPORT_ACCESSES_MAX = 1 << 16,
    HT_REPORT_EVENTS_MAX = 200,
    HT_REPORT_LOSS_MAX = 1024,
    HT_REPORT_MODELS_MAX = 64
};
extern const char *const ht_report_op_words[HT_REPORT_OPS];

struct ht_report_file {
    uint64_t id, bytes[HT_REPORT_OPS], waited_ns;
    char *path; /* "": it has none any more */
};

struct ht_report_access {
    uint64_t time_ns, bytes, waited_ns;
    uint32_t file;
    enum ht_report_op op;
};

/* The end of a step. */
struct ht_report_step {
    uint64_t time_ns;
    uint32_t file; /* the model */
};

struct ht_report_trace {
    struct ht_report_file *file; /* in the order of their first access */
    uint32_t *slot;              /* hash of ids: number of the file + 1 */
    struct ht_report_access *access;
    struct ht_report_step *step;
    uint32_t files, accesses, steps;
    uint64_t first_ns, last_ns;
    bool has_gradient; /* since the last end of a step */
};

/* report_trace.c. */
int ht_report_trace_new(struct ht_report_trace *t) HT_MUST_CHECK;
/* One line of .hitrain/trace. */
int ht_report_trace_add(struct ht_report_trace *t, const struct ht_cmd_line *l) HT_MUST_CHECK;
void ht_report_trace_free(struct ht_report_trace *t);
/* Numbers of the files with the most bytes, most first. Returns how many. */
unsigned ht_report_trace_largest(const struct ht_report_trace *t, uint32_t *out, unsigned most);

/* report_loss.c: points of a file; where there are more, neighbours become their mean. */
struct ht_report_loss {
    double step[HT_REPORT_LOSS_MAX], loss[HT_REPORT_LOSS_MAX];
    unsigned count;
    uint64_t points, skipped; /* lines with a loss; others */
    uint64_t in_point, each;
};
/* One line of CSV or JSON Lines. */
struct ht_loss_columns {
    int step, loss; /* -1: not in the header */
    bool known;
};
void ht_report_loss_line(struct ht_report_loss *l, struct ht_loss_columns *c, char *line);
/* -errno; -ENODATA: no line has a loss. */
int ht_report_loss_read(const char *path, struct ht_report_loss *out) HT_MUST_CHECK;

struct ht_report_event {
    uint64_t time_ns, count;
    char level[8], code[32], path[256], text[512];
};

struct ht_report_model {
    const char *path;  /* below the mount */
    char config[1024]; /* its optimizer, or "" */
};

struct ht_report {
    const char *point, *source, *options; /* of the mount */
    char command[512];                    /* of the daemon, or "" */
    char store[64], label[64];            /* uuid; "": the device cannot be read */
    uint32_t format;
    struct ht_top_sample *sample;
    struct ht_report_trace trace;
    struct ht_plan_columns plan;
    bool plan_known, trace_known, events_known; /* the caller could read them */
    struct ht_report_event *event;              /* a ring of the newest */
    uint64_t events;
    struct ht_report_model model[HT_REPORT_MODELS_MAX];
    unsigned models;
    const char *loss_path; /* NULL: there is no file of losses */
    char found_loss[PATH_MAX];
    struct ht_report_loss loss;
    uint64_t wall_ns;
};

/* report_page.c, report_parts.c */
void ht_report_page(const struct ht_report *r, struct ht_buf *out);
void ht_report_put_steps(const struct ht_report *r, struct ht_buf *out);
void ht_report_put_traffic(const struct ht_report *r, struct ht_buf *out);
void ht_report_put_memory(const struct ht_report *r, struct ht_buf *out);

#endif
