/* SPDX-License-Identifier: Apache-2.0 */
/* bench_scratch.c - see bench_scratch.h. */
#include "mount-helpers/ctl/bench_scratch.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "mount-helpers/common/text.h"
#include "tiering/base/base.h"

#define BYTES_MIN (4 * HT_MIB)

static const char *name_of_signal_handler; /* the path of the file, or NULL */

static void on_end(int signal_number)
{
    if (name_of_signal_handler)
        (void)unlink(name_of_signal_handler);
    _exit(128 + signal_number);
}

static void catch_signals(void)
{
    struct sigaction end = {.sa_handler = on_end};

    sigaction(SIGINT, &end, NULL);
    sigaction(SIGTERM, &end, NULL);
    sigaction(SIGHUP, &end, NULL);
}

/* A file in a model would be part of its steps. All directories in a model have its step. */
static int check_directory(const char *whole)
{
    char *text;

    if (ht_cmd_attribute(whole, "step", true, &text) < 0)
        return 0;
    free(text);
    ht_error("%s is part of a model: --write needs a directory outside models", whole);
    return -EINVAL;
}

static int choose_size(const char *whole, uint64_t *out_bytes)
{
    struct statvfs v;

    if (statvfs(whole, &v) != 0)
        return ht_cmd_explain(whole, -errno);
    uint64_t available = (uint64_t)v.f_bavail * v.f_frsize;
    *out_bytes = ht_min_u64(available / 4 / HT_MIB * HT_MIB, HT_BENCH_SCRATCH_BYTES);
    if (*out_bytes >= BYTES_MIN)
        return 0;
    ht_error("%s: only %s are available, and --write needs %s: delete files", whole, ht_size_text(available),
             ht_size_text(4 * BYTES_MIN));
    return -ENOSPC;
}

static int make(struct ht_bench_scratch *s, const char *whole)
{
    uint32_t number;
    int rc = ht_random(&number, sizeof(number));

    if (rc < 0)
        return ht_cmd_explain(whole, rc);
    int n = snprintf(s->path, sizeof(s->path), "%s/.hitrain-bench-%08x", whole, number);
    if (n < 0 || (size_t)n >= sizeof(s->path))
        return ht_cmd_explain(whole, -ENAMETOOLONG);
    name_of_signal_handler = s->path;
    catch_signals();
    s->fd = open(s->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600);
    if (s->fd >= 0)
        return 0;
    rc = -errno;
    name_of_signal_handler = NULL;
    if (rc == -EACCES || rc == -EROFS)
        ht_error("%s: %s: name a directory of the mount that you may write", whole, strerror(-rc));
    else
        (void)ht_cmd_explain(whole, rc);
    return rc;
}

int ht_bench_scratch_begin(struct ht_bench_scratch *s, const char *path)
{
    char whole[PATH_MAX];
    struct stat st;
    int rc;

    *s = (struct ht_bench_scratch){.fd = -1};
    if (!realpath(path, whole) || stat(whole, &st) != 0)
        return ht_cmd_explain(path, -errno);
    if (!S_ISDIR(st.st_mode)) {
        ht_error("%s is a file: --write needs a directory, in which it makes a scratch file", path);
        return -ENOTDIR;
    }
    rc = check_directory(whole);
    if (rc == 0)
        rc = choose_size(whole, &s->bytes);
    return rc == 0 ? make(s, whole) : rc;
}

int ht_bench_scratch_end(struct ht_bench_scratch *s)
{
    int rc = unlink(s->path) == 0 || errno == ENOENT ? 0 : -errno;

    name_of_signal_handler = NULL;
    close(s->fd);
    return rc < 0 ? ht_cmd_explain(s->path, rc) : 0;
}
