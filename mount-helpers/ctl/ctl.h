/* SPDX-License-Identifier: Apache-2.0 */
/* ctl.h - the common part of the commands of hitrainctl. */
#pragma once

#include <limits.h>
#include "mount-helpers/common/text.h"
#include "tiering/base/json.h"
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

/* A command. Returns an exit code, and prints errors. path: NULL for size, and for doctor of the machine alone. */
typedef int ht_cmd(const char *path, const struct ht_cmd_options *o);
/* steer.c, steps.c, reshard.c. parameter: wait, reset, drop; move: prefetch, evict. */
ht_cmd ht_cmd_parameter, ht_cmd_step, ht_cmd_abort, ht_cmd_commit, ht_cmd_move, ht_cmd_scrub, ht_cmd_trim;
ht_cmd ht_cmd_snapshot, ht_cmd_rollback, ht_cmd_forget, ht_cmd_clone, ht_cmd_delta;
ht_cmd ht_cmd_reshard;
/* Those of look/, each in its file; show.c has background, and tools.c plan, report and steps. */
ht_cmd ht_cmd_stats, ht_cmd_show, ht_cmd_background, ht_cmd_top, ht_cmd_metrics, ht_cmd_features, ht_cmd_doctor;
ht_cmd ht_cmd_size, ht_cmd_dump, ht_cmd_plan, ht_cmd_report, ht_cmd_steps;
/* tools.c. A command that reads its own words, of which the first one is its name. */
int ht_cmd_vault(int count, char *const *words);

/* The dtype of a parameter by its word; HT_DTYPE_NONE: no parameter has such a one. */
uint8_t ht_cmd_trained_dtype(const char *word);
/* Begins the object of --json, with the place that it is about. */
static inline void ht_cmd_json_begin(struct ht_json *j, const char *key, const char *place)
{
    ht_json_init(j, stdout);
    ht_json_object(j, NULL);
    ht_json_str(j, key, place);
}

/* ----------------------------------------------------------------- mount.c */

/* A line of a hidden file of JSON Lines. Strings are the reverse of tiering/base/json.h: \udcXX is the byte XX. */
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
/* The whole text of .hitrain/NAME of the mount at point, with a NUL after it; free it. Above 16 MiB: -EFBIG. */
int ht_hidden_text(const char *point, const char *name, char **out_text) HT_MUST_CHECK;

/* The attribute stats: the counters of a path or, at the mount's root, of the store; free it. -errno: printed. */
int ht_figures_read(const char *path, char **out_text) HT_MUST_CHECK;
/* The number of the line "word=number"; 0 when there is none. */
uint64_t ht_figure(const char *text, const char *word);
