/* SPDX-License-Identifier: Apache-2.0 */
/* hitrainctl - look at a mounted store and steer it. A command is one row here and one file. */
#include "mount-helpers/ctl/ctl.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

#include "mount-helpers/common/text.h"

enum {
    OPT_JSON = 256,
    OPT_WATCH,
    OPT_FOLLOW,
    OPT_SINCE,
    OPT_LEVEL,
    OPT_IF,
    OPT_ASYNC,
    OPT_FULL,
    OPT_ENGINE,
    OPT_SVG,
    OPT_ONCE,
    OPT_LISTEN,
    OPT_TEXTFILE,
    OPT_RATE,
    OPT_DIGEST,
    OPT_FROM,
    OPT_BASE,
    OPT_OUTPUT,
    OPT_LOSS,
    OPT_UDEV,
    OPT_TO,
    OPT_LOST,
    OPT_RECEIVE,
    OPT_SHARD,
    OPT_OF,
    OPT_ALL,
    OPT_PARAMS,
    OPT_TENSORS,
    OPT_DTYPE,
    OPT_OPTIMIZER,
    OPT_RETAIN,
    OPT_REDO,
    OPT_HELP,
    OPT_VERSION
};
enum { ENGINE_NAME_MAX = 64 };
#define OPT_BIT(option) (UINT64_C(1) << ((option)-OPT_JSON))

static const char *const scrub_verbs[] = {"start", "status", "stop", NULL};
static const char *const background_verbs[] = {"status", "pause", "resume", NULL};
static const char *const trace_verbs[] = {"show", "save", NULL};

/* What stands after the name of a command, and its verb. */
enum paths { NONE, ONE, MANY, OPTIONAL, ROOT_NAME, ROOT_STEP, ROOT_STEPS, ROOT_STEP_DIR };
static const struct {
    int least, most;
    const char *expected;
} counts[] = {
    [NONE] = {0, 0, "expected no path after "},
    [ONE] = {1, 1, "expected one path after "},
    [MANY] = {1, INT_MAX, "expected paths after "},
    [OPTIONAL] = {0, 1, "expected one path after "},
    [ROOT_NAME] = {1, 2, "expected a model root, and at most a name, after "},
    [ROOT_STEP] = {2, 2, "expected a model root and a kept step after "},
    [ROOT_STEPS] = {1, INT_MAX, "expected a model root and kept steps after "},
    [ROOT_STEP_DIR] = {3, 3, "expected a model root, a kept step and a new directory after "},
};

static const struct command {
    const char *name, *usage;
    const char *const *verbs; /* a verb that stands between name and path; NULL: no verb does */
    int (*run)(const char *path, const struct ht_cmd_options *o);
    enum paths paths;
    uint64_t options;
    const char *help;
} commands[] = {
    {"stats", "PATH [--json] [--watch=SECONDS]", NULL, ht_cmd_stats, ONE, OPT_BIT(OPT_JSON) | OPT_BIT(OPT_WATCH),
     "Prints the counters of a file or, at the mount's root, of the whole store.\n\n"
     "  --watch=SECONDS  print again after each interval, until interrupted\n"},
    {"top", "PATH [--once] [--json] [--watch=SECONDS]", NULL, ht_cmd_top, ONE,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_WATCH) | OPT_BIT(OPT_ONCE),
     "Shows what the store of PATH does: the DRAM tier, rates, waits, devices and models. On a terminal the keys are q\n"
     "(quit), p (pause), s (sort models), + and - (interval). Elsewhere it prints one picture after the other.\n\n"
     "  --once           one picture, of one interval, and end\n"
     "  --watch=SECONDS  the interval (1)\n"},
    {"metrics", "PATH [--listen=ADDRESS:PORT | --textfile=FILE] [--watch=SECONDS]", NULL, ht_cmd_metrics, ONE,
     OPT_BIT(OPT_WATCH) | OPT_BIT(OPT_LISTEN) | OPT_BIT(OPT_TEXTFILE),
     "Prints the figures of the store of PATH as OpenMetrics, or gives them to monitoring. Shows the models that the caller\n"
     "could find, so run it as root.\n\n"
     "  --listen=ADDRESS:PORT  answers GET /metrics over HTTP until it is interrupted; :9469 is 127.0.0.1:9469\n"
     "  --textfile=FILE        replaces FILE, for the textfile collector of node_exporter (its name ends in .prom)\n"
     "  --watch=SECONDS        prints or replaces again after each interval\n"},
    {"features", "PATH|DEVICE [--json | --udev]", NULL, ht_cmd_features, ONE, OPT_BIT(OPT_JSON) | OPT_BIT(OPT_UDEV),
     "Prints the version of the format of a mounted store, or of a device or file of a store, and the features that it uses.\n"
     "A program that does not know a used feature refuses the store, reads it only, or ignores the feature.\n\n"
     "  --udev           type, UUID and label instead, as udev's rules import them\n"},
    {"size", "--params=N [--dtype=DTYPE] [--optimizer=WORDS] [--retain=N] [--redo=N] [--tensors=N] [--json]", NULL,
     ht_cmd_size, NONE,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_PARAMS) | OPT_BIT(OPT_TENSORS) | OPT_BIT(OPT_DTYPE) | OPT_BIT(OPT_OPTIMIZER) |
         OPT_BIT(OPT_RETAIN) | OPT_BIT(OPT_REDO),
     "Prints how many bytes a store needs for one model: parameters, optimizer state and its rewrite, gradients that wait,\n"
     "kept steps, logged steps, and the store's log. mkfs.hitrain --size takes the number.\n\n"
     "  --params=N         parameters of the model\n"
     "  --dtype=DTYPE      f32 (default), bf16 or f16\n"
     "  --optimizer=WORDS  as in the attribute optimizer (adamw)\n"
     "  --retain=N         kept steps\n"
     "  --redo=N           logged steps, with every N-th in full\n"
     "  --tensors=N        tensors of the model (1000; fewer if it is small)\n"},
    {"doctor", "[PATH|DEVICE] [--json]", NULL, ht_cmd_doctor, OPTIONAL, OPT_BIT(OPT_JSON),
     "Checks this machine, and the mount or the device or file of a store, for what is slow or unsafe, and prints a remedy\n"
     "for each finding. Changes nothing. Exit status: 3 if the worst finding is a warning, 4 if it is an error.\n\n"},
    {"device", "PATH [--json]", NULL, ht_cmd_show, ONE, OPT_BIT(OPT_JSON),
     "Prints the devices of the store that PATH lies on: size, used space, health, copy of the log,\n"
     "and how many requests succeeded and failed.\n\n"},
    {"events", "PATH [--json] [--follow] [--since=SEQ] [--level=LEVEL]", NULL, ht_cmd_show, ONE,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_FOLLOW) | OPT_BIT(OPT_SINCE) | OPT_BIT(OPT_LEVEL),
     "Prints what happened to the store that PATH lies on since it was mounted: errors, refusals,\n"
     "commits that failed. For root and the owner of the mount's root.\n\n"
     "  --follow         continue with new events, until interrupted or unmounted\n"
     "  --since=SEQ      only events after the one with this number\n"
     "  --level=LEVEL    only events at least as important: error, warn or info (default)\n"},
    {"trace", "show|save PATH [--follow] [--since=NUMBER]", trace_verbs, ht_cmd_show, ONE,
     OPT_BIT(OPT_FOLLOW) | OPT_BIT(OPT_SINCE),
     "Prints the last 65536 accesses to the store that PATH lies on: reads, writes, gradients, updates, and the ends of\n"
     "steps, with the time since the mount and how long each waited. show prints a table; save prints JSON Lines, which\n"
     "hitrain(7) describes. For root and the owner of the mount's root.\n\n"
     "  --follow         continue with new accesses, until interrupted or unmounted\n"
     "  --since=NUMBER   only accesses after the one with this number\n"},
    {"plan", "PATH [--json] [--svg=FILE]", NULL, ht_cmd_plan, ONE, OPT_BIT(OPT_JSON) | OPT_BIT(OPT_SVG),
     "Prints the plan of a step that the store of PATH follows: its length, how many steps matched it, and for each file\n"
     "when it is used next and what leaves memory. For root and the owner of the mount's root.\n\n"
     "  --svg=FILE       also draw content in memory and reads over one step\n"},
    {"report", "PATH -o FILE|--output=FILE [--loss=FILE]", NULL, ht_cmd_report, ONE,
     OPT_BIT(OPT_OUTPUT) | OPT_BIT(OPT_LOSS),
     "Writes a page of HTML about the store of PATH, readable without a network: steps per second, memory and input and\n"
     "output over a step, traffic of tensors and devices, models, events and configuration. Run it as root, or as the\n"
     "owner of the mount's root: others see less.\n\n"
     "  -o, --output=FILE  the page; - is standard output\n"
     "  --loss=FILE        also draw losses: CSV with the columns step and loss, or JSON Lines with these keys\n"},
    {"dump", "MOUNTPOINT", NULL, ht_cmd_dump, ONE, 0,
     "Prints what a mount that hangs is doing: its threads with their requests and what they wait for, queues, model\n"
     "roots, requests that devices have not answered, and chunks that threads hold. Sends no request to the mount.\n"
     "For root.\n\n"},
    {"roots", "PATH [--json]", NULL, ht_cmd_show, ONE, OPT_BIT(OPT_JSON),
     "Prints the model roots of the store that PATH lies on, if you could find them: finished and durable steps,\n"
     "whether one is open, parameters with state, the last step's gradient norm, and the holder of a claim.\n\n"},
    {"commit", "PATH [--full] [--if=N] [--json]", NULL, ht_cmd_commit, ONE,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_IF) | OPT_BIT(OPT_FULL),
     "Ends the step of the model root PATH and makes it durable; at the mount's root: makes\n"
     "everything outside model roots durable.\n\n"
     "  --full           writes parameters and state also with redo=on, and frees the logged gradients\n"
     "  --if=N           only while user.hitrain.step_open is N (0: no step is open)\n"},
    {"step", "PATH [--async] [--if=N] [--json]", NULL, ht_cmd_step, ONE,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_IF) | OPT_BIT(OPT_ASYNC),
     "Ends the step of the model root PATH. It becomes durable as durable_every says.\n\n"
     "  --async          returns at once; the store closes the step meanwhile\n"
     "  --if=N           only while user.hitrain.step_open is N (0: no step is open)\n"},
    {"abort", "PATH [--if=N] [--json]", NULL, ht_cmd_abort, ONE, OPT_BIT(OPT_JSON) | OPT_BIT(OPT_IF),
     "Takes the model root PATH back to its last commit: the open step, steps that are not durable, and all newer\n"
     "changes below it.\n\n"
     "  --if=N           only while user.hitrain.step_open is N (0: no step is open)\n"},
    {"snapshot", "ROOT [NAME] [--json]", NULL, ht_cmd_snapshot, ROOT_NAME, OPT_BIT(OPT_JSON),
     "Commits the model root ROOT and keeps the step, by its number or by NAME. Nothing is copied.\n\n"},
    {"steps", "ROOT [--json]", NULL, ht_cmd_show, ONE, OPT_BIT(OPT_JSON),
     "Prints the kept steps of the model root ROOT. ROOT/.hitrain/snap/STEP has the files of each.\n\n"},
    {"rollback", "ROOT STEP [--json]", NULL, ht_cmd_rollback, ROOT_STEP, OPT_BIT(OPT_JSON),
     "Takes the model root ROOT back to a kept step: files, attributes, optimizer state and counts. Later kept steps stay.\n"
     "Fails while a step is open.\n\n"},
    {"clone", "ROOT STEP DIR [--json]", NULL, ht_cmd_clone, ROOT_STEP_DIR, OPT_BIT(OPT_JSON),
     "Makes a kept step a model of its own, in the new directory DIR of the same store. Both share what is stored, until\n"
     "either changes it.\n\n"},
    {"forget", "ROOT STEP...|--all", NULL, ht_cmd_forget, ROOT_STEPS, OPT_BIT(OPT_ALL),
     "Drops kept steps, and the space that they alone have. A model root that has any cannot be\n"
     "removed, and keeps its optimizer.\n\n"
     "  --all            all kept steps of ROOT\n"},
    {"verify", "ROOT STEP [--digest=DIGEST] [--json]", NULL, ht_cmd_verify, ROOT_STEP,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_DIGEST),
     "Reads a kept step, which verifies its checksums, and prints its digest. The same step has the same digest in\n"
     "every store. Fails if the store has computed another one in the background.\n\n"
     "  --digest=DIGEST  fail if it has another one\n"},
    {"send", "ROOT STEP [--from=STEP [--digest=DIGEST] | --shard=r [--of=q]] [--rate=BYTES]", NULL, ht_cmd_send,
     ROOT_STEP, OPT_BIT(OPT_RATE) | OPT_BIT(OPT_FROM) | OPT_BIT(OPT_DIGEST) | OPT_BIT(OPT_SHARD) | OPT_BIT(OPT_OF),
     "Writes a kept step to standard output, as a stream for receive: names, attributes, content and optimizer state.\n\n"
     "  --from=STEP      content that differs from this kept step alone; the receiver needs to keep it, too\n"
     "  --digest=DIGEST  the digest of that step, which is read for it otherwise\n"
     "  --shard=r        the blocks alone that rank r gets by the last reshard before the step\n"
     "  --of=q           of these the ones that were of rank q before, when each rank has a store\n"
     "  --rate=BYTES     at most so many bytes per second, as in 100M\n"},
    {"receive", "DIR [--base=ROOT] [--json]", NULL, ht_cmd_receive, ONE, OPT_BIT(OPT_JSON) | OPT_BIT(OPT_BASE),
     "Makes a model root in the new directory DIR from a stream on standard input. A stream that is cut or damaged\n"
     "leaves nothing there. Streams of send --shard --of for one rank may follow each other.\n\n"
     "  --base=ROOT      a model root of the same store that keeps the step of send --from, or of send --shard\n"},
    {"reshard", "ROOT --to=R [--lost=r] [--json]", NULL, ht_cmd_reshard, ONE,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_TO) | OPT_BIT(OPT_LOST),
     "Gives each of R ranks its blocks of all parameters of the model root ROOT, and moves as few as it can from the ranks\n"
     "that had them. ROOT/.hitrain/shard/<r>of<R>/ has the shard of each. Durable with the next commit. Copies nothing.\n\n"
     "  --to=R           how many ranks there are\n"
     "  --lost=r         the rank that is gone; without it the last ones leave\n"},
    {"follow", "ROOT [--from=STEP [--digest=DIGEST] | --since=N] [--once] [--rate=BYTES] | DIR --receive [--json]",
     NULL, ht_cmd_follow, ONE,
     OPT_BIT(OPT_FROM) | OPT_BIT(OPT_DIGEST) | OPT_BIT(OPT_SINCE) | OPT_BIT(OPT_ONCE) | OPT_BIT(OPT_RATE) |
         OPT_BIT(OPT_RECEIVE) | OPT_BIT(OPT_JSON),
     "Writes each logged step of the model root ROOT to standard output, as soon as it is durable, until interrupted.\n"
     "With --receive: computes the steps on standard input in DIR, a copy of the model in another store. Both then have\n"
     "the same bits. Needs redo=on and redo_keep=N. A copy continues where it stopped.\n\n"
     "  --from=STEP      the first time: the kept step that was copied with send and receive\n"
     "  --digest=DIGEST  the digest of that step, which is read for it otherwise\n"
     "  --since=N        later: the copy has step N; else all readable steps are sent\n"
     "  --once           end when all present steps are sent\n"
     "  --rate=BYTES     at most so many bytes per second, as in 100M\n"
     "  --receive        read steps, in place of writing them\n"},
    {"wait", "PATH...", NULL, ht_cmd_wait, MANY, 0,
     "Returns when the queued updates of a parameter, or of all parameters of a model root, are applied.\n\n"},
    {"reset", "PATH...", NULL, ht_cmd_reset, MANY, 0,
     "Deletes the optimizer state of a parameter, or of all parameters of a model root.\n\n"},
    {"drop", "PATH...", NULL, ht_cmd_drop, MANY, 0,
     "Takes back the gradient of a parameter in the open step, as if it had not been written.\n\n"},
    {"prefetch", "PATH...", NULL, ht_cmd_prefetch, MANY, 0,
     "Loads files into the DRAM tier. At most half of the clean content of other files goes for each. Needs write permission\n"
     "on the mount's root.\n\n"},
    {"evict", "PATH...", NULL, ht_cmd_evict, MANY, 0,
     "Writes files back and releases their memory in the DRAM tier. Needs write permission on the mount's root.\n\n"},
    {"scrub", "start|status|stop PATH [--json]", scrub_verbs, ht_cmd_scrub, ONE, OPT_BIT(OPT_JSON),
     "Reads everything that the store of PATH has on its devices, in the background, and verifies it. Repairs content\n"
     "that has a second copy: superblocks, the log, and chunks that are in DRAM. Damage beyond repair is an event\n"
     "(hitrainctl events) and an error for readers. start and stop need write permission on the mount's root; status\n"
     "prints the progress. A scrub ends with the mount.\n\n"},
    {"trim", "PATH [--json]", NULL, ht_cmd_trim, ONE, OPT_BIT(OPT_JSON),
     "Has the devices of the store of PATH discard all free space, and prints how much that was. Returns when they have\n"
     "done so. For root and the owner of the mount's root.\n\n"},
    {"background", "status|pause|resume PATH [--engine=NAME] [--json]", background_verbs, ht_cmd_background, ONE,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_ENGINE),
     "Prints what the engines of the store of PATH do in the background, and what they have done since the mount. pause\n"
     "keeps them from beginning anything until resume, or until the store is mounted again. Both are for root and the\n"
     "owner of the mount's root.\n\n"
     "  --engine=NAME    this engine alone\n"},
};

static const struct option words[] = {
    {"json", no_argument, NULL, OPT_JSON},
    {"watch", required_argument, NULL, OPT_WATCH},
    {"follow", no_argument, NULL, OPT_FOLLOW},
    {"since", required_argument, NULL, OPT_SINCE},
    {"level", required_argument, NULL, OPT_LEVEL},
    {"if", required_argument, NULL, OPT_IF},
    {"async", no_argument, NULL, OPT_ASYNC},
    {"full", no_argument, NULL, OPT_FULL},
    {"engine", required_argument, NULL, OPT_ENGINE},
    {"svg", required_argument, NULL, OPT_SVG},
    {"once", no_argument, NULL, OPT_ONCE},
    {"listen", required_argument, NULL, OPT_LISTEN},
    {"textfile", required_argument, NULL, OPT_TEXTFILE},
    {"rate", required_argument, NULL, OPT_RATE},
    {"digest", required_argument, NULL, OPT_DIGEST},
    {"from", required_argument, NULL, OPT_FROM},
    {"base", required_argument, NULL, OPT_BASE},
    {"output", required_argument, NULL, OPT_OUTPUT},
    {"loss", required_argument, NULL, OPT_LOSS},
    {"udev", no_argument, NULL, OPT_UDEV},
    {"to", required_argument, NULL, OPT_TO},
    {"lost", required_argument, NULL, OPT_LOST},
    {"receive", no_argument, NULL, OPT_RECEIVE},
    {"shard", required_argument, NULL, OPT_SHARD},
    {"of", required_argument, NULL, OPT_OF},
    {"all", no_argument, NULL, OPT_ALL},
    {"params", required_argument, NULL, OPT_PARAMS},
    {"tensors", required_argument, NULL, OPT_TENSORS},
    {"dtype", required_argument, NULL, OPT_DTYPE},
    {"optimizer", required_argument, NULL, OPT_OPTIMIZER},
    {"retain", required_argument, NULL, OPT_RETAIN},
    {"redo", required_argument, NULL, OPT_REDO},
    {"help", no_argument, NULL, OPT_HELP},
    {"version", no_argument, NULL, OPT_VERSION},
    {NULL, 0, NULL, 0},
};

static int usage_error(const char *why, const char *what)
{
    if (why)
        ht_error("%s%s", why, what);
    ht_print_usage_error(NULL, "hitrainctl --help");
    return HT_CMD_USAGE;
}

/* command NULL: of all. */
static int put_help(const struct command *command)
{
    if (command) {
        printf("Usage: hitrainctl %s %s\n\n%s", command->name, command->usage, command->help);
        if (command->options & OPT_BIT(OPT_JSON))
            puts("  --json           as JSON");
    } else {
        puts("Usage: hitrainctl COMMAND PATH... [OPTION...]\n");
        for (size_t i = 0; i < HT_ARRAY_SIZE(commands); i++)
            printf("  %s %s\n", commands[i].name, commands[i].usage);
        puts("\n  COMMAND --help        what it does\n  --help, --version");
    }
    puts("\nExit status: 0 done, 1 failed, 2 usage.");
    return HT_CMD_OK;
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

static bool parse_number(const char *text, uint64_t *out)
{
    char *end;

    errno = 0;
    *out = strtoull(text, &end, 10);
    return text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0 && *out <= INT64_MAX;
}

static bool parse_level(const char *text, enum ht_log_level *out)
{
    for (enum ht_log_level l = HT_LOG_ERROR; l <= HT_LOG_INFO; l++)
        if (strcmp(ht_log_level_word(l), text) == 0) {
            *out = l;
            return true;
        }
    return false;
}

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(commands); i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

struct parsed {
    struct ht_cmd_options o;
    uint64_t given; /* OPT_BIT of each */
    bool help, version;
};

/* What an option without a value sets; NULL: it has a value. */
static bool *flag_of(int option, struct ht_cmd_options *o)
{
    switch (option) {
    case OPT_JSON:
        return &o->json;
    case OPT_FOLLOW:
        return &o->follow;
    case OPT_ONCE:
        return &o->once;
    case OPT_ASYNC:
        return &o->async;
    case OPT_FULL:
        return &o->full;
    case OPT_UDEV:
        return &o->udev;
    case OPT_RECEIVE:
        return &o->receive;
    case OPT_ALL:
        return &o->all;
    default:
        return NULL;
    }
}

/* Those of `size`. */
static int parse_need(int option, const char *value, struct ht_cmd_options *o)
{
    uint64_t *number = option == OPT_PARAMS ? &o->params
        : option == OPT_TENSORS             ? &o->tensors
        : option == OPT_RETAIN              ? &o->retain
                                            : &o->redo;

    if (option == OPT_DTYPE)
        o->dtype = value;
    else if (option == OPT_OPTIMIZER)
        o->optimizer = value;
    else if (!parse_number(value, number) || !*number)
        return usage_error("not a number above 0: ", value);
    return 0;
}

static int parse_value(int option, const char *value, struct ht_cmd_options *o)
{
    bool *flag = flag_of(option, o);

    if (flag) {
        *flag = true;
        return 0;
    }
    if (option >= OPT_PARAMS && option <= OPT_REDO)
        return parse_need(option, value, o);
    switch (option) {
    case OPT_SVG:
        o->svg = value;
        return value[0] != '\0' ? 0 : usage_error("--svg: expected a file", "");
    case OPT_LISTEN:
        o->listen = value;
        return value[0] != '\0' ? 0 : usage_error("--listen: expected an address and a port", "");
    case OPT_TEXTFILE:
        o->textfile = value;
        return value[0] != '\0' ? 0 : usage_error("--textfile: expected a file", "");
    case OPT_OUTPUT:
        o->output = value;
        return value[0] != '\0' ? 0 : usage_error("--output: expected a file", "");
    case OPT_LOSS:
        o->loss = value;
        return value[0] != '\0' ? 0 : usage_error("--loss: expected a file", "");
    case OPT_RATE:
        return ht_parse_size(value, &o->rate) == 0 && o->rate
            ? 0
            : usage_error("--rate: not a number of bytes per second: ", value);
    case OPT_DIGEST:
        o->digest = value;
        return strlen(value) == 32 && strspn(value, "0123456789abcdef") == 32
            ? 0
            : usage_error("--digest: not 32 hexadecimal digits in lower case: ", value);
    case OPT_FROM:
        o->from = value;
        return 0;
    case OPT_BASE:
        o->base = value;
        return value[0] != '\0' ? 0 : usage_error("--base: expected a model root", "");
    case OPT_ENGINE:
        o->engine = value;
        return value[0] != '\0' && strlen(value) <= ENGINE_NAME_MAX
            ? 0
            : usage_error("--engine: not the name of an engine: ", value);
    case OPT_WATCH:
        return parse_seconds(value, &o->watch_s)
            ? 0
            : usage_error("--watch: not a number of seconds from 0.01 to 86400: ", value);
    case OPT_TO:
        return parse_number(value, &o->to) && o->to ? 0 : usage_error("--to: not a number of ranks: ", value);
    case OPT_LOST:
        o->loses = true;
        return parse_number(value, &o->lost) ? 0 : usage_error("--lost: not the number of a rank: ", value);
    case OPT_SHARD:
        o->for_rank = true;
        return parse_number(value, &o->shard) ? 0 : usage_error("--shard: not the number of a rank: ", value);
    case OPT_OF:
        o->of_rank = true;
        return parse_number(value, &o->of) ? 0 : usage_error("--of: not the number of a rank: ", value);
    case OPT_SINCE:
        return parse_number(value, &o->since) ? 0 : usage_error("--since: not a number: ", value);
    case OPT_IF:
        o->conditional = true;
        return parse_number(value, &o->step_open) ? 0 : usage_error("--if: not the number of a step: ", value);
    default:
        return parse_level(value, &o->level) ? 0 : usage_error("--level: not error, warn or info: ", value);
    }
}

static int parse(int argc, char **argv, struct parsed *p)
{
    int c, status = 0;

    while (status == 0 && (c = getopt_long(argc, argv, "o:", words, NULL)) != -1) {
        if (c == 'o')
            c = OPT_OUTPUT;
        if (c == OPT_HELP)
            p->help = true;
        else if (c == OPT_VERSION)
            p->version = true;
        else if (c == '?')
            status = usage_error(NULL, NULL);
        else
            status = parse_value(c, optarg, &p->o);
        if (status == 0)
            p->given |= OPT_BIT(c);
    }
    return status;
}

static const char *misplaced(const struct command *command, uint64_t given)
{
    for (const struct option *w = words; w->name; w++)
        if (given & ~command->options & OPT_BIT(w->val))
            return w->name;
    return NULL;
}

static bool takes_verb(const struct command *command, const char *word)
{
    for (const char *const *v = command->verbs; *v; v++)
        if (word && strcmp(*v, word) == 0)
            return true;
    return false;
}

static const char *verbs_of(const struct command *command)
{
    return command->verbs == scrub_verbs     ? "scrub start, status or stop"
        : command->verbs == background_verbs ? "background status, pause or resume"
                                             : "trace show or save";
}

static int run(const struct command *command, char **paths, const struct ht_cmd_options *o)
{
    int status = HT_CMD_OK;

    if (!*paths || command->paths >= ROOT_NAME) /* of none or one */
        return command->run(*paths, o);
    for (; *paths; paths++) {
        int one = command->run(*paths, o);
        if (one != HT_CMD_OK)
            status = one;
    }
    return status;
}

int main(int argc, char **argv)
{
    struct parsed p = {.o = {.level = HT_LOG_INFO}};
    const struct command *command;
    int status = parse(argc, argv, &p);

    if (status != 0)
        return status;
    if (p.version || (optind + 1 == argc && strcmp(argv[optind], "version") == 0)) {
        ht_print_version("hitrainctl");
        return HT_CMD_OK;
    }
    if (optind == argc)
        return p.help ? put_help(NULL) : usage_error("expected a command and a path", "");
    command = find_command(argv[optind]);
    if (!command)
        return usage_error("unknown command ", argv[optind]);
    p.o.command = command->name;
    if (p.help)
        return put_help(command);
    if (misplaced(command, p.given)) {
        ht_error("--%s is not for %s", misplaced(command, p.given), command->name);
        return usage_error(NULL, NULL);
    }
    if (command->verbs) {
        p.o.verb = argv[optind + 1];
        if (!takes_verb(command, p.o.verb))
            return usage_error("expected: hitrainctl ", verbs_of(command));
        optind++;
    }
    if (argc - optind - 1 < counts[command->paths].least || argc - optind - 1 > counts[command->paths].most)
        return usage_error(counts[command->paths].expected, argv[optind]);
    if (command->paths >= ROOT_NAME)
        p.o.words = argv + optind + 2;
    return run(command, argv + optind + 1, &p.o);
}
