/* SPDX-License-Identifier: Apache-2.0 */
/* device.c - `hitrainctl device`: the devices of a mounted store and how they do. */
#include "mount-helpers/ctl/ctl.h"

#include <stdio.h>
#include <stdlib.h>

#include "tiering/base/log.h"
#include "mount-helpers/common/json.h"
#include "mount-helpers/common/text.h"

/* "12/0": done and failed. */
static void put_counts(const struct ht_ctl_line *l, const char *done, const char *failed)
{
    char text[48];

    snprintf(text, sizeof(text), "%llu/%llu", (unsigned long long)ht_ctl_number(l, done),
             (unsigned long long)ht_ctl_number(l, failed));
    printf(" %13s", text);
}

static void put_for_people(const struct ht_ctl_line *l)
{
    uint64_t data = ht_ctl_number(l, "data_bytes"), free = ht_ctl_number(l, "free_bytes");
    const char *path = ht_ctl_value(l, "path");

    ht_put_printable(ht_ctl_value(l, "index"), stdout);
    printf("  %11s %11s  %-14.14s %-7.7s", ht_size_text(ht_ctl_number(l, "bytes")),
           ht_size_text(data > free ? data - free : 0), ht_ctl_value(l, "health"), ht_ctl_value(l, "log"));
    put_counts(l, "reads", "read_errors");
    put_counts(l, "writes", "write_errors");
    put_counts(l, "flushes", "flush_errors");
    fputs("  ", stdout);
    ht_put_printable(path[0] != '\0' ? path : "(missing)", stdout);
    putchar('\n');
}

static void put_json(struct ht_json *j, const struct ht_ctl_line *l)
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

static void put_all(const char *path, char *text, const struct ht_ctl_options *o)
{
    struct ht_json j;
    char *save;

    if (o->json) {
        ht_json_init(&j, stdout);
        ht_json_object(&j, NULL);
        ht_json_str(&j, "path", path);
        ht_json_array(&j, "devices");
    } else {
        puts("#         size        used  health         log        reads/err    writes/err   flushes/err  path");
    }
    for (char *one = strtok_r(text, "\n", &save); one != NULL; one = strtok_r(NULL, "\n", &save)) {
        struct ht_ctl_line l;

        ht_ctl_parse_line(one, &l);
        if (o->json)
            put_json(&j, &l);
        else
            put_for_people(&l);
    }
    if (o->json) {
        ht_json_end(&j);
        ht_json_end(&j);
    }
}

int ht_ctl_device(const char *path, const struct ht_ctl_options *o)
{
    char point[PATH_MAX], *text;
    int ret = ht_ctl_mount_point(path, point);

    if (ret == 0)
        ret = ht_ctl_attribute(point, "devices", false, &text);
    if (ret == -ENODATA)
        ht_error("%s does not tell its devices: its daemon is older than this program", point);
    if (ret < 0)
        return HT_CTL_FAILED;
    put_all(point, text, o);
    free(text);
    if (fflush(stdout) != 0) {
        ht_error("cannot write: %s", strerror(errno));
        return HT_CTL_FAILED;
    }
    return HT_CTL_OK;
}
