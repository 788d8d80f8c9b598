/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tools.c - the commands that are programs in Python: `hitrainctl report` and `plan`, which draw (mount-helpers/tools),
 * and those that read and write vaults (mount-helpers/vault). This finds the mount, and what only C knows.
 */
#include <unistd.h>

#include "mount-helpers/common/features.h"
#include "mount-helpers/ctl/ctl.h"
#include "tiering/sys/holder.h"
#include "tiering/sys/mounts.h"
#include <hitrain/version.h>

/* Its folder stands beside that of hitrainctl: bin/hitrainctl and share/hitrain/NAME. */
static int find_folder(const char *name, char out[PATH_MAX])
{
    char folder[PATH_MAX];

    if (!ht_own_folder(1, folder) || snprintf(out, PATH_MAX, "%s/share/hitrain/%s", folder, name) >= PATH_MAX)
        return -ENOENT;
    return access(out, R_OK) == 0 ? 0 : -errno;
}

/* Returns only where the program cannot be run. words: its command and arguments, so many. */
static int run_program(const char *name, const char *const *words, size_t count)
{
    char folder[PATH_MAX];
    const char *const python[] = {"python3", "-ISB", "-Xutf8", folder};
    const char **argv = calloc(HT_ARRAY_SIZE(python) + count + 1, sizeof(*argv));
    int rc = find_folder(name, folder);

    if (!argv)
        return ht_fail(HT_CMD_FAILED, "not enough memory");
    memcpy(argv, python, sizeof(python));
    memcpy(argv + HT_ARRAY_SIZE(python), words, count * sizeof(*words));
    if (rc == 0)
        execvp(argv[0], (char *const *)(uintptr_t)argv);
    if (rc < 0)
        ht_error("%s needs share/hitrain/%s beside the folder of hitrainctl, which is not there", words[0], name);
    else if (errno == ENOENT)
        ht_error("%s needs python3, which is not installed", words[0]);
    else
        ht_error("python3: %s", strerror(errno));
    free(argv);
    return HT_CMD_FAILED;
}

int ht_cmd_vault(int count, char *const *words)
{
    return run_program("vault", (const char *const *)words, (size_t)count);
}

/* The kept steps; with a vault, those that only this has below them. */
int ht_cmd_steps(const char *path, const struct ht_cmd_options *o)
{
    const char *const words[] = {"steps", path, o->vault, "--json"};
    int status = o->vault && o->json ? HT_CMD_OK : ht_cmd_show(path, o);

    if (!o->vault || status != HT_CMD_OK)
        return status;
    if (fflush(stdout))
        return HT_CMD_FAILED;
    return run_program("vault", words, HT_ARRAY_SIZE(words) - !o->json);
}

int ht_cmd_plan(const char *path, const struct ht_cmd_options *o)
{
    const char *const words[] = {"plan", o->point, o->json ? "json" : "table", o->svg ? o->svg : ""};

    return run_program("tools", words, HT_ARRAY_SIZE(words));
}

/* ------------------------------------------------------------------- report */

/* NAME=VALUE; no value where it is not known. */
struct settings {
    char source[PATH_MAX + 16], mount[HT_MOUNT_OPTIONS_MAX + 16];
    char daemon[HT_HOLDER_COMMAND_MAX + 16], store[HT_UUID_TEXT_MAX + 16], label[80], format[32];
};

static void find_settings(const char *source, struct settings *out)
{
    struct ht_holder h;
    struct ht_super_words f;
    char uuid[HT_UUID_TEXT_MAX];

    if (ht_holder_find(source, &h) == 0 && h.pid && !h.opener)
        snprintf(out->daemon, sizeof(out->daemon), "daemon=%s", h.command);
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

    if (ht_mount_at(o->point, &m) < 0)
        return HT_CMD_FAILED;
    find_settings(m.source, &s);
    snprintf(s.source, sizeof(s.source), "source=%s", m.source);
    snprintf(s.mount, sizeof(s.mount), "mount=%s", m.super_options);
    const char *const words[] = {"report", HT_VERSION, o->point, o->output, o->loss ? o->loss : "", s.source, s.store,
                                 s.label,  s.format,   s.daemon, s.mount};
    return run_program("tools", words, HT_ARRAY_SIZE(words));
}
