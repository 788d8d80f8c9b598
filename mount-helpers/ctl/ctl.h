/* SPDX-License-Identifier: Apache-2.0 */
/* ctl.h - what the commands of hitrainctl share. */
#ifndef HITRAIN_MOUNT_HELPERS_CTL_CTL_H
#define HITRAIN_MOUNT_HELPERS_CTL_CTL_H

#include <limits.h>
#include "tiering/base/log.h"

/* Exit codes of hitrainctl. */
enum { HT_CTL_OK = 0, HT_CTL_FAILED = 1, HT_CTL_USAGE = 2 };

struct ht_ctl_options {
    const char *verb; /* scrub: what to do */
    bool json;
    double watch_s;          /* stats: again after so many seconds; 0: once */
    bool follow;             /* events: go on with new ones */
    uint64_t since;          /* events: after this number */
    enum ht_log_level level; /* events: at least so important */
    bool conditional;        /* step, commit, abort: only while step_open is this number */
    uint64_t step_open;
};

/* Each command in its own file; path is on some mount or other. Returns an exit code; errors are told. */
int ht_ctl_stats(const char *path, const struct ht_ctl_options *o);
int ht_ctl_commit(const char *path, const struct ht_ctl_options *o);
int ht_ctl_events(const char *path, const struct ht_ctl_options *o);
int ht_ctl_device(const char *path, const struct ht_ctl_options *o);
int ht_ctl_prefetch(const char *path, const struct ht_ctl_options *o);
int ht_ctl_evict(const char *path, const struct ht_ctl_options *o);
int ht_ctl_scrub(const char *path, const struct ht_ctl_options *o);
int ht_ctl_step(const char *path, const struct ht_ctl_options *o);
int ht_ctl_abort(const char *path, const struct ht_ctl_options *o);
int ht_ctl_wait(const char *path, const struct ht_ctl_options *o);
int ht_ctl_reset(const char *path, const struct ht_ctl_options *o);
int ht_ctl_drop(const char *path, const struct ht_ctl_options *o);
int ht_ctl_roots(const char *path, const struct ht_ctl_options *o);

/* "VERB", or "VERB if=N" with the number of the options. As snprintf. */
int ht_ctl_line(const char *verb, const struct ht_ctl_options *o, char *buf, size_t cap);
/* commit.c: a figure of a model after a command, as a word of j, or printed where j is NULL. Nothing where path has none. */
struct ht_json;
void ht_ctl_put_number(struct ht_json *j, const char *path, const char *word);

/* A line key=value, separated by tabs, as the daemon tells events and devices. */
enum { HT_CTL_FIELDS_MAX = 24 };
struct ht_ctl_field {
    const char *key;
    char *value; /* as it came */
};
struct ht_ctl_line {
    struct ht_ctl_field field[HT_CTL_FIELDS_MAX];
    unsigned count;
};
/* Cuts text, which is one line and must live as long, into its fields. */
void ht_ctl_parse_line(char *text, struct ht_ctl_line *out);
/* "" and 0 when there is none. */
const char *ht_ctl_value(const struct ht_ctl_line *l, const char *key);
uint64_t ht_ctl_number(const struct ht_ctl_line *l, const char *key);

/*
 * The attribute user.hitrain.WORD of a path, with a NUL behind it; free it. -ENODATA: not set; other errors are told
 * unless quiet, among them that the path is not on a hitrain mount.
 */
int ht_ctl_attribute(const char *path, const char *word, bool quiet, char **out_text) HT_CHECK;
/* Whether path lies on a hitrain mount; why not is told. */
int ht_ctl_check_mount(const char *path) HT_CHECK;
/* The same, and where that is mounted. */
int ht_ctl_mount_point(const char *path, char out[PATH_MAX]) HT_CHECK;
/* Have the daemon of the mount at point run a line of .hitrain/ctl; why it did not is told, naming path. 0 or -errno. */
int ht_ctl_command(const char *path, const char *point, const char *line) HT_CHECK;
/* Say why a path of a mount cannot be used; returns err. */
int ht_ctl_explain(const char *path, int err);

#endif
