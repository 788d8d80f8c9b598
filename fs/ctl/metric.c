/* SPDX-License-Identifier: Apache-2.0 */
/* metric.c - the parts of a metric that all tables of figures need. */
#include "fs/ctl/ctl_priv.h"

uint64_t ht_metrics_value(const void *of, size_t offset)
{
    uint64_t v;

    memcpy(&v, (const char *)of + offset, sizeof(v));
    return v;
}

void ht_metrics_head(struct ht_buf *out, const char *name, const char *type, const char *help)
{
    size_t len = strlen(name);

    ht_buf_printf(out, "# TYPE %s %s\n", name, type);
    if (len > 6 && strcmp(name + len - 6, "_bytes") == 0)
        ht_buf_printf(out, "# UNIT %s bytes\n", name);
    ht_buf_printf(out, "# HELP %s %s\n", name, help);
}

void ht_metrics_label(const char *path, char *out, size_t cap)
{
    size_t n = 0;

    for (; *path && n + 3 < cap; path++) {
        if (*path == '\\' || *path == '"' || *path == '\n')
            out[n++] = '\\';
        out[n++] = *path == '\n' ? 'n' : *path;
    }
    out[n] = 0;
}
