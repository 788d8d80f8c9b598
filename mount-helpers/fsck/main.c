/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hitrain-fsck - check a whole store and repair it: every superblock, both logs, every reference, every stored byte,
 * every name.
 */
#include "mount-helpers/fsck/fsck.h"

#include <getopt.h>
#include <unistd.h>

static const char hint[] = "hitrain-fsck --help";
static const char usage_text[] =
    "Usage: hitrain-fsck [-n | -p | -y] [--json] [--progress] [--extents] [--degraded] [--no-data]\n"
    "                    [--vault[=URL]] [--no-wait] DEVICE...\n"
    "\n"
    "Checks the hitrain store on all of its devices, and repairs it; they must not be mounted.\n"
    "\n"
    "  -n          change nothing (default)\n"
    "  -p, -a      repair everything that needs no loss and no guess\n"
    "  -y          repair everything that can be repaired\n"
    "  -f          accepted; everything is always checked\n"
    "  --json      problems, figures and the state of the log as JSON on stdout\n"
    "  --progress  show progress on stderr also if it is not a terminal\n"
    "  --extents   list where every stored chunk lies, too (with -n)\n"
    "  --degraded  check the present devices although others are missing (with -n)\n"
    "  --no-data   check all metadata, and read no stored content\n"
    "  --vault[=URL]  read what lies in the store's vault, too\n"
    "  --no-wait   fail at once if a device is in use, instead of after 30 s\n"
    "  --help, --version\n"
    "\n"
    "Exit status: 0 clean, 1 problems repaired, 4 problems left, 8 operational error, 16 usage; 1, 4 and 8 may add up.\n";

/* -1: go on; else the exit status. */
static int parse(int argc, char **argv, struct ht_fsck_options *o)
{
    const struct option words[] = {
        {"json", no_argument, &o->json, 1},       {"progress", no_argument, &o->progress, 1},
        {"extents", no_argument, &o->extents, 1}, {"degraded", no_argument, &o->degraded, 1},
        {"no-data", no_argument, &o->no_data, 1}, {"no-wait", no_argument, &o->no_wait, 1},
        {"vault", optional_argument, NULL, 'v'},  {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},      {NULL, 0, NULL, 0},
    };
    int c, mode = 0;

    while ((c = getopt_long(argc, argv, "npayf", words, NULL)) != -1) {
        if (c == 'v')
            o->vault = optarg ? optarg : "";
        if (c == 'v' || c == 'f' || c == 0)
            continue;
        if (!strchr("npay", c))
            return ht_option_status(c, "hitrain-fsck", hint, usage_text, HT_FSCK_USAGE);
        c = c == 'a' ? 'p' : c;
        if (mode != 0 && mode != c)
            return ht_usage_error(hint, HT_FSCK_USAGE, "only one of -n, -p (or -a) and -y is possible");
        mode = c;
    }
#ifdef HT_BINDIR /* of the programs of vaults */
    o->vault_programs = access(HT_BINDIR "/hitrain-vault-file", X_OK) == 0 ? HT_BINDIR : NULL;
#endif
    o->mode = mode == 'p' ? HT_FSCK_PREEN : mode == 'y' ? HT_FSCK_YES : HT_FSCK_CHECK;
    if ((o->extents || o->degraded) && o->mode != HT_FSCK_CHECK)
        return ht_usage_error(hint, HT_FSCK_USAGE, "--extents and --degraded go with -n only");
    if (o->vault && o->no_data)
        return ht_usage_error(hint, HT_FSCK_USAGE, "--vault reads content, and --no-data reads none");
    if (optind == argc || argc - optind > (int)HT_DEVICES_MAX)
        return ht_usage_error(hint, HT_FSCK_USAGE, "expected the devices of one store");
    return -1;
}

/* Opens and holds the devices, for writing if something may be repaired. Errors are reported, with the holder. */
static int open_devices(struct ht_fsck *f, char *const paths[], unsigned count)
{
    int flags = (f->opt.mode == HT_FSCK_CHECK ? HT_DEV_RDONLY : 0) | (f->opt.no_wait ? HT_DEV_NOWAIT : 0);

    while (f->dev_count < count) {
        const char *path = paths[f->dev_count];
        int rc = ht_dev_open(path, flags, &f->devs[f->dev_count]);
        if (rc == -EBUSY)
            ht_error("%s: nothing was checked", path);
        if (rc < 0)
            return rc;
        f->dev_count++;
    }
    return 0;
}

int main(int argc, char **argv)
{
    static struct ht_fsck f;

    ht_stdio_fds_open();
    int status = parse(argc, argv, &f.opt);
    if (status >= 0)
        return status;
    f.out = stdout;
    ht_json_init(&f.json, stdout);
    f.failed = open_devices(&f, argv + optind, (unsigned)(argc - optind)) < 0;
    status = ht_fsck_run(&f, argv[optind]);
    ht_fsck_close(&f);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        ht_error("cannot write the result: %s", strerror(errno));
        status |= HT_FSCK_FAILED;
    }
    return status;
}
