/* SPDX-License-Identifier: Apache-2.0 */
/*
 * show.h - the commands that print a hidden file of JSON Lines: `hitrainctl device`, `events`, `roots`, `steps`,
 * `trace`, and the state of `background`.
 */
#pragma once

#include "mount-helpers/ctl/ctl.h"

struct ht_column {
    const char *head;
    int width; /* negative: to the left; 0: the last one */
    void (*text)(const struct ht_cmd_line *l, const struct ht_column *c, char *buf, size_t cap);
    const char *key, *other; /* or NULL */
};

enum { HT_SHOW_TABLES_MAX = 3 };
struct ht_show {
    const char *command, *file;
    const char *entries;      /* the name of lines with a number, in a message; NULL: they have none */
    uint64_t most;            /* entries to print at most without --follow; 0: all */
    const char *place, *list; /* of --json: the key of the path, and that of the lines; NULL: the lines alone */
    const char *const *keys;  /* of a line of --json, and NULL; or NULL: all */
    bool path_given;          /* that path is the argument; else it is the mount's root, or the model */
    bool of_root;             /* the argument is a model root; else the file is in the mount's root */
    const struct ht_column *table[HT_SHOW_TABLES_MAX];
};

const struct ht_show *ht_show_find(const char *command);
/* On stdout. l: NULL for the heads of the columns. */
void ht_show_line(const struct ht_column *table, bool colours, const struct ht_cmd_line *l);
/* keys: as of a command. */
void ht_show_json(struct ht_json *j, const char *const *keys, const struct ht_cmd_line *l);
/* HT_LOG_LEVELS: it has none. */
enum ht_log_level ht_show_level(const struct ht_cmd_line *l);
