/* SPDX-License-Identifier: Apache-2.0 */
/* stats.c - `hitrainctl stats`: the counters of a file, a directory or, at the mount's root, of the store. */
#include "mount-helpers/ctl/ctl.h"

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

static void put_row(const char *key, const char *value)
{
    printf("%-28s ", key);
    if (strlen(value) <= 20)
        printf("%20s", value);
    else
        ht_put_printable(value, stdout);
    put_meaning(key, value);
    putchar('\n');
}

/* Lines "key=value"; those of another form are skipped. */
static void put_stats(const char *path, char *text, bool as_json)
{
    struct ht_json j;
    char *save;

    if (as_json) {
        ht_cmd_json_begin(&j, "path", path);
        ht_json_object(&j, "stats");
    }
    for (char *key = strtok_r(text, "\n", &save); key; key = strtok_r(NULL, "\n", &save)) {
        char *value = strchr(key, '=');
        if (!value || value == key)
            continue;
        *value++ = '\0';
        if (as_json)
            ht_json_word(&j, key, value);
        else
            put_row(key, value);
    }
    if (as_json) {
        ht_json_end(&j);
        ht_json_end(&j);
    }
}

static int show_stats(const char *path, const struct ht_cmd_options *o)
{
    char *text;

    if (ht_figures_read(path, &text) < 0)
        return HT_CMD_FAILED;
    put_stats(path, text, o->json);
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
