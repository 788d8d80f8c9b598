/* SPDX-License-Identifier: Apache-2.0 */
/* device.c - `hitrainctl device`: the devices of a mounted store and how they do. */
#include "mount-helpers/ctl/ctl.h"

#include <stdio.h>
#include <stdlib.h>

#include <hitrain/limits.h>
#include "tiering/base/log.h"
#include "tiering/base/json.h"
#include "mount-helpers/common/text.h"

/* "12/0": done and failed. */
static void put_counts(const struct ht_cmd_line *l, const char *done, const char *failed)
{
    char text[48];

    snprintf(text, sizeof(text), "%llu/%llu", (unsigned long long)ht_cmd_number(l, done),
             (unsigned long long)ht_cmd_number(l, failed));
    printf(" %13s", text);
}

static void put_for_people(const struct ht_cmd_line *l)
{
    uint64_t data = ht_cmd_number(l, "data_bytes"), free = ht_cmd_number(l, "free_bytes");
    const char *path = ht_cmd_value(l, "path");

    ht_put_printable(ht_cmd_value(l, "index"), stdout);
    printf("  %11s %11s  %-14.14s %-7.7s", ht_size_text(ht_cmd_number(l, "bytes")),
           ht_size_text(data > free ? data - free : 0), ht_cmd_value(l, "health"), ht_cmd_value(l, "log"));
    put_counts(l, "reads", "read_errors");
    put_counts(l, "writes", "write_errors");
    put_counts(l, "flushes", "flush_errors");
    fputs("  ", stdout);
    ht_put_printable(path[0] != '\0' ? path : "(missing)", stdout);
    putchar('\n');
}

/* In three digits. */
static void put_ns(uint64_t ns)
{
    static const char *const units[] = {"us", "ms", "s"};
    double v = (double)ns / 1000;
    unsigned unit = 0;
    char text[32];

    for (; v >= 999.5 && unit + 1 < HT_ARRAY_SIZE(units); unit++)
        v /= 1000;
    snprintf(text, sizeof(text), "%.*f %s", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v, units[unit]);
    printf(" %10s", text);
}

static void put_rate(const struct ht_cmd_line *l, const char *rate, const char *mean, const char *p99)
{
    char text[48];

    if (ht_cmd_value(l, rate)[0] == '\0') {
        printf("  %13s %10s %10s", "-", "-", "-");
        return;
    }
    snprintf(text, sizeof(text), "%s/s", ht_size_text(ht_cmd_number(l, rate)));
    printf("  %13s", text);
    put_ns(ht_cmd_number(l, mean));
    put_ns(ht_cmd_number(l, p99));
}

static void put_rates(const struct ht_cmd_line *l)
{
    ht_put_printable(ht_cmd_value(l, "index"), stdout);
    if (ht_cmd_value(l, "share_per_mille")[0] == '\0')
        printf("  %7s", "-");
    else
        printf("  %5.1f %%", (double)ht_cmd_number(l, "share_per_mille") / 10);
    put_rate(l, "read_bytes_per_s", "read_latency_ns", "read_latency_p99_ns");
    put_rate(l, "write_bytes_per_s", "write_latency_ns", "write_latency_p99_ns");
    putchar('\n');
}

/* Bytes in flight of a class. */
static void put_in_flight(const struct ht_cmd_line *l, const char *key)
{
    printf("  %11s", ht_size_text(ht_cmd_number(l, key)));
}

/* How often a class waited at the gate, and how long on average. */
static void put_waits(const struct ht_cmd_line *l, const char *count_key, const char *ns_key)
{
    uint64_t count = ht_cmd_number(l, count_key);

    printf("  %11llu", (unsigned long long)count);
    put_ns(count ? ht_cmd_number(l, ns_key) / count : 0);
}

static void put_classes(const struct ht_cmd_line *l)
{
    ht_put_printable(ht_cmd_value(l, "index"), stdout);
    put_in_flight(l, "urgent_bytes");
    put_in_flight(l, "planned_bytes");
    put_in_flight(l, "background_bytes");
    put_waits(l, "planned_waits", "planned_wait_ns");
    put_waits(l, "background_waits", "background_wait_ns");
    putchar('\n');
}

static void put_json(struct ht_json *j, const struct ht_cmd_line *l)
{
    ht_json_object(j, NULL);
    for (unsigned i = 0; i < l->count; i++) {
        if (strcmp(l->field[i].key, "path") == 0)
            ht_json_str(j, "path", l->field[i].value);
        else
            ht_json_word(j, l->field[i].key, l->field[i].value);
    }
    ht_json_end(j);
}

static void put_all_json(const char *path, const struct ht_cmd_line *lines, unsigned count)
{
    struct ht_json j;

    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", path);
    ht_json_array(&j, "devices");
    for (unsigned i = 0; i < count; i++)
        put_json(&j, &lines[i]);
    ht_json_end(&j);
    ht_json_end(&j);
}

static void put_all(const char *path, char *text, const struct ht_cmd_options *o)
{
    struct ht_cmd_line lines[HT_DEVICES_MAX];
    unsigned count = 0;
    char *save;

    for (char *one = strtok_r(text, "\n", &save); one && count < HT_DEVICES_MAX; one = strtok_r(NULL, "\n", &save))
        ht_cmd_parse_line(one, &lines[count++]);
    if (o->json) {
        put_all_json(path, lines, count);
        return;
    }
    puts("#         size        used  health         log        reads/err    writes/err   flushes/err  path");
    for (unsigned i = 0; i < count; i++)
        put_for_people(&lines[i]);
    puts("\n#    share         read/s       mean        p99        write/s       mean        p99");
    for (unsigned i = 0; i < count; i++)
        put_rates(&lines[i]);
    puts("\n#       urgent      planned   background        waits       mean        waits       mean");
    for (unsigned i = 0; i < count; i++)
        put_classes(&lines[i]);
}

int ht_cmd_device(const char *path, const struct ht_cmd_options *o)
{
    char point[PATH_MAX], *text;
    int rc = ht_cmd_mount_point(path, point);

    if (rc == 0)
        rc = ht_cmd_attribute(point, "devices", false, &text);
    if (rc == -ENODATA)
        ht_error("%s has no list of its devices: its daemon is older than this program", point);
    if (rc < 0)
        return HT_CMD_FAILED;
    put_all(point, text, o);
    free(text);
    if (fflush(stdout) != 0) {
        ht_error("cannot write: %s", strerror(errno));
        return HT_CMD_FAILED;
    }
    return HT_CMD_OK;
}
