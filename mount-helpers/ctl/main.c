/* SPDX-License-Identifier: Apache-2.0 */
/* hitrainctl - look at a mounted store and steer it. A command is one row here and one file. */
#include "mount-helpers/ctl/ctl.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "tiering/base/log.h"
#include "mount-helpers/common/text.h"

static const struct command {
    const char *name;
    int (*run)(const char *path, const struct ht_ctl_options *o);
    bool may_watch;
} commands[] = {
    {"stats", ht_ctl_stats, true},
    {"commit", ht_ctl_commit, false},
};

static const char usage_text[] =
    "Usage: hitrainctl COMMAND PATH [--json]\n"
    "\n"
    "  stats PATH [--watch=SECONDS]  counters of a file or, at the mount's root, of the whole store\n"
    "  commit PATH                   end the step of the model root PATH and make it durable; at the\n"
    "                                mount's root: make everything outside model roots durable\n"
    "\n"
    "  --json                        as JSON\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0 done, 1 failed, 2 usage.\n";

enum { OPT_JSON = 256, OPT_WATCH, OPT_HELP, OPT_VERSION };

static const struct option words[] = {
    {"json", no_argument, NULL, OPT_JSON},
    {"watch", required_argument, NULL, OPT_WATCH},
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {NULL, 0, NULL, 0},
};

static int usage_error(const char *why, const char *what)
{
    if (why != NULL)
        ht_error("%s%s", why, what);
    fputs("Try 'hitrainctl --help'.\n", stderr);
    return HT_CTL_USAGE;
}

static bool parse_seconds(const char *text, double *out)
{
    char *end;
    double v = strtod(text, &end);

    if (end == text || *end != '\0' || !(v >= 0.01 && v <= 86400))
        return false;
    *out = v;
    return true;
}

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(commands); i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

/* -1: go on; else the exit status. */
static int parse(int argc, char **argv, struct ht_ctl_options *o)
{
    int c;

    while ((c = getopt_long(argc, argv, "", words, NULL)) != -1) {
        switch (c) {
        case OPT_JSON:
            o->json = true;
            break;
        case OPT_WATCH:
            if (!parse_seconds(optarg, &o->watch_s))
                return usage_error("--watch: not a number of seconds from 0.01 to 86400: ", optarg);
            break;
        case OPT_HELP:
            fputs(usage_text, stdout);
            return HT_CTL_OK;
        case OPT_VERSION:
            ht_print_version("hitrainctl");
            return HT_CTL_OK;
        default:
            return usage_error(NULL, NULL);
        }
    }
    return -1;
}

int main(int argc, char **argv)
{
    struct ht_ctl_options o = {false, 0};
    const struct command *command;
    int status = parse(argc, argv, &o);

    if (status >= 0)
        return status;
    if (optind == argc)
        return usage_error("expected a command and a path", "");
    if (strcmp(argv[optind], "version") == 0 && optind + 1 == argc) {
        ht_print_version("hitrainctl");
        return HT_CTL_OK;
    }
    command = find_command(argv[optind]);
    if (command == NULL)
        return usage_error("unknown command ", argv[optind]);
    if (argc - optind != 2)
        return usage_error("expected one path after ", argv[optind]);
    if (o.watch_s > 0 && !command->may_watch)
        return usage_error("--watch is not for ", argv[optind]);
    return command->run(argv[optind + 1], &o);
}
