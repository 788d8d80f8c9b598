/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wrong.h - what breaks an invariant each, added by its definition, for a test that runs once for each of them.
 *
 *     WRONG_BY(a_count_of_nothing, s->count++)
 *     WRONG(a_count_of_another)
 *     {
 *         s->count--;
 *         other->count++;
 *     }
 *
 *     TEST_SIGNAL(a_broken_store_ends_the_process, SIGABRT, wrongs)
 *     {
 *         wrong[_i].make();
 *         ht_store_verify(s, true);
 *     }
 */
#ifndef HITRAIN_TESTS_SUPPORT_WRONG_H
#define HITRAIN_TESTS_SUPPORT_WRONG_H

static struct {
    void (*make)(void);
    int line;
} wrong[64];
static int wrongs;

/* In the order of the file: constructors run in any. */
static inline void wrong_add(void (*make)(void), int line)
{
    int at = wrongs++;

    for (; at > 0 && wrong[at - 1].line > line; at--)
        wrong[at] = wrong[at - 1];
    wrong[at].make = make;
    wrong[at].line = line;
}

/* Their number is known before tests are added: a constructor with a priority runs earlier than one without. */
#define WRONG(name)                                                \
    static void name(void);                                        \
    __attribute__((constructor(101))) static void name##_add(void) \
    {                                                              \
        wrong_add(name, __LINE__);                                 \
    }                                                              \
    static void name(void)

/* By one statement. */
#define WRONG_BY(name, ...) \
    WRONG(name)             \
    {                       \
        __VA_ARGS__;        \
    }

#endif
