/* SPDX-License-Identifier: Apache-2.0 */
/* report_trace.c - the accesses of .hitrain/trace by file. See report.h. */
#include "mount-helpers/ctl/report.h"

#include <stdlib.h>

enum { SLOTS = 4 * HT_REPORT_ACCESSES_MAX, PATH_BYTES = 255 };

const char *const ht_report_op_words[HT_REPORT_OPS] = {"read", "write", "gradient", "update"};

int ht_report_trace_new(struct ht_report_trace *t)
{
    *t = (struct ht_report_trace){
        .file = calloc(HT_REPORT_ACCESSES_MAX, sizeof(*t->file)),
        .slot = calloc(SLOTS, sizeof(*t->slot)),
        .access = calloc(HT_REPORT_ACCESSES_MAX, sizeof(*t->access)),
        .step = calloc(HT_REPORT_ACCESSES_MAX, sizeof(*t->step)),
    };
    if (t->file && t->slot && t->access && t->step)
        return 0;
    ht_report_trace_free(t);
    return -ENOMEM;
}

void ht_report_trace_free(struct ht_report_trace *t)
{
    for (uint32_t i = 0; i < t->files; i++)
        free(t->file[i].path);
    free(t->file);
    free(t->slot);
    free(t->access);
    free(t->step);
    *t = (struct ht_report_trace){0};
}

/* The end of a long path tells more than its beginning. */
static char *copy_path(const char *path)
{
    size_t len = strlen(path);

    return strdup(len > PATH_BYTES ? path + len - PATH_BYTES : path);
}

/* NULL: no memory. There are at most as many files as lines. */
static struct ht_report_file *file_of(struct ht_report_trace *t, uint64_t id, const char *path)
{
    uint32_t at = (uint32_t)(id * 0x9e3779b97f4a7c15u >> 46) % SLOTS;

    while (t->slot[at] && t->file[t->slot[at] - 1].id != id)
        at = (at + 1) % SLOTS;
    if (!t->slot[at]) {
        char *copy = copy_path(path);
        if (!copy)
            return NULL;
        t->file[t->files] = (struct ht_report_file){.id = id, .path = copy};
        t->slot[at] = ++t->files;
    }
    return &t->file[t->slot[at] - 1];
}

static int op_of(const char *word)
{
    for (int i = 0; i < HT_REPORT_OPS; i++)
        if (strcmp(word, ht_report_op_words[i]) == 0)
            return i;
    return -1;
}

int ht_report_trace_add(struct ht_report_trace *t, const struct ht_cmd_line *l)
{
    const char *word = ht_cmd_value(l, "op");
    uint64_t time_ns = ht_cmd_number(l, "time_ns"), bytes = ht_cmd_number(l, "bytes");
    int op = op_of(word);

    if (word[0] == '\0')
        return -EPROTO;
    bool ends_step = strcmp(word, "step") == 0 || strcmp(word, "commit") == 0;
    bool only_publishes = strcmp(word, "commit") == 0 && !t->has_gradient;
    if (t->accesses + t->steps == HT_REPORT_ACCESSES_MAX)
        return 1;
    if (t->last_ns == 0)
        t->first_ns = time_ns;
    t->last_ns = ht_max_u64(t->last_ns, time_ns);
    if (op < 0 && (!ends_step || only_publishes))
        return 0;
    struct ht_report_file *f = file_of(t, ht_cmd_number(l, "id"), ht_cmd_value(l, "path"));
    if (!f)
        return -ENOMEM;
    uint32_t file = (uint32_t)(f - t->file);
    if (op < 0) {
        t->has_gradient = false;
        t->step[t->steps++] = (struct ht_report_step){.time_ns = time_ns, .file = file};
        return 0;
    }
    t->has_gradient |= op == HT_REPORT_GRADIENT;
    uint64_t waited_ns = ht_cmd_number(l, "waited_ns");
    t->access[t->accesses++] = (struct ht_report_access){
        .time_ns = time_ns, .bytes = bytes, .waited_ns = waited_ns, .file = file, .op = (enum ht_report_op)op};
    f->bytes[op] += bytes;
    f->waited_ns += waited_ns;
    return 0;
}

static uint64_t bytes_of(const struct ht_report_file *f)
{
    uint64_t sum = 0;

    for (int i = 0; i < HT_REPORT_OPS; i++)
        sum += f->bytes[i];
    return sum;
}

static int compare(const void *a, const void *b, void *arg)
{
    const struct ht_report_trace *t = arg;
    uint64_t x = bytes_of(&t->file[*(const uint32_t *)a]), y = bytes_of(&t->file[*(const uint32_t *)b]);

    return x != y ? (x < y ? 1 : -1) : (*(const uint32_t *)a > *(const uint32_t *)b ? 1 : -1);
}

unsigned ht_report_trace_largest(const struct ht_report_trace *t, uint32_t *out, unsigned most)
{
    uint32_t *all = malloc((t->files + 1) * sizeof(*all));
    unsigned count = 0;

    if (!all)
        return 0;
    for (uint32_t i = 0; i < t->files; i++)
        if (bytes_of(&t->file[i]))
            all[count++] = i;
    qsort_r(all, count, sizeof(*all), compare, (void *)(uintptr_t)t);
    count = count < most ? count : most;
    memcpy(out, all, count * sizeof(*all));
    free(all);
    return count;
}
