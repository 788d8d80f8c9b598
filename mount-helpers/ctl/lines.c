/* SPDX-License-Identifier: Apache-2.0 */
/* lines.c - see lines.h. */
#include "mount-helpers/ctl/lines.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <hitrain/words.h>

enum { READ_BYTES = 1 << 16 };

struct reader {
    ht_line_fn *fn;
    void *ctx;
    uint64_t most, count;
    size_t len;
    char text[READ_BYTES]; /* begins with an unfinished line */
};

/* Takes whole lines; the rest begins the buffer. */
static int take_lines(struct reader *r)
{
    char *at = r->text, *end;
    struct ht_cmd_line l;
    int rc = 0;

    while (rc == 0 && (end = memchr(at, '\n', r->len - (size_t)(at - r->text)))) {
        *end = '\0';
        rc = ht_cmd_parse_json(at, &l);
        if (rc == 0)
            rc = r->fn(&l, r->ctx);
        if (rc == 0 && ++r->count == r->most)
            rc = 1;
        at = end + 1;
    }
    r->len -= (size_t)(at - r->text);
    memmove(r->text, at, r->len);
    return rc == 0 && r->len == sizeof(r->text) ? -EPROTO : rc; /* no line is so long */
}

int ht_lines_read(const char *point, const char *name, uint64_t most, ht_line_fn *fn, void *ctx)
{
    struct reader *r = malloc(sizeof(*r));
    char path[PATH_MAX + 64];
    ssize_t n = 1;
    int fd, rc = 0;

    if (!r)
        return -ENOMEM;
    r->fn = fn;
    r->ctx = ctx;
    r->most = most;
    r->count = r->len = 0;
    snprintf(path, sizeof(path), "%s/" HT_CTL_DIR "/%s", point, name);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        rc = -errno;
    while (rc == 0 && n > 0) {
        n = read(fd, r->text + r->len, sizeof(r->text) - r->len);
        r->len += n > 0 ? (size_t)n : 0;
        rc = n < 0 ? -errno : take_lines(r);
    }
    if (fd >= 0)
        close(fd);
    if (rc == 0 && r->len)
        rc = -EPROTO;
    free(r);
    return rc < 0 ? rc : 0;
}
