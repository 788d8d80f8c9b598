/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mark.c - which assertion a test reached last. Check writes that into a file, with a call of the kernel for each
 * assertion that holds, and shows it where a signal ends the test. Loops assert a million times: only the first time of
 * each place is written. The linker puts this in front of Check's function (Makefile, test_flags).
 */
#include <check.h>
#include <stddef.h>

enum { PLACES = 64 };

void __real__mark_point(const char *file, int line);
void __wrap__mark_point(const char *file, int line);

void __wrap__mark_point(const char *file, int line)
{
    static _Thread_local struct place {
        const char *file;
        int line;
    } seen[PLACES];
    struct place *p = &seen[(size_t)line % PLACES];

    if (p->file == file && p->line == line)
        return;
    *p = (struct place){file, line};
    __real__mark_point(file, line);
}
