/* SPDX-License-Identifier: Apache-2.0 */
/* top_sample.c - reads .hitrain/stats into the figures that `hitrainctl top` shows. See top.h. */
#include "mount-helpers/ctl/top.h"

#include <stdio.h>
#include <stdlib.h>

#include "mount-helpers/ctl/figures.h"
#include <hitrain/words.h>

enum { STATS_BYTES_MAX = 16 << 20 };

static const char *const store_words[HT_TOP_STORE_FIGURES] = {
    [HT_TOP_TOTAL] = "total_bytes",
    [HT_TOP_AVAILABLE] = "available_bytes",
    [HT_TOP_DRAM] = "dram_bytes",
    [HT_TOP_RESIDENT] = "resident_bytes",
    [HT_TOP_DIRTY] = "dirty_bytes",
    [HT_TOP_PROTECTED] = "protected_bytes",
    [HT_TOP_PASSTHROUGH] = "passthrough_used_bytes",
    [HT_TOP_STAGING] = "staging_bytes",
    [HT_TOP_STAGING_USED] = "staging_used_bytes",
    [HT_TOP_HITS] = "hits_total",
    [HT_TOP_MISSES] = "misses_total",
    [HT_TOP_EVICTIONS] = "evictions_total",
    [HT_TOP_WRITEBACKS] = "writebacks_total",
    [HT_TOP_PARKED] = "mount_parked_reads_total",
    [HT_TOP_ROOM_WAITS] = "room_waits_total",
    [HT_TOP_JOBS] = "mount_job_threads",
    [HT_TOP_REQUESTS] = "mount_requests_total",
    [HT_TOP_LOG] = "log_bytes",
    [HT_TOP_LOG_USED] = "log_used_bytes",
};
static const char *const device_words[HT_TOP_DEVICE_FIGURES] = {
    [HT_TOP_READ] = "device_read_bytes_total",
    [HT_TOP_WRITTEN] = "device_written_bytes_total",
    [HT_TOP_URGENT] = "device_urgent_bytes",
    [HT_TOP_PLANNED] = "device_planned_bytes",
    [HT_TOP_BACKGROUND] = "device_background_bytes",
    [HT_TOP_URGENT_MOVED] = "device_urgent_moved_bytes_total",
    [HT_TOP_PLANNED_MOVED] = "device_planned_moved_bytes_total",
    [HT_TOP_BACKGROUND_MOVED] = "device_background_moved_bytes_total",
    [HT_TOP_PLANNED_WAITS] = "device_planned_waits_total",
    [HT_TOP_BACKGROUND_WAITS] = "device_background_waits_total",
    [HT_TOP_OLDEST] = "device_oldest_request_ns",
};
static const char *const root_words[HT_TOP_ROOT_FIGURES] = {
    [HT_TOP_STEP] = "step",
    [HT_TOP_DURABLE] = "durable_step",
    [HT_TOP_OPEN] = "step_open",
    [HT_TOP_GRAD] = "grad_bytes_total",
    [HT_TOP_ELEMENTS] = "updated_elements_total",
    [HT_TOP_UPDATE_NS] = "update_ns_total",
    [HT_TOP_COMMIT_NS] = "commit_ns_total",
    [HT_TOP_STATE] = "state_bytes",
};

static int row_of(const char *const *words, unsigned count, const char *word)
{
    for (unsigned i = 0; i < count; i++)
        if (strcmp(words[i], word) == 0)
            return (int)i;
    return -1;
}

/* The part with this name, new if there is room; NULL: there is none. Metrics list parts in the same order. */
static struct ht_top_part *part_of(struct ht_top_part *list, unsigned *count, unsigned max, const char *name)
{
    for (unsigned i = *count; i-- > 0;)
        if (strcmp(list[i].name, name) == 0)
            return &list[i];
    if (*count == max)
        return NULL;
    struct ht_top_part *p = &list[(*count)++];
    memset(p, 0, sizeof(*p));
    snprintf(p->name, sizeof(p->name), "%s", name);
    return p;
}

/* The number of a device; its path comes with another metric. */
static bool device_of(const char *labels, unsigned *out)
{
    char number[16];

    if (!ht_label_of(labels, "device", number, sizeof(number)))
        return false;
    *out = (unsigned)strtoul(number, NULL, 10);
    return *out < HT_DEVICES_MAX;
}

static void take_device(struct ht_top_sample *s, const char *word, const char *labels, uint64_t value)
{
    int row = row_of(device_words, HT_TOP_DEVICE_FIGURES, word);
    unsigned i;

    if (!device_of(labels, &i))
        return;
    if (i >= s->devices)
        s->devices = i + 1;
    if (row >= 0)
        s->device[i].value[row] = value;
    else if (strcmp(word, "device_info") == 0)
        (void)ht_label_of(labels, "path", s->device[i].name, sizeof(s->device[i].name));
    else if (strcmp(word, "device_health") == 0 && value == 1)
        (void)ht_label_of(labels, "hitrain_device_health", s->device[i].state, sizeof(s->device[i].state));
}

static void take_root(struct ht_top_sample *s, const char *word, const char *labels, uint64_t value)
{
    int row = row_of(root_words, HT_TOP_ROOT_FIGURES, word);
    char name[HT_TOP_NAME_MAX];

    if (row < 0 || !ht_label_of(labels, "root", name, sizeof(name)))
        return;
    struct ht_top_part *p = part_of(s->root, &s->roots, HT_TOP_ROOTS_MAX, name);
    if (p)
        p->value[row] = value;
}

static void take_engine(struct ht_top_sample *s, const char *word, const char *labels, uint64_t value)
{
    char name[HT_TOP_NAME_MAX];

    if (!ht_label_of(labels, "engine", name, sizeof(name)))
        return;
    struct ht_top_part *p = part_of(s->engine, &s->engines, HT_TOP_ENGINES_MAX, name);
    if (p && strcmp(word, "background_moved_bytes_total") == 0)
        p->value[HT_TOP_READ] = value;
    else if (p && strcmp(word, "background_state") == 0 && value == 1)
        (void)ht_label_of(labels, "hitrain_background_state", p->state, sizeof(p->state));
}

static void take_event(struct ht_top_sample *s, const char *labels, uint64_t value)
{
    char level[16];

    if (!ht_label_of(labels, "level", level, sizeof(level)))
        return;
    if (strcmp(level, "error") == 0)
        s->errors += value;
    else if (strcmp(level, "warn") == 0)
        s->warnings += value;
}

static void take_line(struct ht_top_sample *s, char *line)
{
    static const char prefix[] = "hitrain_";
    char *blank = strrchr(line, ' '), *labels = strchr(line, '{');

    if (!blank || strncmp(line, prefix, strlen(prefix)) != 0)
        return;
    uint64_t value = strtoull(blank + 1, NULL, 10);
    const char *word = line + strlen(prefix);
    if (!labels) {
        *blank = '\0';
        int row = row_of(store_words, HT_TOP_STORE_FIGURES, word);
        if (row >= 0)
            s->store[row] = value;
        return;
    }
    *labels++ = '\0';
    if (strcmp(word, "events_total") == 0)
        take_event(s, labels, value);
    else if (strncmp(word, "device_", 7) == 0)
        take_device(s, word, labels, value);
    else if (strncmp(word, "background_", 11) == 0)
        take_engine(s, word, labels, value);
    else
        take_root(s, word, labels, value);
}

void ht_top_parse(char *text, uint64_t at_ns, struct ht_top_sample *out)
{
    char *save;

    memset(out, 0, sizeof(*out));
    out->at_ns = at_ns;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        take_line(out, line);
}

int ht_top_read(const char *point, struct ht_top_sample *out)
{
    char path[PATH_MAX + 32], *text;

    snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/stats", point);
    int rc = ht_file_text(path, STATS_BYTES_MAX, &text);
    if (rc < 0)
        return rc;
    ht_top_parse(text, ht_now_ns(), out);
    free(text);
    return 0;
}

double ht_top_rate(uint64_t now, uint64_t before, uint64_t ns)
{
    return now > before && ns ? (double)(now - before) * 1e9 / (double)ns : 0;
}

const struct ht_top_part *ht_top_same(const struct ht_top_part *part, const struct ht_top_part *list, unsigned count,
                                      unsigned hint)
{
    if (hint < count && strcmp(list[hint].name, part->name) == 0)
        return &list[hint];
    for (unsigned i = 0; i < count; i++)
        if (strcmp(list[i].name, part->name) == 0)
            return &list[i];
    return NULL;
}
