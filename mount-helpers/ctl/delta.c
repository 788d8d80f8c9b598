/* SPDX-License-Identifier: Apache-2.0 */
/* delta.c - `hitrainctl delta`: the changes of a step, to standard output. */
#include "mount-helpers/ctl/ctl.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <hitrain/words.h>

enum { PIECE_BYTES = 64 << 10 };

/* The number of a step, which is the name of its file. */
static bool is_number(const char *text)
{
    size_t digits = strspn(text, "0123456789");

    return digits && digits < 20 && text[digits] == '\0' && text[0] != '0';
}

/* Why there is no such step; there are others, or none. */
static void explain_missing(const char *root, const char *step)
{
    unsigned long long first = 0, last = 0;
    char folder[PATH_MAX];
    int n = snprintf(folder, sizeof(folder), "%s/" HT_CTL_DIR "/delta", root);
    DIR *d = n > 0 && (size_t)n < sizeof(folder) ? opendir(folder) : NULL;

    for (const struct dirent *e; d && (e = readdir(d));) {
        unsigned long long number = is_number(e->d_name) ? strtoull(e->d_name, NULL, 10) : 0;
        first = number && (!first || number < first) ? number : first;
        last = number > last ? number : last;
    }
    if (d)
        closedir(d);
    if (last)
        ht_error("%s: step %s has no delta; those of %llu to %llu are there", root, step, first, last);
    else
        ht_error("%s: no step has a delta: " HT_XATTR_PREFIX "optimizer needs delta=on, and a step after that", root);
}

static int copy_out(int fd, const char *path)
{
    char buf[PIECE_BYTES];
    ssize_t n;

    do
        n = read(fd, buf, sizeof(buf));
    while (n > 0 && fwrite(buf, 1, (size_t)n, stdout) == (size_t)n);
    if (n < 0)
        return ht_cmd_explain(path, -errno);
    if (n > 0 || fflush(stdout)) {
        ht_error("standard output: %s", strerror(errno));
        return -EIO;
    }
    return 0;
}

int ht_cmd_delta(const char *root, const struct ht_cmd_options *o)
{
    const char *step = o->words[0];
    char path[PATH_MAX];
    int n = snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/delta/%s", root, step);

    if (!is_number(step) || n < 0 || (size_t)n >= sizeof(path)) {
        ht_error("%s: this is no number of a step: %s", root, step);
        return HT_CMD_FAILED;
    }
    if (isatty(STDOUT_FILENO)) {
        ht_error("standard output is a terminal: give a file, as in > delta.safetensors");
        return HT_CMD_FAILED;
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        explain_missing(root, step);
    else if (fd < 0)
        ht_cmd_explain(path, -errno);
    int rc = fd < 0 ? -ENOENT : copy_out(fd, path);
    if (fd >= 0)
        close(fd);
    return rc ? HT_CMD_FAILED : HT_CMD_OK;
}
