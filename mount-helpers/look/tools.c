/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tools.c - the commands whose output is drawn: `hitrainctl report` and `hitrainctl plan`. This finds the mount, and
 * what only these programs know; a program in Python, mount-helpers/tools, does the rest.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "mount-helpers/common/features.h"
#include "mount-helpers/common/text.h"
#include "mount-helpers/ctl/ctl.h"
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"
#include <hitrain/version.h>

/* It stands beside the folder of hitrainctl: bin/hitrainctl and share/hitrain/tools. */
static int folder_of_tools(char out[PATH_MAX])
{
    char self[PATH_MAX - 64] = "";
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

    for (int level = 0; n >= 0 && level < 2; level++) {
        char *slash = strrchr(self, '/');
        if (!slash)
            return -ENOENT;
        *slash = '\0';
    }
    snprintf(out, PATH_MAX, "%s/share/hitrain/tools", self);
    return access(out, R_OK) == 0 ? 0 : -errno;
}

enum { WORDS_MAX = 16 };

/* Returns only where the program cannot be run. words: its command and arguments, and NULL. */
static int run_tool(const char *const *words)
{
    char folder[PATH_MAX];
    const char *argv[8 + WORDS_MAX] = {"python3", "-IB", "-Xutf8", folder};
    int rc = folder_of_tools(folder);

    for (unsigned i = 0; i < WORDS_MAX && words[i]; i++)
        argv[4 + i] = words[i];
    if (rc < 0) {
        ht_error("%s needs share/hitrain/tools beside the folder of hitrainctl, which is not there", words[0]);
        return HT_CMD_FAILED;
    }
    execvp(argv[0], (char *const *)(uintptr_t)argv);
    if (errno == ENOENT)
        ht_error("%s needs python3, which is not installed", words[0]);
    else
        ht_error("python3: %s", strerror(errno));
    return HT_CMD_FAILED;
}

int ht_cmd_plan(const char *path, const struct ht_cmd_options *o)
{
    char point[PATH_MAX];

    if (ht_cmd_mount_point(path, point) < 0)
        return HT_CMD_FAILED;
    return run_tool((const char *const[]){"plan", point, o->json ? "json" : "table", o->svg ? o->svg : "", NULL});
}

/* ------------------------------------------------------------------- report */

/* NAME=VALUE; no value where it is not known. */
struct settings {
    char source[PATH_MAX + 16], mount[HT_MOUNT_OPTIONS_MAX + 16];
    char daemon[HT_HOLDER_COMMAND_MAX + 16], store[HT_UUID_TEXT_MAX + 16], label[80], format[32];
};

static void find_settings(const char *source, struct settings *out)
{
    struct ht_holder *h = malloc(sizeof(*h));
    struct ht_store_features f;
    char uuid[HT_UUID_TEXT_MAX];

    if (h && ht_holder_find(source, h) == 0 && h->pid && !h->opener)
        snprintf(out->daemon, sizeof(out->daemon), "daemon=%s", h->command);
    free(h);
    if (ht_features_read(source, &f) < 0)
        return;
    snprintf(out->store, sizeof(out->store), "store=%s", ht_uuid_text(f.uuid, uuid));
    snprintf(out->label, sizeof(out->label), "label=%s", f.label);
    snprintf(out->format, sizeof(out->format), "format=%u", f.version);
}

int ht_cmd_report(const char *path, const struct ht_cmd_options *o)
{
    struct settings s = {0};
    struct ht_mount_entry m;
    char point[PATH_MAX];

    if (!o->output) {
        ht_error("expected -o and the name of the page, as in -o report.html");
        return HT_CMD_USAGE;
    }
    if (ht_cmd_mount_point(path, point) < 0 || ht_mount_at(point, &m) < 0)
        return HT_CMD_FAILED;
    find_settings(m.source, &s);
    snprintf(s.source, sizeof(s.source), "source=%s", m.source);
    snprintf(s.mount, sizeof(s.mount), "mount=%s", m.super_options);
    return run_tool((const char *const[]){"report", HT_VERSION, point, o->output, o->loss ? o->loss : "", s.source,
                                          s.store, s.label, s.format, s.daemon, s.mount, NULL});
}
