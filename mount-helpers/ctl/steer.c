/* SPDX-License-Identifier: Apache-2.0 */
/*
 * steer.c - commands that are lines of a .hitrain/ctl: `hitrainctl step`, `abort`, `wait`, `reset` and `drop` of a
 * model root or a parameter's directory; `prefetch`, `evict`, `scrub` and `trim` of the mount's root. And `commit`,
 * which is an fsync.
 */
#include "mount-helpers/ctl/ctl.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <hitrain/words.h>

/* The directory of a file, and its name inside path. -EINVAL, and prints why: the name cannot stand in a command. */
static int split(char *path, char **out_name)
{
    char *slash = strrchr(path, '/');

    *out_name = slash + 1;
    *slash = '\0';
    if (strcmp(*out_name, "*") == 0 || strpbrk(*out_name, "\n\t\r "))
        return ht_fail(-EINVAL, "%s/%s: a name with blanks or line breaks, or *, cannot stand in a command", path,
                       *out_name);
    return 0;
}

/* Writes the line to .hitrain/ctl of dir; prints errors with path. */
static int command(const char *path, const char *dir, const char *line)
{
    char control[PATH_MAX + 32];

    snprintf(control, sizeof(control), "%s/" HT_CTL_DIR "/ctl", dir);
    if (access(control, F_OK) != 0 && errno == ENOENT)
        return ht_fail(-ENOENT, "%s is no model root, and not below one (setfattr -n user.hitrain.optimizer makes one)",
                       path);
    return ht_cmd_command(path, dir, line);
}

/* The command for a directory; for a file: with its name, in its directory. */
int ht_cmd_parameter(const char *path, const struct ht_cmd_options *o)
{
    char line[PATH_MAX + 32], *whole = realpath(path, NULL), *name;
    struct stat st;
    int rc;

    if (!whole || stat(whole, &st) != 0) {
        free(whole);
        ht_cmd_explain(path, -errno);
        return HT_CMD_FAILED;
    }
    if (S_ISDIR(st.st_mode)) {
        snprintf(line, sizeof(line), "%s%s", o->command, strcmp(o->command, "reset") == 0 ? " *" : "");
        rc = command(path, whole, line);
    } else {
        rc = split(whole, &name);
        snprintf(line, sizeof(line), "%s %s", o->command, name);
        if (rc == 0)
            rc = command(path, whole, line);
    }
    free(whole);
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}

/* ------------------------------------------------------------ step and abort */

static void put_number(struct ht_json *j, const char *path, const char *word)
{
    char *text;

    if (ht_cmd_attribute(path, word, true, &text) != 0)
        return;
    if (j)
        ht_json_word(j, word, text);
    else
        printf(", %s %s", word, text);
    free(text);
}

/* seconds: that a commit took; below 0: it is none. */
static void report_steps(const char *path, const struct ht_cmd_options *o, const char *done, bool root, double seconds)
{
    struct ht_json json, *j = o->json ? &json : NULL;
    char text[32];

    if (j)
        ht_cmd_json_begin(j, "path", path);
    else
        printf("%s: %s", path, done);
    if (j && seconds >= 0)
        ht_json_bool(j, "model_root", root);
    if (root) {
        put_number(j, path, "step");
        put_number(j, path, "durable_step");
    }
    snprintf(text, sizeof(text), j ? "%.6f" : ", %.3f s", seconds);
    if (j && seconds >= 0)
        ht_json_word(j, "seconds", text);
    if (j)
        ht_json_end(j);
    else
        puts(seconds >= 0 ? text : "");
}

/* Has the root do this, with the number and the word of the options. */
static int send_verb(const char *path, const struct ht_cmd_options *o, const char *verb)
{
    char line[64];
    int n = snprintf(line, sizeof(line), "%s%s", verb, o->full ? " full" : "");

    if (o->conditional)
        snprintf(line + n, sizeof(line) - (size_t)n, " if=%llu", (unsigned long long)o->step_open);
    return command(path, path, line);
}

static int steer(const char *path, const struct ht_cmd_options *o, const char *verb, const char *done)
{
    if (send_verb(path, o, verb) < 0)
        return HT_CMD_FAILED;
    report_steps(path, o, done, true, -1);
    return HT_CMD_OK;
}

int ht_cmd_step(const char *path, const struct ht_cmd_options *o)
{
    return o->async ? steer(path, o, "step async", "the step is being closed")
                    : steer(path, o, "step", "the step has ended");
}

int ht_cmd_abort(const char *path, const struct ht_cmd_options *o)
{
    return steer(path, o, "abort", "back at the last commit");
}

/* ------------------------------------------------------------------ commit */

static bool is_model_root(const char *path)
{
    char *text;
    bool is = ht_cmd_attribute(path, "optimizer", true, &text) == 0;

    if (is)
        free(text);
    return is;
}

/* The directory above lies on another file system, or is the same one. */
static bool is_mount_root(int fd)
{
    struct stat here, above;

    return fstat(fd, &here) == 0 && fstatat(fd, "..", &above, 0) == 0 &&
        (here.st_dev != above.st_dev || here.st_ino == above.st_ino);
}

/* Prints the daemon's text about its last refusal. */
static void explain_commit(const char *path, int err)
{
    char *reason = NULL;
    bool given = ht_cmd_attribute(path, "error", true, &reason) == 0 && reason[0] != '\0';

    ht_error("%s: commit failed: %s%s%s", path, strerror(-err), given ? ": " : "", given ? reason : "");
    free(reason);
}

/* The page cache first, then the daemon's content. */
static int commit(int fd, bool whole_mount)
{
    if (whole_mount && syncfs(fd) != 0)
        return -errno;
    return fsync(fd) == 0 ? 0 : -errno;
}

int ht_cmd_commit(const char *path, const struct ht_cmd_options *o)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0)
        return ht_fail(HT_CMD_FAILED, "%s: %s", path,
                       errno == ENOTDIR ? "commit works on a model root or on the mount's root" : strerror(errno));
    bool root = is_model_root(path);
    bool whole_mount = is_mount_root(fd);
    bool steered = o->conditional || o->full;
    if (!root && (!whole_mount || steered)) {
        ht_error(whole_mount ? "%s is no model root: --if and --full are for the steps of one"
                             : "%s is neither a model root (it has no user.hitrain.optimizer) nor the mount's root",
                 path);
        close(fd);
        return HT_CMD_FAILED;
    }
    uint64_t began_ns = ht_now_ns();
    int rc = steered ? send_verb(path, o, "commit") : commit(fd, whole_mount);
    close(fd);
    if (rc < 0 && steered)
        return HT_CMD_FAILED; /* reported already */
    if (rc < 0)
        explain_commit(path, rc);
    else
        report_steps(path, o, "durable", root, (double)(ht_now_ns() - began_ns) / 1e9);
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}

/* ------------------------------------------------------- prefetch and evict */

/* The path below the mount, inside path. NULL, and prints why: it cannot be named in a command. */
static const char *below(const char *path, const char *point)
{
    size_t len = strcmp(point, "/") == 0 ? 0 : strlen(point);

    if (strncmp(path, point, len) != 0 || path[len] != '/' || path[len + 1] == '\0')
        return ht_fail(NULL, "%s is not a file below %s", path, point);
    if (strchr(path, '\n'))
        return ht_fail(NULL, "%s: a name with a line break cannot stand in a command", path);
    return path + len + 1;
}

int ht_cmd_move(const char *path, const struct ht_cmd_options *o)
{
    char line[PATH_MAX + 32], *whole = realpath(path, NULL);
    const char *rest = whole ? below(whole, o->point) : NULL;

    if (!rest) {
        free(whole);
        return HT_CMD_FAILED;
    }
    snprintf(line, sizeof(line), "%s %s", o->command, rest);
    free(whole);
    int rc = ht_cmd_command(path, o->point, line);
    return rc < 0 ? HT_CMD_FAILED : HT_CMD_OK;
}

/* ------------------------------------------------------------------- scrub */

static const char *const states[] = {"never", "running", "complete", "stopped", "failed"};

static const char *state_word(const char *f)
{
    uint64_t state = ht_figure(f, "scrub_state");

    return state < HT_ARRAY_SIZE(states) ? states[state] : "unknown";
}

static uint64_t scrub_rate(const char *f)
{
    uint64_t ns = ht_figure(f, "scrub_run_ns");

    return ns != 0 ? (uint64_t)((double)ht_figure(f, "scrub_run_bytes") * 1e9 / (double)ns) : 0;
}

/* 0: not known, or it does not run. */
static uint64_t seconds_left(const char *f)
{
    uint64_t bytes = ht_figure(f, "scrub_run_bytes"), total = ht_figure(f, "scrub_run_total_bytes");
    bool known = ht_figure(f, "scrub_state") == 1 && scrub_rate(f) != 0;

    return known && total > bytes ? (total - bytes) / scrub_rate(f) : 0;
}

static void put_scrub(const char *point, const char *f)
{
    uint64_t bytes = ht_figure(f, "scrub_run_bytes"), total = ht_figure(f, "scrub_run_total_bytes");
    uint64_t found = ht_figure(f, "scrub_run_found"), repaired = ht_figure(f, "scrub_run_repaired");
    uint64_t left = seconds_left(f);

    if (ht_figure(f, "scrub_state") == 0) {
        printf("%s: no scrub since the mount\n", point);
        return;
    }
    printf("%s: scrub %s: %s of %s", point, state_word(f), ht_size_text(bytes), ht_size_text(total));
    if (total != 0)
        printf(" (%u %%)", (unsigned)((double)bytes * 100 / (double)total));
    printf(" in %.0f s, %s/s", (double)ht_figure(f, "scrub_run_ns") / 1e9, ht_size_text(scrub_rate(f)));
    if (ht_figure(f, "scrub_state") == 1 && scrub_rate(f) != 0)
        printf(", %llu:%02llu min left", (unsigned long long)left / 60, (unsigned long long)left % 60);
    printf("; %llu bad, %llu repaired%s\n", (unsigned long long)found, (unsigned long long)repaired,
           found > repaired ? "; see hitrainctl events" : "");
}

static void put_scrub_json(const char *point, const char *f)
{
    struct ht_json j;
    char seconds[32];

    snprintf(seconds, sizeof(seconds), "%.3f", (double)ht_figure(f, "scrub_run_ns") / 1e9);
    ht_cmd_json_begin(&j, "mount", point);
    ht_json_str(&j, "state", state_word(f));
    ht_json_u64(&j, "bytes", ht_figure(f, "scrub_run_bytes"));
    ht_json_u64(&j, "total_bytes", ht_figure(f, "scrub_run_total_bytes"));
    ht_json_word(&j, "seconds", seconds);
    ht_json_u64(&j, "bytes_per_second", scrub_rate(f));
    ht_json_u64(&j, "seconds_left", seconds_left(f));
    ht_json_u64(&j, "found", ht_figure(f, "scrub_run_found"));
    ht_json_u64(&j, "repaired", ht_figure(f, "scrub_run_repaired"));
    ht_json_end(&j);
}

int ht_cmd_scrub(const char *path, const struct ht_cmd_options *o)
{
    char line[32];
    char *f;

    snprintf(line, sizeof(line), "scrub %s", o->verb);
    if (strcmp(o->verb, "status") != 0 && ht_cmd_command(path, o->point, line) < 0)
        return HT_CMD_FAILED;
    if (ht_figures_read(o->point, &f) < 0)
        return HT_CMD_FAILED;
    (o->json ? put_scrub_json : put_scrub)(o->point, f);
    free(f);
    return HT_CMD_OK;
}

/* -------------------------------------------------------------------- trim */

static int discarded(const char *point, uint64_t *out)
{
    char *text;
    int rc = ht_cmd_attribute(point, "device_discarded_bytes", false, &text);

    if (rc == -ENODATA)
        ht_error("%s: its daemon is of another version and does not discard", point);
    if (rc < 0)
        return rc;
    *out = strtoull(text, NULL, 10);
    free(text);
    return 0;
}

int ht_cmd_trim(const char *path, const struct ht_cmd_options *o)
{
    uint64_t before, after;

    if (discarded(o->point, &before) < 0 || ht_cmd_command(path, o->point, "trim") < 0 ||
        discarded(o->point, &after) < 0)
        return HT_CMD_FAILED;
    if (o->json) {
        struct ht_json j;
        ht_cmd_json_begin(&j, "mount", o->point);
        ht_json_u64(&j, "discarded_bytes", after - before);
        ht_json_end(&j);
    } else {
        printf("%s: %s discarded\n", o->point, ht_size_text(after - before));
    }
    return HT_CMD_OK;
}
