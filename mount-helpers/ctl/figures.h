/* SPDX-License-Identifier: Apache-2.0 */
/* figures.h - the counters of a mounted store, by name: the lines of the attribute stats, and texts of hidden files. */
#pragma once

#include <sys/types.h>
#include "mount-helpers/ctl/ctl.h"

enum { HT_FIGURES_MAX = 512 };

struct ht_figures {
    char *text; /* free with ht_figures_free */
    unsigned count;
    struct {
        const char *word;
        uint64_t value;
    } one[HT_FIGURES_MAX];
};

/* Takes the lines "word=number" of text, and text itself. */
void ht_figures_parse(char *text, struct ht_figures *out);
/* Those of the mount at point. -errno: printed. */
int ht_figures_read(const char *point, struct ht_figures *out) HT_MUST_CHECK;
void ht_figures_free(struct ht_figures *f);
/* 0 when there is none. */
uint64_t ht_figure(const struct ht_figures *f, const char *word);

/* The whole text of .hitrain/NAME of the mount at point, with a NUL after it; free it. Above 16 MiB: -EFBIG. */
int ht_hidden_text(const char *point, const char *name, char **out_text) HT_MUST_CHECK;
/* Makes or replaces a file. Its readers see the old content or the new one, whole. */
int ht_file_replace(const char *path, const void *data, size_t len, mode_t mode) HT_MUST_CHECK;
