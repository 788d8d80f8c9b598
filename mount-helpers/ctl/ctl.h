/* SPDX-License-Identifier: Apache-2.0 */
/* ctl.h - the common part of the commands of hitrainctl. */
#pragma once

#include <limits.h>
#include "tiering/base/log.h"

/* Exit codes of hitrainctl. */
enum { HT_CMD_OK = 0, HT_CMD_FAILED = 1, HT_CMD_USAGE = 2 };

struct ht_cmd_options {
    const char *command;
    const char *point; /* where the store of the path is mounted; of commands that are for a mount */
    bool help, version;
    const char *verb;   /* scrub, background, trace: the action */
    const char *engine; /* background: the only one; NULL: all */
    bool json;
    double watch_s;                /* stats: again after so many seconds; 0: once. top: the interval */
    bool once;                     /* top: one picture */
    const char *listen, *textfile; /* metrics: an address and a port; a file; or NULL */
    bool follow;                   /* events, trace: continue with new entries */
    uint64_t since;                /* events, trace: after this number */
    enum ht_log_level level;       /* events: at least so important */
    bool conditional;              /* step, commit, abort: only while step_open is this number */
    uint64_t step_open;
    bool async;         /* step: do not wait until it is closed */
    bool full;          /* commit: parameters and state, in place of logged steps */
    const char *svg;    /* plan: the file to draw into, or NULL */
    const char *vault;  /* steps: the URL of a job, or NULL */
    char *const *words; /* commands for kept steps: what stands after the path, and NULL */
    bool udev;          /* features: for udev */
    const char *output; /* report: the page, or NULL */
    const char *loss;   /* report: a file of losses, or NULL */
    uint64_t to, lost;  /* reshard: the number of ranks; the rank that is gone, if one is */
    bool loses;
    bool all;                               /* forget: all kept steps */
    uint64_t params, tensors, retain, redo; /* size: 0 where they were not given */
    const char *dtype, *optimizer;          /* or NULL */
};

/* Each command in its own file. Returns an exit code, and prints errors. */
int ht_cmd_stats(const char *path, const struct ht_cmd_options *o);
int ht_cmd_show(const char *path, const struct ht_cmd_options *o);
int ht_cmd_commit(const char *path, const struct ht_cmd_options *o);
int ht_cmd_steps(const char *path, const struct ht_cmd_options *o);
int ht_cmd_plan(const char *path, const struct ht_cmd_options *o);
/* A command that reads its own words, of which the first one is its name. */
int ht_cmd_vault(int count, char *const *words);
int ht_cmd_report(const char *path, const struct ht_cmd_options *o);
int ht_cmd_top(const char *path, const struct ht_cmd_options *o);
int ht_cmd_metrics(const char *path, const struct ht_cmd_options *o);
int ht_cmd_features(const char *path, const struct ht_cmd_options *o);
int ht_cmd_doctor(const char *path, const struct ht_cmd_options *o); /* path: NULL for the machine alone */
int ht_cmd_size(const char *path, const struct ht_cmd_options *o);   /* path: NULL */
int ht_cmd_move(const char *path, const struct ht_cmd_options *o);   /* prefetch, evict */
int ht_cmd_dump(const char *path, const struct ht_cmd_options *o);
int ht_cmd_trim(const char *path, const struct ht_cmd_options *o);
int ht_cmd_background(const char *path, const struct ht_cmd_options *o);
int ht_cmd_scrub(const char *path, const struct ht_cmd_options *o);
int ht_cmd_step(const char *path, const struct ht_cmd_options *o);
int ht_cmd_abort(const char *path, const struct ht_cmd_options *o);
int ht_cmd_parameter(const char *path, const struct ht_cmd_options *o); /* wait, reset, drop */
int ht_cmd_snapshot(const char *path, const struct ht_cmd_options *o);
int ht_cmd_rollback(const char *path, const struct ht_cmd_options *o);
int ht_cmd_delta(const char *path, const struct ht_cmd_options *o);
int ht_cmd_clone(const char *path, const struct ht_cmd_options *o);
int ht_cmd_forget(const char *path, const struct ht_cmd_options *o);
int ht_cmd_reshard(const char *path, const struct ht_cmd_options *o);

/* A line of a hidden file of JSON Lines. */
enum { HT_CMD_FIELDS_MAX = 48 };
struct ht_cmd_field {
    const char *key;
    char *value;
    bool is_text; /* a string of JSON */
};
struct ht_cmd_line {
    struct ht_cmd_field field[HT_CMD_FIELDS_MAX]; /* the first ones */
    unsigned count;
};
/*
 * Cuts one JSON object of strings, numbers, true and false into its fields. text is one line and must live as long as
 * out. -EPROTO: text is none, and *out is undefined.
 */
int ht_cmd_parse_json(char *text, struct ht_cmd_line *out) HT_MUST_CHECK;
/* "" and 0 when there is none. */
const char *ht_cmd_value(const struct ht_cmd_line *l, const char *key);
uint64_t ht_cmd_number(const struct ht_cmd_line *l, const char *key);

/*
 * The attribute user.hitrain.WORD of a path, with a NUL after it; free it. -ENODATA: not set. Prints other errors
 * unless quiet, among them that the path is not on a hitrain mount.
 */
int ht_cmd_attribute(const char *path, const char *word, bool quiet, char **out_text) HT_MUST_CHECK;
/* The place of the hitrain mount that path lies on. -errno: it is on none; prints the reason. */
int ht_cmd_mount_point(const char *path, char out[PATH_MAX]) HT_MUST_CHECK;
/*
 * Has the daemon of the mount at point run a line of .hitrain/ctl. Returns 0 or -errno, and prints the error with path.
 */
int ht_cmd_command(const char *path, const char *point, const char *line) HT_MUST_CHECK;
/* Reports why a path of a mount cannot be used; returns err. */
int ht_cmd_explain(const char *path, int err);
