/* SPDX-License-Identifier: Apache-2.0 */
#include "tiering/sys/stdio_fds.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

void ht_stdio_fds_open(void)
{
    int fd;

    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= STDIN_FILENO && fd <= STDERR_FILENO);
    if (fd >= 0)
        close(fd);
    else if (fcntl(STDIN_FILENO, F_GETFD) < 0 || fcntl(STDOUT_FILENO, F_GETFD) < 0 || fcntl(STDERR_FILENO, F_GETFD) < 0)
        abort(); /* without /dev/null there is no safe way on, and no place for a message */
}

void ht_stdio_fds_detach(void)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    if (null < 0)
        return;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        (void)dup2(null, fd);
    if (null > STDERR_FILENO)
        close(null);
}
