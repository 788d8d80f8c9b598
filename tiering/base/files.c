/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/base/files.h"

#include <unistd.h>

int ht_write_all(int fd, const void *data, size_t len)
{
    for (const char *at = data; len > 0;) {
        ssize_t done = write(fd, at, len);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done < 0 ? -errno : -EIO;
        at += done;
        len -= (size_t)done;
    }
    return 0;
}

bool ht_read_line(const char *path, char *out, size_t cap)
{
    FILE *f = fopen(path, "re");
    bool there = f && fgets(out, (int)cap, f);

    if (there)
        out[strcspn(out, "\n")] = '\0';
    if (f)
        (void)fclose(f);
    return there;
}
