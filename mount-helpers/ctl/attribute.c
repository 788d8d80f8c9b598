/* SPDX-License-Identifier: Apache-2.0 */
/* attribute.c - extended attributes of the daemon, and the meaning of their absence. */
#include "mount-helpers/ctl/ctl.h"

#include <sys/xattr.h>

#include "tiering/base/log.h"
#include "tiering/sys/mounts.h"
#include <hitrain/limits.h>
#include <hitrain/words.h>

enum { TRIES = 4 }; /* the value may grow between asking for its size and for itself */

int ht_cmd_explain(const char *path, int err)
{
    if (err == -ENOTCONN)
        ht_error("%s: the daemon of this mount is gone; unmount it and mount it again", path);
    else
        ht_error("%s: %s", path, strerror(-err));
    return err;
}

int ht_cmd_mount_point(const char *path, char out[PATH_MAX])
{
    struct ht_mount_entry *m = malloc(sizeof(*m));
    int rc = m ? ht_mount_of_path(path, m) : -ENOMEM;

    if (rc < 0) {
        rc = ht_cmd_explain(path, rc);
    } else if (!ht_mount_is_hitrain(m)) {
        ht_error("%s is not on a hitrain mount: it is on %s (%s); name a folder of a mounted store", path, m->point,
                 m->type);
        rc = -ENOTSUP;
    } else {
        memcpy(out, m->point, sizeof(m->point));
    }
    free(m);
    return rc;
}

static ssize_t get(const char *path, const char *name, char **out_text)
{
    for (unsigned i = 0; i < TRIES; i++) {
        ssize_t n = getxattr(path, name, NULL, 0);
        if (n < 0)
            return -errno;
        if (n > (ssize_t)HT_XATTR_VALUE_BYTES_MAX)
            return -E2BIG;
        n += n / 2 + 64; /* counters grow */
        char *text = malloc((size_t)n + 1);
        if (!text)
            return -ENOMEM;
        n = getxattr(path, name, text, (size_t)n);
        if (n >= 0) {
            text[n] = '\0';
            *out_text = text;
            return n;
        }
        free(text);
        if (errno != ERANGE)
            return -errno;
    }
    return -ERANGE;
}

int ht_cmd_attribute(const char *path, const char *word, bool quiet, char **out_text)
{
    char name[HT_XATTR_NAME_BYTES_MAX + 1];

    snprintf(name, sizeof(name), "%s%s", HT_XATTR_PREFIX, word);
    ssize_t n = get(path, name, out_text);
    if (n < 0 && !quiet && n != -ENODATA)
        return ht_cmd_explain(path, (int)n);
    return n < 0 ? (int)n : 0;
}
