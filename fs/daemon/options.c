/* SPDX-License-Identifier: Apache-2.0 */
/* options.c - see options.h. A new mount option is one row of the table below. */
#include "fs/daemon/options.h"

#include <getopt.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "fs/fuse/session.h"
#include "tiering/base/log.h"

#define DRAM_BYTES_MIN (8 * HT_MIB)
#define STAGING_BYTES_MIN (24 * HT_MIB)
#define PASSTHROUGH_BYTES_MIN (2 * HT_MIB)
#define RATE_BYTES_MIN (64 * HT_KIB)
#define DEDUP_INDEX_BYTES_MIN (64 * HT_KIB)
enum {
    COMMIT_S_DEFAULT = 5,
    COMMIT_S_MAX = 3600,
    COMPRESS_AFTER_S_MAX = 30 * 24 * 3600,
    TIMEOUT_S_MAX = 3600,
    THREADS_MAX = 64,
    NUMA_NODES_MAX = 1024,
    PERCENT_MAX = 6400
};

/* ------------------------------------------------------------------ values */

static int refuse(const char *word, const char *value, const char *allowed)
{
    ht_error("option %s=%s: %s", word, value, allowed);
    return -EINVAL;
}

static int parse_size(const char *word, const char *value, uint64_t least, uint64_t *out)
{
    char text[32], allowed[96];
    uint64_t bytes;

    if (ht_parse_size(value, &bytes) == 0 && bytes >= least) {
        *out = bytes;
        return 0;
    }
    snprintf(allowed, sizeof(allowed), "a size of at least %s is allowed, as in 512M or 8G",
             ht_format_size(least, text, sizeof(text)));
    return refuse(word, value, allowed);
}

static int parse_number(const char *word, const char *value, unsigned least, unsigned most, unsigned *out)
{
    char allowed[64], *end;
    unsigned long v;

    errno = 0;
    v = strtoul(value, &end, 10);
    if (value[0] >= '0' && value[0] <= '9' && !*end && !errno && v >= least && v <= most) {
        *out = (unsigned)v;
        return 0;
    }
    snprintf(allowed, sizeof(allowed), "a number from %u to %u is allowed", least, most);
    return refuse(word, value, allowed);
}

static int set_dram(struct ht_options *o, const char *value)
{
    return parse_size("dram", value, DRAM_BYTES_MIN, &o->dram_bytes);
}

static int set_staging(struct ht_options *o, const char *value)
{
    return parse_size("staging", value, STAGING_BYTES_MIN, &o->staging_bytes);
}

static int set_passthrough(struct ht_options *o, const char *value)
{
    o->passthrough_bytes = 0;
    return strcmp(value, "off") == 0 ? 0
                                     : parse_size("passthrough", value, PASSTHROUGH_BYTES_MIN, &o->passthrough_bytes);
}

static int set_scrub_rate(struct ht_options *o, const char *value)
{
    return parse_size("scrub_rate", value, RATE_BYTES_MIN, &o->scrub_rate_bytes);
}

static int set_background_rate(struct ht_options *o, const char *value)
{
    return parse_size("background_rate", value, RATE_BYTES_MIN, &o->background_rate_bytes);
}

static int set_background_cpu(struct ht_options *o, const char *value)
{
    return parse_number("background_cpu", value, 1, PERCENT_MAX, &o->background_cpu_percent);
}

static int set_switch(const char *word, const char *value, bool *out)
{
    *out = strcmp(value, "on") == 0;
    return *out || strcmp(value, "off") == 0 ? 0 : refuse(word, value, "on or off is allowed");
}

static int set_dedup(struct ht_options *o, const char *value)
{
    return set_switch("dedup", value, &o->dedup);
}

static int set_digest(struct ht_options *o, const char *value)
{
    return set_switch("digest", value, &o->digest);
}

static int set_discard(struct ht_options *o, const char *value)
{
    return set_switch("discard", value, &o->discard);
}

static int set_compact(struct ht_options *o, const char *value)
{
    return set_switch("compact", value, &o->compact);
}

static int set_dedup_index(struct ht_options *o, const char *value)
{
    return parse_size("dedup_index", value, DEDUP_INDEX_BYTES_MIN, &o->dedup_index_bytes);
}

static int set_compress(struct ht_options *o, const char *value)
{
    o->compress = strcmp(value, "auto") == 0;
    return o->compress || strcmp(value, "off") == 0 ? 0 : refuse("compress", value, "off or auto is allowed");
}

static int set_compress_inline(struct ht_options *o, const char *value)
{
    static const char *const words[] = {[HT_INLINE_AUTO] = "auto", [HT_INLINE_OFF] = "off", [HT_INLINE_ALWAYS] = "on"};

    for (unsigned i = 0; i < HT_ARRAY_SIZE(words); i++) {
        if (strcmp(value, words[i]) == 0) {
            o->compress_inline = (enum ht_inline)i;
            return 0;
        }
    }
    return refuse("compress_inline", value, "auto, on or off is allowed");
}

static int set_compress_after(struct ht_options *o, const char *value)
{
    return parse_number("compress_after", value, 1, COMPRESS_AFTER_S_MAX, &o->compress_after_s);
}

static int set_commit(struct ht_options *o, const char *value)
{
    unsigned s;
    int rc = parse_number("commit", value, 0, COMMIT_S_MAX, &s);

    if (rc == 0)
        o->commit_ms = s * 1000;
    return rc;
}

static int set_optim_threads(struct ht_options *o, const char *value)
{
    return parse_number("optim_threads", value, 1, THREADS_MAX, &o->optim_threads);
}

static int set_max_threads(struct ht_options *o, const char *value)
{
    return parse_number("max_threads", value, 1, THREADS_MAX, &o->fuse_threads);
}

static int set_numa(struct ht_options *o, const char *value)
{
    unsigned node;

    if (strcmp(value, "auto") == 0) {
        o->numa_node = HT_NUMA_AUTO;
    } else if (strcmp(value, "off") == 0) {
        o->numa_node = HT_NUMA_OFF;
    } else {
        if (value[0] < '0' || value[0] > '9')
            return refuse("numa", value, "auto, off or the number of a node is allowed");
        if (parse_number("numa", value, 0, NUMA_NODES_MAX, &node))
            return -EINVAL;
        o->numa_node = (int)node;
    }
    return 0;
}

static int set_device(struct ht_options *o, const char *value)
{
    char *copy;

    if (!value[0])
        return refuse("device", value, "the path of a member is needed");
    if (o->device_count == HT_DEVICES_MAX) {
        ht_error("a store has at most %u devices", HT_DEVICES_MAX);
        return -EINVAL;
    }
    copy = strdup(value);
    if (!copy)
        return -ENOMEM;
    o->device[o->device_count++] = copy;
    o->named_count++;
    return 0;
}

static int set_degraded(struct ht_options *o, const char *value)
{
    o->degraded = true;
    return 0;
}

static int set_no_replay(struct ht_options *o, const char *value)
{
    o->no_replay = true;
    return 0;
}

static int set_device_timeout(struct ht_options *o, const char *value)
{
    return parse_number("device_timeout", value, 1, TIMEOUT_S_MAX, &o->answer_s);
}

static int set_tune(struct ht_options *o, const char *value)
{
    o->tune = true;
    return 0;
}

static int set_allow_other(struct ht_options *o, const char *value)
{
    o->allow_other = true;
    return 0;
}

static int set_default(struct ht_options *o, const char *value)
{
    return 0;
}

static int set_remount(struct ht_options *o, const char *value)
{
    o->remount = true;
    return 0;
}

#define FIXED(field) offsetof(struct ht_options, field), sizeof(((struct ht_options *)0)->field)

static const struct row {
    const char *word;
    const char *value; /* its name in the help text; NULL: takes none */
    int (*set)(struct ht_options *o, const char *value);
    const char *help;
    size_t offset, bytes; /* a remount cannot change these; bytes 0: none */
} rows[] = {
    {"dram", "SIZE", set_dram, "DRAM tier (default: a quarter of the available memory)", FIXED(dram_bytes)},
    {"staging", "SIZE", set_staging, "staging pool (default: 64M)", FIXED(staging_bytes)},
    {"passthrough", "off|SIZE", set_passthrough,
     "part of dram for parameters and pinned files whose very pages clients read and map (default: off)",
     FIXED(passthrough_bytes)},
    {"commit", "SECONDS", set_commit, "how long unsynced data outside model roots may stay volatile (default: 5)",
     FIXED(commit_ms)},
    {"scrub_rate", "SIZE", set_scrub_rate, "what a scrub reads in a second at most (default: 64M)",
     FIXED(scrub_rate_bytes)},
    {"discard", "on|off", set_discard, "devices discard space soon after it became free (default: off)",
     FIXED(discard)},
    {"background_rate", "SIZE", set_background_rate,
     "what all work in the background moves in a second at most (default: no limit)", FIXED(background_rate_bytes)},
    {"background_cpu", "PERCENT", set_background_cpu, "its processor time, in percent of one CPU (default: no limit)",
     FIXED(background_cpu_percent)},
    {"dedup", "on|off", set_dedup, "store content once that is there twice (default: off)", FIXED(dedup)},
    {"dedup_index", "SIZE", set_dedup_index, "memory for its checksums at most (default: 1/64 of dram)",
     FIXED(dedup_index_bytes)},
    {"digest", "on|off", set_digest, "compute the digest of each kept step in the background (default: off)",
     FIXED(digest)},
    {"compact", "on|off", set_compact,
     "empty nearly empty groups of blocks, for long runs of free space (default: off)", FIXED(compact)},
    {"compress", "off|auto", set_compress,
     "whether files without the attribute compress are compressed when they have not changed for a while (default: off)",
     FIXED(compress)},
    {"compress_inline", "auto|on|off", set_compress_inline,
     "compress new content of such files when it is written: where that is faster, always, or never (default: auto)",
     FIXED(compress_inline)},
    {"compress_after", "SECONDS", set_compress_after,
     "how long content has to stay the same before it is compressed (default: 60)", FIXED(compress_after_s)},
    {"optim_threads", "N", set_optim_threads, "threads of the optimizer (default: one for each CPU, at least 2)",
     FIXED(optim_threads)},
    {"max_threads", "N", set_max_threads, "threads that take requests (default: two for each CPU, 4 to 16)",
     FIXED(fuse_threads)},
    {"numa", "auto|off|NODE", set_numa, "where memory is and threads run (default: auto, the nodes of the devices)",
     FIXED(numa_node)},
    {"device", "PATH", set_device, "a further member of the store", FIXED(device_count)},
    {"degraded", NULL, set_degraded, "go on without members that are missing: what lies on them is EIO",
     FIXED(degraded)},
    {"noreplay", NULL, set_no_replay, "with ro: show models with logged steps as of their last full step",
     FIXED(no_replay)},
    {"device_timeout", "SECONDS", set_device_timeout,
     "a device does not answer when a request takes longer (default: 30)", FIXED(answer_s)},
    {"tune", NULL, set_tune, "let it change settings of the system that make it faster, and say which", FIXED(tune)},
    {"allow_other", NULL, set_allow_other, "other users have access (default for root)", FIXED(allow_other)},
    {"remount", NULL, set_remount, "change ro, rw, noatime and the like of a mount that is there", 0, 0},
    {"default_permissions", NULL, set_default, "the kernel checks permissions (always so)", 0, 0},
    {"defaults", NULL, set_default, "nothing special", 0, 0},
};
static_assert(HT_ARRAY_SIZE(rows) <= 32, "one bit of given for each");

/* Options that the kernel reports of a mount, and mount(8) hands back for a remount. */
static const char *const reported_by_kernel[] = {"user_id=", "group_id=", "rootmode=", "seclabel"};

/* ----------------------------------------------------------------- one word */

/* Flags, then the words that only libfuse knows. */
static const char *kernel_word(unsigned i)
{
    unsigned flags = 0;

    while (ht_mount_flag_word(flags))
        flags++;
    if (i < flags)
        return ht_mount_flag_word(i);
    for (unsigned k = 0; ht_fuse_option(k); k++) {
        struct ht_mount_flags ignored = {0, 0};
        if (!ht_mount_flags_add(&ignored, ht_fuse_option(k)) && i-- == flags)
            return ht_fuse_option(k);
    }
    return NULL;
}

static int unknown(const char *option)
{
    struct ht_buf b = HT_BUF_INIT;

    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        ht_buf_printf(&b, " %s%s%s", rows[i].word, rows[i].value ? "=" : "", rows[i].value ? rows[i].value : "");
    for (unsigned i = 0; kernel_word(i); i++)
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
    return row->set(o, value);
}

/* Adds to a list that ends with a NUL. Backslashes keep what a list gives a meaning, as libfuse wants it. */
static int append(struct ht_buf *b, const char *option)
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

static int set_flag_word(struct ht_options *o, const char *word)
{
    o->read_only = strcmp(word, "ro") == 0 || (o->read_only && strcmp(word, "rw") != 0);
    return ht_mount_flag_at_start(word) ? append(&o->passed, word) : 0;
}

static bool is_reported_by_kernel(const char *option)
{
    for (size_t i = 0; i < HT_ARRAY_SIZE(reported_by_kernel); i++)
        if (strncmp(option, reported_by_kernel[i], strlen(reported_by_kernel[i])) == 0)
            return true;
    return false;
}

static int set_option(struct ht_options *o, char *option)
{
    char *equals = strchr(option, '=');
    size_t len = equals ? (size_t)(equals - option) : strlen(option);

    for (size_t i = 0; i < HT_ARRAY_SIZE(rows); i++)
        if (strlen(rows[i].word) == len && memcmp(rows[i].word, option, len) == 0) {
            int rc = set_row(o, &rows[i], equals ? equals + 1 : NULL);
            return rc == 0 && rows[i].bytes ? append(&o->fixed, option) : rc;
        }
    if (ht_mount_flags_add(&o->flags, option))
        return set_flag_word(o, option);
    if (ht_fuse_knows_option(option)) {
        o->labelled = true;
        return append(&o->passed, option);
    }
    if (is_reported_by_kernel(option)) {
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
    switch (flag) {
    case 'f':
        o->foreground = true;
        return 0;
    case 's':
        o->single_thread = true;
        return 0;
    case 'd':
        o->debug = o->foreground = true;
        return 0;
    case 'h':
        o->help = true;
        return 0;
    case 'V':
        o->version = true;
        return 0;
    case 'o':
        return set_list(o, optarg);
    default:
        return -EINVAL; /* getopt has printed the reason */
    }
}

/* The options that replace the arguments. The mount gives the first device. */
static int append_arguments(struct ht_options *o, unsigned device_count)
{
    char option[PATH_MAX + 16];
    int rc = o->read_only ? append(&o->fixed, "ro") : 0;

    for (unsigned i = 1; i < device_count && rc == 0; i++) {
        snprintf(option, sizeof(option), "device=%s", o->device[i]);
        rc = append(&o->fixed, option);
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
    if (o->no_replay && !o->read_only) {
        ht_error("noreplay is for a mount with ro: a step after the one that it shows would lose the logged ones");
        return -EINVAL;
    }
    return append_arguments(o, count);
}

static struct ht_options defaults(bool allow_other)
{
    return (struct ht_options){
        .allow_other = allow_other,
        .commit_ms = COMMIT_S_DEFAULT * 1000,
        .numa_node = HT_NUMA_AUTO,
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
    for (unsigned i = 0; kernel_word(i); i++)
        printf(" %s", kernel_word(i));
    printf("\n");
}
