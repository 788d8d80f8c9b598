/* SPDX-License-Identifier: Apache-2.0 */
/*
 * report_loss.c - losses from a file that a trainer wrote: CSV with the columns step and loss, or JSON Lines with these
 * keys. The file may be of any length: neighbouring points become one when there are too many.
 */
#include "mount-helpers/ctl/report.h"

#include <ctype.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINE_BYTES = 8192 };

/* -------------------------------------------------------------------- points */

/* Each point becomes the mean of two. */
static void halve(struct ht_report_loss *l)
{
    for (unsigned i = 0; i < HT_REPORT_LOSS_MAX / 2; i++) {
        l->step[i] = (l->step[2 * i] + l->step[2 * i + 1]) / 2;
        l->loss[i] = (l->loss[2 * i] + l->loss[2 * i + 1]) / 2;
    }
    l->count /= 2;
    l->each *= 2;
}

static void add(struct ht_report_loss *l, double step, double loss)
{
    if (!l->each)
        l->each = 1;
    if (l->in_point == 0) {
        if (l->count == HT_REPORT_LOSS_MAX)
            halve(l);
        l->step[l->count] = l->loss[l->count] = 0;
        l->count++;
    }
    /* the mean of what has come for this point */
    double n = (double)++l->in_point;
    l->step[l->count - 1] += (step - l->step[l->count - 1]) / n;
    l->loss[l->count - 1] += (loss - l->loss[l->count - 1]) / n;
    l->points++;
    if (l->in_point == l->each)
        l->in_point = 0;
}

/* --------------------------------------------------------------------- lines */

static bool number(const char *text, double *out)
{
    char *end;

    while (isspace((unsigned char)*text))
        text++;
    *out = strtod(text, &end);
    while (isspace((unsigned char)*end))
        end++;
    return end != text && *end == '\0' && isfinite(*out);
}

static char *trim(char *word)
{
    word += strspn(word, " \t\"");
    word[strcspn(word, "\"\r\n")] = '\0';
    for (size_t n = strlen(word); n && isspace((unsigned char)word[n - 1]); n--)
        word[n - 1] = '\0';
    return word;
}

static bool take_json(struct ht_report_loss *l, char *line)
{
    struct ht_cmd_line fields;
    double step, loss;

    if (ht_cmd_parse_json(line, &fields) != 0 || !number(ht_cmd_value(&fields, "loss"), &loss))
        return false;
    if (!number(ht_cmd_value(&fields, "step"), &step))
        step = (double)(l->points + l->skipped + 1);
    add(l, step, loss);
    return true;
}

/* The first line is a header if it names a column loss; else the columns are step and loss, or loss alone. */
static bool take_csv(struct ht_report_loss *l, struct ht_loss_columns *c, char *line)
{
    double step = (double)(l->points + l->skipped + 1), loss = 0;
    bool has_loss = false, was_known = c->known;
    struct ht_loss_columns header = {.step = -1, .loss = -1};
    int fields = 0;

    if (!c->known)
        *c = (struct ht_loss_columns){
            .step = strchr(line, ',') ? 0 : -1, .loss = strchr(line, ',') ? 1 : 0, .known = true};
    for (char *at = line, *word; at; fields++) {
        word = trim(strsep(&at, ","));
        if (!was_known && strcmp(word, "loss") == 0)
            header.loss = fields;
        if (!was_known && strcmp(word, "step") == 0)
            header.step = fields;
        if (fields == c->loss)
            has_loss = number(word, &loss);
        if (fields == c->step && !number(word, &step))
            step = (double)(l->points + l->skipped + 1);
    }
    if (header.loss >= 0) {
        *c = header;
        c->known = true;
        return true;
    }
    if (has_loss)
        add(l, step, loss);
    return has_loss;
}

void ht_report_loss_line(struct ht_report_loss *l, struct ht_loss_columns *c, char *line)
{
    line += strspn(line, " \t\r\n");
    if (*line == '\0')
        return;
    if (!(*line == '{' ? take_json(l, line) : take_csv(l, c, line)))
        l->skipped++;
}

int ht_report_loss_read(const char *path, struct ht_report_loss *out)
{
    struct ht_loss_columns columns = {0};
    char line[LINE_BYTES];
    bool whole = true; /* the line before has ended */
    struct stat st = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc;

    *out = (struct ht_report_loss){0};
    if (fd < 0)
        return -errno;
    FILE *f = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? fdopen(fd, "r") : NULL;
    if (!f) {
        close(fd);
        return S_ISREG(st.st_mode) ? -ENOMEM : -EINVAL;
    }
    while (fgets(line, sizeof(line), f)) {
        bool ends = strchr(line, '\n') || feof(f);
        if (whole && ends)
            ht_report_loss_line(out, &columns, line);
        else if (whole)
            out->skipped++;
        whole = ends;
    }
    rc = ferror(f) ? -EIO : out->points ? 0 : -ENODATA;
    fclose(f);
    return rc;
}
