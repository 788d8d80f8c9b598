/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.h - messages for people. Thread-safe; never blocks on anything but stderr or syslog.
 * One line each, no trailing newline. Name the thing and the remedy.
 */
#pragma once

#include "tiering/base/base.h"

enum ht_log_level { HT_LOG_ERROR, HT_LOG_WARN, HT_LOG_INFO, HT_LOG_LEVELS };

/* Where messages go from now on: stderr (default) or syslog. */
void ht_log_to_syslog(const char *ident);
/* Least important level that is still shown (default HT_LOG_INFO). For tests. */
void ht_log_set_level(enum ht_log_level level);
/* Do messages go to a terminal, where a person may read them? */
bool ht_log_on_terminal(void);
/* "error", "warn", "info": words for programs. */
const char *ht_log_level_word(enum ht_log_level level);
void ht_log(enum ht_log_level level, const char *fmt, ...) HT_PRINTF(2, 3);

#define ht_error(...) ht_log(HT_LOG_ERROR, __VA_ARGS__)
#define ht_warn(...) ht_log(HT_LOG_WARN, __VA_ARGS__)
#define ht_info(...) ht_log(HT_LOG_INFO, __VA_ARGS__)
/* Says why a function fails, and is what it returns. Keeps errno, as the others do. */
#define ht_fail(result, ...) (ht_error(__VA_ARGS__), (result))
