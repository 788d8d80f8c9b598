/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.c - messages for people, to stderr or syslog.
 *
 * A message is formatted on the stack and leaves in one write, so that lines of several
 * threads or processes do not mix. No lock is held. Control characters (a file name may hold
 * any) are shown as '?': a message is one line and cannot steer a terminal.
 */
#include "tiering/base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <syslog.h>
#include <unistd.h>

#define LINE_BYTES_MAX 2048

static _Atomic int least_level = HT_LOG_INFO;
static _Atomic bool to_syslog;
static char syslog_ident[64]; /* written once, before to_syslog */

void ht_log_to_syslog(const char *ident)
{
    if (atomic_load(&to_syslog))
        return;
    snprintf(syslog_ident, sizeof(syslog_ident), "%s", ident);
    openlog(syslog_ident, LOG_PID, LOG_DAEMON);
    atomic_store(&to_syslog, true);
}

void ht_log_set_level(enum ht_log_level level)
{
    atomic_store(&least_level, (int)level);
}

bool ht_log_on_terminal(void)
{
    return !atomic_load(&to_syslog) && isatty(STDERR_FILENO) == 1;
}

const char *ht_log_level_word(enum ht_log_level level)
{
    static const char *const words[] = {"error", "warn", "info"};

    return words[level];
}

/* Those above 0x7f are two bytes in UTF-8. */
static void hide_controls(char *text)
{
    for (unsigned char *p = (unsigned char *)text; *p; p++)
        if (*p < 0x20 || *p == 0x7f)
            *p = '?';
        else if (p[0] == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0)
            p[0] = p[1] = '?';
}

void ht_log(enum ht_log_level level, const char *fmt, ...)
{
    static const char *const words[] = {"error: ", "warning: ", ""};
    static const int priorities[] = {LOG_ERR, LOG_WARNING, LOG_INFO};
    int saved_errno = errno;
    char line[LINE_BYTES_MAX];
    va_list args;

    if ((int)level > atomic_load_explicit(&least_level, memory_order_relaxed))
        return;
    int head = snprintf(line, sizeof(line) / 2, "%s: %s", program_invocation_short_name, words[level]);
    if (head < 0 || (size_t)head >= sizeof(line) / 2)
        head = 0;
    errno = saved_errno; /* for %m */
    va_start(args, fmt);
    int body = vsnprintf(line + head, sizeof(line) - 1 - (size_t)head, fmt, args);
    va_end(args);
    if (body < 0)
        body = 0;
    size_t len = ht_min_u64((size_t)head + (size_t)body, sizeof(line) - 2);
    line[len] = '\0';
    hide_controls(line + head);
    if (atomic_load(&to_syslog)) {
        syslog(priorities[level], "%s", line + head);
    } else {
        line[len++] = '\n';
        int unread = ht_write_all(STDERR_FILENO, line, len);
        (void)unread; /* no reader is left */
    }
    errno = saved_errno;
}
