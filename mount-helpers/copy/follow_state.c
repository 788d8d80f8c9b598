/* SPDX-License-Identifier: Apache-2.0 */
/* follow_state.c - the common part of sender and receiver of `hitrainctl follow`. */
#include "mount-helpers/copy/follow.h"

#include <signal.h>
#include <stdlib.h>

static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

void ht_follow_catch_signals(void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction a = {.sa_handler = stop};

    for (size_t i = 0; i < HT_ARRAY_SIZE(numbers); i++)
        (void)sigaction(numbers[i], &a, NULL);
    (void)signal(SIGPIPE, SIG_IGN); /* a message says that the reader is gone */
}

bool ht_follow_stopped(void)
{
    return stopped;
}

uint64_t ht_follow_number(const char *text, const char *key)
{
    size_t len = strlen(key);

    for (const char *p = text; *p != '\0'; p += strcspn(p, " \n"), p += strspn(p, " \n"))
        if (strncmp(p, key, len) == 0 && p[len] == '=')
            return strtoull(p + len + 1, NULL, 10);
    return 0;
}

int ht_follow_state(const char *root, struct ht_follow_state *out)
{
    char *text;
    int rc = ht_cmd_attribute(root, "redo", false, &text);

    if (rc == -ENODATA)
        ht_error("%s is no model root", root);
    if (rc < 0)
        return rc;
    *out = (struct ht_follow_state){
        .first = ht_follow_number(text, "first"),
        .last = ht_follow_number(text, "last"),
        .lineage = ht_follow_number(text, "lineage"),
        .publications = ht_follow_number(text, "publications"),
        .changed = ht_follow_number(text, "changed") != 0,
    };
    free(text);
    return 0;
}
