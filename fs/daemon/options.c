/* SPDX-License-Identifier: Apache-2.0 */
/* options.c - see options.h. A new mount option is one row of the first table below, a new flag one of the second. */
#include "fs/daemon/options.h"

#include <getopt.h>
#include <limits.h>
#include <sys/mount.h>

#include "tiering/base/log.h"

#ifndef MS_NOSYMFOLLOW
#define MS_NOSYMFOLLOW 256
#endif

enum { COMMIT_S_DEFAULT = 5, THREADS_MAX = 64 };

/* ------------------------------------------------------------------ values */

static int refuse_value(const char *word, const char *value, const char *allowed)
{
    ht_error("option %s=%s: %s", word, value, allowed);
    return -EINVAL;
}

struct row {
    const char *word;
    const char *value; /* its name in the help text; NULL: takes none */
    int (*set)(struct ht_options *o, const struct row *row, const char *value);
    const char *help;
    size_t offset, bytes; /* of its field; a remount cannot change it. bytes 0: it can */
    uint64_t least, most; /* of a size or number */
    const char *words[3]; /* all that there are; the place of each is its value */
};

static void *field_of(struct ht_options *o, const struct row *row)
{
    return (char *)o + row->offset;
}

static int set_size(struct ht_options *o, const struct row *row, const char *value)
{
    char text[32], allowed[96];
    uint64_t bytes;

    if (ht_parse_size(value, &bytes) == 0 && bytes >= row->least) {
        *(uint64_t *)field_of(o, row) = bytes;
        return 0;
    }
    snprintf(allowed, sizeof(allowed), "a size of at least %s is allowed, as in 512M or 8G",
             ht_format_size(row->least, text, sizeof(text)));
    return refuse_value(row->word, value, allowed);
}

static int set_passthrough(struct ht_options *o, const struct row *row, const char *value)
{
    bool off = strcmp(value, "off") == 0 || strcmp(value, "0") == 0, lent = strcmp(value, "auto") == 0;

    *(uint64_t *)field_of(o, row) = lent ? HT_PASSTHROUGH_AUTO : 0;
    return off || lent ? 0 : set_size(o, row, value);
}

static int set_number(struct ht_options *o, const struct row *row, const char *value)
{
    char allowed[64], *end;

    errno = 0;
    unsigned long v = strtoul(value, &end, 10);
    if (value[0] >= '0' && value[0] <= '9' && !*end && !errno && v >= row->least && v <= row->most) {
        *(unsigned *)field_of(o, row) = (unsigned)v;
        return 0;
    }
    snprintf(allowed, sizeof(allowed), "a number from %u to %u is allowed", (unsigned)row->least, (unsigned)row->most);
    return refuse_value(row->word, value, allowed);
}

/* Kept as milliseconds. */
static int set_seconds(struct ht_options *o, const struct row *row, const char *value)
{
    int rc = set_number(o, row, value);

    if (rc == 0)
        *(unsigned *)field_of(o, row) *= 1000;
    return rc;
}

static int set_word(struct ht_options *o, const struct row *row, const char *value)
{
    for (unsigned i = 0; i < HT_ARRAY_SIZE(row->words) && row->words[i]; i++) {
        if (strcmp(value, row->words[i]) != 0)
            continue;
        if (row->bytes == sizeof(bool))
            *(bool *)field_of(o, row) = i;
        else
            *(unsigned *)field_of(o, row) = i;
        return 0;
    }
    return refuse_value(row->word, value,
                        row->words[2]                           ? "auto, on or off is allowed"
                            : strcmp(row->value, "on|off") == 0 ? "on or off is allowed"
                                                                : "off or auto is allowed");
}

static int set_numa(struct ht_options *o, const struct row *row, const char *value)
{
    if (strcmp(value, "auto") == 0)
        o->store.numa_node = HT_NUMA_AUTO;
    else if (strcmp(value, "off") == 0)
        o->store.numa_node = HT_NUMA_OFF;
    else if (value[0] >= '0' && value[0] <= '9')
        return set_number(o, row, value);
    else
        return refuse_value(row->word, value, "auto, off or the number of a node is allowed");
    return 0;
}

static int set_device(struct ht_options *o, const struct row *row, const char *value)
{
    if (!value[0])
        return refuse_value(row->word, value, "the path of a member is needed");
    if (o->device_count == HT_DEVICES_MAX) {
        ht_error("a store has at most %u devices", HT_DEVICES_MAX);
        return -EINVAL;
    }
    char *copy = strdup(value);
    if (!copy)
        return -ENOMEM;
    o->device[o->device_count++] = copy;
    o->named_count++;
    return 0;
}

/* A copy, which is freed with the options. */
static int set_text(struct ht_options *o, const struct row *row, const char *value)
{
    char *copy = strdup(value);

    if (!copy)
        return -ENOMEM;
    free(*(char **)field_of(o, row));
    *(char **)field_of(o, row) = copy;
    return 0;
}

static int set_true(struct ht_options *o, const struct row *row, const char *value)
{
    *(bool *)field_of(o, row) = true;
    return 0;
}

static int set_default(struct ht_options *o, const struct row *row, const char *value)
{
    return 0;
}

#define SWITCH .words = {"off", "on"}
#define FIXED(field) offsetof(struct ht_options, field), sizeof(((struct ht_options *)0)->field)

static const struct row rows[] = {
    {"dram", "SIZE", set_size, "DRAM tier (default: a quarter of the available memory)", FIXED(store.dram_bytes),
     8 * HT_MIB},
    {"staging", "SIZE", set_size, "staging pool (default: 64M)", FIXED(store.staging_bytes), 24 * HT_MIB},
    {"passthrough", "auto|off|SIZE", set_passthrough,
     "part of dram for files whose very pages clients read and map; auto: as much as they ask for (default: auto)",
     FIXED(store.shm_bytes), 2 * HT_MIB},
    {"commit", "SECONDS", set_seconds, "how long unsynced data outside model roots may stay volatile (default: 5)",
     FIXED(store.commit_ms), 0, 3600},
    {"scrub_rate", "SIZE", set_size, "what a scrub reads in a second at most (default: 64M)",
     FIXED(store.scrub_rate_bytes), 64 * HT_KIB},
    {"background", "on|off", set_word,
     "whether engines begin by themselves: dedup, compact, discard, compression, digests (default: on)",
     FIXED(store.no_background), .words = {"on", "off"}},
    {"discard", "auto|on|off", set_word,
     "devices discard space that became free; auto: but not reserved space of files (default: auto)",
     FIXED(store.discard), .words = {[HT_DISCARD_OFF] = "off", [HT_DISCARD_ON] = "on", [HT_DISCARD_AUTO] = "auto"}},
    {"background_rate", "SIZE", set_size,
     "what all work in the background moves in a second at most (default: no limit)",
     FIXED(store.background_rate_bytes), 64 * HT_KIB},
    {"background_cpu", "PERCENT", set_number, "its processor time, in percent of one CPU (default: no limit)",
     FIXED(store.background_cpu_percent), 1, 6400},
    {"dedup", "on|off", set_word, "store content once that is there twice (default: on)", FIXED(store.dedup), SWITCH},
    {"dedup_index", "SIZE", set_size, "memory for its checksums at most (default: 1/64 of dram)",
     FIXED(store.dedup_index_bytes), 64 * HT_KIB},
    {"digest", "on|off", set_word, "compute the digest of each kept step in the background (default: off)",
     FIXED(store.digest), SWITCH},
    {"compact", "on|off", set_word, "empty nearly empty groups of blocks, for long runs of free space (default: on)",
     FIXED(store.compact), SWITCH},
    {"compress", "off|auto", set_word,
     "whether files without the attribute compress are compressed when they have not changed for a while (default: off)",
     FIXED(compress), .words = {"off", "auto"}},
    {"compress_inline", "auto|on|off", set_word,
     "compress new content of such files when it is written: where that is faster, always, or never (default: auto)",
     FIXED(store.compress_inline),
     .words = {[HT_INLINE_AUTO] = "auto", [HT_INLINE_OFF] = "off", [HT_INLINE_ALWAYS] = "on"}},
    {"compress_after", "SECONDS", set_seconds,
     "how long content has to stay the same before it is compressed (default: 60)", FIXED(store.compress_after_ms), 1,
     30 * 24 * 3600},
    {"optim_threads", "N", set_number, "threads of the optimizer (default: one for each CPU, at least 2)",
     FIXED(optim_threads), 1, THREADS_MAX},
    {"max_threads", "N", set_number, "threads that take requests (default: two for each CPU, 4 to 16)",
     FIXED(fuse_threads), 1, THREADS_MAX},
    {"numa", "auto|off|NODE", set_numa, "where memory is and threads run (default: auto, the nodes of the devices)",
     FIXED(store.numa_node), 0, 1024},
    {"device", "PATH", set_device, "a further member of the store", FIXED(device_count)},
    {"degraded", NULL, set_true, "go on without members that are missing: what lies on them is EIO",
     FIXED(store.degraded)},
    {"noreplay", NULL, set_true, "with ro: show models with logged steps as of their last full step", FIXED(no_replay)},
    {"vault", "URL", set_text, "where cold content is read (default: as the store remembers)", FIXED(store.vault_url)},
    {"vault_timeout", "SECONDS", set_seconds, "a vault does not answer when a read takes longer (default: 30)",
     FIXED(store.vault_timeout_ms), 1, 3600},
    {"vault_slots", "NUMBER", set_number, "how many reads of 1 MiB a vault gets at once (default: 16)",
     FIXED(store.vault_slots), 2, 64},
    {"device_timeout", "SECONDS", set_seconds, "a device does not answer when a request takes longer (default: 30)",
     FIXED(store.answer_ms), 1, 3600},
    {"capacity_timeout", "SECONDS", set_seconds, "the same for devices of the class capacity (default: 10)",
     FIXED(store.capacity_answer_ms), 1, 3600},
    {"tune", NULL, set_true, "let it change settings of the system that make it faster, and say which", FIXED(tune)},
    {"allow_other", NULL, set_true, "other users have access (default for root)", FIXED(allow_other)},
    {"remount", NULL, set_true, "change ro, rw, noatime and the like of a mount that is there",
     offsetof(struct ht_options, remount), 0},
    {"default_permissions", NULL, set_default, "the kernel checks permissions (always so)", 0, 0},
    {"defaults", NULL, set_default, "nothing special", 0, 0},
};
static_assert(HT_ARRAY_SIZE(rows) <= 32, "one bit of given for each");

/* ---------------------------------------------------------- flags of mount(2) */

/* Kinds of access times exclude each other, nodiratime apart. */
#define ATIMES ((unsigned long)(MS_NOATIME | MS_RELATIME | MS_STRICTATIME))

static const struct flag {
    const char *word;
    unsigned long set, clear;
    bool at_start; /* libfuse, and its helper for users other than root, take it */
} flags[] = {
    {"ro", MS_RDONLY, 0, true},
    {"rw", 0, MS_RDONLY, true},
    {"nosuid", MS_NOSUID, 0, true},
    {"suid", 0, MS_NOSUID, true},
    {"nodev", MS_NODEV, 0, true},
    {"dev", 0, MS_NODEV, true},
    {"noexec", MS_NOEXEC, 0, true},
    {"exec", 0, MS_NOEXEC, true},
    {"sync", MS_SYNCHRONOUS, 0, true},
    {"async", 0, MS_SYNCHRONOUS, true},
    {"dirsync", MS_DIRSYNC, 0, true},
    {"noatime", MS_NOATIME, ATIMES, true},
    {"atime", MS_RELATIME, ATIMES, false},
    {"relatime", MS_RELATIME, ATIMES, false},
    {"norelatime", MS_STRICTATIME, ATIMES, false},
    {"strictatime", MS_STRICTATIME, ATIMES, false},
    {"nostrictatime", MS_RELATIME, ATIMES, false},
    {"nodiratime", MS_NODIRATIME, 0, true},
    {"diratime", 0, MS_NODIRATIME, false},
    {"nosymfollow", MS_NOSYMFOLLOW, 0, false},
    {"symfollow", 0, MS_NOSYMFOLLOW, false},
};

static const struct flag *find_flag(const char *word, size_t len)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(flags); i++)
        if (strlen(flags[i].word) == len && memcmp(flags[i].word, word, len) == 0)
            return &flags[i];
    return NULL;
}

static void add_flag(struct ht_mount_flags *f, const struct flag *flag)
{
    f->set = (f->set & ~flag->clear) | flag->set;
    f->clear = (f->clear | flag->clear) & ~flag->set;
}

unsigned long ht_mount_flags_of(const char *options)
{
    struct ht_mount_flags f = {0, 0};

    while (*options) {
        size_t len = strcspn(options, ",");
        const struct flag *flag = find_flag(options, len);
        if (flag)
            add_flag(&f, flag);
        options += len;
        options += *options == ',';
    }
    return f.set;
}

unsigned long ht_mount_flags_later(const struct ht_mount_flags *f)
{
    return f->set & (MS_STRICTATIME | MS_NOSYMFOLLOW);
}

/* ----------------------------------------------------------------- one word */

/* Options that the kernel reports of a mount, and mount(8) hands back for a remount. */
static const char *const reported_by_kernel[] = {"user_id=", "group_id=", "rootmode=", "seclabel"};

/* Of a security module. The kernel gets these. */
static const char *const context_words[] = {"context=", "fscontext=", "defcontext=", "rootcontext="};

/* Flags, then those. */
static const char *kernel_word(size_t i)
{
    if (i < HT_ARRAY_SIZE(flags))
        return flags[i].word;
    i -= HT_ARRAY_SIZE(flags);
    return i < HT_ARRAY_SIZE(context_words) ? context_words[i] : NULL;
}

static int unknown(const char *option)
{
    struct ht_buf b = HT_BUF_INIT;

    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        ht_buf_printf(&b, " %s%s%s", rows[i].word, rows[i].value ? "=" : "", rows[i].value ? rows[i].value : "");
    for (size_t i = 0; kernel_word(i); i++)
        ht_buf_printf(&b, " %s", kernel_word(i));
    ht_error("unknown option '%s'; allowed are:%s", option, b.err ? "" : (const char *)b.data);
    ht_buf_free(&b);
    return -EINVAL;
}

static int set_row(struct ht_options *o, const struct row *row, const char *value)
{
    if (!row->value != !value) {
        ht_error("option '%s' %s", row->word, value ? "takes no value" : "needs a value");
        return -EINVAL;
    }
    o->given |= 1u << (row - rows);
    return row->set(o, row, value);
}

/* Adds to a list that ends with a NUL. Backslashes keep what a list gives a meaning, as libfuse wants it. */
static int append_option(struct ht_buf *b, const char *option)
{
    if (b->len)
        b->data[b->len - 1] = ',';
    for (const char *p = option; *p; p++) {
        if (*p == ',' || *p == '\\' || *p == '"')
            ht_buf_put_u8(b, '\\');
        ht_buf_put_u8(b, (uint8_t)*p);
    }
    ht_buf_put_u8(b, 0);
    return b->err;
}

static bool begins_with(const char *option, const char *const *words, size_t count)
{
    size_t i = 0;

    while (i < count && strncmp(option, words[i], strlen(words[i])) != 0)
        i++;
    return i < count;
}

static int set_option(struct ht_options *o, char *option)
{
    char *equals = strchr(option, '=');
    size_t len = equals ? (size_t)(equals - option) : strlen(option);
    const struct flag *flag = find_flag(option, strlen(option));

    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        if (strlen(rows[i].word) == len && memcmp(rows[i].word, option, len) == 0) {
            int rc = set_row(o, &rows[i], equals ? equals + 1 : NULL);
            return rc == 0 && rows[i].bytes ? append_option(&o->fixed, option) : rc;
        }
    if (flag) {
        add_flag(&o->flags, flag);
        o->store.read_only = strcmp(option, "ro") == 0 || (o->store.read_only && strcmp(option, "rw") != 0);
        return flag->at_start ? append_option(&o->passed, option) : 0;
    }
    if (begins_with(option, context_words, HT_ARRAY_SIZE(context_words))) {
        o->labelled = true;
        return append_option(&o->passed, option);
    }
    if (begins_with(option, reported_by_kernel, HT_ARRAY_SIZE(reported_by_kernel))) {
        o->reported = true;
        return 0;
    }
    return unknown(option);
}

/*
 * Takes one option off the list into word, without the quotes and backslashes that kept its commas. Returns the rest.
 */
static const char *next_option(const char *text, char *word)
{
    bool quoted = false;

    for (; *text && (quoted || *text != ','); text++) {
        if (*text == '"')
            quoted = !quoted;
        else if (*text == '\\' && text[1])
            *word++ = *++text;
        else
            *word++ = *text;
    }
    *word = 0;
    return *text ? text + 1 : text;
}

static int set_list(struct ht_options *o, const char *text)
{
    char *word = malloc(strlen(text) + 1);
    int rc = word ? 0 : -ENOMEM;

    while (rc == 0 && *text) {
        text = next_option(text, word);
        if (word[0])
            rc = set_option(o, word);
    }
    free(word);
    return rc;
}

/* ---------------------------------------------------------------- arguments */

static const struct option longs[] = {
    {"help", no_argument, NULL, 'h'},
    {"version", no_argument, NULL, 'V'},
    {"foreground", no_argument, NULL, 'f'},
    {NULL, 0, NULL, 0},
};

static int set_flag(struct ht_options *o, int flag)
{
    o->foreground |= flag == 'f' || flag == 'd';
    o->single_thread |= flag == 's';
    o->debug |= flag == 'd';
    o->help |= flag == 'h';
    o->version |= flag == 'V';
    if (flag == 'o')
        return set_list(o, optarg);
    return flag == '?' ? -EINVAL : 0; /* getopt has printed the reason */
}

/* The options that replace the arguments. The mount gives the first device. */
static int append_arguments(struct ht_options *o, unsigned device_count)
{
    char option[PATH_MAX + 16];
    int rc = o->store.read_only ? append_option(&o->fixed, "ro") : 0;

    for (unsigned i = 1; i < device_count && rc == 0; i++) {
        snprintf(option, sizeof(option), "device=%s", o->device[i]);
        rc = append_option(&o->fixed, option);
    }
    return rc;
}

/* Devices come before those that options named. */
static int take_arguments(struct ht_options *o, int argc, char **argv)
{
    unsigned count = (unsigned)(argc - optind);
    unsigned named = o->device_count;

    if (count < 2) {
        ht_error("a device and a mount point are needed: hitrain DEV... MOUNTPOINT; see hitrain --help");
        return -EINVAL;
    }
    count--;
    if (named + count > HT_DEVICES_MAX) {
        ht_error("a store has at most %u devices", HT_DEVICES_MAX);
        return -EINVAL;
    }
    memmove(&o->device[count], &o->device[0], named * sizeof(o->device[0]));
    for (unsigned i = 0; i < count; i++)
        o->device[i] = argv[optind + (int)i];
    o->device_count += count;
    o->mountpoint = argv[argc - 1];
    if (o->reported && !o->remount) {
        ht_error("options that the kernel shows for a mount (user_id and the like) are for a remount only");
        return -EINVAL;
    }
    if (o->no_replay && !o->store.read_only) {
        ht_error("noreplay is for a mount with ro: a step after the one that it shows would lose the logged ones");
        return -EINVAL;
    }
    return append_arguments(o, count);
}

static struct ht_options defaults(bool allow_other)
{
    return (struct ht_options){
        .allow_other = allow_other,
        .store.commit_ms = COMMIT_S_DEFAULT * 1000,
        .store.numa_node = HT_NUMA_AUTO,
        .store.shm_bytes = HT_PASSTHROUGH_AUTO,
        .store.dedup = true,
        .store.compact = true,
        .store.discard = HT_DISCARD_AUTO,
    };
}

int ht_options_parse(int argc, char **argv, bool allow_other, struct ht_options *out)
{
    struct ht_options *o = out;
    int flag, rc = 0;

    *o = defaults(allow_other);
    optind = 0; /* unlike 1, this forgets where in an argument the last call stopped */
    while (rc == 0 && (flag = getopt_long(argc, argv, "fsdhVo:", longs, NULL)) != -1)
        rc = set_flag(o, flag);
    if (rc || o->help || o->version)
        return rc;
    return take_arguments(o, argc, argv);
}

int ht_options_parse_fixed(const char *fixed, struct ht_options *out)
{
    *out = defaults(true);
    out->device_count = 1;
    return set_list(out, fixed);
}

const char *ht_options_changed(const struct ht_options *in_force, const struct ht_options *asked)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        if ((asked->given & 1u << i) && rows[i].bytes &&
            memcmp((const char *)in_force + rows[i].offset, (const char *)asked + rows[i].offset, rows[i].bytes) != 0)
            return rows[i].word;
    return NULL;
}

void ht_options_free(struct ht_options *o)
{
    for (unsigned i = o->device_count - o->named_count; i < o->device_count; i++)
        free((char *)(uintptr_t)o->device[i]);
    o->device_count = o->named_count = 0;
    free((char *)(uintptr_t)o->store.vault_url);
    o->store.vault_url = NULL;
    ht_buf_free(&o->passed);
    ht_buf_free(&o->fixed);
}

void ht_options_usage(void)
{
    printf("Usage: hitrain DEV... MOUNTPOINT [-f] [-s] [-d] [-o OPTION[,OPTION]...]\n\n"
           "Mounts the store on the devices (block devices or regular files, formatted by mkfs.hitrain).\n"
           "Returns when the mount is ready.\n\n"
           "  -f, --foreground  stay in the foreground, print messages on stderr\n"
           "  -s                use one thread for requests\n"
           "  -d                stay in the foreground and log every request\n"
           "  -h, --help        print this text\n"
           "  -V, --version     print the version\n\n"
           "Options:\n");
    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++) {
        int n = printf("  %s%s%s", rows[i].word, rows[i].value ? "=" : "", rows[i].value ? rows[i].value : "");
        printf("%*s%s\n", n < 24 ? 24 - n : 1, "", rows[i].help);
    }
    printf("and, for the kernel:");
    for (size_t i = 0; kernel_word(i); i++)
        printf(" %s", kernel_word(i));
    printf("\n");
}
