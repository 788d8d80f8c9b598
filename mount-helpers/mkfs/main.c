/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mkfs.hitrain - format one or more devices as one store.
 *
 * It checks and holds all devices before it changes the first one.
 */
#include <getopt.h>

#include "optim/rules/need.h"
#include "tiering/space/claim.h"
#include "mount-helpers/mkfs/mkfs.h"
#include <hitrain/words.h>

#define LOG_SHARE 4 /* the log takes at most one part of so many */

static const char hint[] = "mkfs.hitrain --help";
static const char usage_text[] =
    "Usage: mkfs.hitrain [OPTIONS] DEVICE...\n"
    "       mkfs.hitrain [OPTIONS] --add=DEVICE [--capacity] MEMBER...\n"
    "\n"
    "Formats block devices, NVMe namespaces (/dev/ngXnY) or regular files as one hitrain store, or adds one to a\n"
    "store that is not mounted and whose members are all named.\n"
    "\n"
    "  --size=SIZE      make a regular file of this size (8G, 500M) and format that\n"
    "  --capacity=DEVICE  a slower device, for content that has no room elsewhere (repeatable)\n"
    "  --capacity       the added device is such a one\n"
    "  --label=LABEL    name of the store, at most 32 bytes\n"
    "  --chunk=SIZE     unit of placement of tensors (1M; a power of two from 64K to 1M)\n"
    "  --log-size=SIZE  size of each of the two copies of the metadata log\n"
    "                   (1/32 of the smallest device)\n"
    "  -K, --no-discard keep the device from forgetting what it holds (it is faster when it may)\n"
    "  --force          overwrite what a device holds; never one that is mounted or in use\n"
    "  --no-wait        fail at once when a device is in use, instead of after 30 s\n"
    "  --help, --version\n";

/* ------------------------------------------------------------- command line */

/* A size within bounds, in whole units. */
static int parse_size(const char *word, const char *text, uint64_t least, uint64_t most, uint64_t *out)
{
    uint64_t bytes;
    int rc = ht_parse_size(text, &bytes);

    if (rc == 0 && bytes >= least && bytes <= most) {
        *out = bytes / HT_BLOCK_BYTES * HT_BLOCK_BYTES;
        return 0;
    }
    if (rc == -EINVAL)
        ht_error("--%s=%s: not a size; sizes are written like 4096, 64K, 1M or 8G", word, text);
    else
        ht_error("--%s=%s: must be from %s to %s", word, text, ht_size_text(least), ht_size_text(most));
    return -EINVAL;
}

static int parse_chunk(const char *text, uint32_t *out)
{
    uint64_t bytes;
    int rc = parse_size("chunk", text, HT_SMALL_CHUNK_BYTES, HT_CHUNK_BYTES, &bytes);

    if (rc == 0 && (bytes & (bytes - 1)) != 0)
        return ht_fail(-EINVAL, "--chunk=%s: must be a power of two", text);
    if (rc == 0)
        *out = (uint32_t)bytes;
    return rc;
}

static int parse_label(const char *text, const char **out)
{
    size_t len = strlen(text);

    if (len > HT_LABEL_BYTES)
        return ht_fail(-EINVAL, "--label: %zu bytes are too many, %u are possible", len, HT_LABEL_BYTES);
    for (size_t i = 0; i < len; i++) {
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            return ht_fail(-EINVAL, "--label: control characters are not possible");
    }
    *out = text;
    return 0;
}

static int note_capacity(struct ht_mkfs_options *o)
{
    if (!optarg)
        o->add_capacity = true;
    else if (o->capacity_count++ < HT_DEVICES_MAX)
        o->capacity[o->capacity_count - 1] = optarg;
    return 0;
}

static int parse_word(int c, struct ht_mkfs_options *o)
{
    switch (c) {
    case 's':
        return parse_size("size", optarg, HT_MKFS_BYTES_MIN, 1ull << 60, &o->size_bytes);
    case 'c':
        return note_capacity(o);
    case 'a':
        if (o->add)
            return ht_fail(-EINVAL, "--add: one device at a time");
        o->add = optarg;
        return 0;
    case 'l':
        return parse_label(optarg, &o->label);
    case 'k':
        return parse_chunk(optarg, &o->chunk_bytes);
    case 'g':
        return parse_size("log-size", optarg, HT_LOG_BYTES_MIN, HT_LOG_BYTES_MAX, &o->log_bytes);
    case 'K':
        o->no_discard = true;
        return 0;
    case 0: /* a flag */
        return 0;
    default:
        return -EINVAL;
    }
}

static int check_words(const struct ht_mkfs_options *o, unsigned named)
{
    if (!o->add && o->add_capacity)
        ht_error("--capacity: which device? It is written --capacity=DEVICE");
    else if (o->add && (o->capacity_count > 0 || o->label || o->log_bytes != 0 || o->chunk_bytes != 0))
        ht_error("--add: the store has its label, chunks, log and members already; the class of the added device is "
                 "--capacity, without a name");
    else if (named == 0 && o->capacity_count > 0)
        ht_error("%s is of the class capacity, and no device is fast: the log needs one that is named without "
                 "--capacity",
                 o->capacity[0]);
    else if (named == 0 || named + o->capacity_count > HT_DEVICES_MAX)
        ht_error("expected 1 to %u devices", HT_DEVICES_MAX);
    else
        return 0;
    return -EINVAL;
}

/* -1: go on; else the exit status. */
static int parse_options(int argc, char **argv, struct ht_mkfs_options *o)
{
    const struct option words[] = {
        {"size", required_argument, NULL, 's'},
        {"capacity", optional_argument, NULL, 'c'},
        {"add", required_argument, NULL, 'a'},
        {"label", required_argument, NULL, 'l'},
        {"chunk", required_argument, NULL, 'k'},
        {"log-size", required_argument, NULL, 'g'},
        {"force", no_argument, &o->force, 1},
        {"no-wait", no_argument, &o->no_wait, 1},
        {"no-discard", no_argument, &o->no_discard, 1},
        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},
        {NULL, 0, NULL, 0},
    };
    int c;

    while ((c = getopt_long(argc, argv, "K", words, NULL)) != -1)
        if (parse_word(c, o) < 0)
            return ht_option_status(c, "mkfs.hitrain", hint, usage_text, EXIT_FAILURE);
    return check_words(o, (unsigned)(argc - optind)) < 0 ? ht_usage_hint(hint, EXIT_FAILURE) : -1;
}

/* --------------------------------------------------------------------- format */

static void explain_too_small(const struct ht_mkfs_target *targets, unsigned count, const struct ht_mkfs_options *o)
{
    for (unsigned i = 0; i < count; i++) {
        bool log = o->log_bytes != 0 && i < count - o->capacity_count;
        uint64_t least = ht_max_u64(HT_MKFS_BYTES_MIN, log ? o->log_bytes * LOG_SHARE : 0);
        if (ht_dev_size(targets[i].dev) < least)
            ht_error("%s is too small: it has %s, and a store %sneeds at least %s", targets[i].path,
                     ht_size_text(ht_dev_size(targets[i].dev)), log ? "with a log of this size " : "",
                     ht_size_text(least));
    }
}

static int format(struct ht_mkfs_target *targets, unsigned count, const struct ht_mkfs_options *o,
                  struct ht_super *out_sb)
{
    struct ht_format_opts f = {.label = o->label, .chunk_bytes = o->chunk_bytes, .log_bytes = o->log_bytes};
    unsigned fast = count - o->capacity_count;
    struct ht_dev *devs[HT_DEVICES_MAX];

    for (unsigned i = 0; i < count; i++)
        devs[i] = targets[i].dev;
    for (unsigned i = fast; i < count; i++)
        f.capacity |= 1u << i;
    int rc = ht_claim_ask(devs, count);
    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < count; i++)
        ht_mkfs_discard(&targets[i], o);
    rc = ht_super_format(devs, count, &f, out_sb);
    if (rc == -ENOSPC)
        explain_too_small(targets, count, o);
    else if (rc < 0)
        ht_error("%s: formatting failed: %s", targets[0].path, strerror(-rc));
    for (unsigned i = 0; rc == 0 && i < count; i++)
        rc = ht_mkfs_wipe_old(&targets[i]);
    for (unsigned i = 0; rc == 0 && i < count; i++)
        rc = ht_mkfs_verify(targets[i].dev, out_sb);
    return rc;
}

/* Rounded down: hitrainctl size, which has the way back, then asks for no larger store. */
static double millions(uint64_t elements)
{
    return (double)(elements / 10000) / 100;
}

static void report_elements(const char *where, uint64_t bytes)
{
    static const char adamw[] = "adamw";
    struct ht_optim_config config;
    char err[HT_OPTIM_ERROR_MAX];

    if (ht_optim_config_parse(adamw, strlen(adamw), &config, err) == 0)
        printf("  model     with adamw up to %.2f million parameters in f32, or %.2f million in bf16%s\n",
               millions(ht_need_elements(bytes, HT_DTYPE_F32, &config)),
               millions(ht_need_elements(bytes, HT_DTYPE_BF16, &config)), where);
}

/* What it is enough for. */
static void report_model(const struct ht_super *sb)
{
    uint64_t bytes[HT_DEVICE_CAPACITY + 1] = {0};

    for (unsigned i = 0; i < sb->device_count; i++)
        bytes[sb->device_class[i]] += sb->device_bytes[i];
    report_elements("", bytes[HT_DEVICE_FAST] + bytes[HT_DEVICE_CAPACITY]);
    if (bytes[HT_DEVICE_CAPACITY] > 0)
        report_elements(", on the fast devices", bytes[HT_DEVICE_FAST]);
}

static void report_store(const struct ht_mkfs_target *targets, unsigned count, const struct ht_super *sb)
{
    char uuid[HT_UUID_TEXT_MAX];

    for (unsigned i = 0; i < count; i++)
        if (targets[i].held_something)
            printf("%s contained %s: overwritten\n", targets[i].path, targets[i].found);
    printf("hitrain store %s%s%s\n", ht_uuid_text(sb->uuid, uuid), sb->label[0] != '\0' ? ", label " : "", sb->label);
    for (unsigned i = 0; i < count; i++)
        printf("  device %-2u %s, %s%s%s\n", i, targets[i].path, ht_size_text(sb->device_bytes[i]),
               sb->device_class[i] == HT_DEVICE_CAPACITY ? ", capacity" : "",
               !targets[i].created     ? ""
                   : targets[i].sparse ? ", new file, sparse"
                                       : ", new file");
    printf("  log       2 x %s", ht_size_text(sb->log_bytes));
    for (unsigned i = 0; i < HT_LOG_COPIES; i++)
        printf("%s device %u at %s", i == 0 ? ":" : ",", sb->log_device[i], ht_size_text(sb->log_offset[i]));
    printf("\n  chunk     %s\n", ht_size_text(sb->chunk_bytes));
    report_model(sb);
}

int main(int argc, char **argv)
{
    struct ht_mkfs_options o = {.chunk_bytes = 0};
    struct ht_mkfs_target targets[HT_DEVICES_MAX] = {{NULL}};
    struct ht_super sb;
    unsigned count, held = 0;

    ht_stdio_fds_open();
    int status = parse_options(argc, argv, &o);
    if (status >= 0)
        return status;
    if (o.add)
        return ht_mkfs_add((const char *const *)argv + optind, (unsigned)(argc - optind), &o) == 0 ? EXIT_SUCCESS
                                                                                                   : EXIT_FAILURE;
    for (count = 0; optind < argc; count++)
        targets[count].path = argv[optind++];
    for (unsigned i = 0; i < o.capacity_count; i++)
        targets[count++].path = o.capacity[i];
    int rc = ht_mkfs_check_distinct(targets, count);
    while (rc == 0 && held < count)
        rc = ht_mkfs_open(&targets[held++], &o, NULL);
    if (rc == 0)
        rc = format(targets, count, &o, &sb);
    if (rc == 0)
        report_store(targets, count, &sb);
    for (unsigned i = 0; i < held; i++)
        ht_mkfs_close(&targets[i], rc < 0);
    return rc == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
