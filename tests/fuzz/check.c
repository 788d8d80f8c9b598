/* SPDX-License-Identifier: Apache-2.0 */
/* check.c - the functions that Check's assertions call, for programs that are no tests of Check's: they end there. */
#include <check.h>
#include <stdio.h>
#include <stdlib.h>

void _mark_point(const char *file, int line)
{
    (void)file;
    (void)line;
}

void _ck_assert_failed(const char *file, int line, const char *expr, const char *msg, ...)
{
    fprintf(stderr, "%s:%d: %s%s%s\n", file, line, expr, msg ? ": " : "", msg ? msg : "");
    abort();
}
