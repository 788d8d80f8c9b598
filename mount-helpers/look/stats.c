/* SPDX-License-Identifier: Apache-2.0 */
/* stats.c - `hitrainctl stats`: the counters of a file, a directory or, at the mount's root, of the store. */
#include "mount-helpers/ctl/ctl.h"

#include "tiering/base/log.h"
#include "tiering/base/json.h"
#include "mount-helpers/common/text.h"

/* Cuts the next "key=value" line out of *rest, and skips lines of another form. */
static bool next_line(char **rest, char **out_key, char **out_value)
{
    while (**rest != '\0') {
        char *line = *rest, *end = line + strcspn(line, "\n"), *equal;
        *rest = *end == '\0' ? end : end + 1;
        *end = '\0';
        equal = strchr(line, '=');
        if (!equal || equal == line)
            continue;
        *equal = '\0';
        *out_key = line;
        *out_value = equal + 1;
        return true;
    }
    return false;
}

/* Prints the meaning of a number for people, or nothing. */
static void put_meaning(const char *key, const char *value)
{
    char *end;

    errno = 0;
    uint64_t n = strtoull(value, &end, 10);
    if (end == value || *end != '\0' || errno != 0)
        return;
    if (ht_text_ends_with(key, "_bytes") && n >= HT_KIB)
        printf("  %s", ht_size_text(n));
    else if (ht_text_ends_with(key, "_ns") && n != 0)
        printf("  %.3f s", (double)n / 1e9);
}

static void put_table(char *text)
{
    char *key, *value;

    while (next_line(&text, &key, &value)) {
        printf("%-28s ", key);
        if (strlen(value) <= 20)
            printf("%20s", value);
        else
            ht_put_printable(value, stdout);
        put_meaning(key, value);
        putchar('\n');
    }
}

static void put_json(const char *path, char *text)
{
    struct ht_json j;
    char *key, *value;

    ht_json_init(&j, stdout);
    ht_json_object(&j, NULL);
    ht_json_str(&j, "path", path);
    ht_json_object(&j, "stats");
    while (next_line(&text, &key, &value))
        ht_json_word(&j, key, value);
    ht_json_end(&j);
    ht_json_end(&j);
}

static int show_stats(const char *path, const struct ht_cmd_options *o)
{
    char *text;
    int rc = ht_cmd_attribute(path, "stats", false, &text);

    if (rc == -ENODATA)
        ht_error("%s has no statistics", path);
    if (rc < 0)
        return HT_CMD_FAILED;
    if (o->json)
        put_json(path, text);
    else
        put_table(text);
    free(text);
    return HT_CMD_OK;
}

int ht_cmd_stats(const char *path, const struct ht_cmd_options *o)
{
    int status = show_stats(path, o);

    while (status == HT_CMD_OK && o->watch_s > 0 && fflush(stdout) == 0) {
        ht_sleep_ns((uint64_t)(o->watch_s * 1e9));
        if (!o->json)
            putchar('\n');
        status = show_stats(path, o);
    }
    return status;
}
