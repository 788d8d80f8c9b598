/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roots.c - `hitrainctl roots`: the model roots of a mounted store, by the metrics in .hitrain/stats of the mount's
 * root. These name the roots only that the caller could find.
 */
#include "mount-helpers/ctl/figures.h"

#include <stdio.h>
#include <stdlib.h>

#include "tiering/base/json.h"
#include "mount-helpers/common/text.h"
#include <hitrain/words.h>

enum { STATS_BYTES_MAX = 16 << 20 };

/* ------------------------------------------------------------------ metrics */

/* Returns the labels after the name of a metric that has a root; NULL: the line has another metric. */
static const char *labels_of(const char *line, const char *metric)
{
    size_t len = strlen(metric);

    return strncmp(line, metric, len) == 0 && strncmp(line + len, "{root=\"", 7) == 0 ? line + len : NULL;
}

struct metrics {
    char *text;
    char **line;
    size_t count;
};

static const char *find(const struct metrics *m, const char *metric, const char *root)
{
    char of[PATH_MAX];

    for (size_t i = 0; i < m->count; i++) {
        const char *labels = labels_of(m->line[i], metric);
        if (labels && ht_label_of(labels, "root", of, sizeof(of)) && strcmp(of, root) == 0)
            return labels;
    }
    return NULL;
}

/* The value at the end of a line, or "". */
static const char *value_of(const struct metrics *m, const char *metric, const char *root)
{
    const char *labels = find(m, metric, root), *blank = labels ? strrchr(labels, ' ') : NULL;

    return blank ? blank + 1 : "";
}

static int cut_lines(struct metrics *m)
{
    char *save;
    size_t lines = 1;

    for (const char *p = m->text; *p != '\0'; p++)
        lines += *p == '\n';
    m->line = malloc(lines * sizeof(*m->line));
    if (!m->line)
        return -ENOMEM;
    for (char *l = strtok_r(m->text, "\n", &save); l; l = strtok_r(NULL, "\n", &save))
        if (strstr(l, "{root=\""))
            m->line[m->count++] = l;
    return 0;
}

/* ------------------------------------------------------------------- output */

static void put_json(struct ht_json *j, const struct metrics *m, const char *root)
{
    const char *claim = find(m, "hitrain_claimed", root), *norm = value_of(m, "hitrain_grad_norm", root);
    char text[128];

    ht_json_object(j, NULL);
    ht_json_str(j, "path", root);
    ht_json_word(j, "step", value_of(m, "hitrain_step", root));
    ht_json_word(j, "durable_step", value_of(m, "hitrain_durable_step", root));
    ht_json_bool(j, "open", strcmp(value_of(m, "hitrain_step_open", root), "1") == 0);
    ht_json_word(j, "parameters", value_of(m, "hitrain_parameters", root));
    if (norm[0] != '\0')
        ht_json_word(j, "grad_norm", norm);
    if (claim && ht_label_of(claim, "name", text, sizeof(text)))
        ht_json_str(j, "claimed_by", text);
    if (claim && ht_label_of(claim, "pid", text, sizeof(text)))
        ht_json_word(j, "pid", text);
    ht_json_end(j);
}

static void put_for_people(const struct metrics *m, const char *root)
{
    const char *claim = find(m, "hitrain_claimed", root), *norm = value_of(m, "hitrain_grad_norm", root);
    char name[128] = "-", pid[32];

    if (claim && ht_label_of(claim, "name", name, 80) && ht_label_of(claim, "pid", pid, sizeof(pid)))
        snprintf(name + strlen(name), sizeof(name) - strlen(name), " (%s)", pid);
    printf("%12s %12s  %-4s %10s  %-10.10s  ", value_of(m, "hitrain_step", root),
           value_of(m, "hitrain_durable_step", root),
           strcmp(value_of(m, "hitrain_step_open", root), "1") == 0 ? "yes" : "no",
           value_of(m, "hitrain_parameters", root), norm[0] != '\0' ? norm : "-");
    ht_put_printable(name, stdout);
    fputs("  ", stdout);
    ht_put_printable(root, stdout);
    putchar('\n');
}

static void put_all(const char *point, const struct metrics *m, const struct ht_cmd_options *o)
{
    char root[PATH_MAX];
    struct ht_json j;

    if (o->json) {
        ht_json_init(&j, stdout);
        ht_json_object(&j, NULL);
        ht_json_str(&j, "path", point);
        ht_json_array(&j, "roots");
    } else {
        puts("        step      durable  open parameters  grad_norm   claimed by  path");
    }
    for (size_t i = 0; i < m->count; i++) {
        const char *labels = labels_of(m->line[i], "hitrain_step");
        if (!labels || !ht_label_of(labels, "root", root, sizeof(root)))
            continue;
        if (o->json)
            put_json(&j, m, root);
        else
            put_for_people(m, root);
    }
    if (o->json) {
        ht_json_end(&j);
        ht_json_end(&j);
    }
}

int ht_cmd_roots(const char *path, const struct ht_cmd_options *o)
{
    char point[PATH_MAX], stats[PATH_MAX + 32];
    struct metrics m = {0};
    int rc = ht_cmd_mount_point(path, point);

    if (rc < 0)
        return HT_CMD_FAILED;
    snprintf(stats, sizeof(stats), "%s/" HT_CTL_DIR "/stats", point);
    rc = ht_file_text(stats, STATS_BYTES_MAX, &m.text);
    if (rc < 0) {
        ht_cmd_explain(stats, rc);
        return HT_CMD_FAILED;
    }
    rc = cut_lines(&m);
    if (rc == 0)
        put_all(point, &m, o);
    else
        ht_cmd_explain(stats, rc);
    free(m.line);
    free(m.text);
    if (fflush(stdout) != 0) {
        ht_error("cannot write: %s", strerror(errno));
        return HT_CMD_FAILED;
    }
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}
