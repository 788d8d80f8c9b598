/* SPDX-License-Identifier: Apache-2.0 */
/* processors.c - see processors.h. */
#include "tiering/sys/processors.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

int ht_processors_idle_ms(uint64_t *out_ms)
{
    char text[256];
    uint64_t idle, waiting;
    long per_s = sysconf(_SC_CLK_TCK);
    int fd = open("/proc/stat", O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return -EIO;
    ssize_t n = read(fd, text, sizeof(text) - 1); /* the sum of all processors comes first */
    close(fd);
    if (n <= 0 || per_s <= 0)
        return -EIO;
    text[n] = '\0';
    if (sscanf(text, "cpu %*u %*u %*u %" SCNu64 " %" SCNu64, &idle, &waiting) != 2)
        return -EIO;
    *out_ms = (idle + waiting) * 1000 / (uint64_t)per_s;
    return 0;
}
