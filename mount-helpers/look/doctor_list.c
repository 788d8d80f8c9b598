/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_list.c - findings, and the small files that checks read. See doctor.h. */
#include "mount-helpers/look/doctor.h"

#include <stdarg.h>
#include <unistd.h>

void ht_doctor_add(struct ht_doctor *d, enum ht_doctor_level level, const char *check, const char *fmt, ...)
{
    bool full = d->count == HT_DOCTOR_FINDINGS_MAX;
    struct ht_doctor_finding *f = &d->finding[d->count - full];
    va_list args;

    d->last = NULL;
    d->cut |= full;
    if (full && level <= f->level) /* the last place keeps the worst */
        return;
    *f = (struct ht_doctor_finding){.level = level, .check = check};
    d->last = f;
    va_start(args, fmt);
    vsnprintf(f->text, sizeof(f->text), fmt, args);
    va_end(args);
    if (!full)
        d->count++; /* last: this process may be killed, and another reads the list */
}

void ht_doctor_remedy(struct ht_doctor *d, const char *fmt, ...)
{
    va_list args;

    if (!d->last) /* the list had no room */
        return;
    va_start(args, fmt);
    vsnprintf(d->last->remedy, sizeof(d->last->remedy), fmt, args);
    va_end(args);
}

void ht_doctor_answered(const struct ht_doctor *d)
{
    if (d->told > 0 && write(d->told, ".", 1) != 1)
        _exit(1); /* the parent is gone, or has given up */
}

enum ht_doctor_level ht_doctor_worst(const struct ht_doctor *d, unsigned from)
{
    enum ht_doctor_level worst = HT_DOCTOR_OK;

    for (unsigned i = from; i < d->count; i++)
        worst = d->finding[i].level > worst ? d->finding[i].level : worst;
    return worst;
}

/* ------------------------------------------------------------- small files */

static bool read_line(const struct ht_doctor *d, char *out, size_t cap, const char *fmt, va_list args)
{
    char name[PATH_MAX], path[PATH_MAX];

    vsnprintf(name, sizeof(name), fmt, args);
    return snprintf(path, sizeof(path), "%s/%s", d->root, name) < (int)sizeof(path) && ht_read_line(path, out, cap);
}

bool ht_doctor_line(const struct ht_doctor *d, char *out, size_t cap, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    bool ok = read_line(d, out, cap, fmt, args);
    va_end(args);
    return ok;
}

bool ht_doctor_number(const struct ht_doctor *d, uint64_t *out, const char *fmt, ...)
{
    char line[64];
    va_list args;

    va_start(args, fmt);
    bool ok = read_line(d, line, sizeof(line), fmt, args);
    va_end(args);
    if (!ok || line[0] < '0' || line[0] > '9')
        return false;
    *out = strtoull(line, NULL, 10);
    return true;
}
