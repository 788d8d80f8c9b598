/* SPDX-License-Identifier: Apache-2.0 */
/* hitrainctl - look at a mounted store and steer it. A command is one row here. */
#include "mount-helpers/ctl/ctl.h"

#include <getopt.h>

/* ----------------------------------------------------------------- options */

static bool take_flag(const char *value, void *to)
{
    *(bool *)to = true;
    return true;
}

static bool take_any(const char *value, void *to)
{
    *(const char **)to = value;
    return true;
}

static bool take_name(const char *value, void *to)
{
    return take_any(value, to) && value[0] != '\0';
}

static bool take_engine(const char *value, void *to)
{
    enum { ENGINE_NAME_MAX = 64 };

    return take_name(value, to) && strlen(value) <= ENGINE_NAME_MAX;
}

static bool take_number(const char *value, void *to)
{
    uint64_t *out = to;
    char *end;

    errno = 0;
    *out = strtoull(value, &end, 10);
    return value[0] >= '0' && value[0] <= '9' && *end == '\0' && errno == 0 && *out <= INT64_MAX;
}

static bool take_count(const char *value, void *to)
{
    return take_number(value, to) && *(uint64_t *)to;
}

static bool take_seconds(const char *value, void *to)
{
    char *end;
    double v = strtod(value, &end);

    *(double *)to = v;
    return end != value && *end == '\0' && v >= 0.01 && v <= 86400;
}

static bool take_level(const char *value, void *to)
{
    for (enum ht_log_level l = HT_LOG_ERROR; l <= HT_LOG_INFO; l++)
        if (strcmp(ht_log_level_word(l), value) == 0) {
            *(enum ht_log_level *)to = l;
            return true;
        }
    return false;
}

/*
 * O(identifier, name, how its value is taken, its field, given, expected). given: a flag that says that the option is
 * there; 0: none does. expected: NULL for options without a value.
 */
#define AT(field) offsetof(struct ht_cmd_options, field)
#define OPTION_ROWS(O)                                                                        \
    O(JSON, "json", take_flag, AT(json), 0, NULL)                                             \
    O(WATCH, "watch", take_seconds, AT(watch_s), 0, "a number of seconds from 0.01 to 86400") \
    O(FOLLOW, "follow", take_flag, AT(follow), 0, NULL)                                       \
    O(SINCE, "since", take_number, AT(since), 0, "a number")                                  \
    O(LEVEL, "level", take_level, AT(level), 0, "error, warn or info")                        \
    O(IF, "if", take_number, AT(step_open), AT(conditional), "the number of a step")          \
    O(ASYNC, "async", take_flag, AT(async), 0, NULL)                                          \
    O(FULL, "full", take_flag, AT(full), 0, NULL)                                             \
    O(ENGINE, "engine", take_engine, AT(engine), 0, "the name of an engine")                  \
    O(SVG, "svg", take_name, AT(svg), 0, "a file")                                            \
    O(VAULT, "vault", take_name, AT(vault), 0, "the URL of a job")                            \
    O(ONCE, "once", take_flag, AT(once), 0, NULL)                                             \
    O(LISTEN, "listen", take_name, AT(listen), 0, "an address and a port")                    \
    O(TEXTFILE, "textfile", take_name, AT(textfile), 0, "a file")                             \
    O(OUTPUT, "output", take_name, AT(output), 0, "a file")                                   \
    O(LOSS, "loss", take_name, AT(loss), 0, "a file")                                         \
    O(UDEV, "udev", take_flag, AT(udev), 0, NULL)                                             \
    O(TO, "to", take_count, AT(to), 0, "a number of ranks")                                   \
    O(LOST, "lost", take_number, AT(lost), AT(loses), "the number of a rank")                 \
    O(ALL, "all", take_flag, AT(all), 0, NULL)                                                \
    O(PARAMS, "params", take_count, AT(params), 0, "a number above 0")                        \
    O(TENSORS, "tensors", take_count, AT(tensors), 0, "a number above 0")                     \
    O(DTYPE, "dtype", take_any, AT(dtype), 0, "a dtype")                                      \
    O(OPTIMIZER, "optimizer", take_any, AT(optimizer), 0, "words of an optimizer")            \
    O(RETAIN, "retain", take_count, AT(retain), 0, "a number above 0")                        \
    O(REDO, "redo", take_count, AT(redo), 0, "a number above 0")                              \
    O(HELP, "help", take_flag, AT(help), 0, NULL)                                             \
    O(VERSION, "version", take_flag, AT(version), 0, NULL)

enum {
#define OPTION_ID(id, name, take, offset, given, expected) OPT_##id,
    OPTION_ROWS(OPTION_ID)
#undef OPTION_ID
        OPTIONS,
    OPT_FIRST = 256 /* of getopt: letters are below */
};
#define OPT_BIT(option) (UINT64_C(1) << (option))

static const struct option_row {
    const char *name;
    bool (*take)(const char *value, void *to);
    size_t offset, given;
    const char *expected;
} option_rows[OPTIONS] = {
#define ROW(id, name, take, offset, given, expected) {name, take, offset, given, expected},
    OPTION_ROWS(ROW)
#undef ROW
};

/* ---------------------------------------------------------------- commands */

static const char *const scrub_verbs[] = {"start", "status", "stop", NULL};
static const char *const background_verbs[] = {"status", "pause", "resume", NULL};
static const char *const trace_verbs[] = {"show", "save", NULL};

/* What stands after the name of a command, and its verb. */
enum paths { NONE, ONE, MANY, OPTIONAL, ROOT_NAME, ROOT_STEP, ROOT_STEPS, ROOT_STEP_DIR };
static const struct {
    int least, most;
    const char *expected;
} counts[] = {
    [NONE] = {0, 0, "expected options alone after "},
    [ONE] = {1, 1, "expected one path after "},
    [MANY] = {1, INT_MAX, "expected paths after "},
    [OPTIONAL] = {0, 1, "expected one path after "},
    [ROOT_NAME] = {1, 2, "expected a model root, and at most a name, after "},
    [ROOT_STEP] = {2, 2, "expected a model root and a kept step after "},
    [ROOT_STEPS] = {1, INT_MAX, "expected a model root and kept steps after "},
    [ROOT_STEP_DIR] = {3, 3, "expected a model root, a kept step and a new directory after "},
};

static const char *wrong_forget(const struct ht_cmd_options *o)
{
    return o->all == (o->words[0] != NULL) ? "forget: expected kept steps, or --all" : NULL;
}

static const char *wrong_report(const struct ht_cmd_options *o)
{
    return o->output ? NULL : "expected -o and the name of the page, as in -o report.html";
}

static const char *wrong_metrics(const struct ht_cmd_options *o)
{
    return o->listen && (o->textfile || o->watch_s > 0) ? "--listen goes with neither --textfile nor --watch" : NULL;
}

static const struct command {
    const char *name, *usage;
    const char *const *verbs; /* a verb that stands between name and path; NULL: no verb does */
    ht_cmd *run;              /* NULL: ht_cmd_vault */
    enum paths paths;
    uint64_t options;
    const char *help;
    bool anywhere; /* its path need not lie on a mount */
    const char *(*wrong)(
        const struct ht_cmd_options *o); /* options that lack something, or do not go together; or NULL */
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
     "  --watch=SECONDS        prints or replaces again after each interval\n",
     .wrong = wrong_metrics},
    {"features", "PATH|DEVICE [--json | --udev]", NULL, ht_cmd_features, ONE, OPT_BIT(OPT_JSON) | OPT_BIT(OPT_UDEV),
     "Prints the version of the format of a mounted store, or of a device or file of a store, and the features that it uses.\n"
     "A program that does not know a used feature refuses the store, reads it only, or ignores the feature.\n\n"
     "  --udev           type, UUID and label instead, as udev's rules import them\n",
     .anywhere = true},
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
     "  --tensors=N        tensors of the model (1000; fewer if it is small)\n",
     .anywhere = true},
    {"doctor", "[PATH|DEVICE] [--json]", NULL, ht_cmd_doctor, OPTIONAL, OPT_BIT(OPT_JSON),
     "Checks this machine, and the mount or the device or file of a store, for what is slow or unsafe, and prints a remedy\n"
     "for each finding. Changes nothing. Exit status: 3 if the worst finding is a warning, 4 if it is an error.\n\n",
     .anywhere = true},
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
     "  --loss=FILE        also draw losses: CSV with the columns step and loss, or JSON Lines with these keys\n",
     .wrong = wrong_report},
    {"dump", "MOUNTPOINT", NULL, ht_cmd_dump, ONE, 0,
     "Prints what a mount that hangs is doing: its threads with their requests and what they wait for, queues, model\n"
     "roots, requests that devices have not answered, and chunks that threads hold. Sends no request to the mount.\n"
     "For root.\n\n",
     .anywhere = true},
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
    {"steps", "ROOT [--vault=URL/JOB] [--json]", NULL, ht_cmd_steps, ONE, OPT_BIT(OPT_JSON) | OPT_BIT(OPT_VAULT),
     "Prints the kept steps of the model root ROOT. ROOT/.hitrain/snap/STEP has the files of each.\n\n"
     "  --vault=URL/JOB  also the steps that only the job of this vault has\n"},
    {"rollback", "ROOT STEP [--json]", NULL, ht_cmd_rollback, ROOT_STEP, OPT_BIT(OPT_JSON),
     "Takes the model root ROOT back to a kept step: files, attributes, optimizer state and counts. Later kept steps stay.\n"
     "Fails while a step is open.\n\n"},
    {"clone", "ROOT STEP DIR [--json]", NULL, ht_cmd_clone, ROOT_STEP_DIR, OPT_BIT(OPT_JSON),
     "Makes a kept step a model of its own, in the new directory DIR of the same store. Both share what is stored, until\n"
     "either changes it.\n\n"},
    {"forget", "ROOT STEP...|--all", NULL, ht_cmd_forget, ROOT_STEPS, OPT_BIT(OPT_ALL),
     "Drops kept steps, and the space that they alone have. A model root that has any cannot be\n"
     "removed, and keeps its optimizer.\n\n"
     "  --all            all kept steps of ROOT\n",
     .wrong = wrong_forget},
    {"delta", "ROOT STEP > FILE", NULL, ht_cmd_delta, ROOT_STEP, 0,
     "Prints what a step of the model root ROOT has changed, as a safetensors file: NAME.indices and NAME.values of each\n"
     "parameter. With delta=on the last delta_keep steps have it.\n\n"},
    {"verify", "ROOT STEP [--digest=DIGEST] [--json]", NULL, NULL, NONE, 0,
     "Reads a kept step, which verifies its checksums, and prints its digest. The same step has the same digest in\n"
     "every store. Fails if the store has computed another one in the background.\n\n"
     "  --digest=DIGEST  fail if it has another one\n"
     "  --json           as JSON\n"},
    {"archive", "ROOT STEP URL/JOB|- [--from=STEP [--digest=DIGEST]] [--rate=BYTES] [--compress] [--json]", NULL, NULL,
     NONE, 0,
     "Writes a kept step to a vault, or to standard output for restore -: names, attributes, content and optimizer state.\n\n"
     "  --from=STEP      to standard output: only content that differs from this kept step; the reader keeps it, too\n"
     "  --digest=DIGEST  the digest of that step, which is read for it otherwise\n"
     "  --rate=BYTES     at most so many bytes per second, as in 100M\n"
     "  --compress       to a vault: f32 content takes five sixths of its bytes, bf16 two thirds\n"
     "  --json           as JSON\n"},
    {"restore", "URL/JOB[@STEP]|- DIR [--base=ROOT | --cold] [--rank=rofR | --shard=rofR [--lost=q]] [--json]", NULL,
     NULL, NONE, 0,
     "Makes a model root in the new directory DIR, of a step in a vault, or of one on standard input. A step that is cut or\n"
     "damaged leaves nothing there.\n\n"
     "  --cold           the content stays in the vault, and the store reads it from there\n"
     "  --base=ROOT      a model root of the same store: what its kept steps have is shared, and not fetched\n"
     "  --rank=rofR      all that rank r of R has archived\n"
     "  --shard=rofR     rank r of R: the blocks that it owns after this change of ranks, of a full step of all ranks\n"
     "  --lost=q         the former rank that is gone; without it the last ones leave\n"
     "  --json           as JSON\n"},
    {"recall", "PATH [--json]", NULL, NULL, NONE, 0,
     "Brings the cold content of a model root, or of a file in one, to the devices of the store, and waits for it.\n\n"
     "  --json           as JSON\n"},
    {"demote", "ROOT URL/JOB | --older-than=TIME MOUNTPOINT URL [--rate=BYTES] [--json]", NULL, NULL, NONE, 0,
     "Archives a model that no program uses, reads all of that back, and makes the model cold at its own name. Its devices have\n"
     "room for others then. Its kept steps go, and it refuses those that no vault has.\n\n"
     "  --older-than=TIME  all models of the mount that nobody has changed for so long, as in 7d; their paths are their jobs\n"
     "  --rate=BYTES       at most so many bytes per second, as in 100M\n"
     "  --json             as JSON\n"},
    {"vault", "init|probe|list|verify|forget|gc|unpin URL[/JOB[@STEP]] [STEP...|MOUNTPOINT] [--grace=TIME] [--json]",
     NULL, NULL, NONE, 0,
     "init makes a vault; probe tries what its engine promises; list shows jobs, the steps of a job, or the ranks of a step; verify\n"
     "reads steps and compares all checksums; forget drops steps of a job; gc removes what no step needs and is older than the grace.\n"
     "unpin drops the pins of a store that none of its models needs any more.\n\n"
     "  --grace=TIME  of init: how long content may wait for its step, as in 24h (the default); at least 1h\n"
     "  --store=UUID  of unpin, in place of a mount point: all pins of a store that is gone, of 32 hexadecimal digits\n"
     "  --json        as JSON\n"},
    {"reshard", "ROOT --to=R [--lost=r] [--json]", NULL, ht_cmd_reshard, ONE,
     OPT_BIT(OPT_JSON) | OPT_BIT(OPT_TO) | OPT_BIT(OPT_LOST),
     "Gives each of R ranks its blocks of all parameters of the model root ROOT, and moves as few as it can from the ranks\n"
     "that had them. ROOT/.hitrain/shard/<r>of<R>/ has the shard of each. Durable with the next commit. Copies nothing.\n\n"
     "  --to=R           how many ranks there are\n"
     "  --lost=r         the rank that is gone; without it the last ones leave\n"},
    {"wait", "PATH...", NULL, ht_cmd_parameter, MANY, 0,
     "Returns when the queued updates of a parameter, or of all parameters of a model root, are applied.\n\n"},
    {"reset", "PATH...", NULL, ht_cmd_parameter, MANY, 0,
     "Deletes the optimizer state of a parameter, or of all parameters of a model root.\n\n"},
    {"drop", "PATH...", NULL, ht_cmd_parameter, MANY, 0,
     "Takes back the gradient of a parameter in the open step, as if it had not been written.\n\n"},
    {"prefetch", "PATH...", NULL, ht_cmd_move, MANY, 0,
     "Loads files into the DRAM tier. At most half of the clean content of other files goes for each. Needs write permission\n"
     "on the mount's root.\n\n"},
    {"evict", "PATH...", NULL, ht_cmd_move, MANY, 0,
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

static const char hint[] = "hitrainctl --help";

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

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(commands); i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

static int take_option(int option, const char *value, struct ht_cmd_options *o, uint64_t *given)
{
    const struct option_row *row = &option_rows[option];

    *given |= OPT_BIT(option);
    if (row->given)
        *(bool *)((char *)o + row->given) = true;
    if (row->take(value, (char *)o + row->offset))
        return 0;
    return ht_usage_error(hint, HT_CMD_USAGE, "--%s: not %s: %s", row->name, row->expected, value);
}

/* given: OPT_BIT of each. */
static int parse_options(int argc, char **argv, struct ht_cmd_options *o, uint64_t *given)
{
    struct option words[OPTIONS + 1] = {{0}};
    int c, status = 0;

    for (int i = 0; i < OPTIONS; i++)
        words[i] = (struct option){option_rows[i].name, option_rows[i].expected ? required_argument : no_argument, NULL,
                                   OPT_FIRST + i};
    while (status == 0 && (c = getopt_long(argc, argv, "o:", words, NULL)) != -1)
        status = c == '?' ? ht_usage_hint(hint, HT_CMD_USAGE)
                          : take_option(c == 'o' ? OPT_OUTPUT : c - OPT_FIRST, optarg, o, given);
    return status;
}

static const char *misplaced(const struct command *command, uint64_t given)
{
    for (int i = 0; i < OPTIONS; i++)
        if (given & ~command->options & OPT_BIT(i))
            return option_rows[i].name;
    return NULL;
}

static bool takes_verb(const struct command *command, const char *word)
{
    for (const char *const *v = command->verbs; *v; v++)
        if (word && strcmp(*v, word) == 0)
            return true;
    return false;
}

static int run_on(const struct command *command, const char *path, struct ht_cmd_options *o)
{
    static char point[PATH_MAX];

    if (!command->anywhere && ht_cmd_mount_point(path, point) < 0)
        return HT_CMD_FAILED;
    o->point = point;
    return command->run(path, o);
}

static int run_command(const struct command *command, char **paths, struct ht_cmd_options *o)
{
    int status = HT_CMD_OK;

    if (!*paths || command->paths >= ROOT_NAME) /* of none or one */
        return run_on(command, *paths, o);
    for (; *paths; paths++) {
        int one = run_on(command, *paths, o);
        if (one != HT_CMD_OK)
            status = one;
    }
    return status;
}

static bool asks_help(int argc, char **argv)
{
    for (int i = 0; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0)
            return true;
    return false;
}

static int run_words(int argc, char **argv)
{
    struct ht_cmd_options o = {.level = HT_LOG_INFO};
    uint64_t given = 0;
    const struct command *command = argc > 1 ? find_command(argv[1]) : NULL;

    if (command && !command->run)
        return asks_help(argc, argv) ? put_help(command) : ht_cmd_vault(argc - 1, argv + 1);
    int status = parse_options(argc, argv, &o, &given);
    if (status != 0)
        return status;
    if (o.version || (optind + 1 == argc && strcmp(argv[optind], "version") == 0)) {
        ht_print_version("hitrainctl");
        return HT_CMD_OK;
    }
    if (optind == argc)
        return o.help ? put_help(NULL) : ht_usage_error(hint, HT_CMD_USAGE, "expected a command and a path");
    command = find_command(argv[optind]);
    if (!command)
        return ht_usage_error(hint, HT_CMD_USAGE, "unknown command %s", argv[optind]);
    o.command = command->name;
    if (o.help)
        return put_help(command);
    if (misplaced(command, given))
        return ht_usage_error(hint, HT_CMD_USAGE, "--%s is not for %s", misplaced(command, given), command->name);
    if (command->verbs) {
        o.verb = argv[optind + 1];
        if (!takes_verb(command, o.verb))
            return ht_usage_error(hint, HT_CMD_USAGE, "expected: hitrainctl %s %s", command->name, command->usage);
        optind++;
    }
    if (argc - optind - 1 < counts[command->paths].least || argc - optind - 1 > counts[command->paths].most)
        return ht_usage_error(hint, HT_CMD_USAGE, "%s%s: hitrainctl %s %s", counts[command->paths].expected,
                              argv[optind], command->name, command->usage);
    if (command->paths >= ROOT_NAME)
        o.words = argv + optind + 2;
    const char *wrong = command->wrong ? command->wrong(&o) : NULL;
    if (wrong)
        return ht_fail(HT_CMD_USAGE, "%s", wrong);
    return run_command(command, argv + optind + 1, &o);
}

/* What could not be written was not said. */
int main(int argc, char **argv)
{
    int status = run_words(argc, argv);

    if (fflush(stdout) == 0 && !ferror(stdout))
        return status;
    return ht_fail(HT_CMD_FAILED, "cannot write: %s", strerror(errno));
}
